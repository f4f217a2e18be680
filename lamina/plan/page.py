"""`lamina plan --html`: the whole plan as one page that opens with no network. It needs plotly, which brings its JavaScript.

Every text that comes from a config is escaped; a content security policy forbids the page to load anything from anywhere.
"""

import importlib
import os
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path

from lamina.base.errors import ConfigError
from lamina.base.version import __version__
from lamina.plan import page_parts
from lamina.plan.charts import Figure, bar_lengths, capacity, curve_lengths, memory_names, stacked, waste, waste_lengths
from lamina.plan.page_maps import maps_html, shown_maps
from lamina.plan.page_rivals import rival_figures
from lamina.plan.palette import colours_of, css
from lamina.plan.report import Plan

#: what the page may load: nothing
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_HERE = Path(__file__).parent


def write_page(plan: Plan, path: Path, rival: str | None = None) -> None:
    """Writes the page of a plan, whole or not at all.

    rival  an engine of `lamina.plan.rivals` to compare with; it is left out, and the page says so, where it has no figures.
    Raises ConfigError where plotly is missing, OSError where the file cannot be written.
    """
    path = path.resolve()
    if not path.parent.is_dir() or not path.name or (path.exists() and not path.is_file()):
        raise ConfigError("html", str(path), "a file, new or a regular one, in a directory that exists")
    text = page_html(plan, rival)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        part.chmod(0o666 & ~_umask())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def page_html(plan: Plan, rival: str | None = None) -> str:
    """The page as text. Raises ConfigError where plotly is missing."""
    layout, longest = plan.layout, plan.description.max_positions
    colours = colours_of(memory_names(layout))
    bars, lengths, edges = bar_lengths(longest), curve_lengths(longest), waste_lengths(layout, longest)
    pool = page_parts.pool_of(plan)
    other = rival_figures(plan, rival, pool.pages * layout.page_bytes)
    charts = [
        page_parts.Chart(
            "bytes", "What one request takes", page_parts.growth_words(layout, bars),
            stacked(layout, bars, colours), page_parts.bytes_table(layout, bars),
        ),
        page_parts.Chart(
            "capacity", "How many requests fit", page_parts.capacity_words(plan, pool),
            capacity(layout, lengths, pool.pages, plan.mesh.dp, plan.checkpoint_pages, other.curve),
            page_parts.capacity_table(plan, pool, bars),
        ),
        page_parts.Chart(
            "waste", "How much of it holds nothing", page_parts.waste_words(layout, edges),
            waste(layout, edges, other.curve), page_parts.waste_table(layout, edges),
        ),
    ]  # fmt: skip
    drawn = _drawn([chart.figure for chart in charts], [chart.identity for chart in charts])
    sections = [page_parts.chart_html(chart, html) for chart, html in zip(charts, drawn, strict=True)]
    shown = shown_maps(layout, longest)
    title = escape(plan.model)
    styles = (_HERE / "page.css").read_text(encoding="utf-8") + css()
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: memory plan</title>
<link rel="icon" href="data:,">
<style>{styles}</style>
</head>
<body><main>
<header><div><h1>{title}</h1><div class="soft">{escape(page_parts.subtitle(plan))}</div></div>
<button id="theme" type="button">Light or dark</button></header>
<nav aria-label="Sections">{_links(bool(other.table))}</nav>
{page_parts.cards(plan)}
<section id="memories"><h2>What the model remembers</h2>
<p>Every layer keeps its own list of memories. A log grows with the tokens; all else has a fixed size.</p>
{page_parts.memory_table(plan, colours)}
{page_parts.workload_table(plan)}</section>
<section id="weights"><h2>Where the GPU's memory goes</h2>{page_parts.budget_html(plan)}{page_parts.weights_table(plan)}</section>
{"".join(sections)}
{other.table}
<section id="places"><h2>Where the bytes lie</h2>
<p>The pool is cut into equal pages. What follows is drawn to scale from the layout that the engine uses;
hatched bytes hold nothing.</p>
{maps_html(shown, colours)}</section>
<section id="assumptions"><h2>Assumptions</h2>{page_parts.assumptions(plan, pool, other.remarks)}</section>
<footer>Lamina {escape(__version__)} · layout {escape(plan.layout_id)} · calculated from the config alone</footer>
</main><div class="tip" role="tooltip"></div>
<script>{script}</script>
</body></html>
"""


def _drawn(figures: Sequence[Figure], identities: Sequence[str]) -> list[str]:
    """The figures as HTML; plotly's JavaScript is in the first of them. Raises ConfigError without plotly."""
    try:
        plotly = importlib.import_module("plotly.io")
    except ImportError as error:
        raise ConfigError("html", "plotly is not installed", "pip install 'lamina[plot]' (or plotly>=6), then again") from error
    config = {"displaylogo": False, "responsive": True, "displayModeBar": False}
    return [
        plotly.to_html(figure, config=config, include_plotlyjs=number == 0, full_html=False, div_id=f"{identity}-chart")
        for number, (figure, identity) in enumerate(zip(figures, identities, strict=True))
    ]


def _links(has_rival: bool) -> str:
    """Links to the sections."""
    names = {
        "memories": "Memories", "weights": "Weights", "bytes": "One request", "capacity": "Capacity", "waste": "Waste",
        **({"rival": "The other engine"} if has_rival else {}), "places": "Where bytes lie", "assumptions": "Assumptions",
    }  # fmt: skip
    return " ".join(f'<a href="#{identity}">{name}</a>' for identity, name in names.items())


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
