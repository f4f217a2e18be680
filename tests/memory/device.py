"""A pretend device: real bytes in pages, written as a model would write them, with orders carried out.

Every row of every memory has one right value, a function of the tokens it stands for. So whatever a request reads, after
hits, copies, evictions and adopted twins, can be compared with what it would have computed itself.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from lamina.memory.kinds import Window
from lamina.memory.layout import Layout, Span
from lamina.memory.orders import CopyPage, Order, SaveSlot

FREE, UNUSED = 0xDD, 0xEE


@lru_cache(maxsize=200_000)
def prefix_digest(salt: str, tokens: tuple[int, ...]) -> bytes:
    """Stands for everything a model knows after these tokens."""
    return hashlib.blake2b(repr((salt, tokens)).encode(), digest_size=16).digest()


@lru_cache(maxsize=200_000)
def value(digest: bytes, layer: int, memory: str, field: str, num_bytes: int) -> bytes:
    """The right bytes of one row."""
    return hashlib.shake_128(digest + f"{layer}/{memory}/{field}".encode()).digest(num_bytes)


class Device:
    """Pages of bytes and the rules by which requests fill them."""

    def __init__(self, layout: Layout, num_pages: int) -> None:
        self.layout = layout
        self.pages = np.full((num_pages, layout.page_bytes), FREE, np.uint8)  # [P, page bytes]
        memories = [(memory, part) for memory in layout.memories for part in memory.slot_parts(layout.draft_tokens)]
        self.windows = [memory if isinstance(memory, Window) else None for memory, _ in memories] + [None] * (
            layout.hidden is not None
        )
        self.strides = [memory.log_stride for memory in layout.memories for _ in memory.block_parts(layout.block_tokens)]

    def row(self, page: int, span: Span, row: int) -> np.ndarray:
        """The bytes of one row, writable."""
        start = span.offset + row * span.row_bytes
        return self.pages[page, start : start + span.row_bytes]

    def put(self, page: int, span: Span, row: int, digest: bytes) -> None:
        self.row(page, span, row)[:] = np.frombuffer(
            value(digest, span.layer, span.memory, span.field.name, span.row_bytes), np.uint8
        )

    def has(self, page: int, span: Span, row: int, digest: bytes) -> bool:
        return self.row(page, span, row).tobytes() == value(digest, span.layer, span.memory, span.field.name, span.row_bytes)

    # -- what a step does

    def compute(
        self, salt: str, tokens: Sequence[int], start: int, stop: int, blocks: Sequence[int], slot: Sequence[int]
    ) -> None:
        """Tokens [start, stop) of a request: finished entries into its blocks, rings and states into its slot."""
        size = self.layout.block_tokens
        for position in range(start, stop):
            seen = position + 1
            digest = prefix_digest(salt, tuple(tokens[:seen]))
            for span, stride in zip(self.layout.block_spans, self.strides, strict=True):
                if seen % stride == 0:
                    entry = seen // stride - 1
                    self.put(blocks[entry * stride // size], span, entry % (size // stride), digest)
            for span, window in zip(self.layout.slot_spans, self.windows, strict=True):
                self.put(slot[span.page], span, 0 if window is None else position % window.size, digest)

    def check_log(self, salt: str, tokens: Sequence[int], position: int, blocks: Sequence[int]) -> None:
        """I9: every entry below `position` has its right bytes."""
        size = self.layout.block_tokens
        for span, stride in zip(self.layout.block_spans, self.strides, strict=True):
            for entry in range(position // stride):
                digest = prefix_digest(salt, tuple(tokens[: (entry + 1) * stride]))
                page = blocks[entry * stride // size]
                assert self.has(page, span, entry % (size // stride), digest), f"I9: entry {entry} of {span.memory}, page {page}"

    def check_slot(self, salt: str, tokens: Sequence[int], position: int, pages: Sequence[int], frozen: bool) -> None:
        """I9: the live part of a slot, or of a checkpoint, has its right bytes."""
        live = self.layout.slot_live(position)
        spans = self.layout.checkpoint_spans(position) if frozen else self.layout.slot_spans
        for span, window, ranges in zip(spans, self.windows, live, strict=True):
            count = sum(length for _, length in ranges)
            for index in range(count):
                seen = position if window is None else position - count + index + 1
                row = index if frozen else 0 if window is None else (seen - 1) % window.size
                digest = prefix_digest(salt, tuple(tokens[:seen]))
                assert self.has(pages[span.page], span, row, digest), (
                    f"I9: {span.memory} row {row} at {position}, frozen {frozen}"
                )

    # -- orders

    def execute(self, order: Order) -> None:
        if isinstance(order, CopyPage):
            self.pages[order.target] = self.pages[order.source]
            return
        packed = self.layout.checkpoint_spans(order.position)
        live = self.layout.slot_live(order.position)
        if isinstance(order, SaveSlot):
            rows = [
                np.concatenate(
                    [self.row(order.slot[s.page], s, first + i) for first, count in ranges for i in range(count)]
                    or [self.pages[0, :0]]
                )
                for s, ranges in zip(self.layout.slot_spans, live, strict=True)
            ]
            for page in order.checkpoint:
                self.pages[page] = UNUSED
            for span, data in zip(packed, rows, strict=True):
                self.pages[order.checkpoint[span.page], span.offset : span.offset + len(data)] = data
            return
        blobs = [self.pages[order.checkpoint[s.page], s.offset : s.offset + s.nbytes].copy() if s.rows else None for s in packed]
        for page in order.slot:
            self.pages[page] = UNUSED
        for span, ranges, blob in zip(self.layout.slot_spans, live, blobs, strict=True):
            at = 0
            for first, count in ranges:
                assert blob is not None
                target = span.offset + first * span.row_bytes
                self.pages[order.slot[span.page], target : target + count * span.row_bytes] = blob[
                    at : at + count * span.row_bytes
                ]
                at += count * span.row_bytes
