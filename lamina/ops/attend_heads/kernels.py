# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment,misc"
"""Triton kernels of attention with grouped keys and values; `triton.py` calls them and says what each argument is.

    roots_of_heads     what queries and keys are multiplied by where one norm goes over all heads
    project_heads      rows of a projection -> queries, keys and values: norms, rotation, stored in log or ring
    attend_split       decode: one query, some heads of a group, a range of tiles    -> sums, peak, unnormalised output
    combine            decode: the ranges of a query under one softmax
    gate_heads         the output of heads that have gates
    attend_tiles       prefill: QUERIES queries of one request, some heads of a group

Keys are taken in tiles of TILE positions that begin at multiples of TILE, so that the order of all sums of a query follows from
its position alone: a tile that a query does not see adds exact zeros. Where a tile has positions that no query of a program sees,
the nearest one that is seen is read instead, with weight 0: no row that was never written is touched.

Scores are kept in units of log 2. The rows of a program's matrices are queries x heads, heads fastest.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.quantise.kernels import e4m3_to_fp32, fp32_to_e4m3, round_bf16, rounded
from lamina.ops.rope_norm.kernels import INTERPRETED, inverse_root, store_as

#: below every score; exp2 of any difference to it is 0 or 1, never NaN
_LOWEST = tl.constexpr(-1e30)
_LOG2_E = tl.constexpr(1.4426950408889634)
#: requests whose tiles are counted at a time
_COUNTED = tl.constexpr(64)
#: where keys and values go: to `own` alone, to the log alone, to `own` and the ring, to `own` and the pages of a large window
OWN, LOG, RING, WINDOW_PAGES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


# Queries, keys and values ---------------------------------------------------------------------------------------------


@triton.jit
def _put(pointer, x, mask):
    """fp32 x as stored: e4m3 codes, which saturate, or rounded."""
    if pointer.dtype.element_ty == tl.uint8:
        tl.store(pointer, fp32_to_e4m3(x), mask=mask)
    else:
        store_as(pointer, x, mask)


@triton.jit
def _value(x, bias, at, mask, IS_BF16: tl.constexpr):
    found = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        found += tl.load(bias + at, mask=mask, other=0.0)
    return rounded(found, IS_BF16)


@triton.jit
def _gain(gain, column, is_own, found):
    """`found` with a norm's weight of the columns in the heads that are its own."""
    if gain is not None:
        loaded = tl.load(gain + column, mask=is_own, other=0.0)
        found = tl.where(is_own, loaded, found)
    return found


@triton.jit
def _root_of(x, bias, eps, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, IS_BF16: tl.constexpr):
    """1 over the root mean square of WIDTH values, D of them together at every multiple of STEP."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, WIDTH, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = _value(x, bias, at // D * STEP + at % D, at < WIDTH, IS_BF16)
        total += value * value
    return inverse_root(tl.sum(total, 0), eps, WIDTH)


@triton.jit
def roots_of_heads(
    x, x_stride, bias, roots, q_eps, k_eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, IS_BF16: tl.constexpr, HAS_GATES: tl.constexpr,
):  # fmt: skip
    """roots[row, 0] of all queries by program (row, 0), roots[row, 1] of all keys by (row, 1)."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    STEP: tl.constexpr = 2 * D if HAS_GATES else D
    if tl.program_id(1) == 0:
        tl.store(roots + row * 2, _root_of(x, bias, q_eps, D, HEADS * D, BLOCK, STEP, IS_BF16))
    else:
        if bias is not None:
            bias += HEADS * STEP
        tl.store(roots + row * 2 + 1, _root_of(x + HEADS * STEP, bias, k_eps, D, KV * D, BLOCK, D, IS_BF16))


