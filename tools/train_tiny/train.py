"""Trains the small model in three phases, in pieces of any length: `python -m tools.train_tiny.train --data DIR --out DIR`.

Rows of 512 tokens first, then of 2,048, all entries visible; last with weights and memories rounded as they are stored and with
the index's selection. A step is one CUDA graph for each phase. Rates follow the step number alone, so that a piece can go on from
another's weights; what an optimiser remembers is read if it is beside them, else it warms up again.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tools.train_tiny.export import export, load_weights, save_weights
from tools.train_tiny.model import SHAPE, Inputs, Mode, Model
from tools.train_tiny.optimiser import Optimiser
from tools.train_tiny.tasks import Mix, Rows

COURSES = ("first", "second", "third")
WATCHED = ("loss", "text", "answer", "right", "mtp", "draft", "index")
WARM_UP = 0.02  # of all steps; a piece without an optimiser's memory warms up over as many again, at most 50


@dataclass(frozen=True, slots=True)
class Phase:
    """`steps` steps on `rows` rows of `length` tokens."""

    name: str
    steps: int
    rows: int
    length: int
    mode: Mode
    mix: Mix


def phases(course: str, steps: int, tokens: int) -> list[Phase]:
    """The phases of a course, `steps` steps of `tokens` tokens: the "first" from nothing, others from the model before."""
    stored = Mode(quantised=True, topk=SHAPE.index_topk)
    if course == "first":
        short, last = round(0.30 * steps), round(0.15 * steps)
        return [
            Phase("short", short, tokens // 512, 512, Mode(), Mix()),
            Phase("long", steps - short - last, tokens // 2048, 2048, Mode(), Mix()),
            Phase("stored", last, tokens // 2048, 2048, stored, Mix()),
        ]
    if course == "second":
        mix = Mix(text=0.40, recall=0.40, copy=0.05, gist=0.08, other=0.04, story=0.03)
        last, far = round(0.16 * steps), round(0.04 * steps)
    else:
        mix = Mix(
            text=0.31, recall=0.52, copy=0.05, gist=0.06, other=0.03, story=0.03, chat=0.25, single=0.5, completed=0.2,
            varied=0.6, related=0.13, words=0.2, gaps=0.4,
        )  # fmt: skip
        last, far = round(0.20 * steps), round(0.10 * steps)
    return [
        Phase("long", steps - last - far, tokens // 2048, 2048, Mode(), mix),
        Phase("stored", last, tokens // 2048, 2048, stored, mix),
        Phase("far", far, tokens // 8192, 8192, stored, replace(mix, most_facts=1 / 64)),
    ]


def rate(step: int, steps: int, since: int, peak: float) -> float:
    """The share of the usual rate at `step`: linear up to `peak`, cosine down to 0.03. `since`: where the optimiser began."""
    warm = max(1, round(WARM_UP * steps))
    up = min(1.0, (step - since + 1) / (warm if since == 0 else min(50, warm)))
    return up * (0.03 + (peak - 0.03) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def positions(chance: np.random.Generator, rows: int, length: int, gaps: float) -> NDArray[np.int64]:
    """[rows, length] int64: each token's place. In a share `gaps` of the rows they jump once, by 2K to a million.

    What lies before the jump, a multiple of 128, is as far away as in a text of that length, at the price of a short row.
    """
    at = np.tile(np.arange(length, dtype=np.int64), (rows, 1))
    for row in np.flatnonzero(chance.random(rows) < gaps):
        first = int(chance.integers(1, max(length // 128, 2))) * 128
        at[row, first:] += int(2 ** chance.uniform(4, 13)) * 128
    return at


class _Batches(IterableDataset):
    """Endless batches of one phase as tensors, each worker's own."""

    def __init__(self, data: Path, seed: int, phase: Phase) -> None:
        self.data, self.seed, self.phase = data, seed, phase

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        worker = get_worker_info()
        rows = Rows(self.data, self.seed, self.phase.length, self.phase.mix, worker.id if worker else 0)
        chance = np.random.default_rng((self.seed, worker.id if worker else 0))
        probes = self.phase.length // 8
        while True:
            batch = rows.batch(self.phase.rows)
            at = chance.integers(0, self.phase.length, (self.phase.rows, probes))
            for row, asked in enumerate(batch.answer):  # up to half of them where an answer begins or goes on
                places = np.flatnonzero(asked[1:])[: probes // 2]
                at[row, : len(places)] = places
            yield (
                torch.from_numpy(batch.ids.astype(np.int64)),
                torch.from_numpy(positions(chance, self.phase.rows, self.phase.length, self.phase.mix.gaps)),
                torch.from_numpy(batch.weights),
                torch.from_numpy(batch.answer),
                torch.from_numpy(~batch.drop_c4),
                torch.from_numpy(~batch.drop_c128),
                torch.from_numpy(at),
            )


class _Step:
    """One training step of a phase: a CUDA graph on a GPU."""

    def __init__(self, model: Model, optimiser: Optimiser, phase: Phase, first: tuple[Tensor, ...]) -> None:
        self.model, self.optimiser, self.phase = model, optimiser, phase
        device = next(model.parameters()).device
        self.inputs = Inputs(*(tensor.to(device) for tensor in first))
        self.seen = torch.zeros(len(WATCHED), device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            kept = [tensor.detach().clone() for tensor in self._state()]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._run()
            torch.cuda.current_stream().wait_stream(side)
            for parameter in model.parameters():
                parameter.grad = None
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._run()
            for tensor, value in zip(self._state(), kept, strict=True):
                tensor.detach().copy_(value)

    def _state(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers(), *self.optimiser.state()]

    def _run(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        out = self.model(self.inputs, self.phase.mode)
        out["loss"].backward()
        self.optimiser.step()
        self.seen += torch.stack([out[name].detach().float() for name in WATCHED])

    def __call__(self, batch: tuple[Tensor, ...], share: float) -> None:
        held = (
            self.inputs.tokens, self.inputs.positions, self.inputs.weights, self.inputs.answers,
            self.inputs.keep_c4, self.inputs.keep_c128, self.inputs.probes,
        )  # fmt: skip
        for target, value in zip(held, batch, strict=True):
            target.copy_(value, non_blocking=True)
        self.optimiser.rate.fill_(share)
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()


def routes(model: Model, data: Path) -> None:
    """Experts of each token id in the hash-routed layers: distinct pairs, dealt out by frequency so that loads are even."""
    counts = np.bincount(np.fromfile(data / "train.u16", np.uint16), minlength=model.shape.vocab).astype(np.float64) + 1.0
    for layer, name in enumerate(model.routes):
        chance = np.random.default_rng(layer)
        load = np.zeros(model.shape.experts)
        chosen = np.zeros((model.shape.vocab, model.shape.experts_per_token), np.int64)
        for token in np.argsort(-counts, kind="stable"):
            order = np.lexsort((chance.random(model.shape.experts), load))[: model.shape.experts_per_token]
            chosen[token] = chance.permutation(order)
            load[order] += counts[token]
        model.buffer(name).copy_(torch.from_numpy(chosen))


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def text_nats(model: Model, data: Path, mode: Mode, length: int = 2048, most: int = 64) -> float:
    """Mean nats per token over held-out text, rows of `length` tokens."""
    device = next(model.parameters()).device
    ids = np.fromfile(data / "val.u16", np.uint16).astype(np.int64)
    count = min(most, (len(ids) - 1) // length)
    starts = np.linspace(0, len(ids) - 1 - length, count).astype(np.int64)
    total, size = 0.0, 16 if device.type == "cuda" else 1
    for begin in range(0, count, size):
        rows = torch.from_numpy(np.stack([ids[s : s + length + 1] for s in starts[begin : begin + size]])).to(device)
        total += float(model(plain_inputs(rows), mode)["nats"].mean(1).sum())
    return total / count


def plain_inputs(tokens: Tensor) -> Inputs:
    """Rows [B, S + 1] as text, every memory on."""
    rows, device = tokens.shape[0], tokens.device
    on = torch.ones(rows, dtype=torch.bool, device=device)
    return Inputs(
        tokens, torch.arange(tokens.shape[1] - 1, device=device).expand(rows, -1), torch.ones(tokens.shape, device=device),
        torch.zeros(tokens.shape, dtype=torch.bool, device=device), on, on,
        torch.zeros((rows, 1), dtype=torch.int64, device=device),
    )  # fmt: skip


def check(arguments: argparse.Namespace, first: int, plan: list[Phase]) -> None:
    """Raises ValueError, before anything is written, for what cannot be trained."""
    if arguments.steps < 1:
        raise ValueError(f"--steps {arguments.steps}: 1 or more")
    if not 0 <= first < arguments.steps:
        raise ValueError(f"first step {first}: from 0 to {arguments.steps - 1}, as --steps is {arguments.steps}")
    if not plan:
        raise ValueError(f"--phase {arguments.phase}: not a phase of the course {arguments.course}")
    longest = max(phase.length for phase in plan if phase.steps) if any(phase.steps for phase in plan) else 2048
    if arguments.tokens < 1 or arguments.tokens % longest:
        raise ValueError(f"--tokens {arguments.tokens}: a multiple of {longest}, the longest row")
    for name in ("train.u16", "val.u16", "documents.json", "tokenizer.json"):
        if not (arguments.data / name).is_file():
            raise ValueError(f"--data {arguments.data}: no {name}; corpus.py writes it")
    most = int(np.fromfile(arguments.data / "train.u16", np.uint16).max())
    if most >= SHAPE.vocab:
        raise ValueError(f"--data {arguments.data}: token id {most} in train.u16, the model has {SHAPE.vocab} tokens")


def main() -> int:
    """Runs `train`; an error is one line."""
    try:
        return train()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1


def train() -> int:
    """Runs the steps from --first to --last or until --seconds; prints a line every --report steps; writes the checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="directory that corpus.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="directory for weights, log and checkpoint")
    parser.add_argument("--resume", type=Path, help="directory of an earlier piece's weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=7200, help="steps of the whole course (default 7200)")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a step (default 32768)")
    parser.add_argument(
        "--first", type=int, default=None, help="first step of this piece (default: where the resumed piece ended)"
    )
    parser.add_argument("--last", type=int, default=None, help="step before which this piece ends (default: the end)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="wall-clock limit; the piece ends cleanly before it")
    parser.add_argument(
        "--course", choices=COURSES, default="first", help="first: from nothing; second, third: go on from a trained model"
    )
    parser.add_argument("--peak", type=float, default=1.0, help="share of the usual learning rate (default 1)")
    parser.add_argument(
        "--phase", choices=("short", "long", "stored", "far"), help="all steps in this phase of the course, to try one out"
    )
    parser.add_argument(
        "--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes that make rows for each phase (default 2)"
    )
    parser.add_argument("--keep-optimiser", action="store_true", help="also write what the optimiser remembers, for --resume")
    parser.add_argument("--report", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    torch._dynamo.config.cache_size_limit = 64
    torch.backends.cuda.matmul.allow_tf32 = True
    plan = phases(arguments.course, arguments.steps, arguments.tokens)
    if arguments.phase:
        plan = [Phase(p.name, arguments.steps, p.rows, p.length, p.mode, p.mix) for p in plan if p.name == arguments.phase]
    check(arguments, arguments.first or 0, plan)
    device = torch.device(arguments.device)
    model = Model(seed=arguments.seed)
    routes(model, arguments.data)
    first = 0
    if arguments.resume is not None:
        load_weights(model, arguments.resume)
        piece = arguments.resume / "piece.json"
        first = json.loads(piece.read_text())["next"] if piece.exists() else 0
    first = first if arguments.first is None else arguments.first
    model.to(device)
    keys = list(model.stacks)
    optimiser = Optimiser(
        [model.stacks[key] for key in keys if "_muon_" in key], [model.stacks[key] for key in keys if "_muon_" not in key]
    )
    since = first
    memory = None if arguments.resume is None else arguments.resume / "optimiser.pt"
    if memory is not None and memory.exists():
        for target, value in zip(optimiser.state(), torch.load(memory, weights_only=True), strict=True):
            target.copy_(value)
        masters = torch.load(arguments.resume / "masters.pt", weights_only=True)
        with torch.no_grad():
            for key in keys:
                model.stacks[key].copy_(masters[key])
        since = 0
    steps, step = arguments.steps, first
    last = steps if arguments.last is None else min(arguments.last, steps)
    check(arguments, first, plan)
    arguments.out.mkdir(parents=True, exist_ok=True)
    stop = began + arguments.seconds - 12
    ends = list(itertools.accumulate(phase.steps for phase in plan))
    todo = [(phase, end) for phase, end in zip(plan, ends, strict=True) if step < min(end, last) and end - phase.steps < last]
    made = [  # all at once, so that a later phase's are ready when it begins
        iter(
            DataLoader(
                _Batches(arguments.data, arguments.seed * 1009 + step, phase), batch_size=None, num_workers=arguments.workers,
                prefetch_factor=4 if arguments.workers else None, pin_memory=device.type == "cuda",
            )
        )
        for phase, _ in todo
    ]  # fmt: skip
    for (phase, end), batches in zip(todo, made, strict=True):
        run = _Step(model, optimiser, phase, next(batches))
        _say(
            arguments.out,
            {"course": arguments.course, "phase": phase.name, "step": step, "ready_s": round(time.monotonic() - began, 1)},
        )
        reported, since_time = step, time.monotonic()
        while step < min(end, last) and time.monotonic() < stop:
            run(next(batches), rate(step, steps, since, arguments.peak))
            step += 1
            if step - reported >= arguments.report or step == min(end, last):
                values = (run.seen / (step - reported)).tolist()
                run.seen.zero_()
                now = time.monotonic()
                speed = (step - reported) * arguments.tokens / (now - since_time)
                line = {"phase": phase.name, "step": step, "s": round(now - began, 1), "tokens_per_s": round(speed)}
                _say(arguments.out, line | {name: round(value, 4) for name, value in zip(WATCHED, values, strict=True)})
                if not math.isfinite(values[0]):
                    print("the loss is not finite: stopped; the weights of the last piece are as they were", file=sys.stderr)
                    return 1
                reported, since_time = step, now
        del run  # and its graph's memory
        save_weights(model, arguments.out)  # a machine may be taken away
        if time.monotonic() >= stop:
            break
    save_weights(model, arguments.out)
    if arguments.keep_optimiser:
        torch.save(optimiser.state(), arguments.out / "optimiser.pt")
        torch.save({key: model.stacks[key].detach() for key in keys}, arguments.out / "masters.pt")
    (arguments.out / "piece.json").write_text(json.dumps({"next": step, "steps": steps}) + "\n")
    export(model, Tokenizer.from_file(str(arguments.data / "tokenizer.json")), arguments.out / "checkpoint")
    stored = Mode(quantised=True, topk=SHAPE.index_topk)
    most = 64 if device.type == "cuda" else 2  # a row takes seconds on a CPU
    line = {"step": step, "held_out_nats": round(text_nats(model, arguments.data, Mode(), most=most), 4)}
    line |= {"as_stored": round(text_nats(model, arguments.data, stored, most=most), 4), "rows": most}
    line |= {"s": round(time.monotonic() - began, 1)}
    _say(arguments.out, line)
    return 0


def _say(out: Path, line: dict[str, object]) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    with (out / "log.jsonl").open("a") as file:
        file.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
