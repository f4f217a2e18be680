# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Norms and rotations on rows held in registers, for the kernels of this op and of others, and this op's own kernels.

A row of D values lies in a tile [rows, W] of a power of two W, with zeros past D. What is no sum over a row has the very
operations of `ref.py` in their order, without fused multiply-adds (kernels are launched with enable_fp_fusion=False).
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.quantise.kernels import power, quantise_e4m3, round_bf16, rounded

#: Triton's CPU interpreter, whose cast to bf16 cuts bits off
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def store_as(pointer, x, mask):
    """Stores fp32 x in the pointer's type, to nearest even."""
    if INTERPRETED and pointer.dtype.element_ty == tl.bfloat16:
        x = round_bf16(x)
    tl.store(pointer, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def inverse_root(total, eps, D: tl.constexpr):
    """1 over the root mean square of D values whose squares add up to `total`, rounded as IEEE says: the same on every GPU."""
    return tl.div_rn(1.0, tl.sqrt_rn(total * (1.0 / D) + eps))


@triton.jit
def normed(x, eps, D: tl.constexpr):
    """x [rows, W] over its root mean square."""
    return x * inverse_root(tl.sum(x * x, 1), eps, D)[:, None]


@triton.jit
def turns(cos, sin, D: tl.constexpr, ROPE: tl.constexpr, W: tl.constexpr):
    """cos and sin of every pair of a row, from its ROPE / 2 values: loaded ahead of the row's sums."""
    pair = tl.arange(0, W // 2)[None, :] - (D - ROPE) // 2
    is_turned = (pair >= 0) & (pair < ROPE // 2)
    return tl.load(cos + pair, mask=is_turned, other=1.0), tl.load(sin + pair, mask=is_turned, other=0.0)


@triton.jit
def rotated(x, turn, D: tl.constexpr, ROPE: tl.constexpr):
    """x [rows, W] with the pairs of columns D - ROPE .. D turned; the others keep their bits, a zero its sign."""
    rows: tl.constexpr = x.shape[0]
    pairs: tl.constexpr = x.shape[1] // 2
    pair = tl.arange(0, pairs)[None, :] - (D - ROPE) // 2
    is_turned = (pair >= 0) & (pair < ROPE // 2)
    first, second = x.reshape(rows, pairs, 2).split()
    turned = tl.where(is_turned, first * turn[0] - second * turn[1], first)
    second = tl.where(is_turned, second * turn[0] + first * turn[1], second)
    return tl.join(turned, second).reshape(rows, 2 * pairs)


@triton.jit
def rotations(positions, inv_freq, cos, sin, num, RATIO: tl.constexpr, PAIRS: tl.constexpr, SIZE: tl.constexpr):
    """cos, sin [T, PAIRS] of num = T * PAIRS angles: an fp32 product, exact positions up to 2^24."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < num
    position = tl.load(positions + at // PAIRS, mask=inside, other=0)
    angle = (position // RATIO * RATIO).to(tl.float32) * tl.load(inv_freq + at % PAIRS, mask=inside, other=0.0)
    tl.store(cos + at, tl.cos(angle), mask=inside)
    tl.store(sin + at, tl.sin(angle), mask=inside)


@triton.jit
def low_rank_row(
    x, x_stride, weight, values, codes, scales, row, eps,
    K: tl.constexpr, BLOCKS: tl.constexpr, IS_BF16: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """One row of K values: rounded, norm, rounded, and as fp8 with a scale every 128. BLOCKS: a power of two."""
    COUNT: tl.constexpr = (K + 127) // 128
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < K
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0)
    value = rounded(value, IS_BF16)
    total = tl.sum(tl.sum(value * value, 1), 0)
    value = rounded(value * inverse_root(total, eps, K) * gain, IS_BF16)
    store_as(values + row * K + column, value, inside)
    if IS_FP8:
        code, byte = quantise_e4m3(value, 1)
        tl.store(codes + row * K + column, code, mask=inside)
        tl.store(scales + row * COUNT + block, power(byte), mask=block < COUNT)


@triton.jit
def norm_quantise(
    x, x_stride, weight, values, codes, scales, eps,
    K: tl.constexpr, BLOCKS: tl.constexpr, IS_BF16: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    low_rank_row(x, x_stride, weight, values, codes, scales, row, eps, K, BLOCKS, IS_BF16, IS_FP8)


@triton.jit
def query_heads(
    q, q_stride, out, cos, sin, row, first, eps,
    HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """GROUP heads of one row from head `first` on: norm without weight, rotation."""
    head = first + tl.arange(0, GROUP)
    column = tl.arange(0, W)
    inside = (head < HEADS)[:, None] & (column < D)[None, :]
    own = head[:, None] * D + column[None, :]
    x = tl.load(q + row * q_stride + own, mask=inside, other=0.0).to(tl.float32)
    turn = turns(cos + row * (ROPE // 2), sin + row * (ROPE // 2), D, ROPE, W)
    x = rotated(normed(x, eps, D), turn, D, ROPE)
    store_as(out + row * (HEADS * D) + own, x, inside)


@triton.jit
def query_norm_rope(
    q, q_stride, out, cos, sin, eps,
    HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One program for GROUP heads of a row."""
    TILES: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    row = (tl.program_id(0) // TILES).to(tl.int64)
    query_heads(q, q_stride, out, cos, sin, row, tl.program_id(0) % TILES * GROUP, eps, HEADS, D, ROPE, GROUP, W)
