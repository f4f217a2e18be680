"""The hyper-connections of `triton.py` against `ref.py`: on a GPU if there is one, else in Triton's interpreter."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from kernel_tests import (
    DEVICE,
    INTERPRETED,
    MachineCode,
    compiles_kernels,
    machine_code,
    poisoned,
    runs_kernels,
    starts_interpreter,
)
from torch import Tensor

from lamina.layers.rounding import rounded
from lamina.ops.gemm import Activation
from lamina.ops.hyper import HyperCase, Mixer, hyper_head, hyper_post, hyper_pre, kernels
from lamina.ops.hyper.triton import Boundary, BoundaryStep, Cut, boundary, end, refuses, start
from lamina.ops.machine import Machine
from lamina.ops.quantise import quantise_fp8
from lamina.ops.rope_norm import rms_norm

EPS = 1e-6
BF16, FP32 = torch.bfloat16, torch.float32
ON_GPU = DEVICE == "cuda"


@dataclass(frozen=True, slots=True)
class Case:
    """T tokens of S streams of width D."""

    tokens: int
    streams: int = 4
    width: int = 64
    dtype: torch.dtype = FP32
    iterations: int = 20
    seed: int = 0


def cases() -> Iterator[Case]:
    """Tiles with one row and with one too many, widths that fill no block, every padding of the streams."""
    yield Case(1)
    yield Case(17, width=40, dtype=BF16)
    yield Case(9, streams=3, width=200)  # the last block of 128 is short
    yield Case(3, streams=1, width=8, iterations=1)
    yield Case(2, streams=2, width=130, iterations=2)
    yield Case(2, streams=5, width=96)
    yield Case(2, streams=8, width=64, dtype=BF16)
    yield Case(16, width=256, dtype=BF16)
    if ON_GPU:
        yield Case(300, width=4096, dtype=BF16)
        yield Case(33, width=4096)
        yield Case(40, width=7168, dtype=BF16)


def mixer_of(case: Case, is_head: bool = False) -> Mixer:
    generator = torch.Generator().manual_seed(case.seed)
    num = case.streams
    parts = torch.tensor([num] if is_head else [num, num, num * num])
    rows, width = int(parts.sum()), num * case.width
    fn = torch.randn(rows, width, generator=generator) * width**-0.5
    base = torch.randn(rows, generator=generator)
    scale = (1 + 0.2 * torch.randn(len(parts), generator=generator)).repeat_interleave(parts)
    return Mixer(fn.to(DEVICE), base.to(DEVICE), scale.to(DEVICE), case.iterations, EPS, EPS)


@dataclass(frozen=True, slots=True)
class Given:
    """What reaches a boundary."""

    streams: Tensor
    out: Tensor
    out2: Tensor
    post: Tensor
    comb: Tensor
    weight: Tensor

    def rows(self, rows: list[int]) -> "Given":
        """Some tokens alone."""
        return Given(*(one[rows] for one in (self.streams, self.out, self.out2, self.post, self.comb)), self.weight)


def make(case: Case) -> Given:
    generator = torch.Generator().manual_seed(case.seed + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    tokens, num, width = case.tokens, case.streams, case.width
    comb = normal(tokens, num, num).softmax(-1)
    streams, out = (3 * normal(tokens, num, width)).to(case.dtype), normal(tokens, width).to(case.dtype)
    return Given(streams, out, normal(tokens, width), 2 * normal(tokens, num).sigmoid(), comb, normal(width))


@dataclass(frozen=True, slots=True)
class Run:
    """What a boundary gave, from buffers full of NaN."""

    streams: Tensor
    x: Activation
    post: Tensor
    comb: Tensor
    products: Tensor


def run(given: Given, mixer: Mixer, has_out: bool = True, tiles: int | None = None) -> Run:
    tokens, num, width = given.streams.shape
    dtype = given.streams.dtype
    codes, scales = poisoned(tokens, width, dtype=torch.float8_e4m3fn), poisoned(tokens, -(-width // 128))
    x = Activation(poisoned(tokens, width, dtype=dtype), codes, scales)
    post, comb = poisoned(tokens, num), poisoned(tokens, num, num)
    out = (given.out, None, given.post, given.comb) if has_out else (None, None, None, None)
    step = BoundaryStep(given.streams, *out, mixer, given.weight, x, (post, comb))
    step.products.fill_(torch.nan)
    if has_out:
        step.mixed.fill_(torch.nan)
    step.mix(tiles)
    step.collapse()
    return Run(step.mixed, x, post, comb, step.products)


def close(found: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    """fp32 to 1e-5. bf16 to its next number where fp32 lies between two, which is rare."""
    found, truth = found.float(), truth.float()
    if dtype == FP32:
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)
        return
    torch.testing.assert_close(found, truth, rtol=2**-7, atol=1e-5)
    assert float((found != truth).float().mean()) < 0.01


@runs_kernels
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_the_definition(case: Case) -> None:
    """Each result from the kernels' own streams, so that one rounding does not hide in the next."""
    given, mixer = make(case), mixer_of(case)
    found = run(given, mixer)
    mixed = hyper_post(given.streams.float(), given.out.float(), given.post, given.comb)
    close(found.streams, rounded(mixed, case.dtype), case.dtype)
    collapsed, post, comb = hyper_pre(found.streams.float(), mixer)
    torch.testing.assert_close(found.post, post, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.comb, comb, rtol=1e-5, atol=1e-5)
    normed = rounded(rms_norm(rounded(collapsed, case.dtype), given.weight, EPS), case.dtype)
    if case.dtype == FP32:
        close(found.x.values, normed, FP32)
    else:  # a collapsed value rounded the other way moves the whole row by a share of itself
        torch.testing.assert_close(found.x.values.float(), normed, rtol=2**-6, atol=1e-3)
        assert float((found.x.values.float() != normed).float().mean()) < 0.02
    codes, scales = quantise_fp8(found.x.values.float(), 128)
    assert found.x.codes is not None and found.x.scales is not None
    assert torch.equal(found.x.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.x.scales, torch.exp2(scales.float() - 127))


