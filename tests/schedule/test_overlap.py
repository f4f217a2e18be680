"""Steps that are planned before earlier ones are booked: random traces over the real ledger, with bytes.

A pretend device carries out each step when it is launched and draws at once, but the scheduler learns of it later, perhaps after
it has planned further, and meanwhile requests come, end, are cancelled and lose their memory. The device knows every token, so
that every byte a slice reads, and every byte that is kept for others, can be compared with what it has to be.
"""

import random
from collections import deque
from collections.abc import Callable

import pytest

from lamina.memory.layout import Layout
from lamina.memory.lease import Lease
from lamina.memory.ledger import Ledger
from lamina.memory.prefix import Checkpoint, Node
from lamina.schedule.grammar import mask_of
from lamina.schedule.request import Request, RequestState, ThoughtLimit
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.step import UNKNOWN, Sample, Slice, Step, StepResult
from tests.memory import shapes
from tests.memory.device import Device, prefix_digest
from tests.memory.trace import _ids, _pages, _tokens

LAYOUTS = (shapes.tiny, shapes.replayed, shapes.paged, shapes.scans_only, shapes.logs_only)
ROWS = 5
BASE = [0, 1, 1, 0, 2, 0, 0, 1, 0, 1, 2, 1, 0, 0, 1, 2, 1, 0, 1, 1]


def drawn_after(tokens: list[int], num_kinds: int = 3) -> int:
    """Equal prompts get equal answers, so that blocks of answers meet again too."""
    return prefix_digest("draw", tuple(tokens))[0] % num_kinds


