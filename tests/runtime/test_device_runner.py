"""Steps as a GPU gets them, computed here by a model that notices every wrong number: packing, padding, splitting, overlap."""

import random
from collections import deque
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pytest
import torch

from lamina.memory.ledger import Ledger
from lamina.ops.move import WORDS, move
from lamina.runtime.arena import DeviceArena
from lamina.runtime.device_inputs import StepInputs
from lamina.runtime.device_runner import DeviceRunner, Mode
from lamina.runtime.graphs import context_buckets, request_buckets
from lamina.schedule.drafting import Drafting, DraftRule
from lamina.schedule.request import Request, RequestState
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.step import UNKNOWN, Decodes, LaunchedStep, Member, Slice, Step

CPU = torch.device("cpu")
MODES: list[Mode] = [True, "strict", False]
GREEDY = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)


class Serving:
    """A scheduler and a runner, one step ahead of each other unless `ahead` is 1."""

    def __init__(
        self, helper: ModuleType, mode: Mode = True, num_pages: int = 400, budget: int = 64, max_requests: int = 8,
        ahead: int = 2, max_model_len: int = 600, drafts: int = 0, by_model: bool = False,
    ) -> None:  # fmt: skip
        self.helper = helper
        layout = helper.layout(draft_tokens=drafts, features=int(by_model))
        self.ledger = Ledger(layout, num_pages, adopt_twins=mode is not False, min_checkpoint_gain=4)
        rule = DraftRule(drafts, by_model, 0.0, with_penalties=False) if drafts else None
        self.scheduler = Scheduler(self.ledger, budget, max_requests, helper.VOCAB, overlaps=ahead > 1, drafts=rule)
        self.arena = DeviceArena(layout, num_pages, CPU)
        self.arena.bytes.fill_(255)  # NaN
        self.model = helper.TokenModel(self.arena)
        self.sampler = helper.TokenSampler(max_requests)
        self.runner = DeviceRunner(
            self.model, self.arena, self.sampler, max_requests, budget, max_model_len, CPU, mode, self.model if by_model else None
        )
        self.ahead = ahead
        self.requests: dict[int, Request] = {}
        self.flying: deque[tuple[Step, LaunchedStep]] = deque()
        self.steps: list[Step] = []

    def add(
        self, prompt: Sequence[int], max_new: int, params: SamplingParams = GREEDY, stops: frozenset[int] = frozenset()
    ) -> Request:
        number = len(self.requests) + 1
        made = Request(number, f"r{number}", tuple(prompt), params, number, max_new, stops)
        self.requests[number] = made
        self.scheduler.add(made)
        return made

    def step(self) -> bool:
        """One step planned and launched ahead, one booked."""
        while len(self.flying) < self.ahead:
            step = self.scheduler.plan()
            if step is None:
                break
            self.ledger.check()
            self.flying.append((step, self.runner.execute(step)))
            self.steps.append(step)
        if not self.flying:
            return False
        step, launched = self.flying.popleft()
        self.scheduler.apply(step, launched.result(), self.requests)
        self.ledger.check()
        return True

    def run(self) -> None:
        """To the end of all requests, and of what is still on its way."""
        while self.step():
            pass
        assert not self.scheduler.has_work, "work is left and nothing is planned"
        self.ledger.drop_index()
        assert self.ledger.free_pages == self.ledger.num_pages, "I6: pages are lost"

    def check(self, *requests: Request) -> None:
        """The requests have their one right answer."""
        for one in requests:
            assert one.state is RequestState.FINISHED
            expected = self.helper.answer(one.prompt, one.max_new, one.stop_ids)
            assert one.output == expected, one.name
            assert one.finish_reason == ("stop" if expected[-1] in one.stop_ids else "length")


@pytest.fixture(scope="session")
def helper() -> ModuleType:
    """tests/runtime/device_model.py"""
    from tests.conftest import load_helper

    return load_helper("runtime/device_model.py")


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(61), k=length)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_answers(helper: ModuleType, mode: Mode, ahead: int) -> None:
    """Long and short prompts together, cut into steps of 64 rows."""
    serving = Serving(helper, mode, ahead=ahead)
    requests = [serving.add(prompt(length, length), 5 + length % 13) for length in (1, 200, 3, 64, 65, 4, 17, 100, 31, 8)]
    serving.run()
    serving.check(*requests)
    overlapped = sum(part.tokens == (UNKNOWN,) for step in serving.steps for part in step.slices)
    assert (overlapped > 50) == (ahead > 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(8))
