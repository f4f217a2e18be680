"""Bamba and Granite 4 hybrids: Mamba-2 layers with full attention in between. No torch."""

from collections.abc import Mapping

from lamina.base.errors import ConfigError
from lamina.models.decoder import Decoder, Defaults, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.network import Attention, Branch, Experts, Mlp, Network, Norm, Part, Rope, Router
from lamina.models.network_fields import end_tokens, names_of, read_rope
from lamina.models.parts_scan import head_scan, step_limits, stored_of
from lamina.models.recurrent import FULL, LINEAR, Mixer, describe_hybrid, layer_numbers, listed_kinds, read_mamba2, width
from lamina.models.weight_parts import Size, mlp, router
from lamina.weights.names import NameScheme, Split

_BAMBA = Defaults(
    vocab_size=128000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=None, max_position_embeddings=262144,
)  # fmt: skip
_GRANITE = Defaults(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=None, head_dim=None, max_position_embeddings=2048,
)  # fmt: skip


#: Granite's experts lie in two tensors: gates and ups [E, 2I, D], and [E, D, I]
_EXPERTS = NameScheme(
    splits=(
        Split(
            r"(.*\.block_sparse_moe)\.input_linear\.weight",
            (r"\1.experts.{index}.gate_proj.weight", r"\1.experts.{index}.up_proj.weight"),
        ),
        Split(r"(.*\.block_sparse_moe)\.output_linear\.weight", (r"\1.experts.{index}.down_proj.weight",)),
    )
)


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Bamba config. Raises ConfigError naming the field."""
    decoder = read_decoder(values, _BAMBA)
    bias = flag(decoder.fields, "mlp_bias", False)
    feed_forward = [("mlp", mlp(decoder.store, decoder.hidden_size, decoder.mlp_width, bias))]
    return _describe(decoder, choices, _kinds(decoder), feed_forward)


def describe_granite(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Granite hybrid (granitemoehybrid): as Bamba, with experts beside a shared feed-forward layer."""
    decoder = read_decoder(values, _GRANITE)
    fields, store, hidden = decoder.fields, decoder.store, decoder.hidden_size
    experts = width(fields, "num_local_experts", "num_experts", default=8, low=0)
    shared = mlp(store, hidden, width(fields, "shared_intermediate_size", default=1024))
    feed_forward = [("mlp", shared)]
    if experts:
        expert = mlp(decoder.expert_store, hidden, decoder.mlp_width)
        feed_forward = [("router", router(store, hidden, experts)), ("experts", expert * experts), ("shared experts", shared)]
    return _describe(decoder, choices, _granite_kinds(decoder), feed_forward)


def _granite_kinds(decoder: Decoder) -> list[str]:
    """The kind of each layer: scans, unless the config lists them."""
    listed = listed_kinds(decoder.fields, decoder.num_layers, "layer_types", "layers_block_type")
    return listed or [LINEAR] * decoder.num_layers


def network(values: Mapping[str, object]) -> Network:
    """What a Bamba computes; half of each head's dims are rotated."""
    decoder = read_decoder(values, _BAMBA)
    fields, eps = decoder.fields, decoder.fields.number("rms_norm_eps", default=1e-5)
    fields.must_be("hidden_act", "silu")
    rope = read_rope(fields, decoder.head_dim, decoder.max_positions, 10000.0, partial=0.5)
    bias = flag(fields, "mlp_bias", False)
    layers = []
    for layer, kind in enumerate(_kinds(decoder)):
        prefix = f"model.layers.{layer}"
        mixer = _mixer(decoder, prefix, kind, rope, decoder.head_dim**-0.5, eps)
        before, between = (Norm(f"{prefix}.{name}.weight", eps) for name in ("input_layernorm", "pre_ff_layernorm"))
        layers.append((Branch(mixer, before), Branch(Mlp(f"{prefix}.feed_forward", decoder.mlp_width, bias=bias), between)))
    return Network(
        decoder.vocab_size, decoder.hidden_size, "model.embed_tokens.weight", tuple(layers),
        Norm("model.final_layernorm.weight", eps), None if decoder.tied else "lm_head.weight", end_tokens(values),
        names=names_of(decoder),
    )  # fmt: skip


