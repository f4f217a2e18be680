"""The causal convolution against a loop in fp64, over memory full of NaN; and that bits do not depend on cuts and company."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lamina.ops.conv import convolve
from lamina.ops.store import Place, StateCodec, Store


@dataclass(frozen=True, slots=True)
class Case:
    """One step. lengths: (start, stop) of each sequence.   valid: where each sequence's past begins; 0 where nothing is said.

    spare  rows of the ring beyond `width`.   step  strides of the input's columns.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    width: int = 4
    channels: int = 5
    bias: bool = True
    activates: bool = True
    spare: int = 0
    step: int = 1
    dtype: str = "fp32"
    valid: tuple[int, ...] = ()


def cases() -> Iterator[Case]:
    near = tuple((start, start + count) for start in (0, 1, 2, 3, 4, 5, 63, 64) for count in (0, 1, 2, 5))
    for width in (1, 2, 3, 4, 7):
        yield Case(f"width {width}", near, width)
    for channels in (1, 3, 8, 17, 64, 130):
        yield Case(f"{channels} channels", near, channels=channels, step=2 if channels == 17 else 1)
    yield Case("no bias", near, bias=False)
    yield Case("no activation", near, activates=False)
    yield Case("a ring with rows for drafts", near, spare=3)
    yield Case("bf16", near, dtype="bf16")
    yield Case("one row each", tuple((start, start + 1) for start in (0, 1, 2, 3, 4, 9, 100, 0)))
    yield Case("nothing", ((0, 0), (7, 7)))
    yield Case("long", ((0, 300), (5, 6), (250, 450)))
    yield Case("a past that begins late", ((9, 10), (9, 14), (9, 10), (9, 11)), valid=(9, 8, 7, 3))


CASES = list(cases())


