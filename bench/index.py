"""The index on one GPU: scores, choice and both, time, bytes, share of the roof, and the ratio to rivals.

    python bench/index.py [--formats fp8,fp4] [--shapes 1x32K,..] [--prefill 4K,32K,128K] [--tune] [--json FILE] [--commit ID]

64 heads of 128 dims, 512 kept (--top-k), ratio 4, blocks of 256 tokens; keys and queries random. Medians of CUDA-graph replays; a
graph holds several calls with keys of their own, so that none are still in L2. The floor is the keys and scores at the copy rate
for decode and bf16's rate for prefill. Rivals: DeepGEMM's scores of fp8 keys plus vLLM's choice, same shapes on one H200, not in
the same run; PyTorch's own composition from keys already decoded to bf16 (without their gathering) in this run.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton
from timing import time_us
from torch import Tensor

from lamina.ops.index_topk.triton import IndexStep, Tiles, choose_tiles
from lamina.ops.rows import Rows, rows_of
from lamina.ops.sequences import Piece
from lamina.ops.store import Store, index_codec

HEADS, DIM, RATIO, PAGE = 64, 128, 4, 64
COPY_BYTES_S, BF16_FLOPS = 4.26e12, 795e12
#: us of DeepGEMM's scores and of vLLM's better choice, (batch, context in K)
RIVAL_US = {(1, 32): (4.0, 4.6), (1, 128): (4.7, 9.1), (1, 1024): (13.4, 14.9), (8, 32): (6.2, 4.6), (8, 128): (13.5, 9.2),
            (32, 32): (13.6, 5.1), (32, 128): (40.5, 15.1), (128, 32): (40.8, 5.2), (128, 128): (147.9, 14.2),
            (32, 1024): (289.5, 47.8)}  # fmt: skip
#: us of DeepGEMM's scores of 4,096 queries in fp8 by context in K
PREFILL_RIVAL_US = {4: 72.5, 32: 521.0, 128: 2212.0}
QUERIES = 4096
POOL_BYTES = 400 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. flops 2 * heads * dim for each score; share of the floor; ratio of us to the rival's, 0: none."""

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
    note: str
    device: str
    commit: str


