"""Gemma 2 and 3: a window in most layers, full attention in every second or sixth; four norms a layer."""

from collections.abc import Mapping
from dataclasses import replace

from lamina.base.errors import ConfigError
from lamina.models.attention_memory import FULL, NAMES, WINDOW, attention_memories, every, layer_types, nullable
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Decoder, Defaults, describe_decoder, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.network import Attention, Branch, Mlp, Network, Norm, Rope
from lamina.models.network_fields import end_tokens, names_of, read_rope
from lamina.models.weight_parts import mlp

_GEMMA2 = Defaults(256000, 2304, 9216, 26, 8, 4, 256, 8192, tie_word_embeddings=True)
_GEMMA3 = Defaults(262208, 2304, 9216, 26, 8, 4, 256, 131072, tie_word_embeddings=True)


def describe_2(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Gemma 2 config.json."""
    return _describe(read_decoder(values, _GEMMA2), choices, period=2, qk_norm=False)


def describe_3(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Gemma 3 config.json, for text and images (the text model is in `text_config`) or for text alone."""
    decoder = _decoder_3(values)
    return _describe(decoder, choices, _period_3(decoder), qk_norm=True)


def network_2(values: Mapping[str, object]) -> Network:
    """What a Gemma 2 computes: scores and logits are capped."""
    decoder = read_decoder(values, _GEMMA2)
    fields = decoder.fields
    rope = read_rope(fields, decoder.head_dim, decoder.max_positions, 10000.0)
    softcap = softcap_of(fields, "attn_logit_softcapping", 50.0)
    return _network(values, decoder, 2, {FULL: rope, WINDOW: rope}, softcap, softcap_of(fields, "final_logit_softcapping", 30.0))


def network_3(values: Mapping[str, object]) -> Network:
    """What a Gemma 3 computes: queries and keys are normed, and each layer type has its own rotary positions."""
    decoder = _decoder_3(values)
    fields = decoder.fields
    fields.must_be("attn_logit_softcapping", None)
    if decoder.is_nested:  # Transformers caps the logits of a model for text alone
        fields.must_be("final_logit_softcapping", None)
    ropes = {kind: rope_of(fields, decoder, kind) for kind in (FULL, WINDOW)}
    softcap = softcap_of(fields, "final_logit_softcapping", None)
    return _network(values, decoder, _period_3(decoder), ropes, 0.0, softcap, qk_norm=True)


def softcap_of(fields: ConfigFields, name: str, default: float | None) -> float:
    """A cap, which null switches off; 0 for none."""
    if name in fields.values and fields.values[name] is None:
        return 0.0
    found = fields.number(name, default=default or 0.0)
    if name in fields.values and not found:
        raise ConfigError(fields.prefix + name, found, "a number above 0, or null for none")
    return found


def rope_of(fields: ConfigFields, decoder: Decoder, kind: str) -> Rope:
    """The rotary positions of layers of a type: under its name in `rope_parameters`; older files say the base of windows in
    `rope_local_base_freq`, and scale full attention alone."""
    parameters = fields.nested("rope_parameters")
    if parameters is not None and any(not isinstance(value, dict | None) for value in parameters.values.values()):
        raise ConfigError(fields.prefix + "rope_parameters", parameters.values, f"an object for each of {FULL} and {WINDOW}")
    own = parameters.nested(kind) if parameters is not None else None
    told = dict(own.values) if own is not None else {}
    if kind == FULL:
        scaling = fields.nested("rope_scaling")
        told = {"rope_theta": fields.get("rope_theta"), **told, **(scaling.values if scaling is not None else {})}
    else:
        told = {"rope_theta": fields.get("rope_local_base_freq"), **told}
    asked = ConfigFields({"rope_parameters": told}, fields.prefix)
    return read_rope(asked, decoder.head_dim, decoder.max_positions, 1e6 if kind == FULL else 1e4)


def _decoder_3(values: Mapping[str, object]) -> Decoder:
    """The common fields; whether embeddings are tied, a config for text and images says outside of `text_config`."""
    decoder = read_decoder(values, _GEMMA3, "text_config" if values.get("model_type") == "gemma3" else None)
    name = "tie_word_embeddings"
    return replace(decoder, tied=flag(ConfigFields(values), name, True)) if decoder.is_nested else decoder


def _period_3(decoder: Decoder) -> int:
    return decoder.fields.integer("sliding_window_pattern", default=6, low=1)


def _types(decoder: Decoder, period: int) -> tuple[tuple[str, ...], int | None]:
    """The type of each layer, and the window."""
    fields, layers = decoder.fields, decoder.num_layers
    fields.must_be("use_bidirectional_attention", False)
    window = nullable(fields, "sliding_window", 4096)
    return layer_types(fields, layers, every(period, layers), window), window


def _network(
    values: Mapping[str, object], decoder: Decoder, period: int, ropes: Mapping[str, Rope], softcap: float, last_softcap: float,
    qk_norm: bool = False,
) -> Network:  # fmt: skip
    fields, dim = decoder.fields, decoder.head_dim
    (types, window), bias = _types(decoder, period), flag(fields, "attention_bias", False)
    for name in ("hidden_activation", "hidden_act"):
        fields.must_be(name, "gelu_pytorch_tanh")
    eps = fields.number("rms_norm_eps", default=1e-6)
    scale = fields.number("query_pre_attn_scalar", default=256.0, low=1e-6) ** -0.5
    layers = []
    for number, kind in enumerate(types):
        prefix = f"model.layers.{number}"

        def norm(name: str, prefix: str = prefix) -> Norm:
            return Norm(f"{prefix}.{name}.weight", eps, "rms1")

        attention = Attention(
            f"{prefix}.self_attn", decoder.num_heads, decoder.kv_heads, dim, scale, NAMES[kind], bias, bias, ropes[kind],
            window=window if kind == WINDOW else None, softcap=softcap,
            q_norm=norm("self_attn.q_norm") if qk_norm else None, k_norm=norm("self_attn.k_norm") if qk_norm else None,
        )  # fmt: skip
        inner = Mlp(f"{prefix}.mlp", decoder.mlp_width, "gelu_tanh")
        layers.append((
            Branch(attention, norm("input_layernorm"), norm("post_attention_layernorm")),
            Branch(inner, norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")),
        ))  # fmt: skip
    return Network(
        decoder.vocab_size, decoder.hidden_size, "model.embed_tokens.weight", tuple(layers),
        Norm("model.norm.weight", eps, "rms1"), None if decoder.tied else "lm_head.weight",
        end_tokens(values, "text_config"), decoder.hidden_size**0.5, softcap=last_softcap, names=names_of(decoder),
    )  # fmt: skip


def _describe(decoder: Decoder, choices: Choices, period: int, qk_norm: bool) -> Description:
    fields, layers = decoder.fields, decoder.num_layers
    types, window = _types(decoder, period)
    sizes = [
        ("attention", decoder.attention(flag(fields, "attention_bias", False), qk_norm=qk_norm) * layers),
        ("mlp", mlp(decoder.store, decoder.hidden_size, decoder.mlp_width) * layers),
        ("norms", decoder.norms(per_layer=4)),
    ]
    return describe_decoder(decoder, choices, lambda entry: attention_memories(types, entry, window), sizes)
