"""`lamina plan`: where every byte goes, from a config.json alone."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from lamina.base.config import CACHE_FORMATS, INDEX_FORMATS
from lamina.base.errors import ConfigError
from lamina.base.sizes import MiB, parse_bytes
from lamina.cli.formatter import make_printable
from lamina.cli.options import add_common
from lamina.models.files import model_path
from lamina.plan.diff import Diff, compare_plans, diff_json
from lamina.plan.diff_table import print_diff
from lamina.plan.gpus import GPUS
from lamina.plan.page import write_page
from lamina.plan.records import Plan, PlanOptions
from lamina.plan.report import plan_json
from lamina.plan.request_lines import parse_contexts, parse_requests, parse_tokens
from lamina.plan.rivals import ENGINES, Comparison, compare, comparison_json, comparison_table
from lamina.plan.simulate import run_trace
from lamina.plan.simulate_report import report_json, table
from lamina.plan.simulation import Options, SimulationReport
from lamina.plan.source import Source, open_source
from lamina.plan.table import make_console, print_plan
from lamina.plan.traces import MIXES, make_mix, read_trace
from lamina.plan.what_if import parse_changes, parse_share

DESCRIPTION = """\
Says where every byte of a model's memory goes and how many requests fit, from its config.json
alone: no GPU, no weights, nothing is loaded. What it says of pages, slots and requests is what
the engine then allocates, to the byte.

A request holds blocks (`log`: what grows with its length, in whole pages) and a slot (windows,
running states and the last hidden vector, in whole pages). One pool of equal pages serves both:

  pool = memory x gpu-memory-utilization - weights - workspace      on each GPU
  fit  = pool pages / (pages of log + pages of slot)                times dp

weights    on the fullest GPU: divided over tp GPUs, experts over the larger of tp and ep, norms,
           routers and low-rank projections whole on every GPU. In a directory with safetensors
           they are the exact bytes of its files, else calculated from the config.
workspace  an estimate: max-step-tokens x (32 hidden vectors of 2 bytes + the entries that a
           token adds in one layer) + max-requests x vocabulary x 8 bytes.
"""
EPILOG = f"""\
Sizes: 141GB (10^9), 26.09GiB (2^30), 1048576. Tokens: 4096, 128K (x 1024), 1M (x 1024 x 1024).
GPUs, with the memory that CUDA or HIP report: {", ".join(list(GPUS)[:6])},
  {", ".join(list(GPUS)[6:])}.

