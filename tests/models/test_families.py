"""Every family that runs as a network: the answers of Transformers, whatever is cut, kept, shared or taken away."""

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lamina import LLM, SamplingParams
from lamina.base.errors import ConfigError

NAME = "lamina_tests_families"
#: of each kind of memory one, that `make test` drafts with
DRAFTED = ("gemma3n", "llama4-large-chunk", "gemma3-large-window", "deepseek-v3.2", "nemotron-h")
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def helpers() -> ModuleType:
    """tests/models/families.py"""
    if NAME not in sys.modules:
        spec = spec_from_file_location(NAME, Path(__file__).resolve().parent / "families.py")
        assert spec is not None and spec.loader is not None
        sys.modules[NAME] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return sys.modules[NAME]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "bench" in metafunc.fixturenames:
        is_first = metafunc.function is test_scores_and_tokens_are_those_of_transformers
        is_drafted = metafunc.function is test_guesses_change_nothing
        names = [
            pytest.param(
                name, marks=[pytest.mark.long] if (name not in DRAFTED if is_drafted else recipe.is_long and not is_first) else []
            )
            for name, recipe in sorted(helpers().recipes().items())
        ]
        metafunc.parametrize("bench", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest, driving: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return helpers().Bench(driving, tmp_path_factory.mktemp(request.param), helpers().recipes()[request.param])


def test_scores_and_tokens_are_those_of_transformers(bench: Any) -> None:
    """Prompts of every length where something changes: scores of all positions, and greedy tokens."""
    for length in bench.recipe.lengths:
        bench.reset()
        (group,) = bench.serve([bench.ids(length)], prompt_logprobs=0)
        bench.check(group)


def test_any_cuts(bench: Any) -> None:
    """Steps of few tokens give what one step gives."""
    ids = bench.ids(max(bench.recipe.lengths[-1], 150), 2)
    bench.reset()
    (group,) = bench.serve([ids])
    bench.check(group)
    known = bench.scores(group)
    for budget in bench.recipe.budgets:
        bench.reset(budget)
        (group,) = bench.serve([ids])
        bench.check_scores(group, known)


def test_a_hit_gives_the_same_answer(bench: Any) -> None:
    """The same prompt again; a longer one; one that parts in the middle; and what was answered, as a new prompt."""
    ids = bench.ids(max(bench.recipe.lengths[-1], 150), 3)
    bench.reset()
    (cold,) = bench.serve([ids])
    known, answer = bench.scores(cold), list(cold.output.outputs[0].token_ids)
    (again,) = bench.serve([ids])
    bench.check_scores(again, known)
    step = bench.granule
    assert again.output.usage.cached_tokens >= (len(ids) - 1) // step * step
    for prompt in (ids + bench.ids(20, 4), ids[: len(ids) // 2] + bench.ids(40, 5), ids + answer + bench.ids(9, 6)):
        (group,) = bench.serve([prompt])
        bench.check(group)
    assert group.output.usage.cached_tokens >= len(ids) // step * step


def test_company(bench: Any) -> None:
    """Prompts of many lengths at once, in steps that cut them, with shared beginnings."""
    base = bench.ids(90, 7)
    prompts = [bench.ids(n, 10 + n) for n in (1, 2, 17, 63, 64, 65, 100)] + [base + bench.ids(n, 30 + n) for n in (1, 30)]
    alone = []
    for prompt in prompts:
        bench.reset()
        (group,) = bench.serve([prompt])
        alone.append(bench.scores(group))
    for budget in (None, 50):
        bench.reset(budget)
        groups = bench.serve(prompts)
        for group, known in zip(groups, alone, strict=True):
            bench.check_scores(group, known)


def test_preempted_and_resumed(bench: Any) -> None:
    """Requests whose memory is taken away on the way, and kept as a checkpoint or lost."""
    prompts = [bench.ids(n, 50 + n) for n in (70, 150)]
    alone = []
    for prompt in prompts:
        bench.reset()
        (group,) = bench.serve([prompt], max_tokens=12)
        alone.append(bench.scores(group))
    driving = bench.driving
    for loses in (False, True):
        bench.reset(40)
        between: Callable[[object], None] = driving.preempt_every(45, driving.lose_everything if loses else None)
        groups = [bench.engine.add(prompt, GREEDY, number, "") for number, prompt in enumerate(prompts)]
        driving.run_all(bench.engine, groups, between)
        for group, known in zip(groups, alone, strict=True):
            bench.check_scores(group, known)


def test_pages_are_those_predicted(bench: Any) -> None:
    """What a running request holds at every step is what the layout says of its length."""
    bench.reset(33)
    group = bench.engine.add(bench.ids(140, 8), GREEDY, 0, "")
    layout, checked = bench.engine.worker.layout, 0

    def between(engine: Any) -> None:
        nonlocal checked
        for request in engine.scheduler.running:
            counts = engine.ledger.pages()
            position = request.lease.position
            assert counts.slots == layout.slot_pages and counts.blocks == layout.block_pages(position)
            assert counts.tails == layout.tail_pages(position)
            checked += 1

    bench.driving.run_all(bench.engine, [group], between)
    assert checked > 5


def test_guesses_change_nothing(bench: Any) -> None:
    """Right and wrong ones, around every border: tokens, bits of scores, and what is kept are as without. A scan refuses them."""
    settings = {"cache_format": "fp32", "index_format": "fp32", "cache_bytes": bench.recipe.cache} | bench.recipe.llm
    if not all(memory.takes_drafts for memory in bench.engine.layout.memories):
        with pytest.raises(ConfigError, match=r"draft=.lookup. is not valid: none or auto: .* cannot give tokens back"):
            LLM(str(bench.directory), draft="lookup", **settings)
        assert LLM(str(bench.directory), draft="auto", **settings).engine.scheduler.guesses.rule is None
        return
    driving = bench.driving
    engine = LLM(str(bench.directory), draft="auto", draft_tokens=5, **settings).engine
    recorder = driving.Recorder(engine)
    answers: dict[tuple[int, ...], list[int]] = {}
    driving.script(engine, lambda request: answers[request.prompt])
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    for border in bench.recipe.borders:
        prompt = bench.ids(max(border - 9, 1), 3)
        bench.reset()
        driving.wipe(engine)
        for _ in ("cold", "warm"):
            (known,) = driving.serve(bench.engine, [prompt], params)
            answers[tuple(prompt)] = list(known.output.outputs[0].token_ids)
            (group,) = driving.serve(engine, [prompt], params)
            engine.ledger.check()
            assert group.output.outputs[0].token_ids == answers[tuple(prompt)]
            assert group.output.usage.cached_tokens == known.output.usage.cached_tokens
            request = group.requests[0]
            found = [recorder.logits[request.id, p] for p in range(len(prompt) - 1, len(request.tokens) - 1)]
            bench.check_scores(known, found)
            prompt = [*prompt, *answers[tuple(prompt)], *bench.ids(3, 4)]
    counts = engine.scheduler.guesses.counts
    assert 0 < counts.accepted < counts.tokens
