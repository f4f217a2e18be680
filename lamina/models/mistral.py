"""Mistral and Ministral: full attention, a window in every layer, or both in turn."""

from collections.abc import Mapping

from lamina.base.errors import ConfigError
from lamina.models.attention_memory import FULL, WINDOW, attention_memories, layer_types, nullable
from lamina.models.decoder import Decoder, Defaults, describe_decoder, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.network import Network
from lamina.models.plain_network import Plain, plain_network
from lamina.models.weight_parts import mlp

_MISTRAL = Defaults(32000, 4096, 14336, 32, 32, 8, None, 131072)
_MINISTRAL3 = Defaults(131072, 4096, 14336, 34, 32, 8, 128, 262144)
_TEXT = Defaults(131072, 5120, 32768, 40, 32, 8, 128, 131072)  # of mistral3 without a text_config


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
    text = values.get("text_config")
    kind = text.get("model_type", "mistral") if isinstance(text, dict) else "mistral"
    if kind not in ("mistral", "ministral3"):
        raise ConfigError("text_config.model_type", kind, "mistral or ministral3")
    if text is None:
        return _describe(read_decoder(values, _TEXT, "text_config"), choices, None)
    defaults, window = (_MISTRAL, 4096) if kind == "mistral" else (_MINISTRAL3, None)
    return _describe(read_decoder(values, defaults, "text_config"), choices, window)


def network(values: Mapping[str, object]) -> Network:
    """What a Mistral computes."""
    return _network(values, read_decoder(values, _MISTRAL), 4096)


def network_ministral(values: Mapping[str, object]) -> Network:
    """What a Ministral computes."""
    return _network(values, read_decoder(values, _MISTRAL), 4096, may_alternate=True)


def _network(
    values: Mapping[str, object], decoder: Decoder, default_window: int | None, may_alternate: bool = False
) -> Network:  # fmt: skip
    types, window = _types(decoder, default_window, may_alternate)
    return plain_network(values, decoder, Plain(), types, window)


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
