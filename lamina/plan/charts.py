"""The charts of the plan's page as plotly figures in plain data: what a request's bytes are, how many fit, what is wasted."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lamina.base.sizes import GiB, KiB, MiB, format_bytes
from lamina.memory.layout import HIDDEN, Layout
from lamina.plan.palette import GAP_FILL, Colours
from lamina.plan.request_lines import format_tokens

#: a plotly figure, trace or part of a layout, as JSON has it
Figure = dict[str, object]

#: name of the bytes of a request's pages that matter to nobody yet, or never
UNUSED = "padding and empty rows"
_SHORTEST, _SAMPLES = 256, 8
_OURS, _RIVAL = "#1f86cc", "#e0691a"


@dataclass(frozen=True, slots=True)
class Spread:
    """The smallest, the mean and the largest share of waste over the lengths of one period."""

    low: float
    mean: float
    high: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A rival's figures: requests that fit at each of `curve_lengths`, and what it wastes around each of `waste_lengths`."""

    name: str
    requests: tuple[int, ...]
    waste: tuple[Spread, ...]


def bar_lengths(max_positions: int) -> tuple[int, ...]:
    """Powers of two from 256 tokens to the longest context, and that itself."""
    found = []
    length = min(_SHORTEST, max_positions)
    while length < max_positions:
        found.append(length)
        length *= 2
    return (*found, max_positions)


def curve_lengths(max_positions: int) -> tuple[int, ...]:
    """Eight lengths per octave from 256 tokens to the longest context: most of them no multiple of anything."""
    found, step = [], 0
    while (length := round(_SHORTEST * 2 ** (step / 8))) < max_positions:
        found.append(length)
        step += 1
    return (*found, max_positions)


