"""Falcon-H1: every layer attends and scans side by side. What it remembers and weighs; no torch."""

from collections.abc import Mapping
from dataclasses import replace

from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Defaults, flag, read_decoder
from lamina.models.description import Choices, Description
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


def _scan(fields: ConfigFields, hidden: int) -> Mamba2:
    """The scan's width is `mamba_d_ssm`: 1024 where it is not there, mamba_expand x hidden_size where it is null."""
    is_null = "mamba_d_ssm" in fields.values and fields.values["mamba_d_ssm"] is None
    scan = read_mamba2(fields, hidden, None if is_null else width(fields, "mamba_d_ssm", default=1024))
    has_norm, out_bias = flag(fields, "mamba_rms_norm", False), flag(fields, "projectors_bias", False)
    return replace(scan, out_bias=out_bias, has_norm=has_norm)