class World:
    """Inputs of all positions of some sequences, and a poisoned ring with those before each step's start."""

    def __init__(self, rows: ModuleType, case: Case) -> None:
        self.rows, self.case = rows, case
        generator = torch.Generator().manual_seed(len(case.name))
        num = len(case.lengths)
        self.inputs = [torch.randn(stop, case.channels, generator=generator) * 3 for _, stop in case.lengths]
        self.weight = torch.randn(case.channels, case.width, generator=generator)
        self.bias = torch.randn(case.channels, generator=generator) if case.bias else None
        self.codec = StateCodec(case.channels, case.dtype)
        self.slots = [(number * 2 + 1, 2 * num + 1 - number) for number in range(num)]

    def store(self, starts: Sequence[int]) -> Store:
        """A ring of which only what a sequence may read is no NaN."""
        case = self.case
        ring = case.width + case.spare
        store = self.rows.poisoned_store(self.codec, 3 * len(starts) + 3, ring, 1)
        for number, start in enumerate(starts):
            first = max(self.valid(number), start - case.width + 1)
            span = range(first, start)
            if span:
                where = torch.tensor([position % ring for position in span])
                pages = torch.full_like(where, self.slots[number][1])
                store.write(pages, where, self.codec.encode(self.inputs[number][first:start]))
        return store

    def valid(self, number: int) -> int:
        return self.case.valid[number] if self.case.valid else 0

    def step(self, store: Store, lengths: Sequence[tuple[int, int]], numbers: Sequence[int] | None = None) -> list[Tensor]:
        """Outputs of each sequence; the store keeps what comes next."""
        case, numbers = self.case, range(len(lengths)) if numbers is None else numbers
        parts = [
            self.rows.Part(start, stop, (), self.slots[number], valid_from=self.valid(number))
            for number, (start, stop) in zip(numbers, lengths, strict=True)
        ]
        sequences = self.rows.arrays(parts)
        x = torch.full((sequences.positions.shape[0], case.channels * case.step), torch.nan)[:, :: case.step]
        x[: sequences.num_rows] = torch.cat(
            [self.inputs[number][a:b] for number, (a, b) in zip(numbers, lengths, strict=True)] or [x[:0]]
        )
        found = convolve(x, self.weight.t().contiguous(), self.bias, store, sequences, case.activates)
        assert not found[sequences.num_rows :].any()
        return [found[piece.rows] for piece in sequences.pieces]

    def expected(self, number: int, position: int) -> Tensor:
        """One output by its definition."""
        case, total = self.case, torch.zeros(self.case.channels, dtype=torch.float64)
        stored = self.inputs[number].bfloat16() if case.dtype == "bf16" else self.inputs[number]
        for tap in range(case.width):
            source = position - case.width + 1 + tap
            if source >= self.valid(number):
                total += self.weight[:, tap].double() * stored[source].double()
        if self.bias is not None:
            total += self.bias.double()
        return total * torch.sigmoid(total) if case.activates else total


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_definition(rows: ModuleType, case: Case) -> None:
    world = World(rows, case)
    found = world.step(world.store([start for start, _ in case.lengths]), case.lengths)
    for number, (start, stop) in enumerate(case.lengths):
        assert found[number].shape == (stop - start, case.channels)
        for position in range(start, stop):
            want = world.expected(number, position)
            torch.testing.assert_close(found[number][position - start].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_kept(rows: ModuleType, case: Case) -> None:
    """After a step the ring holds the last inputs, and the bytes of nobody else are touched."""
    world = World(rows, case)
    store = world.store([start for start, _ in case.lengths])
    before = rows.bytes_of(store)
    world.step(store, case.lengths)
    ring = case.width + case.spare
    for number, (_, stop) in enumerate(case.lengths):
        for position in range(max(world.valid(number), stop - case.width + 1), stop):
            page, row = torch.tensor([world.slots[number][1]]), torch.tensor([position % ring])
            want = world.inputs[number][position : position + 1]
            assert torch.equal(store.read(page, row), want.bfloat16().float() if case.dtype == "bf16" else want)
    after = rows.bytes_of(store)
    untouched = torch.ones_like(after, dtype=torch.bool).view(store.views[0].shape[0], -1)
    untouched[[slot[1] for slot, (a, b) in zip(world.slots, case.lengths, strict=True) if b > a]] = False
    assert torch.equal(before.view_as(untouched)[untouched], after.view_as(untouched)[untouched])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("channels", [3, 19, 64])
def test_bits_depend_on_nothing_else(rows: ModuleType, channels: int, dtype: str) -> None:
    """However a sequence is cut into steps, and whoever else is there: the same bits."""
    case = Case("cuts", ((0, 70), (0, 70), (0, 33)), channels=channels, dtype=dtype)
    world = World(rows, case)
    whole = world.step(world.store([0, 0, 0]), case.lengths)
    for cuts in ((1, 2, 3), (64,), (3, 4, 10, 11, 12, 60), tuple(range(1, 70))):
        store = world.store([0, 0, 0])
        alone = World(rows, replace(case, lengths=case.lengths[:1]))
        alone.inputs, alone.weight, alone.bias = world.inputs, world.weight, world.bias
        own_store = alone.store([0])
        for start, stop in zip((0, *cuts), (*cuts, 70), strict=True):
            lengths = ((start, stop), (start, stop), (min(start, 33), min(stop, 33)))
            found = world.step(store, lengths)
            for number, (a, b) in enumerate(lengths):
                assert rows.same_bits(found[number], whole[number][a:b])
            assert rows.same_bits(alone.step(own_store, lengths[:1])[0], whole[0][start:stop])


def test_a_window_in_pages_of_its_own(rows: ModuleType) -> None:
    """Where the inputs lie in the blocks of a large window instead of a ring, the answers are the same."""
    case = Case("blocks", ((0, 9), (0, 9)))
    world = World(rows, case)
    want = world.step(world.store([0, 0]), case.lengths)
    size = 3
    ring = rows.poisoned_store(world.codec, 12, size)
    store = Store(world.codec, ring.views, 0, Place("window", 1, 0))
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, 9)):
        parts = [rows.Part(start, stop, (), ()) for _ in range(2)]
        sequences = rows.arrays(parts)
        windows = tuple(({block: (11, 4 * number + block) for block in range(3)},) for number in range(2))
        sequences = replace(sequences, windows=windows)
        x = torch.zeros(sequences.positions.shape[0], case.channels)
        x[: sequences.num_rows] = torch.cat([inputs[start:stop] for inputs in world.inputs])
        found = convolve(x, world.weight.t().contiguous(), world.bias, store, sequences)
        for number, piece in enumerate(sequences.pieces):
            assert rows.same_bits(found[piece.rows], want[number][start:stop])
