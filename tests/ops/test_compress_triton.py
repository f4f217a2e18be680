"""Compression by `compress/triton.py` against `ref.py`: on a GPU if there is one, else in Triton's interpreter.

Where gates are equal and values small integers all arithmetic is exact in any order, and whole arenas are compared byte for byte.
With random gates states are held to 2e-6, the accuracy of a few exponentials, and the kernels to themselves, bit for bit.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.ops.compress import CompressCase, Compressor, Folding, ref
from lamina.ops.machine import Machine
from lamina.ops.rope_norm import inverse_frequencies, rope_tables
from lamina.ops.rows import Rows, rows_of
from lamina.ops.store import EntryCodec, StateCodec, Store, attention_codec, index_codec

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from kernel_tests import compiled, long_but, orders_of_sums

from lamina.ops.compress import kernels
from lamina.ops.compress.triton import compress, compress_pair, refuses
from lamina.ops.store.kernels import Fields

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU and not INTERPRETED else "cpu"
EPS = 1e-6
runs_kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in the process that test_interpreted starts")
CODECS: dict[str, EntryCodec] = {
    "fp32": StateCodec(24),
    "bf16": attention_codec("bf16", 24, 8),
    "fp8": attention_codec("fp8", 24, 8),
    "index fp8": index_codec("fp8", 32),
    "index fp4": index_codec("fp4", 16),
}
ROPE = 8


@dataclass(slots=True)
class World:
    """One compressor with two sets of stores of the same bytes: the definition's, on the CPU, and the kernels'.

    values, gates  projected rows of each sequence, on the CPU.   blocks  pages of each sequence's log.
    """

    ratio: int
    ape: Tensor
    inv_freq: Tensor
    definition: Compressor
    folding: Folding
    values: list[Tensor]
    gates: list[Tensor]
    blocks: list[tuple[int, ...]]

    @property
    def stores(self) -> Iterator[tuple[Store, Store]]:
        """Pairs (the definition's, the kernels')."""
        for name in ("open", "next", "log"):
            left, right = getattr(self.definition, name), getattr(self.folding, name)
            if left is not None:
                yield left, right


def on_device(store: Store, rows: ModuleType) -> Store:
    """The same bytes on the test's device."""
    flat = rows.bytes_of(store).to(DEVICE)
    views = tuple(flat.view(v.dtype).as_strided(v.shape, v.stride(), v.storage_offset()) for v in store.views)
    return Store(store.codec, views, store.slot_column)


