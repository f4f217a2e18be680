"""Copying many pieces of memory at once, between places that the host lists. `ref.py` is the definition."""

import torch
from torch import Tensor

from lamina.ops.move import ref

__all__ = ["PIECE_BYTES", "WORDS", "move", "word_of"]

#: the most bytes of one piece
PIECE_BYTES = 16_384
#: what is moved at a time, by its bytes
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def word_of(divisor: int) -> int:
    """The largest word that divides every place and length, given a number that has all of their lowest bits (their `or`)."""
    return next(size for size in WORDS if divisor % size == 0)


def move(source: Tensor, target: Tensor, pieces: Tensor, word_bytes: int) -> None:
    """Copies pieces of `source` to `target`, in no order: what is written must not be read, nor written twice.

    source, target  uint8 [bytes], contiguous; the same tensor or two. More than 4 GiB each are fine.
    pieces          int64 [3, N] on their device: first byte in source, first byte in target, bytes (0 to PIECE_BYTES).
    word_bytes      8, 4, 2 or 1; divides all of these numbers.
    Raises          ValueError if shapes or types differ from the above. Numbers outside the tensors are the caller's fault.
    """
    if pieces.dim() != 2 or pieces.shape[0] != 3 or pieces.dtype != torch.int64:
        raise ValueError(f"pieces={tuple(pieces.shape)} {pieces.dtype}: [3, N] torch.int64 is needed")
    if word_bytes not in WORDS:
        raise ValueError(f"word_bytes={word_bytes}: one of {', '.join(map(str, WORDS))} is needed")
    for name, memory in (("source", source), ("target", target)):
        if memory.dim() != 1 or memory.dtype != torch.uint8:
            raise ValueError(f"{name}={tuple(memory.shape)} {memory.dtype}: [bytes] torch.uint8 is needed")
    ref.move(source, target, pieces)
