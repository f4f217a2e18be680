"""Attention over latents on one GPU, all rows or those that an index lists, and that index: time, bytes, FLOPs, share of a roof.

    python bench/latent.py [--only attend|index] [--json FILE] [--commit NAME]

The widths of DeepSeek-V3.2: 128 heads over latents of 512 and 64 rotated dims; an index of 64 heads of 128 dims that lists 2,048.
Requests lie in pages of 16 tokens drawn at random. Figures are medians of CUDA-graph replays of the same call: what is small
enough is read from L2. The roof is the larger of the bytes at the copy rate and the products at the bf16 rate. The ratio of
listed rows is the time of all rows in the same run over theirs.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from timing import COPY_BYTES_S, time_us
from torch import Tensor

from lamina.ops.attend_heads import HeadsCase, Past
from lamina.ops.attend_latent.triton import attend_latent
from lamina.ops.index_topk.triton import index_topk
from lamina.ops.rows import Rows
from lamina.ops.store import EntryCodec, LatentCodec, Place, Store, index_codec

HEADS, RANK, ROPE, INDEX_HEADS, INDEX_DIM, TOP_K, BLOCK_TOKENS = 128, 512, 64, 64, 128, 2048, 16
BF16_FLOPS = 790e12
DEVICE = torch.device("cuda")
Launch = Callable[[], object]
#: (order, queries, tokens of a request after the step); a decode's queries are of as many requests, a prefill's of one
SHAPES = (
    *(("decode", batch, context) for context in (2048, 8192, 32768) for batch in (1, 8, 32)), ("decode", 1, 131072),
    ("prefill", 1024, 8192), ("prefill", 1024, 32768),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the results. roof_us  what bytes or products need at least.   ratio  0: to nothing."""

    op: str
    shape: str
    us: float
    low_us: float
    high_us: float
    bytes: int
    flops: int
    share_of_roof: float
    ratio: float
    device: str
    commit: str

    def show(self) -> None:
        """One row of the table."""
        print(
            f"{self.op:20s} {self.shape:24s} {self.us:9.1f} us ({self.low_us:.1f}-{self.high_us:.1f}) |"
            f" {self.bytes / 1e6:.1f} MB | {self.bytes / self.us / 1e6:.2f} TB/s | {self.flops / self.us / 1e6:.0f} TFLOP/s |"
            f" {self.share_of_roof:.0%} of roof | {self.ratio:.2f}x",
            flush=True,
        )


def store_of(codec: EntryCodec | LatentCodec, pages: int, seed: int) -> Store:
    """A store of random rows, each field by itself."""
    draw = torch.Generator(DEVICE).manual_seed(seed)
    width = codec.width
    encoded = codec.encode(torch.randn(4096, width, device=DEVICE, generator=draw))
    views = []
    for field in encoded:
        rows = field.reshape(4096, -1)[torch.randint(0, 4096, (pages * BLOCK_TOKENS,), device=DEVICE, generator=draw)]
        views.append(rows.view(pages, BLOCK_TOKENS, -1))
    return Store(codec, tuple(views), 0, Place("block"))


