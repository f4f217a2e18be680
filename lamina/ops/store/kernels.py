# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Rows as they are stored: a codec's fields from registers, rings, hidden vectors, queries of an index.

A codec is one of four formats, its fields a tuple of pointers. Addresses of the arena are page * stride + row * width, 64 bits.
"""

from typing import NamedTuple

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.quantise.kernels import (
    fp4_scale_byte,
    fp8_scale_byte,
    fp32_to_e2m1,
    fp32_to_e4m3,
    inverse_power,
    largest_bits,
    power,
    quantise_e4m3,
    rounded,
)
from lamina.ops.rope_norm.kernels import low_rank_row, normed, query_heads, rotated, store_as, turns

#: formats: the values themselves; an attention entry in fp8; an index key in fp8 and in fp4 (from 2 on: spread first)
PLAIN, ENTRY_FP8, INDEX_FP8, INDEX_FP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


class Fields(NamedTuple):
    """A pointer a field, elements from a page to the next, elements of a row. Outside the arena: pages of one row."""

    pointers: tuple[object, ...]
    strides: tuple[int, ...]


class LowRank(NamedTuple):
    """The query's low-rank row: input and its row stride, weight; what is written (`values` would be Triton's own name)."""

    x: object
    stride: int
    weight: object
    kept: object
    codes: object
    scales: object


class Entry(NamedTuple):
    """The key-value row: input and its row stride, weight; the step's own encoded rows, and the ring they also go to."""

    x: object
    stride: int
    weight: object
    own: tuple[object, ...]
    ring: Fields


class Key(NamedTuple):
    """The index key of a row: input and its row stride, the layer norm's weight and bias, the log that it goes to."""

    x: object
    stride: int
    weight: object
    bias: object
    log: Fields


class Queries(NamedTuple):
    """Heads of a projection: input and its row stride; what is written, one field of values or a codec's fields."""

    x: object
    stride: int
    out: tuple[object, ...]


