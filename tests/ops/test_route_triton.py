"""Routing of `triton.py` against `ref.py`: on a GPU if there is one, else in Triton's interpreter."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_tests import DEVICE, INTERPRETED, compiles_kernels, long_but, machine_code, runs_kernels, starts_interpreter
from torch import Tensor

from lamina.ops.machine import Machine
from lamina.ops.route import RouteCase, kernels, route_by_table
from lamina.ops.route import route as definition
from lamina.ops.route.softmax import route_sigmoid, route_softmax
from lamina.ops.route.triton import refuses, route, route_plain
from lamina.ops.rows import Rows, rows_of
from lamina.ops.sequences import Piece


def rows(num_tokens: int, padding: int = 0) -> Rows:
    """One request's rows, then padding."""
    pieces = (Piece(0, num_tokens, 0, 0),) if num_tokens else ()
    tables = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    return rows_of(pieces, ((0,),) * len(pieces), tables, num_tokens + padding, 1)


def learned(logits: Tensor, bias: Tensor, top_k: int, scale: float, padding: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(logits.shape[0], dtype=torch.int32, device=DEVICE)
    given = rows(logits.shape[0] - padding, padding)
    return route(logits.to(DEVICE), bias.to(DEVICE), None, tokens, top_k, scale, given)


@runs_kernels
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 1), (8, 2), (8, 8), (256, 6), (7, 3), (384, 6)])
def test_the_definition(experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(12 if DEVICE == "cpu" else 2000, experts, generator=generator) * 4
    bias = torch.randn(experts, generator=generator)
    chosen, weights = learned(logits, bias, top_k, 2.5)
    expected, shares = definition(logits, bias, top_k, 2.5)
    assert chosen.dtype == torch.int32
    # scores within an ulp or two of each other may change places
    differs = (chosen.cpu() != expected).any(1)
    scores = torch.nn.functional.softplus(logits.double(), threshold=1e9).sqrt() + bias.double()
    same = scores.gather(1, chosen.cpu().long()) - scores.gather(1, expected)
    assert int(differs.sum()) <= logits.shape[0] // 500 and float(same.abs().max()) < 1e-6
    torch.testing.assert_close(weights.cpu()[~differs], shares[~differs], rtol=2e-6, atol=0)


@runs_kernels
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("experts", "groups", "kept", "top_k"), [(8, 4, 2, 3), (160, 8, 3, 6), (12, 2, 2, 4)])
def test_groups(kind: str, experts: int, groups: int, kept: int, top_k: int) -> None:
    """Groups of any size; ties, of which the first group wins."""
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(12 if DEVICE == "cpu" else 500, experts, generator=generator)
    logits[0] = 0.5
    bias = torch.randn(experts, generator=generator) if kind == "sigmoid" else None
    moved = None if bias is None else bias.to(DEVICE)
    chosen, weights = route_plain(logits.to(DEVICE), moved, kind, top_k, True, 2.5, rows(logits.shape[0]), groups, kept)
    if kind == "sigmoid":
        expected, shares = route_sigmoid(logits, bias, top_k, True, 2.5, groups, kept)
    else:
        expected, shares = route_softmax(logits, top_k, True, 2.5, groups, kept)
    differs = (chosen.cpu() != expected).any(1)
    assert int(differs.sum()) <= logits.shape[0] // 250  # sums within an ulp or two of each other
    torch.testing.assert_close(weights.cpu()[~differs], shares[~differs], rtol=2e-6, atol=0)


@runs_kernels
def test_ties_go_to_the_lowest_expert() -> None:
    logits = torch.zeros(4, 32)
    logits[1, 20:] = 1
    logits[2, 5] = logits[2, 31] = 2
    bias = torch.zeros(32)
    chosen, weights = learned(logits, bias, 3, 1.0)
    assert chosen.tolist() == [[0, 1, 2], [20, 21, 22], [5, 31, 0], [0, 1, 2]]
    torch.testing.assert_close(weights.sum(1).cpu(), torch.ones(4))
    low = torch.full((1, 8), -200.0)  # scores of 0 and biases of either sign of it
    assert learned(low, torch.tensor([-0.0, 0, -0.0, 0, 0, 0, 0, 0]), 4, 1.0)[0].tolist() == [[0, 1, 2, 3]]


