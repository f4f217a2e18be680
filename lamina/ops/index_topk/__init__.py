"""The index of compressed entries: score every visible entry, keep the best.

index_topk(queries, weights, keys, sequences, ratio, top_k) -> [T, k] int64 entry numbers, ascending, -1 last; or None
where every query may see all its entries (no more than top_k are visible to any).
"""

from lamina.ops.index_topk.ref import index_topk

__all__ = ["index_topk"]
