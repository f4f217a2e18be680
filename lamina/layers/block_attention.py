"""Attention of a block of rows that see one another, over a window of context that other rows have left."""

from dataclasses import dataclass

from torch import Tensor

from lamina.layers.compressed import AttentionWeights, CompressedAttention
from lamina.ops.attend import attend_block
from lamina.ops.sequences import Sequences


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """The weights and the window of `inner`, an attention without entries. The block's own rows are never kept."""

    inner: CompressedAttention

    @property
    def weights(self) -> AttentionWeights:
        """Its weights."""
        return self.inner.weights

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
        """x [T, D], as many rows of each sequence, cos and sin [T, r] at their positions -> [T, D]."""
        inner = self.inner
        parts = inner.project(x)
        _, q = inner.queries(parts[0], cos, sin)
        encoded = inner.encode(parts[1], cos, sin)
        scale, sink = inner.dim**-0.5, inner.weights.sink
        out = attend_block(q, encoded, inner.stores.window, inner.window, scale, sink, sequences)
        return inner.output(out, cos, sin)

    def keep(self, context: Tensor, cos: Tensor, sin: Tensor, pages: Tensor, where: Tensor) -> None:
        """Writes N rows of context, the first of context [N', D], at rows `where` [N] of the rings in `pages` [N]."""
        inner, num = self.inner, pages.shape[0]
        encoded = inner.encode(inner.project(context)[1], cos, sin)
        inner.stores.window.write(pages, where, tuple(part[:num] for part in encoded))