def waste_lengths(layout: Layout, max_positions: int) -> tuple[tuple[int, ...], ...]:
    """Lengths from the first token of a block to its last, for blocks of every order of size: there waste goes up and down.

    Where large windows have blocks of their own, the longer of both is the period.
    """
    period = max([layout.block_tokens, *(tail.tokens for tail in layout.tails)])
    last = max(1, max_positions // period)
    blocks = dict.fromkeys(min(last, length // period + 1) for length in curve_lengths(max_positions))
    inside = sorted({1, *(max(1, round(period * part / _SAMPLES)) for part in range(1, _SAMPLES + 1))})
    return tuple(tuple((block - 1) * period + length for length in inside) for block in blocks)


def spread(shares: Sequence[float]) -> Spread:
    """Smallest, mean and largest."""
    return Spread(min(shares), sum(shares) / len(shares), max(shares))


def request_bytes(layout: Layout, num_tokens: int) -> dict[str, int]:
    """Bytes of one request by memory, live ones, and what its pages have besides; adds up to its pages."""
    live = {name: size for name, size in layout.live_bytes(num_tokens).items() if size}
    total = layout.pages_for(num_tokens) * layout.page_bytes
    return {**live, UNUSED: total - sum(live.values())}


def stacked(layout: Layout, lengths: Sequence[int], colours: Colours) -> Figure:
    """Bars of one request's bytes by memory at each length; below, the same as shares of the request."""
    parts = [request_bytes(layout, length) for length in lengths]
    totals = [sum(part.values()) for part in parts]
    names = [name for name in dict.fromkeys(name for part in parts for name in part) if name != UNUSED]
    ticks = [format_tokens(length) for length in lengths]
    unit, word = _unit(max(totals))
    traces: list[Figure] = []
    for name in [*names, UNUSED]:
        sizes = [part.get(name, 0) for part in parts]
        if not any(sizes):
            continue
        words = [f"{format_bytes(size)} ({size / total:.1%})" for size, total in zip(sizes, totals, strict=True)]
        common: Figure = {
            "type": "bar", "x": ticks, "name": escape(name), "legendgroup": escape(name), "marker": _fill(name, colours),
            "customdata": words, "hovertemplate": "%{customdata}",
        }  # fmt: skip
        traces.append({**common, "y": [round(size / unit, 6) for size in sizes]})
        shares = [round(100 * size / total, 4) for size, total in zip(sizes, totals, strict=True)]
        traces.append({**common, "y": shares, "yaxis": "y2", "showlegend": False})
    above = {
        "type": "scatter", "mode": "text", "x": ticks, "y": [total / unit for total in totals], "textposition": "top center",
        "text": [format_bytes(total) for total in totals], "showlegend": False, "hoverinfo": "skip", "cliponaxis": False,
    }  # fmt: skip
    figure = _figure([*traces, above], "tokens of the request", 620)
    figure["barmode"], figure["bargap"] = "stack", 0.25
    _axis(figure, "xaxis").update({"type": "category", "anchor": "y2", "showgrid": False})
    above_all = 1.09 * max(totals) / unit
    figure["yaxis"] = {"title": {"text": f"{word} of one request"}, "domain": [0.46, 1.0], "range": [0, above_all]}
    figure["yaxis2"] = {"title": {"text": "share of it"}, "ticksuffix": " %", "domain": [0.0, 0.38], "range": [0, 100]}
    return _finished([*traces, above], figure)


def capacity(
    layout: Layout, lengths: Sequence[int], pages: int, replicas: int, checkpoint_pages: int, rival: Curve | None
) -> Figure:
    """How many requests of a length fit at once: alone, with one checkpoint each, and at the rival's. Both axes are log."""

    def fitting(extra: int) -> list[int]:
        return [replicas * (pages // max(1, layout.peak_pages(length) + extra)) for length in lengths]

    traces = [_line("this plan", lengths, fitting(0), _OURS, "%{y:,} requests")]
    if checkpoint_pages:
        with_one = _line("with a checkpoint each", lengths, fitting(checkpoint_pages), _OURS, "%{y:,} requests", "dot")
        traces.append(with_one)
    if rival is not None:
        traces.append(_line(rival.name, lengths, rival.requests, _RIVAL, "%{y:,} requests", "dash"))
    figure = _figure(traces, "tokens of each request", 420)
    _logarithmic(figure, lengths)
    figure["yaxis"] = {"title": {"text": "requests that fit at once"}, "type": "log", "dtick": "D2", "tickformat": ",d"}
    return _finished(traces, figure)


def waste(layout: Layout, lengths: Sequence[Sequence[int]], rival: Curve | None) -> Figure:
    """What share of a request's memory holds no byte that matters: the mean over a block's lengths, and a band of all of them."""
    ends = [inside[-1] for inside in lengths]
    traces = _band("this plan", ends, [waste_around(layout, inside) for inside in lengths], _OURS)
    if rival is not None:
        traces += _band(rival.name, ends, rival.waste, _RIVAL, "dash")
    figure = _figure(traces, "tokens of the request", 420)
    _logarithmic(figure, ends)
    figure["yaxis"] = {"title": {"text": "of its memory holds nothing"}, "ticksuffix": " %", "rangemode": "tozero"}
    return _finished(traces, figure)


def _band(name: str, x: Sequence[int], shares: Sequence[Spread], colour: str, dash: str = "solid") -> list[Figure]:
    """The means as a line, and the band from smallest to largest."""
    words = [f"{100 * one.mean:.2f} % ({100 * one.low:.2f} to {100 * one.high:.2f} %)" for one in shares]
    edge: Figure = {
        "type": "scatter", "mode": "lines", "x": list(x), "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False,
        "legendgroup": escape(name),
    }  # fmt: skip
    line = _line(name, x, [_percent(one.mean) for one in shares], colour, "%{customdata}", dash)
    return [
        {**edge, "y": [_percent(one.high) for one in shares]},
        {**edge, "y": [_percent(one.low) for one in shares], "fill": "tonexty", "fillcolor": f"{colour}33"},
        {**line, "customdata": words, "legendgroup": escape(name)},
    ]


def _percent(share: float) -> float:
    return round(100 * share, 4)


def waste_around(layout: Layout, lengths: Sequence[int]) -> Spread:
    """What share of a request's pages holds no live byte, over these lengths."""
    return spread([waste_of(layout, length) for length in lengths])


def waste_of(layout: Layout, num_tokens: int) -> float:
    """Share of a request's pages that holds no live byte."""
    total = layout.pages_for(num_tokens) * layout.page_bytes
    return 1 - sum(layout.live_bytes(num_tokens).values()) / total if total else 0.0


def memory_names(layout: Layout) -> tuple[str, ...]:
    """Names that own bytes, in the model's order, the hidden vector last."""
    in_tails = [span for tail in layout.tails for span in tail.spans]
    names = dict.fromkeys(span.memory for span in (*layout.block_spans, *layout.slot_spans, *in_tails))
    ordered = [memory.name for memory in layout.memories if memory.name in names]
    return tuple(dict.fromkeys([*ordered, *(name for name in names if name != HIDDEN), *([HIDDEN] if HIDDEN in names else [])]))


def _unit(num_bytes: int) -> tuple[int, str]:
    for size, word in ((GiB, "GiB"), (MiB, "MiB")):
        if num_bytes >= 2 * size:
            return size, word
    return KiB, "KiB"


def _fill(name: str, colours: Colours) -> Figure:
    if name != UNUSED:
        return {"color": colours.fill(name)}
    return {"color": GAP_FILL, "pattern": {"shape": "/", "size": 5, "solidity": 0.25}}


def _line(name: str, x: Sequence[int], y: Sequence[float], colour: str, template: str, dash: str = "solid") -> Figure:
    return {
        "type": "scatter", "mode": "lines", "x": list(x), "y": list(y), "name": escape(name),
        "line": {"color": colour, "width": 2.5, "dash": dash}, "hovertemplate": template,
    }  # fmt: skip


def _figure(traces: Sequence[Figure], x_title: str, height: int) -> Figure:
    return {
        "height": height, "margin": {"l": 78, "r": 16, "t": 44, "b": 56}, "hovermode": "x unified",
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "font": {"size": 13},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "xaxis": {"title": {"text": x_title}}, "yaxis": {},
    }  # fmt: skip


def _axis(figure: Figure, name: str) -> Figure:
    axis = figure[name]
    assert isinstance(axis, dict)
    return axis


def _logarithmic(figure: Figure, lengths: Sequence[int]) -> None:
    """A logarithmic axis of lengths with a tick at every second power of two, in words."""
    ticks = [length for length in bar_lengths(lengths[-1]) if length & (length - 1) == 0]
    _axis(figure, "xaxis").update(
        {"type": "log", "tickvals": ticks, "ticktext": [format_tokens(length) for length in ticks], "hoverformat": ",d"}
    )


def _finished(traces: Sequence[Figure], figure: Figure) -> Figure:
    return {"data": list(traces), "layout": figure}
