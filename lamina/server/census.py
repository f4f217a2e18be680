"""How much is in a JSON text, counted while it comes and before anything is made of it.

A decoder holds the interpreter until it is done, so what one body may cost must be known before: lists, objects and names
cost most, texts less, numbers least. A body's bytes alone say little of it: `{},` and a long text differ by a factor of fifty.
"""

from lamina.server.errors import ApiError
from lamina.server.limits import MAX_CONTAINERS, MAX_NAMES, MAX_TEXTS, MAX_VALUES

_PIECE_BYTES = 256 * 1024


class Census:
    """Counts what comes, piece by piece. Exact for valid JSON, whatever its texts hold."""

    def __init__(self) -> None:
        self._is_in_text = False
        self._rest = b""
        self._quotes = self._containers = self._commas = self._names = 0

    def add(self, part: bytes) -> None:
        """The next bytes. Raises ApiError (413) where there is more than one body may have."""
        for start in range(0, len(part), _PIECE_BYTES):
            self._add(part[start : start + _PIECE_BYTES])

    def _add(self, part: bytes) -> None:
        piece = self._rest + part
        self._rest = b""
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"")
            if piece.endswith(b"\\"):  # what it escapes is still to come
                piece, self._rest = piece[:-1], b"\\"
            piece = piece.replace(b'\\"', b"")
        quotes = piece.count(b'"')
        self._quotes += quotes
        _check(self._quotes // 2, MAX_TEXTS, "texts, names included")
        if quotes:
            parts = piece.split(b'"')
            piece = b"".join(parts[1::2] if self._is_in_text else parts[::2])
            self._is_in_text ^= quotes % 2 == 1
        elif self._is_in_text:
            return
        self._containers += piece.count(b"[") + piece.count(b"{")
        self._names += piece.count(b":")
        self._commas += piece.count(b",")
        _check(self._containers, MAX_CONTAINERS, "lists and objects")
        _check(self._names, MAX_NAMES, "named values")
        _check(self._containers + self._commas, MAX_VALUES, "values")


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        raise ApiError(413, f"the body has more than {most} {what}", code="body_too_large")