def build(
    rows: ModuleType, ratio: int, lengths: list[int], codec: EntryCodec, gate: float, seed: int = 0,
    columns: tuple[int, int] = (1, 0), rope: int = ROPE, states: int = 1,
) -> World:  # fmt: skip
    """gate 0: values in -1, 0, 1, equal gates and no bias.   states  rows of each state in a slot."""
    generator = torch.Generator().manual_seed(seed)
    width, num = codec.width, len(lengths)
    span = width * (2 if ratio == 4 else 1)
    each = max(-(-length // 256) for length in lengths)
    order = torch.randperm(num * each + 1, generator=generator).tolist()
    state = StateCodec(3 * width)
    norm = 1 + torch.randint(-4, 5, (width,), generator=generator) / 8
    inv_freq = inverse_frequencies(rope, 160_000.0)
    ape = gate / 2 * torch.randn(ratio, span, generator=generator) + 0.0  # of two zeros the larger has no sign of its own
    opened = rows.poisoned_store(state, 4 * num, states, column=columns[0])
    ahead = rows.poisoned_store(state, 4 * num, states, column=columns[1]) if ratio == 4 else None
    log = rows.poisoned_store(codec, len(order), 256 // ratio)
    folding = Folding(
        ratio, ape.to(DEVICE), norm.to(DEVICE), EPS, on_device(opened, rows),
        on_device(ahead, rows) if ahead is not None else None, on_device(log, rows),
    )  # fmt: skip
    values = [torch.randn(length, span, generator=generator) for length in lengths]
    return World(
        ratio, ape, inv_freq, Compressor(ratio, norm, inv_freq, EPS, opened, ahead, log), folding,
        values if gate else [x.sign() * (x.abs() > 0.5) for x in values],
        [gate * torch.randn(length, span, generator=generator) + 0.0 for length in lengths],
        [tuple(order[number * each : (number + 1) * each]) for number in range(num)],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of one sequence."""

    number: int
    start: int
    stop: int
    valid_from: int = 0
    write_from: int = 0
    guesses: int = 0


def take(rows: ModuleType, world: World, spans: list[Span], padding: int = 2) -> tuple[Any, Rows, Tensor, Tensor]:
    """One step: the definition's metadata, the kernels', and values and gates as columns of one matrix; padding rows are NaN."""
    parts = [
        rows.Part(s.start, s.stop, world.blocks[s.number][: -(-s.stop // 256)], (2 * s.number, 2 * s.number + 1), s.valid_from,
                  s.write_from, s.guesses)
        for s in spans
    ]  # fmt: skip
    sequences = rows.arrays(parts, [world.ratio])
    real = sum(span.stop - span.start for span in spans)
    tables = sequences.tables.to(torch.int32).to(DEVICE)
    batch = rows_of(sequences.pieces, sequences.slot_pages, tables, real + padding, len(spans) + padding)
    span = world.values[0].shape[1]
    wide = torch.full((batch.num_rows, 2 * span + 8), torch.nan)
    wide[:real, 4 : 4 + span] = torch.cat([world.values[s.number][s.start : s.stop] for s in spans])
    wide[:real, 4 + span : 4 + 2 * span] = torch.cat([world.gates[s.number][s.start : s.stop] for s in spans])
    return sequences, batch, wide[:, 4 : 4 + span], wide[:, 4 + span : 4 + 2 * span]


def turns(world: World, batch: Rows) -> tuple[Tensor, Tensor]:
    """cos and sin at the first position of each row's group, the definition's very numbers."""
    cos, sin = rope_tables(batch.positions.cpu().long() // world.ratio * world.ratio, world.inv_freq)
    return cos[:, ::2].contiguous().to(DEVICE), sin[:, 1::2].contiguous().to(DEVICE)


def run(rows: ModuleType, world: World, spans: list[Span], is_defined: bool = True) -> None:
    """One step by the kernels and, if asked, by the definition."""
    sequences, batch, values, gates = take(rows, world, spans)
    wide = torch.cat([values, gates], dim=1).to(DEVICE)
    span = values.shape[1]
    compress(world.folding, wide[:, :span], wide[:, span:], *turns(world, batch), batch)
    if is_defined:
        missing = sequences.positions.shape[0] - values.shape[0]
        values, gates = (torch.nn.functional.pad(x, (0, 0, 0, max(0, missing))) for x in (values, gates))
        phase = batch.positions.cpu().long() % world.ratio
        phase = torch.nn.functional.pad(phase, (0, max(0, missing)))
        ref.compress(world.definition, values.clone(), gates + world.ape[phase], sequences)


def walk(lengths: list[int], seed: int, most: int, begin: int = 0) -> Iterator[list[Span]]:
    """Steps of random pieces of random sequences in random order until all are through; every third has single rows."""
    generator = torch.Generator().manual_seed(seed)
    done, step = [begin] * len(lengths), 0
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        spans = []
        for number in torch.randperm(len(lengths), generator=generator)[:4].tolist():
            limit = 1 if step % 3 == 2 else int(torch.randint(1, most, (), generator=generator))
            count = min(limit, lengths[number] - done[number])
            if count:
                spans.append(Span(number, done[number], done[number] + count, begin, begin))
                done[number] += count
        step += 1
        if spans:
            yield spans


def same_arenas(world: World, rows: ModuleType) -> bool:
    return all(torch.equal(rows.bytes_of(left), rows.bytes_of(right).cpu()) for left, right in world.stores)


@runs_kernels
@pytest.mark.parametrize(
    ("ratio", "name"),
    [pytest.param(4, name, marks=[] if name in ("fp8", "index fp4") else [pytest.mark.long]) for name in CODECS]
    + long_but({1}, [(128, "fp32"), (128, "bf16"), (128, "fp8")]),
)
def test_every_byte_where_all_sums_are_exact(ratio: int, name: str, rows: ModuleType) -> None:
    """Ragged steps of several requests, padding rows, slots and blocks in any order: entries, states, and nothing else."""
    lengths = [21, 9, 34, 8, 1] if ratio == 4 else [130, 257]
    world = build(rows, ratio, lengths, CODECS[name], 0.0)
    for spans in walk(lengths, 3, 12 if ratio == 4 else 150):
        run(rows, world, spans)
        assert same_arenas(world, rows), spans


@runs_kernels
@pytest.mark.parametrize(("ratio", "states"), long_but({0, 2}, [(4, 4), (4, 8), (128, 6), (128, 2)]))
def test_guesses_leave_a_state_after_each_row(ratio: int, states: int, rows: ModuleType) -> None:
    """Steps whose last rows are guesses, of which some are taken back: states byte for byte, and entries written again."""
    length, most = ratio + 90, 5
    world = build(rows, ratio, [length, length], CODECS["fp8"], 0.0, seed=9, states=states)
    run(rows, world, [Span(0, 0, ratio - 3), Span(1, 0, ratio + 2)])
    done, generator = [ratio - 3, ratio + 2], torch.Generator().manual_seed(states)
    for number in range(8):
        spans = []
        for request in range(2):
            guesses = min(int(torch.randint(0, states, (), generator=generator)), length - 1 - done[request])
            ahead = 1 + (most if number == 3 else 0)  # a prompt's end with guesses behind it, longer than the states
            spans.append(Span(request, done[request], min(length, done[request] + ahead + guesses), guesses=guesses))
        run(rows, world, spans)
        assert same_arenas(world, rows), spans
        for request, span in enumerate(spans):
            done[request] = span.stop - int(torch.randint(0, 1 + span.guesses, (), generator=generator))
            change = 1 - 2 * torch.randint(0, 2, world.values[request][done[request] :].shape, generator=generator)
            world.values[request][done[request] :] *= change  # what comes now is not what was guessed


@runs_kernels
@pytest.mark.parametrize(("gate", "ratio"), long_but({0, 3}, [(2.0, 4), (2.0, 128), (200.0, 4), (200.0, 128)]))
def test_states_and_entries_of_any_gates(ratio: int, gate: float, rows: ModuleType) -> None:
    """Ordinary and overwhelming gates: the fold to 2e-6 of the definition's, entries to what their norm makes of that."""
    lengths = [30, 11, 24] if ratio == 4 else [257, 140]
    world = build(rows, ratio, lengths, CODECS["fp32"], gate, seed=5)
    for spans in walk(lengths, 4, 9 if ratio == 4 else 120):
        run(rows, world, spans)
    for left, right in world.stores:
        found, expected = rows.bytes_of(right).cpu().view(torch.float32), rows.bytes_of(left).view(torch.float32)
        assert torch.equal(found.isnan(), expected.isnan()), "bytes that nobody owns were written"
        torch.testing.assert_close(found.nan_to_num(), expected.nan_to_num(), rtol=2e-6, atol=4e-6)


@runs_kernels
@pytest.mark.parametrize(
    ("ratio", "cut"), long_but({1, 3, 6}, [(4, 1), (4, 3), (4, 7), (4, 64), (128, 1), (128, 100), (128, 129)])
)
def test_cuts_do_not_change_bits(ratio: int, cut: int, rows: ModuleType) -> None:
    """However a prompt is cut, decode rows among the cuts, its entries and its last state have the same bytes."""
    length = 2 * ratio + ratio // 2 + 1 + (40 if ratio == 4 else 0)
    if cut == 1 and not HAS_GPU and ratio == 128:
        pytest.skip("hundreds of steps in the interpreter")
    whole, pieces = (build(rows, ratio, [length], CODECS["fp8"], 3.0, seed=6) for _ in range(2))
    run(rows, whole, [Span(0, 0, length)], is_defined=False)
    for start in range(0, length, cut):
        run(rows, pieces, [Span(0, start, min(length, start + cut))], is_defined=False)
    for name in ("open", "next", "log"):
        left, right = getattr(whole.folding, name), getattr(pieces.folding, name)
        if left is not None:
            # a state that was kept at a border may still lie in the slot: only what a step after this one reads counts
            is_kept = name == "log" or length % ratio
            assert not is_kept or torch.equal(rows.bytes_of(left), rows.bytes_of(right)), name


@runs_kernels
@pytest.mark.parametrize(
    ("ratio", "begin"), long_but({1, 2, 3}, [(ratio, begin) for ratio in (4, 128) for begin in (128, 129, 131)])
)
def test_folds_that_begin_in_the_middle(ratio: int, begin: int, rows: ModuleType) -> None:
    """Nothing exists before `begin`, the states are NaN; what closes at or before write_from is in the log and stays."""
    stop = 160 if ratio == 4 else 386
    world = build(rows, ratio, [stop], CODECS["fp32"], 0.0, seed=7)
    write_from = -(-begin // ratio) * ratio
    at = begin
    for count in (1, 2, 5, 3, 1, 1, 11, 300):
        if at < stop:
            run(rows, world, [Span(0, at, min(stop, at + count), begin, write_from)])
            for left, right in world.stores:  # the first entry may have an odd number of tokens, whose mean is rounded
                found, expected = rows.bytes_of(right).cpu().view(torch.float32), rows.bytes_of(left).view(torch.float32)
                tolerance = 1e-6 if left is world.definition.log else 0.0
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
            at += count
    assert not world.folding.log.views[0].isnan().all(), "nothing was written at all"


@runs_kernels
def test_requests_with_and_without_a_past_in_one_step(rows: ModuleType) -> None:
    """Groups that continue, follow, begin anew and begin without a past, single rows among them, padding between."""
    world = build(rows, 4, [40] * 5, CODECS["fp32"], 0.0, seed=8)
    run(rows, world, [Span(0, 0, 10), Span(1, 0, 12), Span(4, 0, 11)])
    run(rows, world, [Span(1, 12, 30), Span(3, 10, 30, 10, 16), Span(0, 10, 23), Span(2, 0, 20), Span(4, 11, 12)])
    assert same_arenas(world, rows)
    run(rows, world, [Span(3, 30, 31, 10, 16), Span(4, 12, 13), Span(2, 20, 21)])
    run(rows, world, [Span(4, 13, 19), Span(2, 21, 22)])
    assert same_arenas(world, rows)


@runs_kernels
@pytest.mark.parametrize("spans", [[Span(0, 0, 23), Span(1, 0, 5)], [Span(1, 0, 1), Span(0, 0, 1)]], ids=["prefill", "decode"])
def test_a_pair_has_the_bits_of_two(spans: list[Span], rows: ModuleType) -> None:
    made = []
    for is_pair in (False, True):
        worlds = [
            build(rows, 4, [40, 40], CODECS["fp8"], 3.0, seed=1),
            build(rows, 4, [40, 40], CODECS["index fp4"], 3.0, seed=2, columns=(0, 1)),
        ]
        for step in (spans, [Span(s.number, s.stop, s.stop + 1) for s in spans], [Span(0, 24, 33), Span(1, 6, 8)]):
            arguments = []
            for world in worlds:
                _, batch, values, gates = take(rows, world, step)
                arguments.append((world.folding, values.to(DEVICE), gates.to(DEVICE)))
            cos, sin = turns(worlds[0], batch)
            if is_pair:
                compress_pair(*arguments[0], *arguments[1], cos, sin, batch)
            else:
                for each in arguments:
                    compress(*each, cos, sin, batch)
        made.append([rows.bytes_of(right) for world in worlds for _, right in world.stores])
    for left, right in zip(*made, strict=True):
        assert torch.equal(left, right)


@pytest.mark.skipif(DEVICE == "cpu", reason="too long for the interpreter")
@pytest.mark.parametrize(("ratio", "width", "name"), [(4, 512, "fp8"), (4, 128, "index fp4"), (128, 512, "fp8")])
def test_the_shipped_shapes(ratio: int, width: int, name: str, rows: ModuleType) -> None:
    """2,000 and 1,300 tokens in pieces, and then token by token: states to 2e-6, codes to one step."""
    codec = index_codec("fp4", width) if name == "index fp4" else attention_codec("fp8", width, 64)
    world = build(rows, ratio, [2000, 1300], codec, 2.0, seed=3, rope=64)
    for spans in ([Span(0, 0, 1024), Span(1, 0, 640)], [Span(1, 640, 1290), Span(0, 1024, 1990)]):
        run(rows, world, spans)
    for at in range(10):
        run(rows, world, [Span(0, 1990 + at, 1991 + at), Span(1, 1290 + at, 1291 + at)])
    for left, right in world.stores:
        if left is not world.definition.log:
            found, expected = (rows.bytes_of(store).cpu().view(torch.float32) for store in (right, left))
            torch.testing.assert_close(found.nan_to_num(), expected.nan_to_num(), rtol=2e-6, atol=4e-6)
            continue
        for number, length in enumerate((2000, 1300)):
            entry = torch.arange(length // ratio)
            pages = torch.tensor(world.blocks[number])[entry // left.rows_per_page]
            wanted = left.read(pages, entry % left.rows_per_page)
            found = right.read(pages.to(DEVICE), (entry % left.rows_per_page).to(DEVICE)).cpu()
            differing = (found != wanted).float().mean()
            assert differing < 1e-3, differing
            steps = (found - wanted).abs() / wanted.abs().amax(-1, keepdim=True)
            assert steps.max() < (0.4 if name == "index fp4" else 0.08), "more than a step"


def test_refusals() -> None:
    good = Machine("cuda", (9, 0), True)
    assert refuses(good, CompressCase(512, 64)) is None
    assert refuses(good, CompressCase(8192, 64)) == "a program folds up to 4096 channels, not 8192"
    assert refuses(good, CompressCase(64, 5)) is not None
    if not INTERPRETED:
        assert refuses(Machine("cuda", (7, 5), True), CompressCase(512, 64)) == "needs compute capability 8.0, this GPU has 7.5"


def compress_code(ratio: int, has_index: bool, is_single: bool, saves: bool, capability: int) -> dict[str, Any]:
    """What the kernel becomes without a GPU, at the shipped shapes."""
    kernel = kernels.compress
    coded, keys = ("*u8", "*bf16", "*u8"), ("*u8", "*u8")

    def memory(fields: tuple[str, ...]) -> Any:
        ahead = ("*fp32", "i32") if ratio == 4 else ("constexpr", "i32")
        log: Any = Fields(fields, ("i32",) * len(fields))
        made: Any = kernels.Memory(
            "*fp32", "i32", "*fp32", "i32", "*fp32", "*fp32", "*fp32", "i32", *ahead, log,  # type: ignore[arg-type]
        )  # fmt: skip
        return made

    batch = kernels.Batch(*(["*i32"] * 9), "i32", "*i32", "i32", "*i32")  # type: ignore[arg-type]
    types = {"memory": memory(coded), "index": memory(keys) if has_index else "constexpr", "batch": batch}
    types |= {"cos": "*fp32", "sin": "*fp32", "eps": "fp32", "index_eps": "fp32"}
    types |= {name: "i32" for name in kernel.arg_names if name.endswith("_column")}
    constants: dict[Any, Any] = {
        "IS_SINGLE": is_single, "SAVES": saves, "STATES": 6, "HAS_DRAFTS": not is_single, "RATIO": ratio, "ROPE": 64,
        "STAGES": 0 if is_single else min(8, ratio + 1),
        "D": 512, "W": 512, "FORMAT": 1, "WIDTHS": (448, 64, 8), "LOG_ROWS": 256 // ratio,
        "INDEX_D": 128, "INDEX_W": 128, "INDEX_FORMAT": 3, "INDEX_WIDTHS": (64, 4), "INDEX_LOG_ROWS": 64,
    }  # fmt: skip
    if not has_index:
        constants["index"] = None
    if ratio != 4:
        constants[0, kernels.Memory._fields.index("next")] = None
    return compiled(kernel, types, constants, capability)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.long), 90])
def test_compiled_ahead_of_time(capability: int) -> None:
    """At the shipped shapes nothing is spilled, channels are read 16 bytes at a time, tokens ahead of their use; and an entry's
    sum has one order in decode, in prefill, alone and beside the index."""
    single, entries = {}, {}
    for ratio, has_index in ((4, True), (128, False)):
        single[ratio] = compress_code(ratio, has_index, True, True, capability)
        entries[ratio] = compress_code(ratio, has_index, False, False, capability)
        assert "cp.async" in entries[ratio]["ptx"]
    states = compress_code(4, True, False, True, capability)
    for code in (*single.values(), *entries.values(), states):
        assert ".local" not in code["ptx"]
        assert "ld.global.v4.b32" in code["ptx"]
    assert orders_of_sums(single[4]) == orders_of_sums(entries[4]) and len(orders_of_sums(single[4])) == 2
    assert orders_of_sums(single[128]) == orders_of_sums(entries[128]) < orders_of_sums(single[4])


@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="the kernels run in this process")
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
