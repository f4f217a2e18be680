"""What to give up first: the item that has lain unused longest for what it saves and for how likely it is wanted again.

    score = (steps since last use + 32) / (tokens saved per page x return rate of its kind)       the highest goes first

How likely is learned. Items fall into classes: blocks, checkpoints, and checkpoints that a later one on their path has
replaced, each by uses so far (0, 1, 2, 3 or more). Waiting times are taken to have a Pareto tail; its index, the return rate,
is the number of returns over the sum of log(1 + age / 32) of all that was used again or given up (the most likely value,
with those not seen again counted as still waiting). So one-off prompts teach that new blocks do not return, and give way to
what does. What was given up is remembered for a while: coming back counts as a return, and brings the old uses along.
"""

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol

#: a density below this many tokens a page counts as this
_LEAST = 2.0**-6
#: ages are measured in this many steps of the ledger's clock
_AGE = 32.0
#: uses beyond this make no class of their own
_MOST_USES = 3
_ROLES = 3
#: so many observations are remembered in full; then old ones count half
_MEMORY = 4096.0
_LOWEST_RATE = 1e-3
#: what was given up is remembered until so many others have been
_GHOSTS = 8192


class Evictable(Protocol):
    """Something the queue can give up. Only the queue writes `queued`: the number of its queue, or -1."""

    stamp: int
    uses: int
    queued: int

    @property
    def role(self) -> int:
        """0 a block, 1 a checkpoint, 2 a checkpoint that has been replaced."""
        ...

    @property
    def evictable(self) -> bool:
        """Whether nobody stands on it or hangs on it."""
        ...

    @property
    def density(self) -> float:
        """Tokens that one of its pages saves whoever needs it again."""
        ...


class ReturnRates:
    """How often items of each class are wanted again, learned from what happens to them."""

    __slots__ = ("_ghosts", "_returns", "_waits", "rates")

    def __init__(self) -> None:
        self._returns = [1.0] * (_ROLES * (_MOST_USES + 1))
        self._waits = [2.0] * len(self._returns)
        self.rates = [0.5] * len(self._returns)
        self._ghosts: OrderedDict[Hashable, tuple[int, int, float, int]] = OrderedDict()  # uses, stamp, wait counted, class

    def used(self, item: Evictable, now: int, count: int = 1) -> None:
        """An item, and so many in all that were last used when it was and as often, are wanted again."""
        self._note(_class_of(item), count * _wait(now - item.stamp), float(count))

    def gone(self, key: Hashable, item: Evictable, now: int) -> None:
        """An item is given up; it may come back under this key."""
        kind, wait = _class_of(item), _wait(now - item.stamp)
        self._note(kind, wait, 0.0)
        self._ghosts[key] = (item.uses, item.stamp, wait, kind)
        self._ghosts.move_to_end(key)
        if len(self._ghosts) > _GHOSTS:
            _, (_, stamp, counted, kind) = self._ghosts.popitem(last=False)
            self._note(kind, _wait(now - stamp) - counted, 0.0)

    def back(self, key: Hashable, now: int) -> int:
        """Something is stored under a key: the uses it has had if it was given up not long ago, with this one; else 0."""
        ghost = self._ghosts.pop(key, None)
        if ghost is None:
            return 0
        uses, stamp, counted, kind = ghost
        self._note(kind, _wait(now - stamp) - counted, 1.0)
        return uses + 1

    def _note(self, kind: int, wait: float, returns: float) -> None:
        self._waits[kind] += max(wait, 0.0)
        self._returns[kind] += returns
        if self._waits[kind] + self._returns[kind] > _MEMORY:
            self._waits[kind] /= 2
            self._returns[kind] /= 2
        self.rates[kind] = max(self._returns[kind] / self._waits[kind], _LOWEST_RATE)


class EvictionQueue:
    """Items that could be evicted, in one queue by last use for each class and density (to half powers of two)."""

    __slots__ = ("_heaps", "_order", "learned")

    def __init__(self) -> None:
        self.learned = ReturnRates()
        self._heaps: dict[int, list[tuple[int, int, Evictable]]] = {}
        self._order = itertools.count()

    def offer(self, item: Evictable) -> None:
        """Queues an item that is evictable, unless it is in its queue already. What is left in another is out of date."""
        queue = _queue_of(item)
        if item.queued != queue:
            item.queued = queue
            heapq.heappush(self._heaps.setdefault(queue, []), (item.stamp, next(self._order), item))

    def pop(self, now: int) -> Evictable | None:
        """The item with the highest score at time `now`, taken out; None if there is none."""
        rates = self.learned.rates
        while self._heaps:
            best, most = -1, -1.0
            for queue, heap in self._heaps.items():
                kind, density = divmod(queue, _DENSITIES)
                score = (max(now - heap[0][0], 0) + _AGE) / (rates[kind] * _POWERS[density])
                if score > most:
                    best, most = queue, score
            heap = self._heaps[best]
            stamp, _, item = heapq.heappop(heap)
            if not heap:
                del self._heaps[best]
            if item.queued != best:
                continue  # it has moved to another queue since
            item.queued = -1
            if not item.evictable:
                continue  # offered again when it is
            if item.stamp <= stamp and _queue_of(item) == best:
                return item
            self.offer(item)  # used since, or worth something else now
        return None


_DENSITIES = 128
_POWERS = [_LEAST * 2.0 ** (step / 2) for step in range(_DENSITIES)]


def _class_of(item: Evictable) -> int:
    return item.role * (_MOST_USES + 1) + min(item.uses, _MOST_USES)


def _queue_of(item: Evictable) -> int:
    step = round(2 * math.log2(max(item.density / _LEAST, 1.0)))
    return _class_of(item) * _DENSITIES + min(step, _DENSITIES - 1)


def _wait(age: int) -> float:
    return math.log1p(max(age, 0) / _AGE)
