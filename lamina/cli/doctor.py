"""`lamina doctor`: does it run here?"""

import argparse
import sys
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from lamina.base.config import CACHE_FORMATS, INDEX_FORMATS
from lamina.base.errors import ConfigError
from lamina.base.sizes import format_bytes, parse_bytes
from lamina.cli.formatter import make_printable
from lamina.cli.machine import probe_machine
from lamina.cli.options import add_common
from lamina.engine.text import load_codec
from lamina.models.description import Choices
from lamina.models.files import find_checkpoint, model_path
from lamina.plan.doctor import Capacity, Gpu, Machine, ModelFound, Report, TokenizerFound, diagnose
from lamina.plan.facts import printable
from lamina.plan.table import make_console

DESCRIPTION = """\
Says yes or no, and why, within seconds: reads a checkpoint's headers (names, types and shapes of
its tensors, never their data), its config.json and tokenizer.json, and asks the machine for its
memory, GPUs, driver, torch and triton. Without DIR: the machine alone.
Exits with 0 for yes, limits or not, and with 1 for no.
"""
EPILOG = """\
Examples:
  lamina doctor
  lamina doctor lamina-tiny
  lamina doctor MODEL-DIR --cache-bytes 20GiB --json | python3 -m json.tool
"""
_SHOWN, _LISTED = 12, 20
_MOST_TOKENIZER_BYTES = 1 << 28


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command understands."""
    text = "a checkpoint: config.json and *.safetensors, a *.gguf file, or lamina-tiny"
    parser.add_argument("directory", metavar="DIR", type=model_path, nargs="?", help=text)
    group = parser.add_argument_group("what it would run with")
    text = "judge it for the cpu, for cuda, or auto: a GPU if there is one that can be used (default auto)"
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=text)
    group.add_argument(
        "--cache-bytes", default="1GiB", metavar="SIZE", help="memory for what requests remember: 8GiB, 512MiB (default 1GiB)"
    )
    group.add_argument(
        "--cache-format", choices=CACHE_FORMATS, metavar="FORMAT",
        help=f"attention entries: {', '.join(CACHE_FORMATS)} (default: the model's)",
    )  # fmt: skip
    group.add_argument(
        "--index-format", choices=INDEX_FORMATS, metavar="FORMAT",
        help=f"index keys: {', '.join(INDEX_FORMATS)} (default: the model's)",
    )  # fmt: skip
    group = parser.add_argument_group("output (stdout)")
    group.add_argument("--json", action="store_true", help="one JSON object with everything, and nothing else")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the report; 0 for yes and 1 for no."""
    directory: Path | None = args.directory if args.directory is None else find_checkpoint(args.directory)
    cache_bytes = parse_bytes(args.cache_bytes, "cache_bytes")
    choices = Choices(cache_format=args.cache_format, index_format=args.index_format)
    tokenizer = None if directory is None else _tokenizer(directory)
    report = diagnose(probe_machine(), directory, cache_bytes, choices, tokenizer, args.device)
    make_printable(sys.stdout)
    if args.json:
        print(msgspec.json.encode(report_json(report)).decode())
    else:
        print_report(report)
    return 0 if report.is_yes else 1


def _tokenizer(directory: Path) -> TokenizerFound:
    """What the engine would make of tokenizer.json."""
    path = directory / "tokenizer.json"
    try:
        if path.is_file() and path.stat().st_size > _MOST_TOKENIZER_BYTES:
            return TokenizerFound(problem=f"tokenizer.json is larger than {format_bytes(_MOST_TOKENIZER_BYTES)}")
        codec = load_codec(directory)
    except ConfigError as error:
        return TokenizerFound(problem=str(error))
    except OSError as error:
        return TokenizerFound(problem=f"{error.filename}: {error.strerror}")
    return TokenizerFound(num_tokens=None if codec is None else codec.vocab_size)


