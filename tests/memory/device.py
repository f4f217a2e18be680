"""A pretend device: real bytes in pages, written as a model would write them, with orders carried out.

Every row of every memory has one right value, a function of the tokens it stands for. So whatever a request reads, after
hits, copies, evictions and adopted twins, can be compared with what it would have computed itself.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from lamina.memory.kinds import Fold, Memory, Window
from lamina.memory.layout import Layout, Span
from lamina.memory.lease import Lease
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
        of = {(memory.layer, memory.name): memory for memory in layout.memories}
        self.slot_memories: list[Memory | None] = [of.get((span.layer, span.memory)) for span in layout.slot_spans]
        self.windows = [memory if isinstance(memory, Window) else None for memory in self.slot_memories]
        self.strides = [of[span.layer, span.memory].log_stride for span in layout.block_spans]
        #: a token's row in layer l is right from so many tokens after an empty start
        self.below = {
            layer: sum(m.size - 1 for m in layout.memories if isinstance(m, Window) and m.layer < layer)
            for layer in range(max((span.layer for span in layout.slot_spans), default=0) + 1)
        }

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
        self, salt: str, tokens: Sequence[int], start: int, stop: int, blocks: Sequence[int], slot: Sequence[int],
        lease: Lease | None = None,
    ) -> None:  # fmt: skip
        """Tokens [start, stop) of a request: finished entries into its blocks, rings and states into its slot.

        lease  says what need not be written, what has not been there before, and where the large windows are.
        """
        size = self.layout.block_tokens
        write_from, valid_from = (lease.write_from, lease.valid_from) if lease is not None else (0, 0)
        for position in range(start, stop):
            seen = position + 1
            digest = prefix_digest(salt, tuple(tokens[:seen]))
            for span, stride in zip(self.layout.block_spans, self.strides, strict=True):
                if seen % stride == 0 and seen > write_from:
                    entry = seen // stride - 1
                    self.put(blocks[entry * stride // size], span, entry % (size // stride), digest)
            for span, memory in zip(self.layout.slot_spans, self.slot_memories, strict=True):
                row = self.ring_row(memory, position) if isinstance(memory, Window) else self.state_row(memory, seen)
                self.put(slot[span.page], span, row, self.seen_by(memory, span.layer, seen, valid_from, digest))
            for group, tail in enumerate(self.layout.tails):
                pages = lease.tails[group].get(position // tail.tokens) if lease is not None else None
                for span in tail.spans if pages is not None else ():
                    found = self.seen_by(tail.windows[0], span.layer, seen, valid_from, digest)
                    self.put(pages[span.page], span, position % tail.tokens, found)

    def seen_by(self, memory: Memory | None, layer: int, seen: int, valid_from: int, digest: bytes) -> bytes:
        """The digest of the row that the token before `seen` leaves: a wrong one while an empty start still shows."""
        first = seen - 1
        if isinstance(memory, Fold):
            first = first // memory.period * memory.period - (memory.period if memory.carry else 0)
        is_right = not valid_from or first >= valid_from + self.below.get(layer, 0)
        return digest if is_right else b"wrong" + digest

    def check_log(self, salt: str, tokens: Sequence[int], position: int, blocks: Sequence[int]) -> None:
        """I9: every entry below `position` has its right bytes."""
        size = self.layout.block_tokens
        for span, stride in zip(self.layout.block_spans, self.strides, strict=True):
            for entry in range(position // stride):
                digest = prefix_digest(salt, tuple(tokens[: (entry + 1) * stride]))
                page = blocks[entry * stride // size]
                assert self.has(page, span, entry % (size // stride), digest), f"I9: entry {entry} of {span.memory}, page {page}"

    def check_slot(self, salt: str, tokens: Sequence[int], position: int, pages: Sequence[int], frozen: bool) -> None:
        """I8, I9: the live part of a slot, or of a checkpoint, has its right bytes."""
        live = self.layout.slot_live(position)
        spans = self.layout.checkpoint_spans(position) if frozen else self.layout.slot_spans
        for span, window, memory, ranges in zip(spans, self.windows, self.slot_memories, live, strict=True):
            count = sum(length for _, length in ranges)
            kept = min(window.keep_first, position) if window is not None else 0
            for index in range(count):
                seen = position if window is None else index + 1 if index < kept else position - count + index + 1
                row = index
                if not frozen:
                    row = self.state_row(memory, seen) if window is None else self.ring_row(window, seen - 1)
                digest = prefix_digest(salt, tuple(tokens[:seen]))
                assert self.has(pages[span.page], span, row, digest), (
                    f"I9: {span.memory} row {row} at {position}, frozen {frozen}"
                )

    def ring_row(self, window: Window, position: int) -> int:
        ring = window.size + self.layout.draft_tokens
        return position if position < window.keep_first else window.keep_first + position % ring

    def state_row(self, memory: Memory | None, seen: int) -> int:
        """Of a fold or of the hidden vector: there is one for every token that may be taken back."""
        return seen % (1 + self.layout.draft_tokens) if memory is None or isinstance(memory, Fold) else 0

    def check_tails(self, salt: str, tokens: Sequence[int], position: int, tails: Sequence[dict[int, tuple[int, ...]]]) -> None:
        """I9: the live rows of the large windows have their right bytes."""
        for tail, blocks in zip(self.layout.tails, tails, strict=True):
            for first, stop in tail.live_blocks(position):
                for block in range(first, stop):
                    for start, count in tail.live_rows(block, position):
                        for row in range(start, start + count):
                            digest = prefix_digest(salt, tuple(tokens[: block * tail.tokens + row + 1]))
                            for span in tail.spans:
                                assert self.has(blocks[block][span.page], span, row, digest), (
                                    f"I9: {span.memory} row {row} of window block {block} at {position}"
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
