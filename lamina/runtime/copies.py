"""The ledger's copies as tables of pieces, which a GPU moves all at once.

Orders come in a sequence, and a page that one of them writes may be read or written by the next. They are cut into waves: in a
wave no page is written that an order before it has written, and none is read that one before it has written, so that reading
everything first and then writing everything is what their sequence gives. If nothing at all is both read and written, one launch
moves the wave; else one gathers it into spare memory and another spreads it out. A step's orders are nearly always one wave.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.memory.kinds import RowRange
from lamina.memory.layout import Layout
from lamina.memory.orders import CopyPage, Order, SaveSlot
from lamina.ops.move import PIECE_BYTES, WORDS, word_of

Ints: TypeAlias = NDArray[np.int64]
Mover: TypeAlias = Callable[[Tensor, Tensor, Tensor, int], None]

_PATTERNS_KEPT = 256


@dataclass(frozen=True, slots=True)
class Wave:
    """Pieces that move at once.

    pieces        int64 [3, N] as `ops.move` wants them: from the arena into the arena. If anything is both read and written
                  [6, N]: from the arena into spare memory, then from there into the arena.
    spare_bytes   of that memory; 0 where there is no need.   word_bytes  divides every number.
    """

    pieces: Ints
    spare_bytes: int
    word_bytes: int


class CopyPlanner:
    """Turns orders over one layout into waves."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        whole = np.array([[0], [0], [0], [0], [layout.page_bytes]])
        self._page = _in_pieces(whole)
        self._patterns: OrderedDict[tuple[tuple[RowRange, ...], ...], Ints] = OrderedDict()

    def waves(self, orders: Sequence[Order]) -> list[Wave]:
        """The orders' pieces, wave by wave."""
        waves: list[Wave] = []
        parts: list[Ints] = []
        read: set[int] = set()
        written: set[int] = set()
        for order in orders:
            sources, targets, pattern = self._parts(order)
            if not written.isdisjoint(sources) or not written.isdisjoint(targets):
                waves.append(_wave(parts, not read.isdisjoint(written)))
                parts, read, written = [], set(), set()
            read.update(sources)
            written.update(targets)
            page = self.layout.page_bytes
            first = np.array(sources)[pattern[0]] * page + pattern[1]
            to = np.array(targets)[pattern[2]] * page + pattern[3]
            parts.append(np.stack([first, to, pattern[4]]))
        if parts:
            waves.append(_wave(parts, not read.isdisjoint(written)))
        return [wave for wave in waves if wave.pieces.shape[1]]

    def _parts(self, order: Order) -> tuple[tuple[int, ...], tuple[int, ...], Ints]:
        """Pages read, pages written, and int64 [5, N]: which of the first, its byte, which of the second, its byte, bytes."""
        if isinstance(order, CopyPage):
            return (order.source,), (order.target,), self._page
        saved = self._pattern(order.position)
        if isinstance(order, SaveSlot):
            return order.slot, order.checkpoint, saved
        return order.checkpoint, order.slot, saved[[2, 3, 0, 1, 4]]

    def _pattern(self, position: int) -> Ints:
        """What a slot at `position` is to its checkpoint. It repeats as rings turn."""
        live = self.layout.slot_live(position)
        found = self._patterns.get(live)
        if found is not None:
            self._patterns.move_to_end(live)
            return found
        rows: list[tuple[int, int, int, int, int]] = []
        spans = self.layout.checkpoint_spans(position)
        for slot, packed, ranges in zip(self.layout.slot_spans, spans, live, strict=True):
            size, done = slot.row_bytes, 0
            for first, count in ranges:
                rows.append((slot.page, slot.offset + first * size, packed.page, packed.offset + done * size, count * size))
                done += count
        pattern = _in_pieces(np.array(rows, dtype=np.int64).reshape(-1, 5).T)
        self._patterns[live] = pattern
        if len(self._patterns) > _PATTERNS_KEPT:
            self._patterns.popitem(last=False)
        return pattern


def run_waves(memory: Tensor, waves: Sequence[Wave], mover: Mover) -> None:
    """Carries out waves over the arena's bytes [bytes]: one upload, and one launch or two a wave."""
    if not waves:
        return
    tables = torch.from_numpy(np.concatenate([wave.pieces.ravel() for wave in waves]))
    if memory.is_cuda:  # the allocator of pinned memory knows when the copy has been made
        tables = tables.pin_memory().to(memory.device, non_blocking=True)
    at = 0
    for wave in waves:
        pieces = tables[at : at + wave.pieces.size].view(wave.pieces.shape)
        at += wave.pieces.size
        if not wave.spare_bytes:
            mover(memory, memory, pieces, wave.word_bytes)
            continue
        spare = torch.empty(wave.spare_bytes, dtype=torch.uint8, device=memory.device)
        mover(memory, spare, pieces[:3], wave.word_bytes)
        mover(spare, memory, pieces[3:], wave.word_bytes)


def warm_up(memory: Tensor, mover: Mover) -> None:
    """Moves nothing, once in each way that a wave may ask for: whatever compiles does it now."""
    nothing = torch.zeros(3, 1, dtype=torch.int64, device=memory.device)
    for word_bytes in WORDS:
        mover(memory, memory, nothing, word_bytes)


def _in_pieces(pattern: Ints) -> Ints:
    """Cuts what is longer than a piece."""
    nbytes = pattern[4]
    counts = -(-nbytes // PIECE_BYTES)
    cut = np.repeat(pattern, counts, axis=1)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    done = (np.arange(cut.shape[1]) - before) * PIECE_BYTES
    cut[1] += done
    cut[3] += done
    cut[4] = np.minimum(cut[4] - done, PIECE_BYTES)
    return cut


def _wave(parts: Sequence[Ints], overlaps: bool) -> Wave:
    pieces = np.concatenate(parts, axis=1)
    if not pieces.size:
        return Wave(pieces, 0, 1)
    word = word_of(int(np.bitwise_or.reduce(pieces, axis=None)))
    if not overlaps:
        return Wave(pieces, 0, word)
    first, to, nbytes = pieces
    ends = np.cumsum(nbytes)
    return Wave(np.stack([first, ends - nbytes, nbytes, ends - nbytes, to, nbytes]), int(ends[-1]), word)
