"""The requests of the engine's process: submitted, compiled for, given to the engine, ended; and the news of each step."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lamina.base.errors import BusyError, CapacityError, ConfigError, MissingError
from lamina.base.log import event, get_logger
from lamina.engine.engine import Engine, Group, News
from lamina.engine.grammar import CompiledGrammar
from lamina.engine.moves import Arrival, MoveCounts, Moves
from lamina.engine.process_facts import Tally
from lamina.engine.process_grammars import Grammars
from lamina.engine.wire import GrammarStats, LogprobRow, Output, Refusal, RequestRow, Sampling, Submit, UsageRow
from lamina.schedule.request import Request, RequestState, ThoughtLimit
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.step import Step, TokenLogprobs

_LOG = get_logger(__name__)
_ID_BYTES = 4


@dataclass(slots=True)
class _Live:
    """A submitted prompt that has not ended. left  outputs that go on.   group  None until the engine has it.

    compiling, grammar  while its grammar is made, and then.   arrival  while somebody else computes it.
    cached_tokens  of one that somebody else computed.
    """

    submit: Submit
    params: SamplingParams
    prompt: list[int]
    arrived: float
    ends: float  # its deadline; inf where it has none
    left: int
    group: Group | None = None
    compiling: Future[CompiledGrammar] | None = None
    grammar: CompiledGrammar | None = None
    arrival: Arrival | None = None
    cached_tokens: int | None = None


@dataclass(slots=True)
class _Times:
    """When an output first ran and had its first token; 0 before."""

    started: float = 0.0
    first: float = 0.0


class Desk:
    """Takes commands between steps and turns what the engine did into outputs. One thread.

    wake   ends the loop's wait, from any thread: a grammar has been compiled.
    moves  what is done with other engines; None: there are none.
    """

    def __init__(self, engine: Engine, tally: Tally, wake: Callable[[], None], moves: Moves | None = None) -> None:
        self._engine = engine
        self._tally = tally
        self._grammars = Grammars(engine, wake)
        self._moves = moves
        self._arriving: dict[Arrival, _Live] = {}
        self._live: dict[str, _Live] = {}
        self._owners: dict[int, _Live] = {}  # by the engine's id of an output
        self._times: dict[int, _Times] = {}
        self._unstarted: set[int] = set()
        self._untold: set[int] = set()  # no token yet
        self._next_deadline = math.inf  # none ends before
        self._outputs: list[Output] = []
        self._step_began = 0.0
        engine.on_computed = self._computed

    @property
    def has_requests(self) -> bool:
        """Whether anything submitted has not ended."""
        return bool(self._live)

    @property
    def next_deadline(self) -> float:
        """Nothing has to be ended before this moment of the monotonic clock."""
        return self._next_deadline if self._moves is None else min(self._next_deadline, self._moves.next_deadline)

    @property
    def is_moving(self) -> bool:
        """Whether something moves, for which requests may wait although nothing runs."""
        return self._moves is not None and self._moves.is_busy

    # -- commands

    def submit(self, submit: Submit) -> Refusal | None:
        """Queues a prompt, or says why not."""
        try:
            return self._submit(submit)
        except Exception as error:
            return refusal(submit.id, error)

    def _submit(self, submit: Submit) -> Refusal | None:
        if submit.id in self._live:
            raise ConfigError("id", submit.id, "an id that no request has")
        if submit.deadline_s is not None and not math.isfinite(submit.deadline_s):
            raise ConfigError("deadline_s", submit.deadline_s, "a finite number of seconds")
        params, prompt = sampling_params(submit.sampling), token_ids(submit.prompt)
        now = time.monotonic()
        ends = math.inf if submit.deadline_s is None else now + submit.deadline_s
        live = _Live(submit, params, prompt, now, ends, params.n)
        if submit.grammar is not None:
            self._engine.check(prompt, params)  # nothing is compiled for one that cannot be served
            live.compiling = self._grammars.compile(submit.grammar)
        else:
            self._begin(live)
        self._live[submit.id] = live
        self._next_deadline = min(self._next_deadline, ends)
        return None

    def _begin(self, live: _Live) -> None:
        """Gives a prompt to the engine, or first to somebody else."""
        submit = live.submit
        if self._moves is not None and live.params.prompt_logprobs is None:
            self._engine.check(live.prompt, live.params)
            found = self._moves.begin(live.prompt, submit.cache_salt, submit.priority, submit.peer, live.ends)
            if found is not None:
                live.arrival = found
                self._arriving[found] = live
                return
        self._add(live)

    def pump(self) -> list[Refusal]:
        """Goes on with what moves; gives the engine what has come, or must be computed after all."""
        refusals = []
        for arrival in () if self._moves is None else self._moves.pump():
            live = self._arriving.pop(arrival)
            live.arrival, live.cached_tokens = None, arrival.cached_tokens
            try:
                self._add(live)
            except Exception as error:
                del self._live[live.submit.id]
                refusals.append(refusal(live.submit.id, error))
        return refusals

    def _add(self, live: _Live) -> None:
        """Gives a prompt to the engine."""
        submit, limit = live.submit, live.submit.thoughts
        thoughts = None if limit is None else ThoughtLimit(limit.tokens, limit.end, frozenset((limit.end, *limit.others)))
        group = live.group = self._engine.add(
            live.prompt, live.params, cache_salt=submit.cache_salt, priority=submit.priority, owner=submit.owner,
            grammar=live.grammar,
            keep_at=submit.keep_at, thoughts=thoughts,
        )  # fmt: skip
        for request in group.requests:
            self._owners[request.id] = live
            self._times[request.id] = _Times()
            self._unstarted.add(request.id)
            self._untold.add(request.id)

    def add_compiled(self) -> list[Refusal]:
        """Gives those to the engine whose grammar is ready; refusals of those whose grammar is bad."""
        refusals = []
        for compiled in self._grammars.take_done():
            live = next((one for one in self._live.values() if one.compiling is compiled), None)
            if live is None:  # cancelled meanwhile
                continue
            live.compiling = None
            try:
                live.grammar = compiled.result()
                self._begin(live)
            except Exception as error:
                del self._live[live.submit.id]
                refusals.append(refusal(live.submit.id, error))
        return refusals

    def cancel(self, id: str, reason: str = "abort") -> None:
        """Ends a request in any state; one that has ended, or is not known, is left alone."""
        live = self._live.get(id)
        if live is None:
            return
        if live.group is not None:
            self._engine.cancel(live.group, reason)
            return
        if live.arrival is not None and self._moves is not None:
            self._moves.cancel(live.arrival)
            del self._arriving[live.arrival]
        elif live.compiling is not None:
            self._grammars.forget(live.compiling)
        for child in range(live.params.n):
            self._end_unborn(live, child, reason)

    def finish(self, id: str, child: int) -> None:
        """One output has its answer; what is not known or has ended is left alone."""
        live = self._live.get(id)
        if live is not None and live.group is not None and 0 <= child < live.params.n:
            self._engine.finish(live.group, child)

    def cancel_all(self) -> None:
        """Ends everything."""
        for id in list(self._live):
            self.cancel(id)

    def expire(self, now: float) -> None:
        """Ends what has passed its deadline."""
        if now < self._next_deadline:
            return
        for id in [id for id, live in self._live.items() if live.ends <= now]:
            self.cancel(id, "deadline")
        self._next_deadline = min((live.ends for live in self._live.values() if live.ends > now), default=math.inf)

    # -- steps

    def step(self) -> bool:
        """One step of the engine. False if there was nothing to do. Raises what went wrong in it."""
        self._step_began = time.monotonic()
        try:
            return self._engine.step()
        finally:
            self._tally.took(time.monotonic() - self._step_began)

    def _computed(self, step: Step) -> None:
        self._tally.computed(step)
        if self._unstarted and step.decodes is None:
            for sample in step.samples:
                self._started(sample.request_id)
            for part in step.slices:
                self._started(part.request_id)

    def _started(self, number: int) -> None:
        if number not in self._unstarted:
            return
        self._unstarted.discard(number)
        live = self._owners[number]
        assert live.group is not None
        self._times[number].started = self._step_began
        request = next(request for request in live.group.requests if request.id == number)
        if live.cached_tokens is not None:  # the rest was computed, though not here
            request.cached_tokens = min(request.cached_tokens, live.cached_tokens)
        self._tally.admitted(request)

    def take(self) -> list[Output]:
        """What is new for the server: plain tokens of an output since the last time are one."""
        engine = self._engine
        news, engine.news = engine.news, []
        now = time.monotonic()
        outputs, self._outputs = self._outputs, []
        plain: dict[int, tuple[str, int, list[int]]] = {}
        for item in news:
            request = item.request
            live = self._owners.get(request.id)
            if live is None:
                continue  # computed for another engine
            if item.token is not None and request.id in self._untold:
                self._untold.discard(request.id)
                self._times[request.id].first = now
            if item.finish is None and item.logprobs is None:
                assert item.token is not None
                before = plain.get(request.id)
                if before is None:
                    plain[request.id] = (live.submit.id, request.child, [item.token])
                else:
                    before[2].append(item.token)
                continue
            before = plain.pop(request.id, None)
            if before is not None:
                outputs.append(Output(before[0], before[1], tuple(before[2])))
            outputs.append(self._output(live, item, now))
        outputs += [Output(id, child, tuple(tokens)) for id, child, tokens in plain.values()]
        return outputs

    def _output(self, live: _Live, item: News, now: float) -> Output:
        request, token, logprobs, finish = item
        tokens = () if token is None else (token,)
        rows = None
        if request.params.logprobs is not None:
            rows = () if logprobs is None or token is None else (logprob_row(logprobs),)
        if finish is None:
            return Output(live.submit.id, request.child, tokens, rows)
        usage = self._usage(live, request, now)
        stop_token = token if finish == "stop" and token in request.stop_ids else None
        self._forget(live, request, finish)
        return Output(live.submit.id, request.child, tokens, rows, finish, stop_token, usage, prompt_rows(request), request.error)

    def _usage(self, live: _Live, request: Request, now: float) -> UsageRow:
        times = self._times[request.id]
        started, first = times.started or now, times.first or now
        hit = request.first_hit
        return UsageRow(
            prompt_tokens=len(request.prompt), cached_tokens=request.cached_tokens, completion_tokens=request.num_output,
            held_bytes=self._engine.held_bytes(request), prefix_stop="not looked up" if hit is None else hit.why,
            queued_s=max(0.0, started - live.arrived), prefill_s=max(0.0, first - started), decode_s=max(0.0, now - first),
            accepted_drafts=request.accepted_drafts, rejected_drafts=request.rejected_drafts,
        )  # fmt: skip

    def _forget(self, live: _Live, request: Request, finish: str) -> None:
        del self._owners[request.id], self._times[request.id]
        self._unstarted.discard(request.id)
        self._untold.discard(request.id)
        self._ended(live, finish)

    def _ended(self, live: _Live, finish: str) -> None:
        self._tally.ended(finish)
        live.left -= 1
        if not live.left:
            del self._live[live.submit.id]

    def _end_unborn(self, live: _Live, child: int, reason: str) -> None:
        """An output that the engine was never given."""
        waited = time.monotonic() - live.arrived
        usage = UsageRow(len(live.prompt), 0, 0, {}, "not looked up", queued_s=waited)
        self._outputs.append(Output(live.submit.id, child, (), None, reason, None, usage))
        self._ended(live, reason)

    # -- looking

    def num_compiling(self) -> int:
        """Requests whose grammar is being compiled, or whose prompt is computed by somebody else."""
        return self._grammars.num_pending + len(self._arriving)

    def move_counts(self) -> MoveCounts:
        """What moved so far."""
        return MoveCounts({}, {}) if self._moves is None else self._moves.counts()

    def grammar_stats(self) -> GrammarStats:
        """What grammars cost so far."""
        return self._grammars.stats()

    def prepare(self) -> None:
        """What the first grammar needs is made ready beside the loop."""
        self._grammars.prepare()

    def rows(self, most: int) -> tuple[RequestRow, ...]:
        """Requests as the web page shows them, running ones first."""
        now = time.monotonic()
        scheduler = self._engine.scheduler
        found = [self._row(request, now) for request in scheduler.running[:most]]
        for request in scheduler.waiting:
            if len(found) >= most:
                break
            found.append(self._row(request, now))
        return tuple(row for row in found if row is not None)

    def _row(self, request: Request, now: float) -> RequestRow | None:
        live = self._owners.get(request.id)
        if live is None:
            return None
        state, lease = "waiting", request.lease
        if request.state is RequestState.RUNNING:
            state = "decoding" if request.is_prompt_done else "prefilling"
        return RequestRow(
            id=live.submit.id, child=request.child, state=state, prompt_tokens=len(request.prompt),
            computed_tokens=0 if lease is None else lease.position, output_tokens=request.num_output,
            max_tokens=request.max_new, cached_tokens=request.cached_tokens, age_s=now - live.arrived,
        )  # fmt: skip


def refusal(id: str, error: Exception) -> Refusal:
    """What the server is told of a request or change that failed."""
    if isinstance(error, ConfigError):
        return Refusal(id, "missing" if isinstance(error, MissingError) else "config", str(error), error.field)
    if isinstance(error, CapacityError):
        return Refusal(id, "capacity", str(error))
    if isinstance(error, BusyError):
        return Refusal(id, "busy", str(error))
    event(_LOG, "refused_by_fault", logging.ERROR, error=f"{type(error).__name__}: {error}")
    return Refusal(id, "internal", f"{type(error).__name__}: {error}")


def token_ids(prompt: bytes) -> list[int]:
    """Ids of a prompt as it travels. Raises ConfigError."""
    if len(prompt) % _ID_BYTES:
        raise ConfigError("prompt", f"{len(prompt)} bytes", "4 bytes a token, little-endian")
    found: list[int] = np.frombuffer(prompt, "<i4").tolist()
    return found


@lru_cache(maxsize=256)
def sampling_params(sampling: Sampling) -> SamplingParams:
    """The same settings as the engine takes them; those that many requests share are checked once. Raises ConfigError."""
    return SamplingParams(
        n=sampling.n, max_tokens=sampling.max_tokens, min_tokens=sampling.min_tokens, temperature=sampling.temperature,
        top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p, seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids, ignore_eos=sampling.ignore_eos, logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs, presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty, repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias or None,
    )  # fmt: skip


def logprob_row(item: TokenLogprobs) -> LogprobRow:
    """As it travels."""
    return LogprobRow(item.token, item.logprob, item.rank, item.top_tokens, item.top_logprobs)


def prompt_rows(request: Request) -> tuple[LogprobRow | None, ...] | None:
    """Log-probs of a prompt, None for its first token; None where none were asked for."""
    if not request.wants_prompt_logprobs:
        return None
    rows: Sequence[LogprobRow] = [logprob_row(item) for item in request.prompt_logprobs]
    return (None, *rows)
