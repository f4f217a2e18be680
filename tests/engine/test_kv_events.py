"""KV events as vLLM's subscribers read them: what they say adds up to what the index holds."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from lamina.base.errors import ConfigError
from lamina.base.peers import PeerConfig
from lamina.engine.kv_events import KvEvents
from lamina.memory.ledger import Ledger
from tests.memory.shapes import tiny
from tests.memory.trace import Trace


class Reader:
    """Keeps the books that a router would, from the frames alone."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(b"")
        self.socket.connect(address)
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.next = 0

    def read(self, until: Callable[[], bool]) -> None:
        ends = time.monotonic() + 5
        while not until():
            assert time.monotonic() < ends
            if self.socket.poll(10):
                topic, number, payload = self.socket.recv_multipart()
                assert topic == b"" and int.from_bytes(number, "big") == self.next
                self.take(payload)

    def take(self, payload: bytes) -> None:
        self.next += 1
        stamp, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(stamp, float) and rank == 0
        for name, *fields in events:
            if name == "BlockStored":
                keys, parent, ids, size, lora, medium, lora_name = fields
                assert lora is None and medium == "GPU" and lora_name is None and len(ids) == size * len(keys)
                for at, key in enumerate(keys):
                    assert parent is None or parent in self.blocks, "a block before the one above it"
                    self.blocks[key] = (parent, tuple(ids[at * size : (at + 1) * size]))
                    parent = key
            elif name == "BlockRemoved":
                for key in fields[0]:
                    del self.blocks[key]
            else:
                assert name == "AllBlocksCleared" and not fields
                self.blocks.clear()


def held(ledger: Ledger) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    found = {}
    for node in ledger.index.nodes:
        if node.parent is not None and not node.salt:
            above = None if node.parent.parent is None else int.from_bytes(node.parent.key[:8], "big")
            found[int.from_bytes(node.key[:8], "big")] = (above, tuple(memoryview(node.tokens).cast("i")))
    return found


def test_what_is_told_is_what_is_kept(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Over a random trace, a memory that starts empty, and a listener that comes late."""
    address, replay = f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"
    events = KvEvents(tiny(), address, replay)
    request.addfinalizer(events.close)
    reader, late, rng = Reader(address), Reader(address), random.Random(4)
    for one in (reader, late):
        request.addfinalizer(lambda one=one: one.context.destroy(linger=0))
    time.sleep(0.1)  # a PUB socket tells nothing to those who are still connecting
    seen = evicted = 0
    for num_pages in (16, 6, 12, 24, 9):
        trace = Trace(tiny(), num_pages)
        events.flush(trace.ledger)
        for _ in range(150):
            trace.step(*(rng.randrange(1 << 12) for _ in range(4)))
            events.flush(trace.ledger)
            if events._number > reader.next:
                reader.read(lambda: reader.next == events._number)
            assert reader.blocks == held(trace.ledger)
            seen = max(seen, len(reader.blocks))
        evicted += trace.ledger.evictions
    assert evicted and seen > 2 and reader.next > 10
    raw = late.context.socket(zmq.DEALER)
    raw.connect(replay)
    raw.send_multipart((b"", (0).to_bytes(8, "big")))
    ends = time.monotonic() + 5
    while time.monotonic() < ends:
        events.flush(trace.ledger)
        if raw.poll(5):
            _, number, payload = raw.recv_multipart()
            if not payload:
                assert number == b"\xff" * 8
                break
            assert int.from_bytes(number, "big") == late.next
            late.take(payload)
    assert late.blocks == reader.blocks


def test_addresses_that_others_could_read_are_refused() -> None:
    for bad in ("tcp://0.0.0.0:5557", "tcp://*:5557", "udp://127.0.0.1:1", "5557"):
        with pytest.raises(ConfigError, match="kv_events"):
            PeerConfig(kv_events=bad)
    with pytest.raises(ConfigError, match="without --kv-events"):
        PeerConfig(kv_events_replay="ipc:///run/x")
    with pytest.raises(ConfigError, match="kv_events"):
        KvEvents(tiny(), "ipc:///nowhere/at/all")
