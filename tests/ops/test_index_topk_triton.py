"""The index of `triton.py` against `ref.py` and a stable sort: on a GPU if there is one, else in Triton's interpreter.

Codes and weights are chosen so that every score is exact in fp32, whatever the order of its sum, and many are equal: the places
must be the very same. Where numbers are real, the choice must be that of the kernel's own scores, and these must be right.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from lamina.ops.index_topk import IndexCase, index_topk
from lamina.ops.machine import Machine
from lamina.ops.rows import Rows, rows_of
from lamina.ops.sequences import Piece
from lamina.ops.store import Store, index_codec
from tests.ops.kernel_tests import (
    DEVICE,
    FAR,
    HAS_GPU,
    INTERPRETED,
    compiles_kernels,
    long_but,
    machine_code,
    runs_kernels,
    starts_interpreter,
)
from tests.ops.rows import Part, arrays, poisoned_store

from lamina.ops.index_topk import kernels  # isort: skip
from lamina.ops.index_topk import triton as served  # isort: skip

FORMATS = ("fp4", "fp8", "bf16", "fp32")


@dataclass(frozen=True, slots=True)
class Case:
    """lengths  (start, stop) of each request.   spread  of the values: few make ties.   page  entries in a page.

    ratio  tokens of an entry.
    """

    index_format: str = "fp4"
    lengths: tuple[tuple[int, int], ...] = ((255, 256), (70, 71), (2, 3), (3, 4), (299, 300), (0, 1), (31, 32), (35, 36))
    order: Literal["decode", "prefill"] = "decode"
    heads: int = 3
    dim: int = 32
    top_k: int = 7
    spread: int = 1
    page: int = 64
    padding: int = 2
    ratio: int = 4


#: prefill: a request within one tile of rows and over several, borders of what is visible, one row alone
PIECES = ((20, 37), (130, 133), (255, 257), (300, 301), (3, 4), (0, 2))


def cases() -> Iterator[Case]:
    """Every format both ways; then widths, heads and pages that fill nothing evenly."""
    for index_format in FORMATS:
        yield Case(index_format)
        yield Case(index_format, PIECES, "prefill")
    yield Case("fp4", spread=0)
    yield Case("fp8", PIECES, "prefill", spread=0, top_k=1)
    yield Case("bf16", dim=6, heads=1, top_k=8)
    yield Case("fp32", dim=24, heads=5, page=2)
    yield Case("fp4", dim=16, page=32, top_k=9)
    yield Case("fp4", dim=64, heads=8, page=24, spread=3)
    yield Case("fp8", PIECES, "prefill", dim=16, heads=2, page=128)
    yield Case("fp4", PIECES, "prefill", dim=128, heads=17, spread=3, top_k=33, padding=0)
    yield Case("fp4", top_k=100)  # nobody sees so many
    yield Case("fp8", ((70, 71), (2, 3), (98, 99), (6, 7), (7, 8)), page=16, ratio=1)
    yield Case("bf16", ((60, 66), (6, 9), (0, 2)), "prefill", page=16, ratio=1)


@dataclass(slots=True)
class World:
    """queries  fields [T * Hi, ...].   exact  their values [T, Hi, d].   weights [T, Hi].   keys  the log, on the CPU."""

    case: Case
    queries: tuple[Tensor, ...]
    weights: Tensor
    keys: Store
    parts: tuple[Part, ...]
    pieces: tuple[Piece, ...]
    tables: Tensor

    @property
    def exact(self) -> Tensor:
        """The queries' values [T, Hi, d]."""
        return self.keys.codec.decode(self.queries).unflatten(0, self.weights.shape).double()


