"""Who comes first, and who gets which part of a step. Pure rules; the scheduler asks them.

Turn. A request has one place in one order for its whole life: the step in which it came plus AGING_STEPS for each unit of
priority (lower is better), then its number. Waiting therefore improves its place against whoever comes later, by one unit of
priority in AGING_STEPS steps, and only finitely many requests can ever come before it. Requests are admitted in this order and
lose their memory in the opposite one, so the worst effective priority goes first, and of equals the last to come.

Rows. Decodes come first. Of the rows that they leave, the first prefill in turn gets at least half, so that the first always
gets on and nobody starves; prefills with less left than the first share the other half, shortest first, so that a short prompt
does not wait behind a long one (of equals, one finishes before the next begins: all of them halfway would be later for all).
What is not used so goes in turn. Where a prefill is cut, it is cut at a multiple of CUT_TOKENS; only the first in turn may be cut
elsewhere, where no such multiple is in reach.

Overtaking. A request that finds no memory lets those behind it try. Once MAX_OVERTAKEN of them have been admitted in front of it
nobody does any more: what runs ends, and it has the memory. Nobody overtakes one that has been preempted: it would be for memory
that was just too little. A request that waits only for rows is not held up like that: it is
first in turn as soon as those before it have their prompts done.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

#: a unit of priority is worth so many steps of waiting
AGING_STEPS = 256
#: where prefills are cut, so that their bits do not depend on the cuts
CUT_TOKENS = 128
#: requests that may be admitted in front of one that waits for memory
MAX_OVERTAKEN = 16
#: after so many steps, requests that did not fit are asked again even if no more memory is there
ASK_AGAIN_STEPS = 16
#: requests that are asked in one step whether they fit, besides those that do, and that are looked at in all
MAX_ASKED, MAX_LOOKED_AT = 4, 64

#: the smaller one comes first
Turn: TypeAlias = tuple[int, int]


class Prefill(NamedTuple):
    """A request with more than one token to compute.

    position  tokens computed or planned.   left  tokens after these.   wanted  of these, the ones up to its next own cut.
    """

    turn: Turn
    position: int
    wanted: int
    left: int


def turn_of(priority: int, step: int, number: int) -> Turn:
    """The place of a request that comes at `step` as the `number`-th."""
    return step + AGING_STEPS * priority, number


def may_overtake(num_overtaken: int, num_preemptions: int) -> bool:
    """Whether a request that waits for memory, and was overtaken and preempted so often, lets one more pass."""
    return num_overtaken < MAX_OVERTAKEN and not num_preemptions


def cut(position: int, wanted: int, rows: int, is_first: bool) -> int:
    """Tokens of a prefill at `position` to compute with so many rows: all wanted, or up to a multiple of CUT_TOKENS."""
    if wanted <= rows:
        return wanted
    stop = (position + rows) // CUT_TOKENS * CUT_TOKENS
    return stop - position if stop > position else rows * is_first


def first_share(rows: int) -> int:
    """Rows that the first prefill in turn can count on."""
    return rows - rows // 2


def share(prefills: Sequence[Prefill], rows: int) -> list[int]:
    """Tokens of each prefill in the next step; they are given in order of turn. O(n log n)."""
    granted = [0] * len(prefills)
    if not prefills or rows <= 0:
        return granted
    first = prefills[0]
    shorter = [at for at in range(1, len(prefills)) if prefills[at].left < first.left]
    kept = min(first.wanted, first_share(rows))
    rest = rows - kept
    for at in sorted(shorter, key=lambda at: prefills[at].left):
        granted[at] = cut(prefills[at].position, prefills[at].wanted, rest, False)
        rest -= granted[at]
    rest += kept
    for at, one in enumerate(prefills):
        if not granted[at]:
            granted[at] = cut(one.position, one.wanted, rest, at == 0)
            rest -= granted[at]
    return granted


class Room:
    """Whether one more prefill would get rows, without sharing them out each time. O(1) but for a new first in turn.

    rows  what is left for the prefills that have been added; the caller lowers it for those that simply get all they want.
    """

    __slots__ = ("_all_rows", "_first", "_prefills", "_shorter", "_used", "rows")

    def __init__(self, rows: int) -> None:
        self.rows = self._all_rows = rows
        self._prefills: list[Prefill] = []
        self._first: Prefill | None = None
        self._used = self._shorter = 0

    def has(self, one: Prefill) -> bool:
        """Whether it would get any: it is the first in turn, or all want less than there is, or it is short enough."""
        first, least = self._first, min(one.wanted, CUT_TOKENS)
        if self.rows <= 0:
            return False
        if first is None:
            return least <= self.rows or self.rows == self._all_rows
        if one.turn < first.turn or self._used + least <= self.rows:
            return True
        return one.left < first.left and least <= self.rows - min(first.wanted, first_share(self.rows)) - self._shorter

    def add(self, one: Prefill) -> None:
        """One more takes part."""
        self._prefills.append(one)
        if self._first is None or one.turn < self._first.turn:
            self._first = one
            self._used = sum(other.wanted for other in self._prefills)
            self._shorter = sum(other.wanted for other in self._prefills if other.left < one.left)
        else:
            self._used += one.wanted
            self._shorter += one.wanted if one.left < self._first.left else 0
