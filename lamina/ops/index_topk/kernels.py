# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Triton kernels of the index: score every visible entry, keep the best of each segment, list the best of all.

A score is the sum over heads of relu(query . key) * weight: keys [TILE] x heads of ROWS queries on the tensor cores, so that a
sum over heads stays inside four neighbouring threads. Keys and queries in fp8 are multiplied in fp16 and in fp4 in bf16, which
hold them exactly. A score's bits depend neither on the tile's place nor on the other rows.

Scores are kept as int32 in the same order (NaN as -inf, no negative zero), so that choosing is exact whatever the way: the k-th
largest is found by bisection with counts, ties go to the lowest entry by prefix sums.

INTERPRET marks Triton's CPU interpreter, which has no inline assembly, no bf16 and no fp8: same values by other means.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.quantise.kernels import e2m1_to_fp32, e4m3_to_fp32, power

#: what no entry's order is: less than minus infinity's
_NOTHING = tl.constexpr(-2147483648)
#: bisection halves the distance of values so often, then that of their bits, which always ends
_VALUE_STEPS = tl.constexpr(16)


@triton.jit
def _scaled_bf16(packed, factors):
    """Both nibbles of each byte times a power of two (bf16, twice in an int32), as bf16: exact.

    Two neighbouring bytes have one factor. The bits placed read as e2m1 * 2^-126, times 2^126.
    """
    return tl.inline_asm_elementwise(
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
        fma.rn.bf16x2 a, a, m, z;
        fma.rn.bf16x2 b, b, m, z;
        fma.rn.bf16x2 c, c, m, z;
        fma.rn.bf16x2 d, d, m, z;
        fma.rn.bf16x2 $0, a, $5, z;
        fma.rn.bf16x2 $1, b, $7, z;
        fma.rn.bf16x2 $2, c, $5, z;
        fma.rn.bf16x2 $3, d, $7, z;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [packed, factors],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _factor(word, GROUP: tl.constexpr, INTERPRET: tl.constexpr):
    """The power of two of e8m0 byte GROUP of each word: bf16, twice in an int32; fp32 in the interpreter."""
    byte = (word >> (8 * GROUP)) & 0xFF
    if INTERPRET:
        return power(byte)
    bits = tl.where(byte == 0, 0x40, tl.where(byte == 255, 0x7FC0, byte << 7))
    return bits | (bits << 16)


@triton.jit
def _even_odd(packed, word, INTERPRET: tl.constexpr):
    """[rows, bytes] of fp4 and its scales, four bytes in a word [rows], as the even dims and the odd ones."""
    byte = tl.arange(0, packed.shape[1])[None, :]
    low = tl.where(byte < 16, _factor(word, 0, INTERPRET)[:, None], _factor(word, 1, INTERPRET)[:, None])
    high = tl.where(byte < 48, _factor(word, 2, INTERPRET)[:, None], _factor(word, 3, INTERPRET)[:, None])
    factors = tl.where(byte < 32, low, high)
    if INTERPRET:
        wide = packed.to(tl.int32)
        even, odd = e2m1_to_fp32(wide & 15) * factors, e2m1_to_fp32(wide >> 4) * factors
    else:
        even, odd = _scaled_bf16(packed, factors)
    return even, odd


@triton.jit
def _whole(x, FORMAT: tl.constexpr, HAS_FP8: tl.constexpr, INTERPRET: tl.constexpr):
    """Rows of fp8 codes as fp16, exact; of bf16 and fp32 as they are."""
    if FORMAT == "fp8":
        if INTERPRET:
            x = e4m3_to_fp32(x)
        elif HAS_FP8:
            x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            wide = x.to(tl.int16)
            x = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * tl.full((), 256.0, tl.float16)
    elif INTERPRET:
        x = x.to(tl.float32)
    return x


@triton.jit
def _scale_word(scales, GROUPS: tl.constexpr):
    """The e8m0 bytes of each row in one int32; `scales` points at int32 words if there are four, at the first bytes if fewer."""
    if GROUPS == 4:
        word = tl.load(scales)
    else:
        word = tl.load(scales).to(tl.int32)
        for group in tl.static_range(1, GROUPS):
            word |= tl.load(scales + group).to(tl.int32) << (8 * group)
    return word


@triton.jit
def _order(score):
    """int32 in the order of the scores: NaN as minus infinity, both zeros equal."""
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _pages(tables, entry, count, PAGE: tl.constexpr, TILE: tl.constexpr):
    """The page of each entry from `entry` on, or the one page of all; in bounds whatever `entry` is."""
    if PAGE % TILE == 0:
        page = tl.load(tables + tl.minimum(entry, count - 1) // PAGE)
    else:
        page = tl.load(tables + tl.minimum(entry + tl.arange(0, TILE), count - 1) // PAGE)
    return page


@triton.jit
def _queries(
    query_codes, query_scales, weights, weight_stride, weight_scale, first_row, first_local, num_rows,
    ROWS: tl.constexpr, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
    GROUPS: tl.constexpr, FORMAT: tl.constexpr, HAS_FP8: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """(even dims, odd dims, weights) of the heads of ROWS rows, dims first; all dims are even ones unless in fp4."""
    n = tl.arange(0, ROWS * PADDED_HEADS)
    head = n % PADDED_HEADS
    row = (first_row + tl.minimum(first_local + n // PADDED_HEADS, num_rows - 1)).to(tl.int64)
    query = row * HEADS + tl.minimum(head, HEADS - 1)  # a head that does not exist repeats the last one, with weight 0
    column = tl.arange(0, PADDED_WIDTH)
    codes = tl.load(query_codes + query[:, None] * WIDTH + column[None, :], mask=column[None, :] < WIDTH, other=0)
    weight = tl.load(weights + row * weight_stride + head, mask=head < HEADS, other=0.0).to(tl.float32) * weight_scale
    if FORMAT == "fp4":
        word = _scale_word(query_scales + query * (GROUPS if GROUPS < 4 else 1), GROUPS)
        even, odd = _even_odd(codes, word, INTERPRET)
        even, odd = tl.trans(even), tl.trans(odd)
    else:
        even = tl.trans(_whole(codes, FORMAT, HAS_FP8, INTERPRET))
        odd = even
        if FORMAT == "fp8":
            weight *= tl.load(query_scales + query)
    return even, odd, weight


@triton.jit
def _visible(positions, owners, row, live, max_entries, RATIO: tl.constexpr, TOP_K: tl.constexpr):
    """(entries, requests) of rows; no entries unless more than TOP_K, none and no request (-1) for padding."""
    owner = tl.load(owners + row, mask=live, other=-1)
    visible = tl.minimum((tl.load(positions + row, mask=live, other=0) + 1) // RATIO, max_entries)
    return tl.where((owner >= 0) & (visible > TOP_K), visible, 0), owner


@triton.jit
def _score(
    query_codes, query_scales, weights, weight_stride, weight_scale, key_codes, key_scales, code_stride, scale_stride,
    table_rows, tables, table_stride, scores, score_stride, first_row, num_rows, first_local, visible, owner, begin, step, stop,
    PARTS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
    HAS_FP8: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Scores of rows first_local .. of the launch, which are owner's and see so many entries, from `begin` to `stop` by `step`.

    Rows of one request share the keys; ROWS of them are one product, PARTS of these use the same expanded keys.
    """
    SCALE_STEP: tl.constexpr = GROUPS if FORMAT == "fp4" and GROUPS < 4 else 1
    queries = ()
    for part in tl.static_range(PARTS):
        queries += (_queries(
            query_codes, query_scales, weights, weight_stride, weight_scale, first_row, first_local + part * ROWS, num_rows,
            ROWS, HEADS, PADDED_HEADS, WIDTH, PADDED_WIDTH, GROUPS, FORMAT, HAS_FP8, INTERPRET,
        ),)  # fmt: skip
    r = tl.arange(0, PARTS * ROWS)
    column = tl.arange(0, PADDED_WIDTH)
    tile_row = tl.arange(0, TILE)
    for run in range(0, PARTS * ROWS):  # rows of one request follow one another
        request = tl.sum(tl.where(r == run, owner, 0), 0)
        is_first = tl.sum(((r < run) & (owner == request)).to(tl.int32), 0) == 0
        count = tl.where(is_first & (request >= 0), tl.max(tl.where(owner == request, visible, 0), 0), 0)
        count = tl.minimum(count, stop)
        table = tables + tl.load(table_rows + tl.maximum(request, 0)).to(tl.int64) * table_stride
        page = _pages(table, begin, tl.maximum(count, 1), PAGE, TILE)
        for first in tl.range(begin, count, step, num_stages=STAGES):
            page = page.to(tl.int64)
            if PAGE % TILE == 0:
                at_codes = page * code_stride + (first % PAGE) * WIDTH + (tile_row[:, None] * WIDTH + column[None, :])
                at_scales = page * scale_stride + (first % PAGE) * SCALE_STEP + tile_row * SCALE_STEP
            else:
                row = (first + tile_row) % PAGE
                at_codes = (page * code_stride + row * WIDTH)[:, None] + column[None, :]
                at_scales = page * scale_stride + row * SCALE_STEP
            page = _pages(table, first + step, count, PAGE, TILE)  # known a tile before its keys are asked for
            if WIDTH == PADDED_WIDTH:
                packed = tl.load(key_codes + at_codes)
            else:
                packed = tl.load(key_codes + at_codes, mask=column[None, :] < WIDTH, other=0)
            if FORMAT == "fp4":
                even, odd = _even_odd(packed, _scale_word(key_scales + at_scales, GROUPS), INTERPRET)
            else:
                even = _whole(packed, FORMAT, HAS_FP8, INTERPRET)
            if FORMAT == "fp8":
                key_scale = tl.load(key_scales + at_scales)
            for part in tl.static_range(PARTS):
                even_queries, odd_queries, weight = queries[part]  # type: ignore[var-annotated]
                products = tl.dot(even, even_queries, input_precision="ieee")
                if FORMAT == "fp4":
                    products = tl.dot(odd, odd_queries, products, input_precision="ieee")
                terms = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
                found = tl.sum(terms.reshape(TILE, ROWS, PADDED_HEADS), 2)
                if FORMAT == "fp8":
                    found *= key_scale[:, None]
                local = part * ROWS + tl.arange(0, ROWS)
                sees = tl.sum(tl.where((r[:, None] == local[None, :]) & (owner == request)[:, None], visible[:, None], 0), 0)
                entry = first + tile_row
                out = scores + (first_local + local).to(tl.int64)[None, :] * score_stride + entry[:, None]
                tl.store(out, _order(found), mask=entry[:, None] < sees[None, :])


@triton.jit(do_not_specialize=["first_row", "num_rows", "weight_scale", "max_entries"])
def score(
    query_codes, query_scales, weights, weight_stride, weight_scale, key_codes, key_scales, code_stride, scale_stride,
    positions, owners, table_rows, tables, table_stride, scores, score_stride, first_row, num_rows, max_entries,
    RATIO: tl.constexpr, TOP_K: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, FORMAT: tl.constexpr, HAS_FP8: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """scores[row, entry] of PARTS * ROWS rows from first_row on, every num_programs(0)-th tile of entries.

    A row that sees TOP_K entries or fewer is not scored. WIDTH is that of the codes, GROUPS the scales of a row.
    """
    first_local = tl.program_id(1) * (PARTS * ROWS)
    local = first_local + tl.arange(0, PARTS * ROWS)
    visible, owner = _visible(positions, owners, first_row + local, local < num_rows, max_entries, RATIO, TOP_K)
    begin = tl.program_id(0) * TILE
    if begin < tl.max(visible, 0):
        _score(
            query_codes, query_scales, weights, weight_stride, weight_scale, key_codes, key_scales, code_stride, scale_stride,
            table_rows, tables, table_stride, scores, score_stride, first_row, num_rows, first_local, visible, owner,
            begin, tl.num_programs(0) * TILE, max_entries, PARTS, ROWS, HEADS, PADDED_HEADS, WIDTH, PADDED_WIDTH, GROUPS, PAGE,
            TILE, FORMAT, HAS_FP8, STAGES, INTERPRET,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_row", "num_rows", "weight_scale", "max_entries"])
def score_singles(
    query_codes, query_scales, weights, weight_stride, weight_scale, key_codes, key_scales, code_stride, scale_stride,
    positions, owners, table_rows, tables, table_stride, scores, score_stride, first_row, num_rows, max_entries,
    RATIO: tl.constexpr, TOP_K: tl.constexpr, PADDED_ROWS: tl.constexpr, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    FORMAT: tl.constexpr, HAS_FP8: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """As `score`, of rows of different requests: all tiles of all rows, one after another, are dealt out evenly."""
    local = tl.arange(0, PADDED_ROWS)
    visible, _ = _visible(positions, owners, first_row + local, local < num_rows, max_entries, RATIO, TOP_K)
    tiles = (visible + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    share = (total + tl.num_programs(0) - 1) // tl.num_programs(0)
    tile = tl.program_id(0) * share
    stop = tl.minimum(tile + share, total)
    while tile < stop:
        row = tl.sum((ends <= tile).to(tl.int32), 0)
        end = tl.sum(tl.where(local == row, ends, 0), 0)
        first = end - tl.sum(tl.where(local == row, tiles, 0), 0)
        last = tl.minimum(end, stop)
        one = row + tl.arange(0, 1)
        sees, request = _visible(positions, owners, first_row + one, one < num_rows, max_entries, RATIO, TOP_K)
        _score(
            query_codes, query_scales, weights, weight_stride, weight_scale, key_codes, key_scales, code_stride, scale_stride,
            table_rows, tables, table_stride, scores, score_stride, first_row, num_rows, row, sees, request,
            (tile - first) * TILE, TILE, (last - first) * TILE, 1, 1, HEADS, PADDED_HEADS, WIDTH, PADDED_WIDTH, GROUPS, PAGE,
            TILE, FORMAT, HAS_FP8, STAGES, INTERPRET,
        )  # fmt: skip
        tile = last


@triton.jit
def _value(order):
    """The score of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _bounds(orders, count, TOP_K: tl.constexpr):
    """(least order that is kept, how many of those equal to it): the TOP_K largest, or all where no more than TOP_K are there."""
    low = tl.min(tl.where(orders == _NOTHING, 2147483647, orders), 0).to(tl.int64)
    high = tl.max(orders, 0).to(tl.int64)
    high = tl.where(count > TOP_K, high, low)  # count(>= low) >= TOP_K and count(> high) < TOP_K
    step = 0
    while low < high:
        middle = (low + high + 1) >> 1
        if step < _VALUE_STEPS:
            value = 0.5 * _value(low.to(tl.int32)) + 0.5 * _value(high.to(tl.int32))
            guess = tl.minimum(tl.maximum(_order(value).to(tl.int64), low + 1), high)
            middle = tl.where(tl.abs(value) < float("inf"), guess, middle)
        kept = tl.sum((orders >= middle.to(tl.int32)).to(tl.int32), 0)
        low = tl.where(kept >= TOP_K, middle, low)
        high = tl.where(kept == TOP_K, middle, tl.where(kept > TOP_K, high, middle - 1))
        step += 1
    least = low.to(tl.int32)
    above = tl.sum((orders > least).to(tl.int32), 0)
    return least, TOP_K - above


@triton.jit
def _ranks(orders, least, room):
    """(whether kept, rank among the kept) of each order; of those equal to `least` the first `room` are kept."""
    is_above = orders > least
    is_tie = (orders == least) & (orders != _NOTHING)
    own = is_above.to(tl.int32) | (is_tie.to(tl.int32) << 16)
    before = tl.cumsum(own, 0) - own
    ties = (before >> 16) & 0xFFFF
    return is_above | (is_tie & (ties < room)), (before & 0xFFFF) + tl.minimum(ties, room)


@triton.jit
def _rounded_up(count):
    """To a multiple of 16: a mask that keeps loads wide. Rows of scores have room for it."""
    return (count + 15) // 16 * 16


@triton.jit(do_not_specialize=["first_row", "max_entries"])
def select_segments(
    scores, score_stride, positions, owners, kept_orders, kept_entries, first_row, max_entries,
    RATIO: tl.constexpr, TOP_K: tl.constexpr, PADDED_K: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """kept_*[row, segment]: the TOP_K best of SIZE entries (all where fewer are visible), ascending by entry."""
    local = tl.program_id(1).to(tl.int64)
    visible, _ = _visible(positions, owners, first_row + tl.program_id(1), True, max_entries, RATIO, TOP_K)
    first = tl.program_id(0) * SIZE
    if first >= visible:
        return
    entry = first + tl.arange(0, SIZE)
    orders = tl.load(scores + local * score_stride + entry, mask=entry < _rounded_up(visible), other=_NOTHING)
    orders = tl.where(entry < visible, orders, _NOTHING)
    least, room = _bounds(orders, tl.minimum(visible - first, SIZE), TOP_K)
    is_kept, rank = _ranks(orders, least, room)
    out = (local * tl.num_programs(0) + tl.program_id(0)) * TOP_K
    tl.store(kept_entries + out + rank, entry, mask=is_kept)
    tl.debug_barrier()  # few are left: each thread fetches the orders of its share of them
    each = tl.arange(0, PADDED_K)
    live = each < tl.minimum(visible - first, TOP_K)
    best = tl.load(kept_entries + out + each, mask=live, other=0)
    tl.store(kept_orders + out + each, tl.load(scores + local * score_stride + best, mask=live), mask=live)


@triton.jit
def _place(table, entry, mask, PAGE: tl.constexpr):
    return tl.load(table + entry // PAGE, mask=mask, other=0) * PAGE + entry % PAGE


@triton.jit(do_not_specialize=["first_row", "max_entries", "num_segments"])
def select_places(
    orders_in, entries_in, row_stride, positions, owners, table_rows, tables, table_stride, places, first_row, max_entries,
    num_segments,
    RATIO: tl.constexpr, TOP_K: tl.constexpr, PADDED_K: tl.constexpr, SIZE: tl.constexpr, SEGMENT: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """places[row] = page * PAGE + row in the page of its TOP_K best entries, ascending, then -1.

    SEGMENT 0: orders_in holds the orders of all entries; else what select_segments kept of segments of so many entries.
    """
    local = tl.program_id(0).to(tl.int64)
    row = first_row + tl.program_id(0)
    visible, request = _visible(positions, owners, row, True, max_entries, RATIO, 0)
    table = tables + tl.load(table_rows + tl.maximum(request, 0)).to(tl.int64) * table_stride
    places += row.to(tl.int64) * TOP_K
    each = tl.arange(0, PADDED_K)
    if visible <= TOP_K:
        every = _place(table, each, each < visible, PAGE)
        tl.store(places + each, tl.where(each < visible, every, -1), mask=each < TOP_K)
    else:
        slot = tl.arange(0, SIZE)
        if SEGMENT == 0:
            is_there = slot < visible
            count = visible
            stop = _rounded_up(visible)
        else:
            segment = slot // TOP_K
            is_there = (slot - segment * TOP_K < visible - segment * SEGMENT) & (segment < num_segments)
            count = tl.sum(is_there.to(tl.int32), 0)
            stop = num_segments * TOP_K
        orders = tl.load(orders_in + local * row_stride + slot, mask=slot < stop, other=_NOTHING)
        orders = tl.where(is_there, orders, _NOTHING)
        least, room = _bounds(orders, count, TOP_K)
        is_kept, rank = _ranks(orders, least, room)
        tl.store(places + rank, slot, mask=is_kept)
        tl.debug_barrier()  # few are left: each thread maps its share of them
        entry = tl.load(places + each, mask=each < TOP_K, other=0)
        tl.debug_barrier()
        if SEGMENT != 0:
            entry = tl.load(entries_in + local * row_stride + entry)
        tl.store(places + each, _place(table, entry, each < TOP_K, PAGE), mask=each < TOP_K)
