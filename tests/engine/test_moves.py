"""A prompt computed elsewhere gives the same bits as one computed here; whatever happens to a peer, answers stay right."""

import importlib.util
import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from lamina import SamplingParams
from lamina.engine.engine import Engine
from lamina.engine.peer_channel import PeerError, SocketChannel, connect, listen
from lamina.engine.peer_wire import PROTOCOL, Declined, Done, Message, Offer, Wait, Want
from lamina.memory.manifest import decode_manifest, encode_manifest
from tests.engine.moving import Child, Side, decode, make_engine, prefill, random_ids, run

KEY = b"a key of more than 16 characters"
AROUND = [at + by for at in (4, 128, 256, 384, 512) for by in (-1, 0, 1)]


@pytest.fixture(scope="module")
def engines(checkpoint_of: Callable[[str], Path]) -> Callable[[int], Engine]:
    """Engines of one random model, made once each. The first computes prompts in small steps, so that blocks move meanwhile."""
    made: dict[int, Engine] = {}

    def engine(number: int) -> Engine:
        if number not in made:
            made[number] = make_engine(checkpoint_of("short"), max_step_tokens=1024 if number else 96)
        return made[number]

    return engine


@dataclass
class Trio:
    """Somebody who computes prompts, somebody who lets them be computed, and somebody who does all alone."""

    sender: Side
    receiver: Side
    alone: Side

    @property
    def vocab(self) -> int:
        return self.alone.engine.vocab_size

    def both(self, id: str, tokens: list[int], **options: object) -> None:
        self.receiver.submit(id, tokens, **options)
        self.alone.submit(id, tokens, **options)

    def check(self, *ids: str) -> None:
        run([self.sender, self.receiver], lambda: self.receiver.is_done(*ids))
        run([self.alone], lambda: self.alone.is_done(*ids))
        for id in ids:
            assert self.receiver.answer(id) == self.alone.answer(id), id

    def rest(self) -> None:
        run([self.sender, self.receiver], lambda: self.sender.is_clean() and self.receiver.is_clean(), 10)


@pytest.fixture
def trio(engines: Callable[[int], Engine]) -> Iterator[Trio]:
    for number in range(3):
        engines(number).ledger.drop_index()
    sender = prefill(engines(0))
    found = Trio(sender, decode(engines(1), sender.moves.address), Side(engines(2)))
    yield found
    sender.moves.close()


def count(side: Side, what: str) -> int:
    return side.moves.counts().states[what]


# -- bits


def check_positions(trio: Trio, positions: list[int]) -> None:
    tokens = random_ids(600, 1, trio.vocab)
    both = (trio.sender, trio.receiver)
    for side in both:  # other requests run all the time
        side.submit("noise", random_ids(9, 2, trio.vocab), 8000, "noise")
    run(both, lambda: all(side.outputs["noise"] for side in both))
    for position in positions:
        trio.both(f"{position}", tokens[:position], max_tokens=4, salt=f"{position}")
        trio.check(f"{position}")
        assert trio.receiver.cached(f"{position}") == 0
    assert count(trio.receiver, "received") == len(positions) + 1 and not count(trio.receiver, "recomputed")
    for side in both:
        side.desk.cancel_all()
    trio.rest()


def test_every_bit_is_the_same_wherever_a_prompt_ends(trio: Trio) -> None:
    rng = random.Random(3)
    check_positions(trio, [1, 127, 128, 257, rng.randrange(258, 512)])


@pytest.mark.long
def test_every_bit_is_the_same_at_each_position(trio: Trio) -> None:
    check_positions(trio, sorted({*range(1, 601), *AROUND}))


def test_turns_of_a_chat_move_what_is_new(trio: Trio) -> None:
    """The second turn's blocks are at the receiver: only what follows them moves. A short one is not worth asking for."""
    tokens = random_ids(700, 5, trio.vocab)
    trio.both("first", tokens[:520])
    trio.check("first")
    before = trio.receiver.moves.counts().nbytes["received"]
    later = tokens[:520] + trio.alone.answer("first")[0] + tokens[520:660]
    trio.both("second", later)
    trio.check("second")
    moved = trio.receiver.moves.counts().nbytes["received"] - before
    layout = trio.alone.engine.layout
    blocks = sum(span.nbytes for span in layout.block_spans)
    whole = sum(layout.live_bytes(len(later)).values())
    assert 0 < moved <= whole - 2 * blocks, "blocks that were there have moved again"
    assert trio.receiver.cached("second") >= 520, "what the receiver had counts as cached"
    trio.both("again", later)
    trio.check("again")
    assert count(trio.receiver, "received") == 2, "all of it was there"
    trio.rest()


