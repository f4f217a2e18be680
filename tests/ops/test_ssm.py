"""Scans against one row after another in fp64, over memory full of NaN; and what their bits depend on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lamina.ops import chunks
from lamina.ops.ssm import CHUNK, scan_channels, scan_heads, softplus
from lamina.ops.store import StateCodec, Store


@dataclass(frozen=True, slots=True)
class Case:
    """One step. lengths: (start, stop) of each sequence.   groups 0: channels with a decay for each number.

    decay  how fast states are forgotten.   dtype  of stored states.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: int = 4
    width: int = 3
    size: int = 5
    groups: int = 2
    decay: float = 1.0
    dtype: str = "fp32"


NEAR = tuple((start, start + count) for start in (0, 1, 62, 63, 64, 65, 127, 128) for count in (0, 1, 2, 3))
LONG = ((0, 64), (0, 65), (0, 129), (63, 65), (63, 128), (5, 300), (64, 128), (64, 193), (127, 129), (10, 11), (0, 1), (3, 3))


def cases() -> Iterator[Case]:
    yield Case("near", NEAR)
    yield Case("long", LONG)
    yield Case("one row each", tuple((start, start + 1) for start in (0, 5, 63, 64, 0, 1000)))
    yield Case("all new", ((0, 70), (0, 1), (0, 64)))
    yield Case("nothing", ((0, 0), (9, 9)))
    for heads, width, size, groups in ((1, 1, 1, 1), (6, 8, 16, 1), (3, 5, 7, 3), (8, 4, 2, 4), (2, 20, 64, 2)):
        yield Case(f"{heads} heads of {width} x {size} in {groups}", LONG, heads, width, size, groups)
    yield Case("forgets at once", LONG, decay=300.0)
    yield Case("forgets nothing", LONG, decay=0.0)
    yield Case("bf16", LONG, dtype="bf16")
    for heads, size in ((1, 1), (7, 5), (12, 16), (33, 3)):
        yield Case(f"{heads} channels of {size}", LONG, heads, 1, size, 0)
    yield Case("channels near", NEAR, groups=0)
    yield Case("channels forget at once", LONG, groups=0, decay=300.0)
    yield Case("channels in bf16", LONG, groups=0, dtype="bf16")


CASES = list(cases())


