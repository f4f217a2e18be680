"""What the scheduler knows of a grammar: which tokens may come next, and what it must be told. No tensors, no library."""

from collections.abc import Collection
from typing import Protocol

import numpy as np


class GrammarState(Protocol):
    """Where one output is in its grammar. It belongs to the request and stays valid while that waits or is preempted."""

    @property
    def banned(self) -> tuple[int, ...]:
        """Ids that cannot come next beside what the mask says: ends of text, while the grammar has not begun."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether nothing but an end can come."""
        ...

    def mask(self) -> bytes | None:
        """Tokens that may come next: a bit per id in little-endian int32 words, lowest bit first; None: all may."""
        ...

    def accept(self, token: int) -> bool:
        """Goes on by a token that was drawn. False if the grammar does not allow it; nothing may come then."""
        ...


def mask_of(token: int, vocab_size: int) -> bytes:
    """The mask that allows this token alone."""
    words = bytearray(-(-vocab_size // 32) * 4)
    words[token >> 3] = 1 << (token & 7)
    return bytes(words)


def allows_any(mask: bytes, banned: Collection[int] = ()) -> bool:
    """Whether any token of a mask may come that is not banned."""
    words = np.frombuffer(mask, np.uint8)
    if banned:
        words = words.copy()
        for token in banned:
            words[token >> 3] &= 0xFF ^ (1 << (token & 7))
    return bool(words.any())
