"""How often a model's own draft blocks say what the model then says, by place in the draft.

    python bench/drafts.py [--model DIR --text FILE | --ids FILE --segments 16 --context 256 --tokens 64 --drafts 4
                            --least-likely 0 --json FILE]

Segments of the text, evenly spread, are read as contexts; then each is gone on with, a token at a time, and a draft is made at
every one. Two ways to go on: the model's own most likely tokens (what a greedy request sees), and the text itself (what one with
other tokens sees; a draft is then held against the model's choice, the first place alone means something).
`given_before`: of the drafts that were right up to there. `tokens_a_step`: what a greedy request gets if every draft is verified.
"""

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from lamina.memory.layout import make_layout
from lamina.models.deepseek_v4 import Model
from lamina.models.files import model_path, read_config, read_file
from lamina.models.registry import Drafts, blueprint
from lamina.models.tensors import open_tensors
from lamina.ops.sequences import Sequences
from lamina.runtime.arena import DeviceArena
from lamina.runtime.inputs import BlockTables, step_arrays
from lamina.schedule.step import Slice

_CPU = torch.device("cpu")
_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Places:
    """right  share of the drafts that were right up to each place.   given  the same of those that were right before it.
    length  mean length of a draft.   milliseconds  of a step of all segments, and of its drafts."""

    way: str
    drafts: int
    length: float
    right: tuple[float, ...]
    given: tuple[float, ...]
    milliseconds: tuple[float, float]

    @property
    def tokens_a_step(self) -> float:
        """Tokens of a step whose drafts are all verified."""
        return 1 + sum(self.right)