def make_store(index_format: str, pages: int) -> Store:
    """Random keys: codes of all kinds that are numbers, scales around 1."""
    codec = index_codec(index_format, DIM)
    if index_format == "bf16":
        return Store(codec, (torch.randn(pages, PAGE, DIM, device="cuda", dtype=torch.bfloat16),))
    if index_format == "fp4":
        codes = torch.randint(0, 256, (pages, PAGE, DIM // 2), dtype=torch.uint8, device="cuda")
        return Store(codec, (codes, torch.randint(125, 129, (pages, PAGE, DIM // 32), dtype=torch.uint8, device="cuda")))
    codes = torch.empty(pages, PAGE, DIM, dtype=torch.uint8, device="cuda")
    for part in codes.split(4096):
        part.copy_((torch.randn(part.shape, device="cuda") * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    return Store(codec, (codes, torch.exp2(torch.randint(-8, -6, (pages, PAGE, 1), device="cuda").float())))


def make_queries(index_format: str, count: int) -> tuple[Tensor, ...]:
    codec = index_codec(index_format, DIM)
    return tuple(field.contiguous() for field in codec.encode(torch.randn(count, DIM, device="cuda")))


def rows_over(pages: Tensor, pieces: tuple[Piece, ...], num_rows: int) -> Rows:
    """Rows of `pieces`, whose blocks lie in these pages, in a random order."""
    tables = pages.view(len(pieces), -1).to(torch.int32)
    return rows_of(pieces, ((0,),) * len(pieces), tables, num_rows, len(pieces))


def composed(queries: Tensor, weights: Tensor, keys: Tensor, top_k: int) -> Tensor:
    """queries [B, n * Hi, d] and keys [B, N, d] bf16, weights [B, n, Hi, 1] -> entries [B, n, k]."""
    products = torch.bmm(queries, keys.transpose(1, 2)).unflatten(1, (-1, HEADS))
    return (products.relu_() * weights).sum(2).topk(top_k, dim=-1, sorted=False).indices.sort(dim=-1).values


class Table:
    """Measures and prints."""

    def __init__(self, commit: str) -> None:
        self.rows: list[Row] = []
        self.commit, self.device = commit, torch.cuda.get_device_name()

    def measure(
        self, op: str, shape: str, launches: list[Callable[[], None]], num_bytes: int, flops: int, is_decode: bool,
        rival: float = 0.0, note: str = "",
    ) -> float:  # fmt: skip
        us, low, high = time_us(launches)
        floor = num_bytes / COPY_BYTES_S * 1e6 if is_decode else flops / BF16_FLOPS * 1e6
        row = Row(
            op, shape, us, low, high, num_bytes, flops, floor / us, rival, us / rival if rival else 0.0, note, self.device,
            self.commit,
        )  # fmt: skip
        self.rows.append(row)
        print(
            f"{op:24s} {shape:12s} {us:9.1f} us ({low:.1f}-{high:.1f}) | {num_bytes / 1e6:8.1f} MB {num_bytes / us / 1e6:5.2f}"
            f" TB/s | {flops / us / 1e6:6.1f} TF/s | {floor / us:5.2f} of floor | {row.ratio:5.2f}x rival {note}",
            flush=True,
        )
        return us


def size(text: str) -> int:
    """Tokens in 4K, 1M."""
    return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]


def decode(table: Table, index_format: str, batch: int, context: int, top_k: int, tune: bool, has_torch: bool) -> None:
    """One token each of `batch` requests."""
    entries, blocks = context // RATIO, context // (RATIO * PAGE)
    store = make_store(index_format, 1)
    key_bytes = store.row_bytes
    calls = max(2, min(16, POOL_BYTES // (batch * entries * key_bytes)))
    store = make_store(index_format, batch * blocks * calls)
    pages = torch.randperm(batch * blocks * calls, device="cuda").view(calls, -1)
    pieces = tuple(Piece(context - 1, context, row, row) for row in range(batch))
    shape = f"{batch}x{context >> 10}K"

    def steps(tiles: Tiles | None = None, segment: int | None = None) -> list[IndexStep]:
        made = []
        for own in pages:
            weights = torch.randn(batch, HEADS, device="cuda")
            made.append(IndexStep(
                make_queries(index_format, batch * HEADS), weights, 0.01, store, rows_over(own, pieces, batch), RATIO, top_k,
                entries, "decode", tiles=tiles, segment=segment,
            ))  # fmt: skip
        return made

    def choose(step: IndexStep) -> None:
        step.select_segments(0, batch)
        step.select_places(out, 0, batch)

    out = torch.empty(batch, top_k, dtype=torch.int32, device="cuda")
    num_bytes, flops = batch * entries * (key_bytes + 4), 2 * batch * entries * HEADS * DIM
    rival = RIVAL_US.get((batch, context >> 10), (0.0, 0.0))
    if tune:
        base = choose_tiles(index_format, True, torch.cuda.get_device_capability())
        for tiles in (
            replace(base, stages=2), replace(base, stages=3), replace(base, stages=5), replace(base, programs=264),
            replace(base, programs=396), replace(base, programs=792), replace(base, programs=1056),
            replace(base, entries=128), replace(base, entries=128, warps=8), replace(base, warps=8),
            replace(base, entries=128, warps=8, stages=3, programs=264),
        ):  # fmt: skip
            launches = [lambda step=step: step.score(0, batch) for step in steps(tiles)]
            table.measure(f"scores {index_format}", shape, launches, num_bytes, flops, True, rival[0], str(tiles))
        for segment in (2048, 4096, 8192, 16384, 32768):
            if -(-entries // segment) * top_k <= 32768 and segment > top_k:
                made = steps(None, segment)
                for step in made:
                    step.score(0, batch)
                launches = [lambda step=step: choose(step) for step in made]
                table.measure(f"choice {index_format}", shape, launches, 4 * batch * entries, 0, True, rival[1], str(segment))
    made = steps()
    for step in made:
        step.run(out)
    note = f"segments {made[0].segments} of {made[0].segment}, last of {made[0].size}"
    launches = [lambda step=step: step.score(0, batch) for step in made]
    table.measure(f"scores {index_format}", shape, launches, num_bytes, flops, True, rival[0])
    if made[0].segment:
        launches = [lambda step=step: step.select_segments(0, batch) for step in made]
        table.measure(f"segments {index_format}", shape, launches, 4 * batch * entries, 0, True)
    launches = [lambda step=step: choose(step) for step in made]
    table.measure(f"choice {index_format}", shape, launches, 4 * batch * entries, 0, True, rival[1], note)
    launches = [lambda step=step: step.run(out) for step in made]
    table.measure(f"whole {index_format}", shape, launches, num_bytes, flops, True, sum(rival))
    if has_torch:
        keys = torch.randn(2, batch, entries, DIM, device="cuda", dtype=torch.bfloat16)
        queries = torch.randn(batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        weights = torch.randn(batch, 1, HEADS, 1, device="cuda", dtype=torch.bfloat16)
        launches = [lambda own=own: composed(queries, weights, own, top_k) for own in keys]
        table.measure("whole PyTorch bf16", shape, launches, batch * entries * (2 * DIM + 4), flops, True, sum(rival))


def prefill(table: Table, index_format: str, context: int, top_k: int, tune: bool, has_torch: bool) -> None:
    """The last 4,096 tokens of a prompt, or all of a shorter one."""
    entries, blocks = context // RATIO, context // (RATIO * PAGE)
    num_rows = min(QUERIES, context)
    store = make_store(index_format, blocks)
    pieces = (Piece(context - num_rows, context, 0, 0),)
    rows = rows_over(torch.randperm(blocks, device="cuda"), pieces, num_rows)
    queries, weights = make_queries(index_format, num_rows * HEADS), torch.randn(num_rows, HEADS, device="cuda")
    seen = sum((position + 1) // RATIO for position in range(context - num_rows, context))
    shape, flops = f"{num_rows}@{context >> 10}K", 2 * seen * HEADS * DIM
    num_bytes = blocks * PAGE * store.row_bytes + 4 * seen
    out = torch.empty(num_rows, top_k, dtype=torch.int32, device="cuda")
    rival = PREFILL_RIVAL_US.get(context >> 10, 0.0) * seen / (num_rows * entries)  # it was measured without a causal cut

    def scores(step: IndexStep) -> None:
        for first in range(0, num_rows, step.chunk):
            step.score(first, min(step.chunk, num_rows - first))

    base = choose_tiles(index_format, False, torch.cuda.get_device_capability())
    candidates: tuple[Tiles, ...] = (base,)
    if tune:
        candidates += (
            replace(base, stages=2), replace(base, stages=4), replace(base, programs=2112),
            replace(base, parts=4, rows=1), replace(base, parts=1, registers=168),
            replace(base, parts=1, registers=168, stages=2), replace(base, parts=4, rows=1, stages=2),
            replace(base, entries=128, warps=8),
        )  # fmt: skip
    for tiles in candidates:
        step = IndexStep(queries, weights, 0.01, store, rows, RATIO, top_k, entries, "prefill", tiles=tiles)
        try:
            table.measure(
                f"scores {index_format}", shape, [lambda step=step: scores(step)], num_bytes, flops, False, rival, str(tiles)
            )  # fmt: skip
        except triton.runtime.errors.TritonError as error:
            print(f"{tiles}: {error}")
    step = IndexStep(queries, weights, 0.01, store, rows, RATIO, top_k, entries, "prefill")
    table.measure(f"whole {index_format}", shape, [lambda: step.run(out)], num_bytes, flops, False)
    if has_torch:  # 64 queries: their products alone are 256 MB at 128K
        few = 64
        keys = torch.randn(1, entries, DIM, device="cuda", dtype=torch.bfloat16)
        own = torch.randn(1, few * HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        own_weights = torch.randn(1, few, HEADS, 1, device="cuda", dtype=torch.bfloat16)
        flops = 2 * few * entries * HEADS * DIM
        launches: list[Callable[[], None]] = [lambda: composed(own, own_weights, keys, min(top_k, entries))]
        table.measure("whole PyTorch bf16", f"{few}@{context >> 10}K", launches, 0, flops, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--formats", default="fp8,fp4")
    parser.add_argument("--shapes", default="1x32K,1x128K,1x1M,8x128K,32x32K,32x128K,128x32K")
    parser.add_argument("--prefill", default="4K,32K,128K")
    parser.add_argument("--top-k", type=int, default=512)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="named in the lines of --json")
    args = parser.parse_args()
    torch.manual_seed(0)
    table = Table(args.commit)
    for number, index_format in enumerate(args.formats.split(",")):
        for shape in filter(None, args.shapes.split(",")):
            batch, context = shape.split("x")
            has_torch = number == 0 and int(batch) * size(context) <= 32 << 17
            decode(table, index_format, int(batch), size(context), args.top_k, args.tune, has_torch)
            torch.cuda.empty_cache()
        for context in filter(None, args.prefill.split(",")):
            prefill(table, index_format, size(context), args.top_k, args.tune, number == 0)
            torch.cuda.empty_cache()
    for row in table.rows:
        print(json.dumps(asdict(row)))
    if args.json:
        with args.json.open("a") as file:
            for row in table.rows:
                file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
