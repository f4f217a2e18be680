"""A comparison of two plans as tables for people: what changed, what one GPU then has, what each length then takes."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lamina.base.sizes import format_bytes
from lamina.plan.diff import Column, Diff, Shift
from lamina.plan.request_lines import format_tokens

_MORE, _LESS = "red", "green"


def print_diff(diff: Diff, console: Console, title: str) -> None:
    """Prints one comparison under its title."""
    console.print(Text(title, style="bold"), soft_wrap=True)
    for name, was, now in diff.choices:
        console.print(Text(f"  {name}: {was} -> {now}"), soft_wrap=True)
    if diff.budget:
        console.print()
        console.print(_budget_table(diff))
    console.print()
    if not diff.columns:
        console.print(Text("The two plans have no length in common: nothing to compare for requests."), soft_wrap=True)
    elif not diff.effects and not _fits_differ(diff):
        console.print(Text("Requests take the same bytes, and as many fit."), soft_wrap=True)
    else:
        console.print(_request_table(diff))
        for line in why_lines(diff):
            console.print(line, soft_wrap=True)


def signed_bytes(value: int) -> str:
    """+1.90 GiB, -12.00 KiB, 0 B."""
    return f"{'+' if value > 0 else '-' if value < 0 else ''}{format_bytes(abs(value))}"


def why_lines(diff: Diff) -> list[Text]:
    """One sentence a cause, as of the column where it costs most: `+1.90 GiB: draft_window, new: 3 layers of ...`."""
    lines = []
    for effect in diff.effects:
        worst = max(range(len(diff.columns)), key=lambda number: abs(effect.deltas[number]))
        value = effect.deltas[worst]
        lines.append(
            Text.assemble(
                (f"{signed_bytes(value):>11}", _style(value)),
                f" at {column_words(diff.columns[worst])}: {effect.name}: {effect.why}",
            )
        )
    return lines


def column_words(column: Column) -> str:
    """`256 x 4K`, or the length alone."""
    tokens = format_tokens(column.context)
    return tokens if column.requests is None else f"{column.requests:,} x {tokens}"


def _style(value: int | None) -> str:
    return "" if not value else _MORE if value > 0 else _LESS


def _fits_differ(diff: Diff) -> bool:
    return any(shift.was != shift.now for shift in diff.fits)


def _budget_table(diff: Diff) -> Table:
    grid = _grid("memory of one GPU")
    for name in ("", "before", "after", "change"):
        grid.add_column(name, justify="right" if name else "left", no_wrap=True)
    for shift in diff.budget:
        delta = shift.delta
        change = Text("-" if delta is None else signed_bytes(delta))
        grid.add_row(shift.name, _size(shift.was), _size(shift.now), change)
    return grid


def _size(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


def _request_table(diff: Diff) -> Table:
    """A column for each length, a row for each cause; the rows add up to `in all`."""
    grid = _grid("bytes of a request" if all(c.requests is None for c in diff.columns) else "bytes of these requests")
    grid.add_column("", no_wrap=True)
    for column in diff.columns:
        grid.add_column(column_words(column), justify="right", no_wrap=True)
    several = len(diff.columns) > 1 and all(column.requests is not None for column in diff.columns)
    if several:
        grid.add_column("all lines", justify="right", no_wrap=True)
    for effect in diff.effects:
        sums = [*effect.deltas, *([sum(effect.deltas)] if several else [])]
        grid.add_row(effect.name, *(Text(signed_bytes(value), style=_style(value)) for value in sums))
    grid.add_section()
    deltas = [shift.delta or 0 for shift in diff.totals]
    deltas += [sum(deltas)] if several else []
    grid.add_row("in all", *(Text(signed_bytes(value), style=_style(value)) for value in deltas), style="bold")
    for name, values in (("before", [t.was or 0 for t in diff.totals]), ("after", [t.now or 0 for t in diff.totals])):
        grid.add_row(name, *(format_bytes(value) for value in [*values, *([sum(values)] if several else [])]))
    if any(shift.was is not None or shift.now is not None for shift in diff.fits):
        grid.add_section()
        grid.add_row("fit before", *(_count(shift.was) for shift in diff.fits), *([""] if several else []))
        grid.add_row("fit after", *(_fit(shift) for shift in diff.fits), *([""] if several else []))
    return grid


def _fit(shift: Shift) -> Text:
    delta = shift.delta or 0
    return Text(_count(shift.now), style=_style(-delta))


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _grid(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
        padding=(0, 1, 0, 0), header_style="bold",
    )  # fmt: skip
