"""Norms and rotary embedding against complex numbers in fp64 and the golden frequencies of section 2.3."""

import math

import pytest
import torch
from torch import Tensor

from lamina.ops.rope_norm import (
    Yarn,
    entry_norm_rope,
    inverse_frequencies,
    query_norm_rope,
    rms_norm,
    rope_tables,
    rotate,
    unrotate,
)

SHIPPED = Yarn(factor=16.0, original_positions=65536, beta_fast=32.0, beta_slow=1.0)
EPS = 1e-6


def turned(x: Tensor, positions: Tensor, frequencies: Tensor, sign: int = 1) -> Tensor:
    """x [N, ..., D] with its last dims as complex numbers times e^(i * position * frequency), in fp64."""
    tail = 2 * frequencies.shape[0]
    out = x.double().clone()
    pairs = torch.view_as_complex(out[..., -tail:].unflatten(-1, (-1, 2)).contiguous())
    angle = positions.double()[:, None] * frequencies.double()
    angle = angle.reshape(angle.shape[0], *([1] * (x.dim() - 2)), angle.shape[1])
    out[..., -tail:] = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), sign * angle)).flatten(-2)
    return out


def test_golden_frequencies() -> None:
    found = inverse_frequencies(64, 160_000.0, SHIPPED)
    golden = {
        0: 1.0,
        1: 6.876560e-1,
        15: 3.635539e-3,
        16: 2.265625e-3,
        20: 2.969778e-4,
        24: 1.953125e-5,
        25: 5.372312e-6,
        31: 5.680529e-7,
    }
    for pair, value in golden.items():
        assert float(found[pair]) == pytest.approx(value, rel=1e-6)
    plain = inverse_frequencies(64, 10_000.0)
    for pair in range(32):
        assert float(plain[pair]) == pytest.approx(10_000.0 ** (-pair / 32), rel=1e-6)


@pytest.mark.parametrize("dim", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("original", [1, 64, 4096, 65536, 10**9])
def test_the_ramp_by_the_letter(dim: int, original: int) -> None:
    found = inverse_frequencies(dim, 160_000.0, Yarn(16.0, original, 32.0, 1.0))

    def pair(turns: float) -> float:
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(160_000.0))

    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), dim - 1)
    for p in range(dim // 2):
        plain = 160_000.0 ** (-2 * p / dim)
        share = min(max((p - low) / max(high - low, 0.001), 0), 1)
        assert float(found[p]) == pytest.approx(plain * (1 - share) + plain / 16 * share, rel=2e-6)


@pytest.mark.parametrize("dim", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("original", [1, 64, 4096, 65536])
def test_the_ramp_is_between_plain_and_stretched(dim: int, original: int) -> None:
    plain, found = inverse_frequencies(dim, 160_000.0), inverse_frequencies(dim, 160_000.0, Yarn(16.0, original, 32.0, 1.0))
    ratio = plain / found
    assert ((ratio >= 1 - 1e-6) & (ratio <= 16 + 1e-4)).all() and (ratio.diff() >= -1e-5).all()


def test_pairs_are_neighbours_and_turn_forward() -> None:
    cos, sin = rope_tables(torch.tensor([0, 1]), torch.tensor([torch.pi / 2, 0.0]))
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).expand(2, 4)
    torch.testing.assert_close(rotate(x, cos, sin), torch.tensor([[1.0, 2, 3, 4], [-2, 1, 3, 4]]))


@pytest.mark.parametrize(("heads", "dim", "rope"), [(1, 8, 8), (4, 32, 8), (3, 48, 16), (2, 512, 64)])
def test_queries(heads: int, dim: int, rope: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    positions = torch.tensor([0, 1, 3, 127, 128, 300, 4095, 17])
    frequencies = inverse_frequencies(rope, 10_000.0)
    tables = rope_tables(positions, frequencies)
    q = torch.randn(8, heads, dim, generator=generator) * 5
    normed = q.double() / (q.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    found = query_norm_rope(q.clone(), *tables, EPS)
    torch.testing.assert_close(
        found.double(), turned(normed, positions, frequencies), rtol=1e-5, atol=2e-3 if rope == 64 else 5e-4
    )
    near = positions <= 300  # fp32 angles: the error grows with the position
    torch.testing.assert_close(found[near].double(), turned(normed, positions, frequencies)[near], rtol=1e-5, atol=5e-5)
    o = torch.randn(8, heads, dim, generator=generator)
    torch.testing.assert_close(
        unrotate(o.clone(), *tables)[near].double(), turned(o, positions, frequencies, -1)[near], rtol=1e-5, atol=5e-5
    )
    torch.testing.assert_close(unrotate(query_norm_rope(q.clone(), *tables, EPS), *tables).double(), normed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dim", "rope"), [(8, 8), (32, 8), (512, 64)])
def test_entries(dim: int, rope: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    positions = torch.tensor([0, 4, 128, 256, 300])
    frequencies = inverse_frequencies(rope, 160_000.0, SHIPPED)
    x, weight = torch.randn(5, dim, generator=generator), 1 + 0.2 * torch.randn(dim, generator=generator)
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    found = entry_norm_rope(x.clone(), weight, *rope_tables(positions, frequencies), EPS)
    torch.testing.assert_close(found.double(), turned(normed, positions, frequencies), rtol=1e-5, atol=5e-5)


def test_norms_of_hostile_rows() -> None:
    x = torch.tensor([[0.0] * 8, [1e-12] * 8, [1e18] * 8, [1.0, -2, 3, -4, 5, -6, 7, -8]])
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(rms_norm(x.clone(), None, EPS).double(), expected, rtol=1e-6, atol=0)
    weight = torch.arange(8.0)
    torch.testing.assert_close(rms_norm(x.clone(), weight, EPS).double(), expected * weight.double(), rtol=1e-6, atol=0)
    strided = torch.randn(4, 24)[:, 8:16]
    torch.testing.assert_close(rms_norm(strided, weight, EPS), rms_norm(strided.contiguous(), weight, EPS), rtol=0, atol=0)


def test_inputs_of_norms_are_left_alone() -> None:
    x, q = torch.randn(8, 16), torch.randn(8, 2, 16)
    tables = rope_tables(torch.arange(8), inverse_frequencies(8, 1e4))
    before = x.clone(), q.clone()
    rms_norm(x, torch.ones(16), EPS)
    entry_norm_rope(x, torch.ones(16), *tables, EPS)
    query_norm_rope(q, *tables, EPS)
    assert torch.equal(x, before[0]) and torch.equal(q, before[1])


def test_bits_do_not_depend_on_the_number_of_rows() -> None:
    positions = torch.arange(301)
    frequencies = inverse_frequencies(16, 1e4)
    q, x = torch.randn(301, 3, 40), torch.randn(301, 40)
    weight = torch.randn(40)
    cos, sin = rope_tables(positions, frequencies)
    queries, entries = query_norm_rope(q, cos, sin, EPS), entry_norm_rope(x, weight, cos, sin, EPS)
    for start, stop in ((0, 1), (7, 9), (100, 117), (3, 301)):
        tables = rope_tables(positions[start:stop], frequencies)
        assert torch.equal(tables[0], cos[start:stop]) and torch.equal(tables[1], sin[start:stop])
        assert torch.equal(query_norm_rope(q[start:stop].clone(), *tables, EPS), queries[start:stop])
        assert torch.equal(entry_norm_rope(x[start:stop].clone(), weight, *tables, EPS), entries[start:stop])
