"""Rows encoded and kept by `store/triton.py` against `ref.py`: on a GPU if there is one, else in Triton's interpreter.

Values are small multiples of 1/8, whose sums of squares are exact in any order, so that whole arenas are compared byte for byte:
what was written, and that nothing else was. The definition runs on the CPU, whose roots are those of IEEE.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.layers.heads import RmsNorm
from lamina.ops.machine import Machine
from lamina.ops.quantise import hadamard
from lamina.ops.rope_norm import entry_norm_rope, inverse_frequencies, rope_tables, rotate
from lamina.ops.rows import Rows, rows_of
from lamina.ops.store import EntryCodec, StateCodec, Store, StoreCase, attention_codec, index_codec

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl
from kernel_tests import compiled, long_but, orders_of_sums

from lamina.ops.rope_norm import kernels as rope_kernels
from lamina.ops.rope_norm.triton import norm_quantise, query_norm_rope
from lamina.ops.store import kernels
from lamina.ops.store.triton import (
    encode_queries,
    encode_rows,
    index_epilogue,
    keep_hidden,
    keep_rows,
    project_epilogue,
    query_epilogue,
    refuses,
)

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU and not INTERPRETED else "cpu"
EPS = 1e-6
runs_kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in the process that test_interpreted starts")
ENTRIES: dict[str, EntryCodec] = {
    "fp32": attention_codec("fp32", 24, 8),
    "bf16": attention_codec("bf16", 32, 16),
    "fp8 partial": attention_codec("fp8", 24, 8),
    "fp8": attention_codec("fp8", 160, 32),
    "fp8 real": attention_codec("fp8", 512, 64),
}
KEYS: dict[str, EntryCodec] = {
    "fp4": index_codec("fp4", 64),
    "fp4 short": index_codec("fp4", 16),
    "fp4 real": index_codec("fp4", 128),
    "fp8": index_codec("fp8", 32),
    "fp8 real": index_codec("fp8", 128),
    "bf16": index_codec("bf16", 20),
    "fp32": index_codec("fp32", 20),
}


def exact(*shape: int, seed: int = 0) -> Tensor:
    """Multiples of 1/8 up to 2."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 17, shape, generator=generator) / 8


