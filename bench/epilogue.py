"""What follows the projections of an attention layer, on one GPU: norms, rotations, encoding, folds; and what a step keeps.

    python bench/epilogue.py [--tokens 1,8,32,256,4096] [--json FILE] [--commit NAME]

Shapes of DeepSeek-V4-Flash: 64 heads of 512, low rank 1024, 64 index heads of 128, windows and entries in fp8, index keys in fp4.
Up to 256 tokens are decode steps of as many requests around position 100,000, one in `ratio` of which closes an entry; 4,096 are
one prompt. Every figure is the median of CUDA-graph replays; a graph holds several calls, each with its own inputs and states.
Inputs of few tokens lie in L2, as they do right after a projection. The floor is bytes at the copy rate, or one graph node.
"torch" is PyTorch's own composition of the same op in the same run, the rival a figure measured elsewhere (RIVAL_US).
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from timing import time_us
from torch import Tensor

from lamina.ops.compress import Folding
from lamina.ops.compress.triton import compress, compress_pair
from lamina.ops.quantise import quantise_fp8
from lamina.ops.rope_norm import entry_norm_rope, inverse_frequencies, ref, rms_norm, rotate
from lamina.ops.rope_norm.triton import norm_quantise, query_norm_rope, rotations
from lamina.ops.rows import Rows, rows_of
from lamina.ops.sequences import Piece
from lamina.ops.store import EntryCodec, StateCodec, Store, attention_codec, index_codec
from lamina.ops.store.triton import (
    encode_queries,
    encode_rows,
    keep_hidden,
    keep_rows,
    project_epilogue,
    query_epilogue,
)

HIDDEN, HEADS, DIM, ROPE, LOW, WINDOW = 4096, 64, 512, 64, 1024, 128
INDEX_HEADS, INDEX_DIM, BLOCK, EPS = 64, 128, 256, 1e-6
COPY_BYTES_S, NODE_US = 4.26e12, 0.9
#: vLLM 0.33: norm and rotation of the queries, quantised insertion of keys and values in one kernel; one H200, same method
RIVAL_US = {1: 2.1, 8: 2.3, 32: 4.1, 256: 16.2, 4096: 150.0}
ENTRY, KEY = attention_codec("fp8", DIM, ROPE), index_codec("fp4", INDEX_DIM)
ENTRY_BYTES, KEY_BYTES, ACT, BF16 = 584, 68, 2, torch.bfloat16


@dataclass(frozen=True, slots=True)
class Row:
    """One line: us (median, extremes), bytes moved at least, share of the floor, PyTorch's us (0: not measured), rival's us."""

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


def store_of(codec: EntryCodec, pages: int, rows: int, column: int = 0) -> Store:
    """Rows of zeros, each field in memory of its own."""
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    views = tuple(
        torch.zeros(pages, rows, n // 2 if dtype == "e2m1" else n, dtype=types.get(dtype, torch.uint8), device="cuda")
        for _, dtype, n in codec.fields
    )
    return Store(codec, views, column)


def folding_of(ratio: int, width: int, codec: EntryCodec, requests: int, pages: int) -> Folding:
    """A compressor with states in columns 1 and 2 of the slots and a log of so many pages."""
    span = width * (2 if ratio == 4 else 1)
    state = StateCodec(3 * width)
    ahead = store_of(state, 3 * requests, 1, 2) if ratio == 4 else None
    ape, norm = torch.randn(ratio, span, device="cuda"), torch.ones(width, device="cuda")
    return Folding(ratio, ape, norm, EPS, store_of(state, 3 * requests, 1, 1), ahead, store_of(codec, pages, BLOCK // ratio))


def batch_of(tokens: int, pages: int) -> Rows:
    """A decode step of so many requests, or one prompt."""
    is_prompt = tokens > 256
    requests = 1 if is_prompt else tokens
    spans = [(0, tokens)] if is_prompt else [(100_000 + 1_237 * n, 100_001 + 1_237 * n) for n in range(tokens)]
    pieces, row = [], 0
    for number, (start, stop) in enumerate(spans):
        pieces.append(Piece(start, stop, row, number))
        row += stop - start
    blocks = -(-max(stop for _, stop in spans) // BLOCK)
    tables = torch.randint(0, pages, (requests, blocks), dtype=torch.int32, device="cuda")
    slots = tuple((3 * n, 3 * n + 1, 3 * n + 2) for n in range(requests))
    return rows_of(tuple(pieces), slots, tables, tokens, requests)


@dataclass(frozen=True, slots=True)
class Inputs:
    """One call's inputs: the projections, the queries beside the index's, the window, the compressors, hidden vectors."""

    low: Tensor
    kv: Tensor
    q: Tensor
    index_q: Tensor
    folds: tuple[Tensor, ...]
    window: Store
    main: Folding
    index: Folding
    long: Folding
    hidden: Tensor
    kept: Store
    states: Tensor


class Step:
    """Some tokens and so many calls' inputs; every method is one launch of a list, by these kernels or by PyTorch."""

    def __init__(self, tokens: int, calls: int, pages: int = 512) -> None:
        self.batch = batch_of(tokens, pages)
        self.is_prompt = not self.batch.is_single
        requests = self.batch.num_requests
        inv_freq = inverse_frequencies(ROPE, 160_000.0).cuda()
        self.inv_freq = inv_freq
        self.turns = rotations(self.batch.positions, inv_freq)
        self.starts = {ratio: rotations(self.batch.positions, inv_freq, ratio) for ratio in (4, 128)}
        self.wide = ref.rope_tables(self.batch.positions.long(), inv_freq)
        self.low_norm, self.kv_norm = torch.rand(LOW, device="cuda"), torch.rand(DIM, device="cuda")
        self.calls = [self._inputs(tokens, requests, pages) for _ in range(calls)]
        self.own = encode_rows(self.calls[0].kv, self.kv_norm, EPS, *self.turns, BF16, self.calls[0].window, self.batch)

    def _inputs(self, tokens: int, requests: int, pages: int) -> Inputs:
        projected = torch.randn(tokens, LOW + DIM, device="cuda")
        queries = torch.randn(tokens, HEADS * DIM + INDEX_HEADS * INDEX_DIM, device="cuda", dtype=BF16)
        folds = torch.randn(tokens, 4 * DIM + 4 * INDEX_DIM + INDEX_HEADS, device="cuda")
        return Inputs(
            projected[:, :LOW], projected[:, LOW:], queries[:, : HEADS * DIM], queries[:, HEADS * DIM :],
            folds.split_with_sizes((2 * DIM, 2 * DIM, 2 * INDEX_DIM, 2 * INDEX_DIM, INDEX_HEADS), dim=1),
            store_of(ENTRY, 3 * requests, WINDOW), folding_of(4, DIM, ENTRY, requests, pages),
            folding_of(4, INDEX_DIM, KEY, requests, pages), folding_of(128, DIM, ENTRY, requests, pages),
            torch.randn(tokens, HIDDEN, device="cuda"), store_of(StateCodec(HIDDEN), 3 * requests, 1),
            torch.zeros(requests, 3, 2 * DIM, device="cuda"),
        )  # fmt: skip

    def each(self, work: Callable[[Inputs], object]) -> list[Callable[[], object]]:
        """`work` on every call's inputs."""
        return [partial(work, one) for one in self.calls]

    def rotations(self, one: Inputs) -> object:
        return rotations(self.batch.positions, self.inv_freq, 4)

    def norm_quantise(self, one: Inputs) -> object:
        return norm_quantise(one.low, self.low_norm, EPS, BF16, True)

    def encode_rows(self, one: Inputs) -> object:
        return encode_rows(one.kv, self.kv_norm, EPS, *self.turns, BF16, one.window, self.batch)

    def project_epilogue(self, one: Inputs) -> object:
        return project_epilogue(
            one.low, self.low_norm, one.kv, self.kv_norm, EPS, *self.turns, BF16, True, one.window, self.batch
        )

    def project_torch(self, one: Inputs) -> object:
        low = quantise_fp8(rms_norm(one.low.to(BF16), self.low_norm, EPS).to(BF16), 128)
        return low, ENTRY.encode(entry_norm_rope(one.kv.to(BF16), self.kv_norm, *self.wide, EPS).to(BF16).float())

    def query_norm_rope(self, one: Inputs) -> object:
        return query_norm_rope(one.q, *self.turns, HEADS, EPS)

    def query_torch(self, one: Inputs) -> object:
        return ref.query_norm_rope(one.q.unflatten(1, (HEADS, DIM)), *self.wide, EPS).to(BF16)

    def encode_queries(self, one: Inputs) -> object:
        return encode_queries(one.index_q, *self.turns, INDEX_HEADS, KEY)

    def index_torch(self, one: Inputs) -> object:
        q = one.index_q.float().unflatten(1, (INDEX_HEADS, INDEX_DIM))
        tail = q[..., -ROPE:]
        tail.copy_(rotate(tail, self.wide[0][:, None], self.wide[1][:, None]))
        return KEY.encode(q.flatten(0, 1))

    def query_epilogue(self, one: Inputs) -> object:
        return query_epilogue(one.q, one.index_q, *self.turns, HEADS, INDEX_HEADS, EPS, KEY)

    def as_the_rival(self, one: Inputs) -> object:
        return self.query_norm_rope(one), self.encode_rows(one)

    def compress_pair(self, one: Inputs) -> object:
        parts = one.folds
        return compress_pair(one.main, parts[0], parts[1], one.index, parts[2], parts[3], *self.starts[4], self.batch)

    def compress_128(self, one: Inputs) -> object:
        return compress(one.long, one.folds[0][:, :DIM], one.folds[1][:, :DIM], *self.starts[128], self.batch)

    def pair_torch(self, one: Inputs) -> object:
        """The entries alone, without the index's keys."""
        if not self.is_prompt:
            return fold_by_torch(one.states, one.folds[0], one.folds[1])
        values, gates = (part.unflatten(0, (-1, 4)) for part in one.folds[:2])  # [G, 4, 2d]
        values, gates = (torch.cat([x[:, :, :DIM].roll(1, 0), x[:, :, DIM:]], 1) for x in (values, gates))
        return self._pooled(values, gates, 4)

    def torch_128(self, one: Inputs) -> object:
        values, gates = one.folds[0][:, :DIM], one.folds[1][:, :DIM]
        if not self.is_prompt:
            return fold_by_torch(one.states[..., :DIM], values, gates)
        return self._pooled(values.unflatten(0, (-1, 128)), gates.unflatten(0, (-1, 128)), 128)

    def _pooled(self, values: Tensor, gates: Tensor, ratio: int) -> object:
        rows = (gates.softmax(1) * values).sum(1)
        cos, sin = (table[::ratio] for table in self.wide)
        return ENTRY.encode(entry_norm_rope(rows, self.kv_norm, cos, sin, EPS))

    def keep_rows(self, one: Inputs) -> object:
        return keep_rows(self.own, one.window, self.batch)

    def keep_hidden(self, one: Inputs) -> object:
        return keep_hidden(one.hidden, one.kept, self.batch)