class Overlapping:
    """A scheduler, its ledger, and a device that is some steps ahead of what the scheduler has been told."""

    def __init__(self, layout: Layout, num_pages: int, budget: int, adopt_twins: bool, interval: int | None) -> None:
        self.ledger = Ledger(layout, num_pages, adopt_twins=adopt_twins, min_checkpoint_gain=2)
        self.scheduler = Scheduler(self.ledger, budget, ROWS, 3, interval, overlaps=True)
        self.device = Device(layout, num_pages)
        self.layout = layout
        self.requests: dict[int, Request] = {}
        self.truth: dict[int, list[int]] = {}  # tokens of each request, drawn ones before anybody is told
        self.tables: list[list[int]] = [[] for _ in range(ROWS)]
        self.last = [UNKNOWN] * ROWS
        self.flying: deque[tuple[Step, StepResult]] = deque()
        self.seen = {"unknown": 0, "wasted": 0, "preempted": 0, "closing": 0, "together": 0, "forced": 0}

    def add(self, prompt: list[int], max_new: int, stops: frozenset[int], params: SamplingParams) -> Request:
        """Every third one has thoughts that end with a 1, at the latest after some tokens."""
        number = len(self.truth) + 1
        thoughts = None if number % 3 else ThoughtLimit(number % 7, 1, frozenset((1,)))
        made = Request(number, f"r{number}", tuple(prompt), params, 0, max_new, stops, thoughts=thoughts)
        self.requests[number], self.truth[number] = made, list(prompt)
        self.scheduler.add(made)
        return made

    def launch(self) -> bool:
        """Plans a step and lets the device run it."""
        preempted = self.ledger.stats.preempted
        step = self.scheduler.plan()
        self.seen["preempted"] += self.ledger.stats.preempted > preempted
        if step is None:
            return False
        self.seen["together"] += step.decodes is not None and len(step.slices) > 1
        for order in step.copies_before:
            self.device.execute(order)
        for part in step.slices:
            self.compute(part)
        tokens = tuple(self.draw(item) for item in step.samples)
        for order in step.copies_after:
            self.device.execute(order)
        result = StepResult(tokens, (None,) * len(tokens), ((),) * len(step.slices))
        self.flying.append((step, result))
        self.seen["closing"] += any(lease.state == "closing" for lease in self.ledger.leases)
        self.check_kept()
        return True

    def compute(self, part: Slice) -> None:
        """What is there before the slice is right; then it is computed."""
        request, truth = self.requests[part.request_id], self.truth[part.request_id]
        lease, table = request.lease, self.tables[part.row]
        assert lease is not None and request.num_pending <= 1 + len(self.flying)
        if part.tokens == (UNKNOWN,):
            self.seen["unknown"] += 1
            assert self.last[part.row] == truth[part.start], "the row drew another token last"
        else:
            assert list(part.tokens) == truth[part.start : part.stop]
        assert part.stop <= len(request.prompt) + request.max_new - 1, "computed beyond the greatest length"
        if part.table:
            del table[part.table_start :]
            table += part.table
        assert not self.layout.has_logs or table == lease.blocks
        if self.layout.has_logs:
            self.device.check_log("", truth, part.start, table)
        if part.start and lease._is_exact_at(part.start):
            self.device.check_slot("", truth, part.start, part.slot, frozen=False)
        self.device.compute("", truth, part.start, part.stop, table, part.slot, lease)

    def draw(self, item: Sample) -> int:
        """The next token of a request, from its slice or from its slot as it is."""
        request, truth = self.requests[item.request_id], self.truth[item.request_id]
        position = len(request.prompt) + item.num_output
        if self.layout.has_state and self.layout.slot_pages:
            self.device.check_slot("", truth, position, item.slot, frozen=False)
        token = drawn_after(truth[:position])
        if item.mask is not None:
            assert item.mask == mask_of(1, 3) and item.num_output == len(request.tokens) - len(request.prompt)
            token = 1
        assert truth[position : position + 1] in ([], [token]), "drawn again, and not the same"
        if position == len(truth):
            truth.append(token)
        self.last[item.row] = token
        return token

    def book(self) -> list[Request]:
        """The oldest result reaches the scheduler; who drew."""
        step, result = self.flying.popleft()
        known = {number: one for number, one in self.requests.items() if one.state is not RequestState.FINISHED}
        late = self.scheduler.late_results
        found = [drawn.request for drawn in self.scheduler.apply(step, result, known)]
        self.seen["wasted"] += self.scheduler.late_results > late
        for one in found:
            assert one.tokens == self.truth[one.id][: len(one.tokens)]
        return found

    def check_kept(self) -> None:
        """I9: whatever is stored for others has the bytes of its tokens. Right after a launch nothing is left to be copied."""
        found: list[tuple[tuple[int, ...], Node | Checkpoint]] = []
        for node in self.ledger.index.nodes:
            tokens, _ = _tokens(node)
            found.append((tokens, node))
            for tails in node.checkpoints.values():
                found += [((*tokens, *_ids(tail)), made) for tail, made in tails.items()]
        for tokens, item in found:
            path = _pages(item if isinstance(item, Node) else item.node)
            if isinstance(item, Checkpoint):
                path += [item.open_page] if item.open_page is not None else []
                self.device.check_slot("", tokens, item.position, item.pages, frozen=True)
                self.device.check_tails("", tokens, item.position, item.tails)
            if path:
                self.device.check_log("", tokens, len(tokens), path)

    def end(self) -> None:
        """Everything is served and booked; I6."""
        while self.launch() or self.flying:
            is_stuck = len(self.flying) == 1 and not self.scheduler.has_work
            if self.flying and (len(self.flying) > 1 or is_stuck or not self.launch()):
                self.book()
            self.ledger.check()
        assert not self.scheduler.has_work, "work is left and nothing is planned"
        for one in self.requests.values():
            if one.thoughts is not None and one.num_output > one.thoughts.tokens:
                assert 1 in one.output[: one.thoughts.tokens + 1]
                self.seen["forced"] += 1 not in one.output[: one.thoughts.tokens]
        self.ledger.drop_index()
        self.ledger.check()
        assert self.ledger.free_pages == self.ledger.num_pages, "I6: pages are lost"


