"""The rival of bench/experts.py: Humming's MXFP4 experts with fp8 activations, from the wheel `humming-kernels`, measured alike.

    python -m bench.rivals.humming_experts [--tokens 1,8,32,256,1024] [--json FILE]

Its own choice of tile for each size, places sorted by expert and padded to it ("indexed"); activations with one scale a token and
with one for every 128. Aligning and quantising lie outside, as they do for ours. Weights are random bytes in its own layout.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from humming.forward import may_quant_input
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config
from torch import Tensor

from bench.experts import COPY_BYTES_S, HIDDEN, INNER, NUM_EXPERTS, TOP_K, routings, time_us


def make_layer(rows: int, columns: int, group: int) -> HummingLayer:
    """[rows, columns] of every expert; activations with one scale for `group` columns, 0 = for the whole row."""
    layer = HummingLayer(
        shape_n=rows,
        shape_k=columns,
        num_experts=NUM_EXPERTS,
        weight_config={"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
        input_config={"dtype": "float8e4m3", "group_size": group},
        torch_dtype=torch.bfloat16,
    ).cuda()
    for name, low, high in (("weight", 0, 256), ("weight_scale", 118, 124)):
        part = getattr(layer, name)
        bytes_ = part.data.view(torch.uint8)
        bytes_.copy_(torch.randint(low, high, bytes_.shape, dtype=torch.uint8, device="cuda"))
    layer.transform(allow_inplace=True)
    return layer


def padded(chosen: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places by expert, each expert's padded to whole blocks with the number of places; the blocks' experts; padded length."""
    flat, places, experts = chosen.flatten().tolist(), [], []
    for expert in range(NUM_EXPERTS):
        own = [place for place, e in enumerate(flat) if e == expert]
        own += [len(flat)] * (-len(own) % block)
        places += own
        experts += [expert] * (len(own) // block)
    ids, blocks, length = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in (places, experts, [len(places)]))
    return ids, blocks, length


def launches(layer: HummingLayer, inputs: list[Tensor], chosen: list[Tensor], top_k: int) -> list[Callable[[], None]]:
    """One call for each routing, ready to be captured."""
    config = layer.humming_config
    num_places = chosen[0].numel()
    tuning = get_heuristics_config(config, shape_m=num_places, gemm_type="indexed", device=inputs[0].device)
    block = int(tuning["block_shape"][0])
    made: list[Callable[[], None]] = []
    for x, routing in zip(inputs, chosen):
        codes, scales = may_quant_input(config, x)
        ids, blocks, length = padded(routing, block)
        out = torch.empty(num_places, layer.shape_n, dtype=torch.bfloat16, device="cuda")

        made.append(
            partial(
                layer, codes, outputs=out, input_scale=scales, sorted_ids=ids, expert_ids=blocks, num_tokens_padded=length,
                top_k=top_k, compute_config={"gemm_type": "indexed"}, tuning_config=[[0, 1 << 30, tuning]],
            )
        )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", default="1,8,32,256,1024")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    lines = []
    for group in (0, 128):
        layers = (make_layer(2 * INNER, HIDDEN, group), make_layer(HIDDEN, INNER, group))
        for tokens in (int(part) for part in args.tokens.split(",")):
            routed = routings(tokens, 40 if tokens == 1 else 12 if tokens <= 32 else 6)
            chosen = [routing for _, routing, _ in routed]
            hit = statistics.mean(float(routing.unique().numel()) for routing in chosen)
            inner = [torch.randn(tokens * TOP_K, INNER, device="cuda", dtype=torch.bfloat16) for _ in routed]
            calls = (launches(layers[0], [x for x, _, _ in routed], chosen, TOP_K), launches(layers[1], inner, chosen, 1))
            for part, made, size in (
                ("gate_up", calls[0], INNER * HIDDEN * 17 // 16), ("down", calls[1], INNER * HIDDEN * 17 // 32)
            ):  # fmt: skip
                us, low, high = time_us(made)
                moved = int(hit * size)
                share = moved / us * 1e6 / COPY_BYTES_S
                scaling = f"1x{group}" if group else "per token"
                spread = f"({low:.1f}-{high:.1f})"
                print(f"Humming {scaling} T={tokens:5d} {part:8s} {us:8.1f} us {spread} | {share:5.2f} of copy", flush=True)
                lines.append(
                    {
                        "op": f"rival humming fp4 x fp8, {scaling}", "part": part, "tokens": tokens, "experts_hit": hit, "us": us,
                        "low_us": low, "high_us": high, "bytes": moved, "share": share, "device": torch.cuda.get_device_name(),
                    }
                )  # fmt: skip
    if args.json:
        with args.json.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
