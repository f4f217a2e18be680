"""The engine's end of the socket: whole, checked commands in, reports out, and a way to be woken."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from lamina.base.log import event, get_logger
from lamina.engine.wire import Command, Report

_LOG = get_logger(__name__)
_READABLE = int(zmq.POLLIN)  # plain: the library's enumeration costs more than the question
#: what may wait to be sent; a server that has stopped reading makes the engine wait, as there is nobody to serve
_MOST_UNSENT = 100_000
_LINGER_MS = 2000


class Link:
    """Connects to `address` (ipc://...). Not for several threads, except `wake`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, _MOST_UNSENT)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.connect(address)
        self._folder = Path(address.removeprefix("ipc://")).parent
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)

    @property
    def server_pid(self) -> int | None:
        """The server's process id, with which the socket's name ends."""
        digits = self._address.rpartition("-")[2]
        return int(digits) if digits.isdecimal() and len(digits) < 10 else None

    def wake(self) -> None:
        """Ends a wait, from any thread."""
        try:
            os.write(self._wake, b"\0")
        except OSError:  # it is full, so a wait ends anyway, or closed
            return

    def wait(self, seconds: float) -> None:
        """Until a command has come, somebody wakes it, or the time is over."""
        self._poller.poll(max(0, int(seconds * 1000) + 1))
        try:
            os.read(self._woken, 4096)
        except BlockingIOError:
            return

    def commands(self, most: int) -> Iterator[Command]:
        """Those that are there, at most so many. What cannot be read is logged and dropped."""
        for _ in range(most):
            if not int(self._socket.get(zmq.EVENTS)) & _READABLE:  # asking is a tenth of the time of an attempt that fails
                return
            data = self._socket.recv(zmq.NOBLOCK)
            try:
                yield self._decoder.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                event(_LOG, "command_dropped", logging.WARNING, bytes=len(data), why=str(error))

    def send(self, report: Report) -> None:
        """Queues a report."""
        self._socket.send(self._encoder.encode(report))

    def forget_folder(self) -> None:
        """Removes the socket's folder, for a server that has gone before it could."""
        if self._folder.name.startswith("lamina-"):
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Sends what is queued, for a while, and closes."""
        self._socket.close()
        self._context.term()
