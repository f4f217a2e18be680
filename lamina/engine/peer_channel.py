"""Messages between two engines over a stream socket: bounded, in order, and signed with a key that both know.

Each side first sends a greeting with 32 random bytes. From both greetings and the shared key follows a key of this connection
alone; every message after that is signed with it, together with its direction and its number, so that nothing can be changed,
repeated, left out or turned around. Lengths are checked before anything is allocated. Nothing is encrypted.

    greeting | magic 8 | random 32 |
    message  | head bytes 4 | body bytes 4 | HMAC-SHA256 32 | head | body |
"""

import contextlib
import hashlib
import hmac
import os
import select
import socket
import struct
import time
from pathlib import Path
from typing import Protocol

import msgspec

from lamina.base.errors import ConfigError, LaminaError
from lamina.engine.peer_wire import Message

_MAGIC = b"lamina\x00\x01"
_RANDOM_BYTES, _MAC_BYTES = 32, 32
_GREETING_BYTES = len(_MAGIC) + _RANDOM_BYTES
_LENGTHS = struct.Struct("<II")
#: of a message's record, and of the bytes behind it
MOST_HEAD_BYTES, MOST_BODY_BYTES = 1 << 20, 1 << 30
_FEW_BYTES = 64 * 1024
_MIN_KEY_CHARS = 16
_KEY_FILE_BYTES = 4096


class PeerError(LaminaError, OSError):
    """A connection to another engine that does not work, in one line."""


class Channel(Protocol):
    """One state's way between two engines; used by one thread at a time."""

    def send(self, message: Message, body: "bytes | memoryview" = b"") -> None:
        """Sends a message, waiting while the other side does not read. Raises PeerError."""
        ...

    def receive(self, most_body: int, seconds: float) -> tuple[Message, bytearray]:
        """The next message with at most so many bytes behind it. Raises PeerError, also if none is there in time."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether the other side is still there, as far as is known."""
        ...

    def close(self) -> None:
        """Ends it; the other side notices."""
        ...


def read_peer_key(path: Path | None) -> bytes:
    """The key that engines share: the file's text without white space around it; b"" where there is no file.

    Raises ConfigError for one that is not readable or too short.
    """
    if path is None:
        return b""
    try:
        with path.open("rb") as file:
            key = file.read(_KEY_FILE_BYTES).strip()
    except OSError as error:
        raise ConfigError("peer_key_file", str(path), f"a readable file ({error.strerror})") from None
    if len(key) < _MIN_KEY_CHARS:
        raise ConfigError("peer_key_file", str(path), f"a file with a key of at least {_MIN_KEY_CHARS} characters")
    return key


