"""The engine one step ahead of its results: the same answers as without, whatever ends them."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from lamina import LLM, SamplingParams
from lamina.engine.engine import Engine, Group
from lamina.runtime.runner import Runner
from lamina.schedule.request import ThoughtLimit
from lamina.schedule.step import UNKNOWN, Step, StepResult


class Late:
    """Holds results back, as a device does, and knows the tokens that it has drawn itself."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.last: dict[int, int] = {}
        self.unknown = 0
        self.waiting = 0
        self.most_waiting = 0
        self._execute = engine.worker.runner.execute
        engine.worker.runner.execute = self.execute  # type: ignore[method-assign,assignment]

    def execute(self, step: Step) -> "LateResult":
        """The step is run to its end; nobody is told."""
        slices = tuple(
            part._replace(tokens=(self.last[part.row],)) if part.tokens == (UNKNOWN,) else part for part in step.slices
        )
        self.unknown += sum(part.tokens == (UNKNOWN,) for part in step.slices)
        result = self._execute(replace(step, slices=slices))
        for item, token in zip(step.samples, result.tokens, strict=True):
            self.last[item.row] = 0 if token is None else token
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        return LateResult(self, result)


class LateResult:
    """A result that has been asked for when `result` is called."""

    def __init__(self, late: Late, found: StepResult) -> None:
        self.late = late
        self.found = found

    def result(self) -> StepResult:
        """What the step gave."""
        self.late.waiting -= 1
        return self.found


@pytest.fixture
def made(tiny_of: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[LLM, LLM, Late]]]:
    """Two engines of a tiny model with a tokenizer: one as on a CPU, one that overlaps."""

    def build(**settings: object) -> tuple[LLM, LLM, Late]:
        directory = str(tiny_of("flash", "official"))
        options = {"cache_bytes": "16MiB", "max_step_tokens": 64} | settings
        plain = LLM(directory, **options)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "overlaps", True)
            ahead = LLM(directory, **options)  # type: ignore[arg-type]
        return plain, ahead, Late(ahead.engine)

    yield build


def answers(groups: list[Group]) -> list[object]:
    """All that a user sees, but for what was cached."""
    return [
        (one.token_ids, one.text, one.logprobs, one.finish_reason, one.stop_reason, group.output.prompt_logprobs)
        for group in groups
        for one in group.output.outputs
    ]


def assert_nothing_held(engine: Engine) -> None:
    engine.ledger.check()
    counts = engine.ledger.pages()
    assert (counts.blocks, counts.slots) == (0, 0) and not engine.has_work and not engine._flying
    engine.ledger.drop_index()
    assert engine.ledger.free_pages == engine.num_pages


