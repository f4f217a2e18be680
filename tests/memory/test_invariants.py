"""I1-I6, I9, I10, I12 and I13 on random traces, with real bytes behind them."""

import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lamina.memory.check as check
import lamina.memory.prefix as prefix
import lamina.memory.tokens as token_keys
from lamina.memory.layout import Layout
from lamina.memory.lease import Lease, Refused
from lamina.memory.ledger import Ledger
from lamina.memory.orders import SaveSlot
from lamina.memory.prefix import Hit, TailPages
from lamina.memory.segments import Segment, pack, segments, unpack, wire_bytes
from tests.memory.device import FREE, Device, prefix_digest
from tests.memory.shapes import logs_only, paged, paged_only, replayed, scans_only, tiny, v4_flash
from tests.memory.trace import Trace

LAYOUTS: dict[str, Callable[[], Layout]] = {
    "tiny": tiny, "tiny8": lambda: tiny(8), "no_hidden": lambda: tiny(hidden=False),
    "logs_only": logs_only, "scans_only": scans_only, "paged": paged, "paged_only": paged_only, "replayed": replayed,
    "tiny_drafts": lambda: tiny(draft_tokens=3), "paged_drafts": lambda: paged(draft_tokens=7),
}  # fmt: skip
SMALL = st.integers(0, (1 << 12) - 1)
STEPS = st.lists(st.tuples(SMALL, SMALL, SMALL, SMALL), min_size=20, max_size=60)
QUICK = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize(
    ("name", "adopt_twins"),
    [
        pytest.param(name, adopts, marks=[] if adopts or not name.endswith("drafts") else [pytest.mark.long])
        for name in LAYOUTS
        for adopts in (True, False)
    ],
)
def test_any_order_of_calls(name: str, adopt_twins: bool) -> None:
    """I1-I6, I9, I10 after every call; the trace compares with oracles of its own."""

    @QUICK
    @given(STEPS, st.integers(3, 20), st.sampled_from([1, 2, 5]))
    def run(steps: list[tuple[int, int, int, int]], num_pages: int, gain: int) -> None:
        trace = Trace(LAYOUTS[name](), num_pages, adopt_twins, gain)
        for step in steps:
            trace.step(*step)
        trace.close()

    run()


def test_traces_reach_the_corners() -> None:
    """The traces are worth something only if they hit, wait, refuse, adopt, take over, evict and guess."""
    seen: dict[str, int] = {}
    for seed in range(60):
        rng = random.Random(seed)
        layout = replayed() if seed % 3 == 0 else tiny(draft_tokens=3) if seed % 9 == 1 else tiny()
        trace = Trace(layout, rng.randint(5, 16))
        for _ in range(120):
            trace.step(*(rng.randrange(1 << 12) for _ in range(4)))
        trace.close()
        stats = trace.ledger.stats
        now = {**trace.seen, "twins": stats.twins, "takeovers": stats.takeovers, "evictions": trace.ledger.evictions}
        seen = {key: seen.get(key, 0) + value for key, value in now.items()}
    assert min(seen.values()) > 0, seen


def test_a_pinned_window_that_a_second_request_takes_up_is_counted_for_neither() -> None:
    """Calls that once left a stale reservation: the pinned page of a large window, held by one request and then by two."""
    rng = random.Random(195)
    trace = Trace(paged_only(), rng.randint(6, 14))
    for _ in range(33):
        trace.step(*(rng.randrange(1 << 12) for _ in range(4)))
    trace.close()
    assert trace.seen["pinned"]


