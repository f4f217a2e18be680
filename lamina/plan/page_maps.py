"""The part of the page that shows where bytes lie: a block, a slot, a window in pages of its own and a checkpoint, to scale."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from lamina.base.sizes import format_bytes
from lamina.memory.layout import HIDDEN, Layout, Span
from lamina.plan.drawing import GUTTER, PADDING, Map, Region, make_map, svg
from lamina.plan.palette import Colours

#: most lines of a map; what has more pages puts several into a line
_BLOCK_LINES, _SLOT_LINES, _PAGE_LINES = 16, 48, 8


@dataclass(frozen=True, slots=True)
class Shown:
    """One map of the page: its id, its heading, what it is in a sentence, and the map."""

    identity: str
    heading: str
    words: str
    drawn: Map


def checkpoint_position(layout: Layout, max_positions: int) -> int:
    """A position for the checkpoint that is shown: past every window where the model goes so far, and inside a block."""
    longest = max((sum(count for _, count in rows) for rows in layout.slot_live(max_positions)), default=0)
    return min(max_positions, max(1000, longest + layout.block_tokens // 2 + 1))


def shown_maps(layout: Layout, max_positions: int) -> tuple[Shown, ...]:
    """The maps that this layout has: no block without logs, no slot without state."""
    found: list[Shown] = []
    page = format_bytes(layout.page_bytes)
    if layout.block_spans:
        words = (
            f"A page of {page} is one block: {layout.block_tokens} tokens of every log of every layer. A request takes one more "
            "as each fills; full blocks are shared by requests with the same tokens."
        )
        found.append(_shown("block", "One block page", words, layout.block_spans, layout, 1, _BLOCK_LINES, 20))
    if layout.slot_pages:
        size = f"{count_words(layout.slot_pages, 'page')} ({format_bytes(layout.slot_pages * layout.page_bytes)})"
        words = f"A running request has one slot of {size}: everything that it overwrites as it goes, whatever its length."
        found.append(_shown("slot", "One slot", words, layout.slot_spans, layout, layout.slot_pages, _SLOT_LINES, 15))
    for number, tail in enumerate(layout.tails):
        words = (
            f"Windows larger than a page lie in blocks of {tail.tokens} tokens, {count_words(tail.pages, 'page')} each; a block "
            "is let go when its last row has left the window. This is one such block."
        )
        name = ", ".join(dict.fromkeys(memory.name for memory in tail.windows))
        heading = f"One block of a large window ({name})"
        found.append(_shown(f"tail{number}", heading, words, tail.spans, layout, tail.pages, _BLOCK_LINES, 20))
    if layout.slot_pages:
        position = checkpoint_position(layout, max_positions)
        pages = layout.checkpoint_pages(position)
        words = (
            f"A checkpoint is a copy of what is live in a slot, here after {position:,} tokens: {count_words(pages, 'page')} "
            f"({format_bytes(pages * layout.page_bytes)}), and references to blocks that are there anyway. A later request with "
            "the same tokens starts from it."
        )
        spans = layout.checkpoint_spans(position)
        found.append(_shown("checkpoint", f"A checkpoint at token {position:,}", words, spans, layout, pages, _SLOT_LINES, 15))
    return tuple(found)


def maps_html(shown: Sequence[Shown], colours: Colours) -> str:
    """Each map with its legend, a table by field, and the table of all its arrays, which the page's script fills."""
    return "\n".join(_map_html(one, colours) for one in shown)


def _shown(
    identity: str, heading: str, words: str, spans: Iterable[Span], layout: Layout, pages: int, lines: int, height: float
) -> Shown:
    drawn = make_map(heading, spans, layout.page_bytes, pages, min(lines, max(_BLOCK_LINES, pages * _PAGE_LINES)), height)
    each = f"a full line is {format_bytes(drawn.line_bytes)}, a pixel about {drawn.bytes_per_pixel:,.0f} B"
    return Shown(identity, heading, f"{words} To scale: {each}; odd layers are shaded.", drawn)


