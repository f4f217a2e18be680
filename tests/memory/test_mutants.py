"""Each seeded fault must be noticed by the traces that the real code passes; so the traces can fail."""

import random

import pytest

from tests.memory.draft_mutants import DRAFT_MUTANTS
from tests.memory.mutants import MUTANTS
from tests.memory.shapes import logs_only, paged, paged_only, replayed, scans_only, tiny
from tests.memory.trace import Trace

STEPS = 100
#: a trace that notices the fault, for those that few notice; it is tried before all others
SEEDS = {
    "a_pin_stays_on_the_page_of_a_twin": 54, "drops_what_others_go_on_from": 120, "evicts_a_pinned_block": 28,
    "keeps_half_of_a_failed_extend_of_decodes": 42, "leaves_checkpoints_on_the_page_of_a_twin": 54,
    "publishes_nothing_of_decodes": 30, "restores_before_the_save_that_it_reads": 22, "rollback_keeps_the_checkpoints": 49,
    "shares_the_open_window_block_instead_of_copying": 63, "takes_over_an_open_block_that_others_use": 324,
    "commits_let_go_of_what_is_needed_on_the_way_back": 30, "guesses_across_what_windows_do_not_hold": 27,
    "takes_back_one_token_less": 16, "rollback_keeps_the_windows_of_guesses": 11, "rollback_keeps_the_blocks_of_guesses": 6,
}  # fmt: skip


def run(seed: int) -> None:
    """One random trace; layouts, sizes and switches follow from the seed."""
    rng = random.Random(seed)
    others = (lambda: tiny(8), lambda: tiny(hidden=False), logs_only, scans_only, paged, paged_only)
    layout = rng.choice([tiny, tiny, tiny, *others, replayed, replayed])()
    trace = Trace(layout, rng.randint(4, 24), rng.random() < 0.7, rng.choice([1, 2, 5]))
    for _ in range(STEPS):
        trace.step(*(rng.randrange(1 << 12) for _ in range(4)))
    trace.close()


def run_with_drafts(seed: int) -> None:
    """The same with tokens drafted ahead."""
    rng = random.Random(seed)
    layout = rng.choice([lambda: tiny(draft_tokens=3), lambda: paged(draft_tokens=7)])()
    trace = Trace(layout, rng.randint(8, 30), rng.random() < 0.7, rng.choice([1, 2, 5]))
    for _ in range(STEPS):
        trace.step(*(rng.randrange(1 << 12) for _ in range(4)))
    trace.close()


def test_the_real_code_survives() -> None:
    for seed in range(80):
        run(seed)


def test_the_real_code_survives_drafts() -> None:
    for seed in range(12):
        run_with_drafts(seed)


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_mutant_is_killed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        for seed in (SEEDS.get(name, 0), *range(1200)):  # most fall within the first ten
            run(seed)


@pytest.mark.parametrize("name", sorted(DRAFT_MUTANTS))
def test_draft_mutant_is_killed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DRAFT_MUTANTS[name](monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        for seed in (SEEDS.get(name, 0), *range(300)):
            run_with_drafts(seed)
