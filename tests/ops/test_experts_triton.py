"""The FP4 experts of `triton.py` against `ref.py`: on a GPU if there is one, else in Triton's interpreter, in its own process.

The interpreter knows no bf16 and rounds some casts wrongly, so inputs are fp32 there and rounding itself is tested on GPUs only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from kernel_tests import (
    DEVICE,
    FAR,
    HAS_GPU,
    INTERPRETED,
    X_DTYPE,
    compiles_kernels,
    long_but,
    machine_code,
    runs_kernels,
    starts_interpreter,
)
from torch import Tensor

from lamina.ops.experts import Activation, ExpertsCase, experts_fp4, hopper, kernels, pack_weights
from lamina.ops.experts.triton import ExpertsStep, Places, Tiles, choose_tiles, refuses
from lamina.ops.experts.triton import experts_fp4 as run_experts
from lamina.ops.gemm import Activation as Rows
from lamina.ops.machine import Machine
from lamina.ops.quantise import dequantise_fp4, quantise_fp4, quantise_fp8


@dataclass(frozen=True, slots=True)
class Case:
    """A layer and a routing. routing: each way to fill `chosen`."""

    tokens: int
    experts: int = 4
    top_k: int = 2
    hidden: int = 128
    inner: int = 128
    limit: float = 0.0
    routing: str = "random"
    activation: Activation = "fp8"
    binades: int = 12
    seed: int = 0


def cases() -> Iterator[Case]:
    """Hostile inputs on tiny shapes."""
    yield Case(1, top_k=1)
    yield Case(1, limit=0.5)
    yield Case(3, hidden=256, limit=0.5, activation="bf16")
    yield Case(5, inner=256, limit=0.5)
    yield Case(5, hidden=256, limit=0.5, binades=40)
    yield Case(2, hidden=256, activation="bf16", binades=40)
    yield Case(17, experts=2, top_k=1, routing="one")  # a block of 16 and one of 1
    yield Case(16, experts=3, top_k=1, routing="one")  # exactly full
    yield Case(6, experts=5, top_k=3, routing="nobody")
    yield Case(4, experts=2, top_k=2, routing="none")  # no place at all
    yield Case(130, experts=2, top_k=2)  # more places than one program aligns


def stored(num: int, rows: int, columns: int, binades: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """FP4 weights with codes of all kinds and so many different scales; 12 are what rebasing holds."""
    codes = torch.randint(0, 256, (num, rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(127 - binades, 127, (num, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return codes.to(DEVICE), scales.to(DEVICE)


@dataclass(frozen=True, slots=True)
class Layer:
    x: Tensor
    chosen: Tensor
    weights: Tensor
    gate_up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]


def make(case: Case) -> Layer:
    generator = torch.Generator().manual_seed(case.seed + 1000 * case.tokens)
    x = torch.randn(case.tokens, case.hidden, generator=generator) * 0.1
    if case.routing == "one":
        chosen = torch.full((case.tokens, case.top_k), case.experts - 1)
    else:
        chosen = torch.stack([torch.randperm(case.experts, generator=generator)[: case.top_k] for _ in range(case.tokens)])
    if case.routing == "nobody":  # places that belong to another machine's experts
        chosen[0, 0], chosen[1, :], chosen[2, 1] = -1, -1, case.experts
    if case.routing == "none":
        chosen.fill_(-1)
    return Layer(
        x.to(torch.bfloat16).to(X_DTYPE).to(DEVICE),
        chosen.to(DEVICE),
        torch.rand(case.tokens, case.top_k, generator=generator).to(DEVICE),
        stored(case.experts, 2 * case.inner, case.hidden, case.binades, generator),
        stored(case.experts, case.hidden, case.inner, case.binades, generator),
    )


def poisoned(layer: Layer, case: Case, **changed: int) -> ExpertsStep:
    """The launches, with every buffer filled with what nobody may read."""
    packed = pack_weights(*layer.gate_up, *layer.down, case.activation)
    assert packed.gate_up.is_rebased == packed.down.is_rebased == (case.binades <= 12 and case.activation == "fp8")
    tiles = replace(choose_tiles(layer.chosen.numel(), packed), **changed)
    step = ExpertsStep(layer.x, layer.chosen, layer.weights, packed, case.limit, tiles)
    for name in ("h", "h_codes", "h_scales", "partial", "x_scales"):
        buffer: Tensor = getattr(step, name)
        buffer.copy_(torch.full(buffer.shape, torch.nan).to(buffer.dtype))
    for buffer in (step.places.places, step.places.counts, step.places.firsts, *step.places.blocks):
        buffer.fill_(FAR)
    return step


def run(layer: Layer, case: Case, **changed: int) -> Tensor:
    out = torch.full((case.tokens, case.hidden), torch.nan, device=DEVICE)
    poisoned(layer, case, **changed).run(out)
    return out


def error(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm; 0 for two zeros."""
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))


