"""Graphs, pinned uploads, draws and copies on a GPU, with a model small enough to be checked by hand; else as far as they go.

The model remembers one number a request, which every token changes: a token that is counted twice, missed or given to another
request, by a warm-up, a capture or padding, is in every answer from then on.
"""

import random
from collections import deque
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lamina.layers.entries import StoreKey
from lamina.memory.kinds import EntryFormat, Field, Log, Snapshot
from lamina.memory.layout import Layout, make_layout
from lamina.memory.ledger import Ledger
from lamina.ops.rows import Rows
from lamina.ops.sample import sample
from lamina.ops.store import StateCodec
from lamina.runtime.arena import DeviceArena
from lamina.runtime.device_runner import DeviceRunner, Mode, Order, Sampler
from lamina.runtime.graphs import sizes_up_to
from lamina.runtime.runner import sample_batch
from lamina.schedule.request import Request, RequestState
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.step import Decodes, LaunchedStep, Sample, Step, TokenLogprobs

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
VOCAB, ROWS, LONGEST = 61, 24, 5000
GREEDY = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)


def after(state: int, token: int) -> int:
    """The number once a token has been seen."""
    return (state * 31 + token + 1) % 9973


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """The greedy answer."""
    state, found = 0, []
    for token in prompt:
        state = after(state, token)
    while len(found) < count:
        found.append(state % VOCAB)
        state = after(state, found[-1])
    return found


class NumberModel:
    """One number a slot. With decode order everything stays on the device and can be captured."""

    def __init__(self, arena: DeviceArena) -> None:
        self.state = arena.store(StoreKey(0, "state", ("s",)), StateCodec(1))
        self.orders: list[Order] = []

    def forward(self, tokens: Tensor, rows: Rows, order: Order, max_context: int) -> Tensor:
        """Single rows at once, others one after another."""
        self.orders.append(order)
        if order == "decode":
            pages = rows.slots[:, self.state.slot_column].long()
            numbers = self.state.views[0][:, 0, 0]
            old = numbers[pages]
            new = torch.remainder(old * 31 + tokens + 1, 9973)
            numbers.index_add_(0, pages, torch.where(rows.owners >= 0, new - old, 0.0))  # nothing is added for padding
            return torch.stack([new, tokens.float(), rows.positions.float(), rows.starts.float()], 1)
        hidden = torch.zeros(rows.num_rows, 4, device=DEVICE)
        columns = (rows.starts, rows.stops, rows.first_rows, rows.slots[:, self.state.slot_column])
        ids = tokens.tolist()
        for start, stop, first, page in zip(*(column.tolist() for column in columns), strict=True):
            state = int(self.state.views[0][page, 0, 0]) if start else 0
            for row in range(first, first + stop - start):
                state = after(state, ids[row])
                hidden[row, 0] = state
            if stop > start:
                self.state.views[0][page, 0, 0] = state
        return hidden

    def logits(self, hidden: Tensor, order: Order) -> Tensor:
        """The greatest score has the number, modulo the vocabulary."""
        ids = torch.arange(VOCAB, device=DEVICE)
        return -(ids - hidden[:, :1] % VOCAB).abs()


class Draws:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def result(self) -> tuple[tuple[int | None, ...], tuple[TokenLogprobs | None, ...]]:
        return tuple(self.tokens), (None,) * len(self.tokens)


class PlainSampler:
    """Stands where there is no GPU for the one that draws there."""

    def __init__(self) -> None:
        self.last_tokens = torch.zeros(ROWS, dtype=torch.int32)

    def warm_up(self) -> None:
        pass

    def launch(self, samples: Sequence[Sample], logits: Tensor, table_rows: Sequence[int]) -> Draws:
        tokens = sample(logits, sample_batch(samples, VOCAB, DEVICE)).tolist()
        self.last_tokens[list(table_rows)] = torch.tensor(tokens, dtype=torch.int32)
        return Draws(tokens)

    def launch_decodes(self, decodes: Decodes, logits: Tensor) -> Draws:
        return self.launch(decodes.samples(), logits, [one.row for one in decodes.members])


