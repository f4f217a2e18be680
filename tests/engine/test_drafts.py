"""Tokens drafted ahead, as users meet them: the answers are those without drafts, wherever and however these are wrong."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lamina import LLM, SamplingParams
from lamina.base.errors import ConfigError
from lamina.engine.engine import Engine
from lamina.engine.outputs import RequestOutput
from lamina.engine.process_facts import Tally
from lamina.models.tiny import SHAPES, write_tiny
from lamina.ops.compress import ref as compress_ref
from lamina.ops.sequences import Piece, Sequences, make_groups
from lamina.ops.store import Store
from lamina.runtime import inputs
from lamina.runtime.runner import Runner
from lamina.schedule.draft import Flight
from lamina.schedule.guesses import Guesses
from lamina.schedule.request import Request, RequestState, ThoughtLimit
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.step import StepResult

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
MOST = 7


class Pair:
    """Two engines of one model, one of which drafts: its guesses are scripted from what the other one answered."""

    def __init__(self, driving: ModuleType, directory: Path, **settings: object) -> None:
        common = {"cache_bytes": "48MiB"} | settings
        self.driving = driving
        self.plain = LLM(str(directory), **common)  # type: ignore[arg-type]
        self.drafting = LLM(str(directory), draft="lookup", draft_tokens=MOST, **common)  # type: ignore[arg-type]
        self.answers: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self.begin()

    @property
    def engine(self) -> Engine:
        return self.drafting.engine

    def begin(self, choose: Callable[[int, int], tuple[int, int]] | None = None) -> None:
        """Guesses as `choose` says; all is forgotten."""
        for llm in (self.plain, self.drafting):
            self.driving.wipe(llm.engine)
        self.driving.script(self.engine, lambda request: self.answers[request.prompt, request.child], choose)

    def both(
        self, prompts: Sequence[str | list[int]], params: SamplingParams | list[SamplingParams]
    ) -> tuple[list[RequestOutput], list[RequestOutput]]:
        """What each answers."""
        plain = self.plain.generate(prompts, params)
        for output in plain:
            for child, found in enumerate(output.outputs):
                self.answers[tuple(output.prompt_token_ids), child] = found.token_ids
        drafted = self.drafting.generate(prompts, params)
        self.engine.ledger.check()
        assert not self.engine.ledger.leases
        return plain, drafted

    def same(self, prompts: Sequence[str | list[int]], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
        """Both answer alike, in everything that users see. The drafted answers."""
        plain, drafted = self.both(prompts, params)
        for one, other in zip(plain, drafted, strict=True):
            assert [everything(output) for output in other.outputs] == [everything(output) for output in one.outputs]
            assert other.usage.cached_tokens == one.usage.cached_tokens
            assert other.usage.completion_tokens == one.usage.completion_tokens
        return drafted


def everything(output: object) -> tuple[object, ...]:
    """All of an answer."""
    names = ("token_ids", "text", "logprobs", "cumulative_logprob", "finish_reason", "stop_reason")
    return tuple(getattr(output, name) for name in names)


@pytest.fixture(scope="module")
def pair(driving: ModuleType, checkpoint_of: Callable[[str], Path]) -> Pair:
    return Pair(driving, checkpoint_of("narrow"), max_model_len=400)


@pytest.fixture(scope="module")
def talking(driving: ModuleType, tiny_of: Callable[[str, str], Path]) -> Pair:
    """A model with a tokenizer."""
    return Pair(driving, tiny_of("flash", "official"), cache_bytes="64MiB")


@pytest.fixture
def ids(random_models: ModuleType) -> Callable[[int, int], list[int]]:
    return random_models.token_ids  # type: ignore[no-any-return]


Ids = Callable[[int, int], list[int]]


def sweep(pair: Pair, prompt: list[int], period: int, num_new: int) -> set[tuple[int, int]]:
    """One answer; (offset of a step in `period`, guesses of seven that were right) whose turn had come least often."""
    done: dict[tuple[int, int], int] = {}

    def choose(num_tokens: int, most: int) -> tuple[int, int]:
        offset = (num_tokens - 1) % period
        right = min(range(most + 1), key=lambda count: done.get((offset, count), 0))
        if most == MOST:
            done[offset, right] = done.get((offset, right), 0) + 1
        return most, right

    pair.begin(choose)
    for _ in range(60):
        pair.same([prompt], SamplingParams(max_tokens=num_new, temperature=0, ignore_eos=True))
        if len(done) == period * (MOST + 1):
            break
        for llm in (pair.plain, pair.drafting):
            pair.driving.wipe(llm.engine)
    again = prompt + pair.answers[tuple(prompt), 0]
    pair.answers[tuple(again), 0] = []
    pair.same([again], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))  # from the slot that was frozen
    return set(done)


def test_any_number_is_accepted_at_every_offset_of_a_group_of_4(pair: Pair, ids: Ids) -> None:
    """CASES 4. Also across the ends of the window's ring (16 rows and 7 more)."""
    assert len(sweep(pair, ids(9, 1), 4, 90)) == 4 * (MOST + 1)


