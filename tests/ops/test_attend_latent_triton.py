"""Attention over latents of `triton.py` against `ref.py`: on a GPU if there is one, else in Triton's interpreter."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lamina.ops.attend_heads import HeadsCase, Past
from lamina.ops.attend_latent import attend_latent as definition
from lamina.ops.machine import Machine
from lamina.ops.rope_norm import rms_norm
from lamina.ops.rows import rows_of
from lamina.ops.store import LatentCodec, Place, Store

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lamina.ops.attend_latent import kernels
from lamina.ops.attend_latent.triton import LatentCase, attend_latent, choose_tiles, project_latent, refuses
from tests.ops.kernel_tests import (
    DEVICE,
    HAS_GPU,
    INTERPRETED,
    compiles_kernels,
    long_but,
    machine_code,
    runs_kernels,
    starts_interpreter,
)

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, slots=True)
class Case:
    """One step. lengths: (start, stop) of each request.   top_k  rows that are listed for a query, None: it sees all."""

    lengths: tuple[tuple[int, int], ...]
    heads: int = 4
    nope: int = 12
    rope: int = 8
    rank: int = 16
    cache: str = "fp32"
    dtype: torch.dtype = FP32
    is_pairs: bool = True
    top_k: int | None = None


CASES = [
    Case(((0, 3), (15, 17), (40, 41), (16, 17))),
    Case(((0, 2), (33, 34)), heads=17, rope=2, rank=24, cache="bf16", is_pairs=False),
    Case(((0, 3), (15, 18), (40, 41), (16, 17)), top_k=17),
    Case(((0, 2), (33, 34)), heads=17, rope=2, rank=24, cache="bf16", top_k=5),
    Case(((0, 2), (33, 34)), rank=136, cache="fp8"),
    Case(((0, 3), (15, 18)), heads=3, rank=24, cache="fp8", top_k=9, is_pairs=False),
]
#: those whose rows run alone too
ALONE = [CASES[0], CASES[2]]
if HAS_GPU:
    LENGTHS = ((0, 2), (127, 230), (2040, 2052), (5000, 5003), (300, 301))
    CASES += [
        Case(LENGTHS, heads, 128, 64, 512, cache, dtype)
        for heads in (16, 128)
        for cache, dtype in (("bf16", BF16), ("fp32", FP32))
    ]
    CASES += [
        Case(LENGTHS, heads, 128, 64, 512, cache, dtype, top_k=2048)
        for heads, cache, dtype in ((8, "bf16", BF16), (128, "bf16", BF16), (16, "fp32", FP32))
    ]
    CASES += [
        Case(LENGTHS, heads, 128, 64, 512, "fp8", dtype, top_k=top_k)
        for heads, dtype, top_k in ((16, BF16, None), (128, BF16, None), (128, BF16, 2048), (16, FP32, None))
    ]
    ALONE += [CASES[6], CASES[11], CASES[14], CASES[15]]


def turned(x: Tensor, cos: Tensor, sin: Tensor, is_pairs: bool) -> Tensor:
    """x [..., r] turned in pairs."""
    first, second = (x[..., ::2], x[..., 1::2]) if is_pairs else x.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(parts, -1).flatten(-2) if is_pairs else torch.cat(parts, -1)


def choices(case: Case, parts: list[object], numbers: tuple[int, ...]) -> Tensor | None:
    """[T, top_k] positions: all that a query sees, or so many of them at random; ascending, then -1."""
    if case.top_k is None:
        return None
    found = []
    for part, number in zip(parts, numbers, strict=True):
        draw = torch.Generator().manual_seed(number)
        for position in range(part.start, part.stop):
            seen = torch.randperm(position + 1, generator=draw)[: case.top_k].sort().values
            found.append(torch.nn.functional.pad(seen, (0, case.top_k - len(seen)), value=-1))
    return torch.stack(found)


def run(
    case: Case, order: str, helpers: ModuleType, keep: tuple[int, ...] | None = None, spare: int = 0
) -> tuple[Tensor, Tensor]:
    """(what the kernels give, the definition) [T, H * rank] of the requests `keep`, whose last rows are stored by the kernels.

    spare  rows of padding beside, and tokens that a request might have beside.
    """
    codec, size = LatentCodec(case.rank, case.rope, case.cache), 24
    each = max(-(-stop // size) for _, stop in case.lengths)
    count = len(case.lengths)
    store = helpers.poisoned_store(codec, count * each + 1, size, column=1)
    store = Store(codec, store.views, store.slot_column, Place("block"))
    pages = torch.randperm(count * each, generator=torch.Generator().manual_seed(7)).tolist()
    parts, inputs = [], []
    for number in keep or range(count):
        draw = torch.Generator().manual_seed(number)
        start, stop = case.lengths[number]
        blocks = tuple(pages[number * each : number * each + -(-stop // size)])
        parts.append(helpers.Part(start, stop, blocks, (number, number), 0, start))
        held = torch.arange(start)
        store.write(
            torch.tensor(blocks)[held // size], held % size, codec.encode(torch.randn(start, codec.width, generator=draw))
        )
        widths = (case.heads * (case.nope + case.rope), codec.width, case.heads * case.rank)
        inputs.append([torch.randn(stop - start, width, generator=draw).to(case.dtype) for width in widths])
    real = sum(part.stop - part.start for part in parts)
    total = -(-(real + 2 + spare) // 8) * 8
    q, latent, absorbed = (
        torch.full((total, field[0].shape[1]), torch.nan, dtype=case.dtype) for field in zip(*inputs, strict=True)
    )
    for field, made in zip((q, latent, absorbed), zip(*inputs, strict=True), strict=True):
        field[:real] = torch.cat(made)
    sequences = helpers.arrays(parts)
    tables = torch.full((count + 3, each + 2), 1 << 30, dtype=torch.int32)
    for piece, part in zip(sequences.pieces, parts, strict=True):
        tables[piece.table_row, : len(part.blocks)] = torch.tensor(part.blocks, dtype=torch.int32)
    rows = rows_of(sequences.pieces, tuple(part.slot for part in parts), tables.to(DEVICE), total, len(parts) + 1)
    angles = rows.positions.cpu()[:, None] * torch.linspace(0.01, 1, case.rope // 2)
    cos, sin, gain = torch.cos(angles), torch.sin(angles), torch.linspace(0.5, 2, case.rank)

    arena = torch.tensor([], dtype=torch.uint8).set_(store.views[0].untyped_storage()).to(DEVICE)
    moved = tuple(arena.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset()) for view in store.views)
    there = Past(Store(codec, moved, store.slot_column, store.place), codec)
    same = HeadsCase(case.heads, 1, (case.nope + case.rope) ** -0.5, top_k=case.top_k)
    dims = LatentCase(case.heads, case.nope, case.rope, case.rank, case.is_pairs)
    plain, rotary = project_latent(
        q.to(DEVICE), None, latent.to(DEVICE), None, gain.to(DEVICE), 1e-6, (cos.to(DEVICE), sin.to(DEVICE)), dims, there, rows,
        case.dtype,
    )  # fmt: skip
    chosen = choices(case, parts, keep or tuple(range(count)))
    places = None
    if chosen is not None:
        places = torch.full((total, case.top_k), -1, dtype=torch.int32)
        for piece in sequences.pieces:
            listed = chosen[piece.rows]
            where = tables[piece.table_row, listed.clamp(min=0) // size] * size + listed % size
            places[piece.rows] = torch.where(listed < 0, -1, where).int()
        places = places.to(DEVICE)
    is_exact = INTERPRETED or FP32 in (case.dtype, store.views[0].dtype)
    tiles = choose_tiles(
        case.heads, case.rank, is_exact, order, is_listed=places is not None, is_codes=case.cache == "fp8"
    )  # fmt: skip
    longest = max(part.stop for part in parts) + 50 * spare
    found = attend_latent(
        absorbed.to(DEVICE), rotary, there, same, rows, order, longest, replace(tiles, least_tiles=1) if INTERPRETED else tiles,
        places,
    )  # fmt: skip
    assert not found[real:].any()

    heads = q.float().unflatten(1, (case.heads, -1))[:real]
    asked = turned(heads[..., case.nope :], cos[:real, None], sin[:real, None], case.is_pairs).to(case.dtype)
    assert torch.equal(plain[:real].cpu(), heads[..., : case.nope].flatten(1).to(case.dtype))
    torch.testing.assert_close(rotary[:real].cpu(), asked.flatten(1), rtol=1e-6 if case.dtype == FP32 else 1e-2, atol=1e-6)
    own = rms_norm(latent[:real, : case.rank].float(), gain, 1e-6).to(case.dtype).float()
    key = turned(latent[:real, case.rank :].float(), cos[:real], sin[:real], case.is_pairs).to(case.dtype).float()
    for part, piece in zip(parts, sequences.pieces, strict=True):
        held = torch.arange(part.start, part.stop)
        put = torch.cat([own, key], 1)[piece.rows]
        store.write(torch.tensor(part.blocks)[held // size], held % size, codec.encode(put))
        stored = codec.decode(tuple(field.cpu()[torch.tensor(part.blocks)[held // size], held % size] for field in moved))
        allowed = {"fp32": 1e-5, "bf16": 1e-2, "fp8": 0.13}[case.cache]  # or the code beside it
        torch.testing.assert_close(stored, codec.decode(codec.encode(put)), rtol=allowed, atol=1e-4)
    short = max(sequences.num_rows - real, 0)
    asks = [torch.nn.functional.pad(part, (0, 0, 0, short)) for part in (absorbed[:real].float(), asked.float().flatten(1))]
    if chosen is not None:
        chosen = torch.nn.functional.pad(chosen, (0, 0, 0, short), value=-1)
    truth = definition(*asks, Past(store, codec), same, sequences, chosen)[:real]
    return found[:real], truth


@runs_kernels
@pytest.mark.parametrize("order", ["decode", "prefill"])
@pytest.mark.parametrize("case", long_but({1, 2, 4}, CASES), ids=str)
def test_the_definition(case: Case, order: str, rows: ModuleType) -> None:
    """Each row by itself, so that a wrong one does not hide; and what is stored before."""
    found, truth = run(case, order, rows)
    error = (found.double().cpu() - truth.double()).norm(dim=1) / truth.double().norm(dim=1)
    assert float(error.max()) < (2e-5 if case.dtype == FP32 and (case.cache == "fp32" or not HAS_GPU) else 1e-2)


@runs_kernels
@pytest.mark.parametrize("order", ["decode", "prefill"])
@pytest.mark.parametrize("case", long_but({0}, ALONE), ids=str)
def test_bits_do_not_depend_on_the_other_rows(case: Case, order: str, rows: ModuleType) -> None:
    """Nor on how long others may be."""
    together, _ = run(case, order, rows)
    first = case.lengths[0][1] - case.lengths[0][0]
    count = case.lengths[1][1] - case.lengths[1][0]
    alone, _ = run(case, order, rows, keep=(1,), spare=9)
    assert torch.equal(alone, together[first : first + count])


@compiles_kernels
@pytest.mark.parametrize(
    ("capability", "order", "top_k", "cache"),
    long_but(
        {0},
        [
            (capability, order, top_k, cache)
            for capability in (90, 80, 89, 100)
            for order in ("decode", "prefill")
            for top_k in (0, 2048)
            for cache in ("bf16", "fp8")
        ],
    ),
)
def test_machine_code(capability: int, order: str, top_k: int, cache: str) -> None:
    """Tensor cores, shared memory that there is, registers of threads."""
    tiles = choose_tiles(128, 512, False, order, divmod(capability, 10), top_k > 0, cache == "fp8")
    constants = {
        "HEADS": 128, "R": 512, "WR": 512, "P": 64, "WP": 64, "HEAD_TILE": tiles.heads, "TILE": tiles.rows, "PAGE_ROWS": 64,
        "EXACT": False, "STAGES": tiles.stages,
    }  # fmt: skip
    if order == "decode":
        kernel = kernels.attend_split
        constants |= {"SPLITS": tiles.splits, "LEAST_TILES": tiles.least_tiles, "TOP_K": top_k} | (
            {} if top_k else {"places": None}
        )
    elif top_k:
        kernel = kernels.attend_listed
        constants |= {"TOP_K": top_k}
    else:
        kernel = kernels.attend_tiles
        constants |= {"QUERIES": tiles.queries}
    types = dict.fromkeys(("q", "q_turned", "kept", "scales", "turns", "out"), "*bf16")
    if cache == "fp8":
        types |= {"kept": "*u8", "scales": "*fp32"}
    types |= dict.fromkeys(("partial", "peaks", "sums"), "*fp32")
    types |= dict.fromkeys(("positions", "owners", "starts", "stops", "first_rows", "table_rows", "tables", "places"), "*i32")
    types |= {"factor": "fp32"} | dict.fromkeys(("k_page", "s_page", "t_page", "table_width", "num_rows", "num_requests"), "i32")
    code = machine_code(kernel, types, constants, capability, tiles.warps, tiles.stages, ("k_page", "s_page", "t_page"))
    assert code.count({90: "HGMMA", 100: "UTCHMMA"}.get(capability, "HMMA")) >= 8
    assert code.spills <= 80 and code.shared_bytes <= {80: 163, 89: 99, 90: 227, 100: 227}[capability] * 1024


@compiles_kernels
def test_refusals() -> None:
    there = Machine("cuda", (9, 0), True)
    assert refuses(there, 512, 64) is None and refuses(there, 24, 2) is None
    assert refuses(there, 640, 64) == "latents must have 1 to 512 dims, not 640"
    assert refuses(there, 512, 7) == "rotated keys of latents must have 2 to 64 dims, an even number, not 7"
    assert refuses(Machine("cuda", (7, 5), True), 512, 64) == "needs compute capability 8.0, this GPU has 7.5"


@starts_interpreter
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
