"""What side-by-side chains and each fusion buy: the same decode step of a few Flash-shaped layers with one of them taken apart.

    python bench/fusions.py [--ratios 4,128,4,128 --experts 32 --batches 1,8,32 --context 4096 --json FILE]

Every variant replaces one fused call of a layer by the separate ones that it stands for, and says whether the step's bits stay
the same (PyTorch's own operations round elsewhere; "as it is, once more" is the control). Each is a CUDA graph of the whole step;
medians of replays, ms, and the loss against the step as it is. Few experts, so that their weights do not hide the rest.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch
from decode import capture, fill, make_rows, replay_ms
from official_random import flash_config, make_llm
from torch import Tensor

from lamina.base.sizes import GiB
from lamina.layers import device_attention, device_moe
from lamina.models import deepseek_v4_device
from lamina.ops.compress.triton import compress
from lamina.ops.gemm import Activation
from lamina.ops.gemm.triton import linear
from lamina.ops.hyper import hyper_post, hyper_pre
from lamina.ops.hyper.triton import Boundary
from lamina.ops.quantise.triton import quantise_rows
from lamina.ops.rope_norm import rms_norm
from lamina.ops.rope_norm.triton import norm_quantise, query_norm_rope
from lamina.ops.store.triton import encode_queries, encode_rows


@dataclass(frozen=True, slots=True)
class Variant:
    """A name of a module that is replaced, and by what. It is left out where the module has no such name."""

    name: str
    module: ModuleType
    replaced: str
    by: Callable[..., object]

    @property
    def is_there(self) -> bool:
        """Whether layers call what it replaces."""
        return self.replaced in vars(self.module)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The layers call the replacement meanwhile."""
        before = vars(self.module)[self.replaced]
        setattr(self.module, self.replaced, self.by)
        try:
            yield
        finally:
            setattr(self.module, self.replaced, before)


def two_folds(main, values, gates, index, index_values, index_gates, cos, sin, rows) -> None:  # type: ignore[no-untyped-def]
    """The entries' fold, then the index keys'."""
    compress(main, values, gates, cos, sin, rows)
    compress(index, index_values, index_gates, cos, sin, rows)


def two_query_epilogues(q, index_q, cos, sin, heads, index_heads, eps, codec):  # type: ignore[no-untyped-def]
    """Queries, then the indexer's."""
    return query_norm_rope(q, cos, sin, heads, eps), encode_queries(index_q, cos, sin, index_heads, codec)


def two_project_epilogues(low, low_norm, kv, kv_norm, eps, cos, sin, dtype, is_fp8, window, rows):  # type: ignore[no-untyped-def]
    """Low-rank queries, then keys."""
    return norm_quantise(low, low_norm, eps, dtype, is_fp8), encode_rows(kv, kv_norm, eps, cos, sin, dtype, window, rows)


def two_products(x, weight, wide_weight, out_dtype, wide_dtype, order="decode"):  # type: ignore[no-untyped-def]
    """Both products of an input, one after the other."""
    return linear(x, weight, out_dtype, order), linear(x, wide_weight, wide_dtype, order)


def torch_boundary(streams, out, post, comb, mixer, norm, dtype, is_fp8):  # type: ignore[no-untyped-def]
    """The boundary between sub-layers in PyTorch's operations: mix back, mix, collapse, norm; then quantise."""
    if out is not None:
        streams = hyper_post(streams.float(), out.float(), post, comb).to(dtype)
    mixed, post, comb = hyper_pre(streams.float(), mixer)
    x = rms_norm(mixed.to(dtype).float(), norm, mixer.norm_eps).to(dtype)
    made = quantise_rows(x) if is_fp8 else Activation(x)
    return Boundary(streams.contiguous(), made, post.contiguous(), comb.contiguous())


VARIANTS = (
    Variant("fold and index fold apart", device_attention, "compress_pair", two_folds),
    Variant("query and index query epilogues apart", device_attention, "query_epilogue", two_query_epilogues),
    Variant("low-rank and key epilogues apart", device_attention, "project_epilogue", two_project_epilogues),
    Variant("input products apart", device_attention, "linear_pair", two_products),
    Variant("expert input products apart", device_moe, "linear_pair", two_products),
    Variant("boundary in PyTorch's operations", deepseek_v4_device, "boundary", torch_boundary),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One variant. ms of a step, without it and as it is; loss in percent."""

    variant: str
    batch: int
    context: int
    ms: float
    fused_ms: float
    loss_percent: float
    same_bits: bool
    device: str


def main() -> None:
    """Every variant at every batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", default="4,128,4,128")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="append one JSON line a variant to this file")
    args = parser.parse_args()
    ratios = tuple(int(ratio) for ratio in args.ratios.split(","))
    batches = [int(batch) for batch in args.batches.split(",")]
    values = flash_config(ratios, n_routed_experts=args.experts)
    llm = make_llm(values, "cuda", 2 * GiB, max_requests=1, max_step_tokens=256, max_model_len=2048, warmup=False)
    worker = llm.engine.worker
    model, arena = worker.device_model, worker.arena
    fill(arena)
    kept = arena.bytes.clone()
    rows: list[Row] = []
    for batch in batches:
        step_rows = make_rows(arena, batch, args.context, worker.device)
        tokens = torch.randint(3, llm.engine.vocab_size, (batch,), device=worker.device).int()

        def measure(rows=step_rows, tokens=tokens) -> tuple[float, Tensor]:  # type: ignore[no-untyped-def]
            hidden: list[Tensor] = []
            graph = capture(lambda: hidden.append(model.forward(tokens, rows, "decode", args.context)))
            arena.bytes.copy_(kept)  # folds as at the first step
            graph.replay()
            found = hidden[-1].clone()
            return replay_ms(graph, 25)[0], found

        fused_ms, truth = measure()
        finite = bool(torch.isfinite(truth).all())
        print(f"B={batch:3} context {args.context}: {fused_ms:.3f} ms a step of {len(ratios)} layers, finite {finite}")

        def note(name: str, ms: float, found: Tensor, fused_ms: float = fused_ms, truth: Tensor = truth, b: int = batch) -> None:
            same = torch.equal(found.view(torch.uint8), truth.view(torch.uint8))  # NaN too
            loss = (ms / fused_ms - 1) * 100
            rows.append(Row(name, b, args.context, ms, fused_ms, loss, same, torch.cuda.get_device_name()))
            print(f"    {name:40} {ms:8.3f} ms  {loss:+6.1f} %  same bits {same}", flush=True)

        note("as it is, once more", *measure())
        model.has_branches = False
        note("chains one after another", *measure())
        model.has_branches = True
        for variant in VARIANTS:
            if variant.is_there:
                with variant.applied():
                    note(variant.name, *measure())
    if args.json is not None:
        with args.json.open("a") as file:
            file.writelines(json.dumps({"op": "fusions", **asdict(row)}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
