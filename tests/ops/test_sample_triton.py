"""The sampling of `triton.py` against `ref.py`: on a GPU if there is one, else in Triton's interpreter, in its own process."""

import dataclasses
import importlib.util
import math
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lamina.ops.machine import Machine
from lamina.ops.sample import SampleBatch, ref
from lamina.ops.sample import sample as definition
from lamina.ops.sample import token_logprobs as define_logprobs
from lamina.ops.sample.batch import (
    CHILD,
    FLAGS,
    IS_DRAWN,
    IS_NEGATIVE,
    IS_SEEDED,
    POSITION,
    SEED,
    STATE_ROW,
    TEMPERATURE,
    TOP_P,
    WORDS,
    Records,
    records_of,
)  # fmt: skip
from lamina.ops.sample.draws import uniform

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl
from kernel_tests import long_but
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from lamina.ops.sample import kernels
from lamina.ops.sample.draw import kernels as draw_kernels
from lamina.ops.sample.triton import Cuts, refuses, sample, sample_into, token_logprobs, warm_up

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU else "cpu"
INF = math.inf
runs_kernels = pytest.mark.skipif(not (HAS_GPU or INTERPRETED), reason="runs in the process that test_interpreted starts")
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="takes the real sizes or a captured graph")

SETTINGS: list[dict[str, float]] = [
    {"temperature": 0.0, "top_p": 0.5},
    {},
    {"temperature": 0.4},
    {"min_p": 0.15},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.03},
    {"top_p": 0.7},
    {"top_p": 0.999},
    {"temperature": 3.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.9, "top_k": 12, "top_p": 0.5},
    {"temperature": 1e-30, "top_k": 3, "top_p": 0.9},
    {"temperature": 1e30, "top_p": 0.4},
]


@dataclass(frozen=True, slots=True)
class Case:
    """vocab_size tokens in chunks of `chunk`; lists of at most `cap`. A row for each setting, or for each second or third."""

    vocab_size: int
    chunk: int
    cap: int
    kind: str
    every: int = 2


CASES = [
    Case(100, 128, 128, "smooth"),  # every head is listed
    Case(100, 64, 16, "smooth", 1),  # of some only the border's part
    Case(100, 64, 16, "smooth", 3),
    Case(60, 64, 16, "equals"),
    Case(65, 64, 32, "flat", 5),  # no list is short enough
    Case(65, 64, 32, "flat", 3),
    Case(33, 16, 64, "holes"),
    Case(48, 32, 16, "sure"),  # all but one token far below the peak
    Case(1, 16, 16, "smooth"),
]


