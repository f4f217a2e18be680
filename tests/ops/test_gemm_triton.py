"""The products of `gemm/triton.py` against `ref.py`: on a GPU if there is one, else in Triton's interpreter, in a process."""

import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lamina.ops.gemm import Activation, GemmCase, StoredWeight, ref
from lamina.ops.machine import Machine
from lamina.ops.quantise import e8m0_to_fp32, quantise_fp8, quantise_fp8_weight
from lamina.runtime.graphs import sizes_up_to

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction

from lamina.ops.gemm import hopper, kernels
from lamina.ops.gemm import triton as gemm
from lamina.ops.quantise.triton import quantise_rows

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU else "cpu"
runs_kernels = pytest.mark.skipif(not (HAS_GPU or INTERPRETED), reason="runs in the process that test_interpreted starts")
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="the interpreter adds in an order that depends on the sizes")
KINDS = ("fp8", "codes", "wide", "fp8 by fp32", "bf16", "bf16 by fp32", "fp32", "fp32 by bf16")
#: (out, in, groups) as real and tiny models have them
REAL = [(1536, 4096, 1), (32768, 1024, 1), (4096, 8192, 1), (1024, 4096, 8), (4096, 4096, 1), (4096, 2048, 1), (8192, 1024, 1)]
REAL += [(2048, 4096, 1), (1024, 4096, 1), (256, 4096, 1), (129280, 4096, 1), (24, 64, 1), (1536, 7168, 1), (1024, 4096, 16)]


@dataclass(frozen=True, slots=True)
class Case:
    """kind  of weight and rows, see KINDS."""

    tokens: int
    rows: int
    width: int
    kind: str
    order: gemm.Order
    groups: int = 1
    out_dtype: torch.dtype = torch.float32


def cases() -> Iterator[Case]:
    """Hostile shapes: no multiple of anything, one row, ranges of columns, groups that share a scale."""
    for kind in KINDS:
        yield Case(1, 24, 64, kind, "prefill")
        yield Case(3, 130, 200, kind, "decode")
        yield Case(17, 64, 512, kind, "decode")  # in ranges of columns, a second tile of tokens or one half full
        yield Case(5, 40, 96, kind, "decode", groups=2)
        yield Case(2, 16, 64, kind, "prefill", groups=3)
    yield Case(1, 128, 2048, "fp8", "decode", out_dtype=torch.bfloat16)
    yield Case(70, 72, 512, "fp8", "decode", out_dtype=torch.bfloat16)
    yield Case(70, 130, 256, "fp8", "prefill", out_dtype=torch.bfloat16)
    yield Case(33, 72, 128, "bf16", "prefill", out_dtype=torch.bfloat16)
    yield Case(9, 192, 256, "fp8", "decode", groups=2)  # groups whose rows begin inside a block
    if HAS_GPU:
        for order in ("decode", "prefill"):
            for kind in KINDS:
                yield Case(37, 1536, 4096, kind, order)
                yield Case(130, 256, 512, kind, order, groups=8, out_dtype=torch.bfloat16)
            yield Case(300, 4096, 2048, "fp8", order, out_dtype=torch.bfloat16)
            yield Case(700, 1000, 512, "fp8", order)
            yield Case(4200, 256, 512, "fp8", order, groups=3, out_dtype=torch.bfloat16)


def fp8_weight(rows: int, width: int, generator: torch.Generator) -> StoredWeight:
    """Blocks of very different sizes; scales that are no powers of two, as some checkpoints have."""
    weight = torch.randn(rows, width, generator=generator)
    codes, scales = quantise_fp8_weight(weight * torch.logspace(-3, 3, width))
    factors = torch.rand(scales.shape, generator=generator) + 0.5
    return StoredWeight(codes.to(DEVICE), (e8m0_to_fp32(scales) * factors).to(DEVICE))


