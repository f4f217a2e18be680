"""Pages drawn to scale: every byte of a block, a slot or a checkpoint is a place on a map that reads like text.

A map cuts its pages into lines of equal length, so that a region of 16 bytes is still somewhere:

    0        | c4 nope            | rope | s | index | ...       one line = line_bytes, left to right
    64 KiB   | ...                             | padding |       a page starts a new line
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from lamina.base.errors import ConfigError
from lamina.base.sizes import KiB
from lamina.memory.layout import HIDDEN, Span
from lamina.plan.palette import Colours

#: a region with no layer: alignment between arrays, or the unused end of a page
PADDING = "padding"
#: lines shorter than this carry no text
_TEXT_HEIGHT = 11.0
#: pixels left of the lines, for offsets
GUTTER = 64.0
_GAP_LINES, _CHARACTER = 2.0, 6.1


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes [offset, offset + nbytes) of page number `page`: one field of one memory of one layer, or padding.

    rows, row_bytes  of the array; 0 rows for padding.   stored  dtype and shape of a row, in words.
    """

    page: int
    offset: int
    nbytes: int
    layer: int | None
    memory: str
    field: str
    rows: int = 0
    row_bytes: int = 0
    stored: str = ""

    @property
    def name(self) -> str:
        """Layer, memory and field; of padding its kind; the hidden vector belongs to no layer."""
        if self.layer is None or self.memory == HIDDEN:
            return self.field
        return f"layer {self.layer} {self.array}"

    @property
    def array(self) -> str:
        """Memory and field, once where they have the same name."""
        return self.memory if self.memory == self.field else f"{self.memory} {self.field}"


