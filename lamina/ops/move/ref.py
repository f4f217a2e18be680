"""The definition, in plain PyTorch: one slice after another."""

from torch import Tensor


def move(source: Tensor, target: Tensor, pieces: Tensor) -> None:
    """See `lamina.ops.move.move`."""
    for first, to, count in pieces.t().tolist():
        target[to : to + count] = source[first : first + count]