def test_many_at_once_in_a_small_memory(engines: Callable[[int], Engine], checkpoint_of: Callable[[str], Path]) -> None:
    """More than fits: states wait for room or are computed here; nothing is stuck, nothing is wrong."""
    sender = prefill(engines(0))
    small = make_engine(checkpoint_of("short"), "1MiB")
    trio = Trio(sender, decode(small, sender.moves.address), Side(engines(2)))
    ids = []
    for number in range(4):
        tokens = random_ids(150 + 100 * number, number, trio.vocab)
        if len(tokens) < small.max_model_len - 8:
            ids.append(f"{number}")
            trio.both(ids[-1], tokens, max_tokens=4, salt=f"s{number}")
    assert len(ids) == 4
    trio.check(*ids)
    assert count(trio.receiver, "received") > 0
    trio.rest()
    sender.moves.close()


def test_what_is_cancelled_or_late_lets_go_everywhere(trio: Trio) -> None:
    tokens = random_ids(580, 9, trio.vocab)
    trio.receiver.submit("gone", tokens, salt="a")
    run([trio.sender, trio.receiver], lambda: bool(trio.sender.engine.ledger.leases))
    trio.receiver.desk.cancel("gone")
    trio.rest()
    assert trio.receiver.answer("gone")[2] == "abort"
    trio.receiver.submit("late", tokens, salt="b", deadline_s=0.15)
    run([trio.receiver], lambda: trio.receiver.is_done("late"))  # the sender does nothing
    assert trio.receiver.answer("late")[2] == "deadline"
    trio.rest()


def test_nobody_answers_in_time(engines: Callable[[int], Engine]) -> None:
    """A peer that is silent, one that is not there, and one that never ends: the prompt is computed here."""
    silent, address = listen("127.0.0.1:0")
    nobody, gone = listen("127.0.0.1:0")
    nobody.close()
    sender = prefill(engines(0))
    for peers in (address, gone, sender.moves.address):
        receiver, alone = decode(engines(1), peers, handover_s=0.3), Side(engines(2))
        tokens = random_ids(60, 11, alone.engine.vocab_size)
        receiver.submit("x", tokens, salt=peers)
        alone.submit("x", tokens, salt=peers)
        run([receiver], lambda receiver=receiver: receiver.is_done("x"), 5)
        run([alone], lambda alone=alone: alone.is_done("x"))
        assert receiver.answer("x") == alone.answer("x")
        assert count(receiver, "recomputed") == 1 and receiver.is_clean()
    silent.close()
    run([sender], sender.is_clean)
    sender.moves.close()


