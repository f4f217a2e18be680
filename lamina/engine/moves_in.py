"""Prompts that other engines compute: asked for, landed in this engine's memory, and then served as ordinary hits.

Whatever goes wrong, and whenever, the prompt is computed here instead: nothing but time depends on a peer.
"""

import hashlib
import logging
import math
import queue
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.base.errors import LaminaError
from lamina.base.log import event, get_logger
from lamina.base.peers import PeerConfig
from lamina.engine.engine import Engine
from lamina.engine.peer_list import PeerList
from lamina.engine.peer_node import Incoming, PeerNode
from lamina.engine.peer_wire import PROTOCOL, Declined, Done, Offer, Part, Want
from lamina.memory.landing import Landing, first_missing, open_landing
from lamina.memory.lease import Wait
from lamina.memory.ledger import Ledger
from lamina.memory.manifest import Manifest, MoveError, decode_manifest, moved_position
from lamina.memory.tokens import TOKEN_BYTES, Prompt

_LOG = get_logger(__name__)
_MOST_TRIES = 2  # peers that are asked for one prompt
_PAUSE_S, _DECLINED_S = 3.0, 0.2  # for so long a peer that failed, or had no room, is not asked again
_MOST_AT_ONCE = 64  # states on their way; others wait for their turn
_MOST_PIECES = 8  # that are taken in one round, so that steps go on
_LEAST_S = 0.05  # with less time left nobody is asked


class _NoStateError(LaminaError):
    """A peer says that it will not give a state."""


@dataclass(slots=True, eq=False)
class Arrival:
    """A prompt that somebody else computes.

    is_over  it can be served.   cached_tokens  that nobody computed; None where nothing came and all is computed here.
    """

    tokens: list[int]
    prompt: Prompt
    ledger: Ledger
    priority: int
    hint: str
    ends: float
    here: int
    tried: tuple[str, ...] = ()
    incoming: Incoming | None = None
    manifest: Manifest | None = None
    landing: Landing | None = None
    received: int = 0
    is_over: bool = False
    cached_tokens: int | None = None


