# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""The Triton kernel between the two products of a feed-forward layer: ITEMS blocks of 128 columns a program."""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.quantise.kernels import power, quantise_e4m3, rounded
from lamina.ops.rope_norm.kernels import store_as


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        x = x / (1 + tl.exp(-x))
    elif ACTIVATION == "relu2":
        x = tl.where(x < 0, 0.0, x)  # a comparison, so that a NaN stays one
        x = x * x
    else:
        x = x / (1 + tl.exp((x * x * 0.044715 + 1.0) * x * -1.5957691216057308))
    return x


@triton.jit(do_not_specialize=["num_items"])
def gated(
    h, bias, values, codes, scales, num_items, multiplier,
    INNER: tl.constexpr, HAS_GATE: tl.constexpr, ACTIVATION: tl.constexpr, IS_BF16: tl.constexpr, IS_FP8: tl.constexpr,
    ITEMS: tl.constexpr,
):  # fmt: skip
    """Rows [gate | up] of h, or [up], with their bias."""
    BLOCKS: tl.constexpr = (INNER + 127) // 128
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row, column = (item // BLOCKS).to(tl.int64), (item % BLOCKS * 128)[:, None] + tl.arange(0, 128)[None, :]
    inside = (item < num_items)[:, None] & (column < INNER)
    WIDE: tl.constexpr = 2 * INNER if HAS_GATE else INNER
    at = row[:, None] * WIDE + column
    x = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + column, mask=inside, other=0.0)
    if HAS_GATE:
        up = tl.load(h + at + INNER, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            up += tl.load(bias + INNER + column, mask=inside, other=0.0)
        x = activated(x * multiplier, ACTIVATION) * up
    else:
        x = activated(x, ACTIVATION)
    x = rounded(tl.where(inside, x, 0.0), IS_BF16)
    to = row[:, None] * INNER + column
    store_as(values + to, x, inside)
    if IS_FP8:
        code, byte = quantise_e4m3(x, 1)
        tl.store(codes + to, code, mask=inside)
        tl.store(scales + item, power(byte), mask=item < num_items)
