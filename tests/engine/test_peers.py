"""Messages between engines: signed, bounded, in order; who may speak to whom, and who is listed."""

import os
import queue
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lamina.base.errors import ConfigError
from lamina.base.peers import PeerConfig
from lamina.engine.peer_channel import PeerError, SocketChannel, connect, listen, read_peer_key
from lamina.engine.peer_list import PeerList
from lamina.engine.peer_node import PeerNode
from lamina.engine.peer_wire import PROTOCOL, Declined, Done, Part, Wait, Want

KEY = b"a key of more than 16 characters"


def _flip(body: bytes, at: int) -> bytes:
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


def pair(
    key: bytes = KEY, other: bytes = KEY, seconds: float = 5.0
) -> tuple[SocketChannel, SocketChannel, socket.socket, socket.socket]:
    """Two ends that have greeted each other, and their sockets."""
    one, two = socket.socketpair()
    made: queue.Queue[SocketChannel] = queue.Queue()
    thread = threading.Thread(target=lambda: made.put(SocketChannel(two, other, False, seconds)))
    thread.start()
    caller = SocketChannel(one, key, True, seconds)
    thread.join()
    return caller, made.get(), one, two


def test_messages_arrive_whole_and_in_order() -> None:
    caller, callee, _, _ = pair()
    caller.send(Want(PROTOCOL, "m", "l", "salt", 3, 9.0), b"1234")
    assert callee.receive(4, 1) == (Want(PROTOCOL, "m", "l", "salt", 3, 9.0), bytearray(b"1234"))
    for number in range(3):
        callee.send(Part("block", number, None, b"x"), memoryview(b"y" * number))
    for number in range(3):
        assert caller.receive(10, 1) == (Part("block", number, None, b"x"), bytearray(b"y" * number))
    assert callee.is_open
    caller.close()
    assert not callee.is_open
    with pytest.raises(PeerError, match="has gone"):
        callee.receive(1, 1)


def test_who_does_not_know_the_key_is_not_heard() -> None:
    for key, other in ((KEY, b"another key of some length"), (b"", KEY), (KEY, b"")):
        caller, callee, _, _ = pair(key, other)
        caller.send(Wait())
        with pytest.raises(PeerError, match="not signed"):
            callee.receive(0, 1)


def _sent(send: Callable[[SocketChannel], None]) -> bytes:
    """The bytes that a message is on the wire, on a connection of its own."""
    caller, _, _, two = pair()
    send(caller)
    return two.recv(1 << 16)


@pytest.mark.parametrize("change", ["flip", "repeat", "turn_around", "other_connection", "cut", "swap"])
def test_what_was_changed_on_its_way_is_not_taken(change: str) -> None:
    caller, callee, one, two = pair()
    caller.send(Done(5), b"body")
    data = two.recv(1 << 16)
    rng = random.Random(1)
    if change == "flip":
        for at in rng.sample(range(8, len(data)), 12):
            caller, callee, one, two = pair()
            caller.send(Done(5), b"body")
            two.recv(1 << 16)
            one.sendall(_flip(data, at))
            with pytest.raises(PeerError):
                callee.receive(10, 1)
        return
    if change == "repeat":
        one.sendall(data + data)
        assert callee.receive(10, 1) == (Done(5), bytearray(b"body"))
    elif change == "turn_around":
        two.sendall(data)
        callee = caller
    elif change == "other_connection":
        one.sendall(_sent(lambda channel: channel.send(Done(5), b"body")))
    elif change == "cut":
        one.sendall(data[:-1])
        one.close()
    elif change == "swap":
        caller.send(Wait())
        second = two.recv(1 << 16)
        one.sendall(second + data)
    with pytest.raises(PeerError):
        callee.receive(10, 1)


def test_sizes_are_refused_before_they_are_read() -> None:
    for lengths in ((1 << 31, 0), (10, 1 << 31), (10, 11), ((1 << 20) + 1, 0)):
        _, callee, one, _ = pair()
        one.sendall(lengths[0].to_bytes(4, "little") + lengths[1].to_bytes(4, "little") + bytes(32))
        with pytest.raises(PeerError, match="announced"):
            callee.receive(10, 1)


def test_who_says_nothing_is_left() -> None:
    _, callee, one, _ = pair()
    for begun in (b"", b"\x05"):
        one.sendall(begun)
        begin = time.monotonic()
        with pytest.raises(PeerError, match="in time"):
            callee.receive(10, 0.05)
        assert time.monotonic() - begin < 1


class _Wanted:
    """A node without an engine, and sockets that come to it."""

    def __init__(self, key: bytes = KEY) -> None:
        self.node = PeerNode(key, ("m", "l"), 100, 1000, lambda: None)
        self.address = self.node.listen("127.0.0.1:0")
        host, port = self.address.split(":")
        self.where = (host, int(port))