class SocketChannel:
    """A channel over a connected stream socket. Raises PeerError if the other side does not greet.

    seconds  for greetings; also what a message may take to be sent, until `send_s` says something else.
    """

    def __init__(self, sock: socket.socket, key: bytes, is_caller: bool, seconds: float) -> None:
        self._socket = sock
        self.send_s = seconds
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
        self._num_sent = self._num_received = 0
        self._directions = (b"c", b"s") if is_caller else (b"s", b"c")
        sock.settimeout(seconds)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = _MAGIC + os.urandom(_RANDOM_BYTES)
        try:
            sock.sendall(mine)
        except OSError as error:
            raise PeerError(f"a peer has gone: {error}") from None
        theirs = bytes(self._read(_GREETING_BYTES, time.monotonic() + seconds))
        if theirs[: len(_MAGIC)] != _MAGIC:
            raise PeerError("a peer does not speak this protocol")
        both = (mine, theirs) if is_caller else (theirs, mine)
        self._key = hmac.digest(key, b"lamina peers" + b"".join(both), "sha256")

    def send(self, message: Message, body: bytes | memoryview = b"") -> None:
        """See Channel."""
        head = self._encoder.encode(message)
        assert len(head) <= MOST_HEAD_BYTES and len(body) <= MOST_BODY_BYTES
        lengths = _LENGTHS.pack(len(head), len(body))
        mac = self._mac(self._directions[0], self._num_sent, lengths, head, body)
        self._num_sent += 1
        try:
            self._socket.settimeout(self.send_s)
            if len(body) <= _FEW_BYTES:
                self._socket.sendall(b"".join((lengths, mac, head, body)))
            else:
                self._socket.sendall(lengths + mac + head)
                self._socket.sendall(body)
        except OSError as error:
            raise PeerError(f"the peer has gone or does not read: {error}") from None

    def receive(self, most_body: int, seconds: float) -> tuple[Message, bytearray]:
        """See Channel."""
        ends = time.monotonic() + seconds
        start = self._read(_LENGTHS.size + _MAC_BYTES, ends)
        lengths, mac = bytes(start[: _LENGTHS.size]), bytes(start[_LENGTHS.size :])
        num_head, num_body = _LENGTHS.unpack(lengths)
        if num_head > MOST_HEAD_BYTES or num_body > min(most_body, MOST_BODY_BYTES):
            raise PeerError(f"a peer announced {num_head} + {num_body} bytes, at most {MOST_HEAD_BYTES} + {most_body} are read")
        head, body = self._read(num_head, ends), self._read(num_body, ends)
        if not hmac.compare_digest(mac, self._mac(self._directions[1], self._num_received, lengths, head, body)):
            raise PeerError("a message is not signed with this side's peer key")
        self._num_received += 1
        try:
            return self._decoder.decode(head), body
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PeerError(f"a message cannot be read: {error}") from None

    @property
    def is_open(self) -> bool:
        """See Channel. Nothing is read."""
        try:
            readable, _, _ = select.select([self._socket], [], [], 0)
            return not readable or bool(self._socket.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        """See Channel."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _mac(
        self, direction: bytes, number: int, lengths: bytes, head: bytes | bytearray, body: bytes | bytearray | memoryview
    ) -> bytes:
        mac = hmac.new(self._key, direction + number.to_bytes(8, "little") + lengths, hashlib.sha256)
        mac.update(head)
        mac.update(body)
        return mac.digest()

    def _read(self, count: int, ends: float) -> bytearray:
        """So many bytes. They are asked for by the time `ends`."""
        found, at = bytearray(count), 0
        view = memoryview(found)
        while at < count:
            left = ends - time.monotonic()
            if left <= 0:
                raise PeerError("a peer said nothing in time")
            try:
                self._socket.settimeout(left)
                got = self._socket.recv_into(view[at:])
            except TimeoutError:
                raise PeerError("a peer said nothing in time") from None
            except OSError as error:
                raise PeerError(f"the peer has gone: {error}") from None
            if not got:
                raise PeerError("the peer has gone")
            at += got
        return found


def parse_address(text: str, field: str = "peers") -> tuple[str, int]:
    """HOST:PORT, or unix:PATH as (path, -1). Raises ConfigError."""
    if text.startswith("unix:"):
        return text.removeprefix("unix:"), -1
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(field, text, "HOST:PORT or unix:PATH")
    return host.strip("[]"), int(port)


def connect(address: str, key: bytes, seconds: float) -> SocketChannel:
    """A channel to a listening engine. Raises PeerError."""
    host, port = parse_address(address)
    sock: socket.socket | None = None
    try:
        if port < 0:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(seconds)
            sock.connect(host)
        else:
            sock = socket.create_connection((host, port), seconds)
        return SocketChannel(sock, key, True, seconds)
    except PeerError:
        assert sock is not None
        sock.close()
        raise
    except OSError as error:
        if sock is not None:
            sock.close()
        raise PeerError(f"{address} cannot be reached: {error.strerror or error}") from None


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket, and the address that others reach it by. Raises ConfigError."""
    host, port = parse_address(address, "peer_listen")
    try:
        if port < 0:
            if Path(host).is_socket():  # of a process that has gone
                Path(host).unlink()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(host)
            os.chmod(host, 0o600)
            listener.listen(64)
            return listener, address
        family, kind, protocol, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found)
        listener.listen(64)
        shown = f"[{host}]" if ":" in host else host
        return listener, f"{shown}:{listener.getsockname()[1]}"
    except OSError as error:
        raise ConfigError("peer_listen", address, f"an address of this machine that is free ({error.strerror})") from None