def test_colliding_keys_never_give_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is a hint: with keys of two values the traces still hold, only less is shared."""

    def weak(parent: bytes, block: bytes) -> bytes:
        return bytes([sum(block) % 2]) * token_keys.KEY_BYTES

    for module in (prefix, token_keys, check):
        monkeypatch.setattr(module, "block_key", weak)
    for seed in range(30):
        rng = random.Random(seed)
        trace = Trace(tiny(), 16, adopt_twins=False)
        trace.keeps = False  # what users name by its key would be something else
        for _ in range(80):
            trace.step(*(rng.randrange(1 << 12) for _ in range(4)))
        trace.close()


# -- I12: everything that is admitted ends, and its answer does not depend on what else ran


@dataclass(eq=False)
class Job:
    """A request with the answer it must give: each token follows from all before it."""

    prompt: list[int]
    max_new: int
    salt: str
    tokens: list[int]
    lease: Lease | None = None

    @property
    def end(self) -> int:
        return len(self.prompt) + max(self.max_new - 1, 0)


def next_token(salt: str, tokens: list[int]) -> int:
    return prefix_digest(salt, tuple(tokens))[0] & 1


class Drive:
    """A small scheduler: first come first served, overlap of `lag` steps, preempts the last to come."""

    def __init__(self, layout: Layout, num_pages: int, jobs: list[Job], lag: int, rng: random.Random, adopt_twins: bool) -> None:
        self.layout, self.rng, self.lag = layout, rng, lag
        self.ledger = Ledger(layout, num_pages, adopt_twins=adopt_twins, min_checkpoint_gain=3)
        self.device = Device(layout, num_pages)
        self.waiting, self.running = deque(jobs), list[Job]()
        self.closing: list[tuple[Job, Lease]] = []
        self.steps: deque[list[tuple[Lease, list[int], Job]]] = deque()
        self.preemptions = 0

    def preempt(self, job: Job) -> None:
        assert job.lease is not None
        self.ledger.preempt(job.lease)
        self.running.remove(job)
        self.closing.append((job, job.lease))
        self.preemptions += 1
        self.collect()

    def collect(self) -> None:
        for job, lease in list(self.closing):
            if lease.ended:
                self.closing.remove((job, lease))
                job.lease = None
                if lease.committed < job.end:  # else its last token is known
                    self.waiting.appendleft(job)

    def plan(self) -> bool:
        """One step, as the engine orders it: copies, slices, copies. False if nothing could run."""
        slices: list[tuple[Job, int, int, list[int]]] = []
        preempted = False
        for job in list(self.running):
            if job in self.running:
                preempted = self.extend(job, slices) or preempted
        while self.waiting and not preempted and len(self.running) < 5:
            job = self.waiting[0]
            lease = self.ledger.admit(job.tokens, len(job.prompt) + job.max_new - len(job.tokens), job.salt)
            assert not isinstance(lease, Refused), "I12: refused, though it fits alone"
            if not isinstance(lease, Lease):
                assert self.running or self.closing, "I12: waits, though nothing runs"
                break
            self.waiting.popleft()
            self.running.append(job)
            job.lease = lease
            preempted = self.extend(job, slices)
        self.execute()
        for job, start, stop, blocks in slices:
            lease = job.lease
            if lease is None or job not in self.running:
                continue
            self.device.check_log(job.salt, job.tokens, start, blocks)
            if lease._is_exact_at(start):
                self.device.check_slot(job.salt, job.tokens, start, lease.slot, frozen=False)
                self.device.check_tails(job.salt, job.tokens, start, lease.tails)
            self.device.compute(job.salt, job.tokens, start, stop, blocks, lease.slot, lease)
            if stop == len(job.tokens) <= job.end:
                job.tokens.append(next_token(job.salt, job.tokens))
        made = [job.lease for job, _, _, _ in slices if job.lease is not None and job in self.running and self.rng.random() < 0.4]
        for lease in made:
            self.ledger.checkpoint(lease)
        self.execute()
        live = [(job, start, stop) for job, start, stop, _ in slices if job in self.running]
        self.steps.append([(job.lease, job.tokens[start:stop], job) for job, start, stop in live if job.lease is not None])
        self.ledger.check()
        return bool(live)

    def extend(self, job: Job, slices: list[tuple[Job, int, int, list[int]]]) -> bool:
        """Plans the job's next slice. True if someone was preempted for it."""
        lease = job.lease
        assert lease is not None
        if lease.position == len(job.tokens) <= job.end:  # a full hit: the hidden vector gives the next token
            self.execute()
            self.device.check_slot(job.salt, job.tokens, lease.position, lease.slot, frozen=False)
            job.tokens.append(next_token(job.salt, job.tokens))
        count = min(self.rng.randint(1, 6), len(job.tokens) - lease.position, job.end - lease.position)
        count = self.ledger.room(lease, count) or min(count, 1)
        busy = {id(other) for other, _, _, _ in slices}
        preempted = False
        while not self.ledger.extend(lease, count):
            preempted = True
            victim = next((other for other in reversed(self.running) if id(other) not in busy), job)
            self.preempt(victim)
            if victim is job or self.closing:
                return True
        if count > 0:
            slices.append((job, lease.position - count, lease.position, list(lease.blocks)))
        return preempted

    def execute(self) -> None:
        for order in self.ledger.take_orders():
            self.device.execute(order)
        for page in range(self.ledger.num_pages):
            if not self.ledger.arena.lease_refs(page) and not self.ledger.arena.cache_refs(page):
                self.device.pages[page] = FREE

    def apply(self) -> None:
        for lease, tokens, _ in self.steps.popleft():
            self.ledger.commit(lease, tokens)
        for job in list(self.running):
            if job.lease is not None and job.lease.committed == job.end:
                self.ledger.finish(job.lease)
                self.running.remove(job)
        self.collect()
        self.ledger.check()

    def run(self) -> None:
        for _ in range(3000):
            if not (self.waiting or self.running or self.closing):
                break
            self.plan()
            if len(self.steps) > self.lag:
                self.apply()
        assert not (self.waiting or self.running or self.closing), "I12: requests do not end"
        while self.steps:
            self.apply()
        self.execute()
        self.ledger.drop_index()
        self.ledger.check()
        assert self.ledger.free_pages == self.ledger.num_pages, "I6: pages are lost"


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("name", ["tiny", "no_hidden", "logs_only", "scans_only"])
def test_everything_admitted_ends_under_pressure(name: str, lag: int) -> None:
    """I12, and the answers are the same whatever was hit, preempted, taken over or adopted."""
    preemptions = 0
    for seed in range(12):
        rng = random.Random(seed)
        layout = LAYOUTS[name]()
        stem = [rng.randrange(2) for _ in range(14)]
        jobs = []
        for _ in range(8):
            prompt = [*stem[: rng.randrange(15)], *(rng.randrange(2) for _ in range(rng.randrange(1, 6)))]
            jobs.append(Job(prompt, rng.randrange(0, 9), rng.choice(["", "", "x"]), list(prompt)))
        largest = max(layout.pages_for(job.end) for job in jobs)
        drive = Drive(layout, largest + rng.randrange(4), jobs, lag, rng, seed % 3 != 0)
        drive.run()
        preemptions += drive.preemptions
        for job in jobs:
            answer = list(job.prompt)
            while len(answer) < len(job.prompt) + job.max_new:
                answer.append(next_token(job.salt, answer))
            assert job.tokens[: len(answer)] == answer, "I9: an answer depends on what else ran"
    assert preemptions or name == "scans_only"


