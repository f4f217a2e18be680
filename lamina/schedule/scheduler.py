"""Continuous batching: which tokens of which requests run in the next step. No tensors.

`plan` and `apply` are the only mutators. Running requests come before waiting ones, decodes before prefills; otherwise the rules
of `policy.py` say who is first: by priority, and of equals who came first. The last in that order is preempted first.

plan(k + 1) may come before apply(k). Where the runtime overlaps, a request whose token is still being drawn then gets the slice
that computes it, with the id left open: positions advance in `plan`, ids come in `apply`. If the token turns out to end the
request, that slice was for nothing but for the token itself, which stays a part of what can be reused. Memory of what is in
flight is never taken away.

Where all that runs decodes, it is taken as one cohort: see cohort.py.
"""

import logging
from bisect import insort
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from lamina.base.log import event, get_logger
from lamina.memory.lease import Lease, Refused, Wait
from lamina.memory.ledger import Ledger
from lamina.memory.tokens import Prompt
from lamina.schedule.cohort import Cohort, Cohorts, is_decode
from lamina.schedule.draft import Draft, Flight
from lamina.schedule.drafting import DraftRule
from lamina.schedule.grammar import mask_of
from lamina.schedule.guesses import Guesses
from lamina.schedule.policy import (
    ASK_AGAIN_STEPS,
    MAX_ASKED,
    MAX_LOOKED_AT,
    Prefill,
    Room,
    may_overtake,
    share,
    turn_of,
)  # fmt: skip
from lamina.schedule.request import Request, RequestState, by_turn
from lamina.schedule.step import UNKNOWN, Decodes, Sample, Slice, Step, StepResult, TokenLogprobs

_LOG = get_logger(__name__)
_UNKNOWN = (UNKNOWN,)


class Drawn(NamedTuple):
    """One token that a step drew for a request; None where the model's scores were not finite and the request ended."""

    request: Request
    token: int | None
    logprobs: TokenLogprobs | None


_make_drawn = partial(tuple.__new__, Drawn)  # what Drawn._make is, a third of its time


