"""Keeps what the grammar library prints out of the log: its warnings cite schemas and have no switch of their own."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()
_STDERR = 2


class _Quiet:
    """num_inside  threads inside now.   kept  where descriptor 2 went before the first of them; -1 where nobody is inside."""

    num_inside = 0
    kept = -1


@contextmanager
def quiet() -> Iterator[None]:
    """Meanwhile nothing written to descriptor 2 is seen, whichever thread writes. Our own lines have another, see process.py."""
    with _LOCK:
        if not _Quiet.num_inside:
            _Quiet.kept = _muted()
        _Quiet.num_inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _Quiet.num_inside -= 1
            if not _Quiet.num_inside and _Quiet.kept >= 0:
                os.dup2(_Quiet.kept, _STDERR)
                os.close(_Quiet.kept)
                _Quiet.kept = -1


def _muted() -> int:
    """Sends descriptor 2 nowhere. A copy of what it was; -1 where there is none to be had, and then nothing is muted."""
    try:
        kept = os.dup(_STDERR)
    except OSError:  # it is closed, or there are no descriptors left
        return -1
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        os.close(kept)
        return -1
    os.dup2(nowhere, _STDERR)
    os.close(nowhere)
    return kept
