"""The simulator drives the real ledger: figures by hand, by brute force from the trace alone, and beside the real scheduler."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lamina.base.errors import ConfigError
from lamina.memory.layout import Layout
from lamina.memory.ledger import Ledger
from lamina.memory.plan import Held, measured, predict
from lamina.memory.prefix import NEVER_STORED, WHOLE_BLOCKS
from lamina.plan import simulate
from lamina.plan.offline import ample_pages
from lamina.plan.simulate import run_trace
from lamina.plan.simulate_report import report_json, table
from lamina.plan.simulation import Moment, Options, SimulationReport
from lamina.plan.table import make_console
from lamina.plan.traces import TokenSource, TraceRequest, make_mix
from lamina.schedule.request import Request
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.step import StepResult
from tests.memory.shapes import logs_only, paged, replayed, scans_only, tiny, v4_flash

LAYOUTS: dict[str, Callable[[], Layout]] = {
    "tiny": tiny, "logs": logs_only, "scans": scans_only, "paged": paged, "replayed": replayed,
}  # fmt: skip
SLOW = Options(prefill_rate=10, decode_rate=2, min_checkpoint_gain=1)


# -- by hand


def test_two_turns_by_hand() -> None:
    # Blocks of 4, logs alone. Turn 1: 10 tokens in one step, 1.0 s, which draws token 1; tokens 2 and 3 take 0.5 s each: ends
    # at 2.0 s with 12 tokens computed (the last one drawn never is), 3 blocks. Turn 2 was sent at 0.5 s but is ready at 2.0 s;
    # 12 of its 15 tokens are resident (14 could be used), 3 are left: 0.3 s.
    found = run_trace(
        logs_only(4), [TraceRequest(0, 0.0, 10, 3, "s"), TraceRequest(1, 0.5, 15, 1, "s")], 40, SLOW, keep_served=True
    )
    first, second = found.served
    assert (first.ready, first.admitted, first.ended, first.hit_tokens) == (0.0, 0.0, pytest.approx(2.0), 0)
    assert (second.ready, second.admitted) == (first.ended, first.ended)
    assert (second.ended, second.hit_tokens) == (pytest.approx(2.3), 12)
    assert (found.hit_tokens, found.prompt_tokens, found.output_tokens, found.hits) == (12, 25, 4, 1)
    assert found.reusable_tokens == 12 and found.hit_rate == 12 / 25
    assert found.seconds == pytest.approx(2.3) and found.steps == 4
    assert (found.peak_running, found.peaks.blocks, found.peaks.used) == (1, 4, 4)
    assert found.mean_running == pytest.approx(1.0)
    # nothing was known of the first 10 tokens; of the second prompt all that could be reused (whole blocks of 14 tokens) was
    assert {(miss.reason, miss.requests, miss.tokens) for miss in found.misses} == {(NEVER_STORED, 1, 10), (WHOLE_BLOCKS, 1, 3)}


def test_a_preemption_by_hand() -> None:
    # Blocks of 4 in a pool of 6. Both prompts (8 tokens) start with 2 blocks and take a third for token 9. At position 12 the
    # first needs a fourth: the second, which came last, is preempted with 12 tokens computed and 5 drawn. The first ends at
    # position 8 + 12 - 1 = 19 with 5 blocks: 2 of the second's 3 were evicted for it, leaf first. The second goes on from the
    # one that is left: it computes 12 - 4 tokens again.
    found = run_trace(logs_only(4), [TraceRequest(0, 0.0, 8, 12), TraceRequest(1, 0.0, 8, 12)], 6, SLOW, keep_served=True)
    assert [one.preemptions for one in found.served] == [0, 1]
    assert (found.preemptions, found.recomputed_tokens, found.finished) == (1, 8, 2)
    # evicted: those 2; then the second, up to 5 blocks, has 1 and needs 4 more: 1 was free, the first's 5 give 3
    assert (found.evicted_blocks, found.evicted_checkpoints) == (5, 0)
    assert found.peaks.used == found.peaks.held == 6 and found.peak_running == 2


def test_waiting_and_refusing_by_hand() -> None:
    # A pool of 5 blocks of 4. The first (16 tokens and 1 drawn want 5) holds them until 1.6 + 0.5 s. The second does not fit
    # beside it; the third (21 tokens) can never fit. The fourth would fit beside the second, 3 + 2 blocks, but for the block
    # that is kept free for each request that draws: it follows 0.9 s later.
    found = run_trace(
        logs_only(4),
        [TraceRequest(0, 0.0, 16, 2), TraceRequest(1, 0.0, 9, 1), TraceRequest(2, 0.0, 21, 1), TraceRequest(3, 0.0, 8, 1)],
        5, SLOW, keep_served=True,
    )  # fmt: skip
    assert (found.requests, found.finished, found.refused, found.waited) == (4, 3, 1, 2)
    assert [one.number for one in found.served] == [0, 1, 3]
    assert [one.admitted for one in found.served] == [0.0, pytest.approx(2.1), pytest.approx(3.0)]
    assert found.wait_s == tuple(one.admitted for one in found.served)


def test_two_long_chats_with_room_for_both_by_hand() -> None:
    # Two chats of 50,000 tokens take turns; each turn adds 600 tokens, answers have 200. Of turn k's prompt everything is
    # reused but the new 600 tokens and the last token of the answer before, which was drawn but never computed.
    turns, requests = 6, []
    for number in range(2 * turns):
        who, turn = number % 2, number // 2
        requests.append(TraceRequest(number, 20.0 * number, 50_000 + 800 * turn, 200, f"chat {who}", turn))
    layout = v4_flash()
    # 54,000 + 200 tokens: 212 blocks and the slot of 5 pages each; the newest checkpoints (answer, prompt): 4 pages, open block
    pages = 2 * (212 + 5 + 2 * 5) + 10
    found = run_trace(layout, requests, pages, keep_served=True)
    assert [one.hit_tokens for one in found.served] == [0, 0, *(50_000 + 800 * (n // 2) - 601 for n in range(2, 2 * turns))]
    assert found.evicted_blocks == 0 and found.preemptions == 0


def test_a_decode_is_where_its_formula_says() -> None:
    # One request of 1,000 tokens and 600 more at 1 token/s, prefilled in 1 s by 1,000 tokens/s and checkpointed at its end.
    seen: list[tuple[float, int, int]] = []
    layout = v4_flash()

    def observe(moment: Moment, ledger: Ledger) -> None:
        planned = 1000 if moment.time < 1 else 1001 + round(moment.time - 1)
        checkpoints = (1000,)  # ordered with the step that reaches it
        assert predict(layout, [Held(planned, checkpoints)]).pages == ledger.num_pages - moment.pages.free
        assert moment.pages == ledger.pages()
        live = sum(layout.live_bytes(planned if moment.time < 1 else planned - 1).values())
        held = (moment.pages.blocks + moment.pages.slots) * layout.page_bytes
        assert moment.padding == pytest.approx(1 - live / held)
        seen.append((moment.time, moment.pages.blocks, ledger.leases[0].position))

    options = Options(prefill_rate=1000, decode_rate=1)
    run_trace(layout, [TraceRequest(0, 0.0, 1000, 600)], 40, options, observe=observe)
    # block borders at 1,024, 1,280 and 1,536 tokens, reached 24, 280 and 536 s after the prompt's end; the last token is 1,599
    assert seen == [(0.0, 4, 1000), (1.0, 4, 1024), (25.0, 5, 1280), (281.0, 6, 1536), (537.0, 7, 1599)]


def test_a_prompt_longer_than_a_step_takes_several() -> None:
    # 20 tokens in steps of 8, 8 and 4; with one decode running, a step has 7 rows left for it and takes a token's time more.
    options = replace(SLOW, max_step_tokens=8)
    found = run_trace(logs_only(4), [TraceRequest(0, 0.0, 20, 1)], 40, options)
    assert found.steps == 3 and found.seconds == pytest.approx(2.0)
    both = run_trace(logs_only(4), [TraceRequest(0, 0.0, 4, 9), TraceRequest(1, 0.1, 14, 1)], 40, options, keep_served=True)
    # 0.4 s; then 7 + 7 tokens in two steps of 0.7 + 0.5 s; the first has drawn 1 + 2 tokens and needs 6 more steps of 0.5 s
    assert [one.ended for one in both.served] == [pytest.approx(0.4 + 2.4 + 3.0), pytest.approx(0.4 + 2.4)]


def test_the_rows_of_a_step_are_shared() -> None:
    # two prompts of 6 in steps of 8: 6 + 2 rows in 0.8 s, then the other 4
    found = run_trace(
        logs_only(4),
        [TraceRequest(0, 0.0, 6, 1), TraceRequest(1, 0.0, 6, 1)],
        40,
        replace(SLOW, max_step_tokens=8),
        keep_served=True,
    )
    assert [one.ended for one in found.served] == [pytest.approx(0.8), pytest.approx(1.2)] and found.peak_running == 2


def test_who_waits_follows_what_is_published() -> None:
    # Blocks of 4 in a pool of 16. The first prompt takes 12 (44 tokens and 1 drawn), in steps of 8 rows. The second shares 40
    # of its tokens and lacks 12, while 4 are left: it fits once 8 blocks are published. The first step after that with rows
    # to spare is the sixth, at 4.0 s, when 40 tokens are. The first ends much later, at 4.4 + 3 x 0.5 s.
    requests = [TraceRequest(0, 0.0, 44, 4, None, None, "p", 40), TraceRequest(1, 0.0, 44, 1, None, None, "p", 40)]
    found = run_trace(logs_only(4), requests, 16, replace(SLOW, max_step_tokens=8), keep_served=True)
    assert (found.served[1].admitted, found.served[1].hit_tokens) == (pytest.approx(4.0), 40)


def test_checkpoints_on_the_way() -> None:
    # 40 tokens and 11 drawn, up to position 50: checkpoints at 16, 32, 48 on the way, at the prompt's end and at the end.
    options = replace(SLOW, checkpoint_interval=16)
    assert run_trace(tiny(), [TraceRequest(0, 0.0, 40, 11)], 100, options).checkpoints == 5
    assert run_trace(tiny(), [TraceRequest(0, 0.0, 40, 11)], 100, SLOW).checkpoints == 2


def test_wrong_options_are_refused() -> None:
    for name, value in {
        "prefill_rate": 0.0, "decode_rate": float("inf"), "max_step_tokens": 0, "max_requests": 0, "num_samples": 0,
        "checkpoint_interval": 0,
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            replace(Options(), **{name: value})
    with pytest.raises(ConfigError, match="num_pages"):
        run_trace(logs_only(), [], 0)


# -- against the trace alone


def mixed(layout_name: str) -> st.SearchStrategy[list[TraceRequest]]:
    """Sessions, prefixes and one-off prompts, each long after the last one's end; prefixes of one id differ in length."""

    @st.composite
    def build(draw: st.DrawFn) -> list[TraceRequest]:
        found: list[TraceRequest] = []
        said: dict[str, TraceRequest] = {}
        for number in range(draw(st.integers(1, 9))):
            session = draw(st.sampled_from([None, "a", "b"]))
            last = said.get(session or "")
            if last is None:
                prompt = draw(st.integers(1, 40))
                prefix = draw(st.sampled_from([None, "p", "p", "q"]))
                inside = draw(st.one_of(st.just(prompt), st.integers(0, prompt)))  # the prompt may be the prefix alone
                one = TraceRequest(number, 0, prompt, 1, session, None, prefix, inside if prefix else 0)
            else:
                one = replace(last, number=number, prompt_tokens=last.total_tokens + draw(st.integers(0, 9)))
            one = replace(one, arrival=1000.0 * number, output_tokens=draw(st.integers(1, 12)))
            if session is not None:
                said[session] = one
            found.append(one)
        return found

    return build()


