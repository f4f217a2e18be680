"""Grouped attention of `triton.py` against `ref.py`: on a GPU if there is one, else in Triton's interpreter."""

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lamina.ops.attend_heads import HeadsCase, Past
from lamina.ops.attend_heads import attend_heads as definition
from lamina.ops.machine import Machine
from lamina.ops.rope_norm import rms_norm, rotate
from lamina.ops.rows import Rows, rows_of
from lamina.ops.store import HeadsCodec, Place, Store

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lamina.ops.attend_heads import kernels
from lamina.ops.attend_heads.triton import attend_heads, choose_tiles, keep_rows, project_heads, refuses
from tests.ops.kernel_tests import DEVICE, HAS_GPU, INTERPRETED, compiles_kernels, machine_code, runs_kernels, starts_interpreter

BF16, FP32 = torch.bfloat16, torch.float32
FAR = 1 << 30
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """One step. lengths: (start, stop) of each request.   valid: where the past of each request's window begins.

    padding: rows of nobody.
    """

    lengths: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    window: int | None = None
    reset: int | None = None
    softcap: float = 0.0
    has_sinks: bool = False
    cache: str = "fp32"
    dtype: torch.dtype = FP32
    valid: tuple[int, ...] = ()
    padding: int = 2
    block_tokens: int = 16

    @property
    def in_log(self) -> bool:
        return self.window is None and self.reset is None


def cases() -> Iterator[Case]:
    """Borders of windows, chunks, pages and tiles; every format; shapes that are no powers of two."""
    yield Case(((0, 1), (0, 3), (15, 17), (16, 17), (63, 66)))
    yield Case(((0, 1), (1, 2), (99, 100), (31, 35)), heads=2, kv_heads=2, dim=12, cache="bf16", block_tokens=24)
    yield Case(((0, 2), (40, 42)), heads=6, kv_heads=2, dim=20, cache="fp8", has_sinks=True)
    yield Case(((30, 33), (17, 18)), heads=17, kv_heads=1, dim=40, softcap=3.0)
    for window in (1, 17):
        yield Case(((0, 1), (0, 3), (window - 1, window), (window, window + 1), (window + 1, window + 3)), window=window)
    yield Case(((0, 5), (50, 52), (70, 71)), window=20, has_sinks=True, cache="bf16", dim=32)
    yield Case(((0, 5), (14, 18), (31, 32), (32, 33)), reset=16, cache="fp8")
    yield Case(((30, 36), (33, 34)), window=10, reset=16)
    yield Case(((70, 72), (40, 41), (16, 17), (33, 36)), window=16, valid=(70, 39, 1, 30))
    yield Case(((0, 9), (20, 29)), 2, 1, dtype=BF16, cache="bf16")
    if HAS_GPU:
        lengths = ((0, 2), (127, 230), (2040, 2052), (5000, 5003), (300, 301))
        real = Case(lengths, 32, 8, 128, cache="bf16", dtype=BF16)
        yield real
        yield replace(real, cache="fp8", block_tokens=48)
        yield replace(real, window=1000, softcap=30.0, has_sinks=True)
        yield replace(real, heads=8, kv_heads=8, dim=64)
        yield replace(real, heads=64, kv_heads=1, dim=256)
        yield replace(real, heads=12, kv_heads=4, dim=96)
        yield replace(real, cache="fp32", dtype=FP32)


@dataclass(slots=True)
class World:
    """The arguments of one call on DEVICE, and what the definition gives on the CPU, fp32 [T, H * d]."""

    q: Tensor
    own: tuple[Tensor, ...]
    past: Past
    case: HeadsCase
    rows: Rows
    longest: int
    truth: Tensor


def on_device(store: Store) -> Store:
    """The same bytes on DEVICE."""
    arena = torch.tensor([], dtype=torch.uint8).set_(store.views[0].untyped_storage()).to(DEVICE)
    views = [arena.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset()) for view in store.views]
    return Store(store.codec, tuple(views), store.slot_column, store.place)


