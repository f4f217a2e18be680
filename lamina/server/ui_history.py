"""The last minutes of a server, second by second, from its engine's statistics: what the web page draws as lines."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lamina.engine.wire import Stats
from lamina.server.state import GenerationRecord

#: seconds that are kept
SPAN_S = 300
#: ended requests that are kept
NUM_ENDED = 200


@dataclass(frozen=True, slots=True)
class Second:
    """About one second. Rates are tokens per second; prefill: computed for prompts, decode: drawn."""

    time_s: float
    prefill: float
    decode: float
    prompt_tokens: int
    cached_tokens: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended and had a first token."""

    time_s: float
    first_token_s: float


class History:
    """Seconds and ended requests, oldest first. An Observer of the server and a listener of its engine; O(1) for each news."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: deque[Second] = deque(maxlen=SPAN_S)
        self.ended: deque[Ended] = deque(maxlen=NUM_ENDED)
        self.stats: Stats | None = None
        self._clock = clock
        self._from: tuple[float, Stats] | None = None  # where the second that is being filled began

    @property
    def now(self) -> float:
        """The time on the history's clock."""
        return self._clock()

    def on_stats(self, stats: Stats) -> None:
        """The engine's news."""
        now = self._clock()
        self.stats = stats
        if self._from is None:
            self._from = now, stats
            return
        began, before = self._from
        if now - began < 1:
            return
        self._from = now, stats
        computed, drawn = stats.computed_tokens - before.computed_tokens, stats.drawn_tokens - before.drawn_tokens
        self.seconds.append(
            Second(
                now, max(0, computed - drawn) / (now - began), drawn / (now - began),
                stats.prompt_tokens - before.prompt_tokens, stats.cached_tokens - before.cached_tokens,
                stats.running, stats.waiting,
            )
        )  # fmt: skip

    def on_generation(self, record: GenerationRecord) -> None:
        """A prompt has ended."""
        if record.first_token_s is not None:
            self.ended.append(Ended(self._clock(), record.first_token_s))

    def on_tokens(self, num_tokens: int, gap_s: float) -> None:
        """Nothing."""

    def on_response(self, method: str, route: str, status: int, seconds: float) -> None:
        """Nothing."""

    @property
    def hit_rate(self) -> float | None:
        """Share of the last minutes' prompt tokens that were found in the cache; None: there were no prompts."""
        prompts = sum(second.prompt_tokens for second in self.seconds)
        return min(1.0, sum(second.cached_tokens for second in self.seconds) / prompts) if prompts else None
