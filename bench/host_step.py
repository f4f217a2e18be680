"""Host time of a decode step: planning it, laying it out, booking its result. The model is pretended, the ledger is real.

    python bench/host_step.py [--requests 1,16,64,256] [--steps 300] [--model DIRECTORY] [--json FILE]

Parts: plan (scheduler and ledger), pack (arrays into the pinned buffer), draw (what the sampler lays out and reads; it needs
Triton, though nothing is launched), apply (ledger and requests), book (the engine's outputs, without a tokenizer), each the
median of the steps in us of CPU time, as the machine may be shared. Steps overlap: one is planned while the one before is out.
Aim: 500 us at 256 requests, so that the host is never what a GPU waits for. --model measures the same with a real engine on a
GPU: the time in which the host plans, launches and books a step, and the time that the step takes.
"""

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.engine.engine import Engine, Group
from lamina.engine.outputs import RequestOutput, Usage
from lamina.engine.text_output import GrowingOutput
from lamina.memory.layout import make_layout
from lamina.memory.ledger import Ledger
from lamina.models.families import describe
from lamina.runtime.device_inputs import StepInputs
from lamina.runtime.graphs import request_buckets
from lamina.schedule.request import Request
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.step import Step, StepResult

if TYPE_CHECKING:
    from lamina.runtime.device_sampler import DeviceSampler

CONFIGS = Path(__file__).resolve().parent.parent / "tests" / "configs"
AIM_US, AIM_REQUESTS = 500.0, 256
VOCAB = 129_280


@dataclass(frozen=True, slots=True)
class Line:
    """Medians in us; `ratio` is the sum to the aim, which counts at 256 requests."""

    requests: int
    plan_us: float
    pack_us: float
    draw_us: float
    apply_us: float
    book_us: float
    total_us: float
    ratio: float


class Pretended:
    """Requests in the middle of their answers, and what the runtime does with their steps short of launching them."""

    def __init__(self, num_requests: int, config: str) -> None:
        found = describe(json.loads((CONFIGS / f"{config}.json").read_text()))
        layout = make_layout(found.memories, found.hidden)
        self.ledger = Ledger(layout, num_requests * (layout.slot_pages + 30) * 2)
        self.scheduler = Scheduler(self.ledger, 8192, max(num_requests, 1), VOCAB, overlaps=True)
        buckets = request_buckets(num_requests)
        self.inputs = StepInputs(layout.slot_pages, buckets, num_requests, 8192, 64, torch.device("cpu"))
        self.bucket = buckets[-1]
        self.flying: deque[Step] = deque()
        self.requests: dict[int, Request] = {}
        self.sampler = pretended_sampler(num_requests)
        self.logits = torch.zeros(num_requests, 1)
        self.engine = pretended_engine()
        params = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=100_000)
        for number in range(num_requests):
            prompt = tuple((number * 7919 + at * 104_729) % VOCAB for at in range(300 + number % 256))
            self.requests[number] = Request(number, str(number), prompt, params, number, 5000, frozenset([VOCAB]))
            self.scheduler.add(self.requests[number])
            output = RequestOutput(number, None, list(prompt), None, [], Usage(len(prompt)))
            growing = GrowingOutput(0, params, None)
            self.engine.groups[number] = Group(number, 0, output, [self.requests[number]], [growing])
        while any(not request.num_output for request in self.requests.values()):
            self.step()

    def step(self) -> tuple[float, ...]:
        """CPU seconds of planning, packing, drawing, applying and booking."""
        times = [time.thread_time()]
        step = self.scheduler.plan()
        times.append(time.thread_time())
        if step is not None:
            self.flying.append(step)
            self.pack(step)
            times.append(time.thread_time())
            if step.decodes is not None:
                pending = self.sampler.launch_decodes(step.decodes, self.logits)
            else:
                pending = self.sampler.launch(step.samples, self.logits, [item.row for item in step.samples])
            pending.result()
            times.append(time.thread_time())
        if len(self.flying) < 2 and step is not None:
            return (*(stop - start for start, stop in pairwise(times)), 0.0, 0.0)
        oldest = self.flying.popleft()
        count = len(oldest.samples)
        result = StepResult(tuple(range(count)), (None,) * count, ((),) * len(oldest.slices))
        times.append(time.thread_time())
        drawn = self.scheduler.apply(oldest, result, self.requests)
        times.append(time.thread_time())
        for one in drawn:
            self.engine._book(one)
        times.append(time.thread_time())
        for group in self.engine.groups.values():
            group.deltas.clear()  # somebody has taken them
        found = [stop - start for start, stop in pairwise(times)]
        return (*found[:3], *found[-2:])

    def pack(self, step: Step) -> None:
        """What the runner does before it launches anything."""
        self.inputs.begin()
        if step.decodes is not None:
            self.inputs.put_members(step.decodes, self.bucket)
            members = step.decodes.members
            self.inputs.upload_with((members[place].row, first, pages) for place, first, pages in step.decodes.tables)
            return
        decodes = [part for part in step.slices if part.is_decode]
        others = [part for part in step.slices if not part.is_decode]
        if decodes:
            self.inputs.put_decodes(decodes, self.bucket)
        if others:
            self.inputs.put_rows(others)
        self.inputs.upload(step.slices)


