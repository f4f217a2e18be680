"""What users of an engine meet: prompts of every kind of length, reuse, settings, limits, cancellation and faults."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Protocol

import pytest
import torch
from torch import Tensor

from lamina import LLM, SamplingParams
from lamina.base.errors import ConfigError
from lamina.engine.engine import Engine
from lamina.engine.outputs import CompletionOutput, RequestOutput
from lamina.ops.sample.draws import uniform

EOS = 1
Ids = Callable[[int, int], list[int]]
FindCheckpoint = Callable[[str], Path]


class Recorder(Protocol):
    """See driving.Recorder."""

    logits: dict[tuple[int, int], Tensor]
    prompt: dict[tuple[int, int], Tensor]

    def forget(self) -> None: ...


GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(max_tokens=20, temperature=1, seed=5, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def shared(checkpoint_of: FindCheckpoint) -> LLM:
    return LLM(str(checkpoint_of("short")), cache_bytes="64MiB")


@pytest.fixture
def llm(shared: LLM, driving: ModuleType) -> LLM:
    """An engine whose memory is NaN and whose index is empty."""
    driving.wipe(shared.engine)
    return shared


@pytest.fixture
def recorder(llm: LLM, driving: ModuleType) -> Iterator[Recorder]:
    with driving.Recorder(llm.engine) as found:
        yield found


@pytest.fixture
def ids(random_models: ModuleType) -> Ids:
    """Random prompts by length and seed."""
    return random_models.token_ids


def make(checkpoint_of: FindCheckpoint, **settings: object) -> LLM:
    return LLM(str(checkpoint_of("short")), **settings)  # type: ignore[arg-type]


def answer(output: RequestOutput, index: int = 0) -> tuple[object, ...]:
    """Everything about an answer that must not depend on circumstances; log-probs compare by their bits."""
    found = output.outputs[index]
    return found.token_ids, found.logprobs, found.cumulative_logprob, found.text, found.finish_reason, found.stop_reason


def alone(llm: LLM, driving: ModuleType, prompt: list[int] | str, params: SamplingParams) -> tuple[object, ...]:
    """The answer of a wiped engine that does nothing else."""
    driving.wipe(llm.engine)
    return answer(llm.generate([prompt], params)[0])


def assert_nothing_held(engine: Engine) -> None:
    """Only the prefix index holds pages, and when it lets go all of them are free."""
    engine.ledger.check()
    counts = engine.ledger.pages()
    assert (counts.blocks, counts.slots) == (0, 0) and not engine.ledger.leases and not engine.has_work
    assert not engine.groups and not engine._requests
    engine.ledger.drop_index()
    assert engine.ledger.free_pages == engine.num_pages


# Lengths -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_short_prompt_after_a_long_unrelated_one(llm: LLM, driving: ModuleType, ids: Ids, length: int) -> None:
    expected = alone(llm, driving, ids(length, 1), GREEDY)
    driving.wipe(llm.engine)
    for seed in range(2, 5):
        llm.generate(ids(300, seed), GREEDY)
        llm.engine.ledger.drop_index()  # its pages come next
        assert answer(llm.generate(ids(length, 1), GREEDY)[0]) == expected
    together = llm.generate([ids(300, 9), ids(length, 1)], GREEDY)
    assert answer(together[1]) == expected


@pytest.mark.parametrize("length", [border + near for border in (4, 8, 128, 256) for near in (-1, 0, 1)])
def test_prompts_that_end_at_borders(llm: LLM, driving: ModuleType, ids: Ids, length: int) -> None:
    """Cold, sent again, and grown by their own answer: one answer, and the scores of a prefill."""
    prompt = ids(length, 3)
    first, again = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert answer(first) == answer(again)
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, length)
    tokens = first.outputs[0].token_ids
    for known in (1, 5):
        (rest,) = llm.generate(prompt + tokens[:known], GREEDY)
        assert rest.outputs[0].token_ids[: 12 - known] == tokens[known:]
        assert rest.outputs[0].logprobs[: 12 - known] == first.outputs[0].logprobs[known:]
    driving.wipe(llm.engine)
    (replay,) = llm.generate(prompt + tokens, SamplingParams(max_tokens=1, prompt_logprobs=2))
    for mine, other in zip(first.outputs[0].logprobs, replay.prompt_logprobs[length:], strict=True):
        assert mine == other


def test_every_length_up_to_a_window_continues_as_it_was_prefilled(llm: LLM, ids: Ids) -> None:
    """A greedy answer from one token on: every prefix of it, sent as a prompt, goes on in the same way."""
    (whole,) = llm.generate(ids(1, 8), SamplingParams(max_tokens=140, temperature=0, ignore_eos=True))
    tokens = ids(1, 8) + whole.outputs[0].token_ids
    prompts = [tokens[:length] for length in range(1, 140)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True), cache_salt="other")
    assert [output.outputs[0].token_ids[0] for output in outputs] == tokens[1:140]


# Reuse ---------------------------------------------------------------------------------------------------------------------


def test_three_identical_prompts_together_and_one_after_another(llm: LLM, driving: ModuleType, ids: Ids) -> None:
    expected = alone(llm, driving, ids(270, 4), SEEDED)
    driving.wipe(llm.engine)
    assert [answer(output) for output in llm.generate([ids(270, 4)] * 3, SEEDED)] == [expected] * 3
    assert [answer(llm.generate(ids(270, 4), SEEDED)[0]) for _ in range(3)] == [expected] * 3
    llm.engine.ledger.check()


def test_a_prompt_sent_again_is_cached_whole_at_any_length(llm: LLM, ids: Ids) -> None:
    params = SamplingParams(max_tokens=4, temperature=1, seed=1, ignore_eos=True, logprobs=1)
    for length in [1, 2, 3, 4, 5, 8, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 511, 512, 513]:
        prompt = ids(length, 1000 + length)
        first, again = (llm.generate(prompt, params)[0] for _ in range(2))
        assert again.usage.cached_tokens == length, again.usage.prefix_stop
        assert again.usage.prefix_stop.endswith("full hit")
        assert answer(first) == answer(again)


def test_a_miss_says_why(checkpoint_of: FindCheckpoint, llm: LLM, ids: Ids) -> None:
    prompt = ids(300, 5)
    (first,) = llm.generate(prompt, GREEDY)
    assert "never stored" in first.usage.prefix_stop
    (other,) = llm.generate(prompt[:100] + ids(200, 6), GREEDY)
    assert other.usage.cached_tokens == 0 and "first differing token at position 100" in other.usage.prefix_stop
    (scored,) = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert scored.usage.cached_tokens == 0 and "prompt log-probs wanted" in scored.usage.prefix_stop
    (salted,) = llm.generate(prompt, GREEDY, cache_salt="mine")
    assert salted.usage.cached_tokens == 0 and answer(salted) == answer(first)
    layout = llm.engine.layout
    small = make(checkpoint_of, cache_bytes=(layout.pages_for(620) + layout.slot_pages) * layout.page_bytes)
    small.generate(prompt, GREEDY)
    small.generate(ids(600, 7), GREEDY)
    (again,) = small.generate(prompt, GREEDY)
    assert again.usage.cached_tokens == 0 and "evicted" in again.usage.prefix_stop
    assert answer(again) == answer(first)


def test_two_chats_in_turn_keep_all_of_their_past(llm: LLM, ids: Ids) -> None:
    """There is room for both, so neither evicts the other; what is cached grows with the chat."""
    chats = [ids(700, 31), ids(900, 32)]
    for turn in range(4):
        for number, chat in enumerate(chats):
            (output,) = llm.generate(chat, GREEDY)
            cached = output.usage.cached_tokens
            assert cached == (len(chat) - 21 if turn else 0), (
                output.usage.prefix_stop
            )  # all but the new 20 and the last drawn one
            chats[number] = chat + output.outputs[0].token_ids + ids(20, 100 * turn + number)
    assert llm.engine.ledger.evictions == 0 or llm.engine.ledger.free_pages > 0


def test_prompt_logprobs_with_a_cached_prefix(llm: LLM, recorder: Recorder, ids: Ids) -> None:
    prompt = ids(270, 10)
    llm.generate(prompt[:200], GREEDY)
    wanted = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=3, ignore_eos=True)
    first, again = (llm.generate(prompt, wanted)[0] for _ in range(2))
    assert first.prompt_logprobs == again.prompt_logprobs and len(first.prompt_logprobs) == 270
    assert first.prompt_logprobs[0] is None
    request = first.request_id  # the first output's own
    for position, entry in enumerate(first.prompt_logprobs[1:], start=1):
        expected = torch.log_softmax(recorder.prompt[request, position - 1].double(), -1)
        order = expected.argsort(descending=True).tolist()
        assert set(entry) == {prompt[position], *order[:3]} and next(iter(entry)) == prompt[position]
        for token, item in entry.items():
            assert abs(item.logprob - float(expected[token])) < 1e-5 and order[item.rank - 1] == token
    (plain,) = llm.generate(prompt, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert plain.usage.cached_tokens == 270  # the scored runs have published all the same
    assert plain.outputs[0].token_ids == first.outputs[0].token_ids
    assert plain.prompt_logprobs is None
    (short,) = llm.generate([7], wanted)
    assert short.prompt_logprobs == [None]
    (everything,) = llm.generate(prompt[:9], SamplingParams(max_tokens=1, prompt_logprobs=-1))
    assert all(len(entry) == 257 for entry in everything.prompt_logprobs[1:])


def test_prompt_logprobs_survive_preemption_and_forks(llm: LLM, driving: ModuleType, ids: Ids) -> None:
    prompt = ids(200, 11)
    (expected,) = llm.generate(prompt, SamplingParams(max_tokens=8, seed=2, prompt_logprobs=1, n=2, ignore_eos=True))
    driving.wipe(llm.engine)
    llm.engine.scheduler.max_step_tokens = 30
    group = llm.engine.add(prompt, SamplingParams(max_tokens=8, seed=2, prompt_logprobs=1, n=2, ignore_eos=True))
    preempt = driving.preempt_every(67)
    driving.run_all(llm.engine, [group], preempt)
    llm.engine.scheduler.max_step_tokens = 1024
    assert group.requests[0].num_preemptions
    assert group.output.prompt_logprobs == expected.prompt_logprobs
    assert [output.token_ids for output in group.output.outputs] == [output.token_ids for output in expected.outputs]


# Drawing -------------------------------------------------------------------------------------------------------------------


def test_a_seeded_answer_does_not_depend_on_the_batch(llm: LLM, driving: ModuleType, ids: Ids) -> None:
    params = SamplingParams(max_tokens=15, temperature=1.3, top_p=0.9, top_k=50, min_p=0.01, seed=77, ignore_eos=True, logprobs=0)
    expected = alone(llm, driving, ids(50, 1), params)
    driving.wipe(llm.engine)
    others = [SamplingParams(max_tokens=5 + number, temperature=0.5, seed=number, ignore_eos=True) for number in range(7)]
    outputs = llm.generate([ids(20 * number + 1, number) for number in range(7)] + [ids(50, 1)], [*others, params])
    assert answer(outputs[-1]) == expected


def test_draws_are_counted_by_seed_child_and_output_position(llm: LLM, recorder: Recorder, ids: Ids) -> None:
    """The inverse of the cumulative probabilities, in fp64, at the counter's number."""
    (output,) = llm.generate(ids(33, 7), SamplingParams(n=2, max_tokens=12, temperature=0.8, seed=99, ignore_eos=True))
    for child, found in enumerate(output.outputs):
        for place, token in enumerate(found.token_ids):
            scores = recorder.logits[output.request_id + child, 32 + place].double()
            cumulative = torch.softmax(scores / 0.8, -1).cumsum(-1)
            assert float(cumulative[token - 1]) - 1e-9 <= uniform(99, child, place) <= float(cumulative[token]) + 1e-9


