"""Arrays into pages: each aligned, and all arrays of one memory of one layer in the same page."""

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.memory.kinds import Field, Part

ALIGNMENT = 128
#: so many of the last pages are looked at for room
_LOOK_BACK = 64


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Span:
    """One field's array: `rows` rows from byte `offset` of page number `page` of a block, slot, checkpoint or tail block."""

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
class Unit:
    """The arrays of one memory of one layer, which stay together."""

    layer: int
    memory: str
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes with alignment."""
        return sum(aligned(part.rows * part.field.nbytes) for part in self.parts)


def pack(units: Sequence[Unit], page_bytes: int) -> tuple[Span, ...]:
    """Spans of the units: each goes into the first of the last pages that has room for it. Units must fit into a page."""
    spans: list[Span] = []
    filled: list[int] = []
    for unit in units:
        need = unit.nbytes
        assert need <= page_bytes, (unit.layer, unit.memory, need, page_bytes)
        recent = range(max(0, len(filled) - _LOOK_BACK), len(filled))
        page = next((p for p in recent if filled[p] + need <= page_bytes), len(filled))
        if page == len(filled):
            filled.append(0)
        offset = filled[page]
        for part in unit.parts:
            spans.append(Span(unit.layer, unit.memory, part.field, page, offset, part.rows))
            offset += aligned(part.rows * part.field.nbytes)
        filled[page] = offset
    return tuple(spans)


def pages_of(spans: Sequence[Span]) -> int:
    """Pages that the spans lie in."""
    return 1 + max((span.page for span in spans), default=-1)
