# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Triton kernels of the routed experts: align, quantise, gate-up, down, sum. `triton.py` calls them and says what each buffer is;
`packed.py` has the layout of the weights. `plain_kernels.py` reads weights of any other format, for `plain.py`.

A token is a *column* of every product: weights [64 .. 256 rows] x tokens [16 or more], so that few tokens fill the tensor cores.
All sums have one order: of a block of 128 columns by one chain of instructions from zero (rebased; else of each group of 32,
times its scale), times the activations' scale, added over the blocks. It depends neither on the tile nor on the other tokens.

INTERPRET marks Triton's CPU interpreter, which has no inline assembly and no bf16: same values by other means.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.quantise.kernels import round_bf16

#: bytes of a tile and block, and of half of it
_TILE, _HALF = tl.constexpr(4096), tl.constexpr(2048)


@triton.jit
def _decode(packed, HIGH: tl.constexpr):
    """Magnitude and sign of one plane, by plain arithmetic on whole words: [rows, 32] int32 each."""
    rows: tl.constexpr = packed.shape[0]
    n = tl.arange(0, 4)[None, None, :]
    word = tl.sum(packed.to(tl.int32).reshape(rows, 8, 4) << (8 * n), 2)[:, :, None]
    magnitude = (word >> (4 * n + 16 * HIGH)) & 7
    sign = (word >> (8 * n + 7 - 4 * HIGH)) & 1
    return magnitude.reshape(rows, 32), sign.reshape(rows, 32)


@triton.jit
def _look_up(packed, HIGH: tl.constexpr, table, next_table):
    magnitude, sign = _decode(packed, HIGH)
    code = tl.where(magnitude < 4, table >> (8 * magnitude), next_table >> (8 * (magnitude - 4))) & 0xFF
    return (code | (sign << 7)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _to_fp8(packed, INTERPRET: tl.constexpr):
    """Both planes as e4m3, at their own size. A permutation looks four magnitudes up at a time: 7 instructions for 8 weights."""
    if INTERPRET:
        low = _look_up(packed, 0, 0x3C383000, 0x4C484440)
        high = _look_up(packed, 1, 0x3C383000, 0x4C484440)
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            and.b32 a, $2, 0x77777777;
            prmt.b32 b, 0x3C383000, 0x4C484440, a;
            shr.b32 a, a, 16;
            prmt.b32 a, 0x3C383000, 0x4C484440, a;
            shl.b32 c, $2, 4;
            lop3.b32 $0, $2, 0x80808080, b, 0xEA;
            lop3.b32 $1, c, 0x80808080, a, 0xEA;
            }""",
            "=&r,=&r,r",
            [packed],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
        low = low.to(tl.float8e4nv, bitcast=True)
        high = high.to(tl.float8e4nv, bitcast=True)
    return low, high


@triton.jit
def _to_scaled_fp8(packed, low_table, low_next, high_table, high_next, INTERPRET: tl.constexpr):
    """Both planes as e4m3 times the scale of their group: the tables [rows, 1] hold the eight magnitudes already scaled."""
    if INTERPRET:
        low = _look_up(packed, 0, low_table, low_next)
        high = _look_up(packed, 1, high_table, high_next)
    else:
        zero = tl.zeros_like(packed).to(tl.int32)  # an operand of an elementwise instruction for each weight; one register a row
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            and.b32 a, $2, 0x77777777;
            prmt.b32 b, $3, $7, a;
            shr.b32 a, a, 16;
            prmt.b32 a, $11, $15, a;
            shl.b32 c, $2, 4;
            lop3.b32 $0, $2, 0x80808080, b, 0xEA;
            lop3.b32 $1, c, 0x80808080, a, 0xEA;
            }""",
            "=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [packed, low_table + zero, low_next + zero, high_table + zero, high_next + zero],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
        low = low.to(tl.float8e4nv, bitcast=True)
        high = high.to(tl.float8e4nv, bitcast=True)
    return low, high