def make(case: Case) -> tuple[Activation, StoredWeight]:
    generator = torch.Generator().manual_seed(case.tokens + case.rows + case.width)
    values = torch.randn(case.tokens, case.groups * case.width, generator=generator)
    wide = torch.float32 if case.kind in ("fp8 by fp32", "bf16 by fp32", "fp32") else torch.bfloat16
    x = Activation(values.to(wide).to(DEVICE))
    if case.kind in ("fp8", "codes"):
        x = ref.quantise_rows(x.values)
    total = case.groups * case.rows
    if case.kind in ("fp8", "codes", "wide", "fp8 by fp32"):
        return x, fp8_weight(total, case.width, generator)
    stored = torch.float32 if case.kind.startswith("fp32") else torch.bfloat16
    return x, StoredWeight(torch.randn(total, case.width, generator=generator).to(stored).to(DEVICE))


def run(x: Activation, weight: StoredWeight, case: Case) -> Tensor:
    """The product, written between columns that nobody may touch."""
    total, tokens = case.groups * case.rows, x.values.shape[0]
    whole = torch.full((tokens, total + 32), torch.nan, dtype=case.out_dtype, device=DEVICE)
    inner = whole[:, 16:-16]
    found = gemm.grouped_linear(x, weight, case.groups, case.out_dtype, case.order, inner)
    assert found is inner and whole[:, :16].isnan().all() and whole[:, -16:].isnan().all()
    return found


def rows_of(x: Activation, rows: list[int]) -> Activation:
    return Activation(*(None if part is None else part[rows].contiguous() for part in (x.values, x.codes, x.scales)))


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))


@pytest.fixture(autouse=True)
def _memory_is_poisoned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New memory is full of NaN; of kind `codes` the GPU seems to have no fp8."""
    case = getattr(request.node, "callspec", None)
    if case is not None and "codes" in str(case.params):
        monkeypatch.setattr(gemm, "capability_of", lambda device: (8, 0))
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def _long(*values: object) -> "pytest.ParameterSet":
    """Another size or kind of what is tried without it too."""
    return pytest.param(*values, marks=pytest.mark.long)


def _is_quick(place: int) -> bool:
    """Every shape of the first kind, two of each other, and what comes after them."""
    return place < 5 or place % 5 in (1, 3) or place >= 5 * len(KINDS)


@runs_kernels
@pytest.mark.parametrize("case", [case if _is_quick(place) else _long(case) for place, case in enumerate(cases())], ids=str)
def test_the_definition(case: Case) -> None:
    """Against fp64 on the same operands; Hopper's tensor cores truncate: fp8 sums to some 14 bits, bf16 to fp32."""
    x, weight = make(case)
    found = run(x, weight, case)
    truth = ref.grouped_linear(x, weight, case.groups, torch.float64)
    exact = 1e-5 if HAS_GPU else 2e-6
    bound = 3e-3 if case.out_dtype == torch.bfloat16 else 5e-4 if case.kind == "fp8" and HAS_GPU else exact
    assert error(found, truth) < bound
    assert error(ref.grouped_linear(x, weight, case.groups), truth) < exact
    assert torch.equal(run(x, weight, case), found)  # the counters are as they were


@needs_gpu
@pytest.mark.parametrize("order", ["decode", "prefill"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "width", "groups"),
    [(1536, 4096, 1), (256, 1024, 8), (200, 320, 1), (2048, 512, 1), (4096, 2048, 1), (256, 4096, 1), (33024, 256, 1)],
)
def test_bits_do_not_depend_on_the_other_rows(rows: int, width: int, groups: int, kind: str, order: gemm.Order) -> None:
    case = Case(600, rows, width, kind, order, groups, torch.float32 if rows != 4096 else torch.bfloat16)
    x, weight = make(case)
    whole = run(x, weight, case)
    for count in (1, 2, 5, 16, 17, 32, 33, 64, 65, 128, 129, 200, 256, 257, 520):
        first = (37 * count) % (600 - count)
        chosen = list(range(first, first + count))[::-1]
        assert torch.equal(run(rows_of(x, chosen), weight, case), whole[chosen]), count


