"""Nemotron-H: each layer is one thing, a Mamba-2 scan, full attention, a feed-forward layer or experts. No torch."""

from collections.abc import Mapping
from dataclasses import replace

from lamina.base.errors import ConfigError
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Decoder, Defaults, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.network import Attention, Branch, Mlp, Network, Norm, Part, Router
from lamina.models.network_fields import end_tokens, names_of
from lamina.models.parts_experts import UngatedExperts
from lamina.models.parts_scan import head_scan, step_limits, stored_of
from lamina.models.recurrent import FULL, LINEAR, SPELLINGS, Mamba2, Mixer, check_groups, describe_hybrid, listed_kinds, width
from lamina.models.weight_parts import Size, mlp, router
from lamina.weights.names import Rename

_DEFAULTS = Defaults(
    vocab_size=131072, hidden_size=4096, intermediate_size=21504, num_hidden_layers=4, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
)  # fmt: skip
_MOE, _MLP = "moe", "mlp"
_SPELLINGS = {**SPELLINGS, _MOE: _MOE, _MLP: _MLP}
_LETTERS = {"M": LINEAR, "*": FULL, "E": _MOE, "-": _MLP}


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Nemotron-H config. Raises ConfigError naming the field."""
    decoder, kinds = _decoder(values)
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


def network(values: Mapping[str, object]) -> Network:
    """What a Nemotron-H computes: one part a layer, attention without positions.

    As in Transformers, `attention_bias`, `mamba_proj_bias` and `n_shared_experts` say nothing of its tensors, and a head that is
    stored is used, whatever `tie_word_embeddings` says.
    """
    decoder, kinds = _decoder(values)
    fields, dim, eps = decoder.fields, decoder.head_dim, decoder.fields.number("layer_norm_epsilon", default=1e-5)
    fields.must_be("sliding_window", None)
    fields.must_be("mamba_hidden_act", "silu")
    activation = fields.get("mlp_hidden_act") or "relu2"
    if activation not in ("relu2", "silu"):
        raise ConfigError("mlp_hidden_act", activation, "relu2 or silu")
    least = fields.number("mamba_dt_min", "time_step_min", default=0.001)
    if step_limits(fields) != (0.0, float("inf")):
        raise ConfigError("time_step_limit", fields.get("time_step_limit"), "[0, Infinity]; time_step_min is the least step")
    scan, stored, layers = _scan(fields), stored_of(decoder), []
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}"
        name = f"{prefix}.mixer"
        part: Part
        if kind == FULL:
            part = Attention(name, decoder.num_heads, decoder.kv_heads, dim, dim**-0.5, "kv")
        elif kind == LINEAR:
            part = head_scan(name, scan, stored, eps, (least, float("inf")))
        elif kind == _MOE:
            part = _experts_part(decoder, name, activation)
        else:
            part = _mlp_part(decoder, name, decoder.mlp_width, activation)
        layers.append((Branch(part, Norm(f"{prefix}.norm.weight", eps)),))
    return Network(
        decoder.vocab_size, decoder.hidden_size, "model.embeddings.weight", tuple(layers), Norm("model.norm_f.weight", eps),
        "lm_head.weight", end_tokens(values), head_may_miss=decoder.tied,
        names=names_of(replace(decoder, tied=False), (Rename(r"^backbone\.", "model."),), ("mtp.",)),
    )  # fmt: skip


def _mlp_part(decoder: Decoder, name: str, inner: int, activation: str) -> Mlp:
    bias = flag(decoder.fields, "mlp_bias", False)
    return Mlp(name, inner, activation, bias, names=(None, "up_proj", "down_proj"))


def _experts_part(decoder: Decoder, name: str, activation: str) -> UngatedExperts:
    fields = decoder.fields
    count = _expert_count(fields)
    groups = fields.integer("n_group", default=1, low=1)
    if count % groups or count // groups < 2:
        raise ConfigError("n_group", groups, f"a divisor of n_routed_experts ({count}) that leaves two in each group")
    kept = fields.integer("topk_group", default=1, low=1, high=groups)
    top_k = fields.integer("num_experts_per_tok", default=2, low=1, high=count // groups * kept)
    bias, scale = f"{name}.gate.e_score_correction_bias", fields.number("routed_scaling_factor", default=1.0)
    routing = Router("sigmoid", top_k, flag(fields, "norm_topk_prob", True), scale, bias, groups, kept)
    shared = _mlp_part(decoder, f"{name}.shared_experts", _shared_width(decoder), activation)
    latent = width(fields, "moe_latent_size") if fields.get("moe_latent_size") is not None else None
    return UngatedExperts(
        name, count, width(fields, "moe_intermediate_size", default=7688), routing, f"{name}.gate.weight", shared, activation,
        latent, flag(fields, "mlp_bias", False),
    )  # fmt: skip


def _expert_count(fields: ConfigFields) -> int:
    return width(fields, "n_routed_experts", "num_local_experts", default=8)


def _shared_width(decoder: Decoder) -> int:
    return width(decoder.fields, "moe_shared_expert_intermediate_size", default=7688, low=0) or decoder.mlp_width


def _decoder(values: Mapping[str, object]) -> tuple[Decoder, list[str]]:
    """The common fields, and the kind of each layer."""
    if values.get("head_dim") is None and values.get("attention_head_dim") is not None:
        values = {**values, "head_dim": values["attention_head_dim"]}  # the first checkpoints' name
    kinds = _kinds(ConfigFields(values))
    return read_decoder({**values, "num_hidden_layers": len(kinds)}, _DEFAULTS), kinds


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
    count, shared = _expert_count(fields), Size()
    outer = hidden
    if fields.get("moe_latent_size") is not None:
        outer, bias = width(fields, "moe_latent_size"), flag(fields, "mlp_bias", False)
        shared = store.linear(outer, hidden, bias) + store.linear(hidden, outer, bias)
    expert = mlp(decoder.expert_store, outer, width(fields, "moe_intermediate_size", default=7688), gated=False)
    correction = Size(0, store.tensor(count, dtype="fp32").nbytes)  # of the scores: stored, but no parameter
    return [
        ("router", router(store, hidden, count) + correction), ("experts", expert * count),
        ("shared experts", shared + _feed_forward(decoder, _shared_width(decoder))),
    ]  # fmt: skip
