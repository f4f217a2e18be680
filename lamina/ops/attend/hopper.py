# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Attention over fp8 rows for compute capability 9.0, in Gluon: 64 heads a program, rows of 448 + 64 dims, tiles of 64 rows.

As `kernels.attend`, by three groups of warps that hand each other tiles, two in flight:

    rows    reads rows, one tile ahead, expands them to bf16      -> keys, shown, full
    lead    scores, softmax, and the left 256 columns of outputs  -> weights, shrinks, ready;  empty
    second  the right 256 columns                                 -> taken;  empty

Barriers count tiles: tile n uses place n % 2, and waits for phase n // 2 % 2 of what it needs.
"""

from triton.experimental import gluon  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon import language as gl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon.language.nvidia.ampere import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    async_copy,
)
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.6 .. 3.9: renamed on the way
_copy = async_copy.async_load if "async_load" in dir(async_copy) else async_copy.async_copy_global_to_shared
_barrier = gl.barrier if "barrier" in dir(gl) else gl.thread_barrier

#: width of rows and how many of it are rotated
SHAPE = (512, 64)
_TILE, _DIM, _ROPE, _HEADS = gl.constexpr(64), gl.constexpr(512), gl.constexpr(64), gl.constexpr(64)
_LOWEST = gl.constexpr(-1e30)
#: of scores, of half of the outputs and the weights that they are made with, of rows as they are read, of copies
_SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
_OUTPUTS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=_OUTPUTS.value, k_width=2))
_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
_ROPES = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_SWIZZLED_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def _expand(codes, factor):
    """Two int32 of four bf16: e4m3 codes (int32) times a power of two (twice as bf16 in int32), exact: the bits placed read as
    e4m3 * 2^-120."""
    low, high = gl.inline_asm_elementwise(
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
        fma.rn.bf16x2 $1, b, $3, z;
        }""",
        "=&r,=&r,r,r",
        [codes, factor],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.join(low, high).reshape([_TILE, 32])


@gluon.jit
def _factor(scales, BLOCK: gl.constexpr):
    """Twice the bf16 of e8m0 byte BLOCK of each int64, as int32."""
    byte = ((scales >> (8 * BLOCK)) & 255).to(gl.int32)
    bits = gl.where(byte == 0, 0x40, gl.where(byte == 255, 0x7FC0, byte << 7))
    return bits * 0x10001


