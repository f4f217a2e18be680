"""`lamina ops`: which kernels run here."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich import box
from rich.table import Table
from rich.text import Text

from lamina.base.config import ACTIVATION_FORMATS, CACHE_FORMATS, DTYPES, INDEX_FORMATS, KERNELS
from lamina.base.errors import ConfigError
from lamina.cli.formatter import make_printable
from lamina.cli.options import add_common
from lamina.models.files import model_path
from lamina.models.implementations import SHIPPED, Choice, Row, implementations, machine_named, refusals, shipped_values
from lamina.plan.source import open_source
from lamina.plan.table import make_console

DESCRIPTION = """\
Lists every operation of a model, its implementations, the one that is chosen on this machine, and
why the others are not: asked of the implementations themselves, so nothing is loaded or compiled.
Without MODEL: the widths that are shipped. Exits with 1 if an operation has none that serves.
"""
EPILOG = """\
Examples:
  lamina ops
  lamina ops lamina-tiny --device cuda --capability 8.0
  lamina ops MODEL-DIR --kernels portable --json | python3 -m json.tool
"""
ON_CPU = "reference on a CPU: PyTorch, and C kernels for what they serve where there is a C compiler (LAMINA_NATIVE=0: without)"
_CAPABILITY = re.compile(r"([0-9]{1,2})\.([0-9])")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command understands."""
    parser.add_argument(
        "model", metavar="MODEL", type=model_path, nargs="?", help="a config.json, a directory with one, or lamina-tiny"
    )
    group = parser.add_argument_group("the machine")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto: a GPU if there is one")
    group.add_argument("--capability", metavar="X.Y", help="a GPU of this compute capability instead of one that is here")
    group = parser.add_argument_group("what it would run with")
    for name, allowed, default, text in (
        ("dtype", DTYPES, "auto", "activations are rounded to"),
        ("cache-format", CACHE_FORMATS, "fp8", "attention entries"),
        ("index-format", INDEX_FORMATS, "fp4", "index keys"),
        ("activation-format", ACTIVATION_FORMATS, "auto", "what products with quantised weights read"),
        ("kernels", KERNELS, "auto", "the fastest, or those that run on every GPU"),
    ):
        words = f"{text}: {', '.join(allowed)} (default {default})"
        group.add_argument(f"--{name}", choices=allowed, default=default, metavar="NAME", help=words)
    group.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of a request (default: the model's limit)")
    group = parser.add_argument_group("output (stdout)")
    group.add_argument("--json", action="store_true", help="one JSON object with everything, and nothing else")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the table; 1 if an operation has no implementation there."""
    if args.max_model_len is not None and args.max_model_len < 1:
        raise ConfigError("max-model-len", args.max_model_len, "at least 1")
    values, name = shipped_values(), f"the widths of {SHIPPED}"
    if args.model is not None:
        source = open_source(args.model)
        values, name = dict(source.values), source.name
    device, capability = _device(args.device, args.capability)
    machine = machine_named(device, capability)
    choice = Choice(args.dtype, args.cache_format, args.index_format, args.activation_format, args.kernels, args.max_model_len)
    rows = implementations(values, machine, choice)
    problems = refusals(rows)
    make_printable(sys.stdout)
    found = "{}.{}".format(*machine.capability) if device == "cuda" else None
    if args.json:
        listed = [{**asdict(row), "is_chosen": row.is_chosen} for row in rows]
        whole = {"model": name, "device": device, "capability": found, "has_triton": machine.has_triton, "rows": listed}
        print(json.dumps({**whole, "problems": list(problems)}))
    else:
        place = f"a GPU of compute capability {found}" if found else "the CPU"
        _print(f"{name} on {place}", rows, problems)
        if not found:
            print(ON_CPU)
    return 1 if problems else 0


def _device(wanted: str, capability: str | None) -> tuple[str, tuple[int, int] | None]:
    """(cpu or cuda, the capability that was named). Raises ConfigError for a GPU that is neither here nor named."""
    if capability is not None:
        found = _CAPABILITY.fullmatch(capability)
        if found is None:
            raise ConfigError("capability", capability, "two numbers such as 9.0")
        if wanted == "cpu":
            raise ConfigError("capability", capability, "left out for --device cpu")
        return "cuda", (int(found.group(1)), int(found.group(2)))
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", wanted, "cpu, or with --capability: there is no GPU here")
    return ("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"), None


def _print(title: str, rows: Sequence[Row], problems: Sequence[str]) -> None:
    console = make_console(sys.stdout)
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for column in ("op", "implementation", "chosen", "why not"):
        table.add_column(column, no_wrap=column != "why not")
    last = ""
    for row in rows:
        mark = Text("yes", style="bold green") if row.is_chosen else Text("no", style="dim")
        table.add_row("" if row.op == last else row.op, row.implementation, mark, row.why_not or "")
        last = row.op
    console.print(table)
    for problem in problems:
        console.print(Text.assemble(("no implementation serves ", "bold red"), problem), soft_wrap=True)