class MovesIn:
    """All of them. Called by the loop that owns the engine, between steps. The counts only grow."""

    def __init__(self, engine: Engine, node: PeerNode, peers: PeerList, config: PeerConfig) -> None:
        self._engine = engine
        self._node = node
        self._peers = peers
        self._config = config
        self._all: dict[Arrival, None] = {}
        self._bad_until: dict[str, float] = {}
        self.num_received = self.received_bytes = self.num_recomputed = 0

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, tokens: list[int], salt: str, priority: int, hint: str, deadline: float) -> Arrival | None:
        """Asks somebody for a prompt's state; None where it is to be computed here.

        hint  the peer that should be asked, if it is one of ours.   deadline  of the request, on the monotonic clock.
        """
        ledger, now = self._engine.ledger, time.monotonic()
        position = moved_position(self._engine.layout, len(tokens))
        if position < self._config.handover_tokens:
            return None
        prompt = ledger.prompt(tokens[:position], salt)
        hit = ledger.longest(prompt, limit=position)
        if position - hit.position < self._config.handover_tokens:
            return None
        ends = min(deadline, now + self._config.handover_s)
        found = Arrival(tokens, prompt, ledger, priority, hint, ends, hit.position)
        if self._num_moving < _MOST_AT_ONCE and not self._ask(found, now):
            self.num_recomputed += 1
            return None
        self._all[found] = None
        return found

    @property
    def _num_moving(self) -> int:
        return sum(1 for one in self._all if one.incoming is not None)

    def _ask(self, found: Arrival, now: float) -> bool:
        """Asks the next peer; False where there is none, or no time."""
        address = self._choose(found, now)
        first = first_missing(found.ledger, found.prompt)
        if address is None or first is None or found.ends - now < _LEAST_S:
            return False
        found.tried += (address,)
        found.manifest, found.received = None, 0
        index = found.ledger.index
        layout_id = self._engine.layout.layout_id
        want = Want(PROTOCOL, index.model_id, layout_id, found.prompt.salt, first, found.ends - now, found.priority)
        found.incoming = self._node.ask(address, want, _encoded(found.tokens))
        return True

    def _choose(self, found: Arrival, now: float) -> str | None:
        """The peer with the least to do; of equals the one that prompts with the same beginning go to."""
        able = [one for one in self._peers.addresses if one not in found.tried and self._bad_until.get(one, 0.0) <= now]
        if not able:
            return None
        if found.hint in able:
            return found.hint
        start = found.prompt.key(1) if found.prompt.num_blocks else found.prompt.data
        load = {address: 0 for address in able}
        for other in self._all:
            address = "" if other.incoming is None else other.incoming.address
            if address in load:
                load[address] += len(other.tokens)
        return min(able, key=lambda one: (load[one], hashlib.blake2b(start + one.encode(), digest_size=8).digest()))

    def pump(self) -> list[Arrival]:
        """Takes in what has come; gives those that can be served now, one way or the other."""
        now = time.monotonic()
        over = []
        for one in list(self._all):
            try:
                self._advance(one, now)
            except LaminaError as error:
                self._failed(one, str(error), now, isinstance(error, _NoStateError))
            if one.is_over:
                del self._all[one]
                over.append(one)
        return over

    def _advance(self, one: Arrival, now: float) -> None:
        if one.ledger is not self._engine.ledger:
            one.landing = None
            raise LaminaError("a step failed and the memory starts empty")
        if now > one.ends:
            raise LaminaError("it was not there in time")
        if one.incoming is None:
            if self._num_moving < _MOST_AT_ONCE and not self._ask(one, now):
                raise LaminaError("nobody can be asked")
            return
        if one.manifest is not None and one.landing is None and not self._open(one):
            return
        assert one.incoming is not None
        for _ in range(_MOST_PIECES):
            try:
                item = one.incoming.items.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, Exception):
                raise item
            message, body = item
            match message:
                case Offer() if one.manifest is None:
                    one.manifest = decode_manifest(bytes(body))
                    if not self._open(one):
                        return
                case Part() if one.landing is not None:
                    write = self._engine.worker.arena.write_page
                    one.landing.take(message.kind, message.number, message.tail, message.checksums, body, write)
                    one.received += len(body)
                case Done() if one.landing is not None:
                    landing, one.landing = one.landing, None
                    landing.finish()
                    self._landed(one, message.cached_tokens)
                    return
                case Declined():
                    raise _NoStateError(" ".join(message.why.split())[:500])
                case _:
                    raise MoveError(f"{type(message).__name__} has come where it says nothing")

    def _open(self, one: Arrival) -> bool:
        """Takes the pages; False where it must wait for them."""
        assert one.manifest is not None
        found = open_landing(one.ledger, one.prompt, one.manifest, "peer")
        if isinstance(found, Wait):
            return False
        one.landing = found
        self._engine.run_orders()  # nothing that was ordered before may write into these pages later
        return True

    def _landed(self, one: Arrival, cached_tokens: int) -> None:
        self.num_received += 1
        self.received_bytes += one.received
        one.is_over, one.cached_tokens = True, max(one.here, min(max(cached_tokens, 0), len(one.prompt)))
        assert one.incoming is not None
        event(_LOG, "received", logging.DEBUG, peer=one.incoming.address, tokens=len(one.prompt), bytes=one.received)

    def _failed(self, one: Arrival, why: str, now: float, is_declined: bool) -> None:
        """Asks somebody else, or lets it be computed here."""
        address = "" if one.incoming is None else one.incoming.address
        if now <= one.ends and address:
            self._bad_until[address] = now + (_DECLINED_S if is_declined else _PAUSE_S)
        self._drop(one)
        will_ask = 0 < len(one.tried) < _MOST_TRIES and one.ledger is self._engine.ledger and self._ask(one, now)
        event(_LOG, "not_received", logging.WARNING, peer=address, tokens=len(one.prompt), why=why,
              then="another peer" if will_ask else "computed here")  # fmt: skip
        if not will_ask:
            self.num_recomputed += 1
            one.is_over = True

    def _drop(self, one: Arrival) -> None:
        """Lets go of what has come so far; whole blocks stay."""
        if one.incoming is not None:
            one.incoming.is_cancelled = True
        if one.landing is not None and one.ledger is self._engine.ledger:
            one.landing.cancel()
        one.landing = None

    def cancel(self, one: Arrival) -> None:
        """Nobody wants it any more."""
        if one in self._all:
            del self._all[one]
            self._drop(one)

    @property
    def next_deadline(self) -> float:
        """Nothing has to be ended before."""
        return min((one.ends for one in self._all), default=math.inf)


def _encoded(tokens: Sequence[int]) -> bytes:
    """As they travel: little-endian int32."""
    ids = array("i", tokens)
    assert ids.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
