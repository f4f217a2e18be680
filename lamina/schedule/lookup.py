"""Guesses from a request's own tokens: what followed when the last few of them came before. O(1) a token; no tensors.

A table a length of n-gram, from a hash of its tokens to the position after its latest occurrence. A slot holds one position, and
what is found is compared token by token: where two n-grams meet in a slot the older one is forgotten, never mistaken.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: lengths of the n-grams that are looked for, the surest first
LENGTHS = (5, 3)
_FIRST_SLOTS = 1 << 10
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
#: from so many new tokens on their hashes are computed together
_TOGETHER = 64


class Lookup:
    """The n-grams of one request's tokens. The list may only grow between calls."""

    __slots__ = ("_bits", "_done", "_tables")

    def __init__(self) -> None:
        self._bits = _FIRST_SLOTS.bit_length() - 1
        self._tables: list[NDArray[np.int32]] = [np.zeros(1 << self._bits, np.int32) for _ in LENGTHS]
        self._done = 0  # n-grams that end before this token are known

    def guess(self, tokens: Sequence[int], most: int) -> tuple[int, tuple[int, ...]]:
        """(which of LENGTHS was found, guesses of the next `most` tokens), or (-1, ()).

        A guess that goes past the last token goes on with what was guessed: a text that repeats itself does so again.
        """
        self._learn(tokens)
        size = len(tokens)
        for level, length in enumerate(LENGTHS):
            if size <= length:
                continue
            position = int(self._tables[level][self._slot(tokens, size - 1, length)])
            if position and tokens[position - length : position] == tokens[size - length :]:
                found: list[int] = []
                for at in range(position, position + most):
                    found.append(tokens[at] if at < size else found[at - size])
                return level, tuple(found)
        return -1, ()

    def _learn(self, tokens: Sequence[int]) -> None:
        """Enters every n-gram that something follows."""
        stop = len(tokens) - 1
        if 2 * stop > 1 << self._bits:
            while 2 * stop > 1 << self._bits:
                self._bits += 1
            self._tables = [np.zeros(1 << self._bits, np.int32) for _ in LENGTHS]
            self._done = 0
        first = self._done
        if stop - first >= _TOGETHER:
            self._learn_many(tokens, first, stop)
        else:
            for end in range(first, stop):
                for table, length in zip(self._tables, LENGTHS, strict=True):
                    if end >= length - 1:
                        table[self._slot(tokens, end, length)] = end + 1
        self._done = max(first, stop)

    def _learn_many(self, tokens: Sequence[int], first: int, stop: int) -> None:
        start = max(0, first - max(LENGTHS) + 1)
        ids = np.array(tokens[start:stop], np.uint64)
        for table, length in zip(self._tables, LENGTHS, strict=True):
            if len(ids) < length:
                continue
            count = len(ids) - length + 1
            code = np.zeros(count, np.uint64)
            for at in range(length):
                code = code * np.uint64(_FACTOR) + ids[at : at + count] + np.uint64(1)
            slots = (code * np.uint64(_FACTOR)) >> np.uint64(64 - self._bits)
            ends = np.arange(start + length, stop + 1, dtype=np.int32)  # positions after the n-grams
            table[slots] = ends  # of equal slots the last is kept

    def _slot(self, tokens: Sequence[int], end: int, length: int) -> int:
        code = 0
        for token in tokens[end - length + 1 : end + 1]:
            code = (code * _FACTOR + token + 1) & _MASK
        return ((code * _FACTOR) & _MASK) >> (64 - self._bits)
