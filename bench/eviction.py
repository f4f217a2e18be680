"""What is kept when room is short: token hit rates of simulated workloads by rule of eviction, beside what was possible.

    python bench/eviction.py [--quick] [--traces agents,flood --layouts compressed --rules lru,ledger --json FILE]

lru       the least recently used leaf goes first.      ledger   the ledger's own rule.
offline   a schedule that knows the future, on the ledger's own run (lamina/plan/offline.py).
bound     what no schedule exceeds on that run.         all      what a pool without limits gives.
"""

import argparse
import heapq
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from lamina.memory.eviction import Evictable, EvictionQueue
from lamina.memory.layout import Layout, make_layout
from lamina.memory.ledger import Ledger
from lamina.models.families import describe
from lamina.plan.offline import Optimum, ample_pages, offline_optimum
from lamina.plan.simulate import run_trace
from lamina.plan.simulation import SimulationReport
from lamina.plan.traces import TraceRequest, make_mix

CONFIGS = Path(__file__).resolve().parent.parent / "tests" / "configs"
#: by name: a config and its block size; full attention has blocks of 256 tokens here, so that all have about as many
LAYOUTS = {
    "compressed": ("deepseek-v4-flash", None),
    "attention": ("llama-3.1-8b", 256),
    "mamba": ("bamba-9b", None),
    "mamba-many": ("jamba-1.5-mini", 256),
}


def layout_of(name: str) -> Layout:
    """The layout of one of LAYOUTS."""
    config, block_tokens = LAYOUTS[name]
    found = describe(json.loads((CONFIGS / f"{config}.json").read_text()))
    return make_layout(found.memories, found.hidden, block_tokens)


# -- workloads


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace and the pool it runs in: `pages` says how many for a layout."""

    requests: tuple[TraceRequest, ...]
    pages: Callable[[Layout], int]


def request_pages(layout: Layout, num_tokens: int, checkpoints: int = 2) -> int:
    """Pages of a running request of that many tokens, and of the checkpoints it leaves."""
    return layout.pages_for(num_tokens) + checkpoints * (layout.checkpoint_pages(num_tokens) + 1)


def alternating(turns: int = 24) -> Workload:
    """Two chats that begin with 50K tokens and take turns, 600 new tokens each time, in a pool with room for both."""
    requests: list[TraceRequest] = []
    said = [0, 0]
    for number in range(2 * turns):
        who, turn = number % 2, number // 2
        prompt = said[who] + (50_000 if turn == 0 else 600)
        requests.append(TraceRequest(number, 30.0 * number, prompt, 200, f"chat {who}", turn))
        said[who] = prompt + 200
    # both logs and slots, the prompt and answer checkpoints of each, and one more of both while a new one is written
    return Workload(tuple(requests), lambda layout: 2 * request_pages(layout, max(said), 4))


def shared_prompt(count: int = 1000, seed: int = 1) -> Workload:
    """Chats of one question each behind the same 8K system prompt; room for the prompt and 24 chats."""
    random, now, requests = Random(seed), 0.0, []
    for number in range(count):
        now += random.expovariate(2.0)
        own = max(1, round(random.lognormvariate(math.log(200), 1.0)))
        answer = max(1, round(random.lognormvariate(math.log(150), 0.7)))
        requests.append(TraceRequest(number, now, 8000 + own, answer, prefix="system", prefix_tokens=8000))
    return Workload(tuple(requests), lambda layout: layout.block_pages(8000) + 24 * request_pages(layout, 600))


def agents(count: int = 2000, room: float = 1.0, users: int = 8) -> Workload:
    """Agent loops of 55K-280K tokens with 96 % reuse; room for `room` times as many as are alive, at 200K tokens each."""
    requests = tuple(make_mix("agents", 0, count, users))
    return Workload(requests, lambda layout: round(room * users * request_pages(layout, 200_000)))


def flood(count: int = 2000, every: int = 40, length: int = 4000, room: int = 12) -> Workload:
    """One-off prompts of 4K tokens, and every so often a request behind a shared 8K prompt; room for that and 12 one-offs."""
    random, now, requests = Random(2), 0.0, []
    for number in range(count):
        now += random.expovariate(1.0)
        if number % every == 0:
            requests.append(TraceRequest(number, now, 8200, 100, prefix="shared", prefix_tokens=8000))
        else:
            requests.append(TraceRequest(number, now, round(length * random.uniform(0.5, 1.5)), 100))
    return Workload(tuple(requests), lambda layout: request_pages(layout, 8200) + room * request_pages(layout, length))


def chats(count: int = 4000, room: float = 0.5) -> Workload:
    """The chat mix, in a pool with room for half of the sessions that are alive, at 4K tokens each."""
    requests = tuple(make_mix("chat", 0, count))
    return Workload(requests, lambda layout: round(room * 64 * request_pages(layout, 4000)))


def documents(count: int = 400, room: float = 1.0) -> Workload:
    """The long mix: questions about documents of 128K-1M tokens; room for three documents of 400K tokens."""
    requests = tuple(make_mix("long", 0, count))
    return Workload(requests, lambda layout: round(room * 3 * request_pages(layout, 400_000)) + layout.pages_for(1 << 20))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "alternating": alternating,
    "shared prompt": shared_prompt,
    "agents x1.25": lambda: agents(room=1.25),
    "agents x1": lambda: agents(),
    "agents x0.75": lambda: agents(room=0.75),
    "flood": flood,
    "flood, rare": lambda: flood(every=120),
    "chat": chats,
    "long": documents,
}
QUICK: dict[str, Callable[[], Workload]] = {
    "alternating": lambda: alternating(8),
    "shared prompt": lambda: shared_prompt(200),
    "agents x1": lambda: agents(240),
    "flood": lambda: flood(600),
}


# -- rules


class Lru(EvictionQueue):
    """Least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.heap: list[tuple[int, int, Evictable]] = []
        self.numbers = itertools.count()

    def offer(self, item: Evictable) -> None:
        """Queues an item by its last use."""
        if item.queued < 0:
            item.queued = 0
            heapq.heappush(self.heap, (item.stamp, next(self.numbers), item))

    def pop(self, now: int) -> Evictable | None:
        """The item that was used longest ago."""
        while self.heap:
            stamp, _, item = heapq.heappop(self.heap)
            item.queued = -1
            if item.evictable and item.stamp <= stamp:
                return item
            if item.evictable:
                self.offer(item)
        return None


