"""I11: planning a step, its arrays and booking it cost the same at token 1,024 and at token 1,048,576.

The real scheduler and ledger over pages on paper, and the real arrays of each step. Counted are the numbers in the step, the
numbers that are uploaded, the lines of ours that run, and the memory that is taken meanwhile (a copy of a long list is one line).
"""

import sys
import tracemalloc
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from types import FrameType

import pytest
import torch
from torch import Tensor

from lamina.memory.kinds import EntryFormat, Field, Fold, Log, Window
from lamina.memory.layout import make_layout
from lamina.memory.ledger import Ledger
from lamina.runtime.inputs import BlockTables, step_arrays
from lamina.schedule.request import Request
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.step import Step, StepResult

CPU = torch.device("cpu")
SHORT, LONG = 1 << 10, 1 << 20
BIG_STEP = 1 << 16


@dataclass(frozen=True, slots=True)
class Cost:
    """What some steps took. lines: of this package.   peak_bytes: the most that was allocated during any one of them."""

    step_numbers: int
    uploaded: int
    lines: int
    peak_bytes: int


def numbers_in(item: object) -> int:
    """Numbers and texts in a record of records."""
    if is_dataclass(item) and not isinstance(item, type):
        return sum(numbers_in(getattr(item, field.name)) for field in fields(item))
    if isinstance(item, str) or not isinstance(item, Iterable):
        return 1
    return sum(numbers_in(part) for part in item)


class Bookkeeping:
    """A scheduler whose steps are turned into arrays and booked; nothing is computed."""

    def __init__(self, prompt_tokens: int) -> None:
        row, state = EntryFormat("row", (Field("row", "fp32", (64,)),)), (Field("open", "fp32", (192,)),)
        memories = [
            Log("c4", 0, row, 4), Log("c128", 1, row, 128), Window("window", 0, row, 16), Window("window", 1, row, 16),
            Fold("c4_fold", 0, state, 4, ("open",)), Fold("c128_fold", 1, state, 128),
        ]  # fmt: skip
        layout = make_layout(memories, Field("hidden", "fp32", (64,)), 256)
        self.ledger = Ledger(layout, 2 * (LONG // 256) + 100)
        self.scheduler = Scheduler(self.ledger, BIG_STEP, 8, 1000)
        self.tables = BlockTables(8, CPU)
        prompt = tuple(number * 7919 % 1000 for number in range(prompt_tokens))
        params = SamplingParams(max_tokens=2000, ignore_eos=True)
        self.request = Request(1, "one", prompt, params, 0, 2000, frozenset())
        self.scheduler.add(self.request)
        self.uploaded = 0

    @property
    def position(self) -> int:
        assert self.request.lease is not None
        return self.request.lease.position

    def step(self) -> Step:
        """One step, planned, laid out and booked."""
        step = self.scheduler.plan()
        assert step is not None and len(step.slices) == 1
        step_arrays(step.slices, self.tables, (4, 128), (16,), 8, CPU)
        drawn = tuple(len(self.request.tokens) % 1000 for _ in step.samples)
        result = StepResult(drawn, (None,) * len(drawn), ((),) * len(step.slices))
        self.scheduler.apply(step, result, {1: self.request})
        return step

    def cost(self, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> Cost:
        """Of the next steps."""
        lines = uploaded = numbers = peak = 0
        tensor = torch.tensor

        def trace(frame: FrameType, event: str, _: object) -> object:
            nonlocal lines
            if "lamina" not in frame.f_code.co_filename:
                return None
            lines += event == "line"
            return trace

        def upload(*args: object, **kwargs: object) -> Tensor:
            nonlocal uploaded
            made = tensor(*args, **kwargs)  # type: ignore[arg-type]
            uploaded += made.numel()
            return made

        monkeypatch.setattr(torch, "tensor", upload)
        for _ in range(num_steps):
            tracemalloc.start()
            numbers += numbers_in(self.step())
            peak = max(peak, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                self.step()
            finally:
                sys.settrace(before)
        monkeypatch.setattr(torch, "tensor", tensor)
        return Cost(numbers, uploaded, lines, peak)


def compare(costs: list[Cost]) -> None:
    """Equal at both lengths; allocations within the noise of a list that happens to grow."""
    short, long = costs
    assert (long.step_numbers, long.uploaded, long.lines) == (short.step_numbers, short.uploaded, short.lines)
    assert long.peak_bytes < short.peak_bytes + 16 * 1024, "something as long as the request was copied"
    assert short.lines > 1000 and short.uploaded > 100


def test_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 tokens, which fill one block and open the next."""
    costs = []
    for length in (SHORT, LONG):
        books = Bookkeeping(length)
        while books.request.num_output < 5:
            books.step()
        assert books.position == length + 4
        costs.append(books.cost(150, monkeypatch))
        assert books.position == length + 304 and books.tables.pages.shape[1] >= length // 256
    compare(costs)
    assert costs[0].uploaded < 300 * 100


def test_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 slices of 64 tokens far into a prompt."""
    costs = []
    for length in (SHORT, LONG):
        books = Bookkeeping(length + 2048)
        books.scheduler.max_step_tokens = SHORT
        books.step()
        books.scheduler.max_step_tokens = BIG_STEP
        while books.position < length:
            books.scheduler.max_step_tokens = min(BIG_STEP, length - books.position)
            books.step()
        books.scheduler.max_step_tokens = 64
        books.step()
        costs.append(books.cost(8, monkeypatch))
        assert books.position == length + 64 + 16 * 64
    compare(costs)


@pytest.mark.parametrize("fault", ["", "whole table", "copied tokens"])
def test_the_count_would_notice(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that lists the whole table, and a booking that copies all tokens: each is seen."""
    costs = []
    for length in (SHORT, 64 * SHORT):
        books = Bookkeeping(length)
        while books.request.num_output < 5:
            books.step()
        decodes, commit = books.ledger.decodes, books.ledger.decodes.commit
        if fault == "whole table":
            monkeypatch.setattr(decodes, "new_blocks", lambda leases: ((0, 0, tuple(leases[0].blocks)),))
        elif fault == "copied tokens":
            monkeypatch.setattr(decodes, "commit", lambda leases, ids, commit=commit: commit(leases, ids) or leases[0].tokens[:])
        costs.append(books.cost(4, monkeypatch))
    if not fault:
        compare(costs)
        return
    with pytest.raises(AssertionError):
        compare(costs)
