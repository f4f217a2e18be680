"""What a change costs: two plans compared, memory by memory, so that the parts add up to the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamina.plan.facts import MemoryFacts, PlanFacts, WorkloadFacts

PADDING = "padding"


@dataclass(frozen=True, slots=True)
class Column:
    """One line of workloads that both plans have: a length, and how many requests of it (None: one is shown)."""

    context: int
    requests: int | None

    @property
    def factor(self) -> int:
        """Requests that the figures are for."""
        return self.requests or 1


@dataclass(frozen=True, slots=True)
class Effect:
    """What became of one memory, or of padding: why, and bytes more or less in each column."""

    name: str
    why: str
    deltas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shift:
    """A figure before and after; None where there is none."""

    name: str
    was: int | None
    now: int | None

    @property
    def delta(self) -> int | None:
        """Bytes more or less; None unless both are known."""
        return None if self.was is None or self.now is None else self.now - self.was


@dataclass(frozen=True, slots=True)
class Diff:
    """Two plans compared.

    choices   settings that differ: (name, before, after).   budget  parts of one GPU's memory that differ, weights by component.
    columns   lengths that both have.   effects  add up, column by column, to `totals`.   totals  bytes of all requests of a
    column.   fits  requests that fit.   same_layout  whether bytes have the same shape.
    """

    was: str
    now: str
    same_layout: bool
    choices: tuple[tuple[str, str, str], ...]
    budget: tuple[Shift, ...]
    columns: tuple[Column, ...]
    effects: tuple[Effect, ...]
    totals: tuple[Shift, ...]
    fits: tuple[Shift, ...]


def compare_plans(was: PlanFacts, now: PlanFacts) -> Diff:
    """What `now` costs more or less than `was`."""
    pairs = [(one, other) for one in was.workloads for other in now.workloads if _column(one) == _column(other)]
    columns = tuple(_column(one) for one, _ in pairs)
    choices = tuple(
        (name, was.choices.get(name, "-"), now.choices.get(name, "-"))
        for name in dict.fromkeys([*was.choices, *now.choices])
        if was.choices.get(name, "-") != now.choices.get(name, "-")
    )
    totals = tuple(
        Shift("bytes", one.bytes_per_request * column.factor, other.bytes_per_request * column.factor)
        for column, (one, other) in zip(columns, pairs, strict=True)
    )
    fits = tuple(Shift("fits", one.fits, other.fits) for one, other in pairs)
    same = was.layout_id == now.layout_id
    return Diff(was.model, now.model, same, choices, _budget(was, now), columns, _effects(was, now, pairs), totals, fits)


def _column(line: WorkloadFacts) -> Column:
    return Column(line.context, line.requests)


def _budget(was: PlanFacts, now: PlanFacts) -> tuple[Shift, ...]:
    known = was.usable_bytes is not None or now.usable_bytes is not None
    shifts = [Shift("usable memory", was.usable_bytes, now.usable_bytes)] if known else []
    for name in dict.fromkeys([*was.weights, *now.weights]):
        shifts.append(Shift(f"weights: {name}", was.weights.get(name, 0), now.weights.get(name, 0)))
    shifts.append(Shift("workspace (estimate)", was.workspace_bytes, now.workspace_bytes))
    shifts.append(Shift("pool", was.pool_bytes, now.pool_bytes))
    return tuple(shift for shift in shifts if shift.was != shift.now)


def _effects(was: PlanFacts, now: PlanFacts, pairs: Sequence[tuple[WorkloadFacts, WorkloadFacts]]) -> tuple[Effect, ...]:
    names = dict.fromkeys(name for pair in pairs for line in pair for name in line.memories)
    effects = []
    for name in sorted(names, key=lambda one: one == PADDING):  # padding last
        deltas = tuple((other.memories.get(name, 0) - one.memories.get(name, 0)) * (one.requests or 1) for one, other in pairs)
        if any(deltas):
            effects.append(Effect(name, _why(name, was, now), deltas))
    return tuple(effects)


def _why(name: str, was: PlanFacts, now: PlanFacts) -> str:
    """The change of a memory in words."""
    if name == PADDING:
        return "alignment and whole pages"
    before, after = _lines(was, name), _lines(now, name)
    if not before:
        return "new: " + "; ".join(_described(line) for line in after)
    if not after:
        return "gone: " + "; ".join(_described(line) for line in before)
    said: list[str] = []
    if len(before) == len(after) == 1:
        said = _differences(before[0], after[0])
    elif before != after:
        said = ["; ".join(_described(line) for line in after) + ", was " + "; ".join(_described(line) for line in before)]
    block = (was.choices.get("block_tokens", "-"), now.choices.get("block_tokens", "-"))
    if not said and block[0] != block[1]:
        said = [f"blocks of {block[1]} tokens, were {block[0]}"]
    return ", ".join(said) or "pages of other sizes"


def _lines(facts: PlanFacts, name: str) -> list[MemoryFacts]:
    return [line for line in facts.memories if line.name == name]


def _described(line: MemoryFacts) -> str:
    plural = "s" * (line.layers != 1)
    return f"{line.layers} layer{plural} of {line.entry_bytes:,} B ({line.format}), {line.lifetime}"


def _differences(was: MemoryFacts, now: MemoryFacts) -> list[str]:
    """What of one memory differs, most telling first."""
    said = []
    if was.layers != now.layers:
        said.append(f"{now.layers} layers, were {was.layers}")
    if (was.entry_bytes, was.format) != (now.entry_bytes, now.format):
        said.append(f"entries of {now.entry_bytes:,} B ({now.format}), were {was.entry_bytes:,} B ({was.format})")
    rows = [line.fixed_bytes // (line.layers * line.entry_bytes) if line.entry_bytes else 0 for line in (was, now)]
    if rows[0] != rows[1]:
        said.append(f"rings of {rows[1]:,} rows, were {rows[0]:,}")
    if was.lifetime != now.lifetime and rows[0] == rows[1]:
        said.append(f"{now.lifetime}, was {was.lifetime}")
    return said


def diff_json(diff: Diff) -> dict[str, object]:
    """A comparison as plain values; bytes are of all requests of a line."""
    return {
        "from": diff.was,
        "to": diff.now,
        "same_layout": diff.same_layout,
        "choices": [{"name": name, "from": was, "to": now} for name, was, now in diff.choices],
        "budget": [{"name": s.name, "from_bytes": s.was, "to_bytes": s.now, "delta_bytes": s.delta} for s in diff.budget],
        "workloads": [_column_json(diff, number) for number in range(len(diff.columns))],
    }


def _column_json(diff: Diff, number: int) -> Mapping[str, object]:
    column, total, fits = diff.columns[number], diff.totals[number], diff.fits[number]
    return {
        "context": column.context,
        "requests": column.requests,
        "from_bytes": total.was,
        "to_bytes": total.now,
        "delta_bytes": total.delta,
        "from_fits": fits.was,
        "to_fits": fits.now,
        "parts": [
            {"name": effect.name, "why": effect.why, "delta_bytes": effect.deltas[number]}
            for effect in diff.effects
            if effect.deltas[number]
        ],
    }
