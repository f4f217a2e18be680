"""Each call of the ledger by itself: pages, position, index and orders."""

import numpy as np
import pytest

from lamina.memory.kinds import EntryFormat, Field, Window
from lamina.memory.layout import make_layout
from lamina.memory.lease import Lease, PageCounts, Refused, Wait
from lamina.memory.ledger import Ledger
from lamina.memory.orders import CopyPage, RestoreSlot, SaveSlot
from tests.memory.shapes import logs_only, scans_only, tiny

A = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def ledger_of(num_pages: int = 20, gain: int = 1, adopt_twins: bool = True) -> Ledger:
    """Blocks of 4 tokens, slots of 2 pages, checkpoints of 1 (even positions) or 2 pages."""
    return Ledger(tiny(), num_pages, adopt_twins=adopt_twins, min_checkpoint_gain=gain)


def admitted(ledger: Ledger, tokens: list[int], max_new: int = 4, salt: str = "", use_cache: bool = True) -> Lease:
    lease = ledger.admit(tokens, max_new, salt, "r", use_cache)
    assert isinstance(lease, Lease)
    return lease


def computed(ledger: Ledger, tokens: list[int], **how: object) -> Lease:
    """A lease that has accepted all of its prompt."""
    lease = admitted(ledger, tokens, **how)  # type: ignore[arg-type]
    assert ledger.extend(lease, len(tokens) - lease.position)
    ledger.commit(lease, tokens[lease.committed :])
    ledger.check()
    return lease


# -- admission


def test_admission_takes_the_slot_and_reserves_the_prompt() -> None:
    ledger = ledger_of()
    lease = admitted(ledger, A)
    assert ledger.pages() == PageCounts(free=18, blocks=0, tails=0, slots=2, cached=0, checkpoints=0)
    assert (lease.position, lease.committed, lease.in_flight, lease.blocks, lease.state) == (0, 0, 0, [], "running")
    assert len(lease.slot) == 2 and lease.hit.position == 0 and lease.hit.reason == "never stored"
    assert ledger.take_orders() == ()


def test_refused_only_what_cannot_fit_alone() -> None:
    ledger = ledger_of(5)  # a slot and 3 blocks: 12 tokens are computed at most
    assert isinstance(ledger.admit([1] * 12, 2), Refused)
    refused = ledger.admit([1] * 12, 100)
    assert isinstance(refused, Refused) and (refused.needed, refused.total) == (2 + 28, 5) and "100" in refused.reason
    for length, max_new in ((12, 0), (12, 1), (11, 2), (1, 12)):
        lease = admitted(ledger, [1] * length, max_new)
        assert ledger.extend(lease, 12)  # the last sampled token is never computed
        assert not ledger.extend(lease, 1)
        ledger.cancel(lease)


def test_wait_says_what_is_missing() -> None:
    ledger = ledger_of(9)
    admitted(ledger, [1] * 11)  # slot 2, lacks 3
    wait = ledger.admit([2] * 11, 4)
    assert isinstance(wait, Wait) and (wait.needed, wait.available) == (5, 4)
    assert "7 free" in wait.reason and "3 are reserved" in wait.reason
    assert isinstance(ledger.admit([2] * 7, 4), Lease)
    assert isinstance(ledger.admit([2], 4), Wait)
    ledger.check()


def test_a_running_decode_keeps_one_block_from_admissions() -> None:
    ledger = ledger_of(7)
    computed(ledger, [1] * 3)
    wait = ledger.admit([2] * 7, 4)
    assert isinstance(wait, Wait) and (wait.needed, wait.available) == (4, 3)
    assert isinstance(ledger.admit([2] * 3, 4), Lease)


def test_decodes_leave_what_prefills_lack() -> None:
    ledger = ledger_of(8)
    decode = computed(ledger, [1] * 3)  # 3 pages
    prefill = admitted(ledger, [2] * 7)  # 2 pages, lacks 2
    assert ledger.extend(decode, 1) and ledger.extend(decode, 1)
    assert not ledger.can_extend(decode, 4) and not ledger.extend(decode, 4)
    assert (decode.position, len(decode.blocks)) == (5, 2)
    assert ledger.extend(prefill, 7)
    ledger.check()


