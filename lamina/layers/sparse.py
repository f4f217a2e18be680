"""Feed-forward layers with routed experts, and a shared one if there is one."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lamina.layers.heads import Context, GatedMlp
from lamina.layers.projection import Projection
from lamina.layers.rounding import rounded
from lamina.ops.experts import Gating, experts
from lamina.ops.gemm import Weight, Weights, linear

#: logits [T, E] -> (experts [T, k] int64, weights [T, k])
Route = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """gate [E, D], gate_bias [E] or None.   gate_up [E, 2I, D], down [E, D, I].   route  who gets a row.

    limit, gating  of the experts, as `ops/experts` says.
    enter, leave  the routed experts read enter(x), and give to leave; None: they read x.
    shared       an expert that every row visits.   shared_gate  [1, D]: it is multiplied by sigmoid(shared_gate x).
    """

    gate: Weight
    route: Route
    gate_up: Weights
    down: Weights
    shared: GatedMlp | None = None
    shared_gate: Weight | None = None
    gate_bias: Tensor | None = None
    limit: float = 0.0
    gating: Gating = field(default_factory=Gating)
    enter: Projection | None = None
    leave: Projection | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [T, D] -> [T, D]; rows of padding visit no routed expert."""
        sequences = context.sequences
        num_rows = sequences.num_rows
        logits = linear(x, self.gate)[:num_rows]
        chosen, weights = self.route(logits if self.gate_bias is None else logits + self.gate_bias)
        rows, multiple = x if self.enter is None else self.enter.forward(x, context.dtype), sequences.row_multiple
        routed = experts(rows[:num_rows], chosen, weights, self.gate_up, self.down, self.limit, multiple, self.gating)
        if self.leave is not None:
            whole = rows.new_zeros(rows.shape)
            whole[:num_rows] = rounded(routed, context.dtype)
            routed = self.leave.forward(whole, context.dtype)[:num_rows]
        if self.shared is None:
            out = x.new_zeros(x.shape)
        else:
            out = self.shared.forward(x, context)
            if self.shared_gate is not None:
                out = out / (torch.exp(-linear(x, self.shared_gate)) + 1)
        out[:num_rows] += routed
        return rounded(out, context.dtype)