@runs_kernels
def test_hostile_logits() -> None:
    """Orders of infinities and NaN as in a stable sort, and small scores that keep their ratios."""
    logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    logits[0, 3], logits[1, 4], logits[2, 5:7], logits[3] = torch.inf, -torch.inf, torch.nan, torch.nan
    logits[4, 2], logits[4, 9] = -torch.nan, torch.inf
    bias = torch.randn(16, generator=torch.Generator().manual_seed(1))
    bias[7] = -torch.inf
    chosen, _ = learned(logits, bias, 4, 1.0)
    assert torch.equal(chosen.cpu().long(), definition(logits, bias, 4, 1.0)[0])
    small = torch.tensor([[-80.0, -78, -500, -84], [-20.5, -19.5, -20, -40], [-80.0, -90, 500, 80]])
    chosen, weights = learned(small, torch.zeros(4), 2, 1.0)
    expected, shares = definition(small.double(), torch.zeros(4).double(), 2, 1.0)
    assert torch.equal(chosen.cpu().long(), expected)
    torch.testing.assert_close(weights.cpu().double(), shares, rtol=1e-6, atol=0)


@runs_kernels
def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    chosen, weights = learned(logits, torch.tensor([10.0, 0, 0, 0]), 2, 1.0)
    assert chosen.tolist() == [[0, 3]]
    torch.testing.assert_close(weights.cpu(), route_by_table(logits, torch.tensor([[0, 3]]), 1.0)[1])


@runs_kernels
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_a_table_is_obeyed_in_its_own_order(kind: torch.dtype) -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))
    table = torch.tensor([[7, 0, 8], [0, 7, 1], [3, 4, 5], [1, 2, 3], [6, 5, 4], [8, 7, 6]])
    tokens = torch.tensor([5, 0, 0, 3, 2])
    chosen, weights = route(logits.to(DEVICE), None, table.to(DEVICE, kind), tokens.to(DEVICE, kind), 3, 1.5, rows(5))
    expected, shares = route_by_table(logits, table[tokens], 1.5)
    assert torch.equal(chosen.cpu().long(), expected)
    torch.testing.assert_close(weights.cpu(), shares, rtol=2e-6, atol=0)


@runs_kernels
def test_padding_is_nobodys() -> None:
    logits = torch.randn(7, 8, generator=torch.Generator().manual_seed(3))
    logits[4:] = torch.nan
    chosen, weights = learned(logits, torch.zeros(8), 3, 1.5, padding=3)
    assert (chosen[4:] == -1).all() and (weights[4:] == 0).all() and (chosen[:4] >= 0).all()
    table = torch.zeros(1, 3, dtype=torch.int32, device=DEVICE)
    tokens = torch.zeros(7, dtype=torch.int32, device=DEVICE)
    chosen, weights = route(logits.to(DEVICE), None, table, tokens, 3, 1.5, rows(4, 3))
    assert (chosen[4:] == -1).all() and (weights[4:] == 0).all() and (chosen[:4] == 0).all()
    assert learned(logits[:0], torch.zeros(8), 3, 1.5)[0].shape == (0, 3)


@runs_kernels
def test_bits_do_not_depend_on_the_number_of_rows() -> None:
    logits = torch.randn(24, 37, generator=torch.Generator().manual_seed(2)) * 5
    bias = torch.randn(37, generator=torch.Generator().manual_seed(3))
    chosen, weights = learned(logits, bias, 4, 1.5)
    for start, stop in ((0, 1), (7, 8), (3, 20)):
        part = learned(logits[start:stop].clone(), bias, 4, 1.5)
        assert torch.equal(part[0], chosen[start:stop]) and torch.equal(part[1], weights[start:stop])


def test_refusals() -> None:
    good, machine = RouteCase(256, 6), Machine("cuda", (9, 0), True)
    assert refuses(machine, good) is None
    if not INTERPRETED:
        assert refuses(Machine("cpu", (0, 0), True), good) == "runs on NVIDIA GPUs, not on cpu"
    assert refuses(machine, replace(good, experts=2000)) == "the number of experts must be 1 to 1024, not 2000"
    assert refuses(machine, replace(good, experts=4)) == "the experts of a token must be 1 to 4, not 6"


@compiles_kernels
@pytest.mark.parametrize(("capability", "has_table"), long_but({2, 3}, [(80, False), (80, True), (90, False), (90, True)]))
def test_compiled_ahead_of_time(capability: int, has_table: bool) -> None:
    """No register is spilled, and nothing goes through shared memory: a program is a warp."""
    types = dict.fromkeys(("logits", "bias", "weights"), "*fp32") | dict.fromkeys(("table", "tokens", "owners", "chosen"), "*i32")
    shape = {"EXPERTS": 256, "SIZE": 256, "TOP_K": 6, "PLACES": 8, "HAS_TABLE": has_table, "bias" if has_table else "table": None}
    code = machine_code(kernels.route, types | {"scale": "fp32"}, shape, capability, warps=1)
    assert code.spills == 0 and code.shared_bytes == 0
    assert has_table or code.count("REDUX") == 12


@starts_interpreter
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