def regions(spans: Iterable[Span], page_bytes: int, num_pages: int) -> tuple[Region, ...]:
    """The arrays in order of their place, and between them the padding: together every byte of every page, once."""
    by_page: list[list[Span]] = [[] for _ in range(num_pages)]
    for span in spans:
        if span.rows:
            by_page[span.page].append(span)
    found: list[Region] = []
    for page, inside in enumerate(by_page):
        at = 0
        for span in sorted(inside, key=lambda one: one.offset):
            assert span.offset >= at, "two arrays overlap"
            if span.offset > at:
                found.append(Region(page, at, span.offset - at, None, PADDING, "alignment"))
            stored = f"{'x'.join(str(size) for size in span.field.shape)} {span.field.dtype}"
            found.append(
                Region(
                    page, span.offset, span.nbytes, span.layer, span.memory, span.field.name, span.rows, span.row_bytes, stored
                )
            )
            at = span.offset + span.nbytes
        assert at <= page_bytes, "an array ends behind its page"
        if at < page_bytes:
            found.append(Region(page, at, page_bytes - at, None, PADDING, "unused end of the page"))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Map:
    """Pages and how they are drawn.

    line_bytes   bytes of a full line.   lines  (first, last + 1) byte of each line, counted over all pages.
    width        pixels of a full line.  line_height  pixels, the gap to the next line not counted.
    """

    title: str
    regions: tuple[Region, ...]
    page_bytes: int
    num_pages: int
    line_bytes: int
    lines: tuple[tuple[int, int], ...]
    width: float
    line_height: float

    @property
    def bytes_per_pixel(self) -> float:
        """The scale."""
        return self.line_bytes / self.width

    @property
    def height(self) -> float:
        """Pixels of all lines."""
        return self.top(len(self.lines) - 1) + self.line_height

    def top(self, line: int) -> float:
        """Where a line begins, pixels; pages stand apart where a page has several lines."""
        page_gap = 6.0 if self.line_bytes < self.page_bytes else 0.0
        return line * (self.line_height + _GAP_LINES) + page_gap * (self.lines[line][0] // self.page_bytes)

    def starts(self) -> list[int]:
        """First byte of each region, counted over all pages."""
        return [region.page * self.page_bytes + region.offset for region in self.regions]


def make_map(
    title: str, spans: Iterable[Span], page_bytes: int, num_pages: int, max_lines: int, line_height: float, width: float = 1040.0
) -> Map:
    """A map with at most `max_lines` lines: each page is cut into as many equal lines as fit, or several pages share one."""
    if num_pages < 1:
        raise ConfigError("num_pages", num_pages, "at least 1, to be drawn")
    each = max_lines // num_pages
    if each >= 1:
        line_bytes = _round_up(page_bytes / each) if each > 1 else page_bytes
        lines = [
            (page * page_bytes + at, page * page_bytes + min(at + line_bytes, page_bytes))
            for page in range(num_pages)
            for at in range(0, page_bytes, line_bytes)
        ]
    else:
        line_bytes = page_bytes * math.ceil(num_pages / max_lines)
        total = page_bytes * num_pages
        lines = [(at, min(at + line_bytes, total)) for at in range(0, total, line_bytes)]
    return Map(title, regions(spans, page_bytes, num_pages), page_bytes, num_pages, line_bytes, tuple(lines), width, line_height)


def _round_up(num_bytes: float) -> int:
    """The next number of bytes that reads well: 2 or 3 times a power of two, at least 128."""
    size = 128
    while size < num_bytes:
        if size * 3 // 2 >= num_bytes:
            return size * 3 // 2
        size *= 2
    return size


@dataclass(frozen=True, slots=True)
class Piece:
    """What is drawn: `nbytes` bytes of a line from pixel `x` on. Regions thinner than a pixel are drawn together.

    layer   None for padding and for pieces of several layers.   memory  the memory with most bytes in it.
    labels  names of what is drawn, longest first; none for the later parts of a region that several lines share.
    """

    line: int
    x: float
    width: float
    nbytes: int
    layer: int | None
    memory: str
    labels: tuple[str, ...]


def pieces(drawn: Map) -> Iterator[Piece]:
    """The pieces of every line, from left to right; together they have every byte of the map, once."""
    starts = drawn.starts()
    for line, (first, stop) in enumerate(drawn.lines):
        thin: list[tuple[Region, int]] = []
        at = begin = first
        number = bisect_right(starts, first) - 1
        while at < stop:
            region = drawn.regions[number]
            end = min(starts[number] + region.nbytes, stop)
            is_thin = (end - at) < drawn.bytes_per_pixel
            held = sum(size for _, size in thin)
            if thin and (not is_thin or (held >= drawn.bytes_per_pixel and region.layer != thin[-1][0].layer)):
                yield _merged(drawn, line, first, begin, thin)
                thin = []
            if is_thin:
                begin = at if not thin else begin
                thin.append((region, end - at))
            else:
                labels = _labels(drawn, number) if starts[number] == at else ()
                yield _piece(drawn, line, first, at, end - at, region.layer, region.memory, labels)
            at, number = end, number + 1
        if thin:
            yield _merged(drawn, line, first, begin, thin)


def _merged(drawn: Map, line: int, first: int, begin: int, thin: Sequence[tuple[Region, int]]) -> Piece:
    sizes: dict[str, int] = {}
    for region, size in thin:
        sizes[region.memory] = sizes.get(region.memory, 0) + size
    layers = {region.layer for region, _ in thin if region.layer is not None}
    memory = max(sizes, key=lambda name: sizes[name])
    return _piece(drawn, line, first, begin, sum(sizes.values()), min(layers) if len(layers) == 1 else None, memory, ())


def _piece(
    drawn: Map, line: int, first: int, at: int, size: int, layer: int | None, memory: str, labels: tuple[str, ...]
) -> Piece:
    scale = drawn.bytes_per_pixel
    return Piece(line, (at - first) / scale, size / scale, size, layer, memory, labels)


def _labels(drawn: Map, number: int) -> tuple[str, ...]:
    """Names of a region, longest first: the first array of a memory keeps the memory's name, the others their own."""
    region = drawn.regions[number]
    before = next((one for one in reversed(drawn.regions[max(number - 2, 0) : number]) if one.layer is not None), None)
    if region.layer is None:
        return ()
    if region.memory == HIDDEN:
        return (HIDDEN,)
    goes_on = before is not None and (before.layer, before.memory, before.page) == (region.layer, region.memory, region.page)
    if goes_on:
        return (region.array, region.field)
    return (region.name, f"layer {region.layer} {region.memory}", f"{region.layer} {region.memory}", region.memory)


def svg(drawn: Map, colours: Colours, identity: str) -> str:
    """The map as an SVG element for a page that has the rules of `palette.css`. identity: its id, unique in the document."""
    names = sorted({region.memory for region in drawn.regions if region.layer is not None}, key=colours.number)
    words = f"{drawn.title}: {drawn.page_bytes * drawn.num_pages:,} bytes to scale, with {', '.join(names)}"
    head = (
        f'<svg id="{identity}" class="map" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {drawn.width + GUTTER + 1:g} '
        f'{drawn.height + 1:g}" role="img" aria-label="{escape(words)}" font-family="system-ui, sans-serif" font-size="10">'
    )
    return "\n".join([head, hatch(f"{identity}-hatch"), *elements(drawn, colours, f"{identity}-hatch"), "</svg>"])


def elements(drawn: Map, colours: Colours, pattern: str) -> list[str]:
    """Labels and rectangles of classes that `palette.css` colours, hatched with `pattern` where nothing is stored."""
    labels = (_line_label(drawn, line) for line in range(len(drawn.lines)))
    return [*(label for label in labels if label), *(_rect(drawn, piece, colours, pattern) for piece in pieces(drawn))]


def hatch(identity: str) -> str:
    """The pattern of bytes that store nothing."""
    return (
        f'<defs><pattern id="{identity}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect class="gap" width="6" height="6"/><line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>'
    )


def offset_words(num_bytes: int) -> str:
    """An offset for people: 0, 64 KiB, 1.5 MiB."""
    if num_bytes < KiB:
        return f"{num_bytes} B" if num_bytes else "0"
    return f"{num_bytes / KiB:,.0f} KiB" if num_bytes < KiB * KiB else f"{num_bytes / KiB / KiB:.2f} MiB"


def _line_label(drawn: Map, line: int) -> str:
    first = drawn.lines[line][0]
    page, offset = divmod(first, drawn.page_bytes)
    if drawn.line_height < _TEXT_HEIGHT and line % math.ceil(_TEXT_HEIGHT / (drawn.line_height + _GAP_LINES)):
        return ""
    words = offset_words(offset) if offset or drawn.num_pages == 1 else f"page {page}"
    y = drawn.top(line) + drawn.line_height / 2 + 3.5
    return f'<text class="ink" x="{GUTTER - 6:g}" y="{y:.1f}" text-anchor="end">{words}</text>'


def _rect(drawn: Map, piece: Piece, colours: Colours, pattern: str) -> str:
    x, y = GUTTER + piece.x, drawn.top(piece.line)
    box = f'x="{x:.2f}" y="{y:.1f}" width="{piece.width:.2f}" height="{drawn.line_height:g}" data-bytes="{piece.nbytes}"'
    if piece.memory == PADDING:
        return f'<rect fill="url(#{pattern})" {box}/>'
    number = colours.number(piece.memory)
    odd = " odd" if piece.layer is not None and piece.layer % 2 else ""
    text = next((one for one in piece.labels if len(one) * _CHARACTER + 6 <= piece.width), "")
    if not text or drawn.line_height < _TEXT_HEIGHT:
        return f'<rect class="m{number}{odd}" {box}/>'
    label = f'<text class="on{number}" x="{x + 3:.1f}" y="{y + drawn.line_height / 2 + 3.5:.1f}">{escape(text)}</text>'
    return f'<rect class="m{number}{odd}" {box}/>{label}'