def test_children_differ_and_can_be_repeated(llm: LLM, ids: Ids) -> None:
    def children(seed: int | None, n: int = 4) -> list[list[int]]:
        (output,) = llm.generate(ids(40, 2), SamplingParams(n=n, max_tokens=10, temperature=1, seed=seed, ignore_eos=True))
        assert [found.index for found in output.outputs] == list(range(n)) and output.usage.completion_tokens == 10 * n
        return [found.token_ids for found in output.outputs]

    first = children(3)
    assert len({tuple(tokens) for tokens in first}) == 4
    assert children(3) == first and children(3, n=2) == first[:2] and children(4) != first
    assert children(None) != children(None)


def test_a_root_seed_repeats_a_whole_session(checkpoint_of: FindCheckpoint, ids: Ids) -> None:
    params = SamplingParams(max_tokens=8, temperature=1, ignore_eos=True)
    runs = [
        [
            answer(output)
            for output in make(checkpoint_of, cache_bytes="16MiB", seed=seed).generate([ids(9, 1), ids(9, 2)], params)
        ]
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def edited(scores: Tensor, params: SamplingParams, prompt: list[int], output: list[int], stops: set[int]) -> Tensor:
    """Scores after bias, bans and penalties, one token at a time, in fp64."""
    values = scores.double().clone()
    for token, bias in params.logit_bias:
        values[token] += bias
    if len(output) < params.min_tokens:
        for token in stops:
            values[token] = -torch.inf
    for token in set(prompt) | set(output):
        values[token] = (
            values[token] / params.repetition_penalty if values[token] > 0 else values[token] * params.repetition_penalty
        )
    for token in set(output):
        values[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return values


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.8},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 0.6, "presence_penalty": -0.5, "frequency_penalty": 0.3, "logit_bias": {5: 1.5, 9: -3.0}},
        {"logit_bias": {EOS: 3.0}, "min_tokens": 7},
        {"stop_token_ids": list(range(2, 130)), "min_tokens": 9},
    ],
)
def test_edited_scores(llm: LLM, recorder: Recorder, ids: Ids, changes: dict[str, object]) -> None:
    """Greedy tokens against the recorded scores, edited by the letter of vLLM's meanings."""
    params = SamplingParams(max_tokens=20, temperature=0, **changes)  # type: ignore[arg-type]
    prompt = ids(30, 6) + [3] * 3
    plain = llm.generate(prompt, SamplingParams(max_tokens=20, temperature=0))[0].outputs[0].token_ids
    recorder.forget()
    (output,) = llm.generate(prompt, params)
    tokens, stops = output.outputs[0].token_ids, {EOS, *params.stop_token_ids}
    assert tokens != plain
    for count, token in enumerate(tokens):
        scores = edited(recorder.logits[output.request_id, len(prompt) - 1 + count], params, prompt, tokens[:count], stops)
        assert float(scores[token]) >= float(scores.max()) - 1e-5
        assert (token in stops) == (count == len(tokens) - 1 and output.outputs[0].finish_reason == "stop")
    assert len(tokens) >= max(1, params.min_tokens)