class Reuse:
    """What an unlimited pool gives requests that come one after the other, from docs/ledger.md and the tokens alone."""

    def __init__(self, layout: Layout, gain: int) -> None:
        self.layout = layout
        self.gain = gain
        self.computed: list[tuple[int, ...]] = []
        self.frozen: set[tuple[int, ...]] = set()

    def hit(self, ids: Sequence[int], prompt: int) -> int:
        """Tokens reused of the prompt; books what the request leaves behind. `ids` are all that it computes."""
        layout, size = self.layout, self.layout.block_tokens
        ids = tuple(ids)
        known = max((_common(ids[:prompt], other) for other in self.computed), default=0)
        if not layout.has_state:
            found = min(known, prompt - 1) // size * size  # the last token is computed, for its logits
        else:
            limit = prompt if layout.hidden is not None else prompt - 1
            found = max((len(c) for c in self.frozen if len(c) <= limit and ids[: len(c)] == c), default=0)
            resident = min(known, limit) // size * size
            if layout.replay < float("inf"):  # one token more than the memories need, for the hidden vector
                found = max(found, int(resident - layout.replay - 1) // size * size)
            if known - found >= max(1, self.gain) and known < prompt:
                self.frozen.add(ids[:known])
            self.frozen |= {ids[:prompt], ids}
        self.computed.append(ids)
        return found


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(one, other)) if x != y), min(len(one), len(other)))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_without_limits_the_reuse_is_what_the_trace_has(name: str) -> None:
    layout = LAYOUTS[name]()

    @given(mixed(name), st.sampled_from([0, 1, 6]))
    @settings(max_examples=60, deadline=None)
    def check(requests: list[TraceRequest], gain: int) -> None:
        options = Options(min_checkpoint_gain=gain)
        found = run_trace(layout, requests, ample_pages(layout, requests), options, keep_served=True)
        model, source = Reuse(layout, gain), TokenSource()
        wanted = [model.hit(source.ids(one, 0, one.total_tokens - 1), one.prompt_tokens) for one in requests]
        assert [one.hit_tokens for one in found.served] == wanted
        assert found.hit_tokens == sum(wanted) and found.evicted_blocks == found.evicted_checkpoints == 0
        assert found.hit_tokens <= found.reusable_tokens

    check()