@gluon.jit
def _places(
    places, table, tile, entries, layout: gl.constexpr, WINDOW_TILES: gl.constexpr, RATIO: gl.constexpr,
    IS_SELECTED: gl.constexpr, PAGE_ENTRIES: gl.constexpr,
):  # fmt: skip
    """page * PAGE_ENTRIES + row of each entry of a tile, -1 of those that are none; all -1 of a tile of the window. int32."""
    entry = (tile - WINDOW_TILES) * _TILE + gl.arange(0, _TILE, layout=layout)
    place = gl.full([_TILE], -1, gl.int32, layout)
    if RATIO:
        is_entry = (entry >= 0) & (entry < entries)
        if IS_SELECTED:
            place = gl.load(places + entry, mask=is_entry, other=-1)
        else:
            safe = gl.where(is_entry, entry, 0)
            page = gl.load(table + safe // PAGE_ENTRIES, mask=is_entry, other=0)
            place = gl.where(is_entry, page * PAGE_ENTRIES + safe % PAGE_ENTRIES, -1)
    return place


@gluon.jit
def _pointers(own, ring, log, own_row, ring_page, ring_row, page, row, is_ring, is_entry, WIDTH: gl.constexpr):
    """Where each row of a tile lies, of one field; `ring_page` and `page` are offsets of pages already."""
    found = gl.where(is_ring, ring + ring_page + ring_row * WIDTH, own + own_row * WIDTH)
    return gl.where(is_entry, log + page + row * WIDTH, found)


@gluon.jit
def _rows(
    own, own_rope, own_scale, ring, ring_rope, ring_scale, log, log_rope, log_scale, places, table, words, shown, full, empty,
    t, first, count, position, start, first_row, oldest, entries, page_of_ring,
    ring_page, ring_rope_page, ring_scale_page, log_page, log_rope_page, log_scale_page,
    SIZE: gl.constexpr, RING: gl.constexpr, RATIO: gl.constexpr, IS_SELECTED: gl.constexpr, PAGE_ENTRIES: gl.constexpr,
):  # fmt: skip
    """Fills the keys, tile by tile, as int32 `words` [2 * 8, tile, 32], and says which rows the query sees.

    The next tile is under way while the products take one.
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(1, _WORDS)
    WINDOW_TILES: gl.constexpr = (SIZE + _TILE - 1) // _TILE
    slot = gl.arange(0, _TILE, layout=LAYOUT)
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, _WORDS))[None, :]
    rope_slot = gl.arange(0, 32, layout=gl.SliceLayout(0, _ROPES))[None, :]
    place = _places(places, table, first, entries, LAYOUT, WINDOW_TILES, RATIO, IS_SELECTED, PAGE_ENTRIES)
    codes = ()
    for _ in gl.static_range(7):
        codes += (gl.zeros([_TILE, 16], gl.int32, _WORDS),)
    rope = gl.zeros([_TILE, 32], gl.int32, _ROPES)
    scales = gl.zeros([_TILE], gl.int64, LAYOUT)
    live = gl.zeros([_TILE], gl.int32, LAYOUT)
    zero = gl.zeros([_TILE, 16], gl.int32, _WORDS)
    for n in range(-1, count):
        index = n & 1
        if n >= 0:  # addresses come later, so that they need not be held meanwhile
            mbarrier.wait(empty.index(index), ((n >> 1) & 1) ^ 1)
            for block in gl.static_range(7):
                words.index(index * 8 + block).store(_expand(codes[block], _factor(scales, block)[:, None] + zero))
            words.index(index * 8 + 7).store(rope)
            shown.index(index).store(live)
            fence_async_shared()
            _barrier()
            mbarrier.arrive(full.index(index), count=1)
        tile = first + n + 1
        at = position - SIZE + 1 + tile * _TILE + slot  # position, if the tile is of the window
        is_seen = (tile < WINDOW_TILES) & (at >= oldest) & (at <= position) & (n + 1 < count)
        is_ring = is_seen & (at < start)
        own_row = gl.where(is_seen & (at >= start), first_row + at - start, t).to(gl.int64)
        ring_row = gl.maximum(at, 0) % RING
        is_entry = (place >= 0) & (n + 1 < count)  # past the last tile only the query's own row is read
        live = (is_seen | is_entry).to(gl.int32)
        safe = gl.maximum(place, 0)
        page, row = (safe // PAGE_ENTRIES).to(gl.int64), safe % PAGE_ENTRIES
        code_rows = _pointers(
            own, ring, log, own_row, page_of_ring * ring_page, ring_row, page * log_page, row, is_ring, is_entry, 112
        )
        rope_rows = _pointers(
            own_rope, ring_rope, log_rope, own_row, page_of_ring * ring_rope_page, ring_row, page * log_rope_page, row,
            is_ring, is_entry, 32,
        )  # fmt: skip
        scale_rows = _pointers(
            own_scale, ring_scale, log_scale, own_row, page_of_ring * ring_scale_page, ring_row, page * log_scale_page, row,
            is_ring, is_entry, 1,
        )  # fmt: skip
        place = _places(places, table, tile + 1, entries, LAYOUT, WINDOW_TILES, RATIO, IS_SELECTED, PAGE_ENTRIES)
        fresh = ()
        for block in gl.static_range(7):
            fresh += (gl.load(code_rows[:, None] + (block * 16 + column)),)
        codes = fresh
        rope = gl.load(gl.convert_layout(rope_rows, gl.SliceLayout(1, _ROPES))[:, None] + rope_slot)
        scales = gl.load(scale_rows)


@gluon.jit
def _finish(
    x, total, queries, cos, sin, values, codes, scales, start, heads_here, HALF: gl.constexpr, QUANTISES: gl.constexpr
):  # fmt: skip
    """Stores half of the columns of each head: x over the softmax's total, rotated back, rounded. `queries` is overwritten."""
    x = x / total[:, None]
    if HALF == 1:
        a, b = x.reshape([_HEADS, 128, 2]).split()
        pair = gl.arange(0, 128, layout=gl.SliceLayout(0, a.type.layout)) - 96
        c = gl.load(cos + pair, mask=pair >= 0, other=1.0)[None, :]
        s = gl.load(sin + pair, mask=pair >= 0, other=0.0)[None, :]
        first = gl.where((pair >= 0)[None, :], a * c + b * s, a)
        second = gl.where((pair >= 0)[None, :], b * c - a * s, b)
        x = gl.convert_layout(gl.join(first, second).reshape([_HEADS, 256]), _OUTPUTS)
    queries.slice(HALF * 256, 256, dim=1).store(x.to(gl.bfloat16))
    _barrier()
    head = gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _COPY))
    live = head < heads_here
    for block in gl.static_range(2 * HALF, 2 * HALF + 2):
        found = queries.slice(block * 128, 128, dim=1).load(_COPY)
        at = start + head[:, None] * _DIM + (block * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, _COPY)))[None, :]
        gl.store(values + at, found, mask=live[:, None])
        if QUANTISES:
            wide = found.to(gl.float32)
            bits = gl.maximum(gl.max(wide.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0x38D1B717)  # as fp8_scale_byte
            byte = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
            is_finite = bits < 0x7F800000
            inverse = ((254 - byte) << 23).to(gl.float32, bitcast=True)
            scaled = gl.where(is_finite[:, None], wide * inverse[:, None], 0.0)
            gl.store(codes + at, scaled.to(gl.float8e4nv), mask=live[:, None])
            scale = gl.where(is_finite, byte << 23, 0x7FC00000).to(gl.float32, bitcast=True)
            gl.store(scales + start // 128 + head * 4 + block, scale, mask=live)


@gluon.jit
def _clear(values, codes, scales, start, heads_here, QUANTISES: gl.constexpr):
    """The outputs of a row of nobody."""
    head = gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _COPY))
    live = head < heads_here
    for block in gl.static_range(4):
        at = start + head[:, None] * _DIM + (block * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, _COPY)))[None, :]
        gl.store(values + at, gl.zeros([_HEADS, 128], gl.bfloat16, _COPY), mask=live[:, None])
        if QUANTISES:
            gl.store(codes + at, gl.zeros([_HEADS, 128], gl.float32, _COPY).to(gl.float8e4nv), mask=live[:, None])
            gl.store(scales + start // 128 + head * 4 + block, 2.384185791015625e-07, mask=live)


@gluon.jit
def _store_partial(partial, x, start, heads_here, HALF: gl.constexpr):
    """Half of the columns of each head, fp32, as they are."""
    head = gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _OUTPUTS))
    column = HALF * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, _OUTPUTS))
    gl.store(partial + start + head[:, None] * _DIM + column[None, :], x, mask=(head < heads_here)[:, None])


