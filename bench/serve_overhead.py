"""What the server itself costs: Lamina's, with a model that takes no time, beside a bare echo server on the same stack.

`PYTHONPATH=. python bench/serve_overhead.py`. Bars: at least 0.4 of the echo's requests/s, 0.5 of its streamed tokens/s, and at
half of Lamina's requests/s a p99 of at most twice the echo's. Requests are chats with a short message and a streamed answer; the
worst case, an answer of one token in one piece, is shown beside them. Rounds alternate between the two; ratios are medians.
Processor time of a request or token: the server's process, its engine's, this one's.
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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lamina.cli.bench_client import check_errors
from lamina.cli.bench_data import Job, Turn
from lamina.cli.bench_figures import percentile
from lamina.cli.bench_run import Load, drive
from lamina.cli.http_client import parse_address
from lamina.models.tiny import write_tiny

_FOLDER = Path(__file__).resolve().parent
_TOKENS = 32
_SETTLE_S = 6.0  # the engine's process imports its grammar library in the seconds after its start
_MESSAGE = "Say something about memory, please."
_HERTZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs. engine  its engine's process, 0 where it has none."""

    name: str
    url: str
    pid: int
    engine: int

    def cpu_seconds(self) -> tuple[float, float]:
        """Processor seconds so far, of the server and of its engine."""
        return _cpu_seconds(self.pid), _cpu_seconds(self.engine) if self.engine else 0.0


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / _HERTZ


