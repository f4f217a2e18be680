"""gpt-oss: a window and full attention in turn, a learned sink logit per head, experts in MXFP4."""

from collections.abc import Mapping

from lamina.models.attention_memory import NAMES, WINDOW, attention_memories, every, layer_types, nullable
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Decoder, Defaults, describe_decoder, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.network import Attention, Branch, Network, Norm, Rope, Router
from lamina.models.network_fields import end_tokens, names_of, read_rope
from lamina.models.parts_experts import PACKED_NAMES, FusedExperts
from lamina.models.weight_parts import router

_DEFAULTS = Defaults(201088, 2880, 2880, 36, 64, 8, 64, 131072)
_ROPE: dict[str, object] = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a gpt-oss config.json. A sink is a logit joined to the softmax: a weight, and no byte of memory."""
    decoder = read_decoder(values, _DEFAULTS)
    fields, layers, width = decoder.fields, decoder.num_layers, decoder.hidden_size
    types, window = _types(decoder)
    num_experts = _num_experts(fields)
    inner, store, experts = decoder.mlp_width, decoder.store, decoder.expert_store
    attention = decoder.attention(flag(fields, "attention_bias", True)) + store.tensor(decoder.num_heads)
    expert = experts.linear(2 * inner, width, bias=True) + experts.linear(width, inner, bias=True)
    sizes = [
        ("attention", attention * layers),
        ("router", router(store, width, num_experts, bias=True) * layers),
        ("experts", expert * (num_experts * layers)),
        ("norms", decoder.norms(per_layer=2)),
    ]
    return describe_decoder(decoder, choices, lambda entry: attention_memories(types, entry, window), sizes)


def network(values: Mapping[str, object]) -> Network:
    """What a gpt-oss computes; experts are MXFP4 where the config says so, else as Transformers writes them."""
    decoder = read_decoder(values, _DEFAULTS)
    fields, dim = decoder.fields, decoder.head_dim
    fields.must_be("hidden_act", "silu")
    (types, window), bias = _types(decoder), flag(fields, "attention_bias", True)
    eps, num, rope = fields.number("rms_norm_eps", default=1e-5), _num_experts(fields), _rope(decoder)
    routing = Router("chosen", fields.integer("num_experts_per_tok", "experts_per_token", default=4, low=1, high=num))
    is_packed = decoder.expert_store.codes == "e2m1"
    limit, alpha = (fields.number(name, default=default) for name, default in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)))
    layers = []
    for number, kind in enumerate(types):
        prefix = f"model.layers.{number}"
        attention = Attention(
            f"{prefix}.self_attn", decoder.num_heads, decoder.kv_heads, dim, dim**-0.5, NAMES[kind], bias, bias, rope,
            window=window if kind == WINDOW else None, sinks=f"{prefix}.self_attn.sinks",
        )  # fmt: skip
        experts = FusedExperts(
            f"{prefix}.mlp.experts", num, decoder.mlp_width, routing, f"{prefix}.mlp.router.weight", f"{prefix}.mlp.router.bias",
            is_packed=is_packed, is_interleaved=True, bias=True, limit=limit, alpha=alpha, shift=1.0,
        )  # fmt: skip
        before, between = (Norm(f"{prefix}.{name}.weight", eps) for name in ("input_layernorm", "post_attention_layernorm"))
        layers.append((Branch(attention, before), Branch(experts, between)))
    return Network(
        decoder.vocab_size, decoder.hidden_size, "model.embed_tokens.weight", tuple(layers), Norm("model.norm.weight", eps),
        None if decoder.tied else "lm_head.weight", end_tokens(values),
        names=names_of(decoder, scheme=PACKED_NAMES if is_packed else None),
    )  # fmt: skip


def _types(decoder: Decoder) -> tuple[tuple[str, ...], int | None]:
    """The type of each layer, and the window."""
    fields, layers = decoder.fields, decoder.num_layers
    window = nullable(fields, "sliding_window", 128)
    return layer_types(fields, layers, every(2, layers), window), window


def _num_experts(fields: ConfigFields) -> int:
    return fields.integer("num_local_experts", "num_experts", default=128, low=1)


def _rope(decoder: Decoder) -> Rope:
    """YaRN over 4,096 positions where the config is silent."""
    fields = decoder.fields
    if fields.get("rope_parameters", "rope_scaling") is None:
        fields = ConfigFields({**fields.values, "rope_parameters": _ROPE}, fields.prefix)
    return read_rope(fields, decoder.head_dim, decoder.max_positions, 150000.0)
