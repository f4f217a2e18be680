"""Loads a model and serves prompts, with progress on stderr: what `generate` and `demo` share."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lamina import Delta, RequestOutput, SamplingParams
from lamina.base.config import EngineConfig
from lamina.cli.options import Prompt
from lamina.cli.stream import OutputStream, label
from lamina.engine.engine import Engine, Group
from lamina.engine.watch import MemoryReport, Speed, Watch


@dataclass(frozen=True, slots=True)
class Served:
    """Everything that came of one run. Times in seconds; first_token_s counts from the first step."""

    outputs: list[RequestOutput]
    speed: Speed
    memory: MemoryReport | None
    load_s: float
    first_token_s: float
    total_s: float


def load(config: EngineConfig, quiet: bool) -> tuple[Engine, float]:
    """The engine and the seconds that loading took."""
    start = time.perf_counter()
    with _progress(quiet) as progress:
        task = progress.add_task("loading weights", total=None)

        def show(what: str) -> Callable[[int, int], None]:
            return lambda done, total: progress.update(task, description=what, completed=done, total=total)

        engine = Engine(config, show("loading weights"), show("compiling kernels, capturing graphs"))
    return engine, time.perf_counter() - start


def serve(
    engine: Engine, load_s: float, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams], *,
    out: TextIO | None, streams: bool, quiet: bool, counts_memory: bool, pictures: bool = False,
    watch: Watch | None = None, keep_at: int | None = None,
) -> Served:  # fmt: skip
    """Serves all prompts together, and writes their texts to `out` (None: nowhere), as they come if it streams.

    params   one for all, or one a prompt.   watch  of an engine that has served before: speed and memory are then of all runs.
    keep_at  tokens of the first prompt after which the next ones will differ, see Engine.add.
    Raises ConfigError or CapacityError, before anything is computed, if any prompt cannot be served.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for index, (prompt, own) in enumerate(zip(prompts, each, strict=True), start=1):
        engine.check(prompt, own, f"prompt {index}")
    watch = watch or Watch(engine, counts_memory)
    start = time.perf_counter()
    groups = [
        engine.add(prompt, own, index, keep_at=None if index else keep_at)
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True))
    ]
    writer = None if out is None else OutputStream(out, _labels(groups), pictures)
    first = 0.0
    drawn = 0
    streams = streams and writer is not None
    with _progress(quiet or streams) as progress:
        task = progress.add_task("generating tokens", total=sum(own.n * own.max_tokens for own in each))
        while not all(group.is_finished and not group.deltas for group in groups):
            deltas = [delta for group in groups for delta in engine.take(group)]
            drawn += sum(len(delta.token_ids) for delta in deltas)
            first = first or (time.perf_counter() - start if drawn else 0.0)
            progress.update(task, completed=drawn)
            if streams and writer is not None:
                _write(writer, deltas, groups, engine.codec is not None)
            if not deltas and not watch.step():
                raise AssertionError("requests wait although nothing runs")
    total = time.perf_counter() - start
    if not streams and writer is not None:
        for group in groups:
            for output in group.output.outputs:
                text = output.text if engine.codec is not None else _ids(output.token_ids)
                writer.feed(_number(groups, group.prompt_index, output.index), text, True)
    return Served([group.output for group in groups], watch.speed, watch.memory(), load_s, first, total)


def _labels(groups: Sequence[Group]) -> list[str]:
    return [
        label(
            group.prompt_index, len(groups), child, len(group.requests), group.output.prompt, len(group.output.prompt_token_ids)
        )
        for group in groups
        for child in range(len(group.requests))
    ]


def _number(groups: Sequence[Group], prompt_index: int, child: int) -> int:
    """The place of an output among all of them."""
    return sum(len(group.requests) for group in groups[:prompt_index]) + child


def _write(writer: OutputStream, deltas: Sequence[Delta], groups: Sequence[Group], has_text: bool) -> None:
    for delta in deltas:
        text = delta.text if has_text else _ids(delta.token_ids)
        writer.feed(_number(groups, delta.prompt_index, delta.index), text, delta.finish_reason is not None)


def _ids(token_ids: Sequence[int]) -> str:
    """Token ids where there is no tokenizer."""
    return "".join(f"{token} " for token in token_ids)


def _progress(quiet: bool) -> Progress:
    """A bar on stderr that vanishes when it is done; nothing where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty())
