# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Activations to fp8 on a GPU.

quantise_rows(values)   the rows with codes and a power of two for every 128 columns, as `quantise_fp8(values, 128)`.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.gemm.stored import BLOCK, Activation
from lamina.ops.quantise.kernels import power, quantise_e4m3

#: blocks of 128 a program
_ITEMS = 8


def quantise_rows(values: Tensor) -> Activation:
    """values [T, K] bf16 or fp32, contiguous -> the same rows with codes and scales; a block with an infinity or NaN is NaN."""
    rows, width = values.shape
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=values.device)
    scales = torch.empty(rows, -(-width // BLOCK), dtype=torch.float32, device=values.device)
    items = scales.numel()
    if items:
        _quantise[(triton.cdiv(items, _ITEMS),)](values, codes.view(torch.uint8), scales, items, WIDTH=width, ITEMS=_ITEMS)
    return Activation(values, codes, scales)


@triton.jit(do_not_specialize=["num_items"])
def _quantise(values, codes, scales, num_items, WIDTH: tl.constexpr, ITEMS: tl.constexpr):
    BLOCKS: tl.constexpr = (WIDTH + 127) // 128
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    column = (item % BLOCKS * 128)[:, None] + tl.arange(0, 128)[None, :]
    inside = (item < num_items)[:, None] & (column < WIDTH)
    at = (item // BLOCKS).to(tl.int64)[:, None] * WIDTH + column
    code, byte = quantise_e4m3(tl.load(values + at, mask=inside, other=0.0).to(tl.float32), 1)
    tl.store(codes + at, code, mask=inside)
    tl.store(scales + item, power(byte), mask=item < num_items)
