"""`lamina serve` beside Transformers behind the same HTTP layer: tokens/s, time to first token, and the second turn of a chat.

    PYTHONPATH=. python bench/serve_against_transformers.py [--concurrency 1,8,32 --input-len 512 --output-len 32 --json FILE]

The same checkpoint (the tiny model `bench`), the same machine, one run, rounds in turn; both compute and keep everything in
fp32, greedy. Transformers' server (transformers_server.py) joins what waits into one batch of equal lengths and keeps nothing
between requests, as `generate` does. The second turn: a system message of --system-len tokens and a question; then all of it
again with the answer and another question, one conversation at a time; what is compared is the time to its first token.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from lamina.cli.bench_client import Result, check_errors
from lamina.cli.bench_data import Job, Wanted, make_jobs
from lamina.cli.bench_figures import Figures, figures_of
from lamina.cli.bench_run import Load, drive
from lamina.cli.http_client import Client, parse_address
from lamina.models.tiny import write_tiny

_FOLDER = Path(__file__).resolve().parent


@contextmanager
def running(*command: str) -> Iterator[str]:
    """The address of a server that runs until the end of the `with`."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready: "):
                yield line.removeprefix("ready: ").strip()
                return
        raise SystemExit(f"error: {command[0]} did not start")
    finally:
        process.terminate()
        process.wait(30)


def send(load: Load, jobs: Sequence[Job]) -> tuple[list[Result], Figures]:
    """All jobs; exits where one fails."""
    results, seconds = asyncio.run(drive(load, jobs))
    check_errors(results)
    bad = [result for result in results if not result.is_good]
    if bad:
        raise SystemExit(f"error: {load.address}: {bad[0].error}: {bad[0].message}")
    return results, figures_of(results, seconds, {})


def main() -> None:
    """Prints one line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--system-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="append a line for each figure to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "bench"
        write_tiny(model, shape="bench", seed=0, file_format="transformers")
        flags = ("--port", "0", "--served-model-name", "tiny", "--cache-format", "fp32", "--index-format", "fp32", "--quiet")
        with (
            running("-m", "lamina", "serve", str(model), *flags) as ours,
            running(str(_FOLDER / "transformers_server.py"), str(model)) as theirs,
        ):
            compare(args, {"lamina": ours, "transformers": theirs})


def compare(args: argparse.Namespace, urls: dict[str, str]) -> None:
    """Rounds of each figure, each server in turn; the first round warms up."""
    lines = []
    for concurrency in map(int, args.concurrency.split(",")):
        found: dict[str, list[Figures]] = {name: [] for name in urls}
        for number in range(args.rounds + 1):
            count = max(concurrency, 2)
            jobs = make_jobs(Wanted("random", count, args.input_len, args.output_len, number, as_ids=True))
            for name, url in urls.items():
                load = Load(parse_address(url), None, "completions", "tiny", concurrency=concurrency)
                found[name].append(send(load, jobs)[1])
        rates = {name: statistics.median(one.output_tokens / one.duration_s for one in ones[1:]) for name, ones in found.items()}
        totals = {
            name: statistics.median((one.input_tokens + one.output_tokens) / one.duration_s for one in ones[1:])
            for name, ones in found.items()
        }
        firsts = {name: statistics.median(_first_ms(one) for one in ones[1:]) for name, ones in found.items()}
        lines += [
            line("output tokens/s", concurrency, rates, False), line("all tokens/s", concurrency, totals, False),
            line("first token, ms", concurrency, firsts, True),
        ]  # fmt: skip
    lines += second_turn(args, urls)
    if args.json is not None:
        facts = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__, "load": os.getloadavg()[0]}
        with args.json.open("a") as out:
            for one in lines:
                out.write(json.dumps({"bench": "serve_against_transformers", **one, **facts}) + "\n")


def second_turn(args: argparse.Namespace, urls: dict[str, str]) -> list[dict[str, object]]:
    """Times to the first token of the first and the second turn of a conversation, alone on the server."""
    firsts: dict[str, list[float]] = {name: [] for name in urls}
    seconds: dict[str, list[float]] = {name: [] for name in urls}
    with_client = Client(parse_address(urls["lamina"]))
    sample = "the of and to in is that it was for on are as with his they at be this from"
    per_word = (with_client.count_tokens(sample, "tiny") or 26) / len(sample.split())
    with_client.close()
    for number in range(args.rounds + 1):
        wanted = Wanted("agents", 2, args.system_len, args.output_len, number, turns=2, tokens_per_word=per_word)
        for name, url in urls.items():
            extra = (("chat_template_kwargs", {"thinking": False}),)
            load = Load(parse_address(url), None, "chat", "tiny", concurrency=1, extra=extra)
            results, _ = send(load, make_jobs(wanted))
            firsts[name].append((results[0].first_s or 0.0) * 1e3)
            seconds[name].append((results[1].first_s or 0.0) * 1e3)
    return [
        line("first turn's first token, ms", 1, {name: statistics.median(ones[1:]) for name, ones in firsts.items()}, True),
        line("second turn's first token, ms", 1, {name: statistics.median(ones[1:]) for name, ones in seconds.items()}, True),
    ]


def line(what: str, concurrency: int, values: dict[str, float], is_time: bool) -> dict[str, object]:
    """Prints one figure; ratio above 1: Lamina is faster."""
    ratio = values["transformers"] / values["lamina"] if is_time else values["lamina"] / values["transformers"]
    print(
        f"{what:<30} at {concurrency:>2} | Lamina {values['lamina']:>9,.1f} | Transformers {values['transformers']:>9,.1f} | "
        f"{ratio:.2f}x", flush=True,
    )  # fmt: skip
    return {"what": what, "concurrency": concurrency, **values, "ratio": ratio}


def _first_ms(figures: Figures) -> float:
    spread = figures.spreads["ttft"]
    return 0.0 if spread is None else spread.percentiles[50] * 1e3


if __name__ == "__main__":
    main()
