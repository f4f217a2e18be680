# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Folds of groups of tokens and the entries they close; the maths and its order are those of `ref.py`.

A program works for one group of one memory: of the row that is the group's last in this step.

    tokens          | group i - 1          | group i        row |
    first half      -> into entry i                -> into entry i + 1, kept with the request's state
    second half                             -> into entry i

What group i - 1 gives to entry i is folded again from its tokens where they are in this step, so that programs need nothing of
each other; each half of the projection is still read once, but for each request's last group.

A slot has STATES rows of each state, the one after q tokens in row q mod STATES: one is kept after each row that may turn out to
be a request's last. A program reads the state before the step first, whose row one of the new ones may take.
"""

from typing import NamedTuple

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.language.extra import libdevice  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.rope_norm.kernels import INTERPRETED, normed, rotated, turns
from lamina.ops.store.kernels import Fields, put, rows_at, spread


class Memory(NamedTuple):
    """One compressor: projections with their row strides, bias and norm, states with their page strides, log. next: or None."""

    value: object
    value_stride: int
    gate: object
    gate_stride: int
    ape: object
    norm: object
    open: object
    open_stride: int
    next: object
    next_stride: int
    log: Fields


class Batch(NamedTuple):
    """What `Rows` has, and the row strides of its two tables."""

    positions: object
    owners: object
    starts: object
    stops: object
    first_rows: object
    valid_from: object
    write_from: object
    table_rows: object
    tables: object
    table_stride: int
    slots: object
    slot_stride: int
    drafts: object


@triton.jit
def _exp(x):
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def _add_token(state, value, gate):
    """The running softmax (max, sum, weighted sum) with one more token."""
    peak = tl.maximum(state[0], gate, propagate_nan=tl.PropagateNan.ALL)
    keep, add = _exp(state[0] - peak), _exp(gate - peak)
    return peak, state[1] * keep + add, state[2] * keep + value * add


@triton.jit
def _fold(
    state, memory, row, phase, count, column, inside, HALF: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`count` tokens from row `row` on, left to right, while the next STAGES - 1 are under way (0: there is one token). HALF:
    their first column."""
    values = memory.value + row * memory.value_stride + HALF + column
    gates = memory.gate + row * memory.gate_stride + HALF + column
    ape = memory.ape + phase * WIDTH + HALF + column
    if STAGES == 0:
        value = tl.load(values, mask=inside, other=0.0)
        gate = tl.load(gates, mask=inside, other=0.0) + tl.load(ape, mask=inside, other=0.0)
        return _add_token(state, value, gate)
    for j in tl.range(0, count, num_stages=STAGES):
        value = tl.load(values + j * memory.value_stride, mask=inside, other=0.0)
        gate = tl.load(gates + j * memory.gate_stride, mask=inside, other=0.0)
        state = _add_token(state, value, gate + tl.load(ape + j * WIDTH, mask=inside, other=0.0))
    return state


@triton.jit
def _load_state(at, mask, column, D: tl.constexpr):
    """The state of D channels at `at`, an empty one where not `mask`."""
    peak = tl.load(at + column, mask=mask, other=float("-inf"))
    total = tl.load(at + D + column, mask=mask, other=0.0)
    return peak, total, tl.load(at + 2 * D + column, mask=mask, other=0.0)


@triton.jit
def _save_state(at, state, mask, column, D: tl.constexpr):
    tl.store(at + column, state[0], mask=mask)
    tl.store(at + D + column, state[1], mask=mask)
    tl.store(at + 2 * D + column, state[2], mask=mask)


@triton.jit
def _picked(state, is_there):
    """`state`, or an empty one."""
    peak = tl.where(is_there, state[0], float("-inf"))
    return peak, tl.where(is_there, state[1], 0.0), tl.where(is_there, state[2], 0.0)


@triton.jit
def _pages(memory, batch, open_column, next_column, owner, D: tl.constexpr, STATES: tl.constexpr):
    """The first row of a request's states; the second is the first again where there is no `next`."""
    slots = batch.slots + owner * batch.slot_stride
    open_page = tl.load(slots + open_column).to(tl.int64)
    opened = memory.open + open_page * memory.open_stride
    if memory.next is not None:
        return opened, memory.next + tl.load(slots + next_column).to(tl.int64) * memory.next_stride
    return opened, opened