@triton.jit
def to_bf16(packed, INTERPRET: tl.constexpr):
    """Both nibbles of each byte as bf16 (fp32 in the interpreter), exact: the bits placed read as e2m1 * 2^-126, times 2^126."""
    if INTERPRET:
        wide = packed.to(tl.int32)
        low = (((wide & 0x08) << 28) | ((wide & 0x07) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
        high = (((wide & 0x80) << 24) | ((wide & 0x70) << 18)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:  # each byte by itself: the operands' layout need not keep four neighbours together
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u, a, b, c, d, m, z;
            mov.b32 m, 0x7e807e80;
            mov.b32 z, 0x80008000;
            prmt.b32 t, $4, 0, 0x4140;
            prmt.b32 u, $4, 0, 0x4342;
            shl.b32 a, t, 6;
            and.b32 a, a, 0x01c001c0;
            shl.b32 b, t, 12;
            lop3.b32 a, b, 0x80008000, a, 0xEA;
            shl.b32 b, u, 6;
            and.b32 b, b, 0x01c001c0;
            shl.b32 c, u, 12;
            lop3.b32 b, c, 0x80008000, b, 0xEA;
            shl.b32 c, t, 2;
            and.b32 c, c, 0x01c001c0;
            shl.b32 d, t, 8;
            lop3.b32 c, d, 0x80008000, c, 0xEA;
            shl.b32 d, u, 2;
            and.b32 d, d, 0x01c001c0;
            shl.b32 t, u, 8;
            lop3.b32 d, t, 0x80008000, d, 0xEA;
            fma.rn.bf16x2 $0, a, m, z;
            fma.rn.bf16x2 $1, b, m, z;
            fma.rn.bf16x2 $2, c, m, z;
            fma.rn.bf16x2 $3, d, m, z;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def _scale(word, GROUP: tl.constexpr):
    """fp32 of the e8m0 byte GROUP of each word; the byte 0 (2^-127) reads as 0."""
    if GROUP < 3:
        bits = word << (23 - 8 * GROUP)
    else:
        bits = word >> 1
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _tables(word, GROUP: tl.constexpr):
    """e4m3 codes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, times 2^(binades - 5), in two words for each row: [rows, 1] int32."""
    step = ((word >> (8 * GROUP)) & 0xFF)[:, None]
    return step * 0x01010100 + 0x14100800, step * 0x01010101 + 0x24201C18


@triton.jit
def _half(
    total, weights, word, x_low, x_high, HALF: tl.constexpr, FP8: tl.constexpr, REBASED: tl.constexpr, INTERPRET: tl.constexpr
):
    """total + the products of 64 columns: two groups of 32, each with its own scale."""
    packed = tl.load(weights + HALF * _HALF)
    if REBASED:
        low_table, low_next = _tables(word, 2 * HALF)
        high_table, high_next = _tables(word, 2 * HALF + 1)
        low, high = _to_scaled_fp8(packed, low_table, low_next, high_table, high_next, INTERPRET)
        total = tl.dot(low, x_low, total, input_precision="ieee")
        total = tl.dot(high, x_high, total, input_precision="ieee")
    else:
        if FP8:
            low, high = _to_fp8(packed, INTERPRET)
        else:
            low, high = to_bf16(packed, INTERPRET)
        total += tl.dot(low, x_low, input_precision="ieee") * _scale(word, 2 * HALF)[:, None]
        total += tl.dot(high, x_high, input_precision="ieee") * _scale(word, 2 * HALF + 1)[:, None]
    return total


@triton.jit
def _columns(x, live, GROUP: tl.constexpr):
    """[32, tokens] of group GROUP of a block: x points at [tokens, 32]; no row of a dead token is read."""
    return tl.trans(tl.load(x + GROUP * 32, mask=live[:, None], other=0.0))


@triton.jit
def _product(
    x, x_scales, row_of_x, live, weights, scales, factors, row,
    K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    FP8: tl.constexpr, REBASED: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """[ROWS, TOKENS] fp32: rows `row` of the matrices of all experts, one under the other, times rows `row_of_x` of x."""
    BLOCKS: tl.constexpr = K // 128
    byte = tl.arange(0, 32)
    weights += (row // 64 * (BLOCKS * _TILE) + row % 64 * 32)[:, None] + byte[None, :]
    scales += row // 64 * (BLOCKS * 64) + row % 64
    x += row_of_x[:, None] * K + byte[None, :]
    x_scales += row_of_x * BLOCKS
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for k in tl.range(0, BLOCKS, num_stages=STAGES):
        x0 = _columns(x + k * 128, live, 0)
        x1 = _columns(x + k * 128, live, 1)
        x2 = _columns(x + k * 128, live, 2)
        x3 = _columns(x + k * 128, live, 3)
        word = tl.load(scales + k * 64)
        block = tl.zeros((ROWS, TOKENS), tl.float32)
        block = _half(block, weights + k * _TILE, word, x0, x1, 0, FP8, REBASED, INTERPRET)
        block = _half(block, weights + k * _TILE, word, x2, x3, 1, FP8, REBASED, INTERPRET)
        if FP8:
            total += block * tl.load(x_scales + k, mask=live, other=0.0)[None, :]
        else:
            total += block
    return total * tl.load(factors + row)[:, None]


@triton.jit
def gate_up(
    x, x_scales, weights, scales, factors, shares, h, places, block_expert, block_first, block_rows, num_blocks, limit,
    K: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    HAS_LIMIT: tl.constexpr, FP8: tl.constexpr, REBASED: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """h[sorted place, INNER] = silu(gate) * up * share: one block of tokens, ROWS / 2 of its columns."""
    TILES: tl.constexpr = 2 * INNER // ROWS
    block = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    first = tl.load(block_first + block)
    slot = tl.arange(0, TOKENS)
    live = slot < tl.load(block_rows + block)
    place = tl.load(places + first + slot, mask=live, other=0)
    total = _product(
        x, x_scales, (place // TOP_K).to(tl.int64), live, weights, scales, factors,
        expert * (2 * INNER) + tile * ROWS + tl.arange(0, ROWS), K, ROWS, TOKENS, FP8, REBASED, STAGES, INTERPRET,
    )  # fmt: skip
    turns = total.reshape(ROWS // 16, 2, 8, TOKENS)  # eight rows of gate, eight of up
    gate, up = turns.permute(0, 2, 3, 1).reshape(ROWS // 2, TOKENS, 2).split()
    if HAS_LIMIT:  # comparisons, so that a NaN stays one
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    share = tl.load(shares + place, mask=live, other=0.0)
    act = gate / (1 + tl.exp(-gate)) * up * share[None, :]
    column = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
    out = h + (first + slot).to(tl.int64)[None, :] * INNER + column[:, None]
    tl.store(out, act.to(h.dtype.element_ty), mask=live[None, :])


@triton.jit
def down(
    h, h_scales, weights, scales, factors, partial, places, block_expert, block_first, block_rows, num_blocks,
    K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    FP8: tl.constexpr, REBASED: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """partial[place, WIDTH] = h @ down: one block of tokens, ROWS of its columns."""
    TILES: tl.constexpr = WIDTH // ROWS
    block = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    slot = tl.arange(0, TOKENS)
    live = slot < tl.load(block_rows + block)
    position = (tl.load(block_first + block) + slot).to(tl.int64)
    column = tile * ROWS + tl.arange(0, ROWS)
    total = _product(
        h, h_scales, position, live, weights, scales, factors,
        expert * WIDTH + column, K, ROWS, TOKENS, FP8, REBASED, STAGES, INTERPRET,
    )  # fmt: skip
    place = tl.load(places + position, mask=live, other=0).to(tl.int64)
    tl.store(partial + place[None, :] * WIDTH + column[:, None], total.to(partial.dtype.element_ty), mask=live[None, :])


@triton.jit
def _quantise(x, codes, scales, program, num_items, ITEMS: tl.constexpr, INTERPRET: tl.constexpr):
    """codes e4m3 and an fp32 power of two for ITEMS items, each 128 neighbouring values of x."""
    item = program * ITEMS + tl.arange(0, ITEMS)
    live = item < num_items
    at = item.to(tl.int64)[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = tl.load(x + at, mask=live[:, None], other=0.0).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    most = tl.maximum(tl.max(bits, 1), 0x38D1B717)  # as integers, so that a NaN is the largest; 1e-4
    byte = (most >> 23) - 8 + ((most & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 = 1.75 * 2^8
    is_finite = most < 0x7F800000
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    scaled = tl.where(is_finite[:, None], value * inverse[:, None], 0.0)
    if INTERPRET:
        tl.store(codes + at, _encode_e4m3(scaled).to(tl.float8e4nv, bitcast=True), mask=live[:, None])
    else:
        tl.store(codes + at, scaled.to(tl.float8e4nv), mask=live[:, None])
    scale = tl.where(is_finite, byte << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    tl.store(scales + item, scale, mask=live)


@triton.jit(do_not_specialize=["num_items"])
def quantise(x, codes, scales, num_items, ITEMS: tl.constexpr, INTERPRET: tl.constexpr):
    """All items of x."""
    _quantise(x, codes, scales, tl.program_id(0), num_items, ITEMS, INTERPRET)


@triton.jit
def _encode_e4m3(value):
    """Nearest e4m3, ties to even, of |value| <= 448, by integers (the interpreter's cast is wrong)."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(value) * 512 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < 0x3C800000, small, normal)  # 2^-6, the least normal
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _align_few(
    chosen, places, block_expert, block_first, block_rows, num_blocks, num_places, num_experts,
    TOKENS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Places sorted by expert, and blocks of at most TOKENS of one expert; one program compares every pair of SIZE places."""
    i = tl.arange(0, SIZE)
    e = tl.load(chosen + i, mask=i < num_places, other=-1).to(tl.int32)
    e = tl.where((e < 0) | (e >= num_experts), num_experts, e)  # nobody's: sorted last, in no block
    ei, ej = e[:, None], e[None, :]
    ii, ij = i[:, None], i[None, :]
    same = ei == ej
    before = (ej < ei) | (same & (ij < ii))
    position = tl.sum(before.to(tl.int32), 1)
    rank = tl.sum((same & (ij < ii)).to(tl.int32), 1)
    alike = tl.sum(same.to(tl.int32), 1)
    rank_of_j = tl.sum((same & (ii < ij)).to(tl.int32), 0)
    leads_j = (rank_of_j % TOKENS == 0) & (e < num_experts)
    block = tl.sum((before & leads_j[None, :]).to(tl.int32), 1)
    live = e < num_experts
    tl.store(places + position, i, mask=live)
    leads = live & (rank % TOKENS == 0)
    tl.store(block_expert + block, e, mask=leads)
    tl.store(block_first + block, position, mask=leads)
    tl.store(block_rows + block, tl.minimum(alike - rank, TOKENS), mask=leads)
    tl.store(num_blocks, tl.sum(leads.to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_places", "num_items"])
def prepare_few(
    chosen, places, block_expert, block_first, block_rows, num_blocks, num_places, num_experts, x, codes, scales, num_items,
    TOKENS: tl.constexpr, SIZE: tl.constexpr, ITEMS: tl.constexpr, QUANTISES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The first program aligns, the others quantise x."""
    if tl.program_id(0) == 0:
        _align_few(chosen, places, block_expert, block_first, block_rows, num_blocks, num_places, num_experts, TOKENS, SIZE)
    elif QUANTISES:
        _quantise(x, codes, scales, tl.program_id(0) - 1, num_items, ITEMS, INTERPRET)


@triton.jit(do_not_specialize=["num_places", "num_items"])
def prepare_many(
    chosen, places, counts, firsts, num_places, num_experts, x, codes, scales, num_items,
    CHUNK: tl.constexpr, ITEMS: tl.constexpr, QUANTISES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One program for each expert aligns, the others quantise x."""
    if tl.program_id(0) < num_experts:
        _align_many(chosen, places, counts, firsts, tl.program_id(0), num_places, CHUNK)
    elif QUANTISES:
        _quantise(x, codes, scales, tl.program_id(0) - num_experts, num_items, ITEMS, INTERPRET)


@triton.jit
def _align_many(chosen, places, counts, firsts, expert, num_places, CHUNK: tl.constexpr):
    """Counts the places of one expert, then lists them in order after those of lower experts."""
    i = tl.arange(0, CHUNK)
    own = tl.zeros((CHUNK,), tl.int32)
    lower = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, num_places, CHUNK):
        e = tl.load(chosen + start + i, mask=start + i < num_places, other=-1).to(tl.int32)
        own += (e == expert).to(tl.int32)
        lower += ((e >= 0) & (e < expert)).to(tl.int32)
    first = tl.sum(lower, 0)
    count = tl.sum(own, 0)
    tl.store(counts + expert, count)
    tl.store(firsts + expert, first)
    stop = tl.where(count > 0, num_places, 0)
    for start in range(0, stop, CHUNK):
        mine = (tl.load(chosen + start + i, mask=start + i < num_places, other=-1).to(tl.int32) == expert).to(tl.int32)
        tl.store(places + first + tl.cumsum(mine, 0) - 1, start + i, mask=mine > 0)
        first += tl.sum(mine, 0)


@triton.jit
def align_blocks(
    counts, firsts, block_expert, block_first, block_rows, num_blocks, num_experts, TOKENS: tl.constexpr, SIZE: tl.constexpr
):
    """Blocks of at most TOKENS places from the counts of each expert; one program."""
    e = tl.arange(0, SIZE)
    count = tl.load(counts + e, mask=e < num_experts, other=0)
    first = tl.load(firsts + e, mask=e < num_experts, other=0)
    blocks = (count + TOKENS - 1) // TOKENS
    begin = tl.cumsum(blocks, 0) - blocks
    for b in range(0, tl.max(blocks, 0)):
        live = b < blocks
        tl.store(block_expert + begin + b, e, mask=live)
        tl.store(block_first + begin + b, first + b * TOKENS, mask=live)
        tl.store(block_rows + begin + b, tl.minimum(count - b * TOKENS, TOKENS), mask=live)
    tl.store(num_blocks, tl.sum(blocks, 0))


@triton.jit
def sum_experts(
    partial, chosen, shared, out, num_experts, WIDTH: tl.constexpr, TOP_K: tl.constexpr, SIZE: tl.constexpr,
    HAS_SHARED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """out[token] = its partial rows, added in ascending expert order; rows of nobody's experts were never written. The sum is
    added to the token's row of `shared`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < WIDTH
    chosen += token * TOP_K
    rows = ()  # all are under way before the order is known
    for j in tl.static_range(TOP_K):
        rows += (tl.load(partial + (token * TOP_K + j) * WIDTH + column, mask=inside, other=0.0),)
    if HAS_SHARED:
        beside = tl.load(shared + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((SIZE,), tl.float32)
    for rank in tl.static_range(TOP_K):
        own = tl.zeros((SIZE,), tl.float32)
        for j in tl.static_range(TOP_K):
            e = tl.load(chosen + j).to(tl.int32)
            before = 0
            for i in tl.static_range(TOP_K):
                other = tl.load(chosen + i).to(tl.int32)
                is_before = (other < e) if i >= j else (other <= e)
                before += ((other >= 0) & is_before).to(tl.int32)
            own = tl.where((before == rank) & (e >= 0) & (e < num_experts), rows[j].to(tl.float32), own)
        total += own
    if HAS_SHARED:
        total = beside + total
    if INTERPRET and out.dtype.element_ty == tl.bfloat16:
        total = round_bf16(total)
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)