def test_bad_arguments_are_refused_and_change_nothing() -> None:
    ledger = ledger_of()
    lease = computed(ledger, A)
    before = ledger.pages()
    other = admitted(ledger_of(), A)
    for call in (
        lambda: ledger.admit([], 1), lambda: ledger.admit([-1], 1), lambda: ledger.admit(A, -1),
        lambda: ledger.extend(lease, -1),
        lambda: ledger.can_extend(lease, -1), lambda: ledger.commit(lease, [1]), lambda: ledger.rollback(lease, 1),
        lambda: ledger.rollback(lease, -1), lambda: ledger.fork(lease, -1), lambda: ledger.extend(other, 1),
        lambda: ledger.commit(other, []),
        lambda: Ledger(tiny(), 0), lambda: Ledger(tiny(), 3, min_checkpoint_gain=-1),
        lambda: ledger.fork(admitted(ledger_of(), A), 1),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="is not valid"):
            call()
    assert ledger.pages() == before and lease.position == 10
    ledger.check()


def test_ids_may_be_numpy() -> None:
    ledger = ledger_of()
    lease = ledger.admit(np.array(A), 4)
    assert isinstance(lease, Lease) and ledger.extend(lease, 10)
    ledger.commit(lease, np.array(A, np.int32))
    assert list(lease.tokens) == A and all(type(token) is int for token in lease.tokens)


# -- extend, commit, rollback


def test_extend_takes_exactly_the_blocks_it_needs() -> None:
    ledger = ledger_of()
    lease = admitted(ledger, A, 20)
    held = []
    for _ in range(14):
        assert ledger.extend(lease, 1)
        held.append(len(lease.blocks))
    assert held == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 2
    assert ledger.extend(lease, 0) and lease.in_flight == 14


def test_commit_publishes_each_block_that_fills() -> None:
    ledger = ledger_of()
    lease = admitted(ledger, A)
    assert ledger.extend(lease, 10)
    found = []
    for token in A:
        ledger.commit(lease, [token])
        found.append(ledger.longest(A).resident)
    assert found == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert ledger.longest(A).position == 0 and ledger.longest(A).reason == "no checkpoint"
    assert ledger.pages().blocks == 3


def test_plan_may_be_ahead_of_commit() -> None:
    ledger = ledger_of()
    lease = admitted(ledger, A[:3], 8)
    for n in (3, 1, 1, 1):  # three tokens whose ids are not known yet
        assert ledger.extend(lease, n)
    assert (lease.position, lease.committed, lease.in_flight) == (6, 0, 6)
    ledger.commit(lease, A[:3])
    ledger.commit(lease, [4, 5])
    assert list(lease.tokens) == A[:5] and lease.in_flight == 1 and ledger.longest(A).resident == 1


def test_commit_refuses_other_ids_than_the_prompt() -> None:
    ledger = ledger_of()
    lease = admitted(ledger, A)
    ledger.extend(lease, 4)
    with pytest.raises(ValueError, match="known tokens"):
        ledger.commit(lease, [1, 2, 9])
    assert lease.committed == 0 and len(ledger.index) == 0


def test_rollback_returns_blocks_and_checkpoints() -> None:
    ledger = ledger_of()
    lease = computed(ledger, A[:4])
    assert ledger.extend(lease, 5) and ledger.checkpoint(lease)
    before = ledger.pages()
    ledger.rollback(lease, 3)
    assert (lease.position, len(lease.blocks)) == (6, 2)
    assert ledger.pages().free == before.free + 1 + 2 and ledger.pages().checkpoints == 0
    assert ledger.take_orders() == ()  # nobody wants the copy any more
    ledger.commit(lease, [5, 6])
    ledger.check()


def test_twins_share_one_page() -> None:
    ledger = ledger_of()
    one, two = admitted(ledger, A), admitted(ledger, A)
    for lease in (one, two):
        assert ledger.extend(lease, 6) and ledger.checkpoint(lease) and ledger.extend(lease, 4)
    ledger.commit(one, A)
    own = list(two.blocks)
    ledger.commit(two, A)
    assert two.blocks[:2] == one.blocks[:2] != own[:2] and two.blocks[2] == own[2]
    assert ledger.stats.twins == 2 and ledger.pages().blocks == 4
    assert ledger.pages().checkpoints == 1  # of the two checkpoints at 6 one is enough
    ledger.check()