def test_random_loads(helper: ModuleType, mode: Mode, seed: int) -> None:
    """Prompts that share beginnings, come while others run, stop at tokens that nobody foresees, in pools that are too small."""
    draw = random.Random(seed)
    serving = Serving(helper, mode, num_pages=draw.choice([40, 60, 300]), budget=draw.choice([7, 33, 64]), max_model_len=140,
                      max_requests=draw.choice([3, 8]))  # fmt: skip
    base = prompt(100, 1)
    requests, cancelled = [], []
    for _ in range(30):
        for _ in range(draw.randrange(3)):
            ids = base[: draw.choice([0, 3, 4, 40, 41, 99])] + prompt(draw.choice([1, 5, 9]), draw.randrange(5))
            stops = frozenset(draw.sample(range(61), draw.choice([0, 3, 10])))
            params = draw.choice([GREEDY, GREEDY, SamplingParams(max_tokens=99, temperature=0, repetition_penalty=1.0000001)])
            requests.append(serving.add(ids, draw.choice([1, 2, 20, 30]), params, stops))
        for _ in range(draw.randrange(8)):
            serving.step()
        if requests and draw.random() < 0.3:
            one = draw.choice(requests)
            if one.state is not RequestState.FINISHED:
                cancelled.append(one)
            serving.scheduler.cancel(one)
        idle = [r for r in serving.scheduler.running if serving.scheduler._is_idle(r)]
        if idle and draw.random() < 0.3:
            serving.scheduler.preempt(draw.choice(idle))
        serving.ledger.check()
    serving.run()
    serving.check(*(one for one in requests if one not in cancelled))