@pytest.mark.long
def test_any_number_is_accepted_at_every_offset_of_a_group_of_128(pair: Pair, ids: Ids) -> None:
    assert len(sweep(pair, ids(90, 2), 128, 290)) == 128 * (MOST + 1)


@pytest.mark.parametrize("most", [pytest.param(n, marks=pytest.mark.long) for n in range(1, MOST + 1)])
def test_any_number_drafted(most: int, driving: ModuleType, checkpoint_of: Callable[[str], Path], ids: Ids) -> None:
    """Rings and folds of every length, cold and warm, preempted, and in a memory that is too small for all."""
    directory = checkpoint_of("narrow")
    prompts = [ids(length, 20 + length) for length in (3, 120, 127, 128, 250, 5)]
    params = [SamplingParams(max_tokens=30, temperature=number % 2, seed=number, ignore_eos=True) for number in range(6)]
    plain = LLM(str(directory), cache_bytes="48MiB").engine
    answers = {
        tuple(prompt): group.output.outputs[0].token_ids
        for prompt, group in zip(prompts, driving.serve(plain, prompts, params), strict=True)
    }
    engine = LLM(str(directory), cache_bytes="6MiB", draft="lookup", draft_tokens=most).engine
    driving.script(engine, lambda request: answers[request.prompt])
    for between in (None, driving.preempt_every(10), driving.preempt_every(16, driving.lose_everything)):
        groups = [engine.add(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        driving.run_all(engine, groups, between)
        assert [group.output.outputs[0].token_ids for group in groups] == list(answers.values())
        engine.ledger.check()
    assert engine.scheduler.guesses.counts.by_place[-1] and engine.ledger.stats.preempted > 6


@pytest.mark.parametrize("left", range(9))
def test_the_length_of_the_model_ends_it(pair: Pair, ids: Ids, left: int) -> None:
    """CASES 16."""
    pair.begin(lambda _, most: (most, most))
    (output,) = pair.same([ids(400 - left, 3)], SamplingParams(max_tokens=50, temperature=0, ignore_eos=True))
    assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == left


def test_max_tokens_ends_it(pair: Pair, ids: Ids) -> None:
    """CASES 15: requests that end one after the other, however many guesses each has; all of them at once."""
    pair.begin(lambda _, most: (most, most))
    prompts = [ids(5 + number, 40 + number) for number in range(8)]
    pair.same(prompts, [SamplingParams(max_tokens=8 - number, temperature=0, ignore_eos=True) for number in range(8)])


def test_stops_inside_of_guesses_that_are_right(talking: Pair) -> None:
    """End tokens and stop strings: nothing after them is seen, counted or kept, and the next turn starts from the same place."""
    prompt = "Strings are sequences of characters"
    talking.begin()
    (free,) = talking.same([prompt], GREEDY)
    text, tokens = free.outputs[0].text, free.outputs[0].token_ids
    for end in (3, 8):
        talking.begin(lambda _, most: (most, most))
        (output,) = talking.both([prompt], SamplingParams(max_tokens=24, temperature=0, stop_token_ids=[tokens[end]]))[1]
        first = tokens.index(tokens[end])
        assert output.outputs[0].token_ids == tokens[: first + 1] and output.outputs[0].finish_reason == "stop"
        talking.begin(lambda _, most: (most, most))
        stop = text[end : end + 4]
        (output,) = talking.same([prompt], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, stop=[stop]))
        assert output.outputs[0].finish_reason == "stop" and stop not in output.outputs[0].text
        turn = [*output.prompt_token_ids, *output.outputs[0].token_ids, 7, 8]
        talking.same([turn], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))


