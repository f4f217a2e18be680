"""Torch's own activations are used where their bits depend neither on the number of rows nor on threads."""

import pytest
import torch

from lamina.layers.heads import activated


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("width", [32, 96, 768, 100])
def test_activations_do_not_depend_on_rows_and_threads(activation: str, width: int) -> None:
    both = torch.randn(301, 2 * width, generator=torch.Generator().manual_seed(width))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(activated(both[:, :width], activation))
            for first, rows in ((0, 1), (5, 1), (7, 3), (100, 64), (3, 298)):
                part = activated(both[first : first + rows].clone()[:, :width], activation)
                assert torch.equal(part, found[-1][first : first + rows])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