@contextmanager
def running(name: str, *command: str) -> Iterator[Server]:
    """A server, until the end of the `with`."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if not words:
            raise SystemExit(f"error: {name} did not start")
        yield Server(name, words[1], process.pid, int(words[2]) if len(words) > 2 else 0)
    finally:
        process.terminate()
        process.wait(20)


@dataclass(frozen=True, slots=True)
class Measured:
    """One round. rate  requests or tokens a second; times in seconds; cpu  processor seconds of server, engine and client."""

    rate: float
    p50_s: float
    p99_s: float
    first_p50_s: float
    cpu: tuple[float, float, float]


def measure(server: Server, load: Load, count: int, tokens: int, counts_tokens: bool = False) -> Measured:
    """Sends `count` requests of so many tokens each."""
    jobs = [Job("", (Turn(_MESSAGE, (), tokens),))] * count
    before = (*server.cpu_seconds(), time.process_time())
    results, seconds = asyncio.run(drive(load, jobs))
    after = (*server.cpu_seconds(), time.process_time())
    check_errors(results)
    bad = [result for result in results if not result.is_good]
    if bad:
        raise SystemExit(f"error: {len(bad)} of {count} requests failed at {server.name}: {bad[0].error}: {bad[0].message}")
    times = sorted(result.total_s for result in results)
    firsts = sorted(result.first_s or 0.0 for result in results)
    total = count * tokens if counts_tokens else count
    server_s, engine_s, client_s = ((late - early) / total for early, late in zip(before, after, strict=True))
    cpu = server_s, engine_s, client_s
    return Measured(total / seconds, percentile(times, 50), percentile(times, 99), percentile(firsts, 50), cpu)


def main() -> int:
    """Prints all figures; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1_500, help="of a round")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--streams", type=int, default=128, help="of a round")
    parser.add_argument("--stream-tokens", type=int, default=256)
    parser.add_argument("--json", type=Path, help="append a line to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        write_tiny(model)
        with (
            running("echo", str(_FOLDER / "echo_server.py")) as echo,
            running("lamina", str(_FOLDER / "instant_server.py"), str(model)) as lamina,
        ):
            return compare(args, echo, lamina)


def compare(args: argparse.Namespace, echo: Server, lamina: Server) -> int:
    """Rounds of each kind, each server in turn."""
    extra = (("chat_template_kwargs", {"thinking": False}),)
    loads = {
        server.name: Load(parse_address(server.url), None, "chat", "tiny", concurrency=args.concurrency, extra=extra)
        for server in (echo, lamina)
    }
    whole = {name: replace(load, is_streamed=False) for name, load in loads.items()}
    servers = (echo, lamina)
    time.sleep(_SETTLE_S)
    for server in servers:
        measure(server, whole[server.name], 200, 1)
        measure(server, loads[server.name], 32, 64)
    rows: dict[str, list[dict[str, Measured]]] = {}

    def rounds(kind: str, run: Callable[[Server], Measured]) -> list[dict[str, Measured]]:
        rows[kind] = [
            {server.name: run(server) for server in (servers if number % 2 else servers[::-1])} for number in range(args.rounds)
        ]
        return rows[kind]

    requests = rounds(
        f"requests/s, {_TOKENS} streamed tokens", lambda server: measure(server, loads[server.name], args.requests // 2, _TOKENS)
    )
    streams = rounds(
        f"streamed tokens/s, {args.stream_tokens} a request",
        lambda server: measure(server, loads[server.name], args.streams, args.stream_tokens, True),
    )
    half = statistics.median(round["lamina"].rate for round in requests) / 2
    paced = {name: replace(load, concurrency=None, rate=half) for name, load in loads.items()}
    latency = rounds(
        f"latency of {_TOKENS} streamed tokens, {half:,.0f} requests/s",
        lambda server: measure(server, paced[server.name], args.requests // 2, _TOKENS),
    )
    short = rounds("requests/s, 1 token, not streamed", lambda server: measure(server, whole[server.name], args.requests, 1))
    half = statistics.median(round["lamina"].rate for round in short) / 2
    paced_short = {name: replace(load, concurrency=None, rate=half) for name, load in whole.items()}
    short_latency = rounds(
        f"latency of 1 token, not streamed, {half:,.0f} requests/s",
        lambda server: measure(server, paced_short[server.name], args.requests // 2, 1),
    )
    for kind, found in rows.items():
        print_row(kind, found)
    ratios = {
        "requests": statistics.median(one["lamina"].rate / one["echo"].rate for one in requests),
        "tokens": statistics.median(one["lamina"].rate / one["echo"].rate for one in streams),
        "p99": statistics.median(one["lamina"].p99_s / one["echo"].p99_s for one in latency),
        "requests of 1 token": statistics.median(one["lamina"].rate / one["echo"].rate for one in short),
        "p99 of 1 token": statistics.median(one["lamina"].p99_s / one["echo"].p99_s for one in short_latency),
    }
    bars = {"requests": ratios["requests"] >= 0.4, "tokens": ratios["tokens"] >= 0.5, "p99": ratios["p99"] <= 2.0}
    texts = {"requests": "at least 0.40", "tokens": "at least 0.50", "p99": "at most 2.00"}
    for name, ratio in ratios.items():
        print(f"{name:<20} {ratio:5.2f}" + (f"  {texts[name]}: {'kept' if bars[name] else 'MISSED'}" if name in bars else ""))
    if args.json is not None:
        line = {
            "bench": "serve_overhead", "time": int(time.time()), "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(), "python": platform.python_version(), "load_average": os.getloadavg()[0], "ratios": ratios,
            "concurrency": args.concurrency, "rounds": args.rounds,
            "medians": {kind: {name: _median(found, name) for name in ("echo", "lamina")} for kind, found in rows.items()},
        }  # fmt: skip
        with args.json.open("a") as out:
            out.write(json.dumps(line) + "\n")
    return 0 if all(bars.values()) else 1


def _median(found: list[dict[str, Measured]], name: str) -> dict[str, float]:
    ones = [one[name] for one in found]
    return {
        "rate": statistics.median(one.rate for one in ones), "p50_ms": statistics.median(one.p50_s for one in ones) * 1e3,
        "p99_ms": statistics.median(one.p99_s for one in ones) * 1e3,
        "first_p50_ms": statistics.median(one.first_p50_s for one in ones) * 1e3,
        "server_cpu_us": statistics.median(one.cpu[0] for one in ones) * 1e6,
        "engine_cpu_us": statistics.median(one.cpu[1] for one in ones) * 1e6,
        "client_cpu_us": statistics.median(one.cpu[2] for one in ones) * 1e6,
    }  # fmt: skip


def print_row(kind: str, found: list[dict[str, Measured]]) -> None:
    """Both servers' medians of one kind, with the spread of the rounds."""
    print(kind)
    for name in ("echo", "lamina"):
        one = _median(found, name)
        rates = [round[name].rate for round in found]
        cpu = f"processor {one['server_cpu_us']:,.0f} + {one['engine_cpu_us']:,.0f} + {one['client_cpu_us']:,.0f} us each"
        print(
            f"  {name:<7} {one['rate']:>9,.0f}/s ({min(rates):,.0f}-{max(rates):,.0f})   p50 {one['p50_ms']:,.2f} ms   "
            f"p99 {one['p99_ms']:,.2f} ms   {cpu}"
        )


if __name__ == "__main__":
    sys.exit(main())