# -- every page, at every moment


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_pages_add_up_at_every_moment(name: str) -> None:
    layout = LAYOUTS[name]()

    @given(mixed(name), st.integers(0, 30), st.integers(0, 3), st.sampled_from([None, 5, 8]), st.sampled_from([8, 64]))
    @settings(max_examples=40, deadline=None)
    def check(requests: list[TraceRequest], spare: int, hurry: int, interval: int | None, rows: int) -> None:
        requests = [replace(one, arrival=one.arrival / 10 ** (2 * hurry)) for one in requests]
        least = max(layout.peak_pages(one.total_tokens - 1) for one in requests)
        ledger = Ledger(layout, least + spare, min_checkpoint_gain=1)
        moments = 0

        def observe(moment: Moment, seen: Ledger) -> None:
            nonlocal moments
            moments += 1
            seen.check()
            counted = measured(layout, seen)
            used = (moment.pages.blocks + moment.pages.cached, moment.pages.slots, moment.pages.checkpoints)
            assert (counted.block_pages, counted.slot_pages, counted.checkpoint_pages) == used or layout.tails
            assert counted.pages == seen.num_pages - moment.pages.free and moment.pages.total == seen.num_pages
            assert moment.running == len(seen.leases) and 0 <= moment.padding <= 1

        options = Options(max_step_tokens=rows, max_requests=3, checkpoint_interval=interval, num_samples=1000)
        found = run_trace(layout, requests, least + spare, options, observe=observe, ledger=ledger)
        assert found.finished == len(requests) and found.refused == 0 and moments > 0
        assert found.output_tokens == sum(one.output_tokens for one in requests)
        assert sum(miss.requests for miss in found.misses) == found.finished
        assert sum(miss.tokens for miss in found.misses) == found.prompt_tokens - found.hit_tokens
        assert not ledger.leases
        ledger.check()
        nodes = len(ledger.index)
        checkpoints = len(ledger.all_checkpoints())
        before = ledger.evictions
        ledger.drop_index()
        assert ledger.free_pages == ledger.num_pages and ledger.evictions == before + nodes + checkpoints
        assert found.evicted_blocks >= 0 and found.evicted_checkpoints >= 0
        assert found.evicted_blocks + found.evicted_checkpoints == before

    check()


