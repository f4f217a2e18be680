"""Who runs when: decodes before prefills, short prompts beside long ones, priorities that age, and nobody waits for ever."""

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lamina.schedule.scheduler as scheduler_module
from lamina.memory.layout import Layout
from lamina.memory.ledger import Ledger
from lamina.schedule import policy
from lamina.schedule.policy import AGING_STEPS, CUT_TOKENS, MAX_OVERTAKEN, Prefill, Room, share
from lamina.schedule.request import Request, RequestState
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.step import Step, StepResult
from tests.memory.shapes import logs_only, paged, tiny

QUICK = settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


class Served:
    """A scheduler over pages on paper; every drawn token is 1 more than the position it follows, modulo 3."""

    def __init__(self, layout: Layout, num_pages: int, budget: int, max_requests: int = 8, overlaps: bool = False) -> None:
        self.ledger = Ledger(layout, num_pages, min_checkpoint_gain=4)
        self.scheduler = Scheduler(self.ledger, budget, max_requests, 3, None, overlaps)
        self.requests: dict[int, Request] = {}
        self.steps: list[Step] = []
        self.begun: dict[int, int] = {}  # step of the first slice
        self.ended: dict[int, int] = {}
        self.flying: list[tuple[Step, StepResult]] = []

    def add(self, length: int, max_new: int = 1, priority: int = 0, first: int | None = None) -> Request:
        number = len(self.requests) + 1
        prompt = (number if first is None else first, *(at % 3 for at in range(length - 1)))
        params = SamplingParams(max_tokens=max_new, ignore_eos=True)
        made = Request(number, f"r{number}", prompt, params, 0, max_new, frozenset(), priority=priority)
        self.requests[number] = made
        self.scheduler.add(made)
        return made

    def step(self) -> Step | None:
        step = self.scheduler.plan()
        if self.ledger.num_pages < 500 or len(self.steps) % 50 == 0:
            self.ledger.check()
        if step is not None:
            self.steps.append(step)
            for part in step.slices:
                self.begun.setdefault(part.request_id, len(self.steps))
            count = len(step.samples)
            self.flying.append((step, StepResult((1,) * count, (None,) * count, ((),) * len(step.slices))))
        if self.flying and (step is None or len(self.flying) > self.scheduler.overlaps):
            oldest, result = self.flying.pop(0)
            self.scheduler.apply(oldest, result, self.requests)
            for number, one in self.requests.items():
                if one.state is RequestState.FINISHED:
                    self.ended.setdefault(number, len(self.steps))
        return step

    def run(self, most: int = 100_000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work and not self.flying:
                return
            was_flying = bool(self.flying)
            assert self.step() is not None or was_flying, "I12: work waits and nothing runs"
        raise AssertionError("requests do not end")

    def tokens(self, request: Request) -> list[tuple[int, int]]:
        """(start, stop) of its slices, by step."""
        return [(part.start, part.stop) for step in self.steps for part in step.slices if part.request_id == request.id]


# -- the pure rules

PREFILLS = st.lists(
    st.builds(lambda at, wanted, more: Prefill((0, 0), at, wanted, wanted + more), *[st.integers(1, 3000)] * 3),
    min_size=1, max_size=9,
)  # fmt: skip


@QUICK
@given(PREFILLS, st.integers(1, 5000))
def test_shares(drawn: list[Prefill], rows: int) -> None:
    """Never more than there is or is wanted; the first in turn always gets on, with half at least; cuts are where bits allow."""
    prefills = [one._replace(turn=(0, at)) for at, one in enumerate(drawn)]
    granted = share(prefills, rows)
    assert sum(granted) <= rows and all(0 <= got <= one.wanted for got, one in zip(granted, prefills, strict=True))
    first, half = prefills[0], rows - rows // 2
    assert granted[0] >= min(first.wanted, max(1, half - CUT_TOKENS + 1))
    for at, (got, one) in enumerate(zip(granted, prefills, strict=True)):
        is_cut = 0 < got < one.wanted
        assert not is_cut or (one.position + got) % CUT_TOKENS == 0 or (at == 0 and got < CUT_TOKENS)
    shorter = [(one.left, at) for at, one in enumerate(prefills) if one.left < first.left]
    if granted[0] < first.wanted and shorter:
        _, least = min(shorter)
        assert granted[least] == prefills[least].wanted or granted[least] > rows // 2 - CUT_TOKENS, "the shortest waits"


@QUICK
@given(PREFILLS, st.integers(1, 5000))
def test_room_says_what_sharing_gives(drawn: list[Prefill], rows: int) -> None:
    """Who is let in as a short one, or where there is enough for all, gets rows in the same step."""
    prefills = [one._replace(turn=(0, at)) for at, one in enumerate(drawn)]
    room = Room(rows)
    for one in prefills[:-1]:
        room.add(one)
    last = prefills[-1]
    if room.has(last):
        whole = sum(one.wanted for one in prefills) <= rows
        assert share(prefills, rows)[-1] > 0 or not whole
        assert share(prefills, rows)[-1] > 0 or last.wanted > CUT_TOKENS or len(prefills) > 1
    else:
        assert len(prefills) > 1 or last.wanted > rows


def test_turns_age() -> None:
    """Priority 1 that came AGING_STEPS earlier is before priority 0; among equals who came first."""
    assert policy.turn_of(0, 10, 1) < policy.turn_of(0, 10, 2) < policy.turn_of(0, 11, 0)
    assert policy.turn_of(-1, 10, 2) < policy.turn_of(0, 10, 1) < policy.turn_of(1, 10, 0)
    assert policy.turn_of(1, 10, 1) < policy.turn_of(0, 10 + AGING_STEPS, 2) < policy.turn_of(1, 11, 1)


# -- prefill and decode


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_long_prompt_does_not_stop_decodes(overlaps: bool) -> None:
    """Eight thousand tokens of an earlier request: whoever decodes gets a token in every step all the same."""
    served = Served(logs_only(16), 4000, 64, overlaps=overlaps)
    long = served.add(8000, 3)
    served.step()
    quick = [served.add(5, 20) for _ in range(3)]
    served.run()
    for one in quick:
        first = served.begun[one.id]
        computed = [sum(part.request_id == one.id for part in step.slices) for step in served.steps[first - 1 :]]
        assert computed[:20] == [1] * 20 and served.ended[one.id] <= first + 21
    assert served.ended[long.id] > served.ended[quick[0].id] + 50
    spent = [step.num_tokens for step in served.steps[:100]]
    assert all(64 - CUT_TOKENS < count <= 64 for count in spent) and sum(spent) > 100 * 60


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    """One that came later with a cached or short prompt begins in the next step; equal ones go one after the other."""
    served = Served(logs_only(16), 9000, 1024)
    long, other = served.add(20_000), served.add(20_000)
    served.step()
    short = served.add(300)
    served.step()
    assert served.tokens(short) == [(0, 300)] and served.begun[short.id] == 2
    again = served.add(15_000, first=long.id)  # what the long one has computed so far is found, and the rest is shorter
    served.run()
    assert served.begun[again.id] < served.ended[long.id] and served.ended[again.id] <= served.ended[other.id]
    assert served.begun[other.id] >= served.ended[long.id] - 1
    cuts = [stop for one in (long, other, again) for _, stop in served.tokens(one)[:-1]]
    assert all(stop % CUT_TOKENS == 0 for stop in cuts) and len(cuts) > 30


def test_a_stream_of_short_prompts_does_not_stop_a_long_one() -> None:
    served = Served(logs_only(16), 9000, 1024)
    long = served.add(20_000)
    for _ in range(60):
        for _ in range(3):
            served.add(200)
        served.step()
    assert served.ended[long.id] <= 20_000 // 512 + 3
    served.run()


# -- priority


def test_priority_decides_who_is_admitted_and_who_loses_memory() -> None:
    served = Served(logs_only(4), 1000, 64, max_requests=1)
    order = [served.add(4, 2, priority) for priority in (5, 0, -1, 0)]
    served.run()
    assert sorted(served.ended, key=lambda number: served.ended[number]) == [order[at].id for at in (2, 1, 3, 0)]
    served = Served(logs_only(4), 12, 64)  # two of 20 tokens and more need 5 pages each
    worse, better = served.add(16, 24, 3), served.add(16, 24, 0)
    served.run()
    assert worse.num_preemptions > 0 and better.num_preemptions == 0


def test_waiting_makes_up_for_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of better requests that never ends: the worse one is served once it has waited long enough."""
    monkeypatch.setattr(scheduler_module, "turn_of", lambda priority, step, number: (step + 8 * priority, number))
    served = Served(logs_only(4), 1000, 64, max_requests=1)
    worse = served.add(4, 2, 5)
    for _ in range(100):
        while len(served.scheduler.waiting) < 3:
            served.add(4, 2, 0)
        served.step()
    assert worse.state is RequestState.FINISHED and 40 <= served.ended[worse.id] <= 60
    monkeypatch.setattr(scheduler_module, "turn_of", lambda priority, step, number: (priority, number))  # without ageing
    served = Served(logs_only(4), 1000, 64, max_requests=1)
    worse = served.add(4, 2, 5)
    for _ in range(100):
        while len(served.scheduler.waiting) < 3:
            served.add(4, 2, 0)
        served.step()
    assert worse.state is RequestState.WAITING


# -- requests that do not fit now


def blocked(num_small: int) -> tuple[Served, Request, Request, list[Request]]:
    """One runs for long with half of the pages; one that needs more than the rest waits; small ones keep coming."""
    served = Served(logs_only(4), 100, 1024, max_requests=64)
    runs = served.add(160, 60)
    served.step()
    big = served.add(300)
    return served, runs, big, [served.add(4) for _ in range(num_small)]


def test_small_requests_overtake_one_that_does_not_fit() -> None:
    served, runs, big, small = blocked(3)
    served.step()
    assert all(served.begun[one.id] == 2 for one in small) and big.state is RequestState.WAITING
    served.run()
    assert served.begun[big.id] > served.ended[runs.id]


def test_nobody_is_overtaken_for_ever() -> None:
    """After MAX_OVERTAKEN the others wait, though they would fit."""
    served, runs, big, _ = blocked(MAX_OVERTAKEN + 5)
    while big.state is RequestState.WAITING:
        served.add(4)
        served.step()
    ahead = [number for number, step in served.begun.items() if number > big.id and step < served.begun[big.id]]
    assert len(ahead) == MAX_OVERTAKEN == big.num_overtaken and served.begun[big.id] >= served.ended[runs.id]
    served.run()


def test_without_a_bound_it_would_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones that come before the last have ended: the bound is what lets the big one run."""
    for bound, starves in ((lambda *_: True, True), (policy.may_overtake, False)):
        monkeypatch.setattr(scheduler_module, "may_overtake", bound)
        served = Served(logs_only(4), 100, 1024, max_requests=64)
        served.add(160, 20)
        served.step()
        big = served.add(390)
        for _ in range(300):
            if len(served.scheduler.running) + len(served.scheduler.waiting) < 4:
                served.add(40, 8)
            served.step()
        assert (big.state is RequestState.WAITING) == starves


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 60), st.integers(1, 12), st.integers(-2, 2), st.integers(0, 3)),
    min_size=1, max_size=24,
)  # fmt: skip


