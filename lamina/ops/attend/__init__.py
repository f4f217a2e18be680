"""Attention: one softmax over a window, compressed entries and a sink logit.

attend(q, own, window, size, entries, scale, sink, sequences) -> [T, H, D] fp32.
attend_block(q, own, window, size, scale, sink, sequences)      of rows that see one another, whatever their order.
Selected, Range      which entries of a log the kernels of `triton.py` read (it needs Triton).
AttendCase           what an implementation may refuse.
"""

from dataclasses import dataclass

from torch import Tensor

from lamina.ops.attend.ref import EntryScope, attend, attend_block
from lamina.ops.store import Store


@dataclass(frozen=True, slots=True)
class Selected:
    """Entries chosen for each query.

    log     where they are stored; one is complete every `ratio` positions.
    places  int32 [T, k]: page * rows_per_page + row of each entry, ascending by entry, -1 last. A query at position p has
            min(k, (p + 1) // ratio) places at most.
    """

    log: Store
    ratio: int
    places: Tensor


@dataclass(frozen=True, slots=True)
class Range:
    """All entries that a query sees: the first (position + 1) // ratio of its request's log, found through the block tables."""

    log: Store
    ratio: int


@dataclass(frozen=True, slots=True)
class AttendCase:
    """What an implementation may refuse.

    heads H, width d of a row, its last `rope` dims rotated.   cache_format  fp8 | bf16 | fp32, how rows are stored.
    is_fp8  whether the outputs are quantised to e4m3 too.
    """

    heads: int
    width: int
    rope: int
    cache_format: str
    is_fp8: bool


__all__ = ["AttendCase", "EntryScope", "Range", "Selected", "attend", "attend_block"]