def codes(case: Case, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Fields of `count` vectors of whole numbers, or of numbers of their format times powers of two: products are exact."""

    def number(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, (count, *shape), generator=generator)

    if case.index_format in ("bf16", "fp32"):
        values = number(-case.spread, case.spread, case.dim).float()
        return (values.to(torch.bfloat16) if case.index_format == "bf16" else values,)
    power = number(126, 128, -(-case.dim // 32)).to(torch.uint8) if case.spread else number(127, 127, -(-case.dim // 32)).byte()
    if case.index_format == "fp4":
        magnitude = number(0, min(7, 2 * case.spread), case.dim // 2) + 16 * number(0, min(7, 2 * case.spread), case.dim // 2)
        return (magnitude + 8 * number(0, 1, case.dim // 2) + 128 * number(0, 1, case.dim // 2)).byte(), power
    values = number(-case.spread, case.spread, case.dim).float()
    return values.to(torch.float8_e4m3fn).view(torch.uint8), torch.exp2(power[:, :1].float() - 127)


def make(case: Case, seed: int = 0) -> World:
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(stop - start for start, stop in case.lengths) + case.padding
    codec = index_codec(case.index_format, case.dim)
    width = max(-(-max(stop // case.ratio for _, stop in case.lengths) // case.page), 1)
    order = torch.randperm(len(case.lengths) * width + 1, generator=generator).tolist()
    keys = poisoned_store(codec, len(order), case.page)
    tables = torch.randint(0, len(order), (len(case.lengths) + 3, width), generator=generator, dtype=torch.int32)
    parts, pieces, first = [], [], 0
    for number, (start, stop) in enumerate(case.lengths):
        entry = torch.arange(stop // case.ratio)
        blocks = order[number * width : number * width + -(-len(entry) // case.page)]
        table_row = len(case.lengths) + 1 - number
        tables[table_row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        if blocks:
            keys.write(tables[table_row, entry // case.page].long(), entry % case.page, codes(case, len(entry), generator))
        parts.append(Part(start, stop, tuple(blocks), (0,)))
        pieces.append(Piece(start, stop, first, table_row))
        first += stop - start
    weights = torch.randint(-2, 4, (num_rows, case.heads + 3), generator=generator).float()[:, 1 : case.heads + 1]
    return World(case, codes(case, num_rows * case.heads, generator), weights, keys, tuple(parts), tuple(pieces), tables)


def on_device(store: Store) -> Store:
    """A copy of the whole arena that a store's views lie in."""
    arena = torch.tensor([], dtype=torch.uint8).set_(store.views[0].untyped_storage()).to(DEVICE, copy=True)
    views = tuple(arena.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset()) for view in store.views)
    return Store(store.codec, views, store.slot_column)


def device_rows(world: World, pieces: Sequence[Piece] | None = None) -> Rows:
    pieces = world.pieces if pieces is None else tuple(pieces)
    return rows_of(
        tuple(pieces), tuple((0,) for _ in pieces), world.tables.to(DEVICE), world.weights.shape[0], len(pieces) + 1
    )  # fmt: skip


def step_of(world: World, rows: Rows | None = None, scale: float = 0.5, **changed: object) -> served.IndexStep:
    """The launches, with every buffer full of what nobody may read."""
    case = world.case
    strides = (world.weights.shape[1] + 3, 1)
    base = torch.empty(world.weights.shape[0], strides[0], device=DEVICE)
    weights = base[:, 1 : case.heads + 1].copy_(world.weights)
    longest = max(stop for _, stop in case.lengths) // case.ratio
    arguments: dict = {"max_entries": longest, "order": case.order} | changed
    step = served.IndexStep(
        tuple(field.to(DEVICE) for field in world.queries), weights, scale, on_device(world.keys),
        device_rows(world) if rows is None else rows, case.ratio, case.top_k, **arguments,
    )  # fmt: skip
    if step.is_scored:
        for buffer in (step.scores, step.kept, step.entries):
            buffer.fill_(FAR)
    return step


def run(world: World, rows: Rows | None = None, **changed: object) -> Tensor:
    places = torch.full((world.weights.shape[0], world.case.top_k), FAR, dtype=torch.int32, device=DEVICE)
    step_of(world, rows, **changed).run(places)
    return places.cpu()


