"""Routing against section 6.1: golden values, ties, and the two ways to choose."""

import math

import pytest
import torch

from lamina.ops.route import route, route_by_table, route_chosen


def test_golden_values() -> None:
    logits = torch.tensor([[1, -2, 0.5, 3, 0, -0.3]])
    bias = torch.tensor([0, 2, 0, -1.5, 0, 0.1])
    experts, weights = route(logits, bias, 2, 1.5)
    assert experts.tolist() == [[1, 0]] or experts.tolist() == [[0, 1]]
    by_expert = dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))
    assert by_expert[1] == pytest.approx(0.3557, abs=5e-5) and by_expert[0] == pytest.approx(1.1443, abs=5e-5)
    scores = [1.1460, 0.3563, 0.9870, 1.7460, 0.8326, 0.7446]
    _, weights = route_by_table(logits, torch.arange(6)[None], sum(scores))
    torch.testing.assert_close(weights, torch.tensor([scores]), rtol=0, atol=2e-4)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 1), (8, 2), (8, 8), (256, 6), (7, 3)])
def test_the_definition(experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(40, experts, generator=generator) * 4
    bias = torch.randn(experts, generator=generator)
    chosen, weights = route(logits, bias, top_k, 2.5)
    for row in range(40):
        scores = [math.sqrt(math.log1p(math.exp(x)) if x < 20 else x) for x in logits[row].tolist()]
        best = sorted(range(experts), key=lambda expert: -(scores[expert] + float(bias[expert])))[:top_k]
        assert sorted(chosen[row].tolist()) == sorted(best)
        total = sum(scores[expert] for expert in best)
        for expert, weight in zip(chosen[row].tolist(), weights[row].tolist(), strict=True):
            assert weight == pytest.approx(scores[expert] / total * 2.5, rel=2e-6)


def test_ties_go_to_the_lowest_expert() -> None:
    logits = torch.zeros(3, 32)
    logits[1, 20:] = 1
    logits[2, 5] = logits[2, 31] = 2
    chosen, weights = route(logits, torch.zeros(32), 3, 1.0)
    assert [sorted(row) for row in chosen.tolist()] == [[0, 1, 2], [20, 21, 22], [0, 5, 31]]
    torch.testing.assert_close(weights.sum(1), torch.ones(3))


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    chosen, weights = route(logits, torch.tensor([10.0, 0, 0, 0]), 2, 1.0)
    plain = dict(zip(*(column[0].tolist() for column in route_by_table(logits, torch.tensor([[0, 3]]), 1.0)), strict=True))
    assert dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True)) == plain


def test_a_table_is_obeyed_in_its_own_order() -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    table = torch.tensor([[7, 0], [0, 7], [3, 4], [1, 2], [6, 5]])
    chosen, weights = route_by_table(logits, table, 1.5)
    assert torch.equal(chosen, table)
    torch.testing.assert_close(weights.sum(1), torch.full((5,), 1.5))
    assert weights[0, 0] / weights[0, 1] == pytest.approx(
        math.sqrt(math.log1p(math.exp(float(logits[0, 7]))) / math.log1p(math.exp(float(logits[0, 0])))), rel=1e-5
    )


def test_extreme_logits_and_no_rows() -> None:
    _, weights = route(torch.tensor([[-80.0, -90.0, 500.0, 80.0]]), torch.zeros(4), 4, 1.0)
    assert torch.isfinite(weights).all() and weights.sum() == pytest.approx(1)
    _, weights = route(torch.full((1, 4), -40.0), torch.zeros(4), 2, 1.0)
    torch.testing.assert_close(weights, torch.full((1, 2), 0.5))
    chosen, weights = route(torch.zeros(0, 4), torch.zeros(4), 2, 1.0)
    assert chosen.shape == weights.shape == (0, 2)


def test_bits_do_not_depend_on_the_number_of_rows() -> None:
    logits = torch.randn(301, 37, generator=torch.Generator().manual_seed(2)) * 5
    bias = torch.randn(37, generator=torch.Generator().manual_seed(3))
    chosen, weights = route(logits, bias, 4, 1.5)
    for start, stop in ((0, 1), (7, 8), (3, 20), (100, 301)):
        part = route(logits[start:stop].clone(), bias, 4, 1.5)
        assert torch.equal(part[0], chosen[start:stop]) and torch.equal(part[1], weights[start:stop])


def test_the_best_logits_are_weighed_alone_or_together() -> None:
    """Sigmoids so large that they are all 1 do not choose."""
    logits = torch.tensor([[30.0, -1.0, 40.0, 35.0], [0.5, 0.5, -2.0, 0.5]])
    chosen, weights = route_chosen(logits, 2, True)
    assert chosen.tolist() == [[2, 3], [0, 1]]
    torch.testing.assert_close(weights, torch.sigmoid(logits.gather(1, chosen)))
    same, shares = route_chosen(logits, 2)
    assert torch.equal(same, chosen)
    torch.testing.assert_close(shares, torch.softmax(logits.gather(1, chosen), dim=1))
