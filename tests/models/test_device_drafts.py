"""Draft blocks by the kernels of a GPU against those of a CPU: on a GPU if there is one, else in Triton's interpreter."""

import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draft_rig import CPU, KINDS, MOST, Part, Rig, random_ids
from torch import Tensor

from lamina.models.tiny import write_tiny

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lamina.models.deepseek_v4_device_drafts import _shifted
from lamina.models.registry import Drafts, Target, blueprint
from lamina.ops.machine import Machine, this_machine
from lamina.ops.rows import rows_of
from lamina.ops.sequences import Piece
from lamina.ops.store.triton import keep_hidden
from lamina.runtime.arena import DeviceArena
from lamina.runtime.inputs import BlockTables, step_arrays
from lamina.weights.loader import Checkpoint, read_config

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if HAS_GPU and not INTERPRETED else "cpu")
runs_kernels = pytest.mark.skipif(not (HAS_GPU or INTERPRETED), reason="runs in the process that test_interpreted starts")


class DeviceRig:
    """The same as `Rig` with the models of a GPU, and what a slot keeps read from the slot."""

    def __init__(self, directory: Path, requests: int, blocks: int) -> None:
        plan = blueprint(read_config(directory), "fp32", "fp32", drafts=Drafts(MOST, True))
        self.rig = Rig(directory, requests=requests, blocks=blocks)
        self.layout, self.plan = self.rig.layout, plan
        self.arena = DeviceArena(self.layout, self.rig.arena.num_pages, DEVICE)
        self.arena.bytes.fill_(255)
        self.tables = BlockTables(requests, DEVICE)
        machine = this_machine("cuda") if DEVICE.type == "cuda" else Machine("cpu", (0, 0), True)
        target = Target(DEVICE, machine, torch.float32, "bf16")
        with Checkpoint(directory, plan.names) as checkpoint:
            self.model = plan.load_device(checkpoint, target, lambda spec: self.arena.store(spec.key, spec.codec))

    def step(self, parts: Sequence[Part], count: int, spare: int) -> tuple[list[list[int]], Tensor]:
        """Drafts of each part and how likely they are, with `spare` rows and requests of padding."""
        slices = self.rig.slices(parts)
        tokens, sequences = step_arrays(slices, self.tables, self.model.ratios, self.plan.rings, 4, DEVICE)
        num, requests = sequences.num_rows, len(parts) + spare
        tables = self.tables.pages.to(torch.int32)
        rows = rows_of(sequences.pieces, tuple(part.slot for part in slices), tables, num + spare, requests)
        padded = torch.zeros(num + spare, dtype=torch.int32, device=DEVICE)
        padded[:num] = tokens[:num]
        longest = max(part.start + len(part.ids) for part in parts)
        store, drafter = self.arena.hidden, self.model.drafter
        assert store is not None
        places = (rows.starts % store.rows_per_page).long()
        before = store.read(rows.slots[:, store.slot_column].long(), places)[:, self.model.config.hidden_size :]
        hidden, features = self.model.forward_with_features(padded, rows, "decode", longest)
        keep_hidden(torch.cat([hidden, features.float()], -1) if drafter.keeps_features else hidden, store, rows)

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values + [-1] * spare, dtype=torch.int32, device=DEVICE)

        counts = column([len(part.ids) - part.rejected for part in parts])
        following = column([part.following for part in parts])
        found, chances = drafter.draft(
            features, before if drafter.keeps_features else None, padded, rows, counts, following, count, "decode", longest
        )
        return found[: len(parts)].tolist(), chances[: len(parts)].to(CPU)


