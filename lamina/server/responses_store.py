"""Responses that clients may ask for again or go on from: in memory only, bounded, each API key for itself."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lamina.base.sizes import MiB
from lamina.chat.records import Message

#: what an object of ours costs besides its texts
_OVERHEAD = 256


@dataclass(slots=True)
class Turn:
    """The messages that one response added, input and answer, and the turn before it. Later responses share it.

    users  responses and later turns that hold it; its bytes count as long as there is one.
    """

    messages: tuple[Message, ...]
    before: "Turn | None"
    num_bytes: int
    users: int = 0

    def history(self) -> list[Message]:
        """All messages up to here, oldest first."""
        return [message for turn in reversed(list(self._back())) for message in turn.messages]

    def _back(self) -> "Iterator[Turn]":
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.before


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was answered (JSON) and what a next one goes on from. num_input  messages of its turn that are input."""

    body: bytes
    turn: Turn
    kept_at: float
    num_input: int = 0

    def input(self) -> list[Message]:
        """What it answered, oldest first, without instructions."""
        return [*(self.turn.before.history() if self.turn.before else ()), *self.turn.messages[: self.num_input]]

    @property
    def num_bytes(self) -> int:
        """What it costs besides its turn."""
        return len(self.body) + _OVERHEAD


class ResponseStore:
    """Keeps at most so many responses and bytes, the least recently used go first, none longer than max_age_s."""

    def __init__(
        self, max_responses: int = 4096, max_bytes: int = 256 * MiB, max_age_s: float = 86_400.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.max_responses, self.max_bytes, self.max_age_s = max_responses, max_bytes, max_age_s
        self.num_bytes = 0
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(
        self, owner: str, id: str, body: bytes, messages: tuple[Message, ...], before: Turn | None, num_input: int = 0
    ) -> None:
        """Keeps a response of `owner`. One that is larger than the store is not kept. num_input  as in StoredResponse."""
        self.drop(owner, id)
        turn = Turn(messages, before, sum(map(_size, messages)) + _OVERHEAD)
        stored = StoredResponse(body, turn, self._clock(), num_input)
        if turn.num_bytes + stored.num_bytes > self.max_bytes:
            return
        self._hold(turn)
        self.num_bytes += stored.num_bytes
        self._kept[owner, id] = stored
        while self._kept and (len(self._kept) > self.max_responses or self.num_bytes > self.max_bytes or self._is_old()):
            self._remove(next(iter(self._kept)))

    def get(self, owner: str, id: str) -> StoredResponse | None:
        """A response of `owner`; None where there is none (any more)."""
        found = self._kept.get((owner, id))
        if found is None:
            return None
        if self._clock() - found.kept_at > self.max_age_s:
            self._remove((owner, id))
            return None
        self._kept.move_to_end((owner, id))
        return found

    def drop(self, owner: str, id: str) -> bool:
        """Forgets a response of `owner`; whether there was one. Responses that went on from it keep what they need."""
        if (owner, id) not in self._kept:
            return False
        self._remove((owner, id))
        return True

    def _is_old(self) -> bool:
        return self._clock() - next(iter(self._kept.values())).kept_at > self.max_age_s

    def _remove(self, key: tuple[str, str]) -> None:
        stored = self._kept.pop(key)
        self.num_bytes -= stored.num_bytes
        turn: Turn | None = stored.turn
        while turn is not None:
            turn.users -= 1
            if turn.users:
                break
            self.num_bytes -= turn.num_bytes
            turn = turn.before

    def _hold(self, held: Turn) -> None:
        """One more user of a turn. One that had none (dropped since it was looked up) counts again, as do those before it."""
        turn: Turn | None = held
        while turn is not None:
            turn.users += 1
            if turn.users > 1:
                break
            self.num_bytes += turn.num_bytes
            turn = turn.before


def _size(message: Message) -> int:
    texts = [message.content, message.reasoning, message.name or "", message.tool_call_id or ""]
    texts += [text for call in message.tool_calls for text in (call.id, call.name, call.arguments)]
    return _OVERHEAD + 4 * sum(map(len, texts))
