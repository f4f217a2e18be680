"""What an engine's process does with other engines: one object that the loop asks between steps."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lamina.base.peers import PeerConfig
from lamina.engine.engine import Engine
from lamina.engine.moves_in import Arrival, MovesIn
from lamina.engine.moves_out import MovesOut
from lamina.engine.peer_channel import read_peer_key
from lamina.engine.peer_list import PeerList
from lamina.engine.peer_nixl import Nixl
from lamina.engine.peer_node import PeerNode
from lamina.memory.layout import Layout
from lamina.memory.tokens import TOKEN_BYTES

__all__ = ["Arrival", "MoveCounts", "Moves"]


@dataclass(frozen=True, slots=True)
class MoveCounts:
    """states  sent, declined, received, recomputed, as in wire.Stats.   nbytes  sent, received.   arriving  now."""

    states: dict[str, int]
    nbytes: dict[str, int]
    arriving: int = 0


class Moves:
    """Peers of one engine. address  where others ask this one; "" where they do not.

    wake  ends the loop's wait, from any thread. Raises ConfigError for a key, an address or a list that cannot be used.
    """

    def __init__(self, engine: Engine, config: PeerConfig, wake: Callable[[], None]) -> None:
        key = read_peer_key(Path(config.key_file) if config.key_file else None)
        layout = engine.layout
        self._node = PeerNode(
            key, (engine.ledger.index.model_id, layout.layout_id), engine.max_model_len, most_piece_bytes(layout), wake,
            Nixl(f"lamina-{os.getpid()}-{id(self)}") if config.transport == "nixl" else None,
        )  # fmt: skip
        self._out = MovesOut(engine)
        self._in: MovesIn | None = None
        if config.peers:
            self._in = MovesIn(engine, self._node, PeerList(config.peers, bool(key)), config)
        self.address = self._node.listen(config.listen) if config.listen else ""

    @property
    def is_busy(self) -> bool:
        """Whether memory is held for what moves: requests may have to wait for it although nothing runs."""
        return bool(len(self._out) or (self._in is not None and len(self._in)))

    @property
    def next_deadline(self) -> float:
        """Nothing has to be ended before."""
        return min(self._out.next_deadline, math.inf if self._in is None else self._in.next_deadline)

    def begin(self, tokens: list[int], salt: str, priority: int, hint: str, deadline: float) -> Arrival | None:
        """Lets somebody else compute a prompt; None where it is to be computed here."""
        return None if self._in is None else self._in.begin(tokens, salt, priority, hint, deadline)

    def cancel(self, arrival: Arrival) -> None:
        """Nobody wants it any more."""
        if self._in is not None:
            self._in.cancel(arrival)

    def pump(self) -> list[Arrival]:
        """Goes on with everything; gives the prompts that can be served now, whether their state came or not."""
        while self._node.wanted:
            outgoing = self._node.wanted.popleft()
            tokens: list[int] = np.frombuffer(outgoing.tokens, "<i4").tolist()
            self._out.add(outgoing, tokens)
        self._out.pump()
        return [] if self._in is None else self._in.pump()

    def counts(self) -> MoveCounts:
        """Since the start."""
        out, back = self._out, self._in
        states, nbytes = {"sent": out.num_sent, "declined": out.num_failed}, {"sent": out.sent_bytes}
        if back is not None:
            states |= {"received": back.num_received, "recomputed": back.num_recomputed}
            nbytes["received"] = back.received_bytes
        return MoveCounts(states, nbytes, 0 if back is None else len(back))

    def close(self) -> None:
        """Listens no more."""
        self._node.close()


def most_piece_bytes(layout: Layout) -> int:
    """What no piece exceeds."""
    assert TOKEN_BYTES == 4
    pages = max([1, layout.slot_pages, *(tail.pages for tail in layout.tails)])
    return pages * layout.page_bytes
