"""Continuous batching: which tokens of which requests run in the next step. No tensors.

`plan` and `apply` are the only mutators. plan(k + 1) may come before apply(k): a request that waits for a drawn token then
simply has nothing to plan. First come, first served; running requests before waiting ones; the last to come is preempted first.
"""

import logging
from collections import deque
from dataclasses import dataclass

from lamina.base.log import event, get_logger
from lamina.memory.lease import Lease, Refused, Wait
from lamina.memory.ledger import Ledger
from lamina.schedule.request import Request, RequestState
from lamina.schedule.step import Sample, Slice, Step, StepResult, TokenLogprobs

_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token that a step drew for a request; None where the model's scores were not finite and the request ended."""

    request: Request
    token: int | None
    logprobs: TokenLogprobs | None


class Scheduler:
    """Plans steps over one ledger.

    max_step_tokens  rows of one step.   max_requests  requests that run at once.   vocab_size  token ids there are.
    checkpoint_interval  tokens after which a checkpoint is made on the way; None: only at ends and junctions.
    """

    def __init__(
        self, ledger: Ledger, max_step_tokens: int, max_requests: int, vocab_size: int, checkpoint_interval: int | None = None
    ) -> None:
        self.ledger = ledger
        self.max_step_tokens = max_step_tokens
        self.max_requests = max_requests
        self.vocab_size = vocab_size
        self.checkpoint_interval = checkpoint_interval
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_steps = 0
        self._leases: dict[int, list[Lease]] = {}  # of each step in flight, one a slice
        self._free_rows = list(range(max_requests))[::-1]
        self._rows: dict[int, int] = {}  # of running requests: their row in the runtime's tables
        self.late_results = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queues a request. Whether it can ever fit is the caller's to check before."""
        self.waiting.append(request)

    def cancel(self, request: Request, reason: str = "abort") -> None:
        """Ends a request in any state; pages that are not in the prefix index come back at once. Ended ones are left alone."""
        if request.state is RequestState.FINISHED:
            return
        if request.lease is not None:
            self.ledger.cancel(request.lease)
        self._end(request, reason)

    def finish(self, request: Request, reason: str) -> None:
        """Ends a running request with its answer; what it remembers stays for reuse."""
        if request.state is RequestState.FINISHED:
            return
        if request.lease is not None:
            self.ledger.finish(request.lease)
        self._end(request, reason)

    def preempt(self, request: Request) -> None:
        """Takes a running request's memory; it waits at the front and resumes from its own checkpoint."""
        assert request.state is RequestState.RUNNING and request.lease is not None
        self.ledger.preempt(request.lease)
        self.running.remove(request)
        self._leave_row(request)
        request.lease = None
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        event(_LOG, "preempted", logging.DEBUG, request=request.name, position_tokens=len(request.tokens))

    def plan(self) -> Step | None:
        """The next step, or None if nothing can run before a result comes."""
        budget = self.max_step_tokens
        slices: list[Slice] = []
        samples: list[Sample] = []
        checkpoints: list[Lease] = []
        preempted = False
        for request in list(self.running):
            if request.state is not RequestState.RUNNING or request.awaits_result or budget == 0:
                continue
            count = self._extend(request, budget, {part.request_id for part in slices})
            preempted = preempted or count is None
            if count:
                budget -= count
                self._take(request, count, slices, samples, checkpoints)
        while not preempted and budget > 0 and len(self.running) < self.max_requests:
            admitted = self._admit_next()
            if admitted is None:
                break
            count = self._extend(admitted, budget, {part.request_id for part in slices})
            if count is None:
                break
            budget -= count
            self._take(admitted, count, slices, samples, checkpoints)
        before = self.ledger.take_orders()
        for lease in checkpoints:
            self.ledger.checkpoint(lease)
        after = self.ledger.take_orders()
        if not slices and not samples and not before:
            return None
        self.num_steps += 1
        by_id = {request.id: request.lease for request in self.running if request.lease is not None}
        self._leases[self.num_steps] = [by_id[part.request_id] for part in slices]
        return Step(self.num_steps, before, tuple(slices), tuple(samples), after)

    def apply(self, step: Step, result: StepResult, requests: dict[int, Request]) -> list[Drawn]:
        """Books what a step gave: published blocks, new tokens, ended requests. Late results are counted and dropped."""
        for part, lease, logprobs in zip(step.slices, self._leases.pop(step.number), result.prompt_logprobs, strict=True):
            self.ledger.commit(lease, part.tokens)  # an ended lease ignores it, a closing one ends with it
            request = requests.get(part.request_id)
            if request is None or request.lease is not lease:
                self.late_results += 1
                continue
            request.prompt_logprobs.extend(logprobs)
            request.is_prompt_done = request.is_prompt_done or part.stop >= len(request.prompt)
        drawn = []
        for item, token, logprob in zip(step.samples, result.tokens, result.logprobs, strict=True):
            request = requests.get(item.request_id)
            if request is None or request.state is not RequestState.RUNNING:
                self.late_results += 1
                continue
            request.awaits_result = False
            request.is_prompt_done = True
            drawn.append(Drawn(request, token, logprob))
            if token is None:
                self.cancel(request, "error")
                continue
            request.tokens.append(token)
            if token in request.stop_ids:
                self.finish(request, "stop")
            elif request.num_output >= request.max_new:
                self.finish(request, "length")
        return drawn

    def _end(self, request: Request, reason: str) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self._leave_row(request)
        else:
            self.waiting.remove(request)
        request.state = RequestState.FINISHED
        request.lease = None
        request.finish_reason = reason

    def _leave_row(self, request: Request) -> None:
        """The row of a request that stops running is free for another."""
        self._free_rows.append(self._rows.pop(request.id))

    def _admit_next(self) -> Request | None:
        """Admits the first waiting request that does not wait for a sibling's prompt; None if there is none or it must wait."""
        for request in self.waiting:
            parent = request.parent
            if parent is None or parent.is_prompt_done or parent.state is RequestState.FINISHED:
                break
        else:
            return None
        remaining = request.max_new - request.num_output
        if request.encoded is None or len(request.encoded) != len(request.tokens):
            request.encoded = self.ledger.prompt(request.tokens, request.salt)
        lease = self.ledger.admit(
            request.encoded, remaining, name=request.name, use_cache=not request.wants_prompt_logprobs
        )  # fmt: skip
        if isinstance(lease, Wait):
            return None
        assert not isinstance(lease, Refused), lease  # checked before it was queued
        self.waiting.remove(request)
        self.running.append(request)
        self._rows[request.id] = self._free_rows.pop()
        request.state = RequestState.RUNNING
        request.lease, request.encoded = lease, None
        if request.wants_prompt_logprobs:
            request.prompt_logprobs.clear()  # nothing of the prompt is skipped, so all of it is reported again
        if request.first_hit is None:
            request.first_hit = lease.hit
            request.cached_tokens = min(lease.position, len(request.prompt))
        return request

    def _wanted(self, request: Request, budget: int) -> int:
        """Tokens that the request can run now: to its next cut, within the budget."""
        lease = request.lease
        assert lease is not None
        stop = min(len(request.tokens), lease.position + budget)
        cuts = [len(request.prompt)] if not request.has_prompt_checkpoint else []
        cuts += [lease.junction] if lease.junction is not None else []
        cuts += [lease.write_from] if lease.valid_from else []
        if self.checkpoint_interval is not None:
            cuts.append((lease.position // self.checkpoint_interval + 1) * self.checkpoint_interval)
        return min([stop, *(cut for cut in cuts if lease.position < cut)]) - lease.position

    def _extend(self, request: Request, budget: int, planned: set[int]) -> int | None:
        """Takes the blocks for the request's next slice, preempting the last to come if need be.

        Returns the tokens granted (0 where only the hidden vector is sampled), or None if someone had to be preempted
        and this request did not get its blocks.
        """
        wanted = self._wanted(request, budget)
        lease = request.lease
        assert lease is not None
        while True:
            count = self.ledger.room(lease, wanted)
            if count or not wanted or (lease.in_flight and self.ledger.layout.tails):  # what is in flight gives pages back
                granted = self.ledger.extend(lease, count)
                assert granted
                break
            victim = next((other for other in reversed(self.running) if self._is_idle(other, planned)), request)
            self.preempt(victim)
            if victim is request:
                return None
        return count

    def _is_idle(self, request: Request, planned: set[int]) -> bool:
        """Whether a request can be preempted now: no part of it is planned or in flight."""
        lease = request.lease
        return request.id not in planned and not request.awaits_result and lease is not None and lease.in_flight == 0

    def _take(self, request: Request, count: int, slices: list[Slice], samples: list[Sample], checkpoints: list[Lease]) -> None:
        """Adds the request's slice and sample to the step; a slice that ends where a checkpoint is wanted asks for one."""
        lease = request.lease
        assert lease is not None
        stop = lease.position
        start = stop - count
        index = None
        slot = tuple(lease.slot)
        if count:
            index = len(slices)
            wants = request.wants_prompt_logprobs
            targets = request.prompt[start + 1 : stop + 1] if wants else ()
            num_logprobs = request.params.num_prompt_logprobs(self.vocab_size) if wants and targets else None
            tokens = tuple(request.tokens[start:stop])
            first, pages = self.ledger.new_blocks(lease)
            slices.append(
                Slice(
                    request.id, start, stop, tokens, slot, self._rows[request.id], first, pages, lease.write_from,
                    lease.valid_from, targets, num_logprobs,
                )
            )  # fmt: skip
        request.peak_position = max(request.peak_position, stop)
        if stop == len(request.prompt):
            if not request.has_prompt_checkpoint and count:
                checkpoints.append(lease)
            request.has_prompt_checkpoint = True
        elif stop == lease.junction or (self.checkpoint_interval is not None and stop % self.checkpoint_interval == 0):
            checkpoints.append(lease)
        if stop == len(request.tokens):
            request.awaits_result = True
            samples.append(self._sample(request, index, slot))

    def _sample(self, request: Request, index: int | None, slot: tuple[int, ...]) -> Sample:
        params = request.params
        uses_ids = params.has_penalties
        return Sample(
            request_id=request.id, slice_index=index, slot=slot, params=params, seed=request.seed, child=request.child,
            prompt=request.prompt if uses_ids else (), output=tuple(request.output) if uses_ids else (),
            num_output=request.num_output,
            banned=tuple(sorted(request.stop_ids)) if request.num_output < params.min_tokens else (),
        )  # fmt: skip
