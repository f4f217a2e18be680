"""Windows larger than a page: a log with a left edge.

Rows are appended to blocks of `tokens` tokens, each in `pages` pages of its own; a block is let go when its last row has
left the window. Nothing is ever overwritten, so running requests and checkpoints share whole blocks by reference:

    block 0 | block 1 | block 2 | block 3 | block 4 (open)
    let go  | let go  | <--------- window --------->|        position
"""

from dataclasses import dataclass

from lamina.base.errors import ConfigError
from lamina.memory.kinds import Memory, RowRange
from lamina.memory.packing import Span, Unit, pack, pages_of

#: tail blocks have at most so many tokens
_MOST_TOKENS = 512
_GRANULE = 16


@dataclass(frozen=True, slots=True)
class Tail:
    """Large windows with equal edges.

    tokens  native tokens of a block: position q is in row q mod tokens of block q // tokens.   pages  pages of a block.
    spans   arrays of one block; `page` is the number of the page within the block.   windows  the memories.
    """

    tokens: int
    pages: int
    spans: tuple[Span, ...]
    windows: tuple[Memory, ...]

    def live_blocks(self, position: int) -> tuple[tuple[int, int], ...]:
        """Block numbers [first, stop) with live rows once `position` tokens have been seen: ascending, disjoint."""
        found: list[tuple[int, int]] = []
        for start, count in self.windows[0].tail_live(position):
            first, stop = start // self.tokens, -(-(start + count) // self.tokens)
            if found and first <= found[-1][1]:
                found[-1] = (found[-1][0], max(stop, found[-1][1]))
            else:
                found.append((first, stop))
        return tuple(found)

    def live_numbers(self, position: int) -> list[int]:
        """The numbers of these blocks."""
        return [block for first, stop in self.live_blocks(position) for block in range(first, stop)]

    def num_live(self, position: int) -> int:
        """Blocks with live rows."""
        return sum(stop - first for first, stop in self.live_blocks(position))

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks a request holds at once, at the most, on its way to `num_tokens` tokens if each step adds one token."""
        return min(-(-num_tokens // self.tokens), self._full_blocks)

    @property
    def _full_blocks(self) -> int:
        """Blocks of a full window wherever it starts; one that is cleared at a block's border starts there."""
        kept, rows = self.windows[0].most_tail_rows
        reset = self.windows[0].tail_edges[1]
        starts_anywhere = not (reset and reset == rows and reset % self.tokens == 0)
        return -(-kept // self.tokens) + (-(-(rows - 1) // self.tokens) + 1 if starts_anywhere else -(-rows // self.tokens))

    def live_rows(self, block: int, position: int) -> tuple[RowRange, ...]:
        """Live rows (first, count) of one block, oldest first."""
        low = block * self.tokens
        spans = ((max(start, low), min(start + count, low + self.tokens)) for start, count in self.windows[0].tail_live(position))
        return tuple((start - low, stop - start) for start, stop in spans if stop > start)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in all the windows."""
        return sum(span.row_bytes for span in self.spans)

    def waste(self, page_bytes: int) -> int:
        """Bytes of a full window's pages that hold no live row, at the worst."""
        kept, rows = self.windows[0].most_tail_rows
        return self._full_blocks * self.pages * page_bytes - (kept + rows) * self.row_bytes


def choose_tail(windows: tuple[Memory, ...], page_bytes: int) -> Tail:
    """The tail of these windows, which have equal edges, with the block size that wastes least of a full window.

    Raises ConfigError where a page does not hold one row of one window.
    """
    kept, rows = windows[0].most_tail_rows
    step = max(1, min(_GRANULE, rows // _GRANULE))
    best: Tail | None = None
    for tokens in range(step, max(step, min(_MOST_TOKENS, kept + rows)) + 1, step):
        units = [Unit(m.layer, m.name, m.tail_parts(tokens)) for m in windows]
        if max(unit.nbytes for unit in units) > page_bytes:
            break
        spans = pack(units, page_bytes)
        tail = Tail(tokens, pages_of(spans), spans, windows)
        if best is None or tail.waste(page_bytes) < best.waste(page_bytes):
            best = tail
    if best is None:
        name = windows[0].name
        raise ConfigError("block_tokens", f"a page of {page_bytes} B", f"larger: {step} rows of {name} do not fit")
    return best