def pretended_sampler(max_requests: int) -> "DeviceSampler":
    """The real one, without its kernels."""
    from lamina.runtime import device_sampler

    def draw(tokens: Tensor, is_bad: Tensor, *_: object) -> None:
        tokens.zero_()
        is_bad.zero_()

    device_sampler.sample_into = draw  # type: ignore[assignment]
    return device_sampler.DeviceSampler(max_requests, VOCAB, torch.device("cpu"))


def pretended_engine() -> Engine:
    """One without a model, good for booking."""
    engine = Engine.__new__(Engine)
    engine.groups, engine.max_model_len = {}, 1 << 20
    return engine


def measure(num_requests: int, steps: int, config: str) -> Line:
    """The medians of so many steps."""
    run = Pretended(num_requests, config)
    times = [run.step() for _ in range(steps)]
    parts = [statistics.median(column) * 1e6 for column in zip(*times, strict=True)]
    return Line(num_requests, *parts, sum(parts), sum(parts) / AIM_US)


def measure_engine(directory: str, num_requests: int, steps: int) -> dict[str, float]:
    """With a real model: us of the host's own work in a step, and of the step, once all requests decode."""
    from lamina.base.config import EngineConfig

    engine = Engine(EngineConfig(directory, device="cuda", max_requests=num_requests))
    params = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=steps + 64, ignore_eos=True)
    for number in range(num_requests):
        engine.add([(number * 7919 + at * 104_729) % engine.vocab_size for at in range(300 + number)], params)
    while any(not request.num_output for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    host: dict[str, list[float]] = {"plan": [], "launch": [], "apply": []}

    def timed(name: str, work: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object) -> object:
            start = time.perf_counter()
            found = work(*args)
            host[name].append(time.perf_counter() - start)
            return found

        return run

    engine.scheduler.plan = timed("plan", engine.scheduler.plan)  # type: ignore[method-assign,assignment]
    engine.scheduler.apply = timed("apply", engine.scheduler.apply)  # type: ignore[method-assign,assignment]
    engine.worker.execute = timed("launch", engine.worker.execute)  # type: ignore[method-assign,assignment]
    for _ in range(30):  # graphs are captured
        engine.step()
    for times in host.values():
        times.clear()
    whole = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - start)
    found = {f"{name}_us": statistics.median(times) * 1e6 for name, times in host.items()}
    return {"requests": num_requests, **found, "step_us": statistics.median(whole) * 1e6}


def main() -> None:
    """Prints a table, and JSON lines if asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,16,64,256")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--config", default="deepseek-v4-flash", help="a file of tests/configs")
    parser.add_argument("--model", help="a checkpoint, for the times of a real engine on a GPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lines: list[dict[str, float]] = []
    for count in map(int, options.requests.split(",")):
        if options.model:
            lines.append(measure_engine(options.model, count, options.steps))
            print(" | ".join(f"{name}={value:.0f}" for name, value in lines[-1].items()))
            continue
        line = measure(count, options.steps, options.config)
        lines.append(asdict(line))
        print(
            f"host step R={line.requests:<4} | plan {line.plan_us:6.1f} | pack {line.pack_us:5.1f} | draw {line.draw_us:5.1f} | "
            f"apply {line.apply_us:6.1f} | book {line.book_us:6.1f} | {line.total_us:7.1f} us | "
            f"{line.ratio:.2f}x of {AIM_US:.0f} us at {AIM_REQUESTS}"
        )
    if options.json:
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
