"""`lamina serve` on a GPU: what the server adds to the engine's own steps, beside Transformers behind the same HTTP layer.

    PYTHONPATH=.:bench python bench/serve_gpu.py [--layers 4 --experts 16 --concurrency 1,8,32,128 --json FILE]
    PYTHONPATH=.:bench python bench/serve_gpu.py --device cpu --shape flash --concurrency 1,4 --output-len 8    # does it run?

A checkpoint of Flash's widths with random weights in the official layout; all servers and the engine alone in one run, in turn,
each round with prompts that nobody has seen; medians of the rounds, the first of which warms up. Load is that of `lamina bench
serve`: so many requests at once, --input-len token ids each, --output-len tokens streamed, greedy.
    server         tokens/s over all; times to the first token and between tokens, as the client sees them
    engine alone   the same requests given to the engine in this process, without texts: tokens/s, mean time of a decode step
    added          the client's mean time for a token beyond that step; `busy` is the share of the time that the server's engine
                   was in steps; cores: processor seconds a second of the server's process, its engine's, this client's
    Transformers   its own DeepSeek-V4 in bf16 with eager attention behind transformers_server.py
"""

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from official_random import flash_config, flash_ratios, write_directory

from lamina import SamplingParams
from lamina.base.config import EngineConfig
from lamina.base.errors import LaminaError
from lamina.cli.bench_client import check_errors
from lamina.cli.bench_data import Job, Wanted, make_jobs
from lamina.cli.bench_figures import Figures, Spread, figures_of
from lamina.cli.bench_run import Load, drive
from lamina.cli.http_client import parse_address
from lamina.engine.engine import Engine
from lamina.models.tiny import SHAPES, write_tiny

_FOLDER = Path(__file__).resolve().parent
_HERTZ = os.sysconf("SC_CLK_TCK")
_RATIOS = (0, 4, 128, 4)
_LOG_LINES = 30


# The checkpoint ---------------------------------------------------------------------------------------------------------


def write_model(directory: Path, args: argparse.Namespace) -> int:
    """Writes it with a tokenizer; gives its vocabulary's size."""
    if args.shape != "wide":
        write_tiny(directory, args.shape)
        return SHAPES[args.shape].vocab
    ratios = _RATIOS if args.layers == len(_RATIOS) else flash_ratios(args.layers)
    values = flash_config(ratios, n_routed_experts=args.experts)
    write_directory(directory, values, device=args.device)
    vocab = int(str(values["vocab_size"]))
    write_tokenizer(directory, vocab)
    return vocab


