"""Pieces of memory moved by one launch. `ref.py` is the definition.

move(source, target, pieces, word_bytes)    as `lamina.ops.move.move`
refuses(machine)                            why this machine is not served, or None
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.machine import Machine
from lamina.ops.move import PIECE_BYTES, WORDS, kernels


def refuses(machine: Machine) -> str | None:
    """Why this machine is not served, in one line, or None."""
    if triton.knobs.runtime.interpret or machine.device == "cuda":
        return None
    return f"runs on NVIDIA GPUs, not on {machine.device}"


def move(source: Tensor, target: Tensor, pieces: Tensor, word_bytes: int) -> None:
    """See `lamina.ops.move.move`; nothing is checked here."""
    num = pieces.shape[1]
    if num:
        word = WORDS[word_bytes]
        # the number of pieces changes with every step: it must not choose a kernel
        kernels.move[(num,)](source.view(word), target.view(word), pieces, num, WORD=word_bytes, SIZE=PIECE_BYTES // word_bytes)