def test_without_adoption_a_twin_keeps_its_pages_and_stops_publishing() -> None:
    ledger = ledger_of(adopt_twins=False)
    one, two = admitted(ledger, A), admitted(ledger, [*A[:8], 0, 0, 0, 0, 0])
    assert ledger.extend(one, 10) and ledger.extend(two, 13)
    ledger.commit(one, A)
    own = list(two.blocks)
    ledger.commit(two, two.tokens)
    assert two.blocks == own and not set(own) & set(one.blocks)
    assert ledger.longest(two.tokens).resident == 2  # its third block is not there
    assert not ledger.checkpoint(two)
    ledger.finish(two)
    assert ledger.longest(two.tokens).position == 0
    ledger.check()


# -- checkpoints and hits


def test_a_checkpoint_is_found_once_its_tokens_are_accepted() -> None:
    ledger = ledger_of()
    lease = admitted(ledger, A)
    assert ledger.extend(lease, 6) and ledger.checkpoint(lease) and not ledger.checkpoint(lease)
    (save,) = ledger.take_orders()
    assert isinstance(save, SaveSlot) and save.slot == lease.slot and len(save.checkpoint) == 1 and save.position == 6
    ledger.commit(lease, A[:5])
    assert ledger.longest(A).position == 0
    ledger.commit(lease, A[5:6])
    hit = ledger.longest(A)
    assert (hit.position, hit.differs_at) == (6, 6)
    assert not ledger.checkpoint(lease)  # there already
    ledger.check()


def test_no_checkpoint_where_none_is_possible() -> None:
    ledger = ledger_of()
    assert not ledger.checkpoint(admitted(ledger, A))  # nothing computed
    logs = Ledger(logs_only(), 20)
    assert not logs.checkpoint(computed(logs, A))  # nothing to freeze
    tight = ledger_of(5)
    lease = computed(tight, A, max_new=3)  # all 5 pages
    assert not tight.checkpoint(lease) and tight.stats.checkpoints_skipped == 1
    ledger.check()


def test_a_checkpoint_leaves_what_prefills_lack() -> None:
    ledger = ledger_of(8)
    lease = computed(ledger, A[:3], max_new=1)
    admitted(ledger, [7] * 7)  # 2 pages, lacks 2
    assert ledger.pages().free == 3 and not ledger.checkpoint(lease)


def test_a_hit_inside_a_block_copies_slot_and_open_block() -> None:
    ledger = ledger_of()
    first = computed(ledger, A[:6])
    ledger.checkpoint(first)
    ledger.take_orders()
    lease = admitted(ledger, A)
    assert (lease.position, lease.committed, lease.hit.position) == (6, 6, 6)
    assert lease.blocks[0] == first.blocks[0] and lease.blocks[1] != first.blocks[1]
    restore, copy = ledger.take_orders()
    assert isinstance(restore, RestoreSlot) and restore.slot == lease.slot and restore.position == 6
    assert copy == CopyPage(first.blocks[1], lease.blocks[1])
    assert ledger.pages() == PageCounts(free=12, blocks=3, tails=0, slots=4, cached=0, checkpoints=1)
    ledger.check()


def test_a_full_hit_computes_nothing() -> None:
    ledger = ledger_of()
    ledger.finish(computed(ledger, A))
    lease = admitted(ledger, A)
    assert lease.position == lease.committed == len(A) and lease.hit.reason == "full hit"
    assert ledger.extend(lease, 1)
    ledger.commit(lease, [11])
    assert list(lease.tokens) == [*A, 11]


def test_without_a_hidden_vector_one_token_is_left() -> None:
    ledger = Ledger(tiny(hidden=False), 20)
    ledger.finish(computed(ledger, A))
    assert ledger.longest(A).position == 0 and ledger.longest([*A, 1]).position == 10
    logs = Ledger(logs_only(), 20)
    logs.finish(computed(logs, A[:8]))
    assert logs.longest(A[:8]).position == 4 and logs.longest(A[:9]).position == 8


def test_salts_do_not_meet() -> None:
    ledger = ledger_of()
    ledger.finish(computed(ledger, A, salt="mine"))
    assert ledger.longest(A, "mine").position == 10
    assert ledger.longest(A).position == ledger.longest(A, "yours").position == 0


def test_prompt_log_probs_compute_everything_and_still_publish() -> None:
    ledger = ledger_of()
    ledger.finish(computed(ledger, A))
    lease = admitted(ledger, [*A, 11, 12], use_cache=False)
    assert lease.position == 0 and lease.hit.reason == "prompt log-probs wanted"
    assert ledger.extend(lease, 12)
    ledger.commit(lease, [*A, 11, 12])
    assert ledger.longest([*A, 11, 12]).resident == 3 and ledger.stats.twins == 2
    ledger.check()


