"""The layer of `latent.py` on a GPU: weights as stored, the ops' kernels.

With an index rows are listed for every query, also where nobody sees more than are listed: one kernel has one order of sums, so
that a query's bits do not depend on how long others are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.device_heads import DeviceContext
from lamina.ops.attend_heads import HeadsCase, Past
from lamina.ops.attend_latent.triton import LatentCase, attend_latent, project_latent
from lamina.ops.gemm.stored import Activation, StoredWeight
from lamina.ops.gemm.triton import grouped_linear
from lamina.ops.index_topk.triton import index_topk
from lamina.ops.quantise.triton import quantise_rows
from lamina.ops.rope_norm.triton import norm_quantise
from lamina.ops.store import Store
from lamina.ops.store.triton import index_epilogue


@dataclass(frozen=True, slots=True)
class LowRank:
    """Queries from a low rank.   norm  [q rank] fp32.   weight  [H * (nope + rope), q rank]."""

    norm: Tensor
    eps: float
    weight: StoredWeight


@dataclass(frozen=True, slots=True)
class DeviceIndex:
    """`latent.LatentIndex`, dims in its order: the last ones turn, in pairs.

    w_in  [di + Hi, D]: the key, and the weights of the heads.   w_q  [Hi * di, q rank].   k_norm, k_bias  [di] fp32.
    """

    w_in: StoredWeight
    w_q: StoredWeight
    k_norm: Tensor
    k_bias: Tensor
    eps: float
    store: Store
    heads: int
    top_k: int

    def places(self, x: Activation, low: Activation, turns: tuple[Tensor, Tensor], context: DeviceContext) -> Tensor:
        """Keeps the keys of x [T, D]. Where the rows lie that the queries of low [T, q rank] attend to, [T, top_k] int32."""
        store, rows = self.store, context.rows
        found = context.times(x, self.w_in, torch.float32)
        keys, weights = found.split_with_sizes((store.codec.width, self.heads), dim=1)
        queries = context.times(low, self.w_q, context.dtype) if context.max_context > self.top_k else None
        asked = index_epilogue(
            keys, self.k_norm, self.k_bias, self.eps, queries, self.heads, *turns, context.dtype, store, rows
        )  # fmt: skip
        if asked is None:  # nobody sees more rows than are listed: no score is computed
            asked = tuple(view[0] for view in store.views)
        scale = (store.codec.width * self.heads) ** -0.5
        return index_topk(asked, weights, scale, store, rows, 1, self.top_k, context.max_context, context.order)


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
    index: DeviceIndex | None = None

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
        places = None
        if self.low is not None:
            reads = context.has_fp8 and (self.low.weight.is_fp8 or (self.index is not None and self.index.w_q.is_fp8))
            low = norm_quantise(queries if q_bias is None else queries + q_bias, self.low.norm, self.low.eps, dtype, reads)
            queries, q_bias = context.times(low, self.low.weight, dtype), None
            if self.index is not None:
                places = self.index.places(x, low, context.angles[self.angle], context)
        plain, turned = project_latent(
            queries, q_bias, found[:, inputs:], None if self.b_in is None else self.b_in[inputs:], self.kv_norm, self.eps,
            context.angles[self.angle], dims, self.past, rows, dtype,
        )  # fmt: skip
        absorbed = grouped_linear(Activation(plain), self.w_key, dims.heads, dtype, order)
        out = attend_latent(absorbed, turned, self.past, self.case, rows, order, context.max_context, places=places)
        values = grouped_linear(Activation(out), self.w_value, dims.heads, dtype, order)
        read = quantise_rows(values) if context.has_fp8 and self.w_out.is_fp8 else Activation(values)
        return context.times(read, self.w_out, dtype if self.bias is None else torch.float32)
