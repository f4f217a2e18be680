"""The engine's process ends when it is told to, and when the process that started it has gone."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from lamina.base.log import event, get_logger

_LOG = get_logger(__name__)
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.5


class Guard:
    """Signals and the parent. SIGINT is the server's to act on; SIGTERM ends the loop after its step, or loading at once.

    server       its process id, if it is known: this process may have been started through another one.
    on_orphaned  called, from another thread, before the process ends because the server or its parent has gone.
    """

    def __init__(self, server: int | None, wake: Callable[[], None], on_orphaned: Callable[[], None]) -> None:
        self.is_stopping = False
        self.is_serving = False
        self._server = server
        self._wake = wake
        self._on_orphaned = on_orphaned
        self._parent = os.getppid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminate)
        threading.Thread(target=self._watch, name="parent-watch", daemon=True).start()

    def bind_to_parent(self) -> None:
        """From now on the system ends this process together with the thread that started it, where it can."""
        if not sys.platform.startswith("linux"):
            return
        try:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        except (OSError, AttributeError) as error:  # another C library: the watch is enough
            event(_LOG, "not_bound_to_parent", why=str(error))

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.is_stopping = True
        self._wake()
        if not self.is_serving:
            raise SystemExit(128 + number)

    def _watch(self) -> None:
        while os.getppid() == self._parent and (self._server is None or _exists(self._server)):
            time.sleep(_LOOK_S)
        self._on_orphaned()
        os._exit(1)


def _exists(pid: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