def write_tokenizer(directory: Path, vocab: int) -> None:
    """The tiny model's, with made-up words between its own and its control tokens."""
    with tempfile.TemporaryDirectory() as root:
        tiny = Path(root) / "tiny"
        write_tiny(tiny)
        spec = json.loads((tiny / "tokenizer.json").read_bytes())
    words, added = spec["model"]["vocab"], spec["added_tokens"]
    old = len(words)
    new = vocab - sum(token["id"] >= old for token in added)
    words |= {f"Ġw{number}": number for number in range(old, new)}
    for token in added:
        token["id"] += new - old if token["id"] >= old else 0
    (directory / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")


# Servers ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs."""

    url: str
    pid: int

    def cpu_seconds(self) -> tuple[float, float]:
        """Processor seconds so far, of the process and of its children."""
        return _cpu_seconds(self.pid), sum(map(_cpu_seconds, _children(self.pid)))

    def engine_seconds(self) -> float:
        """Seconds that its engine has spent in steps; 0 where it does not tell."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics") as response:
                page = response.read().decode()
        except OSError:
            return 0.0
        found = re.findall(r"^lamina_engine_(?:prefill|decode)_seconds_total\S* (\S+)$", page, re.MULTILINE)
        return sum(map(float, found))


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _HERTZ


@contextmanager
def running(name: str, log: Path, *command: str) -> Iterator[Server]:
    """A server, until the end of the `with`. What it writes goes to `log`, whose last lines are shown if anything fails."""
    start = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, *command], stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        while (found := re.search(r"^ready: (http://\S+)$", log.read_text(errors="replace"), re.MULTILINE)) is None:
            if process.poll() is not None:
                raise LaminaError(f"{name} did not start")
            time.sleep(0.1)
        print(f"{name}: ready after {time.perf_counter() - start:.1f} s", flush=True)
        yield Server(found[1], process.pid)
    except BaseException:
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        print(f"{name}'s last lines:", *lines, sep="\n  ", flush=True)
        raise
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


# What is measured ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Round:
    """One round at a server. busy, cores  see above."""

    figures: Figures
    busy: float
    cores: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Alone:
    """The engine without a server. first_ms  median time to the first token."""

    tokens_s: float
    step_ms: float
    first_ms: float


@dataclass(slots=True)
class Cell:
    """All rounds at one concurrency."""

    lamina: list[Round] = field(default_factory=list)
    rival: list[Round] = field(default_factory=list)
    alone: list[Alone] = field(default_factory=list)


def ask(server: Server, jobs: Sequence[Job], concurrency: int) -> Round:
    """All jobs. Raises LaminaError where one fails."""
    load = Load(parse_address(server.url), None, "completions", "tiny", concurrency=concurrency)
    engine, cpu, own = server.engine_seconds(), server.cpu_seconds(), time.process_time()
    results, seconds = asyncio.run(drive(load, jobs))
    own = time.process_time() - own
    after = server.cpu_seconds()
    check_errors(results)
    bad = [result for result in results if not result.is_good]
    if bad:
        raise LaminaError(f"{server.url}: {bad[0].error}: {bad[0].message}")
    time.sleep(0.3)  # the engine's counters come a few times a second
    busy = (server.engine_seconds() - engine) / seconds
    cores = (after[0] - cpu[0]) / seconds, (after[1] - cpu[1]) / seconds, own / seconds
    return Round(figures_of(results, seconds, {}), busy, cores)


def ask_engine(engine: Engine, jobs: Sequence[Job], concurrency: int) -> Alone:
    """The same jobs, `concurrency` of them at a time."""
    total_s, decode_s, steps, tokens = 0.0, 0.0, 0, 0
    firsts: list[float] = []
    for at in range(0, len(jobs), concurrency):
        turns = [job.turns[0] for job in jobs[at : at + concurrency]]
        start = time.perf_counter()
        groups = [
            engine.add(list(turn.ids), SamplingParams(max_tokens=turn.output_len, temperature=0, ignore_eos=True))
            for turn in turns
        ]
        waiting = list(groups)
        while waiting:
            engine.step()
            now = time.perf_counter()
            firsts += [now - start for group in waiting if group.requests[0].num_output]
            waiting = [group for group in waiting if not group.requests[0].num_output]
        begun, least = time.perf_counter(), min(group.requests[0].num_output for group in groups)
        while engine.has_work:
            engine.step()
            engine.news.clear()
        end = time.perf_counter()
        engine.news.clear()
        total_s, decode_s, steps = total_s + end - start, decode_s + end - begun, steps + turns[0].output_len - least
        tokens += sum(turn.output_len for turn in turns)
    return Alone(tokens / total_s, decode_s / max(1, steps) * 1e3, statistics.median(firsts) * 1e3)


def compare(
    args: argparse.Namespace, engine: Engine, lamina: Server, rival: Server | None, vocab: int, facts: dict[str, object]
) -> None:
    """Rounds at each concurrency, each by turns. Prints a row for each and keeps it in --json."""
    for concurrency in map(int, args.concurrency.split(",")):
        cell = Cell()
        for number in range(args.rounds + 1):
            count = concurrency * max(1, 4 // concurrency)
            wanted = Wanted(
                "random", count, args.input_len, args.output_len, 1000 * number + concurrency, as_ids=True, vocab_size=vocab - 20
            )
            jobs = make_jobs(wanted)
            cell.alone.append(ask_engine(engine, jobs, concurrency))
            cell.lamina.append(ask(lamina, jobs, concurrency))
            if rival is not None and number <= args.rival_rounds:
                try:
                    cell.rival.append(ask(rival, jobs, concurrency))
                except LaminaError as error:
                    print(f"{error}; it goes on without Transformers", flush=True)
                    rival = None
        line = show(concurrency, cell)
        if args.json is not None:
            with args.json.open("a") as out:
                out.write(json.dumps({"bench": "serve_gpu", **line, **facts}) + "\n")


def show(concurrency: int, cell: Cell) -> dict[str, object]:
    """Prints one row and gives it as a record."""
    ours, alone = summary(cell.lamina[1:]), cell.alone[1:]
    tokens_s, step_ms, first_ms = (
        statistics.median(values) for values in zip(*((one.tokens_s, one.step_ms, one.first_ms) for one in alone))
    )
    added_ms, share = ours["tpot_ms"] - step_ms, ours["tokens_s"] / tokens_s
    print(
        f"{concurrency:>4} at once | server {ours['tokens_s']:>9,.0f} tokens/s, first {ours['ttft_p50_ms']:,.1f} ms (p99"
        f" {ours['ttft_p99_ms']:,.1f}), between p50 {ours['itl_p50_ms']:.3f} p90 {ours['itl_p90_ms']:.3f} p99"
        f" {ours['itl_p99_ms']:.3f} ms\n"
        f"             | engine alone {tokens_s:>9,.0f} tokens/s, first {first_ms:,.1f} ms, step {step_ms:.3f} ms | server"
        f" {share:.2f}x of it, added {added_ms:+.3f} ms a token | busy {ours['busy']:.0%}, cores {ours['cores_server']:.2f} +"
        f" {ours['cores_engine']:.2f} + {ours['cores_client']:.2f}", flush=True,
    )  # fmt: skip
    found: dict[str, object] = {
        "concurrency": concurrency, **ours, "alone_tokens_s": tokens_s, "alone_step_ms": step_ms, "alone_first_ms": first_ms,
        "share_of_alone": share, "added_ms": added_ms,
    }  # fmt: skip
    if len(cell.rival) > 1:
        theirs = summary(cell.rival[1:])
        ratio, first_ratio = ours["tokens_s"] / theirs["tokens_s"], theirs["ttft_p50_ms"] / ours["ttft_p50_ms"]
        print(
            f"             | Transformers {theirs['tokens_s']:>9,.0f} tokens/s, first {theirs['ttft_p50_ms']:,.1f} ms, between"
            f" p50 {theirs['itl_p50_ms']:.3f} ms | {ratio:.1f}x its tokens/s, first token {first_ratio:.1f}x as soon", flush=True,
        )  # fmt: skip
        found |= {f"rival_{name}": value for name, value in theirs.items()} | {"ratio": ratio, "first_ratio": first_ratio}
    return found


def summary(rounds: Sequence[Round]) -> dict[str, float]:
    """Medians over rounds."""

    def median(values: Iterator[float]) -> float:
        return statistics.median(list(values))

    found = {"tokens_s": median(one.figures.output_tokens / one.figures.duration_s for one in rounds)}
    for name, percentiles in (("ttft", (50, 99)), ("itl", (50, 90, 99))):
        for p in percentiles:
            found[f"{name}_p{p}_ms"] = median(_spread(one, name).percentiles[p] * 1e3 for one in rounds)
    found["tpot_ms"] = median(_spread(one, "tpot").mean * 1e3 for one in rounds)
    found["busy"] = median(one.busy for one in rounds)
    for place, name in enumerate(("server", "engine", "client")):
        found[f"cores_{name}"] = median(one.cores[place] for one in rounds)
    return found


def _spread(one: Round, name: str) -> Spread:
    found = one.figures.spreads[name]
    return Spread(0.0, 0.0, dict.fromkeys((50, 90, 95, 99), 0.0)) if found is None else found


def main() -> None:
    """Makes the checkpoint, starts everything, measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="wide", choices=("wide", *SHAPES), help="wide: Flash's widths; else a tiny model")
    parser.add_argument("--layers", type=int, default=4, help="of the wide shape")
    parser.add_argument("--experts", type=int, default=16, help="of each layer of the wide shape")
    parser.add_argument("--concurrency", default="1,8,32,128")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rival-rounds", type=int, default=1)
    parser.add_argument("--rival-experts", default="grouped_mm", help="Transformers' experts: grouped_mm, batched_mm or eager")
    parser.add_argument("--no-rival", action="store_true", help="Lamina alone")
    parser.add_argument("--cache-bytes", default="4GiB")
    parser.add_argument("--logs", type=Path, help="folder for what the servers write (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="append one JSON line a concurrency to this file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: ended from outside"))  # so that servers end too
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        model, start = Path(folder) / "model", time.perf_counter()
        vocab = write_model(model, args)
        print(f"{name}: checkpoint written in {time.perf_counter() - start:.1f} s", flush=True)
        most = max(map(int, args.concurrency.split(",")))
        config = EngineConfig(
            str(model), device=args.device, cache_bytes=args.cache_bytes, max_requests=most, warmup=False,
            max_model_len=args.input_len + args.output_len + 64,
        )  # fmt: skip
        lamina = stack.enter_context(running(
            "lamina", logs / "serve_lamina.log", "-m", "lamina", "serve", str(model), "--port", "0", "--device", args.device,
            "--served-model-name", "tiny", "--cache-bytes", args.cache_bytes, "--max-requests", str(most), "--max-model-len",
            str(config.max_model_len), "--no-ui",
        ))  # fmt: skip
        rival = None
        if not args.no_rival:
            try:
                rival = stack.enter_context(running(
                    "Transformers", logs / "serve_transformers.log", str(_FOLDER / "transformers_server.py"), str(model),
                    "--random", "--device", args.device, "--experts", args.rival_experts, "--max-batch", str(most),
                ))  # fmt: skip
            except LaminaError as error:
                print(f"{error}; it goes on without Transformers", flush=True)
        start = time.perf_counter()
        engine = Engine(config, has_text=False)
        print(f"engine alone: ready after {time.perf_counter() - start:.1f} s", flush=True)
        facts: dict[str, object] = {
            "device": name, "torch": torch.__version__, "cores": os.cpu_count(), "shape": args.shape, "layers": args.layers,
            "experts": args.experts, "input_len": args.input_len, "output_len": args.output_len, "rounds": args.rounds,
        }  # fmt: skip
        compare(args, engine, lamina, rival, vocab, facts)


if __name__ == "__main__":
    main()
