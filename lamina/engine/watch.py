"""What a run remembers at its fullest moment, predicted and counted, and how fast its steps were.

The moment is the last one at which running requests held the most pages: a step has been computed, its results are not
booked yet, so nobody of that step has ended and every page that it needed is held.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lamina.engine.engine import Engine
from lamina.memory.lease import PageCounts
from lamina.memory.plan import Held, Prediction, measured, predict
from lamina.schedule.request import Request
from lamina.schedule.step import Slice, Step


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Bytes of one memory, of `padding` or of `checkpoints`: predicted, really held, and written by the store ops so far."""

    name: str
    predicted: int
    held: int
    written: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The table of one moment.

    lines        add up to pages x page_bytes in both columns.   pool_pages  all pages of the arena.
    positions    tokens computed of each request that was running.   num_ended  requests that had ended before, or waited.
    checkpoints  positions of the frozen slots.   evictions  blocks and checkpoints evicted until then.
    """

    lines: tuple[MemoryLine, ...]
    predicted_pages: int
    held_pages: int
    page_bytes: int
    pool_pages: int
    positions: tuple[int, ...]
    num_ended: int
    checkpoints: tuple[int, ...]
    evictions: int

    @property
    def is_equal(self) -> bool:
        """Whether every predicted figure is the one that was counted, and both columns add up to their pages."""
        sums = (sum(line.predicted for line in self.lines), sum(line.held for line in self.lines))
        totals = (self.predicted_pages * self.page_bytes, self.held_pages * self.page_bytes)
        return sums == totals and all(line.predicted == line.held for line in self.lines)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens and seconds of the steps. A step that computes any prompt token counts as prefill; others as decode.

    prefill_tokens  prompt tokens computed (and tokens computed again after a preemption).
    decode_tokens   tokens drawn in decode steps.   drawn  all tokens drawn.   steps  how many steps there were.
    """

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    drawn: int = 0
    steps: int = 0

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens per second; None if none were computed."""
        return self.prefill_tokens / self.prefill_s if self.prefill_tokens and self.prefill_s else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens drawn per second of decoding; None if there was no decode step."""
        return self.decode_tokens / self.decode_s if self.decode_tokens and self.decode_s else None