def test_junction_is_where_a_stored_path_is_left() -> None:
    ledger = ledger_of(40, gain=3)
    ledger.finish(computed(ledger, A))
    assert admitted(ledger, [*A[:7], 0, 0]).junction == 7
    assert admitted(ledger, [1, 2, 0, 0]).junction is None  # saves 2
    assert admitted(ledger, A[:7]).junction is None  # does not leave it
    lease = admitted(ledger, [*A[:7], 5])
    assert ledger.extend(lease, 7) and ledger.checkpoint(lease)
    ledger.commit(lease, A[:7])
    hit = ledger.longest([*A[:7], 3, 3])
    assert hit.position == 7 and hit.reason == "first differing token"
    assert admitted(ledger, [*A[:7], 3]).junction is None


# -- endings


def test_preempt_freezes_in_place_and_resuming_recomputes_nothing() -> None:
    ledger = ledger_of()
    lease = computed(ledger, A)
    slot, blocks = lease.slot, list(lease.blocks)
    ledger.preempt(lease)
    (save,) = ledger.take_orders()
    assert save == SaveSlot(slot, slot[:1], 10)  # even position: 1 page, the other is free again
    assert ledger.pages() == PageCounts(free=16, blocks=0, tails=0, slots=0, cached=3, checkpoints=1)
    assert (lease.state, lease.blocks, lease.slot) == ("preempted", [], ())
    again = admitted(ledger, A)
    assert again.position == 10 and again.blocks[:2] == blocks[:2]
    ledger.check()


def test_ending_with_tokens_in_flight_waits_for_them() -> None:
    ledger = ledger_of()
    lease = admitted(ledger, A)
    assert ledger.extend(lease, 10)
    ledger.finish(lease)
    assert lease.state == "closing" and ledger.pages().slots == 2
    for call in (lambda: ledger.extend(lease, 1), lambda: ledger.checkpoint(lease), lambda: ledger.fork(lease, 1)):
        with pytest.raises(ValueError, match="closing"):
            call()
    ledger.commit(lease, A[:9])
    assert lease.state == "closing"
    ledger.rollback(lease, 1)
    assert lease.state == "finished" and ledger.longest(A).position == 9
    ledger.check()


def test_ending_at_an_existing_checkpoint_keeps_only_one() -> None:
    ledger = ledger_of()
    lease = computed(ledger, A)
    assert ledger.checkpoint(lease)
    ledger.finish(lease)
    assert ledger.pages() == PageCounts(free=16, blocks=0, tails=0, slots=0, cached=3, checkpoints=1)


def test_cancel_frees_all_that_is_not_in_the_index() -> None:
    ledger = ledger_of()
    lease = computed(ledger, A[:9])
    assert ledger.extend(lease, 4) and ledger.checkpoint(lease)
    ledger.cancel(lease)
    assert ledger.pages() == PageCounts(free=18, blocks=0, tails=0, slots=0, cached=2, checkpoints=0)
    ledger.cancel(lease)
    ledger.commit(lease, [1, 2])
    assert ledger.stale_commits == 1 and ledger.stats.cancelled == 1 and ledger.take_orders() == ()
    for call in (ledger.finish, ledger.preempt, ledger.checkpoint):
        with pytest.raises(ValueError, match="ended"):
            call(lease)
    ledger.check()


def test_fork_is_a_full_hit() -> None:
    ledger = ledger_of()
    lease = computed(ledger, A)
    child = ledger.fork(lease, 4, "child")
    assert isinstance(child, Lease) and child.name == "child"
    assert child.position == 10 and child.blocks[:2] == lease.blocks[:2] and child.blocks[2] != lease.blocks[2]
    assert [type(order) for order in ledger.take_orders()] == [SaveSlot, RestoreSlot, CopyPage]
    assert isinstance(ledger.fork(lease, 4), Lease) and ledger.stats.checkpoints == 1
    assert isinstance(ledger.fork(lease, 1000), Refused)
    ledger.check()


def test_fork_that_must_wait_makes_no_checkpoint() -> None:
    ledger = ledger_of(8)
    lease = computed(ledger, A)
    before = ledger.pages()
    assert isinstance(ledger.fork(lease, 4), Wait) and ledger.pages() == before and ledger.stats.checkpoints == 0