def fold_by_torch(state: Tensor, value: Tensor, gate: Tensor) -> None:
    """One token of each request into [B, 3, d]."""
    peak, total, weighted = state.unbind(1)
    new_peak = torch.maximum(peak, gate)
    keep, add = (peak - new_peak).exp(), (gate - new_peak).exp()
    state.copy_(torch.stack([new_peak, total * keep + add, weighted * keep + value * add], 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", default="1,8,32,256,4096")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="named in the lines of --json")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.cuda.get_device_name()
    made: list[Row] = []

    def measure(
        op: str,
        tokens: int,
        launches: list[Callable[[], object]],
        moved: int,
        composed: list[Callable[[], object]] | None = None,
        rival: float = 0.0,
        flops: int = 0,
    ) -> None:
        us, low, high = time_us(launches)
        by_torch = time_us(composed, 5)[0] if composed else 0.0
        floor = max(moved / COPY_BYTES_S * 1e6, NODE_US)
        row = Row(
            op, f"T={tokens}", us, low, high, moved, flops, floor / us, by_torch, rival, us / rival if rival else 0.0, device,
            args.commit,
        )  # fmt: skip
        made.append(row)
        print(json.dumps(asdict(row)), flush=True)

    for tokens in (int(part) for part in args.tokens.split(",")):
        step = Step(tokens, 2 if tokens > 256 else 12)
        requests, is_prompt = step.batch.num_requests, step.is_prompt
        turns = tokens * 4 * ROPE
        low = tokens * LOW * (4 + ACT + 1)
        kv = tokens * (DIM * 4 + ENTRY_BYTES * (1 if is_prompt else 2)) + turns
        q = tokens * HEADS * DIM * 2 * ACT + turns
        index = tokens * INDEX_HEADS * (INDEX_DIM * ACT + KEY_BYTES)
        states = 3 * 4 * requests * (1 if is_prompt else 2)  # a prompt's first are not read
        pair = (tokens * 4 * 4 + 2 * states) * (DIM + INDEX_DIM) + -(-tokens // 4) * (ENTRY_BYTES + KEY_BYTES)
        long = (tokens * 2 * 4 + states) * DIM + -(-tokens // 128) * ENTRY_BYTES
        measure("rotations", tokens, step.each(step.rotations), tokens * 4 + turns)
        measure("norm_quantise", tokens, step.each(step.norm_quantise), low)
        measure("encode_rows", tokens, step.each(step.encode_rows), kv)
        measure("project_epilogue", tokens, step.each(step.project_epilogue), low + kv, step.each(step.project_torch))
        measure("query_norm_rope", tokens, step.each(step.query_norm_rope), q, step.each(step.query_torch))
        adds = tokens * INDEX_HEADS * INDEX_DIM * 7
        measure("encode_queries", tokens, step.each(step.encode_queries), index + turns, step.each(step.index_torch), 0.0, adds)
        measure("query_epilogue", tokens, step.each(step.query_epilogue), q + index, None, 0.0, adds)
        rival = RIVAL_US.get(tokens, 0.0)
        measure("query_norm_rope + encode_rows", tokens, step.each(step.as_the_rival), q + kv, None, rival)
        measure("compress_pair", tokens, step.each(step.compress_pair), pair + turns, step.each(step.pair_torch))
        measure("compress 128", tokens, step.each(step.compress_128), long + turns, step.each(step.torch_128))
        if is_prompt:
            measure("keep_rows", tokens, step.each(step.keep_rows), WINDOW * 2 * ENTRY_BYTES)
        measure("keep_hidden", tokens, step.each(step.keep_hidden), requests * HIDDEN * 8)
        del step
        torch.cuda.empty_cache()

    print(f"{'op':32s} {'shape':>7s} {'us':>8s} {'MB':>8s} {'floor':>6s} {'torch us':>9s} {'rival':>7s}")
    for row in made:
        print(
            f"{row.op:32s} {row.shape:>7s} {row.us:8.2f} {row.bytes / 1e6:8.2f} {row.share_of_floor:6.2f}"
            f" {row.torch_us or float('nan'):9.1f} {row.ratio or float('nan'):6.2f}x"
        )
    if args.json:
        with args.json.open("a") as file:
            for row in made:
                file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
