"""Products with stored weights on one GPU: time, bytes, share of the floor, ratio to a rival and to PyTorch in bf16.

    python bench/gemm.py [--tokens 1,32,256,4096] [--shapes wq_b,wo_b] [--tune] [--no-torch] [--json FILE]

Shapes of DeepSeek-V4-Flash. Every figure is the median of CUDA-graph replays; a graph holds a call for each of several weights,
so that none is still in L2. Rivals' figures are constants, measured on one H200 by the same method: DeepGEMM 2.8.1 with
programmatic dependent launch for fp8 (without it for 4,096 tokens), cuBLAS for bf16. The floor is the larger of all bytes at the
copy rate and the operations at the rate of large products. Up to 256 tokens are in the decode order, more in the prefill order.
--tune times other cuts.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from timing import time_us
from torch import Tensor

from lamina.ops.gemm import Activation, StoredWeight
from lamina.ops.gemm.triton import (
    Cut,
    Order,
    choose_cut,
    grouped_linear,
    grouped_linear_quantised,
    linear_pair,
    swiglu_quantise,
)
from lamina.ops.quantise.triton import quantise_rows

COPY_BYTES_S, FP8_FLOP_S, BF16_FLOP_S = 4.26e12, 1.376e15, 0.782e15
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
#: more than the L2
ROTATED_BYTES = 120e6


@dataclass(frozen=True, slots=True)
class Shape:
    """out rows and in columns of each group.   rival_us  by tokens."""

    name: str
    rows: int
    width: int
    groups: int
    is_fp8: bool
    rival_us: dict[int, float]

    @property
    def weight_bytes(self) -> int:
        """Codes and scales."""
        count = self.groups * self.rows * self.width
        return count + count // 4096 if self.is_fp8 else 2 * count

    def bytes(self, tokens: int) -> int:
        """Weight, rows and result, each once."""
        per_code = 1 + 4 / 128 if self.is_fp8 else 2
        out = 4 if self.name == "lm_head" else 2
        return self.weight_bytes + int(tokens * self.groups * (self.width * per_code + self.rows * out))

    def flops(self, tokens: int) -> int:
        """Two for each product."""
        return 2 * tokens * self.groups * self.rows * self.width


SHAPES = (
    Shape("wq_a+wkv", 1536, 4096, 1, True, {1: 7.15, 8: 6.96, 32: 7.3, 64: 6.74, 256: 7.89, 4096: 39.3}),
    Shape("wq_b", 32768, 1024, 1, True, {1: 12.7, 8: 12.9, 32: 13.4, 64: 13.4, 256: 19.9, 4096: 238}),
    Shape("wo_a", 1024, 4096, 8, True, {1: 12.8, 8: 12.7, 32: 12.9, 64: 12.8, 256: 17.2, 4096: 217}),
    Shape("wo_b", 4096, 8192, 1, True, {1: 16.6, 8: 13.6, 32: 13.7, 64: 12.9, 256: 19.2, 4096: 191}),
    Shape("shared_gate_up", 4096, 4096, 1, True, {1: 10.1, 32: 8.69, 256: 11.6}),
    Shape("shared_down", 4096, 2048, 1, True, {1: 6.32, 32: 6.23, 256: 7.69}),
    Shape("index_wq_b", 8192, 1024, 1, True, {}),
    Shape("compressor", 2048, 4096, 1, False, {1: 11.9, 32: 11.8, 256: 12.2}),
    Shape("gate", 256, 4096, 1, False, {1: 8.1, 32: 8.3, 256: 8.7}),
    Shape("lm_head", 129280, 4096, 1, False, {1: 243, 8: 247, 32: 267, 64: 282, 256: 418}),
)
_SIX = tuple(shape.name for shape in SHAPES[:6])


@dataclass(frozen=True, slots=True)
class Row:
    """One line: us (median, extremes), share of the floor, the rival's us and the ratio to it (0: none), PyTorch's us in bf16."""

    op: str
    shape: str
    tokens: int
    us: float
    low_us: float
    high_us: float
    bytes: int
    flops: int
    share_of_floor: float
    rival_us: float
    ratio: float
    torch_us: float
    cut: str
    device: str
    commit: str


def stored(rows: int, width: int, is_fp8: bool) -> StoredWeight:
    """A random weight as a checkpoint has it."""
    values = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) * width**-0.5
    if not is_fp8:
        return StoredWeight(values)
    scales = torch.exp2(torch.randint(-9, -6, (-(-rows // 128), -(-width // 128)), device="cuda").float())
    return StoredWeight((values * 128).to(torch.float8_e4m3fn), scales)


def inputs(shape: Shape, tokens: int, calls: int) -> list[Activation]:
    """Rows of each call."""
    made = [torch.randn(tokens, shape.groups * shape.width, device="cuda", dtype=torch.bfloat16) for _ in range(calls)]
    return [quantise_rows(values) if shape.is_fp8 else Activation(values) for values in made]


def candidates(cut: Cut, shape: Shape, is_decode: bool) -> Iterator[Cut]:
    """Other cuts worth a look; of a prefill product only what keeps its bits."""
    if is_decode:
        yield replace(cut, is_ahead=not cut.is_ahead)
        blocks = shape.width // cut.block
        for splits in (cut.splits // 2, cut.splits * 2):
            if splits and blocks % splits == 0 and splits % cut.runs == 0:
                yield replace(cut, splits=splits)
        if IS_HOPPER:
            for tokens, runs, stages in ((64, 1, 8), (64, 2, 8), (64, 1, 4), (128, 1, 6), (128, 2, 6)):
                if cut.splits % runs == 0:
                    yield replace(
                        cut, tokens=tokens, rows=128, runs=runs, stages=stages, is_gluon=True, is_tokens_first=True, is_ahead=True
                    )  # fmt: skip
        if not cut.is_gluon:
            for stages in (3, 4, 8):
                yield replace(cut, stages=stages)
            yield replace(cut, rows=128, stages=4)
        return
    for tokens, rows, warps, stages in (
        (64, 128, 4, 4), (64, 256, 4, 3), (64, 256, 8, 3), (128, 128, 4, 3), (128, 128, 8, 2), (128, 128, 8, 4), (128, 256, 8, 3),
    ):  # fmt: skip
        yield replace(cut, tokens=tokens, rows=rows, warps=warps, stages=stages, is_gluon=False)
    if cut.is_gluon:
        for tokens, rows, stages in ((64, 128, 8), (128, 128, 6), (128, 128, 5), *([] if shape.is_fp8 else [(128, 256, 4)])):
            yield replace(cut, tokens=tokens, rows=rows, stages=stages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", default="1,32,256,4096")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="named in the lines of --json")
    args = parser.parse_args()
    torch.manual_seed(0)
    tokens_list = [int(part) for part in args.tokens.split(",")]
    device, rows = torch.cuda.get_device_name(), list[Row]()

    def measure(op: str, shape: Shape, tokens: int, launches: list[Callable[[], object]], torch_us: float, cut: str) -> None:
        us, low, high = time_us(launches, 9)
        num_bytes, flops = shape.bytes(tokens), shape.flops(tokens)
        floor = max(num_bytes / COPY_BYTES_S, flops / (FP8_FLOP_S if shape.is_fp8 else BF16_FLOP_S)) * 1e6
        rival = shape.rival_us.get(tokens, 0.0)
        ratio = us / rival if rival else 0.0
        rows.append(
            Row(
                op, shape.name, tokens, us, low, high, num_bytes, flops, floor / us, rival, ratio, torch_us, cut, device,
                args.commit,
            )
        )  # fmt: skip
        print(json.dumps({key: value for key, value in asdict(rows[-1]).items() if key not in ("device", "commit")}), flush=True)
        print(
            f"T={tokens:5d} {shape.name:15s} {us:7.1f} us ({low:.1f}-{high:.1f}) | {num_bytes / us / 1e6:5.2f} TB/s |"
            f" {flops / us / 1e6:6.0f} TFLOP/s | {floor / us:4.2f} of floor | {ratio:4.2f}x rival | torch {torch_us:7.1f} us |"
            f" {cut}",
            flush=True,
        )

    for shape in [shape for shape in SHAPES if shape.name in args.shapes.split(",")]:
        calls = int(min(24, max(3, ROTATED_BYTES // shape.weight_bytes + 1))) if shape.weight_bytes < ROTATED_BYTES else 1
        weights = [stored(shape.groups * shape.rows, shape.width, shape.is_fp8) for _ in range(calls)]
        out_dtype = torch.float32 if shape.name == "lm_head" else torch.bfloat16
        for tokens in tokens_list:
            if shape.name == "lm_head" and tokens > 256:
                continue  # nobody asks for the logits of a whole prompt
            order: Order = "decode" if tokens <= 256 else "prefill"
            xs = inputs(shape, tokens, calls)
            maths = "fp8" if shape.is_fp8 else "bf16"
            cut = choose_cut(tokens, shape.rows, shape.width, shape.groups, maths, order, IS_HOPPER)

            torch_us = 0.0
            if not args.no_torch:
                wide = [weight.codes.to(torch.bfloat16).view(shape.groups, shape.rows, shape.width) for weight in weights]
                turned = [x.values.view(tokens, shape.groups, shape.width).transpose(0, 1) for x in xs]
                torch_us = time_us([lambda x=x, w=w: _torch(x, w) for x, w in zip(turned, wide)], 5)[0]
                del wide
            cuts = [cut, *(candidates(cut, shape, order == "decode") if args.tune else ())]
            for cut in cuts:
                calls_of = _calls(xs, weights, shape.groups, out_dtype, order, cut)
                try:
                    measure("linear", shape, tokens, calls_of, torch_us, str(cut))
                except triton.runtime.errors.OutOfResources as error:
                    print(f"{cut}: {error}")
            if shape.name == "wo_a" and order == "decode":
                for op, function in (("quantised", grouped_linear_quantised), ("then_quantise", _two_steps)):
                    calls_of = [lambda x=x, w=w, f=function: f(x, w, 8, torch.bfloat16, "decode") for x, w in zip(xs, weights)]
                    measure(f"grouped_linear_{op}", replace(shape, name=f"wo_a {op}"), tokens, calls_of, 0.0, "")
        del weights
    if "wq_a+wkv" in args.shapes and "compressor" in args.shapes:
        pair = Shape("wq_a+wkv | 2624", 1536 + 2 * 2624, 4096, 1, True, {})  # in bytes of fp8
        weights = [(stored(1536, 4096, True), stored(2624, 4096, False)) for _ in range(6)]
        for tokens in [tokens for tokens in tokens_list if tokens <= 256]:
            xs = inputs(pair, tokens, 6)
            calls_of = [lambda x=x, w=w: linear_pair(x, *w, torch.bfloat16, torch.float32) for x, w in zip(xs, weights)]
            measure("linear_pair", pair, tokens, calls_of, 0.0, "")
    for tokens in tokens_list:
        h = [torch.randn(tokens, 4096, device="cuda") for _ in range(max(3, 6 if tokens > 256 else 20))]
        us, low, high = time_us([lambda part=part: swiglu_quantise(part, 10.0, torch.bfloat16, True) for part in h], 9)
        moved = tokens * 4096 * 4 + tokens * 2048 * 3
        print(f"T={tokens:5d} swiglu_quantise {us:7.1f} us ({low:.1f}-{high:.1f}) | {moved / us / 1e6:5.2f} TB/s")
        values = [part.bfloat16() for part in h]
        us, low, high = time_us([lambda part=part: quantise_rows(part) for part in values], 9)
        print(f"T={tokens:5d} quantise_rows   {us:7.1f} us ({low:.1f}-{high:.1f}) | {tokens * 4096 * 3 / us / 1e6:5.2f} TB/s")
    for tokens in tokens_list:
        first = {row.shape: row for row in reversed(rows) if row.tokens == tokens}
        six = [first[name] for name in _SIX if name in first and first[name].rival_us]  # a rival measured four of them at 4,096
        if six:
            ours, rival = sum(row.us for row in six), sum(row.rival_us for row in six)
            print(f"T={tokens:5d} {len(six)} of the six fp8 products of a layer {ours:7.1f} us, rival {rival:.1f}")
    if args.json:
        with args.json.open("a") as file:
            for row in rows:
                file.write(json.dumps(asdict(row)) + "\n")


def _calls(
    xs: list[Activation], weights: list[StoredWeight], groups: int, out_dtype: torch.dtype, order: Order, cut: Cut
) -> list[Callable[[], object]]:
    return [
        lambda x=x, weight=weight: grouped_linear(x, weight, groups, out_dtype, order, None, cut)
        for x, weight in zip(xs, weights)
    ]


def _two_steps(x: Activation, weights: StoredWeight, groups: int, dtype: torch.dtype, order: Order) -> Activation:
    return quantise_rows(grouped_linear(x, weights, groups, dtype, order))


def _torch(x: Tensor, weight: Tensor) -> Tensor:
    """x [G, T, K], weight [G, N, K]."""
    return F.linear(x[0], weight[0]) if x.shape[0] == 1 else torch.bmm(x, weight.transpose(1, 2))


if __name__ == "__main__":
    main()