def trace(layout: Layout, seed: int) -> Overlapping:
    """One random trace, checked all the way."""
    draw = random.Random(seed)
    longest = 44
    alone = layout.peak_pages(longest)
    num_pages = alone + draw.choice([0, layout.slot_pages + 3, alone // 2, alone, 6 * alone])
    run = Overlapping(layout, num_pages, draw.choice([3, 8, 40]), draw.random() < 0.8, draw.choice([None, None, 6]))
    depth, cancelled = draw.choice([2, 2, 3]), set()
    penalty = SamplingParams(max_tokens=99, presence_penalty=0.1)
    for _ in range(150):
        chance = draw.random()
        live = [one for one in run.requests.values() if one.state is not RequestState.FINISHED]
        if chance < 0.12 and len(live) < 9:
            prompt = [*BASE[: draw.choice([0, 3, 4, 8, 16, 20])], *draw.choices(range(3), k=draw.choice([1, 1, 5]))]
            prompt = draw.choice([prompt, *(run.truth[one.id][:25] for one in run.requests.values())])
            stops = draw.choice([frozenset[int](), frozenset[int](), frozenset([2])])
            most = max(1, min(draw.choice([1, 2, 7, 40]), longest - len(prompt)))
            run.add(prompt, most, stops, penalty if draw.random() < 0.1 else SamplingParams(max_tokens=99))
        elif chance < 0.5:
            if len(run.flying) < depth:
                run.launch()
        elif chance < 0.9:
            for one in run.book() if run.flying else ():
                if one.state is RequestState.RUNNING and draw.random() < 0.05:  # its text had a stop string
                    run.scheduler.finish(one, "stop")
        elif chance < 0.93 and live:
            one = draw.choice(live)
            run.scheduler.cancel(one)
            cancelled.add(one.id)
        elif chance < 0.96 and run.scheduler.running:
            run.scheduler.preempt(draw.choice(run.scheduler.running))  # in flight or not
        elif chance < 0.97:
            run.ledger.drop_index()
        run.ledger.check()
    run.end()
    for one in run.requests.values():
        assert one.state is RequestState.FINISHED and (one.id in cancelled) == (one.finish_reason == "abort")
        if one.finish_reason == "length":
            assert one.num_output == one.max_new and not one.stop_ids.intersection(one.output[:-1])
        assert one.tokens == run.truth[one.id][: len(one.tokens)]
    return run


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 80), marks=pytest.mark.long)], ids=["short", "long"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_traces(layout: Callable[[], Layout], seeds: range) -> None:
    seen: dict[str, int] = {}
    for seed in seeds:
        for name, count in trace(layout(), seed).seen.items():
            seen[name] = seen.get(name, 0) + count
    assert seen["unknown"] > 100 and seen["wasted"] > 10 and seen["forced"] > 0, seen
    assert layout().tails or seen["together"] > 3, seen
    assert not layout().has_state or seen["closing"] > 5, seen
    assert len(seeds) < 50 or not layout().has_logs or seen["preempted"] > 2, seen


def drive(num_pages: int, budget: int = 40) -> Overlapping:
    return Overlapping(shapes.tiny(), num_pages, budget, True, None)


def test_nobody_in_flight_loses_memory_and_the_last_to_come_gives_way() -> None:
    """Two grow until there is no page left: the younger one stops, is waited for, and gives its memory to the older one."""
    layout = shapes.tiny()
    run = drive(layout.peak_pages(12) + layout.peak_pages(9))
    old = run.add(BASE[:4], 20, frozenset(), SamplingParams(max_tokens=99))
    run.launch()
    young = run.add(BASE[5:9], 20, frozenset(), SamplingParams(max_tokens=99))
    preempt, states = run.scheduler.preempt, []

    def watched(request: Request) -> None:
        lease = request.lease
        assert isinstance(lease, Lease)
        states.append((request.id, lease.in_flight, request.num_pending))
        preempt(request)

    run.scheduler.preempt = watched  # type: ignore[method-assign]
    run.end()
    assert states and all(state[1:] == (0, 0) for state in states) and states[0][0] == young.id
    assert old.num_preemptions == 0 and old.num_output == young.num_output == 20


def test_who_came_later_stops_at_once_and_not_where_its_block_ends() -> None:
    """The older one is at the end of its second block, the younger one could go on for long in its first."""
    layout = shapes.tiny(block_tokens=32)
    run = Overlapping(layout, 2 * layout.slot_pages + 3, 40, True, 32)
    old = run.add([*BASE, *BASE, *BASE], 20, frozenset(), SamplingParams(max_tokens=99))
    young = run.add(BASE[5:7], 25, frozenset(), SamplingParams(max_tokens=99))
    run.launch()
    assert [part.request_id for part in run.flying[0][0].slices] == [old.id, young.id]
    while not young.num_preemptions:
        assert run.scheduler.running == [old, young] and young.num_output <= old.num_output + 2
        if not run.launch() or len(run.flying) > 1:
            run.book()
    assert len(old.tokens) == 65 and old.num_preemptions == 0  # 64 computed, one drawn
    run.end()
    assert (old.num_output, young.num_output) == (20, 25)


def test_without_overlap_nothing_is_planned_ahead() -> None:
    run = drive(200)
    run.scheduler.overlaps = False
    run.add(BASE[:6], 9, frozenset(), SamplingParams(max_tokens=99))
    assert run.launch() and not run.launch()
    run.book()
    assert run.launch() and run.flying[0][0].slices[0].tokens != (UNKNOWN,)
    run.end()
    assert run.seen["unknown"] == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_cohort_plans_what_its_requests_would_one_by_one(depth: int) -> None:
    """Requests come and end at any time, four run at once, and memory is short for some steps: the steps are equal."""
    layout = shapes.tiny()
    runs = [Overlapping(layout, 3 * layout.peak_pages(40), 40, True, None) for _ in range(2)]
    runs[1].scheduler.cohorts.gathers = False
    for number in range(10):
        for run in runs:
            run.scheduler.overlaps = depth > 1
            stops = frozenset([2]) if number % 3 == 2 else frozenset[int]()
            run.add(BASE[number : number + 4 + number % 5], 7 + 5 * number % 23, stops, SamplingParams(max_tokens=99))
    num_together = 0
    while runs[0].scheduler.has_work or runs[0].flying:
        launched = [len(run.flying) < depth and run.launch() for run in runs]
        assert launched[0] == launched[1]
        if launched[0]:
            ours, theirs = (run.flying[-1][0] for run in runs)
            num_together += ours.decodes is not None and len(ours.slices) > 2
            assert theirs.decodes is None and list(ours.samples) == list(theirs.samples)
            assert list(ours.slices) == [part if part.table else part._replace(table_start=0) for part in theirs.slices] or (
                ours.decodes is None and list(ours.slices) == list(theirs.slices)
            )
            assert (ours.copies_before, ours.copies_after) == (theirs.copies_before, theirs.copies_after)
        else:
            assert [one.id for one in runs[0].book()] == [one.id for one in runs[1].book()]
        for run in runs:
            run.ledger.check()
        assert runs[0].ledger.pages() == runs[1].ledger.pages() and runs[0].ledger.stats == runs[1].ledger.stats
    assert num_together > 10
    for run in runs:
        run.end()


def test_a_late_commit_has_the_true_ids() -> None:
    """Steps run ahead by three: what is published is what was drawn."""
    run = drive(200)
    one = run.add(BASE[:6], 12, frozenset(), SamplingParams(max_tokens=99))
    for _ in range(3):
        run.launch()
    assert [step.slices[0].tokens for step, _ in run.flying] == [tuple(BASE[:6]), (UNKNOWN,), (UNKNOWN,)]
    lease = one.lease
    assert lease is not None and (lease.position, lease.committed, one.num_pending) == (8, 0, 3)
    assert all(node.parent is None for node in run.ledger.index.nodes)
    for committed in (6, 7, 8):
        run.book()
        assert lease.committed == committed and list(lease.tokens) == run.truth[one.id][: max(6, committed)]
    assert sum(node.parent is not None for node in run.ledger.index.nodes) == 2
    run.end()


def test_scores_that_are_not_finite_end_a_request_whose_next_token_is_on_its_way() -> None:
    run = drive(200)
    one = run.add(BASE[:6], 12, frozenset(), SamplingParams(max_tokens=99))
    run.launch()
    run.launch()
    step, result = run.flying.popleft()
    run.scheduler.apply(step, StepResult((None,), result.logprobs, result.prompt_logprobs), run.requests)
    assert one.finish_reason == "error" and not run.ledger.leases
    run.book()
    assert run.ledger.stats.stale_commits == 1 and run.scheduler.late_results == 2
    run.end()


def test_an_interval_is_kept_while_running_ahead() -> None:
    run = Overlapping(shapes.tiny(), 200, 40, True, 6)
    run.add(BASE[:8], 18, frozenset(), SamplingParams(max_tokens=99))
    for _ in range(30):
        run.launch()
        if len(run.flying) > 1:
            run.book()
    while run.flying:
        run.book()
    assert sorted(made.position for made in run.ledger.all_checkpoints()) == [6, 8, 12, 18, 24, 25]
    run.end()