@runs_kernels
@pytest.mark.parametrize("case", [Case(3), Case(18, streams=3, width=40, dtype=BF16)], ids=str)
def test_the_first_boundary_and_the_end(case: Case) -> None:
    given, mixer, head = make(case), mixer_of(case), mixer_of(case, is_head=True)
    kept = given.streams.clone()
    first = boundary(given.streams, None, None, None, mixer, given.weight, case.dtype, False)
    _, post, comb = hyper_pre(kept.float(), mixer)
    assert torch.equal(first.streams, kept) and first.x.codes is None
    torch.testing.assert_close(first.post, post, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first.comb, comb, rtol=1e-5, atol=1e-5)
    hidden = end(given.streams, given.out, given.post, given.comb, head, given.weight, case.dtype)
    streams = rounded(hyper_post(given.streams.float(), given.out.float(), given.post, given.comb), case.dtype)
    truth = rms_norm(rounded(hyper_head(streams, head), case.dtype), given.weight, EPS)
    assert hidden.dtype == FP32
    torch.testing.assert_close(hidden, truth, rtol=1e-5 if case.dtype == FP32 else 2**-6, atol=1e-5)


@runs_kernels
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_second_output_is_added_before_rounding(dtype: torch.dtype) -> None:
    case = Case(5, dtype=dtype)
    given, mixer = make(case), mixer_of(case)
    tail = (given.post, given.comb, mixer, given.weight, dtype, True)
    found = boundary(given.streams, given.out, *tail, out2=given.out2)
    once = boundary(given.streams, (given.out.float() + given.out2).to(dtype), *tail)
    for one, other in zip(parts(found), parts(once), strict=True):
        assert torch.equal(one, other)


def parts(found: Boundary | Run) -> tuple[Tensor, ...]:
    assert found.x.codes is not None and found.x.scales is not None
    return found.streams, found.x.values, found.x.codes.view(torch.uint8), found.x.scales, found.post, found.comb