# For people ------------------------------------------------------------------------------------------------------------


def print_report(report: Report) -> None:
    """The verdict and its reasons first, then what was found, then the limits."""
    console = make_console(sys.stdout)
    console.print(_verdict(report), soft_wrap=True)
    _list(report.reasons, "x", "bold red", "more reasons")
    print()
    grid = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, words in [*(_model_rows(report.model) if report.model is not None else []), *_machine_rows(report.machine)]:
        grid.add_row(name, Text(words))
    console.print(grid)
    if report.limits:
        print()
        _list(report.limits, "!", "yellow", "more limits")


def _list(sentences: tuple[str, ...], mark: str, style: str, more: str) -> None:
    console = make_console(sys.stdout)
    shown = list(sentences[:_SHOWN])
    if len(sentences) > _SHOWN:
        shown.append(f"and {len(sentences) - _SHOWN} {more} (--json has them all)")
    for sentence in shown:
        console.print(Text.assemble((f"  {mark} ", style), sentence), soft_wrap=True)


def _verdict(report: Report) -> Text:
    name = f"{report.model.name} " if report.model is not None else ""
    if not report.is_yes:
        what = f"{name}does not run here" if report.model is not None else "this machine cannot run Lamina"
        return Text.assemble(("no", "bold red"), f"   {what}")
    limits = f", with {len(report.limits)} limit{'s' if len(report.limits) > 1 else ''}" if report.limits else ""
    what = f"{name}runs here" if report.model is not None else "this machine can run Lamina"
    return Text.assemble(("yes", "bold green"), f"  {what}{limits}")


def _model_rows(model: ModelFound) -> list[tuple[str, str]]:
    rows = []
    if model.model_type is not None:
        state = "runs" if model.runs else "plan only" if model.is_known else "unknown"
        parts = [f"{model.model_type} ({state})"]
        if model.num_params is not None:
            parts.append(f"{_people(model.num_params)} parameters")
        if model.max_positions is not None:
            parts.append(f"up to {model.max_positions:,} tokens")
        rows.append(("model", ", ".join(parts)))
    if model.num_tensors is not None:
        files = f"{model.num_files} file{'s' if model.num_files != 1 else ''}"
        rows.append(("files", f"{files}, {model.num_tensors:,} tensors, {format_bytes(model.stored_bytes or 0)}"))
    if model.tensors is not None:
        rows.append(("tensors", _tensor_words(model)))
    if model.gpu_bytes is not None:
        rows.append(("weights", f"{format_bytes(model.gpu_bytes)} in memory, as stored on the GPU"))
    elif model.loaded_bytes is not None:
        rows.append(("weights", f"{format_bytes(model.loaded_bytes)} in memory, as fp32 on the CPU"))
    elif model.planned_bytes is not None:
        rows.append(("weights", f"{format_bytes(model.planned_bytes)} by its config"))
    if model.capacity is not None:
        rows.append(("cache", _cache_words(model.capacity, model)))
    tokens = model.tokenizer.num_tokens
    if model.exists and model.tokenizer.problem is None:
        rows.append(("tokenizer", "none" if tokens is None else f"{tokens:,} tokens"))
    return rows


def _tensor_words(model: ModelFound) -> str:
    found = model.tensors
    assert found is not None
    bad = [
        f"{number:,} {what}"
        for number, what in ((len(found.missing), "missing"), (len(found.wrong), "wrong"), (len(found.unused), "unknown"))
        if number
    ]
    ignored = [f"{found.ignored:,} not used"] if found.ignored else []
    return ", ".join([f"all {found.num_found:,} needed are right" if not bad else f"{found.num_found:,} found", *bad, *ignored])


