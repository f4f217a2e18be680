"""Attention of `triton.py` against `ref.py`: on a GPU if there is one, else in Triton's interpreter, in its own process."""

import importlib.util
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lamina.ops.attend import AttendCase, EntryScope, Range, Selected
from lamina.ops.attend import attend as definition
from lamina.ops.gemm.stored import Activation, empty_activation
from lamina.ops.machine import Machine
from lamina.ops.quantise import e8m0_to_fp32, quantise_fp8
from lamina.ops.rope_norm import unrotate
from lamina.ops.rows import Rows, rows_of
from lamina.ops.store import Store, attention_codec

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
from kernel_tests import long_but
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from lamina.ops.attend import hopper, kernels
from lamina.ops.attend.triton import AttendStep, choose_tiles, fuses_quantising, refuses, split_tiles, tiles_for

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU else "cpu"
runs_kernels = pytest.mark.skipif(not (HAS_GPU or INTERPRETED), reason="runs in the process that test_interpreted starts")
BLOCK_TOKENS = 256
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, slots=True)
class Case:
    """One step. lengths: (start, stop) of each request.   pick: places of a query, None = all visible entries.

    valid: where the past of each request's window begins.   padding: rows of nobody.
    """

    lengths: tuple[tuple[int, int], ...]
    size: int = 16
    ratio: int = 0
    pick: int | None = None
    heads: int = 4
    dim: int = 32
    rope: int = 8
    cache: str = "fp32"
    dtype: torch.dtype = FP32
    is_fp8: bool = False
    valid: tuple[int, ...] = ()
    padding: int = 2
    block_tokens: int = BLOCK_TOKENS


def cases() -> Iterator[Case]:
    """Borders of window, entries and blocks; every format; shapes that are no powers of two."""
    for size in (1, 17):
        yield Case(((0, 1), (0, 4), (size - 1, size), (size, size + 1), (size + 1, size + 3)), size, heads=2)
    yield Case(((15, 18), (16, 17), (30, 31)), 16, heads=2)
    yield Case(((0, 3), (3, 4), (4, 5), (15, 17), (255, 258)), 16, 4, heads=2)
    yield Case(((127, 129), (255, 256), (382, 383), (5, 6)), 8, 128, heads=2)
    yield Case(((0, 5), (254, 256), (99, 100), (3, 4)), 20, 4, 5, heads=2, cache="fp8")
    yield Case(((0, 2), (342, 344), (99, 100)), 16, 4, 84, heads=3, dim=88, rope=16, cache="fp8", dtype=BF16, is_fp8=True)
    yield Case(((62, 65), (99, 100)), 16, 4, 7, heads=2, dim=128, rope=64, cache="fp8", dtype=BF16, is_fp8=True)
    yield Case(((30, 33), (99, 100)), 16, 4, None, heads=17, dim=24, rope=8, cache="bf16", dtype=BF16)
    yield Case(((30, 32), (99, 100)), 16, 4, 3, heads=1, dim=40, rope=16, cache="bf16")
    yield Case(((30, 32), (99, 100)), 16, 4, 3, heads=4, dim=64, rope=16, cache="fp32", dtype=BF16, is_fp8=True)
    yield Case(((70, 72), (40, 41), (16, 17), (33, 36)), 16, 4, heads=2, valid=(70, 39, 1, 30))
    yield Case(((40, 42), (50, 51)), 16, 4, None, heads=2, block_tokens=24)
    if HAS_GPU:
        lengths = ((0, 2), (127, 130), (2040, 2052), (5000, 5003), (300, 301))
        real = Case(lengths, 128, 4, 512, heads=64, dim=512, rope=64, cache="fp8", dtype=BF16, is_fp8=True)
        yield real
        yield replace(real, heads=128)
        yield replace(real, heads=20, is_fp8=False)
        yield replace(real, ratio=128, pick=None, valid=(0, 100, 2000, 5000, 200))
        yield replace(real, ratio=0, pick=None)
        yield replace(real, cache="bf16")
        yield replace(real, pick=64, cache="fp32", dtype=FP32, is_fp8=False)


