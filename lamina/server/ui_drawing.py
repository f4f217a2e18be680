"""The pictures of the web page as SVG and HTML texts: pages, memories, lines, bars. Colours are classes of ui.css.

Every text that came from outside is escaped; each picture says in words what it shows.
"""

from collections.abc import Iterable, Sequence
from html import escape

from lamina.engine.wire import CacheState, RequestRow

#: states of pages, from the one that matters most: letter of CacheState.page_states, class, word
PAGE_STATES = (("p", "pinned", "pinned"), ("h", "held", "in use"), ("c", "cached", "kept for reuse"), ("f", "free", "free"))
_CLASS = {letter: name for letter, name, _ in PAGE_STATES}
#: most cells of the picture of pages; where there are more pages, a cell stands for several
MAX_CELLS = 2400
COLUMNS = 60
CELL = 10
#: bytes are written with these
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(nbytes: float) -> str:
    """Three figures and a unit."""
    for unit in _UNITS:
        if nbytes < 1024 or unit == _UNITS[-1]:
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.3g} {unit}"


def seconds_text(seconds: float) -> str:
    """A duration, short."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def number_text(number: float) -> str:
    """A figure that a glance can take in."""
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"


# Pages ---------------------------------------------------------------------------------------------------------------


def cells_of(runs: Iterable[tuple[str, int]], pages_per_cell: int) -> list[tuple[str, int]]:
    """Runs of cells (state, count) for runs of pages: a cell of several pages has the state that matters most in it."""
    rank = {letter: place for place, (letter, _, _) in enumerate(PAGE_STATES)}
    cells: list[tuple[str, int]] = []

    def add(state: str, count: int) -> None:
        if cells and cells[-1][0] == state:
            cells[-1] = (state, cells[-1][1] + count)
        elif count:
            cells.append((state, count))

    best, filled = "f", 0  # of the cell that is not full yet
    for state, count in runs:
        if count == 0:
            continue
        state = state if state in rank else "h"
        if filled:
            taken = min(count, pages_per_cell - filled)
            best, filled, count = min(best, state, key=rank.__getitem__), filled + taken, count - taken
            if filled == pages_per_cell:
                add(best, 1)
                filled = 0
        if count:
            add(state, count // pages_per_cell)
            best, filled = state, count % pages_per_cell
    if filled:
        add(best, 1)
    return cells


def pages_svg(state: CacheState) -> str:
    """All pages in the order of their ids, row by row, coloured by state."""
    num_pages = sum(count for _, count in state.page_states)
    if num_pages == 0:
        return '<p class="soft">No pages yet.</p>'
    per_cell = -(-num_pages // MAX_CELLS)
    cells = cells_of(state.page_states, per_cell)
    total = sum(count for _, count in cells)
    columns = min(COLUMNS, total)
    rows = -(-total // columns)
    size = CELL if rows > 8 else 2 * CELL if columns <= COLUMNS // 2 else CELL
    rects, at = [], 0
    for letter, count in cells:
        while count:
            row, column = divmod(at, columns)
            width = min(count, columns - column)
            rects.append(f'<rect class="{_CLASS[letter]}" x="{column}" y="{row}" width="{width}" height="1"/>')
            at, count = at + width, count - width
    lines = [f"M{x} 0V{rows}" for x in range(1, columns)] + [f"M0 {y}H{columns}" for y in range(1, rows)]
    words = ", ".join(
        f"{count:,} {word}" for word, count in zip(("free", "in use", "kept for reuse", "pinned"), counts_of(state))
    )
    return (
        f'<svg class="pages" viewBox="0 0 {columns} {rows}" role="img" aria-label="{num_pages:,} pages: {words}" '
        f'style="max-width:{columns * size * 2}px" preserveAspectRatio="xMinYMin">{"".join(rects)}'
        f'<path class="grid" d="{"".join(lines)}"/></svg>'
        + (f'<p class="soft small">One cell stands for {per_cell:,} pages.</p>' if per_cell > 1 else "")
    )


def counts_of(state: CacheState) -> tuple[int, int, int, int]:
    """Pages that are free, held, cached, pinned."""
    return state.free_pages, state.held_pages, state.cached_pages, state.pinned_pages


def pages_legend(state: CacheState) -> str:
    """What the colours mean, with counts and bytes."""
    counts = dict(zip(("f", "h", "c", "p"), counts_of(state)))
    items = [
        f"<li>{_swatch(name)}{word} <b>{counts[letter]:,}</b> <span>{bytes_text(counts[letter] * state.page_bytes)}</span></li>"
        for letter, name, word in reversed(PAGE_STATES)
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _swatch(name: str) -> str:
    return f'<svg class="swatch" viewBox="0 0 1 1" aria-hidden="true"><rect class="{name}" width="1" height="1"/></svg>'


def memories_html(state: CacheState) -> str:
    """Each memory's bytes, held and kept, as bars to one scale."""
    most = max([row.held_bytes + row.cached_bytes for row in state.memories], default=0)
    lines = [
        f'<div class="line-of"><span class="name">{escape(row.name)}</span>'
        + bar([("held", row.held_bytes), ("cached", row.cached_bytes)], most, f"{row.name}: in use {bytes_text(row.held_bytes)}, "
              f"kept for reuse {bytes_text(row.cached_bytes)}")
        + f'<span class="value"><b>{bytes_text(row.held_bytes)}</b> + {bytes_text(row.cached_bytes)}</span></div>'
        for row in state.memories
    ]  # fmt: skip
    return f'<div class="lines">{"".join(lines)}</div>'


