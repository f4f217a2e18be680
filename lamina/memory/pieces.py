"""A state cut into what moves at once: a block, a block of a large window, the slot. Packed from pages, unpacked into others.

blocks in order, as they fill ── blocks of large windows ── the slot, last
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lamina.memory.layout import Layout
from lamina.memory.segments import Segment, block_segments, slot_segments, tail_segments

BLOCK, WINDOW, SLOT = "block", "window", "slot"

#: read(page) -> its bytes
ReadPage: TypeAlias = Callable[[int], "memoryview"]
#: write(page, parts): (offset, bytes) into a page; what lies between them is lost
WritePage: TypeAlias = Callable[[int, Sequence[tuple[int, "memoryview"]]], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """What moves at once.

    kind   block, window or slot.   number  of the block.   tail  number of the large window, None where it is none.
    parts  its segments; `page` counts the piece's own pages, wire offsets count from the piece's beginning.
    """

    kind: str
    number: int
    tail: int | None
    parts: tuple[Segment, ...]
    nbytes: int

    @property
    def name(self) -> str:
        """For messages."""
        return self.kind if self.kind == SLOT else f"{self.kind} {self.number}"


def pieces(layout: Layout, position: int, frozen: bool, first_block: int = 0) -> Iterator[Piece]:
    """The pieces of a state at `position`, in the order in which they move.

    frozen       the slot's part lies in the pages of a checkpoint instead of a slot; the wire is the same.
    first_block  blocks before this one are there already and do not move.
    Blocks that are full of final entries share one tuple of parts.
    """
    full: Piece | None = None
    for block in range(first_block, layout.blocks_for(position) if layout.has_logs else 0):
        if (block + 2) * layout.block_tokens > position:  # entries may lag behind
            yield _piece(BLOCK, block, None, block_segments(layout, position, block))
            continue
        full = (
            _piece(BLOCK, block, None, block_segments(layout, position, block)) if full is None else replace(full, number=block)
        )
        yield full
    for number, tail in enumerate(layout.tails):
        for block in tail.live_numbers(position):
            yield _piece(WINDOW, block, number, tail_segments(layout, position, number, block))
    if layout.slot_pages:
        yield _piece(SLOT, 0, None, slot_segments(layout, position, frozen))


def _piece(kind: str, number: int, tail: int | None, found: Iterable[Segment]) -> Piece:
    parts, at = [], 0
    for part in found:
        parts.append(replace(part, wire_offset=at))
        at += part.nbytes
    return Piece(kind, number, tail, tuple(parts), at)


def pack_piece(read: ReadPage, pages: Sequence[int], piece: Piece) -> bytes:
    """The bytes of a piece that lies in these pages."""
    views: dict[int, memoryview] = {}
    found: list[memoryview] = []
    for part in piece.parts:
        view = views.get(part.page)
        if view is None:
            view = views[part.page] = read(pages[part.page])
        found += [view[offset : offset + size] for offset, size in part.pieces]
    return b"".join(found)


def unpack_piece(write: WritePage, pages: Sequence[int], piece: Piece, body: bytes | memoryview) -> None:
    """Writes a piece, whose size has been checked, into pages that nobody reads yet."""
    assert len(body) == piece.nbytes
    view, at = memoryview(body), 0
    by_page: dict[int, list[tuple[int, memoryview]]] = {}
    for part in piece.parts:
        into = by_page.setdefault(part.page, [])
        for offset, size in part.pieces:
            into.append((offset, view[at : at + size]))
            at += size
    for page, parts in by_page.items():
        write(pages[page], parts)
