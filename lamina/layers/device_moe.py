"""The mixture of experts of `moe.py` on a GPU: weights as stored; the shared expert runs beside the routed ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.branch import Branch
from lamina.layers.stored import without_codes
from lamina.ops.experts import PackedExperts
from lamina.ops.experts.plain import PlainExperts, experts_plain
from lamina.ops.experts.triton import experts_fp4
from lamina.ops.gemm import Activation, StoredWeight
from lamina.ops.gemm.triton import Order, linear, swiglu_quantise
from lamina.ops.route.triton import route
from lamina.ops.rows import Rows


@dataclass(frozen=True, slots=True)
class DeviceMixture:
    """gate [E, D].   bias [E] fp32 for learned routing, or table [V, k] int32 from token id to experts.

    experts       routed ones, FP4 as packed for the kernels, or in any other format as stored.
    shared_gate_up [2I, D], shared_down [D, I].   limit  clamp of the SwiGLU, 0 = none.   has_fp8  products in fp8 are done here.
    """

    gate: StoredWeight
    bias: Tensor | None
    table: Tensor | None
    experts: PackedExperts | PlainExperts
    shared_gate_up: StoredWeight
    shared_down: StoredWeight
    top_k: int
    scale: float
    limit: float
    dtype: torch.dtype
    has_fp8: bool

    def forward(self, x: Activation, tokens: Tensor, rows: Rows, order: Order, branch: Branch) -> Tensor:
        """x [T, D], tokens [T]; rows of padding visit no routed expert. Returns [T, D] in the activations' type."""
        with branch.fork():
            shared = self._shared(x, order)
        logits = linear(without_codes(x), self.gate, torch.float32, order)
        chosen, weights = route(logits, self.bias, self.table, tokens, self.top_k, self.scale, rows)
        if isinstance(self.experts, PackedExperts):
            return experts_fp4(
                x, chosen, weights, self.experts, self.limit, shared=shared, dtype=self.dtype, before_sum=branch.join
            )  # fmt: skip
        return experts_plain(x, chosen, weights, self.experts, self.limit, shared, self.dtype, branch.join)

    def _shared(self, x: Activation, order: Order) -> Tensor:
        has_fp8 = self.has_fp8 and x.is_fp8
        wide = linear(x if self.shared_gate_up.is_fp8 else without_codes(x), self.shared_gate_up, torch.float32, order)
        inner = swiglu_quantise(wide, self.limit, self.dtype, has_fp8 and self.shared_down.is_fp8)
        return linear(inner, self.shared_down, torch.float32, order)
