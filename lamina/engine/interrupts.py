"""Ctrl-C waits until the books are in order."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Inside, SIGINT is only noted; it is delivered at the end. Only the main thread gets signals, so others just pass."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[tuple[int, FrameType | None]] = []
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):  # ignored, or left to the system
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: noted.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if noted:
            previous(*noted[0])
