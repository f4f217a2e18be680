"""Choosing entries against a stable sort of the scores, with numbers small enough that fp32 is exact and ties are real."""

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lamina.ops.index_topk import index_topk
from lamina.ops.store import StateCodec, Store, index_codec

RATIO = 4


@dataclass(slots=True)
class World:
    """One call: queries [T, H, d], weights [T, H], the log, and the keys of each sequence."""

    queries: Tensor
    weights: Tensor
    log: Store
    parts: list
    keys: list[Tensor]


def build(rows: ModuleType, lengths: list[tuple[int, int]], heads: int, dim: int, spread: int, seed: int = 0) -> World:
    """Whole numbers from -spread to spread everywhere: every score is exact, and with a small spread many are equal."""
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-spread, spread + 1, shape, generator=generator).float()

    each = max(-(-stop // 256) for _, stop in lengths)
    order = torch.randperm(len(lengths) * each + 1, generator=generator).tolist()
    log = rows.poisoned_store(StateCodec(dim), len(order), 64)
    parts, keys = [], []
    for number, (start, stop) in enumerate(lengths):
        blocks = tuple(order[number * each : number * each + -(-stop // 256)])
        parts.append(rows.Part(start, stop, blocks, (0,)))
        keys.append(whole(stop // RATIO, dim))
        entry = torch.arange(stop // RATIO)
        log.write(torch.tensor(blocks)[entry // 64], entry % 64, (keys[-1],))
    padded = -(-sum(stop - start for start, stop in lengths) // 8) * 8
    return World(whole(padded, heads, dim), whole(padded, heads), log, parts, keys)


def run(rows: ModuleType, world: World, top_k: int) -> Tensor | None:
    return index_topk(world.queries, world.weights, world.log, rows.arrays(world.parts, [RATIO]), RATIO, top_k)


def expected(rows: ModuleType, world: World, top_k: int) -> dict[int, list[int]]:
    """Entries by row: the best scores, equal ones by number, listed in ascending order, then -1."""
    found = {}
    for row, number, position in rows.places(world.parts):
        keys = world.keys[number][: (position + 1) // RATIO].double()
        scores = (world.weights[row].double()[:, None] * (world.queries[row].double() @ keys.T).clamp(min=0)).sum(0)
        best = sorted(scores.argsort(descending=True, stable=True)[:top_k].tolist())
        found[row] = best + [-1] * (top_k - len(best))
    return found


LENGTHS = [(0, 70), (255, 257), (300, 301), (3, 4), (0, 3), (130, 200), (31, 32), (35, 36), (36, 37), (511, 513)]


@pytest.mark.parametrize("spread", [0, 1, 3, 40])
@pytest.mark.parametrize("top_k", [1, 2, 7, 8, 9, 63, 64, 65])
def test_the_definition_with_ties(spread: int, top_k: int, rows: ModuleType) -> None:
    world = build(rows, LENGTHS, heads=3, dim=6, spread=spread)
    found = run(rows, world, top_k)
    assert found is not None and found.dtype == torch.int64
    for row, entries in expected(rows, world, top_k).items():
        assert found[row].tolist() == entries, row


def test_no_answer_where_everything_is_visible(rows: ModuleType) -> None:
    """None at exactly top_k entries, an answer at one more."""
    assert run(rows, build(rows, [(0, 35), (30, 35)], 2, 4, 3), 8) is None
    assert run(rows, build(rows, [(0, 35), (30, 36)], 2, 4, 3), 8) is not None
    assert run(rows, build(rows, [(0, 3)], 2, 4, 3), 1) is None


def test_negative_scores_are_chosen_before_nothing(rows: ModuleType) -> None:
    """A weight can be negative; what is invisible counts as minus infinity, not as zero."""
    world = build(rows, [(0, 80), (76, 77)], 1, 4, 5)
    world.queries.abs_()
    for keys in world.keys:
        keys.abs_()
    world.log.views[0].abs_()
    world.weights.fill_(-1)
    found = run(rows, world, 5)
    assert found is not None
    for row, entries in expected(rows, world, 5).items():
        assert found[row].tolist() == entries


@pytest.mark.parametrize("heads", [1, 3, 8, 16, 24])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_real_numbers_against_fp64_and_in_any_company(heads: int, dim: int, rows: ModuleType) -> None:
    generator = torch.Generator().manual_seed(heads + dim)
    lengths = [(100, 170), (299, 300), (0, 40), (400, 402)]
    world = build(rows, lengths, heads, dim, 9)
    world.queries = torch.randn(world.queries.shape, generator=generator)
    world.weights = torch.randn(world.weights.shape, generator=generator)
    found = run(rows, world, 6)
    assert found is not None
    exact = expected(rows, world, 6)
    wrong = [row for row in exact if found[row].tolist() != exact[row]]
    assert not wrong  # margins of these seeds are far above fp32 errors
    first = 0
    for part in world.parts:
        count = part.stop - part.start
        mine = [*range(first, first + count)]
        padded = mine + [mine[0]] * (-count % 8)
        alone = run(rows, World(world.queries[padded], world.weights[padded], world.log, [part], []), 6)
        if alone is not None:
            assert torch.equal(alone[:count], found[mine])
        first += count


def test_stored_formats(rows: ModuleType) -> None:
    """Keys as stored in fp4 and fp8, queries in the same basis: the scores are those of the stored values."""
    for index_format in ("fp4", "fp8", "bf16"):
        codec = index_codec(index_format, 64)
        generator = torch.Generator().manual_seed(1)
        log = rows.poisoned_store(codec, 3, 64)
        stored = codec.encode(torch.randn(100, 64, generator=generator))
        entry, blocks = torch.arange(100), torch.tensor([2, 0])
        log.write(blocks[entry // 64], entry % 64, stored)
        queries = codec.decode(codec.encode(torch.randn(16 * 8, 64, generator=generator))).unflatten(0, (8, 16))
        world = World(
            queries, torch.randn(8, 16, generator=generator), log, [rows.Part(395, 403, (2, 0), (0,))], [codec.decode(stored)]
        )
        found = run(rows, world, 10)
        assert found is not None
        assert {row: found[row].tolist() for row in range(8)} == expected(rows, world, 10)
