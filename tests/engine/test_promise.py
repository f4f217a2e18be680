"""The promise: cold = warm = chunked = batched with others = preempted and resumed = forked = with drafts, bit for bit.

Whatever an engine computes for a request is compared with one cold run of the same tokens, alone and in one step: the final
hidden vector of every position that was computed at all, the scores of every token drawn, the tokens and the log-probs.
All memory is NaN before every run, so that nothing stale is ever read.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from lamina import LLM, SamplingParams
from lamina.engine.engine import Group
from lamina.ops.attend import ref as attend_ref
from lamina.schedule.request import Request

PROMPT, ANSWER = 300, 24
BUDGETS = [1, 2, 3, 5, 7, 64, 127, 128, 129, 200]
DEPTHS = [1, 3, 4, 5, 37, 127, 128, 129, 200, 255, 256, 257, 299, 300]
Setup: TypeAlias = tuple[str, str, str, str, str]
#: model, cache format, index format, dtype, tokens drafted ahead
SETUPS: list[Setup] = [
    ("flash", "fp8", "fp4", "fp32", "0"),
    ("pro", "bf16", "fp8", "fp32", "0"),
    ("narrow", "fp32", "fp32", "fp32", "0"),
    ("blocks", "fp8", "fp4", "bf16", "0"),
    ("narrow", "fp8", "fp8", "fp32", "5"),
]
DRAWN = SamplingParams(max_tokens=ANSWER, temperature=1.0, seed=11, ignore_eos=True, logprobs=3)
ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def pick(
    every: Sequence[int], some: Sequence[int], most: Sequence[int] = range(1001), few: Sequence[int] = ()
) -> "list[pytest.ParameterSet]":
    """Pairs of a setup and a number: most for the first setup, some for the fourth, few for the others, the rest marked long."""
    quick = dict(zip(SETUPS, (most, few, few, some, few), strict=True))
    return [
        pytest.param(
            setup,
            number,
            id=f"{'-'.join(setup)}-{number}",
            marks=[] if number in quick[setup] else [pytest.mark.long],
        )
        for setup in SETUPS
        for number in every
    ]


class Bench:
    """One engine with its recorder, and what it must always say about one prompt."""

    def __init__(self, driving: ModuleType, random_models: ModuleType, directory: Path, setup: Setup) -> None:
        _, cache, index, dtype, drafts = setup
        self.driving = driving
        common = {"dtype": dtype, "cache_format": cache, "index_format": index, "cache_bytes": "96MiB"}
        drafting = {"draft": "lookup", "draft_tokens": int(drafts)} if int(drafts) else {}
        self.engine = LLM(str(directory), **common, **drafting).engine
        # it computes the truth, without drafts, so that asking for it in the middle of a test forgets nothing
        self.witness = LLM(str(directory), **common).engine
        self.full_budget = self.engine.scheduler.max_step_tokens
        self.recorder, self.witness_recorder = driving.Recorder(self.engine), driving.Recorder(self.witness)
        self.ids: list[int] = random_models.token_ids(PROMPT, 5)
        self.random_ids: Callable[[int, int], list[int]] = random_models.token_ids
        self.known: dict[tuple[int, ...], dict[int, Tensor]] = {}
        self.answers: dict[tuple[tuple[int, ...], SamplingParams, int], list[int]] = {}
        if drafting:
            driving.script(self.engine, self.answer)
        self.reset()
        (self.group,) = self.serve([self.ids])
        self.tokens = self.ids + self.group.output.outputs[0].token_ids
        assert len(set(self.tokens[PROMPT:])) > ANSWER // 2, "an answer that repeats itself tests little"

    def reset(self, max_step_tokens: int | None = None) -> None:
        """Nothing is remembered; steps have `max_step_tokens`, or as many as fit."""
        self.driving.wipe(self.engine)
        self.recorder.forget()
        self.engine.scheduler.max_step_tokens = max_step_tokens or self.full_budget

    def serve(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams] = DRAWN) -> list[Group]:
        return self.driving.serve(self.engine, prompts, params)

    def answer(self, request: Request) -> list[int]:
        """What a request will draw, if nobody drafts."""
        key = (request.prompt, request.params, request.child)
        if key not in self.answers:
            (group,) = self.driving.serve(self.witness, [request.prompt], request.params)
            self.answers |= {(*key[:2], child): output.token_ids for child, output in enumerate(group.output.outputs)}
        return self.answers[key]

    def truth(self, tokens: list[int]) -> dict[int, Tensor]:
        """Hidden vector of every position of `tokens` and scores after it (under ~position), from one cold prefill, alone."""
        key = tuple(tokens)
        if key not in self.known:
            recorder, params = (
                self.witness_recorder,
                SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True),
            )
            self.driving.wipe(self.witness)
            recorder.forget()
            (group,) = self.driving.serve(self.witness, [tokens], params)
            assert group.output.usage.cached_tokens == 0
            request = group.requests[0].id
            found = {position: recorder.hidden[request, position] for position in range(len(tokens))}
            found |= {~position: recorder.prompt[request, position] for position in range(len(tokens) - 1)}
            found[~(len(tokens) - 1)] = recorder.logits[request, len(tokens) - 1]
            self.known[key] = found
        return self.known[key]

    def check(self, group: Group, computed: int | None = None) -> None:
        """Everything recorded for a finished group is the truth. computed: how many positions of its prompt were computed."""
        for request in group.requests:
            last = len(request.tokens) - 2  # rows past it stood for guesses that were wrong
            hidden, logits = (
                {position: row for (owner, position), row in found.items() if owner == request.id and position <= last}
                for found in (self.recorder.hidden, self.recorder.logits)
            )
            assert sorted(logits) == list(range(len(request.prompt) - 1, len(request.tokens) - 1))
            if computed is not None:
                assert sum(position < len(request.prompt) for position in hidden) == computed
            truth = self.truth(list(request.tokens[:-1]))
            wrong = [position for position, row in hidden.items() if not self.driving.same_bits(row, truth[position])]
            wrong += [~position for position, row in logits.items() if not self.driving.same_bits(row, truth[~position])]
            assert not wrong, f"{len(wrong)} of {len(hidden) + len(logits)} differ, first {wrong[:5]} (~ = scores)"

    def check_all(self, groups: list[Group]) -> None:
        """Checks several groups of one run."""
        for group in groups:
            self.check(group)

    def check_same(self, group: Group) -> None:
        """A group that served the bench's own prompt gave the very same answer as the first time, log-probs included."""
        first, again = self.group.output.outputs[0], group.output.outputs[0]
        assert again.token_ids == first.token_ids
        assert again.logprobs == first.logprobs
        assert again.cumulative_logprob == first.cumulative_logprob
        assert again.finish_reason == "length"


