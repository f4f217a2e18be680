"""Attention against its definition, one query at a time in fp64, over memory full of NaN."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lamina.ops.attend import EntryScope, attend
from lamina.ops.attend import ref as attend_ref
from lamina.ops.store import EntryCodec, Store, attention_codec

ROWS_PER_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Case:
    """One step. lengths: (start, stop) of each sequence.   pick: entries chosen a query, None = all visible ones.

    valid: where the past of each sequence's window begins; 0 where nothing is said.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    size: int = 128
    ratio: int = 0
    pick: int | None = None
    heads: int = 4
    dim: int = 24
    cache_format: str = "fp32"
    seed: int = 0
    valid: tuple[int, ...] = ()

    def valid_from(self, number: int) -> int:
        """Where the past of one sequence's window begins."""
        return self.valid[number] if self.valid else 0


def cases() -> Iterator[Case]:
    for size in (1, 2, 3, 16, 63, 64, 65, 127, 128, 129, 200):
        yield Case(f"window {size}", ((0, 1), (0, 70), (size - 1, size), (size, size + 1), (size + 1, size + 66)), size)
    for start in (0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257):
        yield Case(f"from {start}", ((start, start + 1), (start, start + 3), (start, start + 130)), 128, 4)
    for ratio in (4, 128):
        near = [ratio * groups + more for groups in (1, 2) for more in (-2, -1, 0, 1)]
        yield Case(
            f"ratio {ratio}",
            tuple((max(0, stop - 2), stop) for stop in near) + tuple((stop - 1, stop) for stop in near),
            16,
            ratio,
        )
    for pick in (1, 5, 64):
        yield Case(f"pick {pick}", ((0, 9), (250, 300), (299, 300), (3, 4), (0, 3)), 20, 4, pick)
    for heads, dim in ((1, 16), (2, 40), (3, 24), (6, 48), (8, 64), (5, 160)):
        yield Case(f"{heads} heads of {dim}", ((0, 66), (130, 131), (200, 203)), 64, 4, 7, heads, dim)
    for cache_format in ("fp8", "bf16"):
        yield Case(cache_format, ((0, 40), (140, 150), (300, 301)), 128, 4, 9, cache_format=cache_format, dim=96)
    yield Case("long, gathered", ((8300, 8303), (8400, 8401), (9000, 9001), (8190, 8200), (5, 6)), 32, 4, 12, dim=16)
    # a past that begins with the step, one token, a tile or a window before it, or long ago
    for size in (1, 2, 16, 64, 65, 128, 200):
        starts = (1, 5, 64, 70, 128, 300, 300, 301, 400, 513, 600)
        ages = (0, 1, 64, 3, 0, size - 1, size, 64, 0, 127, 500)
        valid = tuple(max(0, start - age) for start, age in zip(starts, ages, strict=True))
        ratio, pick = (4 if size % 2 else 0), (5 if size == 65 else None)
        for count in (1, 3, 150):
            lengths = tuple((start, start + count) for start in starts)
            yield Case(f"{count} of a short past, window {size}", lengths, size, ratio, pick, valid=valid)
    yield Case("long, all", ((8300, 8303), (9000, 9001)), 32, 4, None, dim=16)


CASES = list(cases())


@dataclass(slots=True)
class World:
    """The arguments of one call, and what is stored for every position and entry of each sequence."""

    q: Tensor
    own: tuple[Tensor, ...]
    window: Store
    entries: EntryScope | None
    scale: float
    sink: Tensor
    parts: list
    raw: list[Tensor]
    packed: list[Tensor]


