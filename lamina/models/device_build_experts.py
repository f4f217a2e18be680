"""How experts that lie together in one tensor, and experts without a gate, become layers on a GPU."""

import torch
from torch import Tensor

from lamina.base.errors import WeightError
from lamina.layers.device_heads import DeviceLayer, DeviceProjection, DeviceSparse
from lamina.models.device_builder import DeviceBuilder, GatheredExperts, build_mlp, build_router, refuses_routed
from lamina.models.parts_experts import FusedExperts, UngatedExperts
from lamina.ops.experts import Gating
from lamina.ops.experts.plain import MxExperts, PlainExperts, StoredExperts, pack_mx
from lamina.ops.machine import Machine


def refuses_fused(part: FusedExperts, machine: Machine) -> str | None:
    """Why a layer is not served, or None."""
    return refuses_routed(part.router, part.num, part.shared, machine)


def refuses_ungated(part: UngatedExperts, machine: Machine) -> str | None:
    """Why a layer is not served, or None."""
    return refuses_routed(part.router, part.num, part.shared, machine)


def build_fused(builder: DeviceBuilder, part: object) -> DeviceLayer:
    """The layer of a `FusedExperts`; MXFP4 stays packed."""
    assert isinstance(part, FusedExperts)
    num, width, inner = part.num, builder.width, part.width
    biases = None
    if part.bias:
        first = builder.take(f"{part.prefix}.gate_up_proj_bias", num, 2 * inner)
        biases = _halves(first, part.is_interleaved).contiguous(), builder.take(f"{part.prefix}.down_proj_bias", num, width)
    matrices = (
        _matrix(builder, part, "gate_up_proj", 2 * inner, width, part.is_interleaved, 2),
        _matrix(builder, part, "down_proj", width, inner, False, 1),
    )
    return DeviceSparse(
        gate=builder.weight(part.gate, num, width), router=build_router(builder, part.router, num),
        gate_bias=builder.take(part.gate_bias, num) if part.gate_bias is not None else None, experts=PlainExperts(*matrices),
        shared=build_mlp(builder, part.shared) if part.shared is not None else None, limit=part.limit,
        gating=Gating(part.alpha, part.shift, biases, part.weighs_input),
    )  # fmt: skip


def build_ungated(builder: DeviceBuilder, part: object) -> DeviceLayer:
    """The layer of an `UngatedExperts`."""
    assert isinstance(part, UngatedExperts)
    width, inner, outer = builder.width, part.width, part.latent or builder.width

    def gathered(name: str, rows: int, columns: int) -> StoredExperts:
        found = GatheredExperts(part.num, 1, builder.dtype)
        for expert in range(part.num):
            full = f"{part.prefix}.experts.{expert}.{name}.weight"
            found.put(full, expert, 0, builder.stored(full, rows, columns))
        return found.experts()

    def projection(name: str, rows: int, columns: int) -> DeviceProjection | None:
        if part.latent is None:
            return None
        full = f"{part.prefix}.{name}"
        bias = builder.take(f"{full}.bias", rows) if part.latent_bias else None
        return DeviceProjection(builder.weight(f"{full}.weight", rows, columns), bias)

    return DeviceSparse(
        gate=builder.weight(part.gate, part.num, width), router=build_router(builder, part.router, part.num),
        experts=PlainExperts(gathered("up_proj", inner, outer), gathered("down_proj", outer, inner)),
        shared=build_mlp(builder, part.shared) if part.shared is not None else None,
        gating=Gating(ungated=part.activation),
        enter=projection("fc1_latent_proj", outer, width), leave=projection("fc2_latent_proj", width, outer),
    )  # fmt: skip


def _matrix(
    builder: DeviceBuilder, part: FusedExperts, name: str, rows: int, columns: int, is_interleaved: bool, parts: int
) -> StoredExperts | MxExperts:  # fmt: skip
    """[E, rows, columns] of all experts, gate first."""
    if not part.is_packed:
        full = f"{part.prefix}.{name}"
        found = builder.stored(full, part.num, columns, rows)
        if found.kind != "plain":
            raise WeightError(f"tensor {full!r}: expected bf16 or fp32 values, found {found.kind}")
        turned = _halves(found.codes.transpose(1, 2), is_interleaved).contiguous()
        return StoredExperts(turned)
    names = [f"{part.prefix}.{expert}.{name}.weight" for expert in range(part.num)]
    first = builder.stored(names[0], rows, columns)
    if first.kind != "fp4" or first.scales is None:
        raise WeightError(f"tensor {names[0]!r}: expected fp4, found {first.kind}")
    codes = first.codes.new_empty(part.num, rows, columns // 2, dtype=torch.uint8)
    scales = first.scales.new_empty(part.num, rows, columns // 32, dtype=torch.uint8)
    for expert, full in enumerate(names):
        one = builder.stored(full, rows, columns) if expert else first
        if one.kind != "fp4" or one.scales is None:
            raise WeightError(f"tensor {full!r}: expected fp4 as the layer's other experts, found {one.kind}")
        codes[expert] = _halves(one.codes.view(torch.uint8)[None], is_interleaved)[0]
        scales[expert] = _halves(one.scales.view(torch.uint8)[None], is_interleaved)[0]
    return pack_mx(codes, scales, parts)


def _halves(both: Tensor, is_interleaved: bool) -> Tensor:
    """Gate first, in dim 1 of [E, 2I, ...]."""
    return torch.cat([both[:, ::2], both[:, 1::2]], dim=1) if is_interleaved else both
