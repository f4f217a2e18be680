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

from lamina.ops.chunks import CHUNK, Chunks, Recurrence, gathered, run_chunks
from lamina.ops.sequences import Sequences
from lamina.ops.store import Store


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


class _Kind(Recurrence, Protocol):
    """The inputs of a scan, and how they are computed."""

    @property
    def x(self) -> Tensor:
        """[T, ...]."""
        ...


def _scan(kind: _Kind, skip: Tensor, store: Store, sequences: Sequences) -> Tensor:
    out, num = run_chunks(kind, store, sequences), sequences.num_rows
    out[:num] += kind.x[:num] * skip
    return out


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

    def after(self, number: int, before: Tensor) -> Tensor:
        return (before * self.kept[number]).add_(self.ends[number])

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
    def out_shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    @property
    def state_shape(self) -> tuple[int, ...]:
        return tuple(self.decay.shape)

    @property
    def chunk_numbers(self) -> int:
        return CHUNK * self.decay.numel()

    def one(self, rows: Tensor, states: Tensor) -> Tensor:
        x, steps, b, c = (gathered(values, rows) for values in (self.x, self.steps, self.b, self.c))
        states.mul_((steps[..., None] * self.decay).exp_())
        states.add_((steps * x)[..., None] * b[:, None])
        return (states * c[:, None]).sum(-1)

    def chunks(self, index: Tensor, counts: Sequence[int]) -> Chunks:
        length = max(counts)  # the longest chunk's rows; nothing is summed over rows, so that bits do not depend on it
        at = index[:, :length].t()
        x, steps, b, c = (gathered(values, at) for values in (self.x, self.steps, self.b, self.c))  # [length, K, ...]
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

    def after(self, number: int, before: Tensor) -> Tensor:
        return (before * self.kept[number]).add_(self.ends[number])

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
    def out_shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.x.shape[1], self.x.shape[2], self.b.shape[2]

    @property
    def chunk_numbers(self) -> int:
        heads, width, size = self.state_shape
        return heads * max(CHUNK * CHUNK, CHUNK * width, width * size)

    def one(self, rows: Tensor, states: Tensor) -> Tensor:
        x, steps, b, c = (gathered(values, rows) for values in (self.x, self.steps, self.b, self.c))
        grouped = states.unflatten(1, (b.shape[1], -1))  # [B, G, H / G, P, N]
        states.mul_((steps * self.decay).exp_()[..., None, None])
        grouped.add_((x * steps[..., None]).view(grouped.shape[:-1])[..., None] * b[:, :, None, None])
        return (grouped * c[:, :, None, None]).sum(-1).view(x.shape)

    def chunks(self, index: Tensor, counts: Sequence[int]) -> Chunks:
        x, steps, b, c = (gathered(values, index) for values in (self.x, self.steps, self.b, self.c))  # [K, CHUNK, ...]
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
