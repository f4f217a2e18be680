"""Feed-forward layers with routed experts, and a shared one if there is one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.heads import Context, GatedMlp
from lamina.layers.rounding import rounded
from lamina.ops.experts import experts
from lamina.ops.gemm import linear

#: logits [T, E] -> (experts [T, k] int64, weights [T, k])
Route = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """gate [E, D].   gate_up [E, 2I, D], down [E, D, I].   route  who gets a row.

    shared       an expert that every row visits.   shared_gate  [1, D]: it is multiplied by sigmoid(shared_gate x).
    """

    gate: Tensor
    route: Route
    gate_up: Tensor
    down: Tensor
    shared: GatedMlp | None = None
    shared_gate: Tensor | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [T, D] -> [T, D]; rows of padding visit no routed expert."""
        sequences = context.sequences
        num_rows = sequences.num_rows
        chosen, weights = self.route(linear(x, self.gate)[:num_rows])
        routed = experts(x[:num_rows], chosen, weights, self.gate_up, self.down, 0.0, sequences.row_multiple)
        if self.shared is None:
            out = x.new_zeros(x.shape)
        else:
            out = self.shared.forward(x, context)
            if self.shared_gate is not None:
                out = out / (torch.exp(-linear(x, self.shared_gate)) + 1)
        out[:num_rows] += routed
        return rounded(out, context.dtype)
