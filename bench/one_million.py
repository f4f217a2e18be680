"""One request of a million tokens, prefilled and decoded by the engine, on a model of few Flash-shaped layers.

    python bench/one_million.py [--ratios 0,0,4,128,4,128 --tokens 1048000 --decode-tokens 64 --step-tokens 8192 --json FILE]

Nothing is faked: all tokens go through the public interface, and the request's memory is what a million tokens take. The table
says how fast prefill is at each depth (its attention and index grow with what is there), and a decode step at the end.
Extrapolated to 43 layers as if all layers cost alike.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from official_random import FLASH_LAYERS, flash_config, make_llm

from lamina import SamplingParams
from lamina.base.sizes import GiB, format_bytes

MARKS = (0, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 768 << 10, 1 << 20)


@dataclass(frozen=True, slots=True)
class Depth:
    """Prefill between two depths."""

    first: int
    last: int
    seconds: float

    @property
    def tokens_s(self) -> float:
        """Tokens/s there."""
        return (self.last - self.first) / self.seconds


@dataclass(frozen=True, slots=True)
class Result:
    """The whole request."""

    layers: int
    tokens: int
    prefill_s: float
    prefill_tokens_s: float
    decode_ms: float
    held_bytes: int
    depths: tuple[Depth, ...]
    prefill_tokens_s_43: float
    decode_ms_43: float
    device: str


def main() -> None:
    """Serves the request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", default="0,0,4,128,4,128")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=(1 << 20) - 576)
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--cache-gib", type=float, default=8.0)
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON with changes of the config")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="append one JSON line to this file")
    args = parser.parse_args()
    ratios = tuple(int(ratio) for ratio in args.ratios.split(","))
    values = flash_config(ratios, n_routed_experts=args.experts, **args.shape)
    start = time.perf_counter()
    llm = make_llm(
        values, args.device, int(args.cache_gib * GiB), max_step_tokens=args.step_tokens, max_requests=1,
        max_model_len=args.tokens + args.decode_tokens, warmup=False,
    )  # fmt: skip
    engine = llm.engine
    print(f"{len(ratios)} layers ready in {time.perf_counter() - start:.1f} s", flush=True)
    ids = torch.randint(3, engine.vocab_size, (args.tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    llm.generate(ids[: args.step_tokens + 1], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))  # warm
    engine.ledger.drop_index()

    params = SamplingParams(max_tokens=args.decode_tokens, temperature=0, ignore_eos=True)
    group = engine.add(ids, params)
    request = group.requests[0]
    marks = [mark for mark in MARKS if mark < args.tokens] + [args.tokens]
    begun = last = time.perf_counter()
    depths, at = [], 0
    while request.num_output == 0:
        engine.step()
        position = request.lease.position if request.lease is not None else args.tokens
        reached = max(mark for mark in marks if mark <= position)
        if reached > at:
            now = time.perf_counter()
            depths.append(Depth(at, reached, now - last))
            print(f"prefill {at:9,} .. {reached:9,} | {depths[-1].tokens_s:9,.0f} tokens/s | {now - begun:6.1f} s", flush=True)
            at, last = reached, now
    prefill_s, done, decode_start = time.perf_counter() - begun, request.num_output, time.perf_counter()
    while engine.has_work:
        engine.step()
    decode_ms = (time.perf_counter() - decode_start) / max(1, args.decode_tokens - done) * 1e3
    output = group.output.outputs[0]
    assert output.finish_reason == "length" and len(output.token_ids) == args.decode_tokens, output.finish_reason
    held = sum(group.output.usage.held_bytes.values())
    scale = FLASH_LAYERS / len(ratios)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    result = Result(
        len(ratios), args.tokens, prefill_s, args.tokens / prefill_s, decode_ms, held, tuple(depths),
        args.tokens / prefill_s / scale, decode_ms * scale, name,
    )  # fmt: skip
    print(
        f"{args.tokens:,} tokens: prefill {prefill_s:.1f} s, {result.prefill_tokens_s:,.0f} tokens/s; decode {decode_ms:.3f} ms a"
        f" step; the request holds {format_bytes(held)}\n43 layers alike: prefill {result.prefill_tokens_s_43:,.0f} tokens/s,"
        f" decode {result.decode_ms_43:.2f} ms", flush=True,
    )  # fmt: skip
    if args.json is not None:
        with args.json.open("a") as file:
            file.write(json.dumps({"op": "one_million", **asdict(result)}) + "\n")


if __name__ == "__main__":
    main()
