"""Grouped attention and whole decode steps on one GPU: time, bytes, FLOPs, share of the roof, and the ratio to a rival.

    python bench/heads.py [--only attend|step] [--rival] [--tune] [--batches 1,8,32] [--json FILE] [--commit NAME]

attend  32 query heads over 8 key/value heads of 128, bf16: decodes over pages of 16 tokens drawn at random, a prefill of 4,096.
        Figures are medians of CUDA-graph replays; a graph holds several calls with rows of their own, so few are still in L2.
        The roof is the larger of the bytes at the copy rate and the products at the bf16 rate. The rival is PyTorch's flash
        attention in the same run, whose keys and values lie together instead of in pages.
step    one decode step of a model of 8 billion parameters, 32 layers, with random weights that are made on the GPU: forward pass,
        head, greedy choice, one graph. The floor is all weights but the embedding, and all keys and values, at the copy rate.
        --rival: the same model in Transformers, bf16, its cache, its default attention; wall time of a step.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import COPY_BYTES_S, time_us
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lamina.memory.layout import make_layout
from lamina.models.description import Choices
from lamina.models.families import describe
from lamina.models.llama import network
from lamina.models.network_device import DeviceNetworkModel, load_device_network
from lamina.ops.attend_heads import HeadsCase, Past
from lamina.ops.attend_heads.triton import Tiles, attend_heads, choose_tiles
from lamina.ops.rows import Rows
from lamina.ops.store import HeadsCodec, Place, Store
from lamina.runtime.arena import DeviceArena
from lamina.weights.loader import StoredTensor

HEADS, KV_HEADS, DIM, BLOCK_TOKENS = 32, 8, 128, 16
BF16_FLOPS = 790e12
_LOG_BYTES = 800_000_000
ROW_BYTES = 4 * KV_HEADS * DIM * 32  # of a token in 32 layers
BF16 = torch.bfloat16
#: config.json of a model of 8 billion parameters
EIGHT = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "eos_token_id": 128001, "bos_token_id": 128000,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the results; rival_us 0: none. roof_us  what bytes or products need at least."""

    op: str
    shape: str
    us: float
    low_us: float
    high_us: float
    bytes: int
    flops: int
    roof_us: float
    share_of_roof: float
    rival: str
    rival_us: float
    ratio: float
    detail: str
    device: str
    commit: str

    def show(self) -> None:
        """One row of the table."""
        print(
            f"{self.op:7s} {self.shape:22s} {self.us:9.1f} us ({self.low_us:.1f}-{self.high_us:.1f}) |"
            f" {self.bytes / 1e6:.1f} MB | {self.bytes / self.us / 1e6:.2f} TB/s | {self.flops / self.us / 1e6:.0f} TFLOP/s |"
            f" {self.share_of_roof:.0%} of roof |"
            f" {self.ratio:5.2f}x {self.rival} ({self.rival_us:.1f} us) | {self.detail}",
            flush=True,
        )