@pytest.fixture(scope="module")
def bench_of(driving: ModuleType, random_models: ModuleType, checkpoint_of: Callable[[str], Path]) -> Callable[[Setup], Bench]:
    made: dict[Setup, Bench] = {}

    def find(setup: Setup) -> Bench:
        if setup not in made:
            made[setup] = Bench(driving, random_models, checkpoint_of(setup[0]), setup)
        return made[setup]

    return find


@pytest.fixture(
    params=[pytest.param(setup, marks=[pytest.mark.long] if setup in SETUPS[1:3] else []) for setup in SETUPS], ids="-".join
)
def bench(request: pytest.FixtureRequest, bench_of: Callable[[Setup], Bench]) -> Bench:
    return bench_of(request.param)


@pytest.fixture
def first(bench_of: Callable[[Setup], Bench]) -> Bench:
    """For tests that look at scheduling more than at formats."""
    return bench_of(SETUPS[0])


def test_decoding_gives_the_bits_of_prefilling(bench: Bench) -> None:
    """The first, cold run: 300 tokens in one step and 23 one by one, against 323 in one step."""
    bench.reset()
    (group,) = bench.serve([bench.ids])
    bench.check(group, computed=PROMPT)
    bench.check_same(group)


@pytest.mark.parametrize(("setup", "budget"), pick(BUDGETS, (5,), (1, 7, 128, 129), (129,)))
def test_chunked(bench_of: Callable[[Setup], Bench], setup: Setup, budget: int) -> None:
    bench = bench_of(setup)
    bench.reset(budget)
    (group,) = bench.serve([bench.ids])
    bench.check(group, computed=PROMPT)
    bench.check_same(group)


