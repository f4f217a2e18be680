"""What must move when a request moves: to another process, to the host or to disk. The same list for all three.

The wire holds the live bytes of a position and nothing else, field by field: first the blocks in order, then the blocks of
large windows, then the slot, rows oldest first. Page ids never travel; both sides look them up in their own tables.

    wire | block 0: c4 rows | index rows | ... | block 1: ... | slot: window rows, oldest first | fold | ... | hidden |
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lamina.memory.layout import Layout, Span

#: read(segment, offset, num_bytes) -> bytes, from byte `offset` of the page that the segment lies in
Read = Callable[["Segment", int, int], bytes]
#: write(segment, offset, data); as above
Write = Callable[["Segment", int, bytes], None]


@dataclass(frozen=True, slots=True)
class Segment:
    """Live rows of one field of one memory of one layer.

    block        block number in the request's block table, or in that of large window number `tail`; None for the slot.
    page         number of the page within the slot or the window's block; 0 for a block.
    offset       of row 0 of the field in that page, bytes.
    rows         (first row, count) ranges, oldest first.   row_bytes  bytes of one row.
    wire_offset  where the rows begin in the message, bytes.   nbytes  how many there are.
    format       dtype and shape of a row.
    """

    layer: int
    memory: str
    field: str
    block: int | None
    page: int
    offset: int
    row_bytes: int
    rows: tuple[tuple[int, int], ...]
    wire_offset: int
    nbytes: int
    tail: int | None = None
    format: str = ""

    @property
    def pieces(self) -> Iterator[tuple[int, int]]:
        """(offset in the page, bytes) of each row range, in the order of the wire."""
        return ((self.offset + first * self.row_bytes, count * self.row_bytes) for first, count in self.rows)


def segments(layout: Layout, position: int, frozen: bool = False, first_block: int = 0) -> tuple[Segment, ...]:
    """The segments of a request that has seen `position` tokens; their bytes are exactly its live bytes.

    frozen       the slot's part lies in the pages of a checkpoint instead of a slot; the wire is the same.
    first_block  blocks before this one are there already and do not move.
    """
    found: list[Segment] = []
    wire = 0

    def parts() -> Iterator[Segment]:
        for block in range(first_block, layout.blocks_for(position) if layout.has_logs else 0):
            yield from block_segments(layout, position, block)
        for number, tail in enumerate(layout.tails):
            for block in tail.live_numbers(position):
                yield from tail_segments(layout, position, number, block)
        yield from slot_segments(layout, position, frozen)

    for part in parts():
        found.append(replace(part, wire_offset=wire))
        wire += part.nbytes
    return tuple(found)


def block_segments(layout: Layout, position: int, block: int) -> Iterator[Segment]:
    """Those of one block of the log; wire offsets are for the caller to say, here and below."""
    for span, count in zip(layout.block_spans, layout.block_live(block, position), strict=True):
        yield from _segment(span, block, ((0, count),))


def tail_segments(layout: Layout, position: int, number: int, block: int) -> Iterator[Segment]:
    """Those of one block of large window `number`."""
    tail = layout.tails[number]
    rows = tail.live_rows(block, position)
    for span in tail.spans:
        yield from _segment(span, block, rows, number)


def slot_segments(layout: Layout, position: int, frozen: bool = False) -> Iterator[Segment]:
    """Those of the slot, or where it is frozen of a checkpoint."""
    if frozen:
        for span in layout.checkpoint_spans(position):
            yield from _segment(span, None, ((0, span.rows),))
    else:
        for span, rows in zip(layout.slot_spans, layout.slot_live(position), strict=True):
            yield from _segment(span, None, rows)


def _segment(span: Span, block: int | None, rows: tuple[tuple[int, int], ...], tail: int | None = None) -> Iterator[Segment]:
    """The rows of a span, if there are any."""
    size = sum(count for _, count in rows) * span.row_bytes
    if size:
        field = span.field
        shape = f"{field.dtype}[{','.join(map(str, field.shape))}]"
        where = (block, span.page, span.offset, span.row_bytes)
        yield Segment(span.layer, span.memory, field.name, *where, rows, 0, size, tail, shape)


def wire_bytes(parts: Sequence[Segment]) -> int:
    """Bytes of the message."""
    return sum(part.nbytes for part in parts)


def pack(read: Read, parts: Sequence[Segment]) -> bytes:
    """The message: the bytes of all segments, in order."""
    return b"".join(read(part, offset, size) for part in parts for offset, size in part.pieces)


def unpack(write: Write, parts: Sequence[Segment], message: bytes) -> None:
    """Writes a message to where the segments say. Raises ValueError, before it writes, if the size is not theirs."""
    if len(message) != wire_bytes(parts):
        raise ValueError(f"message has {len(message)} bytes, allowed: the {wire_bytes(parts)} of its segments")
    at = 0
    for part in parts:
        for offset, size in part.pieces:
            write(part, offset, message[at : at + size])
            at += size
