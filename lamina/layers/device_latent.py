"""The layer of `latent.py` on a GPU, without an index: weights as stored, the ops' kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.device_heads import DeviceContext
from lamina.ops.attend_heads import HeadsCase, Past
from lamina.ops.attend_latent.triton import LatentCase, attend_latent, project_latent
from lamina.ops.gemm.stored import Activation, StoredWeight
from lamina.ops.gemm.triton import grouped_linear
from lamina.ops.quantise.triton import quantise_rows
from lamina.ops.rope_norm.triton import norm_quantise


@dataclass(frozen=True, slots=True)
class LowRank:
    """Queries from a low rank.   norm  [q rank] fp32.   weight  [H * (nope + rope), q rank]."""

    norm: Tensor
    eps: float
    weight: StoredWeight


@dataclass(frozen=True, slots=True)
class DeviceLatent:
    """`latent.LatentAttention`, dims in the checkpoint's order.

    w_in     [inputs + rank + rope, D]: queries or, where there is `low`, their low rank; the latent and the rotated key. b_in
             likewise, fp32, or None.
    w_key    [H * rank, nope] and w_value [H * v, rank]: of each head its own rows.
    bias     of the result, which whoever takes it adds.
    """

    w_in: StoredWeight
    b_in: Tensor | None
    low: LowRank | None
    kv_norm: Tensor
    eps: float
    w_key: StoredWeight
    w_value: StoredWeight
    w_out: StoredWeight
    bias: Tensor | None
    past: Past
    case: HeadsCase
    dims: LatentCase
    angle: int

    @property
    def reads_fp8(self) -> bool:
        """Whether its input is multiplied as fp8 where that is done."""
        return self.w_in.is_fp8

    def forward(self, x: Activation, context: DeviceContext) -> Tensor:
        """x [T, D] -> [T, D]."""
        dims, rows, dtype, order = self.dims, context.rows, context.dtype, context.order
        found = context.times(x, self.w_in, dtype if self.b_in is None else torch.float32)
        inputs = found.shape[1] - dims.rank - dims.rope
        queries, q_bias = found[:, :inputs], None if self.b_in is None else self.b_in[:inputs]
        if self.low is not None:
            reads = context.has_fp8 and self.low.weight.is_fp8
            low = norm_quantise(queries if q_bias is None else queries + q_bias, self.low.norm, self.low.eps, dtype, reads)
            queries, q_bias = context.times(low, self.low.weight, dtype), None
        plain, turned = project_latent(
            queries, q_bias, found[:, inputs:], None if self.b_in is None else self.b_in[inputs:], self.kv_norm, self.eps,
            context.angles[self.angle], dims, self.past, rows, dtype,
        )  # fmt: skip
        absorbed = grouped_linear(Activation(plain), self.w_key, dims.heads, dtype, order)
        out = attend_latent(absorbed, turned, self.past, self.case, rows, order, context.max_context)
        values = grouped_linear(Activation(out), self.w_value, dims.heads, dtype, order)
        read = quantise_rows(values) if context.has_fp8 and self.w_out.is_fp8 else Activation(values)
        return context.times(read, self.w_out, dtype if self.bias is None else torch.float32)