# Attention -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """queries  of as many requests in decode, of one in prefill.   context  tokens of a request after the step."""

    order: str
    queries: int
    context: int

    @property
    def name(self) -> str:
        """One cell of the table."""
        return f"{self.order} T={self.queries} ctx={self.context}"

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key."""
        return self.queries * self.context if self.order == "decode" else self.queries * (self.queries + 1) // 2


SHAPES = (
    *(Shape("decode", batch, context) for context in (1024, 8192, 32768) for batch in (1, 8, 32, 128)),
    Shape("prefill", 4096, 4096),
)


def rows_of_step(shape: Shape, tables: Tensor) -> Rows:
    """The last rows of `context` tokens."""
    is_decode, t = shape.order == "decode", shape.queries
    requests = t if is_decode else 1
    each = torch.arange(requests, device="cuda")
    zeros = each * 0
    start = shape.context - (1 if is_decode else t)
    positions = zeros + start if is_decode else torch.arange(start, start + t, device="cuda")
    owners = each if is_decode else torch.zeros(t, device="cuda")
    numbers = (positions, owners, zeros + start, zeros + shape.context, each, zeros, zeros, each)
    slots = torch.zeros(requests, 0, dtype=torch.int32, device="cuda")
    return Rows(*(number.int() for number in numbers), tables, slots, is_decode)


def launches(shape: Shape, calls: int, tiles: Tiles | None) -> list[Callable[[], object]]:
    """The same launch with different queries and pages."""
    requests = shape.queries if shape.order == "decode" else 1
    blocks = shape.context // BLOCK_TOKENS
    width = KV_HEADS * DIM
    page_bytes = 2 * BLOCK_TOKENS * width * 2
    pages = max(requests * blocks, min(calls * requests * blocks, _LOG_BYTES // page_bytes))
    arena = torch.randn(pages, 2, BLOCK_TOKENS, width, device="cuda", dtype=BF16)
    codec = HeadsCodec(KV_HEADS, DIM, DIM, "bf16")
    past = Past(Store(codec, (arena[:, 0], arena[:, 1]), place=Place("block")), codec)
    case = HeadsCase(HEADS, KV_HEADS, DIM**-0.5)
    found: list[Callable[[], object]] = []
    for _ in range(calls):
        q = torch.randn(shape.queries, HEADS, DIM, device="cuda", dtype=BF16)
        tables = torch.randperm(pages, device="cuda")[: requests * blocks].view(requests, blocks).int()
        rows = rows_of_step(shape, tables)
        out = torch.empty(shape.queries, HEADS * DIM, device="cuda", dtype=BF16)

        def launch(q: Tensor = q, rows: Rows = rows, out: Tensor = out) -> object:
            return attend_heads(q, (), past, case, rows, shape.order, shape.context, tiles, out)  # type: ignore[arg-type]

        found.append(launch)
    return found


def rivals(shape: Shape, calls: int) -> list[Callable[[], object]]:
    """PyTorch's flash attention over as many rows."""
    requests, queries = (shape.queries, 1) if shape.order == "decode" else (1, shape.queries)
    distinct = max(1, min(calls, _LOG_BYTES // (4 * requests * shape.context * KV_HEADS * DIM)))
    keys = [torch.randn(2, requests, KV_HEADS, shape.context, DIM, device="cuda", dtype=BF16) for _ in range(distinct)]
    found: list[Callable[[], object]] = []
    for number in range(calls):
        q = torch.randn(requests, HEADS, queries, DIM, device="cuda", dtype=BF16)

        def launch(q: Tensor = q, both: Tensor = keys[number % distinct]) -> object:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q, both[0], both[1], is_causal=queries > 1, enable_gqa=True)

        found.append(launch)
    return found


def candidates(order: str) -> list[Tiles]:
    """Other tiles to try."""
    chosen = choose_tiles(HEADS // KV_HEADS, KV_HEADS, DIM, False, order)  # type: ignore[arg-type]
    if order == "decode":
        return [
            replace(chosen, rows=rows, warps=warps, stages=stages, splits=splits, least_tiles=256 // rows // least)
            for rows, warps in ((64, 4), (128, 4), (128, 8), (32, 2), (64, 2))
            for stages in (3, 4, 5)
            for splits, least in ((32, 2), (32, 1), (16, 1))
        ]
    return [
        replace(chosen, queries=queries, rows=rows, warps=warps, stages=stages)
        for queries, rows, warps in ((32, 64, 8), (32, 128, 8), (32, 64, 4), (16, 64, 4), (16, 128, 4))
        for stages in (2, 3, 4)
    ]


def attend(is_tuning: bool, commit: str) -> list[Line]:
    """Lines of the attention."""
    device, lines = torch.cuda.get_device_name(), []
    for shape in SHAPES:
        if is_tuning and (shape.queries, shape.context) not in ((1, 8192), (32, 8192), (128, 1024), (4096, 4096)):
            continue
        is_decode = shape.order == "decode"
        flops = 4 * HEADS * DIM * shape.pairs
        read = 4 * shape.context * KV_HEADS * DIM * (shape.queries if is_decode else 1)
        num_bytes = read + 4 * shape.queries * HEADS * DIM
        roof = max(num_bytes / COPY_BYTES_S, flops / BF16_FLOPS) * 1e6
        calls = max(1, min(24, 100_000_000_000 // (read * 40)))
        replays = 11 if is_decode else 7
        rival = time_us(rivals(shape, calls), replays)[0]
        for tiles in (None, *(candidates(shape.order) if is_tuning else ())):
            try:
                us, low, high = time_us(launches(shape, calls, tiles), replays)
            except Exception as error:  # too much shared memory, for one
                print(f"{shape.name} {tiles}: {type(error).__name__} {str(error)[:100]}")
                continue
            line = Line(
                "attend", shape.name, us, low, high, num_bytes, flops, roof, roof / us, "torch flash", rival, us / rival,
                str(tiles or ""), device, commit,
            )  # fmt: skip
            line.show()
            lines.append(line)
        gc.collect()
        torch.cuda.empty_cache()
    return lines


# Whole steps -----------------------------------------------------------------------------------------------------------


class RandomWeights:
    """A source whose tensors are random, of the names and shapes that are asked for; bf16 on the GPU."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def has(self, name: str) -> bool:
        """All."""
        return True

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """fp32: norms."""
        self.num_bytes += 4 * torch.Size(shape).numel()
        return torch.ones(shape, device="cuda")

    def take_int(self, name: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        """None has any."""
        raise NotImplementedError(name)

    def take_stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """bf16."""
        self.num_bytes += 2 * torch.Size(shape).numel()
        values = torch.empty(shape, dtype=BF16, device="cuda").normal_(0, 0.02)
        return StoredTensor("plain", values)

    def finish(self) -> None:
        """Nothing is left over."""


def load(pool_bytes: int) -> tuple[DeviceNetworkModel, DeviceArena, int]:
    """The model, its memory, and bytes of the weights that a step reads."""
    found = describe(EIGHT, Choices(cache_format="bf16"))
    layout = make_layout(found.memories, found.hidden, None)
    arena = DeviceArena(layout, pool_bytes // layout.page_bytes, torch.device("cuda"))
    arena.bytes.view(torch.int16).random_(0, 0x3F80)  # finite in bf16
    source = RandomWeights()
    model = load_device_network(network(EIGHT), source, BF16, arena.store, "bf16", torch.device("cuda"), False)
    return model, arena, source.num_bytes - model.embed.nbytes


def ours(batches: list[int], contexts: list[int]) -> tuple[dict[tuple[int, int], tuple[float, float, float]], int]:
    """us of each step, and bytes of the weights that a step reads."""
    model, arena, weight_bytes = load(max(batches) * (max(contexts) + 1024) * ROW_BYTES)
    blocks = arena.layout.blocks_for(max(contexts))
    times = {}
    for batch in batches:
        for context in contexts:
            tables = torch.randperm(arena.num_pages, device="cuda")[: batch * blocks].view(batch, blocks).int()
            rows = rows_of_step(Shape("decode", batch, context), tables)
            tokens = torch.randint(0, 1000, (batch,), device="cuda", dtype=torch.int32)

            def run(tokens: Tensor = tokens, rows: Rows = rows, context: int = context) -> object:
                with torch.inference_mode():
                    return model.logits(model.forward(tokens, rows, "decode", context), "decode").argmax(-1)

            times[batch, context] = time_us([run], 15)
    return times, weight_bytes


def step(batches: list[int], contexts: list[int], has_rival: bool, commit: str) -> list[Line]:
    """Lines of whole decode steps."""
    device, lines = torch.cuda.get_device_name(), []
    times, weight_bytes = ours(batches, contexts)
    gc.collect()
    torch.cuda.empty_cache()
    rival = transformers_us(batches, contexts) if has_rival else {}
    for (batch, context), (us, low, high) in times.items():
        num_bytes = weight_bytes + batch * context * ROW_BYTES
        flops = batch * (weight_bytes + 4 * HEADS * DIM * 32 * context)  # two for each weight of two bytes
        floor, other = num_bytes / COPY_BYTES_S * 1e6, rival.get((batch, context), 0.0)
        line = Line(
            "step", f"R={batch} ctx={context}", us, low, high, num_bytes, flops, floor, floor / us, "Transformers", other,
            us / other if other else 0.0, f"{batch / us * 1e6:.0f} tokens/s", device, commit,
        )  # fmt: skip
        line.show()
        lines.append(line)
    return lines


def transformers_us(batches: list[int], contexts: list[int]) -> dict[tuple[int, int], float]:
    """Wall time of a step of Transformers, the median of 12."""
    import transformers

    values = {name: value for name, value in EIGHT.items() if name not in ("model_type", "torch_dtype")}
    config = transformers.LlamaConfig(**values)  # type: ignore[arg-type]
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).eval()
    torch.set_default_dtype(before)
    found = {}
    for batch in batches:
        for context in contexts:
            with torch.inference_mode():
                cache = transformers.DynamicCache()
                prompt = torch.randint(0, 1000, (batch, context - 16), device="cuda")
                for first in range(0, context - 16, 1024):
                    out = model(prompt[:, first : first + 1024], past_key_values=cache, use_cache=True, logits_to_keep=1)
                token, seconds = out.logits[:, -1:].argmax(-1), []
                for _ in range(14):
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
                    torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - begin)
                found[batch, context] = statistics.median(seconds[2:]) * 1e6
            del cache
            torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=("attend", "step"))
    parser.add_argument("--rival", action="store_true", help="Transformers' steps too")
    parser.add_argument("--tune", action="store_true", help="attention with other tiles")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--contexts", default="1024,8192")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="named in the lines of --json")
    args = parser.parse_args()
    torch.manual_seed(0)
    lines = []
    if args.only != "step":
        lines += attend(args.tune, args.commit)
    if args.only != "attend":
        batches, contexts = ([int(each) for each in text.split(",")] for text in (args.batches, args.contexts))
        lines += step(batches, contexts, args.rival, args.commit)
    for line in lines:
        print(json.dumps(asdict(line)))
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(asdict(line)) + "\n" for line in lines)


if __name__ == "__main__":
    main()
