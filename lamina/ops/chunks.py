"""Sequences that a state takes in chunk by chunk: which rows are computed when, and where their states lie. For any such op.

    sequence   row alone in its chunk | chunk | chunk | ... | row alone in its chunk        chunks begin at multiples of CHUNK
               recurrent form           parallel form         recurrent form

Rows that are alone in a chunk, as in decode, are computed for all sequences at once. Of longer chunks everything that needs no
state is computed side by side; then each sequence's chunks are gone through in order, from the state before each to that after.
Stand-ins fill up a shorter chunk: they repeat its last row, and whoever computes them makes them leave a state as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lamina.ops.sequences import TILE, Sequences
from lamina.ops.store import Store

CHUNK = TILE
#: numbers that the largest tensor of the chunks that are computed at once may have
_MOST_NUMBERS = 2**22
#: numbers of states that are gone over several times in a row, while they are near (measured: half of the time of large states)
_CACHED_NUMBERS = 2**17


class Chunks(Protocol):
    """K chunks, of which everything is computed that needs no state."""

    def after(self, number: int, before: Tensor) -> Tensor:
        """The state before a chunk [*state] -> the one after it. Once for each chunk."""
        ...

    def outputs(self, before: Tensor) -> Tensor:
        """States [K, *state] before the chunks -> y [K, CHUNK, *out]. Once, after all states are known."""
        ...


class Recurrence(Protocol):
    """The inputs of an op, and how they are computed."""

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of one row."""
        ...

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of one sequence."""
        ...

    @property
    def chunk_numbers(self) -> int:
        """Numbers of the largest tensor of one chunk."""
        ...

    def one(self, rows: Tensor, states: Tensor) -> Tensor:
        """Takes one row into each state [B, *state], in place -> y [B, *out]."""
        ...

    def chunks(self, index: Tensor, counts: Sequence[int]) -> Chunks:
        """The chunks of rows index [K, CHUNK], of which counts[k] are real."""
        ...


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that are alone in their chunk, of the states `owners`; owners None: of all states in order."""

    rows: Tensor
    owners: Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What such ops do with a step.

    owners  [S] sequences that have rows; states are numbered so.   known  which of these have a state from earlier steps.
    first   rows alone in a chunk that come before all others of their sequence, `last` those that come after.
    index   [K, CHUNK] rows of the longer chunks, in order within each sequence.
    counts  K rows of each that are real; chunk_rows  K first rows; chunk_owners  K states.
    """

    owners: Tensor
    known: tuple[Tensor, Tensor]
    first: _Rows | None
    index: Tensor
    counts: tuple[int, ...]
    chunk_rows: tuple[int, ...]
    chunk_owners: tuple[int, ...]
    last: _Rows | None


def run_chunks(kind: Recurrence, store: Store, sequences: Sequences) -> Tensor:
    """y [T, *out] fp32, zeros in rows of padding. The states of all sequences are read before, and written after.

    store   one row of a state's numbers in each slot; a state's precision is that of its store wherever a chunk ends.
    """
    plan = sequences.remember("chunks", lambda: _plan(sequences))
    out = torch.zeros(sequences.positions.shape[0], *kind.out_shape, dtype=torch.float32, device=sequences.positions.device)
    if not plan.owners.shape[0]:
        return out
    states = _before(kind.state_shape, plan, store, sequences)
    if plan.first is not None:
        states = _alone(kind, plan.first, states, store, out)
    step = max(1, _MOST_NUMBERS // kind.chunk_numbers)
    for number in range(0, len(plan.counts), step):
        _together(kind, plan, slice(number, number + step), states, store, out)
    if plan.last is not None:
        states = _alone(kind, plan.last, states, store, out)
    store.write_first(sequences.slots[plan.owners, store.place.column], store.codec.encode(states.flatten(1)))
    return out


def gathered(values: Tensor, index: Tensor) -> Tensor:
    """values [T, ...] at index [...] -> [*index, ...], a new tensor."""
    return values.index_select(0, index.flatten()).unflatten(0, index.shape)


def in_cache(parts: int, numbers: int) -> list[slice]:
    """`parts` states of `numbers` each, cut so that a processor's cache holds what is worked on at once."""
    step = max(1, _CACHED_NUMBERS // numbers)
    return [slice(first, first + step) for first in range(0, parts, step)]


def product(left: Tensor, right: Tensor) -> Tensor:
    """left [B, m, k], right [B, k, n] -> [B, m, n]. One column has other bits alone than in a batch: there are always two."""
    return torch.bmm(left, right.expand(-1, -1, 2))[..., :1] if right.shape[2] == 1 else torch.bmm(left, right)


def _plan(sequences: Sequences) -> _Plan:
    device = sequences.positions.device
    owners: list[int] = []
    known: list[tuple[int, int]] = []
    first: list[tuple[int, int]] = []
    last: list[tuple[int, int]] = []
    chunks: list[tuple[int, int, int]] = []
    for sequence, piece in enumerate(sequences.pieces):
        if piece.stop == piece.start:
            continue
        state, position = len(owners), piece.start
        owners.append(sequence)
        if piece.start:
            known.append((state, sequence))
        while position < piece.stop:
            stop, row = min(piece.stop, (position // CHUNK + 1) * CHUNK), piece.first_row + position - piece.start
            if stop - position > 1:
                chunks.append((row, stop - position, state))
            else:
                (first if position == piece.start else last).append((row, state))
            position = stop

    def tensor(items: Sequence[object]) -> Tensor:
        return torch.tensor(items, dtype=torch.int64, device=device)

    def alone(found: list[tuple[int, int]]) -> _Rows | None:
        if not found:
            return None
        states = [state for _, state in found]
        return _Rows(tensor([row for row, _ in found]), None if states == list(range(len(owners))) else tensor(states))

    columns = torch.arange(CHUNK, device=device)
    starts, counts = tensor([row for row, _, _ in chunks]), tensor([count for _, count, _ in chunks])
    return _Plan(
        tensor(owners), (tensor([state for state, _ in known]), tensor([sequence for _, sequence in known])), alone(first),
        starts[:, None] + torch.minimum(columns, counts[:, None] - 1), tuple(count for _, count, _ in chunks),
        tuple(row for row, _, _ in chunks), tuple(state for _, _, state in chunks), alone(last),
    )  # fmt: skip


def _before(shape: tuple[int, ...], plan: _Plan, store: Store, sequences: Sequences) -> Tensor:
    """[S, *state]: zeros for a sequence that begins; what lies in its slot is never looked at."""
    states, owners = plan.known
    num = plan.owners.shape[0]
    read = store.read_first(sequences.slots[owners, store.place.column]) if states.shape[0] else None
    if read is not None and states.shape[0] == num:
        return read.view(num, *shape)
    found = torch.zeros(num, *shape, dtype=torch.float32, device=sequences.positions.device)
    return found if read is None else found.index_copy_(0, states, read.view(-1, *shape))


def _stored(store: Store, states: Tensor) -> Tensor:
    """States [n, *state] with the precision that they are stored with: a cut at a chunk's end changes nothing."""
    codec = store.codec
    return codec.decode(codec.encode(states.flatten(1))).view(states.shape)


def _alone(kind: Recurrence, rows: _Rows, states: Tensor, store: Store, out: Tensor) -> Tensor:
    """Rows alone in their chunks. Returns the states after them."""
    if rows.owners is None:
        out.index_copy_(0, rows.rows, kind.one(rows.rows, states))
        return _stored(store, states)
    own = states.index_select(0, rows.owners)
    out.index_copy_(0, rows.rows, kind.one(rows.rows, own))
    return states.index_copy_(0, rows.owners, _stored(store, own))


def _together(kind: Recurrence, plan: _Plan, part: slice, states: Tensor, store: Store, out: Tensor) -> None:
    """Some of the longer chunks. `states` are then those after them."""
    counts, owners = plan.counts[part], plan.chunk_owners[part]
    found = kind.chunks(plan.index[part], counts)
    before = torch.empty(len(counts), *states.shape[1:], dtype=torch.float32, device=states.device)
    for number, owner in enumerate(owners):
        before[number] = states[owner]
        states[owner] = _stored(store, found.after(number, before[number])[None])[0]
    y = found.outputs(before)
    for number, (first, count) in enumerate(zip(plan.chunk_rows[part], counts, strict=True)):
        out[first : first + count] = y[number, :count]