@triton.jit(do_not_specialize=["slot_column"])
def project_heads(
    x, x_stride, bias, q_gain, k_gain, cos, sin, warmth, roots, queries, own_k, own_v, kept_k, kept_v, k_page, v_page,
    positions, owners, write_from, table_rows, tables, table_width, slots, slot_stride, slot_column, q_eps, k_eps, v_eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr, ROPE: tl.constexpr,
    IS_PAIRS: tl.constexpr, NORMS_Q: tl.constexpr, NORMS_K: tl.constexpr, NORMS_V: tl.constexpr, NORMS_AFTER: tl.constexpr,
    PLACE: tl.constexpr, PAGE_ROWS: tl.constexpr, IS_BF16: tl.constexpr, HAS_GATES: tl.constexpr = False,
):  # fmt: skip
    """GROUP heads of one row. The first ROPE dims of queries and keys turn, in pairs (2i, 2i + 1) or (i, i + ROPE / 2).

    HAS_GATES: a gate lies behind each query.   roots  [T, 2], of norms over all heads, whose gains are of all heads too.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    column = tl.arange(0, W)[None, :]
    inside = (head < HEADS + 2 * KV) & (column < D)
    is_q, is_v = head < HEADS, head >= HEADS + KV
    is_k = (is_q | is_v) == 0
    x += row * x_stride
    place = head
    if HAS_GATES:
        place += tl.minimum(head, HEADS)
    value = _value(x, bias, place * D + column, inside, IS_BF16)
    is_turned = column < ROPE
    partner = column
    if ROPE:
        HALF: tl.constexpr = ROPE // 2
        if IS_PAIRS:
            angle, is_first, partner = column // 2, column % 2 == 0, tl.where(is_turned, column ^ 1, column)
        else:
            is_first = column < HALF
            angle = column % HALF
            partner = tl.where(is_turned, tl.where(is_first, column + HALF, column - HALF), column)
        other = _value(x, bias, place * D + partner, inside, IS_BF16)
        c = tl.load(cos + row * HALF + angle, mask=is_turned, other=1.0)
        s = tl.load(sin + row * HALF + angle, mask=is_turned, other=0.0)
        s = tl.where(is_first, -s, s)
    NORMS: tl.constexpr = NORMS_Q or NORMS_K or NORMS_V
    if NORMS:
        is_normed = (is_q & NORMS_Q) | (is_k & NORMS_K) | (is_v & NORMS_V)
        eps = tl.where(is_q, q_eps, tl.where(is_k, k_eps, v_eps))
        q_first, k_first = head * 0, head * 0
        if roots is not None:
            q_first, k_first = head * D, (head - HEADS) * D
        gain = tl.full((GROUP, W), 1, tl.float32)
        gain = _gain(q_gain, q_first + column, is_q & (column < D), gain)
        gain = _gain(k_gain, k_first + column, is_k & (column < D), gain)
        if not NORMS_AFTER:
            inverse = inverse_root(tl.sum(value * value, 1)[:, None], eps, D)
            if roots is not None:
                inverse = tl.where(is_v, inverse, tl.load(roots + row * 2 + is_k.to(tl.int32)))
            value = tl.where(is_normed, rounded(value * inverse * gain, IS_BF16), value)
            if ROPE:
                other_gain = tl.full((GROUP, W), 1, tl.float32)
                other_gain = _gain(q_gain, q_first + partner, is_q & (column < D), other_gain)
                other_gain = _gain(k_gain, k_first + partner, is_k & (column < D), other_gain)
                other = tl.where(is_normed, rounded(other * inverse * other_gain, IS_BF16), other)
    if ROPE:
        value = tl.where(is_turned & (is_v == 0), rounded(value * c + other * s, IS_BF16), value)
    if NORMS and NORMS_AFTER:
        inverse = inverse_root(tl.sum(value * value, 1)[:, None], eps, D)
        value = tl.where(is_normed, rounded(value * inverse * gain, IS_BF16), value)
    asked = value
    if warmth is not None:
        asked = value * tl.load(warmth + row)
    store_as(queries + row * (HEADS * D) + head * D + column, asked, inside & is_q)

    k_at = (head - HEADS) * D + column
    v_at = (head - HEADS - KV) * D + column
    is_k, is_v = is_k & inside, is_v & inside
    if PLACE != LOG:
        _put(own_k + row * (KV * D) + k_at, value, is_k)
        _put(own_v + row * (KV * D) + v_at, value, is_v)
    if PLACE != OWN:
        owner = tl.load(owners + row).to(tl.int64)
        position = tl.load(positions + row)
        is_kept = owner >= 0
        owner = tl.maximum(owner, 0)
        if PLACE == LOG:
            is_kept = is_kept & (position >= tl.load(write_from + owner))
            at = tl.load(table_rows + owner).to(tl.int64) * table_width + position // PAGE_ROWS
            page = tl.load(tables + at, mask=is_kept, other=0).to(tl.int64)
        elif PLACE == WINDOW_PAGES:  # what no later query sees has no page
            at = tl.load(table_rows + owner).to(tl.int64) * table_width + position // PAGE_ROWS
            page = tl.load(tables + at, mask=is_kept, other=-1).to(tl.int64)
            is_kept = is_kept & (page >= 0)
        else:
            page = tl.load(slots + owner * slot_stride + slot_column, mask=is_kept, other=0).to(tl.int64)
        there = (position % PAGE_ROWS).to(tl.int64) * (KV * D)
        _put(kept_k + page * k_page + there + k_at, value, is_k & is_kept)
        _put(kept_v + page * v_page + there + v_at, value, is_v & is_kept)


@triton.jit
def gate_heads(out, x, x_stride, bias, owners, D: tl.constexpr, W: tl.constexpr, HEADS: tl.constexpr, IS_BF16: tl.constexpr):
    """A head of a row, times the sigmoid of its gate, in place."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(owners + row) < 0:
        return
    head, column = tl.program_id(1), tl.arange(0, W)
    gate = _value(x + row * x_stride, bias, (2 * head + 1) * D + column, column < D, IS_BF16)
    out += (row * HEADS + head) * D + column
    value = tl.load(out, mask=column < D, other=0.0).to(tl.float32) / (1.0 + tl.exp(-gate))
    store_as(out, value, column < D)