def bar(parts: Sequence[tuple[str, float]], whole: float, words: str) -> str:
    """One bar of coloured parts (class, amount); the empty rest is what is missing of `whole`."""
    rects, at = [], 0.0
    for name, amount in parts:
        width = 100 * amount / whole if whole > 0 else 0
        if width > 0:
            rects.append(f'<rect class="{name}" x="{at:.2f}" width="{width:.2f}" height="10"/>')
        at += width
    return (
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{escape(words)}">'
        f'<rect class="free" width="100" height="10"/>{"".join(rects)}</svg>'
    )


# Requests ------------------------------------------------------------------------------------------------------------


def request_html(row: RequestRow) -> str:
    """One request: its prompt from the cache, computed and missing; then its answer."""
    cached, computed = min(row.cached_tokens, row.prompt_tokens), min(row.computed_tokens, row.prompt_tokens)
    words = (
        f"prompt {computed:,} of {row.prompt_tokens:,} tokens, {cached:,} from the cache; answer {row.output_tokens:,} "
        f"of at most {row.max_tokens:,} tokens"
    )
    prompt = bar([("cached", min(cached, computed)), ("held", max(0, computed - cached))], row.prompt_tokens, "Prompt: " + words)
    answer = bar([("drawn", min(row.output_tokens, row.max_tokens))], row.max_tokens, f"Answer: {row.output_tokens:,} tokens")
    return (
        f'<div class="request"><span class="name"><code>{escape(row.id[:8])}</code>{f" #{row.child}" if row.child else ""}</span>'
        f'<span class="pill {"" if row.state == "waiting" else "on"}">{escape(row.state)}</span>'
        f'<span class="two">{prompt}{answer}</span>'
        f'<span class="value">{computed:,} / {row.prompt_tokens:,} <span class="soft">→</span> {row.output_tokens:,} '
        f'<span class="soft">of {row.max_tokens:,} · {seconds_text(row.age_s)}</span></span></div>'
    )


def requests_html(rows: Sequence[RequestRow], most: int = 12) -> str:
    """The running and waiting requests, the rest as a number."""
    if not rows:
        return '<p class="soft">Nothing runs and nothing waits.</p>'
    more = f'<p class="soft small">and {len(rows) - most:,} more</p>' if len(rows) > most else ""
    parts = (("cached", "prompt from the cache"), ("held", "prompt computed"), ("drawn", "answer"))
    legend = "".join(f"<li>{_swatch(name)}{words}</li>" for name, words in parts)
    return "".join(request_html(row) for row in rows[:most]) + more + f'<ul class="legend">{legend}</ul>'


# Lines and bars ------------------------------------------------------------------------------------------------------


def sparkline(points: Sequence[tuple[float, float]], now: float, span_s: float, words: str, as_dots: bool = False) -> str:
    """A line or dots over the last `span_s` seconds, (time, value) oldest first, from 0 to its own maximum."""
    inside = [(time_s, value) for time_s, value in points if now - time_s <= span_s]
    top = max([value for _, value in inside], default=0.0) or 1.0
    places = [(100 * (1 - (now - time_s) / span_s), 30 - 28 * value / top) for time_s, value in inside]
    if as_dots:
        drawn = f'<path class="dots" d="{"".join(f"M{x:.1f} {y:.1f}h0" for x, y in places) or "M0 0"}"/>'
    else:
        line = "".join(f"{'L' if n else 'M'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(places)) or "M0 30"
        area = f'<path class="area" d="{line}V30H{places[0][0]:.1f}Z"/>' if places else ""
        drawn = f'{area}<path class="line" d="{line}"/>'
    return (
        f'<svg class="spark" viewBox="0 0 100 30" preserveAspectRatio="none" role="img" aria-label="{escape(words)}">'
        f'<path class="axis" d="M0 30H100"/>{drawn}</svg>'
    )


def reasons_html(reasons: dict[str, int]) -> str:
    """Why lookups ended where they did, as bars, the most frequent first."""
    total = sum(reasons.values())
    if not total:
        return '<p class="soft">No prompt has been looked up yet.</p>'
    lines = []
    for reason, count in sorted(reasons.items(), key=lambda one: -one[1]):
        colour = "cached" if reason.replace("_", " ") == "full hit" else "miss"
        drawn = bar([(colour, count)], total, f"{reason}: {count:,} of {total:,}")
        lines.append(
            f'<div class="line-of three"><span class="name">{escape(reason)}</span>{drawn}'
            f'<span class="value"><b>{count:,}</b> <span class="soft">{100 * count / total:.0f} %</span></span></div>'
        )
    return f'<div class="lines">{"".join(lines)}</div>'
