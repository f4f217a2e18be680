"""The four kinds: what is live at a position, against definitions that list the live positions one by one."""

import math

import pytest

from lamina.base.errors import ConfigError
from lamina.memory.kinds import Alias, EntryFormat, Field, Fold, Log, Snapshot, Window, check_memories, replay_tokens
from tests.memory.shapes import FLASH_RATIOS, FP8, INDEX_FP4, PRO_RATIOS, v4_memories

ENTRY = EntryFormat("e", (Field("a", "u8", (3,)), Field("b", "fp32", (2,))))


def test_entries_have_the_published_bytes() -> None:
    assert FP8.nbytes == 584
    assert INDEX_FP4.nbytes == 68
    assert Field("odd", "e2m1", (3,)).nbytes == 2


@pytest.mark.parametrize("stride", [1, 4, 128])
@pytest.mark.parametrize("lag", [0, 1])
def test_log_entry_is_final_with_its_last_token(stride: int, lag: int) -> None:
    log = Log("log", 0, ENTRY, stride, lag)
    for position in range(3 * stride + 3):
        final = [j for j in range(position + 1) if (j + 1) * stride - 1 <= position - 1 - lag]
        assert log.log_rows(position) == len(final)
        assert log.live_bytes(position) == len(final) * ENTRY.nbytes


@pytest.mark.parametrize("size", [1, 2, 5, 128])
@pytest.mark.parametrize("draft", [0, 3])
@pytest.mark.parametrize("reset", [None, 4, 7])
def test_window_rows_are_the_ones_a_later_token_reads(size: int, draft: int, reset: int | None) -> None:
    window = Window("w", 0, ENTRY, size, reset)
    for position in range(3 * size + 9):
        start = 0 if reset is None else position - position % reset
        live = [q for q in range(position) if q > position - size and q >= start]
        rows = [q % (size + draft) for q in live]
        for ranges in window.slot_live(position, draft):
            assert [first + i for first, count in ranges for i in range(count)] == rows  # oldest first
        assert window.live_bytes(position) == len(live) * ENTRY.nbytes
        assert max(rows, default=0) < window.slot_parts(draft)[0].rows


def test_fold_is_empty_or_its_carry_at_a_border() -> None:
    state = (Field("open", "fp32", (4,)), Field("next", "fp32", (2,)))
    plain, carried = Fold("f", 0, state, 4), Fold("f", 0, state, 4, ("next",))
    assert [plain.live_bytes(p) for p in range(9)] == [0, 24, 24, 24, 0, 24, 24, 24, 0]
    assert [carried.live_bytes(p) for p in range(9)] == [0, 24, 24, 24, 8, 24, 24, 24, 8]
    assert carried.slot_live(4, 0) == ((), ((0, 1),))


def test_snapshot_and_alias() -> None:
    state = (Field("s", "fp32", (4,)),)
    assert [Snapshot("s", 0, state).live_bytes(p) for p in (0, 1, 9)] == [0, 16, 16]
    assert Snapshot("s", 0, state, lag=1).live_bytes(1) == 0
    alias = Alias("w", 1, "w", 0)
    assert (alias.live_bytes(9), alias.slot_parts(0), alias.block_parts(8)) == (0, (), ())


def test_replay_is_the_windows_below_and_the_own_need() -> None:
    assert replay_tokens(v4_memories(FLASH_RATIOS)) == 43 * 127
    assert replay_tokens(v4_memories(PRO_RATIOS)) == 61 * 127
    assert replay_tokens([Log("kv", layer, ENTRY, 1) for layer in range(4)]) == 0
    assert replay_tokens([Snapshot("s", 0, ENTRY.fields)]) == math.inf
    assert replay_tokens([Window("w", 0, ENTRY, 8), Fold("f", 1, ENTRY.fields, 4, ("a",))]) == 7 + 8


@pytest.mark.parametrize(
    "memories",
    [
        [Log("a", 0, ENTRY, 1), Log("a", 0, ENTRY, 1)],
        [Log("a", 0, ENTRY, 0)],
        [Window("a", 0, ENTRY, 0)],
        [Window("a", 0, ENTRY, 4, reset=0)],
        [Window("a", 0, ENTRY, 4, keep_first=-1)],
        [Fold("a", 0, ENTRY.fields, 0)],
        [Fold("a", 0, ENTRY.fields, 4, ("unknown",))],
        [Log("a", 0, ENTRY, 1, lag=-1)],
        [Alias("a", 1, "a", 0)],
    ],
)  # fmt: skip
def test_bad_lists_are_refused(memories: list) -> None:
    with pytest.raises(ConfigError):
        check_memories(memories)