def step_of(order: str, queries: int, context: int) -> Rows:
    """The last rows of requests whose blocks lie anywhere."""
    requests = queries if order == "decode" else 1
    each = queries // requests
    blocks = -(-context // BLOCK_TOKENS)
    draw = torch.Generator().manual_seed(1)
    tables = torch.randperm(requests * blocks, generator=draw).view(requests, blocks).int().to(DEVICE)
    number = torch.arange(requests, dtype=torch.int32, device=DEVICE)
    start = torch.full_like(number, context - each)
    nothing = torch.zeros_like(number)
    return Rows(
        (start[:, None] + torch.arange(each, device=DEVICE).int()).flatten(), number.repeat_interleave(each), start, start + each,
        number * each, nothing, start, number, tables, nothing[:, None], order == "decode",
    )  # fmt: skip


def measure(op: str, shape: tuple[str, int, int], launch: Launch, size: int, flops: int, rival: float, commit: str) -> Line:
    """The time of some calls one after another."""
    us, low, high = time_us([launch] * (4 if shape[0] == "decode" else 2))
    roof = max(size / COPY_BYTES_S, flops / BF16_FLOPS) * 1e6
    name = f"{shape[0]} T={shape[1]} ctx={shape[2]}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    line = Line(op, name, us, low, high, size, flops, roof / us, rival / us, device, commit)
    line.show()
    return line


def attention(shape: tuple[str, int, int], cache: str, commit: str) -> Iterator[Line]:
    """All rows, and rows that are listed at random, ascending."""
    order, queries, context = shape
    rows, codec = step_of(*shape), LatentCodec(RANK, ROPE, cache)
    past = Past(store_of(codec, rows.tables.numel(), 2), codec)
    q = torch.randn(queries, HEADS * RANK, dtype=torch.bfloat16, device=DEVICE) / RANK**0.5
    turned = torch.randn(queries, HEADS * ROPE, dtype=torch.bfloat16, device=DEVICE)
    scale, row_bytes = (128 + ROPE) ** -0.5, {"bf16": 2 * (RANK + ROPE), "fp8": RANK + 16 + 2 * ROPE}[cache]
    products = 2 * HEADS * (2 * RANK + ROPE)
    every = queries * context if order == "decode" else sum(range(context - queries + 1, context + 1))
    whole = HeadsCase(HEADS, 1, scale)
    held = context * row_bytes * rows.num_requests
    line = measure(
        f"attend {cache}", shape, lambda: attend_latent(q, turned, past, whole, rows, order, context), held, every * products,
        0.0, commit,
    )  # fmt: skip
    yield line
    count = min(TOP_K, context)
    places = listed(rows, context, count)
    few = HeadsCase(HEADS, 1, scale, top_k=count)
    yield measure(
        f"attend {cache}, listed", shape, lambda: attend_latent(q, turned, past, few, rows, order, context, None, places),
        min(held, queries * count * row_bytes), queries * count * products, line.us, commit,
    )  # fmt: skip


def listed(rows: Rows, context: int, count: int) -> Tensor:
    """[T, count] places of so many of the rows that each query sees."""
    found = []
    for position, owner in zip(rows.positions.tolist(), rows.owners.tolist(), strict=True):
        seen = torch.randperm(position + 1, device=DEVICE)[:count].sort().values
        places = rows.tables[owner, seen // BLOCK_TOKENS] * BLOCK_TOKENS + seen % BLOCK_TOKENS
        found.append(torch.nn.functional.pad(places, (0, count - len(places)), value=-1))
    return torch.stack(found).int()


def index(shape: tuple[str, int, int], index_format: str, commit: str) -> Line:
    """Scores of all tokens, and the places of the best."""
    order, queries, context = shape
    rows, codec = step_of(*shape), index_codec(index_format, INDEX_DIM)
    store = store_of(codec, rows.tables.numel(), 3)
    asked = tuple(
        field.reshape(queries * INDEX_HEADS, -1)
        for field in codec.encode(torch.randn(queries * INDEX_HEADS, INDEX_DIM, device=DEVICE))
    )
    weights = torch.randn(queries, INDEX_HEADS, device=DEVICE)
    every = queries * context if order == "decode" else sum(range(context - queries + 1, context + 1))
    size = context * rows.num_requests * store.row_bytes
    scale = (INDEX_DIM * INDEX_HEADS) ** -0.5
    return measure(
        f"index {index_format}", shape, lambda: index_topk(asked, weights, scale, store, rows, 1, TOP_K, context, order), size,
        2 * every * INDEX_HEADS * INDEX_DIM, 0.0, commit,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=("attend", "index"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="named in the lines of --json")
    args = parser.parse_args()
    torch.manual_seed(0)
    lines: list[Line] = []
    for shape in SHAPES:
        if args.only != "index":
            for cache in ("bf16", "fp8"):
                lines += attention(shape, cache, args.commit)
        if args.only != "attend":
            lines += [index(shape, index_format, args.commit) for index_format in ("bf16", "fp8", "fp4")]
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(asdict(line)) + "\n" for line in lines)


if __name__ == "__main__":
    main()
