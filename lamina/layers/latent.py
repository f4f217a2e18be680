"""Attention whose heads share one latent row per token, in absorbed form, and the index that may choose rows for it.

A query is multiplied by its head's key half before it meets the latents, and what it finds by its head's value half, so that the
latents themselves are keys and values of all heads. Source: DeepSeek-V2 (MLA) and DeepSeek-V3.2 (DSA) reports.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.heads import Context, RmsNorm
from lamina.layers.rounding import rounded
from lamina.ops.attend_heads import HeadsCase, Past, attend_heads, keep_rows, store_rows
from lamina.ops.gemm import Weight, batched_linear, linear
from lamina.ops.index_topk import index_topk
from lamina.ops.rope_norm import rotate
from lamina.ops.sequences import Sequences
from lamina.ops.store import LatentCodec, Store


@dataclass(frozen=True, slots=True)
class LatentIndex:
    """Chooses the `top_k` tokens that a query attends to: those with the largest weighted sum over heads of clipped products.

    w_q  [Hi * di, q rank], read from the low-rank query.   k_norm, k_bias  a layer norm of keys.   store  the keys' log.
    The last dims of queries and keys are rotated.
    """

    w_q: Weight
    k_norm: RmsNorm
    k_bias: Tensor
    store: Store
    heads: int
    top_k: int

    def keep(self, keys: Tensor, cos: Tensor, sin: Tensor, context: Context) -> None:
        """keys [T, di] as projected: normed, rotated and written to the log."""
        normed = _rotated(rounded(self.k_norm.forward(keys) + self.k_bias, context.dtype), cos, sin)
        keep_rows(self.store.codec.encode(rounded(normed, context.dtype)), self.store, context.sequences)

    def select(self, low: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, context: Context) -> Tensor | None:
        """low [T, q rank], weights [T, Hi] -> positions [T, top_k], ascending; None if no query sees more tokens."""
        sequences: Sequences = context.sequences
        if sequences.longest <= self.top_k:
            return None
        queries = rounded(linear(low, self.w_q), context.dtype).unflatten(-1, (self.heads, -1))
        queries = rounded(_rotated(queries, cos[:, None], sin[:, None]), context.dtype)
        codec, scale = self.store.codec, (queries.shape[-1] * self.heads) ** -0.5
        flat = codec.decode(codec.encode(queries.flatten(0, 1))).view(queries.shape)
        return index_topk(flat, weights * scale, self.store, sequences, 1, self.top_k)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., n] with its last dims rotated."""
    width = cos.shape[-1]
    return torch.cat([x[..., :-width], rotate(x[..., -width:], cos, sin)], dim=-1)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """One attention layer of H heads.

    w_in     [sum(splits), D]: the query (low rank where there is `w_q`), latent and rotated key, then for the index its key and
             the weights of its heads; b_in likewise or None.
    w_q      [H * (nope + rope), q rank] or None.   q_norm  of the low rank.   kv_norm  of the latent.
    w_key    [H, nope, rank].   w_value [H, rank, v].   w_out [D, H * v]; b_out or None.
    past     the log of latents.   angle  which of the context's angles rotates.
    """

    w_in: Weight
    b_in: Tensor | None
    splits: tuple[int, ...]
    w_q: Weight | None
    q_norm: RmsNorm | None
    kv_norm: RmsNorm
    w_key: Tensor
    w_value: Tensor
    w_out: Weight
    b_out: Tensor | None
    past: Past
    codec: LatentCodec
    case: HeadsCase
    angle: int
    index: LatentIndex | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [T, D] -> [T, D]."""
        dtype, sequences = context.dtype, context.sequences
        cos, sin = context.angles[self.angle]
        rows = linear(x, self.w_in)
        if self.b_in is not None:
            rows = rows + self.b_in
        low, latent, turned, *of_index = rows.split_with_sizes(self.splits, dim=-1)
        low = rounded(low, dtype)
        if self.q_norm is not None:
            low = rounded(self.q_norm.forward(low), dtype)

        latent = rounded(self.kv_norm.forward(rounded(latent, dtype)), dtype)
        own = self.codec.encode(torch.cat([latent, rounded(rotate(rounded(turned, dtype), cos, sin), dtype)], dim=-1))
        store_rows(own, self.past, sequences)
        selected = None
        if self.index is not None:
            self.index.keep(rounded(of_index[0], dtype), cos, sin, context)
            selected = self.index.select(low, of_index[1], cos, sin, context)

        found = attend_heads(self._queries(low, context), own, self.past, self.case, sequences, selected)  # [T, H, rank]
        out = batched_linear(rounded(found, dtype).transpose(0, 1), self.w_value)  # [H, T, v]
        out = linear(rounded(out.transpose(0, 1).flatten(1), dtype), self.w_out)
        return rounded(out if self.b_out is None else out + self.b_out, dtype)

    def _queries(self, low: Tensor, context: Context) -> Tensor:
        """[T, H, rank + rope]: each head's query against latents, and its rotated dims."""
        cos, sin = context.angles[self.angle]
        heads, nope, _ = self.w_key.shape
        queries = low if self.w_q is None else rounded(linear(low, self.w_q), context.dtype)
        plain, turned = queries.unflatten(-1, (heads, -1)).split_with_sizes((nope, cos.shape[-1]), dim=-1)
        absorbed = batched_linear(plain.transpose(0, 1), self.w_key).transpose(0, 1)
        return rounded(torch.cat([absorbed, rotate(turned, cos[:, None], sin[:, None])], dim=-1), context.dtype)
