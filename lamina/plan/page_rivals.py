"""Another engine's figures on the plan's page, where its calculator knows the model's family."""

from dataclasses import dataclass
from html import escape

from lamina.plan.charts import Curve, curve_lengths, spread, waste_lengths
from lamina.plan.kept import NotModelled
from lamina.plan.page_parts import table
from lamina.plan.report import Plan
from lamina.plan.rivals import ENGINES, Comparison, Rival, compare, rival_of, shown


@dataclass(frozen=True, slots=True)
class RivalFigures:
    """What the page shows of another engine: its curves, a section with both sides row by row, and what it assumes."""

    curve: Curve | None = None
    table: str = ""
    remarks: tuple[str, ...] = ()


def rival_figures(plan: Plan, engine: str | None, pool_bytes: int) -> RivalFigures:
    """The figures of `engine` in a pool of the same bytes; no curves, and why, where it does not model the family.

    Raises ConfigError for an unknown engine.
    """
    if engine is None:
        return RivalFigures()
    rival, _ = rival_of(plan, engine)
    name = ENGINES.get(engine, engine)
    if isinstance(rival, NotModelled):
        return RivalFigures(remarks=(f"{name} is not shown: {rival.reason}",))
    comparison = compare(plan, engine)
    longest, replicas = plan.description.max_positions, plan.mesh.dp
    requests = tuple(replicas * rival.requests_that_fit(pool_bytes, length) for length in curve_lengths(longest))
    shares = tuple(spread([_waste(rival, one) for one in inside]) for inside in waste_lengths(plan.layout, longest))
    remarks = tuple(f"{name}: {one}" for one in comparison.assumptions)
    return RivalFigures(Curve(name, requests, shares), _section(comparison), remarks)


def _waste(rival: Rival, num_tokens: int) -> float:
    held = rival.held_bytes(num_tokens)
    return 1 - rival.payload_bytes(num_tokens) / held if held else 0.0


def _section(comparison: Comparison) -> str:
    rows = []
    for row in comparison.rows:
        better = "" if row.ratio is None else f"{row.ratio:,.2f}"
        cells = (shown(row.unit, row.ours), shown(row.unit, row.theirs), better)
        title = escape(row.title.strip())
        inner = f'<span style="padding-left:1.2em">{title}</span>' if row.title.startswith(" ") else title
        rows.append(f"<tr><td>{inner}</td>" + "".join(f"<td class=n>{escape(cell)}</td>" for cell in cells) + "</tr>")
    name = f"{comparison.engine} {comparison.version}"
    heading = f'<section id="rival"><h2>Beside {escape(name)}</h2>'
    words = f"<p>{escape(name)} is calculated from its rules, not measured; what that assumes is said below.</p>"
    return heading + words + table(["", "#Lamina", f"#{comparison.engine}", "#times better"], "".join(rows)) + "</section>"
