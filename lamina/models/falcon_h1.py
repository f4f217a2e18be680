"""Falcon-H1: every layer attends and scans side by side. No torch."""

from collections.abc import Mapping
from dataclasses import replace

from lamina.base.errors import ConfigError
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Defaults, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.network import Attention, Branch, Mlp, Network, Norm, Parallel
from lamina.models.network_fields import end_tokens, names_of, read_rope
from lamina.models.parts_scan import Scaled, head_scan, step_limits, stored_of
from lamina.models.recurrent import Mamba2, Mixer, describe_hybrid, read_mamba2, width
from lamina.models.weight_parts import mlp

_DEFAULTS = Defaults(
    vocab_size=128000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=None, max_position_embeddings=8192,
)  # fmt: skip


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Falcon-H1 config. Raises ConfigError naming the field."""
    decoder = read_decoder(values, _DEFAULTS)
    fields, store, hidden, layers = decoder.fields, decoder.store, decoder.hidden_size, decoder.num_layers
    scan = _scan(fields, hidden)
    sizes = [
        ("attention", decoder.attention(flag(fields, "attention_bias", False)) * layers),
        ("mamba", scan.weights(store, hidden) * layers),
        ("mlp", mlp(store, hidden, decoder.mlp_width, flag(fields, "mlp_bias", False)) * layers),
        ("norms", decoder.norms(2)),
    ]
    return describe_hybrid(decoder, choices, [Mixer(attends=True, scan=scan)] * layers, sizes)


def network(values: Mapping[str, object]) -> Network:
    """What a Falcon-H1 computes: an Mlp after an attention and a scan that read the same, and factors at every product."""
    decoder = read_decoder(values, _DEFAULTS)
    fields, dim, eps = decoder.fields, decoder.head_dim, decoder.fields.number("rms_norm_eps", default=1e-5)
    fields.must_be("hidden_act", "silu")
    rope = read_rope(fields, dim, decoder.max_positions, 10000.0)
    bias, mlp_bias = flag(fields, "attention_bias", False), flag(fields, "mlp_bias", False)
    scale = dim**-0.5 * _factor(fields, "key_multiplier")  # every score is a product with one key
    factors = {name: _factor(fields, f"{name}_multiplier") for name in ("attention_in", "attention_out", "ssm_in", "ssm_out")}
    gate, down = _factors(fields, "mlp_multipliers", 2)
    mup = _factors(fields, "ssm_multipliers", 5)
    scan, stored, limits = _scan(fields, decoder.hidden_size), stored_of(decoder), step_limits(fields)
    before_gate, layers = flag(fields, "mamba_norm_before_gate", True), []
    for layer in range(decoder.num_layers):
        prefix = f"model.layers.{layer}"
        name = f"{prefix}.self_attn"
        attention = Attention(name, decoder.num_heads, decoder.kv_heads, dim, scale, "kv", bias, bias, rope)
        recurrence = head_scan(f"{prefix}.mamba", scan, stored, eps, limits, before_gate, mup)
        scaled = Scaled(attention, factors["attention_in"], factors["attention_out"])
        mixer = Parallel((Scaled(recurrence, factors["ssm_in"], factors["ssm_out"]), scaled))
        feed_forward = Mlp(f"{prefix}.feed_forward", decoder.mlp_width, bias=mlp_bias, multipliers=(gate, down))
        first, second = (Norm(f"{prefix}.{name}.weight", eps) for name in ("input_layernorm", "pre_ff_layernorm"))
        layers.append((Branch(mixer, first), Branch(feed_forward, second)))
    return Network(
        decoder.vocab_size, decoder.hidden_size, "model.embed_tokens.weight", tuple(layers),
        Norm("model.final_layernorm.weight", eps), None if decoder.tied else "lm_head.weight", end_tokens(values),
        embed_scale=_factor(fields, "embedding_multiplier"), logit_scale=_factor(fields, "lm_head_multiplier"),
        names=names_of(decoder),
    )  # fmt: skip


def _factor(fields: ConfigFields, name: str) -> float:
    """A factor, 1 where there is none; it may be negative."""
    return fields.number(name, default=1.0, low=-1e30)


def _factors(fields: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    """A list of `count` factors, all 1 where there is none."""
    listed = fields.items(name)
    if listed is None:
        return (1.0,) * count
    found = [float(value) for value in listed if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(found) != count or len(listed) != count:
        raise ConfigError(f"{fields.prefix}{name}", listed, f"{count} numbers")
    return tuple(found)


def _scan(fields: ConfigFields, hidden: int) -> Mamba2:
    """The scan's width is `mamba_d_ssm`: 1024 where it is not there, mamba_expand x hidden_size where it is null."""
    is_null = "mamba_d_ssm" in fields.values and fields.values["mamba_d_ssm"] is None
    scan = read_mamba2(fields, hidden, None if is_null else width(fields, "mamba_d_ssm", default=1024))
    has_norm, out_bias = flag(fields, "mamba_rms_norm", False), flag(fields, "projectors_bias", False)
    return replace(scan, out_bias=out_bias, has_norm=has_norm)
