"""What the tests of ops with a state share: inputs of whole sequences, states by the definition, and slots full of NaN."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from lamina.ops.sequences import Sequences
from lamina.ops.store import StateCodec, Store

NEAR = tuple((start, start + count) for start in (0, 1, 62, 63, 64, 65, 127, 128) for count in (0, 1, 2, 3))
LONG = ((0, 64), (0, 65), (0, 129), (63, 65), (63, 128), (5, 300), (64, 128), (64, 193), (127, 129), (10, 11), (0, 1), (3, 3))
SINGLES = tuple((start, start + 1) for start in (0, 1, 9, 63, 64, 70, 100, 3))


@dataclass(frozen=True, slots=True)
class Case:
    """One step of (start, stop) a sequence.   groups of queries and keys, heads of values.   near  how exact a result is."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: int = 4
    groups: int = 2
    key_dim: int = 5
    value_dim: int = 3
    decay: float = 1.0
    dtype: str = "fp32"

    @property
    def near(self) -> float:
        return 1e-4 if self.dtype == "fp32" else 0.1

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.key_dim, self.value_dim


class Op(Protocol):
    """An op under test."""

    def inputs(self, case: Case, stop: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Of one sequence, [stop, ...] each."""
        ...

    def define(self, case: Case, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """(y, state after each row) of a sequence, row by row in fp64."""
        ...

    def call(self, case: Case, inputs: tuple[Tensor, ...], store: Store, sequences: Sequences) -> Tensor:
        """The op."""
        ...


class World:
    """Sequences of a case, their slots, and one step after another."""

    def __init__(self, rows: ModuleType, op: Op, case: Case) -> None:
        self.rows, self.op, self.case = rows, op, case
        generator = torch.Generator().manual_seed(len(case.name))
        self.inputs = [op.inputs(case, stop, generator) for _, stop in case.lengths]
        self.known = [op.define(case, inputs) for inputs in self.inputs]
        self.codec = StateCodec(torch.Size(case.state).numel(), case.dtype)
        num = len(case.lengths)
        self.slots = [(number * 2 + 1, 2 * num + 1 - number) for number in range(num)]

    def store(self, starts: Sequence[int]) -> Store:
        """Slots of which only the states of sequences that have begun are no NaN."""
        store: Store = self.rows.poisoned_store(self.codec, 3 * len(starts) + 3, 1, 1)
        for number, start in enumerate(starts):
            if start:
                state = self.known[number][1][start - 1].float().view(1, -1)
                store.write_first(torch.tensor([self.slots[number][1]]), self.codec.encode(state))
        return store

    def state(self, store: Store, number: int) -> Tensor:
        return store.read_first(torch.tensor([self.slots[number][1]])).view(self.case.state)

    def step(self, store: Store, lengths: Sequence[tuple[int, int]], numbers: Sequence[int] | None = None) -> list[Tensor]:
        """Outputs of each sequence, from inputs with strides between NaN."""
        numbers = range(len(lengths)) if numbers is None else numbers
        parts = [self.rows.Part(*span, (), self.slots[number]) for number, span in zip(numbers, lengths, strict=True)]
        sequences = self.rows.arrays(parts)

        def spread(field: int) -> Tensor:
            own = torch.cat([self.inputs[number][field][a:b] for number, (a, b) in zip(numbers, lengths, strict=True)])
            whole = torch.full((sequences.positions.shape[0], 2, *own.shape[1:]), torch.nan)[:, 1]
            whole[: own.shape[0]] = own
            return whole

        found = self.op.call(self.case, tuple(spread(field) for field in range(len(self.inputs[0]))), store, sequences)
        assert found.dtype == torch.float32 and not found[sequences.num_rows :].any()
        return [found[piece.rows] for piece in sequences.pieces]


def check_definition(rows: ModuleType, op: Op, case: Case) -> None:
    """Outputs and states, from the states before the step; slots of nobody else are touched."""
    world = World(rows, op, case)
    store = world.store([start for start, _ in case.lengths])
    before = rows.bytes_of(store)
    found = world.step(store, case.lengths)
    for number, (start, stop) in enumerate(case.lengths):
        y, states = world.known[number]
        torch.testing.assert_close(found[number].double(), y[start:stop], rtol=case.near, atol=case.near)
        if stop > start:
            torch.testing.assert_close(world.state(store, number).double(), states[-1], rtol=case.near, atol=case.near)
    pages = store.views[0].shape[0]
    untouched = torch.ones(pages, dtype=torch.bool)
    untouched[[slot[1] for slot, (a, b) in zip(world.slots, case.lengths, strict=True) if b > a]] = False
    assert torch.equal(before.view(pages, -1)[untouched], rows.bytes_of(store).view(pages, -1)[untouched])


def check_forms(rows: ModuleType, op: Op, case: Case) -> None:
    """One sequence row by row (the recurrent form) and in chunks."""
    world, ((_, stop),) = World(rows, op, case), case.lengths
    whole_store, single_store = world.store([0]), world.store([0])
    whole = world.step(whole_store, case.lengths)[0]
    single = torch.cat([world.step(single_store, ((p, p + 1),))[0] for p in range(stop)])
    torch.testing.assert_close(whole, single, rtol=case.near, atol=case.near)
    torch.testing.assert_close(world.state(whole_store, 0), world.state(single_store, 0), rtol=case.near, atol=case.near)


def check_cuts_at_chunks(rows: ModuleType, op: Op, case: Case, chunk: int) -> None:
    """Steps that end at multiples of a chunk give the bits of one step, also where a chunk has one row, in any company."""
    world = World(rows, op, case)
    stop, starts = case.lengths[0][1], [0] * len(case.lengths)
    whole_store = world.store(starts)
    whole = world.step(whole_store, case.lengths)
    for cuts in ((chunk,), (2 * chunk, 4 * chunk), (chunk, 2 * chunk, 3 * chunk, 4 * chunk)):
        store, alone = world.store(starts), world.store(starts)
        for a, b in zip((0, *cuts), (*cuts, stop), strict=True):
            lengths = tuple((min(a, last), min(b, last)) for _, last in case.lengths)
            found = world.step(store, lengths)
            for number, (first, end) in enumerate(lengths):
                assert rows.same_bits(found[number], whole[number][first:end])
            assert rows.same_bits(world.step(alone, lengths[1:2], [1])[0], whole[1][slice(*lengths[1])])
        for number in range(len(starts)):
            assert rows.same_bits(world.state(store, number), world.state(whole_store, number))


def check_single_rows(rows: ModuleType, op: Op, case: Case) -> None:
    """Many sequences with one row each, and beside them a longer one, give what each gives alone."""
    world = World(rows, op, case)
    starts = [start for start, _ in case.lengths]
    together = world.step(world.store(starts), case.lengths)
    alone = [world.step(world.store(starts), [span], [number])[0] for number, span in enumerate(case.lengths)]
    assert all(rows.same_bits(one, two) for one, two in zip(alone, together, strict=True))
    lengths = [span if number else (0, min(span[1], 90)) for number, span in enumerate(case.lengths[::-1])][::-1]
    mixed = world.step(world.store(starts), lengths)
    assert all(rows.same_bits(one, two) for one, two in zip(mixed[:-1], together[:-1], strict=True))