def network_granite(values: Mapping[str, object]) -> Network:
    """What a Granite hybrid computes."""
    decoder = read_decoder(values, _GRANITE)
    fields, eps = decoder.fields, decoder.fields.number("rms_norm_eps", default=1e-6)
    fields.must_be("hidden_act", "silu")
    kind_of_positions = fields.get("position_embedding_type")
    if kind_of_positions not in (None, "nope", "rope"):
        raise ConfigError("position_embedding_type", kind_of_positions, "rope, nope or null")
    rope = read_rope(fields, decoder.head_dim, decoder.max_positions, 10000.0) if kind_of_positions == "rope" else None
    scale, residual = fields.number("attention_multiplier", default=1.0), fields.number("residual_multiplier", default=1.0)
    divisor = fields.number("logits_scaling", default=1.0)
    if not divisor:
        raise ConfigError("logits_scaling", divisor, "a number above 0")
    layers = []
    for layer, kind in enumerate(_granite_kinds(decoder)):
        prefix = f"model.layers.{layer}"
        mixer = _mixer(decoder, prefix, kind, rope, scale, eps)
        before, between = (Norm(f"{prefix}.{name}.weight", eps) for name in ("input_layernorm", "post_attention_layernorm"))
        parts = Branch(mixer, before, scale=residual), Branch(_granite_feed_forward(decoder, prefix), between, scale=residual)
        layers.append(parts)
    return Network(
        decoder.vocab_size, decoder.hidden_size, "model.embed_tokens.weight", tuple(layers), Norm("model.norm.weight", eps),
        None if decoder.tied else "lm_head.weight", end_tokens(values),
        embed_scale=fields.number("embedding_multiplier", default=1.0), logit_scale=1 / divisor,
        names=names_of(decoder, scheme=_EXPERTS),
    )  # fmt: skip


def _granite_feed_forward(decoder: Decoder, prefix: str) -> Part:
    """A gated layer, beside experts where there are any."""
    fields = decoder.fields
    inner = width(fields, "shared_intermediate_size", default=1024)
    shared = Mlp(f"{prefix}.shared_mlp", inner, names=(None, "input_linear", "output_linear"), is_fused=True)
    experts = width(fields, "num_local_experts", "num_experts", default=8, low=0)
    if not experts:
        return shared
    name = f"{prefix}.block_sparse_moe"
    routing = Router("chosen", fields.integer("num_experts_per_tok", default=2, low=1, high=experts))
    return Experts(name, experts, decoder.mlp_width, routing, f"{name}.router.layer.weight", shared)


def _mixer(decoder: Decoder, prefix: str, kind: str, rope: Rope | None, scale: float, eps: float) -> Part:
    """The attention or the scan of a layer."""
    if kind == LINEAR:
        scan = read_mamba2(decoder.fields, decoder.hidden_size)
        return head_scan(f"{prefix}.mamba", scan, stored_of(decoder), eps, step_limits(decoder.fields))
    bias = flag(decoder.fields, "attention_bias", False)
    name = f"{prefix}.self_attn"
    return Attention(name, decoder.num_heads, decoder.kv_heads, decoder.head_dim, scale, "kv", bias, bias, rope)


def _describe(decoder: Decoder, choices: Choices, kinds: list[str], feed_forward: list[tuple[str, Size]]) -> Description:
    scan = read_mamba2(decoder.fields, decoder.hidden_size)
    attention = decoder.attention(flag(decoder.fields, "attention_bias", False))
    mixers, sizes = [], [("norms", decoder.norms(2))]
    for kind in kinds:
        if kind == FULL:
            mixers.append(Mixer(attends=True))
            sizes.append(("attention", attention))
        else:
            mixers.append(Mixer(attends=False, scan=scan))
            sizes.append(("mamba", scan.weights(decoder.store, decoder.hidden_size)))
        sizes += feed_forward
    return describe_hybrid(decoder, choices, mixers, sizes)


def _kinds(decoder: Decoder) -> list[str]:
    """The kind of each layer, from the list of those that attend or the list of all."""
    attending = layer_numbers(decoder.fields, "attn_layer_indices", decoder.num_layers)
    if attending is not None:
        return [FULL if layer in attending else LINEAR for layer in range(decoder.num_layers)]
    listed = listed_kinds(decoder.fields, decoder.num_layers, "layers_block_type", "layer_types")
    return listed or [LINEAR] * decoder.num_layers
