"""Limits, cancellation, contention, threads and failing steps: others are not disturbed, and no page is lost."""

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from lamina import LLM, SamplingParams
from lamina.base.errors import CapacityError, ConfigError
from lamina.engine.engine import Engine, Group
from lamina.memory.ledger import PageCounts
from lamina.schedule.request import RequestState

PARAMS = SamplingParams(max_tokens=16, temperature=1, seed=5, ignore_eos=True, logprobs=1)
Ids = Callable[[int, int], list[int]]
Answer = tuple[list[int], object, str | None]
Make = Callable[..., LLM]
Expect = Callable[..., Answer]


@pytest.fixture
def ids(random_models: ModuleType) -> Ids:
    """Random prompts by length and seed."""
    return random_models.token_ids


@pytest.fixture
def make(checkpoint_of: Callable[[str], Path]) -> Make:
    def build(**settings: object) -> LLM:
        return LLM(str(checkpoint_of("short")), **({"cache_bytes": "16MiB"} | settings))  # type: ignore[arg-type]

    return build


@pytest.fixture(scope="module")
def expect(checkpoint_of: Callable[[str], Path], driving: ModuleType) -> Expect:
    """The answer of an engine that does nothing else."""
    llm = LLM(str(checkpoint_of("short")), cache_bytes="32MiB")

    def find(prompt: list[int], params: SamplingParams = PARAMS) -> Answer:
        driving.wipe(llm.engine)
        (group,) = driving.serve(llm.engine, [prompt], params)
        return answer(group)

    return find


def answer(group: Group, index: int = 0) -> Answer:
    output = group.output.outputs[index]
    return output.token_ids, output.logprobs, output.finish_reason


def pages_of(llm: LLM, tokens: int, more: int = 0) -> int:
    """Bytes of a pool that holds one request of so many tokens and `more` pages."""
    layout = llm.engine.layout
    return (layout.pages_for(tokens) + more) * layout.page_bytes


def assert_nothing_held(engine: Engine) -> None:
    engine.ledger.check()
    counts: PageCounts = engine.ledger.pages()
    assert (counts.blocks, counts.slots) == (0, 0) and not engine.has_work and not engine._requests
    engine.ledger.drop_index()
    assert engine.ledger.free_pages == engine.num_pages


# Limits --------------------------------------------------------------------------------------------------------------------


