"""The memory accounting at scale, on paper pages: 1,000,000 pages, 10,000 live requests, one core.

    python bench/ledger.py [--pages 1000000 --requests 10000 --json FILE]

A block operation is one block taken, published, found again or given up. Aims: 200,000 a second, a lookup of 1M tokens in
100 ms hashing included, under 400 B of index a block beside its token ids.
"""

import argparse
import gc
import json
import time
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lamina.base.sizes import MiB
from lamina.memory.layout import Layout, make_layout
from lamina.memory.lease import Lease
from lamina.memory.ledger import Ledger
from lamina.models.families import describe

CONFIGS = Path(__file__).resolve().parent.parent / "tests" / "configs"
AIM_OPERATIONS, AIM_LOOKUP, AIM_BYTES = 200_000, 0.1, 400


@dataclass(frozen=True, slots=True)
class Line:
    """One result: so many operations in so many seconds."""

    what: str
    operations: int
    seconds: float

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.operations / self.seconds


def layout_of(config: str) -> Layout:
    """The layout of a shipped model."""
    found = describe(json.loads((CONFIGS / f"{config}.json").read_text()))
    return make_layout(found.memories, found.hidden)


def tokens(random: np.random.Generator, count: int) -> "array[int]":
    """Ids that nobody else has."""
    ids = array("i")
    ids.frombytes(random.integers(0, 1 << 17, count, np.int32).tobytes())
    return ids


def admitted(ledger: Ledger, ids: "array[int]", name: str, max_new: int = 512) -> Lease:
    """A lease; the pool is large enough for it."""
    lease = ledger.admit(ids, max_new, name=name)
    assert isinstance(lease, Lease), lease
    return lease


def prefill(ledger: Ledger, lease: Lease, step: int = 8192) -> None:
    """Plans and accepts the rest of the prompt."""
    while lease.position < lease.prompt_tokens:
        count = min(step, lease.prompt_tokens - lease.position)
        assert ledger.extend(lease, count)
        ledger.commit(lease, lease.tokens[lease.committed : lease.position])


def timed(what: str, work: Callable[[], int]) -> Line:
    """Runs something that says how many operations it was."""
    gc.collect()
    start = time.perf_counter()
    operations = work()
    return Line(what, operations, time.perf_counter() - start)


def measure(layout: Layout, num_pages: int, num_requests: int) -> list[Line]:
    """One life of a ledger: it fills, decodes, ends, is asked again, and evicts."""
    random = np.random.default_rng(0)
    ledger = Ledger(layout, num_pages, model_id="bench")
    size = layout.block_tokens
    each = max(1, min(90, num_pages // num_requests - layout.slot_pages - 6))  # blocks of a request
    prompts = [tokens(random, each * size + int(random.integers(size))) for _ in range(num_requests)]
    leases: list[Lease] = []
    lines: list[Line] = []

    def fill() -> int:
        for number, prompt in enumerate(prompts):
            leases.append(admitted(ledger, prompt, str(number)))
            prefill(ledger, leases[-1])
        return num_requests * (each + 1) * 2  # taken and published

    def decode() -> int:
        for _ in range(20):
            for lease in leases:
                assert ledger.extend(lease, 1)
            for lease in leases:
                ledger.commit(lease, (7,))
        return 20 * num_requests

    def end() -> int:
        for lease in leases:
            ledger.finish(lease)
        ledger.take_orders()
        return num_requests * (each + 1)

    def again() -> int:
        for number in range(0, num_requests, 2):
            ledger.cancel(admitted(ledger, prompts[number], str(number)))
        ledger.take_orders()
        return (num_requests + 1) // 2 * (each + 1) * 2  # found, held and given back

    others = [tokens(random, each * size) for _ in range(num_requests // 4)]

    def evict() -> int:
        before, taken = ledger.evictions, 0
        for number, prompt in enumerate(others):
            lease = admitted(ledger, prompt, str(number))
            prefill(ledger, lease)
            ledger.finish(lease)
            taken += each * 2
        ledger.take_orders()
        return taken + ledger.evictions - before

    lines.append(timed(f"admit and prefill {num_requests:,} requests of {each} blocks", fill))
    lines.append(timed("decode steps of all of them (a request-step)", decode))
    lines.append(timed("finish them", end))
    lines.append(timed("admit every other one again: full hits", again))
    lines.append(timed("new requests where the index holds the rest", evict))
    return lines


def lookup_seconds(layout: Layout, num_tokens: int) -> float:
    """A prompt of a million tokens that is stored, looked up from its plain ids: checking, encoding, hashing, walking."""
    ledger = Ledger(layout, layout.pages_for(num_tokens) + 50, model_id="bench")
    prompt = tokens(np.random.default_rng(1), num_tokens)
    lease = admitted(ledger, prompt, "long", 1)
    prefill(ledger, lease)
    ledger.finish(lease)
    ids = prompt.tolist()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        hit = ledger.longest(ids)
        best = min(best, time.perf_counter() - start)
        assert hit.position == num_tokens
    return best


def index_bytes(layout: Layout, num_blocks: int) -> float:
    """Bytes of Python objects a block that the index keeps, its token ids left out."""
    random = np.random.default_rng(2)
    ledger = Ledger(layout, num_blocks + 400, model_id="bench")
    each = 40
    prompts = [tokens(random, each * layout.block_tokens) for _ in range(num_blocks // each)]
    gc.collect()
    tracemalloc.start()
    for number, prompt in enumerate(prompts):
        lease = admitted(ledger, prompt, str(number), 1)
        prefill(ledger, lease)
        ledger.cancel(lease)
    ledger.take_orders()
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / len(ledger.index) - layout.block_tokens * 4


def main() -> None:
    """Prints the lines, and whether they reach the aims."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    flash = layout_of("deepseek-v4-flash")
    lines = measure(flash, args.pages, args.requests)
    for line in lines:
        print(f"{line.what:<60} {line.operations:>10,} ops {line.seconds:>8.2f} s {line.rate:>12,.0f} ops/s")
    blocks = [line for line in lines if "decode" not in line.what]
    rate = sum(line.operations for line in blocks) / sum(line.seconds for line in blocks)
    seconds, used = lookup_seconds(flash, MiB), index_bytes(flash, 20_000)
    print(f"block operations together {rate:,.0f}/s (aim {AIM_OPERATIONS:,})")
    print(f"lookup of 1,048,576 tokens, hashing included: {seconds * 1e3:.1f} ms (aim {AIM_LOOKUP * 1e3:.0f})")
    print(f"index: {used:.0f} B a block beside its token ids (aim {AIM_BYTES})")
    if args.json is not None:
        found = {"block_operations_per_s": rate, "lookup_1m_s": seconds, "index_bytes_per_block": used}
        args.json.write_text(json.dumps(found | {line.what: line.rate for line in lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