class Scheduler:
    """Plans steps over one ledger.

    max_step_tokens  rows of one step.   max_requests  requests that run at once.   vocab_size  token ids there are.
    checkpoint_interval  tokens after which a checkpoint is made on the way; None: only at ends and junctions.
    overlaps             a token that is being drawn may be computed by the next step.
    drafts               how tokens are drafted ahead; None: they are not.
    """

    def __init__(
        self, ledger: Ledger, max_step_tokens: int, max_requests: int, vocab_size: int, checkpoint_interval: int | None = None,
        overlaps: bool = False, drafts: DraftRule | None = None,
    ) -> None:  # fmt: skip
        self.ledger = ledger
        self.max_step_tokens = max_step_tokens
        self.max_requests = max_requests
        self.vocab_size = vocab_size
        self.checkpoint_interval = checkpoint_interval
        self.overlaps = overlaps
        self.guesses = Guesses(ledger, drafts, checkpoint_interval)
        self.waiting: list[Request] = []  # in turn
        self.running: list[Request] = []  # in turn
        self.num_steps = 0
        self._num_added = 0
        self._flights: dict[int, Flight] = {}  # by step number
        self._closing: list[tuple[Request, Lease]] = []  # ended or preempted with tokens in flight
        self._free_rows = list(range(max_requests))[::-1]
        self._rows: dict[int, int] = {}  # of running requests: their row in the runtime's tables
        self.cohorts = Cohorts(ledger.decodes, gathers=checkpoint_interval is None and ledger.decodes.are_alike)
        self.late_results = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.waiting or self.running)

    @property
    def holders(self) -> list[tuple[Request, Lease]]:
        """Who holds memory: running requests in turn, then those that have stopped with tokens in flight."""
        running = [(request, request.lease) for request in self.running if request.lease is not None]
        return [*running, *((request, lease) for request, lease in self._closing if not lease.ended)]

    def add(self, request: Request) -> None:
        """Queues a request. Whether it can ever fit is the caller's to check before."""
        self._num_added += 1
        request.turn = turn_of(request.priority, self.num_steps, self._num_added)
        request.num_overtaken, request.asked_at = 0, -ASK_AGAIN_STEPS
        self.guesses.begin(request)
        insort(self.waiting, request, key=by_turn)

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
            self._close(request, request.lease)
        self._end(request, reason)

    def preempt(self, request: Request) -> None:
        """Takes a running request's memory; it waits in its old turn and resumes from its own checkpoint.

        With tokens in flight it takes effect when their step is booked; what that step draws is drawn again.
        """
        assert request.state is RequestState.RUNNING and request.lease is not None
        self.ledger.preempt(request.lease)
        self._close(request, request.lease)
        self.running.remove(request)
        self._leave_row(request)
        request.lease, request.num_pending = None, 0
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        request.asked_at = -ASK_AGAIN_STEPS
        insort(self.waiting, request, key=by_turn)
        event(_LOG, "preempted", logging.DEBUG, request=request.name, position_tokens=len(request.tokens))

    def plan(self) -> Step | None:
        """The next step, or None if nothing can run before a result comes."""
        draft, admits = Draft(self.max_step_tokens), True
        prefills: list[Request] = []
        for request in () if self._take_cohort(draft) else list(self.running):
            if draft.budget == 0:
                break
            if request.state is not RequestState.RUNNING:
                continue
            if request.num_pending and not (self.overlaps and request.may_run_ahead and not self.guesses.must_wait(request)):
                continue
            if self._take_guesses(request, draft) or self._take_decode(request, draft):
                continue
            if self._left(request) > 1:
                prefills.append(request)  # they get what is left
            elif not self._advance(request, self._wanted(request, draft.budget), draft):
                admits = False
                if request.state is RequestState.RUNNING:
                    break  # those that come later stop, until the last of them has nothing in flight and gives its memory up
        if prefills or (admits and self.waiting):
            self._plan_prefills(prefills, admits, draft)
        before = self.ledger.take_orders()
        for lease, lasts in draft.checkpoints:
            self.ledger.checkpoint(lease, lasts)
        after = self.ledger.take_orders()
        if not draft.flight.slices and not draft.flight.samples and not before:
            return None
        self.num_steps += 1
        self._flights[self.num_steps] = draft.flight
        return draft.step(self.num_steps, before, after)

    def apply(
        self, step: Step, result: StepResult, requests: dict[int, Request], book: Callable[[Drawn], None] | None = None
    ) -> list[Drawn]:
        """Books what a step gave: published blocks, new tokens, ended requests. Steps are booked in the order of their plans.

        book  called with each token that is returned, before the next one of the same request counts: it may end the request.
        Late results, of requests that have ended or lost their memory meanwhile, are counted and dropped.
        """
        if self._flights[step.number].guesses:
            return self._apply_guesses(step, result, requests, book)
        drawn = self._apply(step, result, requests)
        if book is not None:
            for one in drawn:
                book(one)
        return drawn

    def _apply(self, step: Step, result: StepResult, requests: dict[int, Request]) -> list[Drawn]:
        """`apply` of a step without guesses."""
        flight = self._flights.pop(step.number)
        cohort = self.cohorts.current
        if cohort is not None and cohort.flight is flight and cohort.ids <= requests.keys():
            return self._apply_cohort(cohort, result)
        if step.decodes is not None:
            self._commit_decodes(step.decodes, flight)
        else:
            self._commit_slices(step.slices, flight, result)
        drawn = []
        for (request, lease), token, logprob in zip(flight.samples, result.tokens, result.logprobs, strict=True):
            if request.lease is not lease or request.id not in requests:
                self.late_results += 1
                continue
            request.num_pending -= 1
            self._take_in(request, token)
            drawn.append(Drawn(request, token, logprob))
        self.guesses.propose(flight, result)
        return drawn

    def _take_in(self, request: Request, token: int | None) -> None:
        """One more token of a request, which may end it."""
        request.is_prompt_done = True
        if token is None:
            self.cancel(request, "error")
            return
        request.tokens.append(token)
        if token in request.stop_ids:
            self.finish(request, "stop")
        elif len(request.tokens) - len(request.prompt) >= request.max_new:
            self.finish(request, "length")
        elif request.grammar is not None and not request.goes_on(token):
            self.finish(request, "stop")

    def _apply_guesses(
        self, step: Step, result: StepResult, requests: dict[int, Request], book: Callable[[Drawn], None] | None
    ) -> list[Drawn]:
        """`apply` of a step with guesses: of each request the tokens drawn up to the first that differs from its guess."""
        flight = self._flights.pop(step.number)
        self._commit_slices(step.slices, flight, result)
        drawn: list[Drawn] = []

        def take(request: Request, token: int | None, logprobs: TokenLogprobs | None) -> None:
            self._take_in(request, token)
            drawn.append(Drawn(request, token, logprobs))
            if book is not None:
                book(drawn[-1])

        self.late_results += self.guesses.settle(flight, result, requests, take)
        return drawn

    def _apply_cohort(self, cohort: Cohort, result: StepResult) -> list[Drawn]:
        """`apply` of a step of the cohort that still runs: nobody's result is late, nobody has ended before it."""
        self.ledger.decodes.commit(cohort.leases, [request.tokens[-1] for request in cohort.requests])
        drawn = list(map(_make_drawn, zip(cohort.requests, result.tokens, result.logprobs, strict=True)))
        cohort.to_book -= 1
        for request, token in zip(cohort.requests, result.tokens, strict=True):
            request.num_pending -= 1
            if token is None:
                self.cancel(request, "error")
                continue
            request.tokens.append(token)
            if token in request.stop_ids:
                self.finish(request, "stop")
            elif not cohort.to_book and len(request.tokens) - len(request.prompt) >= request.max_new:
                self.finish(request, "length")
        return drawn

    def _commit_slices(self, slices: Sequence[Slice], flight: Flight, result: StepResult) -> None:
        """Books what has been computed."""
        commit = self.ledger.commit
        for part, (request, lease), logprobs in zip(slices, flight.slices, result.prompt_logprobs, strict=True):
            tokens = part.tokens[: len(part.tokens) - part.num_guesses]
            if tokens == _UNKNOWN:
                if part.start < len(request.tokens):
                    tokens = (request.tokens[part.start],)
                else:  # it was drawn for nobody: what has been computed of it is not known to be of any use
                    self.ledger.cancel(lease)
            commit(lease, tokens)  # an ended lease ignores it, a closing one ends with it
            if request.lease is not lease:
                self.late_results += 1
                continue
            if logprobs:
                request.prompt_logprobs.extend(logprobs)
            if not request.is_prompt_done:
                request.is_prompt_done = part.stop >= len(request.prompt)

    def _commit_decodes(self, decodes: Decodes, flight: Flight) -> None:
        """The same for decodes; their prompts were done before."""
        ids = []
        for (request, lease), start in zip(flight.slices, decodes.positions.tolist(), strict=True):
            if start < len(request.tokens):
                ids.append(request.tokens[start])
            else:
                ids.append(0)
                self.ledger.cancel(lease)
            if request.lease is not lease:
                self.late_results += 1
        self.ledger.decodes.commit([lease for _, lease in flight.slices], ids)

    def _close(self, request: Request, lease: Lease) -> None:
        """Keeps a lease in mind that goes on until its last step has been booked."""
        self._closing = [pair for pair in self._closing if not pair[1].ended]
        if not lease.ended:
            self._closing.append((request, lease))

    def _end(self, request: Request, reason: str) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self._leave_row(request)
        else:
            self.waiting.remove(request)
        request.state = RequestState.FINISHED
        request.lease, request.num_pending = None, 0
        request.finish_reason = reason

    def _leave_row(self, request: Request) -> None:
        """The row of a request that stops running is free for another."""
        self._free_rows.append(self._rows.pop(request.id))
        self.cohorts.leave(request)

    def _plan_prefills(self, running: list[Request], admits: bool, draft: Draft) -> None:
        """Shares the rows that decodes leave among the prefills that run and those that can be admitted, as policy.py says."""
        room = Room(draft.budget)
        shared: list[Request] = []  # who does not simply get all
        parts = [(request, self._prefill(request)) for request in running if request.lease is not None]
        fit = sum(part.wanted for _, part in parts) <= draft.budget
        for request, part in parts:
            if request.state is not RequestState.RUNNING:
                continue  # preempted for an earlier one
            if not fit:
                shared.append(request)
                room.add(part)
            elif not self._advance(request, part.wanted, draft):
                admits = False
                break
        room.rows = draft.budget
        if admits and self.waiting:
            self._admit(room, shared, draft)
        shared.sort(key=by_turn)
        for request, count in zip(shared, share([self._prefill(one) for one in shared], draft.budget), strict=True):
            if count and not self._advance(request, count, draft):
                break

    def _admit(self, room: Room, shared: list[Request], draft: Draft) -> None:
        """Admits who waits, in turn, while there are places, rows and memory; adds who must share the rows to `shared`."""
        blocked: Request | None = None  # the first for whom there is no memory
        at = num_asked = num_seen = 0
        while draft.budget > 0 and len(self.running) < self.max_requests and at < len(self.waiting) and num_seen < MAX_LOOKED_AT:
            request = self.waiting[at]
            at += 1
            if request.parent is not None and not request.parent.has_computed_prompt:
                continue
            num_seen += 1
            if (blocked is not None and not self._may_fit(request)) or not self._gets_rows(request, room):
                continue
            if not self._admit_one(request):
                num_asked += 1
                blocked = blocked or request
                if num_asked > MAX_ASKED or not may_overtake(blocked.num_overtaken, blocked.num_preemptions):
                    return
                continue
            at -= 1
            part = self._prefill(request)
            if part.wanted and (shared or part.wanted > room.rows):  # a full hit needs no rows, and is served at once
                shared.append(request)
                room.add(part)
            elif not self._advance(request, part.wanted, draft, is_new=True):
                return
            else:
                room.rows = draft.budget
            if blocked is not None:
                blocked.num_overtaken += 1
                if not may_overtake(blocked.num_overtaken, blocked.num_preemptions):
                    return

    def _may_fit(self, request: Request) -> bool:
        """Whether it makes sense to ask again for the memory of a request that others wait before."""
        return self.ledger.room_to_admit > request.refused_room or self.num_steps >= request.asked_at + ASK_AGAIN_STEPS

    def _gets_rows(self, request: Request, room: Room) -> bool:
        """Whether it would get rows if it were admitted, with what can be reused of its prompt."""
        left = len(request.tokens)
        if room.has(Prefill(request.turn, 0, left, left)):
            return True
        if request.wants_prompt_logprobs or room.rows <= 0:
            return False
        if request.expected_hit < 0:
            request.expected_hit = self.ledger.longest(self._encoded(request)).position
        left = max(1, left - request.expected_hit)
        return room.has(Prefill(request.turn, request.expected_hit, left, left))

    def _encoded(self, request: Request) -> Prompt:
        if request.encoded is None or len(request.encoded) != len(request.tokens):
            request.encoded = self.ledger.prompt(request.tokens, request.salt)
        return request.encoded

    def _admit_one(self, request: Request) -> bool:
        """Admits a waiting request; False if there is no memory for it now."""
        remaining = request.max_new - request.num_output
        lease = self.ledger.admit(
            self._encoded(request), remaining, name=request.name, use_cache=not request.wants_prompt_logprobs,
            owner=request.owner,
        )  # fmt: skip
        if isinstance(lease, Wait):
            request.refused_room, request.asked_at = self.ledger.room_to_admit, self.num_steps
            return False
        assert not isinstance(lease, Refused), lease  # checked before it was queued
        self.waiting.remove(request)
        insort(self.running, request, key=by_turn)
        self.cohorts.dissolve()
        self._rows[request.id] = self._free_rows.pop()
        request.state = RequestState.RUNNING
        request.lease, request.encoded = lease, None
        if request.wants_prompt_logprobs:
            request.prompt_logprobs.clear()  # nothing of the prompt is skipped, so all of it is reported again
        if request.first_hit is None:
            request.first_hit = lease.hit
            request.cached_tokens = min(lease.position, len(request.prompt))
            self.ledger.lookups.note(lease.hit, len(request.prompt))
        return True

    def _left(self, request: Request) -> int:
        """Tokens known, or being drawn, that no step has computed."""
        assert request.lease is not None
        return len(request.tokens) + request.num_pending - request.lease.position

    def _prefill(self, request: Request) -> Prefill:
        assert request.lease is not None
        left = self._left(request)
        return Prefill(request.turn, request.lease.position, self._wanted(request, left), left)

    def _advance(self, request: Request, wanted: int, draft: Draft, is_new: bool = False) -> bool:
        """Puts the request's next tokens into the step; False if memory is short and it did not get its blocks.

        is_new  it has just been admitted: it draws from a hidden vector where there is nothing to compute.
        """
        count = self._extend(request, wanted, draft)
        if count or (is_new and count is not None):
            self._take(request, count, draft)
        return count is not None

    def _wanted(self, request: Request, budget: int) -> int:
        """Tokens that the request can run now: to its next cut, within the budget."""
        lease = request.lease
        assert lease is not None
        position = lease.position
        stop = min(len(request.tokens) + request.num_pending, position + budget)
        if stop - position > 1:  # one token crosses no cut
            cuts = [len(request.prompt)] if not request.has_prompt_checkpoint else []
            cuts += [cut for cut in (lease.junction, request.keep_at) if cut is not None]
            cuts += [lease.write_from] if lease.valid_from else []
            if self.checkpoint_interval is not None:
                cuts.append((position // self.checkpoint_interval + 1) * self.checkpoint_interval)
            stop = min([stop, *(cut for cut in cuts if position < cut)])
        return stop - position

    def _extend(self, request: Request, wanted: int, draft: Draft) -> int | None:
        """Takes the blocks for the request's next slice, preempting the last in turn if need be.

        Returns the tokens granted (0 where only the hidden vector is sampled, or where a result must come first), or None if
        memory is short and this request did not get its blocks: it has been preempted, or runs on and waits for others.
        """
        lease = request.lease
        assert lease is not None
        while not self.ledger.extend(lease, wanted):
            count = self.ledger.room(lease, wanted)
            if count or (lease.in_flight and self.ledger.layout.tails):  # what is in flight gives pages back
                granted = self.ledger.extend(lease, count)
                assert granted
                return count
            victim = next((other for other in reversed(self.running) if other.id not in draft.planned), request)
            if not self._is_idle(victim) or (victim is request and self.running[-1] is not request):
                return None  # what is in flight ends first, and so do those later in turn that are in this step already
            self.preempt(victim)
            if victim is request:
                return None
        return wanted

    def _is_idle(self, request: Request) -> bool:
        """Whether no part of a request is in flight."""
        lease = request.lease
        return not request.num_pending and lease is not None and lease.in_flight == 0

    def _take_cohort(self, draft: Draft) -> bool:
        """All that runs at once, where each is a decode; False where not."""
        if self._flights and not self.overlaps:
            self.cohorts.dissolve()
            return False
        return self.cohorts.take(self.running, self._rows, self._flights.values(), draft)

    def _take_decode(self, request: Request, draft: Draft) -> bool:
        """The short way of `_extend` and `_take`: the token drawn last of a request that has nothing else to compute.

        False, and nothing has changed, where that is not so, where its block must be had first, or where there is more to it.
        """
        lease = request.lease
        assert lease is not None
        if self.checkpoint_interval is not None or not is_decode(request) or not self.ledger.extend(lease, 1):
            return False
        start, num_pending, params = lease.position - 1, request.num_pending, request.params
        num_output = start + 1 - len(request.prompt)
        known, slices, number = (request, lease), draft.slices, request.id
        row, slot = self._rows[number], lease.slot
        first, pages = self.ledger.new_blocks(lease)
        draft.samples.append(
            Sample(number, len(slices), slot, params, request.seed, request.child, (), (), num_output, (), row)
        )  # fmt: skip
        tokens = _UNKNOWN if num_pending else (request.tokens[start],)
        slices.append(
            Slice(
                number, start, start + 1, tokens, slot, row, first, pages, lease.write_from, lease.valid_from, (), None, True,
                lease.window_pages, 0, self.guesses.wanted(request),
            )
        )  # fmt: skip
        draft.flight.slices.append(known)
        draft.flight.samples.append(known)
        draft.planned.add(number)
        draft.budget -= 1
        request.num_pending = num_pending + 1
        if request.peak_position <= start:
            request.peak_position = start + 1
        return True

    def _take_guesses(self, request: Request, draft: Draft) -> bool:
        """The token drawn last with guesses of what follows. False, and nothing has changed, where there are none."""
        guesses = self.guesses.plan(request, draft.budget - len(self.running))
        if not guesses:
            return False
        lease = request.lease
        assert lease is not None
        draft.spread()
        for place in range(1 + len(guesses)):
            sample = self._sample(request, len(draft.slices), lease.slot, guesses[:place], len(guesses) - place)
            draft.samples.append(sample)
        first, pages = self.ledger.new_blocks(lease)
        part = Slice(
            request.id, lease.position - 1 - len(guesses), lease.position, (request.tokens[-1], *guesses), lease.slot,
            self._rows[request.id], first, pages, lease.write_from, lease.valid_from, windows=lease.window_pages,
            num_guesses=len(guesses), num_wanted=self.guesses.wanted(request),
        )  # fmt: skip
        draft.add_guesses(request, lease, part)
        request.num_pending += 1
        request.peak_position = max(request.peak_position, lease.position)
        return True

    def _take(self, request: Request, count: int, draft: Draft) -> None:
        """Adds the request's slice and sample to the step; a slice that ends where a checkpoint is wanted asks for one."""
        draft.spread()
        lease = request.lease
        assert lease is not None
        stop, slot = lease.position, lease.slot
        start, num_prompt = stop - count, len(request.prompt)
        known = len(request.tokens) + request.num_pending
        index = None
        if count:
            index = len(draft.slices)
            tokens = tuple(request.tokens[start:stop]) or _UNKNOWN
            targets: tuple[int, ...] = ()
            num_logprobs = None
            if start < num_prompt and request.wants_prompt_logprobs:
                targets = request.prompt[start + 1 : stop + 1]
                num_logprobs = request.params.num_prompt_logprobs(self.vocab_size) if targets else None
            first, pages = self.ledger.new_blocks(lease)
            is_decode = start >= num_prompt and start == known - 1 and start >= lease.write_from
            draft.slices.append(
                Slice(
                    request.id, start, stop, tokens, slot, self._rows[request.id], first, pages, lease.write_from,
                    lease.valid_from, targets, num_logprobs, is_decode, lease.window_pages, 0,
                    self.guesses.wanted(request) if stop == known else 0,
                )
            )  # fmt: skip
            draft.flight.slices.append((request, lease))
            draft.budget -= count
        draft.planned.add(request.id)
        request.peak_position = max(request.peak_position, stop)
        if stop == num_prompt:
            if not request.has_prompt_checkpoint and count:
                draft.checkpoints.append((lease, False))
            request.has_prompt_checkpoint = True
        elif stop == request.keep_at:
            draft.checkpoints.append((lease, True))
        elif stop == lease.junction or (self.checkpoint_interval is not None and stop % self.checkpoint_interval == 0):
            draft.checkpoints.append((lease, False))
        if stop == known:
            draft.samples.append(self._sample(request, index, slot))
            draft.flight.samples.append((request, lease))
            request.num_pending += 1

    def _sample(
        self, request: Request, index: int | None, slot: tuple[int, ...], guesses: tuple[int, ...] = (), rows_back: int = 0
    ) -> Sample:
        """The draw that follows what is known, or `guesses` after that."""
        params = request.params
        prompt: tuple[int, ...] = ()
        output: tuple[int, ...] = ()
        if request.looks_at_ids:
            prompt, output = request.prompt, (*request.output, *guesses)
        num_output = len(request.tokens) + request.num_pending + len(guesses) - len(request.prompt)
        mask = request.grammar.mask() if request.grammar is not None else None
        forced = request.forced(num_output)
        if forced is not None:
            mask = mask_of(forced, self.vocab_size)
        return Sample(
            request.id, index, slot, params, request.seed, request.child, prompt, output, num_output, request.banned(num_output),
            self._rows[request.id], mask, rows_back, request.lease.position if request.lease is not None else 0,
        )  # fmt: skip