def test_a_request_that_fits_alone_never_waits_alone() -> None:
    """I12: whatever the index holds, and however exactly the request fits."""
    for seed in range(200):
        rng = random.Random(seed)
        layout = rng.choice([tiny(), tiny(8), logs_only()])
        num_pages = rng.randint(layout.slot_pages + 1, 10)
        ledger = Ledger(layout, num_pages, min_checkpoint_gain=1)
        stem = [rng.randrange(2) for _ in range(60)]
        for _ in range(12):
            most = (num_pages - layout.slot_pages) * layout.block_tokens
            length = rng.randint(1, most)
            max_new = most - length + 1 if rng.random() < 0.5 else rng.randint(0, most - length + 1)
            prompt = stem[:length] if rng.random() < 0.8 else [1 - stem[0], *stem[1:length]]
            lease = ledger.admit(prompt, max_new)
            assert isinstance(lease, Lease)
            while lease.position < length + max(max_new - 1, 0):
                assert ledger.extend(lease, min(rng.randint(1, 5), length + max(max_new - 1, 0) - lease.position))
                if rng.random() < 0.5:
                    ledger.checkpoint(lease)
                if rng.random() < 0.5:
                    known = list(lease.tokens[lease.committed : lease.position])
                    ledger.commit(lease, known + [0] * (lease.in_flight - len(known)))
            ledger.check()
            rng.choice([ledger.finish, ledger.preempt, ledger.cancel])(lease)
            if not lease.ended:
                known = list(lease.tokens[lease.committed : lease.position])
                ledger.commit(lease, known + [0] * (lease.in_flight - len(known)))
            ledger.check()


