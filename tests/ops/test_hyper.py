"""Hyper-connections against sections 5.2 to 5.5 of the reference: golden values, loops in fp64, bits."""

import math

import pytest
import torch
from torch import Tensor

from lamina.ops.hyper import Mixer, hyper_head, hyper_post, hyper_pre

EPS = 1e-6


def random_mixer(streams: int, width: int, rows: int, iterations: int = 20, seed: int = 0) -> Mixer:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    scales = 1 + 0.2 * normal(3 if rows > streams else 1)
    parts = torch.tensor([streams, streams, streams * streams] if rows > streams else [streams])
    return Mixer(
        normal(rows, streams * width) * (streams * width) ** -0.5,
        normal(rows),
        scales.repeat_interleave(parts),
        iterations,
        EPS,
        EPS,
    )


def normed_products(streams: Tensor, mixer: Mixer) -> Tensor:
    flat = streams.double().flatten(1)  # stream-major
    return (
        flat @ mixer.fn.double().T / (flat.square().mean(1, keepdim=True) + EPS).sqrt() * mixer.scale.double()
        + mixer.base.double()
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def define_pre(streams: Tensor, mixer: Mixer) -> tuple[Tensor, Tensor, Tensor]:
    """One token, one stream, one number at a time."""
    num_tokens, num, width = streams.shape
    collapsed = torch.zeros(num_tokens, width, dtype=torch.float64)
    post = torch.zeros(num_tokens, num, dtype=torch.float64)
    comb = torch.zeros(num_tokens, num, num, dtype=torch.float64)
    for t, m in enumerate(normed_products(streams, mixer).tolist()):
        for j in range(num):
            collapsed[t] += (sigmoid(m[j]) + EPS) * streams[t, j].double()
            post[t, j] = 2 * sigmoid(m[num + j])
            row = m[2 * num + num * j : 2 * num + num * (j + 1)]
            total = sum(math.exp(x - max(row)) for x in row)
            comb[t, j] = torch.tensor([math.exp(x - max(row)) / total + EPS for x in row])
        comb[t] /= comb[t].sum(0, keepdim=True) + EPS
        for _ in range(mixer.iterations - 1):
            comb[t] /= comb[t].sum(1, keepdim=True) + EPS
            comb[t] /= comb[t].sum(0, keepdim=True) + EPS
    return collapsed, post, comb


def test_golden_values() -> None:
    """Section 5.5: fn = 0, scale 1."""
    comb = [[0, 1, 2, 3], [3, 0, 0, 1], [-1, 2, 0, 0], [0, 0, 0, 4]]
    base = torch.tensor([0.1, 0.2, -0.3, 1, 0.5, -1, 0, 2, *(x for row in comb for x in row)])
    mixer = Mixer(torch.zeros(24, 16), base, torch.ones(24), 20, EPS, EPS)
    streams = torch.eye(4).expand(8, 4, 4).contiguous()  # stream j is the unit vector j, so the collapsed one shows pre
    collapsed, post, found = hyper_pre(streams, mixer)
    close = {"rtol": 0, "atol": 1.1e-6}
    torch.testing.assert_close(collapsed[0], torch.tensor([0.524980, 0.549835, 0.425558, 0.731060]), **close)
    torch.testing.assert_close(post[0], torch.tensor([1.244919, 0.537883, 1.0, 1.761594]), **close)
    golden = torch.tensor(
        [
            [0.046158, 0.129828, 0.623702, 0.200301],
            [0.853408, 0.043967, 0.077704, 0.024954],
            [0.036574, 0.760124, 0.181809, 0.021480],
            [0.063859, 0.066079, 0.116784, 0.753265],
        ]
    )
    torch.testing.assert_close(found[0], golden, **close)
    torch.testing.assert_close(found[0].sum(1), torch.tensor([0.999989, 1.000032, 0.999987, 0.999987]), rtol=0, atol=2e-6)
    torch.testing.assert_close(found[0].sum(0), torch.full((4,), 0.999999), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("streams", "width"), [(1, 8), (2, 12), (3, 40), (4, 64), (5, 20)])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_the_definition(streams: int, width: int, iterations: int) -> None:
    mixer = random_mixer(streams, width, streams * (2 + streams), iterations)
    x = torch.randn(16, streams, width, generator=torch.Generator().manual_seed(1)) * 3
    for found, expected in zip(hyper_pre(x, mixer), define_pre(x, mixer), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_streams_are_summed_over_the_first_index() -> None:
    """New stream k takes comb[j, k] of stream j: a matrix with one entry tells which way round."""
    x = torch.randn(8, 4, 6)
    comb, post = torch.zeros(8, 4, 4), torch.zeros(8, 4)
    comb[:, 1, 3] = 2.0
    post[:, 2] = 5.0
    output = torch.randn(8, 6)
    found = hyper_post(x.clone(), output, post, comb)
    assert torch.equal(found[:, 3], 2 * x[:, 1]) and torch.equal(found[:, 2], 5 * output)
    assert not found[:, :2].any()


@pytest.mark.parametrize(("streams", "width"), [(1, 8), (3, 40), (4, 64)])
def test_mixing_back(streams: int, width: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x, output = torch.randn(8, streams, width, generator=generator), torch.randn(8, width, generator=generator)
    post, comb = torch.randn(8, streams, generator=generator), torch.randn(8, streams, streams, generator=generator)
    expected = torch.zeros(8, streams, width, dtype=torch.float64)
    for k in range(streams):
        expected[:, k] = post[:, k, None].double() * output.double()
        for j in range(streams):
            expected[:, k] += comb[:, j, k, None].double() * x[:, j].double()
    torch.testing.assert_close(hyper_post(x.clone(), output, post, comb).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("streams", "width"), [(1, 8), (3, 40), (4, 64)])
def test_the_head(streams: int, width: int) -> None:
    mixer = random_mixer(streams, width, streams)
    x = torch.randn(8, streams, width, generator=torch.Generator().manual_seed(3))
    weights = torch.tensor([[sigmoid(m) + EPS for m in row] for row in normed_products(x, mixer).tolist()], dtype=torch.float64)
    expected = (weights[..., None] * x.double()).sum(1)
    torch.testing.assert_close(hyper_head(x, mixer).double(), expected, rtol=1e-5, atol=1e-5)


def test_hostile_streams() -> None:
    """Zeros, huge and tiny values: everything stays finite and the mixture stays balanced."""
    mixer = random_mixer(4, 16, 24)
    x = torch.cat([torch.zeros(2, 4, 16), torch.full((3, 4, 16), 1e15), torch.full((3, 4, 16), 1e-20)])
    collapsed, post, comb = hyper_pre(x, mixer)
    assert all(torch.isfinite(found).all() for found in (collapsed, post, comb))
    torch.testing.assert_close(comb.sum(1), torch.ones(8, 4), rtol=0, atol=1e-4)
    steep = Mixer(mixer.fn * 1e4, mixer.base, mixer.scale, 20, EPS, EPS)
    assert all(torch.isfinite(found).all() for found in hyper_pre(torch.randn(8, 4, 16), steep))


@pytest.mark.parametrize(("streams", "width"), [(4, 64), (4, 256), (3, 40), (2, 100)])
def test_bits_do_not_depend_on_the_number_of_rows(streams: int, width: int) -> None:
    pre, head = random_mixer(streams, width, streams * (2 + streams)), random_mixer(streams, width, streams)
    x = torch.randn(304, streams, width, generator=torch.Generator().manual_seed(4))
    output = torch.randn(304, width, generator=torch.Generator().manual_seed(5))
    whole = hyper_pre(x, pre)
    wholes = (*whole, hyper_post(x.clone(), output, *whole[1:]), hyper_head(x, head))
    for start, stop in ((0, 8), (8, 16), (24, 88), (1, 9), (0, 296)):
        part = x[start:stop].clone()
        found = hyper_pre(part, pre)
        for one, all_rows in zip(
            (*found, hyper_post(part.clone(), output[start:stop], *found[1:]), hyper_head(part, head)), wholes, strict=True
        ):
            assert torch.equal(one, all_rows[start:stop])
