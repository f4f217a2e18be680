"""`lamina warmup`: kernels are compiled before anybody waits for them."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lamina import SamplingParams
from lamina.base.errors import ConfigError, LaminaError
from lamina.cli.formatter import make_printable
from lamina.cli.options import add_common, add_engine, engine_config
from lamina.engine.engine import Engine
from lamina.models.implementations import cache_directory, machine_named, watch_compilations

DESCRIPTION = """\
Loads a model on a GPU, compiles every kernel that serving it can need, captures its decode graphs,
and serves a few made-up requests of all kinds. What was compiled stays in a cache on disk, keyed by
the kernel, the GPU and the versions: the next start of the same model on such a GPU compiles nothing.
Give the same options as to `lamina generate`: they choose the kernels. The device is cuda where none is named.
"""
EPILOG = """\
Example:
  lamina warmup MODEL-DIR && lamina generate --model MODEL-DIR --device cuda --prompt "Hello"
"""
_DECODED = 4


@dataclass(frozen=True, slots=True)
class Report:
    """What was done. served_compiled: kernels that graphs and start-up had missed, compiled by made-up requests."""

    model: str
    device: str
    compiled: int
    compile_s: float
    from_cache: int
    served_compiled: int
    graphs: int
    load_s: float
    total_s: float
    cache: str


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command understands."""
    parser.add_argument("model", metavar="MODEL", help="directory of a checkpoint, or lamina-tiny")
    add_engine(parser)
    parser.set_defaults(device=None)
    group = parser.add_argument_group("output (stdout)")
    group.add_argument("--json", action="store_true", help="one JSON object, and nothing else")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Warms up and says what that took."""
    if args.device == "cpu":
        raise ConfigError("device", "cpu", "cuda: nothing is compiled for a CPU")
    if (missing := _missing()) is not None:
        raise LaminaError(f"warmup compiles kernels for an NVIDIA GPU: {missing}; a CPU needs no warm-up")
    args.device = args.device or "cuda"
    config = engine_config(args)
    make_printable(sys.stdout)
    with _progress(args.quiet) as bar:
        report = warm_up(lambda: Engine(replace(config, warmup=False)), bar, Path(args.model).name)
    if args.json:
        print(json.dumps(asdict(report)))
    else:
        print(
            f"{report.model} on {report.device}: {report.compiled} kernels compiled in {report.compile_s:.1f} s,"
            f" {report.from_cache} found in the cache, {report.graphs} graphs captured, {report.total_s:.1f} s in all\n"
            f"kernels are kept in {report.cache}"
        )
    return 0


def _missing() -> str | None:
    """What there is not that kernels are compiled for, or with."""
    import torch

    if not torch.cuda.is_available():
        built = "is built for the CPU" if torch.version.cuda is None else "finds none"
        return f"there is none here, torch {torch.__version__} {built}"
    return None if machine_named("cpu").has_triton else "Triton is not installed"


def warm_up(make: Callable[[], Engine], bar: Progress, name: str) -> Report:
    """Makes the engine, captures its graphs and serves one of each kind of request. Raises ConfigError where there is no GPU."""
    start = time.perf_counter()
    task = bar.add_task("loading", total=None)
    with watch_compilations() as seen:
        engine = make()
        if not engine.worker.is_gpu:
            raise ConfigError("device", str(engine.worker.device), "a GPU: nothing is compiled for a CPU")
        loaded, runner = time.perf_counter() - start, engine.worker.runner
        bar.update(task, description="compiling kernels, capturing graphs")
        engine.worker.warmup(lambda done, total: bar.update(task, completed=done, total=total))
        ready = len(seen)
        serve_all(engine, bar)
    return Report(
        model=name, device=str(engine.worker.device), compiled=sum(not cached for _, _, cached in seen),
        compile_s=sum(seconds for _, seconds, cached in seen if not cached), from_cache=sum(cached for _, _, cached in seen),
        served_compiled=sum(not cached for _, _, cached in seen[ready:]), graphs=runner.num_graphs, load_s=loaded,
        total_s=time.perf_counter() - start, cache=cache_directory(),
    )  # fmt: skip


def serve_all(engine: Engine, bar: Progress) -> None:
    """Serves one of each kind of request, and forgets them."""
    wanted = made_up_requests(engine.vocab_size, max(1, min(engine.config.step_tokens, engine.max_model_len - _DECODED)))
    task = bar.add_task("serving made-up requests", total=len(wanted))
    for kind, (prompts, params) in enumerate(wanted):
        groups = [engine.add(prompt, params, number, f"warm-up {kind}") for number, prompt in enumerate(prompts)]
        while any(not group.is_finished for group in groups):
            engine.step()
        bar.advance(task)
    engine.ledger.drop_index()


def made_up_requests(vocab_size: int, most: int) -> Sequence[tuple[list[list[int]], SamplingParams]]:
    """Prompts of all sizes up to `most` tokens, alone and together, and every kind of drawing."""

    def prompt(length: int, kind: int) -> list[int]:
        return [(kind + 7 * place + place * place) % vocab_size for place in range(length)]

    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    greedy = SamplingParams(max_tokens=_DECODED, temperature=0, ignore_eos=True)
    found = [([prompt(length, number)], greedy) for number, length in enumerate(sizes)]
    found.append(([prompt(min(most, 3 + number), 100 + number) for number in range(5)], greedy))
    short = min(most, 9)
    for number, params in enumerate((
        SamplingParams(max_tokens=_DECODED, temperature=0.7, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=_DECODED, temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=_DECODED, temperature=1.0, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
                       seed=1, ignore_eos=True),
        SamplingParams(max_tokens=_DECODED, temperature=0, logprobs=5, prompt_logprobs=5, ignore_eos=True),
        SamplingParams(max_tokens=_DECODED, temperature=1.0, seed=1, n=2, logit_bias={1: 1.0}, min_tokens=2),
    )):  # fmt: skip
        found.append(([prompt(short, 200 + number)], params))
    return found


def _progress(quiet: bool) -> Progress:
    """A bar on stderr that vanishes when it is done; nothing where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty())