def placed(store: Store, in_log: bool) -> Store:
    return Store(store.codec, store.views, store.slot_column, Place("block") if in_log else None)


def build(case: Case, helpers: ModuleType, sinks: Tensor | None = None, keep: tuple[int, ...] | None = None) -> World:
    """keep: the requests that take part, in this order; what they store does not depend on it."""
    codec = HeadsCodec(case.kv_heads, case.dim, case.dim, case.cache)
    num = len(case.lengths)
    size = case.block_tokens if case.in_log else max(case.window or 0, case.reset or 0)
    each = max(-(-stop // case.block_tokens) for _, stop in case.lengths)
    store = placed(helpers.poisoned_store(codec, num * each + 1 if case.in_log else 2 * num, size, column=1), case.in_log)
    pages = torch.randperm(num * each + 1, generator=torch.Generator().manual_seed(7)).tolist()
    parts, fields, queries = [], [], []
    for number in keep or range(num):
        generator = torch.Generator().manual_seed(number)
        start, stop = case.lengths[number]
        valid = case.valid[number] if case.valid else 0
        blocks = tuple(pages[number * each : number * each + -(-stop // case.block_tokens)])
        parts.append(helpers.Part(start, stop, blocks, (num + number, number), valid, stop))
        stored = codec.encode(torch.randn(stop, codec.width, generator=generator))
        if case.in_log:
            held = torch.arange(stop)
            store.write(torch.tensor(blocks)[held // size], held % size, stored)
        else:
            held = torch.arange(max(valid, start - size, 0), start)  # no older row is in the ring
            store.write(torch.full_like(held, number), held % size, tuple(field[held] for field in stored))
        fields.append(tuple(field[start:] for field in stored))
        queries.append(torch.randn(stop - start, case.heads, case.dim, generator=generator).to(case.dtype))
    count = sum(part.stop - part.start for part in parts)
    total = -(-(count + case.padding) // 8) * 8
    own = tuple(torch.full((total, field.shape[1]), helpers.POISON, dtype=torch.uint8).to(field.dtype) for field in fields[0])
    for field, filled in enumerate(own):
        if filled.dtype.is_floating_point:
            filled.fill_(torch.nan)
        filled[:count] = torch.cat([one[field] for one in fields])
    q = torch.full((total, case.heads, case.dim), torch.nan, dtype=case.dtype)
    q[:count] = torch.cat(queries)
    if sinks is None and case.has_sinks:
        sinks = torch.randn(case.heads, generator=torch.Generator().manual_seed(1))
    sequences = helpers.arrays(parts)
    same = HeadsCase(case.heads, case.kv_heads, case.dim**-0.5, case.window, case.reset, case.softcap, sinks)
    finite = tuple(torch.where(torch.isnan(part), 0, part) if part.dtype.is_floating_point else part for part in own)
    truth = definition(torch.nan_to_num(q.float()), finite, Past(store, codec), same, sequences).flatten(1)
    tables = torch.full((num + 3, each + 2), FAR, dtype=torch.int32)  # nobody may follow these
    for piece, part in zip(sequences.pieces, parts, strict=True):
        tables[piece.table_row, : len(part.blocks)] = torch.tensor(part.blocks, dtype=torch.int32)
    rows = rows_of(sequences.pieces, tuple(part.slot for part in parts), tables.to(DEVICE), total, len(parts) + 1)
    moved = () if case.in_log else tuple(part.to(DEVICE) for part in own)
    there = replace(same, sinks=None if sinks is None else sinks.to(DEVICE))
    longest = max(part.stop for part in parts)
    return World(q.to(DEVICE), moved, Past(on_device(store), codec), there, rows, longest, truth)


def run(world: World, order: str, longest: int = 0, **changed: int) -> Tensor:
    """The launches, their outputs poisoned."""
    q, case = world.q, world.case
    is_exact = FP32 in (q.dtype, world.past.store.views[0].dtype)
    tiles = choose_tiles(case.heads // case.kv_heads, case.kv_heads, q.shape[2], is_exact or INTERPRETED, order)
    tiles = replace(tiles, **changed) if changed else tiles
    out = torch.full((q.shape[0], q.shape[1] * q.shape[2]), torch.nan, dtype=q.dtype, device=DEVICE)
    return attend_heads(q, world.own, world.past, case, world.rows, order, longest or world.longest, tiles, out)


def error(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm; 0 for two zeros."""
    return float((found.double().cpu() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@runs_kernels
@pytest.mark.parametrize("order", ["decode", "prefill"])
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_the_definition(case: Case, order: str, rows: ModuleType) -> None:
    """Each row by itself, so that a wrong one does not hide."""
    world = build(case, rows)
    found = run(world, order)
    assert torch.isfinite(found).all()
    for row in range(world.truth.shape[0]):
        assert error(found[row], world.truth[row]) < (2e-5 if case.dtype == FP32 else 1e-2), row
    assert not found[world.rows.owners < 0].any()


LONG = Case(((0, 2), (60, 61), (120, 121), (33, 36)), 4, 2, block_tokens=24, padding=1)
REAL = Case(((0, 2), (2040, 2041), (1030, 1031), (33, 140)), 32, 8, 128, cache="bf16", dtype=BF16)


@runs_kernels
@pytest.mark.parametrize("order", ["decode", "prefill"])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("case", [LONG, REAL] if HAS_GPU else [LONG], ids=lambda case: f"dim={case.dim}")
def test_bits_do_not_depend_on_the_other_rows(case: Case, window: int | None, order: str, rows: ModuleType) -> None:
    """Nor on how long others may be, nor on their order."""
    case = replace(case, window=window)
    changed = {"least_tiles": 1, "splits": 5} if case.dim == 16 else {}
    together = run(build(case, rows), order, **changed)
    for keep in ((1,), (2, 1, 3, 0)):
        world = build(replace(case, padding=9), rows, keep=keep)
        alone = run(world, order, 100 * world.longest, **changed)
        at = 0
        for number in keep:
            first = sum(stop - start for start, stop in case.lengths[:number])
            count = case.lengths[number][1] - case.lengths[number][0]
            assert torch.equal(bits(alone[at : at + count]), bits(together[first : first + count])), keep
            at += count


@runs_kernels
@pytest.mark.parametrize("order", ["decode", "prefill"])
@pytest.mark.parametrize("window", [None, 20])
def test_cuts_do_not_change_bits(window: int | None, order: str, rows: ModuleType) -> None:
    """The last rows of a request, in one step with those before and in one of their own: through the ring instead."""
    start, stop, cut = 60, 66, 4
    whole = run(build(Case(((start, stop),), window=window, padding=1), rows), order)
    world = build(Case(((start, stop),), window=window, padding=1), rows)
    if window is not None:
        kept = torch.arange(start, stop - cut)
        for view, field in zip(world.past.store.views, world.own, strict=True):
            view[0, kept % window] = field[: len(kept)]
    rest = torch.arange(stop - start - cut, stop - start).to(DEVICE)
    part = replace(
        world.rows, positions=world.rows.positions[rest], owners=world.rows.owners[rest], first_rows=world.rows.first_rows * 0,
        starts=torch.where(world.rows.stops > 0, stop - cut, 0).int(),
    )  # fmt: skip
    own = tuple(field[rest].contiguous() for field in world.own)
    later = replace(world, q=world.q[rest].contiguous(), own=own, rows=part)
    assert torch.equal(bits(run(later, order)), bits(whole[stop - start - cut : stop - start]))


@runs_kernels
@pytest.mark.parametrize("order", ["decode", "prefill"])
@pytest.mark.parametrize("window", [None, 16])
def test_sinks(window: int | None, order: str, rows: ModuleType) -> None:
    case = Case(((0, 2), (70, 71)), window=window, padding=5)
    sinks = torch.tensor([1e4, -math.inf, 80.0, -80.0])
    world = build(case, rows, sinks)
    found = run(world, order).view(-1, 4, case.dim).cpu()
    assert torch.isfinite(found).all()
    assert not found[:, 0].any(), "a sink that is large takes all the weight"
    assert found[:, 2].abs().max() < 1e-20
    assert error(found, world.truth.view(found.shape)) < 2e-6
    world.case.sinks[0] = math.inf
    assert not run(world, order).view(-1, 4, case.dim)[:, 0].any()


@runs_kernels
@pytest.mark.parametrize("order", ["decode", "prefill"])
@pytest.mark.parametrize("window", [None, 16])
def test_a_step_of_padding_alone(window: int | None, order: str, rows: ModuleType) -> None:
    world = build(replace(LONG, window=window), rows)
    world.rows.owners.fill_(-1)
    world.rows.positions.fill_(1 << 20)
    for zeroed in (world.rows.starts, world.rows.stops, world.rows.first_rows):
        zeroed.zero_()
    assert not run(world, order).any()


@runs_kernels
@pytest.mark.parametrize("order", ["decode", "prefill"])
def test_large_scores_and_one_rows_nan(order: str, rows: ModuleType) -> None:
    world = build(LONG, rows)
    clean = run(world, order)
    world.q[:2] *= 1e6
    world.q[3] = torch.nan
    found = run(world, order)
    assert torch.isfinite(found[:3]).all() and torch.isnan(found[3]).all()
    assert torch.equal(bits(found[4:]), bits(clean[4:]))


@runs_kernels
def test_many_requests(rows: ModuleType) -> None:
    """More than are counted at a time."""
    case = Case(tuple((number % 3, number % 3 + 1 + number // 65) for number in range(67)), 1, 1, padding=3)
    world = build(case, rows)
    assert error(run(world, "prefill"), world.truth) < 2e-6


@runs_kernels
@pytest.mark.parametrize("dtype", [FP32, BF16] if HAS_GPU else [FP32])
def test_every_code_is_read_exactly(dtype: torch.dtype, rows: ModuleType) -> None:
    """A query that sees one row gives the row back: all e4m3 codes but NaN."""
    case = Case(((0, 1),) * 2, 2, 1, 128, cache="fp8", dtype=dtype, window=4)
    world = build(case, rows)
    world.q.zero_()
    codes = torch.arange(256, dtype=torch.uint8).masked_fill((torch.arange(256) & 127) == 127, 0).to(DEVICE)
    world.own[1][:2] = codes.view(2, 128)
    for order in ("decode", "prefill"):
        found = run(world, order)[:2].view(2, 2, 128)
        assert torch.equal(found[:, 0].cpu().float(), codes.cpu().view(torch.float8_e4m3fn).float().view(2, 128)), order


# Projections ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Projection:
    """What follows a projection of queries, keys and values."""

    rope: int = 16
    is_pairs: bool = False
    norms: bool = False
    after: bool = False
    v_norm: float = 0.0
    has_bias: bool = False
    is_warm: bool = False
    dim: int = 16
    of_all: bool = False
    has_gates: bool = False


PROJECTIONS = [
    Projection(), Projection(8, True, has_bias=True), Projection(0, norms=True),
    Projection(12, norms=True, dim=12, has_bias=True),
    Projection(8, norms=True, after=True), Projection(v_norm=1e-5, is_warm=True), Projection(20, True, True, True, dim=20),
    Projection(8, norms=True, has_bias=True, dim=12, of_all=True),
    Projection(8, True, True, v_norm=1e-5, of_all=True, has_gates=True),
]  # fmt: skip


@runs_kernels
@pytest.mark.parametrize("place", ["log", "ring", "single"])
@pytest.mark.parametrize(
    ("given", "cache", "dtype"),
    [
        *((given, "fp32", FP32) for given in PROJECTIONS[:3]),
        (PROJECTIONS[0], "fp8", FP32),
        (PROJECTIONS[3], "bf16", BF16),
        *(pytest.param(given, "fp32", FP32, marks=pytest.mark.long) for given in PROJECTIONS[3:]),
        pytest.param(PROJECTIONS[3], "bf16", FP32, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_projections(given: Projection, cache: str, dtype: torch.dtype, place: str, rows: ModuleType) -> None:
    """Queries, keys and values as plain PyTorch gives them; what is kept lies where it belongs, and nothing else changes."""
    heads, kv_heads, dim = 4, 2, given.dim
    codec = HeadsCodec(kv_heads, dim, dim, cache)
    in_log = place == "log"
    spans = ((5, 6), (19, 20), (0, 1)) if place == "single" else ((5, 6), (19, 25), (0, 3))
    store = placed(rows.poisoned_store(codec, 12, 8, column=1), in_log)
    there = on_device(store)
    parts = [
        rows.Part(start, stop, (3 * n, 3 * n + 1, 3 * n + 2, 11), (n, 6 + n), 0, start + n)
        for n, (start, stop) in enumerate(spans)
    ]
    sequences = rows.arrays(parts)
    count, total = sequences.num_rows, 16
    tables = torch.full((8, 4), FAR, dtype=torch.int32)
    for piece, part in zip(sequences.pieces, parts, strict=True):
        tables[piece.table_row] = torch.tensor(part.blocks, dtype=torch.int32)
    step = rows_of(sequences.pieces, tuple(part.slot for part in parts), tables.to(DEVICE), total, 4)
    generator = torch.Generator().manual_seed(3)
    width = (heads + 2 * kv_heads) * dim
    x = torch.full((total, width + 5), torch.nan)
    x[:count] = torch.randn(count, width + 5, generator=generator)
    x = x.to(dtype)
    bias = torch.randn(width, generator=generator) if given.has_bias else None
    sizes = [count * dim if given.of_all else dim for count in (heads, kv_heads)]
    gains = [torch.randn(size, generator=generator) for size in sizes] if given.norms else None
    angles = step.positions.cpu()[:, None] * 100.0 ** -(torch.arange(0, given.rope, 2) / max(1, given.rope))
    turns = (angles.cos(), angles.sin()) if given.rope else None
    warmth = torch.rand(total, generator=generator) + 1 if given.is_warm else None

    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(DEVICE)

    norms = [None if gains is None else (moved(gain), 1e-5) for gain in gains or (None, None)]
    same = HeadsCase(heads, kv_heads, 1.0, None if in_log else 8)
    projected = moved(x)[:, :width]
    if given.has_gates:  # behind each query
        gates = torch.full((total, heads, 2, dim), 3.0, dtype=dtype)
        gates[:, :, 0] = x[:, : heads * dim].view(total, heads, dim)
        projected = moved(torch.cat([gates.flatten(1), x[:, heads * dim : width]], 1))
    queries, own = project_heads(
        projected, moved(bias), same, Past(there, codec), step, dtype,
        None if turns is None else (turns[0].to(DEVICE), turns[1].to(DEVICE)), given.is_pairs, *norms, given.v_norm, given.after,
        moved(warmth), given.has_gates, given.of_all,
    )  # fmt: skip

    def kept(value: Tensor) -> Tensor:
        return value.to(dtype).float()

    values = kept(x[:count, :width].float() + (bias if bias is not None else 0)).view(count, -1, dim)
    both, v = values[:, : heads + kv_heads], values[:, heads + kv_heads :]

    def normed(both: Tensor) -> Tensor:
        if gains is None:
            return both
        parts = (both[:, :heads], both[:, heads:])
        if given.of_all:
            parts = tuple(part.flatten(1) for part in parts)
        found = [rms_norm(part, gain, 1e-5) for part, gain in zip(parts, gains, strict=True)]
        return kept(torch.cat([part.view(count, -1, dim) for part in found], 1))

    both = both if given.after else normed(both)
    if turns is not None:
        order = torch.arange(given.rope) if given.is_pairs else torch.arange(given.rope).view(2, -1).t().flatten()
        cos, sin = (turn[:count, None].repeat_interleave(2, -1) for turn in turns)
        sin = sin * torch.tensor([-1.0, 1.0]).repeat(given.rope // 2)
        turned = both.clone()
        turned[..., order] = kept(rotate(both[..., order], cos, sin))
        both = turned
    both = normed(both) if given.after else both
    v = kept(rms_norm(v, None, given.v_norm)) if given.v_norm else v
    asked = both[:, :heads] * (warmth[:count, None, None] if warmth is not None else 1)
    tolerance = 1e-5 if dtype == FP32 else 1e-2
    assert error(queries[:count], asked) < tolerance
    pack = codec.pack(both[:, heads:].contiguous(), v.contiguous())
    loose = 1e-5 if cache == "fp32" else 2e-2
    truth = [view.clone() for view in store.views]
    at = [(row, number, position) for row, number, position in rows.places(parts)]
    if not in_log:
        for found, wanted in zip(own, pack, strict=True):
            assert error(as_fp32(found[:count]), as_fp32(wanted)) < loose
    if place != "ring":
        for row, number, position in at:
            page = parts[number].blocks[position // 8] if in_log else parts[number].slot[1]
            if in_log and position < parts[number].write_from:
                continue
            for view, wanted in zip(truth, pack, strict=True):
                view[page, position % 8] = wanted[row]
    else:
        keep_rows(own, there, step)
        for row, number, position in at:
            for view, wanted in zip(truth, pack, strict=True):
                if position >= parts[number].stop - 8:
                    view[parts[number].slot[1], position % 8] = wanted[row]
    for view, wanted in zip(there.views, truth, strict=True):
        found, wanted = as_fp32(view.cpu()), as_fp32(wanted)
        assert torch.equal(found.isnan(), wanted.isnan()), "something else was written, or something was not"
        assert error(found.nan_to_num(), wanted.nan_to_num()) < loose


def as_fp32(x: Tensor) -> Tensor:
    """fp32 of a stored field, whatever its type."""
    return (x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x).float().cpu()


# Machine code ---------------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    good = Machine("cuda", (9, 0), True)
    assert refuses(good, 257) == "heads must have 1 to 256 dims, not 257"
    if not INTERPRETED:
        assert refuses(good, 128) is None
        assert refuses(Machine("cpu", (0, 0), True), 128) == "runs on NVIDIA GPUs, not on cpu"
        assert refuses(Machine("cuda", (7, 5), True), 128) is not None


def types_of(cache: str) -> dict[str, str]:
    """Argument types of the kernels for bf16 activations."""
    stored = {"fp8": "*u8", "bf16": "*bf16", "fp32": "*fp32"}[cache]
    act = "*fp32" if cache == "fp32" else "*bf16"
    types = dict.fromkeys(("sinks", "partial", "peaks", "sums", "bias", "q_gain", "k_gain", "cos", "sin", "warmth"), "*fp32")
    types |= dict.fromkeys(("own_k", "own_v", "kept_k", "kept_v"), stored) | dict.fromkeys(("q", "out", "x", "queries"), act)
    types |= dict.fromkeys(("factor", "softcap", "q_eps", "k_eps", "v_eps"), "fp32")
    integers = (
        "k_page", "v_page", "table_width", "slot_stride", "slot_column", "num_rows", "num_requests", "x_stride", "grid_splits",
    )  # fmt: skip
    return types | dict.fromkeys(integers, "i32")


COMPILED = [
    (90, "bf16", "decode", 4, 128, 0, "HMMA.16816"), (90, "bf16", "prefill", 4, 128, 0, "HGMMA.64x128x16"),
    (90, "fp8", "decode", 4, 128, 4096, "HMMA.16816"), (90, "bf16", "prefill", 2, 256, 0, "HGMMA"),
    (80, "bf16", "decode", 4, 128, 0, "HMMA.16816"), (80, "bf16", "prefill", 4, 128, 4096, "HMMA.16816"),
]  # fmt: skip
COMPILED_TOO = [
    (90, "bf16", "prefill", 4, 128, 4096, "HGMMA.64x128x16"), (90, "fp8", "prefill", 1, 64, 0, "HGMMA.64x64x16"),
    (90, "bf16", "decode", 8, 256, 0, "HMMA.16816"), (90, "bf16", "decode", 4, 128, 4096, "HMMA.16816"),
    (90, "fp32", "decode", 4, 128, 0, "FFMA"), (90, "fp32", "prefill", 4, 128, 0, "FFMA"),
    (80, "fp8", "prefill", 4, 128, 0, "HMMA.16816"), (80, "bf16", "prefill", 2, 256, 0, "HMMA.16816"),
]  # fmt: skip


@compiles_kernels
@pytest.mark.parametrize(
    ("capability", "cache", "order", "group", "dim", "window", "instruction"),
    [*COMPILED, *(pytest.param(*one, marks=pytest.mark.long) for one in COMPILED_TOO)],
)
def test_compiled_ahead_of_time(
    capability: int, cache: str, order: str, group: int, dim: int, window: int, instruction: str
) -> None:
    """The products use the tensor cores, and no register is spilled."""
    tiles = choose_tiles(group, 8, dim, cache == "fp32", order, cache == "fp8", capability == 90)
    constants = {
        "HEADS": 8 * group, "KV": 8, "D": dim, "W": dim, "HEAD_TILE": tiles.heads, "TILE": tiles.rows, "WINDOW": window,
        "RESET": 0, "PAGE_ROWS": 4096 if window else 16, "IN_LOG": not window, "IN_WINDOW": False, "HAS_CAP": False,
        "EXACT": cache == "fp32", "STAGES": tiles.stages,
    }  # fmt: skip
    if order == "decode":
        constants |= {"SPLITS": tiles.splits, "LEAST_TILES": tiles.least_tiles}
    else:
        constants |= {"QUERIES": tiles.queries, "sinks": None}
    kernel = kernels.attend_split if order == "decode" else kernels.attend_tiles
    types = {name: "*i32" for name in kernel.arg_names} | types_of(cache)
    code = machine_code(kernel, types, constants, capability, tiles.warps, tiles.stages, aligned=("k_page", "v_page"))
    assert code.count(instruction) > 0
    assert code.spills == 0, (code.spills, code.registers, tiles)
    if cache == "bf16":
        assert code.count("LDGSTS.E.BYPASS.128") > 0, "rows are not copied ahead, 16 bytes a thread"


@starts_interpreter
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)


@runs_kernels
@pytest.mark.parametrize("order", ["decode", "prefill"])
def test_the_pages_of_a_large_window(order: str, rows: ModuleType) -> None:
    """The bits of a ring; blocks that a request does not hold are not followed."""
    case = Case(((0, 1), (0, 3), (16, 17), (17, 18), (40, 44)), window=17)
    world = build(case, rows)
    codec, size = HeadsCodec(case.kv_heads, case.dim, case.dim, case.cache), 8
    store = rows.poisoned_store(codec, 50, size, column=1)
    tables = torch.full((1, world.rows.tables.shape[0], 8), -1, dtype=torch.int32)
    for number, (start, _) in enumerate(case.lengths):
        for position in range(max(0, start - 16), start):
            page = 8 * number + position // size
            tables[0, world.rows.table_rows[number], position // size] = page
            for view, ring in zip(store.views, world.past.store.views, strict=True):
                view[page, position % size] = ring[number, position % 17].cpu()
    paged = on_device(Store(codec, store.views, store.slot_column, Place("window")))
    there = replace(world, past=Past(paged, codec), rows=replace(world.rows, windows=(tables.to(DEVICE),)))
    assert torch.equal(bits(run(there, order)), bits(run(world, order)))
