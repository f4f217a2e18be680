"""Seeded faults in taking drafts back, that random traces with drafts must notice."""

import pytest

from lamina.memory.kinds import Fold, Window
from lamina.memory.layout import HIDDEN, Layout
from lamina.memory.lease import Lease
from lamina.memory.ledger import Ledger
from lamina.memory.orders import SaveSlot
from lamina.memory.prefix import Checkpoint
from lamina.memory.publisher import Publisher
from lamina.memory.windows import Windows
from tests.memory.mutants import Patch

DRAFT_MUTANTS: dict[str, Patch] = {}


def draft_mutant(patch: Patch) -> Patch:
    """Registers a fault under the name of its function."""
    DRAFT_MUTANTS[patch.__name__] = patch
    return patch


@draft_mutant
def reads_the_fold_of_the_last_row(mp: pytest.MonkeyPatch) -> None:
    def slot_live(self: Fold, position: int, draft_tokens: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        live = original(self, position, draft_tokens)
        return tuple(((draft_tokens, 1),) if rows else () for rows in live)

    original = Fold.slot_live
    mp.setattr(Fold, "slot_live", slot_live)


@draft_mutant
def keeps_the_fold_of_one_token_less(mp: pytest.MonkeyPatch) -> None:
    def slot_live(self: Fold, position: int, draft_tokens: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        live = original(self, position, draft_tokens)
        return tuple((((position - 1) % (1 + draft_tokens), 1),) if rows else () for rows in live)

    original = Fold.slot_live
    mp.setattr(Fold, "slot_live", slot_live)


@draft_mutant
def keeps_the_first_hidden_vector(mp: pytest.MonkeyPatch) -> None:
    def slot_live(self: Layout, position: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        live = zip(original(self, position), self.slot_spans, strict=True)
        return tuple(((0, 1),) if span.memory == HIDDEN and rows else rows for rows, span in live)

    original = Layout.slot_live
    mp.setattr(Layout, "slot_live", slot_live)


@draft_mutant
def looks_for_a_ring_without_draft_rows(mp: pytest.MonkeyPatch) -> None:
    original = Window.slot_live
    mp.setattr(Window, "slot_live", lambda self, position, draft_tokens: original(self, position, 0))


@draft_mutant
def takes_back_one_token_less(mp: pytest.MonkeyPatch) -> None:
    def rollback(self: Ledger, lease: Lease, n: int) -> None:
        if n == lease.in_flight > 1 and lease.state == "running" and len(lease.tokens) < lease.position:
            lease.tokens.append(0)
            lease.committed += 1
            n -= 1
        original(self, lease, n)

    original = Ledger.rollback
    mp.setattr(Ledger, "rollback", rollback)


@draft_mutant
def rollback_keeps_the_blocks_of_guesses(mp: pytest.MonkeyPatch) -> None:
    def rollback(self: Ledger, lease: Lease, n: int) -> None:
        blocks, kept = lease.blocks, list(lease.blocks)
        original(self, lease, n)
        if lease.state == "running" and len(blocks) < len(kept):
            blocks.append(self.arena.take_for_lease())

    original = Ledger.rollback
    mp.setattr(Ledger, "rollback", rollback)


@draft_mutant
def rollback_keeps_the_windows_of_guesses(mp: pytest.MonkeyPatch) -> None:
    def rollback(self: Ledger, lease: Lease, n: int) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Windows, "trim", lambda self, lease: None)
            original(self, lease, n)

    original = Ledger.rollback
    mp.setattr(Ledger, "rollback", rollback)


@draft_mutant
def commits_let_go_of_what_is_needed_on_the_way_back(mp: pytest.MonkeyPatch) -> None:
    def trim(self: Windows, lease: Lease) -> None:
        committed, lease.committed = lease.committed, lease.position
        original(self, lease)
        lease.committed = committed

    original = Windows.trim
    mp.setattr(Windows, "trim", trim)


@draft_mutant
def guesses_across_what_windows_do_not_hold(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Layout, "most_guesses", lambda self, position, wanted: wanted)


@draft_mutant
def publishes_guesses(mp: pytest.MonkeyPatch) -> None:
    def publish(self: Publisher, lease: Lease, now: int) -> None:
        committed, known = lease.committed, len(lease.tokens)
        if known == committed < lease.position:
            lease.tokens.extend([0] * (lease.position - committed))
            lease.committed = lease.position
        original(self, lease, now)
        lease.committed = committed
        del lease.tokens[known:]

    original = Publisher.publish
    mp.setattr(Publisher, "publish", publish)


@draft_mutant
def freezes_an_ended_request_with_its_guesses(mp: pytest.MonkeyPatch) -> None:
    def freeze(self: Publisher, lease: Lease, position: int, now: int) -> tuple[SaveSlot, Checkpoint] | None:
        found = original(self, lease, position, now)
        return found and (SaveSlot(found[0].slot, found[0].checkpoint, position + 1), found[1])

    original = Publisher.freeze
    mp.setattr(Publisher, "freeze", freeze)