@triton.jit
def _before(
    memory, batch, pages, owner, start, is_near, RATIO: tl.constexpr, D: tl.constexpr, W: tl.constexpr, STATES: tl.constexpr
):
    """What `start` tokens left: (open, next); empty where it cannot matter."""
    column = tl.arange(0, W)[None, :]
    inside = (column < D) & is_near & (start > tl.load(batch.valid_from + owner))
    at = start % STATES * (3 * D)
    if memory.next is not None:
        return _load_state(pages[0] + at, inside, column, D), _load_state(pages[1] + at, inside & (start % RATIO != 0), column, D)
    opened = _load_state(pages[0] + at, inside & (start % RATIO != 0), column, D)
    return opened, opened


@triton.jit
def _work(
    memory, batch, cos, sin, pages, before, row, owner, position, start, eps,
    SAVES: tl.constexpr, CLOSES: tl.constexpr,
    RATIO: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ROPE: tl.constexpr, STAGES: tl.constexpr,
    FORMAT: tl.constexpr, WIDTHS: tl.constexpr, LOG_ROWS: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """The group that `position` is the last of: its state and, if SAVES, what is kept of it; its entry, if CLOSES."""
    OVERLAP: tl.constexpr = memory.next is not None
    WIDTH: tl.constexpr = 2 * D if OVERLAP else D
    HALF: tl.constexpr = WIDTH - D
    column = tl.arange(0, W)[None, :]
    inside = column < D
    valid_from = tl.load(batch.valid_from + owner)
    if CLOSES:
        write_from = tl.load(batch.write_from + owner)
        table_row = tl.load(batch.table_rows + owner).to(tl.int64)

    first = position // RATIO * RATIO
    low = tl.maximum(first, start)
    count = position - low + 1
    own_row = row - count + 1
    is_late = low > valid_from  # an earlier step, or this one, has something of this group or of the one before
    is_split = low % RATIO != 0
    is_followed = low > start  # the group before is in this step
    loads = is_late & (is_followed == 0) if OVERLAP else is_late & is_split
    state = _picked(before[0], loads)
    if OVERLAP and STAGES > 0 and is_followed:
        earlier = tl.maximum(first - RATIO, start)
        loads_next = (earlier > valid_from) & (earlier % RATIO != 0)
        state = _picked(before[1], loads_next)
        state = _fold(state, memory, own_row - (low - earlier), earlier % RATIO, low - earlier, column, inside, 0, WIDTH, STAGES)
    state = _fold(state, memory, own_row, low - first, count, column, inside, HALF, WIDTH, STAGES)

    is_whole = (position + 1) % RATIO == 0
    if SAVES:
        at = (position + 1) % STATES * (3 * D)
        if OVERLAP:
            ahead = _picked(before[1], is_late & is_split)
            ahead = _fold(ahead, memory, own_row, low - first, count, column, inside, 0, WIDTH, STAGES)
            kept = (
                tl.where(is_whole, ahead[0], state[0]),
                tl.where(is_whole, ahead[1], state[1]),
                tl.where(is_whole, ahead[2], state[2]),
            )
            _save_state(pages[0] + at, kept, inside, column, D)
            _save_state(pages[1] + at, ahead, inside & (is_whole == 0), column, D)
        else:
            _save_state(pages[0] + at, state, inside & (is_whole == 0), column, D)
    if CLOSES:  # noqa: SIM102 what is known when the kernel is compiled
        if is_whole & (position + 1 > write_from):
            entry = position // RATIO
            page = tl.load(batch.tables + table_row * batch.table_stride + entry // LOG_ROWS).to(tl.int64)
            gain = tl.load(memory.norm + column, mask=inside, other=0.0)
            turn = turns(cos + row * (ROPE // 2), sin + row * (ROPE // 2), D, ROPE, W)
            x = tl.div_rn(state[2], state[1])  # zeros past D
            x = rotated(normed(x, eps, D) * gain, turn, D, ROPE)
            one = tl.zeros((1,), tl.int64)
            rows = rows_at(memory.log, page + one, (entry % LOG_ROWS).to(tl.int64) + one, WIDTHS)
            put(spread(x, FORMAT), rows, one == 0, D, ROPE, FORMAT)


@triton.jit
def _of_memory(
    memory, batch, cos, sin, open_column, next_column, row, owner, position, start, oldest, eps,
    IS_SINGLE: tl.constexpr, SAVES: tl.constexpr, HAS_DRAFTS: tl.constexpr,
    RATIO: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ROPE: tl.constexpr, STAGES: tl.constexpr,
    FORMAT: tl.constexpr, WIDTHS: tl.constexpr, LOG_ROWS: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """One memory's part of `compress`: the row at `position`, or every one from `oldest` to it if states are kept of several."""
    CLOSES: tl.constexpr = IS_SINGLE or not SAVES
    pages = _pages(memory, batch, open_column, next_column, owner, D, STATES)
    is_near = position // RATIO * RATIO - RATIO < start
    if SAVES:
        is_near = position >= start
    before = _before(memory, batch, pages, owner, start, is_near, RATIO, D, W, STATES)
    if SAVES:
        tl.debug_barrier()  # all has been read
    if SAVES and HAS_DRAFTS and not IS_SINGLE:
        for at in tl.range(oldest, position + 1):
            _work(
                memory, batch, cos, sin, pages, before, row - (position - at), owner, at, start, eps,
                SAVES, CLOSES, RATIO, D, W, ROPE, STAGES, FORMAT, WIDTHS, LOG_ROWS, STATES,
            )  # fmt: skip
    else:
        _work(
            memory, batch, cos, sin, pages, before, row, owner, position, start, eps,
            SAVES, CLOSES, RATIO, D, W, ROPE, STAGES, FORMAT, WIDTHS, LOG_ROWS, STATES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["open_column", "next_column", "index_open_column", "index_next_column"])
def compress(
    memory, index, batch, cos, sin, open_column, next_column, index_open_column, index_next_column, eps, index_eps,
    IS_SINGLE: tl.constexpr, SAVES: tl.constexpr, STATES: tl.constexpr, HAS_DRAFTS: tl.constexpr, RATIO: tl.constexpr,
    ROPE: tl.constexpr, STAGES: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, FORMAT: tl.constexpr, WIDTHS: tl.constexpr, LOG_ROWS: tl.constexpr,
    INDEX_D: tl.constexpr, INDEX_W: tl.constexpr, INDEX_FORMAT: tl.constexpr, INDEX_WIDTHS: tl.constexpr,
    INDEX_LOG_ROWS: tl.constexpr,
):  # fmt: skip
    """Axis 0: a row, or a request where only states are saved. Axis 1: the memory, or the other one of the layer (or None)."""
    if SAVES and not IS_SINGLE:
        owner = tl.program_id(0)
        start = tl.load(batch.starts + owner)
        count = tl.load(batch.stops + owner) - start
        if count <= 0:
            return
        row = tl.load(batch.first_rows + owner) + count - 1
        position = start + count - 1
        oldest = position
        if HAS_DRAFTS:
            oldest = tl.maximum(start, position - tl.load(batch.drafts + owner))
    else:
        row = tl.program_id(0)
        owner = tl.load(batch.owners + row)
        position = tl.load(batch.positions + row)
        oldest = position
        if owner < 0:
            return
        if IS_SINGLE:
            start = position
        else:
            if (position + 1) % RATIO != 0:
                return
            start = tl.load(batch.starts + owner)
    row = row.to(tl.int64)
    owner = owner.to(tl.int64)
    if index is None:  # noqa: SIM114
        _of_memory(
            memory, batch, cos, sin, open_column, next_column, row, owner, position, start, oldest, eps,
            IS_SINGLE, SAVES, HAS_DRAFTS, RATIO, D, W, ROPE, STAGES, FORMAT, WIDTHS, LOG_ROWS, STATES,
        )  # fmt: skip
    elif tl.program_id(1) == 0:
        _of_memory(
            memory, batch, cos, sin, open_column, next_column, row, owner, position, start, oldest, eps,
            IS_SINGLE, SAVES, HAS_DRAFTS, RATIO, D, W, ROPE, STAGES, FORMAT, WIDTHS, LOG_ROWS, STATES,
        )  # fmt: skip
    else:
        _of_memory(
            index, batch, cos, sin, index_open_column, index_next_column, row, owner, position, start, oldest, index_eps,
            IS_SINGLE, SAVES, HAS_DRAFTS, RATIO, INDEX_D, INDEX_W, ROPE, STAGES, INDEX_FORMAT, INDEX_WIDTHS, INDEX_LOG_ROWS,
            STATES,
        )  # fmt: skip
