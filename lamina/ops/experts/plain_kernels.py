# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Triton kernels of the routed experts whose weights are fp32, bf16, fp8 or MXFP4, and whatever is between their two products.
`plain.py` calls them and says what each buffer is. Orders of sums are as in `kernels.py`: they depend on no other token.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.experts.kernels import to_bf16
from lamina.ops.quantise.kernels import e4m3_to_fp32, round_bf16

#: rows of a tile of MXFP4 weights, and bytes of a tile and 64 columns
_TILE_ROWS, _STEP = tl.constexpr(64), tl.constexpr(2048)


@triton.jit
def _operand(tile, IS_CODES: tl.constexpr, MATHS: tl.constexpr, INTERPRET: tl.constexpr):
    """A tile as loaded -> as multiplied: fp8 as it is, everything else in bf16 or fp32."""
    if IS_CODES:
        if INTERPRET or MATHS != "fp8":
            tile = e4m3_to_fp32(tile)
        if not INTERPRET and MATHS == "codes":
            tile = tile.to(tl.bfloat16)
    elif INTERPRET or MATHS == "fp32":
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _plain_product(
    x, x_scales, row_of_x, live, weights, scales, expert, row, inside,
    K: tl.constexpr, MATRIX_ROWS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    MATHS: tl.constexpr, IS_CODES: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """[ROWS, TOKENS] fp32: rows `row` of an expert's matrix [MATRIX_ROWS, K] times rows `row_of_x` of x."""
    SCALE_COLUMNS: tl.constexpr = (K + 127) // 128
    within = tl.arange(0, BLOCK)
    weights += (expert * MATRIX_ROWS + row)[:, None] * K + within[None, :]
    x += row_of_x[:, None] * K + within[None, :]
    if IS_CODES:
        scales += (expert * ((MATRIX_ROWS + 127) // 128) + row // 128) * SCALE_COLUMNS
    if MATHS == "fp8":
        x_scales += row_of_x * SCALE_COLUMNS
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for k in tl.range(0, (K + BLOCK - 1) // BLOCK, num_stages=STAGES):
        own = live[:, None]
        of = inside[:, None]
        if K % BLOCK:
            own = own & (k * BLOCK + within < K)[None, :]
            of = of & (k * BLOCK + within < K)[None, :]
        tokens = tl.trans(_operand(tl.load(x + k * BLOCK, mask=own, other=0.0), MATHS == "fp8", MATHS, INTERPRET))
        matrix = _operand(tl.load(weights + k * BLOCK, mask=of, other=0.0), IS_CODES, MATHS, INTERPRET)
        if IS_CODES:  # a block of columns has one scale
            part = tl.dot(matrix, tokens, input_precision="ieee") * tl.load(scales + k, mask=inside, other=0.0)[:, None]
            if MATHS == "fp8":
                part *= tl.load(x_scales + k, mask=live, other=0.0)[None, :]
            total += part
        else:
            total = tl.dot(matrix, tokens, total, input_precision="ieee")
    return total


@triton.jit
def _packed_product(
    x, row_of_x, live, weights, scales, tile,
    K: tl.constexpr, TOKENS: tl.constexpr, MATHS: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """[64, TOKENS] fp32: a tile of 64 rows of MXFP4 times rows `row_of_x` of x. Weights and scales are exact in bf16."""
    STEPS: tl.constexpr = (K + 63) // 64
    row, byte = tl.arange(0, _TILE_ROWS), tl.arange(0, 32)
    weights += tile * (STEPS * _STEP) + row[:, None] * 32 + byte[None, :]
    scales += tile * (STEPS * 2 * _TILE_ROWS) + row
    x += row_of_x[:, None] * K + byte[None, :]
    total = tl.zeros((_TILE_ROWS, TOKENS), tl.float32)
    for k in tl.range(0, STEPS, num_stages=STAGES):
        low, high = to_bf16(tl.load(weights + k * _STEP), INTERPRET)
        first = tl.load(scales + k * (2 * _TILE_ROWS)).to(tl.int32)
        second = tl.load(scales + k * (2 * _TILE_ROWS) + _TILE_ROWS).to(tl.int32)
        before = tl.load(x + k * 64, mask=live[:, None], other=0.0)
        behind = live[:, None]
        if K % 64:
            behind = behind & (k * 64 + 32 + byte < K)[None, :]
        after = tl.load(x + k * 64 + 32, mask=behind, other=0.0)
        total = tl.dot(
            _times(low, first, MATHS, INTERPRET), tl.trans(_operand(before, False, MATHS, INTERPRET)), total,
            input_precision="ieee",
        )  # fmt: skip
        total = tl.dot(
            _times(high, second, MATHS, INTERPRET), tl.trans(_operand(after, False, MATHS, INTERPRET)), total,
            input_precision="ieee",
        )  # fmt: skip
    return total


@triton.jit
def _times(values, scale, MATHS: tl.constexpr, INTERPRET: tl.constexpr):
    """Values times the powers of two whose e8m0 bytes are given, one a row; the byte 0 (2^-127) reads as 0."""
    power = (scale << 23).to(tl.float32, bitcast=True)[:, None]
    if INTERPRET or MATHS == "fp32":
        return values.to(tl.float32) * power
    else:  # a branch that is compiled out, where what follows a return is not
        return values * power.to(tl.bfloat16)


@triton.jit
def plain_gate_up(
    x, x_scales, weights, scales, bias, shares, h, places, block_expert, block_first, block_rows, num_blocks,
    limit, alpha, shift,
    K: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_LIMIT: tl.constexpr, KIND: tl.constexpr, WEIGHS_INPUT: tl.constexpr, MATHS: tl.constexpr, IS_CODES: tl.constexpr,
    IS_PACKED: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """h[sorted place, INNER]: one block of tokens, ROWS of its columns; up's rows follow gate's.

    KIND  swiglu: silu(gate) * up * share.   scaled: gate * sigmoid(alpha * gate) * (up + shift) * share.
          relu2, silu: of up alone, there is no gate.   WEIGHS_INPUT  the share multiplies both products instead.
    """
    TILES: tl.constexpr = (INNER + ROWS - 1) // ROWS
    HAS_GATE: tl.constexpr = KIND == "swiglu" or KIND == "scaled"
    WIDE: tl.constexpr = 2 * INNER if HAS_GATE else INNER
    block = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    first = tl.load(block_first + block)
    slot = tl.arange(0, TOKENS)
    live = slot < tl.load(block_rows + block)
    place = tl.load(places + first + slot, mask=live, other=0)
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < INNER
    token = (place // TOP_K).to(tl.int64)
    share = tl.load(shares + place, mask=live, other=0.0)
    if IS_PACKED:
        gate = _packed_product(
            x, token, live, weights, scales, expert * ((1 + HAS_GATE) * TILES) + tile, K, TOKENS, MATHS, STAGES, INTERPRET
        )
    else:
        gate = _plain_product(
            x, x_scales, token, live, weights, scales, expert, row, inside,
            K, WIDE, ROWS, TOKENS, BLOCK, MATHS, IS_CODES, STAGES, INTERPRET,
        )  # fmt: skip
    if WEIGHS_INPUT:
        gate *= share[None, :]
    if bias is not None:
        bias += expert * WIDE
        gate += tl.load(bias + row, mask=inside, other=0.0)[:, None]
    if HAS_GATE:
        if IS_PACKED:
            up = _packed_product(
                x, token, live, weights, scales, expert * (2 * TILES) + TILES + tile, K, TOKENS, MATHS, STAGES, INTERPRET
            )
        else:
            up = _plain_product(
                x, x_scales, token, live, weights, scales, expert, row + INNER, inside,
                K, WIDE, ROWS, TOKENS, BLOCK, MATHS, IS_CODES, STAGES, INTERPRET,
            )  # fmt: skip
        if WEIGHS_INPUT:
            up *= share[None, :]
        if bias is not None:
            up += tl.load(bias + INNER + row, mask=inside, other=0.0)[:, None]
        if HAS_LIMIT:  # comparisons, so that a NaN stays one
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        if KIND == "swiglu":
            act = gate / (1 + tl.exp(-gate)) * up
        else:
            act = gate / (1 + tl.exp(-gate * alpha)) * (up + shift)
    elif KIND == "relu2":
        act = tl.where(gate < 0, 0.0, gate)
        act = act * act
    else:
        act = gate / (1 + tl.exp(-gate))
    if not WEIGHS_INPUT:
        act = act * share[None, :]
    if INTERPRET and h.dtype.element_ty == tl.bfloat16:
        act = round_bf16(act)
    out = h + (first + slot).to(tl.int64)[None, :] * INNER + row[:, None]
    tl.store(out, act.to(h.dtype.element_ty), mask=live[None, :] & inside[:, None])


@triton.jit
def plain_down(
    h, h_scales, weights, scales, bias, shares, partial, places, block_expert, block_first, block_rows, num_blocks,
    K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHS_INPUT: tl.constexpr, MATHS: tl.constexpr, IS_CODES: tl.constexpr, IS_PACKED: tl.constexpr, STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """partial[place, WIDTH] = h @ down + bias * share: one block of tokens, ROWS of its columns."""
    TILES: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    block = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    slot = tl.arange(0, TOKENS)
    live = slot < tl.load(block_rows + block)
    position = (tl.load(block_first + block) + slot).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < WIDTH
    if IS_PACKED:
        total = _packed_product(h, position, live, weights, scales, expert * TILES + tile, K, TOKENS, MATHS, STAGES, INTERPRET)
    else:
        total = _plain_product(
            h, h_scales, position, live, weights, scales, expert, row, inside,
            K, WIDTH, ROWS, TOKENS, BLOCK, MATHS, IS_CODES, STAGES, INTERPRET,
        )  # fmt: skip
    place = tl.load(places + position, mask=live, other=0).to(tl.int64)
    if bias is not None:
        beside = tl.load(bias + expert * WIDTH + row, mask=inside, other=0.0)[:, None]
        if not WEIGHS_INPUT:
            beside = beside * tl.load(shares + place, mask=live, other=0.0)[None, :]
        total += beside
    tl.store(partial + place[None, :] * WIDTH + row[:, None], total, mask=live[None, :] & inside[:, None])
