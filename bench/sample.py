"""Sampling on one GPU: time of each launch and of the whole, share of the roof, and the ratio to PyTorch's own composition.

    python bench/sample.py [--rows 1,32,256] [--parts] [--json FILE]

Shapes: 129,280 tokens. text: logits like a language model's, a hundred likely tokens over noise; flat: noise alone, whose nucleus
is tens of thousands of tokens. Every figure is the median of CUDA-graph replays; a graph holds several calls with different
logits, so that none is still in L2. Bytes are the logits, once; the roof is the copy rate. PyTorch: argmax; softmax and an
exponential race; the same after a sort and a cumulative sum; log_softmax and topk. The host's own time for a step is wall time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from timing import time_us
from torch import Tensor

from lamina.ops.sample.batch import Records, SampleBatch, records_of
from lamina.ops.sample.triton import Cuts, launches, sample_into, token_logprobs
from lamina.runtime.device_sampler import DeviceSampler
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.step import Sample

VOCAB = 129_280
COPY_BYTES_S = 4.26e12
L2_BYTES = 60e6
TOP_P, TOP_K = 0.95, 50
HOST_MODES = (
    ("greedy", SamplingParams(temperature=0)),
    ("top_p", SamplingParams(top_p=TOP_P)),
    ("penalties", SamplingParams(frequency_penalty=1.0)),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line: us (median, extremes), bytes counted, share of the roof, PyTorch's us (0: none) and the ratio to it."""

    op: str
    shape: str
    us: float
    low_us: float
    high_us: float
    bytes: int
    flops: int
    share_of_floor: float
    rival_us: float
    ratio: float
    device: str


def make_logits(kind: str, num: int) -> Tensor:
    x = torch.randn(num, VOCAB, device="cuda") * 2
    if kind == "text":
        likely = torch.randint(0, VOCAB, (num, 100), device="cuda")
        x.scatter_(1, likely, 8 + 10 * torch.rand(num, 100, device="cuda"))
    return x


def make_batch(num: int, **settings: float) -> SampleBatch:
    batch = SampleBatch.greedy(num, "cuda")
    filled = {
        name: torch.full((num,), value, dtype=torch.int64 if name == "top_k" else torch.float64, device="cuda")
        for name, value in settings.items()
    }
    if "frequency" in settings:
        counts = torch.zeros(num, VOCAB, dtype=torch.int32, device="cuda")
        counts[:, ::1000] = 2
        filled["output_counts"] = counts
    return replace(batch, uniforms=torch.rand(num, dtype=torch.float64, device="cuda"), **filled)


def known(records: Records, has_draws: bool, has_filters: bool) -> Records:
    """What a host that has the settings knows of all rows."""
    return replace(records, has_draws=has_draws, has_filters=has_filters)


def race(logits: Tensor) -> Tensor:
    """PyTorch's draw without a wait."""
    probabilities = logits.softmax(dim=-1)
    return probabilities.div_(torch.empty_like(probabilities).exponential_(1)).argmax(dim=-1)


def sorted_race(logits: Tensor) -> Tensor:
    """The same from the nucleus."""
    values, ids = logits.sort(dim=-1, descending=False)
    is_out = values.softmax(dim=-1).cumsum(dim=-1) <= 1 - TOP_P
    is_out[:, -1] = False
    return race(torch.empty_like(logits).scatter_(1, ids, values.masked_fill_(is_out, -torch.inf)))


def likely(logits: Tensor) -> Tensor:
    """PyTorch's log-probabilities."""
    return logits.log_softmax(dim=-1).topk(20, dim=-1).values


def host_us(num: int, params: SamplingParams) -> float:
    """Wall time of `DeviceSampler.launch`, which waits for nothing."""
    sampler = DeviceSampler(num, VOCAB, torch.device("cuda"))
    logits = make_logits("text", num)
    times = []
    for step in range(12):
        samples = [Sample(row, row, (), params, row, 0, (1, 2), (1,) * step, step, ()) for row in range(num)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        pending = sampler.launch(samples, logits, range(num))
        times.append((time.perf_counter() - start) * 1e6)
        pending.result()
    return statistics.median(times[4:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--parts", action="store_true", help="time each launch too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    device, rows = torch.cuda.get_device_name(), list[Row]()

    def measure(op: str, shape: str, num: int, calls: Sequence[Callable[[], object]], rival_us: float) -> None:
        us, low, high = time_us(calls)
        moved = num * VOCAB * 4
        ratio, share = us / rival_us if rival_us else 0.0, moved / us * 1e6 / COPY_BYTES_S
        rows.append(Row(op, shape, us, low, high, moved, 0, share, rival_us, ratio, device))
        print(
            f"{op:16s} {shape:10s} {us:8.1f} us ({low:.1f}-{high:.1f}) | {moved / 1e6:6.1f} MB | {share:5.2f} of copy"
            f" | PyTorch {rival_us:8.1f} us, {ratio:5.2f}x",
            flush=True,
        )

    modes: list[tuple[str, str, dict[str, float], Callable[[Tensor], Tensor] | None]] = [
        ("greedy", "text", {}, lambda x: x.argmax(dim=-1)),
        ("temperature", "text", {"temperature": 0.7}, race),
        ("top_p", "text", {"temperature": 1.0, "top_p": TOP_P}, sorted_race),
        ("top_k, top_p", "text", {"temperature": 1.0, "top_k": TOP_K, "top_p": TOP_P}, sorted_race),
        ("top_p", "flat", {"temperature": 1.0, "top_p": TOP_P}, sorted_race),
        ("penalties", "text", {"frequency": 0.5, "repetition": 1.1}, None),
    ]
    for num in (int(part) for part in args.rows.split(",")):
        copies = max(2, min(60, int(2 * L2_BYTES / (num * VOCAB * 4))))
        tokens = torch.empty(num, dtype=torch.int32, device="cuda")
        is_bad = torch.empty(num, dtype=torch.uint8, device="cuda")
        for kind in ("text", "flat"):
            inputs, shape = [make_logits(kind, num) for _ in range(copies)], f"{num} {kind}"
            for op, wanted, settings, rival in modes:
                if wanted != kind:
                    continue
                records = None
                if settings:
                    made = records_of(make_batch(num, **settings), VOCAB)
                    records = known(made, "temperature" in settings, "top_p" in settings)
                rival_us = time_us([partial(rival, x) for x in inputs[:8]])[0] if rival else 0.0
                measure(op, shape, num, [partial(sample_into, tokens, is_bad, x, records) for x in inputs], rival_us)
                if args.parts:
                    parts = [launches(tokens, is_bad, x, records, None, None, False, Cuts()) for x in inputs]
                    for steps in parts:
                        for step in steps:
                            step()
                    for place in range(len(parts[0])):
                        measure(f"  launch {place}", shape, num, [steps[place] for steps in parts], 0.0)
            if kind == "text":
                chosen = inputs[0].argmax(dim=-1)
                rival_us = time_us([partial(likely, x) for x in inputs[:8]])[0]
                measure("logprobs, 20", shape, num, [partial(token_logprobs, x, chosen, 20) for x in inputs], rival_us)
            del inputs
        for op, wanted_params in HOST_MODES:
            print(f"host, {op:10s} {num:10d} {host_us(num, wanted_params):8.1f} us a step", flush=True)
    for row in rows:
        print(json.dumps(asdict(row)))
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


if __name__ == "__main__":
    main()
