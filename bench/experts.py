"""Routed FP4 experts on one GPU: time of each launch, bytes, share of the roof, and the ratio to a rival.

    python bench/experts.py [--tokens 1,8,32,256,1024] [--activation fp8|bf16] [--tune] [--check] [--plain] [--json FILE]

Shapes: 256 experts, 6 a token, hidden 4096, expert width 2048; uniform random routing. Every figure is the median of CUDA-graph
replays; a graph holds several calls with different tokens and experts, so that no weight is still in L2. Bytes are the packed
weights and scales of the experts hit (what the rivals' tables count); the roof is the copy rate. --check compares with fp64.
--tune times other tiles for both products. "in the model" is a call with rows that have codes and with a shared expert's row to
add. --plain times the same layer in bf16, as experts in formats other than FP4 run, and nothing else.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton
from timing import COPY_BYTES_S, time_us
from torch import Tensor

from lamina.ops.experts import experts_fp4 as definition
from lamina.ops.experts import pack_weights
from lamina.ops.experts.packed import Activation, PackedExperts
from lamina.ops.experts.plain import PlainExperts, StoredExperts, experts_plain
from lamina.ops.experts.triton import ExpertsStep, Tiles, choose_tiles, experts_fp4
from lamina.ops.gemm import Activation as Rows
from lamina.ops.quantise import dequantise_fp4
from lamina.ops.quantise.triton import quantise_rows

HIDDEN, INNER, NUM_EXPERTS, TOP_K, LIMIT = 4096, 2048, 256, 6, 10.0
#: us of gate-up and of down, Humming 0.1.20 W4A8, the better of its two activation scalings; one H200, same shapes and method
RIVAL_US = {1: (21.2, 15.0), 8: (102.9, 57.8), 32: (299.0, 157.8), 64: (423.3, 221.3), 128: (523.8, 271.1),
            256: (595.5, 301.4), 1024: (627.9, 324.8), 8192: (1979.0, 1048.0)}  # fmt: skip
#: rows, warps, stages to try, by the tokens of a tile and whether in Gluon
GATE_CANDIDATES = {
    (16, False): ((64, 4, 4), (128, 4, 3), (128, 4, 4), (256, 4, 3), (256, 4, 4)),
    (32, False): ((256, 4, 3), (256, 4, 4)),
    (8, True): ((64, 4, 4), (64, 4, 6), (64, 4, 8), (128, 4, 3), (128, 4, 4), (128, 4, 6), (256, 4, 3), (256, 4, 4)),
    (16, True): ((64, 4, 4), (128, 4, 3), (128, 4, 4), (256, 4, 3), (256, 4, 4)),
    (32, True): ((64, 4, 4), (128, 4, 3), (128, 4, 4), (256, 4, 3), (256, 4, 4)),
    (64, True): ((64, 4, 4), (128, 4, 3), (128, 4, 4)),
}
DOWN_CANDIDATES = {
    (16, False): ((64, 4, 4), (128, 4, 3), (128, 4, 4), (256, 4, 3)),
    (32, False): ((256, 4, 3), (256, 4, 4)),
    (8, True): ((64, 4, 4), (64, 4, 6), (128, 4, 3), (128, 4, 4), (128, 4, 6), (256, 4, 3), (256, 4, 4)),
    (16, True): ((64, 4, 4), (128, 4, 3), (128, 4, 4), (256, 4, 3), (256, 4, 4)),
    (32, True): ((64, 4, 4), (128, 4, 3), (128, 4, 4), (256, 4, 3), (256, 4, 4)),
    (64, True): ((64, 4, 4), (128, 4, 3), (128, 4, 4)),
}


def is_worth_trying(tile: int, tokens: int) -> bool:
    """Whether tiles of so many tokens could win: a tile holds an expert's places, hardly more and not much fewer."""
    mean = tokens * TOP_K / NUM_EXPERTS
    return min(mean, 64) / 2 < tile <= max(16, 4 * mean)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: us (median, extremes), bytes counted, share of the roof, ratio to the rival (0: none)."""

    op: str
    part: str
    tokens: int
    experts_hit: float
    us: float
    low_us: float
    high_us: float
    bytes: int
    share: float
    rival: float
    tiles: str
    device: str
    commit: str


def stored(num: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """FP4 codes and e8m0 scales as a checkpoint has them: random codes, scales over 6 binades around 1/sqrt(columns)."""
    codes = torch.randint(0, 256, (num, rows, columns // 2), dtype=torch.uint8, device="cuda")
    middle = 127 - round(0.5 * torch.log2(torch.tensor(float(columns))).item()) - 2
    scales = torch.randint(middle - 3, middle + 3, (num, rows, columns // 32), dtype=torch.uint8, device="cuda")
    return codes, scales


def routings(tokens: int, calls: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(x, chosen, weights) of each call; at few tokens no two calls share an expert, as far as there are enough."""
    order, made = torch.randperm(NUM_EXPERTS, device="cuda"), []
    for call in range(calls):
        if tokens == 1:
            chosen = order[(call * TOP_K + torch.arange(TOP_K, device="cuda")) % NUM_EXPERTS][None]
        else:
            chosen = torch.rand(tokens, NUM_EXPERTS, device="cuda").topk(TOP_K, dim=1).indices
        weights = torch.rand(tokens, TOP_K, device="cuda")
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        made.append((x, chosen.contiguous(), weights / weights.sum(1, keepdim=True) * 1.5))
    return made


