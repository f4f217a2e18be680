"""Norms and rotations of `rope_norm/triton.py` against `ref.py`: on a GPU if there is one, else in Triton's interpreter.

Inputs are small multiples of 1/8 where bits are compared: a row's sum of squares is then exact in any order. The definition runs
on the CPU, whose roots are those of IEEE.
"""

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lamina.ops.machine import Machine
from lamina.ops.quantise import e8m0_to_fp32, quantise_fp8
from lamina.ops.rope_norm import RopeNormCase, inverse_frequencies, ref

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lamina.ops.rope_norm import kernels
from lamina.ops.rope_norm.triton import QUERY_WARPS, norm_quantise, query_norm_rope, refuses, rotations

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU and not INTERPRETED else "cpu"
#: the interpreter cuts bits off where it makes bf16
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6
runs_kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in the process that test_interpreted starts")


def exact(*shape: int, seed: int = 0) -> Tensor:
    """Multiples of 1/8 up to 2."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 17, shape, generator=generator) / 8


def columns(x: Tensor, before: int, after: int) -> Tensor:
    """x on the test's device, as columns of a wider matrix full of NaN."""
    x = x.to(DEVICE)
    wide = x.new_full((x.shape[0], before + x.shape[1] + after), torch.nan)
    wide[:, before : before + x.shape[1]] = x
    return wide[:, before : before + x.shape[1]]