@pytest.mark.parametrize("maths", ["fp8", "codes", "wide", "bf16", "fp32"])
@pytest.mark.parametrize(("rows", "width", "groups"), REAL)
def test_order_of_sums_is_a_function_of_the_weight(rows: int, width: int, groups: int, maths: str) -> None:
    for order in ("decode", "prefill"):
        cuts = [gemm.choose_cut(tokens, rows, width, groups, maths, order, bool(tokens % 2)) for tokens in range(1, 700)]
        assert len({(cut.block, cut.splits) for cut in cuts}) == 1
        assert all(cut.splits % cut.runs == 0 and cut.splits & (cut.splits - 1) == 0 for cut in cuts)
        assert order == "decode" or cuts[0].splits == 1


@pytest.mark.parametrize("is_hopper", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "groups", "maths"),
    [(1536, 4096, 1, "fp8"), (32768, 1024, 1, "fp8"), (1024, 4096, 8, "fp8"), (4096, 8192, 1, "fp8"), (7168, 16384, 1, "fp8"),
     (2624, 4096, 1, "bf16"), (2624, 7168, 1, "bf16"), (1024, 4096, 1, "bf16"), (384, 7168, 1, "bf16"), (4096, 4096, 1, "wide")],
)  # fmt: skip
def test_powers_of_two_compile_all_of_a_prefill(rows: int, width: int, groups: int, maths: str, is_hopper: bool) -> None:
    """They are what is computed before an engine is ready."""
    every = {gemm.choose_cut(tokens, rows, width, groups, maths, "prefill", is_hopper) for tokens in range(1, 4097)}
    assert every == {gemm.choose_cut(1 << power, rows, width, groups, maths, "prefill", is_hopper) for power in range(13)}


@runs_kernels
@pytest.mark.parametrize("order", ["decode", "prefill"])
@pytest.mark.parametrize("kind", ["fp8", "bf16", "fp32"])
def test_a_rows_nan_stays_its_own(kind: str, order: gemm.Order) -> None:
    case = Case(9, 72, 512, kind, order)
    x, weight = make(case)
    clean = run(x, weight, case)
    x.values[4, 3] = torch.nan
    if x.scales is not None:
        x.scales[4, 0] = torch.nan
    found = run(x, weight, case)
    assert found[4].isnan().all()
    rest = [row for row in range(9) if row != 4]
    assert torch.equal(found[rest], clean[rest])


@runs_kernels
@pytest.mark.parametrize("kind", ["fp8", "codes", "wide", "fp8 by fp32"])
def test_all_codes_are_exact(kind: str) -> None:
    """One-hot rows read single weights back: every code but NaN."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127] * 2, dtype=torch.uint8)
    matrix = codes[:508].view(torch.float8_e4m3fn)[:, None].repeat(1, 128).to(DEVICE)
    weight = StoredWeight(matrix, torch.full((4, 1), 0.75, device=DEVICE))
    values = torch.eye(128, device=DEVICE)[:5].to(torch.float32 if kind == "fp8 by fp32" else torch.bfloat16)
    x = ref.quantise_rows(values) if kind in ("fp8", "codes") else Activation(values)
    for order in ("decode", "prefill"):
        found = run(x, weight, Case(5, 508, 128, kind, order))
        assert torch.equal(found, (matrix[:, :5].float() * 0.75).t())


@needs_gpu
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize(("rows", "width", "groups"), [(1536, 4096, 1), (256, 2048, 4), (1000, 2048, 1)])
def test_every_cut_has_the_same_bits(rows: int, width: int, groups: int, kind: str) -> None:
    """Of one block and number of ranges: tiles, the operands' sides, kernels, and ranges added in registers or memory."""
    case = Case(200, rows, width, kind, "decode", groups)
    x, weight = make(case)
    first = replace(gemm.choose_cut(1, rows, width, groups, kind, "decode"), tokens=32)
    cuts = [replace(first, tokens=64, rows=128, stages=3), replace(first, is_tokens_first=True, tokens=64)]
    if gemm.is_hopper(x.values.device) and not (groups > 1 and rows % 128):
        for tokens, runs in ((64, 1), (64, 2), (128, 1), (128, 2)):
            cuts.append(replace(first, tokens=tokens, rows=128, is_gluon=True, runs=runs, stages=5))
            cuts.append(replace(cuts[-1], is_ahead=False))
    truth = gemm.grouped_linear(x, weight, groups, torch.float32, "decode", None, first)
    assert first.splits > 1
    for cut in cuts:
        for _ in range(2):
            assert torch.equal(gemm.grouped_linear(x, weight, groups, torch.float32, "decode", None, cut), truth), cut


