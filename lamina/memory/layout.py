"""Where every byte of a request lies: a pure function of the memories, the block size and the draft length.

A block page holds `block_tokens` native tokens of all logs of all layers. A slot holds every ring, fold and snapshot of
one running request in a whole number of pages. A checkpoint holds the live part of a slot, rows oldest first.
A window too large for a slot is a tail: a log with a left edge, in blocks of pages of its own.
Within all four each field is an array of its own that starts at a multiple of 128 bytes, and the fields of one memory
of one layer are in one page:

    block page   | layer 1 c4 nope rows | pad | layer 1 c4 rope rows | pad | ... | layer 2 ... |
    slot page i  | layer 0 window rows ... | layer 1 window rows ... | layer 0 fold ... |       (largest memories first)
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lamina.base.errors import ConfigError
from lamina.base.sizes import KiB
from lamina.memory.kinds import Field, Memory, Part, RowRange, check_memories, replay_tokens
from lamina.memory.packing import ALIGNMENT, Span, Unit, aligned, pack, pages_of
from lamina.memory.tails import Tail, choose_tail

__all__ = ["ALIGNMENT", "HIDDEN", "MIN_PAGE_BYTES", "Layout", "Span", "Tail", "aligned", "bytes_by_memory", "make_layout"]

MIN_PAGE_BYTES = 512 * KiB
#: name of the slot region that keeps the final hidden vector of the last token seen
HIDDEN = "hidden"
#: most tokens of a block that is chosen for a model of logs alone, whose prefixes are hit in whole blocks
_MOST_SHARED_TOKENS = 64
#: blocks larger than the smallest possible by these factors are tried, and the one that wastes least is taken
_FACTORS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets and sizes that follow from the memories. Build it with `make_layout`.

    block_spans  arrays of one block page.   slot_spans  arrays of the slot's pages, `slot_live` in the same order.
    tails        large windows, grouped by their edges.   replay  tokens to recompute where only the log is there.
    """

    memories: tuple[Memory, ...]
    hidden: Field | None
    block_tokens: int
    draft_tokens: int
    page_bytes: int
    block_spans: tuple[Span, ...]
    slot_spans: tuple[Span, ...]
    slot_pages: int
    tails: tuple[Tail, ...]
    layout_id: str
    replay: float
    _log_of: tuple[Memory, ...] = field(repr=False)
    _slot_kinds: tuple[Memory, ...] = field(repr=False)  # one for each way in which rows of the slot live
    _slot_of: tuple[tuple[int, int], ...] = field(repr=False)  # of each slot span which of these (-1: hidden), and which part
    _packed: dict[tuple[int, ...], tuple[Span, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def has_logs(self) -> bool:
        """Whether blocks have pages at all."""
        return bool(self.block_spans)

    @property
    def has_state(self) -> bool:
        """Whether a request remembers anything but logs, so that a checkpoint is needed to continue it."""
        return self.slot_pages > 0 or bool(self.tails)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def block_pages(self, num_tokens: int) -> int:
        """Pages of the blocks of `num_tokens` tokens; 0 in a model without logs."""
        return self.blocks_for(num_tokens) if self.block_spans else 0

    def tail_pages(self, position: int) -> int:
        """Pages of the large windows at `position`."""
        return sum(tail.pages * tail.num_live(position) for tail in self.tails)

    def most_tail_pages(self, num_tokens: int) -> int:
        """Pages of the large windows that a request on its way to `num_tokens` tokens needs at once if it adds one a step."""
        return sum(tail.pages * tail.most_blocks(num_tokens) for tail in self.tails)

    def pages_for(self, num_tokens: int) -> int:
        """Pages a running request of `num_tokens` tokens holds alone: blocks, large windows and slot."""
        return self.block_pages(num_tokens) + self.tail_pages(num_tokens) + self.slot_pages

    def peak_pages(self, num_tokens: int) -> int:
        """Pages that let a request reach `num_tokens` tokens alone."""
        return self.block_pages(num_tokens) + self.most_tail_pages(num_tokens) + self.slot_pages

    def most_guesses(self, position: int, wanted: int) -> int:
        """The most tokens, at most `wanted`, of a step from `position` that can be taken back to any but the first of its rows.

        What large windows hold at both ends of such a step is all that they need on the way.
        """
        for count in range(wanted, 0, -1):
            stop = position + 1 + count
            held = [{*tail.live_numbers(position), *tail.live_numbers(stop)} for tail in self.tails]
            if all(
                held[group].issuperset(tail.live_numbers(place))
                for group, tail in enumerate(self.tails)
                for place in range(position + 1, stop)
            ):
                return count
        return 0

    def most_tokens(self, num_pages: int, limit: int) -> int:
        """The longest request, at most `limit` tokens, that `num_pages` pages can hold alone; 0 if none fits."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.peak_pages(middle) <= num_pages else (low, middle - 1)
        return low

    def slot_live(self, position: int) -> tuple[tuple[RowRange, ...], ...]:
        """For each slot span the live row ranges at `position`, oldest first."""
        live = [memory.slot_live(position, self.draft_tokens) for memory in self._slot_kinds]
        live.append((((position % (1 + self.draft_tokens), 1),) if position > 0 else (),))  # number -1: the hidden vector
        return tuple(live[kind][part] for kind, part in self._slot_of)

    def checkpoint_spans(self, position: int) -> tuple[Span, ...]:
        """Arrays of a checkpoint at `position`, in the order of the slot spans; rows = live rows, 0 where none is."""
        live = [memory.slot_live(position, self.draft_tokens) for memory in self._slot_kinds]
        rows = [tuple(sum(count for _, count in ranges) for ranges in parts) for parts in live]
        rows.append((int(position > 0),))
        counts = tuple(rows[kind][part] for kind, part in self._slot_of)
        if counts not in self._packed:
            parts = [(span.layer, span.memory, Part(span.field, n)) for span, n in zip(self.slot_spans, counts, strict=True)]
            self._packed[counts] = _in_order(pack(_units(parts), self.page_bytes), self.slot_spans)
        return self._packed[counts]

    def checkpoint_pages(self, position: int) -> int:
        """Pages of a checkpoint's own at `position` (the frozen slot); blocks and large windows are only referenced.

        At least 1 where the model has slots.
        """
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
    memories: Sequence[Memory],
    hidden: Field | None = None,
    block_tokens: int | None = None,
    draft_tokens: int = 0,
    min_page_bytes: int = MIN_PAGE_BYTES,
) -> Layout:
    """The layout of a model whose layers remember `memories`.

    hidden          the final hidden vector kept with the slot, or None for models that need no slot.
    block_tokens    native tokens per block; None chooses: twice the largest stride where entries stand for several tokens
                    (256 for 128), else a power of two from 16 up whose page reaches min_page_bytes and wastes least (64 at the
                    most where there is nothing but logs, because prefixes are then hit in whole blocks).
    min_page_bytes  also what a window must exceed, beside a page, to be kept as a tail.
    draft_tokens    most tokens drafted ahead: rings have so many rows more, folds and the hidden vector a row for each.
    Raises ConfigError for a block size that is no multiple of the strides or too small for one memory's slot part, and for
    drafts where a memory cannot take them back.
    """
    check_memories(memories)
    if draft_tokens < 0:
        raise ConfigError("draft_tokens", draft_tokens, "at least 0")
    fixed = next((memory for memory in memories if not memory.takes_drafts), None)
    if draft_tokens and fixed is not None:
        why = f"layer {fixed.layer}'s {fixed.name} takes in the whole prefix and cannot give drafts back"
        raise ConfigError("draft_tokens", draft_tokens, f"0: {why}")
    stride = _common_stride(memories)
    if block_tokens is not None and (block_tokens < 1 or block_tokens % stride):
        raise ConfigError("block_tokens", block_tokens, f"a multiple of {stride}, the largest stride of the model's logs")
    plan = _Choice(tuple(memories), hidden, draft_tokens, min_page_bytes)
    base = block_tokens or plan.first_block_tokens(stride)
    large = plan.large_windows(base)
    if block_tokens is None:
        base = plan.best_block_tokens(base, stride, large)
    page, region = plan.page_bytes(base, large), plan.largest_unit(large)
    if page < region:
        raise ConfigError("block_tokens", base, f"larger: a page of {page} B does not hold one memory's slot ({region} B)")
    block_spans = pack(_units([(m.layer, m.name, part) for m in memories for part in m.block_parts(base)], keep_order=True), page)
    assert all(span.page == 0 for span in block_spans)
    slot_spans = pack(plan.slot_units(large), page)
    tails = plan.tails(large, page)
    kinds, slot_of = _slot_kinds(memories, slot_spans)
    return Layout(
        memories=tuple(memories), hidden=hidden, block_tokens=base, draft_tokens=draft_tokens, page_bytes=page,
        block_spans=block_spans, slot_spans=slot_spans, slot_pages=pages_of(slot_spans), tails=tails,
        layout_id=_layout_id(base, draft_tokens, page, block_spans, slot_spans, tails), replay=replay_tokens(memories),
        _log_of=tuple(m for m in memories for _ in m.block_parts(base)),
        _slot_kinds=kinds, _slot_of=slot_of,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Choice:
    """The search for a block size: everything that depends on the memories alone."""

    memories: tuple[Memory, ...]
    hidden: Field | None
    draft_tokens: int
    min_page_bytes: int

    def log_bytes(self, tokens: int) -> int:
        """Bytes of a block of all logs."""
        return sum(_bytes(m.block_parts(tokens)) for m in self.memories)

    def first_block_tokens(self, stride: int) -> int:
        """The smallest block worth having."""
        if stride > 1:
            return 2 * stride
        tokens = 16
        if not self.log_bytes(tokens):
            windows = [m for m in self.memories if m.tail_parts(1) and self.ring_bytes(m) > self.min_page_bytes]
            if not windows:
                return 256
            while sum(_bytes(m.tail_parts(tokens)) for m in windows) < self.min_page_bytes:
                tokens *= 2
            return tokens
        most = math.inf if self.has_slot else _MOST_SHARED_TOKENS
        while self.log_bytes(tokens) < self.min_page_bytes and tokens < most:
            tokens *= 2
        return tokens

    @property
    def has_slot(self) -> bool:
        """Whether a request keeps anything but logs, so that a prefix can be hit inside a block."""
        return any(m.slot_parts(self.draft_tokens) for m in self.memories)

    def best_block_tokens(self, base: int, stride: int, large: frozenset[Memory]) -> int:
        """The block size, from `base` up, that wastes least; no larger than needed where entries stand for several tokens."""
        region = self.largest_unit(large)
        while self.log_bytes(base) and self.page_bytes(base, large) < region:
            base *= 2
        if stride > 1 or not (self.log_bytes(base) or large):
            return base
        return min((base * factor for factor in _FACTORS), key=lambda tokens: (self.waste(tokens, large), tokens))

    def waste(self, tokens: int, large: frozenset[Memory]) -> float:
        """Bytes of a long request that hold nothing: of the slot, of the large windows, and half an open block."""
        page, units = self.page_bytes(tokens, large), self.slot_units(large)
        slot = pages_of(pack(units, page)) * page - sum(unit.nbytes for unit in units)
        return slot + page / 2 * bool(self.log_bytes(tokens)) + sum(tail.waste(page) for tail in self.tails(large, page))

    def page_bytes(self, tokens: int, large: frozenset[Memory]) -> int:
        """A page: a block of all logs; without logs, a block of all large windows."""
        if self.log_bytes(tokens):
            return self.log_bytes(tokens)
        tail = sum(_bytes(m.tail_parts(tokens)) for m in large)
        return aligned(max(self.min_page_bytes, self.largest_unit(large), tail))

    def ring_bytes(self, memory: Memory) -> int:
        """Bytes of a memory's slot part."""
        return _bytes(memory.slot_parts(self.draft_tokens))

    def large_windows(self, tokens: int) -> frozenset[Memory]:
        """Windows that exceed a page."""
        limit = max(self.log_bytes(tokens), self.min_page_bytes)
        return frozenset(m for m in self.memories if m.tail_parts(1) and self.ring_bytes(m) > limit)

    def slot_units(self, large: frozenset[Memory]) -> list[Unit]:
        """What a slot holds, the fields of each memory together."""
        parts = [(m.layer, m.name, part) for m in self.memories if m not in large for part in m.slot_parts(self.draft_tokens)]
        if self.hidden is not None:
            parts.append((_hidden_layer(self.memories), HIDDEN, Part(self.hidden, 1 + self.draft_tokens)))
        return _units(parts)

    def largest_unit(self, large: frozenset[Memory]) -> int:
        """Bytes that a page must at least hold."""
        return max((unit.nbytes for unit in self.slot_units(large)), default=0)

    def tails(self, large: frozenset[Memory], page: int) -> tuple[Tail, ...]:
        """The large windows by their edges, each group with the block size that wastes least."""
        edges = dict.fromkeys(m.tail_edges for m in self.memories if m in large)
        groups = [tuple(m for m in self.memories if m in large and m.tail_edges == edge) for edge in edges]
        return tuple(choose_tail(group, page) for group in groups)


def _slot_kinds(memories: Sequence[Memory], spans: Sequence[Span]) -> tuple[tuple[Memory, ...], tuple[tuple[int, int], ...]]:
    """One memory for each way in which rows of a slot live, and for each span which of these and which of its parts it is."""
    of = {(memory.layer, memory.name): memory for memory in memories}
    kinds: dict[tuple[object, ...], tuple[int, Memory]] = {}
    found: list[tuple[int, int]] = []
    part: dict[tuple[int, str], int] = {}
    for span in spans:
        key = (span.layer, span.memory)
        part[key] = part.get(key, -1) + 1
        if key not in of:
            found.append((-1, 0))
            continue
        number, _ = kinds.setdefault(of[key].slot_edges, (len(kinds), of[key]))
        found.append((number, part[key]))
    return tuple(memory for _, memory in kinds.values()), tuple(found)


def _bytes(parts: Iterable[Part]) -> int:
    """Bytes of arrays with alignment."""
    return sum(aligned(part.rows * part.field.nbytes) for part in parts)


def _hidden_layer(memories: Sequence[Memory]) -> int:
    """The layer that the hidden vector is listed under: one past the last."""
    return max((m.layer for m in memories), default=0) + 1


def _common_stride(memories: Sequence[Memory]) -> int:
    """The largest stride; every other must divide it."""
    largest = max((m.log_stride for m in memories), default=1)
    for memory in memories:
        if largest % memory.log_stride:
            raise ConfigError(f"{memory.name}.stride", memory.log_stride, f"a divisor of the largest stride, {largest}")
    return largest


def _units(parts: Iterable[tuple[int, str, Part]], keep_order: bool = False) -> list[Unit]:
    """The parts of each memory of each layer together, the largest first unless the order is to be kept."""
    units: dict[tuple[int, str], list[Part]] = {}
    for layer, name, part in parts:
        units.setdefault((layer, name), []).append(part)
    found = [Unit(layer, name, tuple(each)) for (layer, name), each in units.items()]
    return found if keep_order else sorted(found, key=lambda unit: -unit.nbytes)


def _in_order(spans: Sequence[Span], like: Sequence[Span]) -> tuple[Span, ...]:
    """`spans` in the order of the spans `like`, which name the same fields."""
    by_name = {(span.layer, span.memory, span.field.name): span for span in spans}
    return tuple(by_name[span.layer, span.memory, span.field.name] for span in like)


def _layout_id(
    block_tokens: int, draft_tokens: int, page: int, block: Sequence[Span], slot: Sequence[Span], tails: Sequence[Tail]
) -> str:
    """A digest of everything that says where bytes lie."""

    def rows(spans: Sequence[Span]) -> list[list[object]]:
        return [[s.layer, s.memory, s.field.name, s.field.dtype, list(s.field.shape), s.page, s.offset, s.rows] for s in spans]

    placed = [rows(block), rows(slot), [[tail.tokens, tail.pages, rows(tail.spans)] for tail in tails]]
    text = json.dumps(["layout-2", block_tokens, draft_tokens, page, placed], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
