"""How much of a workload could have been reused by somebody who knows the future.

The ledger decides what to keep without knowing what comes. Two figures say how good that was, both for one run that has
been simulated: the same admissions and ends at the same times, the same pages held by running requests at each moment, and
for each request at most the reuse that it has in an unlimited pool (or had in this run, if that is more: an eviction can
move a checkpoint to a better place). What is free to choose is only what to keep in the pages that nobody holds, between
one use and the next:

    session 7     | turn 1 runs |..... keep 190 pages, save 48,000 tokens? .....| turn 2 runs |
    prefix "a"      | runs |..... keep 32 pages, save 8,000 tokens? .........| runs |  (another session)

`belady`   a schedule that can be carried out: when room is short, what is needed last (or never) goes first, tokens that
           continue something never outlive it. The best of this rule, of the same rule weighted by pages x time for each
           token saved, and of filling the room over time with what costs least (`packed`).
`bound`    no schedule whatever saves more: the optimum of the linear program that may keep any part of anything, and needs
           room only on average over each of some windows of time, from above by its dual.

The best schedule lies between the two.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from lamina.base.errors import ConfigError
from lamina.memory.layout import Layout
from lamina.plan.simulation import Served, SimulationReport
from lamina.plan.traces import TraceRequest

Floats = NDArray[np.float64]

#: windows of time of the linear program, and steps of the search for its dual
WINDOWS, ROUNDS = 400, 1500


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that was in use until `start` and is wanted again at `stop` by request `user`.

    tokens     that the user need not compute if it is kept.   blocks  pages of its full blocks.
    pages      that keep all of it: the blocks, the open block and the checkpoint.
    low, block where it begins in its request, and the tokens of a block.
    replay     tokens that are computed again if only blocks are kept: 0 with logs alone, infinite where nothing can be replayed.
    fraction   the fewest pages that a token costs if only a part is kept, at most pages / tokens.
    is_session whether it continues a prefix, and is worth nothing without it.
    """

    user: int
    start: float
    stop: float
    tokens: int
    blocks: int
    pages: int
    low: int
    block: int
    replay: float
    fraction: float
    is_session: bool

    def worth(self, kept: int) -> int:
        """Tokens that a part of the pages saves; it is let go from its end: checkpoint, open block, then the last full block."""
        if kept == self.pages:
            return self.tokens
        if not self.blocks or not kept or math.isinf(self.replay):
            return 0
        end = (self.low // self.block + min(kept, self.blocks)) * self.block
        return max(0, end - int(self.replay) - self.low)


@dataclass(frozen=True, slots=True)
class Optimum:
    """Token hit rates of one run, of all prompt tokens: what was had, and what could have been."""

    had: float
    belady: float
    bound: float
    unlimited: float


def offline_optimum(
    layout: Layout, requests: Sequence[TraceRequest], run: SimulationReport, unlimited: SimulationReport
) -> Optimum:
    """What could have been reused in `run`.

    run, unlimited  of the same requests, with `served` kept; `unlimited` in a pool that evicted nothing (`ample_pages`).
    Raises ConfigError for reports that lack them.
    """
    for name, report in (("run", run), ("unlimited", unlimited)):
        if len(report.served) != report.finished or report.finished != len(requests) - report.refused:
            raise ConfigError(name, f"a report with {len(report.served)} served requests", "run_trace(..., keep_served=True)")
    if unlimited.evicted_blocks or unlimited.evicted_checkpoints:
        raise ConfigError("unlimited", f"{unlimited.num_pages} pages", "a pool in which nothing is evicted, see ample_pages")
    reuse = {one.number: one.hit_tokens for one in unlimited.served}
    for one in run.served:  # checkpoints at junctions can come earlier where something was evicted
        reuse[one.number] = max(reuse[one.number], one.hit_tokens)
    gaps, sure = find_gaps(layout, requests, run.served, reuse)
    total = max(1, run.prompt_tokens)
    room = Room(tuple(time for time, _ in run.held), tuple(run.num_pages - held for _, held in run.held))
    kept = max(belady(gaps, room), belady(gaps, room, weighted=True), packed(gaps, room))
    return Optimum(run.hit_rate, (sure + kept) / total, (sure + bound(gaps, room)) / total, unlimited.hit_rate)


def ample_pages(layout: Layout, requests: Sequence[TraceRequest], checkpoint_interval: int | None = None) -> int:
    """Pages that hold all that the requests can ever leave behind, so that nothing is evicted."""
    pages = 0
    said: dict[tuple[str, str], int] = {}
    for one in requests:
        before = 0
        if one.session is not None:
            before = said.get((one.cache_salt, one.session), 0)
            said[one.cache_salt, one.session] = one.total_tokens
        new = one.total_tokens - before
        points = 4 + (
            new // checkpoint_interval if checkpoint_interval is not None else 0
        )  # prompt, answer, junction, and the slot
        pages += layout.pages_for(new) + 2 + points * (layout.pages_for(1) + 1)
    return max(1, pages)


# -- what there is to keep


def find_gaps(
    layout: Layout, requests: Sequence[TraceRequest], served: Sequence[Served], reuse: dict[int, int]
) -> tuple[list[Gap], int]:
    """Everything that could be kept from one use to the next, and the tokens that are reused without keeping anything.

    reuse   by request: the prompt tokens that it can reuse at the most.
    """
    by_number = {one.number: one for one in requests}
    sizes = _Sizes(layout)
    gaps: list[Gap] = []
    sure = 0
    last: dict[tuple[str, str], float] = {}
    borders = _borders(requests)
    held: dict[tuple[str, str, int], float] = {}  # by prefix and stretch of it: until when somebody runs on it
    for one in sorted(served, key=lambda one: (one.admitted, one.number)):
        request = by_number[one.number]
        useful = reuse[one.number]
        shared = min(useful, request.prefix_tokens)
        if request.prefix is not None:
            name = (request.cache_salt, request.prefix)
            low = 0
            for high in borders[name]:
                if high > request.prefix_tokens:
                    break
                until = held.get((*name, high))
                tokens = min(shared, high) - low
                if tokens > 0 and until is not None and until < one.admitted:
                    gaps.append(sizes.prefix_gap(one.number, until, one.admitted, low, low + tokens))
                else:
                    sure += max(0, tokens)
                held[*name, high] = max(one.ended, until or 0.0)
                low = high
        if request.session is not None:
            session = (request.cache_salt, request.session)
            until = last.get(session)
            if useful > shared:
                if until is not None and until < one.admitted:
                    gaps.append(sizes.session_gap(one.number, until, one.admitted, request.prefix_tokens, useful))
                else:
                    sure += useful - shared
            last[session] = one.ended
        elif useful > shared:
            sure += useful - shared
    return gaps, sure


def _borders(requests: Sequence[TraceRequest]) -> dict[tuple[str, str], list[int]]:
    """For each salt and prefix the lengths that requests share of it, ascending."""
    found: dict[tuple[str, str], set[int]] = {}
    for one in requests:
        if one.prefix is not None and one.prefix_tokens:
            found.setdefault((one.cache_salt, one.prefix), set()).add(one.prefix_tokens)
    return {name: sorted(lengths) for name, lengths in found.items()}


class _Sizes:
    """Pages of parts of a path."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.size = layout.block_tokens
        self.block = layout.block_pages(1)
        self.replay = layout.replay if layout.has_state else 0.0

    def prefix_gap(self, user: int, start: float, stop: float, low: int, high: int) -> Gap:
        """Blocks alone: a checkpoint deeper down may make one here needless, so none is asked for."""
        pages = (high // self.size - low // self.size) * self.block
        fraction = min(self.block / self.size, pages / (high - low))
        return Gap(user, start, stop, high - low, pages, pages, low, self.size, self.replay, fraction, False)

    def session_gap(self, user: int, start: float, stop: float, low: int, high: int) -> Gap:
        """Blocks, the open block and the checkpoint; or only blocks, if tokens are replayed from there."""
        size, layout = self.size, self.layout
        frozen = layout.checkpoint_pages(high) + layout.tail_pages(high)
        whole = (high // size - low // size) * self.block
        opened = self.block if high % size and frozen else 0
        pages = whole + opened + frozen
        costs = [pages / (high - low)]
        aligned = high // size * size
        if aligned > low:
            costs.append((whole + layout.checkpoint_pages(aligned)) / (aligned - low))
            if aligned - self.replay > low:
                costs.append(whole / (aligned - self.replay - low))
        return Gap(user, start, stop, high - low, whole, pages, low, self.size, self.replay, min(costs), True)


# -- room


@dataclass(frozen=True, slots=True)
class Room:
    """Pages that running requests leave over: `free[i]` from `times[i]` on, the first of them before that as well."""

    times: tuple[float, ...]
    free: tuple[int, ...]

    def means(self, edges: Floats) -> Floats:
        """Page-seconds left over between each two edges.  [W + 1] -> [W]"""
        first, last = min(self.times[0], float(edges[0])), max(self.times[-1], float(edges[-1]))
        times = np.array([first, *self.times[1:], last])
        areas = np.concatenate([[0.0], np.cumsum(np.diff(times) * np.array(self.free, dtype=np.float64))])
        return np.diff(np.interp(edges, times, areas))


# -- a schedule


def belady(gaps: Sequence[Gap], room: Room, weighted: bool = False) -> int:
    """Tokens saved by keeping everything and, where room is short, letting go what is needed last.

    weighted  instead, what costs most pages x time to keep for each token it will save.
    """
    events: list[tuple[float, int, int]] = []  # (time, 0 use | 1 keep | 2 room, index)
    for index, gap in enumerate(gaps):
        events += [(gap.start, 1, index), (gap.stop, 0, index)]
    events += [(time, 2, index) for index, time in enumerate(room.times)]
    kept: dict[int, int] = {}  # pages of each gap that are still there
    worst: list[tuple[float, int]] = []
    pages, free = 0, room.free[0]
    final = [0] * len(gaps)
    for _, together in groupby(sorted(events), key=itemgetter(0)):
        for _, what, index in together:
            if what == 2:
                free = room.free[index]
                continue
            gap = gaps[index]
            if what == 1:
                kept[index] = gap.pages
                pages += gap.pages
                cost = (gap.stop - gap.start) * gap.pages / gap.tokens if weighted else gap.stop
                heapq.heappush(worst, (-cost, index))
                continue
            final[index] = kept.pop(index, 0)
            pages -= final[index]
        while pages > free and worst:
            victim = worst[0][1]
            left = kept.get(victim, 0)
            drop = left if math.isinf(gaps[victim].replay) else min(left, pages - free)
            pages -= drop
            if drop == left:
                heapq.heappop(worst)
                kept.pop(victim, None)
            else:
                kept[victim] = left - drop
    return _saved(gaps, final)


def packed(gaps: Sequence[Gap], room: Room) -> int:
    """Tokens saved by keeping first what costs the fewest pages x time a token, as far as there is room for it throughout.

    A part is kept where a part is worth something. Prefixes come first: what continues them needs them.
    """
    times = np.unique(np.array([*(gap.start for gap in gaps), *(gap.stop for gap in gaps), *room.times]))
    free = np.array(room.free)[np.maximum(np.searchsorted(room.times, times, side="right") - 1, 0)]
    starts = np.searchsorted(times, [gap.start for gap in gaps])
    stops = np.searchsorted(times, [gap.stop for gap in gaps])
    order = sorted(range(len(gaps)), key=lambda i: ((gaps[i].stop - gaps[i].start) * gaps[i].pages / gaps[i].tokens, i))
    kept = [0] * len(gaps)
    for index in order:
        gap, span = gaps[index], slice(starts[index], stops[index])
        fits = min(gap.pages, int(free[span].min()))
        if fits > 0 and gap.worth(fits):
            kept[index] = fits
            free[span] -= fits
    return _saved(gaps, kept)


def _saved(gaps: Sequence[Gap], kept: Sequence[int]) -> int:
    """Tokens that these pages of the gaps save. What continues a prefix is reached only through all of it."""
    whole = {gap.user: True for gap in gaps}
    for gap, pages in zip(gaps, kept, strict=True):
        if not gap.is_session and gap.worth(pages) < gap.tokens:
            whole[gap.user] = False
    return sum(gap.worth(pages) for gap, pages in zip(gaps, kept, strict=True) if whole[gap.user] or not gap.is_session)


# -- a bound


def bound(gaps: Sequence[Gap], room: Room, windows: int = WINDOWS, rounds: int = ROUNDS) -> float:
    """Tokens that no schedule can exceed.

    A price for a page-second in each window gives a bound: what the room is worth, and what each gap saves beyond its
    price. Any prices do; a subgradient search looks for good ones.
    """
    if not gaps:
        return 0.0
    start = np.array([gap.start for gap in gaps])
    stop = np.array([gap.stop for gap in gaps])
    value = np.array([gap.tokens for gap in gaps], dtype=np.float64)
    pages = value * np.array([gap.fraction for gap in gaps])
    edges = np.unique(np.quantile(np.concatenate([start, stop]), np.linspace(0, 1, windows + 1)))
    if len(edges) < 2:
        return float(value.sum())
    overlap = np.minimum(stop[:, None], edges[None, 1:]) - np.maximum(start[:, None], edges[None, :-1])
    need = np.maximum(overlap, 0) * pages[:, None]  # [gaps, W] page-seconds
    have = room.means(edges)  # [W]
    most = float((value / np.maximum(need.sum(1), 1e-9)).max())  # a price at which nothing is worth keeping
    price = np.full(len(have), _best_flat_price(need, have, value, most))
    scale = float(price.max()) or most / 100
    best = float(value.sum())
    for step in range(rounds):
        found, slope = _priced(price, need, have, value)
        best = min(best, found)
        norm = float(np.abs(slope).max())
        if norm == 0:
            break
        price = np.maximum(price - scale * slope / norm / (1 + step / 8), 0)
    return best


def _best_flat_price(need: Floats, have: Floats, value: Floats, most: float) -> float:
    """The best price if all windows have the same: the bound is convex in it."""
    low, high = 0.0, most
    for _ in range(60):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        bounds = [_priced(np.full(len(have), one), need, have, value)[0] for one in (left, right)]
        low, high = (low, right) if bounds[0] <= bounds[1] else (left, high)
    return (low + high) / 2


def _priced(price: Floats, need: Floats, have: Floats, value: Floats) -> tuple[float, Floats]:
    """The bound at these prices, and its slope."""
    gain = value - need @ price
    wins = gain > 0
    return float(have @ price + gain[wins].sum()), have - need[wins].sum(0)