# -- beside the real scheduler


class Recording(Ledger):
    """A ledger that notes what was wanted of it."""

    def __init__(self, layout: Layout, num_pages: int, gain: int = 1) -> None:
        super().__init__(layout, num_pages, min_checkpoint_gain=gain)
        self.most = 0

    def take_orders(self):  # type: ignore[no-untyped-def]
        """Called by both drivers when a step is planned."""
        self.most = max(self.most, self.num_pages - self.free_pages)
        return super().take_orders()


def in_waves(requests: Sequence[TraceRequest]) -> list[list[TraceRequest]]:
    """The same requests, up to three at once; a session's next turn comes in a later wave."""
    waves: list[list[TraceRequest]] = [[]]
    for one in requests:
        now = waves[-1]
        if len(now) == 3 or (one.session is not None and any(one.session == other.session for other in now)):
            waves.append([])
        waves[-1].append(replace(one, arrival=1e6 * (len(waves) - 1)))
    return waves


def serve(ledger: Ledger, waves: Sequence[Sequence[TraceRequest]], interval: int | None, rows: int) -> tuple[list[Request], int]:
    """Wave by wave, token by token through the scheduler; the requests and the number of steps."""
    scheduler = Scheduler(ledger, rows, 256, 2**31 - 1, interval)
    source, found, traced = TokenSource(), {}, {}
    for wave in waves:
        for one in wave:
            prompt = tuple(source.ids(one, 0, one.prompt_tokens))
            params = SamplingParams(max_tokens=one.output_tokens)
            request = Request(one.number, str(one.number), prompt, params, 0, one.output_tokens, frozenset())
            found[one.number], traced[one.number] = request, one
            scheduler.add(request)
        while scheduler.has_work:
            step = scheduler.plan()
            assert step is not None
            drawn = []
            for sample in step.samples:
                at = len(found[sample.request_id].tokens)
                drawn.append(source.ids(traced[sample.request_id], at, at + 1)[0])
            scheduler.apply(step, StepResult(tuple(drawn), (None,) * len(drawn), ((),) * len(step.slices)), found)
    return [found[number] for number in sorted(found)], scheduler.num_steps


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_the_ledger_is_driven_as_the_scheduler_does(name: str) -> None:
    layout = LAYOUTS[name]()

    twins = [  # the last one has one token left when the other has three: it is planned first, and its block is kept
        TraceRequest(0, 0.0, 1, 1, "a"), TraceRequest(1, 1000.0, 2, 1, "a"),
        TraceRequest(2, 2000.0, 8, 1, prefix="p", prefix_tokens=8), TraceRequest(3, 3000.0, 6, 1, prefix="p", prefix_tokens=6),
    ]  # fmt: skip

    @example(twins, 5, 40, 1)
    @given(mixed(name), st.sampled_from([None, 5]), st.sampled_from([40, 10_000]), st.sampled_from([1, 16]))
    @settings(max_examples=60, deadline=None)
    def check(requests: list[TraceRequest], interval: int | None, rows: int, gain: int) -> None:
        waves = in_waves(requests)
        rows = rows if all(len(wave) == 1 for wave in waves) else 10_000  # else who gets the rows first differs
        pages = sum(layout.peak_pages(one.total_tokens) + 20 * (layout.checkpoint_pages(9) + 2) for one in requests) + 50
        real, paper = Recording(layout, pages, gain), Recording(layout, pages, gain)
        served, steps = serve(real, waves, interval, rows)
        options = Options(max_step_tokens=rows, checkpoint_interval=interval)
        found = run_trace(layout, [one for wave in waves for one in wave], pages, options, keep_served=True, ledger=paper)
        assert [one.hit_tokens for one in found.served] == [request.cached_tokens for request in served]
        assert paper.stats == real.stats and paper.most == real.most and found.steps == steps
        assert paper.pages() == real.pages()
        frozen = [sorted((c.position, c.node.key, c.tail) for c in each.index.checkpoints if c.node) for each in (paper, real)]
        assert frozen[0] == frozen[1]
        assert {node.key for node in paper.index.nodes} == {node.key for node in real.index.nodes}

    check()