def _map_html(shown: Shown, colours: Colours) -> str:
    drawn, name = shown.drawn, shown.identity
    total = drawn.page_bytes * drawn.num_pages
    sizes: dict[str, int] = {}
    for region in drawn.regions:
        sizes[region.memory] = sizes.get(region.memory, 0) + region.nbytes
    entries = "".join(
        f"<li>{swatch(memory, colours)}{escape(memory)} <span class=soft>{format_bytes(size)}, {size / total:.1%}</span></li>"
        for memory, size in sorted(sizes.items(), key=lambda item: (item[0] == PADDING, -item[1]))
    )
    picture = svg(drawn, colours, name).replace("<svg ", '<svg tabindex="0" ', 1)
    hint = "Point at the map, or focus it and use the arrow keys, to see what is there."
    return f"""<h3 id="{name}-title">{escape(shown.heading)}</h3>
<p>{escape(shown.words)}</p>
<figure aria-labelledby="{name}-title"><ul class="legend">{entries}</ul>
{picture}
<p class="readout" id="{name}-readout" role="status" aria-live="polite">{hint}</p></figure>
<details><summary>By field</summary><div class="scroll">{_field_table(drawn)}</div></details>
<details id="{name}-table"><summary>All {len(drawn.regions):,} arrays and gaps</summary><div class="scroll"><table>
<thead><tr><th class="n">page</th><th class="n">offset</th><th class="n">bytes</th><th class="n">layer</th><th>memory</th>
<th>field</th><th>rows</th></tr></thead>
<tbody></tbody></table></div></details>
<script type="application/json" id="{name}-data">{map_json(drawn)}</script>"""


def swatch(memory: str, colours: Colours) -> str:
    """A little square in a memory's colour."""
    if memory not in colours.numbers:
        return '<span class="swatch gap"></span>'
    return f'<span class="swatch" style="background:{colours.fill(memory)}"></span>'


def map_json(drawn: Map) -> str:
    """What the page's script needs of a map, safe inside a script element."""
    memories: dict[str, int] = {}
    fields: dict[str, int] = {}
    stored: dict[str, int] = {}
    rows = [
        [
            start, region.nbytes, _layer(region), memories.setdefault(region.memory, len(memories)),
            fields.setdefault(region.field, len(fields)), region.rows, stored.setdefault(region.stored, len(stored)),
        ]
        for start, region in zip(drawn.starts(), drawn.regions, strict=True)
    ]  # fmt: skip
    lines = [[first, stop, round(drawn.top(number), 2)] for number, (first, stop) in enumerate(drawn.lines)]
    values = {
        "page_bytes": drawn.page_bytes, "num_pages": drawn.num_pages, "scale": drawn.bytes_per_pixel, "gutter": GUTTER,
        "line_height": drawn.line_height, "lines": lines, "memories": list(memories), "fields": list(fields),
        "stored": list(stored), "regions": rows,
    }  # fmt: skip
    return json.dumps(values, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _layer(region: Region) -> int:
    """The layer; -1 for padding, -2 for what belongs to no layer."""
    if region.layer is None:
        return -1
    return -2 if region.memory == HIDDEN else region.layer


def _field_table(drawn: Map) -> str:
    """Arrays with the same memory, field, rows and format together."""
    groups: dict[tuple[str, str, int, int, str], list[int | None]] = {}
    sizes: dict[tuple[str, str, int, int, str], int] = {}
    for region in drawn.regions:
        key = (region.memory, region.field, region.rows, region.row_bytes, region.stored)
        groups.setdefault(key, []).append(region.layer)
        sizes[key] = sizes.get(key, 0) + region.nbytes
    total = sum(sizes.values())
    rows = []
    for key, layers in groups.items():
        memory, field, count, row_bytes, stored = key
        size = sizes[key]
        each = f"{count:,} x {escape(stored)} = {count * row_bytes:,} B" if count else ""
        rows.append(
            f"<tr><td>{escape(memory)}</td><td>{escape(field)}</td><td>{each}</td><td class=n>{len(layers):,}</td>"
            f"<td class=n>{size:,}</td><td class=n>{size / total:.2%}</td></tr>"
        )
    head = "<th>memory</th><th>field</th><th>one array</th><th class=n>arrays</th><th class=n>bytes</th><th class=n>share</th>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def count_words(number: int, what: str) -> str:
    """A number and what is counted: 1 page, 5 pages."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