def test_drawing_with_every_setting(pair: Pair, ids: Ids) -> None:
    """What depends on the tokens before it: penalties, bans until min_tokens, log-probs, seeds, several outputs."""
    prompt = ids(20, 5)
    (plain,) = pair.plain.generate([prompt], SamplingParams(max_tokens=24, temperature=0))
    pair.begin()
    for params in (
        SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3),
        SamplingParams(max_tokens=12, temperature=1, seed=4, top_k=20, top_p=0.9, min_p=0.01, logprobs=4),
        SamplingParams(max_tokens=24, temperature=0, min_tokens=9, stop_token_ids=plain.outputs[0].token_ids[:4]),
        SamplingParams(max_tokens=12, temperature=0, logit_bias={5: 3.0, 7: -100.0}),
        SamplingParams(max_tokens=8, temperature=0.8, seed=9, n=3, ignore_eos=True),
    ):
        pair.same([prompt], params)


def test_thoughts_that_must_end(pair: Pair, ids: Ids) -> None:
    """The token that ends them is drawn alone, after so many tokens and no others; what follows is drafted again."""
    prompt, end = ids(20, 11), 7
    for limit in (0, 12):
        thoughts = ThoughtLimit(limit, end, frozenset({end}))
        plain = pair.plain.engine.add(prompt, GREEDY, thoughts=thoughts)
        pair.driving.run_all(pair.plain.engine, [plain])
        answer = plain.output.outputs[0].token_ids
        assert answer[limit] == end
        pair.begin(lambda _, most: (most, most))
        pair.answers[tuple(prompt), 0] = answer
        drafted = pair.engine.add(prompt, GREEDY, thoughts=thoughts)
        pair.driving.run_all(pair.engine, [drafted])
        assert drafted.output.outputs[0].token_ids == answer and drafted.output.usage.accepted_drafts


def test_with_and_without_cache(pair: Pair, ids: Ids) -> None:
    """CASES 10: a hit with drafts is the same hit. The point to resume from is where it is without drafts."""
    pair.begin()
    prompt = ids(100, 6)
    first = pair.same([prompt], GREEDY)
    again = pair.same([prompt], GREEDY)
    assert again[0].usage.cached_tokens == 100 and again[0].outputs[0].token_ids == first[0].outputs[0].token_ids
    turn = prompt + first[0].outputs[0].token_ids + ids(4, 7)
    assert pair.same([turn], GREEDY)[0].usage.cached_tokens == 123


def test_checkpoints_on_the_way(driving: ModuleType, checkpoint_of: Callable[[str], Path], ids: Ids) -> None:
    pair = Pair(driving, checkpoint_of("narrow"), checkpoint_interval=11)
    pair.begin(lambda _, most: (most, most))
    prompt = ids(7, 8)
    (output,) = pair.same([prompt], GREEDY)
    for kept in range(1, 24, 6):
        pair.answers[tuple(prompt + output.outputs[0].token_ids[:kept] + [3, 4]), 0] = []
        pair.same([prompt + output.outputs[0].token_ids[:kept] + [3, 4]], SamplingParams(max_tokens=1, temperature=0))


def test_cancelled_and_failed_while_guesses_are_in_flight(pair: Pair, ids: Ids, driving: ModuleType) -> None:
    """What was planned for a request that has gone is dropped; a step that breaks off leaves nothing."""
    pair.begin(lambda _, most: (most, most))
    prompt = ids(30, 9)
    pair.both([prompt], GREEDY)
    engine = pair.engine
    for ends in ("cancel", "fail", "preempt"):
        group = engine.add(prompt, GREEDY)
        while not any(request.num_output for request in group.requests):
            engine.step()
        step = engine.scheduler.plan()
        assert step is not None and step.slices[0].num_guesses == MOST
        result = engine.worker.execute(step).result()
        (request,) = group.requests
        if ends == "cancel":
            engine.cancel(group)
        elif ends == "preempt":
            engine.scheduler.preempt(request)
            assert request.state is RequestState.WAITING
        late = engine.scheduler.late_results
        if ends == "fail":
            result = type(result)((*result.tokens[:3], None, *result.tokens[4:]), result.logprobs, result.prompt_logprobs)
        engine.scheduler.apply(step, result, engine._requests, engine._book)
        engine.ledger.check()
        if ends == "fail":
            assert request.finish_reason == "error" and request.num_output == 4
        else:
            assert engine.scheduler.late_results > late
        driving.run_all(engine, [group])
        if ends == "preempt":
            assert group.output.outputs[0].token_ids == pair.answers[tuple(prompt), 0]
        engine.ledger.check()
        assert not engine.ledger.leases
        driving.wipe(engine)


