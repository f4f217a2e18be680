"""Where every byte of a request lies: a pure function of the memories, the block size and the draft length.

A block page holds `block_tokens` native tokens of all logs of all layers. A slot holds every ring, fold and snapshot of
one running request, cut by layer into whole pages. A checkpoint holds the live part of a slot, rows oldest first.
Within all three each field is an array of its own that starts at a multiple of 128 bytes:

    block page   | layer 1 c4 nope rows | pad | layer 1 c4 rope rows | pad | ... | layer 2 ... |
    slot page i  | layer 0 window rows ... | layer 0 fold | layer 1 ... |            (a layer never crosses a page)
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lamina.base.errors import ConfigError
from lamina.base.sizes import KiB
from lamina.memory.kinds import Field, Memory, Part, RowRange, check_memories, replay_tokens

ALIGNMENT = 128
MIN_PAGE_BYTES = 512 * KiB
#: name of the slot region that keeps the final hidden vector of the last token seen
HIDDEN = "hidden"


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Span:
    """One field's array: `rows` rows from byte `offset` of page number `page` of a block, slot or checkpoint."""

    layer: int
    memory: str
    field: Field
    page: int
    offset: int
    rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; rows are packed."""
        return self.field.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the array, without alignment."""
        return self.rows * self.field.nbytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets and sizes that follow from the memories. Build it with `make_layout`.

    block_spans  arrays of one block page.   slot_spans  arrays of the slot's pages, `slot_rows_live` in the same order.
    """

    memories: tuple[Memory, ...]
    hidden: Field | None
    block_tokens: int
    draft_tokens: int
    page_bytes: int
    block_spans: tuple[Span, ...]
    slot_spans: tuple[Span, ...]
    slot_pages: int
    layout_id: str
    replay: float
    _log_of: tuple[Memory, ...] = field(repr=False)
    _packed: dict[tuple[int, ...], tuple[Span, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def has_logs(self) -> bool:
        """Whether blocks have pages at all."""
        return bool(self.block_spans)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def pages_for(self, num_tokens: int) -> int:
        """Pages a running request of `num_tokens` tokens holds alone: blocks and slot."""
        return (self.blocks_for(num_tokens) if self.has_logs else 0) + self.slot_pages

    def slot_live(self, position: int) -> tuple[tuple[RowRange, ...], ...]:
        """For each slot span the live row ranges at `position`, oldest first."""
        live = [rows for memory in self.memories for rows in memory.slot_live(position, self.draft_tokens)]
        # memories without live rows still own their spans
        counts = [len(memory.slot_parts(self.draft_tokens)) for memory in self.memories]
        assert len(live) == sum(counts)
        if self.hidden is not None:
            live.append(((0, 1),) if position > 0 else ())
        return tuple(live)

    def checkpoint_spans(self, position: int) -> tuple[Span, ...]:
        """Arrays of a checkpoint at `position`, in the order of the slot spans; rows = live rows, 0 where none is."""
        counts = tuple(sum(count for _, count in rows) for rows in self.slot_live(position))
        if counts not in self._packed:
            parts = [(span.layer, span.memory, Part(span.field, n)) for span, n in zip(self.slot_spans, counts, strict=True)]
            self._packed[counts] = tuple(_pack(parts, self.page_bytes))
        return self._packed[counts]

    def checkpoint_pages(self, position: int) -> int:
        """Pages of a checkpoint at `position`, the open block not counted; at least 1 where the model has slots."""
        spans = self.checkpoint_spans(position)
        return 1 + max((span.page for span in spans if span.rows), default=0) if self.slot_pages else 0

    def block_rows(self, span: Span, block: int, position: int) -> int:
        """Final rows of a block span in block number `block` once `position` tokens have been seen."""
        return self.block_live(block, position)[self.block_spans.index(span)]

    def block_live(self, block: int, position: int) -> tuple[int, ...]:
        """For each block span the final rows in block number `block` once `position` tokens have been seen."""
        first = block * self.block_tokens
        return tuple(
            min(max(memory.log_rows(position) - first // memory.log_stride, 0), span.rows)
            for memory, span in zip(self._log_of, self.block_spans, strict=True)
        )

    def live_bytes(self, position: int) -> dict[str, int]:
        """Live bytes by memory name at `position`, summed over layers, no padding."""
        totals: dict[str, int] = {}
        for memory in self.memories:
            totals[memory.name] = totals.get(memory.name, 0) + memory.live_bytes(position)
        if self.hidden is not None:
            totals[HIDDEN] = self.hidden.nbytes if position > 0 else 0
        return totals


def bytes_by_memory(spans: Iterable[Span]) -> dict[str, int]:
    """Bytes of the arrays by memory name, without alignment."""
    totals: dict[str, int] = {}
    for span in spans:
        totals[span.memory] = totals.get(span.memory, 0) + span.nbytes
    return totals


def make_layout(
    memories: Sequence[Memory], hidden: Field | None = None, block_tokens: int | None = None, draft_tokens: int = 0
) -> Layout:
    """The layout of a model whose layers remember `memories`.

    hidden        the final hidden vector kept with the slot, or None for models that need no slot.
    block_tokens  native tokens per block; None chooses: twice the largest stride where entries stand for several tokens
                  (256 for 128), else the smallest power of two from 16 up whose page reaches 512 KiB.
    Raises ConfigError for a block size that is no multiple of the strides or too small for one layer's slot region.
    """
    check_memories(memories)
    if draft_tokens < 0:
        raise ConfigError("draft_tokens", draft_tokens, "at least 0")
    slot_parts = [(m.layer, m.name, part) for m in memories for part in m.slot_parts(draft_tokens)]
    if hidden is not None:
        last = max((m.layer for m in memories), default=0) + 1
        slot_parts.append((last, HIDDEN, Part(hidden, 1)))
    region = _largest_region(slot_parts)
    stride = _common_stride(memories)
    has_logs = any(m.block_parts(stride) for m in memories)

    def page_bytes(tokens: int) -> int:
        return sum(aligned(part.rows * part.field.nbytes) for m in memories for part in m.block_parts(tokens))

    if block_tokens is None:
        block_tokens = _choose_block_tokens(stride, has_logs, page_bytes)
        while has_logs and page_bytes(block_tokens) < region:
            block_tokens *= 2
    if block_tokens < 1 or block_tokens % stride:
        raise ConfigError("block_tokens", block_tokens, f"a multiple of {stride}, the largest stride of the model's logs")
    page = page_bytes(block_tokens) if has_logs else max(MIN_PAGE_BYTES, region)
    if page < region:
        raise ConfigError("block_tokens", block_tokens, f"larger: a page of {page} B does not hold one layer's slot ({region} B)")
    block_spans = _pack([(m.layer, m.name, part) for m in memories for part in m.block_parts(block_tokens)], page)
    assert all(span.page == 0 for span in block_spans)
    slot_spans = _pack(slot_parts, page)
    slot_pages = 1 + max((span.page for span in slot_spans), default=-1)
    log_of = tuple(m for m in memories for _ in m.block_parts(block_tokens))
    return Layout(
        memories=tuple(memories), hidden=hidden, block_tokens=block_tokens, draft_tokens=draft_tokens, page_bytes=page,
        block_spans=tuple(block_spans), slot_spans=tuple(slot_spans), slot_pages=slot_pages,
        layout_id=_layout_id(block_tokens, draft_tokens, page, block_spans, slot_spans), replay=replay_tokens(memories),
        _log_of=log_of,
    )  # fmt: skip


def _common_stride(memories: Sequence[Memory]) -> int:
    """The largest stride; every other must divide it."""
    largest = max((m.log_stride for m in memories), default=1)
    for memory in memories:
        if largest % memory.log_stride:
            raise ConfigError(f"{memory.name}.stride", memory.log_stride, f"a divisor of the largest stride, {largest}")
    return largest


def _choose_block_tokens(stride: int, has_logs: bool, page_bytes: Callable[[int], int]) -> int:
    if not has_logs:
        return 256
    if stride > 1:
        return 2 * stride
    tokens = 16
    while page_bytes(tokens) < MIN_PAGE_BYTES:
        tokens *= 2
    return tokens


def _largest_region(parts: Sequence[tuple[int, str, Part]]) -> int:
    """Bytes of the largest layer, aligned: what a page must at least hold."""
    by_layer: dict[int, int] = {}
    for layer, _, part in parts:
        by_layer[layer] = by_layer.get(layer, 0) + aligned(part.rows * part.field.nbytes)
    return max(by_layer.values(), default=0)


def _pack(parts: Sequence[tuple[int, str, Part]], page_bytes: int) -> list[Span]:
    """Spans of the parts in order: aligned, and no layer across two pages."""
    spans: list[Span] = []
    page = offset = 0
    start = 0
    while start < len(parts):
        stop = start
        while stop < len(parts) and parts[stop][0] == parts[start][0]:
            stop += 1
        need = sum(aligned(part.rows * part.field.nbytes) for _, _, part in parts[start:stop])
        assert need <= page_bytes
        if offset + need > page_bytes:
            page, offset = page + 1, 0
        for layer, name, part in parts[start:stop]:
            spans.append(Span(layer, name, part.field, page, offset, part.rows))
            offset += aligned(part.rows * part.field.nbytes)
        start = stop
    return spans


def _layout_id(block_tokens: int, draft_tokens: int, page: int, *span_lists: Sequence[Span]) -> str:
    """A digest of everything that says where bytes lie."""
    rows = [
        [[s.layer, s.memory, s.field.name, s.field.dtype, list(s.field.shape), s.page, s.offset, s.rows] for s in spans]
        for spans in span_lists
    ]
    text = json.dumps(["layout-1", block_tokens, draft_tokens, page, rows], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