def test_preempted_as_the_scheduler_does() -> None:
    # prompts of 8, 10 and 11 that grow by 11 tokens in blocks of 4, so that they reach their borders at different times, in
    # pools from 6 (the least for one) to 13 pages
    requests = [TraceRequest(n, 0.0, length, 12) for n, length in enumerate((8, 10, 11))]
    preempted = 0
    for pages in range(6, 14):
        real, paper = Recording(logs_only(4), pages), Recording(logs_only(4), pages)
        served, steps = serve(real, [requests], None, 10_000)
        found = run_trace(logs_only(4), requests, pages, Options(max_step_tokens=10_000), keep_served=True, ledger=paper)
        assert [one.preemptions for one in found.served] == [request.num_preemptions for request in served]
        assert paper.stats == real.stats and paper.evictions == real.evictions and found.steps == steps
        preempted += found.preemptions
    assert preempted > 3


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_who_waits_is_asked_again_when_it_matters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, reports = LAYOUTS[name](), []
    requests = [
        TraceRequest(n, 0.3 * n, 30 + n % 7, 6, None, None, "p" if n % 3 else None, 24 if n % 3 else 0) for n in range(40)
    ]

    class Impatient(simulate._Simulation):
        """Asks at every step."""

        def _plan(self):  # type: ignore[no-untyped-def]
            self.blocked = None
            return super()._plan()

    for kind in (simulate._Simulation, Impatient):
        monkeypatch.setattr(simulate, "_Simulation", kind)
        pages = 2 * layout.peak_pages(50) + 6
        reports.append(run_trace(layout, requests, pages, replace(SLOW, max_step_tokens=8), keep_served=True))
    assert reports[0] == reports[1] and reports[0].waited > 5


