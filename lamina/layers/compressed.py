"""Attention whose past is a window of raw entries beside compressed ones.

Order inside the layer, the same for prefill and decode, so that no ring row is overwritten before it is read:
project and encode the step's own rows; fold them, closing entries; attend; write the last rows into the ring.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.rounding import rounded
from lamina.ops.attend import EntryScope, attend
from lamina.ops.compress import Compressor, compress
from lamina.ops.gemm import Weight, linear
from lamina.ops.index_topk import index_topk
from lamina.ops.rope_norm import entry_norm_rope, query_norm_rope, rms_norm, rotate, unrotate
from lamina.ops.sequences import Sequences
from lamina.ops.store import Store


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """ape [ratio, c * d] position bias of the gate, norm [d]; c = 2 with overlap."""

    ape: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """wq_b [Hi * di, q_lora]; its compressor; how many entries it keeps."""

    wq_b: Weight
    heads: int
    top_k: int
    compressor: CompressorWeights


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Weights of one layer, fp32.

    w_in     [sum(splits), D], every projection of the layer's input stacked: query low rank, key/value, then for the
             compressor its values and gates, then for the indexer its compressor's values and gates and its head weights.
    wo_a     one [o_lora, heads/groups * d] a group.   wo_b  [D, groups * o_lora].   sink  [H].
    """

    w_in: Weight
    splits: tuple[int, ...]
    q_norm: Tensor
    wq_b: Weight
    kv_norm: Tensor
    wo_a: tuple[Weight, ...]
    wo_b: Weight
    sink: Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True)
class AttentionStores:
    """Where a layer's memories lie. All but the window are None where the layer has no such memory."""

    window: Store
    entries: Store | None = None
    fold_open: Store | None = None
    fold_next: Store | None = None
    index: Store | None = None
    index_open: Store | None = None
    index_next: Store | None = None


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """One attention layer; ratio 0 has the window alone.

    heads H, dim d, window in tokens, eps of the norms, inv_freq [p] of the layer's rotary embedding.
    """

    weights: AttentionWeights
    stores: AttentionStores
    ratio: int
    heads: int
    dim: int
    window: int
    eps: float
    inv_freq: Tensor
    dtype: torch.dtype

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
        """x [T, D], cos and sin [T, r] at the rows' positions -> [T, D]."""
        parts = self.project(x)
        low, q = self.queries(parts[0], cos, sin)
        encoded = self.encode(parts[1], cos, sin)
        scope = self._compress(parts, low, cos, sin, sequences)
        out = attend(q, encoded, self.stores.window, self.window, scope, self.dim**-0.5, self.weights.sink, sequences)
        self._keep(encoded, sequences)
        return self.output(out, cos, sin)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [T, D] -> every projection of the input, in the order of `splits`."""
        return linear(x, self.weights.w_in).split_with_sizes(self.weights.splits, dim=-1)

    def queries(self, part: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The first projection -> its normed low rank [T, q_lora] and the queries [T, H, d]."""
        low = rounded(rms_norm(rounded(part, self.dtype), self.weights.q_norm, self.eps), self.dtype)
        q = rounded(linear(low, self.weights.wq_b), self.dtype).view(-1, self.heads, self.dim)
        return low, rounded(query_norm_rope(q, cos, sin, self.eps), self.dtype)

    def encode(self, part: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """The second projection -> the rows' entries as the window stores them."""
        own = rounded(entry_norm_rope(rounded(part, self.dtype), self.weights.kv_norm, cos, sin, self.eps), self.dtype)
        return self.stores.window.codec.encode(own)

    def output(self, out: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What the heads found [T, H, d] -> [T, D]."""
        weights = self.weights
        out = rounded(unrotate(out, cos, sin), self.dtype).view(out.shape[0], len(weights.wo_a), -1)
        grouped = torch.cat([linear(out[:, group], wo_a) for group, wo_a in enumerate(weights.wo_a)], dim=-1)
        return rounded(linear(rounded(grouped, self.dtype), weights.wo_b), self.dtype)

    def _compress(
        self, parts: tuple[Tensor, ...], low: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences
    ) -> EntryScope | None:
        """Folds the step into the layer's entries and says which of them each query sees."""
        weights, stores = self.weights, self.stores
        if weights.compressor is None:
            return None
        assert stores.entries is not None and stores.fold_open is not None
        phase = sequences.positions % self.ratio
        self._fold(weights.compressor, stores.entries, stores.fold_open, stores.fold_next, parts[2], parts[3], phase, sequences)
        selected = None
        if weights.indexer is not None:
            assert stores.index is not None and stores.index_open is not None
            indexer = weights.indexer
            self._fold(
                indexer.compressor, stores.index, stores.index_open, stores.index_next, parts[4], parts[5], phase, sequences
            )
            if sequences.longest // self.ratio > indexer.top_k:
                queries = rounded(linear(low, indexer.wq_b), self.dtype).view(low.shape[0], indexer.heads, -1)
                tail = queries[..., -cos.shape[-1] :]
                tail.copy_(rotate(tail, cos[:, None], sin[:, None]))
                codec = stores.index.codec
                flat = codec.decode(codec.encode(queries.flatten(0, 1))).view(queries.shape)
                scale = (queries.shape[-1] * indexer.heads) ** -0.5
                selected = index_topk(flat, parts[6] * scale, stores.index, sequences, self.ratio, indexer.top_k)
        return EntryScope(stores.entries, self.ratio, selected)

    def _fold(
        self, weights: CompressorWeights, log: Store, fold_open: Store, fold_next: Store | None,
        values: Tensor, gates: Tensor, phase: Tensor, sequences: Sequences,
    ) -> None:  # fmt: skip
        compressor = Compressor(self.ratio, weights.norm, self.inv_freq, self.eps, fold_open, fold_next, log)
        compress(compressor, values, gates + weights.ape[phase], sequences)

    def _keep(self, encoded: tuple[Tensor, ...], sequences: Sequences) -> None:
        """Writes the last rows of each sequence into its ring."""
        window = self.stores.window
        rows, owner, where = sequences.tails[window.rows_per_page]
        window.write(sequences.slots[owner, window.slot_column], where, tuple(part[rows] for part in encoded))
