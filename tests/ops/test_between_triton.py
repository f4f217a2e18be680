"""What lies between products, of `triton.py`, against the definitions: residuals with norms, activations, routers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lamina.ops.gated import gated as gated_definition
from lamina.ops.gated.triton import gated
from lamina.ops.gemm.stored import Activation
from lamina.ops.machine import Machine
from lamina.ops.quantise import e8m0_to_fp32, quantise_fp8
from lamina.ops.residual import Joint, VectorNorm
from lamina.ops.residual import join as join_definition
from lamina.ops.residual.triton import finish, join, refuses
from lamina.ops.route import route_chosen, route_sigmoid, route_softmax
from lamina.ops.route.triton import route_plain
from lamina.ops.rows import Rows, rows_of
from lamina.ops.sequences import Piece
from tests.ops.kernel_tests import DEVICE, INTERPRETED, runs_kernels, starts_interpreter

BF16, FP32 = torch.bfloat16, torch.float32


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    """fp32: to rounding; bf16: all but a few to the bit, those to one step."""
    found, truth = found.float().cpu(), truth.float()
    assert torch.isfinite(found).all()
    if dtype == FP32:
        torch.testing.assert_close(found, truth, rtol=2e-6, atol=2e-6)
    else:
        torch.testing.assert_close(found, truth, rtol=1e-2, atol=1e-6)
        assert float((found != truth).float().mean()) < 0.02


def check_codes(made: Activation) -> None:
    """fp8 codes and scales are those of the values."""
    assert made.codes is not None and made.scales is not None
    codes, scales = quantise_fp8(made.values.float().cpu(), 128)
    assert torch.equal(made.codes.view(torch.uint8).cpu(), codes.view(torch.uint8))
    assert torch.equal(made.scales.cpu(), e8m0_to_fp32(scales))


@runs_kernels
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("width", [48, 128, 260])
@pytest.mark.parametrize("kind", ["first", "plain", "biased", "after", "centred", "no norm", "replaced"])
def test_residuals(kind: str, width: int, dtype: torch.dtype) -> None:
    """The new residual, what the next part reads, its codes, and the last hidden vectors."""
    x, found = random(5, width).to(dtype), random(5, width, seed=1).to(dtype)
    weights = [random(width, seed=seed) + 1 for seed in (2, 3)]
    bias = random(width, seed=4) if kind == "biased" else None

    def joint(device: str) -> Joint:
        before, after = (VectorNorm(weight.to(device), 1e-5, kind == "centred") for weight in weights)
        return Joint(
            None if kind == "no norm" else before, after if kind in ("after", "centred") else None,
            None if bias is None else bias.to(device), 0.5 if kind == "after" else 1.0,
            {"after": 2.0, "replaced": 0.0}.get(kind, 1.0), kind in ("first", "replaced"),
        )  # fmt: skip

    given = None if kind == "first" else found
    total, normed = join_definition(x, given, joint("cpu"), dtype)
    there = x.clone().to(DEVICE)
    made = join(there, None if given is None else given.to(DEVICE), joint(DEVICE), True)
    close(there, total, dtype)
    close(made.values, normed.to(dtype), dtype)
    check_codes(made)
    if given is not None:
        there = x.clone().to(DEVICE)
        last = finish(there, given.to(DEVICE), joint(DEVICE))
        assert last.dtype == FP32 and torch.equal(there.cpu(), x)
        torch.testing.assert_close(last.cpu(), normed, rtol=1e-5 if dtype == FP32 else 2e-2, atol=1e-5 if dtype == FP32 else 2e-2)


@runs_kernels
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize(
    ("inner", "has_gate", "has_bias", "multiplier"), [(40, True, False, 1.0), (260, False, True, 1.0), (128, True, True, 0.3)]
)
def test_activations(inner: int, has_gate: bool, has_bias: bool, multiplier: float, activation: str, dtype: torch.dtype) -> None:
    wide = inner * (1 + has_gate)
    h, bias = random(3, wide) * 3, random(wide, seed=1) if has_bias else None
    h[0, :4] = torch.tensor([90.0, -90, 0, -0.0])
    h = h.to(dtype)
    truth = gated_definition(h, bias, activation, has_gate, multiplier).to(dtype)
    made = gated(h.to(DEVICE), None if bias is None else bias.to(DEVICE), activation, has_gate, multiplier, dtype, True)
    found = made.values.float().cpu()
    torch.testing.assert_close(found, truth.float(), rtol=1e-5 if dtype == FP32 else 1e-2, atol=1e-5)
    check_codes(made)


def rows(num: int, padding: int) -> Rows:
    """One request's rows, then padding."""
    tables = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    return rows_of((Piece(0, num, 0, 0),), ((0,),), tables, num + padding, 1)


@runs_kernels
@pytest.mark.parametrize("kind", ["softmax", "shares", "chosen", "chosen_sigmoid", "sigmoid", "biased"])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (6, 2), (128, 8), (40, 3)])
def test_routers(experts: int, top_k: int, kind: str) -> None:
    """Experts, their order and weights; ties go to the lowest; padding is nobody's."""
    logits, bias = random(9, experts, seed=experts) * 3, random(experts, seed=2)
    logits[0] = 1.0
    used = bias if kind == "biased" else None
    truth = {
        "softmax": lambda: route_softmax(logits, top_k, True, 2.5), "shares": lambda: route_softmax(logits, top_k, False),
        "chosen": lambda: route_chosen(logits, top_k), "chosen_sigmoid": lambda: route_chosen(logits, top_k, True),
        "sigmoid": lambda: route_sigmoid(logits, None, top_k, True, 2.5),
        "biased": lambda: route_sigmoid(logits, bias, top_k, False, 2.5),
    }[kind]()  # fmt: skip
    name = {"shares": "softmax", "biased": "sigmoid"}.get(kind, kind)
    normalises, scale = kind in ("softmax", "sigmoid"), 2.5 if kind in ("softmax", "sigmoid", "biased") else 1.0
    chosen, weights = route_plain(
        torch.cat([logits, torch.full((2, experts), torch.nan)]).to(DEVICE), None if used is None else used.to(DEVICE), name,
        top_k, normalises, scale, rows(9, 2),
    )  # fmt: skip
    assert torch.equal(chosen[:9].cpu().long(), truth[0])
    torch.testing.assert_close(weights[:9].cpu(), truth[1], rtol=1e-5, atol=1e-7)
    assert chosen[9:].eq(-1).all() and not weights[9:].any()


def test_refusals() -> None:
    assert refuses(Machine("cuda", (9, 0), True), 16385) == "the hidden width must be 1 to 16384, not 16385"
    if not INTERPRETED:
        assert refuses(Machine("cuda", (9, 0), True), 4096) is None
        assert refuses(Machine("cpu", (0, 0), True), 4096) == "runs on NVIDIA GPUs, not on cpu"


@starts_interpreter
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
