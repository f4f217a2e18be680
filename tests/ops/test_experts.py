"""Experts against section 6.2, one token and one expert at a time in fp64."""

import pytest
import torch
from torch import Tensor

from lamina.ops.experts import Gating, experts, swiglu


def one(x: Tensor, gate_up: Tensor, down: Tensor, limit: float, weight: float = 1.0) -> Tensor:
    """One token through one expert, in fp64."""
    gate, up = (gate_up.double() @ x.double()).chunk(2)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return down.double() @ (gate * torch.sigmoid(gate) * up * weight)


def weights_of(num: int, width: int, inner: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(num, 2 * inner, width, generator=generator) * 3 * width**-0.5
    return gate_up, torch.randn(num, width, inner, generator=generator) * inner**-0.5


@pytest.mark.parametrize("limit", [0.0, 0.5, 10.0])
@pytest.mark.parametrize(("num", "top_k", "rows"), [(1, 1, 1), (8, 2, 8), (8, 2, 65), (6, 6, 9), (16, 4, 1), (5, 1, 0)])
def test_the_definition(num: int, top_k: int, rows: int, limit: float) -> None:
    gate_up, down = weights_of(num, 24, 16)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 24, generator=generator)
    chosen = (
        torch.stack([torch.randperm(num, generator=generator)[:top_k] for _ in range(rows)])
        if rows
        else torch.zeros(0, top_k, dtype=torch.int64)
    )
    weights = torch.rand(rows, top_k, generator=generator)
    found = experts(x, chosen, weights, gate_up, down, limit)
    expected = torch.zeros(rows, 24, dtype=torch.float64)
    for row in range(rows):
        for expert, weight in zip(chosen[row].tolist(), weights[row].tolist(), strict=True):
            expected[row] += one(x[row], gate_up[expert], down[expert], limit, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limit", [0.0, 0.25, 10.0])
def test_one_dense_expert(limit: float) -> None:
    gate_up, down = weights_of(1, 32, 20, 4)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)) * 4
    expected = torch.stack([one(row, gate_up[0], down[0], limit) for row in x])
    torch.testing.assert_close(
        swiglu(x, gate_up[0], down[0], limit).double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max())
    )


def test_the_clamp_is_one_sided_on_the_gate() -> None:
    """Gate from above only, up from both sides, both before the product."""
    gate_up, down = torch.zeros(2, 1), torch.ones(1, 1)
    gate_up[0], gate_up[1] = 1.0, 1.0
    for value in (-50.0, -3.0, 0.2, 50.0):
        gate, up = min(value, 2.0), max(-2.0, min(value, 2.0))
        expected = gate / (1 + 2.718281828459045 ** (-gate)) * up
        found = swiglu(torch.full((8, 1), value), gate_up, down, 2.0)
        torch.testing.assert_close(found, torch.full((8, 1), expected), rtol=1e-5, atol=1e-12)


def test_extreme_gates_are_finite() -> None:
    gate_up, down = torch.tensor([[1.0], [0.0]]), torch.ones(1, 1)
    gate_up[1] = 1e-3
    found = swiglu(torch.tensor([[-1e4], [-200.0], [-90.0], [0.0], [90.0], [1e4], [1.0], [2.0]]), gate_up, down, 0.0)
    assert torch.isfinite(found).all() and found[0] == 0


def test_an_expert_that_nobody_chose_is_never_touched() -> None:
    gate_up, down = weights_of(4, 16, 8)
    gate_up[2], down[2] = torch.nan, torch.nan
    chosen = torch.tensor([[0, 1], [3, 0], [1, 3]])
    assert torch.isfinite(experts(torch.randn(3, 16), chosen, torch.ones(3, 2), gate_up, down, 10.0, 8)).all()


def test_bits_do_not_depend_on_the_other_rows() -> None:
    gate_up, down = weights_of(8, 64, 32, 7)
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(200, 64, generator=generator)
    chosen = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(200)])
    weights = torch.rand(200, 3, generator=generator)
    whole = experts(x, chosen, weights, gate_up, down, 10.0, 8)
    for rows in ([0], [7, 3], list(range(11, 40)), list(range(199, -1, -1))):
        assert torch.equal(experts(x[rows], chosen[rows], weights[rows], gate_up, down, 10.0, 8), whole[rows])
    order = torch.tensor([2, 0, 1])  # how a router lists a token's experts does not matter
    assert torch.equal(experts(x, chosen[:, order], weights[:, order], gate_up, down, 10.0, 8), whole)


def test_strided_rows() -> None:
    gate_up, down = weights_of(4, 16, 8)
    wide = torch.full((10, 48), torch.nan)
    wide[:, 16:32] = torch.randn(10, 16, generator=torch.Generator().manual_seed(1))
    chosen, weights = torch.tensor([[0, 3]] * 10), torch.ones(10, 2)
    assert torch.equal(
        experts(wide[:, 16:32], chosen, weights, gate_up, down, 1.0),
        experts(wide[:, 16:32].contiguous(), chosen, weights, gate_up, down, 1.0),
    )


@pytest.mark.parametrize("weighs_input", [False, True])
@pytest.mark.parametrize("has_biases", [False, True])
def test_other_gates(weighs_input: bool, has_biases: bool) -> None:
    """A steeper sigmoid, a shifted `up`, biases, and weights that multiply what an expert reads."""
    gate_up, down = weights_of(5, 24, 16, 8)
    generator = torch.Generator().manual_seed(9)
    x, weights = torch.randn(12, 24, generator=generator), torch.rand(12, 2, generator=generator)
    chosen = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(12)])
    first, second = torch.randn(5, 32, generator=generator), torch.randn(5, 24, generator=generator)
    gating = Gating(1.702, 1.0, (first, second) if has_biases else None, weighs_input)
    found = experts(x, chosen, weights, gate_up, down, 0.8, 4, gating)
    expected = torch.zeros(12, 24, dtype=torch.float64)
    for row in range(12):
        for expert, weight in zip(chosen[row].tolist(), weights[row].double(), strict=True):
            inner = gate_up[expert].double() @ (x[row].double() * (weight if weighs_input else 1)) + first[expert] * has_biases
            gate, up = inner.chunk(2)
            gate, up = gate.clamp(max=0.8), up.clamp(-0.8, 0.8)
            out = down[expert].double() @ (gate * torch.sigmoid(1.702 * gate) * (up + 1)) + second[expert] * has_biases
            expected[row] += out * (1 if weighs_input else weight)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    one = experts(x[3:4], chosen[3:4], weights[3:4], gate_up, down, 0.8, 4, gating)
    assert torch.equal(one, experts(x[3:4], chosen[3:4], weights[3:4], gate_up, down, 0.8, 8, gating))