Examples:
  lamina plan config.json                                  what a request takes, 1K to 1M tokens
  lamina plan MODEL-DIR --gpu h200 --gpus 8                how many fit on eight H200, tp 8
  lamina plan config.json --memory 141GB --gpus 8 --tp 8 --requests 8x1M,256x4K
  lamina plan config.json --cache-bytes 26.09GiB --context 1K --against vllm
  lamina plan config.json --gpu h200 --gpus 8 --what-if draft=3,cache-format=bf16
  lamina plan config.json --json > a.json; lamina plan a.json --diff b.json
  lamina plan config.json --cache-bytes 20GiB --mix agents
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command understands."""
    parser.add_argument(
        "model", metavar="CONFIG_OR_DIR", type=model_path,
        help="a config.json, a directory with one, lamina-tiny, or a plan's JSON with --diff",
    )  # fmt: skip
    _add_machine(parser)
    _add_memory(parser)
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--context", metavar="TOKENS,...", help="lengths to show (default 1K,4K,32K,128K,1M, as far as the model goes)"
    )
    group.add_argument("--requests", metavar="COUNTxTOKENS,...", help="a workload, such as 1x1M,256x4K; says if all fit at once")
    group = parser.add_argument_group("compare")
    group.add_argument("--against", choices=tuple(ENGINES), help="beside another engine's memory for the same model, calculated")
    group.add_argument("--diff", metavar="PLAN", type=Path, help="what another plan (its JSON, or a config) costs more or less")
    group.add_argument(
        "--what-if", action="append", metavar="NAME=VALUE,...",
        help="change one choice after the other (draft=3, cache-format=bf16, tp=2, block-tokens=512, gpu=b200, ...) and say "
        "what each costs, then all together; repeatable",
    )  # fmt: skip
    _add_simulation(parser)
    group = parser.add_argument_group("output (stdout)")
    group.add_argument("--json", action="store_true", help="one JSON object with everything, and nothing else; sizes in bytes")
    group.add_argument("--html", metavar="FILE", type=Path, help="also write one page with pictures, which needs no network")
    add_common(parser)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the machine")
    group.add_argument("--gpu", metavar="NAME", help="h200, h100, a100-80g, l40s, rtx-pro-6000, mi300x, ... (all: below)")
    group.add_argument("--memory", metavar="SIZE", help="memory of one GPU instead, such as 141GB")
    group.add_argument("--cache-bytes", metavar="SIZE", help="plan a pool of this size; GPU and weights do not count then")
    group.add_argument("--gpus", type=int, metavar="N", help="GPUs = tp x dp; alone: tensor parallel over all (default 1)")
    group.add_argument("--tp", type=int, metavar="N", help="GPUs that share each layer's heads")
    group.add_argument("--dp", type=int, metavar="N", help="replicas, each with a pool; `fit` counts them all")
    group.add_argument("--ep", type=int, metavar="N", help="GPUs that whole experts are spread over (default: cut by tp)")
    group.add_argument(
        "--gpu-memory-utilization", default="0.9", metavar="SHARE", help="share of the GPU's memory to use (default 0.9)"
    )
    group.add_argument("--max-step-tokens", type=int, default=8192, metavar="N", help="sizes the workspace (default 8192)")
    group.add_argument("--max-requests", type=int, default=256, metavar="N", help="sizes the logits (default 256)")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the memory")
    group.add_argument(
        "--cache-format", choices=CACHE_FORMATS, metavar="FORMAT",
        help=f"attention entries: {', '.join(CACHE_FORMATS)} (default: the family's)",
    )  # fmt: skip
    group.add_argument(
        "--index-format", choices=INDEX_FORMATS, metavar="FORMAT",
        help=f"index keys: {', '.join(INDEX_FORMATS)} (default: the family's)",
    )  # fmt: skip
    group.add_argument("--block-tokens", metavar="TOKENS", help="native tokens of a block (default: chosen by the layout)")
    group.add_argument("--draft", type=int, default=0, metavar="N", help="tokens drafted ahead, 0 to 7 (default 0)")


def _add_simulation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulate a workload with the real ledger on paper pages")
    group.add_argument("--trace", metavar="FILE", type=Path, help="JSON lines: arrival, prompt_tokens, output_tokens, ...")
    group.add_argument("--mix", choices=tuple(MIXES), help="a workload that is made up: chat, agents or long")
    group.add_argument("--num-requests", type=int, default=1000, metavar="N", help="requests of a mix (default 1000)")
    group.add_argument("--users", type=int, metavar="N", help="sessions of a mix alive at once (default: the mix's)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of a mix (default 0)")
    group.add_argument("--prefill-rate", type=float, default=20_000, metavar="R", help="tokens/s of all prefills (default 20000)")
    group.add_argument("--decode-rate", type=float, default=50, metavar="R", help="tokens/s of each decode (default 50)")


def plan_options(args: argparse.Namespace) -> PlanOptions:
    """The choices that the options make. Raises ConfigError."""
    return PlanOptions(
        gpu=args.gpu,
        memory_bytes=None if args.memory is None else _device_bytes(args.memory),
        cache_bytes=None if args.cache_bytes is None else parse_bytes(args.cache_bytes, "cache-bytes"),
        gpus=args.gpus,
        tp=args.tp,
        ep=args.ep,
        dp=args.dp,
        cache_format=args.cache_format,
        index_format=args.index_format,
        contexts=() if args.context is None else parse_contexts(args.context),
        requests=() if args.requests is None else parse_requests(args.requests),
        block_tokens=None if args.block_tokens is None else parse_tokens(args.block_tokens, "block-tokens"),
        draft_tokens=args.draft,
        gpu_memory_utilization=parse_share(args.gpu_memory_utilization, "gpu-memory-utilization"),
        max_step_tokens=args.max_step_tokens,
        max_requests=args.max_requests,
    )


def run(args: argparse.Namespace) -> int:
    """Plans and prints what was asked for."""
    _check_together(args)
    options, source = plan_options(args), open_source(args.model)
    make_printable(sys.stdout)
    console = make_console(sys.stdout)
    if args.diff is not None:
        other = open_source(args.diff)
        diff = compare_plans(source.facts(options), other.facts(options))
        if args.json:
            print(json.dumps(diff_json(diff), allow_nan=False))
        else:
            print_diff(diff, console, f"{diff.was} -> {diff.now}")
        return 0
    plan = source.plan(options)
    steps = _what_if(source, plan, options, args.what_if or [])
    comparison = compare(plan, args.against) if args.against is not None else None
    report = _simulate(plan, args) if args.trace is not None or args.mix is not None else None
    if args.html is not None:
        write_page(plan, args.html, args.against)
        if (steps or report is not None) and not args.quiet:
            print("the page shows the plan; what --what-if, --mix and --trace say is printed only", file=sys.stderr)
    if args.json:
        print(json.dumps(_all_json(plan, steps, comparison, report), allow_nan=False))
    else:
        _print_all(plan, steps, comparison, report, console)
    if args.html is not None and not args.quiet:
        print(f"wrote {args.html}", file=sys.stderr)
    return 0


def _check_together(args: argparse.Namespace) -> None:
    """Options that exclude each other."""
    if args.trace is not None and args.mix is not None:
        raise ConfigError("mix", args.mix, "left out where --trace is given")
    for name, value, most in (("num-requests", args.num_requests, _MOST_REQUESTS), ("users", args.users, _MOST_USERS)):
        if value is not None and not 1 <= value <= most:
            raise ConfigError(name, value, f"from 1 to {most:,}")
    if args.trace is not None and args.trace.exists() and not args.trace.is_file():
        raise ConfigError("trace", str(args.trace), "a regular file")
    if args.html is not None:
        for name, other in (("model", args.model), ("trace", args.trace)):
            if other is not None and Path(other).exists() and args.html.exists() and args.html.samefile(other):
                raise ConfigError("html", str(args.html), f"another file than {name}")
    others = {"against": args.against, "what-if": args.what_if, "trace": args.trace, "mix": args.mix, "html": args.html}
    for name, value in others.items():
        if args.diff is not None and value is not None:
            raise ConfigError(name, str(value), "left out where --diff is given")


def _device_bytes(text: str) -> int:
    """A GPU's memory. One without a unit is a slip: nobody has a GPU of 80 bytes."""
    found = parse_bytes(text, "memory")
    if found < MiB:
        raise ConfigError("memory", text, "at least 1MiB, with its unit: 80GB")
    return found


