"""Tokens/s of one engine with and without drafts: none, lookup, and the checkpoint's own draft blocks, same prompts, same run.

    python bench/draft_modes.py [--model DIR --text FILE | --ids FILE --modes none,lookup:4,mtp:1,mtp:2,mtp:4 --device auto
                                 --requests 4 --together 1 --context 256 --tokens 96 --rounds 3 --json FILE]

Prompts are segments of the text, and, as agents copy a lot, segments followed by their own beginning once more (`again`). Rounds
take turns between the modes; figures are medians. Greedy answers must be the same in every mode, or the run ends with an error.
`cpu ms a token` is processor time of this process, which other programs disturb less than the clock.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from drafts import read_ids

from lamina import LLM, SamplingParams
from lamina.models.files import model_path


@dataclass(frozen=True, slots=True)
class Figures:
    """One mode on one kind of prompts.   accepted  of the drafted tokens.   by_place  right drafts by their place."""

    mode: str
    prompts: str
    tokens_a_step: float
    drafted: int
    accepted: int
    by_place: tuple[int, ...]
    tokens_per_s: float
    cpu_ms_a_token: float


class Mode:
    """An engine with one way to draft."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        kind, _, tokens = name.partition(":")
        self.llm = LLM(
            args.model, draft=kind, draft_tokens=int(tokens) if tokens else None, device=args.device, cache_bytes=args.cache_bytes
        )
        self.seconds: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}
        self.answers: dict[str, list[tuple[int, ...]]] = {}
        self.steps: dict[str, int] = {}
        self.counts: dict[str, tuple[int, int, tuple[int, ...]]] = {}

    def run(self, kind: str, prompts: Sequence[list[int]], tokens: int, together: int) -> None:
        """All prompts, so many at a time; every prompt is cold."""
        engine = self.llm.engine
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        counts = engine.scheduler.guesses.counts
        before = (engine.scheduler.num_steps, counts.tokens, counts.accepted, [*counts.by_place])
        found: list[tuple[int, ...]] = []
        wall, cpu = 0.0, 0.0
        for first in range(0, len(prompts), together):
            some = prompts[first : first + together]
            self.llm.generate(some, SamplingParams(max_tokens=1, temperature=0))  # what is timed is decoding, from full hits
            start, own = time.perf_counter(), time.process_time()
            outputs = self.llm.generate(some, params)
            wall += time.perf_counter() - start
            cpu += time.process_time() - own
            found += [tuple(output.outputs[0].token_ids) for output in outputs]
        made = sum(map(len, found))
        self.seconds.setdefault(kind, []).append(made / wall)
        self.cpu.setdefault(kind, []).append(1e3 * cpu / made)
        self.answers[kind] = found
        prompt_steps = -(-len(prompts) // together)
        self.steps[kind] = engine.scheduler.num_steps - before[0] - prompt_steps
        places = tuple(now - old for now, old in zip(counts.by_place, before[3] or [0] * len(counts.by_place), strict=True))
        self.counts[kind] = (counts.tokens - before[1], counts.accepted - before[2], places)

    def figures(self, kind: str, together: int) -> Figures:
        """Medians over the rounds; counts of the last."""
        made = sum(map(len, self.answers[kind]))
        drafted, accepted, by_place = self.counts[kind]
        return Figures(
            self.name, kind, made / together / self.steps[kind], drafted, accepted, by_place,
            statistics.median(self.seconds[kind]), statistics.median(self.cpu[kind]),
        )  # fmt: skip


def main() -> None:
    """Prints a line for each mode and kind of prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lamina-tiny")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "tests/data/plain_text.txt")
    parser.add_argument("--ids", type=Path, help="token ids as uint16, instead of a text")
    parser.add_argument("--modes", default="none,lookup:4,mtp:1,mtp:2,mtp:4")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache-bytes", default="256MiB")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--together", type=int, default=1, help="requests that run at once")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ids = read_ids(model_path(args.model), args.text, args.ids)
    starts = np.linspace(0, len(ids) - args.context, args.requests).astype(int).tolist()
    segments = [ids[start : start + args.context] for start in starts]
    kinds = {"text": segments, "again": [segment + segment[: args.context // 2] for segment in segments]}
    modes = [Mode(name, args) for name in args.modes.split(",")]
    for mode in modes:
        mode.run("text", segments[:1], 8, 1)  # first runs compile
        mode.seconds.clear()
        mode.cpu.clear()
    for _ in range(args.rounds):
        for kind, prompts in kinds.items():
            for mode in modes:
                mode.run(kind, prompts, args.tokens, args.together)
    for kind in kinds:
        base = modes[0].figures(kind, args.together)
        for mode in modes:
            if mode.answers[kind] != modes[0].answers[kind]:
                raise SystemExit(f"{mode.name} gave other answers than {modes[0].name}")
            one = mode.figures(kind, args.together)
            share = one.accepted / max(1, one.drafted)
            print(
                f"{kind:5} {mode.name:8} tokens_a_step={one.tokens_a_step:.2f} drafted={one.drafted} accepted={share:.2f} "
                f"{one.tokens_per_s:7.1f} tokens/s ({one.tokens_per_s / base.tokens_per_s:.2f}x)  "
                f"cpu {one.cpu_ms_a_token:.2f} ms a token ({base.cpu_ms_a_token / one.cpu_ms_a_token:.2f}x)", flush=True,
            )  # fmt: skip
            if args.json is not None:
                settings = {"model": args.model, "device": args.device, "together": args.together, "cpu": platform.processor()}
                with args.json.open("a") as file:
                    file.write(json.dumps(settings | asdict(one)) + "\n")


if __name__ == "__main__":
    main()