@runs_kernels
def test_rows_are_shifted_by_one() -> None:
    """Requests at the start, in the middle and rebuilt from the middle; some rows rejected, some without a token after them."""
    cases = [  # start, stop, valid_from, rows that count, token after them
        (0, 5, 0, 5, 900), (7, 8, 0, 1, -1), (64, 68, 64, 2, 901), (30, 34, 0, 1, 902), (0, 1, 0, 1, -1), (12, 15, 10, 3, -1),
    ]  # fmt: skip
    pieces, at = [], 0
    for number, (start, stop, valid_from, _, _) in enumerate(cases):
        pieces.append(Piece(start, stop, at, number, valid_from))
        at += stop - start
    spare = 3
    rows = rows_of(tuple(pieces), ((0,),) * len(cases), torch.zeros(9, 4, dtype=torch.int32, device=DEVICE), at + spare, 8)
    tokens = torch.arange(100, 100 + at + spare, dtype=torch.int32, device=DEVICE)
    counts, following = (
        torch.tensor([*values, -1, -1], dtype=torch.int32, device=DEVICE) for values in list(zip(*cases, strict=True))[3:]
    )
    own, source, ids = (part.to(CPU) if isinstance(part, Tensor) else part for part in _shifted(tokens, rows, counts, following))
    expected = {}  # (owner, position) -> (where its features are, the token after it)
    for owner, (start, _, valid_from, count, after) in enumerate(cases):
        first = pieces[owner].first_row
        known = [100 + first + place for place in range(count)] + [after] * (after >= 0)
        for position in range(start - (start > valid_from), start + count - (after < 0)):
            features = first + position - start if position >= start else at + spare + owner
            expected[owner, position] = (features, known[position + 1 - start])
        low, high = int(own.starts[owner]), int(own.stops[owner])
        assert (low, high) == (start - (start > valid_from), max(low, start + count - (after < 0)))
    found = {}
    for row, (owner, position) in enumerate(zip(own.owners.tolist(), own.positions.tolist(), strict=True)):
        if owner >= 0:
            assert row == int(own.first_rows[owner]) + position - int(own.starts[owner])
            found[owner, position] = (int(source[row]), int(ids[row]))
    assert found == expected and sorted(source.tolist()) == list(range(at + spare + 8))


@runs_kernels
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_the_kernels(kind: str, tmp_path: Path) -> None:
    """Prompts, one of them a token; then guesses of which some are wrong. The CPU's drafts, and how likely they are."""
    layers = (0, 4) if not HAS_GPU else KINDS[kind].layers
    shape = replace(
        KINDS[kind], ratios=(*layers, *[0] * KINDS[kind].stages), taps=tuple(range(len(layers))) if kind == "dspark" else ()
    )
    write_tiny(tmp_path / "model", shape, 12)
    if not HAS_GPU:
        file = tmp_path / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"hc_sinkhorn_iters": 3}))
    device = DeviceRig(tmp_path / "model", 2, 2)
    count = device.model.drafter.most_tokens if HAS_GPU else 2
    texts = [random_ids(300, 3), random_ids(300, 4)]
    places = [131, 1] if HAS_GPU else [4, 1]
    steps = [
        [Part(number, 0, text[:place], following=text[place], wanted=count)
         for number, (text, place) in enumerate(zip(texts, places, strict=True))]
    ]  # fmt: skip
    for accepted in ((1, 3), (3, 0)) if HAS_GPU else ((1, 3),):
        parts = []
        for request, right in enumerate(accepted):
            text, place = texts[request], places[request]
            wrong = [token + 1 for token in text[place + 1 + right : place + 4]]
            ids = text[place : place + 1 + right] + wrong
            parts.append(Part(request, place, ids, 3, len(wrong), text[place + 1 + right], count))
            places[request] += 1 + right
        steps.append(parts)
    for parts in steps:
        drafts = device.rig.step(parts)
        found, chances = device.step(parts, count, spare=2)
        wanted = [number for number, part in enumerate(parts) if part.wanted]
        for place, number in enumerate(wanted):
            assert found[number] == drafts[number][:count] and len(found[number]) == count
            expected = torch.from_numpy(device.rig.chances(place))[:count].float()
            torch.testing.assert_close(chances[number], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="the kernels run in this process")
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
