"""The offline optimum: between a schedule that can be carried out and a bound, checked against every schedule there is."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.base.errors import ConfigError
from lamina.memory.layout import Layout
from lamina.plan.offline import Gap, Room, ample_pages, belady, bound, find_gaps, offline_optimum, packed
from lamina.plan.simulate import run_trace
from lamina.plan.simulation import Options, Served
from lamina.plan.traces import TraceRequest
from tests.memory.shapes import logs_only, replayed, scans_only, tiny, v4_flash


def gap(user: int, start: float, stop: float, pages: int, block: int, parts: bool, is_session: bool = True) -> Gap:
    """Something of `pages` blocks of `block` tokens; with `parts` each block is worth something by itself."""
    return Gap(user, start, stop, pages * block, pages, pages, 0, block, 0.0 if parts else math.inf, 1 / block, is_session)


def best_of_all(gaps: list[Gap], room: Room) -> int:
    """Tokens that the best schedule saves, by trying every one."""
    times = sorted({*(g.start for g in gaps), *(g.stop for g in gaps), *room.times})
    best = 0
    for kept in itertools.product(*(range(g.pages + 1) for g in gaps)):
        fits = True
        for time in times:
            free = [free for since, free in zip(room.times, room.free) if since <= time]
            used = sum(pages for g, pages in zip(gaps, kept) if g.start <= time < g.stop)
            fits = fits and used <= (free[-1] if free else room.free[0])
        if fits:
            lost = {g.user for g, pages in zip(gaps, kept) if not g.is_session and g.worth(pages) < g.tokens}
            saved = [g.worth(pages) for g, pages in zip(gaps, kept) if not (g.is_session and g.user in lost)]
            best = max(best, sum(saved))
    return best


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Gap], Room]:
    gaps = []
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, 8))
        stop = start + draw(st.integers(1, 6))
        parts = draw(st.booleans())
        made = gap(stop, start, stop, draw(st.integers(1, 3)), draw(st.sampled_from([4, 16])), parts, draw(st.booleans()))
        gaps.append(made)
    times = sorted(draw(st.sets(st.integers(0, 14), min_size=1, max_size=4)))
    return gaps, Room(tuple(float(t) for t in times), tuple(draw(st.integers(0, 5)) for _ in times))


@given(cases())
@settings(max_examples=80, deadline=None)
def test_the_best_schedule_lies_between(case: tuple[list[Gap], Room]) -> None:
    gaps, room = case
    best = best_of_all(gaps, room)
    for found in (belady(gaps, room), belady(gaps, room, weighted=True), packed(gaps, room)):
        assert 0 <= found <= best
    assert bound(gaps, room) >= best - 1e-6
    assert bound(gaps, room, windows=3, rounds=20) >= best - 1e-6


def test_by_hand() -> None:
    # room for 3 pages; a: 2 pages in [0, 4), b: 2 pages in [1, 2), c: 1 page in [3, 9): a and b cannot both be kept
    a, b, c = gap(1, 0, 4, 2, 10, False), gap(2, 1, 2, 2, 10, False), gap(3, 3, 9, 1, 10, False)
    room = Room((0.0,), (3,))
    assert belady([a, b, c], room) == 30  # a is needed last when b comes; c fits beside nothing else
    assert packed([a, b, c], room) == 30  # b and c are cheapest to keep
    assert best_of_all([a, b, c], room) == 30
    # parts: one page of a stays beside b
    a, b = replace(a, replay=0.0), replace(b, replay=0.0)
    assert belady([a, b, c], room) == best_of_all([a, b, c], room) == 40
    # half of the room is gone from 2 on: a (page-seconds 2 x 4) is worth 20, kept whole only until then
    assert belady([a], Room((0.0, 2.0), (3, 1))) == 10
    assert bound([a], Room((0.0, 2.0), (3, 0)), windows=1, rounds=0) <= 20


def test_what_a_part_is_worth() -> None:
    # 1,000 tokens from token 100 on in blocks of 256: up to 1,100, 4 full blocks (the first has 156), an open one, 3 of a slot
    whole = Gap(0, 0, 1, 1000, 4, 8, 100, 256, 300.0, 0.004, True)
    assert [whole.worth(n) for n in (8, 7, 5, 4, 3, 2, 1, 0)] == [1000, 624, 624, 624, 368, 112, 0, 0]  # n x 256 - 300 - 100
    assert [replace(whole, replay=math.inf).worth(n) for n in (8, 7, 1)] == [1000, 0, 0]


def test_gaps_by_hand() -> None:
    layout = v4_flash()  # blocks of 256, a frozen slot of 4 pages
    requests = [
        TraceRequest(0, 0.0, 1000, 10, "a", 0, "p", 600),
        TraceRequest(1, 0.0, 1000, 10, "b", 0, "p", 600),
        TraceRequest(2, 0.0, 1400, 10, "a", 1, "p", 600),
        TraceRequest(3, 0.0, 700, 10, None, None, "p", 300),
    ]
    served = [
        Served(0, 0, 0.0, 5.0, 0, 0),
        Served(1, 0, 4.0, 8.0, 0, 0),
        Served(2, 0, 10.0, 12.0, 0, 0),
        Served(3, 0, 20.0, 21.0, 0, 0),
    ]
    reuse = {0: 0, 1: 600, 2: 1009, 3: 300}
    gaps, sure = find_gaps(layout, requests, served, reuse)
    assert sure == 600  # request 1 came while request 0 ran on the prefix
    prefixes = [(g.user, g.start, g.stop, g.tokens, g.blocks) for g in gaps if not g.is_session]
    # the prefix has two stretches, 0-300 (block 0) and 300-600 (block 1: 600 // 256 - 300 // 256); request 3 uses the first
    assert prefixes == [(2, 8.0, 10.0, 300, 1), (2, 8.0, 10.0, 300, 1), (3, 12.0, 20.0, 300, 1)]
    [own] = [g for g in gaps if g.is_session]
    # tokens 600-1,009: block 2 (up to 768), the open block, 5 pages of the slot (all its folds are open)
    assert (own.user, own.start, own.stop, own.tokens, own.blocks, own.pages) == (2, 5.0, 10.0, 409, 1, 7)


def random_requests(seed: int, count: int, hurry: float) -> list[TraceRequest]:
    """Sessions, one-off prompts and two prefixes in tokens of tens, closely one after the other."""
    random, now, found = Random(seed), 0.0, []
    said: dict[str, TraceRequest] = {}
    for number in range(count):
        now += random.expovariate(hurry)
        user = random.choice([None, "a", "b", "c", "d"])
        last = said.get(user or "")
        if last is not None and last.total_tokens > 150:
            last = None  # a new session of this user
        prompt = random.randint(8, 60) if last is None else last.total_tokens + random.randint(1, 12)
        prefix = random.choice([None, "p", "q"]) if last is None else last.prefix
        prefix_tokens = (min(prompt, random.choice([8, 20])) if last is None else last.prefix_tokens) if prefix else 0
        session = None if user is None else f"{user}{number}" if last is None else last.session
        made = TraceRequest(number, now, prompt, random.randint(1, 9), session, None, prefix, prefix_tokens)
        if user is not None:
            said[user] = made
        found.append(made)
    return found


@pytest.mark.parametrize("make", [tiny, logs_only, scans_only, replayed], ids=lambda make: make.__name__)
def test_the_ledger_never_does_better_than_the_bound(make: Callable[[], Layout]) -> None:
    layout = make()
    options = Options(prefill_rate=100, decode_rate=5, min_checkpoint_gain=2, max_requests=4)
    evictions = 0
    for seed in range(4):
        requests = random_requests(seed, 60, 0.5)
        least = max(layout.peak_pages(one.total_tokens) for one in requests)
        unlimited = run_trace(layout, requests, ample_pages(layout, requests), options, keep_served=True)
        for extra in (0, 20, 60):
            run = run_trace(layout, requests, least + extra, options, keep_served=True)
            found = offline_optimum(layout, requests, run, unlimited)
            assert found.had == run.hit_rate <= found.bound + 1e-9, (seed, extra)
            assert found.belady <= found.bound + 1e-9
            evictions += run.evicted_blocks + run.evicted_checkpoints
        assert offline_optimum(layout, requests, unlimited, unlimited).belady == pytest.approx(unlimited.hit_rate)
    assert evictions > 300  # the pools were too small


def test_reports_that_lack_something_are_refused() -> None:
    layout, requests = logs_only(4), [TraceRequest(n, 10.0 * n, 20, 4) for n in range(3)]
    ample = run_trace(layout, requests, ample_pages(layout, requests), keep_served=True)
    tight = run_trace(layout, requests, 8, keep_served=True)
    with pytest.raises(ConfigError, match="keep_served"):
        offline_optimum(layout, requests, run_trace(layout, requests, 8), ample)
    with pytest.raises(ConfigError, match="ample_pages"):
        offline_optimum(layout, requests, tight, tight)
    assert offline_optimum(layout, requests, tight, ample).bound == 0