def test_a_step_that_fails_on_either_side_is_survived(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = random_ids(300, 12, trio.vocab)
    for side in (trio.sender, trio.receiver):
        trio.receiver.moves._in._bad_until.clear()
        trio.both(f"{id(side)}", tokens, salt=f"{id(side)}")
        run([trio.sender, trio.receiver], lambda: bool(trio.sender.engine.ledger.leases))
        with monkeypatch.context() as patch:
            patch.setattr(side.engine.worker, "execute", lambda step: 1 / 0)
            if side is trio.receiver:  # somebody else's step, while the state is on its way
                side.engine.add([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
            with pytest.raises(ZeroDivisionError):
                run([trio.sender, trio.receiver], lambda: False, 5)
        trio.check(f"{id(side)}")
        trio.rest()


# -- peers that are killed


def check_kills(engines: Callable[[int], Engine], times: int) -> None:
    """The sender, in a process of its own, is killed at any moment; every answer is right."""
    alone, rng = Side(engines(2)), random.Random(times)
    tokens = random_ids(520, 13, alone.engine.vocab_size)
    alone.submit("x", tokens, salt="kill")
    run([alone], lambda: alone.is_done("x"))
    received = 0
    for number in range(times):
        engines(0).ledger.drop_index()
        engines(1).ledger.drop_index()
        child = Child(lambda: (side := prefill(engines(0)), side.moves.address))
        receiver = decode(engines(1), child.text)
        receiver.submit("x", tokens, salt="kill")
        at = time.monotonic() + rng.random() * 0.25 if number else math.inf
        run([receiver], lambda at=at, receiver=receiver: time.monotonic() > at or receiver.is_done("x"))
        child.kill()
        run([receiver], lambda receiver=receiver: receiver.is_done("x"))
        assert receiver.answer("x") == alone.answer("x")
        received += count(receiver, "received")
        assert count(receiver, "received") + count(receiver, "recomputed") == 1
        assert receiver.is_clean()
    assert received, "nothing was ever handed over"


def check_killed_receivers(engines: Callable[[int], Engine], times: int) -> None:
    """The receiver is killed at any moment; the sender lets go of everything and serves the next one."""
    sender, alone, rng = prefill(engines(0)), Side(engines(2)), random.Random(times)
    tokens = random_ids(520, 14, alone.engine.vocab_size)

    def make() -> tuple[Side, str]:
        side = decode(engines(1), sender.moves.address)
        side.submit("x", tokens, salt="kill")
        return side, "ready"

    for _ in range(times):
        engines(0).ledger.drop_index()
        child = Child(make)
        at = time.monotonic() + rng.random() * 0.25
        run([sender], lambda at=at: time.monotonic() > at)
        child.kill()
        run([sender], sender.is_clean, 10)
    receiver = decode(engines(1), sender.moves.address)
    for side in (receiver, alone):
        side.submit("x", tokens, salt="last")
    run([sender, receiver], lambda: receiver.is_done("x"))
    run([alone], lambda: alone.is_done("x"))
    assert receiver.answer("x") == alone.answer("x") and count(receiver, "received") == 1
    sender.moves.close()


def test_a_killed_peer_costs_time_and_nothing_else(engines: Callable[[int], Engine]) -> None:
    check_kills(engines, 3)
    check_killed_receivers(engines, 2)


@pytest.mark.long
def test_a_hundred_killed_peers(engines: Callable[[int], Engine]) -> None:
    check_kills(engines, 100)
    check_killed_receivers(engines, 100)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="NIXL is an extra")
def test_nixl_brings_the_same_bits(engines: Callable[[int], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every body by NIXL, from another process, which is killed at last."""
    monkeypatch.setattr("lamina.engine.peer_nixl._FEW_BYTES", 100)
    (tmp_path / "key").write_bytes(KEY)
    settings = {"key_file": str(tmp_path / "key"), "transport": "nixl"}
    child = Child(lambda: (side := prefill(engines(0), **settings), side.moves.address))
    receiver, alone = decode(engines(1), child.text, **settings), Side(engines(2))
    for position in (1, 128, 300, 513):
        tokens = random_ids(position, position, alone.engine.vocab_size)
        for side in (receiver, alone):
            side.submit(f"{position}", tokens, salt="nixl")
            run([side], lambda side=side, id=f"{position}": side.is_done(id))
        assert receiver.answer(f"{position}") == alone.answer(f"{position}")
    assert count(receiver, "received") == 4
    for side in (receiver, alone):
        side.submit("x", random_ids(600, 3, alone.engine.vocab_size), salt="nixl")
    receiver.go()
    child.kill()
    run([receiver], lambda: receiver.is_done("x"))
    run([alone], lambda: alone.is_done("x"))
    assert receiver.answer("x") == alone.answer("x") and receiver.is_clean()


# -- peers that lie


class Liar:
    """Stands where a sender would: passes its messages on, and changes one of them."""

    def __init__(self, real: str, change: Callable[[int, Message, bytes], "list[tuple[Message, bytes]] | None"]) -> None:
        self._listener, self.address = listen("127.0.0.1:0")
        self._real, self._change = real, change
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(sock,), daemon=True).start()

    def _pass_on(self, sock: socket.socket) -> None:
        try:
            here = SocketChannel(sock, KEY, False, 10)
            want, tokens = here.receive(1 << 20, 10)
            there = connect(self._real, KEY, 10)
            there.send(want, tokens)
            number = 0
            while True:
                message, body = there.receive(1 << 26, 10)
                if isinstance(message, Wait):
                    continue
                found = self._change(number, message, bytes(body))
                number += 1
                if found is None:
                    break
                for one in found:
                    here.send(*one)
                if isinstance(message, Done):
                    break
        except PeerError:
            pass
        finally:
            sock.close()

    def close(self) -> None:
        self._listener.close()


def _flip(body: bytes, at: int) -> bytes:
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


def lies() -> dict[str, Callable[[int, Message, bytes], "list[tuple[Message, bytes]] | None"]]:
    """What a sender could say that is wrong: by what the receiver's log must say of it."""

    def at(number: int, *instead: Callable[[Message, bytes], tuple[Message, bytes]]) -> Callable[..., object]:
        return lambda n, message, body: [one(message, body) for one in instead] if n == number else [(message, body)]

    def same(message: Message, body: bytes) -> tuple[Message, bytes]:
        return message, body

    def other_manifest(message: Message, body: bytes) -> tuple[Message, bytes]:
        return message, encode_manifest(msgspec.structs.replace(decode_manifest(body), version=9))

    return {
        "cannot be read": at(0, lambda m, b: (m, b[:-3])), "version=9": at(0, other_manifest),
        "checksum of": at(2, lambda m, b: (m, _flip(b, 100))), "Part has come where": at(0),
        "where block 1 is next": at(1, same, same),
        "Offer has come where": at(1, lambda m, b: (Offer(), b)), "bytes: ": at(1, lambda m, b: (m, b[:-1])),
        "ended before": at(2, lambda m, b: (Done(0), b"")), "no time": at(1, lambda m, b: (Declined("no time\nfor this"), b"")),
        "says": at(1, lambda m, b: (Want(PROTOCOL, "", "", "", 0, 1.0), b"")),
        "has gone": lambda n, message, body: None if n == 2 else [(message, body)],
        "announced": at(1, lambda m, b: (m, b * 400)),
    }  # fmt: skip


def test_a_peer_that_lies_is_not_believed(
    engines: Callable[[int], Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_bytes(KEY + b"\n")
    settings = {"key_file": str(tmp_path / "key")}
    sender, alone = prefill(engines(0), **settings), Side(engines(2))
    tokens = random_ids(260, 15, alone.engine.vocab_size)
    alone.submit("x", tokens, 2, "lies")
    run([alone], lambda: alone.is_done("x"))
    for text, lie in lies().items():
        engines(1).ledger.drop_index()
        liar = Liar(sender.moves.address, lie)
        receiver = decode(engines(1), liar.address, **settings)
        caplog.clear()
        receiver.submit("x", tokens, 2, "lies")
        run([sender, receiver], lambda receiver=receiver: receiver.is_done("x"))
        assert receiver.answer("x") == alone.answer("x"), text
        assert count(receiver, "recomputed") == 1 and not count(receiver, "received"), text
        assert text in caplog.text and "computed here" in caplog.text, (text, caplog.text)
        run([sender, receiver], lambda receiver=receiver: sender.is_clean() and receiver.is_clean(), 10)
        liar.close()
    sender.moves.close()


def test_another_model_or_settings_are_refused_in_one_line(
    engines: Callable[[int], Engine], checkpoint_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """model_id and layout_id; the prompt is computed here."""
    sender, other = prefill(engines(0)), make_engine(checkpoint_of("short"), block_tokens=512)
    receiver = decode(other, sender.moves.address)
    receiver.submit("x", random_ids(50, 1, other.vocab_size))
    run([sender, receiver], lambda: receiver.is_done("x"))
    assert "layout_id is" in caplog.text and "same settings" in caplog.text
    assert count(receiver, "recomputed") == 1
    sender.moves.close()


def test_only_so_many_are_asked_for_at_once(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for their turn; one that waits can be cancelled, or run out of time."""
    monkeypatch.setattr("lamina.engine.moves_in._MOST_AT_ONCE", 1)
    ids = [f"{number}" for number in range(4)]
    for id in ids:
        trio.both(id, random_ids(30, int(id), trio.vocab), salt=id)
    trio.receiver.submit("gone", [5] * 30)
    trio.receiver.submit("late", [6] * 30, deadline_s=0.0)
    trio.receiver.desk.cancel("gone")
    trio.check(*ids)
    assert [trio.receiver.answer(id)[2] for id in ("gone", "late")] == ["abort", "deadline"]
    assert count(trio.receiver, "received") == 4
    trio.rest()