RULES: dict[str, Callable[[], EvictionQueue] | None] = {"lru": Lru, "ledger": None}


def simulate(layout: Layout, work: Workload, rule: str, keep_served: bool = False) -> SimulationReport:
    """One run under one rule."""
    pages = work.pages(layout)
    ledger = Ledger(layout, pages)
    make = RULES[rule]
    if make is not None:
        ledger.index._queue = make()
    return run_trace(layout, work.requests, pages, ledger=ledger, keep_served=keep_served)


# -- the table


@dataclass(frozen=True, slots=True)
class Row:
    """Token hit rates of one workload in one layout."""

    trace: str
    layout: str
    pages: int
    rates: dict[str, float]
    optimum: Optimum
    seconds: float


def measure(trace: str, work: Workload, layout_name: str, rules: Sequence[str]) -> Row:
    """All rules, and what was possible in the run of the last one."""
    layout, start = layout_of(layout_name), time.perf_counter()
    runs = {rule: simulate(layout, work, rule, keep_served=True) for rule in rules}
    unlimited = run_trace(layout, work.requests, ample_pages(layout, work.requests), keep_served=True)
    optimum = offline_optimum(layout, work.requests, runs[rules[-1]], unlimited)
    rates = {rule: run.hit_rate for rule, run in runs.items()}
    return Row(trace, layout_name, work.pages(layout), rates, optimum, time.perf_counter() - start)


def lines(rows: Iterator[Row], rules: Sequence[str]) -> Iterator[str]:
    """The table, a row as soon as it is there."""
    heads = [*rules, "offline", "bound", "all"]
    yield f"{'trace':<14} {'layout':<11} {'pages':>7} " + " ".join(f"{head:>9}" for head in heads)
    for row in rows:
        found = [*(row.rates[rule] for rule in rules), row.optimum.belady, row.optimum.bound, row.optimum.unlimited]
        cells = " ".join(f"{100 * rate:8.2f}%" for rate in found)
        yield f"{row.trace:<14} {row.layout:<11} {row.pages:>7,} {cells}   {row.seconds:.1f} s"


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short traces")
    parser.add_argument("--traces", help="names that begin so, with commas between")
    parser.add_argument("--layouts", default="compressed,attention,mamba")
    parser.add_argument("--rules", default="lru,ledger", help="the last one is compared with the offline schedule")
    parser.add_argument("--json", type=Path, help="also writes the rows as JSON lines")
    options = parser.parse_args(arguments)
    rules, layouts = options.rules.split(","), options.layouts.split(",")
    found = QUICK if options.quick else WORKLOADS
    wanted = [name for name in found if not options.traces or any(name.startswith(t) for t in options.traces.split(","))]
    rows: list[Row] = []

    def measured() -> Iterator[Row]:
        for name in wanted:
            work = found[name]()
            for layout in layouts:
                rows.append(measure(name, work, layout, rules))
                yield rows[-1]

    for line in lines(measured(), rules):
        print(line, flush=True)
    if options.json is not None:
        options.json.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1:])
