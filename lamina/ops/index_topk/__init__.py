"""The index of compressed entries: score every visible entry, keep the best.

index_topk(queries, weights, keys, sequences, ratio, top_k) -> [T, k] int64 entry numbers, ascending, -1 last; or None
where every query may see all its entries (no more than top_k are visible to any).

`triton.py`, which needs Triton, does the same from encoded queries and returns where the entries lie.
"""

from dataclasses import dataclass

from lamina.ops.index_topk.ref import index_topk

__all__ = ["IndexCase", "index_topk"]


@dataclass(frozen=True, slots=True)
class IndexCase:
    """What an implementation may refuse. index_format fp4 | fp8 | bf16 | fp32; max_entries  the most that a row may see."""

    index_format: str
    heads: int
    dim: int
    top_k: int
    max_entries: int
