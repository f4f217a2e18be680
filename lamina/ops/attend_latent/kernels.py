# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment,misc"
"""Triton kernels of attention over latents; `triton.py` calls them and says what each argument is.

    project_latent     a projection's rows -> latents, normed, and rotated keys in the log; queries, of which the last dims turn
    attend_split       decode: one query, some heads, a range of tiles    -> sums, peak, unnormalised output
    attend_tiles       prefill: QUERIES queries of one request, some heads
    attend_listed      prefill of rows that are listed for each query: one query, some heads

A row of the log is R dims of a latent, which are key and value, and P rotated ones, which belong to the key alone; or, if latents
are codes (uint8), rows of `scales` and `turns` have a power of two for every 128 of the R dims, and the P rotated ones. As in
`attend_heads`: tiles of TILE positions begin at multiples of TILE; instead of a position that no query of a program sees the last
one is read that some query sees, with weight 0; scores are kept in units of log 2; rows of matrices are queries x heads, heads
fastest. `attend_heads.combine` puts the ranges of a decode together. Where rows are listed, what is said of positions is said of
places in the list.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.attend_heads.kernels import _LOWEST, _loaded, _operand, _range, _tile_of, _value
from lamina.ops.quantise.kernels import power, quantise_e4m3, round_bf16, rounded
from lamina.ops.rope_norm.kernels import INTERPRETED, inverse_root, store_as

# Queries and latents --------------------------------------------------------------------------------------------------


@triton.jit
def _turned(x, bias, at, cos, sin, column, inside, P: tl.constexpr, IS_PAIRS: tl.constexpr, IS_BF16: tl.constexpr):
    """P values of x at `at` + column, turned in pairs (2i, 2i + 1) or (i, i + P / 2)."""
    HALF: tl.constexpr = P // 2
    if IS_PAIRS:
        angle, is_first, partner = column // 2, column % 2 == 0, column ^ 1
    else:
        is_first = column < HALF
        angle = column % HALF
        partner = tl.where(is_first, column + HALF, column - HALF)
    c = tl.load(cos + angle, mask=column < P, other=1.0)
    s = tl.load(sin + angle, mask=column < P, other=0.0)
    own = _value(x, bias, at + column, inside, IS_BF16)
    other = _value(x, bias, at + partner, inside, IS_BF16)
    return rounded(own * c + other * tl.where(is_first, -s, s), IS_BF16)


@triton.jit
def _keep_latent(
    row, x, bias, gain, cos, sin, kept, scales, turns, k_page, s_page, t_page, positions, owners, write_from, table_rows, tables,
    table_width, eps,
    R: tl.constexpr, WR: tl.constexpr, P: tl.constexpr, WP: tl.constexpr, IS_PAIRS: tl.constexpr, PAGE_ROWS: tl.constexpr,
    IS_BF16: tl.constexpr,
):  # fmt: skip
    """A row's latent and rotated key, into the log."""
    owner = tl.load(owners + row).to(tl.int64)
    position = tl.load(positions + row)
    is_kept = owner >= 0
    owner = tl.maximum(owner, 0)
    is_kept = is_kept & (position >= tl.load(write_from + owner))
    at = tl.load(table_rows + owner).to(tl.int64) * table_width + position // PAGE_ROWS
    page = tl.load(tables + at, mask=is_kept, other=0).to(tl.int64)
    at = (position % PAGE_ROWS).to(tl.int64)
    column = tl.arange(0, WR)
    value = _value(x, bias, column, column < R, IS_BF16)
    inverse = inverse_root(tl.sum(value * value, 0), eps, R)
    value = rounded(value * inverse * tl.load(gain + column, mask=column < R, other=0.0), IS_BF16)
    if kept.dtype.element_ty == tl.uint8:
        BLOCK: tl.constexpr = 128 if WR > 128 else WR
        COUNT: tl.constexpr = (R + 127) // 128
        code, byte = quantise_e4m3(value.reshape(WR // BLOCK, BLOCK), 1)
        tl.store(kept + page * k_page + at * R + column, code.reshape(WR), mask=(column < R) & is_kept)
        block = tl.arange(0, WR // BLOCK)
        tl.store(scales + page * s_page + at * COUNT + block, power(byte), mask=(block < COUNT) & is_kept)
        turns += page * t_page + at * P
    else:
        kept += page * k_page + at * (R + P)
        store_as(kept + column, value, (column < R) & is_kept)
        turns = kept + R
    rotary = tl.arange(0, WP)
    key = _turned(x, bias, R, cos, sin, rotary, rotary < P, P, IS_PAIRS, IS_BF16)
    store_as(turns + rotary, key, (rotary < P) & is_kept)


@triton.jit
def _split_queries(
    row, head, x, bias, cos, sin, plain, turned,
    HEADS: tl.constexpr, NOPE: tl.constexpr, WN: tl.constexpr, P: tl.constexpr, WP: tl.constexpr, IS_PAIRS: tl.constexpr,
    IS_BF16: tl.constexpr,
):  # fmt: skip
    """Some heads of a row."""
    column = tl.arange(0, WN)[None, :]
    inside = (head < HEADS) & (column < NOPE)
    value = _value(x, bias, head * (NOPE + P) + column, inside, IS_BF16)
    store_as(plain + row * (HEADS * NOPE) + head * NOPE + column, value, inside)
    rotary = tl.arange(0, WP)[None, :]
    within = (head < HEADS) & (rotary < P)
    found = _turned(x, bias, head * (NOPE + P) + NOPE, cos, sin, rotary, within, P, IS_PAIRS, IS_BF16)
    store_as(turned + row * (HEADS * P) + head * P + rotary, found, within)


@triton.jit
def project_latent(
    q, q_stride, q_bias, latent, latent_stride, latent_bias, gain, cos, sin, plain, turned, kept, scales, turns, k_page, s_page,
    t_page, positions, owners, write_from, table_rows, tables, table_width, eps,
    HEADS: tl.constexpr, NOPE: tl.constexpr, WN: tl.constexpr, R: tl.constexpr, WR: tl.constexpr, P: tl.constexpr,
    WP: tl.constexpr, GROUP: tl.constexpr, IS_PAIRS: tl.constexpr, PAGE_ROWS: tl.constexpr, IS_BF16: tl.constexpr,
):  # fmt: skip
    """Program (row, 0): its latent and key; (row, 1 + n): the n-th GROUP heads."""
    row = tl.program_id(0).to(tl.int64)
    cos += row * (P // 2)
    sin += row * (P // 2)
    if tl.program_id(1) == 0:
        _keep_latent(
            row, latent + row * latent_stride, latent_bias, gain, cos, sin, kept, scales, turns, k_page, s_page, t_page,
            positions, owners, write_from, table_rows, tables, table_width, eps, R, WR, P, WP, IS_PAIRS, PAGE_ROWS, IS_BF16,
        )  # fmt: skip
    else:
        head = (tl.program_id(1) - 1) * GROUP + tl.arange(0, GROUP)[:, None]
        _split_queries(
            row, head, q + row * q_stride, q_bias, cos, sin, plain, turned, HEADS, NOPE, WN, P, WP, IS_PAIRS, IS_BF16
        )  # fmt: skip


# Attention ------------------------------------------------------------------------------------------------------------


@triton.jit
def _read(
    kept, scales, turns, k_page, s_page, t_page, page, row,
    R: tl.constexpr, WR: tl.constexpr, P: tl.constexpr, WP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(latents [rows, WR], rotated dims [rows, WP]) of rows of pages, as products take them."""
    if kept.dtype.element_ty == tl.uint8:
        BLOCK: tl.constexpr = 128 if WR > 128 else WR
        BLOCKS: tl.constexpr = WR // BLOCK
        COUNT: tl.constexpr = (R + 127) // 128
        latent = _loaded(kept + page * k_page + row * R, R, WR, EXACT)
        block = tl.arange(0, BLOCKS)[None, :]
        at = (scales + page * s_page + row * COUNT)[:, None] + block
        if BLOCKS == COUNT:
            scale = tl.load(at)
        else:
            scale = tl.load(at, mask=block < COUNT, other=1.0)
        if BLOCKS == 1:
            latent = latent * scale.to(latent.dtype)
        else:
            rows: tl.constexpr = latent.shape[0]
            latent = latent.reshape(rows, BLOCKS, BLOCK) * scale.to(latent.dtype)[:, :, None]  # exact: powers of two
            latent = latent.reshape(rows, WR)
        key = _loaded(turns + page * t_page + row * P, P, WP, EXACT)
    else:
        at = kept + page * k_page + row * (R + P)
        latent = _loaded(at, R, WR, EXACT)
        key = _loaded(at + R, P, WP, EXACT)
    return latent, key


@triton.jit
def _walk(
    query, turned, position, first, stop, most, kept, scales, turns, k_page, s_page, t_page, table, factor,
    R: tl.constexpr, WR: tl.constexpr, P: tl.constexpr, WP: tl.constexpr, TILE: tl.constexpr, PAGE_ROWS: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Online softmax of the rows of `query` [M, WR] and `turned` [M, WP] over tiles [first, stop): peak, sums and output.

    position  [M]: row m sees [0, position].   most  the last that some row sees.
    table  the pages of a request's blocks; LISTED: page * PAGE_ROWS + row in the page of each row that is seen.
    """
    M: tl.constexpr = query.shape[0]
    peak = tl.full((M,), _LOWEST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, WR), tl.float32)
    for tile in tl.range(first, stop, num_stages=STAGES):
        column = tile * TILE + tl.arange(0, TILE)
        at = tl.minimum(column, most)
        if LISTED:
            at = tl.load(table + at)
            page = (at // PAGE_ROWS).to(tl.int64)
        else:
            page = tl.load(table + at // PAGE_ROWS).to(tl.int64)
        latent, key = _read(kept, scales, turns, k_page, s_page, t_page, page, at % PAGE_ROWS, R, WR, P, WP, EXACT)
        score = tl.dot(query, tl.trans(latent), input_precision="ieee")
        score = tl.dot(turned, tl.trans(key), score, input_precision="ieee") * factor
        score = tl.where(column[None, :] <= position[:, None], score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        shrink = tl.exp2(peak - new_peak)
        weight = tl.exp2(score - new_peak[:, None])
        total = total * shrink + tl.sum(weight, 1)
        peak = new_peak
        if not EXACT:
            weight = round_bf16(weight) if INTERPRETED else weight.to(tl.bfloat16)
        out = tl.dot(weight, latent, out * shrink[:, None], input_precision="ieee")
    return peak, total, out


@triton.jit
def attend_split(
    q, q_turned, kept, scales, turns, k_page, s_page, t_page, positions, owners, table_rows, tables, table_width, places,
    partial, peaks, sums, factor,
    HEADS: tl.constexpr, R: tl.constexpr, WR: tl.constexpr, P: tl.constexpr, WP: tl.constexpr, HEAD_TILE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, LEAST_TILES: tl.constexpr, PAGE_ROWS: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """Program (query x part of the heads, split). TOP_K: the most rows that are listed for a query, 0: it sees all."""
    PARTS: tl.constexpr = (HEADS + HEAD_TILE - 1) // HEAD_TILE
    t = (tl.program_id(0) // PARTS).to(tl.int64)
    owner = tl.load(owners + t).to(tl.int64)
    if owner < 0:
        return
    position = tl.load(positions + t)
    if TOP_K:
        position = tl.minimum(position, TOP_K - 1)
    first, stop, each = _range(position, position * 0, SPLITS, LEAST_TILES, TILE)
    first += tl.program_id(1) * each
    if first >= stop:
        return
    stop = tl.minimum(stop, first + each)
    if TOP_K:
        table = places + t * TOP_K
    else:
        table = tables + tl.load(table_rows + owner).to(tl.int64) * table_width
    head = tl.program_id(0) % PARTS * HEAD_TILE + tl.arange(0, HEAD_TILE)
    is_head = head < HEADS
    column = tl.arange(0, WR)[None, :]
    rotary = tl.arange(0, WP)[None, :]
    is_live = is_head[:, None] & (column < R)
    at = t * HEADS + head[:, None]
    query = _operand(tl.load(q + at * R + column, mask=is_live, other=0.0), EXACT)
    turned = _operand(tl.load(q_turned + at * P + rotary, mask=is_head[:, None] & (rotary < P), other=0.0), EXACT)
    seen = tl.zeros((HEAD_TILE,), tl.int32) + position
    peak, total, out = _walk(
        query, turned, seen, first, stop, position, kept, scales, turns, k_page, s_page, t_page, table, factor, R, WR, P, WP,
        TILE, PAGE_ROWS, EXACT, STAGES, TOP_K > 0,
    )  # fmt: skip
    base = (t * tl.num_programs(1) + tl.program_id(1)) * HEADS + head
    tl.store(peaks + base, peak, mask=is_head)
    tl.store(sums + base, total, mask=is_head)
    tl.store(partial + base[:, None] * R + column, out, mask=is_live)


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def attend_tiles(
    q, q_turned, kept, scales, turns, k_page, s_page, t_page, owners, starts, stops, first_rows, table_rows, tables, table_width,
    out, factor, num_rows, num_requests,
    HEADS: tl.constexpr, R: tl.constexpr, WR: tl.constexpr, P: tl.constexpr, WP: tl.constexpr, HEAD_TILE: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, PAGE_ROWS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, the longest first; part of the heads). Rows of padding become zeros."""
    M: tl.constexpr = QUERIES * HEAD_TILE
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    m = tl.arange(0, M)
    head = tl.program_id(1) * HEAD_TILE + m % HEAD_TILE
    column = tl.arange(0, WR)[None, :]
    rotary = tl.arange(0, WP)[None, :]
    is_head = (head < HEADS)[:, None]
    padding = number * QUERIES + m // HEAD_TILE
    is_padding = tl.load(owners + padding, mask=padding < num_rows, other=0) < 0
    if tl.max(is_padding.to(tl.int32), 0):
        at = padding.to(tl.int64)[:, None] * HEADS + head[:, None]
        store_as(out + at * R + column, tl.zeros((M, WR), tl.float32), is_head & is_padding[:, None] & (column < R))
    owner, tile = _tile_of(number, starts, stops, num_requests, QUERIES)
    if owner < 0:
        return
    start = tl.load(starts + owner)
    stop = tl.load(stops + owner)
    table = tables + tl.load(table_rows + owner).to(tl.int64) * table_width
    begin = start + tile * QUERIES
    position = begin + m // HEAD_TILE
    is_query = position < stop
    last = tl.minimum(begin + QUERIES, stop) - 1
    row = (tl.load(first_rows + owner) + tl.where(is_query, position - start, 0)).to(tl.int64)
    position = tl.where(is_query, position, -1)  # sees nothing
    at = row[:, None] * HEADS + head[:, None]
    is_live = is_head & is_query[:, None]
    query = _operand(tl.load(q + at * R + column, mask=is_live & (column < R), other=0.0), EXACT)
    turned = _operand(tl.load(q_turned + at * P + rotary, mask=is_live & (rotary < P), other=0.0), EXACT)
    _, total, found = _walk(
        query, turned, position, 0, last // TILE + 1, last, kept, scales, turns, k_page, s_page, t_page, table, factor, R, WR, P,
        WP, TILE, PAGE_ROWS, EXACT, STAGES, False,
    )  # fmt: skip
    store_as(out + at * R + column, found / tl.maximum(total, 1e-30)[:, None], is_live & (column < R))


@triton.jit
def attend_listed(
    q, q_turned, kept, scales, turns, k_page, s_page, t_page, positions, owners, places, out, factor,
    HEADS: tl.constexpr, R: tl.constexpr, WR: tl.constexpr, P: tl.constexpr, WP: tl.constexpr, HEAD_TILE: tl.constexpr,
    TILE: tl.constexpr, PAGE_ROWS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """Program (query, part of the heads) over the rows that are listed for the query. Rows of padding become zeros."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    column = tl.arange(0, WR)[None, :]
    rotary = tl.arange(0, WP)[None, :]
    is_head = (head < HEADS)[:, None]
    at = t * HEADS + head[:, None]
    if tl.load(owners + t) < 0:
        store_as(out + at * R + column, tl.zeros((HEAD_TILE, WR), tl.float32), is_head & (column < R))
        return
    last = tl.minimum(tl.load(positions + t), TOP_K - 1)
    query = _operand(tl.load(q + at * R + column, mask=is_head & (column < R), other=0.0), EXACT)
    turned = _operand(tl.load(q_turned + at * P + rotary, mask=is_head & (rotary < P), other=0.0), EXACT)
    seen = tl.zeros((HEAD_TILE,), tl.int32) + last
    _, total, found = _walk(
        query, turned, seen, 0, last // TILE + 1, last, kept, scales, turns, k_page, s_page, t_page, places + t * TOP_K, factor,
        R, WR, P, WP, TILE, PAGE_ROWS, EXACT, STAGES, True,
    )  # fmt: skip
    store_as(out + at * R + column, found / total[:, None], is_head & (column < R))
