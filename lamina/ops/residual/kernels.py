# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""The Triton kernel of what lies between two parts; one program a row, which lies in a tile [BLOCKS, 128]."""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.quantise.kernels import power, quantise_e4m3, rounded
from lamina.ops.rope_norm.kernels import inverse_root, store_as


@triton.jit
def _normed(x, weight, column, inside, eps, D: tl.constexpr, CENTRES: tl.constexpr):
    if CENTRES:
        x = tl.where(inside, x - tl.sum(tl.sum(x, 1), 0) * (1.0 / D), 0.0)
    x = x * inverse_root(tl.sum(tl.sum(x * x, 1), 0), eps, D)
    if weight is not None:
        x = x * tl.load(weight + column, mask=inside, other=0.0)
    return x


@triton.jit
def join(
    x, found, bias, after, before, out, codes, scales, after_eps, before_eps, scale, kept,
    D: tl.constexpr, BLOCKS: tl.constexpr, HAS_AFTER: tl.constexpr, AFTER_CENTRES: tl.constexpr, HAS_BEFORE: tl.constexpr,
    BEFORE_CENTRES: tl.constexpr, KEEPS_OLD: tl.constexpr, KEEPS_NORMED: tl.constexpr, IS_BF16: tl.constexpr,
    IS_LAST: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """x is overwritten by the new residual; out, codes and scales get the next part's input. IS_LAST: x is not needed again."""
    row = tl.program_id(0).to(tl.int64)
    COUNT: tl.constexpr = (D + 127) // 128
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < D
    at = row * D + column
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if found is not None:
        value = tl.load(found + at, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + column, mask=inside, other=0.0)
        value = rounded(value, IS_BF16)
        if HAS_AFTER:
            value = rounded(_normed(value, after, column, inside, after_eps, D, AFTER_CENTRES), IS_BF16)
        value = value * scale
        if KEEPS_OLD:
            value = total * kept + value
        total = rounded(value, IS_BF16)
        if not (IS_LAST or KEEPS_NORMED):
            store_as(x + at, total, inside)
    if HAS_BEFORE:
        total = _normed(total, before, column, inside, before_eps, D, BEFORE_CENTRES)
    if not IS_LAST:
        total = rounded(total, IS_BF16)
    store_as(out + at, total, inside)
    if KEEPS_NORMED and not IS_LAST:
        store_as(x + at, total, inside)
    if IS_FP8:
        code, byte = quantise_e4m3(total, 1)
        tl.store(codes + at, code, mask=inside)
        tl.store(scales + row * COUNT + block, power(byte), mask=block < COUNT)
