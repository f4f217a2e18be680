"""Nemotron-H: each layer is one thing, a Mamba-2 scan, full attention, a feed-forward layer or experts. No torch."""

from collections.abc import Mapping

from lamina.base.errors import ConfigError
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Decoder, Defaults, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.recurrent import FULL, LINEAR, SPELLINGS, Mamba2, Mixer, check_groups, describe_hybrid, listed_kinds, width
from lamina.models.weight_parts import Size, mlp, router

_DEFAULTS = Defaults(
    vocab_size=131072, hidden_size=4096, intermediate_size=21504, num_hidden_layers=4, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
)  # fmt: skip
_MOE, _MLP = "moe", "mlp"
_SPELLINGS = {**SPELLINGS, _MOE: _MOE, _MLP: _MLP}
_LETTERS = {"M": LINEAR, "*": FULL, "E": _MOE, "-": _MLP}


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Nemotron-H config. Raises ConfigError naming the field."""
    if values.get("head_dim") is None and values.get("attention_head_dim") is not None:
        values = {**values, "head_dim": values["attention_head_dim"]}  # the first checkpoints' name
    kinds = _kinds(ConfigFields(values))
    decoder = read_decoder({**values, "num_hidden_layers": len(kinds)}, _DEFAULTS)
    fields, store, hidden = decoder.fields, decoder.store, decoder.hidden_size
    fields.must_be("sliding_window", None)
    scan = _scan(fields)
    mixers, sizes = [], [("norms", decoder.norms(1))]
    for kind in kinds:
        mixers.append(Mixer(attends=kind == FULL, scan=scan if kind == LINEAR else None))
        if kind == FULL:
            sizes.append(("attention", decoder.attention()))
        elif kind == LINEAR:
            sizes.append(("mamba", scan.weights(store, hidden)))
        elif kind == _MOE:
            sizes += _experts(decoder)
        else:
            sizes.append(("mlp", _feed_forward(decoder, decoder.mlp_width)))
    return describe_hybrid(decoder, choices, mixers, sizes)


def _kinds(fields: ConfigFields) -> list[str]:
    """The kind of each layer, listed or as a pattern with a letter for each; num_hidden_layers may only agree with it."""
    pattern, listed = fields.get("hybrid_override_pattern"), fields.items("layers_block_type", "layer_types")
    if listed is None and pattern is None:
        kinds: list[str] | None = [LINEAR, _MOE, FULL, _MLP]
    elif listed is not None:
        kinds = listed_kinds(fields, len(listed), "layers_block_type", "layer_types", spellings=_SPELLINGS)
    elif isinstance(pattern, str) and set(pattern) <= set(_LETTERS):
        kinds = [_LETTERS[letter] for letter in pattern]
    else:
        raise ConfigError("hybrid_override_pattern", pattern, f"a letter for each layer: {', '.join(_LETTERS)}")
    if not kinds:
        raise ConfigError("hybrid_override_pattern", pattern, "at least one layer")
    if fields.integer("num_hidden_layers", default=len(kinds), low=1) != len(kinds):
        found = fields.get("num_hidden_layers")
        raise ConfigError("num_hidden_layers", found, f"{len(kinds)}, the layers that hybrid_override_pattern lists")
    return kinds


def _scan(fields: ConfigFields) -> Mamba2:
    heads, bias = width(fields, "mamba_num_heads", default=128), flag(fields, "use_bias", False)
    groups = width(fields, "n_groups", "mamba_n_groups", default=8)
    check_groups("n_groups", groups, heads)
    return Mamba2(
        heads, width(fields, "mamba_head_dim", default=64), width(fields, "ssm_state_size", default=128), groups,
        width(fields, "conv_kernel", "mamba_d_conv", default=4), conv_bias=flag(fields, "use_conv_bias", True),
        in_bias=bias, out_bias=bias,
    )  # fmt: skip


def _feed_forward(decoder: Decoder, inner: int) -> Size:
    return mlp(decoder.store, decoder.hidden_size, inner, flag(decoder.fields, "mlp_bias", False), gated=False)


def _experts(decoder: Decoder) -> list[tuple[str, Size]]:
    """Router, experts (behind a narrower projection, where there is one) and the shared expert."""
    fields, store, hidden = decoder.fields, decoder.store, decoder.hidden_size
    count, shared = width(fields, "n_routed_experts", "num_local_experts", default=8), Size()
    outer = hidden
    if fields.get("moe_latent_size") is not None:
        outer, bias = width(fields, "moe_latent_size"), flag(fields, "mlp_bias", False)
        shared = store.linear(outer, hidden, bias) + store.linear(hidden, outer, bias)
    inner = width(fields, "moe_shared_expert_intermediate_size", default=7688, low=0) or decoder.mlp_width
    expert = mlp(decoder.expert_store, outer, width(fields, "moe_intermediate_size", default=7688), gated=False)
    correction = Size(0, store.tensor(count, dtype="fp32").nbytes)  # of the scores: stored, but no parameter
    return [
        ("router", router(store, hidden, count) + correction), ("experts", expert * count),
        ("shared experts", shared + _feed_forward(decoder, inner)),
    ]  # fmt: skip