@runs_kernels
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_the_definition(case: Case) -> None:
    """The whole against `ref.py`. Where the order of sums moves a SwiGLU's result over the middle between two codes, the code
    differs by 1/16 of itself; products are held to their own operands below."""
    layer = make(case)
    found = run(layer, case)
    truth = experts_fp4(layer.x, layer.chosen, layer.weights, layer.gate_up, layer.down, case.limit, case.activation)
    assert torch.isfinite(found).all()
    assert error(found, truth) < 2e-2
    nobody = ((layer.chosen < 0) | (layer.chosen >= case.experts)).all(1)
    assert (found[nobody] == 0).all()


@runs_kernels
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_products_are_those_of_their_operands(case: Case) -> None:
    """Gate-up and down in fp64 from the very activations that the kernels multiply; Hopper adds fp8 products in some 14 bits."""
    layer = make(case)
    step = poisoned(layer, case)
    step.h = step.h.float()  # unrounded
    for launch in (step.prepare, step.gate_up, step.quantise_inner, step.down):
        launch()
    is_fp8 = case.activation == "fp8"
    operands = []
    for codes, scales in ((step.x_codes, step.x_scales), (step.h_codes if is_fp8 else step.h, step.h_scales)):
        values = codes.double()
        operands.append((values.unflatten(1, (-1, 128)) * scales.double()[..., None]).flatten(1) if is_fp8 else values)
    listed = step.places.places
    flat = layer.chosen.flatten()
    for expert in range(case.experts):
        own = (flat == expert).nonzero()[:, 0]  # places
        position = torch.stack([(listed == place).nonzero()[0, 0] for place in own]) if own.numel() else own
        first, second = (dequantise_fp4(codes[expert], scales[expert]).double() for codes, scales in (layer.gate_up, layer.down))
        gate, up = (operands[0][own // case.top_k] @ first.t()).chunk(2, dim=1)
        if case.limit:
            gate, up = gate.clamp(max=case.limit), up.clamp(-case.limit, case.limit)
        h = gate * torch.sigmoid(gate) * up * layer.weights.flatten()[own, None].double()
        assert error(step.h[position], h) < 5e-4
        if is_fp8:  # in bf16 the kernel multiplies the rounded h, which is replaced above
            assert error(step.partial[own], operands[1][position] @ second.t()) < 5e-4


@runs_kernels
@pytest.mark.parametrize(("first", "binades"), [(67, 101), (110, 12), (3, 12)])
def test_all_codes_and_scales_are_exact(first: int, binades: int) -> None:
    """One-hot activations read single weights back: every code under scales from 2^(first - 127) up, rebased and not."""
    case = Case(8, experts=1, top_k=1)
    layer = make(case)
    codes, scales = layer.gate_up
    scales.copy_(torch.arange(scales.numel(), device=DEVICE).view(scales.shape).remainder(binades) + first)
    layer.x.zero_()
    layer.x[torch.arange(8), torch.arange(8) * 17] = 1.0
    step = ExpertsStep(layer.x, layer.chosen, layer.weights, pack_weights(*layer.gate_up, *layer.down), 0.0)
    step.h = step.h.float()
    step.prepare(), step.gate_up()
    matrix = dequantise_fp4(codes[0], scales[0])[:, torch.arange(8) * 17].t().double()  # [8, 2I]
    gate, up = matrix.chunk(2, dim=-1)
    truth = gate * torch.sigmoid(gate) * up * layer.weights.double()
    torch.testing.assert_close(step.h.double(), truth, rtol=1e-5, atol=1e-30)  # below, exp(-gate) is infinite in fp32


@runs_kernels
@pytest.mark.parametrize("activation", ["fp8", "bf16"])
def test_bits_do_not_depend_on_the_other_tokens_or_the_tiles(activation: Activation) -> None:
    case = Case(20, experts=3, top_k=2, hidden=256, inner=256 if HAS_GPU else 128, activation=activation, limit=1.0)
    layer = make(case)
    whole = run(layer, case)
    if activation == "bf16" and not HAS_GPU:
        pytest.skip("the interpreter multiplies fp32 matrices in an order that depends on their size")
    for rows in ([0], [7, 3], list(range(19, -1, -1))):
        part = Layer(layer.x[rows], layer.chosen[rows], layer.weights[rows], layer.gate_up, layer.down)
        assert torch.equal(run(part, replace(case, tokens=len(rows))), whole[rows])
    order = [1, 0]  # how a router lists a token's experts does not matter
    turned = Layer(layer.x, layer.chosen[:, order], layer.weights[:, order], layer.gate_up, layer.down)
    assert torch.equal(run(turned, case), whole)
    assert torch.equal(run(layer, case, tokens=32, gate_rows=128, down_rows=64), whole)
    assert torch.equal(run(layer, case, tokens=64, gate_rows=64, gate_stages=2, down_stages=2), whole)
    if HAS_GPU and torch.cuda.get_device_capability() == (9, 0) and activation == "fp8":
        for tokens, gate_rows, down_rows in ((8, 64, 128), (16, 256, 64), (32, 128, 128)):
            changed = {"tokens": tokens, "gate_rows": gate_rows, "down_rows": down_rows, "is_gluon": False}
            assert torch.equal(run(layer, case, **{**changed, "tokens": max(16, tokens)}), whole), changed
            changed["is_gluon"] = True
            assert torch.equal(run(layer, case, **changed), whole), changed


@runs_kernels
@pytest.mark.parametrize(
    "case",
    long_but(
        {0, 2},
        [Case(5, hidden=256, limit=0.5), Case(70 if HAS_GPU else 35, experts=3, routing="one"), Case(4, activation="bf16")],
    ),
)
def test_codes_that_rows_have_are_used(case: Case) -> None:
    """The same bits as when the first launch quantises, and the shared expert's row joins the sum before it is rounded."""
    layer = make(case)
    packed = pack_weights(*layer.gate_up, *layer.down, case.activation)
    routing = (layer.chosen, layer.weights, packed, case.limit)
    codes, scales = quantise_fp8(layer.x, 128)
    rows = Rows(layer.x, codes, torch.exp2(scales.float() - 127))
    expected = run_experts(layer.x, *routing)
    assert torch.equal(run_experts(rows, *routing), expected)
    other = Rows(layer.x, codes, 2 * rows.scales)
    assert torch.equal(run_experts(other, *routing), expected) == (case.activation == "bf16")
    shared = torch.randn(layer.x.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    called: list[None] = []
    found = run_experts(rows, *routing, shared=shared, dtype=torch.bfloat16, before_sum=lambda: called.append(None))
    assert torch.equal(found, (shared + expected).to(torch.bfloat16)) and called == [None]
    narrow = shared.to(torch.bfloat16)
    assert torch.equal(run_experts(rows, *routing, shared=narrow), narrow.float() + expected)


@runs_kernels
def test_one_tokens_nan_stays_its_own() -> None:
    case = Case(9, experts=2)
    layer = make(case)
    clean = run(layer, case)
    layer.x[4] = torch.nan
    found = run(layer, case)
    assert torch.isnan(found[4]).all()
    rest = [row for row in range(9) if row != 4]
    assert torch.equal(found[rest], clean[rest])


@runs_kernels
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "block"), [(1, 4, 2, 16), (10, 8, 6, 8), (40, 8, 6, 16), (300, 8, 2, 16), (200, 3, 3, 64)]
)
def test_align(tokens: int, experts: int, top_k: int, block: int) -> None:
    """Against a plain sort: both the program that compares pairs and the two for many places."""
    case = Case(tokens, experts, top_k)
    layer = make(case)
    layer.chosen[0, 0] = -1
    packed = pack_weights(*layer.gate_up, *layer.down)
    tiles = replace(choose_tiles(1, packed), tokens=block)
    step = ExpertsStep(layer.x, layer.chosen, layer.weights, packed, 0.0, tiles)
    step.prepare()
    flat = layer.chosen.flatten().tolist()
    order = sorted((place for place, e in enumerate(flat) if e >= 0), key=lambda place: (flat[place], place))
    assert step.places.places[: len(order)].tolist() == order
    blocks, at = [], 0
    for expert in range(experts):
        count = sum(e == expert for e in flat)
        blocks += [(expert, at + start, min(block, count - start)) for start in range(0, count, block)]
        at += count
    num = int(step.places.num_blocks)
    found = zip(*(part.tolist()[:num] for part in step.places.blocks[:3]))
    assert list(found) == blocks
    assert num <= step.places.max_blocks


@pytest.mark.parametrize("num_places", [1, 6, 7, 18, 84, 333])
@pytest.mark.parametrize("experts", [6, 8, 256])
def test_buffers_begin_at_16_bytes(num_places: int, experts: int) -> None:
    """Else a kernel would be compiled for each number of places that is odd in another way."""
    places = Places.empty(num_places, experts, 16, torch.device(DEVICE))
    most = places.max_blocks
    buffers = (places.places, *places.blocks, places.counts, places.firsts)
    assert [one.numel() for one in buffers] == [num_places, most, most, most, 1, experts, experts]
    assert all(one.data_ptr() % 16 == 0 and one.is_contiguous() for one in buffers)


@runs_kernels
def test_quantise_equals_the_definition_bit_for_bit() -> None:
    case = Case(64, hidden=256)
    layer = make(case)
    x = layer.x
    x[0], x[1], x[2, :128] = 0.0, 448.0, 449.0
    x[3], x[4, 5], x[5, 200] = 1e-6, torch.inf, torch.nan
    x[6:40] *= torch.logspace(-30, 30, 34, base=2.0, device=DEVICE)[:, None].to(x.dtype)
    step = ExpertsStep(x, layer.chosen, layer.weights, pack_weights(*layer.gate_up, *layer.down), 0.0)
    step.prepare()
    codes, scales = quantise_fp8(x, 128)
    assert torch.equal(step.x_codes.view(torch.uint8), codes.view(torch.uint8))
    powers = torch.where(scales == 255, torch.nan, torch.exp2(scales.double() - 127)).float()
    torch.testing.assert_close(step.x_scales, powers, rtol=0, atol=0, equal_nan=True)


def test_packing_is_a_permutation_of_the_bytes() -> None:
    """The layout of the docstring, byte by byte, for one weight of each kind."""
    generator = torch.Generator().manual_seed(3)
    gate_up, gate_scales = quantise_fp4(torch.randn(2, 256, 256, generator=generator))
    down, down_scales = quantise_fp4(torch.randn(2, 256, 128, generator=generator))
    packed = pack_weights(gate_up, gate_scales, down, down_scales)
    kept = pack_weights(gate_up, gate_scales, down, down_scales, may_rebase=False)
    assert (packed.hidden, packed.inner, packed.num_experts) == (256, 128, 2)
    assert packed.gate_up.is_rebased and not kept.down.is_rebased
    assert packed.gate_up.num_bytes == gate_up.nbytes + gate_scales.nbytes + 4 * 512

    def nibble(of: Tensor, expert: int, row: int, column: int) -> int:
        return int(of[expert, row, column // 2]) >> (4 * (column % 2)) & 15

    for expert, row, column in ((0, 0, 0), (1, 130, 200), (0, 255, 255), (1, 64, 33), (0, 127, 96)):
        is_up, unit = divmod(row, 128)
        (tile, own), block, inside = divmod(16 * (unit // 8) + 8 * is_up + unit % 8, 64), column // 128, column % 128
        half, plane, w, n = inside // 64, inside % 64 // 32, inside % 32 // 4, inside % 4
        for matrix, of, tile_of, row_of in ((packed.gate_up, gate_up, tile, own), (packed.down, down, row // 64, row % 64)):
            at = half * 2048 + row_of * 32 + 4 * w
            four = matrix.codes[expert, tile_of, block if of is gate_up else 0, at : at + 4]
            word = int.from_bytes(bytes(four.tolist()), "little")
            code = (word >> (16 * plane + 4 * n) & 7) | (word >> (8 * n + 7 - 4 * plane) & 1) << 3
            assert code == nibble(of, expert, row, column if of is gate_up else inside)
        group, scale = inside // 32, int(gate_scales[expert, row, column // 32])
        assert int(kept.gate_up.scales[expert, tile, block, own]) >> (8 * group) & 255 == scale
        binades = (int(packed.gate_up.scales[expert, tile, block, own]) >> (8 * group) & 255) // 8
        assert float(packed.gate_up.factors[expert, tile, own]) * 2.0 ** (binades - 5) == 2.0 ** (scale - 127)


def test_refusals() -> None:
    good, machine = ExpertsCase("fp8", 4096, 2048), Machine("cuda", (9, 0), True)
    if not INTERPRETED:
        assert refuses(machine, good) is None
        assert refuses(Machine("cpu", (0, 0), True), good) == "runs on NVIDIA GPUs, not on cpu"
        older = replace(machine, capability=(8, 6))
        assert refuses(older, good) == "fp8 activations need compute capability 8.9, this GPU has 8.6"
        assert refuses(replace(machine, capability=(8, 0)), replace(good, activation="bf16")) is None
        assert refuses(replace(machine, capability=(7, 5)), replace(good, activation="bf16")) is not None
    assert refuses(machine, replace(good, hidden=96)) == "the hidden width must be a multiple of 128, not 96"
    with pytest.raises(ValueError, match="multiples of 128"):
        pack_weights(*stored(1, 256, 192, 3, torch.Generator()), *stored(1, 192, 128, 3, torch.Generator()))


@compiles_kernels
@pytest.mark.parametrize(
    ("capability", "activation", "tiles", "instruction"),
    [
        pytest.param(90, "fp8", Tiles(8, 64, 4, 4, 128, 4, 3, True), "QGMMA.64x8x32", marks=pytest.mark.long),
        (90, "fp8", Tiles(16, 128, 4, 4, 128, 4, 4, True), "QGMMA.64x16x32"),
        pytest.param(90, "fp8", Tiles(32, 256, 4, 4, 256, 4, 4, True), "QGMMA.64x32x32", marks=pytest.mark.long),
        pytest.param(90, "fp8", Tiles(16, 256, 4, 4, 256, 4, 3), "QGMMA.64x16x32", marks=pytest.mark.long),
        (90, "bf16", Tiles(16, 128, 4, 3, 128, 4, 3), "HGMMA.64x16x16"),
        pytest.param(120, "fp8", Tiles(16, 256, 4, 4, 256, 4, 3), "QMMA.16832", marks=pytest.mark.long),
        pytest.param(100, "fp8", Tiles(16, 256, 4, 4, 256, 4, 3), "UTCQMMA", marks=pytest.mark.long),
        (89, "fp8", Tiles(16, 128, 4, 3, 128, 4, 3), "QMMA.16832"),
        pytest.param(90, "bf16", Tiles(32, 128, 4, 3, 128, 4, 3), "HGMMA.64x32x16", marks=pytest.mark.long),
        (80, "bf16", Tiles(16, 64, 4, 3, 64, 4, 3), "HMMA.16816"),
    ],
    ids=str,
)
def test_compiled_ahead_of_time(capability: int, activation: Activation, tiles: Tiles, instruction: str) -> None:
    """Both products use the tensor cores on operands expanded in registers, and spill nothing."""
    is_fp8 = activation == "fp8"
    operand = "*fp8e4nv" if is_fp8 else "*bf16"
    types = {"x": operand, "h": "*bf16", "weights": "*u8", "limit": "fp32", "partial": "*fp32"}
    types |= dict.fromkeys(("x_scales", "h_scales", "factors", "shares"), "*fp32")
    types |= dict.fromkeys(("scales", "places", "block_expert", "block_first", "block_rows", "num_blocks"), "*i32")
    common = {"TOKENS": tiles.tokens} if tiles.is_gluon else {
        "TOKENS": tiles.tokens, "FP8": is_fp8, "REBASED": is_fp8, "INTERPRET": False
    }  # fmt: skip
    for is_down in (False, True):
        kernel = getattr(hopper if tiles.is_gluon else kernels, "down" if is_down else "gate_up")
        shape = {"K": 2048, "WIDTH": 4096} if is_down else {"K": 4096, "INNER": 2048, "TOP_K": 6, "HAS_LIMIT": True}
        warps, stages = (tiles.down_warps, tiles.down_stages) if is_down else (tiles.gate_warps, tiles.gate_stages)
        shape |= {"ROWS": tiles.down_rows if is_down else tiles.gate_rows, "STAGES": stages}
        shape |= {"WARPS": warps} if tiles.is_gluon else {}
        signature = types | ({"h": operand} if is_down else {})
        code = machine_code(kernel, signature, shape | common, capability, warps, stages)
        assert instruction in code.text
        assert code.spills == 0


@compiles_kernels
@pytest.mark.parametrize("capability", [80, 90])
def test_aligning_alone_compiles_without_fp8(capability: int) -> None:
    """Rows that have codes, or need none, leave no fp8 cast in the first launch: older GPUs have none."""
    integers = ("chosen", "places", "block_expert", "block_first", "block_rows", "num_blocks", "counts", "firsts")
    types = dict.fromkeys(integers, "*i32") | dict.fromkeys(("num_places", "num_experts", "num_items"), "i32")
    constants = {"x": None, "codes": None, "scales": None, "ITEMS": 8, "QUANTISES": False, "INTERPRET": False}
    for kernel, own in ((kernels.prepare_few, {"TOKENS": 16, "SIZE": 64}), (kernels.prepare_many, {"CHUNK": 1024})):
        assert machine_code(kernel, types, constants | own, capability).spills == 0


@starts_interpreter
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
