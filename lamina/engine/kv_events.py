"""What the prefix index keeps, told to whoever listens: vLLM's KV events over a ZeroMQ PUB socket, for routers of others.

Frames: topic (empty), number (8 bytes, big-endian), then msgpack of [time, [event, ...], rank]. An event is an array that begins
with its name, as in vLLM; keys of blocks are their first 8 bytes as a number. Blocks under a cache_salt are not told. A second
socket repeats what was missed, as vLLM's does: a number asks for all since then.
"""

import time
from collections import deque

import msgspec
import zmq

from lamina.base.errors import ConfigError
from lamina.memory.layout import Layout
from lamina.memory.ledger import Ledger
from lamina.memory.nodes import Node
from lamina.memory.tokens import TOKEN_BYTES

_HASH_BYTES = 8
_MOST_KEPT = 10_000
_MOST_UNSENT = 100_000
_MEDIUM = "GPU"  # what vLLM calls the tier that requests are computed in
_END = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Blocks that follow each other. The order of the fields is vLLM's."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = _MEDIUM
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Blocks that are gone."""

    block_hashes: list[int]
    medium: str | None = _MEDIUM


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Everything is gone."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """What happened in one round."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = 0


class KvEvents:
    """Follows one engine's index. `flush` sends what happened since the last time; called between steps.

    Raises ConfigError for an address that cannot be had.
    """

    def __init__(self, layout: Layout, address: str, replay: str = "") -> None:
        self._size = layout.block_tokens
        self._ledger: Ledger | None = None
        self._events: list[Event] = []
        self._number = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=_MOST_KEPT)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, _MOST_UNSENT)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._replay: zmq.Socket[bytes] | None = None
        _bind(self._socket, address)
        if replay:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.setsockopt(zmq.LINGER, 0)
            _bind(self._replay, replay)

    def flush(self, ledger: Ledger) -> None:
        """Sends; an engine whose memory starts empty has another ledger."""
        if ledger is not self._ledger:
            if self._ledger is not None:
                self._events = [AllBlocksCleared()]
            self._ledger = ledger
            ledger.index.on_block = self._note
        if self._events:
            events, self._events = self._events, []
            payload = self._encoder.encode(EventBatch(time.time(), events))
            self._socket.send_multipart((b"", self._number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            self._sent.append((self._number, payload))
            self._number += 1
        if self._replay is not None:
            self._repeat(self._replay)

    def close(self) -> None:
        """Ends it."""
        self._context.destroy(linger=0)

    def _note(self, node: Node, is_new: bool) -> None:
        """A block has come, or gone."""
        if node.salt:
            return
        key, last = _hash(node), self._events[-1] if self._events else None
        if not is_new:
            if isinstance(last, BlockRemoved):
                last.block_hashes.append(key)
            else:
                self._events.append(BlockRemoved([key]))
            return
        parent = node.parent
        above = None if parent is None or parent.parent is None else _hash(parent)
        ids = memoryview(node.tokens).cast("i").tolist()
        assert len(ids) == self._size and TOKEN_BYTES == 4
        if isinstance(last, BlockStored) and last.block_hashes[-1] == above:
            last.block_hashes.append(key)
            last.token_ids.extend(ids)
        else:
            self._events.append(BlockStored([key], above, ids, self._size))

    def _repeat(self, socket: "zmq.Socket[bytes]") -> None:
        """Answers those who missed something."""
        while int(socket.get(zmq.EVENTS)) & int(zmq.POLLIN):
            frames = socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            start = int.from_bytes(frames[2], "big")
            for number, payload in self._sent:
                if number >= start:
                    socket.send_multipart((frames[0], b"", number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            socket.send_multipart((frames[0], b"", _END, b""), zmq.NOBLOCK)


def _hash(node: Node) -> int:
    return int.from_bytes(node.key[:_HASH_BYTES], "big")


def _bind(socket: "zmq.Socket[bytes]", address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError("kv_events", address, f"an address that is free ({error})") from None
