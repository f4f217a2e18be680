"""Driving an engine step by step and watching the numbers inside."""

import random
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lamina import SamplingParams
from lamina.engine.engine import Engine, Group
from lamina.ops.sequences import Sequences
from lamina.runtime.runner import ForwardModel
from lamina.schedule.drafting import Drafting, DraftRule
from lamina.schedule.request import Request, RequestState
from lamina.schedule.step import Step, StepResult

POISON = 255  # a byte that is NaN as fp32, bf16, e4m3 and e8m0


class Spy:
    """Stands where the runner expects a model. `fail_next`: an exception to raise in the next forward pass."""

    def __init__(self, model: ForwardModel) -> None:
        self.model = model
        self.hidden = torch.empty(0)
        self.products: list[Tensor] = []
        self.fail_next: Exception | None = None

    @property
    def ratios(self) -> tuple[int, ...]:
        return self.model.ratios

    def forward(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.hidden = self.model.forward(tokens, sequences)
        return self.hidden

    def logits(self, hidden: Tensor) -> Tensor:
        scores = self.model.logits(hidden)
        self.products.append(scores)
        return scores


class Recorder:
    """Remembers what an engine computes, by request.

    hidden   final hidden vector of (request id, position), for every position computed.
    logits   scores of (request id, position), for every token drawn: those that follow the token at `position`.
    prompt   scores of (request id, position), for every prompt position whose log-probabilities were asked for.
    As a context manager it leaves the engine as it was.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.spy = Spy(engine.worker.runner.model)
        self.hidden: dict[tuple[int, int], Tensor] = {}
        self.logits: dict[tuple[int, int], Tensor] = {}
        self.prompt: dict[tuple[int, int], Tensor] = {}
        self._execute = engine.worker.runner.execute
        engine.worker.runner.model = self.spy
        engine.worker.runner.execute = self.execute  # type: ignore[method-assign]

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.worker.runner.model = self.spy.model
        self.engine.worker.runner.execute = self._execute  # type: ignore[method-assign]

    def execute(self, step: Step) -> StepResult:
        """One step, with its rows filed under their requests."""
        known = {item.request_id: len(self.engine._requests[item.request_id].tokens) for item in step.samples}
        self.spy.products.clear()
        result = self._execute(step)
        products, row = list(self.spy.products), 0
        for part in step.slices:
            for position in range(part.start, part.stop):
                self.hidden[part.request_id, position] = self.spy.hidden[row].clone()
                row += 1
            position = part.start
            while part.num_logprobs is not None and position < part.start + len(part.targets):
                scores = products.pop(0)
                for one in scores[: part.start + len(part.targets) - position]:
                    self.prompt[part.request_id, position] = one.clone()
                    position += 1
        for one, item in enumerate(step.samples):  # those after a guess come after its sample
            self.logits[item.request_id, known[item.request_id] - 1] = products[-1][one].clone()
            known[item.request_id] += 1
        return result

    def forget(self) -> None:
        """Drops what was remembered."""
        self.hidden.clear()
        self.logits.clear()
        self.prompt.clear()


class Script(Drafting):
    """Guesses of which only the first few are right. choose  called with (tokens known, most guesses): (guesses, right)."""

    def __init__(
        self, prompt: int, answer: Sequence[int], rule: DraftRule, choose: Callable[[int, int], tuple[int, int]]
    ) -> None:
        super().__init__(rule)
        self.prompt, self.answer, self.choose = prompt, list(answer), choose

    def guesses(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Of the answer that is known what comes next, then what does not."""
        count, right = self.choose(len(tokens), min(most, self.rule.most))
        done = len(tokens) - self.prompt
        true = self.answer[done : done + count]
        return tuple(token if place < right else abs(token - 1) for place, token in enumerate(true))


def script(
    engine: Engine, answer_of: Callable[[Request], Sequence[int]], choose: Callable[[int, int], tuple[int, int]] | None = None
) -> None:
    """Lets every request of an engine that drafts have scripted guesses; by default as many, and as many right, as comes."""
    rng, rule = random.Random(1), engine.scheduler.guesses.rule
    assert rule is not None

    def any_few(_: int, most: int) -> tuple[int, int]:
        count = rng.randint(0, most)
        return count, rng.randint(0, count)

    def begin(request: Request) -> None:
        if request.drafting is None:
            request.drafting = Script(len(request.prompt), answer_of(request), rule, choose or any_few)

    engine.scheduler.guesses.begin = begin  # type: ignore[method-assign]


def wipe(engine: Engine) -> None:
    """Makes an idle engine forget every prefix, and fills its memory with NaN."""
    assert not engine.has_work
    engine.ledger.drop_index()
    engine.ledger.check()
    assert engine.ledger.free_pages == engine.num_pages, "I6: pages are lost"
    engine.worker.arena.bytes.fill_(POISON)


def run_all(engine: Engine, groups: Iterable[Group], between: Callable[[Engine], None] | None = None) -> None:
    """Steps until the groups have finished; `between` is called after every step."""
    waiting = list(groups)
    while any(not group.is_finished for group in waiting):
        assert engine.step()
        if between is not None:
            between(engine)


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], salt: str = ""
) -> list[Group]:
    """Serves prompts of token ids together, to their ends."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    groups = [engine.add(list(prompt), own, index, salt) for index, (prompt, own) in enumerate(zip(prompts, each, strict=True))]
    run_all(engine, groups)
    return groups


def preempt_every(tokens: int, also: Callable[[Engine], None] | None = None) -> Callable[[Engine], None]:
    """A `between` that takes a running request's memory each time it passes a multiple of `tokens`; then calls `also`."""
    passed: dict[int, int] = {}

    def between(engine: Engine) -> None:
        for request in list(engine.scheduler.running):
            assert request.lease is not None
            count = request.lease.position // tokens
            if count > passed.get(request.id, 0) and request.state is RequestState.RUNNING:
                passed[request.id] = count
                engine.scheduler.preempt(request)
                if also is not None and not engine.scheduler.running:
                    also(engine)

    return between


def lose_everything(engine: Engine) -> None:
    """For `preempt_every`: every checkpoint and block is evicted and all memory is NaN, so all must be computed again."""
    engine.ledger.drop_index()
    assert engine.ledger.free_pages == engine.num_pages
    engine.worker.arena.bytes.fill_(POISON)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two fp32 tensors have the same bits; no NaN passes."""
    return bool(torch.isfinite(left).all()) and torch.equal(left.view(torch.int32), right.view(torch.int32))


def all_tokens(request: Request) -> list[int]:
    """Prompt and answer of a request that has ended."""
    return list(request.tokens)
