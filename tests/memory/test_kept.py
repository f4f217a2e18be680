"""What users see of the memory and may do to it: list, pin, drop. Pages on paper, times by hand."""

from contextlib import suppress
from itertools import groupby, product

import pytest

from lamina.base.errors import CapacityError, ConfigError
from lamina.memory import kept
from lamina.memory.layout import Layout
from lamina.memory.lease import Lease
from lamina.memory.ledger import Ledger
from lamina.memory.prefix import NEVER_STORED
from lamina.memory.windows import Windows
from tests.memory.shapes import logs_only, paged, scans_only, tiny

SECRET = "a salt that nobody may see"


class Kept:
    """A ledger with a clock of its own; requests run to their ends at once."""

    def __init__(self, layout: Layout | None = None, num_pages: int = 400) -> None:
        self.now = 100.0
        self.layout = layout or tiny()
        self.ledger = Ledger(self.layout, num_pages, min_checkpoint_gain=1)
        self.ledger.index.clock = lambda: self.now

    def start(self, tokens: list[int], salt: str = "", owner: str = "", max_new: int = 1) -> Lease:
        lease = self.ledger.admit(tokens, max_new, salt, f"request {len(tokens)}", owner=owner)
        assert isinstance(lease, Lease), lease
        return lease

    def compute(self, lease: Lease, stop: int) -> None:
        while lease.position < stop:
            count = self.ledger.room(lease, stop - lease.position) or 1
            assert self.ledger.extend(lease, count)
            known = list(lease.tokens[lease.committed : lease.position])
            self.ledger.commit(lease, known + [7] * (lease.in_flight - len(known)))

    def run(self, tokens: list[int], salt: str = "", owner: str = "") -> None:
        lease = self.start(tokens, salt, owner)
        self.compute(lease, len(tokens))
        self.ledger.finish(lease)
        self.ledger.check()

    def rows(self, limit: int = 256) -> list[kept.Prefix]:
        self.ledger.check()
        return kept.prefixes(self.ledger, limit)

    def found(self, tokens: list[int], salt: str = "") -> int:
        return self.ledger.longest(tokens, salt).position


