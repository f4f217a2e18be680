"""Large bodies by NIXL, which reads them out of the other engine's memory by whatever way the two machines have.

The socket stays: it carries every message, signed, and says where a body lies. The receiver reads it, checks it against the
checksums that were signed, and says that it has it. NIXL's own connections are not signed; what they bring is.
"""

import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Protocol, TypeAlias

import msgspec
import numpy as np

from lamina.base.errors import ConfigError
from lamina.engine.peer_channel import PeerError, SocketChannel
from lamina.engine.peer_wire import Message, Placed, Remote, Taken

_FEW_BYTES = 64 * 1024  # a body as small as that is sent as it is
_POLL_S = 0.0002
_HINT = "tcp, or pip install nixl-cu13 (it needs no GPU)"

_Region: TypeAlias = tuple[int, int, int, str]


class _Agent(Protocol):
    """What is used of NIXL's agent."""

    def register_memory(self, regions: list[_Region], kind: str) -> object: ...
    def deregister_memory(self, registered: object) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> bytes: ...
    def get_xfer_descs(self, regions: list[tuple[int, int, int]], kind: str) -> object: ...
    def initialize_xfer(self, way: str, here: object, there: object, name: bytes) -> object: ...
    def transfer(self, handle: object) -> str: ...
    def check_xfer_state(self, handle: object) -> str: ...
    def release_xfer_handle(self, handle: object) -> None: ...


class Nixl:
    """The one agent of a process; its calls come one after the other. Raises ConfigError where NIXL is not installed."""

    def __init__(self, name: str) -> None:
        try:
            module = import_module("nixl_cu13._api")
        except ImportError as error:
            raise ConfigError("peer_transport", "nixl", f"{_HINT} ({error})") from None
        make: Callable[..., _Agent] = module.nixl_agent
        self.agent = make(name, module.nixl_agent_config(backends=["UCX"]))
        self.lock = threading.Lock()

    def wrap(self, channel: SocketChannel, most_bytes: int) -> "NixlChannel":
        """A channel whose large bodies go by NIXL if the other side's is one too."""
        return NixlChannel(self, channel, most_bytes)


class NixlChannel:
    """See Channel. is_remote  the sender's: the other side has said that it can read."""

    def __init__(self, nixl: Nixl, channel: SocketChannel, most_bytes: int) -> None:
        self._nixl = nixl
        self._channel = channel
        self._most_bytes = most_bytes
        self._buffer: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
        self._registered: object = None
        self._name: bytes | None = None
        self._address = self._size = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
        self.is_remote = False

    def send(self, message: Message, body: bytes | memoryview = b"") -> None:
        """See Channel. Returns once a large body has been read."""
        if not self.is_remote or not _FEW_BYTES < len(body) <= self._most_bytes:
            self._channel.send(message, body)
            return
        if self._buffer is None:
            buffer = self._register()
            with self._nixl.lock:
                metadata = self._nixl.agent.get_agent_metadata()
            self._channel.send(Remote(metadata, buffer.ctypes.data, buffer.nbytes))
        assert self._buffer is not None
        self._buffer[: len(body)] = np.frombuffer(body, np.uint8)
        self._channel.send(Placed(len(body), self._encoder.encode(message)))
        answer, _ = self._channel.receive(0, self._channel.send_s)
        if not isinstance(answer, Taken):
            raise PeerError("a peer did not say that it has read")

    def receive(self, most_body: int, seconds: float) -> tuple[Message, bytearray]:
        """See Channel."""
        while True:
            message, body = self._channel.receive(most_body, seconds)
            match message:
                case Remote():
                    self._meet(message)
                case Placed():
                    return self._fetch(message, most_body, seconds)
                case _:
                    return message, body

    def _meet(self, remote: Remote) -> None:
        """The sender says where its memory is."""
        if self._name is not None:
            raise PeerError("a peer said twice where its memory is")
        with self._nixl.lock:
            try:
                self._name = self._nixl.agent.add_remote_agent(remote.metadata)
            except Exception as error:  # whatever the library raises
                raise PeerError(f"a peer's memory cannot be read: {error}") from None
        self._address, self._size = remote.address, remote.nbytes

    def _fetch(self, placed: Placed, most_body: int, seconds: float) -> tuple[Message, bytearray]:
        """Reads a body that lies there."""
        if self._name is None or not 0 < placed.nbytes <= min(most_body, self._size, self._most_bytes):
            raise PeerError(f"a peer announced {placed.nbytes} bytes, at most {min(most_body, self._most_bytes)} are read")
        buffer = self._register() if self._buffer is None else self._buffer
        agent, ends = self._nixl.agent, time.monotonic() + seconds
        try:
            with self._nixl.lock:
                here = agent.get_xfer_descs([(buffer.ctypes.data, placed.nbytes, 0)], "DRAM")
                there = agent.get_xfer_descs([(self._address, placed.nbytes, 0)], "DRAM")
                handle = agent.initialize_xfer("READ", here, there, self._name)
                state = agent.transfer(handle)
            while state == "PROC" and time.monotonic() < ends:
                time.sleep(_POLL_S)
                with self._nixl.lock:
                    state = agent.check_xfer_state(handle)
            with self._nixl.lock:
                agent.release_xfer_handle(handle)
        except Exception as error:  # whatever the library raises
            raise PeerError(f"the peer has gone: {error}") from None
        if state != "DONE":
            raise PeerError(f"a peer's memory was not read: {state}")
        try:
            message = self._decoder.decode(placed.head)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PeerError(f"a message cannot be read: {error}") from None
        found = bytearray(buffer[: placed.nbytes].tobytes())
        self._channel.send(Taken())
        return message, found

    def _register(self) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        buffer = np.zeros(self._most_bytes, np.uint8)
        with self._nixl.lock:
            self._registered = self._nixl.agent.register_memory([(buffer.ctypes.data, buffer.nbytes, 0, "")], "DRAM")
        self._buffer = buffer
        return buffer

    @property
    def is_open(self) -> bool:
        """See Channel."""
        return self._channel.is_open

    def close(self) -> None:
        """See Channel."""
        self._channel.close()
        if self._buffer is not None:
            with self._nixl.lock:
                self._nixl.agent.deregister_memory(self._registered)
            self._buffer = None
