"""Stored rows: how an entry is encoded, and reading and writing rows of a memory in the arena.

EntryCodec      fp32 vectors <-> the fields of a format ("what is read equals what is stored").
Store           the rows of one memory of one layer: strided views of the arena, and a count of the bytes written.
StoreCase       the rows that `triton.py` (which needs Triton) serves or refuses.
"""

from dataclasses import dataclass

from lamina.ops.store.ref import (
    AttentionCodec,
    EntryCodec,
    HeadsCodec,
    IndexCodec,
    KeyValueCodec,
    LatentCodec,
    Place,
    StateCodec,
    Store,
    attention_codec,
    index_codec,
)

__all__ = [
    "AttentionCodec", "EntryCodec", "HeadsCodec", "IndexCodec", "KeyValueCodec", "LatentCodec", "Place", "StateCodec", "Store",
    "StoreCase", "attention_codec", "index_codec",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoreCase:
    """width  of a row, its last `rope` dims turned.   dtypes  of the codec's fields."""

    width: int
    rope: int
    dtypes: tuple[str, ...]