def stretch(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_hits_of_blocks_that_several_prefixes_share_are_seen_on_each() -> None:
    """Four prompts begin with the same 8 tokens, two of them with 12: nobody went on from an end, yet 3 found something."""
    run = Kept(layout=logs_only(4))
    for number, shared in enumerate((8, 12, 12, 8)):
        run.run([*stretch(0, shared), *stretch(100 * (number + 1), 8)], owner=f"user {number}")
    rows = {row.owner: row for row in run.rows()}
    assert [rows[f"user {number}"].hits for number in range(4)] == [0, 0, 0, 0]
    both = (kept.Shared(8, 3), kept.Shared(12, 1))
    assert [rows[f"user {number}"].shared for number in range(4)] == [both[:1], both, both, both[:1]]
    run.run([*stretch(0, 8), *stretch(100, 8), 1], owner="user 4")  # the whole of the first one's
    first = next(row for row in run.rows() if row.owner in ("user 0", "user 4"))
    assert first.hits == 1 and first.shared == (kept.Shared(8, 4),)


def test_a_chat_is_one_row_with_its_checkpoints() -> None:
    """The second turn goes on from the first: one path with two checkpoints, used once, by the one who stored its end."""
    run = Kept()
    run.run(stretch(0, 10), owner="ann")
    run.now += 5
    run.run(stretch(100, 7), owner="bob")
    run.now += 5
    run.run(stretch(0, 19), owner="cid")
    run.now += 2
    first, second = run.rows()
    assert (first.tokens, first.checkpoints, first.owner, first.hits) == (19, (10, 19), "cid", 1)
    assert (second.tokens, second.checkpoints, second.owner, second.hits) == (7, (7,), "bob", 0)
    assert (first.age_s, second.age_s) == (2.0, 7.0) and len(first.key) == 32
    assert not first.is_pinned and not first.is_running and kept.num_prefixes(run.ledger) == 2
    assert run.rows(1) == [first]
    assert first.pages + second.pages == run.ledger.num_pages - run.ledger.free_pages


def test_an_answer_begun_twice_has_two_ends() -> None:
    run = Kept()
    run.run(stretch(0, 9))
    run.run([*stretch(0, 9), 50, 51])
    run.run([*stretch(0, 9), 60, 61])
    rows = run.rows()
    assert [row.tokens for row in rows] == [11, 11] and all(row.checkpoints == (9, 11) for row in rows)
    alone = sum(row.pages for row in rows)
    freed = kept.drop(run.ledger, rows[0].key)
    assert freed == rows[0].pages > 0 and run.found([*stretch(0, 9), 50, 51, 52]) == 11  # the shared part is still there
    (left,) = run.rows()
    assert left.pages > alone - freed and kept.drop(run.ledger, left.key) == left.pages
    assert not run.rows() and run.ledger.free_pages == run.ledger.num_pages


def test_running_ones_are_shown_and_not_dropped() -> None:
    run = Kept()
    lease = run.start(stretch(0, 9), owner="ann", max_new=9)
    run.compute(lease, 9)
    (row,) = run.rows()
    assert row.is_running and row.tokens == 8 and row.owner == "ann"
    assert kept.drop(run.ledger, row.key) == 0 and kept.drop_all(run.ledger) == 0
    run.ledger.check()
    run.ledger.finish(lease)
    assert kept.drop_all(run.ledger) > 0 and run.ledger.free_pages == run.ledger.num_pages


@pytest.mark.parametrize("layout", [tiny, logs_only, scans_only, paged])
@pytest.mark.parametrize("pins", [True, False])
def test_a_pinned_prefix_survives_heavy_pressure(layout: type, pins: bool) -> None:
    made: Layout = layout()
    run = Kept(made, 4 * made.peak_pages(40))
    run.run(stretch(0, 30))
    whole = run.found(stretch(0, 30))
    (row,) = run.rows()
    if pins:
        kept.pin(run.ledger, row.key)
        kept.pin(run.ledger, row.key)  # again: nothing
        assert run.rows()[0].is_pinned and run.ledger.arena.pinned > 0
    for number in range(1, 60):
        run.run(stretch(1000 * number, 35))
    assert run.ledger.evictions > 20 and (run.found(stretch(0, 30)) == whole) == pins
    if not pins:
        return
    run.run(stretch(0, 33))  # it can be gone on from; the pinned row is listed beside the new end
    assert {row.key: row.is_pinned for row in run.rows()}[row.key]
    with pytest.raises(ConfigError, match="unpin it first"):
        kept.drop(run.ledger, row.key)
    kept.drop_all(run.ledger)
    assert run.found(stretch(0, 30)) == whole and run.ledger.evictable_pages == 0
    kept.unpin(run.ledger, row.key)
    kept.drop_all(run.ledger)
    assert run.found(stretch(0, 30)) == 0 and run.ledger.free_pages == run.ledger.num_pages


def test_at_most_half_is_pinned() -> None:
    layout = logs_only(4)
    run = Kept(layout, 40)
    run.run(stretch(0, 60))
    run.run(stretch(500, 60))
    newer, older = run.rows()
    kept.pin(run.ledger, older.key)
    with pytest.raises(CapacityError, match="takes 15 more pages: 15 of 40 are pinned, at most 20 may be"):
        kept.pin(run.ledger, newer.key)
    run.ledger.check()
    assert len(run.ledger.pins) == 1


def test_pins_leave_running_requests_what_they_need() -> None:
    """A prompt has been admitted and lacks most of its pages: they cannot be pinned."""
    run = Kept(logs_only(4), 40)
    run.run(stretch(0, 60))
    (row,) = run.rows()
    lease = run.start(stretch(500, 110))
    with pytest.raises(CapacityError, match="running requests may need all but 12 of those that are not held"):
        kept.pin(run.ledger, row.key)
    run.compute(lease, 110)
    run.ledger.check()


@pytest.mark.parametrize("layout", [tiny, logs_only, paged])
def test_pins_give_way_to_what_could_not_run_otherwise(layout: type, caplog: pytest.LogCaptureFixture) -> None:
    """I12: alone, a request gets everything; only as many pins are dropped as needed, the oldest first; and it is said."""
    made: Layout = layout()
    run = Kept(made, made.peak_pages(120))
    for number in range(3):
        run.now += 1
        run.run(stretch(1000 * number, 12))
        with suppress(CapacityError):  # large windows are more than half of the pages
            kept.pin(run.ledger, run.rows()[0].key)
    lease = run.start(stretch(9000, 4), max_new=117)
    num_pins = len(run.ledger.pins)
    assert num_pins == 3 or made.tails
    run.compute(lease, 120)
    run.ledger.check()
    run.ledger.finish(lease)
    assert run.ledger.pins.num_dropped == num_pins - len(run.ledger.pins) > 0 and "pin_dropped" in caplog.text
    run.run(stretch(7000, 118))
    assert [pin for pin in run.ledger.pins.all if not pin.node.resident] == []


@pytest.mark.parametrize("fault", [False, True])
def test_windows_that_a_pin_keeps_do_not_come_back(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that goes on from a pinned checkpoint of a model with large windows is admitted for all the pages that it will need."""
    made, num_pinned = paged(), 0
    if fault:
        monkeypatch.setattr(Windows, "num_pinned", lambda self, lease: 0)

    def run_all() -> None:
        nonlocal num_pinned
        for first, spare in product(range(8, 14), range(0, 40, 2)):
            run = Kept(made, made.peak_pages(40) + spare)
            run.run(stretch(0, first))
            with suppress(CapacityError):
                kept.pin(run.ledger, run.rows()[0].key)
                num_pinned += 1
            lease = run.start(stretch(0, 40))
            run.ledger.admit(stretch(500, 14), 1)
            run.ledger.check()
            run.compute(lease, 40)
            run.ledger.check()

    if fault:
        with pytest.raises(AssertionError):
            run_all()
    else:
        run_all()
    assert num_pinned > 50 or fault


def test_another_salt_sees_nothing() -> None:
    """A lookup with another salt meets no node, pin or owner; a listing names no salt; keys differ."""
    run = Kept()
    tokens = stretch(0, 21)
    run.run(tokens, SECRET, "ann")
    (first,) = run.rows()
    kept.pin(run.ledger, first.key)
    for salt in ("", "another"):
        hit = run.ledger.longest(tokens, salt)
        assert (hit.position, hit.resident, hit.differs_at, hit.reason) == (0, 0, 0, NEVER_STORED)
    run.run(tokens, "", "bob")
    rows = {row.owner: row for row in run.rows()}
    assert rows["ann"].key != rows["bob"].key and not rows["bob"].is_pinned and rows["ann"].is_pinned
    assert rows["bob"].hits == rows["ann"].hits == 0 and SECRET not in repr(run.rows())
    assert run.found(tokens, SECRET) == run.found(tokens) == 21
    kept.drop(run.ledger, rows["bob"].key)
    assert (run.found(tokens, SECRET), run.found(tokens)) == (21, 0)
    shared = {pin.node for pin in run.ledger.pins.all} & {node for node in run.ledger.index.nodes if node.owner == "bob"}
    assert not shared


@pytest.mark.parametrize("layout", [tiny, logs_only, paged])
def test_pages_and_bytes_add_up(layout: type) -> None:
    run = Kept(layout())
    run.run(stretch(0, 30))
    run.run(stretch(500, 30))
    kept.pin(run.ledger, run.rows()[1].key)
    lease = run.start(stretch(900, 9), max_new=5)
    run.compute(lease, 9)
    arena, states = run.ledger.arena, kept.page_states(run.ledger)
    counts = {letter: sum(count for other, count in states if other == letter) for letter in "fhcp"}
    assert counts == {"f": arena.free, "h": arena.held, "c": arena.evictable, "p": arena.pinned} and min(counts.values()) > 0
    assert [letter for letter, _ in groupby(letter for letter, _ in states)] == [letter for letter, _ in states]
    rows = kept.memory_states(run.ledger)
    assert sum(row.held_bytes for row in rows) == arena.held * run.layout.page_bytes
    assert sum(row.cached_bytes for row in rows) == (arena.evictable + arena.pinned) * run.layout.page_bytes
    assert min(min(row.held_bytes, row.cached_bytes) for row in rows) >= 0


@pytest.mark.parametrize("key", ["", "zz", "00" * 15, "00" * 16, "00" * 17, "00 " * 16])
def test_a_key_that_is_not_there(key: str) -> None:
    run = Kept()
    run.run(stretch(0, 9))
    for change in (kept.pin, kept.unpin, kept.drop):
        with pytest.raises(ConfigError, match=r"^key="):
            change(run.ledger, key)


def test_only_another_lasting_checkpoint_replaces_a_lasting_one() -> None:
    """Where the next turn of a chat parts from this one: the ends of prompt and answer lie behind it and are of less use."""
    trial = Kept()
    lease = trial.start([*range(1, 41)], max_new=30)
    for stop, lasts in ((30, True), (40, False), (60, False)):
        trial.compute(lease, stop)
        trial.ledger.checkpoint(lease, lasts)
        trial.ledger.commit(lease, [])
    trial.ledger.finish(lease)
    assert {one.position: one.is_superseded for one in trial.ledger.all_checkpoints()} == {30: False, 40: True, 60: False}
    lease = trial.start([*range(1, 31), *range(60, 80)])
    trial.compute(lease, 45)
    trial.ledger.checkpoint(lease, True)
    trial.ledger.commit(lease, [])
    trial.compute(lease, 50)
    trial.ledger.finish(lease)
    assert {one.position for one in trial.ledger.all_checkpoints() if one.is_superseded} == {30, 40}
