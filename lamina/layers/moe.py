"""A mixture of experts with one shared expert."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.rounding import rounded
from lamina.ops.experts import experts, swiglu
from lamina.ops.gemm import Weight, Weights, linear
from lamina.ops.route import route, route_by_table
from lamina.ops.sequences import Sequences


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Weights of one layer, fp32.

    gate [E, D].   bias [E] for learned routing, or table [V, k] int64 from token id to experts.
    gate_up [E, 2I, D], down [E, D, I].   shared_gate_up [2I, D], shared_down [D, I].   limit  clamp of the SwiGLU, 0 = none.
    """

    gate: Weight
    bias: Tensor | None
    table: Tensor | None
    gate_up: Weights
    down: Weights
    shared_gate_up: Weight
    shared_down: Weight
    top_k: int
    scale: float
    limit: float
    dtype: torch.dtype

    def forward(self, x: Tensor, tokens: Tensor, sequences: Sequences) -> Tensor:
        """x [T, D], tokens [T]; rows of padding visit no routed expert. Returns [T, D]."""
        num_rows = sequences.num_rows
        logits = linear(x, self.gate)[:num_rows]
        if self.table is not None:
            chosen, weights = route_by_table(logits, self.table[tokens[:num_rows]], self.scale)
        else:
            assert self.bias is not None
            chosen, weights = route(logits, self.bias, self.top_k, self.scale)
        out = swiglu(x, self.shared_gate_up, self.shared_down, self.limit)
        rows = x[:num_rows]
        out[:num_rows] += experts(rows, chosen, weights, self.gate_up, self.down, self.limit, sequences.row_multiple)
        return rounded(out, self.dtype)
