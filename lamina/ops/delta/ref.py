"""The definition, in plain PyTorch; fp32.

For each row of a sequence, one after another, with q and k of length 1 and q then divided by sqrt(Dk):

    state = exp(forgets) * state      new = learns * (v - k state)      state = state + k new      y = q state

In a chunk every `new` depends on those before it, a triangular system (the WY form of the product of I - learns * k k):

    new = solve(I + A, learns * v) - solve(I + A, learns * decay * k) state before
    A[i, j] = learns[i] * (k[i] k[j]) * decay from j to i, for j < i

Exponents are sums of `forgets` <= 0 between two rows, never differences of large numbers: nothing overflows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.ops.chunks import CHUNK, gathered, in_cache, product, run_chunks
from lamina.ops.sequences import Sequences
from lamina.ops.store import Store

#: added to the sum of squares of a query or a key
_EPS = 1e-6


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, forgets: Tensor, learns: Tensor, store: Store, sequences: Sequences
) -> Tensor:  # fmt: skip
    """The gated delta rule of H heads with states [Dk, Dv]; consecutive heads of a group share q and k.

    q, k     [T, G, Dk], of any length.   v  [T, H, Dv].   forgets  [T, H] <= 0, a logarithm.   learns  [T, H] from 0 to 1.
    store    one row of H * Dk * Dv numbers in each slot.
    Returns  [T, H, Dv] fp32; rows of padding are zeros.   Source: Gated DeltaNet; the parallel form: DeltaNet over lengths.
    """
    return run_chunks(_Delta(q, k, v, forgets, learns), store, sequences)


def _unit(x: Tensor) -> Tensor:
    """x [..., D] / its length."""
    return x / (x * x).sum(-1, keepdim=True).add_(_EPS).sqrt_()


@dataclass(frozen=True, slots=True)
class _Chunks:
    """values [K, H, CHUNK, Dv] of a state of zeros, corrected by `after`; keys [K, H, CHUNK, Dk] that correct them.

    taken   [K, H, Dk, CHUNK]: what a state takes in of values.   kept  [K, H, 1, 1] of a state before.
    scores  [K, H, CHUNK, CHUNK] of values.   queries [K, H, CHUNK, Dk] of a state before.
    """

    values: Tensor
    keys: Tensor
    taken: Tensor
    kept: Tensor
    scores: Tensor
    queries: Tensor

    def after(self, number: int, before: Tensor) -> Tensor:
        values = self.values[number]
        values.sub_(product(self.keys[number], before))
        return product(self.taken[number], values).add_(before * self.kept[number])

    def outputs(self, before: Tensor) -> Tensor:
        y = product(self.scores.flatten(0, 1), self.values.flatten(0, 1))
        y.add_(product(self.queries.flatten(0, 1), before.flatten(0, 1)))
        return y.view(self.values.shape).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Delta:
    """As `gated_delta` has them."""

    q: Tensor
    k: Tensor
    v: Tensor
    forgets: Tensor
    learns: Tensor

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.v.shape[1], self.v.shape[2]

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.v.shape[1], self.q.shape[2], self.v.shape[2]

    @property
    def chunk_numbers(self) -> int:
        return self.v.shape[1] * CHUNK * max(CHUNK, self.q.shape[2] + self.v.shape[2])

    def _at(self, index: Tensor) -> tuple[Tensor, ...]:
        """Queries and keys of length 1, values, and the two gates, at index [...]."""
        q, k, v, forgets, learns = (gathered(x, index) for x in (self.q, self.k, self.v, self.forgets, self.learns))
        return _unit(q).mul_(q.shape[-1] ** -0.5), _unit(k), v, forgets, learns

    def one(self, rows: Tensor, states: Tensor) -> Tensor:
        q, k, v, forgets, learns = self._at(rows)
        num, groups, width = k.shape
        parts = (num * groups, v.shape[1] // groups)
        v, kept, learns = v.view(*parts, -1), forgets.exp_().view(*parts, 1, 1), learns.view(*parts, 1)
        grouped = states.view(*parts, width, -1)
        q, k = q.view(-1, 1, width, 1), k.view(-1, 1, width, 1)
        y = torch.empty_like(v)
        for near in in_cache(parts[0], grouped[0].numel()):
            own, key = grouped[near].mul_(kept[near]), k[near]
            new = (v[near] - (own * key).sum(-2)).mul_(learns[near])
            own.add_(key * new[..., None, :])
            torch.sum(own * q[near], dim=-2, out=y[near])
        return y.view(num, *self.out_shape)

    def chunks(self, index: Tensor, counts: Sequence[int]) -> _Chunks:
        q, k, v, forgets, learns = self._at(index)  # [K, CHUNK, ...]
        for number, count in enumerate(counts):  # stand-ins neither forget nor learn
            forgets[number, count:] = 0
            learns[number, count:] = 0
        num, _, groups, width = k.shape
        each = v.shape[2] // groups
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        keys = k.reshape(num * groups, CHUNK, width)
        products = product(torch.cat([keys, q.reshape(num * groups, CHUNK, width)], dim=1), keys.transpose(1, 2))
        by_key, by_query = products.view(num, groups, 1, 2 * CHUNK, CHUNK).split(CHUNK, dim=3)
        sums = forgets.double().cumsum(1).transpose(1, 2)  # [K, H, CHUNK]; fp64, as differences follow
        decay = (sums[..., :, None] - sums[..., None, :]).float()
        later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu_(1)
        decay = decay.masked_fill_(later, -torch.inf).exp_().unflatten(1, (groups, each))
        learns = learns.transpose(1, 2)[..., None]  # [K, H, CHUNK, 1]
        passed, left = sums.float().exp_()[..., None], (sums[..., -1:] - sums).float().exp_()[..., None]
        q, k = (x.repeat_interleave(each, dim=1) for x in (q, k))
        system = (decay * by_key).flatten(1, 2).mul_(learns)
        right = torch.cat([v * learns, k * (learns * passed)], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        values, corrections = solved.split([v.shape[3], width], dim=-1)
        return _Chunks(
            values, corrections, k.mul_(left).transpose(2, 3).contiguous(), passed[:, :, -1:],
            decay.mul_(by_query).flatten(1, 2), q.mul_(passed),
        )  # fmt: skip