def place_of(world: World, piece: Piece, entry: Tensor) -> Tensor:
    page = world.case.page
    return world.tables[piece.table_row, entry // page].long() * page + entry % page


def visible_rows(world: World) -> Iterator[tuple[int, Piece, int]]:
    """(row, its request, entries it sees) of all but padding."""
    for piece in world.pieces:
        for position in range(piece.start, piece.stop):
            yield piece.first_row + position - piece.start, piece, (position + 1) // world.case.ratio


def exact_scores(world: World, row: int, piece: Piece, visible: int) -> Tensor:
    """fp64 [visible]."""
    places = place_of(world, piece, torch.arange(visible))
    keys = world.keys.read(places // world.case.page, places % world.case.page).double()
    products = (world.exact[row] @ keys.T).clamp(min=0)
    return (world.weights[row].double()[:, None] * products).sum(0) * 0.5


def listed(best: Tensor, top_k: int) -> list[int]:
    return best.tolist() + [-1] * (top_k - len(best))


def chosen(scores: Tensor, top_k: int) -> Tensor:
    """The best of [n], equal ones by number, ascending."""
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    return scores.argsort(descending=True, stable=True)[:top_k].sort().values


@runs_kernels
@pytest.mark.parametrize("case", long_but({0, 3, 4, 9, 10, 11, 13, 15, 16, 17}, cases()), ids=str)
def test_places_are_those_of_a_stable_sort(case: Case) -> None:
    world = make(case)
    found = run(world)
    for row, piece, visible in visible_rows(world):
        best = chosen(exact_scores(world, row, piece, visible), case.top_k)
        assert found[row].tolist() == listed(place_of(world, piece, best), case.top_k), (row, visible)
    if case.padding:
        assert (found[-case.padding :] == -1).all()


@runs_kernels
@pytest.mark.parametrize(
    ("order", "index_format"),
    long_but({0, 2, 5, 7}, [(order, index_format) for order in ("decode", "prefill") for index_format in FORMATS]),
)
def test_the_definition(index_format: str, order: Literal["decode", "prefill"]) -> None:
    case = Case(index_format, PIECES if order == "prefill" else Case().lengths, order, heads=4, padding=0)
    world = make(case, seed=1)
    rows = -len(world.weights) % 8
    exact = torch.nn.functional.pad(world.exact.float(), (0, 0, 0, 0, 0, rows))
    weights = torch.nn.functional.pad(world.weights, (0, 0, 0, rows)) * 0.5
    truth = index_topk(exact, weights, world.keys, arrays(world.parts, [case.ratio]), case.ratio, case.top_k)
    assert truth is not None
    found = run(world)
    for row, piece, _ in visible_rows(world):
        entries = truth[row][truth[row] >= 0]
        assert found[row].tolist() == listed(place_of(world, piece, entries), case.top_k), row


@runs_kernels
@pytest.mark.parametrize("spread", long_but({1}, [0, 1]))
def test_segments_pieces_and_bounds_change_nothing(spread: int) -> None:
    """Neither how a row is cut, nor how many rows fit the workspace, nor a larger bound than needed."""
    few = ((0, 1), (130, 133), (255, 257), (35, 36))
    singles = ((255, 256), (70, 71), (299, 300))
    for case in (Case("fp8", singles, top_k=12, spread=spread), Case("bf16", few, "prefill", spread=spread)):
        world = make(case, seed=spread)
        whole = run(world)
        assert torch.equal(run(world, segment=32), whole)
        assert torch.equal(run(world, workspace_bytes=1), whole)
        assert torch.equal(run(world, workspace_bytes=3000, segment=16), whole)
        assert torch.equal(run(world, max_entries=300), whole)
        assert torch.equal(run(world, max_entries=200, segment=64), whole)
        if case.order == "prefill":
            assert torch.equal(run(world, tiles=served._HOPPER_SEVERAL), whole)
        else:
            assert torch.equal(run(world, tiles=replace(served._SINGLE, programs=3)), whole)


@runs_kernels
def test_rows_in_any_order_and_company() -> None:
    """Decode with requests permuted; and prefill of one row as of many."""
    case = Case("fp4", dim=64, heads=4, padding=0)
    world = make(case)
    whole = run(world)
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    mixed = World(
        case, tuple(field.unflatten(0, world.weights.shape)[order].flatten(0, 1) for field in world.queries),
        world.weights[order], world.keys, world.parts, (), world.tables,
    )  # fmt: skip
    pieces = [replace(world.pieces[old], first_row=new) for new, old in enumerate(order)]
    assert torch.equal(run(mixed, device_rows(mixed, pieces)), whole[order])
    assert torch.equal(run(mixed, device_rows(mixed, pieces), order="prefill"), whole[order])
    for tiles in (served._SEVERAL, served._HOPPER_SEVERAL):
        assert torch.equal(run(mixed, device_rows(mixed, pieces), tiles=tiles, is_single=False), whole[order])


@runs_kernels
@pytest.mark.parametrize("index_format", ["fp4", "fp8", "bf16"])
def test_what_is_no_number_comes_last_and_stays_its_own(index_format: str) -> None:
    """A key of NaN is minus infinity to every row; a query of NaN sees nothing but that, and takes the lowest entries."""
    case = Case(index_format, ((255, 256), (199, 200), (150, 151)), heads=2, spread=3)
    world = make(case)
    values = world.keys.views[-1]
    places = place_of(world, world.pieces[0], torch.tensor([1, 40, 63]))
    values[places // case.page, places % case.page] = 255 if index_format == "fp4" else torch.nan
    world.queries[-1].view(len(world.weights), case.heads, -1)[1, 0] = 255 if index_format == "fp4" else torch.nan
    world.weights[2] = -torch.inf
    found = run(world)
    for row in (0, 2):
        piece, visible = world.pieces[row], (world.pieces[row].stop) // case.ratio
        best = chosen(exact_scores(world, row, piece, visible), case.top_k)
        assert found[row].tolist() == place_of(world, piece, best).tolist()
    assert found[1].tolist() == place_of(world, world.pieces[1], torch.arange(case.top_k)).tolist()


@runs_kernels
def test_no_score_is_made_where_all_entries_are_listed() -> None:
    world = make(Case(top_k=100))
    step = step_of(world)
    assert not step.is_scored
    found = run(world, max_entries=100)
    for row, piece, visible in visible_rows(world):
        assert found[row].tolist() == listed(place_of(world, piece, torch.arange(visible)), 100)


def values_of(orders: Tensor) -> Tensor:
    return (orders ^ ((orders >> 31) & 0x7FFFFFFF)).view(torch.float32)


@runs_kernels
@pytest.mark.parametrize("index_format", FORMATS)
def test_scores_of_real_numbers(index_format: str) -> None:
    """Within fp32 of fp64, and the same bits alone, beside other rows, as decode and as prefill."""
    heads, dim = (64, 128) if HAS_GPU else (3, 32)
    case = Case(index_format, ((700, 701), (520, 521), (90, 99)), "prefill", heads, dim, padding=1)
    world = make(case)
    generator = torch.Generator().manual_seed(5)
    for piece in world.pieces:
        entry = torch.arange(piece.stop // case.ratio)
        places = place_of(world, piece, entry)
        stored = world.keys.codec.encode(torch.randn(len(entry), dim, generator=generator))
        world.keys.write(places // case.page, places % case.page, stored)
    world.queries = world.keys.codec.encode(torch.randn(world.weights.numel(), dim, generator=generator))
    world.weights = torch.randn(world.weights.shape, generator=generator)
    step = step_of(world)
    step.score(0, len(world.weights))
    scores = values_of(step.scores.cpu())
    for row, piece, visible in visible_rows(world):
        if visible > case.top_k:
            truth = exact_scores(world, row, piece, visible)
            size = world.exact[row].norm(dim=1).max() * heads**0.5 * dim**0.5
            assert float((scores[row, :visible] - truth).abs().max() / size) < 1e-6
    if not HAS_GPU:
        return  # the interpreter multiplies matrices in an order that depends on their size
    tiles = step.tiles
    cuts = [(1, 1, 4), (1, 2, 3), (2, 2, 3), (4, 1, 2)] if index_format != "fp32" else [(1, 1, 2)]
    for parts, rows_of_part, stages in cuts:
        changed = replace(tiles, parts=parts, rows=rows_of_part, stages=stages)
        other = step_of(world, tiles=changed, is_single=parts * rows_of_part == 1)
        other.score(0, len(world.weights))
        for row, _, visible in visible_rows(world):
            if visible > case.top_k:
                assert torch.equal(values_of(other.scores[row, :visible]).cpu(), scores[row, :visible]), changed
    shifted = World(
        case, tuple(field.roll(heads, 0) for field in world.queries), world.weights.roll(1, 0), world.keys, world.parts, (),
        world.tables,
    )  # fmt: skip
    rows = device_rows(shifted, [replace(piece, first_row=piece.first_row + 1) for piece in world.pieces])
    other = step_of(shifted, rows)
    other.score(0, len(world.weights))
    for row, _, visible in visible_rows(world):
        if visible > case.top_k:
            assert torch.equal(values_of(other.scores[row + 1, :visible]).cpu(), scores[row, :visible])


def select(scores: Tensor, top_k: int, **changed: object) -> tuple[Tensor, served.IndexStep]:
    """Places of given scores [T, N] of one-page-a-request logs, so that a place is its entry plus N times the row."""
    num_rows, entries = scores.shape
    codec = index_codec("fp32", 16)
    keys = Store(codec, (torch.zeros(num_rows, entries, 16, device=DEVICE),))
    pieces = tuple(Piece(entries - 1, entries, row, row) for row in range(num_rows))
    tables = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)[:, None]
    rows = rows_of(pieces, ((0,),) * num_rows, tables, num_rows, num_rows)
    step = served.IndexStep(
        (torch.zeros(num_rows, 16, device=DEVICE),), torch.zeros(num_rows, 1, device=DEVICE), 1.0, keys, rows, 1, top_k,
        entries, "decode", **changed,
    )  # type: ignore[arg-type]  # fmt: skip
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)
    step.scores.fill_(FAR)
    step.scores[:, :entries] = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(DEVICE)
    places = torch.full((num_rows, top_k), FAR, dtype=torch.int32, device=DEVICE)
    step.select_segments(0, num_rows)
    step.select_places(places, 0, num_rows)
    return places.cpu(), step


@runs_kernels
@pytest.mark.parametrize("top_k", long_but({2}, [1, 32, 33]))
def test_hostile_scores(top_k: int) -> None:
    """All equal, two values, infinities, one huge outlier, neighbours in the last bit, tiny and denormal numbers, ascending."""
    generator = torch.Generator().manual_seed(top_k)
    n = 130
    normal = torch.randn(n, generator=generator)
    rows = [
        torch.zeros(n), torch.full((n,), -torch.inf), torch.full((n,), torch.inf), normal, -normal.abs(), normal.sign(),
        torch.where(normal > 1.5, torch.inf, torch.where(normal < -0.5, -torch.inf, normal)), normal * 1e-42, normal * 3e38,
        torch.where(torch.arange(n) == 77, 3e38, normal), torch.arange(n).float(), -torch.arange(n).float(),
        (torch.randint(0, 40, (n,), generator=generator) + 0x3F800000).to(torch.int32).view(torch.float32),
        torch.where(torch.arange(n) % 2 == 0, 0.0, -0.0), torch.where(torch.arange(n) < top_k, -1.0, -torch.inf),
        torch.where(torch.arange(n) > n - top_k, 1.0, 0.0),
    ]  # fmt: skip
    scores = torch.stack(rows)
    whole, step = select(scores, top_k)
    assert step.segment == 0
    cut, step = select(scores, top_k, segment=64)
    assert step.segment == 64
    for row, own in enumerate(scores):
        expected = (chosen(own, top_k) + n * row).tolist()
        assert whole[row].tolist() == expected, row
        assert cut[row].tolist() == expected, row


@pytest.mark.skipif(not HAS_GPU, reason="long rows take the interpreter too long")
@pytest.mark.parametrize(("entries", "top_k"), [(8192, 512), (8193, 512), (32768, 512), (32769, 1024), (262144, 512),
                                                 (262144, 1000), (262144, 2048), (5000, 2048), (70001, 512)])  # fmt: skip
def test_long_rows(entries: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(entries)
    scores = torch.randn(4, entries, generator=generator)
    scores[1] = (scores[1] * 20).round()
    scores[2] = scores[2].exp()
    scores[3] = 1.0
    found, _ = select(scores, top_k)
    for row in range(4):
        assert found[row].tolist() == (chosen(scores[row], top_k) + entries * row).tolist(), row


def test_sizes_of_segments() -> None:
    for top_k in (1, 7, 512, 1000, 1024, 2048):
        for entries in (1, 16, 4096, 8192, 8193, 32768, 100_000, 262_144):
            size = served.segment_size(entries, top_k)
            assert size is not None and size & (size - 1) == 0
            segments = -(-entries // size)
            assert segments == 1 or (segments * top_k <= 32768 and size > top_k)
    assert served.segment_size(262_145 * 64, 2048) is None


def test_refusals() -> None:
    gpu = Machine("cuda", (9, 0), True)
    case = IndexCase("fp4", 64, 128, 512, 262_144)
    assert served.refuses(gpu, case) is None
    assert served.refuses(Machine("cuda", (8, 0), True), case) is None
    if not INTERPRETED:
        assert served.refuses(Machine("cpu", (0, 0), True), case) == "runs on NVIDIA GPUs, not on cpu"
        assert served.refuses(Machine("cuda", (7, 5), True), case) == "needs compute capability 8.0, this GPU has 7.5"
    assert served.refuses(gpu, replace(case, dim=256)) == "the index dim must be an even number up to 128, not 256"
    assert served.refuses(gpu, replace(case, top_k=4096)) == "top_k must be 1 to 2048, not 4096"
    assert served.refuses(gpu, replace(case, heads=0)) is not None
    refused = served.refuses(gpu, replace(case, max_entries=10_000_000))
    assert refused == "the entries a row may see must be at most 2097152, not 10000000"


_INT_POINTERS = "positions owners table_rows tables scores kept_orders kept_entries orders_in entries_in places"
POINTERS = dict.fromkeys(_INT_POINTERS.split(), "*i32")
ALIGNED = ("code_stride", "scale_stride", "score_stride", "row_stride", "table_stride", "weight_stride")


@compiles_kernels
@pytest.mark.parametrize(
    ("capability", "index_format", "order"),
    long_but(
        {0, 1, 2},
        [
            (90, "fp4", "decode"),
            (90, "bf16", "prefill"),
            (80, "fp4", "prefill"),
            (90, "fp4", "prefill"),
            (90, "fp8", "decode"),
            (90, "fp8", "prefill"),
            (80, "fp8", "decode"),
        ],
    ),
)
def test_scores_compiled_ahead_of_time(capability: int, index_format: str, order: Literal["decode", "prefill"]) -> None:
    """Tensor cores, keys expanded in registers, copies under way during the products, no spills."""
    tiles = served.choose_tiles(index_format, order == "decode", (capability // 10, capability % 10))
    width, groups = {"fp4": (64, 4), "fp8": (128, 1), "bf16": (128, 0)}[index_format]
    code, scale = {"fp4": ("*u8", "*i32"), "fp8": ("*u8", "*fp32"), "bf16": ("*bf16", "*bf16")}[index_format]
    integers = dict.fromkeys(("first_row", "num_rows", "max_entries", *ALIGNED), "i32")
    signature = POINTERS | integers | {
        "query_codes": code, "key_codes": code, "query_scales": scale, "key_scales": scale, "weights": "*fp32",
        "weight_scale": "fp32",
    }  # fmt: skip
    constants = {
        "RATIO": 4, "TOP_K": 512, "HEADS": 64, "PADDED_HEADS": 64,
        "WIDTH": width, "PADDED_WIDTH": width, "GROUPS": groups, "PAGE": 64, "TILE": tiles.entries,
        "FORMAT": index_format, "HAS_FP8": capability >= 89, "STAGES": tiles.stages, "INTERPRET": False,
    }  # fmt: skip
    constants |= {"PADDED_ROWS": 32} if order == "decode" else {"PARTS": tiles.parts, "ROWS": tiles.rows}
    kernel = kernels.score_singles if order == "decode" else kernels.score
    code = machine_code(kernel, signature, constants, capability, tiles.warps, tiles.stages, ALIGNED)
    assert code.count(f"HGMMA.64x{64 * tiles.rows}x16.F32" if capability == 90 else "HMMA.16816.F32") >= 8
    assert code.spills == 0
    assert code.count("LDGSTS") > 0


@compiles_kernels
@pytest.mark.parametrize(("size", "segment"), long_but({1}, [(4096, 4096), (8192, 0), (16384, 16384)]))
def test_selection_compiled_ahead_of_time(size: int, segment: int) -> None:
    integers = dict.fromkeys(("first_row", "max_entries", "num_segments", *ALIGNED), "i32")
    constants = {"RATIO": 4, "TOP_K": 512, "PADDED_K": 512, "SIZE": size}
    warps = served.select_warps(size)
    found = [machine_code(kernels.select_segments, POINTERS | integers, constants, 90, warps, aligned=ALIGNED)]
    constants |= {"SEGMENT": segment, "PAGE": 64}
    warps = served.select_warps(size, 16)
    found.append(machine_code(kernels.select_places, POINTERS | integers, constants, 90, warps, aligned=ALIGNED))
    for code in found:
        assert code.spills == 0
        assert code.count("LDG.E.128") > 0


@starts_interpreter
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