@runs_kernels
@pytest.mark.parametrize("order", ["decode", *["prefill"] * HAS_GPU])
@pytest.mark.parametrize("kind", ["fp8", "fp32", *["codes", "bf16"] * HAS_GPU])
@pytest.mark.parametrize(("tokens", "rows", "width", "groups"), [(1, 128, 512, 2), (17, 256, 128, 1), (3, 64, 256, 2)])
def test_quantised_in_one_launch(tokens: int, rows: int, width: int, groups: int, kind: str, order: gemm.Order) -> None:
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    for count in (tokens, *((40, 70, 200) if HAS_GPU else ())):
        x, weight = make(Case(count, rows, width, kind, order, groups))
        expected = quantise_rows(gemm.grouped_linear(x, weight, groups, dtype, order))
        for _ in range(2):
            found = gemm.grouped_linear_quantised(x, weight, groups, dtype, order)
            assert torch.equal(found.values, expected.values)
            assert found.codes is not None and expected.codes is not None
            assert found.scales is not None and expected.scales is not None
            assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
            assert torch.equal(found.scales, expected.scales)


def test_few_rows_are_served_by_small_tiles() -> None:
    """Up to 16 of fp8, 32 of bf16: on an H200 `hopper.py` is faster from the next on."""
    for maths, most in (("fp8", 16), ("bf16", 32)):
        for rows, width, groups in REAL[:10]:
            cuts = [gemm.choose_cut(tokens, rows, width, groups, maths, "decode", True) for tokens in range(1, 70)]
            assert [cut.is_gluon for cut in cuts] == [tokens > most for tokens in range(1, 70)]


@pytest.mark.parametrize("tokens", [1, 16, 17, 32])
def test_both_of_a_pair_have_the_same_tiles(tokens: int) -> None:
    cuts = [gemm.choose_cut(tokens, *shape, maths, "decode") for shape in REAL if shape[2] == 1 for maths in ("fp8", "bf16")]
    assert len({(cut.tokens, cut.rows, cut.warps, cut.stages, cut.is_gluon) for cut in cuts}) == 1


@pytest.mark.parametrize("is_hopper", [False, True])
@pytest.mark.parametrize("maths", ["fp8", "codes", "wide", "bf16", "fp32"])
def test_a_warm_up_tries_every_cut(maths: str, is_hopper: bool) -> None:
    """That any number of rows may have: decodes are padded to sizes of their own, but the head gets as many as there are."""
    for rows, width in ((129280, 4096), (129280, 7168), (1040, 128), (4096, 4096)):
        for order in ("decode", "prefill"):
            for most in (1, 20, 48, 256, 700):
                every, tried = (
                    {gemm.choose_cut(tokens, rows, width, 1, maths, order, is_hopper) for tokens in sizes}
                    for sizes in (range(1, most + 1), sizes_up_to(most))
                )
                assert every == tried