def in_turn(values: Iterable[object]) -> "list[pytest.ParameterSet]":
    """(value, order) for both orders; `make test` runs each value with one of them."""
    both = [(value, order) for value in values for order in ("decode", "prefill")]
    return long_but({2 * place + place % 2 for place in range(len(both))}, both)


@dataclass(slots=True)
class World:
    """The arguments of one call on DEVICE, and those of the definition on the CPU."""

    q: Tensor
    own: tuple[Tensor, ...]
    window: Store
    scope: Selected | Range | None
    sink: Tensor
    cos: Tensor
    sin: Tensor
    rows: Rows
    truth: Tensor  # of the definition, rotated back, fp32 [T, H * d]


def on_device(store: Store) -> Store:
    """The same bytes on DEVICE."""
    arena = torch.tensor([], dtype=torch.uint8).set_(store.views[0].untyped_storage()).to(DEVICE)
    views = [arena.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset()) for view in store.views]
    return Store(store.codec, tuple(views), store.slot_column)


def build(case: Case, helpers: ModuleType, sink: Tensor | None = None, keep: tuple[int, ...] | None = None) -> World:
    """keep: the requests that take part, in this order; what they store does not depend on it."""
    codec = attention_codec(case.cache, case.dim, case.rope)
    num = len(case.lengths)
    ring = max(case.size, 16)
    window = helpers.poisoned_store(codec, 2 * num, ring, column=1)
    blocks_each = max(-(-stop // case.block_tokens) for _, stop in case.lengths)
    pages = torch.randperm(num * blocks_each + 1, generator=torch.Generator().manual_seed(7)).tolist()
    log = helpers.poisoned_store(codec, num * blocks_each + 1, case.block_tokens // case.ratio) if case.ratio else None
    parts, fields, queries, chosen, places = [], [], [], [], []
    for number in keep or range(num):
        generator = torch.Generator().manual_seed(number)
        start, stop = case.lengths[number]
        valid = case.valid[number] if case.valid else 0
        blocks = tuple(pages[number * blocks_each : number * blocks_each + -(-stop // case.block_tokens)])
        parts.append(helpers.Part(start, stop, blocks, (num + number, number), valid, stop))
        stored = codec.encode(torch.randn(stop, case.dim, generator=generator))
        held = torch.arange(max(valid, start - case.size + 1), start)  # no older row is in the ring
        window.write(torch.full_like(held, number), held % ring, tuple(field[held] for field in stored))
        fields.append(tuple(field[start:] for field in stored))
        queries.append(torch.randn(stop - start, case.heads, case.dim, generator=generator).to(case.dtype))
        if log is not None:
            entry = torch.arange(stop // case.ratio)
            stored = codec.encode(torch.randn(len(entry), case.dim, generator=generator))
            log.write(torch.tensor(blocks)[entry // log.rows_per_page], entry % log.rows_per_page, stored)
            for position in range(start, stop):
                visible = (position + 1) // case.ratio
                picked = torch.full((case.pick or 0,), -1)
                some = torch.randperm(visible, generator=generator)[: case.pick or 0].sort().values
                picked[: len(some)] = some
                chosen.append(picked)
                page = torch.tensor(blocks)[picked.clamp(min=0) // log.rows_per_page]
                places.append(torch.where(picked < 0, -1, page * log.rows_per_page + picked % log.rows_per_page))
    count = sum(part.stop - part.start for part in parts)
    total = -(-(count + case.padding) // 8) * 8
    own = tuple(torch.full((total, field.shape[1]), helpers.POISON, dtype=torch.uint8).to(field.dtype) for field in fields[0])
    for field, filled in enumerate(own):
        if filled.dtype.is_floating_point:
            filled.fill_(torch.nan)
        filled[:count] = torch.cat([each[field] for each in fields])
    q = torch.full((total, case.heads, case.dim), torch.nan, dtype=case.dtype)
    q[:count] = torch.cat(queries)
    sink = torch.randn(case.heads, generator=torch.Generator().manual_seed(1)) if sink is None else sink
    sequences = helpers.arrays(parts, [case.ratio] if case.ratio else [], [ring])
    positions = torch.zeros(total)
    for row, _, position in helpers.places(parts):
        positions[row] = position
    angles = positions[:, None] * 10000.0 ** -(torch.arange(0, case.rope, 2) / case.rope)
    cos, sin = angles.cos(), angles.sin()
    scope: Selected | Range | None = None
    listed = torch.full((total, case.pick or 0), -1, dtype=torch.int32)
    selected = torch.full((total, case.pick or 0), -1)
    if log is not None:
        listed[:count], selected[:count] = torch.stack(places), torch.stack(chosen)
        far = on_device(log)
        scope = Selected(far, case.ratio, listed.to(DEVICE)) if case.pick else Range(far, case.ratio)
    entries = EntryScope(log, case.ratio, selected if case.pick else None) if log is not None else None
    finite = tuple(torch.where(torch.isnan(part), 0, part) if part.dtype.is_floating_point else part for part in own)
    truth = definition(
        torch.nan_to_num(q.float()), finite, window, case.size, entries, case.dim**-0.5, sink, sequences
    )  # fmt: skip
    wide_cos, wide_sin = cos.repeat_interleave(2, 1), torch.stack([-sin, sin], 2).flatten(1)
    truth = unrotate(truth, wide_cos, wide_sin).flatten(1)
    width = max(-(-max(stop for _, stop in case.lengths) // case.block_tokens), 1) + 2
    tables = torch.full((num + 3, width), 1 << 30, dtype=torch.int32)  # nobody may follow these
    tables[:, :] = sequences.tables[:1, :1].int()
    pieces = sequences.pieces
    for piece, part in zip(pieces, parts, strict=True):
        tables[piece.table_row, : len(part.blocks)] = torch.tensor(part.blocks, dtype=torch.int32)
    rows = rows_of(pieces, tuple(part.slot for part in parts), tables.to(DEVICE), total, len(parts) + 1)
    moved = tuple(part.to(DEVICE) for part in own)
    return World(q.to(DEVICE), moved, on_device(window), scope, sink.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE), rows, truth)


def run(case: Case, world: World, order: str, **changed: int) -> Activation:
    """The launches, their outputs poisoned."""
    num, heads, dim = world.q.shape
    out = empty_activation(num, heads * dim, case.dtype, torch.device(DEVICE), case.is_fp8)
    out.values.fill_(torch.nan)
    if out.codes is not None and out.scales is not None:
        out.codes.view(torch.uint8).fill_(0x7F)
        out.scales.fill_(torch.nan)
    tiles = replace(tiles_for(world.q, world.window, case.rope), **changed)
    AttendStep(
        world.q, world.own, world.window, case.size, world.scope, dim**-0.5, world.sink, world.rows, world.cos, world.sin,
        out, order, tiles,
    ).run()  # fmt: skip
    return out


def error(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm; 0 for two zeros."""
    return float((found.double().cpu() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@runs_kernels
@pytest.mark.parametrize(("case", "order"), in_turn(cases()), ids=str)
def test_the_definition(case: Case, order: str, rows: ModuleType) -> None:
    world = build(case, rows)
    check(case, world, run(case, world, order))
    if case.heads == 64 and case.pick and tiles_for(world.q, world.window, case.rope).is_gluon:  # the kernels of other machines
        for tiles in (
            choose_tiles(case.heads, 512, 64, False, False, True),
            choose_tiles(case.heads, 512, 64, False, True, False),
        ):
            check(case, world, run(case, world, order, **asdict(tiles)))


def check(case: Case, world: World, found: Activation) -> None:
    """The values against the definition, each row by itself, so that a wrong one does not hide; the codes against the values."""
    assert torch.isfinite(found.values).all()
    for row in range(world.truth.shape[0]):
        assert error(found.values[row], world.truth[row]) < (2e-5 if case.dtype == FP32 else 1e-2), row
    assert not found.values[world.rows.owners < 0].any()
    if found.codes is not None and found.scales is not None:
        codes, scales = quantise_fp8(found.values.float().cpu(), 128)
        assert torch.equal(bits(found.codes.cpu()), bits(codes))
        assert torch.equal(found.scales.cpu(), e8m0_to_fp32(scales))


LONG = Case(((0, 2), (340, 341), (230, 231), (33, 34)), 16, 4, 84, heads=2, cache="fp8", dtype=BF16, padding=1)
REAL = Case(((0, 2), (2040, 2041), (1030, 1031), (33, 34)), 128, 4, 512, heads=64, dim=512, rope=64, cache="fp8", dtype=BF16)


@runs_kernels
@pytest.mark.parametrize(("is_all", "order"), in_turn([False, True]))
@pytest.mark.parametrize("case", [LONG, REAL] if HAS_GPU else [LONG], ids=lambda case: f"dim={case.dim}")
def test_bits_do_not_depend_on_the_other_rows(case: Case, is_all: bool, order: str, rows: ModuleType) -> None:
    case = replace(case, pick=None) if is_all else case
    changed = {} if case.dim == 512 else {"rows": 16}  # several splits
    together = run(case, build(case, rows), order, **changed)
    for keep in ((1,), (2, 1, 3, 0)):
        wider = replace(case, padding=9)
        alone = run(wider, build(wider, rows, keep=keep), order, **changed)
        at = 0
        for number in keep:
            first = sum(stop - start for start, stop in case.lengths[:number])
            count = case.lengths[number][1] - case.lengths[number][0]
            assert torch.equal(bits(alone.values[at : at + count]), bits(together.values[first : first + count])), keep
            at += count


@runs_kernels
@pytest.mark.parametrize(("cut", "order"), in_turn([1, 5]))
def test_cuts_do_not_change_bits(order: str, cut: int, rows: ModuleType) -> None:
    """The last rows of a request, in one step with those before and in one of their own: through the ring instead."""
    case = Case(((60, 66),), 16, 4, heads=2, cache="fp8", dtype=BF16)
    whole = run(case, build(case, rows), order)
    world = build(case, rows)
    (slot,) = world.rows.slots[:1, 1].tolist()
    kept = torch.arange(66 - cut - 15, 66 - cut)
    fields = tuple(field.cpu()[(kept - 60).clamp(min=0)] for field in world.own)
    new = kept >= 60
    for view, field in zip(world.window.views, fields, strict=True):
        view[slot, (kept % 16)[new].to(DEVICE)] = field[new].to(DEVICE)
    rest = torch.arange(6 - cut, 6).to(DEVICE)
    part = replace(
        world.rows, positions=world.rows.positions[rest], owners=world.rows.owners[rest], first_rows=world.rows.first_rows * 0,
        starts=world.rows.starts * 0 + 66 - cut,
    )  # fmt: skip
    turned = (world.cos[rest], world.sin[rest])
    later = replace(
        world, q=world.q[rest].contiguous(), own=tuple(field[rest].contiguous() for field in world.own), rows=part,
        cos=turned[0].contiguous(), sin=turned[1].contiguous(),
    )  # fmt: skip
    assert torch.equal(bits(run(case, later, order).values), bits(whole.values[6 - cut : 6]))


@runs_kernels
@pytest.mark.parametrize("order", ["decode", "prefill"])
@pytest.mark.parametrize("ratio", [0, 4])
def test_sinks(order: str, ratio: int, rows: ModuleType) -> None:
    case = Case(((0, 2), (130, 131)), 16, ratio, padding=5)
    sink = torch.tensor([math.inf, -math.inf, 80.0, -80.0])
    world = build(case, rows, sink)
    found = run(case, world, order).values.view(-1, 4, case.dim).cpu()
    assert torch.isfinite(found).all()
    assert not found[:, 0].any(), "a sink of +inf takes all the weight"
    assert found[:, 2].abs().max() < 1e-20
    assert error(found, world.truth.view(found.shape)) < 2e-6
    assert not found[(world.rows.owners < 0).cpu()].any()


@runs_kernels
@pytest.mark.parametrize("order", ["decode", "prefill"])
def test_a_step_of_padding_alone(order: str, rows: ModuleType) -> None:
    case = replace(LONG, is_fp8=True)
    world = build(case, rows)
    world.rows.owners.fill_(-1)
    world.rows.positions.fill_(1 << 20)
    found = run(case, world, order)
    assert found.codes is not None and not found.values.any() and not (bits(found.codes) & 127).any()


@runs_kernels
@pytest.mark.parametrize("order", ["decode", "prefill"])
def test_large_scores_and_one_rows_nan(order: str, rows: ModuleType) -> None:
    case = replace(LONG, dtype=FP32, cache="fp32")
    world = build(case, rows)
    clean = run(case, world, order).values
    world.q[:2] *= 1e6
    world.q[3] = torch.nan
    found = run(case, world, order).values
    assert torch.isfinite(found[:3]).all() and torch.isnan(found[3]).all()
    assert torch.equal(bits(found[4:]), bits(clean[4:]))


@runs_kernels
@pytest.mark.parametrize("dim", [320, 512] if HAS_GPU else [320])
def test_every_code_and_scale_is_read_exactly(dim: int, rows: ModuleType) -> None:
    """A query that sees one row gives the row back: all e4m3 codes but NaN, and scales from 2^-22 up."""
    case = Case(((0, 1),) * 4, 1, heads=1, dim=dim, rope=64, cache="fp8", padding=4)
    world = build(case, rows, sink=torch.full((1,), -math.inf))
    world.q.zero_()
    codes = torch.arange(256, dtype=torch.uint8).masked_fill((torch.arange(256) & 127) == 127, 0)
    scales = torch.tensor([[105, 106, 107, 108], [120, 127, 128, 134], [135, 140, 150, 200], [160, 111, 112, 113]])
    world.own[0][:4, :256], world.own[2][:4, :4] = codes.to(DEVICE), scales.to(torch.uint8).to(DEVICE)
    truth = world.window.codec.decode(tuple(field[:4].cpu() for field in world.own))
    for dtype, order in ((FP32, "prefill"), (FP32, "decode"), (BF16, "prefill"), (BF16, "decode")):
        world.q = world.q.to(dtype)
        found = run(replace(case, dtype=dtype), world, order).values[:4].float().cpu()
        assert torch.equal(found[:, :256], truth[:, :256]), (dtype, order)


@runs_kernels
def test_nothing_is_written(rows: ModuleType) -> None:
    world = build(LONG, rows)
    assert world.scope is not None
    before = rows.bytes_of(world.window), rows.bytes_of(world.scope.log), world.q.clone()
    for order in ("decode", "prefill"):
        run(LONG, world, order)
    assert torch.equal(before[0], rows.bytes_of(world.window)) and torch.equal(before[1], rows.bytes_of(world.scope.log))
    assert torch.equal(bits(before[2]), bits(world.q))


def test_cuts_of_a_row_and_of_its_tiles() -> None:
    assert kernels.parts_of(448, 64) == ((0, 256), (256, 128), (384, 64), (448, 64))
    assert kernels.parts_of(24, 8) == ((0, 16), (16, 16), (24, 16))
    assert fuses_quantising(448, 64) and fuses_quantising(384, 128) and not fuses_quantising(24, 8)
    assert split_tiles(10, 4) == 4 and split_tiles(130, 4) == 9
    for most in range(1, 400):
        assert -(-most // split_tiles(most, 4)) <= 16


def test_refusals() -> None:
    good, case = Machine("cuda", (9, 0), True), AttendCase(64, 512, 64, "fp8", True)
    if not INTERPRETED:
        assert refuses(good, case) is None
        assert refuses(Machine("cpu", (0, 0), True), case) == "runs on NVIDIA GPUs, not on cpu"
        assert refuses(replace(good, capability=(8, 0)), case) == "fp8 outputs need compute capability 8.9, this GPU has 8.0"
        assert refuses(replace(good, capability=(8, 0)), replace(case, is_fp8=False)) is None
        assert refuses(replace(good, capability=(7, 5)), replace(case, is_fp8=False)) is not None
    assert refuses(good, replace(case, rope=512)) == "some dims must be rotated and some not, not 512 of 512"
    assert refuses(good, replace(case, width=511)) == "dims are rotated in pairs: 64 of 511 must both be even"


def machine_code(kernel, types: dict[str, str], constants: dict, warps: int, stages: int, capability: int) -> str:
    """SASS for `capability`, compiled without a GPU."""
    signature = {name: types.get(name, "*i32") if name not in constants else "constexpr" for name in kernel.arg_names}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in signature if name not in constants}
    aligned = {key: value for key, value in aligned.items() if signature[kernel.arg_names[key[0]]] != "fp32"}
    source_type = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_type(kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def types_of(cache: str) -> dict[str, str]:
    """Argument types of the kernels for bf16 activations."""
    stored = {"fp8": "*u8", "bf16": "*bf16"}[cache]
    types = dict.fromkeys(("sink", "cos", "sin", "scales", "partial", "peaks", "sums"), "*fp32")
    types |= {"q": "*bf16", "values": "*bf16", "codes": "*fp8e4nv", "factor": "fp32", "table_width": "i32", "slot_width": "i32"}
    for name in ("own", "ring", "log"):
        types |= {name: stored, f"{name}_rope": "*bf16", f"{name}_scale": stored}
    for name in ("ring", "log"):
        types |= dict.fromkeys((f"{name}_page", f"{name}_rope_page", f"{name}_scale_page"), "i32")
    return types


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize(
    ("capability", "cache", "order", "instruction"),
    [
        (90, "fp8", "decode", "HGMMA.64x128x16"),
        pytest.param(90, "fp8", "prefill", "HGMMA.64x128x16", marks=pytest.mark.long),
        pytest.param(90, "bf16", "prefill", "HGMMA.64x128x16", marks=pytest.mark.long),
        (80, "fp8", "decode", "HMMA.16816"),
    ],
)
def test_compiled_ahead_of_time(capability: int, cache: str, order: str, instruction: str) -> None:
    """The products use the tensor cores; few registers are spilled (all outside of the loop where there are any)."""
    tiles = choose_tiles(64, 512, 64, False, False, capability == 90)
    constants = {
        "HEADS": 64, "HEAD_TILE": tiles.heads, "NOPE": 448, "ROPE": 64, "SCALE_BYTES": 8,
        "SIZE": 128, "RING": 128, "SLOT_COLUMN": 0, "RATIO": 4, "IS_SELECTED": True, "MAX_ENTRIES": 512, "PAGE_ENTRIES": 64,
        "TILE": tiles.rows, "SPLIT_TILES": 4 if order == "decode" else 0, "IS_FP8": cache == "fp8", "EXACT": False,
        "IS_BF16": True, "QUANTISES": capability == 90, "STAGES": tiles.stages, "INTERPRET": False,
    }  # fmt: skip
    types = types_of(cache) | ({} if capability == 90 else {"codes": "*bf16"})
    code = machine_code(kernels.attend, types, constants, tiles.warps, tiles.stages, capability)
    assert instruction in code
    assert code.count("STL") < 20


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("split", long_but({1}, [0, 4]))
def test_gluon_compiled_ahead_of_time(split: int) -> None:
    """Products of 64 x 64 and 64 x 256 that are not waited for one by one, and hardly a register spilled."""
    words = {name: "*i32" for field in ("own", "ring", "log") for name in (field, f"{field}_rope")}
    types = types_of("fp8") | words | {f"{field}_scale": "*i64" for field in ("own", "ring", "log")}
    constants = {
        "HEADS": 64, "SIZE": 128, "RING": 128, "SLOT_COLUMN": 0, "RATIO": 4, "IS_SELECTED": True, "MAX_ENTRIES": 512,
        "PAGE_ENTRIES": 64, "SPLIT_TILES": split, "QUANTISES": True,
    }  # fmt: skip
    code = machine_code(hopper.attend, types, constants, 4, 1, 90)
    assert "HGMMA.64x64x16" in code and "HGMMA.64x256x16" in code
    assert code.count("WARPGROUP.DEPBAR") < 10  # ptxas would put one behind each of 76
    assert code.count("STL") < 10


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
def test_combining_compiled_ahead_of_time() -> None:
    constants = {
        "HEADS": 64, "NOPE": 448, "ROPE": 64, "WIDTH": 512, "SIZE": 128, "RATIO": 4, "MAX_ENTRIES": 512, "TILE": 64,
        "SPLIT_TILES": 4, "SPLITS": 3, "SPLIT_ROWS": 4, "IS_BF16": True, "QUANTISES": True, "INTERPRET": False,
    }  # fmt: skip
    code = machine_code(kernels.combine, types_of("fp8"), constants, 4, 1, 90)
    assert "STL" not in code and "F2FP.SATFINITE.E4M3" in code


@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="the kernels run in this process")
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