def product_errors(step: ExpertsStep, weights: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Relative error of gate-up (h in fp32) and of down against fp64 on the operands that the kernels themselves had."""
    step.h = step.h.float()
    step.prepare()
    step.gate_up()
    step.quantise_inner()
    step.down()
    if step.is_fp8:
        x, inner = (
            (codes.double().unflatten(1, (-1, 128)) * scales.double()[..., None]).flatten(1)
            for codes, scales in ((step.x_codes, step.x_scales), (step.h_codes, step.h_scales))
        )
    else:
        x, inner = step.x_codes.double(), step.h.double()
    places = step.places.places.long()
    of_h, of_partial, h_norm, partial_norm = 0.0, 0.0, 0.0, 0.0
    flat = step.chosen.flatten()
    for expert in flat.unique().tolist():
        first, second = (dequantise_fp4(codes[expert], scales[expert]).double() for codes, scales in weights)
        own = (flat[places] == expert).nonzero()[:, 0]  # positions
        gate, up = (x[places[own] // TOP_K] @ first.t()).chunk(2, dim=1)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        h = gate * torch.sigmoid(gate) * up * step.shares.flatten()[places[own], None].double()
        partial = inner[own] @ second.t()
        of_h += float((step.h[own].double() - h).square().sum())
        of_partial += float((step.partial[places[own]].double() - partial).square().sum())
        h_norm, partial_norm = h_norm + float(h.square().sum()), partial_norm + float(partial.square().sum())
    return (of_h / h_norm) ** 0.5, (of_partial / partial_norm) ** 0.5


def check(packed: PackedExperts, weights: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], activation: Activation) -> None:
    """Errors of each product, of the whole against the definition, and bits: alone and among others, with every tile."""
    for tokens in (1, 8, 33, 200):
        ((x, chosen, shares),) = routings(tokens, 1)

        def run(rows: Tensor, tiles: Tiles, of: tuple[Tensor, Tensor, Tensor] = (x, chosen, shares)) -> Tensor:
            own = [part[rows] for part in of]
            step = ExpertsStep(own[0], own[1], own[2], packed, LIMIT, tiles)
            for buffer in (step.h, step.partial):
                buffer.fill_(torch.nan)
            out = torch.full((rows.numel(), HIDDEN), torch.nan, device="cuda")
            step.run(out)
            return out

        rows, tiles = torch.arange(tokens, device="cuda"), choose_tiles(tokens * TOP_K, packed)
        found = run(rows, tiles)
        truth = definition(x, chosen, shares, *weights, LIMIT, activation)
        error = float((found - truth).norm() / truth.norm())
        products = product_errors(ExpertsStep(x, chosen, shares, packed, LIMIT), weights)
        alone = torch.equal(run(rows[-1:], choose_tiles(TOP_K, packed)), found[-1:])
        sizes = ((16, 64, 64), (16, 128, 128), (16, 256, 256), (32, 64, 64), (32, 256, 128), (64, 128, 64))
        cuts = [
            Tiles(size, gate_rows, 4, 3, down_rows, 4, 3, packed.gate_up.is_rebased and is_gluon)
            for is_gluon in (False, True)
            for size, gate_rows, down_rows in sizes
        ]
        same = [torch.equal(run(rows, cut), found) for cut in cuts]
        print(
            f"check {activation} rebased={packed.gate_up.is_rebased} T={tokens}: gate-up {products[0]:.1e},"
            f" down {products[1]:.1e}, whole {error:.1e};"
            f" same bits alone {alone}, with other tiles {sum(same)}/{len(same)}",
            flush=True,
        )


def plain(sizes: list[int]) -> None:
    """The layer in bf16; the bytes are those of the experts hit."""
    gate_up = torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN, device="cuda", dtype=torch.bfloat16) * HIDDEN**-0.5
    down = torch.randn(NUM_EXPERTS, HIDDEN, INNER, device="cuda", dtype=torch.bfloat16) * INNER**-0.5
    experts = PlainExperts(StoredExperts(gate_up), StoredExperts(down))
    for tokens in sizes:
        inputs = routings(tokens, 12 if tokens <= 32 else 4)
        hit = statistics.mean(float(chosen.unique().numel()) for _, chosen, _ in inputs)
        launches = [
            lambda x=x, chosen=chosen, shares=shares: experts_plain(Rows(x), chosen, shares, experts, LIMIT)
            for x, chosen, shares in inputs
        ]
        us, low, high = time_us(launches)
        moved = hit * 3 * INNER * HIDDEN * 2
        print(
            f"T={tokens:5d} plain bf16     {us:8.1f} us ({low:.1f}-{high:.1f}) | {moved / 1e6:7.1f} MB |"
            f" {moved / us * 1e6 / COPY_BYTES_S:5.2f} of copy"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", default="1,8,32,256,1024")
    parser.add_argument("--activation", default="fp8", choices=("fp8", "bf16"))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--general", action="store_true", help="do not rebase the scales")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--plain", action="store_true", help="the layer in bf16, as stored")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="named in the lines of --json")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.plain:
        plain([int(part) for part in args.tokens.split(",")])
        return
    activation: Activation = args.activation
    gate_up, down = stored(NUM_EXPERTS, 2 * INNER, HIDDEN), stored(NUM_EXPERTS, HIDDEN, INNER)
    if args.check:
        for may_rebase in (False, True):
            check(pack_weights(*gate_up, *down, activation, may_rebase), (gate_up, down), activation)
    packed = pack_weights(*gate_up, *down, activation, not args.general)
    del gate_up, down
    device = torch.cuda.get_device_name()
    commit = args.commit
    rows: list[Row] = []

    def measure(
        part: str, tokens: int, launches: list[Callable[[], None]], hit: float, num_bytes: int, rival: float, tiles: str
    ) -> float:
        us, low, high = time_us(launches)
        row = Row(
            f"experts fp4 {activation}", part, tokens, hit, us, low, high, num_bytes, num_bytes / us * 1e6 / COPY_BYTES_S,
            us / rival if rival else 0.0, tiles, device, commit,
        )  # fmt: skip
        rows.append(row)
        print(
            f"T={tokens:5d} {part:14s} {us:8.1f} us ({low:.1f}-{high:.1f}) | {num_bytes / 1e6:7.1f} MB |"
            f" {row.share:5.2f} of copy | {row.rival:5.2f}x rival | {tiles}",
            flush=True,
        )
        return us

    per_expert_gate, per_expert_down = INNER * HIDDEN * 17 // 16, INNER * HIDDEN * 17 // 32
    for tokens in (int(part) for part in args.tokens.split(",")):
        inputs = routings(tokens, 40 if tokens == 1 else 12 if tokens <= 32 else 6)
        hit = statistics.mean(float(chosen.unique().numel()) for _, chosen, _ in inputs)
        rival = RIVAL_US.get(tokens, (0.0, 0.0))

        def steps(tiles: Tiles, inputs: list[tuple[Tensor, Tensor, Tensor]] = inputs) -> list[ExpertsStep]:
            made = [ExpertsStep(x, chosen, shares, packed, LIMIT, tiles) for x, chosen, shares in inputs]
            for step in made:
                step.run(torch.empty(step.x.shape, dtype=torch.float32, device="cuda"))
            return made

        best = choose_tiles(tokens * TOP_K, packed)
        if args.tune:
            found: dict[tuple[tuple[int, bool], str], tuple[float, tuple[int, int, int]]] = {}
            keys = [key for key in GATE_CANDIDATES if is_worth_trying(key[0], tokens)]
            for key in keys:
                for part, table in (("gate_up", GATE_CANDIDATES), ("down", DOWN_CANDIDATES)):
                    for cut in table[key]:
                        names = (f"{part[:4]}_rows", f"{part[:4]}_warps", f"{part[:4]}_stages")
                        tiles = replace(best, tokens=key[0], is_gluon=key[1], **dict(zip(names, cut)))
                        is_down = part == "down"
                        moved = int(hit * (per_expert_gate, per_expert_down)[is_down])
                        try:
                            launches = [getattr(step, part) for step in steps(tiles)]
                            us = measure(part, tokens, launches, hit, moved, rival[is_down], f"{key} {cut}")
                        except triton.runtime.errors.OutOfResources as error:
                            print(f"T={tokens} {part} {key} {cut}: {error}")
                            continue
                        found[key, part] = min(found.get((key, part), (1e9, cut)), (us, cut))
            key = min(keys, key=lambda k: sum(found[k, p][0] for p in ("gate_up", "down")))
            best = Tiles(key[0], *found[key, "gate_up"][1], *found[key, "down"][1], key[1])
        made, names = steps(best), str(best)
        outs = [torch.empty(step.x.shape, dtype=torch.float32, device="cuda") for step in made]
        both = int(hit * (per_expert_gate + per_expert_down))
        for part in ("prepare", "quantise_inner"):
            measure(part, tokens, [getattr(step, part) for step in made], hit, 0, 0.0, "")
        measure("sum", tokens, [lambda step=step, out=out: step.sum(out) for step, out in zip(made, outs)], hit, 0, 0.0, "")
        measure("gate_up", tokens, [step.gate_up for step in made], hit, int(hit * per_expert_gate), rival[0], names)
        measure("down", tokens, [step.down for step in made], hit, int(hit * per_expert_down), rival[1], names)
        pair = [lambda step=step: (step.gate_up(), step.down()) for step in made]
        measure("gate_up + down", tokens, pair, hit, both, sum(rival), names)
        whole = [lambda step=step, out=out: step.run(out) for step, out in zip(made, outs)]
        measure("whole", tokens, whole, hit, both, 0.0, names)
        rows_in = [quantise_rows(x) if activation == "fp8" else Rows(x) for x, _, _ in inputs]
        beside = torch.randn(tokens, HIDDEN, device="cuda")
        in_model = [
            lambda x=x, chosen=chosen, shares=shares, shared=beside: experts_fp4(
                x, chosen, shares, packed, LIMIT, shared=shared, dtype=torch.bfloat16
            )
            for x, (_, chosen, shares) in zip(rows_in, inputs)
        ]
        measure("in the model", tokens, in_model, hit, both, 0.0, names)
    if args.json:
        with args.json.open("a") as file:
            for row in rows:
                file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