def tables(positions: Tensor, rope: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The definition's tables, and the kernels': a column for each pair."""
    cos, sin = ref.rope_tables(positions, inverse_frequencies(rope, 10_000.0))
    return (cos, sin), (cos[:, ::2].contiguous().to(DEVICE), sin[:, 1::2].contiguous().to(DEVICE))


@runs_kernels
@pytest.mark.parametrize(("rope", "theta"), [(8, 10_000.0), (64, 160_000.0)])
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_rotations_are_right_at_the_end_of_a_million(rope: int, theta: float, ratio: int) -> None:
    """The angle is the definition's fp32 product; its cosine is right to an ulp or two, far past where fast ones are wrong."""
    last = (1 << 20) - 1
    positions = [0, 1, 3, 4, 127, 128, 4095, 65_536, 99_999, 500_001, last - 128, last - 1, last]
    inv_freq = inverse_frequencies(rope, theta)
    found = rotations(torch.tensor(positions, dtype=torch.int32, device=DEVICE), inv_freq.to(DEVICE), ratio)
    cos, sin = (table.cpu() for table in found)
    starts = torch.tensor(positions) // ratio * ratio
    angles = (starts.float()[:, None] * inv_freq).double()
    assert (cos.double() - angles.cos()).abs().max() < 2e-7
    assert (sin.double() - angles.sin()).abs().max() < 2e-7
    wide_cos, wide_sin = ref.rope_tables(starts, inv_freq)
    assert (cos - wide_cos[:, ::2]).abs().max() < 1e-6 and (sin - wide_sin[:, 1::2]).abs().max() < 1e-6


@runs_kernels
@pytest.mark.parametrize("width", [16, 64, 128, 200, 384, 1024])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_and_codes_are_the_definitions(width: int, dtype: torch.dtype) -> None:
    """Bit for bit; rows of zeros, of tiny and of huge values, and columns of a wider matrix."""
    x = exact(6, width)
    x[1] = 0.0
    x[2] *= 2.0**-30
    x[3] *= 2.0**40
    weight = torch.rand(width, generator=torch.Generator().manual_seed(1))
    weight[0] = 300.0
    found = norm_quantise(columns(x, 16, 5), weight.to(DEVICE), EPS, dtype, True)
    expected = ref.rms_norm(x.to(dtype), weight, EPS).to(dtype)
    assert torch.equal(found.values.cpu(), expected)
    codes, scales = quantise_fp8(expected, 128)
    assert found.codes is not None and found.scales is not None
    assert torch.equal(found.codes.view(torch.uint8).cpu(), codes.view(torch.uint8))
    assert torch.equal(found.scales.cpu(), e8m0_to_fp32(scales))
    plain = norm_quantise(x.to(DEVICE), weight.to(DEVICE), EPS, dtype, False)
    assert plain.codes is None and torch.equal(plain.values, found.values)


@runs_kernels
def test_a_row_that_is_no_number_stays_its_own() -> None:
    x, weight = exact(3, 256).to(DEVICE), torch.ones(256, device=DEVICE)
    x[1, 130] = torch.inf
    found = norm_quantise(x, weight, EPS, torch.float32, True)
    assert found.codes is not None and found.scales is not None
    assert found.scales[1, 1].isnan() and (found.codes.view(torch.uint8)[1, 128:] == 0).all()
    alone = norm_quantise(x[2:], weight, EPS, torch.float32, True)
    assert torch.equal(found.values[2:], alone.values)


@runs_kernels
@pytest.mark.parametrize(("heads", "dim", "rope"), [(1, 8, 8), (2, 32, 8), (3, 24, 8), (8, 64, 16), (5, 512, 64)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_are_normed_and_turned_as_defined(heads: int, dim: int, rope: int, dtype: torch.dtype) -> None:
    q = exact(4, heads * dim).to(dtype)
    positions = torch.tensor([0, 1, 77, 1_048_575])
    (cos, sin), turns = tables(positions, rope)
    found = query_norm_rope(columns(q, 8, 24), *turns, heads, EPS)
    expected = ref.query_norm_rope(q.float().view(4, heads, dim), cos, sin, EPS).to(dtype)
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), expected)
    one = query_norm_rope(q[2:3].to(DEVICE), turns[0][2:3], turns[1][2:3], heads, EPS)
    assert torch.equal(one[0], found[2]), "bits depend on the number of rows"


@runs_kernels
def test_sums_of_any_values_are_close() -> None:
    """Random values: only the order of a row's sum differs."""
    x, weight = torch.randn(5, 1024, generator=torch.Generator().manual_seed(2)), torch.ones(1024)
    found = norm_quantise(x.to(DEVICE), weight.to(DEVICE), EPS, torch.float32, False).values.cpu()
    torch.testing.assert_close(found, ref.rms_norm(x, weight, EPS), rtol=1e-6, atol=0)


def test_refusals() -> None:
    good = Machine("cuda", (9, 0), True)
    assert refuses(good, RopeNormCase(512, 64)) is None
    refusal = "the rotated dims must be pairs at the end of an even dim, not the last 7 of 512"
    assert refuses(good, RopeNormCase(512, 7)) == refusal
    if not INTERPRETED:
        assert refuses(Machine("cpu", (0, 0), True), RopeNormCase(512, 64)) == "runs on NVIDIA GPUs, not on cpu"
        assert refuses(Machine("cuda", (7, 5), True), RopeNormCase(64, 8)) == "needs compute capability 8.0, this GPU has 7.5"


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("name", "types", "constants"),
    [
        ("norm_quantise", {"x": "*fp32", "values": "*bf16", "codes": "*u8"}, {"K": 1024, "BLOCKS": 8}),
        ("norm_quantise", {"x": "*fp32", "values": "*bf16", "codes": "*u8"}, {"K": 1536, "BLOCKS": 16}),
        ("query_norm_rope", {"q": "*bf16", "out": "*bf16"}, {"HEADS": 64, "D": 512, "ROPE": 64, "GROUP": 2, "W": 512}),
    ],
    ids=str,
)
def test_compiled_ahead_of_time(capability: int, name: str, types: dict[str, str], constants: dict[str, int]) -> None:
    """At the shipped shapes nothing is spilled, and rows are read 16 bytes at a time."""
    kernel = getattr(kernels, name)
    constants = constants | ({"IS_BF16": True, "IS_FP8": True} if name == "norm_quantise" else {})
    warps = QUERY_WARPS if name == "query_norm_rope" else 4
    types = {"x_stride": "i32", "q_stride": "i32", "eps": "fp32"} | types
    signature = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in kernel.arg_names}
    attributes = {
        (kernel.arg_names.index(n),): [["tt.divisibility", 16]]
        for n, kind in signature.items()
        if kind.startswith("*") or n.endswith("_stride")
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "enable_fp_fusion": False}
    )
    code = compiled.asm["ptx"]
    assert ".local" not in code  # nothing is spilled
    assert "ld.global.v4.b32" in code and "fma.rn" not in code


@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="the kernels run in this process")
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
