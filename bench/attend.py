"""Attention over stored rows on one GPU: time, bytes, FLOPs, share of the floor, and the ratio to a rival.

    python bench/attend.py [--tune] [--check] [--json FILE] [--commit NAME]

Shapes: 64 heads of 512, rows of 584 bytes, a window of 128 and selected or all entries. Every figure is the median of CUDA-graph
replays; a graph holds several calls with different queries and entries, so that few rows are still in L2. The floor is the larger
of the bytes at the copy rate and the products at the bf16 rate. --check compares with fp64. --tune times other tiles.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from timing import COPY_BYTES_S, time_us
from torch import Tensor

from lamina.ops.attend import Range, Selected
from lamina.ops.attend.triton import AttendStep, Tiles, tiles_for
from lamina.ops.gemm.stored import empty_activation
from lamina.ops.rows import Rows
from lamina.ops.store import Store, attention_codec

HEADS, WIDTH, ROPE, WINDOW, BLOCK_TOKENS = 64, 512, 64, 128, 256
BF16_FLOPS = 790e12
_LOG_BYTES = 200_000_000
#: us of FlashMLA's sparse fp8 decode with its combining, by batch and selected entries; one H200, same shapes and method
RIVAL_US = {
    (1, 512): 14.6, (8, 512): 16.2, (32, 512): 24.4, (64, 512): 45.2, (128, 512): 46.3, (256, 512): 88.7,
    (1, 2048): 19.9, (8, 2048): 22.6, (32, 2048): 53.4, (64, 2048): 83.5, (128, 2048): 128.7, (256, 2048): 251.8,
}  # fmt: skip
#: its prefill over bf16 rows, 640 a query: 435 to 450 TFLOP/s
RIVAL_PREFILL_FLOPS = 440e12


@dataclass(frozen=True, slots=True)
class Shape:
    """queries   T; of as many requests in decode, of one in prefill.   picks  selected entries, 0: all that are visible.

    ratio  tokens of an entry.   context  position of the last query + 1.
    """

    order: str
    queries: int
    ratio: int
    picks: int
    context: int
    cache: str = "fp8"

    @property
    def rows_read(self) -> int:
        """Rows of each query."""
        return WINDOW + (self.picks or self.context // self.ratio)

    @property
    def name(self) -> str:
        """One cell of the table."""
        entries = self.picks or f"all {self.context // self.ratio}"
        return f"{self.order} T={self.queries} {self.cache} {entries}+{WINDOW}"


SHAPES = (
    *(Shape("decode", batch, 4, 512, 8192) for batch in (1, 8, 32, 64, 128, 256)),
    *(Shape("decode", batch, 4, 2048, 32768) for batch in (1, 32, 256)),
    *(Shape("decode", batch, 128, 0, 131072) for batch in (1, 32)),
    Shape("decode", 1, 128, 0, 1 << 20),
    Shape("prefill", 4096, 4, 512, 8192),
    Shape("prefill", 4096, 4, 512, 8192, "bf16"),
)
_CANDIDATES = tuple(Tiles(64, 64, 4, 1, warps, split, True) for split in (2, 3, 4, 5, 8, 10) for warps in (2, 4)) + tuple(
    Tiles(64, rows, 8, stages, warps, split)
    for rows, split, warps in ((64, 2, 4), (64, 3, 4), (64, 4, 4), (64, 4, 2), (64, 4, 8), (64, 5, 4), (32, 8, 4), (32, 10, 4))
    for stages in (1, 2, 3)
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the results; rival_us 0: none."""

    op: str
    shape: str
    us: float
    low_us: float
    high_us: float
    bytes: int
    flops: int
    share_of_floor: float
    tflops: float
    rival_us: float
    ratio: float
    torch_us: float
    tiles: str
    device: str
    commit: str