def test_the_distribution_is_unchanged(pair: Pair, ids: Ids) -> None:
    """Two tokens drawn by 300 seeds with the likeliest token always guessed: chi-square against the scores, by brute force."""
    prompt, kept, seeds = ids(12, 10), 3, 300
    scores: dict[tuple[int, ...], torch.Tensor] = {}
    with pair.driving.Recorder(pair.plain.engine) as recorder:
        (group,) = pair.driving.serve(pair.plain.engine, [prompt], SamplingParams(max_tokens=1, temperature=0))
        scores[()] = recorder.logits[group.requests[0].id, len(prompt) - 1].double()
        firsts = scores[()].topk(kept).indices.tolist()
        for token in firsts:
            params = SamplingParams(max_tokens=1, temperature=0)
            (group,) = pair.driving.serve(pair.plain.engine, [[*prompt, token]], params)
            scores[token,] = recorder.logits[group.requests[0].id, len(prompt)].double()
    expected: dict[tuple[int, int], float] = {}
    for token in firsts:
        first = torch.softmax(scores[()].topk(kept).values, 0)[firsts.index(token)]
        top = scores[token,].topk(kept)
        for other, chance in zip(top.indices.tolist(), torch.softmax(top.values, 0).tolist(), strict=True):
            expected[token, other] = float(first) * chance
    likeliest = {token: int(scores[token,].argmax()) for token in firsts}

    class Likeliest(pair.driving.Script):  # type: ignore[name-defined,misc]
        def guesses(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
            return (likeliest[tokens[-1]],) if len(tokens) == len(prompt) + 1 else ()

    def begin(request: Request) -> None:
        request.drafting = Likeliest(len(prompt), (), pair.engine.scheduler.guesses.rule, lambda *_: (0, 0))

    pair.begin()
    pair.engine.scheduler.guesses.begin = begin  # type: ignore[method-assign]
    counts = pair.engine.scheduler.guesses.counts
    before = counts.drafts, counts.accepted
    params = [SamplingParams(max_tokens=3, temperature=1, top_k=kept, seed=seed, ignore_eos=True) for seed in range(seeds)]
    found: dict[tuple[int, int], int] = dict.fromkeys(expected, 0)
    for output in pair.drafting.generate([prompt] * seeds, params):
        first, second, _ = output.outputs[0].token_ids
        found[first, second] += 1
    assert counts.drafts - before[0] == seeds and 0 < counts.accepted - before[1] < seeds
    chi_square = sum((found[pair_] - seeds * chance) ** 2 / (seeds * chance) for pair_, chance in expected.items())
    assert chi_square < 26.1, f"{len(expected) - 1} degrees of freedom: beyond this once in a thousand"


def test_what_a_server_is_told(talking: Pair) -> None:
    """News of each token in order, then of the end; counters of what was drawn for somebody, and what a request is charged."""
    talking.begin()
    prompts = ["Strings are sequences of characters", "A list is a list"]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    plain = talking.plain.generate(prompts, params)
    answers = {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in plain}
    engine = Engine(talking.engine.config, has_text=False)
    talking.driving.script(engine, lambda request: answers[request.prompt])
    tally = Tally(engine)
    engine.on_computed = tally.computed
    groups = [engine.add(output.prompt_token_ids, params) for output in plain]
    while engine.step():
        tally.took(0.1)
    for group in groups:
        (request,) = group.requests
        news = [item for item in engine.news if item.request is request]
        assert [item.token for item in news] == answers[request.prompt]
        assert [item.finish for item in news] == [None] * 19 + ["length"]
    stats, counts = tally.stats(0, ()), engine.scheduler.guesses.counts
    assert stats.drawn_tokens == 40 and stats.draft_tokens == counts.tokens > stats.accepted_drafts > 0
    assert sum(stats.accepted_by_place) == stats.accepted_drafts and stats.steps < 40
    assert stats.prefill_s == pytest.approx(0.1)  # checking guesses is no prefill
    charged = [(group.requests[0].accepted_drafts, group.requests[0].rejected_drafts) for group in groups]
    assert tuple(map(sum, zip(*charged, strict=True))) == (counts.accepted, counts.rejected)


def test_usage(talking: Pair) -> None:
    """An output is told of every guess that was made for it, those of the step that ended it included."""
    talking.begin()
    counts = talking.engine.scheduler.guesses.counts
    for most in (3, 4, 20):
        before = counts.accepted, counts.rejected
        (output,) = talking.same(["Strings are sequences of characters"], SamplingParams(max_tokens=most, temperature=0))
        told = output.usage.accepted_drafts, output.usage.rejected_drafts
        assert told == (counts.accepted - before[0], counts.rejected - before[1]), most
    assert sum(told) > 0


@pytest.mark.long
def test_lookup_copies(talking: Pair) -> None:
    """The real drafter: a prompt that says something twice, and a request that repeats itself."""
    llm = LLM(str(talking.engine.directory), draft="lookup", draft_tokens=4, cache_bytes="64MiB")
    prompts = ["a list of names, a list of numbers, a list of names, a list of", "one two three four five one two three four"]
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == [
        o.outputs[0].token_ids for o in talking.plain.generate(prompts, params)
    ]


@pytest.mark.parametrize("kind", ["mtp", pytest.param("dspark", marks=pytest.mark.long)])
def test_draft_blocks(kind: str, driving: ModuleType, random_models: ModuleType, tmp_path: Path) -> None:
    """Of random weights, whose drafts are hardly ever right: in cut prompts, from checkpoints and after preemptions."""
    shape = replace(SHAPES["flash"], ratios=(0, 4, 128, 0), hash_layers=1)
    if kind == "dspark":
        shape = replace(shape, ratios=(0, 4, 128, 4, 0, 0, 0), taps=(1, 2, 3), stages=3)
    write_tiny(tmp_path, shape, 3)
    plain = LLM(str(tmp_path), cache_bytes="32MiB").engine
    engine = LLM(str(tmp_path), cache_bytes="32MiB", draft="auto", max_step_tokens=50).engine
    assert engine.config.draft == kind
    engine.worker.runner.drafting.drafter.least_likely = 0  # type: ignore[attr-defined]
    prompts = [random_models.token_ids(length, length) for length in (1, 2, 130, 60)]
    params = [SamplingParams(max_tokens=24, temperature=number % 2, seed=number, ignore_eos=True) for number in range(4)]
    answers = [group.output.outputs[0].token_ids for group in driving.serve(plain, prompts, params)]
    for between in (None, driving.preempt_every(40), driving.preempt_every(45, driving.lose_everything)):
        groups = [engine.add(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        driving.run_all(engine, groups, between)
        assert [group.output.outputs[0].token_ids for group in groups] == answers
    again = driving.serve(engine, prompts, params)
    assert [group.output.outputs[0].token_ids for group in again] == answers and engine.scheduler.guesses.counts.tokens > 30
    engine.ledger.check()


def test_draft_blocks_that_were_trained() -> None:
    """The model in the package drafts well, and says so."""
    params = SamplingParams(max_tokens=60, temperature=0)
    plain, drafting = LLM(cache_bytes="32MiB"), LLM(cache_bytes="32MiB", draft="mtp", draft_tokens=3)
    (one,), (other,) = (llm.generate(["Once upon a time there was a little dog."], params) for llm in (plain, drafting))
    assert other.outputs[0].token_ids == one.outputs[0].token_ids
    counts = drafting.engine.scheduler.guesses.counts
    assert counts.accepted > 0.6 * counts.tokens and counts.by_place[0] > counts.by_place[1] > 0
    assert drafting.engine.scheduler.num_steps < 0.6 * plain.engine.scheduler.num_steps


def test_settings_that_cannot_be(checkpoint_of: Callable[[str], Path]) -> None:
    directory = str(checkpoint_of("narrow"))
    with pytest.raises(ConfigError, match=r"^draft='eagle' is not valid: one of none, auto, lookup, mtp, dspark"):
        LLM(directory, draft="eagle")
    with pytest.raises(ConfigError, match=r"^draft_tokens=2 is not valid: absent where draft is"):
        LLM(directory, draft_tokens=2)
    with pytest.raises(ConfigError, match=r"^draft_tokens=8 is not valid: at most 7"):
        LLM(directory, draft="lookup", draft_tokens=8)
    with pytest.raises(ConfigError, match=r"^draft='mtp' is not valid: none, auto or lookup: the checkpoint has no draft blocks"):
        LLM(directory, draft="mtp")


# Seeded faults in taking drafts back, which the tests above must notice ---------------------------------------------------


def accepts_the_first_wrong_guess(mp: pytest.MonkeyPatch) -> None:
    original = Guesses.settle

    def settle(self: Guesses, flight: Flight, result: StepResult, *rest: object) -> int:
        tokens, at = list(result.tokens), 0
        while at < len(flight.samples):
            guesses = flight.guesses.get(flight.samples[at][0].id, ())
            wrong = next((n for n, guess in enumerate(guesses) if tokens[at + n] != guess), None)
            if wrong is not None:
                tokens[at + wrong] = guesses[wrong]
            at += 1 + len(guesses)
        return original(self, flight, replace(result, tokens=tuple(tokens)), *rest)  # type: ignore[arg-type]

    mp.setattr(Guesses, "settle", settle)


def keeps_the_fold_of_the_last_row_alone(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(
        inputs, "make_groups", lambda pieces, *rest: make_groups(tuple(replace(piece, drafts=0) for piece in pieces), *rest)
    )


def goes_on_from_the_state_of_the_last_row(mp: pytest.MonkeyPatch) -> None:
    def load(state: torch.Tensor, where: object, store: Store, slots: torch.Tensor) -> None:
        group, sequence, seen = where  # type: ignore[misc]
        original(state, (group, sequence, seen + 1), store, slots)

    original = compress_ref._load
    mp.setattr(compress_ref, "_load", load)


def keeps_the_last_hidden_vector_alone(mp: pytest.MonkeyPatch) -> None:
    original = Runner._keep_hidden

    def keep(self: Runner, hidden: torch.Tensor, sequences: Sequences) -> None:
        pieces = tuple(replace(piece, drafts=0) for piece in sequences.pieces)
        original(self, hidden, replace(sequences, pieces=pieces))

    mp.setattr(Runner, "_keep_hidden", keep)


def draws_each_row_as_the_first(mp: pytest.MonkeyPatch) -> None:
    original = Scheduler._sample

    def sample(self: Scheduler, *arguments: object) -> object:
        made = original(self, *arguments)  # type: ignore[arg-type]
        return made._replace(num_output=made.num_output - len(arguments[3])) if len(arguments) > 3 else made  # type: ignore[arg-type]

    mp.setattr(Scheduler, "_sample", sample)


def rings_have_no_rows_for_guesses(mp: pytest.MonkeyPatch) -> None:
    original = inputs.make_tails

    def tails(pieces: tuple[Piece, ...], ring: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, owners, _ = original(pieces, ring, device)
        positions = torch.tensor([p for piece in pieces for p in range(max(piece.start, piece.stop - ring), piece.stop)])
        return rows, owners, positions % (ring - MOST if ring == 16 + MOST else ring)

    mp.setattr(inputs, "make_tails", tails)


MUTANTS = (
    accepts_the_first_wrong_guess, keeps_the_fold_of_the_last_row_alone, goes_on_from_the_state_of_the_last_row,
    keeps_the_last_hidden_vector_alone, draws_each_row_as_the_first, rings_have_no_rows_for_guesses,
)  # fmt: skip


def stands(pair: Pair, ids: Ids) -> None:
    """A little of what has been tried above: an answer, one that ends inside of guesses, and what goes on from each."""
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=0)
    for seed in range(2):
        prompt = ids(60 + seed, 30 + seed)
        params = SamplingParams(max_tokens=40, temperature=seed, seed=seed, ignore_eos=True, logprobs=0)
        pair.begin()
        (output,) = pair.same([prompt], params)
        tokens = output.outputs[0].token_ids
        end = next(place for place in range(20, 40) if tokens[place] not in tokens[:place])
        for ends, stop_token_ids in ((40, ()), (end + 1, (tokens[end],))):
            pair.begin((lambda _, most: (most, most)) if stop_token_ids else None)
            pair.same([prompt], replace(params, stop_token_ids=stop_token_ids))
            again = prompt + tokens[: ends - 1]
            pair.answers[tuple(again), 0] = []
            assert pair.same([again], one)[0].usage.cached_tokens == len(again)


@pytest.mark.long
def test_the_real_code_stands(pair: Pair, ids: Ids) -> None:
    stands(pair, ids)


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, id=one.__name__, marks=[] if at < 2 else [pytest.mark.long]) for at, one in enumerate(MUTANTS)],
)
def test_mutant_is_killed(mutant: Callable[[pytest.MonkeyPatch], None], pair: Pair, ids: Ids) -> None:
    with pytest.MonkeyPatch.context() as mp:
        mutant(mp)
        with pytest.raises(AssertionError):
            stands(pair, ids)