def random_rows(codec: EntryCodec, num: int, dim: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
    """Encoded rows and what reading them gives."""
    stored = codec.encode(torch.randn(num, dim, generator=generator))
    return stored, codec.decode(stored)


def build(case: Case, rows: ModuleType) -> World:
    generator = torch.Generator().manual_seed(case.seed)
    codec = attention_codec(case.cache_format, case.dim, 8)
    num = len(case.lengths)
    window = rows.poisoned_store(codec, 2 * num, case.size, column=1)
    blocks_each = max(-(-stop // ROWS_PER_BLOCK) for _, stop in case.lengths)
    pages = torch.randperm(num * blocks_each + 1, generator=generator).tolist()
    log = rows.poisoned_store(codec, num * blocks_each + 1, ROWS_PER_BLOCK // case.ratio) if case.ratio else None
    parts, raw, packed = [], [], []
    for number, (start, stop) in enumerate(case.lengths):
        blocks = tuple(pages[number * blocks_each : number * blocks_each + -(-stop // ROWS_PER_BLOCK)])
        parts.append(rows.Part(start, stop, blocks, (num + number, number), case.valid_from(number), stop))
        stored, values = random_rows(codec, stop, case.dim, generator)
        raw.append(values)
        held = torch.arange(max(case.valid_from(number), start - case.size + 1), start)  # no older row is in the ring
        window.write(torch.full_like(held, number), held % case.size, tuple(field[held] for field in stored))
        packed.append(torch.zeros(0, case.dim))
        if log is not None:
            stored, packed[-1] = random_rows(codec, stop // case.ratio, case.dim, generator)
            entry = torch.arange(stop // case.ratio)
            log.write(torch.tensor(blocks, dtype=torch.int64)[entry // log.rows_per_page], entry % log.rows_per_page, stored)
    where = rows.places(parts)
    padded = -(-len(where) // 8) * 8
    own = torch.zeros(padded, case.dim)
    selected = torch.full((padded, case.pick or 0), -1, dtype=torch.int64)
    for row, number, position in where:
        own[row] = raw[number][position]
        if case.ratio and case.pick:
            visible = (position + 1) // case.ratio
            chosen = torch.randperm(visible, generator=generator)[: case.pick].sort().values
            selected[row, : len(chosen)] = chosen
    q = torch.randn(padded, case.heads, case.dim, generator=generator)
    scope = None if log is None else EntryScope(log, case.ratio, selected if case.pick else None)
    sink = torch.randn(case.heads, generator=generator)
    return World(q, codec.encode(own), window, scope, case.dim**-0.5, sink, parts, raw, packed)


def run(case: Case, world: World, rows: ModuleType) -> Tensor:
    sequences = rows.arrays(world.parts, [case.ratio] if case.ratio else [], [case.size])
    return attend(world.q, world.own, world.window, case.size, world.entries, world.scale, world.sink, sequences)


def expected(case: Case, world: World, rows: ModuleType) -> Tensor:
    """The definition: explicit visible rows, fp64 softmax with a sink that has no value."""
    out = torch.zeros(world.q.shape, dtype=torch.float64)
    for row, number, position in rows.places(world.parts):
        seen = [world.raw[number][max(case.valid_from(number), position - case.size + 1) : position + 1]]
        if world.entries is not None:
            visible = range((position + 1) // case.ratio)
            if world.entries.selected is not None:
                visible = [entry for entry in world.entries.selected[row].tolist() if entry >= 0]
            seen.append(world.packed[number][list(visible)])
        values = torch.cat(seen).double()
        scores = world.q[row].double() @ values.T * world.scale
        sink = world.sink.double()[:, None]
        peak = torch.maximum(scores.amax(1, keepdim=True), torch.where(sink == math.inf, -math.inf, sink))
        weights = (scores - peak).exp()
        out[row] = weights @ values / (weights.sum(1, keepdim=True) + (sink - peak).exp())
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_definition(case: Case, rows: ModuleType) -> None:
    world = build(case, rows)
    found = run(case, world, rows)
    assert found.shape == world.q.shape and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected(case, world, rows), rtol=1e-5, atol=2e-6)
    assert not found[len(rows.places(world.parts)) :].any()


@pytest.mark.parametrize("case", [case for case in CASES if len(case.lengths) > 1], ids=lambda case: case.name)
def test_a_sequence_has_the_same_bits_alone_and_in_any_company(case: Case, rows: ModuleType) -> None:
    world = build(case, rows)
    together = run(case, world, rows)
    first = 0
    for part in world.parts:
        count = part.stop - part.start
        mine = list(range(first, first + count))
        padded = mine + [mine[0]] * (-count % 8)
        entries = world.entries
        if entries is not None and entries.selected is not None:
            entries = replace(entries, selected=entries.selected[padded])
        alone = World(
            world.q[padded],
            tuple(field[padded] for field in world.own),
            world.window,
            entries,
            world.scale,
            world.sink,
            [part],
            [],
            [],
        )
        assert rows.same_bits(run(case, alone, rows)[:count], together[mine]), (part.start, part.stop)
        first += count


@pytest.mark.parametrize("cut", [1, 2, 37, 64, 65, 129])
@pytest.mark.parametrize("pick", [None, 6])
@pytest.mark.parametrize("valid", [(), (150,), (101,)])
def test_cuts_do_not_change_bits(cut: int, pick: int | None, valid: tuple[int, ...], rows: ModuleType) -> None:
    """150 to 300 at once, and in steps of `cut` through the ring; also where the window's past begins at 150 or 101."""
    case = Case("whole", ((150, 300),), 100, 4, pick, valid=valid)
    world = build(case, rows)
    whole = run(case, world, rows)
    (part,) = world.parts
    for start in range(150, 300, cut):
        stop = min(300, start + cut)
        mine = list(range(start - 150, stop - 150))
        padded = mine + [mine[0]] * (-len(mine) % 8)
        entries = world.entries
        assert entries is not None
        if entries.selected is not None:
            entries = replace(entries, selected=entries.selected[padded])
        step = World(
            world.q[padded], tuple(field[padded] for field in world.own), world.window, entries, world.scale, world.sink,
            [replace(part, start=start, stop=stop)], [], [],
        )  # fmt: skip
        assert rows.same_bits(run(case, step, rows)[: len(mine)], whole[mine])
        kept = torch.arange(max(start, stop - 100), stop)  # older rows, and those before the past begins, stay NaN
        rows_kept = tuple(field[kept - 150] for field in world.own)
        world.window.write(torch.full_like(kept, part.slot[1]), kept % 100, rows_kept)


def test_masking_and_gathering_agree(rows: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("both", ((500, 520), (600, 601)), 32, 4, 9)
    world = build(case, rows)
    masked = run(case, world, rows)
    monkeypatch.setattr(attend_ref, "DENSE_ENTRIES", 64)
    torch.testing.assert_close(run(case, world, rows), masked, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ratio", [0, 4])
def test_sinks(ratio: int, rows: ModuleType) -> None:
    case = Case("sinks", ((0, 10), (130, 131), (40, 120)), 16, ratio)
    world = build(case, rows)
    where = [row for row, _, _ in rows.places(world.parts)]
    world.sink = torch.tensor([math.inf, -math.inf, 80.0, -80.0])
    found = run(case, world, rows)
    assert torch.isfinite(found).all()
    assert not found[where, 0].any(), "a sink of +inf takes all the weight"
    assert found[where, 2].abs().max() < 1e-20
    world.sink = torch.full((4,), -math.inf)
    bare = expected(case, world, rows)
    torch.testing.assert_close(found[:, [1, 3]].double(), bare[:, [1, 3]], rtol=1e-5, atol=2e-6)


def test_strided_queries_and_rows(rows: ModuleType) -> None:
    case = Case("strided", ((0, 20), (70, 71), (200, 204)), 16, 4)
    world = build(case, rows)
    plain = run(case, world, rows)
    world.q = world.q.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.full((world.own[0].shape[0], 3 * case.dim), torch.nan)
    wide[:, case.dim : 2 * case.dim] = world.own[0]
    world.own = (wide[:, case.dim : 2 * case.dim],)
    assert rows.same_bits(run(case, world, rows), plain)


def test_large_scores_do_not_overflow(rows: ModuleType) -> None:
    case = Case("large", ((0, 30), (99, 100)), 16, 4)
    world = build(case, rows)
    world.q *= 1e4
    found = run(case, world, rows)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.double(), expected(case, world, rows), rtol=1e-2, atol=1e-2)


def test_nothing_is_written(rows: ModuleType) -> None:
    case = Case("read only", ((60, 70), (130, 131)), 16, 4, 3)
    world = build(case, rows)
    assert world.entries is not None
    before = rows.bytes_of(world.window), rows.bytes_of(world.entries.log), world.q.clone()
    run(case, world, rows)
    assert torch.equal(before[0], rows.bytes_of(world.window)) and torch.equal(before[1], rows.bytes_of(world.entries.log))
    assert torch.equal(before[2], world.q)
