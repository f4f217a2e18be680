"""Stored rows: how an entry is encoded, and reading and writing rows of a memory in the arena.

EntryCodec      fp32 vectors <-> the fields of a format ("what is read equals what is stored").
Store           the rows of one memory of one layer: strided views of the arena, and a count of the bytes written.
"""

from lamina.ops.store.ref import AttentionCodec, EntryCodec, IndexCodec, StateCodec, Store, attention_codec, index_codec

__all__ = ["AttentionCodec", "EntryCodec", "IndexCodec", "StateCodec", "Store", "attention_codec", "index_codec"]