class FewRight(Drafting):
    """As many guesses as comes, of which as many are right; now and then it says that there will be none."""

    def __init__(self, rule: DraftRule, answer: list[int], prompt: int, draw: random.Random) -> None:
        super().__init__(rule)
        self.answer, self.prompt, self.draw = answer, prompt, draw

    def is_ready(self, tokens: Sequence[int]) -> bool:
        return self.draw.random() < 0.7

    def guesses(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        true = self.answer[len(tokens) - self.prompt :][: self.draw.randint(0, min(most, self.rule.most))]
        right = self.draw.randint(0, len(true))
        return tuple(token if place < right else (token + 1) % 61 for place, token in enumerate(true))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by_model", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_loads_with_guesses(helper: ModuleType, mode: Mode, by_model: bool, seed: int) -> None:
    """Verified beside decodes and prompts; a step waits where the one before it decides what is guessed, or who drafts."""
    draw = random.Random(seed)
    serving = Serving(
        helper, mode, num_pages=draw.choice([60, 300]), budget=draw.choice([16, 64]), max_model_len=140, drafts=5,
        by_model=by_model, ahead=1 if by_model else 2,
    )  # fmt: skip
    assert serving.runner.overlaps is not by_model
    rule = serving.scheduler.guesses.rule

    def begin(request: Request) -> None:
        if request.drafting is None and rule is not None and not request.looks_at_ids:
            answer = helper.answer(request.prompt, request.max_new)
            request.drafting = FewRight(rule, answer, len(request.prompt), draw)

    if not by_model:
        serving.scheduler.guesses.begin = begin  # type: ignore[method-assign]
    base, requests = prompt(100, 1), []
    for _ in range(20):
        for _ in range(draw.randrange(3)):
            ids = base[: draw.choice([0, 3, 40, 99])] + prompt(draw.choice([1, 5, 9]), draw.randrange(5))
            params = draw.choice([GREEDY, GREEDY, SamplingParams(max_tokens=99, temperature=0, repetition_penalty=1.0000001)])
            stops = frozenset(draw.sample(range(61), draw.choice([0, 3])))
            requests.append(serving.add(ids, draw.choice([1, 2, 20, 30]), params, stops))
        for _ in range(draw.randrange(8)):
            serving.step()
        idle = [r for r in serving.scheduler.running if serving.scheduler._is_idle(r)]
        if idle and draw.random() < 0.3:
            serving.scheduler.preempt(draw.choice(idle))
    serving.run()
    serving.check(*requests)
    counts = serving.scheduler.guesses.counts
    assert 0 < counts.accepted < counts.tokens and counts.by_place[-1] >= 0
    ahead = any(part.tokens == (UNKNOWN,) for step in serving.steps for part in step.slices)
    assert ahead is not by_model and (serving.model.drafter.num_drafted > 100) is by_model


def test_full_hits_read_vectors_that_lie_beside_features(helper: ModuleType) -> None:
    """Two prompts that are known to their ends, in one step: both first tokens come from what their slots keep."""
    serving = Serving(helper, drafts=3, by_model=True, ahead=1)
    prompts = [prompt(length, length) for length in (6, 3)]
    for _ in range(2):
        made = [serving.add(ids, 5) for ids in prompts]
        while serving.step():
            pass
        serving.check(*made)
    both = [step for step in serving.steps if sum(item.slice_index is None for item in step.samples) == 2]
    assert both, "no step draws twice from slots"


def test_a_step_is_split_by_mode(helper: ModuleType) -> None:
    """Two decodes beside a prompt: a padded graph and exact rows; one pass where all is strict, or where bits are free."""
    for mode, expected in (
        (True, [("decode", 2, 2, 600), ("prefill", 20, 1, 600)]),
        ("strict", [("prefill", 22, 3, 600)]),
        (False, [("prefill", 22, 3, 600)]),
    ):
        serving = Serving(helper, mode, ahead=1)
        for seed in range(2):
            serving.add(prompt(9, seed), 50)
        serving.step()
        serving.step()
        serving.add(prompt(20, 5), 3)
        serving.model.calls.clear()
        serving.step()
        assert serving.model.calls == expected
        serving.model.calls.clear()
        serving.step()
        assert serving.model.calls == [("prefill", 3, 3, 600) if mode == "strict" else ("decode", 4, 4, 600)]
        serving.run()


def test_what_is_a_decode(helper: ModuleType) -> None:
    """The token drawn last, alone; not the last token of a prompt, not tokens that are computed again."""
    serving = Serving(helper, budget=4, ahead=1)
    one = serving.add(prompt(5, 1), 9)
    while one.num_output < 5:
        serving.step()
    found = [(part.start, part.stop, part.is_decode) for step in serving.steps for part in step.slices]
    assert found == [(0, 4, False), (4, 5, False), *((at, at + 1, True) for at in range(5, 9))]
    serving.scheduler.preempt(one)
    serving.ledger.drop_index()
    serving.steps.clear()
    serving.run()
    found = [(part.start, part.stop, part.is_decode) for step in serving.steps for part in step.slices]
    assert found == [(0, 4, False), (4, 8, False), (8, 10, False), *((at, at + 1, True) for at in range(10, 13))]
    serving.check(one)


def test_a_full_hit_is_drawn_from_the_vector_that_was_kept(helper: ModuleType) -> None:
    """Beside decodes and a new prompt, whose draws come from other places."""
    serving = Serving(helper, ahead=2)
    first = serving.add(prompt(30, 1), 3)
    while first.state is not RequestState.FINISHED:
        serving.step()
    others = [serving.add(prompt(9, 2), 30), serving.add(prompt(30, 1), 12)]
    for _ in range(3):
        serving.step()
    others += [serving.add(prompt(30, 1), 7), serving.add(prompt(50, 3), 6), serving.add(prompt(9, 2), 6)]
    serving.run()
    serving.check(first, *others)
    mixed = [step for step in serving.steps if any(item.slice_index is None for item in step.samples) and len(step.samples) > 2]
    assert mixed and all(one.cached_tokens == len(one.prompt) for one in (others[1], others[2], others[4]))


def test_an_early_end_wastes_one_token(helper: ModuleType) -> None:
    """The slice that computes the end token was on its way: it stays for reuse, and nothing is drawn from it."""
    ids = prompt(20, 1)
    end = helper.answer(ids, 9)[-1]
    assert end not in helper.answer(ids, 8)
    serving = Serving(helper)
    one = serving.add(ids, 100, stops=frozenset([end]))
    while one.state is not RequestState.FINISHED:
        serving.step()
    assert one.num_output == 9 and serving.flying and serving.ledger.leases
    assert serving.step() and not serving.ledger.leases and serving.scheduler.late_results == 2
    assert serving.ledger.longest([*ids, *one.output, 5]).position == 29
    serving.run()


def test_the_greatest_length_wastes_nothing(helper: ModuleType) -> None:
    serving = Serving(helper)
    one = serving.add(prompt(20, 1), 9)
    serving.run()
    serving.check(one)
    assert sum(len(step.samples) for step in serving.steps) == 9 and serving.scheduler.late_results == 0
    assert max(part.stop for step in serving.steps for part in step.slices) == 28


def test_penalties_wait_for_their_tokens(helper: ModuleType) -> None:
    serving = Serving(helper)
    params = SamplingParams(max_tokens=9, temperature=0, presence_penalty=0.5, ignore_eos=True)
    one, other = serving.add(prompt(20, 1), 9, params), serving.add(prompt(20, 2), 9)
    serving.run()
    serving.check(other)
    unknown = {part.request_id for step in serving.steps for part in step.slices if part.tokens == (UNKNOWN,)}
    assert unknown == {other.id} and one.num_output == 9
    outputs = [len(item.output) for step in serving.steps for item in step.samples if item.request_id == one.id]
    assert outputs == list(range(9))


def test_prompt_logprobs(helper: ModuleType) -> None:
    """Those of one slice among others, cut in two."""
    serving = Serving(helper, budget=40, ahead=2)
    ids = prompt(60, 7)
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2, ignore_eos=True)
    serving.add(prompt(9, 2), 20)
    serving.step()
    one = serving.add(ids, 3, params)
    serving.run()
    assert [item.token for item in one.prompt_logprobs] == ids[1:]
    likely = [item.top_tokens[0] for item in one.prompt_logprobs]
    assert likely == [helper.value(ids[:at]) % helper.VOCAB for at in range(1, 60)]