def make_sampler() -> Sampler:
    if not HAS_GPU:
        return PlainSampler()
    from lamina.runtime.device_sampler import DeviceSampler

    return DeviceSampler(ROWS, VOCAB, DEVICE)


def layout() -> Layout:
    row = EntryFormat("row", (Field("row", "fp32", (16,)),))
    return make_layout(
        [Log("log", 0, row, 1), Snapshot("state", 0, (Field("s", "fp32", (1,)),))], Field("hidden", "fp32", (4,)), 8,
        min_page_bytes=256,
    )  # fmt: skip


class Serving:
    """A scheduler and a runner, one step ahead."""

    def __init__(self, mode: Mode = True, num_pages: int = 2000) -> None:
        made = layout()
        self.ledger = Ledger(made, num_pages, min_checkpoint_gain=4)
        self.scheduler = Scheduler(self.ledger, 128, ROWS, VOCAB, overlaps=True)
        self.arena = DeviceArena(made, num_pages, DEVICE)
        self.model = NumberModel(self.arena)
        self.runner = DeviceRunner(self.model, self.arena, make_sampler(), ROWS, 128, LONGEST, DEVICE, mode)
        self.requests: dict[int, Request] = {}
        self.flying: deque[tuple[Step, LaunchedStep]] = deque()

    def add(self, prompt: Sequence[int], max_new: int) -> Request:
        number = len(self.requests) + 1
        made = Request(number, f"r{number}", tuple(prompt), GREEDY, number, max_new, frozenset())
        self.requests[number] = made
        self.scheduler.add(made)
        return made

    def step(self) -> bool:
        while len(self.flying) < 2:
            step = self.scheduler.plan()
            if step is None:
                break
            self.flying.append((step, self.runner.execute(step)))
        if not self.flying:
            return False
        step, launched = self.flying.popleft()
        self.scheduler.apply(step, launched.result(), self.requests)
        return True

    def run(self) -> None:
        while self.step():
            pass
        assert not self.scheduler.has_work
        for one in self.requests.values():
            assert one.state is RequestState.FINISHED and one.output == answer(one.prompt, one.max_new), one.name


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("mode", [True, False, "strict"])
def test_answers(mode: Mode, warm: bool) -> None:
    """Requests come one after another, so that every padded size is used; prefixes are reused, some lose their memory."""
    serving = Serving(mode, num_pages=500)
    if warm:
        done: list[tuple[int, int]] = []
        serving.runner.warmup(lambda *at: done.append(at))
        graphs = serving.runner.graphs
        sizes = len(sizes_up_to(serving.runner.max_step_tokens)) + (0 if mode == "strict" else len(graphs.requests))
        total = sizes * len(graphs.contexts)
        assert done == [(n, total) for n in range(1, total + 1)]
    draw = random.Random(1)
    base = prompt(300, 0)
    for number in range(40):
        ids = base[: draw.choice([0, 8, 40, 200, 300])] + prompt(draw.choice([1, 9, 30]), number % 7)
        serving.add(ids, draw.choice([1, 20, 60]))
        for _ in range(draw.randrange(4)):
            serving.step()
        if serving.scheduler.running and draw.random() < 0.2:
            serving.scheduler.preempt(draw.choice(serving.scheduler.running))
    serving.run()
    assert serving.ledger.stats.hits > 10 and serving.ledger.stats.preempted >= 1
    if HAS_GPU and mode != "strict":
        assert serving.runner.graphs.num_captured >= 4


def test_a_context_that_grows_over_its_bucket() -> None:
    """2,040 tokens and 20 more: the graph of the next context takes over."""
    serving = Serving()
    serving.add(prompt(2040, 3), 20)
    serving.run()
    if HAS_GPU:
        assert serving.runner.graphs.num_captured == 2


@pytest.mark.skipif(not HAS_GPU, reason="graphs are captured on a GPU")
def test_an_upload_is_not_overwritten_while_it_is_copied() -> None:
    """The GPU is kept busy, so that steps are launched long before their uploads are made."""
    serving = Serving()
    busy = torch.randn(4096, 4096, device=DEVICE)
    for seed in range(20):
        serving.add(prompt(5 + seed, seed), 40)
    while serving.step():
        for _ in range(10):
            busy = busy @ busy * 1e-3
    serving.run()