@runs_kernels
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_bits_do_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    """Alone, in other places of a tile, among others, with any number of tiles a program."""
    case = Case(300, width=4096, dtype=dtype) if ON_GPU else Case(19, streams=2, width=40, iterations=2, dtype=dtype)
    given, mixer = make(case), mixer_of(case)
    whole = run(given, mixer)
    choices = ([0], [case.tokens - 1], [7, 3], list(range(18, -1, -1)))
    for rows in choices if ON_GPU or dtype == BF16 else choices[:1]:
        found = run(given.rows(rows), mixer)
        same = [torch.equal(one, other[rows]) for one, other in zip(parts(found), parts(whole), strict=True)]
        if ON_GPU:
            assert all(same), (rows, same)
        else:  # numpy multiplies in orders that depend on the size of the matrix
            assert torch.equal(found.streams, whole.streams[rows])
    for tiles in (1, 2, 5):
        for one, other in zip(parts(run(given, mixer, tiles=tiles)), parts(whole), strict=True):
            assert torch.equal(one, other)


@runs_kernels
def test_one_tokens_nan_stays_its_own() -> None:
    case = Case(19, width=40)
    given, mixer = make(case), mixer_of(case)
    clean = run(given, mixer)
    given.out[4] = torch.nan
    given.streams[17, 2] = torch.inf
    found = run(given, mixer)
    rest = [row for row in range(19) if row not in (4, 17)]
    for one, other in zip(parts(found), parts(clean), strict=True):
        assert torch.equal(one[rest], other[rest])
    assert torch.isnan(found.x.values[4]).all() and torch.isnan(found.comb[4]).all() and torch.isnan(found.x.scales[4]).all()


@runs_kernels
def test_hostile_streams() -> None:
    """Zeros, huge and tiny values, steep mixers: everything stays finite and the mixture balanced."""
    case = Case(8)
    given, mixer = make(case), mixer_of(case)
    given.streams.copy_(torch.cat([torch.zeros(2, 4, 64), torch.full((3, 4, 64), 1e15), torch.full((3, 4, 64), 1e-20)]))
    found = run(given, mixer, has_out=False)
    assert all(torch.isfinite(one.float()).all() for one in (found.x.values, found.post, found.comb))
    torch.testing.assert_close(found.comb.sum(1), torch.ones(8, 4, device=DEVICE), rtol=0, atol=1e-4)
    steep = run(make(case), replace(mixer, fn=mixer.fn * 1e4))
    assert all(torch.isfinite(one.float()).all() for one in (steep.x.values, steep.post, steep.comb))


@runs_kernels
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_start_copies_rows(kind: torch.dtype) -> None:
    embed = torch.randn(50, 72, generator=torch.Generator().manual_seed(0)).to(DEVICE, BF16 if ON_GPU else FP32)
    tokens = torch.tensor([49, 0, 7, 7], dtype=kind, device=DEVICE)
    assert torch.equal(start(embed, tokens, 3), embed[tokens.long()][:, None].repeat(1, 3, 1))
    assert start(embed, tokens[:0], 3).shape == (0, 3, 72)


@runs_kernels
def test_no_rows() -> None:
    given, mixer = make(Case(1)).rows([]), mixer_of(Case(1))
    found = boundary(given.streams, given.out, given.post, given.comb, mixer, given.weight, FP32, True)
    assert found.x.values.shape == (0, 64) and found.comb.shape == (0, 4, 4)


def test_refusals() -> None:
    good, machine = HyperCase(4, 4096), Machine("cuda", (9, 0), True)
    assert refuses(machine, good) is None
    if not INTERPRETED:
        assert refuses(Machine("cpu", (0, 0), True), good) == "runs on NVIDIA GPUs, not on cpu"
        assert refuses(replace(machine, capability=(7, 5)), good) == "needs compute capability 8.0, this GPU has 7.5"
    assert refuses(machine, replace(good, streams=9)) == "the number of streams must be 1 to 8, not 9"
    assert refuses(machine, replace(good, hidden=8320)) == "the hidden width must be 1 to 8192, not 8320"


