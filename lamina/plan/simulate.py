"""Runs a workload on paper: the real ledger accounts for every page, nothing is computed and time is a formula.

Requests are admitted in the order in which they are ready, extended, checkpointed, preempted and finished call by call as
`schedule/scheduler.py` drives the ledger, but for this: nobody overtakes, and rows are given out in order. A step takes

    tokens prefilled / prefill rate  (+ 1 / decode rate if anything decodes)

and a request that decodes gains one token a step. Rates say when requests meet, and touch memory in no other way. Decodes
are booked block by block: pages change only where a token enters a new block, so one `extend` takes that block and plans
the tokens up to its border, and one `commit` publishes it when the last of them is there.
"""

import heapq
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count as numbers

from lamina.memory.layout import Layout
from lamina.memory.lease import Lease, Refused, Wait
from lamina.memory.ledger import Ledger
from lamina.memory.tokens import Prompt
from lamina.plan.simulation import DEFAULTS, Miss, Moment, Options, Peaks, Served, SimulationReport
from lamina.plan.traces import TokenSource, TraceRequest, shared_tokens

#: requests between two calls of a progress callback
PROGRESS_REQUESTS = 16


#: called at each sampled moment with the moment and the ledger, which must not be changed
Observer = Callable[[Moment, Ledger], None]


def run_trace(
    layout: Layout,
    requests: Iterable[TraceRequest],
    num_pages: int,
    options: Options = DEFAULTS,
    progress: Callable[[int, float], None] | None = None,
    observe: Observer | None = None,
    keep_served: bool = False,
    ledger: Ledger | None = None,
) -> SimulationReport:
    """Serves the requests, which come by arrival, from a pool of `num_pages` pages.

    progress     called with the requests that have ended and the simulated seconds.
    observe      called at each sampled moment.   keep_served  fills `served` and `held`.
    ledger       a ledger of this layout and pool to use instead of a new one, to try other rules of eviction.
    Raises ConfigError for a pool without pages and, while reading, for a trace that is wrong.
    """
    if ledger is None:
        ledger = Ledger(layout, num_pages, min_checkpoint_gain=options.min_checkpoint_gain)
    return _Simulation(ledger, iter(requests), options, progress, observe, keep_served).run()


@dataclass(slots=True, eq=False)
class _Job:
    """One request on its way.

    prompt  its tokens, encoded, while it is the next to be admitted.
    drawn  answer tokens drawn; the last one is known and not yet computed.   jump  decode tokens planned from `jump_from` on
    (a count of steps).   order  of the first admission.   plan  number of the first plan that could admit it.
    """

    request: TraceRequest
    ready: float
    prompt: Prompt | None = None
    lease: Lease | None = None
    order: int = 0
    drawn: int = 0
    jump: int = 0
    jump_from: int = 0
    peak: int = 0
    plan: int = 0
    admitted: float | None = None
    hit_tokens: int = 0
    preemptions: int = 0
    has_prompt_checkpoint: bool = False

    @property
    def known(self) -> int:
        """Tokens whose ids are known."""
        return self.request.prompt_tokens + self.drawn


