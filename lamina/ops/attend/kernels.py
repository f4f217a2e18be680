# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment,misc"
"""Triton kernels of attention over stored rows; `triton.py` calls them and says what each argument is.

A row is key and value at once. A program takes one query and some of its heads, and walks over tiles of TILE rows:

    tiles   | window: positions p - SIZE + 1 ... p, ascending | entries in the order of their list |

Rows are read where they lie (own rows of the step, ring, log) and decoded in registers. A row that the query may not see is
replaced by the query's own row, with weight 0: no address is masked. A row is cut in parts of a power of two columns, because
only such tensors exist (`parts_of`: 448 = 256 + 128 + 64 unrotated dims); the last part is the rotated dims.

The order of all sums is a function of the query's position and of launch constants. Scores are kept in units of log 2.
INTERPRET marks Triton's CPU interpreter, where bf16 travels as int16 and is multiplied as fp32.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.quantise.kernels import (
    e4m3_to_fp32,
    fp8_scale_byte,
    fp32_to_e4m3,
    inverse_power,
    largest_bits,
    power,
    round_bf16,
    rounded,
)

#: below every score; exp2 of any difference to it is 0 or 1, never NaN
_LOWEST = tl.constexpr(-1e30)


@triton.constexpr_function
def parts_of(nope, rope):
    """(first column, width) of each part of a row: powers of two from 16 to 256, unrotated dims first, rotated ones last."""
    parts, at = [], 0
    while at < nope:
        left = nope - at
        width = min(256, 1 << (left.bit_length() - 1)) if left >= 16 else 16
        parts.append((at, width))
        at += width
    return (*parts, (nope, max(16, 1 << (rope - 1).bit_length())))


@triton.constexpr_function
def _num_parts(nope, rope):
    return len(parts_of(nope, rope))


@triton.constexpr_function
def _first(part, nope, rope):
    return parts_of(nope, rope)[part][0]


@triton.constexpr_function
def _width(part, nope, rope):
    return parts_of(nope, rope)[part][1]


@triton.jit
def _as_fp32(x):
    """Of fp32, bf16, or the bits of bf16 as int16."""
    if x.dtype == tl.int16:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _operand(x, EXACT: tl.constexpr, INTERPRET: tl.constexpr):
    """As the products take it: fp32 if EXACT, else bf16, which the interpreter holds in fp32."""
    if EXACT or INTERPRET:
        x = _as_fp32(x)
    else:
        x = x.to(tl.bfloat16)
    return x


@triton.jit
def _store(pointer, x, mask):
    """x fp32, rounded already, into fp32, bf16, or the bits of bf16 as int16."""
    if pointer.dtype.element_ty == tl.int16:
        x = (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    tl.store(pointer, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _expand_bf16(codes, factor):
    """bf16 of e4m3 codes (uint8) times a power of two (bf16), exact: the bits placed read as e4m3 * 2^-120."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, m, z;
        mov.b32 m, 0x7b807b80;
        mov.b32 z, 0x80008000;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        and.b32 $0, a, 0x80008000;
        and.b32 $1, b, 0x80008000;
        shr.u32 a, a, 4;
        shr.u32 b, b, 4;
        lop3.b32 a, a, 0x07f007f0, $0, 0xEA;
        lop3.b32 b, b, 0x07f007f0, $1, 0xEA;
        fma.rn.bf16x2 a, a, m, z;
        fma.rn.bf16x2 b, b, m, z;
        fma.rn.bf16x2 $0, a, $3, z;
        fma.rn.bf16x2 $1, b, $4, z;
        }""",
        "=&r,=&r,r,r,r",
        [codes, factor],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _decoded(codes, scale, WIDTH: tl.constexpr, EXACT: tl.constexpr, INTERPRET: tl.constexpr):
    """codes [rows, WIDTH] of e4m3 times a scale byte (int32) [rows, WIDTH / 64] of each 64 (of all, if there are fewer)."""
    rows: tl.constexpr = codes.shape[0]
    BLOCK: tl.constexpr = 64 if WIDTH > 64 else WIDTH
    if EXACT or INTERPRET:
        factor = power(scale)
    else:
        bits = tl.where(scale == 0, 0x40, tl.where(scale == 255, 0x7FC0, scale << 7))
        factor = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    factor = tl.broadcast_to(factor[:, :, None], (rows, WIDTH // BLOCK, BLOCK)).reshape(rows, WIDTH)
    if EXACT or INTERPRET:
        values = e4m3_to_fp32(codes) * factor
    else:
        values = _expand_bf16(codes, factor)
    return values


@triton.jit
def _zeros(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """fp32 [ROWS, WIDTH]; the shape must be made of its own constants, not of a tuple's elements."""
    return tl.zeros((ROWS, WIDTH), tl.float32)


