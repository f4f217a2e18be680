"""The ledger's copies as waves of pieces, against carrying them out one after another."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lamina.memory.kinds import EntryFormat, Field, Fold, Log, Snapshot, Window
from lamina.memory.layout import Layout, make_layout
from lamina.memory.orders import CopyPage, Order, RestoreSlot, SaveSlot
from lamina.ops.move import PIECE_BYTES, WORDS, move
from lamina.runtime.arena import DeviceArena
from lamina.runtime.copies import CopyPlanner, run_waves, warm_up

CPU = torch.device("cpu")
ODD = EntryFormat("odd", (Field("a", "u8", (10,)), Field("b", "fp32", (3,))))
ENTRY = EntryFormat("entry", (Field("nope", "e4m3", (448,)), Field("rope", "bf16", (64,)), Field("scale", "e8m0", (8,))))


def odd() -> Layout:
    """Rows of 10 and 12 bytes, several slot pages."""
    fold = Fold("fold", 1, (Field("open", "fp32", (7,)), Field("next", "fp32", (7,))), 4, ("next",))
    memories = [Window("window", 0, ODD, 5), Log("log", 1, ODD, 4), fold, Window("window", 1, ODD, 9)]
    return make_layout(memories, Field("hidden", "fp32", (8,)), 8)


def real() -> Layout:
    """Rings of many pieces, and a state that is longer than one."""
    memories = [Window("window", 0, ENTRY, 128), Log("log", 1, ENTRY, 4), Snapshot("state", 2, (Field("s", "fp32", (9001,)),))]
    return make_layout(memories, Field("hidden", "fp32", (4096,)), 1024)


class Movers:
    """Moves as the definition does, and counts launches."""

    def __init__(self) -> None:
        self.launches = 0

    def __call__(self, source: Tensor, target: Tensor, pieces: Tensor, word_bytes: int) -> None:
        self.launches += 1
        numbers = pieces.flatten().tolist()
        assert all(number % word_bytes == 0 for number in numbers) and max(pieces[2].tolist()) <= PIECE_BYTES
        written = sorted((to, to + count) for _, to, count in pieces.t().tolist() if count)
        assert all(end <= start for (_, end), (start, _) in pairwise(written)), "written twice"
        if source.data_ptr() == target.data_ptr():
            read = {at for first, _, count in pieces.t().tolist() for at in (first, first + count - 1) if count}
            assert not any(start <= at < end for at in read for start, end in written), "read and written in one launch"
        move(source, target, pieces, word_bytes)


def filled(layout: Layout, num_pages: int, seed: int) -> DeviceArena:
    arena = DeviceArena(layout, num_pages, CPU)
    arena.bytes.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return arena


def random_order(layout: Layout, num_pages: int, draw: random.Random) -> Order:
    """Any order over any pages, a frozen slot or a checkpoint taken over in place among them."""
    kind, position = draw.randrange(5), draw.choice([1, 2, 3, 5, 8, 13, 127, 128, 129, 300])
    if kind == 0:
        return CopyPage(*draw.sample(range(num_pages), 2))
    slot = tuple(draw.sample(range(num_pages), layout.slot_pages))
    count = layout.checkpoint_pages(position)
    frozen = slot[:count] if kind in (1, 2) else tuple(draw.sample(range(num_pages), count))
    return SaveSlot(slot, frozen, position) if kind in (1, 3) else RestoreSlot(frozen, slot, position)


@pytest.mark.parametrize("layout", [odd, real])
@pytest.mark.parametrize("seed", range(20))
def test_waves_give_what_the_sequence_gives(layout: Callable[[], Layout], seed: int) -> None:
    """Few pages, so that orders read and write what others have written."""
    draw, made = random.Random(seed), layout()
    num_pages = draw.choice([made.slot_pages + 2, 4 * made.slot_pages + 3])
    orders = tuple(random_order(made, num_pages, draw) for _ in range(draw.randrange(1, 9)))
    truth, found = filled(made, num_pages, seed), filled(made, num_pages, seed)
    before = truth.bytes.clone()
    truth.run(orders)
    run_waves(found.bytes.view(-1), CopyPlanner(made).waves(orders), Movers())
    assert torch.equal(found.bytes, truth.bytes), orders
    assert not torch.equal(before, truth.bytes)


def test_warming_up_moves_nothing() -> None:
    arena, movers = filled(odd(), 3, 1), Movers()
    before = arena.bytes.clone()
    warm_up(arena.bytes.view(-1), movers)
    assert movers.launches == len(WORDS) and torch.equal(arena.bytes, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
@pytest.mark.parametrize("layout", [odd, real])
@pytest.mark.parametrize("seed", range(5))
def test_on_a_gpu(layout: Callable[[], Layout], seed: int) -> None:
    draw, made = random.Random(seed), layout()
    num_pages = 4 * made.slot_pages + 3
    orders = tuple(random_order(made, num_pages, draw) for _ in range(6))
    truth, found = filled(made, num_pages, seed), DeviceArena(made, num_pages, torch.device("cuda"))
    found.bytes.copy_(truth.bytes)
    truth.run(orders)
    found.run(orders)
    assert torch.equal(found.bytes.cpu(), truth.bytes), orders


def test_a_step_is_one_launch_or_two() -> None:
    """Checkpoints, restored slots and opened blocks apart from each other: one launch. A slot frozen where it lies: two."""
    made = odd()
    size, planner = made.slot_pages, CopyPlanner(made)
    pages = iter(range(1000))

    def take(count: int) -> tuple[int, ...]:
        return tuple(next(pages) for _ in range(count))

    apart = [SaveSlot(take(size), take(made.checkpoint_pages(at)), at) for at in (5, 37)]
    restored = [RestoreSlot(take(made.checkpoint_pages(at)), take(size), at) for at in (4, 8)]
    copied = [CopyPage(*take(2))]
    movers = Movers()
    arena = filled(made, 1000, 1)
    run_waves(arena.bytes.view(-1), planner.waves([*apart, *restored, *copied]), movers)
    assert movers.launches == 1
    slot = take(size)
    frozen = SaveSlot(slot, slot[: made.checkpoint_pages(9)], 9)
    run_waves(arena.bytes.view(-1), planner.waves([*apart, frozen]), movers)
    assert movers.launches == 3
    run_waves(arena.bytes.view(-1), planner.waves([]), movers)
    assert movers.launches == 3


def test_a_surplus_page_given_away_at_once_is_read_before_it_is_written() -> None:
    """The slot that one request leaves is the slot that the next one is restored into: one wave, gathered first."""
    made = odd()
    size = made.slot_pages
    slot, other = tuple(range(size)), tuple(range(50, 50 + made.checkpoint_pages(9)))
    orders = (SaveSlot(slot, tuple(range(100, 100 + made.checkpoint_pages(7))), 7), RestoreSlot(other, slot, 9))
    waves = CopyPlanner(made).waves(orders)
    assert len(waves) == 1 and waves[0].spare_bytes > 0
    chained = (orders[0], RestoreSlot(orders[0].checkpoint, tuple(range(200, 200 + size)), 7))
    assert [wave.spare_bytes for wave in CopyPlanner(made).waves(chained)] == [0, 0]


def test_patterns_are_kept_and_bounded() -> None:
    made = real()
    planner = CopyPlanner(made)
    slot, frozen = tuple(range(made.slot_pages)), tuple(range(50, 50 + made.checkpoint_pages(1000)))
    for position in (1000, 1000 + 128):  # the ring has turned once
        planner.waves([SaveSlot(slot, frozen, position)])
    assert len(planner._patterns) == 1
    for position in range(1, 700):
        planner.waves([SaveSlot(slot, tuple(range(50, 50 + made.checkpoint_pages(position))), position)])
    assert len(planner._patterns) <= 256


def test_nothing_to_copy_is_no_launch() -> None:
    """A model whose slot holds nothing yet."""
    made = make_layout([Window("window", 0, ODD, 5), Log("log", 0, ODD, 1)], None, 8)
    assert CopyPlanner(made).waves([SaveSlot((0,) * made.slot_pages, (1,) * made.checkpoint_pages(0), 0)]) == []
