"""The threads that speak to other engines, and the bounded queues between them and the loop that owns the memory.

A state that moves has a connection and a thread on each side. What a thread cannot hand on fills its queue, then the socket, then
the other side's queue: nobody holds more than a few pieces beyond what its memory has room for.
"""

import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from lamina.base.log import event, get_logger
from lamina.engine.peer_channel import Channel, PeerError, SocketChannel, connect, listen
from lamina.engine.peer_nixl import Nixl
from lamina.engine.peer_wire import PROTOCOL, Declined, Done, Message, Offer, Part, Wait, Want
from lamina.memory.manifest import MOST_MANIFEST_BYTES

_LOG = get_logger(__name__)
_CONNECT_S, _HELLO_S = 2.0, 5.0
_SIGN_S = 0.5  # between signs of life
_SILENCE_S = 5.0  # after which a sender counts as gone
_MOST_SEND_S = 600.0
_POLL_S = 0.2
#: pieces that wait in a queue
QUEUE_PIECES = 4
_MOST_CONNECTIONS = 256


@dataclass(slots=True, eq=False)
class Incoming:
    """A state that has been asked for. items  what came; an exception ends it.   is_cancelled  nobody waits any more."""

    address: str
    items: "queue.Queue[tuple[Message, bytearray] | PeerError]" = field(default_factory=lambda: queue.Queue(QUEUE_PIECES))
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class Outgoing:
    """A state that somebody wants. items  what is to be sent; Done or Declined ends it.   is_gone  the other side has left."""

    want: Want
    tokens: bytes
    items: "queue.Queue[tuple[Message, bytes]]" = field(default_factory=lambda: queue.Queue(QUEUE_PIECES))
    is_gone: bool = False
    is_ended: bool = False

    def put(self, message: Message, body: bytes = b"") -> bool:
        """Queues what comes next; False if there is no room now."""
        try:
            self.items.put_nowait((message, body))
        except queue.Full:
            return False
        self.is_ended = isinstance(message, Done | Declined)
        return True


