"""Selective scans of `triton.py` against `ref.py`: on a GPU if there is one, else in Triton's interpreter."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lamina.layers.scan import GatedNorm
from lamina.ops.machine import Machine
from lamina.ops.rows import rows_of
from lamina.ops.ssm import scan_channels as define_channels
from lamina.ops.ssm import scan_heads as define_heads
from lamina.ops.ssm import softplus
from lamina.ops.store import StateCodec, Store

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lamina.ops.ssm import kernels
from lamina.ops.ssm.triton import (
    GroupNorm,
    Selection,
    gate_rows,
    norm_parts,
    refuses,
    scan_channels,
    scan_heads,
)
from tests.ops.kernel_tests import DEVICE, HAS_GPU, compiles_kernels, machine_code, poisoned, runs_kernels, starts_interpreter

CPU = torch.device("cpu")
NEAR = ((0, 0), (0, 1), (0, 2), (1, 2), (62, 65), (63, 64), (63, 66), (64, 65), (64, 67), (128, 129), (5, 5), (127, 130))
LONG = ((0, 64), (0, 65), (63, 128), (5, 140))
SINGLES = ((0, 1), (1, 2), (63, 64), (64, 65), (100, 101), (3, 3))


@dataclass(frozen=True, slots=True)
class Case:
    """One step.   groups 0: channels with a decay for each number.   shift  of the steps before softplus."""

    lengths: tuple[tuple[int, int], ...] = NEAR
    heads: int = 4
    width: int = 3
    size: int = 5
    groups: int = 2
    decay: float = 1.0
    limits: tuple[float, float] = (0.0, float("inf"))
    cache: str = "fp32"
    shift: float = 0.0
    padding: int = 2

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def state(self) -> tuple[int, ...]:
        return (self.heads, self.width, self.size) if self.groups else (self.inner, self.size)


CASES = [
    Case(), Case(groups=0, width=1), Case(SINGLES), Case(SINGLES, groups=0, width=1, heads=7), Case(LONG),
    Case(LONG, groups=0, width=1), Case(SINGLES, 2, 20, 128, 1), Case(SINGLES, 3, 5, 7, 3), Case(SINGLES, 300, 1, 16, 0),
    Case(heads=1, width=1, size=1, groups=1), Case(decay=300.0), Case(decay=0.0, limits=(0.2, 0.9)), Case(shift=-14.0),
    Case(shift=30.0), Case(SINGLES, cache="bf16"), Case(((0, 0), (9, 9))),
]  # fmt: skip


class World:
    """A step over states full of NaN but for those of requests that have begun."""

    def __init__(self, case: Case, helpers: ModuleType, keep: tuple[int, ...] | None = None) -> None:
        self.case, codec = case, StateCodec(torch.Size(case.state).numel(), case.cache)
        num = len(case.lengths)
        self.store = helpers.poisoned_store(codec, 3 * num + 3, 1, 1)
        draw = torch.Generator().manual_seed(3)
        kinds = case.heads if case.groups else case.inner
        shape = (kinds,) if case.groups else (kinds, case.size)
        decay = -torch.rand(shape, generator=draw) * case.decay
        self.found = Selection(decay, torch.randn(kinds, generator=draw), torch.randn(kinds, generator=draw), case.limits)
        mixed = max(1, case.groups) * case.size
        widths = (case.inner, kinds, mixed, mixed)
        parts, own = [], [torch.zeros(0, sum(widths))]
        for number in range(num) if keep is None else keep:
            start, stop = case.lengths[number]
            values = torch.randn(stop, sum(widths), generator=(seed := torch.Generator().manual_seed(number)))
            values[:, case.inner : case.inner + kinds] += case.shift
            page = 2 * num + 1 - number
            parts.append(helpers.Part(start, stop, (), (2 * number + 1, page)))
            if start:
                before = torch.randn(1, codec.width, generator=seed)
                self.store.write_first(torch.tensor([page]), codec.encode(before))
            own.append(values[start:])
        self.sequences = helpers.arrays(parts)
        x = torch.cat(own)
        self.num, total = x.shape[0], x.shape[0] + case.padding
        whole = torch.full((total, sum(widths)), torch.nan)
        whole[: self.num] = x
        self.parts = whole.to(DEVICE).split(widths, dim=1)
        tables = torch.zeros(num + 4, 1, dtype=torch.int32, device=DEVICE)
        self.rows = rows_of(self.sequences.pieces, tuple(part.slot for part in parts), tables, total, len(parts) + 1)

    def run(self, store: Store | None = None) -> tuple[Tensor, Tensor]:
        """(rows [T, inner], all bytes of the store after it)."""
        store = there(self.store) if store is None else store
        out = poisoned(self.num + self.case.padding, self.case.inner)
        kept = self.found
        found = Selection(kept.decay.to(DEVICE), kept.skip.to(DEVICE), kept.step_bias.to(DEVICE), kept.limits)
        x, steps, b, c = self.parts
        if self.case.groups:
            scan_heads(x, steps, found, b, c, self.case.groups, store, self.rows, out)
        else:
            scan_channels(x, steps, found, b, c, store, self.rows, out)
        return out.to(CPU), bytes_of(store)

    def truth(self) -> Tensor:
        """[T, inner] by the definition, which writes the store."""
        case, kept = self.case, self.found
        padded = []
        for part in self.parts:
            padded.append(torch.full((self.sequences.positions.shape[0], part.shape[1]), torch.nan))
            padded[-1][: self.num] = part[: self.num].to(CPU)
        x, steps, b, c = padded
        steps = softplus(steps + kept.step_bias).clamp(*case.limits)
        if case.groups:
            x = x.unflatten(1, (case.heads, case.width))
            b, c = (part.unflatten(1, (case.groups, case.size)) for part in (b, c))
            y = define_heads(x, steps, kept.decay, b, c, kept.skip, self.store, self.sequences).flatten(1)
        else:
            y = define_channels(x, steps, kept.decay, b, c, kept.skip, self.store, self.sequences)
        return y[: self.num]


def there(store: Store) -> Store:
    """A copy of the same bytes on DEVICE."""
    arena = bytes_of(store).to(DEVICE)
    views = [arena.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset()) for view in store.views]
    return Store(store.codec, tuple(views), store.slot_column, store.place)


def bytes_of(store: Store) -> Tensor:
    storage = store.views[0].untyped_storage()
    return torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage).clone().to(CPU)


@runs_kernels
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_definition(case: Case, rows: ModuleType) -> None:
    """Outputs and states, from the states before the step; slots of nobody else are touched."""
    world = World(case, rows)
    before, store = bytes_of(world.store), there(world.store)
    found, _ = world.run(store)
    truth, near = world.truth(), 1e-4 if case.cache == "fp32" else 2e-2
    torch.testing.assert_close(found[: world.num], truth, rtol=near, atol=near)
    assert torch.isnan(found[world.num :]).all(), "rows of padding are not written"
    num = len(case.lengths)
    pages = torch.tensor([2 * num + 1 - number for number, (a, b) in enumerate(case.lengths) if b > a], dtype=torch.int64)
    if len(pages):
        mine = there(store).views[0].to(CPU)[pages, 0].float()
        torch.testing.assert_close(mine, world.store.read_first(pages), rtol=near, atol=near)
    untouched = torch.ones(world.store.views[0].shape[0], dtype=torch.bool)
    untouched[pages] = False
    of_pages = (len(untouched), -1)
    assert torch.equal(before.view(of_pages)[untouched], bytes_of(store).view(of_pages)[untouched])


@runs_kernels
@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("lengths", [NEAR, SINGLES], ids=["prefill", "decode"])
def test_bits_do_not_depend_on_the_other_rows(lengths: tuple[tuple[int, int], ...], groups: int, rows: ModuleType) -> None:
    case = Case(lengths, groups=groups)
    world = World(case, rows)
    together = world.run()[0]
    for number, piece in enumerate(world.sequences.pieces):
        alone = World(replace(case, padding=5), rows, (number,)).run()[0]
        assert rows.same_bits(alone[: piece.stop - piece.start], together[piece.rows])


@runs_kernels
@pytest.mark.parametrize("cache", ["fp32", "bf16"])
@pytest.mark.parametrize("groups", [0, 2])
def test_cuts_change_no_bit(groups: int, cache: str, rows: ModuleType) -> None:
    """Wherever they are, down to single rows as in decode."""
    whole, kept = World(Case(((0, 20),), groups=groups, cache=cache), rows).run()
    for cuts in ((7,), (1, 2), tuple(range(1, 20))):
        store: Store | None = None
        found = []
        for start, stop in zip((0, *cuts), (*cuts, 20), strict=True):
            world = World(Case(((start, stop),), groups=groups, cache=cache), rows)
            store = there(World(Case(((0, 20),), groups=groups, cache=cache), rows).store) if store is None else store
            wide = World(Case(((0, 20),), groups=groups, cache=cache), rows)
            for mine, other in zip(world.parts, wide.parts, strict=True):
                mine[: stop - start] = other[start:stop]
            found.append(world.run(store)[0][: stop - start])
        assert store is not None
        assert rows.same_bits(torch.cat(found), whole[:20])
        assert torch.equal(bytes_of(store), kept)


@runs_kernels
@pytest.mark.parametrize("norm", [None, (1, False), (2, False), (2, True)], ids=str)
def test_gates(norm: tuple[int, bool] | None, rows: ModuleType) -> None:
    """Rows of padding are zeros, whatever lies there."""
    world = World(Case(((0, 3), (4, 5))), rows)
    draw = torch.Generator().manual_seed(1)
    for inner in (24, 1500):
        y, wide = torch.full((6, inner), torch.nan), torch.full((6, inner + 5), torch.nan)
        y[:4], wide[:4] = torch.randn(4, inner, generator=draw), torch.randn(4, inner + 5, generator=draw) * 3
        weight, gate = torch.randn(inner, generator=draw), wide[:, 2:-3]
        if norm is None:
            truth, given = y / (1 / (gate * torch.sigmoid(gate))), None
        else:
            truth = GatedNorm(weight, 1e-5, *norm).forward(y, gate)
            given = GroupNorm(weight.to(DEVICE), 1e-5, *norm)
        found = gate_rows(y.to(DEVICE), wide.to(DEVICE)[:, 2:-3], given, world.rows, torch.float32, poisoned(6, inner)).to(CPU)
        torch.testing.assert_close(found[:4], truth[:4], rtol=2e-5, atol=2e-5)
        assert not found[4:].any()


@runs_kernels
def test_norms_of_parts() -> None:
    draw = torch.Generator().manual_seed(1)
    x, sizes = torch.randn(3, 30, generator=draw)[:, 4:], (5, 20, 1)
    weights = [torch.randn(size, generator=draw) for size in sizes]
    found = norm_parts(x.to(DEVICE), tuple((weight.to(DEVICE), 1e-5) for weight in weights), torch.float32).to(CPU)
    parts = [part * (part.square().mean(-1, keepdim=True) + 1e-5).rsqrt() for part in x.split(sizes, dim=1)]
    torch.testing.assert_close(found, torch.cat([part * weight for part, weight in zip(parts, weights, strict=True)], dim=1))


@pytest.mark.skipif(HAS_GPU, reason="asks about other machines")
def test_refusals() -> None:
    hopper = Machine("cuda", (9, 0), True)
    assert refuses(hopper, 128, 8192) is None
    assert refuses(hopper, 513) == "scanned channels must have 1 to 512 numbers, not 513"
    assert refuses(hopper, 16, 32769) == "norms of scans must be of at most 32768 channels, not 32769"


@compiles_kernels
@pytest.mark.parametrize(
    ("by_channel", "size", "block"), [(False, 128, 4), (False, 256, 2), (True, 16, 32)], ids=["Mamba-2", "wide", "Mamba-1"]
)
@pytest.mark.parametrize("capability", [80, 90])
def test_machine_code(capability: int, by_channel: bool, size: int, block: int) -> None:
    """No local memory: states stay in registers. A head's channels exchange nothing through shared memory in the loop."""
    types = dict.fromkeys(("starts", "stops", "first_rows", "slots", "owners"), "*i32")
    types |= dict.fromkeys(("x", "steps", "b", "c", "gate"), "*bf16")
    types |= dict.fromkeys(("step_bias", "decay", "skip", "out", "states", "y", "weight"), "*fp32")
    strides = ("x_stride", "steps_stride", "b_stride", "c_stride", "state_page", "gate_stride")
    types |= dict.fromkeys((*strides, "slot_stride", "slot_column"), "i32") | dict.fromkeys(("least", "most", "eps"), "fp32")
    shape = {"HEADS": 1 if by_channel else 128, "GROUP": 1 if by_channel else 128, "P": 8192 if by_channel else 64, "N": size}
    constants = shape | {"NW": size, "BLOCK": block, "BY_CHANNEL": by_channel, "STORED_BF16": False}
    code = machine_code(kernels.scan, types, constants, capability, warps=1, aligned=strides)
    assert code.spills == 0 and code.stack_bytes == 0 and code.registers <= 80
    assert by_channel or code.count("LDS") == 0
    wide = {"INNER": 8192, "SIZE": 8192, "W": 8192, "NORMS": True, "BEFORE": by_channel, "IS_BF16": True}
    code = machine_code(kernels.gate_rows, types | {"out": "*bf16"}, wide, capability, warps=8, aligned=strides)
    assert code.spills == 0 and code.stack_bytes == 0


@starts_interpreter
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
