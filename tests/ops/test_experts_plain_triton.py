"""The experts of `plain.py`, in every format it reads, against `ref.py`: on a GPU, or in Triton's interpreter."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from kernel_tests import DEVICE, X_DTYPE, compiles_kernels, machine_code, runs_kernels, starts_interpreter
from torch import Tensor

from lamina.ops.experts import Gating, experts
from lamina.ops.experts import plain_kernels as kernels
from lamina.ops.experts.plain import PlainExperts, StoredExperts, experts_plain, pack_mx
from lamina.ops.gemm import Activation
from lamina.ops.quantise import dequantise_fp4_weight, dequantise_fp8, dequantise_fp8_weight, quantise_fp8, quantise_fp8_weight


@dataclass(frozen=True, slots=True)
class Case:
    """A layer. weight: fp32, bf16 or fp8; x: fp32, bf16 or fp8 (with codes). routing: as in test_experts_triton."""

    tokens: int
    weight: str
    x: str
    experts: int = 4
    top_k: int = 2
    hidden: int = 48
    inner: int = 24
    limit: float = 0.0
    routing: str = "random"
    seed: int = 0


def cases() -> Iterator[Case]:
    """Every way to multiply, on shapes that fill no tile, and hostile routings."""
    yield Case(1, "fp32", "fp32", top_k=1)
    yield Case(3, "fp32", "fp32", hidden=136, inner=72, limit=0.5)
    yield Case(3, "bf16", "fp32", limit=0.5)
    yield Case(5, "bf16", "bf16", hidden=80, inner=72, limit=0.5)
    yield Case(2, "bf16", "fp8", hidden=128)  # codes that no product reads
    yield Case(4, "fp8", "bf16", hidden=144, inner=136, limit=0.5)
    yield Case(4, "fp8", "fp32", hidden=144, inner=128)
    yield Case(5, "fp8", "fp8", hidden=256, inner=128, limit=0.5)
    yield Case(3, "fp8", "fp8", hidden=144, inner=192)
    yield Case(17, "fp32", "fp32", experts=2, top_k=1, routing="one")  # a block of 16 and one of 1
    yield Case(70, "fp32", "fp32", experts=1, top_k=1, hidden=32)  # tiles of 64
    yield Case(6, "fp32", "fp32", experts=5, top_k=3, routing="nobody")
    yield Case(4, "bf16", "bf16", experts=2, routing="none")
    yield Case(60, "fp32", "fp32", experts=3)  # more places than one program aligns
    if DEVICE == "cuda":
        yield Case(300, "bf16", "bf16", experts=8, hidden=512, inner=320)
        yield Case(300, "fp8", "fp8", experts=8, hidden=512, inner=384)


@dataclass(frozen=True, slots=True)
class Layer:
    x: Activation
    chosen: Tensor
    weights: Tensor
    experts: PlainExperts
    gate_up: Tensor  # fp32 values of the weights
    down: Tensor


def stored(weight: str, shape: tuple[int, int, int], generator: torch.Generator) -> tuple[StoredExperts, Tensor]:
    matrix = torch.randn(shape, generator=generator) * shape[2] ** -0.5
    if weight != "fp8":
        kept = matrix.to(torch.bfloat16 if weight == "bf16" else torch.float32).to(DEVICE)
        return StoredExperts(kept), kept.float()
    made = [quantise_fp8_weight(one.to(DEVICE)) for one in matrix]
    codes = torch.stack([codes.view(torch.uint8) for codes, _ in made]).view(torch.float8_e4m3fn)
    scales = torch.exp2(torch.stack([scales for _, scales in made]).float() - 127)
    return StoredExperts(codes, scales), torch.stack([dequantise_fp8_weight(*one) for one in made])


def make(case: Case) -> Layer:
    generator = torch.Generator().manual_seed(case.seed + 1000 * case.tokens)
    values = torch.randn(case.tokens, case.hidden, generator=generator)
    values = values.to(torch.float32 if case.x == "fp32" else torch.bfloat16).to(DEVICE)
    codes, scales = quantise_fp8(values.float(), 128)
    x = Activation(values, codes, torch.exp2(scales.float() - 127)) if case.x == "fp8" else Activation(values)
    chosen = torch.stack([torch.randperm(case.experts, generator=generator)[: case.top_k] for _ in range(case.tokens)])
    if case.routing == "one":
        chosen = torch.full((case.tokens, case.top_k), case.experts - 1)
    if case.routing == "nobody":  # places that belong to another machine's experts
        chosen[0, 0], chosen[1, :], chosen[2, 1] = -1, -1, case.experts
    if case.routing == "none":
        chosen.fill_(-1)
    gate_up, gate_up_values = stored(case.weight, (case.experts, 2 * case.inner, case.hidden), generator)
    down, down_values = stored(case.weight, (case.experts, case.hidden, case.inner), generator)
    weights = torch.rand(case.tokens, case.top_k, generator=generator).to(DEVICE)
    return Layer(x, chosen.to(DEVICE, torch.int32), weights, PlainExperts(gate_up, down), gate_up_values, down_values)


def run(layer: Layer, case: Case) -> Tensor:
    return experts_plain(layer.x, layer.chosen, layer.weights, layer.experts, case.limit)


def definition(layer: Layer, case: Case) -> Tensor:
    """`ref.experts` in fp64, over activations rounded as the products read them."""

    def read(rows: Tensor) -> Tensor:
        rows = rows.to(layer.x.values.dtype)
        return (dequantise_fp8(*quantise_fp8(rows.float(), 128), 128) if case.x == case.weight == "fp8" else rows).double()

    x, out = read(layer.x.values), torch.zeros(case.tokens, case.hidden, dtype=torch.float64, device=DEVICE)
    for expert in range(case.experts):
        token, place = (layer.chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ layer.gate_up[expert].double().t()).chunk(2, dim=1)
        if case.limit:
            gate, up = gate.clamp(max=case.limit), up.clamp(-case.limit, case.limit)
        h = gate * torch.sigmoid(gate) * up * layer.weights[token, place, None]
        out.index_add_(0, token, read(h) @ layer.down[expert].double().t())
    return out


def error(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm; 0 for two zeros."""
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))


