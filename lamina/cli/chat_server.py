"""A server of `lamina chat`'s own: `lamina serve` on a free port of this machine, with a key that nobody else knows."""

import collections
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import NoReturn

from lamina.base.errors import LaminaError

_STOP_S = 10.0
_KEPT_LINES = 20


class OwnServer:
    """Runs while a `with` lasts. options  arguments of `lamina serve`."""

    def __init__(self, directory: str, options: Sequence[str]) -> None:
        fixed = ["--host", "127.0.0.1", "--port", "0", "--drain-seconds", "0", "--quiet"]
        self._command = [sys.executable, "-m", "lamina", "serve", directory, *fixed, *options]
        self.key = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[str] | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._is_ready = threading.Event()
        self._url = ""

    def __enter__(self) -> "OwnServer":
        # a process group of its own: Ctrl-C in the terminal is the chat's
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True, env=os.environ | {"LAMINA_API_KEY": self.key},
        )  # fmt: skip
        for one in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(one, _end)
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def wait(self) -> str:
        """Its address, once it serves. Raises LaminaError with what it said if it could not start."""
        self._is_ready.wait()
        if not self._url:
            errors = [line.removeprefix("error: ") for line in self._lines if line.startswith("error: ")]
            raise LaminaError(f"the server did not start: {errors[-1] if errors else self.last_words or 'it said nothing'}")
        return self._url

    @property
    def last_words(self) -> str:
        """What it wrote last."""
        return self._lines[-1] if self._lines else ""

    def _read(self) -> None:
        """Takes what it writes, so that it never waits for a reader."""
        assert self._process is not None and self._process.stderr is not None
        for line in self._process.stderr:
            text = line.rstrip()
            if text.startswith("ready: "):
                self._url = text.removeprefix("ready: ")
                self._is_ready.set()
            elif text:
                self._lines.append(text)
        self._is_ready.set()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """A signal that ends the chat stops its server too."""
    raise SystemExit(128 + number)