def test_limits_on_tokens(llm: LLM, ids: Ids) -> None:
    for count in (1, 2, 13):
        (output,) = llm.generate(ids(5, 1), SamplingParams(max_tokens=count, seed=1, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == count and output.outputs[0].finish_reason == "length"
        assert output.finished and output.usage.completion_tokens == count
    (output,) = llm.generate(ids(5, 1), SamplingParams(max_tokens=2**31 - 1, min_tokens=3, logit_bias={EOS: 100}))
    assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].token_ids[-1] == EOS
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    (output,) = llm.generate(ids(5, 1), SamplingParams(max_tokens=5, logit_bias={EOS: 100}))
    assert output.outputs[0].token_ids == [EOS]  # an answer whose first token is a stop is legal
    (output,) = llm.generate(ids(5, 1), SamplingParams(max_tokens=5, logit_bias={9: 100}, stop_token_ids=[9]))
    assert (output.outputs[0].token_ids, output.outputs[0].stop_reason) == ([9], 9)
    (output,) = llm.generate(ids(5, 1), SamplingParams(max_tokens=3, logit_bias={EOS: 100}, ignore_eos=True))
    assert output.outputs[0].token_ids == [EOS] * 3 and output.outputs[0].finish_reason == "length"


# Text ----------------------------------------------------------------------------------------------------------------------

STORY = "The quick brown fox is told about classes, functions and the import statement."


@pytest.fixture(scope="module")
def talker(tiny_of: Callable[[str, str], Path]) -> LLM:
    return LLM(str(tiny_of("flash", "official")), cache_bytes="64MiB")


def pieces(llm: LLM, params: SamplingParams) -> tuple[list[str], CompletionOutput]:
    """Streamed pieces of the answer to STORY, and the whole."""
    deltas = list(llm.stream(STORY, params))
    assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return [delta.text for delta in deltas], deltas[-1].output.outputs[0]


@pytest.mark.parametrize("includes", [False, True])
def test_stop_strings(talker: LLM, includes: bool) -> None:
    settings = {"max_tokens": 40, "temperature": 1.0, "seed": 12, "ignore_eos": True}
    shown, whole = pieces(talker, SamplingParams(**settings))  # type: ignore[arg-type]
    assert "".join(shown) == whole.text and len(whole.text) > 60
    for start, size in itertools.product((5, 23, 40), (1, 4, 9)):
        stop = whole.text[start : start + size]
        cut = whole.text.index(stop)
        params = SamplingParams(stop=["\0 never", stop], include_stop_str_in_output=includes, **settings)  # type: ignore[arg-type]
        shown, output = pieces(talker, params)
        expected = whole.text[: cut + size * includes]
        assert output.text == expected and (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        assert "".join(shown) == expected
    assert_nothing_held(talker.engine)


def test_stop_strings_wait_for_min_tokens(talker: LLM) -> None:
    settings = {"max_tokens": 30, "temperature": 1.0, "seed": 12, "ignore_eos": True}
    _, whole = pieces(talker, SamplingParams(**settings))  # type: ignore[arg-type]
    _, output = pieces(talker, SamplingParams(stop=[whole.text[3:5]], min_tokens=10, **settings))  # type: ignore[arg-type]
    assert len(output.token_ids) >= 10 and output.text.startswith(whole.text[:5])


def test_streamed_logprobs_are_per_token(talker: LLM) -> None:
    (output,) = talker.generate(STORY, SamplingParams(max_tokens=9, temperature=0, logprobs=2))
    found = output.outputs[0]
    assert found.logprobs is not None and len(found.logprobs) == len(found.token_ids)
    total = 0.0
    for token, entry in zip(found.token_ids, found.logprobs, strict=True):
        assert entry[token].rank == 1 and entry[token].decoded_token is not None and len(entry) == 2
        total += entry[token].logprob
    assert found.cumulative_logprob == pytest.approx(total, abs=1e-9)


def test_without_a_tokenizer_texts_are_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        llm.generate("hello")
    with pytest.raises(ConfigError, match="stop"):
        llm.generate([5, 6], SamplingParams(stop="x"))


@pytest.fixture(autouse=True)
def ends_idle(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test on the shared engine nothing is held that is not in the index."""
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("shared").engine
        assert_nothing_held(engine)
