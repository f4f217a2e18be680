"""Hyper-connections and routing on one GPU: time of each launch, bytes, share of the roof, and the ratio to rivals.

    PYTHONPATH=. python bench/hyper.py [--tokens 1,8,32,256,4096] [--pro] [--tune] [--json FILE]

Shapes: 4 streams of width 4096 (--pro: 7168), 256 experts (384), 6 a token. Every figure is the median of CUDA-graph replays. A
graph holds a chain of boundaries as in a model: streams come from the one before, as warm as they are there, and every mixer is
another one, so that none is still in L2. Bytes are what the op must move: streams read and written, the sub-layer's output and
the mixer read, the next input written with its codes. The roof is the copy rate. PyTorch's own composition of the same op is
`ref.py` in the same kind of graph.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from timing import COPY_BYTES_S, time_us
from torch import Tensor

from lamina.layers.rounding import rounded
from lamina.ops.gemm import empty_activation
from lamina.ops.hyper import Mixer, hyper_post, hyper_pre
from lamina.ops.hyper.triton import Boundary, BoundaryStep, boundary, start
from lamina.ops.quantise import quantise_fp8
from lamina.ops.rope_norm import rms_norm
from lamina.ops.route import route as route_definition
from lamina.ops.route.triton import route
from lamina.ops.rows import Rows, rows_of
from lamina.ops.sequences import Piece

STREAMS, TOP_K, EPS, BF16 = 4, 6, 1e-6, torch.bfloat16
#: us of vLLM's router of this model (`topk_softplus_sqrt`) on one H200, measured alike
ROUTER_US = {1: 3.9, 256: 4.2, 1024: 4.8, 8192: 14.9}


@dataclass(frozen=True, slots=True)
class Row:
    """One line: us (median, extremes), bytes counted and flops, share of the roof, what others take (0: not measured)."""

    op: str
    shape: str
    us: float
    low_us: float
    high_us: float
    bytes: int
    flops: int
    share_of_floor: float
    torch_us: float
    rival_us: float
    ratio: float
    device: str
    commit: str


class Report:
    """Prints rows and keeps them."""

    def __init__(self, commit: str) -> None:
        self.rows: list[Row] = []
        self.commit = commit

    def add(
        self, op: str, shape: str, times: tuple[float, float, float], moved: int, flops: int = 0, torch_us: float = 0.0,
        rival_us: float = 0.0,
    ) -> None:  # fmt: skip
        """A line of the table; share and ratio only where there is something to compare with."""
        share, ratio = moved / times[0] * 1e6 / COPY_BYTES_S, times[0] / rival_us if rival_us else 0.0
        device = torch.cuda.get_device_name()
        row = Row(op, shape, *times, moved, flops, share, torch_us, rival_us, ratio, device, self.commit)
        self.rows.append(row)
        print(
            f"{op:16s} {shape:22s} {row.us:8.2f} us ({row.low_us:.2f}-{row.high_us:.2f}) | {moved / 1e6:8.2f} MB |"
            f" {share:5.2f} of copy | torch {torch_us:8.1f} us | {f'{ratio:.2f}x rival' if rival_us else '-'}",
            flush=True,
        )


def mixer_of(width: int) -> Mixer:
    rows = 2 * STREAMS + STREAMS**2
    fn = torch.randn(rows, STREAMS * width, device="cuda") * (STREAMS * width) ** -0.5
    return Mixer(fn, torch.randn(rows, device="cuda"), torch.ones(rows, device="cuda"), 20, EPS, EPS)


def composed(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor, mixer: Mixer, weight: Tensor) -> tuple[Tensor, ...]:
    """The definition of a boundary, in PyTorch."""
    streams = hyper_post(streams, out, post, comb)
    collapsed, post, comb = hyper_pre(streams, mixer)
    x = rounded(rms_norm(rounded(collapsed, BF16), weight, EPS), BF16)
    return streams, post, comb, *quantise_fp8(x, 128)


def boundaries(report: Report, width: int, tokens: int, tune: bool) -> None:
    calls = 40 if tokens <= 32 else 24 if tokens <= 256 else 4
    mixers, weight = [mixer_of(width) for _ in range(calls)], torch.randn(width, device="cuda")
    outs = [torch.randn(tokens, width, device="cuda", dtype=BF16) for _ in range(min(calls, 8))]
    embed = torch.randn(1000, width, device="cuda", dtype=BF16)
    ids = torch.randint(0, 1000, (tokens,), device="cuda", dtype=torch.int32)
    streams = start(embed, ids, STREAMS)
    first = boundary(streams, None, None, None, mixers[0], weight, BF16, True)
    shape = f"T={tokens} S={STREAMS} D={width}"
    moved = tokens * width * (2 * STREAMS * 2 + 2 + 3) + mixers[0].fn.nbytes
    flops = tokens * STREAMS * width * 2 * (mixers[0].fn.shape[0] + STREAMS + 1)
    at: list[Boundary] = [first]

    def whole(call: int) -> Callable[[], None]:
        def launch() -> None:
            last = first if call == 0 else at[0]
            mixer, out = mixers[call], outs[call % len(outs)]
            at[0] = boundary(last.streams, out, last.post, last.comb, mixer, weight, BF16, True)

        return launch

    state: list[tuple[Tensor, ...]] = []

    def plain(call: int) -> Callable[[], None]:
        def launch() -> None:
            given = (first.streams, first.post, first.comb) if call == 0 else state[0][:3]
            found = composed(given[0], outs[call % len(outs)], given[1], given[2], mixers[call], weight)
            state[:] = [found]

        return launch

    torch_us = time_us([plain(call) for call in range(min(calls, 4))], 5)[0]
    report.add("boundary", shape, time_us([whole(call) for call in range(calls)]), moved, flops, torch_us)
    steps = []
    for call in range(calls):
        x = empty_activation(tokens, width, BF16, streams.device, True)
        mixes = (torch.empty_like(first.post), torch.empty_like(first.comb))
        last = steps[-1].mixed if steps else first.streams
        step = BoundaryStep(last, outs[call % len(outs)], None, first.post, first.comb, mixers[call], weight, x, mixes)
        step.mix()
        steps.append(step)
    products = steps[0].products.nbytes
    of_mix = tokens * width * (2 * STREAMS * 2 + 2) + mixers[0].fn.nbytes + products
    report.add("  mix", shape, time_us([step.mix for step in steps]), of_mix, flops)
    report.add("  collapse", shape, time_us([step.collapse for step in steps]), tokens * width * (2 * STREAMS + 3) + products)
    for tiles in (1, 2, 4, 8, 16, 32) if tune else ():
        if tiles == 1 or tiles < -(-tokens // 16):
            launches = [lambda step=step, tiles=tiles: step.mix(tiles) for step in steps]
            report.add(f"  mix tiles={tiles}", shape, time_us(launches), of_mix, flops)
    if tokens in (1, 256, 4096):
        launches = [lambda: start(embed, ids, STREAMS)] * calls
        report.add("start", shape, time_us(launches), tokens * width * 2 * (1 + STREAMS))


def rows_for(tokens: int) -> Rows:
    tables = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    return rows_of((Piece(0, tokens, 0, 0),), ((0,),), tables, tokens, 1)


def routers(report: Report, num_experts: int, tokens: int) -> None:
    calls, rows = 40 if tokens <= 256 else 12, rows_for(tokens)
    logits = [torch.randn(tokens, num_experts, device="cuda") * 3 for _ in range(calls)]
    bias, ids = torch.randn(num_experts, device="cuda"), torch.randint(0, 1000, (tokens,), device="cuda", dtype=torch.int32)
    table = torch.randint(0, num_experts, (1000, TOP_K), device="cuda", dtype=torch.int32)
    shape, moved = f"T={tokens} E={num_experts} k={TOP_K}", tokens * (num_experts * 4 + TOP_K * 8)
    torch_us = time_us([lambda one=one: route_definition(one, bias, TOP_K, 1.5) for one in logits[:4]], 5)[0]
    times = time_us([lambda one=one: route(one, bias, None, ids, TOP_K, 1.5, rows) for one in logits])
    report.add("route", shape, times, moved, 0, torch_us, ROUTER_US.get(tokens, 0.0))
    times = time_us([lambda one=one: route(one, None, table, ids, TOP_K, 1.5, rows) for one in logits])
    report.add("route by table", shape, times, tokens * TOP_K * 48)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", default="1,8,32,256,4096")
    parser.add_argument("--pro", action="store_true", help="width and experts of the larger model")
    parser.add_argument("--tune", action="store_true", help="other numbers of tiles a program of mix")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="named in the lines of --json")
    args = parser.parse_args()
    torch.manual_seed(0)
    report = Report(args.commit)
    for tokens in (int(part) for part in args.tokens.split(",")):
        boundaries(report, 7168 if args.pro else 4096, tokens, args.tune)
    for tokens in (1, 32, 256, 1024, 8192):
        routers(report, 384 if args.pro else 256, tokens)
    lines = "".join(json.dumps(asdict(row)) + "\n" for row in report.rows)
    print(lines, end="")
    if args.json:
        with args.json.open("a") as file:
            file.write(lines)


if __name__ == "__main__":
    main()
