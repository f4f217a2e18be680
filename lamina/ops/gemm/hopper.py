# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""fp8 and bf16 products of more than a few rows for compute capability 9.0, in Gluon: as `kernels.py`, the same bits.

One program for each multiprocessor walks over tiles of x and the weight. One warp copies ahead, through all of its tiles; two
groups of four warps multiply, and while one adds its scaled block the other keeps the tensor cores. A group has 64 rows of x: of
a tile of 128 its half, of a tile of 64 all, times half of the weight's rows.

Columns are cut in PARTS * RUNS ranges: a program takes RUNS of them in a row and adds two in registers, as the last to arrive
adds those of different programs.
"""

from triton.experimental import gluon  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon import language as gl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

_BAND = gl.constexpr(16)


@gluon.jit
def _place(
    item, num_tokens, OUT: gl.constexpr, GROUPS: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr
):
    """(group, first row of the weight, first row of x, part, number of the tile): 16 tiles of x side by side, then the next part,
    then the next of the weight."""
    TILES: gl.constexpr = (OUT + ROWS - 1) // ROWS
    UNITS: gl.constexpr = GROUPS * TILES * PARTS
    token_tiles = (num_tokens + TOKENS - 1) // TOKENS
    band = item // (_BAND * UNITS)
    width = gl.minimum(token_tiles - band * _BAND, _BAND)
    within = item - band * (_BAND * UNITS)
    unit = within // width
    tile = unit // PARTS
    group = tile // TILES
    token_tile = band * _BAND + within % width
    return group, group * OUT + tile % TILES * ROWS, token_tile * TOKENS, unit % PARTS, tile * token_tiles + token_tile


@gluon.jit
def _copy(
    x, weights, x_in, w_in, ready, free, num_tokens, num_items,
    OUT: gl.constexpr, K: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr, RUNS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Fills the stages in turn; one is refilled when both groups have read it."""
    BLOCKS: gl.constexpr = K // BLOCK // PARTS
    EARLY: gl.constexpr = min(STAGES, BLOCKS) if AHEAD else 0
    BYTES: gl.constexpr = (TOKENS + ROWS) * BLOCK * x.dtype.primitive_bitwidth // 8
    if AHEAD:  # the kernel before may still run: x is not yet there, the weights are
        _, first_row, _, part, _ = _place(gl.program_id(0), num_tokens, OUT, GROUPS, TOKENS, ROWS, PARTS)
        for k in range(EARLY):
            mbarrier.expect(ready.index(k), BYTES)
            column = (part * BLOCKS + k) * BLOCK
            tma.async_copy_global_to_shared(weights, [first_row, column], ready.index(k), w_in.index(k))
        gdc_wait()
    step = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        group, first_row, first_token, part, _ = _place(item, num_tokens, OUT, GROUPS, TOKENS, ROWS, PARTS)
        for k in range(BLOCKS):
            stage = step % STAGES
            column = (part * BLOCKS + k) * BLOCK
            if step >= EARLY:
                mbarrier.wait(free.index(stage), (step // STAGES + 1) & 1)
                mbarrier.expect(ready.index(stage), BYTES)
                tma.async_copy_global_to_shared(weights, [first_row, column], ready.index(stage), w_in.index(stage))
            tma.async_copy_global_to_shared(x, [first_token, group * K + column], ready.index(stage), x_in.index(stage))
            step += 1


@gluon.jit
def _range(at, mask, part, SIZE: gl.constexpr, PAIR: gl.constexpr):
    """The sum of a pair of ranges."""
    total = gl.load(at + part * SIZE, mask=mask, other=0.0, cache_modifier=".cg")
    if PAIR == 2:
        total += gl.load(at + (part + 1) * SIZE, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@gluon.jit
def _add(
    own, out, out_stride, first_token, first_row, end_row, num_tokens,
    ROWS: gl.constexpr, WIDE: gl.constexpr, SIZE: gl.constexpr, PARTS: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Stores 64 rows of x by WIDE of the weight, the sum of all parts: so many rows at a time that registers hold every part."""
    CHUNK: gl.constexpr = min(64, 128 * 128 // (PARTS * WIDE))
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WIDE, WIDE // 4], [4, 1], [1, 0])
    column = gl.arange(0, WIDE, layout=gl.SliceLayout(0, LAYOUT))
    for start in gl.static_range(0, 64, CHUNK):
        place = start + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
        live = (first_token + place < num_tokens)[:, None]
        at = own + place[:, None] * ROWS + column[None, :]
        total = _range(at, live, 0, SIZE, PAIR)
        for part in gl.static_range(PAIR, PARTS, PAIR):
            total += _range(at, live, part, SIZE, PAIR)
        to = out + (first_token + place).to(gl.int64)[:, None] * out_stride + (first_row + column)[None, :]
        gl.store(to, total.to(out.dtype.element_ty), mask=live & (first_row + column < end_row)[None, :])


@gluon.jit
def _keep(out, out_stride, total, first_token, first_row, end_row, num_tokens, WIDE: gl.constexpr, MMA: gl.constexpr):
    """Stores 64 rows of x by WIDE of the weight; values of 16 bits in another layout, so that whole sectors are written."""
    IS_TURNED: gl.constexpr = WIDE <= 128 and out.dtype.element_ty.primitive_bitwidth == 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]) if IS_TURNED else MMA
    result = gl.convert_layout(total.to(out.dtype.element_ty), LAYOUT)
    token = first_token + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    row = first_row + gl.arange(0, WIDE, layout=gl.SliceLayout(0, LAYOUT))
    inside = (token < num_tokens)[:, None] & (row < end_row)[None, :]
    gl.store(out + token.to(gl.int64)[:, None] * out_stride + row[None, :], result, mask=inside)


@gluon.jit
def _multiply(
    x_scales, w_scales, out, partial, counters, out_stride, x_in, w_in, ready, free, num_tokens, num_items, HALF: gl.constexpr,
    OUT: gl.constexpr, K: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr, RUNS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """A group's half of every tile."""
    IS_FP8: gl.constexpr = BLOCK == 128
    WIDE: gl.constexpr = ROWS if TOKENS == 128 else ROWS // 2
    X_AT: gl.constexpr = 64 * HALF if TOKENS == 128 else 0
    W_AT: gl.constexpr = 0 if TOKENS == 128 else WIDE * HALF
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDE, 32 if IS_FP8 else 16]
    )
    SCALES: gl.constexpr = K // BLOCK
    PER: gl.constexpr = K // BLOCK // (PARTS * RUNS)
    zero = gl.zeros([64, WIDE], gl.float32, MMA)
    own_token = X_AT + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    own_row = W_AT + gl.arange(0, WIDE, layout=gl.SliceLayout(0, MMA))
    if AHEAD:
        gdc_wait()
    step = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        group, first_row, first_token, part, place = _place(item, num_tokens, OUT, GROUPS, TOKENS, ROWS, PARTS)
        token = first_token + own_token
        live = token < num_tokens
        if IS_FP8:
            first = part * (RUNS * PER)
            of_x = x_scales + gl.minimum(token, num_tokens - 1).to(gl.int64) * (GROUPS * SCALES) + group * SCALES
            of_w = w_scales + first_row // 128 * SCALES
            share = gl.load(of_x + first) * gl.load(of_w + first)
        held = zero
        for run in gl.static_range(RUNS):
            total = zero
            for k in range(PER):
                stage = step % STAGES
                mbarrier.wait(ready.index(stage), step // STAGES & 1)
                left = x_in.index(stage).slice(X_AT, 64, 0)
                right = w_in.index(stage).slice(W_AT, WIDE, 0).permute((1, 0))
                if IS_FP8:
                    pending = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
                    after = gl.minimum((part * RUNS + run) * PER + k + 1, SCALES - 1)
                    next_share = gl.load(of_x + after) * gl.load(of_w + after)
                    block = warpgroup_mma_wait(0, deps=(pending,))
                    mbarrier.arrive(free.index(stage), count=1)
                    total += block * share[:, None]
                    share = next_share
                else:
                    pending = warpgroup_mma(left, right, total, is_async=True)
                    total = warpgroup_mma_wait(0, deps=(pending,))
                    mbarrier.arrive(free.index(stage), count=1)
                step += 1
            if run == 0:
                held = total
            else:
                held += total
        if PARTS == 1:
            _keep(out, out_stride, held, first_token + X_AT, first_row + W_AT, (group + 1) * OUT, num_tokens, WIDE, MMA)
        else:
            SIZE: gl.constexpr = TOKENS * ROWS
            PAIR: gl.constexpr = 2 // RUNS  # partial sums that make a pair of ranges
            own = partial + place.to(gl.int64) * (PARTS * SIZE) + (X_AT * ROWS + W_AT)
            at = own + part * SIZE + (own_token - X_AT)[:, None] * ROWS + (own_row - W_AT)[None, :]
            gl.store(at, held, mask=live[:, None], cache_modifier=".cg")
            gl.thread_barrier()  # every thread's part is written before one of them says so
            counter = counters + 2 * place + HALF
            if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
                _add(
                    own, out, out_stride, first_token + X_AT, first_row + W_AT, (group + 1) * OUT, num_tokens,
                    ROWS, WIDE, SIZE, PARTS, PAIR,
                )  # fmt: skip
                gl.store(counter, 0)  # for the next launch


@gluon.jit(do_not_specialize=["num_tokens", "num_items"])
def linear(
    x, x_scales, weights, w_scales, out, partial, counters, num_tokens, num_items, out_stride,
    OUT: gl.constexpr, K: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr, RUNS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """out [T, GROUPS * OUT] from descriptors of x [T, GROUPS * K] and the weight [GROUPS * OUT, K]; scales as in `kernels.py`."""
    x_in = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, BLOCK], x.layout)
    w_in = gl.allocate_shared_memory(weights.dtype, [STAGES, ROWS, BLOCK], weights.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    if AHEAD:
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    x_scales, w_scales, out, partial, counters, out_stride, x_in, w_in, ready, free, num_tokens, num_items, 0,
                    OUT, K, GROUPS, BLOCK, TOKENS, ROWS, PARTS, RUNS, STAGES, AHEAD,
                ),
            ),
            (
                _multiply,
                (
                    x_scales, w_scales, out, partial, counters, out_stride, x_in, w_in, ready, free, num_tokens, num_items, 1,
                    OUT, K, GROUPS, BLOCK, TOKENS, ROWS, PARTS, RUNS, STAGES, AHEAD,
                ),
            ),
            (
                _copy,
                (
                    x, weights, x_in, w_in, ready, free, num_tokens, num_items,
                    OUT, K, GROUPS, BLOCK, TOKENS, ROWS, PARTS, RUNS, STAGES, AHEAD,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
