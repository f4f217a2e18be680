"""A model with its draft blocks over an arena of its own: what a runner does, without a scheduler."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lamina.memory.layout import make_layout
from lamina.models.deepseek_v4_drafts import Ending
from lamina.models.registry import Drafts, blueprint
from lamina.models.tiny import SHAPES
from lamina.runtime.arena import DeviceArena
from lamina.runtime.inputs import BlockTables, step_arrays
from lamina.schedule.step import Slice
from lamina.weights.loader import Checkpoint, read_config

CPU = torch.device("cpu")
MOST = 7
KINDS = {
    "mtp": replace(SHAPES["flash"], ratios=(0, 4, 128, 0), hash_layers=1),
    "dspark": replace(SHAPES["flash"], ratios=(0, 4, 128, 4, 0, 0, 0), hash_layers=1, taps=(1, 2, 3), stages=3),
}


class Listening:
    """An `Ending` that keeps the scores it gives."""

    def __init__(self, inner: Ending) -> None:
        self.inner = inner
        self.seen: list[Tensor] = []

    @property
    def mixer(self) -> object:
        return self.inner.mixer

    def collapse(self, streams: Tensor) -> Tensor:
        return self.inner.collapse(streams)

    def logits(self, collapsed: Tensor) -> Tensor:
        found = self.inner.logits(collapsed)
        self.seen.append(found)
        return found


class Choosing:
    """A block drafter's choice of tokens that keeps how likely each is taken."""

    def __init__(self, inner: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.inner = inner

    def __call__(self, *given: object) -> tuple[Tensor, Tensor]:
        tokens, self.chances = self.inner(*given)
        return tokens, self.chances


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens [start, start + len(ids)) of a request; the last `guesses` of them may be wrong, `counts` rows are right.

    following  the token after them, -1: none.   wanted  drafts.
    """

    request: int
    start: int
    ids: Sequence[int]
    guesses: int = 0
    rejected: int = 0
    following: int = -1
    wanted: int = 0


class Rig:
    """A model with its drafter over an arena of its own: what a runner does, without a scheduler."""

    def __init__(self, directory: Path, cache: str = "fp32", requests: int = 1, blocks: int = 2) -> None:
        plan = blueprint(read_config(directory), cache, "fp32" if cache == "fp32" else "fp4", drafts=Drafts(MOST, True))
        self.layout = make_layout(plan.memories, plan.hidden, None, draft_tokens=MOST)
        self.blocks, self.rings = blocks, plan.rings
        self.arena = DeviceArena(self.layout, requests * (self.layout.slot_pages + blocks), CPU)
        self.arena.bytes.fill_(255)  # NaN in every format
        self.tables = BlockTables(requests, CPU)
        with Checkpoint(directory, plan.names) as checkpoint:
            self.model = plan.load(checkpoint, "fp32", lambda spec: self.arena.store(spec.key, spec.codec))
        self.drafter = self.model.drafter
        self.drafter.least_likely = 0.0
        self.ending = self.drafter.ending = Listening(self.drafter.ending)
        if not self.drafter.keeps_features:
            self.drafter._chosen = Choosing(self.drafter._chosen)
        self.before: dict[int, Tensor] = {}

    def slices(self, parts: Sequence[Part]) -> tuple[Slice, ...]:
        """As the scheduler would say it."""
        size, slices = self.layout.slot_pages + self.blocks, []
        for part in parts:
            own = tuple(range(part.request * size, (part.request + 1) * size))
            slot, table = own[: self.layout.slot_pages], own[self.layout.slot_pages :][::-1]
            stop = part.start + len(part.ids)
            ids = tuple(part.ids)
            slices.append(Slice(part.request, part.start, stop, ids, slot, part.request, 0, table, num_guesses=part.guesses))
        return tuple(slices)

    def step(self, parts: Sequence[Part]) -> list[list[int]]:
        """Runs a step and drafts after it."""
        slices = self.slices(parts)
        tokens, sequences = step_arrays(slices, self.tables, self.model.ratios, self.rings, 8, CPU)
        hidden, features = self.model.forward_with_features(tokens, sequences)
        assert torch.isfinite(hidden).all()
        counts = [len(part.ids) - part.rejected for part in parts]
        width = features.shape[1]
        before = None
        if self.drafter.keeps_features:
            before = torch.stack([self.before.get(part.request, torch.full((width,), torch.nan)) for part in parts])
        self.ending.seen.clear()
        wanted = [part.wanted for part in parts]
        drafts = self.drafter.draft(features, before, tokens, sequences, counts, [part.following for part in parts], wanted)
        for part, piece, count in zip(parts, sequences.pieces, counts, strict=True):
            self.before[part.request] = features[piece.first_row + count - 1]
        return drafts

    def scores(self, request: int = 0) -> np.ndarray:
        """Logits [k, V] behind the drafts of the last step, of the request in that place."""
        if self.drafter.keeps_features:
            return torch.stack([logits[request] for logits in self.ending.seen]).double().numpy()
        (logits,) = self.ending.seen
        size = self.drafter.most_tokens
        return logits[request * size : (request + 1) * size].double().numpy()

    def chances(self, request: int = 0) -> np.ndarray:
        """What the drafter says of each token of that draft [k]."""
        if self.drafter.keeps_features:
            scores = torch.from_numpy(self.scores(request))
            return torch.exp(scores.amax(-1) - scores.logsumexp(-1)).numpy()
        return self.drafter._chosen.chances[request].double().numpy()


def random_ids(length: int, seed: int) -> list[int]:
    return torch.randint(3, 1000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def drafted(rig: Rig, ids: Sequence[int], cuts: Sequence[int], count: int, request: int = 0) -> list[int]:
    """Drafts after `ids`, whose last token is no row of the prompt, cut at `cuts`."""
    length = len(ids) - 1
    drafts: list[int] = []
    for start, stop in zip((0, *cuts), (*cuts, length), strict=True):
        ends = stop == length
        part = Part(request, start, ids[start:stop], following=ids[length] if ends else -1, wanted=count if ends else 0)
        (drafts,) = rig.step([part])
    return drafts