def compiled(capability: int, width: int, is_bf16: bool, is_head: bool, streams: int = 4) -> tuple[MachineCode, MachineCode]:
    """Both kernels as `BoundaryStep` asks for them."""
    cut, act = Cut.of(streams, width, not is_head), "*bf16" if is_bf16 else "*fp32"
    shape = {"D": width, "S": streams, "SP": cut.slots, "PADDED": cut.padded, "HAS_COMB": not is_head, "IS_BF16": is_bf16}
    types = dict.fromkeys(("post", "comb", "fn", "products", "base", "scale", "norm_weight", "scales"), "*fp32")
    types |= dict.fromkeys(("streams", "out", "mixed"), act) | {"values": "*fp32" if is_head else act, "codes": "*u8"}
    types |= {"num_tokens": "i32", "num_tiles": "i32"}
    own = {"out2": None, "COLUMNS": 64, "HAS_OUT": True, "HAS_OUT2": False, "TILE": 16, "INTERPRET": False}
    first = machine_code(kernels.mix, types, shape | own, capability, 4, 1)
    own = {"WIDTH": max(128, 1 << (width - 1).bit_length()), "SPLITS": cut.splits}
    own |= {"SPLITS_PADDED": 1 << (cut.splits - 1).bit_length()}
    own |= {"ITERATIONS": 20, "EPS": EPS, "NORM_EPS": EPS, "FP8": is_bf16 and not is_head, "KEEPS_FP32": is_head, "BALANCED": 8}
    own |= dict.fromkeys((["post", "comb"] if is_head else []) + ([] if is_bf16 and not is_head else ["codes", "scales"]))
    return first, machine_code(kernels.collapse, types, shape | own | {"INTERPRET": False}, capability, cut.collapse_warps, 3)


@compiles_kernels
@pytest.mark.parametrize(
    ("capability", "width"), [(90, 4096), *(pytest.param(*more, marks=pytest.mark.long) for more in ((90, 7168), (80, 4096)))]
)
def test_compiled_ahead_of_time(capability: int, width: int) -> None:
    """The mixer is multiplied on tensor cores, and nothing is spilled."""
    first, second = compiled(capability, width, True, False)
    assert first.count("HMMA") >= 48 and first.spills == 0
    assert second.spills == 0
    if (capability, width) == (90, 4096):
        assert all(code.spills == 0 for code in compiled(90, width, True, True))
        assert all(code.spills == 0 and not code.count("HMMA") for code in compiled(90, width, False, False))


#: bytes of shared memory that a program may have on GPUs of compute capability 8.6 and 8.9; on 8.0 166,912, on 9.0 232,448
_LEAST_SHARED = 101_376
_LONG = pytest.mark.long


@compiles_kernels
@pytest.mark.parametrize(
    ("streams", "is_bf16", "capability"),
    [
        *[(3, False, 90), (4, True, 90)],
        *[pytest.param(streams, is_bf16, 90, marks=_LONG) for streams, is_bf16 in ((1, True), (3, True), (4, False), (5, True))],
        *[pytest.param(streams, is_bf16, 90, marks=_LONG) for streams, is_bf16 in ((1, False), (5, False))],
        *[pytest.param(streams, is_bf16, 90, marks=_LONG) for streams in (2, 6, 7, 8) for is_bf16 in (True, False)],
        *[pytest.param(streams, is_bf16, 80, marks=_LONG) for streams in range(1, 9) for is_bf16 in (True, False)],
    ],
)
def test_every_number_of_streams_fits_the_shared_memory(streams: int, is_bf16: bool, capability: int) -> None:
    """A kernel that needs more compiles, and fails when it is launched. Of all GPUs that are served."""
    for code in compiled(capability, 64, is_bf16, False, streams):
        assert code.shared_bytes <= _LEAST_SHARED


@starts_interpreter
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
