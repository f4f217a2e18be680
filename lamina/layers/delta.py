"""A layer with the gated delta rule: a projection, a causal convolution, the rule, a gated norm, and a projection back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.heads import Context
from lamina.layers.projection import Projection
from lamina.layers.rounding import rounded
from lamina.layers.scan import Convolution, GatedNorm
from lamina.ops.delta import gated_delta
from lamina.ops.ssm import softplus
from lamina.ops.store import Store


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """G heads of queries and keys of Dk dims, H of values of Dv dims.

    entry   [2 G Dk + 2 H Dv + 2 H, D]: queries, keys and values, which the convolution reads; gates; what is learnt, and steps.
    decay   [H] <= 0, a step's logarithm; step_bias [H].   store  the state of each sequence.   exit [D, H Dv].
    shape   (G, Dk, H, Dv).
    """

    entry: Projection
    convolution: Convolution
    decay: Tensor
    step_bias: Tensor
    store: Store
    norm: GatedNorm
    exit: Projection
    shape: tuple[int, int, int, int]

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [T, D] -> [T, D]."""
        dtype = context.dtype
        groups, key_dim, heads, value_dim = self.shape
        keys, values = groups * key_dim, heads * value_dim
        inputs, gate, learns, steps = self.entry.forward(x, dtype).split([2 * keys + values, values, heads, heads], dim=-1)
        q, k, v = self.convolution.forward(inputs, context).split([keys, keys, values], dim=-1)
        q, k, v = q.unflatten(1, (groups, key_dim)), k.unflatten(1, (groups, key_dim)), v.unflatten(1, (heads, value_dim))
        forgets = softplus(steps + self.step_bias).mul_(self.decay)
        learns = 1 / torch.exp(-learns).add_(1)
        y = gated_delta(q, k, v, forgets, learns, self.store, context.sequences)
        return self.exit.forward(rounded(self.norm.forward(y.flatten(1), gate), dtype), dtype)
