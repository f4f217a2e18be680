"""Token ids as the index sees them: checked once, encoded once, each block's key computed at most once."""

import hashlib
import json
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from lamina.base.errors import ConfigError

TOKEN_BYTES = 4
KEY_BYTES = 16
_ALLOWED = "token ids, whole numbers from 0 to 2147483647"
_FEW = 64


def checked_ids(tokens: Sequence[int], name: str = "tokens") -> "array[int]":
    """The token ids as int32. Raises ConfigError naming `name` for anything but whole numbers in [0, 2**31)."""
    try:
        ids = array("i", tokens if isinstance(tokens, array | list | tuple) else list(tokens))
    except (OverflowError, TypeError) as error:
        raise ConfigError(name, type(tokens).__name__, _ALLOWED) from error
    lowest = min(ids, default=0) if len(ids) < _FEW else int(np.frombuffer(ids, np.int32).min())
    if lowest < 0:
        raise ConfigError(name, lowest, _ALLOWED)
    return ids


def encode(ids: "array[int]") -> bytes:
    """Checked token ids as little-endian int32."""
    assert ids.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids.tobytes()


def block_key(parent: bytes, block: bytes) -> bytes:
    """The 128-bit key of a block below `parent`."""
    return hashlib.blake2b(block, digest_size=KEY_BYTES, key=parent).digest()


@lru_cache(maxsize=256)
def root_key(model_id: str, layout_id: str, salt: str) -> bytes:
    """The key that a chain of blocks starts from: whoever differs in one of these shares nothing."""
    return hashlib.blake2b(json.dumps([model_id, layout_id, salt]).encode(), digest_size=KEY_BYTES).digest()


class Prompt:
    """Checked token ids of one request, with what lookups need; made by `Ledger.prompt`, good for any number of admissions.

    ids  the tokens.   data  the same, encoded.   salt  the request's cache_salt.
    """

    __slots__ = ("_keys", "_size", "data", "ids", "salt")

    def __init__(self, tokens: Sequence[int], salt: str, root: bytes, block_tokens: int) -> None:
        self.ids = checked_ids(tokens)
        self.data = encode(self.ids)
        self.salt = salt
        self._keys = [root]
        self._size = block_tokens * TOKEN_BYTES

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_blocks(self) -> int:
        """Full blocks."""
        return len(self.data) // self._size

    def block(self, number: int) -> bytes:
        """The encoded tokens of a block; of the open one, what there is."""
        return self.data[number * self._size : (number + 1) * self._size]

    def key(self, depth: int) -> bytes:
        """The key of the node at `depth`: block number depth - 1."""
        keys = self._keys
        while len(keys) <= depth:
            keys.append(block_key(keys[-1], self.block(len(keys) - 1)))
        return keys[depth]
