"""The attention layer of `compressed.py` on a GPU: weights as stored, the kernels of the ops, few launches.

The order is the same: project and encode the step's own rows; fold them, closing entries; attend; write the last rows into
the ring. Two chains are independent until attention: query (norm, projection, norm, rotation) and compressor (fold, entries).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.branch import Branch
from lamina.layers.compressed import AttentionStores
from lamina.layers.stored import Stack, first_rows, without_codes
from lamina.ops.attend import Range, Selected
from lamina.ops.attend.triton import attend
from lamina.ops.compress import Folding
from lamina.ops.compress.triton import compress, compress_pair
from lamina.ops.gemm import Activation, StoredWeight
from lamina.ops.gemm.triton import Order, grouped_linear, grouped_linear_quantised, linear
from lamina.ops.index_topk.triton import index_topk
from lamina.ops.rope_norm.triton import query_norm_rope
from lamina.ops.rows import Rows
from lamina.ops.store.triton import encode_rows, keep_rows, project_epilogue, query_epilogue


@dataclass(frozen=True, slots=True)
class Turns:
    """cos and sin [T, r/2] fp32 of one rotary embedding: at the rows' positions, and for each ratio at their groups' starts."""

    cos: Tensor
    sin: Tensor
    starts: dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class DeviceIndexer:
    """heads, how many entries it keeps, its compressor."""

    heads: int
    top_k: int
    folding: Folding


@dataclass(frozen=True, slots=True)
class DeviceAttention:
    """One attention layer; ratio 0 has the window alone.

    w_in   projections of the layer's input: q_low, kv, then the compressor's values and gates, then the indexer's values, gates
           and head weights.
    wq_b   [H * d (+ Hi * di), q_low]: the queries' rows, and behind them the indexer's.
    wo_a   [groups * o_low, H/groups * d].   wo_b  [D, groups * o_low].   sink [H] fp32.   has_fp8  products in fp8 are done here.
    keeps  whether the step's rows go to the window.
    """

    w_in: Stack
    q_norm: Tensor
    wq_b: Stack
    kv_norm: Tensor
    wo_a: StoredWeight
    groups: int
    wo_b: StoredWeight
    sink: Tensor
    folding: Folding | None
    indexer: DeviceIndexer | None
    stores: AttentionStores
    ratio: int
    heads: int
    dim: int
    window: int
    eps: float
    dtype: torch.dtype
    has_fp8: bool
    keeps: bool = True

    def forward(self, x: Activation, turns: Turns, rows: Rows, order: Order, max_context: int, branch: Branch) -> Tensor:
        """x [T, D], the rows' turns -> [T, D] in the activations' type.

        max_context  no request of the step has more tokens after it: a bound known at the launch.
        """
        stores, has_fp8 = self.stores, self.has_fp8 and x.is_fp8
        chosen = self.indexer is not None and max_context // self.ratio > self.indexer.top_k
        results: list[Tensor | None] = [None] * len(self.w_in.products)
        main, folded = self._products_of("q_low", "kv"), self._products_of("values", "gates", "index_values", "index_gates")
        side = [number for number in range(len(results)) if number not in main]
        folds_aside = folded.isdisjoint(main)
        with branch.fork():
            for number in side:
                results[number] = self._project(x, number, order)
            if folds_aside:
                self._fold(results, turns, rows)
        for number in sorted(main):
            results[number] = self._project(x, number, order)
        if not folds_aside:
            self._fold(results, turns, rows)
        low, own = project_epilogue(
            self.w_in.part(results, "q_low"), self.q_norm, self.w_in.part(results, "kv"), self.kv_norm, self.eps,
            turns.cos, turns.sin, self.dtype, has_fp8, stores.window, rows,
        )  # fmt: skip
        q, queries = self._queries(low, turns, order, chosen)
        branch.join()
        scope = self._scope(results, queries, rows, order, max_context)
        out = attend(
            q, own, stores.window, self.window, scope, self.dim**-0.5, self.sink, rows, turns.cos, turns.sin,
            has_fp8 and self.wo_a.is_fp8, order,
        )  # fmt: skip
        if self.keeps and not rows.is_single:
            keep_rows(own, stores.window, rows)
        if has_fp8 and self.wo_b.is_fp8:
            wide = grouped_linear_quantised(out, self.wo_a, self.groups, self.dtype, order)
        else:
            wide = Activation(grouped_linear(out, self.wo_a, self.groups, self.dtype, order))
        return linear(wide, self.wo_b, self.dtype, order)

    def keep(self, context: Activation, turns: Turns, rows: Rows, order: Order) -> None:
        """Writes what the window keeps of rows of context [T, D] that are no rows of the layer; `rows` is not of single rows."""
        product = self.w_in.columns["kv"].product
        results: list[Tensor | None] = [None] * len(self.w_in.products)
        results[product] = self._project(context, product, order)
        kv, window = self.w_in.part(results, "kv"), self.stores.window
        assert not rows.is_single
        keep_rows(encode_rows(kv, self.kv_norm, self.eps, turns.cos, turns.sin, self.dtype, window, rows), window, rows)

    def _products_of(self, *names: str) -> set[int]:
        """Numbers of the stacked products that these projections are in, as far as the layer has them."""
        return {self.w_in.columns[name].product for name in names if name in self.w_in.columns}

    def _project(self, x: Activation, number: int, order: Order) -> Tensor:
        product = self.w_in.products[number]
        return linear(x if product.weight.is_fp8 else without_codes(x), product.weight, product.dtype, order)

    def _fold(self, results: list[Tensor | None], turns: Turns, rows: Rows) -> None:
        """Folds the step into the layer's entries, and into its index keys."""
        if self.folding is None:
            return
        part, starts = self.w_in.part, turns.starts[self.ratio]
        values, gates = part(results, "values"), part(results, "gates")
        if self.indexer is None:
            compress(self.folding, values, gates, *starts, rows)
        else:
            keys = part(results, "index_values"), part(results, "index_gates")
            compress_pair(self.folding, values, gates, self.indexer.folding, *keys, *starts, rows)

    def _queries(self, low: Activation, turns: Turns, order: Order, chosen: bool) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """q [T, H, d], rotated; the indexer's queries, encoded, where entries must be chosen."""
        stack, indexer = self.wq_b, self.indexer
        results = []
        for product in stack.products:
            weight = product.weight
            if not chosen and "index" in product.names:
                if product.names == ("index",):
                    continue
                weight = first_rows(weight, self.heads * self.dim)
            results.append(linear(low if weight.is_fp8 else without_codes(low), weight, self.dtype, order))
        q = stack.part(results, "q")
        if not chosen or indexer is None:
            return query_norm_rope(q, turns.cos, turns.sin, self.heads, self.eps), None
        assert self.stores.index is not None
        index = stack.part(results, "index")
        return query_epilogue(
            q, index, turns.cos, turns.sin, self.heads, indexer.heads, self.eps, self.stores.index.codec
        )  # fmt: skip

    def _scope(
        self, results: list[Tensor | None], queries: tuple[Tensor, ...] | None, rows: Rows, order: Order, max_context: int
    ) -> Selected | Range | None:
        """Which entries the queries see."""
        entries, indexer = self.stores.entries, self.indexer
        if entries is None:
            return None
        if indexer is None:
            return Range(entries, self.ratio)
        keys = self.stores.index
        assert keys is not None
        if queries is None:  # nobody sees more entries than are kept: all are listed, and no score is computed
            queries = tuple(view[0] for view in keys.views)
        weights = self.w_in.part(results, "index_weights")
        scale = (keys.codec.width * indexer.heads) ** -0.5
        places = index_topk(
            queries, weights, scale, keys, rows, self.ratio, indexer.top_k, max_context // self.ratio, order
        )  # fmt: skip
        return Selected(entries, self.ratio, places)