def store_of(cache: str, pages: int, rows: int) -> Store:
    """Random rows: all codes but NaN, scales around 2^-6."""
    codec = attention_codec(cache, WIDTH, ROPE)
    if cache != "fp8":
        arena = torch.randn(pages, rows, WIDTH, device="cuda", dtype=torch.bfloat16)
        return Store(codec, (arena,))
    sizes = (rows * (WIDTH - ROPE), rows * 2 * ROPE, rows * 8)
    page = -(-sum(sizes) // 512) * 512
    arena = torch.empty(pages, page, dtype=torch.uint8, device="cuda")
    codes = arena.as_strided((pages, rows, WIDTH - ROPE), (page, WIDTH - ROPE, 1))
    rope = arena.view(torch.bfloat16).as_strided((pages, rows, ROPE), (page // 2, ROPE, 1), sizes[0] // 2)
    scales = arena.as_strided((pages, rows, 8), (page, 8, 1), sizes[0] + sizes[1])
    random = torch.randint(0, 256, (pages, rows, WIDTH - ROPE), dtype=torch.uint8, device="cuda")
    codes.copy_(torch.where((random & 127) == 127, 0, random))
    rope.copy_(torch.randn(pages, rows, ROPE, device="cuda"))
    scales.copy_(torch.randint(118, 122, (pages, rows, 8), dtype=torch.uint8, device="cuda"))
    return Store(codec, (codes, rope, scales))


def make(shape: Shape, calls: int, tiles: Tiles | None) -> list[AttendStep]:
    """The same launches with different queries, windows and entries."""
    t, is_decode = shape.queries, shape.order == "decode"
    requests = t if is_decode else 1
    rows_per_page = BLOCK_TOKENS // shape.ratio
    blocks = -(-shape.context // BLOCK_TOKENS)
    pages = max(requests * blocks, min(calls * blocks, _LOG_BYTES // (600 * rows_per_page)))
    log = store_of(shape.cache, pages, rows_per_page)
    window = store_of(shape.cache, max(requests, 64), WINDOW)
    found = []
    for _ in range(calls):
        q = torch.randn(t, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
        own = tuple(view[0] for view in store_of(shape.cache, 1, t).views)
        tables = torch.randperm(pages, device="cuda")[: requests * blocks].view(requests, blocks).int()
        start = shape.context - (1 if is_decode else t)
        positions = torch.full((t,), start, device="cuda") if is_decode else torch.arange(start, start + t, device="cuda")
        each = torch.arange(requests, device="cuda")
        owners = each if is_decode else torch.zeros(t, device="cuda")
        slots = torch.randperm(window.views[0].shape[0], device="cuda")[:requests]
        zeros = each * 0
        numbers = (positions, owners, zeros + start, zeros + shape.context, each, zeros, zeros, each)
        positions32, owners32, starts, stops, first_rows, valid, write, table_rows = (x.int() for x in numbers)
        rows = Rows(
            positions32, owners32, starts, stops, first_rows, valid, write, table_rows, tables, slots.int()[:, None].contiguous(),
            is_decode,
        )  # fmt: skip
        scope: Selected | Range = Range(log, shape.ratio)
        if shape.picks:
            entries = torch.rand(t, start // shape.ratio, device="cuda").topk(shape.picks, 1).indices.sort(1).values
            page = tables[owners.long()[:, None], entries // rows_per_page].long()
            scope = Selected(log, shape.ratio, (page * rows_per_page + entries % rows_per_page).int())
        angles = positions[:, None] * 0.01 * torch.arange(1, ROPE // 2 + 1, device="cuda")
        out = empty_activation(t, HEADS * WIDTH, torch.bfloat16, q.device, True)
        cut = tiles or tiles_for(q, window, ROPE)
        sink = torch.randn(HEADS, device="cuda")
        found.append(
            AttendStep(
                q, own, window, WINDOW, scope, WIDTH**-0.5, sink, rows, angles.cos(), angles.sin(), out,
                "decode" if is_decode else "prefill", cut,
            )
        )  # fmt: skip
    return found


def rows_seen(step: AttendStep) -> Tensor:
    """[T, N, d] fp32: the window and the entries of each query, of a decode step."""
    scope, rows, window = step.scope, step.rows, step.window
    assert scope is not None
    past = rows.positions[:, None] + torch.arange(1 - WINDOW, 0, device="cuda")
    ring = window.read(rows.slots[:, :1].expand_as(past).flatten().long(), (past % WINDOW).flatten().long())
    own = window.codec.decode(step.own)
    width = scope.log.rows_per_page
    if isinstance(scope, Selected):
        places = scope.places.long()
        pages, inside = places // width, places % width
    else:
        entries = torch.arange(int(rows.positions[0] + 1) // scope.ratio, device="cuda").expand(rows.num_rows, -1)
        pages, inside = rows.tables.long().gather(1, entries // width), entries % width
    far = scope.log.read(pages.flatten(), inside.flatten())
    t = rows.num_rows
    return torch.cat([ring.view(t, -1, WIDTH), own[:, None], far.view(t, -1, WIDTH)], 1)


def check(shape: Shape, tiles: Tiles | None) -> None:
    """The values against fp64, each query, and the same bits alone."""
    (step,) = make(shape, 1, tiles)
    step.out.values.fill_(torch.nan)
    step.run()
    worst = 0.0
    seen = rows_seen(step).double()
    scores = torch.einsum("thd,tnd->thn", step.q.double(), seen) * step.scale
    both = torch.cat([scores, step.sink.double()[None, :, None].expand(len(scores), -1, 1)], 2).softmax(2)[..., :-1]
    truth = torch.einsum("thn,tnd->thd", both, seen)
    a, b = truth[..., -ROPE::2].clone(), truth[..., 1 - ROPE :: 2].clone()
    cos, sin = step.cos.double()[:, None], step.sin.double()[:, None]
    truth[..., -ROPE::2], truth[..., 1 - ROPE :: 2] = a * cos + b * sin, b * cos - a * sin
    found = step.out.values.view(truth.shape).double()
    for row in range(shape.queries):
        worst = max(worst, float((found[row] - truth[row]).norm() / truth[row].norm()))
    print(f"check {shape.name}: worst row {worst:.1e}", flush=True)
    assert worst < 1e-2


def composed(step: AttendStep) -> Callable[[], None]:
    """The same in plain PyTorch operations, rows decoded to bf16 first."""

    def run() -> None:
        seen = rows_seen(step).to(torch.bfloat16)
        scores = torch.bmm(step.q, seen.transpose(1, 2)).float() * step.scale
        both = torch.cat([scores, step.sink[None, :, None].expand(len(scores), -1, 1)], 2).softmax(2)[..., :-1]
        torch.bmm(both.to(torch.bfloat16), seen)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default="", help="shapes whose name has this in it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="named in the lines of --json")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.cuda.get_device_name()
    lines: list[Line] = []
    for shape in (shape for shape in SHAPES if args.only in shape.name):
        is_decode = shape.order == "decode"
        if args.check and is_decode and shape.queries <= 32:
            check(shape, None)
        row_bytes = 584 if shape.cache == "fp8" else 2 * WIDTH
        flops = 4 * HEADS * WIDTH * shape.rows_read * shape.queries
        # prefill: neighbours share most of their rows, so that only queries and outputs count
        row_reads = shape.rows_read * shape.queries * row_bytes if is_decode else 0
        num_bytes = row_reads + shape.queries * HEADS * WIDTH * 5
        floor = max(num_bytes / COPY_BYTES_S, flops / BF16_FLOPS) * 1e6
        rival = RIVAL_US.get((shape.queries, shape.picks), 0.0) if is_decode else flops / RIVAL_PREFILL_FLOPS * 1e6
        calls = {1: 40, 8: 20, 32: 10, 64: 6}.get(shape.queries, 3 if is_decode else 1)
        plain = 0.0
        if is_decode and shape.queries in (1, 32) and shape.picks == 512:
            plain = time_us([composed(step) for step in make(shape, 2, None)])[0]
        for wanted in (None, *(_CANDIDATES if args.tune else ())):
            try:
                steps = make(shape, calls, wanted)
                tiles = steps[0].tiles
                us, low, high = time_us([step.run for step in steps], 15 if is_decode else 5)
            except triton.runtime.errors.OutOfResources as error:
                print(f"{shape.name} {wanted}: {error}")
                continue
            line = Line(
                "attend", shape.name, us, low, high, num_bytes, flops, floor / us, flops / us / 1e6, rival,
                us / rival if rival else 0.0, plain, str(tiles), device, args.commit,
            )  # fmt: skip
            lines.append(line)
            print(
                f"{shape.name:34s} {us:8.1f} us ({low:.1f}-{high:.1f}) | {num_bytes / 1e6:7.1f} MB | {line.tflops:5.0f} TFLOP/s |"
                f" {line.share_of_floor:4.2f} of floor | {line.ratio:5.2f}x rival | torch {plain:7.1f} us | {tiles}",
                flush=True,
            )
    for line in lines:
        print(json.dumps(asdict(line)))
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(asdict(line)) + "\n" for line in lines)


if __name__ == "__main__":
    main()