@gluon.jit
def _hand_over(weights, shrinks, ready, taken, rounded, shrink, index, phase):
    """A tile's weights to the second group."""
    mbarrier.wait(taken.index(index), phase ^ 1)
    weights.index(index).store(rounded)
    shrinks.index(index).store(shrink)
    _barrier()
    mbarrier.arrive(ready.index(index), count=1)


@gluon.jit
def _lead(
    q, queries, keys, shown, weights, shrinks, full, empty, ready, taken,
    sink, cos, sin, values, codes, scales, partial, peaks, sums, count, factor, row_of_q, row_of_split, heads_here,
    IS_SPLIT: gl.constexpr, QUANTISES: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of each tile, the left half of the outputs."""
    HEADS: gl.constexpr = gl.SliceLayout(1, _SCORES)
    copied = gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _COPY))
    copied = gl.minimum(copied, heads_here - 1)[:, None] * _DIM + gl.arange(0, 128, layout=gl.SliceLayout(0, _COPY))[None, :]
    for quarter in gl.static_range(4):
        _copy(queries.slice(quarter * 128, 128, dim=1), q + row_of_q + quarter * 128 + copied)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    _barrier()

    zero = gl.zeros([_HEADS, _TILE], gl.float32, _SCORES)
    mbarrier.wait(full.index(0), 0)
    score = warpgroup_mma(queries, keys.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    live = shown.index(0).load(gl.SliceLayout(0, _SCORES)) > 0
    score = warpgroup_mma_wait(0, deps=(score,))
    score = gl.where(live[None, :], score * factor, -float("inf"))
    peak = gl.maximum(gl.max(score, 1), _LOWEST)
    weight = gl.exp2(score - peak[:, None])
    shrink = gl.exp2(_LOWEST - peak)  # of outputs that are zeros; 1 or 0, as for a first tile that sees nothing
    total = gl.sum(weight, 1)
    rounded = weight.to(gl.bfloat16)
    acc = gl.zeros([_HEADS, 256], gl.float32, _OUTPUTS)
    for n in range(count - 1):
        index, phase = n & 1, (n >> 1) & 1
        _hand_over(weights, shrinks, ready, taken, rounded, shrink, index, phase)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, _OUTPUTS))[:, None]
        operand = gl.convert_layout(rounded, _WEIGHTS)
        mbarrier.wait(full.index(1 - index), ((n + 1) >> 1) & 1)
        grown = warpgroup_mma(operand, keys.index(index).slice(0, 256, dim=1), acc, is_async=True)
        score = warpgroup_mma(queries, keys.index(1 - index).permute((1, 0)), zero, use_acc=False, is_async=True)
        live = shown.index(1 - index).load(gl.SliceLayout(0, _SCORES)) > 0
        acc = warpgroup_mma_wait(1, deps=(grown,))
        _barrier()
        mbarrier.arrive(empty.index(index), count=1)
        score = warpgroup_mma_wait(0, deps=(score,))
        score = gl.where(live[None, :], score * factor, -float("inf"))
        new_peak = gl.maximum(peak, gl.max(score, 1))
        shrink = gl.exp2(peak - new_peak)
        weight = gl.exp2(score - new_peak[:, None])
        total = total * shrink + gl.sum(weight, 1)
        peak = new_peak
        rounded = weight.to(gl.bfloat16)
    last = count - 1
    _hand_over(weights, shrinks, ready, taken, rounded, shrink, last & 1, (last >> 1) & 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, _OUTPUTS))[:, None]
    operand = gl.convert_layout(rounded, _WEIGHTS)
    grown = warpgroup_mma(operand, keys.index(last & 1).slice(0, 256, dim=1), acc, is_async=True)
    left = warpgroup_mma_wait(0, deps=(grown,))

    head = gl.arange(0, _HEADS, layout=HEADS)
    if IS_SPLIT:
        gl.store(peaks + row_of_split + head, peak, mask=head < heads_here)
        gl.store(sums + row_of_split + head, total, mask=head < heads_here)
        _store_partial(partial, left, row_of_split * _DIM, heads_here, 0)
    else:
        own = gl.load(sink + head, mask=head < heads_here, other=0.0)
        total = gl.maximum(total + gl.exp2(own * 1.4426950408889634 - peak), 1e-30)
        _hand_over(weights, shrinks, ready, taken, rounded, total, count & 1, (count >> 1) & 1)
        wide = gl.convert_layout(total, gl.SliceLayout(1, _OUTPUTS))
        _finish(left, wide, queries, cos, sin, values, codes, scales, row_of_q, heads_here, 0, QUANTISES)


@gluon.jit
def _second(
    queries, keys, weights, shrinks, full, empty, ready, taken, cos, sin, values, codes, scales, partial,
    count, row_of_q, row_of_split, heads_here, IS_SPLIT: gl.constexpr, QUANTISES: gl.constexpr,
):  # fmt: skip
    """The right half of the outputs."""
    acc = gl.zeros([_HEADS, 256], gl.float32, _OUTPUTS)
    for n in range(count):
        index, phase = n & 1, (n >> 1) & 1
        mbarrier.wait(ready.index(index), phase)
        mbarrier.wait(full.index(index), phase)
        operand = weights.index(index).load(_WEIGHTS)
        wide = shrinks.index(index).load(gl.SliceLayout(1, _OUTPUTS))[:, None]
        grown = warpgroup_mma(operand, keys.index(index).slice(256, 256, dim=1), acc * wide, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(grown,))
        _barrier()
        mbarrier.arrive(empty.index(index), count=1)
        mbarrier.arrive(taken.index(index), count=1)
    if IS_SPLIT:
        _store_partial(partial, acc, row_of_split * _DIM, heads_here, 1)
    else:
        mbarrier.wait(ready.index(count & 1), (count >> 1) & 1)
        total = shrinks.index(count & 1).load(gl.SliceLayout(1, _OUTPUTS))
        _finish(acc, total, queries, cos, sin, values, codes, scales, row_of_q, heads_here, 1, QUANTISES)


@gluon.jit
def attend(
    q, own, own_rope, own_scale, ring, ring_rope, ring_scale, log, log_rope, log_scale, places,
    positions, owners, starts, first_rows, valid_from, table_rows, tables, slots, sink, cos, sin,
    values, codes, scales, partial, peaks, sums,
    factor, ring_page, ring_rope_page, ring_scale_page, log_page, log_rope_page, log_scale_page, table_width, slot_width,
    HEADS: gl.constexpr, SIZE: gl.constexpr, RING: gl.constexpr, SLOT_COLUMN: gl.constexpr, RATIO: gl.constexpr,
    IS_SELECTED: gl.constexpr, MAX_ENTRIES: gl.constexpr, PAGE_ENTRIES: gl.constexpr, SPLIT_TILES: gl.constexpr,
    QUANTISES: gl.constexpr,
):  # fmt: skip
    """One query, 64 of its heads, SPLIT_TILES of its tiles (0: all, finished).

    Stored fields are taken as int32 words, the scales as int64.
    """
    PARTS: gl.constexpr = (HEADS + _HEADS - 1) // _HEADS
    WINDOW_TILES: gl.constexpr = (SIZE + _TILE - 1) // _TILE
    t = gl.program_id(0) // PARTS
    first_head = gl.program_id(0) % PARTS * _HEADS
    position = gl.load(positions + t)
    owner = gl.load(owners + t)
    row_of_q = (t.to(gl.int64) * HEADS + first_head) * _DIM
    heads_here = gl.minimum(HEADS - first_head, _HEADS)
    if owner < 0:
        if SPLIT_TILES == 0:
            _clear(values, codes, scales, row_of_q, heads_here, QUANTISES)
        return
    entries = 0
    if RATIO:
        entries = gl.minimum((position + 1) // RATIO, MAX_ENTRIES)
    tiles = WINDOW_TILES + (entries + _TILE - 1) // _TILE
    first = gl.program_id(1) * SPLIT_TILES
    if SPLIT_TILES:
        if first >= tiles:
            return
        tiles = gl.minimum(tiles, first + SPLIT_TILES)
    start = gl.load(starts + owner)
    first_row = gl.load(first_rows + owner)
    oldest = gl.maximum(gl.load(valid_from + owner), 0)
    page_of_ring = gl.load(slots + owner * slot_width + SLOT_COLUMN).to(gl.int64)
    table = tables + gl.load(table_rows + owner).to(gl.int64) * table_width
    if IS_SELECTED:
        places += t.to(gl.int64) * MAX_ENTRIES
    # tiles before `oldest` would add zeros; of a split of such tiles alone one is read and nothing of it seen
    first = gl.maximum(first, gl.minimum(gl.maximum(oldest - (position - SIZE + 1), 0) // _TILE, WINDOW_TILES))
    oldest = gl.where(first < tiles, oldest, position + 1)
    entries = gl.where(first < tiles, entries, 0)
    count = gl.maximum(tiles - first, 1)
    row_of_split = (t.to(gl.int64) * gl.num_programs(1) + gl.program_id(1)) * HEADS + first_head
    cos += t.to(gl.int64) * (_ROPE // 2)
    sin += t.to(gl.int64) * (_ROPE // 2)

    queries = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, _DIM], _SWIZZLED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, _TILE, _DIM], _SWIZZLED)
    words = keys._reinterpret(gl.int32, [16, _TILE, 32], _SWIZZLED_WORDS)  # 64 columns each
    shown = gl.allocate_shared_memory(gl.int32, [2, _TILE], _PLAIN)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2, _HEADS, _TILE], _SWIZZLED)
    shrinks = gl.allocate_shared_memory(gl.float32, [2, _HEADS], _PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(2):
        mbarrier.init(full.index(index), count=1)
        mbarrier.init(empty.index(index), count=2)
        mbarrier.init(ready.index(index), count=1)
        mbarrier.init(taken.index(index), count=1)
    gl.warp_specialize(
        [
            (
                _lead,
                (
                    q, queries, keys, shown, weights, shrinks, full, empty, ready, taken,
                    sink + first_head, cos, sin, values, codes, scales, partial, peaks, sums,
                    count, factor, row_of_q, row_of_split, heads_here, SPLIT_TILES > 0, QUANTISES,
                ),
            ),
            (
                _second,
                (
                    queries, keys, weights, shrinks, full, empty, ready, taken, cos, sin, values, codes, scales, partial,
                    count, row_of_q, row_of_split, heads_here, SPLIT_TILES > 0, QUANTISES,
                ),
            ),
            (
                _rows,
                (
                    own, own_rope, own_scale, ring, ring_rope, ring_scale, log, log_rope, log_scale, places, table, words,
                    shown, full, empty, t, first, count, position, start, first_row, oldest, entries, page_of_ring,
                    ring_page, ring_rope_page, ring_scale_page, log_page, log_rope_page, log_scale_page,
                    SIZE, RING, RATIO, IS_SELECTED, PAGE_ENTRIES,
                ),
            ),
        ],
        worker_num_warps=[4, 4],
        worker_num_regs=[176, 120],
    )  # fmt: skip
