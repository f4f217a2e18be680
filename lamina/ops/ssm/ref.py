"""The definition, in plain PyTorch; fp32.

For each row of a sequence, one after another:

    state = exp(step * decay) * state + step * x b      y = state c + skip * x

A row that is alone in its chunk, as in decode, is computed so (`_one`), all sequences' rows at once. The rows of a longer chunk
are computed side by side from a state of zeros (`_chunks`); then the chunks of each sequence are gone through in order, and each
adds what the state before it makes of its rows:

    chunk k        y = own part + (decay since its first row) * state before it      state after it = decay of all * before + own

Exponents are sums of step * decay <= 0 between two rows, never differences of large numbers: nothing overflows. The last rows
of a shorter chunk are stand-ins with step 0, which leave a state as it is.
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


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)). Not torch's own: its vector body and scalar tail give different bits."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def scan_channels(
    x: Tensor, steps: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor, store: Store, sequences: Sequences
) -> Tensor:  # fmt: skip
    """The scan of C channels with N numbers each.

    x, steps  [T, C], steps >= 0.   decay  [C, N] <= 0.   b, c  [T, N].   skip  [C].
    store     one row of C * N numbers in each slot.
    Returns   [T, C] fp32; rows of padding are zeros.   Source: Mamba, selective state spaces.
    """
    return _scan(_Channels(x, steps, decay, b, c), skip, store, sequences)


def scan_heads(
    x: Tensor, steps: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor, store: Store, sequences: Sequences
) -> Tensor:  # fmt: skip
    """The scan of H heads of P channels with N numbers each; consecutive heads of a group share b and c.

    x  [T, H, P].   steps  [T, H] >= 0.   decay  [H] <= 0.   b, c  [T, G, N].   skip  [H].
    store     one row of H * P * N numbers in each slot.
    Returns   [T, H, P] fp32; rows of padding are zeros.   Source: Mamba-2, state space duality.
    """
    return _scan(_Heads(x, steps, decay, b, c), skip[:, None], store, sequences)


# What is computed when --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that are alone in their chunk, of the states `owners`; owners None: of all states in order."""

    rows: Tensor
    owners: Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What scans do with a step.

    owners  [S] sequences that have rows; states are numbered so.   known  which of these have a state from earlier steps.
    first   rows alone in a chunk that come before all others of their sequence, `last` those that come after.
    index   [K, CHUNK] rows of the longer chunks, in order within each sequence; stand-ins repeat a chunk's last row.
    counts  K rows of each that are real; chunk_owners  K states.
    """

    owners: Tensor
    known: tuple[Tensor, Tensor]
    first: _Rows | None
    index: Tensor
    counts: tuple[int, ...]
    chunk_owners: tuple[int, ...]
    last: _Rows | None


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
        tuple(state for _, _, state in chunks), alone(last),
    )  # fmt: skip


class _Chunks(Protocol):
    """K chunks computed from states of zeros."""

    @property
    def ends(self) -> Tensor:
        """[K, *state] after each chunk."""
        ...

    @property
    def kept(self) -> Tensor:
        """[K, ...] what all rows of each chunk leave of a state before it, broadcastable to it."""
        ...

    def outputs(self, before: Tensor) -> Tensor:
        """States [K, *state] before the chunks -> y [K, at least the longest, ...] without the skip. Once."""
        ...


class _Kind(Protocol):
    """The inputs of a scan, and how they are computed."""

    @property
    def x(self) -> Tensor:
        """[T, ...]."""
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
        """Takes one row into each state [B, *state], in place -> y [B, ...] without the skip."""
        ...

    def chunks(self, index: Tensor, counts: Sequence[int]) -> _Chunks:
        """The chunks of rows index [K, CHUNK], of which counts[k] are real."""
        ...


def _scan(kind: _Kind, skip: Tensor, store: Store, sequences: Sequences) -> Tensor:
    plan = sequences.remember("ssm", lambda: _plan(sequences))
    x = kind.x
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if not plan.owners.shape[0]:
        return out
    states = _before(kind, plan, store, sequences)
    if plan.first is not None:
        states = _alone(kind, plan.first, states, store, out)
    step = max(1, _MOST_NUMBERS // kind.chunk_numbers)
    for number in range(0, len(plan.counts), step):
        _together(kind, plan, slice(number, number + step), states, store, out)
    if plan.last is not None:
        states = _alone(kind, plan.last, states, store, out)
    store.write_first(sequences.slots[plan.owners, store.place.column], store.codec.encode(states.flatten(1)))
    num = sequences.num_rows
    out[:num] += x[:num] * skip
    return out


def _before(kind: _Kind, plan: _Plan, store: Store, sequences: Sequences) -> Tensor:
    """[S, *state]: zeros for a sequence that begins; what lies in its slot is never looked at."""
    shape, (states, owners) = kind.state_shape, plan.known
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


def _alone(kind: _Kind, rows: _Rows, states: Tensor, store: Store, out: Tensor) -> Tensor:
    """Rows alone in their chunks. Returns the states after them."""
    if rows.owners is None:
        out.index_copy_(0, rows.rows, kind.one(rows.rows, states))
        return _stored(store, states)
    own = states.index_select(0, rows.owners)
    out.index_copy_(0, rows.rows, kind.one(rows.rows, own))
    return states.index_copy_(0, rows.owners, _stored(store, own))


def _together(kind: _Kind, plan: _Plan, part: slice, states: Tensor, store: Store, out: Tensor) -> None:
    """Some of the longer chunks. `states` are then those after them."""
    index, counts, owners = plan.index[part], plan.counts[part], plan.chunk_owners[part]
    found = kind.chunks(index, counts)
    before = torch.empty_like(found.ends)
    for number, owner in enumerate(owners):
        before[number] = states[owner]
        after = (states[owner] * found.kept[number]).add_(found.ends[number])
        states[owner] = _stored(store, after[None])[0]
    y = found.outputs(before)
    for number, count in enumerate(counts):
        first = int(index[number, 0])
        out[first : first + count] = y[number, :count]


def _gathered(values: Tensor, index: Tensor) -> Tensor:
    """values [T, ...] at index [...] -> [*index, ...]."""
    return values.index_select(0, index.flatten()).unflatten(0, index.shape)


# Channels ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ChannelChunks:
    """states, passed  [length, K, C, N]: after each row, from zeros; what rows up to it leave of a state.   c [length, K, N]."""

    states: Tensor
    passed: Tensor
    c: Tensor

    @property
    def ends(self) -> Tensor:
        return self.states[-1]

    @property
    def kept(self) -> Tensor:
        return self.passed[-1]

    def outputs(self, before: Tensor) -> Tensor:
        whole = self.passed.mul_(before).add_(self.states)
        return whole.mul_(self.c[:, :, None]).sum(-1).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _Channels:
    """As `scan_channels` has them."""

    x: Tensor
    steps: Tensor
    decay: Tensor
    b: Tensor
    c: Tensor

    @property
    def state_shape(self) -> tuple[int, ...]:
        return tuple(self.decay.shape)

    @property
    def chunk_numbers(self) -> int:
        return CHUNK * self.decay.numel()

    def one(self, rows: Tensor, states: Tensor) -> Tensor:
        x, steps, b, c = (_gathered(values, rows) for values in (self.x, self.steps, self.b, self.c))
        states.mul_((steps[..., None] * self.decay).exp_())
        states.add_((steps * x)[..., None] * b[:, None])
        return (states * c[:, None]).sum(-1)

    def chunks(self, index: Tensor, counts: Sequence[int]) -> _Chunks:
        length = max(counts)  # the longest chunk's rows; nothing is summed over rows, so that bits do not depend on it
        at = index[:, :length].t()
        x, steps, b, c = (_gathered(values, at) for values in (self.x, self.steps, self.b, self.c))  # [length, K, ...]
        for number, count in enumerate(counts):
            steps[count:, number] = 0
        passed = (steps[..., None] * self.decay).exp_()
        states = (steps * x)[..., None] * b[:, :, None]
        room = torch.empty_like(states[0])
        for row in range(1, length):
            states[row].add_(torch.mul(passed[row], states[row - 1], out=room))
            passed[row].mul_(passed[row - 1])
        return _ChannelChunks(states, passed, c)


# Heads ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _HeadChunks:
    """own [K, H, CHUNK, P] y of states of zeros.   passed [K, H, CHUNK] what the rows up to each leave.   c [K * G, CHUNK, N]."""

    own: Tensor
    ends: Tensor
    kept: Tensor
    passed: Tensor
    c: Tensor

    def outputs(self, before: Tensor) -> Tensor:
        num, heads, width, size = before.shape
        groups = self.c.shape[0] // num
        read = torch.bmm(self.c, before.view(num * groups, -1, size).transpose(1, 2))  # [K * G, CHUNK, (H / G) * P]
        read = read.view(num, groups, CHUNK, -1, width).permute(0, 2, 1, 3, 4).reshape(num, CHUNK, heads, width)
        return self.own.transpose(1, 2) + read * self.passed.transpose(1, 2)[..., None]


@dataclass(frozen=True, slots=True)
class _Heads:
    """As `scan_heads` has them."""

    x: Tensor
    steps: Tensor
    decay: Tensor
    b: Tensor
    c: Tensor

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.x.shape[1], self.x.shape[2], self.b.shape[2]

    @property
    def chunk_numbers(self) -> int:
        heads, width, size = self.state_shape
        return heads * max(CHUNK * CHUNK, CHUNK * width, width * size)

    def one(self, rows: Tensor, states: Tensor) -> Tensor:
        x, steps, b, c = (_gathered(values, rows) for values in (self.x, self.steps, self.b, self.c))
        grouped = states.unflatten(1, (b.shape[1], -1))  # [B, G, H / G, P, N]
        states.mul_((steps * self.decay).exp_()[..., None, None])
        grouped.add_((x * steps[..., None]).view(grouped.shape[:-1])[..., None] * b[:, :, None, None])
        return (grouped * c[:, :, None, None]).sum(-1).view(x.shape)

    def chunks(self, index: Tensor, counts: Sequence[int]) -> _Chunks:
        x, steps, b, c = (_gathered(values, index) for values in (self.x, self.steps, self.b, self.c))  # [K, CHUNK, ...]
        for number, count in enumerate(counts):
            steps[number, count:] = 0
        num, groups, size = b.shape[0], b.shape[2], b.shape[3]
        heads, width = x.shape[2:]
        sums = (steps * self.decay).double().cumsum(1).transpose(1, 2)  # [K, H, CHUNK]; fp64, as differences follow
        weights = (sums[..., :, None] - sums[..., None, :]).float()
        later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu_(1)
        weights.masked_fill_(later, -torch.inf).exp_()
        b, c = (values.transpose(1, 2).reshape(num * groups, CHUNK, size) for values in (b, c))
        scores = torch.bmm(c, b.transpose(1, 2)).view(num, groups, 1, CHUNK, CHUNK)
        weights.unflatten(1, (groups, -1)).mul_(scores)
        taken = (x * steps[..., None]).transpose(1, 2).contiguous()  # [K, H, CHUNK, P]
        own = torch.bmm(weights.flatten(0, 1), taken.flatten(0, 1)).view(num, heads, CHUNK, width)
        left = (sums[..., -1:] - sums).float().exp_()
        taken = taken.mul_(left[..., None]).transpose(2, 3).reshape(num * groups, -1, CHUNK)  # [K * G, (H / G) * P, CHUNK]
        ends = torch.bmm(taken, b).view(num, heads, width, size)
        passed = sums.float().exp_()
        return _HeadChunks(own, ends, passed[..., -1][..., None, None], passed, c)
