"""What the tests of kernels with a state share: one step over states full of NaN but for those of requests that have begun."""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from lamina.ops.rows import Rows, rows_of
from lamina.ops.sequences import Sequences
from lamina.ops.store import StateCodec, Store
from tests.ops.kernel_tests import DEVICE, poisoned

CPU = torch.device("cpu")
NEAR = ((0, 0), (0, 1), (0, 2), (62, 65), (63, 64), (63, 66), (64, 65), (5, 5), (127, 130))
LONG = ((0, 64), (0, 65), (5, 140))
SINGLES = ((0, 1), (1, 2), (63, 64), (64, 65), (100, 101), (3, 3))


@dataclass(frozen=True, slots=True)
class Case:
    """One step of (start, stop) a request.   groups of queries and keys.   kind  of inputs, as the op has them."""

    lengths: tuple[tuple[int, int], ...] = NEAR
    form: str = "chunks"
    heads: int = 2
    groups: int = 1
    key_dim: int = 5
    value_dim: int = 3
    kind: str = "random"
    cache: str = "fp32"
    inputs: torch.dtype = torch.float32
    padding: int = 2

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.key_dim, self.value_dim


class Op(Protocol):
    """An op under test."""

    def values(self, case: Case, stop: int, generator: torch.Generator) -> Tensor:
        """All that a request's rows have, [stop, width]."""
        ...

    def width(self, case: Case) -> int: ...

    def define(self, case: Case, x: Tensor, store: Store, sequences: Sequences) -> Tensor:
        """[T, H * Dv] by the definition."""
        ...

    def launch(self, case: Case, x: Tensor, store: Store, rows: Rows, out: Tensor) -> None:
        """By the kernels."""
        ...


class World:
    """One step; `keep`: of these requests alone."""

    def __init__(self, op: Op, case: Case, helpers: ModuleType, keep: tuple[int, ...] | None = None) -> None:
        self.op, self.case, codec = op, case, StateCodec(torch.Size(case.state).numel(), case.cache)
        num = len(case.lengths)
        self.store = helpers.poisoned_store(codec, 3 * num + 3, 1, 1)
        parts, own = [], [torch.zeros(0, op.width(case))]
        for number in range(num) if keep is None else keep:
            start, stop = case.lengths[number]
            draw = torch.Generator().manual_seed(number)
            values = op.values(case, stop, draw)
            page = 2 * num + 1 - number
            parts.append(helpers.Part(start, stop, (), (2 * number + 1, page)))
            if start:
                self.store.write_first(torch.tensor([page]), codec.encode(torch.randn(1, codec.width, generator=draw)))
            own.append(values[start:].to(case.inputs).float())
        self.sequences = helpers.arrays(parts)
        x = torch.cat(own)
        self.num = x.shape[0]
        self.x = torch.full((self.num + case.padding, op.width(case)), torch.nan)
        self.x[: self.num] = x
        tables = torch.zeros(num + 4, 1, dtype=torch.int32, device=DEVICE)
        self.rows = rows_of(
            self.sequences.pieces, tuple(part.slot for part in parts), tables, self.x.shape[0], len(parts) + 1
        )  # fmt: skip

    def run(self, store: Store | None = None) -> tuple[Tensor, Tensor]:
        """(rows [T, H * Dv], all bytes of the store after it)."""
        store = there(self.store) if store is None else store
        out = poisoned(self.x.shape[0], self.case.heads * self.case.value_dim)
        self.op.launch(self.case, self.x.to(DEVICE, self.case.inputs), store, self.rows, out)
        return out.to(CPU), bytes_of(store)

    def truth(self) -> Tensor:
        """By the definition, which writes the store."""
        x = torch.full((self.sequences.positions.shape[0], self.x.shape[1]), torch.nan)
        x[: self.num] = self.x[: self.num]
        return self.op.define(self.case, x, self.store, self.sequences)[: self.num]


def there(store: Store) -> Store:
    """A copy of the same bytes on DEVICE."""
    arena = bytes_of(store).to(DEVICE)
    views = [arena.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset()) for view in store.views]
    return Store(store.codec, tuple(views), store.slot_column, store.place)


def bytes_of(store: Store) -> Tensor:
    storage = store.views[0].untyped_storage()
    return torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage).clone().to(CPU)


def check_near(found: Tensor, truth: Tensor, case: Case) -> None:
    """Of bf16 that is multiplied, which rounds everything by 2^-9 of its size, all numbers together."""
    if case.inputs == torch.bfloat16:
        assert torch.isfinite(found).all()
        off = (found - truth).norm() / truth.norm()
        assert off < 1e-2, off
    else:
        near = 1e-4 if case.cache == "fp32" else 5e-2
        torch.testing.assert_close(found, truth, rtol=near, atol=near)


def check_definition(op: Op, case: Case, helpers: ModuleType) -> None:
    """Outputs and states, from the states before the step; slots of nobody else are touched."""
    world = World(op, case, helpers)
    before, store = bytes_of(world.store), there(world.store)
    found, _ = world.run(store)
    check_near(found[: world.num], world.truth(), case)
    assert torch.isnan(found[world.num :]).all(), "rows of padding are not written"
    num = len(case.lengths)
    pages = torch.tensor([2 * num + 1 - number for number, (a, b) in enumerate(case.lengths) if b > a], dtype=torch.int64)
    if len(pages):
        mine = there(store).views[0].to(CPU)[pages, 0].float()
        check_near(mine, world.store.read_first(pages), case)
    untouched = torch.ones(world.store.views[0].shape[0], dtype=torch.bool)
    untouched[pages] = False
    of_pages = (len(untouched), -1)
    assert torch.equal(before.view(of_pages)[untouched], bytes_of(store).view(of_pages)[untouched])


def check_company(op: Op, case: Case, helpers: ModuleType) -> None:
    """A request's bits are the same alone, with other padding."""
    world = World(op, case, helpers)
    together = world.run()[0]
    for number, piece in enumerate(world.sequences.pieces):
        if piece.stop > piece.start:
            alone = World(op, replace(case, padding=5), helpers, (number,)).run()[0]
            assert helpers.same_bits(alone[: piece.stop - piece.start], together[piece.rows])


def check_cuts(op: Op, case: Case, stop: int, cuts: tuple[int, ...], helpers: ModuleType) -> None:
    """A request of `stop` rows in one step, and cut."""
    whole = World(op, replace(case, lengths=((0, stop),), padding=0), helpers)
    truth, kept = whole.run()
    store, found = there(whole.store), []
    for start, end in zip((0, *cuts), (*cuts, stop), strict=True):
        world = World(op, replace(case, lengths=((start, end),), padding=0), helpers)
        world.x = whole.x[start:end]
        found.append(world.run(store)[0])
    assert helpers.same_bits(torch.cat(found), truth)
    assert torch.equal(bytes_of(store), kept)