def _cache_words(capacity: Capacity, model: ModelFound) -> str:
    formats = f"{model.cache_format} entries" + (f", {model.index_format} index" if model.index_format is not None else "")
    if not capacity.most_tokens:
        return f"{format_bytes(capacity.cache_bytes)} ({formats}): too small for any request"
    many = f"{capacity.short_requests:,} x {capacity.short_tokens:,} tokens"
    longest = max(1, capacity.cache_bytes // max(1, capacity.full_bytes))
    return f"{format_bytes(capacity.cache_bytes)} ({formats}) holds {longest:,} x {capacity.most_tokens:,} or {many}"


def _machine_rows(machine: Machine) -> list[tuple[str, str]]:
    memory = "memory unknown"
    if machine.memory_bytes is not None:
        memory = f"{format_bytes(machine.memory_bytes)} memory"
        if machine.available_bytes is not None:
            memory += f" ({format_bytes(machine.available_bytes)} free)"
    cores = f"{machine.cores} core{'s' if machine.cores != 1 else ''}"
    rows = [("machine", f"{printable(machine.processor)}, {cores}, {memory}, {machine.system}")]
    gpus: dict[str, int] = {}
    for gpu in machine.gpus:
        gpus[_gpu_words(gpu)] = gpus.get(_gpu_words(gpu), 0) + 1
    rows += [("GPU", f"{count} x {words}" if count > 1 else words) for words, count in gpus.items()] or [("GPU", "none")]
    torch = "torch missing" if machine.torch is None else f"torch {machine.torch} ({machine.torch_backend})"
    triton = f"triton {machine.triton}" if machine.triton is not None else "no triton"
    rows.append(("software", f"lamina {machine.lamina}, Python {machine.python}, {torch}, {triton}"))
    return rows


def _gpu_words(gpu: Gpu) -> str:
    parts = [printable(gpu.name)]
    if gpu.memory_bytes is not None:
        used = f" ({format_bytes(gpu.used_bytes)} used)" if gpu.used_bytes is not None else ""
        parts.append(format_bytes(gpu.memory_bytes) + used)
    if gpu.compute_capability is not None:
        parts.append(f"compute {printable(gpu.compute_capability)}")
    if gpu.driver is not None:
        parts.append(f"driver {printable(gpu.driver)}")
    return ", ".join([*parts, *([] if gpu.torch else ["not usable by torch"])])


def _people(number: int) -> str:
    """1,234 as it is; 5.4 M; 79.7 B."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:,}"


# For programs ----------------------------------------------------------------------------------------------------------


def report_json(report: Report) -> dict[str, object]:
    """Everything as one object: verdict, reasons, limits, machine and model (null without a directory)."""
    return {
        "verdict": "yes" if report.is_yes else "no",
        "reasons": list(report.reasons),
        "limits": list(report.limits),
        "machine": report.machine,
        "model": None if report.model is None else _model_json(report.model),
    }


def _model_json(model: ModelFound) -> dict[str, object]:
    found = model.tensors
    tensors = None if found is None else {
        "found": found.num_found,
        "missing": len(found.missing),
        "wrong": len(found.wrong),
        "unused": len(found.unused),
        "ignored": found.ignored,
        "ignored_bytes": found.ignored_bytes,
        "is_complete": found.is_complete,
        "missing_names": found.missing[:_LISTED],
        "unused_names": found.unused[:_LISTED],
    }  # fmt: skip
    return {
        "name": model.name,
        "model_type": model.model_type,
        "is_known": model.is_known,
        "runs": model.runs,
        "num_params": model.num_params,
        "max_positions": model.max_positions,
        "cache_format": model.cache_format,
        "index_format": model.index_format,
        "num_files": model.num_files,
        "num_tensors": model.num_tensors,
        "stored_bytes": model.stored_bytes,
        "planned_bytes": model.planned_bytes,
        "tensors": tensors,
        "loaded_bytes": model.loaded_bytes,
        "device": model.device,
        "gpu_bytes": model.gpu_bytes,
        "capacity": model.capacity,
        "tokenizer_tokens": model.tokenizer.num_tokens,
    }