# -- the report


def report() -> SimulationReport:
    return run_trace(v4_flash(), make_mix("chat", 0, 80), 300, Options(num_samples=10))


def test_the_same_trace_gives_the_same_report() -> None:
    assert report() == report()


def test_moments_are_few_and_in_order() -> None:
    found = report()
    times = [moment.time for moment in found.moments]
    assert 5 <= len(times) <= 21 and times == sorted(times)
    assert {moment.pages.total for moment in found.moments} == {300}


def test_the_json_says_what_the_report_has() -> None:
    found = report()
    values = json.loads(json.dumps(report_json(found)))
    assert values["hit_rate"] == found.hit_rate == found.hit_tokens / found.prompt_tokens
    assert values["peak_concurrency"] == found.peak_running and values["preemptions"] == found.preemptions
    assert len(values["moments"]) == len(found.moments)
    first = values["moments"][0]
    assert sum(first[name] for name in ("blocks", "windows", "slots", "cached", "checkpoints", "free")) == 300
    assert values["waits"]["p50_s"] == sorted(found.wait_s)[39]  # of 80: the 40th


def test_the_tables_print(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    found = report()
    for grid in table(found):
        make_console(sys.stdout).print(grid)
    shown = capsys.readouterr().out
    assert f"{100 * found.hit_rate:.2f} %" in shown and "why prompts were computed" in shown
    assert all(miss.reason in shown for miss in found.misses)


def test_progress_is_told() -> None:
    calls: list[int] = []
    run_trace(logs_only(4), [TraceRequest(n, float(n), 8, 1) for n in range(40)], 50, progress=lambda n, _: calls.append(n))
    assert calls == [16, 32]
