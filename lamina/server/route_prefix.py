"""Which instance has seen the beginning of a prompt: a chain of hashes over the request's own text, remembered by instance.

Nothing is tokenised: two requests whose prompts begin alike have bodies whose prompts do. A chat's next turn begins with all
messages of the one before, so its chain begins with that one's.
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

_PIECE_BYTES = 128
_MOST_PIECES = 8192
_MOST_KEPT = 200_000
_ENCODER = msgspec.json.Encoder(order="deterministic")
#: what a prompt is made of, in the order in which it stands there
_FIELDS = ("cache_salt", "tools", "system", "instructions", "messages", "input", "prompt")

T = TypeVar("T", bound=Hashable)


def prefix_chain(body: bytes) -> list[bytes]:
    """The keys of a request's beginnings, each over all before it; [] for what has no prompt."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    if not any(name in fields for name in ("messages", "input", "prompt")):
        return []
    data = b"\0".join(_bytes(fields[name]) for name in _FIELDS if name in fields)
    found, key = [], b""
    for at in range(0, min(len(data), _PIECE_BYTES * _MOST_PIECES), _PIECE_BYTES):
        key = hashlib.blake2b(data[at : at + _PIECE_BYTES], digest_size=8, key=key).digest()
        found.append(key)
    return found


def _bytes(raw: msgspec.Raw) -> bytes:
    """A field so that what begins alike has bytes that do: without the signs that close a list or a text."""
    try:
        value: object = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return bytes(raw)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, list):
        if value and all(type(one) is int and 0 <= one < 1 << 32 for one in value):
            return struct.pack(f"<{len(value)}I", *value)
        return b"".join(_ENCODER.encode(one) for one in value)
    return _ENCODER.encode(value)


class Affinity(Generic[T]):
    """Beginnings that each of several instances has seen, the latest ones."""

    def __init__(self) -> None:
        self._seen: dict[T, OrderedDict[bytes, None]] = {}

    def known(self, who: T, chain: Sequence[bytes]) -> int:
        """How many pieces of a beginning an instance has seen."""
        seen = self._seen.get(who)
        if seen is None:
            return 0
        return next((number for number, key in enumerate(chain) if key not in seen), len(chain))

    def note(self, who: T, chain: Iterable[bytes]) -> None:
        """An instance sees it now."""
        seen = self._seen.setdefault(who, OrderedDict())
        for key in chain:
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > _MOST_KEPT:
            seen.popitem(last=False)

    def forget(self, who: T) -> None:
        """It has gone, and all that it had with it."""
        self._seen.pop(who, None)
