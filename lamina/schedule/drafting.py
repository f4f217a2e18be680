"""Tokens drafted ahead for one request: where guesses come from, and how many of them pay.

A guess is a token put into a step before it has been drawn. Each row is drawn from with the random number of its own place in
the output, as it would be alone; a guess counts if it is exactly the token that was drawn. So what comes out does not depend on
the guesses, at any temperature.

How many. With a chance `a` that a guess is right, d guesses give (1 - a^(d+1)) / (1 - a) tokens for 1 + d * cost of a step: the d
with most tokens for the cost is taken. Where that is none, nothing is guessed for a while, and then it is tried again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from lamina.schedule.lookup import LENGTHS, Lookup

#: what one more row of a step costs, against a step with one row, and what a token costs that the model drafts
_ROW_COST, _GPU_ROW_COST, _DRAFT_COST = 0.15, 0.04, 0.1
#: what a request's chance is taken for before anything is known, as so many guesses with so many right
_PRIOR_TRIES, _PRIOR_HITS = 4.0, 2.0
#: how much an older guess counts for each later step
_DECAY = 0.9
#: tokens without guesses after they did not pay, doubled from time to time
_FIRST_WAIT, _LAST_WAIT = 16, 512


@dataclass(frozen=True, slots=True)
class DraftRule:
    """most  guesses in a step.   by_model  the model's draft blocks make them, else a lookup.   row_cost  of one more row,
    draft_cost  of one more token that the model drafts, both against a step with one row a request.   with_penalties  also for
    requests whose draws look at the tokens before them."""

    most: int
    by_model: bool
    row_cost: float
    draft_cost: float = 0.0
    with_penalties: bool = True


def draft_rule(most: int, by_model: bool, on_gpu: bool) -> DraftRule | None:
    """The rule with costs as they were measured; None where nothing is drafted."""
    cost = _GPU_ROW_COST if on_gpu else _ROW_COST
    return DraftRule(most, by_model, cost, _DRAFT_COST if by_model else 0.0, not on_gpu) if most else None


@dataclass(slots=True)
class DraftCounts:
    """Counters that only grow. drafts  steps of a request with guesses.   by_place  guesses that were right, by their place."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    by_place: list[int] = field(default_factory=list)

    @property
    def rejected(self) -> int:
        """Tokens that were not drawn."""
        return self.tokens - self.accepted

    def note(self, num_guesses: int, num_right: int) -> None:
        """One more step of one request."""
        self.drafts += 1
        self.tokens += num_guesses
        self.accepted += num_right
        for place in range(num_right):
            self.by_place[place] += 1

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        places = [sum(pair) for pair in zip_longest(self.by_place, other.by_place, fillvalue=0)]
        return DraftCounts(self.drafts + other.drafts, self.tokens + other.tokens, self.accepted + other.accepted, places)


class Pace:
    """How many guesses pay for one request and one source of guesses."""

    __slots__ = ("_cost", "_hits", "_tries", "_until", "_wait")

    def __init__(self, cost: float) -> None:
        self._cost = cost
        self._tries, self._hits = _PRIOR_TRIES, _PRIOR_HITS
        self._wait, self._until = _FIRST_WAIT, 0

    def length(self, most: int, num_tokens: int) -> int:
        """Guesses worth making, at most `most`, when the request has `num_tokens` tokens."""
        if num_tokens < self._until:
            return 0
        best, length = 1.0, 0
        share = self._hits / self._tries
        power = given = 1.0
        for count in range(1, most + 1):
            power *= share
            given += power
            if given / (1.0 + count * self._cost) > best:
                best, length = given / (1.0 + count * self._cost), count
        if length:
            return length
        if self._until:  # it has waited: once more, with a little
            return min(most, 1)
        self._until = num_tokens + self._wait
        return 0

    def is_going(self, num_tokens: int) -> bool:
        """Whether guesses are being made, or it is time to try again."""
        return num_tokens + 1 >= self._until

    def note(self, num_guesses: int, num_right: int, num_tokens: int) -> None:
        """Of so many guesses the first `num_right` were right; the request has `num_tokens` tokens now."""
        self._tries = self._tries * _DECAY + min(num_guesses, num_right + 1)
        self._hits = self._hits * _DECAY + num_right
        if num_right:
            if num_right == num_guesses:
                self._wait = _FIRST_WAIT
            if self._until:
                self._tries, self._hits, self._until = _PRIOR_TRIES, _PRIOR_HITS, 0
        elif self._until:
            self._wait = min(2 * self._wait, _LAST_WAIT)
            self._until = num_tokens + self._wait


class Drafting:
    """The guesses of one request. accepted, rejected  so far, those of steps that nobody needed left out."""

    __slots__ = ("_level", "_lookup", "_paces", "_proposal", "accepted", "rejected", "rule")

    def __init__(self, rule: DraftRule) -> None:
        self.rule = rule
        self.accepted = self.rejected = 0
        self._lookup = None if rule.by_model else Lookup()
        self._paces = [Pace(rule.row_cost + rule.draft_cost) for _ in (range(1) if rule.by_model else LENGTHS)]
        self._level = 0
        self._proposal: tuple[int, tuple[int, ...]] = (0, ())  # for a request with so many tokens

    def wanted(self, num_tokens: int) -> int:
        """Tokens that the model should draft once the next one is drawn; the request has `num_tokens` before that."""
        return self._paces[0].length(self.rule.most, num_tokens + 1) if self.rule.by_model else 0

    def is_ready(self, tokens: Sequence[int]) -> bool:
        """Whether the next step may get guesses, as far as can be said while the token before it is still being drawn."""
        if self._lookup is None:
            return self._paces[0].is_going(len(tokens))
        level, _ = self._lookup.guess(tokens, 1)
        return level >= 0 and self._paces[level].is_going(len(tokens))

    def propose(self, num_tokens: int, drafts: Sequence[int]) -> None:
        """What the model drafted for a request that has `num_tokens` tokens now."""
        self._proposal = num_tokens, tuple(drafts)

    def guesses(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Guesses of the tokens that follow, at most `most`."""
        if self._lookup is None:
            num_tokens, found = self._proposal
            return found[:most] if num_tokens == len(tokens) else ()
        level, found = self._lookup.guess(tokens, min(most, self.rule.most))
        if not found:
            return ()
        self._level = level
        return found[: self._paces[level].length(len(found), len(tokens))]

    def note(self, num_guesses: int, num_right: int, num_tokens: int) -> None:
        """The guesses made last have been looked at; the request has `num_tokens` tokens now."""
        self.accepted += num_right
        self.rejected += num_guesses - num_right
        self._paces[self._level].note(num_guesses, num_right, num_tokens)