# -- eviction and tight arenas


def test_eviction_makes_room_and_is_explained() -> None:
    ledger = ledger_of(9)
    ledger.finish(computed(ledger, A))
    lease = ledger.admit([9] * 20, 4, name="big")
    assert isinstance(lease, Lease) and ledger.extend(lease, 20)
    assert ledger.evictions > 0
    hit = ledger.longest(A)
    assert hit.reason == "evicted" and hit.evicted_for == "big"
    ledger.check()


def test_pending_checkpoints_give_way() -> None:
    """Checkpoints count as evictable, never as needed."""
    ledger = ledger_of(6)
    lease = admitted(ledger, A, 5)
    assert ledger.extend(lease, 6) and ledger.checkpoint(lease)
    assert ledger.extend(lease, 4) and ledger.pages() == PageCounts(0, 3, 0, 2, 0, 1)
    assert ledger.extend(lease, 4)  # takes the page of the checkpoint at 6
    ledger.commit(lease, A)
    assert ledger.longest(A).position == 0 and ledger.take_orders() == ()
    ledger.check()


def test_alone_a_request_takes_over_its_checkpoint() -> None:
    ledger = ledger_of(5)
    ledger.preempt(computed(ledger, A, max_new=3))  # 3 cached blocks, 1 checkpoint page, 1 free
    ledger.take_orders()
    lease = admitted(ledger, A, 3)
    (restore,) = ledger.take_orders()
    assert isinstance(restore, RestoreSlot) and restore.checkpoint[0] == restore.slot[0]
    assert lease.position == 10 and len(lease.blocks) == 3 and ledger.pages() == PageCounts(0, 3, 0, 2, 0, 0)
    assert ledger.stats.takeovers == 1
    assert ledger.extend(lease, 2)
    ledger.check()


def test_blocks_without_pages_cost_nothing() -> None:
    ledger = Ledger(scans_only(), 3)
    lease = admitted(ledger, A * 100, 1000)
    assert ledger.extend(lease, 1000) and lease.blocks == []
    ledger.commit(lease, A * 100)
    assert ledger.checkpoint(lease) and ledger.longest(A * 100).position == 1000
    assert ledger.pages() == PageCounts(free=1, blocks=0, tails=0, slots=1, cached=0, checkpoints=1)
    ledger.check()


def test_drop_index_spares_what_leases_stand_on() -> None:
    ledger = ledger_of()
    lease = computed(ledger, A)
    ledger.checkpoint(lease)
    ledger.finish(computed(ledger, [9] * 9))
    ledger.drop_index()
    assert ledger.pages() == PageCounts(free=15, blocks=3, tails=0, slots=2, cached=0, checkpoints=0)
    assert ledger.longest(A).resident == 2
    ledger.cancel(lease)
    ledger.drop_index()
    assert ledger.pages().free == 20
    ledger.check()


def test_two_long_chats_do_not_evict_each_other() -> None:
    """With room for both, each turn reuses all of the turn before."""
    ledger = ledger_of(60)
    chats = [[chat + 1] * 30 for chat in range(2)]
    for turn in range(4):
        for chat in chats:
            lease = admitted(ledger, chat, 2)
            assert lease.position == (0 if turn == 0 else len(chat) - 3)
            assert ledger.extend(lease, len(chat) - lease.position)
            ledger.commit(lease, chat[lease.committed :])
            ledger.finish(lease)
            chat += [7, 8, 9]
    assert ledger.evictions == 0


def test_a_rollback_while_a_window_is_rebuilt_gives_its_blocks_back() -> None:
    """A request that starts with nothing does not hold the blocks that were live at its start; the count alone would not tell."""
    row = EntryFormat("row", (Field("row", "u8", (128,)),))
    layout = make_layout([Window("w", 0, row, 3)], Field("hidden", "fp32", (4,)), block_tokens=1, min_page_bytes=128)
    ledger = Ledger(layout, 60)
    tokens = list(range(33))
    first = ledger.admit(tokens, 1)
    assert isinstance(first, Lease) and ledger.extend(first, 33)
    ledger.commit(first, tokens)
    ledger.cancel(first)
    lease = ledger.admit(tokens, 1)
    assert isinstance(lease, Lease) and lease.position == lease.valid_from == 30
    assert ledger.extend(lease, 2) and ledger.extend(lease, 1)
    ledger.rollback(lease, 1)
    ledger.check()