# -- I13


def copy_through_segments(layout: Layout, position: int, frozen_source: bool, frozen_target: bool) -> None:
    """Moves a request between two arenas whose page ids have nothing in common."""
    tokens = [at % 7 for at in range(position)]
    blocks = layout.blocks_for(position) if layout.has_logs else 0
    windows = sum(tail.pages * -(-position // tail.tokens) for tail in layout.tails)
    most = blocks + 2 * layout.slot_pages + windows
    here, there = Device(layout, most), Device(layout, most + 3)
    table, slot = list(range(blocks)), list(range(blocks, blocks + layout.slot_pages))
    tails, other_tails = window_tables(layout, position, most - windows), window_tables(layout, position, 3 + layout.slot_pages)
    nothing = Hit(0, 0, 0, False, 0, "")
    lease = Lease("", "", array("i"), 0, 0, nothing, 0, 0, None, tails=tails)
    here.compute("", tokens, 0, position, table, slot, lease)

    frozen = list(range(blocks + layout.slot_pages, blocks + layout.slot_pages + layout.checkpoint_pages(position)))
    here.execute(SaveSlot(tuple(slot), tuple(frozen), position))
    source = frozen if frozen_source else slot
    other_table = [len(there.pages) - 1 - number for number in range(blocks)]
    other_slot = list(range(3, 3 + layout.slot_pages))[::-1]

    def place(part: Segment, slot: list[int], table: list[int], tails: list[TailPages]) -> int:
        if part.block is None:
            return slot[part.page]
        return table[part.block] if part.tail is None else tails[part.tail][part.block][part.page]

    def read(part: Segment, offset: int, count: int) -> bytes:
        return here.pages[place(part, source, table, tails), offset : offset + count].tobytes()

    def write(part: Segment, offset: int, data: bytes) -> None:
        page = place(part, other_slot, other_table, other_tails)
        there.pages[page, offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    parts = segments(layout, position, frozen_source)
    message = pack(read, parts)
    assert len(message) == wire_bytes(parts) == sum(layout.live_bytes(position).values())
    unpack(write, segments(layout, position, frozen_target), message)
    there.check_log("", tokens, position, other_table)
    there.check_slot("", tokens, position, other_slot, frozen_target)
    there.check_tails("", tokens, position, other_tails)


def window_tables(layout: Layout, position: int, page: int) -> list[TailPages]:
    """Every block of every large window up to `position`, in pages from `page` on."""
    tables: list[TailPages] = []
    for tail in layout.tails:
        tables.append({})
        for block in range(-(-position // tail.tokens)):
            tables[-1][block] = tuple(range(page, page + tail.pages))
            page += tail.pages
    return tables


@pytest.mark.parametrize("name", LAYOUTS)
def test_segments_round_trip(name: str) -> None:
    """I13: the live bytes are the same after a move, from and into a slot or a checkpoint."""
    for position in range(0, 27):
        for frozen_source in (False, True):
            for frozen_target in (False, True):
                copy_through_segments(LAYOUTS[name](), position, frozen_source, frozen_target)


@pytest.mark.parametrize("position", [0, 1, 3, 4, 127, 128, 129, 255, 256, 257, 1000])
def test_segments_of_a_large_model_are_its_live_bytes(position: int) -> None:
    """No padding travels, and what travels is counted by memory."""
    layout = v4_flash()
    parts = segments(layout, position)
    by_memory: dict[str, int] = {}
    for part in parts:
        by_memory[part.memory] = by_memory.get(part.memory, 0) + part.nbytes
    assert by_memory == {name: size for name, size in layout.live_bytes(position).items() if size}
    assert [part.wire_offset for part in parts] == [sum(p.nbytes for p in parts[:at]) for at in range(len(parts))]
    assert wire_bytes(segments(layout, position, frozen=True)) == wire_bytes(parts)