def test_warmup_changes_nothing(helper: ModuleType) -> None:
    serving = Serving(helper)
    before = serving.arena.bytes.clone()
    serving.runner.warmup()
    assert torch.equal(serving.arena.bytes, before)
    assert serving.model.calls[0] == ("prefill", 64, 1, 600)


def test_copies_are_warmed_up(helper: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copies of a step are of no kind that the warm-up has not made."""
    serving, words = Serving(helper), []

    def mover(source: torch.Tensor, target: torch.Tensor, pieces: torch.Tensor, word_bytes: int) -> None:
        words.append(word_bytes)
        move(source, target, pieces, word_bytes)

    monkeypatch.setattr(serving.arena, "_mover", mover)  # as a GPU's
    serving.runner.warmup()
    warmed = set(words)
    request = serving.add(prompt(30, 1), 5)
    serving.run()
    serving.check(request)
    assert len(words) > len(WORDS) and set(words) == warmed == set(WORDS)


def test_buckets() -> None:
    assert request_buckets(256) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert request_buckets(1) == (1,) and request_buckets(5) == (1, 2, 4, 5) and request_buckets(20) == (1, 2, 4, 8, 16, 20)
    assert context_buckets(1 << 20) == (2048, 8192, 32768, 131072, 524288, 1 << 20)
    assert context_buckets(600) == (600,) and context_buckets(2048) == (2048,) and context_buckets(2049) == (2048, 2049)


def slice_of(row: int, start: int, slot: tuple[int, ...], table: tuple[int, ...] = (), table_start: int = 0) -> Slice:
    return Slice(row, start, start + 1, (row,), slot, row, table_start, table, 3, 2, (), None, True)


def test_a_padded_section() -> None:
    """Three single rows in a bucket of four, after a step that filled it: nothing of that step is left."""
    inputs = StepInputs(2, (1, 2, 4), 5, 16, 10, CPU)
    slots = [(10 + row, 20 + row) for row in range(5)]
    for rows in ((3, 1, 0, 4), (4, 2, 0)):
        for _ in range(2):  # both buffers
            inputs.begin()
            inputs.put_decodes([slice_of(row, 100 + row, slots[row]) for row in rows], 4)
            inputs.upload([])
    batch = inputs.decode(4)
    rows = batch.rows
    assert batch.tokens.tolist() == [4, 2, 0, 0] and rows.positions.tolist() == [104, 102, 100, 0]
    assert rows.owners.tolist() == [0, 1, 2, -1] and rows.first_rows.tolist() == [0, 1, 2, 0]
    assert (rows.starts.tolist(), rows.stops.tolist()) == ([104, 102, 100, 0], [105, 103, 101, 0])
    assert (rows.valid_from.tolist(), rows.write_from.tolist()) == ([2, 2, 2, 0], [3, 3, 3, 0])
    assert rows.table_rows.tolist() == [4, 2, 0, 0] and rows.slots.tolist() == [[14, 24], [12, 22], [10, 20], [0, 0]]
    inputs.pad_decode(4)
    assert rows.owners.tolist() == [-1] * 4 and not rows.stops.any() and not rows.slots.any()


def decodes_of(members: tuple[Member, ...], starts: list[int], tokens: list[int]) -> Decodes:
    return Decodes(members, np.array(starts, np.int32), np.array(tokens, np.int32), ())


def test_decodes_as_columns_are_written_as_slices_are() -> None:
    """Steps of the same members, of others and of slices in turn: the device sees what slices would have written."""
    params = SamplingParams()
    first = tuple(Member(10 + row, row, (10 + row, 20 + row), row, 2, params, 0, 0, 3) for row in (3, 1, 4))
    second = first[1:]
    columns, single = (StepInputs(2, (1, 2, 4), 5, 16, 10, CPU) for _ in range(2))
    for step, members in enumerate([first, first, first, second, second, None, None, first, second, first, first]):
        columns.begin()
        single.begin()
        if members is None:  # a prompt is written where the section was
            for inputs in (columns, single):
                inputs.put_rows([Slice(1, 0, 9, tuple(range(50, 59)), (5, 6), 0, 0, ())])
                inputs.upload([])
            continue
        decodes = decodes_of(members, [100 * one.row + step for one in members], [step] * len(members))
        bucket = 2 if members is second and step % 2 else 4
        columns.put_members(decodes, bucket)
        columns.upload_with([(one.row, 2, (step,)) for one in members])
        single.put_decodes(decodes.slices(), bucket)
        single.upload([part._replace(table_start=2, table=(step,)) for part in decodes.slices()])
        ours, theirs = columns.decode(bucket), single.decode(bucket)
        assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(columns.tables, single.tables)
        for name in ("positions", "owners", "starts", "stops", "first_rows", "valid_from", "write_from", "table_rows", "slots"):
            assert torch.equal(getattr(ours.rows, name), getattr(theirs.rows, name)), (step, name)


def test_a_row_that_is_used_again_has_its_new_slot() -> None:
    inputs = StepInputs(1, (1, 2), 2, 16, 10, CPU)
    for slot in ((7,), (9,)):
        inputs.begin()
        inputs.put_decodes([slice_of(1, 5, slot)], 1)
        inputs.upload([])
        assert inputs.decode(1).rows.slots.tolist() == [list(slot)]


@pytest.mark.parametrize("count", [3, 9000])
def test_new_and_changed_blocks_reach_the_tables(count: int) -> None:
    """A few go up with the step; a great many in a copy of their own."""
    inputs = StepInputs(1, (1, 2), 3, 16, 10_000, CPU)
    inputs.begin()
    inputs.put_rows([slice_of(2, 5, (7,), tuple(range(1, count + 1)), 4), slice_of(0, 1, (8,), (77,), 0)])
    inputs.upload([slice_of(2, 5, (7,), tuple(range(1, count + 1)), 4), slice_of(0, 1, (8,), (77,), 0)])
    assert inputs.tables[2, 4 : 4 + count].tolist() == list(range(1, count + 1)) and int(inputs.tables[0, 0]) == 77
    assert int((inputs.tables != 0).sum()) == count + 1