@pytest.mark.parametrize(("setup", "depth"), pick(DEPTHS, (37, 257), (1, 4, 37, 128, 129, 255, 256, 257, 300), (257,)))
def test_warm(bench_of: Callable[[Setup], Bench], setup: Setup, depth: int) -> None:
    """A prompt that begins with all of an earlier one: what was cached is not computed, and the rest has the same bits."""
    bench = bench_of(setup)
    bench.reset()
    bench.serve([bench.ids[:depth]], ONE)
    bench.recorder.forget()
    (group,) = bench.serve([bench.ids])
    assert group.output.usage.cached_tokens == depth
    bench.check(group, computed=PROMPT - depth)
    bench.check_same(group)


def test_warm_again_and_again(bench: Bench) -> None:
    bench.reset()
    for time in range(3):
        bench.recorder.forget()
        (group,) = bench.serve([bench.ids])
        assert group.output.usage.cached_tokens == (PROMPT if time else 0)
        bench.check(group, computed=0 if time else PROMPT)
        bench.check_same(group)


@pytest.mark.parametrize(("setup", "kept"), pick([1, 7, ANSWER - 1, ANSWER], (7,)))
def test_warm_after_an_answer(bench_of: Callable[[Setup], Bench], setup: Setup, kept: int) -> None:
    """The next turn of a chat: the prompt, some or all of the answer, then more."""
    bench = bench_of(setup)
    bench.reset()
    bench.serve([bench.ids])
    bench.recorder.forget()
    turn = bench.tokens[: PROMPT + kept] + bench.random_ids(20, 77)
    (group,) = bench.serve([turn])
    cached = PROMPT + ANSWER - 1 if kept >= ANSWER - 1 else PROMPT  # the last token drawn was never computed
    assert group.output.usage.cached_tokens == cached
    bench.check(group, computed=len(turn) - cached)


def test_warm_where_two_prompts_part(first: Bench) -> None:
    """The second prompt leaves the first's path at 280 and marks the junction; the third starts there."""
    first.reset()
    prompts = [first.ids[:280] + first.random_ids(30, seed) for seed in (21, 22, 23)]
    groups = [group for prompt in prompts for group in first.serve([prompt])]
    first.engine.ledger.check()
    assert [group.output.usage.cached_tokens for group in groups] == [0, 0, 280]
    first.check_all(groups)


