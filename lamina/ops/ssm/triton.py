"""Selective scans on a GPU, and the gate and the norms around them. `ref.py` is the definition.

    scan_heads(x, steps, ...), scan_channels(x, steps, ...)   [T, inner] fp32
    gate_rows(y, gate, norm, rows, dtype)                     what the last product of a layer reads
    norm_parts(x, norms, dtype)                               parts of rows, each normed
    refuses(machine, size)                                    why they are not served, or None

A scan is one launch: a program goes through the rows of one request one after another, with the state of some channels in
registers. So a row is computed the same way in decode and in prefill, wherever a request is cut and whoever runs beside it.
"""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.machine import Machine
from lamina.ops.rope_norm.triton import refuses_machine
from lamina.ops.rows import Rows
from lamina.ops.ssm import kernels
from lamina.ops.store import Store

#: numbers of a state that a program holds: of one warp, which waits for no other (from the machine code: 16 a thread)
_CELLS = 512
_WARPS = 1
_MOST_SIZE = 512
_MOST_GROUP = 32768
#: channels of a row that a program gates where nothing is normed
_GATED = 1024


@dataclass(frozen=True, slots=True)
class Selection:
    """The numbers of a scan's layer.

    decay  [H], or [C, N] for channels; <= 0.   skip, step_bias  [H] or [C].   All fp32.
    limits of a step, after softplus.
    """

    decay: Tensor
    skip: Tensor
    step_bias: Tensor
    limits: tuple[float, float] = (0.0, float("inf"))


def refuses(machine: Machine, size: int, group: int = 1) -> str | None:
    """Why channels with `size` numbers, normed in groups of `group`, are not served there, in one line, or None."""
    if not 1 <= size <= _MOST_SIZE:
        return f"scanned channels must have 1 to {_MOST_SIZE} numbers, not {size}"
    if group > _MOST_GROUP:
        return f"norms of scans must be of at most {_MOST_GROUP} channels, not {group}"
    return refuses_machine(machine)


def scan_heads(
    x: Tensor, steps: Tensor, found: Selection, b: Tensor, c: Tensor, groups: int, store: Store, rows: Rows,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`ref.scan_heads` with steps as a projection gives them: softplus(steps + bias) within the limits.

    x     [T, H * P], steps [T, H], b and c [T, G * N]; fp32 or bf16, columns of wider matrices too.
    store one row of H * P * N numbers in each slot.
    Returns [T, H * P] fp32; rows of padding are not written.
    """
    heads = steps.shape[1]
    return _scan(x, steps, found, b, c, heads, heads // groups, b.shape[1] // groups, store, rows, out)


def scan_channels(
    x: Tensor, steps: Tensor, found: Selection, b: Tensor, c: Tensor, store: Store, rows: Rows, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    """`ref.scan_channels`, as `scan_heads`: x, steps [T, C], b and c [T, N] -> [T, C] fp32."""
    return _scan(x, steps, found, b, c, 1, 1, b.shape[1], store, rows, out)


def _scan(
    x: Tensor, steps: Tensor, found: Selection, b: Tensor, c: Tensor, heads: int, group: int, size: int, store: Store, rows: Rows,
    out: Tensor | None,
) -> Tensor:  # fmt: skip
    states, width = store.views[0], x.shape[1] // heads
    assert store.place.kind == "slot" and states.shape[2] == x.shape[1] * size
    assert all(part.stride(1) == 1 for part in (x, steps, b, c))
    if out is None:
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if not x.shape[0]:
        return out
    wide = triton.next_power_of_2(size)
    block = min(triton.next_power_of_2(width), max(1, _CELLS // wide))
    kernels.scan[(rows.num_requests, heads * triton.cdiv(width, block))](
        x, x.stride(0), steps, steps.stride(0), found.step_bias, found.decay, b, b.stride(0), c, c.stride(0), found.skip, out,
        states, states.stride(0), rows.starts, rows.stops, rows.first_rows, rows.slots, rows.slots.shape[1], store.place.column,
        *found.limits, HEADS=heads, GROUP=group, P=width, N=size, NW=wide, BLOCK=block, BY_CHANNEL=found.decay.dim() == 2,
        STORED_BF16=states.dtype == torch.bfloat16, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class GroupNorm:
    """A norm of each of `groups` equal parts of a row.   weight [inner] fp32.   before_gate  the gate multiplies its result."""

    weight: Tensor
    eps: float
    groups: int
    before_gate: bool


def gate_rows(
    y: Tensor, gate: Tensor, norm: GroupNorm | None, rows: Rows, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """y [T, inner] fp32 times silu of gate [T, inner], columns of a wider matrix too, and normed -> `dtype`.

    Rows of padding are zeros, whatever is in y.
    """
    num, inner = y.shape
    assert y.is_contiguous() and gate.stride(1) == 1
    if out is None:
        out = torch.empty(num, inner, dtype=dtype, device=y.device)
    size = min(inner, _GATED) if norm is None else inner // norm.groups
    wide = triton.next_power_of_2(size)
    if num:
        kernels.gate_rows[(num, triton.cdiv(inner, size))](
            y, gate, gate.stride(0), None if norm is None else norm.weight, out, rows.owners, 0.0 if norm is None else norm.eps,
            INNER=inner, SIZE=size, W=wide, NORMS=norm is not None, BEFORE=norm is not None and norm.before_gate,
            IS_BF16=dtype == torch.bfloat16, num_warps=_warps(wide), enable_fp_fusion=False,
        )  # fmt: skip
    return out


def norm_parts(x: Tensor, norms: tuple[tuple[Tensor, float], ...], dtype: torch.dtype) -> Tensor:
    """The parts of rows x [T, K], columns of a wider matrix too, that (weight, eps) norm, side by side -> `dtype`."""
    num, width = x.shape
    assert x.stride(1) == 1 and width == sum(weight.shape[0] for weight, _ in norms)
    out = torch.empty(num, width, dtype=dtype, device=x.device)
    first = 0
    for weight, eps in norms:
        size = weight.shape[0]
        wide = triton.next_power_of_2(size)
        if num:
            kernels.norm_rows[(num,)](
                x, x.stride(0), weight, out, eps, FIRST=first, SIZE=size, WIDTH=width, W=wide, IS_BF16=dtype == torch.bfloat16,
                num_warps=_warps(wide), enable_fp_fusion=False,
            )  # fmt: skip
        first += size
    return out


def _warps(wide: int) -> int:
    return min(8, max(1, wide // 256))
