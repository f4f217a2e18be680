"""Where guesses come from and how many are made: against brute force, and against what they gain and cost."""

import random
from collections.abc import Sequence

import pytest

from lamina.schedule import lookup
from lamina.schedule.drafting import DraftCounts, Drafting, DraftRule, Pace
from lamina.schedule.lookup import LENGTHS, Lookup

RULE = DraftRule(most=5, by_model=False, row_cost=0.15)


def brute(tokens: Sequence[int], most: int) -> tuple[int, tuple[int, ...]]:
    """What followed the latest earlier occurrence of the longest n-gram that the tokens end with."""
    for level, length in enumerate(LENGTHS):
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and tokens[end - length : end] == tokens[-length:]:
                found = list(tokens[end:])
                while len(found) < most:
                    found.append(found[len(found) - (len(tokens) - end)])
                return level, tuple(found[:most])
    return -1, ()


@pytest.mark.parametrize("seed", range(6))
def test_what_followed_the_last_time(seed: int) -> None:
    """Few ids, so that much comes again; tokens come one by one, by the hundred, and all at once."""
    draw = random.Random(seed)
    vocabulary = [draw.randrange(1 << 17) for _ in range(draw.choice([2, 4, 9]))]
    tokens: list[int] = []
    found, num_forgotten = Lookup(), 0
    for _ in range(60):
        tokens += draw.choices(vocabulary, k=draw.choice([0, 1, 1, 2, 63, 64, 65, 200]))
        most = draw.randint(1, 7)
        guess = found.guess(tokens, most)
        assert guess == Lookup().guess(tokens, most)
        num_forgotten += guess != brute(tokens, most)
    assert len(tokens) > 1024, "the tables have grown"
    assert num_forgotten <= 2, "two n-grams hardly ever meet in a slot"


def test_ngrams_that_meet_in_a_slot_are_not_mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With four slots nearly all meet: guesses are rarer, and still what followed."""
    monkeypatch.setattr(lookup, "_FIRST_SLOTS", 4)
    monkeypatch.setattr(Lookup, "_slot", lambda self, tokens, end, length: sum(tokens[end - length + 1 : end + 1]) % 4)
    monkeypatch.setattr(lookup, "_TOGETHER", 1 << 30)
    draw, tokens, found = random.Random(1), [], Lookup()
    hits = 0
    for _ in range(300):
        tokens.append(draw.randrange(3))
        level, guess = found.guess(tokens, 1)
        if level >= 0:
            hits += 1
            length = LENGTHS[level]
            ends = [e for e in range(length, len(tokens)) if tokens[e - length : e] == tokens[-length:]]
            assert guess[0] in [tokens[end] for end in ends]
    assert hits > 20


def test_guesses_that_do_not_pay_stop_and_are_tried_again() -> None:
    pace, num_tokens, lengths = Pace(0.15), 100, []
    for _ in range(600):
        lengths.append(pace.length(5, num_tokens))
        if lengths[-1]:
            pace.note(lengths[-1], 0, num_tokens + 1)
        num_tokens += 1
    assert lengths[0] >= 2 and sum(lengths[:20]) <= 12, "it gives up soon"
    assert 1 <= sum(lengths[100:]) <= 8 and max(lengths[20:]) == 1, "now and then it tries one"
    assert not pace.is_going(num_tokens - 400) or pace.is_going(num_tokens)
    while not pace.length(5, num_tokens):
        num_tokens += 1
    pace.note(1, 1, num_tokens)
    assert pace.length(5, num_tokens + 1) >= 2, "one that is right starts it again"


@pytest.mark.parametrize(
    ("share", "cost", "expected"), [(1.0, 0.15, 5), (0.9, 0.02, 5), (0.7, 0.15, 3), (0.3, 0.5, 0), (0.1, 0.15, 0)]
)
def test_as_many_as_gain_most_for_their_cost(share: float, cost: float, expected: int) -> None:
    pace = Pace(cost)
    for _ in range(60):  # single guesses, of which that share is right
        pace.note(1, 0, 0)
    pace._tries, pace._hits, pace._until = 100.0, 100.0 * share, 0
    gains = [sum(share**place for place in range(count + 1)) / (1 + count * cost) for count in range(6)]
    best = max(range(6), key=lambda count: (round(gains[count], 12), -count))
    assert pace.length(5, 10) == best == expected


def test_each_source_has_a_pace_of_its_own() -> None:
    """Long n-grams go on where short ones have been given up."""
    one = Drafting(RULE)
    for _ in range(40):
        one._level = 1
        one.note(2, 0, 50)
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5]
    assert one.guesses(text, 5)[:2] == (6, 7)
    assert one.guesses([9, 9, 4, 3, 2, 8, 8, 4, 3, 2], 5) == ()
    assert (one.accepted, one.rejected) == (0, 80)


def test_drafts_of_the_model_are_for_one_length_alone() -> None:
    one = Drafting(DraftRule(most=3, by_model=True, row_cost=0.0))
    one.propose(10, [4, 5, 6])
    assert one.guesses(list(range(9)), 3) == () and one.guesses(list(range(10)), 2) == (4, 5)
    assert one.wanted(10) == 3


def test_counts() -> None:
    counts = DraftCounts(by_place=[0, 0, 0])
    for right in (0, 2, 3, 1):
        counts.note(3, right)
    assert (counts.drafts, counts.tokens, counts.accepted, counts.rejected, counts.by_place) == (4, 12, 6, 6, [3, 2, 1])
    assert (counts + counts).by_place == [6, 4, 2] and (DraftCounts() + counts).by_place == [3, 2, 1]