# Attention ------------------------------------------------------------------------------------------------------------


@triton.jit
def _expanded(codes):
    """bf16 of e4m3 codes (uint8), exact: the bits placed read as e4m3 * 2^-120."""
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
        fma.rn.bf16x2 $0, a, m, z;
        fma.rn.bf16x2 $1, b, m, z;
        }""",
        "=&r,=&r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _operand(x, EXACT: tl.constexpr):
    """As the products take it: fp32 if EXACT, else bf16, which the interpreter holds in fp32."""
    if x.dtype == tl.uint8:
        if EXACT or INTERPRETED:
            x = e4m3_to_fp32(x)
        else:
            x = _expanded(x)
    elif EXACT or INTERPRETED:
        x = x.to(tl.float32)
    else:
        x = x.to(tl.bfloat16)
    return x


@triton.jit
def _loaded(rows, D: tl.constexpr, W: tl.constexpr, EXACT: tl.constexpr):
    """[rows, W] of D columns each, zeros behind them."""
    column = tl.arange(0, W)[None, :]
    if D == W:
        found = tl.load(rows[:, None] + column)
    else:
        found = tl.load(rows[:, None] + column, mask=column < D, other=0)
    return _operand(found, EXACT)


@triton.jit
def _low(position, oldest, WINDOW: tl.constexpr, RESET: tl.constexpr):
    """The first position that a query sees."""
    low = position * 0
    if WINDOW:
        low = tl.maximum(low, position - WINDOW + 1)
    if RESET:
        low = tl.maximum(low, position - position % RESET)
    if WINDOW or RESET:
        low = tl.maximum(low, oldest)
    return low


@triton.jit
def _walk(
    query, position, low, first, stop, least, most, own_k, own_v, kept_k, kept_v, k_page, v_page, table, ring_page, start,
    first_row, kv_head, factor, softcap,
    KV: tl.constexpr, D: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr, PAGE_ROWS: tl.constexpr, IN_LOG: tl.constexpr,
    IN_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax of the rows of `query` [M, W] over tiles [first, stop): peak, sums and unnormalised output.

    position, low  [M]: row m sees [low, position].   least, most  positions that some row sees lie between.
    """
    M: tl.constexpr = query.shape[0]
    peak = tl.full((M,), _LOWEST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, W), tl.float32)
    for tile in tl.range(first, stop, num_stages=STAGES):
        column = tile * TILE + tl.arange(0, TILE)
        at = tl.minimum(tl.maximum(column, least), most)
        if IN_LOG:
            page = tl.load(table + at // PAGE_ROWS).to(tl.int64)
            row = (at % PAGE_ROWS) * (KV * D) + kv_head * D
            key = _loaded(kept_k + page * k_page + row, D, W, EXACT)
        else:
            is_ring = at < start
            page = ring_page
            if IN_WINDOW:
                page = tl.load(table + at // PAGE_ROWS, mask=is_ring, other=0).to(tl.int64)
            row = (at % PAGE_ROWS).to(tl.int64) * (KV * D) + kv_head * D
            own_row = tl.where(is_ring, first_row, first_row + at - start).to(tl.int64) * (KV * D) + kv_head * D
            key = _loaded(tl.where(is_ring, kept_k + page * k_page + row, own_k + own_row), D, W, EXACT)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * factor
        if HAS_CAP:
            score = (softcap - 2 * softcap / (tl.exp2(score * (2 * _LOG2_E / softcap)) + 1)) * _LOG2_E
        is_seen = (column[None, :] <= position[:, None]) & (column[None, :] >= low[:, None])
        score = tl.where(is_seen, score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        shrink = tl.exp2(peak - new_peak)
        weight = tl.exp2(score - new_peak[:, None])
        total = total * shrink + tl.sum(weight, 1)
        peak = new_peak
        if not EXACT:
            weight = round_bf16(weight) if INTERPRETED else weight.to(tl.bfloat16)
        if IN_LOG:
            value = _loaded(kept_v + page * v_page + row, D, W, EXACT)
        else:
            value = _loaded(tl.where(is_ring, kept_v + page * v_page + row, own_v + own_row), D, W, EXACT)
        out = tl.dot(weight, value, out * shrink[:, None], input_precision="ieee")
    return peak, total, out


@triton.jit
def _with_sink(total, peak, sinks, head, mask):
    """The softmax's denominator; of no row and no sink something positive."""
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head, mask=mask, other=0.0) * _LOG2_E - peak)
    return tl.maximum(total, 1e-30)


@triton.jit
def _range(position, low, SPLITS: tl.constexpr, LEAST_TILES: tl.constexpr, TILE: tl.constexpr):
    """(first tile, one past the last, tiles of a split) of a query."""
    first, stop = low // TILE, position // TILE + 1
    return first, stop, tl.maximum((stop - first + SPLITS - 1) // SPLITS, LEAST_TILES)


@triton.jit(do_not_specialize=["slot_column"])
def attend_split(
    q, own_k, own_v, kept_k, kept_v, k_page, v_page, positions, owners, starts, first_rows, valid_from, table_rows, tables,
    table_width, slots, slot_stride, slot_column, partial, peaks, sums, factor, softcap,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, W: tl.constexpr, HEAD_TILE: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, LEAST_TILES: tl.constexpr, WINDOW: tl.constexpr, RESET: tl.constexpr, PAGE_ROWS: tl.constexpr,
    IN_LOG: tl.constexpr, IN_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (query x key/value head x part of its group, split)."""
    GROUP: tl.constexpr = HEADS // KV
    PARTS: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    t = (tl.program_id(0) // (KV * PARTS)).to(tl.int64)
    kv_head = tl.program_id(0) // PARTS % KV
    owner = tl.load(owners + t).to(tl.int64)
    if owner < 0:
        return
    position = tl.load(positions + t)
    oldest = tl.load(valid_from + owner)
    low = _low(position, oldest, WINDOW, RESET)
    first, stop, each = _range(position, low, SPLITS, LEAST_TILES, TILE)
    first += tl.program_id(1) * each
    if first >= stop:
        return
    stop = tl.minimum(stop, first + each)
    start = tl.load(starts + owner)
    first_row = tl.load(first_rows + owner)
    table = tables + tl.load(table_rows + owner).to(tl.int64) * table_width
    ring_page = first_row.to(tl.int64)
    if not IN_LOG and not IN_WINDOW:
        ring_page = tl.load(slots + owner * slot_stride + slot_column).to(tl.int64)
    of_group = tl.program_id(0) % PARTS * HEAD_TILE + tl.arange(0, HEAD_TILE)
    is_head = of_group < GROUP
    head = kv_head * GROUP + of_group
    column = tl.arange(0, W)[None, :]
    is_live = is_head[:, None] & (column < D)
    query = _operand(tl.load(q + t * (HEADS * D) + head[:, None] * D + column, mask=is_live, other=0.0), EXACT)
    each_row = tl.zeros((HEAD_TILE,), tl.int32)
    peak, total, out = _walk(
        query, each_row + position, each_row + low, first, stop, low, position, own_k, own_v, kept_k, kept_v, k_page, v_page,
        table, ring_page, start, first_row, kv_head, factor, softcap, KV, D, W, TILE, PAGE_ROWS, IN_LOG,
        IN_WINDOW, HAS_CAP, EXACT, STAGES,
    )  # fmt: skip
    base = (t * tl.num_programs(1) + tl.program_id(1)) * HEADS + head
    tl.store(peaks + base, peak, mask=is_head)
    tl.store(sums + base, total, mask=is_head)
    tl.store(partial + base[:, None] * D + column, out, mask=is_live)


@triton.jit
def combine(
    partial, peaks, sums, positions, owners, valid_from, sinks, out, grid_splits,
    HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, LEAST_TILES: tl.constexpr,
    SPLIT_ROWS: tl.constexpr, WINDOW: tl.constexpr, RESET: tl.constexpr, MOST: tl.constexpr = 0,
):  # fmt: skip
    """A head of a query. `grid_splits` follows from the step, SPLIT_ROWS (a power of two), and so the order of sums, does not.

    MOST  a query attends to so many rows at most, 0: to all that it sees.
    """
    t = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    owner = tl.load(owners + t).to(tl.int64)
    is_real = owner >= 0
    position = tl.load(positions + t)
    if MOST:
        position = tl.minimum(position, MOST - 1)
    oldest = tl.load(valid_from + tl.maximum(owner, 0))
    first, stop, each = _range(position, _low(position, oldest, WINDOW, RESET), SPLITS, LEAST_TILES, TILE)
    split = tl.arange(0, SPLIT_ROWS)
    is_live = is_real & (first + split * each < stop)
    base = (t * grid_splits + split) * HEADS + head
    column = tl.arange(0, W)
    own = tl.load(peaks + base, mask=is_live, other=_LOWEST)
    part = tl.load(sums + base, mask=is_live, other=0.0)
    mask = is_live[:, None] & (column < D)[None, :]
    found = tl.load(partial + base[:, None] * D + column[None, :], mask=mask, other=0.0)
    peak = tl.max(own, 0)
    share = tl.where(is_live, tl.exp2(own - peak), 0.0)
    total = _with_sink(tl.sum(share * part, 0), peak, sinks, head, is_real)
    value = tl.sum(found * share[:, None], 0) / total
    store_as(out + (t * HEADS + head) * D + column, tl.where(is_real, value, 0.0), column < D)


@triton.jit
def _tile_of(number, starts, stops, num_requests, QUERIES: tl.constexpr):
    """(request, tile of it) of tile `number` of all requests' tiles one after another; request -1 past the last."""
    request, tile, seen = -1, 0, 0
    for base in range(0, num_requests, _COUNTED):
        each = base + tl.arange(0, _COUNTED)
        is_one = each < num_requests
        rows = tl.load(stops + each, mask=is_one, other=0) - tl.load(starts + each, mask=is_one, other=0)
        tiles = (rows + QUERIES - 1) // QUERIES
        before = seen + tl.cumsum(tiles, 0) - tiles
        is_here = (number >= before) & (number < before + tiles)
        request = tl.maximum(request, tl.max(tl.where(is_here, each, -1), 0))
        tile = tl.maximum(tile, tl.max(tl.where(is_here, number - before, 0), 0))
        seen += tl.sum(tiles, 0)
    return request, tile


@triton.jit(do_not_specialize=["slot_column", "num_rows", "num_requests"])
def attend_tiles(
    q, own_k, own_v, kept_k, kept_v, k_page, v_page, owners, starts, stops, first_rows, valid_from, table_rows, tables,
    table_width, slots, slot_stride, slot_column, sinks, out, factor, softcap, num_rows, num_requests,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, W: tl.constexpr, HEAD_TILE: tl.constexpr, QUERIES: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, RESET: tl.constexpr, PAGE_ROWS: tl.constexpr, IN_LOG: tl.constexpr,
    IN_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, the longest first; key/value head x part of its group). Rows of padding become zeros."""
    GROUP: tl.constexpr = HEADS // KV
    PARTS: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    M: tl.constexpr = QUERIES * HEAD_TILE
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // PARTS
    m = tl.arange(0, M)
    of_group = tl.program_id(1) % PARTS * HEAD_TILE + m % HEAD_TILE
    head = kv_head * GROUP + of_group
    column = tl.arange(0, W)[None, :]
    is_head = (of_group < GROUP)[:, None] & (column < D)
    padding = number * QUERIES + m // HEAD_TILE
    is_padding = tl.load(owners + padding, mask=padding < num_rows, other=0) < 0
    if tl.max(is_padding.to(tl.int32), 0):
        at = padding.to(tl.int64)[:, None] * (HEADS * D) + head[:, None] * D + column
        store_as(out + at, tl.zeros((M, W), tl.float32), is_head & is_padding[:, None])
    owner, tile = _tile_of(number, starts, stops, num_requests, QUERIES)
    if owner < 0:
        return
    start = tl.load(starts + owner)
    stop = tl.load(stops + owner)
    first_row = tl.load(first_rows + owner)
    oldest = tl.load(valid_from + owner)
    table = tables + tl.load(table_rows + owner).to(tl.int64) * table_width
    ring_page = first_row.to(tl.int64)
    if not IN_LOG and not IN_WINDOW:
        ring_page = tl.load(slots + owner.to(tl.int64) * slot_stride + slot_column).to(tl.int64)
    begin = start + tile * QUERIES
    position = begin + m // HEAD_TILE
    is_query = position < stop
    last = tl.minimum(begin + QUERIES, stop) - 1
    least = _low(begin, oldest, WINDOW, RESET)
    low = _low(position, oldest, WINDOW, RESET)
    position = tl.where(is_query, position, -1)  # sees nothing
    row = (first_row + tl.where(is_query, position - start, 0)).to(tl.int64)
    at = row[:, None] * (HEADS * D) + head[:, None] * D + column
    is_live = is_head & is_query[:, None]
    query = _operand(tl.load(q + at, mask=is_live, other=0.0), EXACT)
    peak, total, found = _walk(
        query, position, low, least // TILE, last // TILE + 1, least, last, own_k, own_v, kept_k, kept_v, k_page, v_page, table,
        ring_page, start, first_row, kv_head, factor, softcap, KV, D, W, TILE, PAGE_ROWS, IN_LOG,
        IN_WINDOW, HAS_CAP, EXACT, STAGES,
    )  # fmt: skip
    total = _with_sink(total, peak, sinks, head, of_group < GROUP)
    store_as(out + at, found / total[:, None], is_live)