class Watch:
    """Drives an engine step by step and watches it. Make it before the first request of a fresh engine.

    counts_memory  False: only the speed is kept, `memory` gives None.
    """

    def __init__(self, engine: Engine, counts_memory: bool = True) -> None:
        self.engine = engine
        self.speed = Speed()
        self._counts_memory = counts_memory
        self._requests: dict[int, Request] = {}
        self._keys: dict[int, list[int]] = {}
        self._left_by: dict[int, tuple[tuple[int, int], int]] = {}
        self._last: tuple[int, int] = (0, 0)
        self._watching_s = 0.0
        self._most = 0
        self._counts: PageCounts | None = None
        self._held: Prediction | None = None
        self._moment: tuple[list[Held], tuple[int, ...], tuple[int, ...], int] | None = None
        self._evictions = 0
        self._seen: set[int] = set()  # blocks counted in the moment being looked at
        engine.on_computed = self._computed

    def step(self) -> bool:
        """One step of the engine. False if there was nothing to do."""
        self._last, self._watching_s = (0, 0), 0.0
        start, before = time.perf_counter(), self.engine.scheduler.guesses.counts.rejected
        moved = self.engine.step()
        seconds = time.perf_counter() - start - self._watching_s
        prompt, drawn = self._last
        drawn -= max(0, self.engine.scheduler.guesses.counts.rejected - before)  # drawn after a wrong guess, for nobody
        speed = replace(self.speed, drawn=self.speed.drawn + drawn, steps=self.speed.steps + moved)
        if prompt:
            speed = replace(speed, prefill_tokens=speed.prefill_tokens + prompt, prefill_s=speed.prefill_s + seconds)
        else:
            speed = replace(speed, decode_tokens=speed.decode_tokens + drawn, decode_s=speed.decode_s + seconds)
        self.speed = speed
        return moved

    def memory(self) -> MemoryReport | None:
        """The table of the fullest moment so far; None before the first step, or if memory is not counted."""
        if self._moment is None or self._held is None:
            return None
        held, checkpoints, running, num_ended = self._moment
        layout, written = self.engine.layout, self.engine.worker.bytes_written()
        # a checkpoint's blocks are its request's: here it counts its own pages alone
        frozen = [Held(p, (p,), running=False, shared_blocks=layout.blocks_for(p)) for p in checkpoints]
        predicted = predict(layout, held + frozen)
        lines = tuple(
            MemoryLine(row.name, row.nbytes, self._held.nbytes(row.name), written.get(row.name, 0)) for row in predicted.rows
        )
        return MemoryReport(
            lines, predicted.pages, self._held.pages, layout.page_bytes, self.engine.num_pages, running, num_ended, checkpoints,
            self._evictions,
        )  # fmt: skip

    # -- inside a step

    def _computed(self, step: Step) -> None:
        start = time.perf_counter()
        for group in self.engine.groups.values():
            for request in group.requests:
                self._requests[request.id] = request
        self._last = (sum(self._prompt_tokens(part) for part in step.slices), len(step.samples))
        if self._counts_memory:
            self._look()
        self._watching_s = time.perf_counter() - start

    def _prompt_tokens(self, part: Slice) -> int:
        """Tokens of a slice that are no decode: a decode is the one token drawn last, and guesses of what follows."""
        length = part.stop - part.start - part.num_guesses
        is_decode = length == 1 and part.start >= len(self._requests[part.request_id].prompt)
        return 0 if is_decode else length

    def _look(self) -> None:
        """Keeps this moment if running requests have not held more before. Pages are counted again whenever they changed."""
        ledger = self.engine.ledger
        counts = ledger.pages()
        in_use = counts.blocks + counts.tails + counts.slots
        if in_use < self._most:
            return
        self._most = in_use
        if counts != self._counts:
            self._counts, self._held = counts, measured(self.engine.layout, ledger)
        published = {node.page for node in ledger.index.nodes if node.page is not None}
        running = list(self._running(published))
        checkpoints = ledger.all_checkpoints()
        left = list(self._ended())
        # an open block that only checkpoints hold: of an ended request, or one that a preempted request went on from with a copy
        counted = {*published, *(page for lease in ledger.leases for page in lease.blocks)}
        kept = {checkpoint.open_page for checkpoint in checkpoints if checkpoint.open_page is not None} - counted
        blocks = [Held(self.engine.layout.block_tokens, running=False)] * len(kept)
        positions = tuple(lease.position for _, lease in self.engine.scheduler.holders)
        self._moment = (running + left + blocks, tuple(checkpoint.position for checkpoint in checkpoints), positions, len(left))
        self._evictions = ledger.evictions

    def _running(self, published: set[int]) -> Iterator[Held]:
        """Who holds memory, first come first; a published block with the same tokens as an earlier one's is the same page."""
        self._seen.clear()
        for request, lease in self.engine.scheduler.holders:
            resident = max(lease.committed, lease.write_from)  # a replay holds the log that it stands on from its first step
            keys = self._block_keys(request, resident)
            num_published = next((n for n, page in enumerate(lease.blocks[: len(keys)]) if page not in published), len(keys))
            keys = keys[:num_published]
            yield Held(max(lease.position, lease.write_from), shared_blocks=_leading(keys, self._seen))
            self._seen.update(keys)

    def _ended(self) -> Iterator[Held]:
        """Full blocks that requests left for reuse that ended or were preempted."""
        holding = {request.id for request, _ in self.engine.scheduler.holders}
        for request in self._requests.values():
            if request.id not in holding and request.peak_position:
                full = self._left(request)
                keys = self._block_keys(request, full * self.engine.layout.block_tokens)
                yield Held(full * self.engine.layout.block_tokens, running=False, shared_blocks=_leading(keys, self._seen))
                self._seen.update(keys)

    def _left(self, request: Request) -> int:
        """Full blocks of an ended request that are still stored."""
        ledger, end = self.engine.ledger, request.peak_position
        stamp = (ledger.evictions, end)
        if request.id not in self._left_by or self._left_by[request.id][0] != stamp:
            hit = ledger.longest(request.tokens[:end], request.salt, limit=end)
            self._left_by[request.id] = stamp, min(hit.resident, end // self.engine.layout.block_tokens)
        return self._left_by[request.id][1]

    def _block_keys(self, request: Request, num_tokens: int) -> list[int]:
        """A key of each full block below `num_tokens`: equal where all tokens up to its end are."""
        size = self.engine.layout.block_tokens
        keys = self._keys.setdefault(request.id, [])
        for block in range(len(keys), num_tokens // size):
            before = keys[-1] if keys else hash(request.salt)
            keys.append(hash((before, tuple(request.tokens[block * size : (block + 1) * size]))))
        return keys[: num_tokens // size]


def _leading(keys: list[int], seen: set[int]) -> int:
    """How many of the first keys were seen before."""
    return next((number for number, key in enumerate(keys) if key not in seen), len(keys))