class World:
    """Inputs of all positions of some sequences, their states by the definition, and slots full of NaN."""

    def __init__(self, rows: ModuleType, case: Case) -> None:
        self.rows, self.case = rows, case
        generator = torch.Generator().manual_seed(len(case.name))

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.is_heads = case.groups > 0
        inner = (case.heads, case.width) if self.is_heads else (case.heads,)
        mixed = (case.groups, case.size) if self.is_heads else (case.size,)
        ends = [stop for _, stop in case.lengths]
        self.x = [random(stop, *inner) for stop in ends]
        self.steps = [softplus(random(stop, case.heads)) for stop in ends]
        self.b, self.c = ([random(stop, *mixed) for stop in ends] for _ in range(2))
        self.decay = -random(*((case.heads,) if self.is_heads else (case.heads, case.size))).abs() * case.decay
        self.skip = random(case.heads)
        self.shape = (*inner, case.size)
        self.codec = StateCodec(torch.Size(self.shape).numel(), case.dtype)
        num = len(case.lengths)
        self.slots = [(number * 2 + 1, 2 * num + 1 - number) for number in range(num)]
        self.known: list[tuple[Tensor, Tensor]] = [self.run(number) for number in range(num)]

    def run(self, number: int) -> tuple[Tensor, Tensor]:
        """(y [stop, ...], state after each row [stop, ...]) of a sequence, one row after another in fp64."""
        case, ys, states = self.case, [], []
        state = torch.zeros(self.shape, dtype=torch.float64)
        for x, step, b, c in zip(self.x[number], self.steps[number], self.b[number], self.c[number], strict=True):
            decay, skip = self.decay.double(), self.skip.double()
            x, step, b, c = x.double(), step.double(), b.double(), c.double()
            if self.is_heads:
                b, c = (part.repeat_interleave(case.heads // case.groups, 0)[:, None] for part in (b, c))
                decay, skip, step = decay[:, None, None], skip[:, None], step[:, None]
                state = torch.exp(step[..., None] * decay) * state + (step * x)[..., None] * b
            else:
                state = torch.exp(step[:, None] * decay) * state + (step * x)[:, None] * b
            ys.append((state * c).sum(-1) + skip * x)
            states.append(state)
        empty = torch.zeros(0, *self.shape, dtype=torch.float64)
        return torch.stack(ys) if ys else empty[..., 0], torch.stack(states) if states else empty

    def store(self, starts: Sequence[int]) -> Store:
        """Slots of which only the states of sequences that have begun are no NaN."""
        store = self.rows.poisoned_store(self.codec, 3 * len(starts) + 3, 1, 1)
        for number, start in enumerate(starts):
            if start:
                state = self.known[number][1][start - 1].float().view(1, -1)
                store.write_first(torch.tensor([self.slots[number][1]]), self.codec.encode(state))
        return store

    def state(self, store: Store, number: int) -> Tensor:
        return store.read_first(torch.tensor([self.slots[number][1]])).view(self.shape)

    def step(self, store: Store, lengths: Sequence[tuple[int, int]], numbers: Sequence[int] | None = None) -> list[Tensor]:
        """Outputs of each sequence, from inputs with strides between NaN."""
        numbers = range(len(lengths)) if numbers is None else numbers
        parts = [self.rows.Part(*span, (), self.slots[number]) for number, span in zip(numbers, lengths, strict=True)]
        sequences = self.rows.arrays(parts)

        def spread(values: list[Tensor]) -> Tensor:
            own = torch.cat([values[number][a:b] for number, (a, b) in zip(numbers, lengths, strict=True)])
            whole = torch.full((sequences.positions.shape[0], 2, *own.shape[1:]), torch.nan)[:, 1]
            whole[: own.shape[0]] = own
            return whole

        scan = scan_heads if self.is_heads else scan_channels
        x, steps, b, c = (spread(values) for values in (self.x, self.steps, self.b, self.c))
        found = scan(x, steps, self.decay, b, c, self.skip, store, sequences)
        assert not found[sequences.num_rows :].any()
        return [found[piece.rows] for piece in sequences.pieces]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_definition(rows: ModuleType, case: Case) -> None:
    """Outputs and states, from the states before the step; slots of nobody else are touched."""
    world = World(rows, case)
    store = world.store([start for start, _ in case.lengths])
    before = rows.bytes_of(store)
    found = world.step(store, case.lengths)
    near = 1e-4 if case.dtype == "fp32" else 0.1
    for number, (start, stop) in enumerate(case.lengths):
        y, states = world.known[number]
        torch.testing.assert_close(found[number].double(), y[start:stop], rtol=near, atol=near)
        if stop > start:
            torch.testing.assert_close(world.state(store, number).double(), states[-1], rtol=near, atol=near)
    pages = store.views[0].shape[0]
    untouched = torch.ones(pages, dtype=torch.bool)
    untouched[[slot[1] for slot, (a, b) in zip(world.slots, case.lengths, strict=True) if b > a]] = False
    assert torch.equal(before.view(pages, -1)[untouched], rows.bytes_of(store).view(pages, -1)[untouched])


@pytest.mark.parametrize("groups", [0, 2])
def test_the_forms_agree(rows: ModuleType, groups: int) -> None:
    """Row by row (the recurrent form) and in chunks, to 1e-4, with heads that forget fast and slowly."""
    case = Case("forms", ((0, 200),), 6, 4, 16, groups)
    world = World(rows, case)
    world.decay[:] = -torch.linspace(0, 16, 6).view(6, *([1] * (world.decay.dim() - 1)))
    whole = world.step(store := world.store([0]), case.lengths)[0]
    single_store = world.store([0])
    single = torch.cat([world.step(single_store, ((p, p + 1),))[0] for p in range(200)])
    torch.testing.assert_close(whole, single, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(world.state(store, 0), world.state(single_store, 0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("groups", "heads", "width", "size"), [(0, 9, 1, 5), (0, 16, 1, 16), (1, 3, 4, 6), (2, 8, 8, 16)])
def test_bits_of_cuts_at_chunks(
    rows: ModuleType, groups: int, heads: int, width: int, size: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that end at multiples of CHUNK give the bits of one step, also where a chunk has one row, in any company."""
    stop = 4 * CHUNK + 1
    case = Case("cuts", ((0, stop), (0, 3 * CHUNK), (0, 40)), heads, width, size, groups, dtype=dtype)
    world = World(rows, case)
    whole_store = world.store([0, 0, 0])
    whole = world.step(whole_store, case.lengths)
    for cuts in ((CHUNK,), (2 * CHUNK, 4 * CHUNK), (CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK)):
        store, alone = world.store([0, 0, 0]), world.store([0, 0, 0])
        for a, b in zip((0, *cuts), (*cuts, stop), strict=True):
            lengths = tuple((min(a, last), min(b, last)) for _, last in case.lengths)
            found = world.step(store, lengths)
            for number, (first, end) in enumerate(lengths):
                assert rows.same_bits(found[number], whole[number][first:end])
            assert rows.same_bits(world.step(alone, lengths[1:2], [1])[0], whole[1][slice(*lengths[1])])
        for number in range(3):
            assert rows.same_bits(world.state(store, number), world.state(whole_store, number))
    monkeypatch.setattr(chunks, "_MOST_NUMBERS", 1)  # one chunk at a time
    assert all(rows.same_bits(one, two) for one, two in zip(world.step(world.store([0, 0, 0]), case.lengths), whole, strict=True))


@pytest.mark.parametrize(("groups", "heads", "width", "size"), [(0, 9, 1, 5), (0, 24, 1, 16), (1, 3, 4, 6), (2, 8, 8, 16)])
def test_bits_of_single_rows(rows: ModuleType, groups: int, heads: int, width: int, size: int) -> None:
    """Many sequences with one row each give what each gives alone."""
    case = Case("singles", tuple((start, start + 1) for start in (0, 1, 9, 63, 64, 70, 100, 3)), heads, width, size, groups)
    world = World(rows, case)
    starts = [start for start, _ in case.lengths]
    together = world.step(world.store(starts), case.lengths)
    for number, span in enumerate(case.lengths):
        assert rows.same_bits(world.step(world.store(starts), [span], [number])[0], together[number])
    longer = (*case.lengths[:7], (3, 90))
    mixed = World(rows, replace(case, lengths=longer))
    for name in ("x", "steps", "b", "c"):
        mine, theirs = getattr(mixed, name), getattr(world, name)
        mine[:7] = theirs[:7]
    mixed.decay, mixed.skip, mixed.known[:7] = world.decay, world.skip, world.known[:7]
    found = mixed.step(mixed.store(starts), longer)
    assert all(rows.same_bits(one, two) for one, two in zip(found[:7], together[:7], strict=True))


def test_nothing_overflows(rows: ModuleType) -> None:
    """Steps and decays so large that any exponent of the other sign would overflow."""
    for groups in (0, 2):
        world = World(rows, Case("hostile", ((0, 150), (70, 71)), groups=groups, decay=1e4))
        for values in world.steps:
            values *= 1e3
        world.known = [world.run(number) for number in range(2)]
        for found, (start, stop), (y, _) in zip(
            world.step(world.store([0, 70]), ((0, 150), (70, 71))), ((0, 150), (70, 71)), world.known, strict=True
        ):
            torch.testing.assert_close(found.double(), y[start:stop], rtol=1e-4, atol=1e-2)


def test_softplus() -> None:
    x = torch.tensor([-200.0, -20.0, -1.0, 0.0, 1.0, 20.0, 200.0, 1e30])
    torch.testing.assert_close(softplus(x).double(), torch.nn.functional.softplus(x.double()), rtol=1e-6, atol=1e-30)
    assert all(rows_equal for rows_equal in (softplus(x)[i : i + 1] == softplus(x[i : i + 1]) for i in range(8)))