@triton.jit
def _part(
    row, scales, FIRST: tl.constexpr, WIDTH: tl.constexpr, STOP: tl.constexpr, IS_FP8: tl.constexpr,
    EXACT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Columns FIRST ... FIRST + WIDTH - 1 of stored rows (pointers [rows]), zeros from column STOP on."""
    column = FIRST + tl.arange(0, WIDTH)
    at = row[:, None] + column[None, :]
    if FIRST + WIDTH <= STOP:
        stored = tl.load(at)
    else:
        stored = tl.load(at, mask=(column < STOP)[None, :], other=0)
    if IS_FP8:
        block = FIRST // 64 + tl.arange(0, WIDTH // 64 if WIDTH > 64 else 1)
        stored = _decoded(stored, tl.load(scales[:, None] + block[None, :]).to(tl.int32), WIDTH, EXACT, INTERPRET)
    else:
        stored = _operand(stored, EXACT, INTERPRET)
    return stored


@triton.jit
def _unrotate(x, cos, sin, FIRST: tl.constexpr, ROPE: tl.constexpr):
    """x [heads, width] fp32 with the ROPE columns from FIRST on turned back by the angles at cos and sin, pair by pair."""
    heads: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    pair = tl.arange(0, width // 2) - FIRST // 2
    turned = (pair >= 0) & (pair < ROPE // 2)
    c = tl.load(cos + pair, mask=turned, other=1.0)[None, :]
    s = tl.load(sin + pair, mask=turned, other=0.0)[None, :]
    a, b = x.reshape(heads, width // 2, 2).split()
    first = tl.where(turned[None, :], a * c + b * s, a)
    second = tl.where(turned[None, :], b * c - a * s, b)
    return tl.join(first, second).reshape(heads, width)


@triton.jit
def _codes(x, byte, INTERPRET: tl.constexpr):
    """e4m3 of x over 2^(byte - 127); zeros where byte is 255. The two are of one rank."""
    scaled = tl.where(byte != 255, x * inverse_power(byte), 0.0)
    if INTERPRET:
        codes = fp32_to_e4m3(scaled).to(tl.float8e4nv, bitcast=True)
    else:
        codes = scaled.to(tl.float8e4nv)
    return codes


@triton.jit
def _store_blocks(x, codes, scales, start, live, INTERPRET: tl.constexpr):
    """x [heads, a multiple of 128] as e4m3 at codes + start, with a scale of each 128."""
    heads: tl.constexpr = x.shape[0]
    blocks: tl.constexpr = x.shape[1] // 128
    byte = fp8_scale_byte(largest_bits(x.reshape(heads, blocks, 128), 2))
    found = _codes(x.reshape(heads, blocks, 128), byte[:, :, None], INTERPRET).reshape(heads, blocks * 128)
    tl.store(codes + start[:, None] + tl.arange(0, blocks * 128)[None, :], found, mask=live[:, None])
    tl.store(scales + (start // 128)[:, None] + tl.arange(0, blocks)[None, :], power(byte), mask=live[:, None])


@triton.jit
def _finish(
    parts, cos, sin, values, codes, scales, start, live,
    NOPE: tl.constexpr, ROPE: tl.constexpr, IS_BF16: tl.constexpr, QUANTISES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Stores outputs of several heads of a query: rotated back, rounded, and as e4m3 with a scale of each 128 if QUANTISES.

    parts  fp32 [heads, width] each.   start  int64 [heads] where each head begins in `values`.   live  [heads].
    """
    N: tl.constexpr = _num_parts(NOPE, ROPE)
    done = ()
    for i in tl.static_range(N):
        x = parts[i]
        if i == N - 1:
            x = _unrotate(x, cos, sin, 0, ROPE)
        x = rounded(x, IS_BF16)
        column = _first(i, NOPE, ROPE) + tl.arange(0, _width(i, NOPE, ROPE))
        inside = column < (NOPE + ROPE if i == N - 1 else NOPE)
        _store(values + start[:, None] + column[None, :], x, live[:, None] & inside[None, :])
        done += (x,)
    if QUANTISES:
        heads: tl.constexpr = done[0].shape[0]
        rest = tl.zeros((heads,), tl.int32)  # of the last 128, which the unrotated and the rotated dims share
        for i in tl.static_range(N):
            if _width(i, NOPE, ROPE) % 128 == 0:
                _store_blocks(
                    done[i], codes + _first(i, NOPE, ROPE), scales + _first(i, NOPE, ROPE) // 128, start, live, INTERPRET
                )
            else:
                rest = tl.maximum(rest, largest_bits(done[i], 1))
        if _width(N - 1, NOPE, ROPE) % 128 != 0:
            byte = fp8_scale_byte(rest)
            for i in tl.static_range(N):
                if _width(i, NOPE, ROPE) % 128 != 0:
                    column = _first(i, NOPE, ROPE) + tl.arange(0, _width(i, NOPE, ROPE))
                    found = _codes(done[i], byte[:, None], INTERPRET)
                    tl.store(codes + start[:, None] + column[None, :], found, mask=live[:, None])
            tl.store(scales + start // 128 + (NOPE + ROPE - 128) // 128, power(byte), mask=live)


@triton.jit
def _num_tiles(position, owner, SIZE: tl.constexpr, TILE: tl.constexpr, RATIO: tl.constexpr, MAX_ENTRIES: tl.constexpr):
    """(tiles of the row, its entries); no tile for padding. RATIO 0: there are no entries."""
    entries = 0
    if RATIO:
        entries = tl.minimum((position + 1) // RATIO, MAX_ENTRIES)
    tiles = (SIZE + TILE - 1) // TILE + (entries + TILE - 1) // TILE
    return tl.where(owner < 0, 0, tiles), entries


@triton.jit
def _pointers(own, ring, log, own_row, ring_page, ring_row, page, row, is_own, is_ring, WIDTH: tl.constexpr, RATIO: tl.constexpr):
    """Where each row of a tile lies, of one field; `ring_page` and `page` are offsets of pages already."""
    found = own + own_row * WIDTH
    found = tl.where(is_ring, ring + ring_page + ring_row * WIDTH, found)
    if RATIO:
        found = tl.where(is_own | is_ring, found, log + page + row * WIDTH)
    return found


@triton.jit
def attend(
    q, own, own_rope, own_scale, ring, ring_rope, ring_scale, log, log_rope, log_scale, places,
    positions, owners, starts, first_rows, valid_from, table_rows, tables, slots, sink, cos, sin,
    values, codes, scales, partial, peaks, sums,
    factor, ring_page, ring_rope_page, ring_scale_page, log_page, log_rope_page, log_scale_page, table_width, slot_width,
    HEADS: tl.constexpr, HEAD_TILE: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, SCALE_BYTES: tl.constexpr,
    SIZE: tl.constexpr, RING: tl.constexpr, SLOT_COLUMN: tl.constexpr, RATIO: tl.constexpr, IS_SELECTED: tl.constexpr,
    MAX_ENTRIES: tl.constexpr, PAGE_ENTRIES: tl.constexpr, TILE: tl.constexpr, SPLIT_TILES: tl.constexpr,
    IS_FP8: tl.constexpr, EXACT: tl.constexpr, IS_BF16: tl.constexpr, QUANTISES: tl.constexpr, STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One query, HEAD_TILE of its heads, and SPLIT_TILES of its tiles: sums, peak and unnormalised output of these.

    SPLIT_TILES 0: all tiles, and the finished outputs.
    """
    N: tl.constexpr = _num_parts(NOPE, ROPE)
    DIM: tl.constexpr = NOPE + ROPE
    WINDOW_TILES: tl.constexpr = (SIZE + TILE - 1) // TILE
    PARTS: tl.constexpr = (HEADS + HEAD_TILE - 1) // HEAD_TILE
    ROW: tl.constexpr = NOPE if IS_FP8 else DIM
    t = tl.program_id(0) // PARTS
    head = tl.program_id(0) % PARTS * HEAD_TILE + tl.arange(0, HEAD_TILE)
    position = tl.load(positions + t)
    owner = tl.load(owners + t)
    tiles, entries = _num_tiles(position, owner, SIZE, TILE, RATIO, MAX_ENTRIES)
    first = 0
    if SPLIT_TILES:
        first = tl.program_id(1) * SPLIT_TILES
        if first >= tiles:
            return
        tiles = tl.minimum(tiles, first + SPLIT_TILES)
    owner = tl.maximum(owner, 0)
    start = tl.load(starts + owner)
    first_row = tl.load(first_rows + owner)
    oldest = tl.maximum(tl.load(valid_from + owner), 0)
    page_of_ring = tl.load(slots + owner * slot_width + SLOT_COLUMN).to(tl.int64)
    table = tables + tl.load(table_rows + owner).to(tl.int64) * table_width
    if IS_SELECTED:
        places += t.to(tl.int64) * MAX_ENTRIES
    begin = position - SIZE + 1  # of the window; tiles before `oldest` would add zeros
    first = tl.maximum(first, tl.minimum(tl.maximum(oldest - begin, 0) // TILE, WINDOW_TILES))

    live_head = head < HEADS
    of_q = q + t.to(tl.int64) * (HEADS * DIM) + head[:, None] * DIM
    queries = ()
    acc = ()
    for i in tl.static_range(N):
        column = _first(i, NOPE, ROPE) + tl.arange(0, _width(i, NOPE, ROPE))
        inside = column < (DIM if i == N - 1 else NOPE)
        loaded = tl.load(of_q + column[None, :], mask=live_head[:, None] & inside[None, :], other=0)
        queries += (_operand(loaded, EXACT, INTERPRET),)
        acc += (_zeros(HEAD_TILE, _width(i, NOPE, ROPE)),)
    peak = tl.full((HEAD_TILE,), _LOWEST, tl.float32)
    total = tl.zeros((HEAD_TILE,), tl.float32)
    slot = tl.arange(0, TILE)
    for tile in tl.range(first, tiles, num_stages=STAGES):
        is_window = tile < WINDOW_TILES
        at = begin + tile * TILE + slot  # position, if the tile is of the window
        live = is_window & (at >= oldest) & (at <= position)
        is_own = live & (at >= start)
        is_ring = live & (at < start)
        ring_row = tl.maximum(at, 0) % RING
        page, row = tl.zeros((TILE,), tl.int64), slot
        if RATIO:
            entry = (tile - WINDOW_TILES) * TILE + slot
            is_entry = (entry >= 0) & (entry < entries)
            if IS_SELECTED:
                place = tl.load(places + entry, mask=is_entry, other=-1)
                is_entry = place >= 0
                place = tl.maximum(place, 0)
                page = (place // PAGE_ENTRIES).to(tl.int64)
            else:
                place = tl.where(is_entry, entry, 0)
                page = tl.load(table + place // PAGE_ENTRIES, mask=is_entry, other=0).to(tl.int64)
            row = place % PAGE_ENTRIES
            live = live | is_entry
        own_row = tl.where(is_own, first_row + at - start, t).to(tl.int64)
        is_own = is_own | (live == 0)
        rows = _pointers(
            own, ring, log, own_row, page_of_ring * ring_page, ring_row, page * log_page, row, is_own, is_ring, ROW, RATIO
        )
        rope_rows, scale_rows = rows, rows
        if IS_FP8:
            rope_rows = _pointers(
                own_rope, ring_rope, log_rope, own_row, page_of_ring * ring_rope_page, ring_row, page * log_rope_page, row,
                is_own, is_ring, ROPE, RATIO,
            ) - NOPE  # fmt: skip
            scale_rows = _pointers(
                own_scale, ring_scale, log_scale, own_row, page_of_ring * ring_scale_page, ring_row, page * log_scale_page, row,
                is_own, is_ring, SCALE_BYTES, RATIO,
            )  # fmt: skip
        keys = ()
        for i in tl.static_range(N):
            if i < N - 1:
                keys += (_part(rows, scale_rows, _first(i, NOPE, ROPE), _width(i, NOPE, ROPE), NOPE, IS_FP8, EXACT, INTERPRET),)
            else:
                keys += (_part(rope_rows, scale_rows, NOPE, _width(i, NOPE, ROPE), DIM, False, EXACT, INTERPRET),)
        score = tl.dot(queries[0], tl.trans(keys[0]), input_precision="ieee")
        for i in tl.static_range(1, N):
            score = tl.dot(queries[i], tl.trans(keys[i]), score, input_precision="ieee")
        score = tl.where(live[None, :], score * factor, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        shrink = tl.exp2(peak - new_peak)
        weight = tl.exp2(score - new_peak[:, None])
        total = total * shrink + tl.sum(weight, 1)
        peak = new_peak
        if not EXACT:
            weight = round_bf16(weight) if INTERPRET else weight.to(tl.bfloat16)
        grown = ()
        for i in tl.static_range(N):
            grown += (tl.dot(weight, keys[i], acc[i] * shrink[:, None], input_precision="ieee"),)
        acc = grown

    if SPLIT_TILES:
        base = ((t.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * HEADS + head).to(tl.int64)
        tl.store(peaks + base, peak, mask=live_head)
        tl.store(sums + base, total, mask=live_head)
        for i in tl.static_range(N):
            column = _first(i, NOPE, ROPE) + tl.arange(0, _width(i, NOPE, ROPE))
            inside = column < (DIM if i == N - 1 else NOPE)
            tl.store(partial + base[:, None] * DIM + column[None, :], acc[i], mask=live_head[:, None] & inside[None, :])
    else:
        total = _with_sink(total, peak, tl.load(sink + head, mask=live_head, other=0.0))
        outputs = ()
        for i in tl.static_range(N):
            outputs += (acc[i] / total[:, None],)
        turn = t.to(tl.int64) * (ROPE // 2)
        _finish(
            outputs, cos + turn, sin + turn, values, codes, scales, t.to(tl.int64) * (HEADS * DIM) + head * DIM, live_head,
            NOPE, ROPE, IS_BF16, QUANTISES, INTERPRET,
        )  # fmt: skip


@triton.jit
def _with_sink(total, peak, sink):
    """The softmax's denominator; of no row and no sink something positive."""
    return tl.maximum(total + tl.exp2(sink * 1.4426950408889634 - peak), 1e-30)


@triton.jit
def combine(
    partial, peaks, sums, positions, owners, sink, cos, sin, values, codes, scales,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, RATIO: tl.constexpr,
    MAX_ENTRIES: tl.constexpr, TILE: tl.constexpr, SPLIT_TILES: tl.constexpr, SPLITS: tl.constexpr, SPLIT_ROWS: tl.constexpr,
    IS_BF16: tl.constexpr, QUANTISES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A head of a query: its live splits under one softmax with the sink, then as `_finish`. WIDTH, SPLIT_ROWS: powers of two."""
    DIM: tl.constexpr = NOPE + ROPE
    t = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    tiles, _ = _num_tiles(tl.load(positions + t), tl.load(owners + t), SIZE, TILE, RATIO, MAX_ENTRIES)
    split = tl.arange(0, SPLIT_ROWS)
    live = split * SPLIT_TILES < tiles
    base = (t.to(tl.int64) * SPLITS + split) * HEADS + head
    column = tl.arange(0, WIDTH)
    found = tl.load(partial + base[:, None] * DIM + column[None, :], mask=live[:, None] & (column < DIM)[None, :], other=0.0)
    own = tl.load(peaks + base, mask=live, other=_LOWEST)
    peak = tl.max(own, 0)
    share = tl.where(live, tl.exp2(own - peak), 0.0)
    total = tl.sum(share * tl.load(sums + base, mask=live, other=0.0), 0)
    x = tl.sum(found * share[:, None], 0) / _with_sink(total, peak, tl.load(sink + head))
    turn = t.to(tl.int64) * (ROPE // 2)
    x = rounded(_unrotate(x[None, :], cos + turn, sin + turn, NOPE, ROPE), IS_BF16)
    first = (t.to(tl.int64) * HEADS + head) * DIM
    _store(values + first + column[None, :], x, (column < DIM)[None, :])
    if QUANTISES:
        blocks: tl.constexpr = WIDTH // 128
        x = x.reshape(blocks, 128)
        byte = fp8_scale_byte(largest_bits(x, 1))
        block = tl.arange(0, blocks)
        at = first + block[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(codes + at, _codes(x, byte[:, None], INTERPRET), mask=(block * 128 < DIM)[:, None])
        tl.store(scales + first // 128 + block, power(byte), mask=block * 128 < DIM)


@triton.jit
def quantise(values, codes, scales, COLUMNS: tl.constexpr, INTERPRET: tl.constexpr):
    """e4m3 of 128 neighbouring columns of a row of `values`; the last such block may be shorter."""
    BLOCKS: tl.constexpr = (COLUMNS + 127) // 128
    t = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    column = block * 128 + tl.arange(0, 128)
    x = _as_fp32(tl.load(values + t * COLUMNS + column, mask=column < COLUMNS, other=0))
    byte = fp8_scale_byte(largest_bits(x, 0))
    tl.store(codes + t * COLUMNS + column, _codes(x, byte, INTERPRET), mask=column < COLUMNS)
    tl.store(scales + t * BLOCKS + block, power(byte))