@runs_kernels
def test_a_pair_of_few_rows_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 32 rows, though an H200 has another kernel for one of the two from 17 rows on."""
    launched = []
    monkeypatch.setattr(gemm, "linear", lambda x, weight, *args: launched.append(args))
    for tokens in (1, 16, 17, 32, 33):
        case = Case(tokens, 136, 128, "fp8", "decode")
        x, weight = make(case)
        gemm.linear_pair(x, weight, make(replace(case, rows=72, kind="bf16"))[1], torch.float32, torch.float32)
        assert len(launched) == (0 if tokens <= 32 else 2)


@runs_kernels
@pytest.mark.parametrize("tokens", [1, 18] + [32, 70] * HAS_GPU)
def test_a_pair_is_two_products(tokens: int) -> None:
    case = Case(tokens, 136, 512, "fp8", "decode", out_dtype=torch.bfloat16)
    x, weight = make(case)
    _, wide_weight = make(replace(case, rows=72, kind="bf16"))
    for order in ("decode", "prefill"):
        found = gemm.linear_pair(x, weight, wide_weight, torch.bfloat16, torch.float32, order)
        assert torch.equal(found[0], gemm.linear(x, weight, torch.bfloat16, order))
        assert torch.equal(found[1], gemm.linear(x, wide_weight, torch.float32, order))
    plain = Activation(x.values)  # what the one launch does not serve
    found = gemm.linear_pair(plain, wide_weight, wide_weight, torch.float32, torch.float32)
    assert torch.equal(found[0], found[1])


@runs_kernels
def test_no_rows() -> None:
    x, weight = make(Case(1, 24, 64, "fp8", "decode"))
    none = rows_of(x, [])
    assert gemm.linear(none, weight, torch.float32, "decode").shape == (0, 24)
    assert quantise_rows(none.values).codes is not None
    assert gemm.swiglu_quantise(torch.empty(0, 8, device=DEVICE), 0.0, torch.float32, True).values.shape == (0, 4)


@runs_kernels
@pytest.mark.parametrize("width", [128, 384, 200, 24])
def test_quantise_equals_the_definition_bit_for_bit(width: int) -> None:
    values = torch.randn(40, width, generator=torch.Generator().manual_seed(width)).to(DEVICE)
    values[0], values[1], values[2], values[3] = 0.0, 448.0, 449.0, 1e-6
    values[4, 5], values[5, width - 1] = torch.inf, torch.nan
    values[6:40] *= torch.logspace(-30, 30, 34, base=2.0, device=DEVICE)[:, None]
    for x in (values, values.bfloat16()):
        found, truth = quantise_rows(x), ref.quantise_rows(x)
        assert found.codes is not None and truth.codes is not None and found.scales is not None and truth.scales is not None
        assert torch.equal(found.codes.view(torch.uint8), truth.codes.view(torch.uint8))
        torch.testing.assert_close(found.scales, truth.scales, rtol=0, atol=0, equal_nan=True)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [0.0, 0.75])
@pytest.mark.parametrize(("tokens", "inner"), [(1, 128), (5, 200), (3, 24)])
def test_swiglu(tokens: int, inner: int, limit: float, dtype: torch.dtype) -> None:
    h = torch.randn(tokens, 2 * inner, generator=torch.Generator().manual_seed(inner)).to(DEVICE)
    h[0, 0], h[0, 1], h[0, inner + 2] = -100.0, 90.0, -3.0
    truth = ref.swiglu_quantise(h, limit, dtype, True)
    found = gemm.swiglu_quantise(h, limit, dtype, True)
    if dtype == torch.bfloat16 and HAS_GPU:
        torch.testing.assert_close(found.values, truth.values, rtol=2**-7, atol=1e-30)
        assert (found.values == truth.values).float().mean() > 0.98  # where exp's last bit decides
    else:
        torch.testing.assert_close(found.values, truth.values, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-30)
    codes, scales = quantise_fp8(found.values, 128)  # of the very values that it gave
    assert found.codes is not None and found.scales is not None
    assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.scales, e8m0_to_fp32(scales))
    plain = gemm.swiglu_quantise(h, limit, dtype, False)
    assert plain.codes is None and torch.equal(plain.values, found.values)
    h[0, 3] = torch.nan
    assert gemm.swiglu_quantise(h, limit, dtype, False).values.isnan().sum() == 1


@needs_gpu
def test_a_captured_graph_follows_its_input() -> None:
    case = Case(3, 1536, 4096, "fp8", "decode")
    x, weight = make(case)
    expected = gemm.linear(x, weight, torch.float32, "decode")
    other = replace(x, codes=x.codes.flip(0), scales=x.scales.flip(0))
    graph = torch.cuda.CUDAGraph()
    static = Activation(x.values, x.codes.clone(), x.scales.clone())
    with torch.cuda.graph(graph):
        found = gemm.linear(static, weight, torch.float32, "decode")
    for _ in range(3):
        graph.replay()
        assert torch.equal(found, expected)
    static.codes.copy_(other.codes), static.scales.copy_(other.scales)
    graph.replay()
    assert torch.equal(found, expected.flip(0))


def test_refusals() -> None:
    hopper = Machine("cuda", (9, 0), True)
    tiny = GemmCase(64, groups=2, is_fp8=True)
    assert gemm.refuses(hopper, tiny) is None
    assert gemm.refuses(hopper, GemmCase(40)) is None
    assert gemm.refuses(hopper, replace(tiny, width=40)) == "fp8 groups need a width that is a multiple of 32, not 40"
    if not INTERPRETED:
        assert gemm.refuses(Machine("cuda", (8, 0), True), tiny) is None
        assert gemm.refuses(Machine("cuda", (7, 5), True), tiny) == "needs compute capability 8.0, this GPU has 7.5"
        assert gemm.refuses(Machine("cpu", (0, 0), True), tiny) == "runs on NVIDIA GPUs, not on cpu"


def machine_code(kernel: JITFunction, types: dict[str, str], constants: dict[str, object], warps: int, capability: int) -> str:
    """SASS for `capability`, compiled without a GPU."""
    source_type = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: types.get(name, "*fp32") if name not in constants else "constexpr" for name in kernel.arg_names}
    aligned = [name for name in names if signature[name].startswith("*") or name.endswith("stride")]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = source_type(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": constants["STAGES"]}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


_OPERANDS = {"fp8": ("*fp8e4nv", "*fp8e4nv"), "codes": ("*u8", "*u8"), "wide": ("*bf16", "*u8"), "bf16": ("*bf16", "*bf16")}


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize(
    ("capability", "maths", "order", "tokens", "shape", "instruction"),
    [
        (90, "fp8", "decode", 1, REAL[0], "QGMMA.64x16x32"),
        _long(90, "fp8", "decode", 32, REAL[1], "QGMMA.64x32x32"),
        _long(90, "fp8", "decode", 64, REAL[2], "QGMMA.64x64x32"),
        (90, "fp8", "decode", 8, REAL[3], "QGMMA.64x16x32"),
        (90, "bf16", "decode", 1, REAL[8], "HGMMA.64x16x16"),
        _long(90, "bf16", "decode", 32, REAL[10], "HGMMA.64x32x16"),
        (90, "wide", "decode", 8, REAL[2], "HGMMA.64x16x16"),
        _long(90, "fp8", "prefill", 40, REAL[2], "QGMMA.64x64x32"),
        (90, "fp8", "prefill", 4096, REAL[2], "QGMMA.64x128x32"),
        (90, "bf16", "prefill", 4096, REAL[7], "HGMMA.64x128x16"),
        _long(90, "wide", "decode", 256, REAL[2], "HGMMA.64x64x16"),
        (80, "codes", "decode", 8, REAL[2], "HMMA.16816"),
        _long(80, "codes", "decode", 256, REAL[2], "HMMA.16816"),
        _long(80, "bf16", "decode", 256, REAL[7], "HMMA.16816"),
        (80, "wide", "decode", 8, REAL[2], "HMMA.16816"),
        (80, "bf16", "decode", 8, REAL[7], "HMMA.16816"),
        (80, "codes", "prefill", 4096, REAL[2], "HMMA.16816"),
        (89, "fp8", "decode", 8, REAL[2], "QMMA.16832"),
    ],
    ids=str,
)
def test_compiled_ahead_of_time(
    capability: int, maths: str, order: gemm.Order, tokens: int, shape: tuple[int, int, int], instruction: str
) -> None:
    """The products use the tensor cores and spill nothing."""
    rows, width, groups = shape
    cut = gemm.choose_cut(tokens, rows, width, groups, maths, order)
    of_x, of_weights = _OPERANDS[maths]
    types = {"x": of_x, "weights": of_weights, "out": "*bf16", "codes": "*u8", "counters": "*i32"}
    types |= {"num_tokens": "i32", "out_stride": "i32"}
    constants = {
        "OUT": rows, "K": width, "GROUPS": groups, "BLOCK": cut.block, "TOKENS": cut.tokens, "ROWS": cut.rows,
        "SPLITS": cut.splits, "MATHS": maths, "W_CODES": maths != "bf16", "TOKENS_FIRST": cut.is_tokens_first,
        "STAGES": cut.stages, "AHEAD": capability == 90 and order == "decode", "QUANTISES": groups > 1 and order == "decode",
        "INTERPRET": False,
    }  # fmt: skip
    code = machine_code(kernels.linear, types, constants, cut.warps, capability)
    assert instruction in code
    assert "STL" not in code and "LDL" not in code  # no register is spilled


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize(
    ("tokens", "shape", "maths", "order", "out_dtype", "tile"),
    [
        (4096, REAL[1], "fp8", "prefill", "bf16", (128, 128, 1, 1)),
        _long(4096, (4000, 7168, 1), "fp8", "prefill", "fp32", (128, 128, 1, 1)),
        (4096, REAL[7], "bf16", "prefill", "fp32", (128, 256, 1, 1)),
        (64, REAL[2], "fp8", "decode", "bf16", (64, 128, 4, 1)),
        (256, REAL[2], "fp8", "decode", "bf16", (128, 128, 2, 2)),
        (256, REAL[7], "bf16", "decode", "fp32", (128, 128, 4, 2)),
        _long(256, REAL[9], "bf16", "decode", "fp32", (64, 128, 16, 1)),
        _long(256, REAL[10], "bf16", "decode", "fp32", (128, 256, 1, 1)),
    ],
    ids=str,
)
def test_hopper_compiled_ahead_of_time(
    tokens: int, shape: tuple[int, int, int], maths: str, order: gemm.Order, out_dtype: str, tile: tuple[int, int, int, int]
) -> None:
    """Copies by the tensor memory unit, and two groups of warps that multiply without a spill."""
    rows, width, groups = shape
    cut = gemm.choose_cut(tokens, rows, width, groups, maths, order, is_hopper=True)
    assert cut.is_gluon and (cut.tokens, cut.rows, cut.splits // cut.runs, cut.runs) == tile
    bits, name = (8, "fp8e4nv") if maths == "fp8" else (16, "bf16")
    layout = gemm._SWIZZLED[bits]
    types = {
        "x": f"tensordesc<{name}[{cut.tokens}, {cut.block}],{layout}>", "out": f"*{out_dtype}", "counters": "*i32",
        "weights": f"tensordesc<{name}[{cut.rows}, {cut.block}],{layout}>",
    }  # fmt: skip
    types |= dict.fromkeys(("num_tokens", "num_items", "out_stride"), "i32")
    constants: dict[str, object] = {
        "OUT": rows, "K": width, "GROUPS": groups, "BLOCK": cut.block, "TOKENS": cut.tokens, "ROWS": cut.rows,
        "PARTS": cut.splits // cut.runs, "RUNS": cut.runs, "STAGES": cut.stages, "AHEAD": cut.is_ahead,
    }  # fmt: skip
    code = machine_code(hopper.linear, types, constants, cut.warps, 90)
    wide = cut.rows if cut.tokens == 128 else cut.rows // 2
    assert code.count(f"GMMA.64x{wide}x") == 8 * cut.runs and "UTMALDG" in code
    assert "STL" not in code and "LDL" not in code


@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="the kernels run in this process")
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
