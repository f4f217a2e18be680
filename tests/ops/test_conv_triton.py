"""Causal convolutions of `triton.py` against `ref.py`: on a GPU if there is one, else in Triton's interpreter."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lamina.ops.conv import convolve as definition
from lamina.ops.rows import rows_of
from lamina.ops.store import StateCodec, Store

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lamina.ops.conv import kernels
from lamina.ops.conv.triton import convolve
from tests.ops.kernel_tests import DEVICE, compiles_kernels, machine_code, poisoned, runs_kernels, starts_interpreter

CPU = torch.device("cpu")
NEAR = ((0, 0), (0, 1), (0, 2), (0, 6), (1, 2), (2, 4), (3, 4), (3, 9), (4, 5), (63, 65), (64, 64), (70, 71))
SINGLES = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (9, 10), (100, 101), (5, 5))


@dataclass(frozen=True, slots=True)
class Case:
    """One step.   spare  rows of the ring beyond `width`.   valid  where each request's past begins."""

    lengths: tuple[tuple[int, int], ...] = NEAR
    width: int = 4
    channels: int = 5
    bias: bool = True
    activates: bool = True
    spare: int = 0
    cache: str = "fp32"
    valid: tuple[int, ...] = ()
    padding: int = 2


CASES = [
    Case(), Case(SINGLES), Case(width=1), Case(width=2, bias=False), Case(SINGLES, width=3, spare=2), Case(width=7, spare=1),
    Case(channels=700), Case(SINGLES, channels=513, activates=False), Case(cache="bf16"), Case(SINGLES, cache="bf16"),
    Case(((9, 10), (9, 14), (9, 10), (9, 11)), valid=(9, 8, 7, 3)), Case(((0, 90), (5, 6), (250, 300))), Case(((0, 0), (7, 7))),
]  # fmt: skip


class World:
    """A step over rings full of NaN but for what a request may read, on DEVICE, and the same for the definition."""

    def __init__(self, case: Case, helpers: ModuleType, keep: tuple[int, ...] | None = None) -> None:
        self.case, self.codec = case, StateCodec(case.channels, case.cache)
        num, size = len(case.lengths), case.width + case.spare
        store = helpers.poisoned_store(self.codec, 3 * num + 3, size, 1)
        draw = torch.Generator().manual_seed(3)
        self.taps = torch.randn(case.width, case.channels, generator=draw)
        self.bias = torch.randn(case.channels, generator=draw) if case.bias else None
        parts, own = [], [torch.zeros(0, case.channels)]
        for number in range(num) if keep is None else keep:
            start, stop = case.lengths[number]
            values = torch.randn(stop, case.channels, generator=torch.Generator().manual_seed(number))
            valid = case.valid[number] if case.valid else 0
            held = torch.arange(max(valid, start - case.width + 1, 0), start)
            parts.append(helpers.Part(start, stop, (), (2 * number + 1, 2 * num + 1 - number), valid))
            store.write(torch.full_like(held, 2 * num + 1 - number), held % size, self.codec.encode(values[held]))
            own.append(values[start:])
        self.store = store
        self.sequences = helpers.arrays(parts)
        x = torch.cat(own)
        self.num, total = x.shape[0], x.shape[0] + case.padding
        self.x = torch.full((total, case.channels + 3), torch.nan)[:, 2:-1]
        self.x[: self.num] = x
        tables = torch.zeros(num + 4, 1, dtype=torch.int32, device=DEVICE)
        self.rows = rows_of(self.sequences.pieces, tuple(part.slot for part in parts), tables, total, len(parts) + 1)

    def run(self) -> tuple[Tensor, Tensor]:
        """(rows [T, C], all bytes of the store after it)."""
        store = there(self.store)
        out, bias = poisoned(self.x.shape[0], self.case.channels), None if self.bias is None else self.bias.to(DEVICE)
        wide = torch.full((self.x.shape[0], self.case.channels + 3), torch.nan, device=DEVICE)[:, 2:-1]
        wide.copy_(self.x)
        convolve(wide, self.taps.to(DEVICE), bias, store, self.rows, torch.float32, self.case.activates, out)
        return out.to(CPU), bytes_of(store)

    def truth(self) -> tuple[Tensor, Tensor]:
        """The same by the definition."""
        x = torch.full((self.sequences.positions.shape[0], self.case.channels), torch.nan)
        x[: self.num] = self.x[: self.num]
        found = definition(x, self.taps, self.bias, self.store, self.sequences, self.case.activates)
        return found[: self.num], bytes_of(self.store)


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
    """Outputs, padding and the bytes of all rings. What a longer prompt leaves in a ring's spare rows is never read."""
    world = World(case, rows)
    found, kept = world.run()
    truth, wanted = world.truth()
    torch.testing.assert_close(found[: world.num], truth, rtol=1e-5, atol=1e-5)
    assert not found[world.num :].any()
    assert torch.equal(kept, wanted)


@runs_kernels
@pytest.mark.parametrize("case", [Case(), Case(SINGLES)], ids=["prefill", "decode"])
def test_bits_do_not_depend_on_the_other_rows(case: Case, rows: ModuleType) -> None:
    world = World(case, rows)
    together = world.run()[0]
    for number, piece in enumerate(world.sequences.pieces):
        alone = World(replace(case, padding=5), rows, (number,)).run()[0]
        assert rows.same_bits(alone[: piece.stop - piece.start], together[piece.rows])


@runs_kernels
def test_a_step_of_padding_alone(rows: ModuleType) -> None:
    for case in (Case(), Case(SINGLES)):
        world = World(case, rows)
        world.rows.owners.fill_(-1)
        found, kept = world.run()
        assert not found.any() and torch.equal(kept, bytes_of(world.store))


@compiles_kernels
@pytest.mark.parametrize("stored", ["fp32", "bf16"])
@pytest.mark.parametrize("capability", [80, 90])
def test_machine_code(capability: int, stored: str) -> None:
    """No local memory, at the width of a real model."""
    pointers = dict.fromkeys(("positions", "owners", "starts", "stops", "valid_from", "slots"), "*i32")
    types = pointers | {"x": "*bf16", "out": "*bf16", "ring": f"*{stored}", "taps": "*fp32", "bias": "*fp32"}
    types |= dict.fromkeys(("x_stride", "ring_page", "slot_stride", "slot_column"), "i32")
    shape = {"C": 10240, "RING": 4, "BLOCK": 512}
    single = shape | {"WIDTH": 4, "ACTIVATES": True, "IS_SINGLE": True, "STORED_BF16": stored == "bf16"}
    several = single | {"IS_SINGLE": False}
    for kernel, constants in ((kernels.convolve, single), (kernels.convolve, several), (kernels.keep, shape)):
        code = machine_code(kernel, types, constants, capability, aligned=("x_stride", "ring_page"))
        assert code.spills == 0 and code.stack_bytes == 0


@starts_interpreter
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