@pytest.mark.parametrize("layout", [tiny, logs_only, paged])
@pytest.mark.parametrize("overlaps", [False, True])
def test_everybody_is_served(layout: Callable[[], Layout], overlaps: bool) -> None:
    """Random traffic in little memory: all end, nobody is overtaken more often than allowed, nothing idles while work waits."""

    @QUICK
    @given(ARRIVALS, st.integers(0, 40), st.sampled_from([2, 7, 200]), st.integers(1, 6))
    def check(arrivals: list[tuple[int, int, int, int, int]], more: int, budget: int, max_requests: int) -> None:
        made = layout()
        served = Served(made, made.peak_pages(72) + more, budget, max_requests, overlaps)
        for wait, length, max_new, priority, first in arrivals:
            for _ in range(wait):
                served.step()
            served.add(length, max_new, priority, first)
        served.run()
        assert all(one.finish_reason == "length" and one.num_overtaken <= MAX_OVERTAKEN for one in served.requests.values())
        served.ledger.drop_index()
        assert served.ledger.free_pages == served.ledger.num_pages

    check()


def test_a_stream_with_pins_and_priorities_ends() -> None:
    """A long random stream that never lets the queue run empty: the longest wait is bounded by what is before."""
    rng = random.Random(5)
    served = Served(tiny(), tiny().peak_pages(90) + 30, 64, 5)
    waits: list[int] = []
    added: dict[int, int] = {}
    for _ in range(600):
        if len(served.scheduler.waiting) < 6:
            one = served.add(rng.choice([2, 9, 80]), rng.randint(1, 8), rng.choice([0, 0, 1]), rng.randrange(4))
            added[one.id] = len(served.steps)
        served.step()
    waits = [step - added[number] for number, step in served.begun.items()]
    assert len(waits) > 100 and max(waits) < 400
    served.run()