def make_logits(kind: str, num_rows: int, vocab_size: int, seed: int) -> Tensor:
    x = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    return {
        "smooth": x,
        "equals": x.round(),
        "flat": torch.zeros_like(x),
        "holes": x.masked_fill(x < -0.5, -INF).index_fill(1, torch.tensor([vocab_size // 2]), 0.25),
        "sure": x.index_fill(1, torch.tensor([vocab_size // 3]), 30.0),
    }[kind]


def make_batch(settings: list[dict[str, float]], uniforms: Tensor) -> SampleBatch:
    columns = {
        name: torch.tensor([setting.get(name, default) for setting in settings], dtype=torch.float64)
        for name, default in (("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0))
    }
    top_k = torch.tensor([int(setting.get("top_k", 0)) for setting in settings])
    return dataclasses.replace(SampleBatch.greedy(len(settings)), top_k=top_k, uniforms=uniforms, **columns)


def on_device(batch: SampleBatch) -> SampleBatch:
    moved = {name: part.to(DEVICE) for name, part in fields_of(batch).items() if part is not None}
    return dataclasses.replace(batch, **moved)


def fields_of(batch: SampleBatch) -> dict[str, Tensor | None]:
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


def draw(logits: Tensor, batch: SampleBatch, cuts: Cuts | None = None) -> tuple[list[int], list[bool]]:
    """Tokens and flags; outputs start as what no row gives."""
    tokens = torch.full((logits.shape[0],), 1 << 30, dtype=torch.int32, device=DEVICE)
    is_bad = torch.full((logits.shape[0],), 7, dtype=torch.uint8, device=DEVICE)
    sample_into(tokens, is_bad, logits.to(DEVICE), records_of(on_device(batch), logits.shape[1]), cuts=cuts)
    assert bool((is_bad <= 1).all())
    return tokens.tolist(), is_bad.bool().tolist()


def numbers(count: int, seed: int) -> Tensor:
    return torch.tensor([uniform(seed, 0, position) for position in range(count)], dtype=torch.float64)


@runs_kernels
@pytest.mark.parametrize("case", long_but({0, 2, 3, 4, 6, 7, 8}, CASES), ids=str)
def test_the_definition(case: Case) -> None:
    settings = SETTINGS[:: case.every]
    logits = make_logits(case.kind, len(settings), case.vocab_size, 3)
    batch = make_batch(settings, numbers(len(settings), 5))
    tokens, is_bad = draw(logits, batch, Cuts(case.chunk, case.cap))
    assert tokens == definition(logits, batch).tolist()
    assert not any(is_bad)


@needs_gpu
@pytest.mark.parametrize("kind", ["smooth", "equals", "flat", "holes", "sure"])
@pytest.mark.parametrize("cuts", [Cuts(), Cuts(cap=512)], ids=str)
def test_the_definition_at_real_size(kind: str, cuts: Cuts) -> None:
    settings: list[dict[str, float]] = [
        *SETTINGS,
        {"top_k": 50},
        {"top_k": 5000},
        {"top_k": 20_000, "top_p": 0.9},
        {"temperature": 0.6, "top_p": 0.95},
        {"top_k": 64, "top_p": 0.95},
    ] * 6  # fmt: skip
    logits = make_logits(kind, len(settings), 129_280, 11)
    batch = make_batch(settings, numbers(len(settings), 6))
    assert draw(logits, batch, cuts)[0] == definition(logits, batch).tolist()


@runs_kernels
def test_the_most_likely_token() -> None:
    """The first of equals, in one chunk or across them; the two zeros are equal; nothing but logits is read."""
    logits = torch.full((5, 40), -3.0)
    logits[0, [7, 8, 30]] = 1.5
    logits[1, 3], logits[1, 39] = -0.0, 0.0
    logits[2, :] = -INF
    logits[2, 39] = -1e30
    logits[3, 39] = 3e38
    wide = torch.full((5, 64), 9.0)  # a row's neighbours in memory are others'
    wide[:, 11:51] = logits
    tokens = torch.full((5,), 1 << 30, dtype=torch.int32, device=DEVICE)
    is_bad = torch.full((5,), 7, dtype=torch.uint8, device=DEVICE)
    last = torch.full((4,), -7, dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([2, -1, 0, 3, -1], device=DEVICE)
    sample_into(tokens, is_bad, wide.to(DEVICE)[:, 11:51], None, rows, last, cuts=Cuts(16))
    assert tokens.tolist() == definition(logits, SampleBatch.greedy(5)).tolist() == [7, 3, 39, 39, 0]
    assert is_bad.tolist() == [0] * 5
    assert last.tolist() == [39, -7, 7, 39]


@runs_kernels
def test_bad_rows_are_flagged_and_harm_nobody() -> None:
    logits = make_logits("smooth", 8, 40, 1)
    logits[1, 39] = torch.nan
    logits[2, 5] = INF
    logits[3, :] = -INF
    logits[4, 17] = torch.nan  # banned, and bad all the same
    logits[6, 1:] = -INF  # and 0 is banned
    batch = make_batch([{"top_p": 0.9}, {}, {"top_k": 3}, {}, {"temperature": 0.0}, {"top_k": 4}, {}, {}], numbers(8, 2))
    batch = dataclasses.replace(batch, banned_rows=torch.tensor([6, 4]), banned_ids=torch.tensor([0, 17]))
    tokens, is_bad = draw(logits, batch, Cuts(16, 16))
    assert is_bad == [False, True, True, True, True, False, True, False]
    assert [token for token, bad in zip(tokens, is_bad, strict=True) if bad] == [0] * 5
    fine = torch.tensor([0, 5, 7])
    assert [tokens[row] for row in fine] == definition(logits[fine], chosen(batch, fine)).tolist()


def chosen(batch: SampleBatch, rows: Tensor) -> SampleBatch:
    """The dense fields of some rows; no edits."""
    dense = ("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "uniforms")
    return SampleBatch(**{name: part[rows] for name, part in fields_of(batch).items() if name in dense and part is not None})


@runs_kernels
@pytest.mark.parametrize("seed", long_but({1}, [0, 2, 3]))
def test_edits_bit_for_bit(seed: int) -> None:
    """Bias (with repeats), bans, penalties and masks give the definition's logits, and its tokens."""
    generator = torch.Generator().manual_seed(seed)
    num, vocab_size = 4, 50
    logits = torch.randn(num, vocab_size, generator=generator) * 3
    batch = make_batch([{}, {"top_p": 0.8}, {"temperature": 0.0}, {"top_k": 5}], numbers(num, seed))
    bias_rows = torch.tensor([0, 3, 0, 0, 2, 3])
    batch = dataclasses.replace(
        batch,
        repetition=torch.tensor([1.3, 1.0, 0.7, 7.1]),
        presence=torch.tensor([0.3, 0.0, -1.1, 0.7]),
        frequency=torch.tensor([0.1, 0.0, 0.37, -1.9]),
        prompt_seen=torch.rand(num, vocab_size, generator=generator) < 0.3,
        output_counts=torch.randint(0, 4, (num, vocab_size), generator=generator, dtype=torch.int32),
        bias_rows=bias_rows, bias_ids=torch.tensor([49, 0, 3, 49, 17, 31]), bias_values=torch.randn(6, generator=generator) * 5,
        banned_rows=torch.tensor([1, 1, 0]), banned_ids=torch.tensor([16, 15, 40]),
    )  # fmt: skip
    if seed == 2:
        batch = dataclasses.replace(batch, output_counts=None)
    if seed:
        words = torch.randint(-(1 << 31), 1 << 31, (2, 2), generator=generator).to(torch.int32)
        batch = dataclasses.replace(batch, mask_rows=torch.tensor([3, 1]), mask_words=words)
    records = records_of(on_device(batch), vocab_size)
    edited = torch.full((num, vocab_size), torch.nan, device=DEVICE)
    packed = torch.empty(num, 4, dtype=torch.int64, device=DEVICE)
    faults = torch.empty(num, 4, dtype=torch.int32, device=DEVICE)
    kernels.peaks[(num * 4,)](
        logits.to(DEVICE), vocab_size, edited, records.words, records.state, packed, faults,
        VOCAB=vocab_size, CHUNK=16, CHUNKS=4, EDITS=True, STATE=True, enable_fp_fusion=False,
    )  # fmt: skip
    assert torch.equal(edited.cpu(), ref._edit(logits, batch))
    assert draw(logits, batch, Cuts(16, 16))[0] == definition(logits, batch).tolist()


@runs_kernels
def test_masks_alone() -> None:
    """Single tokens, on both sides of every word; a row without a mask beside them; nothing left flags that row only."""
    allowed = [[0], [31], [32], [63], [64], [69], list(range(70)), []]
    words = torch.zeros(len(allowed), 3, dtype=torch.int64)
    for row, ids in enumerate(allowed):
        for token in ids:
            words[row, token // 32] |= 1 << token % 32
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    logits = make_logits("smooth", 9, 70, 7)
    batch = make_batch([{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {}, {}, {}, {}, {}], numbers(9, 4))
    free = draw(logits, batch, Cuts(16, 16))[0]
    batch = dataclasses.replace(batch, mask_rows=torch.tensor([0, 1, 2, 3, 4, 5, 6, 8]), mask_words=words)
    tokens, is_bad = draw(logits, batch, Cuts(16, 16))
    assert tokens == [0, 31, 32, 63, 64, 69, free[6], free[7], 0]
    assert is_bad == [False] * 8 + [True]


@runs_kernels
def test_a_row_does_not_depend_on_the_others() -> None:
    """Numbers next to the border between two tokens: the last bit of a sum would show."""
    row = make_logits("smooth", 1, 60, 8)
    weights = (row[0].double() - row.max().double()).exp()
    border = float(weights[:31].sum() / weights.sum())
    uniforms = torch.tensor([border + step * 2.0**-53 for step in range(-4, 5)], dtype=torch.float64)
    batch = make_batch([{}] * 9, uniforms)
    together, _ = draw(row.expand(9, -1), batch, Cuts(16, 16))
    order = torch.tensor([5, 1, 8, 0, 2, 7, 3, 4, 6])
    shuffled, _ = draw(row.expand(9, -1), chosen(batch, order), Cuts(16, 16))
    assert [together[place] for place in order] == shuffled
    for place in (0, 4, 8):
        assert draw(row, chosen(batch, torch.tensor([place])), Cuts(16, 16))[0] == [together[place]]
    assert set(together) <= {30, 31} and together == sorted(together)


@triton.jit
def store_uniform(words, out, WORDS: tl.constexpr, FLAGS: tl.constexpr):
    record = words + tl.program_id(0) * WORDS
    tl.store(out + tl.program_id(0), kernels.uniform_of(record, tl.load(record + FLAGS)))


@runs_kernels
def test_numbers_are_those_of_draws() -> None:
    """The same bits from (seed, child, position)."""
    keys = [(0, 0, 0), (1, 2, 3), (-1, 0, 7), (-(1 << 63), 5, 1 << 40), ((1 << 63) - 1, (1 << 20), 9), ((1 << 64) - 1, 1, 1)]
    keys += [(seed * 0x9E3779B97F4A7C15 % (1 << 64), seed, seed * seed) for seed in range(2, 12)]
    words = torch.zeros(len(keys), WORDS, dtype=torch.int64)
    for row, (seed, child, position) in enumerate(keys):
        words[row, SEED] = seed - (1 << 64) if seed >= 1 << 63 else seed
        words[row, CHILD], words[row, POSITION] = child, position
        words[row, FLAGS] = IS_SEEDED | (IS_NEGATIVE if seed < 0 else 0)
    out = torch.full((len(keys),), torch.nan, dtype=torch.float64, device=DEVICE)
    store_uniform[(len(keys),)](words.to(DEVICE), out, WORDS=WORDS, FLAGS=FLAGS)
    assert out.tolist() == [uniform(*key) for key in keys]


@runs_kernels
def test_drawn_tokens_are_left_on_the_device() -> None:
    """In `last_tokens` by table row, and counted in the state that the record names; a bad row leaves 0 and counts nothing."""
    logits = make_logits("smooth", 4, 20, 4)
    logits[2, 3] = torch.nan
    words = torch.zeros(4, WORDS, dtype=torch.int64)
    words.view(torch.float64)[:, [TEMPERATURE, TOP_P]] = 1.0
    words[:, FLAGS] = IS_DRAWN | IS_SEEDED
    words[:, SEED] = torch.tensor([4, 5, 6, 7])
    words[:, STATE_ROW] = torch.tensor([1, -1, 0, 2])
    state = torch.zeros(3, 20, dtype=torch.int32, device=DEVICE)
    last = torch.full((6,), -1, dtype=torch.int32, device=DEVICE)
    tokens = torch.empty(4, dtype=torch.int32, device=DEVICE)
    is_bad = torch.empty(4, dtype=torch.uint8, device=DEVICE)
    records = Records(words.flatten().to(DEVICE), state, True, False, False)
    sample_into(tokens, is_bad, logits.to(DEVICE), records, torch.tensor([5, 0, 1, 3], device=DEVICE), last, True, Cuts(16, 16))
    drawn = tokens.tolist()
    fine = make_batch([{}] * 4, torch.tensor([uniform(seed, 0, 0) for seed in (4, 5, 6, 7)], dtype=torch.float64))
    rows = torch.tensor([0, 1, 3])
    assert [drawn[row] for row in rows] == definition(logits[rows], chosen(fine, rows)).tolist()
    assert is_bad.tolist() == [0, 0, 1, 0]
    assert last.tolist() == [drawn[1], 0, -1, drawn[3], -1, drawn[0]]
    assert state.sum(dim=1).tolist() == [0, 1, 1]
    assert state[1, drawn[0]] == 1 and state[2, drawn[3]] == 1


@runs_kernels
@pytest.mark.parametrize(("kind", "k"), [("smooth", 0), ("equals", 5), ("holes", 45), ("holes", 8)])
def test_logprobs(kind: str, k: int) -> None:
    """Ids and ranks are the definition's; values to fp32's last bits."""
    logits = make_logits(kind, 3, 45, 9)
    tokens = torch.tensor([0, 44, 22])
    found = [part.cpu() for part in token_logprobs(logits.to(DEVICE), tokens.to(DEVICE), k)]
    truth = define_logprobs(logits, tokens, k)
    assert torch.equal(found[1].long(), truth[1])
    assert torch.equal(found[2].long(), truth[2])
    for one, other in ((found[0], truth[0]), (found[3], truth[3])):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@needs_gpu
def test_logprobs_at_real_size() -> None:
    logits = make_logits("smooth", 33, 129_280, 2)
    tokens = torch.arange(33) * 3917
    found = [part.cpu() for part in token_logprobs(logits.to(DEVICE), tokens.to(DEVICE), 20)]
    truth = define_logprobs(logits.double().float(), tokens, 20)
    torch.testing.assert_close(found[0], truth[0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found[3], truth[3], rtol=1e-6, atol=2e-6)
    total = logits.double().logsumexp(dim=1)
    assert float((found[0].double() - (logits.double()[range(33), tokens] - total)).abs().max()) < 4e-6
    assert bool((found[2].long() == truth[2]).float().mean() > 0.99)  # what one bit of the sum's logarithm makes equal may swap
    assert bool(((found[1].long() - truth[1]).abs() <= 1 + truth[1] // 1000).all())


@needs_gpu
def test_captured_in_a_graph() -> None:
    """All launches, with other numbers on replay."""
    logits = make_logits("smooth", 8, 5000, 5)
    batch = make_batch([SETTINGS[place] for place in (0, 1, 3, 6, 9, 10, 12, 13)], numbers(8, 1))
    on_gpu, other = on_device(batch), numbers(8, 2)
    gpu_logits = logits.to(DEVICE)
    sample(gpu_logits, on_gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, is_bad = sample(gpu_logits, on_gpu)
    on_gpu.uniforms.copy_(other)
    graph.replay()
    assert tokens.tolist() == definition(logits, dataclasses.replace(batch, uniforms=other)).tolist()
    assert not bool(is_bad.any())


@runs_kernels
def test_warming_up_changes_nothing() -> None:
    state = torch.full((1, 40), 3, dtype=torch.int32, device=DEVICE)
    warm_up(40, state)
    assert bool((state == 3).all())


def test_what_is_refused() -> None:
    if not INTERPRETED:
        assert refuses(Machine("cpu", (0, 0), True)) == "runs on NVIDIA GPUs, not on cpu"
    assert refuses(Machine("cuda", (8, 0), True)) is None


SHAPE = {"VOCAB": 129_280, "CHUNK": 2048, "CHUNKS": 64}
BINS = {**SHAPE, "CHUNKS2": 64, "BINS": 16, "FINE": 32, "EDITS": True}
DRAW = {**SHAPE, "CHUNKS2": 64, "CAP": 4096, "EDITS": True, "DRAWS": True, "FILTERS": True, "ROWS": True, "COUNTS": True}


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize(
    ("kernel", "constants", "warps"),
    [
        (kernels.peaks, {**SHAPE, "EDITS": True, "STATE": True}, 4),
        (draw_kernels.weigh, {**BINS, "FILTERS": True}, 4),
        (draw_kernels.refine, {**BINS, "CAP": 4096}, 4),
        (draw_kernels.shortlist, {**BINS, "CAP": 4096}, 4),
        pytest.param(draw_kernels.draw, DRAW, 8, marks=pytest.mark.long),
        (draw_kernels.draw, {**DRAW, "FILTERS": False, "EDITS": False}, 4),
        pytest.param(
            draw_kernels.draw,
            {**DRAW, "EDITS": False, "DRAWS": False, "FILTERS": False, "COUNTS": False},
            4,
            marks=pytest.mark.long,
        ),
        (kernels.partition, SHAPE, 4),
        (kernels.rank, {**SHAPE, "CHUNKS2": 64, "K": 32}, 4),
        (kernels.report, {"CHUNKS": 64, "CHUNKS2": 64, "K": 32, "SIZE": 2048}, 8),
    ],
    ids=str,
)
@pytest.mark.parametrize("capability", [90])
def test_compiled_ahead_of_time(kernel: JITFunction, constants: dict[str, int], warps: int, capability: int) -> None:
    """Everything compiles at the real sizes, and spills nothing."""
    types = dict.fromkeys(("words", "packed", "table_rows", "best", "rows"), "*i64")
    types |= dict.fromkeys(("logits", "edited", "tops", "logprobs", "top_logprobs"), "*fp32")
    types |= dict.fromkeys(("sums", "heads", "masses", "fine_masses"), "*fp64") | {"stride": "i32", "is_bad": "*u8"}
    names = [one for one in kernel.arg_names if one not in constants]
    signature = {one: types.get(one, "*i32") if one in names else "constexpr" for one in kernel.arg_names}
    aligned = {(kernel.arg_names.index(one),): [["tt.divisibility", 16]] for one in names}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "EXIT" in code and "STL" not in code and "LDL" not in code


@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="the kernels run in this process")
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