@runs_kernels
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_the_definition(case: Case) -> None:
    """fp32 to rounding. Where the order of sums moves a SwiGLU's result over the middle between two numbers of a narrower type,
    it differs by the distance of these; Hopper adds fp8 products in some 14 bits."""
    layer = make(case)
    found = run(layer, case)
    assert found.dtype == torch.float32 and torch.isfinite(found).all()
    assert error(found, definition(layer, case)) < {"fp32": 2e-6, "bf16": 1e-3, "fp8": 1e-2}[case.x]
    nobody = ((layer.chosen < 0) | (layer.chosen >= case.experts)).all(1)
    assert (found[nobody] == 0).all()


@runs_kernels
def test_the_reference() -> None:
    """`ref.experts` itself, where it rounds nothing."""
    case = Case(7, "fp32", "fp32", limit=0.5)
    layer = make(case)
    truth = experts(layer.x.values, layer.chosen.long(), layer.weights, layer.gate_up, layer.down, case.limit)
    assert error(run(layer, case), truth) < 2e-6


@dataclass(frozen=True, slots=True)
class Kind:
    """What experts of other families compute. is_packed: from MXFP4."""

    gating: Gating
    hidden: int = 48
    inner: int = 24
    limit: float = 0.0
    has_biases: bool = False
    is_packed: bool = False
    tokens: int = 5
    x: torch.dtype = torch.float32


