"""The definition, in plain PyTorch; fp32.

For each row of a sequence, one after another:

    state = exp(-slope) * state + k v      y = q state

The rows of a chunk attend to those before them in it, weighted by what has been forgotten since, and to the state before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.ops.chunks import CHUNK, gathered, in_cache, product, run_chunks
from lamina.ops.sequences import Sequences
from lamina.ops.store import Store


@dataclass(frozen=True, slots=True)
class Decays:
    """powers [H, CHUNK + 1]: exp(-slope * n) of n rows.   between [H, CHUNK, CHUNK]: of the rows from j to i, 0 where j > i."""

    powers: Tensor
    between: Tensor


def decays(slopes: Tensor) -> Decays:
    """What `decayed_attention` needs of slopes [H] >= 0; calculated in fp64."""
    rows = torch.arange(CHUNK + 1, dtype=torch.float64, device=slopes.device)
    powers = torch.exp(-slopes.double()[:, None] * rows).float()
    distance = torch.arange(CHUNK, device=slopes.device)[:, None] - torch.arange(CHUNK, device=slopes.device)
    return Decays(powers, powers[:, distance.clamp(min=0)].masked_fill(distance < 0, 0))


def decayed_attention(q: Tensor, k: Tensor, v: Tensor, decays: Decays, store: Store, sequences: Sequences) -> Tensor:
    """Linear attention of H heads with states [Dk, Dv]; nothing is normalised or scaled.

    q, k     [T, H, Dk].   v  [T, H, Dv].   store  one row of H * Dk * Dv numbers in each slot.
    Returns  [T, H, Dv] fp32; rows of padding are zeros.   Source: Lightning Attention-2.
    """
    return run_chunks(_Attention(q, k, v, decays), store, sequences)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """own [K, H, CHUNK, Dv] y of states of zeros.   taken [K, H, Dk, CHUNK] what a state takes in of values [K, H, CHUNK, Dv].

    kept  [K, H, 1, 1] of a state before.   queries  [K, H, CHUNK, Dk] of it.
    """

    own: Tensor
    taken: Tensor
    values: Tensor
    kept: Tensor
    queries: Tensor

    def after(self, number: int, before: Tensor) -> Tensor:
        return product(self.taken[number], self.values[number]).add_(before * self.kept[number])

    def outputs(self, before: Tensor) -> Tensor:
        read = product(self.queries.flatten(0, 1), before.flatten(0, 1))
        return read.view(self.own.shape).add_(self.own).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Attention:
    """As `decayed_attention` has them."""

    q: Tensor
    k: Tensor
    v: Tensor
    decays: Decays

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.v.shape[1], self.v.shape[2]

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.v.shape[1], self.q.shape[2], self.v.shape[2]

    @property
    def chunk_numbers(self) -> int:
        return self.v.shape[1] * CHUNK * max(CHUNK, self.q.shape[2], self.v.shape[2])

    def one(self, rows: Tensor, states: Tensor) -> Tensor:
        q, k, v = (gathered(x, rows) for x in (self.q, self.k, self.v))
        num, heads, _ = k.shape
        kept = self.decays.powers[:, 1].repeat(num).view(-1, 1, 1)
        parts, (q, k, v) = states.flatten(0, 1), (x.flatten(0, 1) for x in (q, k, v))
        y = torch.empty_like(v)
        for near in in_cache(num * heads, parts[0].numel()):
            own = parts[near].mul_(kept[near]).add_(k[near][..., None] * v[near][:, None])
            torch.sum(own * q[near][..., None], dim=-2, out=y[near])
        return y.view(num, *self.out_shape)

    def chunks(self, index: Tensor, counts: Sequence[int]) -> _Chunks:
        q, k, v = (gathered(x, index).transpose(1, 2).contiguous() for x in (self.q, self.k, self.v))  # [K, H, CHUNK, ...]
        powers = self.decays.powers
        for number, count in enumerate(counts):  # stand-ins leave nothing in a state
            k[number, :, count:] = 0
        scores = product(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(*q.shape[:3], CHUNK).mul_(self.decays.between)
        own = product(scores.flatten(0, 1), v.flatten(0, 1)).view(v.shape)
        rows = torch.arange(CHUNK, device=q.device)
        real = torch.tensor(counts, dtype=torch.int64, device=q.device)
        left = powers[:, (real[:, None] - 1 - rows).clamp(min=0)].transpose(0, 1)  # [K, H, CHUNK]
        taken = (k * left[..., None]).transpose(2, 3).contiguous()
        return _Chunks(own, taken, v, powers[:, real].t()[..., None, None], q * powers[:, 1:, None])
