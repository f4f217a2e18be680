"""Mistral, Ministral and Ministral 3: full attention, a window in every layer, or both in turn."""

from collections.abc import Mapping
from dataclasses import replace

from lamina.base.errors import ConfigError
from lamina.models.attention_memory import FULL, WINDOW, attention_memories, layer_types, nullable
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Decoder, Defaults, describe_decoder, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.network import Network
from lamina.models.plain_network import Plain, plain_network
from lamina.models.weight_parts import mlp

_MISTRAL = Defaults(32000, 4096, 14336, 32, 32, 8, None, 131072)
_MINISTRAL3 = Defaults(131072, 4096, 14336, 34, 32, 8, 128, 262144)
#: of the text model in a config for text and images, by its type; there may be no text_config
_TEXTS = {"mistral": _MISTRAL, "ministral3": _MINISTRAL3, "": Defaults(131072, 5120, 32768, 40, 32, 8, 128, 131072)}
_ROPE_MINISTRAL3: dict[str, object] = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_PLAIN = Plain()


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Mistral config.json: `sliding_window` is 4096 where it is not said, and null means full attention."""
    return _describe(read_decoder(values, _MISTRAL), choices, 4096)


def describe_ministral(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Ministral config.json; `layer_types` may alternate."""
    return _describe(read_decoder(values, _MISTRAL), choices, 4096, may_alternate=True)


def describe_ministral3(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Ministral 3 config.json: full attention unless it says otherwise."""
    return _describe(read_decoder(values, _MINISTRAL3), choices, None)


def describe_3(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a config.json for text and images: `text_config` is Mistral's or Ministral 3's."""
    kind = _text_kind(values)
    return _describe(read_decoder(values, _TEXTS[kind], "text_config"), choices, 4096 if kind == "mistral" else None)


def _text_kind(values: Mapping[str, object]) -> str:
    """mistral or ministral3; empty where nothing is said of the text model."""
    text = values.get("text_config")
    if text is None:
        return ""
    kind = text.get("model_type", "mistral") if isinstance(text, dict) else "mistral"
    if kind not in ("mistral", "ministral3"):
        raise ConfigError("text_config.model_type", kind, "mistral or ministral3")
    return str(kind)


def network(values: Mapping[str, object]) -> Network:
    """What a Mistral computes."""
    return _network(values, read_decoder(values, _MISTRAL), 4096)


def network_ministral(values: Mapping[str, object]) -> Network:
    """What a Ministral computes."""
    return _network(values, read_decoder(values, _MISTRAL), 4096, may_alternate=True)


def network_ministral3(values: Mapping[str, object]) -> Network:
    """What a Ministral 3 computes: queries grow with the logarithm of their position."""
    return _network_ministral3(values, read_decoder(values, _MINISTRAL3))


def network_3(values: Mapping[str, object]) -> Network:
    """What the text model of one for text and images computes. The head is the embedding once more where the file has none."""
    kind = _text_kind(values)
    decoder = read_decoder(values, _TEXTS[kind], "text_config")
    may_be_tied = flag(decoder.fields, "tie_word_embeddings", False) or flag(ConfigFields(values), "tie_word_embeddings", True)
    decoder = replace(decoder, tied=False)
    if kind == "ministral3":
        found = _network_ministral3(values, decoder)
    elif kind == "mistral":
        found = _network(values, decoder, 4096)
    else:
        found = _network(values, decoder, None, plain=Plain(theta=1e9, eps=1e-5))
    return replace(found, head_may_miss=may_be_tied)


def _network_ministral3(values: Mapping[str, object], decoder: Decoder) -> Network:
    fields = decoder.fields
    if fields.get("rope_parameters", "rope_scaling") is None:
        fields = ConfigFields({**fields.values, "rope_parameters": _ROPE_MINISTRAL3}, fields.prefix)
        decoder = replace(decoder, fields=fields)
    scaling, temperature = fields.nested("rope_parameters", "rope_scaling"), None
    if scaling is not None and scaling.get("llama_4_scaling_beta") is not None:
        step = scaling.number("original_max_position_embeddings", default=float(decoder.max_positions), low=1.0)
        temperature = step, scaling.number("llama_4_scaling_beta"), 0.0
    return _network(values, decoder, None, plain=Plain(eps=1e-5, temperature=temperature))


def _network(
    values: Mapping[str, object], decoder: Decoder, default_window: int | None, may_alternate: bool = False,
    plain: Plain = _PLAIN,
) -> Network:  # fmt: skip
    types, window = _types(decoder, default_window, may_alternate)
    return plain_network(values, decoder, replace(plain, nested="text_config") if decoder.is_nested else plain, types, window)


def _types(decoder: Decoder, default_window: int | None, may_alternate: bool) -> tuple[tuple[str, ...], int | None]:
    """The type of each layer, and the window of those that have one."""
    layers, window = decoder.num_layers, nullable(decoder.fields, "sliding_window", default_window)
    types: tuple[str, ...] = (FULL if window is None else WINDOW,) * layers
    return (layer_types(decoder.fields, layers, types, window) if may_alternate else types), window


def _describe(decoder: Decoder, choices: Choices, default_window: int | None, may_alternate: bool = False) -> Description:
    layers, (types, window) = decoder.num_layers, _types(decoder, default_window, may_alternate)
    sizes = [
        ("attention", decoder.attention() * layers),
        ("mlp", mlp(decoder.store, decoder.hidden_size, decoder.mlp_width) * layers),
        ("norms", decoder.norms(per_layer=2)),
    ]
    return describe_decoder(decoder, choices, lambda entry: attention_memories(types, entry, window), sizes)