def tables(positions: Tensor, rope: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The definition's tables, and the kernels': a column for each pair."""
    cos, sin = rope_tables(positions, inverse_frequencies(rope, 10_000.0))
    return (cos, sin), (cos[:, ::2].contiguous().to(DEVICE), sin[:, 1::2].contiguous().to(DEVICE))


def on_device(store: Store, rows: ModuleType) -> Store:
    """The same bytes on the test's device."""
    flat = rows.bytes_of(store).to(DEVICE)
    views = tuple(flat.view(v.dtype).as_strided(v.shape, v.stride(), v.storage_offset()) for v in store.views)
    return Store(store.codec, views, store.slot_column)


def same_arena(left: Store, right: Store, rows: ModuleType) -> bool:
    return torch.equal(rows.bytes_of(left).cpu(), rows.bytes_of(right).cpu())


def step(rows: ModuleType, parts: list[Any], ring: int, padding: int = 3) -> tuple[Any, Rows]:
    """The definition's metadata and the kernels' of one step; `padding` more rows and requests."""
    sequences = rows.arrays(parts, (), (ring,))
    num_rows = sum(part.stop - part.start for part in parts) + padding
    tables = sequences.tables.to(torch.int32).to(DEVICE)
    return sequences, rows_of(sequences.pieces, sequences.slot_pages, tables, num_rows, len(parts) + padding)


def parts_of(rows: ModuleType, spans: list[tuple[int, int]]) -> list[Any]:
    """Requests with these positions, in slots of two pages that are in another order."""
    num = len(spans)
    return [rows.Part(start, stop, (0,), (2 * (num - 1 - n), 2 * (num - 1 - n) + 1)) for n, (start, stop) in enumerate(spans)]


def expected_own(
    kv: Tensor, norm: Tensor, positions: Tensor, dtype: torch.dtype, codec: EntryCodec, rope: int
) -> tuple[Tensor, ...]:
    cos, sin = rope_tables(positions, inverse_frequencies(rope, 10_000.0))
    own = entry_norm_rope(kv.to(dtype).float(), norm, cos, sin, EPS)
    return codec.encode(own.to(dtype).float())


ROPES = {24: 8, 32: 16, 160: 32, 512: 64}


@runs_kernels
@pytest.mark.parametrize(
    ("dtype", "is_single", "name"),
    long_but(
        {place for place in range(4 * len(ENTRIES)) if (place // len(ENTRIES) + place) % 2 == 0},
        [(dtype, single, name) for dtype in (torch.float32, torch.bfloat16) for single in (True, False) for name in ENTRIES],
    ),
    ids=str,
)
def test_rows_and_rings_hold_the_definitions_bytes(name: str, dtype: torch.dtype, is_single: bool, rows: ModuleType) -> None:
    """Rows of a step and its rings, from strided columns, with padding rows full of NaN. Rings of 6: wrapped, full, begun."""
    codec, ring = ENTRIES[name], 6
    rope = ROPES[codec.width]
    spans = [(11, 12), (0, 1), (5, 6), (1_048_575, 1_048_576)] if is_single else [(0, 1), (3, 20), (7, 9), (2, 8)]
    parts = parts_of(rows, spans)
    sequences, batch = step(rows, parts, ring)
    expected = rows.poisoned_store(codec, 2 * len(parts), ring, column=1)
    window = on_device(expected, rows)
    real = sum(stop - start for start, stop in spans)
    wide = torch.full((batch.num_rows, codec.width + 12), torch.nan)
    wide[:real, 4 : 4 + codec.width] = exact(real, codec.width, seed=5)
    kv, norm = wide[:, 4 : 4 + codec.width], (1 + exact(codec.width, seed=6) / 4)
    positions = batch.positions.cpu().long()
    _, turns = tables(positions, rope)

    assert batch.is_single == is_single
    own = encode_rows(wide.to(DEVICE)[:, 4 : 4 + codec.width], norm.to(DEVICE), EPS, *turns, dtype, window, batch)
    truth = expected_own(kv, norm, positions, dtype, codec, rope)
    for found, wanted in zip(own, truth, strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found[:real].cpu(), wanted[:real])
    if not is_single:
        assert same_arena(window, rows.poisoned_store(codec, 2 * len(parts), ring, column=1), rows), "before attention"
        keep_rows(own, window, batch)
    at, owner, where = sequences.tails[ring]
    expected.write(sequences.slots[owner, 1], where, tuple(part[at] for part in truth))
    assert same_arena(window, expected, rows)


@runs_kernels
@pytest.mark.parametrize("name", ["fp32", "fp8 partial"])
def test_rings_of_many_rows(name: str, rows: ModuleType) -> None:
    """One, ring - 1, ring, ring + 1 and many rows, in permuted requests: each ring has the last ones."""
    codec, ring = ENTRIES[name], 8
    parts = parts_of(rows, [(3, 4), (0, 7), (5, 13), (2, 11), (0, 40)])
    sequences, batch = step(rows, parts, ring, padding=5)
    expected = rows.poisoned_store(codec, 2 * len(parts), ring, column=0)
    window = on_device(expected, rows)
    own = codec.encode(exact(batch.num_rows, codec.width))
    keep_rows(tuple(part.to(DEVICE) for part in own), window, batch)
    at, owner, where = sequences.tails[ring]
    expected.write(sequences.slots[owner, 0], where, tuple(part[at] for part in own))
    assert same_arena(window, expected, rows)


@runs_kernels
@pytest.mark.parametrize(("width", "dtype"), [(40, "fp32"), (2048, "fp32"), (40, "bf16")])
def test_the_last_hidden_vectors_are_kept(width: int, dtype: str, rows: ModuleType) -> None:
    codec = StateCodec(width, dtype)
    parts = parts_of(rows, [(3, 4), (0, 7), (5, 13)])
    sequences, batch = step(rows, parts, 4)
    expected = rows.poisoned_store(codec, 6, 1, column=1)
    store = on_device(expected, rows)
    hidden = torch.randn(batch.num_rows, width, generator=torch.Generator().manual_seed(0))
    keep_hidden(hidden.to(DEVICE), store, batch)
    keep_hidden(hidden.to(DEVICE), None, batch)
    last = torch.tensor([piece.rows.stop - 1 for piece in sequences.pieces])
    expected.write_first(sequences.slots[:, 1], codec.encode(hidden[last]))
    assert same_arena(store, expected, rows)


@runs_kernels
def test_hidden_vectors_are_kept_for_each_guess(rows: ModuleType) -> None:
    """A slot has a row for each count of tokens that a request may turn out to have."""
    codec, states = StateCodec(40), 4
    parts = [replace(part, num_guesses=guesses) for part, guesses in
             zip(parts_of(rows, [(3, 4), (0, 7), (5, 13), (6, 8)]), (0, 3, 2, 1), strict=True)]  # fmt: skip
    sequences, batch = step(rows, parts, 4)
    expected = rows.poisoned_store(codec, 8, states, column=1)
    store = on_device(expected, rows)
    hidden = torch.randn(batch.num_rows, 40, generator=torch.Generator().manual_seed(0))
    keep_hidden(hidden.to(DEVICE), store, batch)
    for number, (part, piece) in enumerate(zip(parts, sequences.pieces, strict=True)):
        for back in range(1 + part.num_guesses):
            place = torch.tensor([(piece.stop - back) % states])
            expected.write(sequences.slots[number, 1:], place, codec.encode(hidden[piece.rows.stop - 1 - back][None]))
    assert same_arena(store, expected, rows)


def queries_of(codec: EntryCodec, heads: int, num: int) -> Tensor:
    """Random queries, with a row of zeros and, of the coded formats, heads that are no numbers."""
    q = torch.randn(num, heads * codec.width, generator=torch.Generator().manual_seed(3))
    q[1] = 0.0
    if len(codec.fields) > 1:
        q[2, 3] = torch.inf
        q[2, codec.width + 1] = torch.nan
    return q


@runs_kernels
@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("heads", [2, 5])
def test_index_queries_have_the_definitions_bytes(name: str, heads: int) -> None:
    """No sum depends on an order that is not the definition's: any values, byte for byte, infinities and NaN included."""
    codec, num = KEYS[name], 5
    rope = {16: 8, 20: 8, 32: 8, 64: 16, 128: 64}[codec.width]
    q = queries_of(codec, heads, num)
    (cos, sin), turns = tables(torch.tensor([0, 3, 7, 4096, 1_048_575]), rope)
    wide = torch.full((num, q.shape[1] + 8), torch.nan, device=DEVICE)
    wide[:, 8:] = q.to(DEVICE)
    found = encode_queries(wide[:, 8:], *turns, heads, codec)
    turned = q.view(num, heads, -1).clone()
    tail = turned[..., -rope:]
    tail.copy_(rotate(tail, cos[:, None], sin[:, None]))
    for part, wanted in zip(found, codec.encode(turned.flatten(0, 1)), strict=True):
        assert torch.equal(part.cpu().nan_to_num(7.0), wanted.nan_to_num(7.0)), name
    alone = encode_queries(q[3:4].to(DEVICE), turns[0][3:4], turns[1][3:4], heads, codec)
    for part, wanted in zip(alone, found, strict=True):
        assert torch.equal(part, wanted[3 * heads : 4 * heads])


@runs_kernels
@pytest.mark.parametrize(
    ("name", "dtype", "is_asked"),
    long_but(
        {1, 7, 13},
        [
            (name, dtype, is_asked)
            for dtype in (torch.float32, torch.bfloat16)
            for name, is_asked in (*((name, True) for name in KEYS), ("fp8", False))
        ],
    ),
    ids=str,
)
def test_index_keys_of_every_token(name: str, dtype: torch.dtype, is_asked: bool, rows: ModuleType) -> None:
    """Whole logs and queries, byte for byte: keys from strided columns, some in the log already, padding full of NaN."""
    codec, size, heads = KEYS[name], 6, 5
    rope = {16: 8, 20: 8, 32: 8, 64: 16, 128: 64}[codec.width]
    spans = [(3, 14, 5), (7, 8, 0), (0, 2, 0), (5, 6, 6)]
    parts = [
        rows.Part(start, stop, tuple(range(3 * n, 3 * n + -(-stop // size))), (n,), 0, write_from)
        for n, (start, stop, write_from) in enumerate(spans)
    ]
    sequences, batch = step(rows, parts, size)
    expected = rows.poisoned_store(codec, 12, size)
    store = on_device(expected, rows)
    real, width = sum(stop - start for start, stop, _ in spans), codec.width
    half = exact(real, width // 2, seed=5)
    order = torch.randperm(width, generator=torch.Generator().manual_seed(8))
    x = torch.cat([half, -half], 1)[:, order] + 0.25  # whose mean and squares are exact
    wide = torch.full((batch.num_rows, width + 3), torch.nan)
    wide[:real, :width] = x
    weight, bias = 1 + exact(width, seed=6) / 4, exact(width, seed=7) / 2
    q = torch.full((batch.num_rows, heads * width), torch.nan)
    q[:real] = queries_of(codec, heads, real).to(dtype).float()
    (cos, sin), turns = tables(batch.positions.cpu().long(), rope)

    def turned(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        values = values.to(dtype).float()
        tail = rotate(values[..., -rope:], cos, sin)
        return torch.cat([values[..., :-rope], tail], -1).to(dtype).float()

    queries = q.to(DEVICE) if is_asked else None
    found = index_epilogue(
        wide.to(DEVICE)[:, :width], weight.to(DEVICE), bias.to(DEVICE), EPS, queries, heads, *turns, dtype, store, batch
    )
    normed = RmsNorm(weight, EPS, centres=True).forward(x.to(dtype).float()) + bias
    keys = codec.encode(turned(normed, cos[:real], sin[:real]))
    kept = [(p, row) for p in sequences.pieces for row in range(p.rows.start, p.rows.stop)]
    kept = [(p, row, p.start + row - p.first_row) for p, row in kept if p.start + row - p.first_row >= p.write_from]
    assert len(kept) == real - 3
    pages = torch.tensor([int(sequences.tables[p.table_row, position // size]) for p, _, position in kept])
    picked = torch.tensor([row for _, row, _ in kept])
    where = torch.tensor([position % size for _, _, position in kept])
    expected.write(pages, where, tuple(part[picked] for part in keys))
    assert same_arena(store, expected, rows)
    assert (found is not None) == is_asked
    if found is not None:
        asked = codec.encode(turned(q[:real].view(real, heads, -1), cos[:real, None], sin[:real, None]).flatten(0, 1))
        for part, wanted in zip(found, asked, strict=True):
            assert torch.equal(part[: real * heads].cpu().nan_to_num(7.0), wanted.nan_to_num(7.0))


@triton.jit
def _spread(x, out, N: tl.constexpr):
    at = tl.arange(0, 4)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, kernels.hadamard(tl.load(x + at)))


@runs_kernels
@pytest.mark.parametrize("width", [2, 16, 128, 512])
def test_the_butterflies_add_in_the_definitions_order(width: int) -> None:
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(width))
    out = torch.full_like(x, torch.nan, device=DEVICE)
    _spread[(1,)](x.to(DEVICE), out, N=width, enable_fp_fusion=False)
    assert torch.equal(out.cpu(), hadamard(x))


@runs_kernels
@pytest.mark.parametrize("is_single", [True, False])
def test_one_launch_has_the_bits_of_two(is_single: bool, rows: ModuleType) -> None:
    """Random values: also the order of the sums is the same."""
    codec = ENTRIES["fp8"]
    parts = parts_of(rows, [(11, 12), (0, 1), (5, 6)] if is_single else [(0, 1), (3, 9)])
    _, batch = step(rows, parts, 6)
    generator = torch.Generator().manual_seed(9)
    low = torch.randn(batch.num_rows, 192, generator=generator).to(DEVICE)
    kv = torch.randn(batch.num_rows, codec.width, generator=generator).to(DEVICE)
    low_norm, kv_norm = torch.rand(192, generator=generator).to(DEVICE), torch.rand(codec.width, generator=generator).to(DEVICE)
    _, turns = tables(batch.positions.cpu().long(), 32)
    windows = [on_device(rows.poisoned_store(codec, 6, 6, column=0), rows) for _ in range(2)]
    own = encode_rows(kv, kv_norm, EPS, *turns, torch.float32, windows[0], batch)
    made = norm_quantise(low, low_norm, EPS, torch.float32, True)
    both = project_epilogue(low, low_norm, kv, kv_norm, EPS, *turns, torch.float32, True, windows[1], batch)
    for found, wanted in zip(both[1], own, strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(both[0].values, made.values)
    assert both[0].codes is not None and made.codes is not None and both[0].scales is not None and made.scales is not None
    assert torch.equal(both[0].codes.view(torch.uint8), made.codes.view(torch.uint8))
    assert torch.equal(both[0].scales, made.scales)
    assert same_arena(windows[0], windows[1], rows)

    keys = KEYS["fp4"]
    wide = torch.randn(batch.num_rows, 3 * 160 + 5 * keys.width, generator=generator).to(DEVICE)
    q, index_q = wide[:, : 3 * 160], wide[:, 3 * 160 :]
    heads, fields = query_epilogue(q, index_q, *turns, 3, 5, EPS, keys)
    assert torch.equal(heads, query_norm_rope(q, *turns, 3, EPS))
    for found, wanted in zip(fields, encode_queries(index_q, *turns, 5, keys), strict=True):
        assert torch.equal(found, wanted)


def test_refusals() -> None:
    good = Machine("cuda", (8, 0), True)
    entry = StoreCase(512, 64, ("e4m3", "bf16", "e8m0"))
    assert refuses(good, entry) is None
    assert refuses(good, StoreCase(512, 64, ("int8",))) == "knows no rows of int8"
    assert refuses(good, StoreCase(513, 64, ("fp32",))) is not None
    if not INTERPRETED:
        assert refuses(Machine("cpu", (0, 0), True), entry) == "runs on NVIDIA GPUs, not on cpu"


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("capability", long_but({1}, [80, 90]))
def test_compiled_ahead_of_time(capability: int) -> None:
    """At the shipped shapes nothing is spilled, no multiply-add is fused, and a row's sum has one order in every kernel."""
    table = {"cos": "*fp32", "sin": "*fp32", "eps": "fp32"}
    common = table | dict.fromkeys(("positions", "owners", "slots"), "*i32") | {"slot_stride": "i32", "slot_column": "i32"}
    fields = ("*u8", "*bf16", "*u8")
    entry = kernels.Entry("*fp32", "i32", "*fp32", fields, kernels.Fields(fields, ("i32",) * 3))  # type: ignore[arg-type]
    low = kernels.LowRank("*fp32", "i32", "*fp32", "*bf16", "*u8", "*fp32")  # type: ignore[arg-type]
    norm = {"K": 1024, "BLOCKS": 8, "IS_BF16": True, "IS_FP8": True}
    row = {"D": 512, "ROPE": 64, "W": 512, "RING": 128, "FORMAT": 1, "WIDTHS": (448, 64, 8), "IS_BF16": True}
    main = kernels.Queries("*bf16", "i32", ("*bf16",))  # type: ignore[arg-type]
    index = kernels.Queries("*bf16", "i32", ("*u8", "*u8"))  # type: ignore[arg-type]
    heads = {"HEADS": 64, "D": 512, "GROUP": 2, "W": 512, "ROPE": 64}
    keys = {"INDEX_HEADS": 64, "INDEX_D": 128, "INDEX_GROUP": 4, "INDEX_W": 128, "FORMAT": 3, "WIDTHS": (64, 4)}
    plain = {name: getattr(low, name) for name in ("x", "weight", "codes", "scales")} | {"values": low.kept, "x_stride": "i32"}
    query = {"q": "*bf16", "q_stride": "i32", "out": "*bf16"}
    made = {
        (name, is_single): compiled(kernel, types, constants | {"IS_SINGLE": is_single}, capability)
        for is_single in (True, False)
        for name, kernel, types, constants in (
            ("both", kernels.project_epilogue, common | {"low": low, "entry": entry}, norm | row),
            ("row", kernels.encode_rows, common | {"entry": entry}, row),
        )
    }
    made["low", True] = compiled(rope_kernels.norm_quantise, plain | {"eps": "fp32"}, norm, capability)
    made["queries", True] = compiled(kernels.query_epilogue, table | {"main": main, "index": index}, heads | keys, capability, 1)
    made["heads", True] = compiled(rope_kernels.query_norm_rope, table | query, heads, capability, 1)
    made["heads", False] = compiled(rope_kernels.query_norm_rope, table | query, heads | {"GROUP": 1}, capability, 1)
    log = kernels.Fields(("*u8", "*fp32"), ("i32",) * 2)
    asked = kernels.Queries("*bf16", "i32", log.pointers)  # type: ignore[arg-type]
    paged = dict.fromkeys(("positions", "owners", "write_from", "table_rows", "tables"), "*i32") | {"table_width": "i32"}
    paged |= table | {"key": kernels.Key("*fp32", "i32", "*fp32", "*fp32", log), "queries": asked}  # type: ignore[arg-type]
    of_index = {"HEADS": 64, "D": 128, "ROPE": 64, "GROUP": 2, "W": 128, "PAGE_ROWS": 64, "FORMAT": 2, "WIDTHS": (128, 1)}
    made["index", True] = compiled(kernels.index_epilogue, paged, of_index | {"IS_BF16": True}, capability, 1)
    for code in made.values():
        assert ".local" not in code["ptx"]
        assert "ld.global.v4.b32" in code["ptx"] and "fma.rn" not in code["ptx"]
    orders = {key: orders_of_sums(code) for key, code in made.items()}
    assert all(orders.values()), "no sum was found"
    assert orders["both", True] == orders["both", False] == orders["row", True] | orders["low", True]
    assert orders["row", True] == orders["row", False]
    assert orders["queries", True] == orders["heads", True]


@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="the kernels run in this process")
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
