"""`lamina bench serve`: how fast a server answers, and how that is distributed."""

import argparse
import asyncio
import importlib.util
import math
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lamina.base.errors import ConfigError, LaminaError
from lamina.cli.bench_data import DATASETS, Wanted, make_jobs, sample_text
from lamina.cli.formatter import make_printable
from lamina.cli.http_client import Client, ServerError, parse_address, read_key
from lamina.cli.options import add_common

_POLL_S = 0.25
_LISTEN_S = 3.0
DESCRIPTION = """\
Measures a server of OpenAI's protocol, Lamina's or another: time to first token (TTFT), time per
output token (TPOT), gaps between chunks (ITL), time to the end, throughput, goodput, cached tokens
and errors by kind, under the names of `vllm bench serve`. Answers have exactly the lengths that were
asked for (ignore_eos).

random         prompts that share nothing; as token ids with --endpoint completions, else words
sharegpt-like  lengths spread as people's are: most short, a few long
agents         conversations that begin with the same long system message (--input-len) and grow by
               --turns turns; each sends all that came before, so a prefix cache can show itself

It runs in one process on one core and can drive some 2,500 short requests or 50,000 chunks a second; beyond
that it measures itself: use several.
"""
EPILOG = """\
Examples:
  lamina bench serve http://127.0.0.1:8000 --concurrency 8 --num-prompts 64
  lamina bench serve http://127.0.0.1:8000 --dataset agents --rate 2 --goodput ttft:500ms,tpot:50ms --json out.json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command understands."""
    parser.add_argument("what", metavar="serve", choices=("serve",), help="what is measured: a server")
    parser.add_argument("url", metavar="URL", help="its address, such as http://127.0.0.1:8000")
    group = parser.add_argument_group("load")
    names = ", ".join(DATASETS)
    group.add_argument("--dataset", choices=DATASETS, default="random", metavar="NAME", help=f"{names} (default random)")
    group.add_argument("--num-prompts", type=int, default=100, metavar="N", help="requests, all turns counted (default 100)")
    group.add_argument(
        "--rate", type=float, default=math.inf, metavar="R",
        help="requests (agents: conversations) that begin in a second, a Poisson process; inf: all at once (default inf)",
    )  # fmt: skip
    group.add_argument("--concurrency", type=int, metavar="N", help="most requests in flight (default: no limit)")
    group.add_argument(
        "--wait", type=float, default=600.0, metavar="SECONDS",
        help="how long to wait for a server that loads its model; 0: not at all (default 600)",
    )  # fmt: skip
    group.add_argument("--warmup", type=int, default=0, metavar="N", help="requests before, which do not count (default 0)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default 0)")
    group = parser.add_argument_group("lengths, in tokens")
    group.add_argument("--input-len", type=int, metavar="N", help="prompt (default 512; sharegpt-like: median 90; agents: 1024)")
    group.add_argument("--output-len", type=int, metavar="N", help="answer (default 128; sharegpt-like: median 150; agents: 64)")
    group.add_argument("--spread", type=float, default=0.0, metavar="S", help="lengths differ by up to this share (default 0)")
    group.add_argument("--turns", type=int, default=4, metavar="N", help="of a conversation of agents (default %(default)s)")
    group.add_argument("--turn-len", type=int, default=64, metavar="N", help="each question of agents (default %(default)s)")
    group.add_argument(
        "--vocab-size", type=int, default=1000, metavar="N", help="token ids are drawn below it (default %(default)s)"
    )
    group = parser.add_argument_group("requests")
    group.add_argument("--endpoint", choices=("completions", "chat"), metavar="NAME", help="completions, chat (default: by data)")
    group.add_argument("--model", metavar="NAME", help="which of the server's models (default: its first)")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="the key to give; also LAMINA_API_KEY (default: none)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of sampling (default 0)")
    group.add_argument("--extra-body", metavar="JSON", help="an object with fields that every request has besides")
    group.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="of one request, in seconds (default 3600)")
    group = parser.add_argument_group("result")
    group.add_argument("--goodput", metavar="LIMITS", help="counts requests that keep all of, e.g., ttft:500ms,tpot:50ms,e2el:2s")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the figures, too; - is stdout, and then nothing else is")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if any request failed."""
    if importlib.util.find_spec("httptools") is None:
        raise ConfigError("bench", "without httptools", "pip install 'lamina[serve]'")
    from lamina.cli.bench_client import Result, check_errors
    from lamina.cli.bench_figures import figures_of, lines_of, parse_goodput, to_json
    from lamina.cli.bench_run import Load, drive

    make_printable(sys.stdout)
    _check(args)
    limits = parse_goodput(args.goodput)
    address, key = parse_address(args.url), read_key(args.api_key_file)
    endpoint = args.endpoint or ("completions" if args.dataset == "random" else "chat")
    as_ids = endpoint == "completions"
    console = Console(stderr=True, highlight=False)
    with closing(Client(address, key)) as client:
        wait_until_ready(client, args.wait, console, args.quiet)
        names = [model.id for model in client.models()]
        if not names or (args.model is not None and args.model not in names):
            raise ConfigError("model", args.model, f"one of {', '.join(names)}" if names else "a model, and the server has none")
        model = args.model or names[0]
        count = None if as_ids else client.count_tokens(sample_text(), model)
    wanted = Wanted(
        args.dataset, args.num_prompts, args.input_len, args.output_len, args.seed, args.spread, args.turns, args.turn_len,
        as_ids, args.vocab_size, count / len(sample_text().split()) if count else 1.3,
    )  # fmt: skip
    jobs = make_jobs(wanted)
    load = Load(
        address, key, endpoint, model, args.rate, args.concurrency, args.seed, args.temperature, timeout_s=args.timeout,
        extra=_extra(args.extra_body),
    )  # fmt: skip
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=args.quiet or not sys.stderr.isatty()) as bar:
        if args.warmup:
            warm = make_jobs(replace(wanted, num_prompts=args.warmup, seed=args.seed + 1_000_003))
            task = bar.add_task("warming up", total=args.warmup)
            done, _ = asyncio.run(drive(replace(load, rate=math.inf), warm, lambda _: bar.advance(task)))
            check_errors(done)
        task = bar.add_task("requests", total=args.num_prompts)
        failed = 0

        def show(result: Result) -> None:
            nonlocal failed
            failed += not result.is_good
            bar.update(task, advance=1, description="requests" + f" ({failed} failed)" * bool(failed))

        results, duration_s = asyncio.run(drive(load, jobs, show))
    figures = figures_of(results, duration_s, limits)
    if args.json is not None:
        settings: dict[str, object] = {
            "url": str(address), "model": model, "dataset": args.dataset, "endpoint": endpoint, "num_prompts": args.num_prompts,
            "request_rate": "inf" if math.isinf(args.rate) else args.rate, "max_concurrency": args.concurrency, "seed": args.seed,
            "input_len": args.input_len, "output_len": args.output_len,
        }  # fmt: skip
        text = msgspec.json.format(msgspec.json.encode(settings | to_json(figures))) + b"\n"
        if str(args.json) == "-":
            print(text.decode(), end="")
        else:
            args.json.write_bytes(text)
    if str(args.json) != "-":
        print(*lines_of(figures, args.rate, args.concurrency), sep="\n")
    check_errors(results)
    return 1 if figures.failed else 0


