"""How layers with the gated delta rule and with decayed linear attention are built."""

import torch

from lamina.layers.delta import DeltaLayer
from lamina.layers.heads import RmsNorm
from lamina.layers.lightning import LightningLayer
from lamina.layers.projection import Projection
from lamina.layers.scan import GatedNorm
from lamina.models.build_scan import build_convolution
from lamina.models.builder import Builder, Layer, build_projection
from lamina.models.parts_delta import DecayedAttention, DeltaRule
from lamina.ops.linear_attention import decays
from lamina.ops.store import StateCodec


def delta_rule(builder: Builder, part: object) -> Layer:
    """The layer of a `DeltaRule`."""
    assert isinstance(part, DeltaRule)
    prefix, groups, heads, width = part.prefix, part.groups, part.heads, builder.width
    each = heads // groups
    keys, values = groups * part.key_dim, heads * part.value_dim
    sizes = [part.key_dim, part.key_dim, each * part.value_dim, each * part.value_dim]
    mixed = builder.take(f"{prefix}.in_proj_qkvz.weight", 2 * keys + 2 * values, width).view(groups, sum(sizes), width)
    gates = builder.take(f"{prefix}.in_proj_ba.weight", 2 * heads, width).view(groups, 2 * each, width)
    rows = [*mixed.split(sizes, dim=1), *gates.split(each, dim=1)]
    norm = builder.take(f"{prefix}.norm.weight", part.value_dim).repeat(heads)
    return DeltaLayer(
        entry=Projection(builder.product(torch.cat([each_kind.flatten(0, 1) for each_kind in rows])), None),
        convolution=build_convolution(builder, f"{prefix}.conv1d", 2 * keys + values, part.kernel, False, part.stored),
        decay=-torch.exp(builder.take(f"{prefix}.A_log", heads)), step_bias=builder.take(f"{prefix}.dt_bias", heads),
        store=builder.store("state", StateCodec(heads * part.key_dim * part.value_dim, part.stored.state), "state"),
        norm=GatedNorm(norm, part.eps, heads, before_gate=True),
        exit=build_projection(builder, f"{prefix}.out_proj", width, values, False),
        shape=(groups, part.key_dim, heads, part.value_dim),
    )  # fmt: skip


def decayed_attention(builder: Builder, part: object) -> Layer:
    """The layer of a `DecayedAttention`."""
    assert isinstance(part, DecayedAttention)
    prefix, dim, heads, width = part.prefix, part.dim, len(part.slopes), builder.width
    inner = heads * dim
    mixed = builder.take(f"{prefix}.qkv_proj.weight", 3 * inner, width).view(heads, 3, dim, width)
    gate = builder.take(f"{prefix}.output_gate.weight", inner, width)
    rows = torch.cat([mixed.transpose(0, 1).flatten(0, 2), gate])
    return LightningLayer(
        entry=Projection(builder.product(rows), None),
        decays=decays(torch.tensor(part.slopes, dtype=torch.float32)),
        store=builder.store("state", StateCodec(heads * dim * dim, part.stored.state), "state"),
        norm=RmsNorm(builder.take(f"{prefix}.norm.weight", inner), part.eps),
        exit=build_projection(builder, f"{prefix}.out_proj", width, inner, False), dim=dim, activation=part.activation,
    )  # fmt: skip