def test_prompts_close_to_the_greatest_length(make: Make, ids: Ids) -> None:
    llm = make(max_model_len=140)
    for room in range(9):
        (output,) = llm.generate(ids(140 - room, 1), SamplingParams(max_tokens=50, seed=1, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == room and output.outputs[0].finish_reason == "length" and output.finished
    deltas = list(llm.stream(ids(140, 1), SamplingParams(max_tokens=5)))
    assert [(delta.token_ids, delta.finish_reason) for delta in deltas] == [((), "length")]
    (output,) = llm.generate(ids(139, 2), SamplingParams(max_tokens=5, n=3, seed=1, ignore_eos=True))
    assert [len(found.token_ids) for found in output.outputs] == [1, 1, 1]
    with pytest.raises(CapacityError, match=r"141.*max_model_len=140"):
        llm.generate(ids(141, 1))
    assert_nothing_held(llm.engine)


def test_the_pool_can_be_the_limit_and_is_used_to_the_last_page(make: Make, ids: Ids, expect: Expect) -> None:
    llm = make(cache_bytes=pages_of(make(), 512))
    longest = llm.engine.max_model_len
    assert longest == 513  # the last token needs no memory
    params = SamplingParams(max_tokens=1000, seed=3, ignore_eos=True, logprobs=1)
    (output,) = llm.generate(ids(480, 1), params)
    found = output.outputs[0]
    assert len(found.token_ids) == longest - 480 and found.finish_reason == "length"
    expected = expect(ids(480, 1), SamplingParams(max_tokens=longest - 480, seed=3, ignore_eos=True, logprobs=1))
    assert (found.token_ids, found.logprobs, found.finish_reason) == expected
    (again,) = llm.generate(ids(480, 1), params)
    assert again.outputs[0].token_ids == found.token_ids
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("size", [0, -1, "1B", 1000])
def test_a_pool_that_holds_nothing_is_refused(make: Make, size: int | str) -> None:
    with pytest.raises((CapacityError, ConfigError)) as caught:
        make(cache_bytes=size)
    assert "\n" not in str(caught.value) and "cache_bytes" in str(caught.value)


def test_lengths_that_cannot_be_are_refused_at_the_start(make: Make) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        make(max_model_len=0)
    with pytest.raises(ConfigError, match="max_model_len"):
        make(max_model_len=10**6)
    with pytest.raises(CapacityError, match="max_model_len=4000"):
        make(max_model_len=4000, cache_bytes=pages_of(make(), 300))


def test_what_can_never_fit_is_refused_at_once_while_others_go_on(make: Make, ids: Ids, expect: Expect) -> None:
    llm = make(cache_bytes=pages_of(make(), 300))
    stream = llm.stream(ids(50, 1), PARAMS)
    deltas = [next(stream), next(stream)]
    for bad in (ids(600, 2), [ids(5, 3), ids(600, 2)]):
        with pytest.raises(CapacityError) as caught:
            llm.generate(bad, PARAMS)
        assert "600" in str(caught.value) and str(llm.engine.max_model_len) in str(caught.value)
    deltas += stream
    assert [token for delta in deltas for token in delta.token_ids] == expect(ids(50, 1))[0]
    assert_nothing_held(llm.engine)


def test_bad_prompts_are_refused_with_their_place(make: Make) -> None:
    llm = make()
    for bad, text in (
        ([[5], []], r"prompts\[1\]"),
        ([[5, 257]], "257"),
        ([[5, -1]], "-1"),
        ([[5, True]], "True"),
        ([[2.0]], "2.0"),
        (7, "prompts"),
    ):
        with pytest.raises(ConfigError, match=text):
            llm.generate(bad)
    assert llm.generate([]) == []
    assert_nothing_held(llm.engine)


# Cancellation --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "moment"),
    [(3, moment) for moment in ("waiting", "prefilling", "decoding", "preempted", "finished")]
    + [(1, "decoding")]
    + [pytest.param(1, moment, marks=pytest.mark.long) for moment in ("waiting", "prefilling", "preempted", "finished")],
)
def test_cancelling(make: Make, driving: ModuleType, ids: Ids, expect: Expect, moment: str, n: int) -> None:
    """The cancelled one gives its pages back at once; the one beside it is not disturbed; the same prompt then works."""
    llm = make(max_step_tokens=64, max_requests=1 if moment == "waiting" else 8)
    engine = llm.engine
    beside = engine.add(ids(90, 1), PARAMS)
    while not beside.deltas:
        engine.step()
    before = engine.ledger.pages()
    group = engine.add(ids(300, 2), SamplingParams(n=n, max_tokens=16, temperature=1, seed=5, ignore_eos=True, logprobs=1))
    target = group.requests[0]
    steps = {"waiting": 1, "prefilling": 2, "decoding": 9, "preempted": 3, "finished": 60}[moment]
    for _ in range(steps):
        engine.step()
    if moment == "preempted":
        engine.scheduler.preempt(target)
    states = {"waiting": RequestState.WAITING, "preempted": RequestState.WAITING, "finished": RequestState.FINISHED}
    assert target.state is states.get(moment, RequestState.RUNNING)
    assert (target.num_output > 0) == (moment in ("decoding", "finished"))
    engine.cancel(group)
    engine.cancel(group)  # once more changes nothing
    engine.ledger.check()
    assert all(output.finish_reason == ("length" if moment == "finished" else "abort") for output in group.output.outputs)
    assert group.output.finished
    after = engine.ledger.pages()
    if moment != "finished":  # the one beside has ended by then
        assert after.slots == before.slots and after.blocks <= before.blocks + 1
    driving.run_all(engine, [beside])
    assert answer(beside) == expect(ids(90, 1))
    assert_nothing_held(engine)
    (again,) = driving.serve(engine, [ids(300, 2)], PARAMS)
    assert answer(again) == expect(ids(300, 2))
    assert_nothing_held(engine)


def test_a_cancelled_parent_leaves_no_child_behind(make: Make, driving: ModuleType, ids: Ids, expect: Expect) -> None:
    llm = make(max_step_tokens=40)
    group = llm.engine.add(ids(100, 1), SamplingParams(n=4, max_tokens=5))
    llm.engine.step()
    llm.engine.cancel(group)
    assert_nothing_held(llm.engine)
    assert answer(driving.serve(llm.engine, [ids(100, 1)], PARAMS)[0]) == expect(ids(100, 1))


def test_closing_a_stream_cancels_what_has_not_finished(make: Make, ids: Ids) -> None:
    llm = make(max_step_tokens=50)
    prompts = [ids(120, seed) for seed in range(4)]
    stream = llm.stream(prompts, [SamplingParams(max_tokens=length, ignore_eos=True) for length in (1, 50, 50, 50)])
    seen = [next(stream) for _ in range(3)]
    assert seen and llm.engine.has_work
    stream.close()
    assert_nothing_held(llm.engine)
    with pytest.raises(ConfigError):  # nothing was queued for the good prompt either
        llm.stream([prompts[0], [999]])
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("closes", [False, True])
def test_a_stream_that_is_never_read_is_cancelled_when_it_goes(make: Make, ids: Ids, closes: bool) -> None:
    llm = make()
    stream = llm.stream(ids(20, 1), PARAMS)
    assert llm.engine.has_work
    if closes:
        stream.close()
        assert list(stream) == []
    else:
        del stream
    assert_nothing_held(llm.engine)


# Contention ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "more_pages"),
    [(33, 0), (1024, 1), *(pytest.param(*more, marks=pytest.mark.long) for more in ((33, 1), (33, 3), (1024, 0), (1024, 3)))],
)
def test_a_tiny_pool_serves_everyone_exactly(
    make: Make, driving: ModuleType, ids: Ids, expect: Expect, more_pages: int, budget: int
) -> None:
    """Room for one or two at a time, whose answers grow over the end of a block: they take memory from each other."""
    llm = make(cache_bytes=pages_of(make(), 290, more_pages + make().engine.layout.slot_pages), max_step_tokens=budget)
    lengths = (250, 60, 254, 1, 249, 128, 200)
    params = [
        SamplingParams(max_tokens=10 + number, temperature=1, seed=number, ignore_eos=True, logprobs=1) for number in range(7)
    ]
    groups = [llm.engine.add(ids(length, 40 + length), own) for length, own in zip(lengths, params, strict=True)]
    checks = 0

    def check(engine: Engine) -> None:
        nonlocal checks
        checks += 1
        engine.ledger.check()

    driving.run_all(llm.engine, groups, check)
    for group, length, own in zip(groups, lengths, params, strict=True):
        assert answer(group) == expect(ids(length, 40 + length), own)
    assert checks > 20
    assert_nothing_held(llm.engine)


