"""Prefill and decode tokens/s of Lamina and of Transformers: same checkpoint, same machine, same run.

    python bench/cpu_generate.py [--contexts 512,4096 --batches 1,8 --decode-tokens 24 --repeats 3 --json FILE]

Both compute in fp32 with entries and index keys in fp32. Rounds alternate between the engines; the figure is the median.
Transformers prefills in whole (512 tokens) or in pieces of --piece tokens with its cache, which is faster for it than whole
at 4,096 and needs less memory. Only ratios mean anything on a shared machine.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lamina import LLM, SamplingParams
from lamina.models.tiny import write_tiny


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure: what was measured, tokens/s of each engine (median) and the spread over the rounds."""

    phase: str
    batch: int
    context: int
    lamina: float
    rival: float
    lamina_spread: tuple[float, float]
    rival_spread: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Lamina over Transformers."""
        return self.lamina / self.rival


def prompts(batch: int, context: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids, different for every request and seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (batch, context), generator=generator).tolist()


def lamina_round(llm: LLM, ids: list[list[int]], decode_tokens: int) -> tuple[float, float]:
    """Seconds to prefill all prompts, and seconds of `decode_tokens` decode steps of the whole batch after them."""
    engine = llm.engine
    start = time.perf_counter()
    groups = [engine.add(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)) for prompt in ids]
    while engine.has_work:
        engine.step()
    prefill = time.perf_counter() - start
    params = SamplingParams(max_tokens=decode_tokens + 1, temperature=0, ignore_eos=True)
    groups = [engine.add(prompt, params) for prompt in ids]
    engine.step()  # admits every request on its full hit and draws the first token
    assert all(group.requests[0].num_output == 1 for group in groups), "the prompts were not cached"
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    decode = time.perf_counter() - start
    assert all(len(group.output.outputs[0].token_ids) == decode_tokens + 1 for group in groups)
    return prefill, decode


def rival_round(
    model: torch.nn.Module, make_cache: Callable[[], object], ids: list[list[int]], decode_tokens: int, piece: int
) -> tuple[float, float]:
    """The same of Transformers: one padded-free batch of equal lengths, greedy."""
    tokens = torch.tensor(ids)
    with torch.inference_mode():
        start = time.perf_counter()
        cache, at = make_cache(), 0
        while at < tokens.shape[1]:
            out = model(input_ids=tokens[:, at : at + piece], cache=cache, use_cache=True, logits_to_keep=1)
            at += piece
        drawn = out.logits[:, -1:].argmax(-1)
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(decode_tokens):
            drawn = model(input_ids=drawn, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
        return prefill, time.perf_counter() - start


def main() -> None:
    """Runs every cell and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="512,4096")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--decode-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--piece", type=int, default=512, help="tokens a forward of Transformers' prefill")
    parser.add_argument("--max-step-tokens", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="append one JSON line a cell to this file")
    args = parser.parse_args()
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as root:
        write_tiny(Path(root) / "bench", shape="bench", seed=0, file_format="transformers")
        directory = str(Path(root) / "bench")
        rival_config = AutoConfig.from_pretrained(directory)
        rival = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        llm = LLM(directory, cache_format="fp32", index_format="fp32", cache_bytes="1GiB", max_step_tokens=args.max_step_tokens)
        size = sum(p.numel() for p in rival.parameters()) / 1e6
        print(f"{size:.1f} M parameters, {torch.get_num_threads()} threads, torch {torch.__version__}")
        cells = []
        for context in map(int, args.contexts.split(",")):
            for batch in map(int, args.batches.split(",")):
                ours, theirs = [], []
                for repeat in range(args.repeats + 1):  # the first round warms both up
                    ids = prompts(batch, context, llm.engine.vocab_size, seed=repeat * 1000 + context + batch)
                    ours.append(lamina_round(llm, ids, args.decode_tokens))
                    theirs.append(
                        rival_round(rival, lambda: DynamicCache(config=rival_config), ids, args.decode_tokens, args.piece)
                    )
                    llm.engine.ledger.drop_index()
                for phase, column, tokens in (("prefill", 0, batch * context), ("decode", 1, batch * args.decode_tokens)):
                    mine = [tokens / times[column] for times in ours[1:]]
                    other = [tokens / times[column] for times in theirs[1:]]
                    spreads = (min(mine), max(mine)), (min(other), max(other))
                    cell = Cell(phase, batch, context, statistics.median(mine), statistics.median(other), *spreads)
                    cells.append(cell)
                    print(
                        f"{phase:8} batch {batch:2} context {context:5} | Lamina {cell.lamina:9.1f} tokens/s | "
                        f"Transformers {cell.rival:9.1f} | {cell.ratio:5.2f}x", flush=True,
                    )  # fmt: skip
    if args.json:
        with args.json.open("a") as file:
            for cell in cells:
                file.write(
                    json.dumps({**asdict(cell), "ratio": cell.ratio, "cpu": platform.processor(), "torch": torch.__version__})
                    + "\n"
                )


if __name__ == "__main__":
    main()