class _Simulation:
    """The loop: plan a step, let its time pass, apply it."""

    def __init__(
        self, ledger: Ledger, requests: Iterator[TraceRequest], options: Options,
        progress: Callable[[int, float], None] | None, observe: Observer | None, keep_served: bool,
    ) -> None:  # fmt: skip
        self.ledger = ledger
        self.layout = ledger.layout
        self.options = options
        self.progress = progress
        self.tokens = TokenSource()
        self.requests = requests
        self.next = next(requests, None)
        self.now = self.next.arrival if self.next is not None else 0.0
        self.start = self.now
        self.steps = self.plans = 0
        self.waiting: deque[_Job] = deque()
        self.running: dict[_Job, None] = {}  # in their order
        self.prefilling: dict[_Job, None] = {}  # of these, with known tokens left to compute
        self.due: list[_Job] = []  # decodes whose next tokens are not planned
        self.jumps: list[tuple[int, int, _Job]] = []  # (step at whose end it is done, order, job); stale ones are skipped
        self.orders = numbers()
        self.busy: dict[tuple[str, str], deque[TraceRequest]] = {}  # turns that wait for their session's last one
        self.blocked: _Job | None = None  # the head of the queue, told to wait; nothing that matters has changed since
        self.books = _Books(ledger, options, observe, keep_served)

    def run(self) -> SimulationReport:
        """Until all requests have ended."""
        while self._arrive():
            slices, checkpoints = self._plan()
            self.ledger.take_orders()
            for job in checkpoints:
                assert job.lease is not None
                self.ledger.checkpoint(job.lease)
            self.ledger.take_orders()
            self.plans += 1
            self._let_pass(slices)
            self._apply(slices)
            if not self.running:
                self.books.hold(self.now)
        return self.books.report(self.now - self.start, self.steps, self.tokens)

    # -- time

    def _arrive(self) -> bool:
        """Queues what has arrived; with nothing to do, waits for it. False when all is done."""
        if self.next is not None and not self.waiting and not self.running:
            self.now = max(self.now, self.next.arrival)
        while self.next is not None and self.next.arrival <= self.now:
            request = self.next
            self.next = next(self.requests, None)
            self.books.seen(request)
            if request.session is not None:
                key = (request.cache_salt, request.session)
                if key in self.busy:
                    self.busy[key].append(request)
                    continue
                self.busy[key] = deque()
            self.waiting.append(_Job(request, request.arrival, plan=self.plans))
        return bool(self.waiting or self.running or self.next is not None)

    def _let_pass(self, slices: list[tuple[_Job, int]]) -> None:
        """One step, or as many as change no page and admit nobody."""
        options = self.options
        steps = 1
        while self.jumps and not self._is_current(self.jumps[0]):
            heapq.heappop(self.jumps)
        if not slices and self.jumps:
            steps = self.jumps[0][0] - self.steps
            if self.next is not None and not self.waiting and len(self.running) < options.max_requests:
                until = (self.next.arrival - self.now) * options.decode_rate
                steps = max(1, min(steps, int(until) + 1))
        prefilled = sum(count for _, count in slices)
        decodes = len(self.running) > len(self.prefilling)
        seconds = prefilled / options.prefill_rate
        seconds += steps / options.decode_rate if decodes or any(not count for _, count in slices) else 0.0
        self.books.passed(self.now, seconds, self.steps, self.running, len(self.waiting))
        self.steps += steps
        self.now += seconds

    # -- planning

    def _plan(self) -> tuple[list[tuple[_Job, int]], list[_Job]]:
        """The prefill slices of the next step and who gets a checkpoint behind them; plans decodes as well."""
        options = self.options
        slices: list[tuple[_Job, int]] = []
        checkpoints: list[_Job] = []
        decodes = len(self.running) - len(self.prefilling)
        budget = max(1, options.max_step_tokens - decodes)
        gave_up = False
        for job in sorted([*self.due, *self.prefilling], key=self._turn):
            if job.lease is None or (budget == 0 and job in self.prefilling):
                continue  # preempted for an earlier one
            if job not in self.prefilling:
                gave_up |= not self._plan_jump(job, checkpoints)
                continue
            count = self._wanted(job, budget)
            granted = self._extend(job, count)
            if granted is None:
                gave_up = True
                continue
            budget -= granted
            self._take(job, granted, slices, checkpoints)
        self.due = []
        while not gave_up and budget > 0 and len(self.running) < options.max_requests and (new := self._admit()):
            count = self._wanted(new, budget)
            granted = self._extend(new, count)
            if granted is None:
                break
            budget -= granted
            self._take(new, granted, slices, checkpoints)
        return slices, checkpoints

    def _turn(self, job: _Job) -> tuple[bool, int]:
        """Who is planned first: those with one token to compute, whether it was drawn or is a prompt's last."""
        return job in self.prefilling and job.lease is not None and job.known - job.lease.position > 1, job.order

    def _admit(self) -> _Job | None:
        """Admits the head of the queue if it fits; one that lost its memory takes its old place among those that run."""
        ledger, request = self.ledger, None
        while self.waiting:
            job = self.waiting[0]
            if job is self.blocked:
                return None
            request = job.request
            if job.prompt is None:
                job.prompt = ledger.prompt(self.tokens.ids(request, 0, job.known), request.cache_salt)
            lease = ledger.admit(job.prompt, request.output_tokens - job.drawn, name=str(request.number))
            if isinstance(lease, Wait):
                self.blocked = job
                return None
            self.waiting.popleft()
            job.prompt = None
            if isinstance(lease, Refused):
                self.books.refused += 1
                self._next_turn(request)
                continue
            job.lease, job.order = lease, job.order if job.preemptions else next(self.orders)
            last = next(reversed(self.running), job)
            self.running[job] = None
            if job.order < last.order:
                self.running = dict.fromkeys(sorted(self.running, key=lambda other: other.order))
            self.prefilling[job] = None
            self.books.admitted(job, self.now, self.plans > job.plan)
            return job
        return None

    def _wanted(self, job: _Job, budget: int) -> int:
        """Tokens to the next cut, within the budget."""
        lease, request, interval = job.lease, job.request, self.options.checkpoint_interval
        assert lease is not None
        stop, cuts = min(job.known, lease.position + budget), []
        if not job.has_prompt_checkpoint:
            cuts.append(request.prompt_tokens)
        if lease.junction is not None:
            cuts.append(lease.junction)
        if lease.valid_from:
            cuts.append(lease.write_from)
        if interval is not None:
            cuts.append((lease.position // interval + 1) * interval)
        return min([stop, *(cut for cut in cuts if lease.position < cut)]) - lease.position

    def _take(self, job: _Job, count: int, slices: list[tuple[_Job, int]], checkpoints: list[_Job]) -> None:
        lease, interval = job.lease, self.options.checkpoint_interval
        assert lease is not None
        stop, prompt = lease.position, job.request.prompt_tokens
        slices.append((job, count))
        if stop == prompt:
            if not job.has_prompt_checkpoint and count:
                checkpoints.append(job)
            job.has_prompt_checkpoint = True
        elif stop == lease.junction or (interval is not None and stop % interval == 0):
            checkpoints.append(job)
        job.peak = max(job.peak, stop)

    def _plan_jump(self, job: _Job, checkpoints: list[_Job]) -> bool:
        """Plans a decode's tokens up to the next block border or its end; False if it was preempted instead."""
        lease, interval = job.lease, self.options.checkpoint_interval
        assert lease is not None
        job.jump = self._jump(lease.position, job.request.output_tokens - job.drawn)
        job.jump_from = self.steps
        granted = self._extend(job, job.jump)
        if granted is None:
            return False
        job.jump = granted
        heapq.heappush(self.jumps, (self.steps + job.jump, job.order, job))
        if interval is not None and lease.position % interval == 0:
            checkpoints.append(job)
        return True

    def _jump(self, position: int, most: int) -> int:
        """Tokens, at most so many, after which the pages are still those that the first of them needs."""
        size, interval = self.layout.block_tokens, self.options.checkpoint_interval
        most = min(size - position % size, most)
        if interval is not None:  # the token that reaches a checkpoint is a step of its own
            most = min(most, max(1, interval - 1 - position % interval))
        for tail in self.layout.tails:
            live = tail.live_blocks(position + 1)
            if tail.live_blocks(position + most) != live:
                most = next(n for n in range(1, most + 1) if tail.live_blocks(position + n + 1) != live)
        return most

    def _extend(self, job: _Job, wanted: int) -> int | None:
        """Takes the pages of as many tokens as there is room for, preempting the last to come where there is none.

        None where the job itself had to go.
        """
        assert job.lease is not None
        while True:
            count = self.ledger.room(job.lease, wanted)
            if count or not wanted:
                granted = self.ledger.extend(job.lease, count)
                assert granted
                return count
            victim = next(reversed(self.running))  # older ones have been planned in this step
            if victim is job:
                job.jump = 0  # nothing of it was planned
            self._preempt(victim)
            if victim is job:
                return None

    def _preempt(self, job: _Job) -> None:
        """Its memory is frozen where it stands; it waits at the front."""
        lease = job.lease
        assert lease is not None
        if job.jump:
            done = self.steps - job.jump_from
            self._commit(job, done)
            self.ledger.rollback(lease, lease.in_flight)
            job.drawn += done
            job.jump = 0
        job.peak = max(job.peak, lease.position)
        self.books.ended(lease)
        self.ledger.preempt(lease)
        del self.running[job]
        self.prefilling.pop(job, None)
        job.lease = None
        job.preemptions += 1
        self.blocked = None
        self.waiting.appendleft(job)

    # -- applying

    def _apply(self, slices: list[tuple[_Job, int]]) -> None:
        for job, count in slices:
            lease = job.lease
            assert lease is not None
            self._commit(job, count)
            if lease.position == job.known:
                del self.prefilling[job]
                self._draw(job, 1)
        while self.jumps and self.jumps[0][0] <= self.steps:
            entry = heapq.heappop(self.jumps)
            job = entry[2]
            if self._is_current(entry):
                count, job.jump = job.jump, 0
                self._commit(job, count)
                self._draw(job, count)

    def _draw(self, job: _Job, count: int) -> None:
        """Books drawn tokens: the request ends, or its next ones are due."""
        job.drawn += count
        assert job.lease is not None
        if job.drawn < job.request.output_tokens:
            self.due.append(job)
            return
        self.books.ended(job.lease)
        self.ledger.finish(job.lease)
        self.blocked = None
        del self.running[job]
        self.books.finished(job, self.now)
        self._next_turn(job.request)
        if self.progress is not None and self.books.num_finished % PROGRESS_REQUESTS == 0:
            self.progress(self.books.num_finished, self.now)

    def _next_turn(self, request: TraceRequest) -> None:
        """A session's next turn may be sent once its last one has ended."""
        if request.session is None:
            return
        key = (request.cache_salt, request.session)
        held = self.busy[key]
        if held:
            self.waiting.append(_Job(held.popleft(), self.now, plan=self.plans))
        else:
            del self.busy[key]

    def _commit(self, job: _Job, count: int) -> None:
        lease = job.lease
        assert lease is not None
        start, twins = lease.committed, self.ledger.stats.twins
        self.ledger.commit(lease, self.tokens.ids(job.request, start, start + count))
        # What the head of the queue needs has changed only if pages came back or more of its own prompt was published.
        head = self.blocked
        came_back = self.layout.tails or self.ledger.stats.twins > twins
        if head is not None and (came_back or shared_tokens(head.request, job.request) > start):
            self.blocked = None

    def _is_current(self, entry: tuple[int, int, _Job]) -> bool:
        end, order, job = entry
        return job.jump > 0 and job.order == order and job.jump_from + job.jump == end


class _LiveBytes:
    """Live bytes of a request, all memories together. Layers that remember alike are counted once and multiplied."""

    def __init__(self, layout: Layout) -> None:
        self._groups = Counter(replace(memory, layer=0) for memory in layout.memories)
        self._hidden = layout.hidden.nbytes if layout.hidden is not None else 0

    def at(self, position: int) -> int:
        """At a position."""
        return sum(memory.live_bytes(position) * layers for memory, layers in self._groups.items()) + self._hidden * (
            position > 0
        )


class _Books:
    """Counts what happens."""

    def __init__(self, ledger: Ledger, options: Options, observe: Observer | None, keep_served: bool) -> None:
        self.ledger = ledger
        self.layout = ledger.layout
        self.options = options
        self.observe = observe
        self.keep_served = keep_served
        self.num_requests = self.num_finished = self.refused = self.waited = self.preemptions = self.recomputed = 0
        self.prompt_tokens = self.output_tokens = self.hit_tokens = self.hits = self.reusable = 0
        self.waits: array[float] = array("d")
        self.misses: dict[str, list[int]] = {}
        self.served: list[Served] = []
        self.moments: list[Moment] = []
        self.peaks = [0] * 7
        self.peak_running = 0
        self.running_seconds = self.total_seconds = 0.0
        self.published = 0  # blocks that requests have put into the index or found there as twins
        self.held: list[tuple[float, int]] = []
        self._every, self._next_moment = 0.0, 0.0
        self._live = _LiveBytes(ledger.layout)
        self._said: dict[tuple[str, str], int] = {}
        self._prefixes: dict[tuple[str, str], int] = {}

    def seen(self, request: TraceRequest) -> None:
        """A request has arrived: what it repeats of the trace before it."""
        self.num_requests += 1
        salt, said, known = request.cache_salt, 0, 0
        if request.prefix is not None:
            known = self._prefixes.get((salt, request.prefix), 0)
            self._prefixes[salt, request.prefix] = max(known, request.prefix_tokens)
        if request.session is not None:
            said = self._said.get((salt, request.session), 0)
            self._said[salt, request.session] = request.total_tokens - 1  # the last token drawn is never computed
        self.reusable += max(min(said, request.prompt_tokens), min(known, request.prefix_tokens))

    def admitted(self, job: _Job, now: float, has_waited: bool) -> None:
        """A request runs, for the first time or again."""
        lease, request = job.lease, job.request
        assert lease is not None
        if job.admitted is not None:
            self.recomputed += max(0, job.peak - lease.position)
            return
        job.admitted, job.hit_tokens = now, lease.position
        self.waits.append(now - job.ready)
        self.waited += has_waited
        self.prompt_tokens += request.prompt_tokens
        self.hit_tokens += lease.position
        self.hits += lease.position > 0
        row = self.misses.setdefault(lease.hit.reason, [0, 0])
        row[0] += 1
        row[1] += request.prompt_tokens - lease.position

    def ended(self, lease: Lease) -> None:
        """A lease is about to end."""
        size = self.layout.block_tokens
        self.published += max(0, lease.committed // size - lease.hit.log_tokens // size)

    def finished(self, job: _Job, now: float) -> None:
        """A request has its answer."""
        self.num_finished += 1
        self.output_tokens += job.request.output_tokens
        self.preemptions += job.preemptions
        if self.keep_served:
            assert job.admitted is not None
            self.served.append(Served(job.request.number, job.ready, job.admitted, now, job.hit_tokens, job.preemptions))

    def passed(self, now: float, seconds: float, steps: int, running: Iterable[_Job], waiting: int) -> None:
        """A planned step is about to run: counts pages, and keeps a moment now and then."""
        jobs = list(running) if now >= self._next_moment else []
        pages = self.ledger.pages()
        held = pages.blocks + pages.tails + pages.slots
        used = self.ledger.num_pages - pages.free
        counts = (used, held, pages.blocks, pages.tails, pages.slots, pages.cached, pages.checkpoints)
        self.peaks = [max(pair) for pair in zip(self.peaks, counts, strict=True)]
        num_running = len(self.ledger.leases)
        self.peak_running = max(self.peak_running, num_running)
        self.running_seconds += num_running * seconds
        self.total_seconds += seconds
        self.hold(now)
        if now >= self._next_moment:
            moment = Moment(now, num_running, waiting, pages, self._padding(jobs, steps))
            self._keep(moment)
            if self.observe is not None:
                self.observe(moment, self.ledger)

    def hold(self, now: float) -> None:
        """Notes what running requests hold from now on."""
        pages = self.ledger.pages()
        held = pages.blocks + pages.tails + pages.slots
        if self.keep_served and (not self.held or self.held[-1][1] != held):
            self.held.append((now, held))

    def _keep(self, moment: Moment) -> None:
        """At most twice num_samples moments: when there are more, they are thinned out and come further apart from then on."""
        self.moments.append(moment)
        if len(self.moments) > 2 * self.options.num_samples:
            self._every = (moment.time - self.moments[0].time) / self.options.num_samples
            kept = self.moments[:1]
            for one in self.moments:
                if one.time >= kept[-1].time + self._every:
                    kept.append(one)
            self.moments = kept
        self._next_moment = moment.time + self._every

    def _padding(self, jobs: list[_Job], steps: int) -> float:
        """Share of the pages of running requests without a live byte. What several share counts for each of them."""
        live = pages = 0
        for job in jobs:
            lease = job.lease
            assert lease is not None
            position = lease.committed + steps - job.jump_from if job.jump else lease.position
            position = max(position, lease.write_from)  # while a slot is rebuilt, the log is longer than what was computed
            live += self._live.at(position)
            pages += len(lease.blocks) + len(lease.slot) + sum(len(block) for held in lease.tails for block in held.values())
        return 1 - live / (pages * self.layout.page_bytes) if pages else 0.0

    def report(self, seconds: float, steps: int, tokens: TokenSource) -> SimulationReport:
        """All of it."""
        ledger, stats = self.ledger, self.ledger.stats
        evicted_blocks = self.published - stats.twins - len(ledger.index)
        misses = tuple(Miss(reason, *row) for reason, row in sorted(self.misses.items(), key=lambda item: -item[1][1]))
        return SimulationReport(
            num_pages=ledger.num_pages, page_bytes=self.layout.page_bytes, requests=self.num_requests,
            finished=self.num_finished, refused=self.refused, prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens, reusable_tokens=self.reusable, hit_tokens=self.hit_tokens, hits=self.hits,
            recomputed_tokens=self.recomputed, preemptions=self.preemptions, waited=self.waited,
            wait_s=tuple(self.waits), evicted_blocks=evicted_blocks,
            evicted_checkpoints=ledger.evictions - evicted_blocks, checkpoints=stats.checkpoints,
            skipped_checkpoints=stats.checkpoints_skipped, takeovers=stats.takeovers, twins=stats.twins, seconds=seconds,
            steps=steps, mean_running=self.running_seconds / self.total_seconds if self.total_seconds else 0.0,
            peak_running=self.peak_running, peaks=Peaks(*self.peaks), misses=misses, moments=tuple(self.moments),
            served=tuple(sorted(self.served, key=lambda one: one.number)), held=tuple(self.held),
        )  # fmt: skip
