"""Causal convolutions of channels on a GPU. `ref.py` is the definition.

    convolve(x, taps, bias, store, rows, dtype)   [T, C] in `dtype`; keeps the last inputs in the ring
    refuses(machine)                              why they are not served, or None

One launch where every request has one row (decode), else a second one that writes the rings, which the first one reads. A row's
bits depend on its W inputs alone.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.conv import kernels
from lamina.ops.rope_norm.triton import refuses_machine as refuses
from lamina.ops.rows import Rows
from lamina.ops.store import Store

__all__ = ["convolve", "refuses"]

_BLOCK = 512


def convolve(
    x: Tensor, taps: Tensor, bias: Tensor | None, store: Store, rows: Rows, dtype: torch.dtype, activates: bool = True,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each row's convolution with its request's past, which is read from the store; then the store has the last inputs.

    x      [T, C] fp32 or bf16, columns of a wider matrix too.   taps [W, C] fp32, oldest first.   bias [C] fp32 or None.
    store  a ring of at least W rows in a slot.   activates  silu of the sum.
    Returns  [T, C] in `dtype`, contiguous; rows of padding are zeros.
    """
    width, channels = taps.shape
    ring, num = store.views[0], x.shape[0]
    assert store.place.kind == "slot" and store.rows_per_page >= width and x.stride(1) == 1 and taps.is_contiguous()
    if out is None:
        out = torch.empty(num, channels, dtype=dtype, device=x.device)
    if not num:
        return out
    block = min(_BLOCK, triton.next_power_of_2(channels))
    grid = (num, triton.cdiv(channels, block))
    slots = (rows.slots, rows.slots.shape[1], store.place.column)
    kernels.convolve[grid](
        x, x.stride(0), taps, bias, out, ring, ring.stride(0), rows.positions, rows.owners, rows.starts, rows.valid_from, *slots,
        C=channels, WIDTH=width, RING=store.rows_per_page, BLOCK=block, ACTIVATES=activates, IS_SINGLE=rows.is_single,
        STORED_BF16=ring.dtype == torch.bfloat16, enable_fp_fusion=False,
    )  # fmt: skip
    if not rows.is_single:
        kernels.keep[grid](
            x, x.stride(0), ring, ring.stride(0), rows.positions, rows.owners, rows.stops, *slots,
            C=channels, RING=store.rows_per_page, BLOCK=block,
        )  # fmt: skip
    return out
