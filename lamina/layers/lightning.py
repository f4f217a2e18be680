"""A layer with decayed linear attention: an activated projection, the attention, a norm, a gate, and a projection back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.heads import Context, RmsNorm, activated
from lamina.layers.projection import Projection
from lamina.layers.rounding import rounded
from lamina.ops.linear_attention import Decays, decayed_attention
from lamina.ops.store import Store


@dataclass(frozen=True, slots=True)
class LightningLayer:
    """H heads of `dim` dims.

    entry  [4 H dim, D]: queries, keys, values, which are activated, and gates.   store  the state of each sequence.
    norm   of all heads together.   exit  [D, H dim].
    """

    entry: Projection
    decays: Decays
    store: Store
    norm: RmsNorm
    exit: Projection
    dim: int
    activation: str

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [T, D] -> [T, D]."""
        dtype, rows = context.dtype, self.entry.forward(x, context.dtype)
        inner = rows.shape[1] // 4
        inputs = rounded(activated(rows[:, : 3 * inner], self.activation), dtype)
        q, k, v = (part.unflatten(1, (-1, self.dim)) for part in inputs.chunk(3, dim=-1))
        y = decayed_attention(q, k, v, self.decays, self.store, context.sequences)
        y = rounded(self.norm.forward(y.flatten(1)), dtype)
        return self.exit.forward(rounded(y / torch.exp(-rows[:, 3 * inner :]).add_(1), dtype), dtype)