@pytest.mark.long
def test_answers_that_outgrow_the_pool_take_turns(make: Make, driving: ModuleType, ids: Ids, expect: Expect) -> None:
    """Each grows over two blocks; the last to come gives way, and comes back."""
    size = make().engine.layout
    llm = make(cache_bytes=(2 * size.slot_pages + 4) * size.page_bytes)
    params = [SamplingParams(max_tokens=267, temperature=1, seed=number, ignore_eos=True, logprobs=1) for number in range(2)]
    prompts = [ids(247 + number, 60 + number) for number in range(2)]
    groups = [llm.engine.add(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    driving.run_all(llm.engine, groups)
    assert sum(group.requests[0].num_preemptions for group in groups) >= 1
    for group, prompt, own in zip(groups, prompts, params, strict=True):
        assert answer(group) == expect(prompt, own)
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_storm_of_preemptions_evictions_and_cancellations(
    make: Make, driving: ModuleType, ids: Ids, expect: Expect, seed: int
) -> None:
    chance = random.Random(seed)
    size = make().engine.layout
    llm = make(cache_bytes=(3 * (size.slot_pages + 2) + 2) * size.page_bytes, max_step_tokens=chance.choice((33, 64, 300)))
    prompts = [ids(chance.choice((3, 120, 254, 256, 300)), number) for number in range(8)]
    prompts[5], prompts[6] = prompts[1], [*prompts[1][:-1], 9]
    params = [SamplingParams(max_tokens=25, temperature=1, seed=number, ignore_eos=True, logprobs=1) for number in range(8)]
    groups = [llm.engine.add(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    preempted = 0

    def disturb(engine: Engine) -> None:
        nonlocal preempted
        if engine.scheduler.running and chance.random() < 0.2:
            engine.scheduler.preempt(chance.choice(engine.scheduler.running))
            preempted += 1
        if chance.random() < 0.04:
            engine.ledger.drop_index()
        if chance.random() < 0.01:
            engine.cancel(chance.choice(groups))
        engine.ledger.check()

    driving.run_all(llm.engine, groups, disturb)
    assert preempted > 8
    served = 0
    for group, prompt, own in zip(groups, prompts, params, strict=True):
        if group.output.outputs[0].finish_reason != "abort":
            assert answer(group) == expect(prompt, own)
            served += 1
    assert served >= 5
    assert_nothing_held(llm.engine)


def test_children_run_one_after_another_where_there_is_no_room_for_all(make: Make, driving: ModuleType, ids: Ids) -> None:
    """n never makes a request too big."""
    wide, tight = make(), make(cache_bytes=pages_of(make(), 290))
    params = SamplingParams(n=5, max_tokens=20, temperature=1, seed=1, ignore_eos=True)
    expected, found = (llm.generate(ids(250, 1), params)[0] for llm in (wide, tight))
    assert [output.token_ids for output in found.outputs] == [output.token_ids for output in expected.outputs]
    assert_nothing_held(tight.engine)


def test_max_requests_and_max_step_tokens_are_obeyed(make: Make, driving: ModuleType, ids: Ids, expect: Expect) -> None:
    llm = make(max_requests=2, max_step_tokens=29)
    sizes, running = [], []
    execute = llm.engine.worker.runner.execute
    llm.engine.worker.runner.execute = lambda step: (sizes.append(step.num_tokens), execute(step))[1]
    groups = [llm.engine.add(ids(10 * number + 1, number), PARAMS) for number in range(5)]
    driving.run_all(llm.engine, groups, lambda engine: running.append(len(engine.scheduler.running)))
    assert max(sizes) == 29 and max(running) == 2
    assert [answer(group) for group in groups] == [expect(ids(10 * number + 1, number)) for number in range(5)]


# Several users -------------------------------------------------------------------------------------------------------------


def test_two_threads(make: Make, ids: Ids, expect: Expect) -> None:
    llm = make(max_step_tokens=40)
    found: dict[int, list[list[int]]] = {}
    errors: list[BaseException] = []

    def use(number: int) -> None:
        try:
            found[number] = [llm.generate(ids(30 * number + turn, turn), PARAMS)[0].outputs[0].token_ids for turn in range(1, 4)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and not any(thread.is_alive() for thread in threads)
    for number in range(3):
        assert found[number] == [expect(ids(30 * number + turn, turn))[0] for turn in range(1, 4)]
    assert_nothing_held(llm.engine)


def test_streams_read_in_turn(make: Make, ids: Ids, expect: Expect) -> None:
    llm = make(max_step_tokens=64)
    streams = {number: llm.stream(ids(70 * number + 5, number), PARAMS) for number in range(4)}
    tokens: dict[int, list[int]] = {number: [] for number in streams}
    waiting = list(streams)
    while waiting:
        number = waiting.pop(0)
        delta = next(streams[number], None)
        if delta is not None:
            tokens[number] += delta.token_ids
            waiting.append(number)
    assert all(tokens[number] == expect(ids(70 * number + 5, number))[0] for number in streams)
    assert_nothing_held(llm.engine)


# Faults --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 3, 6, 10])
def test_a_step_that_fails(make: Make, driving: ModuleType, ids: Ids, expect: Expect, after: int) -> None:
    """Its requests end with "error", what it wrote cannot be hit, no page is lost, and the next request is exact."""
    llm = make(max_step_tokens=100)
    with driving.Recorder(llm.engine) as recorder:
        groups = [llm.engine.add(ids(150 + number, number), PARAMS) for number in range(3)]
        groups.append(llm.engine.add(ids(40, 3), SamplingParams(n=2, max_tokens=5, seed=7, ignore_eos=True)))
        for _ in range(after):
            llm.engine.step()
        recorder.spy.fail_next = RuntimeError("injected")
        with pytest.raises(RuntimeError, match="injected"):
            while llm.engine.step():
                pass
        reasons = [output.finish_reason for group in groups for output in group.output.outputs]
        assert "error" in reasons and set(reasons) <= {"error", "length", None}
        llm.engine.ledger.check()
        driving.run_all(llm.engine, groups)  # those that were still waiting go on
        assert all(group.is_finished for group in groups)
        for number, group in enumerate(groups[:3]):
            if group.output.outputs[0].finish_reason == "length":
                assert answer(group) == expect(ids(150 + number, number))
        llm.engine.ledger.check()
        assert answer(driving.serve(llm.engine, [ids(150, 0)], PARAMS)[0]) == expect(ids(150, 0))
    assert_nothing_held(llm.engine)


def test_generate_raises_the_fault_and_the_engine_lives(make: Make, driving: ModuleType, ids: Ids, expect: Expect) -> None:
    llm = make()
    with driving.Recorder(llm.engine) as recorder:
        recorder.spy.fail_next = ValueError("injected")
        with pytest.raises(ValueError, match="injected"):
            llm.generate([ids(20, 1), ids(30, 2)], PARAMS)
        assert_nothing_held(llm.engine)
        stream = llm.stream(ids(20, 1), PARAMS)
        assert next(stream).token_ids
        recorder.spy.fail_next = ValueError("injected")
        with pytest.raises(ValueError, match="injected"):
            list(stream)
        assert_nothing_held(llm.engine)
        (output,) = llm.generate(ids(20, 1), PARAMS)
        assert output.outputs[0].token_ids == expect(ids(20, 1))[0]


def test_copies_that_were_never_made_cannot_be_hit(
    make: Make, driving: ModuleType, ids: Ids, expect: Expect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request ends; the step that should freeze its slot fails before its copies: the next turn must not start there."""
    llm = make()
    short = SamplingParams(max_tokens=3, temperature=1, seed=5, ignore_eos=True)
    first, other = llm.engine.add(ids(150, 1), short), llm.engine.add(ids(20, 2), PARAMS)
    while not first.is_finished:
        llm.engine.step()

    def fail(*_: object) -> None:
        raise RuntimeError("no copy")

    monkeypatch.setattr(llm.engine.worker.arena, "run", fail)
    with pytest.raises(RuntimeError, match="no copy"):
        llm.engine.step()
    monkeypatch.undo()
    assert other.output.outputs[0].finish_reason == "error"
    turn = ids(150, 1) + first.output.outputs[0].token_ids + ids(5, 3)
    assert answer(driving.serve(llm.engine, [turn], PARAMS)[0]) == expect(turn)
    assert_nothing_held(llm.engine)


def test_a_fault_after_the_model_ran_leaves_nothing_to_hit(
    make: Make, driving: ModuleType, ids: Ids, expect: Expect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are written and the step then fails in sampling: the same prompt must be computed again."""
    llm = make()
    runner = llm.engine.worker.runner

    def fail(*_: object) -> object:
        raise RuntimeError("no draw")

    monkeypatch.setattr(runner, "_sample", fail)
    with pytest.raises(RuntimeError, match="no draw"):
        llm.generate(ids(300, 1), PARAMS)
    monkeypatch.undo()
    (output,) = llm.generate(ids(300, 1), PARAMS)
    assert output.usage.cached_tokens == 0 and output.outputs[0].token_ids == expect(ids(300, 1))[0]
    assert_nothing_held(llm.engine)


# Interrupts and impossible requests ----------------------------------------------------------------------------------------


def test_an_interrupt_waits_for_the_end_of_its_step(make: Make, ids: Ids, expect: Expect) -> None:
    """Ctrl-C at random moments: KeyboardInterrupt comes out, no later answer is wrong, and nobody else's request is lost."""
    llm = make()
    prompts = [ids(length, length) for length in (5, 130, 300)]
    truth = [expect(prompt) for prompt in prompts]
    chance = random.Random(3)
    old = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests were started in the background
    caught = 0
    try:
        for turn in range(20):
            other = llm.engine.add(prompts[turn % 3], PARAMS)
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, 0.05))
            try:
                llm.generate([prompts[(turn + 1) % 3]], PARAMS)
            except KeyboardInterrupt:
                caught += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            while not other.is_finished:
                llm.engine.advance(other)
            assert answer(other) == truth[turn % 3]
            llm.engine.ledger.check()
    finally:
        signal.signal(signal.SIGALRM, old)
        signal.signal(signal.SIGINT, before)
    assert caught
    assert_nothing_held(llm.engine)


def test_scores_that_are_not_finite_end_one_request_alone(
    make: Make, ids: Ids, expect: Expect, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make()
    model = llm.engine.worker.model
    exact = model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        scores = exact(hidden)
        scores[0] = torch.nan
        return scores

    bad, good = llm.engine.add(ids(9, 1), PARAMS), llm.engine.add(ids(7, 2), PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", poisoned)
        llm.engine.step()
    while llm.engine.has_work:
        llm.engine.step()
    assert bad.output.outputs[0].finish_reason == "error" and answer(good) == expect(ids(7, 2))
    assert_nothing_held(llm.engine)


def test_what_nobody_could_draw_is_refused(make: Make) -> None:
    llm = make()
    everything = list(range(llm.engine.vocab_size))
    with pytest.raises(ConfigError, match="min_tokens"):
        llm.generate([[5]], SamplingParams(min_tokens=3, stop_token_ids=everything))
    with pytest.raises(ConfigError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=1e-320)
    (output,) = llm.generate([[5]], SamplingParams(stop_token_ids=everything))
    assert output.outputs[0].finish_reason == "stop" and len(output.outputs[0].token_ids) == 1


def test_log_probs_of_a_prompt_of_the_greatest_length(make: Make, ids: Ids) -> None:
    llm = make(max_model_len=50)
    (output,) = llm.generate([ids(50, 4)], SamplingParams(prompt_logprobs=1))
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 50
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "length")


def test_every_spelling_of_a_prompt(make: Make) -> None:
    llm = make()
    params = SamplingParams(max_tokens=3, temperature=0)
    same = [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), {"prompt_token_ids": [5, 6, 7]}, [[5, 6, 7]], [np.array([5, 6, 7])]]
    answers = [llm.generate(prompt, sampling_params=params)[0].outputs[0].token_ids for prompt in same]
    assert all(found == answers[0] for found in answers)
    for prompt in (b"abc", [True], [5.0], [[None]], {"text": 1}, None, 5, [[np.float32(1.7)]], [[]]):
        with pytest.raises(ConfigError, match="prompts"):
            llm.generate(prompt, params)  # type: ignore[arg-type]
