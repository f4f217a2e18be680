"""States that other engines want: each prompt is an ordinary request of one token here, and its state leaves as it comes."""

import logging
import math
import time
from collections.abc import Iterator, Sequence

from lamina.base.errors import LaminaError
from lamina.base.log import event, get_logger
from lamina.engine.engine import Engine, Group
from lamina.engine.peer_node import Outgoing
from lamina.engine.peer_wire import Declined, Done, Offer, Part
from lamina.memory.lease import Hold
from lamina.memory.ledger import Ledger
from lamina.memory.manifest import checksums_of, encode_manifest, make_manifest, moved_position
from lamina.memory.pieces import BLOCK, Piece, pack_piece, pieces
from lamina.schedule.sampling_params import SamplingParams

_LOG = get_logger(__name__)
_OWNER = "peer"
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class _Departure:
    """One state on its way out. held  keeps it in memory once its prompt has been computed."""

    def __init__(self, engine: Engine, outgoing: Outgoing, tokens: list[int]) -> None:
        self.engine = engine
        self.ledger: Ledger = engine.ledger
        self.outgoing = outgoing
        self.ends = time.monotonic() + outgoing.want.deadline_s
        self.held: Hold | None = None
        layout, first = engine.layout, outgoing.want.first_block
        self.position = moved_position(layout, len(tokens))
        self.prompt = self.ledger.prompt(tokens[: self.position], outgoing.want.cache_salt)
        if not 0 <= first <= layout.blocks_for(self.position) or not self.position:
            raise LaminaError(f"a state of {self.position} tokens from block {first} on cannot be had")
        self._lag = max((memory.lag for memory in layout.memories), default=0)
        self._manifest: bytes | None = encode_manifest(
            make_manifest(layout, self.ledger.index.model_id, self.prompt, first)
        )  # fmt: skip
        self._left: Iterator[Piece] = pieces(layout, self.position, True, first)
        self._next = next(self._left, None)
        self.group: Group = engine.add(
            tokens, _ONE_TOKEN, cache_salt=outgoing.want.cache_salt, priority=outgoing.want.priority, owner=_OWNER
        )

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be sent."""
        return self.outgoing.is_ended or self.outgoing.is_gone

    def advance(self, now: float) -> int:
        """Queues what is ready, as far as there is room for it; the bytes of it."""
        if self.engine.ledger is not self.ledger:
            raise LaminaError("a step failed and the memory starts empty")
        if now > self.ends:
            raise LaminaError("the prompt was not computed in time")
        if self.group.is_finished and self.held is None:
            self._hold()
        sent = 0
        while (piece := self._next) is not None and self._is_ready(piece):
            if self._manifest is not None:
                if not self.outgoing.put(Offer(), self._manifest):
                    return sent
                self._manifest = None
            if self.outgoing.items.full():
                return sent
            body = pack_piece(self.engine.worker.arena.read_page, self._pages(piece), piece)
            queued = self.outgoing.put(Part(piece.kind, piece.number, piece.tail, checksums_of(piece, body)), body)
            assert queued, "only this thread fills the queue"
            sent += len(body)
            self._next = next(self._left, None)
        if self._next is None and self.held is not None:
            self.outgoing.put(Done(self.group.requests[0].cached_tokens))
        return sent

    def _hold(self) -> None:
        """Keeps the computed state where it is."""
        self.engine.run_orders()
        held = self.ledger.hold(self.prompt)
        if held is not None and held.position != self.position:
            self.ledger.release(held)
            held = None
        if held is None:
            why = self.group.requests[0].finish_reason
            raise LaminaError(f"the state was not kept: its prompt ended with {why} and memory is short")
        self.held = held

    def _is_ready(self, piece: Piece) -> bool:
        """Whether a piece will not change any more: everything at the end, full blocks before."""
        if self.held is not None:
            return True
        lease = self.group.requests[0].lease
        if lease is None or piece.kind != BLOCK:
            return False
        return (piece.number + 1) * self.engine.layout.block_tokens + self._lag <= lease.committed

    def _pages(self, piece: Piece) -> Sequence[int]:
        if self.held is None:
            lease = self.group.requests[0].lease
            assert lease is not None
            return (lease.blocks[piece.number],)
        if piece.kind == BLOCK:
            return (self.held.blocks[piece.number],)
        return self.held.checkpoint if piece.tail is None else self.held.tails[piece.tail][piece.number]

    def close(self) -> None:
        """Lets go of everything."""
        if not self.group.is_finished:
            self.engine.cancel(self.group)
        if self.held is not None and self.engine.ledger is self.ledger:
            self.ledger.release(self.held)
        self.held = None


class MovesOut:
    """All of them. Called by the loop that owns the engine, between steps. num_sent, sent_bytes, num_failed  count."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._all: dict[_Departure, None] = {}
        self.num_sent = self.sent_bytes = self.num_failed = 0

    def __len__(self) -> int:
        return len(self._all)

    def add(self, outgoing: Outgoing, tokens: list[int]) -> None:
        """Begins with the prompt of a state that is wanted, or says why not."""
        try:
            self._engine.check(tokens, _ONE_TOKEN)
            self._all[_Departure(self._engine, outgoing, tokens)] = None
        except LaminaError as error:
            self._decline(outgoing, str(error))

    def pump(self) -> None:
        """Sends on what there is; ends what has been sent, has failed, or is not wanted any more."""
        now = time.monotonic()
        for one in list(self._all):
            try:
                if not one.is_over:
                    self.sent_bytes += one.advance(now)
                is_over = one.is_over
            except LaminaError as error:
                self._decline(one.outgoing, str(error))
                is_over = True
            if is_over:
                if one.outgoing.is_gone and not one.outgoing.is_ended:
                    self.num_failed += 1
                elif one.held is not None:
                    self.num_sent += 1
                del self._all[one]
                one.close()

    def _decline(self, outgoing: Outgoing, why: str) -> None:
        self.num_failed += 1
        event(_LOG, "state_declined", logging.WARNING, why=why)
        if not outgoing.put(Declined(" ".join(why.split()))):
            outgoing.is_gone = True  # its queue is full of what nobody reads: it runs into its own deadline

    @property
    def next_deadline(self) -> float:
        """Nothing has to be ended before."""
        return min((one.ends for one in self._all), default=math.inf)