def others(bench: Bench, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of other lengths, two of which begin as the bench's own, with other settings."""
    lengths = [41, 3, 128, 255, 1, 400, 64, 300, 17][:count]
    prompts = [bench.random_ids(length, 50 + number) for number, length in enumerate(lengths)]
    if count > 3:
        prompts[1], prompts[3] = bench.ids[:3], bench.ids[:255]
    params = [
        SamplingParams(
            max_tokens=5 + 7 * number % 31, temperature=number % 3 / 2, seed=number, ignore_eos=True, top_k=5 * (number % 2)
        )
        for number in range(count)
    ]
    return prompts, params


@pytest.mark.parametrize("budget", [pytest.param(None, marks=pytest.mark.long), 50])
@pytest.mark.parametrize(("setup", "count"), pick((1, 4, 9), (4,)))
def test_batched_with_others(bench_of: Callable[[Setup], Bench], setup: Setup, count: int, budget: int | None) -> None:
    """The others come before and after; all of them are checked, not the one alone."""
    bench = bench_of(setup)
    bench.reset(budget)
    prompts, params = others(bench, count)
    place = count // 2
    prompts.insert(place, bench.ids)
    params.insert(place, DRAWN)
    groups = bench.serve(prompts, params)
    bench.check_same(groups[place])
    bench.check_all(groups)


@pytest.mark.parametrize(("setup", "budget"), pick([37, 128, 1000], (37,)))
def test_preempted_at_every_37th_token(bench_of: Callable[[Setup], Bench], setup: Setup, budget: int) -> None:
    bench = bench_of(setup)
    bench.reset(budget)
    group = bench.engine.add(bench.ids, DRAWN)
    bench.driving.run_all(bench.engine, [group], bench.driving.preempt_every(37))
    assert group.requests[0].num_preemptions == {37: 8, 128: 3, 1000: 1}[budget]
    bench.check(group, computed=PROMPT)  # a resumed request computes nothing twice
    bench.check_same(group)


def test_preempted_and_all_its_memory_lost(bench: Bench) -> None:
    """The checkpoints are evicted while it waits: prompt and answer so far are computed again, the answer goes on unchanged."""
    bench.reset(64)
    group = bench.engine.add(bench.ids, DRAWN)
    bench.driving.run_all(bench.engine, [group], bench.driving.preempt_every(37, bench.driving.lose_everything))
    assert group.requests[0].num_preemptions >= 5
    bench.check(group)
    bench.check_same(group)


def test_preempted_among_others(first: Bench) -> None:
    first.reset(50)
    prompts, params = others(first, 4)
    groups = [first.engine.add(prompt, own) for prompt, own in zip([first.ids, *prompts], [DRAWN, *params], strict=True)]
    first.driving.run_all(first.engine, groups, first.driving.preempt_every(37))
    assert sum(request.num_preemptions for group in groups for request in group.requests) > 10
    first.check_same(groups[0])
    first.check_all(groups)


@pytest.mark.parametrize(("setup", "budget"), pick([1000, 50], (50,)))
def test_forked(bench_of: Callable[[Setup], Bench], setup: Setup, budget: int) -> None:
    """n = 3: the first child is the request with n = 1; every child's every token has the bits of a prefill of its own answer."""
    bench = bench_of(setup)
    bench.reset(budget)
    (group,) = bench.serve(
        [bench.ids], SamplingParams(n=3, max_tokens=ANSWER, temperature=1.0, seed=11, ignore_eos=True, logprobs=3)
    )
    answers = [output.token_ids for output in group.output.outputs]
    assert len({tuple(answer) for answer in answers}) == 3
    bench.check_same(group)
    hidden = bench.recorder.hidden
    prompt_rows = [sum(owner == request.id and position < PROMPT for owner, position in hidden) for request in group.requests]
    assert prompt_rows == [PROMPT, 0, 0]
    bench.check(group)


def test_gathered_entries(first: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts gather the chosen entries where short ones mask the others; here from the fifth tile on."""
    monkeypatch.setattr(attend_ref, "DENSE_ENTRIES", 64)
    known, first.known = first.known, {}
    try:
        for budget in (None, 7, 129):
            first.reset(budget)
            (group,) = first.serve([first.ids + first.ids[:100]])
            first.check(group, computed=PROMPT + 100)
        first.reset(50)
        prompts, params = others(first, 4)
        group, *_ = first.serve([first.ids + first.ids[:100], *prompts], [DRAWN, *params])
        first.check(group)
    finally:
        first.known = known


def test_the_answer_is_greedy_at_temperature_zero(first: Bench) -> None:
    first.reset(7)
    (group,) = first.serve([first.ids], SamplingParams(max_tokens=10, temperature=0, ignore_eos=True))
    truth = first.truth(list(group.requests[0].tokens[:-1]))
    expected = [int(truth[~position].argmax()) for position in range(PROMPT - 1, PROMPT + 9)]
    assert group.output.outputs[0].token_ids == expected


def test_logprobs_are_those_of_the_scores(first: Bench) -> None:
    """The figures a user sees, against a brute-force log-softmax in fp64."""
    output = first.group.output.outputs[0]
    assert output.logprobs is not None
    truth = first.truth(first.tokens[:-1])
    for index, (token, found) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        expected = torch.log_softmax(truth[~(PROMPT - 1 + index)].double(), -1)
        order = expected.argsort(descending=True).tolist()
        assert next(iter(found)) == token and set(found) == {token, *order[:3]}
        for other, item in found.items():
            assert abs(item.logprob - float(expected[other])) < 1e-5
            assert order[item.rank - 1] == other


@pytest.mark.long
def test_contexts_beyond_the_masked_ones(first: Bench) -> None:
    """9,000 tokens: the real border between masking and gathering (2,048 entries), cut in two ways, warm, and decoded."""
    prompt = first.random_ids(9000, 1)
    for budget in (700, 129):
        first.reset(budget)
        (group,) = first.serve([prompt])
        first.check(group, computed=9000)
    first.recorder.forget()
    (again,) = first.serve([prompt])
    assert again.output.usage.cached_tokens == 9000
    first.check(again, computed=0)
