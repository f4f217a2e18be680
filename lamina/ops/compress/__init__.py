"""Compression of groups of tokens into log entries.

compress(compressor, values, gates, sequences)
    Folds the step's tokens into the running softmax of their groups, token by token from left to right; where a group
    closes: norm, rotation at the position of the group's first token, encode, append to the log.
Folding, CompressCase
    What `triton.py` (which needs Triton) works with, and the shapes that it serves or refuses.
"""

from dataclasses import dataclass

from torch import Tensor

from lamina.ops.compress.ref import Compressor, compress, fold
from lamina.ops.store import Store

__all__ = ["CompressCase", "Compressor", "Folding", "compress", "fold"]


@dataclass(frozen=True, slots=True)
class Folding:
    """What compresses one memory of one layer: a `Compressor` that adds the position bias itself and is given its rotations.

    ape [ratio, c * d] fp32 bias of the gates; c = 2 with overlap.   norm [d] fp32.
    open, next       fp32 fold states in the slot (next only with overlap).   log  where entries go.
    """

    ratio: int
    ape: Tensor
    norm: Tensor
    eps: float
    open: Store
    next: Store | None
    log: Store


@dataclass(frozen=True, slots=True)
class CompressCase:
    """width  of an entry, its last `rope` dims turned."""

    width: int
    rope: int
