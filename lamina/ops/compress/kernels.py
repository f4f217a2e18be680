# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Folds of groups of tokens and the entries they close; the maths and its order are those of `ref.py`.

A program works for one group of one memory: of the row that is the group's last in this step.

    tokens          | group i - 1          | group i        row |
    first half      -> into entry i                -> into entry i + 1, kept with the request's state
    second half                             -> into entry i

What group i - 1 gives to entry i is folded again from its tokens where they are in this step, so that programs need nothing of
each other; each half of the projection is still read once, but for each request's last group.
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
def _work(
    memory, batch, cos, sin, open_column, next_column, row, owner, position, start, eps,
    SAVES: tl.constexpr, CLOSES: tl.constexpr,
    RATIO: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ROPE: tl.constexpr, STAGES: tl.constexpr,
    FORMAT: tl.constexpr, WIDTHS: tl.constexpr, LOG_ROWS: tl.constexpr,
):  # fmt: skip
    """The group that `position` is the last of: its state and, if SAVES, what is kept of it; its entry, if CLOSES."""
    OVERLAP: tl.constexpr = memory.next is not None
    WIDTH: tl.constexpr = 2 * D if OVERLAP else D
    HALF: tl.constexpr = WIDTH - D
    column = tl.arange(0, W)[None, :]
    inside = column < D
    valid_from = tl.load(batch.valid_from + owner)
    slots = batch.slots + owner * batch.slot_stride
    open_page = tl.load(slots + open_column).to(tl.int64)
    if OVERLAP:
        next_page = tl.load(slots + next_column).to(tl.int64)
        next_row = memory.next + next_page * memory.next_stride
    if CLOSES:
        write_from = tl.load(batch.write_from + owner)
        table_row = tl.load(batch.table_rows + owner).to(tl.int64)
    open_row = memory.open + open_page * memory.open_stride

    first = position // RATIO * RATIO
    low = tl.maximum(first, start)
    count = position - low + 1
    own_row = row - count + 1
    is_late = low > valid_from  # an earlier step, or this one, has something of this group or of the one before
    is_split = low % RATIO != 0
    is_followed = low > start  # the group before is in this step
    loads = is_late & (is_followed == 0) if OVERLAP else is_late & is_split
    state = _load_state(open_row, inside & loads, column, D)
    if OVERLAP and STAGES > 0 and is_followed:
        before = tl.maximum(first - RATIO, start)
        loads_next = (before > valid_from) & (before % RATIO != 0)
        state = _load_state(next_row, inside & loads_next, column, D)
        state = _fold(state, memory, own_row - (low - before), before % RATIO, low - before, column, inside, 0, WIDTH, STAGES)
    state = _fold(state, memory, own_row, low - first, count, column, inside, HALF, WIDTH, STAGES)

    is_whole = (position + 1) % RATIO == 0
    if SAVES:
        if OVERLAP:
            ahead = _load_state(next_row, inside & is_late & is_split, column, D)
            ahead = _fold(ahead, memory, own_row, low - first, count, column, inside, 0, WIDTH, STAGES)
            tl.debug_barrier()  # all has been read
            kept = (
                tl.where(is_whole, ahead[0], state[0]),
                tl.where(is_whole, ahead[1], state[1]),
                tl.where(is_whole, ahead[2], state[2]),
            )
            _save_state(open_row, kept, inside, column, D)
            _save_state(next_row, ahead, inside & (is_whole == 0), column, D)
        else:
            tl.debug_barrier()
            _save_state(open_row, state, inside & (is_whole == 0), column, D)
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


@triton.jit(do_not_specialize=["open_column", "next_column", "index_open_column", "index_next_column"])
def compress(
    memory, index, batch, cos, sin, open_column, next_column, index_open_column, index_next_column, eps, index_eps,
    IS_SINGLE: tl.constexpr, SAVES: tl.constexpr, RATIO: tl.constexpr, ROPE: tl.constexpr, STAGES: tl.constexpr,
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
    else:
        row = tl.program_id(0)
        owner = tl.load(batch.owners + row)
        position = tl.load(batch.positions + row)
        if owner < 0:
            return
        if IS_SINGLE:
            start = position
        else:
            if (position + 1) % RATIO != 0:
                return
            start = tl.load(batch.starts + owner)
    CLOSES: tl.constexpr = IS_SINGLE or not SAVES
    row = row.to(tl.int64)
    owner = owner.to(tl.int64)
    if index is None:  # noqa: SIM114
        _work(
            memory, batch, cos, sin, open_column, next_column, row, owner, position, start, eps,
            SAVES, CLOSES, RATIO, D, W, ROPE, STAGES, FORMAT, WIDTHS, LOG_ROWS,
        )  # fmt: skip
    elif tl.program_id(1) == 0:
        _work(
            memory, batch, cos, sin, open_column, next_column, row, owner, position, start, eps,
            SAVES, CLOSES, RATIO, D, W, ROPE, STAGES, FORMAT, WIDTHS, LOG_ROWS,
        )  # fmt: skip
    else:
        _work(
            index, batch, cos, sin, index_open_column, index_next_column, row, owner, position, start, index_eps,
            SAVES, CLOSES, RATIO, INDEX_D, INDEX_W, ROPE, STAGES, INDEX_FORMAT, INDEX_WIDTHS, INDEX_LOG_ROWS,
        )  # fmt: skip
