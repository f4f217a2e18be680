"""One run of the engine's process: started, talked to, watched, and never left behind."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from lamina.engine.wire import Command

_MOST_PATH_BYTES = 100  # of an address; systems allow 104 to 108
_MOST_MESSAGES = 64  # handled before others get their turn
_TERMINATE_S, _KILL_S = 5.0, 5.0
_READABLE = int(zmq.POLLIN)  # plain: the library's enumeration costs more than the question


def default_command() -> list[str]:
    """How the process is started. Nothing is imported from the folder that one happens to be in, which may be a checkpoint's."""
    return [sys.executable, "-P", "-m", "lamina.engine.process"]


class EngineProcess:
    """Starts `command ADDRESS` at once, in the running loop's thread; it ends with that thread at the latest.

    on_message  called with each frame that comes.   on_exit  called once with the exit code, after the last frame.
    """

    def __init__(self, command: Sequence[str], on_message: Callable[[bytes], None], on_exit: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_exit = on_message, on_exit
        self._encoder = msgspec.msgpack.Encoder()
        self._exited = asyncio.Event()
        self._is_reading = False
        self._frames: list[bytes] = []
        self._unsent: list[Command] | None = []  # until the process has said its first word: before there is no way to it
        self._folder = _make_folder()
        self._clean = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.setsockopt(zmq.RCVHWM, 0)
            address = f"ipc://{self._folder / _socket_name()}"
            self._socket.bind(address)
            self._popen = subprocess.Popen(
                [*command, address], stdin=subprocess.DEVNULL, stdout=2, env=_environment()
            )  # its lines go where ours go that are no output
        except BaseException:
            self._context.destroy(linger=0)
            self._clean()
            raise
        self._end = weakref.finalize(self, _kill, self._popen)
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._is_reading = True
        threading.Thread(target=self._wait, name="engine-exit", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._popen.pid

    def send(self, command: Command) -> None:
        """Queues a command; never waits."""
        if not self._is_reading:
            return
        if self._unsent is not None:
            self._unsent.append(command)
            return
        if not self._frames:
            self._loop.call_soon(self._flush)
        self._frames.append(self._encoder.encode(command))

    def _flush(self) -> None:
        """Sends what this turn of the loop queued, in one go: one wake-up of the other side, and each command is a frame."""
        frames, self._frames = self._frames, []
        if not frames or not self._is_reading:
            return
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # it has gone, which will be known in a moment
            return
        if self._has_frames():  # sending may have taken the wake-up of what came
            self._loop.call_soon(self._read)

    def _has_frames(self) -> bool:
        """Whether anything has come; a tenth of the time of an attempt to read that fails."""
        return bool(int(self._socket.get(zmq.EVENTS)) & _READABLE)

    def kill(self) -> None:
        """Ends it now."""
        _kill(self._popen)

    async def stop(self, quit: Command) -> None:
        """Asks it to end, then tells it to, then ends it."""
        self.send(quit)
        for end, seconds in ((None, _TERMINATE_S), (self._popen.terminate, _KILL_S), (self._popen.kill, None)):
            if end is not None and self._popen.returncode is None:
                end()
            try:
                await asyncio.wait_for(self._exited.wait(), seconds)
                return
            except TimeoutError:
                continue

    def cpu_seconds(self) -> float | None:
        """Processor time that it has used, all threads together; None where the system does not tell."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return None

    def close(self) -> None:
        """Ends the process if it runs, and lets go of everything; nothing is called any more."""
        self._stop_reading()
        self._end()
        self._clean()

    def _read(self) -> None:
        for _ in range(_MOST_MESSAGES):
            if not self._is_reading or not self._has_frames():
                return
            data = self._socket.recv(zmq.NOBLOCK)
            if self._unsent is not None:
                self._connected()
            self._on_message(data)
        self._loop.call_soon(self._read)

    def _connected(self) -> None:
        """Sends what had to wait. Nobody needs the socket's folder now."""
        assert self._unsent is not None
        commands, self._unsent = self._unsent, None
        self._clean()
        for command in commands:
            self.send(command)

    def _wait(self) -> None:
        code = self._popen.wait()
        try:
            self._loop.call_soon_threadsafe(self._ended, code)
        except RuntimeError:  # the loop is closed: nobody is interested
            return

    def _ended(self, code: int) -> None:
        """Reads what it sent last, then says that it has gone."""
        poller = zmq.Poller()
        if self._is_reading:
            poller.register(self._socket, zmq.POLLIN)
            while self._is_reading and poller.poll(20):
                self._read()
        self._exited.set()
        was_reading = self._is_reading
        self.close()
        if was_reading:
            self._on_exit(code)

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._socket.fileno())
            self._context.destroy(linger=0)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _socket_name() -> str:
    """It says whose it is, so that a process knows that its server has gone even if that was before it could look."""
    return f"engine-{os.getpid()}"


def _make_folder() -> Path:
    """A folder that only this user can look into, with a short name."""
    for parent in (None, "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix="lamina-", dir=parent))
        if len(os.fsencode(folder / _socket_name())) <= _MOST_PATH_BYTES:
            return folder
        folder.rmdir()
    raise OSError(f"no folder with a path short enough for a socket: {folder}")


def _environment() -> dict[str, str]:
    """The same, with the place that this package came from. Threads of products wait asleep unless the user says otherwise:
    on cores that the server's process uses too, ones that spin slow a small model down many times."""
    found = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    home = Path(__file__).resolve().parents[2]
    if home.name not in ("site-packages", "dist-packages"):
        found["PYTHONPATH"] = os.pathsep.join([str(home), *filter(None, [found.get("PYTHONPATH")])])
    return found


def _kill(popen: "subprocess.Popen[bytes]") -> None:
    if popen.poll() is None:
        popen.kill()