def requests(ids: Callable[[int, int], list[int]]) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths, two alike, with every way to end and to draw."""
    base = {"temperature": 1.0, "ignore_eos": True, "logprobs": 2}
    found = [
        (ids(90, 1), SamplingParams(max_tokens=20, seed=1, **base)),
        (ids(3, 2), SamplingParams(max_tokens=25, seed=2, stop_token_ids=list(range(0, 250, 7)), **base)),
        (ids(120, 3), SamplingParams(max_tokens=20, seed=3, stop=["a", "e", "\n"], **base)),
        (ids(17, 4), SamplingParams(max_tokens=25, seed=4, frequency_penalty=1.0, presence_penalty=0.5, **base)),
        (ids(64, 5), SamplingParams(max_tokens=12, seed=5, n=3, **base)),
        (ids(90, 1), SamplingParams(max_tokens=1, seed=6, **base)),
        (ids(33, 7), SamplingParams(max_tokens=9, seed=7, prompt_logprobs=1, **base)),
        (ids(20, 8), SamplingParams(max_tokens=40, seed=8, min_tokens=15, stop_token_ids=list(range(128)), **base)),
    ]
    return [prompt for prompt, _ in found], [params for _, params in found]


def test_the_same_answers(made: Callable[..., tuple[LLM, LLM, Late]], driving: ModuleType, random_models: ModuleType) -> None:
    plain, ahead, late = made()
    prompts, params = requests(random_models.token_ids)
    expected, found = (driving.serve(llm.engine, prompts, params) for llm in (plain, ahead))
    assert answers(found) == answers(expected)
    reasons = {one.finish_reason for group in found for one in group.output.outputs}
    assert reasons == {"stop", "length"} and late.unknown > 50 and late.most_waiting == 2
    assert ahead.engine.scheduler.late_results > 0 and plain.engine.scheduler.late_results == 0
    again = driving.serve(ahead.engine, prompts, params)  # from what was left
    assert answers(again) == answers(expected)
    assert_nothing_held(ahead.engine)


def test_thoughts_that_are_ended(made: Callable[..., tuple[LLM, LLM, Late]], random_models: ModuleType) -> None:
    """The token that ends them waits for those before it; the others go on meanwhile."""
    plain, ahead, late = made()
    ends = ((4, 7, (7,)), (9, 7, (7, *range(500))), (0, 3, (3,)))
    limits = [None, *(ThoughtLimit(tokens, end, frozenset(others)) for tokens, end, others in ends)]
    params = SamplingParams(max_tokens=16, seed=5, n=2, ignore_eos=True)
    found = []
    for engine in (plain.engine, ahead.engine):
        groups = [
            engine.add(random_models.token_ids(20 + place, place), params, thoughts=limit) for place, limit in enumerate(limits)
        ]
        while engine.has_work:
            engine.step()
        found.append(answers(groups))
    assert found[0] == found[1] and late.unknown > 50
    outputs = [one.token_ids for group in groups for one in group.output.outputs]
    assert all(ids[4] == 7 for ids in outputs[2:4]) and all(ids[0] == 3 for ids in outputs[6:])
    assert all(min(ids[:9]) < 500 for ids in outputs[4:6])
    assert_nothing_held(ahead.engine)


def test_in_a_pool_that_is_too_small(
    made: Callable[..., tuple[LLM, LLM, Late]], driving: ModuleType, random_models: ModuleType
) -> None:
    layout = made()[0].engine.layout
    pages = 2 * layout.slot_pages + 5
    plain, ahead, late = made(cache_bytes=pages * layout.page_bytes)
    draw = random.Random(0)
    prompts = [random_models.token_ids(draw.choice([3, 120, 250, 254]), number) for number in range(4)]
    params = [SamplingParams(max_tokens=15, temperature=1, seed=number, ignore_eos=True, logprobs=1) for number in range(4)]
    expected, found = (driving.serve(llm.engine, prompts, params) for llm in (plain, ahead))
    assert answers(found) == answers(expected) and late.unknown > 20
    assert_nothing_held(ahead.engine)


def test_cancelled_while_its_next_token_is_on_its_way(
    made: Callable[..., tuple[LLM, LLM, Late]], driving: ModuleType, random_models: ModuleType
) -> None:
    plain, ahead, _ = made()
    params = SamplingParams(max_tokens=20, temperature=1, seed=1, ignore_eos=True)
    prompts = [random_models.token_ids(30, 1), random_models.token_ids(40, 2)]
    expected = driving.serve(plain.engine, prompts[:1], params)
    groups = [ahead.engine.add(prompt, params) for prompt in prompts]
    for _ in range(6):
        ahead.engine.step()
    assert ahead.engine._flying
    ahead.engine.cancel(groups[1])
    ahead.engine.ledger.check()
    driving.run_all(ahead.engine, groups)
    assert answers(groups[:1]) == answers(expected) and groups[1].output.outputs[0].finish_reason == "abort"
    only = ahead.engine.add(prompts[1], params)
    for _ in range(4):
        ahead.engine.step()
    ahead.engine.cancel(only)
    while ahead.engine.step():
        pass
    assert_nothing_held(ahead.engine)


@pytest.mark.parametrize("when", ["launched", "waited for"])
def test_a_step_that_fails(
    made: Callable[..., tuple[LLM, LLM, Late]], driving: ModuleType, random_models: ModuleType, when: str
) -> None:
    """Whatever is in flight is forgotten; those that wait are served, and the next prompt is exact."""
    plain, ahead, _ = made(max_requests=2)
    params = SamplingParams(max_tokens=20, temperature=1, seed=1, ignore_eos=True)
    prompts = [random_models.token_ids(30 + number, number) for number in range(3)]
    expected = driving.serve(plain.engine, prompts, params)
    groups = [ahead.engine.add(prompt, params) for prompt in prompts]
    for _ in range(5):
        ahead.engine.step()

    class Broken:
        def result(self) -> StepResult:
            raise RuntimeError("injected")

    def fail(step: Step) -> Broken:
        if when == "launched":
            raise RuntimeError("injected")
        return Broken()

    execute, ahead.engine.worker.runner.execute = ahead.engine.worker.runner.execute, fail  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="injected"):
        for _ in range(3):
            ahead.engine.step()
    ahead.engine.worker.runner.execute = execute  # type: ignore[method-assign]
    assert [group.output.outputs[0].finish_reason for group in groups] == ["error", "error", None]
    assert not ahead.engine._flying
    driving.run_all(ahead.engine, groups)
    assert answers(groups[2:]) == answers(expected[2:])
    again = driving.serve(ahead.engine, prompts, params)
    assert answers(again) == answers(expected)
    assert_nothing_held(ahead.engine)