KINDS = {
    "clamped, biases": Kind(Gating(1.702, 1.0), limit=0.7, has_biases=True),
    "clamped, biases, packed": Kind(Gating(1.702, 1.0), 96, 96, 0.7, True, True),
    "packed tiles": Kind(Gating(), 64, 160, is_packed=True, tokens=40),
    "packed, bf16": Kind(Gating(1.702, 1.0), 96, 32, 0.7, True, True, x=torch.bfloat16),
    "weights of the input": Kind(Gating(weighs_input=True)),
    "weights of the input, biases": Kind(Gating(1.5, weighs_input=True), limit=0.7, has_biases=True),
    "relu2": Kind(Gating(ungated="relu2"), inner=72),
    "silu": Kind(Gating(ungated="silu"), has_biases=True),
}


@runs_kernels
@pytest.mark.parametrize("name", list(KINDS))
def test_other_families(name: str) -> None:
    """Biases, other gates and none, weights that multiply what an expert reads, MXFP4: against `ref.experts`."""
    kind, draw, num = KINDS[name], torch.Generator().manual_seed(3), 3
    first = (num, kind.inner * (1 if kind.gating.ungated else 2), kind.hidden)
    shapes = (first, (num, kind.hidden, kind.inner))
    x = torch.randn(kind.tokens, kind.hidden, generator=draw).to(kind.x).to(DEVICE)
    chosen = torch.stack([torch.randperm(num, generator=draw)[:2] for _ in range(kind.tokens)]).to(DEVICE)
    weights = (torch.rand(kind.tokens, 2, generator=draw) + 0.2).to(DEVICE)
    stored, values = [], []
    for rows, columns, parts in ((shapes[0][1], shapes[0][2], first[1] // kind.inner), (shapes[1][1], shapes[1][2], 1)):
        if kind.is_packed:
            codes = torch.randint(0, 256, (num, rows, columns // 2), generator=draw, dtype=torch.uint8).to(DEVICE)
            scales = torch.randint(120, 127, (num, rows, columns // 32), generator=draw, dtype=torch.uint8).to(DEVICE)
            stored.append(pack_mx(codes, scales, parts))
            values.append(torch.stack([dequantise_fp4_weight(*one) for one in zip(codes, scales, strict=True)]))
        else:
            values.append((torch.randn(num, rows, columns, generator=draw) * columns**-0.5).to(DEVICE))
            stored.append(StoredExperts(values[-1]))
    biases = None
    if kind.has_biases:
        biases = (torch.randn(num, first[1], generator=draw).to(DEVICE), torch.randn(num, kind.hidden, generator=draw).to(DEVICE))
    gating = replace(kind.gating, biases=biases)
    found = experts_plain(Activation(x), chosen.int(), weights, PlainExperts(*stored), kind.limit, gating=gating)
    truth = experts(x.float(), chosen, weights, *values, kind.limit, gating=gating)
    assert error(found, truth) < (2e-6 if kind.x == torch.float32 else 6e-3)


@runs_kernels
@pytest.mark.parametrize(("weight", "x"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp8", "fp8"), ("fp8", "bf16")])
def test_bits_do_not_depend_on_the_other_tokens(weight: str, x: str) -> None:
    """One token, few and many, whose tiles differ; on the GPU only, for numpy multiplies in orders that depend on the size."""
    if DEVICE == "cpu":
        pytest.skip("the interpreter multiplies matrices in an order that depends on their size")
    case = Case(400, weight, x, experts=3, hidden=256, inner=128, limit=1.0)
    layer = make(case)
    whole = run(layer, case)
    for rows in ([0], [7, 3], list(range(19, -1, -1)), list(range(60, 200))):
        codes, scales = (None, None) if layer.x.codes is None else (layer.x.codes[rows], layer.x.scales[rows])
        own = Activation(layer.x.values[rows], codes, scales)
        part = replace(layer, x=own, chosen=layer.chosen[rows], weights=layer.weights[rows])
        assert torch.equal(run(part, replace(case, tokens=len(rows))), whole[rows])
        turned = replace(part, chosen=part.chosen[:, [1, 0]], weights=part.weights[:, [1, 0]])
        assert torch.equal(run(turned, case), whole[rows])


@runs_kernels
def test_the_shared_expert_joins_before_rounding() -> None:
    case = Case(6, "fp32", "fp32")
    layer = make(case)
    alone = run(layer, case)
    shared = torch.randn(alone.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    called: list[None] = []
    found = experts_plain(
        layer.x, layer.chosen, layer.weights, layer.experts, case.limit, shared, torch.bfloat16, lambda: called.append(None)
    )
    assert torch.equal(found, (shared + alone).to(torch.bfloat16)) and called == [None]


@runs_kernels
def test_one_tokens_nan_stays_its_own() -> None:
    case = Case(9, "fp32", "fp32", experts=2)
    layer = make(case)
    clean = run(layer, case)
    layer.x.values[4] = torch.nan
    found = run(layer, case)
    rest = [row for row in range(9) if row != 4]
    assert torch.isnan(found[4]).all() and torch.equal(found[rest], clean[rest])


@runs_kernels
def test_no_rows() -> None:
    layer = make(Case(1, "fp32", "fp32"))
    x = Activation(layer.x.values[:0].to(X_DTYPE))
    assert experts_plain(x, layer.chosen[:0], layer.weights[:0], layer.experts, 0.0).shape == (0, 48)


@compiles_kernels
@pytest.mark.parametrize(
    ("capability", "maths", "tokens", "instruction"),
    [
        (90, "fp8", 16, "QGMMA.64x16x32"),
        (90, "codes", 16, "HGMMA.64x16x16"),
        (90, "bf16", 64, "HGMMA.64x64x16"),
        (80, "codes", 16, "HMMA.16816"),
        pytest.param(80, "bf16", 64, "HMMA.16816", marks=pytest.mark.long),
        (90, "fp32", 16, "FFMA"),
        (90, "packed", 64, "HGMMA.64x64x16"),
        (80, "packed", 16, "HMMA.16816"),
    ],
)
def test_compiled_ahead_of_time(capability: int, maths: str, tokens: int, instruction: str) -> None:
    is_codes, is_packed = maths in ("fp8", "codes"), maths == "packed"
    of_x = {"fp8": "*fp8e4nv", "fp32": "*fp32"}.get(maths, "*bf16")
    types = {"x": of_x, "h": of_x, "weights": {"fp8": "*fp8e4nv", "codes": "*u8", "packed": "*u8"}.get(maths, of_x)}
    types |= dict.fromkeys(("limit", "alpha", "shift"), "fp32")
    types |= dict.fromkeys(("x_scales", "h_scales", "bias", "shares", "partial"), "*fp32")
    types |= {"scales": "*u8" if is_packed else "*fp32"}
    types |= dict.fromkeys(("places", "block_expert", "block_first", "block_rows", "num_blocks"), "*i32")
    block = {"bf16": 64, "packed": 64, "fp32": 32}.get(maths, 128)
    common = {
        "ROWS": 64, "TOKENS": tokens, "BLOCK": block, "MATHS": "bf16" if is_packed else maths, "IS_CODES": is_codes, "STAGES": 3,
        "INTERPRET": False, "IS_PACKED": is_packed, "WEIGHS_INPUT": False, "KIND": "scaled" if is_packed else "swiglu",
    }  # fmt: skip
    absent = {} if maths == "fp8" else {"x_scales": None, "h_scales": None}
    absent |= {} if is_codes or is_packed else {"scales": None}
    absent |= {} if is_packed else {"bias": None}
    for kernel, shape in (
        (kernels.plain_gate_up, {"K": 4096, "INNER": 2048, "TOP_K": 6, "HAS_LIMIT": True}),
        (kernels.plain_down, {"K": 2048, "WIDTH": 4096}),
    ):
        constants = {**common, **shape, **{name: None for name in absent if name in kernel.arg_names}}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        signature = types | ({"h": "*bf16" if maths != "fp32" else "*fp32"} if kernel is kernels.plain_gate_up else {})
        code = machine_code(kernel, signature, constants, capability)
        assert code.count(instruction) and code.spills == 0


@starts_interpreter
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
