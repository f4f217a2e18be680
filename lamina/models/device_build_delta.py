"""How layers with the gated delta rule and with decayed linear attention are built on a GPU."""

from collections.abc import Sequence

import torch

from lamina.base.log import event, get_logger
from lamina.layers.device_delta import DeviceDelta, DeviceLightning
from lamina.layers.device_heads import DeviceLayer
from lamina.layers.stored import Part, stack
from lamina.models.device_build_scan import build_convolution, build_state
from lamina.models.device_builder import DeviceBuilder
from lamina.models.parts_delta import DecayedAttention, DeltaRule
from lamina.ops.delta.triton import Rule
from lamina.ops.delta.triton import refuses as delta_refuses
from lamina.ops.gated import ACTIVATIONS
from lamina.ops.gemm.stored import BLOCK, StoredWeight
from lamina.ops.linear_attention import decays
from lamina.ops.linear_attention.triton import refuses as attention_refuses
from lamina.ops.machine import Machine
from lamina.ops.quantise import dequantise_fp8_weight
from lamina.ops.ssm.triton import GroupNorm

_LOG = get_logger(__name__)


def refuses_delta(part: DeltaRule, machine: Machine) -> str | None:
    """Why a layer is not served, or None."""
    return delta_refuses(machine, part.key_dim)


def build_delta(builder: DeviceBuilder, part: object) -> DeviceLayer:
    """The layer of a `DeltaRule`."""
    assert isinstance(part, DeltaRule)
    prefix, groups, heads, width = part.prefix, part.groups, part.heads, builder.width
    each = heads // groups
    keys, values = groups * part.key_dim, heads * part.value_dim
    sizes = (part.key_dim, part.key_dim, each * part.value_dim, each * part.value_dim)
    names = (f"{prefix}.in_proj_qkvz.weight", f"{prefix}.in_proj_ba.weight")
    mixed = by_kind(names[0], builder.weight(names[0], 2 * keys + 2 * values, width), groups, sizes, builder.dtype)
    gates = by_kind(names[1], builder.weight(names[1], 2 * heads, width), groups, (each, each), builder.dtype)
    stacked = _stacked(builder, names, (mixed, gates))
    return DeviceDelta(
        entry=stacked[0], gates=stacked[1] if len(stacked) > 1 else None,
        convolution=build_convolution(builder, f"{prefix}.conv1d", 2 * keys + values, part.kernel, False, part.stored),
        rule=Rule(
            -torch.exp(builder.take(f"{prefix}.A_log", heads)), builder.take(f"{prefix}.dt_bias", heads), groups, part.key_dim,
            part.value_dim,
        ),
        store=build_state(builder, heads * part.key_dim * part.value_dim, part.stored),
        norm=GroupNorm(builder.take(f"{prefix}.norm.weight", part.value_dim).repeat(heads), part.eps, heads, before_gate=True),
        w_out=builder.weight(f"{prefix}.out_proj.weight", width, values),
    )  # fmt: skip


def refuses_decayed(part: DecayedAttention, machine: Machine) -> str | None:
    """Why a layer is not served, or None."""
    if part.activation not in ACTIVATIONS:
        return f"activation {part.activation}: no GPU kernels yet"
    return attention_refuses(machine, part.dim, len(part.slopes))


def build_decayed(builder: DeviceBuilder, part: object) -> DeviceLayer:
    """The layer of a `DecayedAttention`."""
    assert isinstance(part, DecayedAttention)
    prefix, dim, heads, width = part.prefix, part.dim, len(part.slopes), builder.width
    inner = heads * dim
    names = (f"{prefix}.qkv_proj.weight", f"{prefix}.output_gate.weight")
    mixed = by_kind(names[0], builder.weight(names[0], 3 * inner, width), heads, (dim, dim, dim), builder.dtype)
    stacked = _stacked(builder, names, (mixed, builder.weight(names[1], inner, width)))
    return DeviceLightning(
        entry=stacked[0], gates=stacked[1] if len(stacked) > 1 else None,
        powers=decays(torch.tensor(part.slopes, dtype=torch.float32)).powers.to(builder.device).contiguous(),
        store=build_state(builder, heads * dim * dim, part.stored),
        norm=(builder.take(f"{prefix}.norm.weight", inner), part.eps),
        w_out=builder.weight(f"{prefix}.out_proj.weight", width, inner), dim=dim, activation=part.activation,
    )  # fmt: skip


def _stacked(builder: DeviceBuilder, names: Sequence[str], weights: Sequence[StoredWeight]) -> list[StoredWeight]:
    """Weights that read the same rows as one where their formats allow it."""
    parts = [Part(name, weight, builder.dtype) for name, weight in zip(names, weights, strict=True)]
    return [product.weight for product in stack(parts).products]


def by_kind(name: str, weight: StoredWeight, groups: int, sizes: Sequence[int], dtype: torch.dtype) -> StoredWeight:
    """Rows that lie group by group, `sizes` of each kind in a group, as all groups' rows of one kind after another.

    Expanded to `dtype`, with a line in the log, where fp8 has scales for rows of several kinds.
    """
    codes, scales = weight.codes, weight.scales
    if scales is not None and any(size % BLOCK for size in sizes):
        event(_LOG, "weight_expanded", tensor=name, stored="fp8", used=str(dtype))
        codes, scales = dequantise_fp8_weight(codes, scales).to(dtype), None
    kind = codes.dtype
    found = _moved(codes.view(torch.uint8) if scales is not None else codes, groups, sizes)
    if scales is None:
        return StoredWeight(found)
    return StoredWeight(found.view(kind), _moved(scales, groups, [size // BLOCK for size in sizes]))


def _moved(rows: torch.Tensor, groups: int, sizes: Sequence[int]) -> torch.Tensor:
    kinds = rows.unflatten(0, (groups, sum(sizes))).split(list(sizes), dim=1)
    return torch.cat([kind.flatten(0, 1) for kind in kinds])
