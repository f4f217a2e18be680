"""Decode steps of a Flash-shaped model with as many layers as fit one GPU: tokens/s, where the time goes, share of the floor.

    python bench/decode.py [--layers N] [--batches 1,32,128] [--contexts 4096,32768,131072] [--no-profile] [--json FILE]

Random weights in the official format, made on the GPU. Contexts are not prefilled: positions and block tables say that they are
there, and the arena is full of random finite entries, so a step reads what it would read; requests share pages at random, many
more of them than L2 holds. A step is one CUDA graph: forward pass, head, greedy choice. Medians of replays.
All layers route by a random table from token id to experts, so that a step hits as many experts as evenly spread tokens do.
The floor is all bytes that the step must read (weights of the experts hit, entries, index keys) at the copy rate.
ms by component: kernels of the graph as the profiler sees them, by the op whose module defines them; chains that run side by side
count twice, so the parts can sum to more than the step. The last line of a row is extrapolated to 43 layers.
"""

import argparse
import importlib
import importlib.util
import json
import math
import pkgutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from official_random import FLASH_LAYERS, flash_config, flash_ratios, make_llm, needed_bytes, read_bytes
from timing import COPY_BYTES_S
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import lamina.ops
from lamina import LLM
from lamina.base.sizes import GiB
from lamina.ops.rows import Rows, rows_of
from lamina.ops.sequences import Piece
from lamina.ops.store import Store
from lamina.runtime.arena import DeviceArena

SPARE_BYTES = 10 * GiB  # beside weights and cache: one layer twice while it is packed, graphs, logits
OTHER = "torch"


@dataclass(frozen=True, slots=True)
class Row:
    """One cell. ms of a step (median, extremes); components in ms; ms_43, tokens_s_43 for all layers of Flash; strict_ms is the
    same step with the order of sums of prefills, as mode "strict" computes it."""

    layers: int
    batch: int
    context: int
    ms: float
    low_ms: float
    high_ms: float
    head_ms: float
    tokens_s: float
    gigabytes: float
    floor_ms: float
    share_of_floor: float
    components: dict[str, float]
    ms_43: float
    tokens_s_43: float
    floor_ms_43: float
    strict_ms: float | None
    device: str


# Memory full of entries ------------------------------------------------------------------------------------------------


def fill(arena: DeviceArena, distinct: int = 48) -> None:
    """Random finite rows in every store of every page; after `distinct` pages they repeat."""
    generator = torch.Generator(arena.bytes.device).manual_seed(0)
    for store in (*arena.stores.values(), *((arena.hidden,) if arena.hidden is not None else ())):
        _fill(store, min(distinct, arena.num_pages), arena.num_pages, generator)


def _fill(store: Store, distinct: int, num_pages: int, generator: torch.Generator) -> None:
    rows = store.rows_per_page
    x = torch.randn(distinct * rows, store.codec.width, device=store.views[0].device, generator=generator)
    if rows == 1:
        x = x.abs() + 0.5  # a fold's sum of weights is positive
    for view, field in zip(store.views, store.codec.encode(x), strict=True):
        block = field.view(distinct, rows, -1)
        for first in range(0, num_pages, distinct):
            part = view[first : first + distinct]
            part.copy_(block[: part.shape[0]])


def make_rows(arena: DeviceArena, batch: int, context: int, device: torch.device) -> Rows:
    """`batch` decode rows of about `context` tokens each: slots of their own, blocks drawn from all other pages."""
    layout, generator = arena.layout, torch.Generator(device).manual_seed(batch)
    slots = [tuple(range(number * layout.slot_pages, (number + 1) * layout.slot_pages)) for number in range(batch)]
    taken = batch * layout.slot_pages
    assert taken < arena.num_pages, f"{arena.num_pages} pages hold no {batch} slots: raise --cache-gib"
    tables = torch.randint(
        taken, arena.num_pages, (batch, layout.blocks_for(context)), device=device, generator=generator, dtype=torch.int32
    )
    pieces = []
    for number in range(batch):
        position = max(1, context - 1 - 7 * number % 128)  # so that groups close in some requests and not in others
        pieces.append(Piece(position, position + 1, number, number))
    return rows_of(tuple(pieces), tuple(slots), tables, batch, batch)


# Timing ----------------------------------------------------------------------------------------------------------------


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `run`, which is called twice before."""
    with torch.inference_mode():
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, replays: int = 15) -> tuple[float, float, float]:
    """Median, least and most."""
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), min(times), max(times)


def kernel_ops() -> dict[str, str]:
    """Name of every Triton kernel -> the op whose folder defines it; "a or b" where two use the same name."""
    from triton.runtime.jit import JITFunction

    found: dict[str, set[str]] = defaultdict(set)
    for package in pkgutil.iter_modules(lamina.ops.__path__):
        if not package.ispkg:
            continue
        for part in ("kernels", "hopper"):
            name = f"lamina.ops.{package.name}.{part}"
            if importlib.util.find_spec(name) is not None:
                for value in vars(importlib.import_module(name)).values():
                    if isinstance(value, JITFunction) and value.fn.__module__ == name:
                        found[value.fn.__name__].add(package.name)
    return {name: " or ".join(sorted(ops)) for name, ops in found.items()}


def components_ms(graph: torch.cuda.CUDAGraph, replays: int = 3) -> dict[str, float]:
    """ms of kernels in one replay, by op; PyTorch's own kernels are OTHER."""
    ops = kernel_ops()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    found: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        name = ops.get(event.key, OTHER)
        found[name] += event.self_device_time_total / 1e3 / replays
    return dict(sorted(found.items(), key=lambda item: -item[1]))


