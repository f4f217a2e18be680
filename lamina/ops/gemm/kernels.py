# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Triton kernels of products with stored weights, of one weight or of two in one launch, and of a dense expert's SwiGLU.
`triton.py` calls them and chooses how they are cut.

MATHS says what the tensor cores multiply:
    fp8     codes of both                                      the product of a block of 128 columns, by one chain of
    codes   the same codes expanded to bf16                    instructions from zero, times the scales of both, is added
    wide    codes of the weight expanded to bf16, x in bf16    over the blocks in ascending order
    bf16    both as they are                                   one chain of instructions over all columns
    fp32    both in fp32, no tensor cores                      the same
So a sum's order depends neither on the tile nor on the other rows. With SPLITS > 1, a power of two, it is cut in so many ranges
of columns, a function of the weight's shape alone; whichever program of a tile arrives last adds the two of each pair, and the
pairs in ascending order.

With AHEAD a kernel lets the next one start early, and waits itself for the one before: whatever it reads or writes but weights
comes after that.

INTERPRET marks Triton's CPU interpreter, which has no fp8, no inline assembly and no bf16: same values by other means.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from lamina.ops.quantise.kernels import e4m3_to_fp32, power, quantise_e4m3, round_bf16, rounded


@triton.jit
def _to_bf16(codes):
    """e4m3 codes (uint8) as bf16, exact: the bits placed read as e4m3 * 2^-120, times 2^120."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, a, b, m, z;
        mov.b32 m, 0x7b807b80;
        mov.b32 z, 0x80008000;
        prmt.b32 t, $2, 0, 0x4140;
        shl.b32 a, t, 4;
        and.b32 a, a, 0x07f007f0;
        shl.b32 b, t, 8;
        lop3.b32 a, b, 0x80008000, a, 0xEA;
        fma.rn.bf16x2 $0, a, m, z;
        prmt.b32 t, $2, 0, 0x4342;
        shl.b32 a, t, 4;
        and.b32 a, a, 0x07f007f0;
        shl.b32 b, t, 8;
        lop3.b32 a, b, 0x80008000, a, 0xEA;
        fma.rn.bf16x2 $1, a, m, z;
        }""",
        "=&r,=&r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _operand(tile, IS_CODES: tl.constexpr, MATHS: tl.constexpr, INTERPRET: tl.constexpr):
    """A tile as loaded -> as multiplied."""
    if IS_CODES:
        if INTERPRET or MATHS == "fp32":
            tile = e4m3_to_fp32(tile)
        elif MATHS != "fp8":
            tile = _to_bf16(tile)
    elif INTERPRET or MATHS == "fp32":
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _product(
    x, x_scales, weights, w_scales, token, live, row, inside, group, scale_row, first,
    K: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    MATHS: tl.constexpr, W_CODES: tl.constexpr, TOKENS_FIRST: tl.constexpr, EVEN_ROWS: tl.constexpr,
    SHARE_SCALE: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """fp32 [TOKENS, ROWS] if TOKENS_FIRST, else [ROWS, TOKENS]: blocks first .. first + PER of one group's columns.

    token, live [TOKENS]; row, inside [ROWS], rows of the whole weight.   scale_row  a number if SHARE_SCALE, else [ROWS].
    """
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    EVEN_K: tl.constexpr = K % BLOCK == 0 and BLOCKS % PER == 0
    X_CODES: tl.constexpr = MATHS == "fp8" or MATHS == "codes"
    SCALE_BLOCKS: tl.constexpr = (K + 127) // 128
    X_SCALE_BLOCKS: tl.constexpr = (GROUPS * K + 127) // 128
    IS_CHAIN: tl.constexpr = not W_CODES
    column = tl.arange(0, BLOCK)
    x += token.to(tl.int64)[:, None] * (GROUPS * K) + group * K + first * BLOCK + column[None, :]
    weights += row.to(tl.int64)[:, None] * K + first * BLOCK + column[None, :]
    if TOKENS_FIRST:
        total = tl.zeros((TOKENS, ROWS), tl.float32)
    else:
        total = tl.zeros((ROWS, TOKENS), tl.float32)
    for k in tl.range(0, PER, num_stages=STAGES):
        if EVEN_K:
            x_tile = tl.load(x + k * BLOCK, mask=live[:, None], other=0.0)
            if EVEN_ROWS:
                w_tile = tl.load(weights + k * BLOCK)
            else:
                w_tile = tl.load(weights + k * BLOCK, mask=inside[:, None], other=0.0)
        else:
            is_in = (first + k) * BLOCK + column < K
            x_tile = tl.load(x + k * BLOCK, mask=live[:, None] & is_in[None, :], other=0.0)
            w_tile = tl.load(weights + k * BLOCK, mask=inside[:, None] & is_in[None, :], other=0.0)
        x_tile = _operand(x_tile, X_CODES, MATHS, INTERPRET)
        w_tile = _operand(w_tile, W_CODES, MATHS, INTERPRET)
        if IS_CHAIN:
            if TOKENS_FIRST:
                total = tl.dot(x_tile, tl.trans(w_tile), total, input_precision="ieee")
            else:
                total = tl.dot(w_tile, tl.trans(x_tile), total, input_precision="ieee")
        else:
            at = tl.minimum(first + k, BLOCKS - 1)
            share = tl.load(w_scales + scale_row * SCALE_BLOCKS + at * BLOCK // 128)
            if TOKENS_FIRST:
                block = tl.dot(x_tile, tl.trans(w_tile), input_precision="ieee")
            else:
                block = tl.dot(w_tile, tl.trans(x_tile), input_precision="ieee")
            if X_CODES:
                of_x = x_scales + token.to(tl.int64) * X_SCALE_BLOCKS + (group * K + at * BLOCK) // 128
                x_share = tl.load(of_x, mask=live, other=0.0)
            else:
                x_share = tl.full((TOKENS,), 1.0, tl.float32)
            if TOKENS_FIRST:
                if not SHARE_SCALE:
                    share = share[None, :]
                total += block * (x_share[:, None] * share)
            else:
                if not SHARE_SCALE:
                    share = share[:, None]
                total += block * (x_share[None, :] * share)
    return total


@triton.jit
def _store(out, total, mask):
    kept = out.dtype.element_ty
    if kept == tl.bfloat16:
        total = round_bf16(total)  # what the cast does, but the interpreter's truncates
    tl.store(out, total.to(kept), mask=mask)


@triton.jit
def _added(partial, mask, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    """The sum of all ranges: of pairs, in ascending order."""
    total = tl.load(partial, mask=mask, other=0.0, cache_modifier=".cg")
    if SPLITS > 1:
        total += tl.load(partial + SIZE, mask=mask, other=0.0, cache_modifier=".cg")
    for s in tl.static_range(2, SPLITS, 2):
        pair = tl.load(partial + s * SIZE, mask=mask, other=0.0, cache_modifier=".cg")
        pair += tl.load(partial + (s + 1) * SIZE, mask=mask, other=0.0, cache_modifier=".cg")
        total += pair
    return total


@triton.jit
def _fetch(weights, row, first, K: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Asks L2 for blocks first .. first + BLOCKS of rows that are whole, 128 bytes at a time."""
    LINES: tl.constexpr = BLOCK * BLOCKS * weights.dtype.element_ty.primitive_bitwidth // 1024
    at = weights + row.to(tl.int64)[:, None] * K + first * BLOCK + (tl.arange(0, LINES) * (BLOCK * BLOCKS // LINES))[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _kept(value, column, inside, values, codes, scales, row, WIDTH: tl.constexpr, IS_BF16: tl.constexpr, FP8: tl.constexpr):
    """Stores fp32 [.., 128] rounded to the activation's type and, if FP8, its codes and scale."""
    value = rounded(value, IS_BF16)
    at = row.to(tl.int64)[:, None] * WIDTH + column
    tl.store(values + at, value.to(values.dtype.element_ty), mask=inside)
    if FP8:
        code, byte = quantise_e4m3(value, 1)
        tl.store(codes + at, code, mask=inside)
        return power(byte)
    return tl.zeros_like(row).to(tl.float32)


@triton.jit
def _tile(
    x, x_scales, weights, w_scales, out, codes, scales, partial, counters, num_tokens, out_stride, program,
    OUT: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, MATHS: tl.constexpr, W_CODES: tl.constexpr, TOKENS_FIRST: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, QUANTISES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One tile of out [T, GROUPS * OUT], or one range of its columns: 16 tiles of tokens side by side, then the next rows.

    QUANTISES  the last of all programs of 128 rows of the weight stores the result's codes and scales too; OUT is whole blocks.
    """
    TILES: tl.constexpr = (OUT + ROWS - 1) // ROWS  # of a group
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    PER: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    EVEN_ROWS: tl.constexpr = OUT % ROWS == 0
    SHARE_SCALE: tl.constexpr = ROWS <= 128 and (GROUPS == 1 or OUT % 128 == 0)
    UNITS: tl.constexpr = GROUPS * TILES * SPLITS
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    band = program // (16 * UNITS)
    width = tl.minimum(token_tiles - band * 16, 16)
    within = program - band * (16 * UNITS)
    token_tile = band * 16 + within % width
    unit = within // width
    split = unit % SPLITS
    tile = unit // SPLITS
    group = tile // TILES
    first_row = group * OUT + tile % TILES * ROWS
    row = first_row + tl.arange(0, ROWS)
    inside = row < (group + 1) * OUT
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    live = token < num_tokens
    if SHARE_SCALE:
        scale_row = first_row // 128
    else:
        scale_row = tl.minimum(row, GROUPS * OUT - 1) // 128
    if AHEAD:  # the kernel before may still run: x is not yet there, the weights are
        gdc_launch_dependents()
        if EVEN_ROWS and K % (BLOCK * PER) == 0 and PER & (PER - 1) == 0:
            _fetch(weights, row, split * PER, K, BLOCK, min(PER, 8))
        gdc_wait()
    total = _product(
        x, x_scales, weights, w_scales, token, live, row, inside, group, scale_row, split * PER,
        K, GROUPS, BLOCK, PER, TOKENS, ROWS, MATHS, W_CODES, TOKENS_FIRST, EVEN_ROWS, SHARE_SCALE, STAGES, INTERPRET,
    )  # fmt: skip
    out_start = out
    if TOKENS_FIRST:
        out += token.to(tl.int64)[:, None] * out_stride + row[None, :]
        mask = live[:, None] & inside[None, :]
        own = tl.arange(0, TOKENS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    else:
        out += token.to(tl.int64)[None, :] * out_stride + row[:, None]
        mask = live[None, :] & inside[:, None]
        own = tl.arange(0, TOKENS)[None, :] * ROWS + tl.arange(0, ROWS)[:, None]
    SIZE: tl.constexpr = TOKENS * ROWS
    if QUANTISES:
        JOINED: tl.constexpr = 128 // ROWS  # tiles of a block
        place = tile // JOINED * token_tiles + token_tile
        partial += place.to(tl.int64) * (JOINED * SPLITS * SIZE)
        tl.store(partial + (tile % JOINED * SPLITS + split) * SIZE + own, total, mask=mask, cache_modifier=".cg")
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + place, 1, sem="acq_rel", scope="gpu")
        if arrived == JOINED * SPLITS - 1:
            within_block = tl.arange(0, 128)
            of_tile = within_block // ROWS * (SPLITS * SIZE) + within_block % ROWS
            added = _added(partial + of_tile[None, :] + tl.arange(0, TOKENS)[:, None] * ROWS, live[:, None], SPLITS, SIZE)
            IS_BF16: tl.constexpr = out_start.dtype.element_ty == tl.bfloat16
            column = tile // JOINED * 128 + within_block
            WIDTH: tl.constexpr = GROUPS * OUT
            scale = _kept(added, column[None, :], live[:, None], out_start, codes, scales, token, WIDTH, IS_BF16, True)
            tl.store(scales + token.to(tl.int64) * (WIDTH // 128) + tile // JOINED, scale, mask=live)
            tl.store(counters + place, 0)
    elif SPLITS == 1:
        _store(out, total, mask)
    else:
        place = tile * token_tiles + token_tile
        partial += place.to(tl.int64) * (SPLITS * SIZE) + own
        tl.store(partial + split * SIZE, total, mask=mask, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's part is written before one of them says so
        arrived = tl.atomic_add(counters + place, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            _store(out, _added(partial, mask, SPLITS, SIZE), mask)
            tl.store(counters + place, 0)  # for the next launch


@triton.jit(do_not_specialize=["num_tokens"])
def linear(
    x, x_scales, weights, w_scales, out, codes, scales, partial, counters, num_tokens, out_stride,
    OUT: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, MATHS: tl.constexpr, W_CODES: tl.constexpr, TOKENS_FIRST: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, QUANTISES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """out [T, GROUPS * OUT]: of each group its K columns of x times its OUT rows of the weight."""
    _tile(
        x, x_scales, weights, w_scales, out, codes, scales, partial, counters, num_tokens, out_stride, tl.program_id(0),
        OUT, K, GROUPS, BLOCK, TOKENS, ROWS, SPLITS, MATHS, W_CODES, TOKENS_FIRST, STAGES, AHEAD, QUANTISES, INTERPRET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def linear_pair(
    x_codes, x_scales, x_values, weights, w_scales, wide_weights, out, wide_out, partial, wide_partial, counters,
    num_tokens, out_stride, wide_stride,
    OUT: tl.constexpr, WIDE_OUT: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WIDE_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, WIDE_SPLITS: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Two products of the same rows, codes with an fp8 weight and values with a bf16 one: tiles of the second come first."""
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    wide_tiles = (WIDE_OUT + ROWS - 1) // ROWS * token_tiles
    if tl.program_id(0) < wide_tiles * WIDE_SPLITS:
        _tile(
            x_values, x_scales, wide_weights, w_scales, wide_out, wide_out, wide_out, wide_partial, counters, num_tokens,
            wide_stride, tl.program_id(0), WIDE_OUT, K, 1, WIDE_BLOCK, TOKENS, ROWS, WIDE_SPLITS, "bf16", False, False, STAGES,
            AHEAD, False, INTERPRET,
        )  # fmt: skip
    else:
        _tile(
            x_codes, x_scales, weights, w_scales, out, out, out, partial, counters + wide_tiles, num_tokens, out_stride,
            tl.program_id(0) - wide_tiles * WIDE_SPLITS, OUT, K, 1, BLOCK, TOKENS, ROWS, SPLITS, "fp8", True, False, STAGES,
            AHEAD, False, INTERPRET,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_items"])
def swiglu(
    h, values, codes, scales, num_items, limit,
    INNER: tl.constexpr, HAS_LIMIT: tl.constexpr, IS_BF16: tl.constexpr, FP8: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Rows [gate | up] of h -> silu(gate) * up: ITEMS blocks of 128 columns a program."""
    BLOCKS: tl.constexpr = (INNER + 127) // 128
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row, column = item // BLOCKS, (item % BLOCKS * 128)[:, None] + tl.arange(0, 128)[None, :]
    inside = (item < num_items)[:, None] & (column < INNER)
    h += row.to(tl.int64)[:, None] * (2 * INNER) + column
    gate = tl.load(h, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h + INNER, mask=inside, other=0.0).to(tl.float32)
    if HAS_LIMIT:  # comparisons, so that a NaN stays one
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    act = gate / (1 + tl.exp(-gate)) * up
    scale = _kept(act, column, inside, values, codes, scales, row, INNER, IS_BF16, FP8)
    if FP8:
        tl.store(scales + item, scale, mask=item < num_items)