class PeerNode:
    """Listens and connects for one engine.

    wake  ends the engine's wait, from any thread.   most_tokens  of a prompt.   most_piece  bytes of the largest piece.
    ids   (model_id, layout_id) that others must have.   nixl  reads large bodies, where both sides have it.
    """

    def __init__(
        self, key: bytes, ids: tuple[str, str], most_tokens: int, most_piece: int, wake: Callable[[], None],
        nixl: Nixl | None = None,
    ) -> None:  # fmt: skip
        self._key = key
        self._ids = ids
        self._most_tokens = most_tokens
        self._most_piece = most_piece
        self._wake = wake
        self._nixl = nixl
        self._listener: socket.socket | None = None
        self._num_open = 0
        self._lock = threading.Lock()
        #: states that others want, oldest first; the engine takes them out
        self.wanted: deque[Outgoing] = deque()
        self.address = ""

    def listen(self, address: str) -> str:
        """Begins to listen; the address that others reach it by. Raises ConfigError."""
        self._listener, self.address = listen(address)
        threading.Thread(target=self._accept, args=(self._listener,), name="peer-accept", daemon=True).start()
        return self.address

    def close(self) -> None:
        """Listens no more. Threads end with the process."""
        if self._listener is not None:
            self._listener.close()

    def ask(self, address: str, want: Want, tokens: bytes) -> Incoming:
        """Asks another engine for a state; never waits."""
        found = Incoming(address)
        threading.Thread(target=self._fetch, args=(found, want, tokens), name="peer-fetch", daemon=True).start()
        return found

    # -- the receiver's thread

    def _fetch(self, incoming: Incoming, want: Want, tokens: bytes) -> None:
        channel: Channel | None = None
        try:
            opened = connect(incoming.address, self._key, _CONNECT_S)
            channel = opened if self._nixl is None else self._nixl.wrap(opened, self._most_piece)
            channel.send(msgspec.structs.replace(want, can_read=self._nixl is not None), tokens)
            most = MOST_MANIFEST_BYTES
            while True:
                message, body = channel.receive(most, _SILENCE_S)
                if incoming.is_cancelled:
                    return
                if isinstance(message, Wait):
                    continue
                if not isinstance(message, Offer | Part | Done | Declined):
                    raise PeerError(f"{incoming.address} said what only a receiver says")
                most = self._most_piece
                if not self._put(incoming, (message, body)):
                    return
                if isinstance(message, Done | Declined):
                    return
        except PeerError as error:
            self._put(incoming, error)
        except Exception as error:
            _LOG.exception("a peer's thread failed")
            self._put(incoming, PeerError(f"{type(error).__name__}: {error}"))
        finally:
            if channel is not None:
                channel.close()

    def _put(self, incoming: Incoming, item: "tuple[Message, bytearray] | PeerError") -> bool:
        """Hands something to the engine; False if it does not want it any more."""
        while not incoming.is_cancelled:
            try:
                incoming.items.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            self._wake()
            return True
        return False

    # -- the sender's threads

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if listener.fileno() < 0:
                    return
                event(_LOG, "peer_not_accepted", logging.WARNING, why=str(error))
                time.sleep(_POLL_S)
                continue
            with self._lock:
                is_full = self._num_open >= _MOST_CONNECTIONS
                self._num_open += not is_full
            if is_full:
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="peer-serve", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        channel: SocketChannel | None = None
        outgoing: Outgoing | None = None
        try:
            channel = SocketChannel(sock, self._key, False, _HELLO_S)
            want, tokens = channel.receive(4 * self._most_tokens, _HELLO_S)
            if not isinstance(want, Want):
                raise PeerError("a peer did not begin with what it wants")
            why = self._refusal(want, len(tokens))
            if why:
                channel.send(Declined(why))
                return
            channel.send_s = min(want.deadline_s, _MOST_SEND_S)  # it may wait for memory and read nothing so long
            outgoing = Outgoing(want, bytes(tokens))
            self.wanted.append(outgoing)
            self._wake()
            if want.can_read and self._nixl is not None:
                remote = self._nixl.wrap(channel, self._most_piece)
                remote.is_remote = True
                try:
                    self._send(remote, outgoing)
                finally:
                    remote.close()
            else:
                self._send(channel, outgoing)
        except PeerError as error:
            event(_LOG, "peer_ended", logging.INFO if outgoing is not None else logging.WARNING, why=str(error))
        except Exception:
            _LOG.exception("a peer's thread failed")
        finally:
            with self._lock:
                self._num_open -= 1
            if outgoing is not None:
                outgoing.is_gone = True
                self._wake()
            if channel is not None:
                channel.close()
            else:
                sock.close()

    def _refusal(self, want: Want, num_bytes: int) -> str:
        """Why a state cannot be given to this peer, whatever it is."""
        for name, ours, theirs in (
            ("protocol", PROTOCOL, want.protocol), ("model_id", self._ids[0], want.model_id),
            ("layout_id", self._ids[1], want.layout_id),
        ):  # fmt: skip
            if ours != theirs:
                return f"{name} is {ours} here, {theirs} is wanted: both sides must run the same model with the same settings"
        if not want.deadline_s > 0:
            return f"deadline_s={want.deadline_s} is not valid: a number above 0"
        return "" if num_bytes % 4 == 0 and num_bytes else f"{num_bytes} bytes are no token ids"

    def _send(self, channel: Channel, outgoing: Outgoing) -> None:
        while True:
            try:
                message, body = outgoing.items.get(timeout=_SIGN_S)
            except queue.Empty:
                if outgoing.is_gone:
                    raise PeerError("the engine has given it up") from None
                if not channel.is_open:
                    raise PeerError("the receiver has gone") from None
                channel.send(Wait())
                continue
            self._wake()  # there is room for more
            channel.send(message, body)
            if isinstance(message, Done | Declined):
                return