# The cells -------------------------------------------------------------------------------------------------------------


def layers_that_fit(cache_bytes: int) -> int:
    """Layers of Flash that fit beside the cache."""
    free, _ = torch.cuda.mem_get_info()
    for layers in range(FLASH_LAYERS, 1, -1):
        if needed_bytes(flash_config(flash_ratios(layers))) + cache_bytes + SPARE_BYTES <= free:
            return layers
    return 2


def measure(
    llm: LLM, values: dict[str, object], batch: int, context: int, with_profile: bool, with_strict: bool
) -> Row:
    """One cell."""
    engine = llm.engine
    model, arena, device = engine.worker.device_model, engine.worker.arena, engine.worker.device
    rows = make_rows(arena, batch, context, device)
    tokens = torch.randint(3, engine.vocab_size, (batch,), device=device).int()

    def head(hidden: Tensor) -> Tensor:
        return model.logits(hidden, "decode").argmax(-1)

    step = capture(lambda: head(model.forward(tokens, rows, "decode", context)))
    hidden = torch.randn(batch, int(str(values["hidden_size"])), device=device)
    head_only = capture(lambda: head(hidden))
    ms, low, high = replay_ms(step)
    head_ms = replay_ms(head_only)[0]
    strict_ms = None
    if with_strict:
        strict = capture(lambda: model.logits(model.forward(tokens, rows, "prefill", context), "prefill").argmax(-1))
        strict_ms = replay_ms(strict)[0]
    components = components_ms(step) if with_profile else {}
    if components:
        in_head = components_ms(head_only)
        components = {name: value - in_head.get(name, 0.0) for name, value in components.items()}
        components["head"] = sum(in_head.values())
    layers = len(values["compress_ratios"])  # type: ignore[arg-type]
    needed, whole = read_bytes(values, batch, context), read_bytes(flash_config(), batch, context)
    floor = needed.total / COPY_BYTES_S * 1e3
    ms_43 = (ms - head_ms) * FLASH_LAYERS / layers + head_ms
    return Row(
        layers, batch, context, ms, low, high, head_ms, batch / ms * 1e3, needed.total / 1e9, floor, floor / ms, components,
        ms_43, batch / ms_43 * 1e3, whole.total / COPY_BYTES_S * 1e3, strict_ms, torch.cuda.get_device_name(),
    )  # fmt: skip


def show(row: Row) -> None:
    """One cell for people."""
    print(
        f"decode {row.layers} layers B={row.batch:4} context {row.context:7,} | {row.ms:7.3f} ms"
        f" ({row.low_ms:.3f}-{row.high_ms:.3f}) | {row.tokens_s:8,.0f} tokens/s | {row.gigabytes:6.1f} GB, floor"
        f" {row.floor_ms:6.2f} ms, {row.share_of_floor:5.1%} of it | head {row.head_ms:.3f} ms", flush=True,
    )  # fmt: skip
    if row.strict_ms is not None:
        print(f"    mode strict: {row.strict_ms:.3f} ms, {row.strict_ms / row.ms:.2f}x", flush=True)
    if row.components:
        print("    kernels, ms: " + ", ".join(f"{name} {value:.3f}" for name, value in row.components.items()), flush=True)
    print(
        f"    43 layers: {row.ms_43:.2f} ms, {row.tokens_s_43:,.0f} tokens/s, {row.floor_ms_43 / row.ms_43:.1%} of the floor"
        f" ({row.floor_ms_43:.2f} ms)", flush=True,
    )  # fmt: skip


def main() -> None:
    """Fills the GPU and measures every cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="default: as many as fit")
    parser.add_argument("--batches", default="1,32,128")
    parser.add_argument("--contexts", default="4096,32768,131072")
    parser.add_argument("--cache-gib", type=float, default=5.0)
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON with changes of the config")
    parser.add_argument("--json", type=Path, help="append one JSON line a cell to this file")
    args = parser.parse_args()
    cache_bytes = int(args.cache_gib * GiB)
    layers = args.layers or layers_that_fit(cache_bytes)
    # tables route by token id, at random: a router over random weights sends alike rows to few experts
    values = flash_config(flash_ratios(layers), **({"num_hash_layers": layers} | args.shape))
    start = time.perf_counter()
    contexts = [int(context) for context in args.contexts.split(",")]
    batches = [int(batch) for batch in args.batches.split(",")]
    llm = make_llm(values, "cuda", cache_bytes, max_requests=1, max_step_tokens=256, max_model_len=2048, warmup=False)
    torch.cuda.empty_cache()
    fill(llm.engine.worker.arena)
    torch.cuda.synchronize()
    used = torch.cuda.memory_allocated() / GiB
    print(
        f"{torch.cuda.get_device_name()}: {len(values['compress_ratios'])} layers, {used:.1f} GiB in use,"  # type: ignore[arg-type]
        f" made in {time.perf_counter() - start:.1f} s", flush=True,
    )  # fmt: skip
    rows = []
    for context in contexts:
        for batch in batches:
            row = measure(llm, values, batch, context, not args.no_profile, context == contexts[0])
            assert math.isfinite(row.ms)
            rows.append(row)
            show(row)
    if args.json is not None:
        with args.json.open("a") as file:
            file.writelines(json.dumps({"op": "decode", **asdict(row)}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