@triton.jit
def hadamard(x):
    """x [rows, N]: butterflies at distance 1, 2, 4, ..., then one product, in the order of `quantise.ref.hadamard`."""
    rows: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    for level in tl.static_range(16):
        if (1 << level) < N:
            pairs = x.reshape(rows, N // (2 << level), 2, 1 << level).permute(0, 1, 3, 2)
            first, second = pairs.split()
            x = tl.join(first + second, first - second).permute(0, 1, 3, 2).reshape(rows, N)
    return x * (N**-0.5)


@triton.jit
def _put_entry(x, codes, rope, scales, live, D: tl.constexpr, ROPE: tl.constexpr):
    """fp8 where the row does not turn, with a scale every 64; bf16 where it does. The pointers [rows] say where rows begin."""
    rows: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    BLOCK: tl.constexpr = 64 if W > 64 else W
    BLOCKS: tl.constexpr = W // BLOCK
    NOPE: tl.constexpr = D - ROPE
    COUNT: tl.constexpr = (NOPE + 63) // 64
    PADDED: tl.constexpr = (COUNT + 7) // 8 * 8
    column = tl.arange(0, W)[None, :]
    coded = tl.where(column < NOPE, x, 0.0).reshape(rows, BLOCKS, BLOCK)
    code, byte = quantise_e4m3(coded, 2)
    tl.store(codes[:, None] + column, code.reshape(rows, W), mask=live[:, None] & (column < NOPE))
    store_as(rope[:, None] + (column - NOPE), x, live[:, None] & (column >= NOPE) & (column < D))
    number = tl.arange(0, BLOCKS)[None, :]
    byte = tl.where(number < COUNT, byte, 0).to(tl.uint8)
    tl.store(scales[:, None] + number, byte, mask=live[:, None] & (number < PADDED))
    if BLOCKS < PADDED:  # 8 of them: with more blocks than that, all scales are in the tile
        spare = tl.arange(0, 8)[None, :]
        tl.store(scales[:, None] + spare, tl.zeros((rows, 8), tl.uint8), mask=live[:, None] & (spare >= BLOCKS))


@triton.jit
def _put_fp8(x, codes, scales, live):
    """An index row with one fp32 scale."""
    byte = fp8_scale_byte(largest_bits(x, 1))
    column = tl.arange(0, x.shape[1])[None, :]
    tl.store(codes[:, None] + column, fp32_to_e4m3(x * inverse_power(byte)[:, None]), mask=live[:, None])
    tl.store(scales, power(byte), mask=live)


@triton.jit
def _put_fp4(x, codes, scales, live):
    """An index row, two codes a byte, a scale every 32."""
    rows: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    BLOCK: tl.constexpr = 32 if W > 32 else W
    blocks = x.reshape(rows, W // BLOCK, BLOCK)
    byte = fp4_scale_byte(largest_bits(blocks, 2))
    code = fp32_to_e2m1(blocks * inverse_power(byte)[:, :, None])
    even, odd = code.reshape(rows, W // 2, 2).split()
    tl.store(codes[:, None] + tl.arange(0, W // 2)[None, :], (even + 16 * odd).to(tl.uint8), mask=live[:, None])
    tl.store(scales[:, None] + tl.arange(0, W // BLOCK)[None, :], byte.to(tl.uint8), mask=live[:, None])


@triton.jit
def put(x, rows, live, D: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr):
    """Encodes x [rows, W] fp32 (index formats: after `spread`); rows: a tuple with pointers [rows] to the rows of each field."""
    if FORMAT == ENTRY_FP8:
        _put_entry(x, rows[0], rows[1], rows[2], live, D, ROPE)
    elif FORMAT == INDEX_FP8:
        _put_fp8(x, rows[0], rows[1], live)
    elif FORMAT == INDEX_FP4:
        _put_fp4(x, rows[0], rows[1], live)
    else:
        column = tl.arange(0, x.shape[1])[None, :]
        store_as(rows[0][:, None] + column, x, live[:, None] & (column < D))


@triton.jit
def spread(x, FORMAT: tl.constexpr):
    """x times the Hadamard matrix where the format asks for it."""
    if FORMAT >= INDEX_FP8:
        x = hadamard(x)
    return x


@triton.jit
def rows_at(fields, page, row, WIDTHS: tl.constexpr):
    """Pointers to row `row` of page `page` of each field; both int64."""
    found = ()
    for field in tl.static_range(len(WIDTHS)):
        found += (fields.pointers[field] + page * fields.strides[field] + row * WIDTHS[field],)
    return found


@triton.jit
def step_rows(pointers, row, WIDTHS: tl.constexpr):
    """Pointers to row `row` of each field of a step's own rows."""
    found = ()
    for field in tl.static_range(len(WIDTHS)):
        found += (pointers[field] + row * WIDTHS[field],)
    return found


@triton.jit
def entry_row(
    entry, cos, sin, positions, owners, slots, slot_stride, slot_column, row, eps,
    D: tl.constexpr, ROPE: tl.constexpr, W: tl.constexpr, RING: tl.constexpr, FORMAT: tl.constexpr, WIDTHS: tl.constexpr,
    IS_BF16: tl.constexpr, IS_SINGLE: tl.constexpr,
):  # fmt: skip
    """One key-value row: norm, rotation, encoded; a request's only row goes to its ring at once."""
    column = tl.arange(0, W)[None, :]
    inside = column < D
    x = tl.load(entry.x + row * entry.stride + column, mask=inside, other=0.0).to(tl.float32)
    if IS_SINGLE:
        owner = tl.load(owners + row)
        place = (tl.load(positions + row) % RING).to(tl.int64)
    gain = tl.load(entry.weight + column, mask=inside, other=0.0)
    turn = turns(cos + row * (ROPE // 2), sin + row * (ROPE // 2), D, ROPE, W)
    if IS_SINGLE:
        page = tl.load(slots + owner.to(tl.int64) * slot_stride + slot_column, mask=owner >= 0, other=0).to(tl.int64)
    x = rounded(rotated(normed(rounded(x, IS_BF16), eps, D) * gain, turn, D, ROPE), IS_BF16)
    one = tl.zeros((1,), tl.int64)
    put(x, step_rows(entry.own, row + one, WIDTHS), one == 0, D, ROPE, FORMAT)
    if IS_SINGLE:
        put(x, rows_at(entry.ring, page + one, place + one, WIDTHS), (owner >= 0) & (one == 0), D, ROPE, FORMAT)


@triton.jit(do_not_specialize=["slot_column"])
def encode_rows(
    entry, cos, sin, positions, owners, slots, slot_stride, slot_column, eps,
    D: tl.constexpr, ROPE: tl.constexpr, W: tl.constexpr, RING: tl.constexpr, FORMAT: tl.constexpr, WIDTHS: tl.constexpr,
    IS_BF16: tl.constexpr, IS_SINGLE: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    entry_row(
        entry, cos, sin, positions, owners, slots, slot_stride, slot_column, tl.program_id(0).to(tl.int64), eps,
        D, ROPE, W, RING, FORMAT, WIDTHS, IS_BF16, IS_SINGLE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slot_column"])
def project_epilogue(
    low, entry, cos, sin, positions, owners, slots, slot_stride, slot_column, eps,
    K: tl.constexpr, BLOCKS: tl.constexpr, IS_FP8: tl.constexpr,
    D: tl.constexpr, ROPE: tl.constexpr, W: tl.constexpr, RING: tl.constexpr, FORMAT: tl.constexpr, WIDTHS: tl.constexpr,
    IS_BF16: tl.constexpr, IS_SINGLE: tl.constexpr,
):  # fmt: skip
    """Two programs a row: the query's low rank, the key-value row."""
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        low_rank_row(low.x, low.stride, low.weight, low.kept, low.codes, low.scales, row, eps, K, BLOCKS, IS_BF16, IS_FP8)
    else:
        entry_row(
            entry, cos, sin, positions, owners, slots, slot_stride, slot_column, row, eps,
            D, ROPE, W, RING, FORMAT, WIDTHS, IS_BF16, IS_SINGLE,
        )  # fmt: skip


@triton.jit
def index_heads(
    queries, cos, sin, row, first,
    HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr,
    FORMAT: tl.constexpr, WIDTHS: tl.constexpr, IS_BF16: tl.constexpr = False,
):  # fmt: skip
    """GROUP heads of one row from head `first` on: rotation, rounded if IS_BF16, Hadamard, encoded."""
    head = first + tl.arange(0, GROUP)
    column = tl.arange(0, W)
    live = head < HEADS
    x = queries.x + row * queries.stride + head[:, None] * D + column[None, :]
    x = tl.load(x, mask=live[:, None] & (column < D)[None, :], other=0.0).to(tl.float32)
    x = rounded(rotated(x, turns(cos + row * (ROPE // 2), sin + row * (ROPE // 2), D, ROPE, W), D, ROPE), IS_BF16)
    put(spread(x, FORMAT), step_rows(queries.out, row * HEADS + head, WIDTHS), live, D, ROPE, FORMAT)


@triton.jit
def encode_queries(
    queries, cos, sin,
    HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr,
    FORMAT: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """One program for GROUP heads of a row."""
    TILES: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    row = (tl.program_id(0) // TILES).to(tl.int64)
    index_heads(queries, cos, sin, row, tl.program_id(0) % TILES * GROUP, HEADS, D, ROPE, GROUP, W, FORMAT, WIDTHS)


@triton.jit
def query_epilogue(
    main, index, cos, sin, eps,
    HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr,
    INDEX_HEADS: tl.constexpr, INDEX_D: tl.constexpr, INDEX_GROUP: tl.constexpr, INDEX_W: tl.constexpr,
    ROPE: tl.constexpr, FORMAT: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """Programs of a row: first its attention heads, GROUP each, then its index heads."""
    MAIN: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    TILES: tl.constexpr = MAIN + (INDEX_HEADS + INDEX_GROUP - 1) // INDEX_GROUP
    row = (tl.program_id(0) // TILES).to(tl.int64)
    tile = tl.program_id(0) % TILES
    if tile < MAIN:
        query_heads(main.x, main.stride, main.out[0], cos, sin, row, tile * GROUP, eps, HEADS, D, ROPE, GROUP, W)
    else:
        first = (tile - MAIN) * INDEX_GROUP
        index_heads(index, cos, sin, row, first, INDEX_HEADS, INDEX_D, ROPE, INDEX_GROUP, INDEX_W, FORMAT, WIDTHS)


@triton.jit
def _keep_key(
    key, cos, sin, positions, owners, write_from, table_rows, tables, table_width, row, eps,
    D: tl.constexpr, ROPE: tl.constexpr, W: tl.constexpr, PAGE_ROWS: tl.constexpr, FORMAT: tl.constexpr, WIDTHS: tl.constexpr,
    IS_BF16: tl.constexpr,
):  # fmt: skip
    """One row's index key, from a layer norm to the log."""
    one = tl.zeros((1,), tl.int64)
    owner = tl.load(owners + row + one)
    position = tl.load(positions + row + one)
    is_kept = owner >= 0
    owner = tl.maximum(owner, 0).to(tl.int64)
    is_kept = is_kept & (position >= tl.load(write_from + owner))
    at = tl.load(table_rows + owner).to(tl.int64) * table_width + position // PAGE_ROWS
    page = tl.load(tables + at, mask=is_kept, other=0).to(tl.int64)
    column = tl.arange(0, W)[None, :]
    inside = column < D
    x = rounded(tl.load(key.x + row * key.stride + column, mask=inside, other=0.0).to(tl.float32), IS_BF16)
    x = tl.where(inside, x - (tl.sum(x, 1) * (1.0 / D))[:, None], 0.0)
    x = normed(x, eps, D) * tl.load(key.weight + column, mask=inside, other=0.0)
    x = rounded(x + tl.load(key.bias + column, mask=inside, other=0.0), IS_BF16)
    x = rounded(rotated(x, turns(cos + row * (ROPE // 2), sin + row * (ROPE // 2), D, ROPE, W), D, ROPE), IS_BF16)
    put(spread(x, FORMAT), rows_at(key.log, page, (position % PAGE_ROWS).to(tl.int64), WIDTHS), is_kept, D, ROPE, FORMAT)


@triton.jit
def index_epilogue(
    key, queries, cos, sin, positions, owners, write_from, table_rows, tables, table_width, eps,
    HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr, PAGE_ROWS: tl.constexpr,
    FORMAT: tl.constexpr, WIDTHS: tl.constexpr, IS_BF16: tl.constexpr,
):  # fmt: skip
    """Program (row, 0): its key, into the log; (row, 1 + n): the n-th GROUP heads of its queries."""
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _keep_key(
            key, cos, sin, positions, owners, write_from, table_rows, tables, table_width, row, eps,
            D, ROPE, W, PAGE_ROWS, FORMAT, WIDTHS, IS_BF16,
        )  # fmt: skip
    else:
        first = (tl.program_id(1) - 1) * GROUP
        index_heads(queries, cos, sin, row, first, HEADS, D, ROPE, GROUP, W, FORMAT, WIDTHS, IS_BF16)


@triton.jit
def _copy(source, target, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    column = tl.arange(0, SIZE)
    inside = column < WIDTH
    tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["slot_column"])
def keep_rows(
    own, ring, positions, owners, stops, slots, slot_stride, slot_column,
    RING: tl.constexpr, WIDTHS: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """One program a row: to its ring, if it is one of the last RING of its request. SIZES: powers of two."""
    row = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + row)
    if owner < 0:
        return
    position = tl.load(positions + row)
    if position < tl.load(stops + owner) - RING:
        return
    page = tl.load(slots + owner.to(tl.int64) * slot_stride + slot_column).to(tl.int64)
    target = rows_at(ring, page, (position % RING).to(tl.int64), WIDTHS)
    source = step_rows(own, row, WIDTHS)
    for field in tl.static_range(len(WIDTHS)):
        _copy(source[field], target[field], WIDTHS[field], SIZES[field])


@triton.jit(do_not_specialize=["slot_column"])
def keep_hidden(
    hidden, hidden_stride, kept, kept_stride, starts, stops, first_rows, drafts, slots, slot_stride, slot_column,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Program (request, part of the columns, back): the row before its last `back` ones to its slot, if it may be its last.

    A slot has STATES rows; that after q tokens is row q mod STATES.
    """
    request = tl.program_id(0).to(tl.int64)
    back = tl.program_id(2)
    stop = tl.load(stops + request)
    count = stop - tl.load(starts + request)
    if count <= back:
        return
    if back > 0 and back > tl.load(drafts + request):
        return
    row = (tl.load(first_rows + request) + count - 1 - back).to(tl.int64)
    page = tl.load(slots + request * slot_stride + slot_column).to(tl.int64)
    kept += (stop - back) % STATES * WIDTH
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < WIDTH
    value = tl.load(hidden + row * hidden_stride + column, mask=inside).to(tl.float32)
    store_as(kept + page * kept_stride + column, value, inside)