class Bench:
    """A model with its draft blocks over an arena of its own, a slot for each segment."""

    def __init__(self, checkpoint: Path, requests: int, tokens: int, drafts: int, cache: str, least: float) -> None:
        self.plan = blueprint(read_config(checkpoint), cache, "auto", drafts=Drafts(drafts, by_model=True))
        self.layout = make_layout(self.plan.memories, self.plan.hidden, None, draft_tokens=drafts)
        self.blocks = -(-tokens // self.layout.block_tokens)
        self.arena = DeviceArena(self.layout, requests * (self.layout.slot_pages + self.blocks), _CPU)
        self.tables = BlockTables(requests, _CPU)
        with open_tensors(checkpoint, self.plan.names) as source:
            model = self.plan.load(source, "fp32", lambda spec: self.arena.store(spec.key, spec.codec))
        assert isinstance(model, Model) and model.drafter is not None
        self.model, drafter = model, model.drafter
        drafter.least_likely = least
        self.drafter, self.wanted = drafter, min(drafts, drafter.most_tokens)
        self.before = torch.zeros(requests, 0)
        self.seconds = [0.0, 0.0]

    def step(self, start: int, parts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor, Sequences]:
        """Rows of each request from `start` on -> the most likely next tokens, and what the drafter is to be given."""
        size, slices = self.layout.slot_pages + self.blocks, []
        for number, ids in enumerate(parts):
            own = tuple(range(number * size, (number + 1) * size))
            slot, table = own[: self.layout.slot_pages], own[self.layout.slot_pages :]
            slices.append(Slice(number, start, start + len(ids), tuple(ids), slot, number, 0, table))
        tokens, sequences = step_arrays(slices, self.tables, self.model.ratios, self.plan.rings, _MULTIPLE, _CPU)
        began = time.perf_counter()
        hidden, features = self.model.forward_with_features(tokens, sequences)
        last = torch.tensor([piece.rows.stop - 1 for piece in sequences.pieces])
        best = self.model.logits(hidden[last]).argmax(-1)
        self.seconds[0] += time.perf_counter() - began
        return best, features, tokens, sequences

    def run(self, segments: Sequence[Sequence[int]], context: int, tokens: int, way: str) -> Places:
        """Goes on with every segment, drafting after each token."""
        num = len(segments)
        said: list[list[int]] = []  # the model's choices, a row a step
        fed: list[list[int]] = []
        drafts: list[list[list[int]]] = []
        start, parts = 0, [list(ids[:context]) for ids in segments]
        self.before = torch.zeros(num, 0)
        for number in range(tokens):
            best, features, rows, sequences = self.step(start, parts)
            following = best.tolist() if way == "greedy" else [ids[context + number] for ids in segments]
            said.append(best.tolist())
            fed.append(following)
            if number == 0:
                self.seconds = [0.0, 0.0]
            began = time.perf_counter()
            counts = [len(ids) for ids in parts]
            before = self.before if number else features[:num]
            drafts.append(self.drafter.draft(features, before, rows, sequences, counts, following, [self.wanted] * num))
            self.seconds[1] += time.perf_counter() - began
            self.before = features[torch.tensor([piece.rows.stop - 1 for piece in sequences.pieces])]
            start += counts[0]
            parts = [[token] for token in following]
        hits = np.zeros(self.wanted, dtype=np.int64)
        count = length = 0
        for number in range(tokens - self.wanted):
            for request in range(num):
                count += 1
                own = drafts[number][request]
                length += len(own)
                for place, token in enumerate(own):
                    if token != said[number + 1 + place][request]:
                        break
                    hits[place] += 1
                    if way == "text":
                        break
        shown = hits if way == "greedy" else hits[:1]
        right = tuple(float(hit) / count for hit in shown)
        given = tuple(float(hit) / max(1, before) for hit, before in zip(shown, (count, *shown[:-1].tolist()), strict=True))
        per_step = tuple(1e3 * seconds / (tokens - 1) for seconds in self.seconds)
        return Places(way, count, length / count, right, given, (per_step[0], per_step[1]))


def read_ids(checkpoint: Path, text: Path | None, ids: Path | None) -> list[int]:
    """Token ids of a text file, by the model's own tokenizer, or of a file of uint16."""
    if ids is not None:
        return np.fromfile(ids, dtype=np.uint16).astype(np.int64).tolist()
    assert text is not None
    raw = read_file(checkpoint, "tokenizer.json")
    assert raw is not None
    found: list[int] = Tokenizer.from_str(raw.decode()).encode(text.read_text(), add_special_tokens=False).ids
    return found


def main() -> None:
    """Prints a line for each way to go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lamina-tiny", help="a checkpoint with draft blocks")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "tests/data/plain_text.txt")
    parser.add_argument("--ids", type=Path, help="token ids as uint16, instead of a text")
    parser.add_argument("--segments", type=int, default=16)
    parser.add_argument("--context", type=int, default=256, help="tokens read before the first draft")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each segment is gone on with")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--least-likely", type=float, default=0.0, help="a draft ends where its chance falls below this")
    parser.add_argument("--cache-format", default="auto")
    parser.add_argument("--ways", default="greedy,text")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    checkpoint = model_path(args.model)
    ids = read_ids(checkpoint, args.text, args.ids)
    length = args.context + args.tokens
    starts = np.linspace(0, len(ids) - length, args.segments).astype(int).tolist()
    segments = [ids[start : start + length] for start in starts]
    torch.set_num_threads(1)
    found = []
    with torch.inference_mode():
        for way in args.ways.split(","):
            bench = Bench(checkpoint, args.segments, length, args.drafts, args.cache_format, args.least_likely)
            places = bench.run(segments, args.context, args.tokens, way)
            found.append(places)
            shares = " ".join(f"{share:.3f}" for share in places.right)
            given = " ".join(f"{share:.3f}" for share in places.given)
            line = f"{way:6} drafts={places.drafts} length={places.length:.2f} right={shares} given_before={given}"
            if way == "greedy":
                line += f" tokens_a_step={places.tokens_a_step:.2f}"
            print(f"{line} | {places.milliseconds[0]:.1f} ms a step, {places.milliseconds[1]:.1f} ms its drafts", flush=True)
    if args.json is not None:
        settings = {"model": str(args.model), "context": args.context, "tokens": args.tokens, "machine": platform.processor()}
        with args.json.open("a") as file:
            for places in found:
                file.write(json.dumps(settings | asdict(places)) + "\n")


if __name__ == "__main__":
    main()
