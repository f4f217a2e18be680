"""The GPU's forward pass against the CPU's, over the same checkpoint and the same steps: on a GPU if there is one, else a few
small ones in Triton's interpreter, in its own process."""

import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lamina.memory.layout import Layout, make_layout
from lamina.models.registry import Blueprint, Target, blueprint
from lamina.models.tiny import SHAPES, write_tiny
from lamina.ops.machine import Machine, this_machine
from lamina.ops.rows import rows_of
from lamina.runtime.arena import DeviceArena
from lamina.runtime.inputs import BlockTables, step_arrays
from lamina.schedule.step import Slice
from lamina.weights.headers import read_config
from lamina.weights.loader import Checkpoint

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
runs_kernels = pytest.mark.skipif(not (HAS_GPU or INTERPRETED), reason="runs in the process that test_interpreted starts")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens [start, stop) of request `request` in one step."""

    request: int
    start: int
    stop: int


class Side:
    """One of the two models with an arena of its own; requests have slots and blocks at fixed pages."""

    def __init__(self, plan: Blueprint, layout: Layout, directory: Path, dtype: str, requests: int, blocks: int, on_device: bool):
        self.layout, self.blocks, self.on_device = layout, blocks, on_device
        self.device = DEVICE if on_device else CPU
        self.arena = DeviceArena(layout, requests * (layout.slot_pages + blocks), self.device)
        self.arena.bytes.fill_(255)  # NaN in every format
        self.tables = BlockTables(requests, self.device)
        self.plan = plan
        machine = this_machine("cuda") if HAS_GPU else Machine("cpu", (0, 0), True)
        target = Target(DEVICE, machine, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], "fp8")
        with Checkpoint(directory, plan.names) as checkpoint:
            make = lambda spec: self.arena.store(spec.key, spec.codec)
            self.model = plan.load_device(checkpoint, target, make) if on_device else plan.load(checkpoint, dtype, make)

    def pages(self, request: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(slot, blocks), the blocks scattered."""
        size = self.layout.slot_pages + self.blocks
        own = list(range(request * size, (request + 1) * size))
        return tuple(own[: self.layout.slot_pages]), tuple(own[self.layout.slot_pages :][::-1])

    def slices(self, parts: Sequence[Part], ids: Sequence[list[int]]) -> tuple[Slice, ...]:
        found = []
        for part in parts:
            slot, blocks = self.pages(part.request)
            tokens = tuple(ids[part.request][part.start : part.stop])
            found.append(Slice(part.request, part.start, part.stop, tokens, slot, part.request, 0, blocks))
        return tuple(found)

    def step(self, parts: Sequence[Part], ids: Sequence[list[int]], order: str, spare: int = 0) -> Tensor:
        """Hidden vectors [rows, D] of one step; `spare` rows and requests of padding behind them on the device."""
        slices = self.slices(parts, ids)
        tokens, sequences = step_arrays(slices, self.tables, self.model.ratios, self.plan.rings, 4, self.device)
        if not self.on_device:
            return self.model.forward(tokens, sequences)[: sequences.num_rows]
        num = sequences.num_rows
        pieces = tuple(sequences.pieces)
        tables = self.tables.pages.to(torch.int32)
        rows = rows_of(pieces, tuple(part.slot for part in slices), tables, num + spare, len(parts) + spare)
        padded = torch.zeros(num + spare, dtype=torch.int32, device=self.device)
        padded[:num] = tokens[:num]
        longest = max(part.stop for part in parts)
        return self.model.forward(padded, rows, order, longest)[:num]


def both(directory: Path, dtype: str, cache: str, index: str, requests: int, blocks: int) -> tuple[Side, Side]:
    plan = blueprint(read_config(directory), cache, index)
    layout = make_layout(plan.memories, plan.hidden, None)
    return tuple(Side(plan, layout, directory, dtype, requests, blocks, on_device) for on_device in (False, True))


def steps(lengths: Sequence[int], cuts: Sequence[int], decodes: int) -> Iterator[tuple[list[Part], str]]:
    """Prefills of all requests together, cut at `cuts`, then decodes."""
    start = 0
    for cut in [*cuts, max(lengths)]:
        parts = [Part(request, start, min(cut, length)) for request, length in enumerate(lengths) if start < min(cut, length)]
        if parts:
            yield parts, "prefill"
        start = cut
    for number in range(decodes):
        yield [Part(request, length + number, length + number + 1) for request, length in enumerate(lengths)], "decode"


def compare(sides: tuple[Side, Side], lengths: Sequence[int], cuts: Sequence[int], decodes: int, vocab: int, most: float) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = [torch.randint(2, vocab, (length + decodes,), generator=generator).tolist() for length in lengths]
    cpu, device = sides
    for parts, order in steps(lengths, cuts, decodes):
        truth = cpu.step(parts, ids, order)
        found = device.step(parts, ids, order, spare=3).to(CPU)
        assert torch.isfinite(found).all(), (parts, order)
        off = float((found - truth).norm() / truth.norm())
        assert off < most, (off, parts, order)


#: the interpreter takes seconds for a layer: one of each kind, routed by a table and by scores
FEW_LAYERS = {"flash": (0, 4, 128), "narrow": (4, 128), "blocks": (128, 0, 4)}
ITERATIONS = 3


@pytest.fixture(scope="module")
def random_directory(tmp_path_factory: pytest.TempPathFactory, random_models: ModuleType) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        directory, recipe = tmp_path_factory.mktemp(name), random_models.RECIPES[name]
        if not HAS_GPU:
            recipe = replace(recipe, ratios=FEW_LAYERS[name], changes=(*recipe.changes, ("hc_sinkhorn_iters", ITERATIONS)))
        random_models.build(recipe).save_pretrained(directory)
        return directory

    return make


@runs_kernels
@pytest.mark.parametrize(
    ("name", "cache", "index", "lengths", "cuts"),
    [
        ("flash", "fp32", "fp32", (7, 3), (5,)),
        pytest.param("narrow", "fp32", "fp32", (9,), (4,), marks=pytest.mark.long),
        pytest.param("blocks", "fp8", "fp4", (6,), (), marks=pytest.mark.long),
    ],
)
def test_plain_weights(
    random_directory: Callable[[str], Path], name: str, cache: str, index: str, lengths: tuple[int, ...], cuts: tuple[int, ...]
) -> None:
    """Checkpoints as Transformers writes them, activations in fp32: the same sums in another order."""
    if HAS_GPU:
        lengths, cuts = (*(31 * length for length in lengths), 131), (128, 256, 257)
    sides = both(random_directory(name), "fp32", cache, index, len(lengths), max(lengths) // 16 + 2)
    # where a code of the cache is at its border, other sums give another code
    compare(sides, lengths, cuts, 1, 257, 1e-4 if cache == "fp32" else 2e-2)


@runs_kernels
def test_official_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 and FP4 as stored; products read fp8 on a GPU, so they differ by its rounding."""
    if not HAS_GPU:
        monkeypatch.setitem(SHAPES, "flash", replace(SHAPES["flash"], ratios=(0, 4, 128), hash_layers=1))
    write_tiny(tmp_path / "model", "flash")
    if not HAS_GPU:
        file = tmp_path / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"hc_sinkhorn_iters": ITERATIONS}))
    lengths, cuts = ((530, 77), (256,)) if HAS_GPU else ((5,), ())
    sides = both(tmp_path / "model", "bf16" if HAS_GPU else "fp32", "fp8", "fp4", len(lengths), 4)
    compare(sides, lengths, cuts, 1, 1024, 0.2 if HAS_GPU else 2e-2)


@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="the kernels run in this process")
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