_MOST_REQUESTS, _MOST_USERS = 10_000_000, 100_000

# What if -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """A change as it was written, and what it costs; the last of several is all of them together."""

    text: str
    diff: Diff


def _what_if(source: Source, plan: Plan, options: PlanOptions, texts: list[str]) -> list[_Step]:
    """Each change from the state that the ones before it left, then, if there are several, from the first to the last."""
    changes = parse_changes(texts)
    facts = [source.facts(options)] if changes else []
    for change in changes:
        options = change.apply(options)
        facts.append(source.facts(options))
    steps = [_Step(change.text, compare_plans(*facts[n : n + 2])) for n, change in enumerate(changes)]
    if len(changes) > 1:
        steps.append(_Step(f"all {len(changes)} changes", compare_plans(facts[0], facts[-1])))
    return steps


# Simulation ----------------------------------------------------------------------------------------------------------


def _simulate(plan: Plan, args: argparse.Namespace) -> SimulationReport:
    """Runs the trace or mix on one replica's pool."""
    if not plan.pages:
        name = "trace" if args.trace is not None else "mix"
        why = "where the weights leave a pool: a larger --memory, more --gpus, or --cache-bytes for a pool alone"
        raise ConfigError(name, str(args.trace or args.mix), f"usable only {why}")
    settings = Options(
        prefill_rate=args.prefill_rate, decode_rate=args.decode_rate, max_step_tokens=args.max_step_tokens,
        max_requests=args.max_requests,
    )  # fmt: skip
    with _progress(args.quiet) as bar:
        if args.trace is not None:
            read = bar.add_task("reading the trace", total=None)
            requests = read_trace(args.trace, lambda done, total: bar.update(read, completed=done, total=total))
            return run_trace(plan.layout, requests, plan.pages, settings)
        task = bar.add_task("simulating requests", total=args.num_requests)
        requests = make_mix(args.mix, args.seed, args.num_requests, args.users)
        return run_trace(plan.layout, requests, plan.pages, settings, lambda ended, _: bar.update(task, completed=ended))


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    """A bar on stderr that vanishes when it is done; nothing where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()) as bar:
        yield bar


# Output --------------------------------------------------------------------------------------------------------------


def _all_json(
    plan: Plan, steps: list[_Step], comparison: Comparison | None, report: SimulationReport | None
) -> dict[str, object]:
    whole = plan_json(plan)
    if steps:
        whole["what_if"] = [{"change": step.text, **diff_json(step.diff)} for step in steps]
    if comparison is not None:
        whole["against"] = comparison_json(comparison)
    if report is not None:
        whole["simulation"] = report_json(report)
    return whole


def _print_all(
    plan: Plan, steps: list[_Step], comparison: Comparison | None, report: SimulationReport | None, console: Console
) -> None:
    print_plan(plan, console)
    for step in steps:
        console.print()
        console.rule(style="dim")
        print_diff(step.diff, console, f"what if {step.text}")
    if comparison is not None:
        console.print()
        console.print(comparison_table(comparison))
    if report is not None:
        if plan.mesh.dp > 1:
            console.print(f"\nThe workload below runs on one of the {plan.mesh.dp} replicas.")
        for each in table(report):
            console.print()
            console.print(each)