def test_noise_does_not_disturb_a_node() -> None:
    """Bytes that are no greeting, greetings without a key, wants that cannot be: all are sent away, the next one is served."""
    wanted, rng, magic = _Wanted(), random.Random(2), b"lamina\x00\x01"
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 4, rng.randbytes(500), magic + bytes(32), magic + rng.randbytes(400)):
        with socket.create_connection(wanted.where, 5) as sock:
            sock.sendall(data)
    good = Want(PROTOCOL, "m", "l", "", 0, 5.0)
    for want, tokens, text in (
        (Want(2, "m", "l", "", 0, 5.0), b"1234", "protocol is 1"),
        (Want(PROTOCOL, "n", "l", "", 0, 5.0), b"1234", "model_id is m"),
        (Want(PROTOCOL, "m", "k", "", 0, 5.0), b"1234", "layout_id is l"), (good, b"12345", "no token ids"),
        (good, b"", "no token ids"), (Want(PROTOCOL, "m", "l", "", 0, float("nan")), b"1234", "deadline_s"),
    ):  # fmt: skip
        channel = connect(wanted.address, KEY, 5)
        channel.send(want, tokens)
        answer, _ = channel.receive(0, 5)
        assert isinstance(answer, Declined) and text in answer.why
        channel.close()
    channel = connect(wanted.address, KEY, 5)
    with pytest.raises(PeerError):  # too long for any prompt
        channel.send(good, bytes(404))
        channel.receive(0, 5)
    channel = connect(wanted.address, KEY, 5)
    channel.send(good, bytes(400))
    until = time.monotonic() + 5
    while not wanted.node.wanted and time.monotonic() < until:
        time.sleep(0.01)
    outgoing = wanted.node.wanted.popleft()
    assert not wanted.node.wanted and outgoing.tokens == bytes(400)
    assert outgoing.put(Done(1)) and channel.receive(0, 5)[0] == Done(1)
    wanted.node.close()


def test_a_unix_socket_is_nobody_elses(tmp_path: Path) -> None:
    listener, address = listen(f"unix:{tmp_path / 'peer'}")
    assert address == f"unix:{tmp_path / 'peer'}" and (tmp_path / "peer").stat().st_mode & 0o077 == 0
    threading.Thread(target=lambda: SocketChannel(listener.accept()[0], b"", False, 5).send(Wait()), daemon=True).start()
    assert connect(address, b"", 5).receive(0, 5)[0] == Wait()


# -- settings


def test_nothing_leaves_this_machine_without_a_key(tmp_path: Path) -> None:
    for bad in ("0.0.0.0:0", "10.0.0.1:80", "example.com:80"):
        with pytest.raises(ConfigError, match="peer-key-file"):
            PeerConfig("prefill", bad)
        with pytest.raises(ConfigError, match="peer-key-file"):
            PeerList(bad, has_key=False)
        assert PeerList(bad, has_key=True).addresses == (bad,)
    for good in ("127.0.0.1:1", "localhost:0", "[::1]:5", "unix:/run/x"):
        assert PeerConfig("prefill", good).listen == good
    (tmp_path / "short").write_text("  too short   \n")
    for path in (tmp_path / "short", tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="peer_key_file"):
            read_peer_key(path)
    assert read_peer_key(None) == b""


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "decode"}, {"role": "both", "peers": "x:1"}, {"role": "decode", "peers": "x:1", "listen": "127.0.0.1:0"},
        {"transport": "pigeon"}, {"transport": "nixl"},
        {"role": "what"}, {"handover_s": 0.0}, {"handover_s": float("nan")}, {"handover_tokens": 0},
    ],
)  # fmt: skip
def test_roles_that_make_no_sense(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        PeerConfig(**fields)


def test_a_file_of_peers_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("lamina.engine.peer_list._READ_S", 0.01)
    file = tmp_path / "peers"
    file.write_text("127.0.0.1:1  # the first\n\n127.0.0.1:2\n127.0.0.1:1\n")
    peers = PeerList(str(file), has_key=False)
    assert peers.addresses == ("127.0.0.1:1", "127.0.0.1:2")
    file.write_text("127.0.0.1:3\n10.0.0.1:4\nnonsense\n")
    until = time.monotonic() + 5
    while peers.addresses != ("127.0.0.1:3",) and time.monotonic() < until:
        time.sleep(0.01)
    os.unlink(file)
    time.sleep(0.05)
    assert peers.addresses == ("127.0.0.1:3",), "those that are known stay"
    peers.close()
    assert "10.0.0.1:4" in caplog.text
    with pytest.raises(ConfigError):
        PeerList(str(tmp_path / "nothing"), has_key=False)