def _extra(text: str | None) -> tuple[tuple[str, object], ...]:
    """The fields of --extra-body. Raises ConfigError."""
    if text is None:
        return ()
    try:
        return tuple(msgspec.json.decode(text, type=dict[str, object]).items())
    except msgspec.DecodeError as error:
        raise ConfigError("extra_body", text, f"a JSON object ({error})") from None


def wait_until_ready(client: Client, wait_s: float, console: Console, is_quiet: bool) -> None:
    """Returns when the server takes requests, or at once if wait_s is 0. Raises LaminaError after so many seconds.

    A server listens before it loads; so an address where nobody does is given a moment, for one that was started just now.
    """
    start = time.monotonic()
    text = f"waiting for {client.address}: it loads its model"
    with console.status(text) if console.is_terminal and not is_quiet else nullcontext():
        is_said = is_quiet or console.is_terminal
        while wait_s:
            waited_s = time.monotonic() - start
            try:
                if client.is_ready():
                    return
            except ServerError:
                if waited_s > min(wait_s, _LISTEN_S):
                    raise
            else:
                if not is_said:
                    console.print(text, soft_wrap=True)
                    is_said = True
            if waited_s > wait_s:
                raise LaminaError(f"{client.address} was not ready within --wait {wait_s:g} s: it answers /ready with 503")
            time.sleep(min(_POLL_S, wait_s))


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for a number that makes no sense."""
    most = 1 << 31
    for name in ("num_prompts", "concurrency", "input_len", "output_len", "turns", "turn_len"):
        value = vars(args)[name]
        if value is not None and not 1 <= value < most:
            raise ConfigError(name, value, "an integer of at least 1")
    if not 0 <= args.wait < most:
        raise ConfigError("wait", args.wait, "a number of seconds from 0")
    if args.warmup < 0:
        raise ConfigError("warmup", args.warmup, "an integer of at least 0")
    if not args.rate > 0:
        raise ConfigError("rate", args.rate, "a number above 0, or inf")
    if not 0 <= args.spread < 1:
        raise ConfigError("spread", args.spread, "a number from 0 to below 1")
    if not args.timeout > 0:
        raise ConfigError("timeout", args.timeout, "a number above 0")
    if args.dataset == "agents" and args.endpoint == "completions":
        raise LaminaError("agents are conversations: --endpoint chat")
