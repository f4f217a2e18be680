"""Block tables that stay on the device, and the flat arrays of a step."""

import random

import pytest
import torch

from lamina.ops.sequences import Piece
from lamina.runtime.inputs import BlockTables, step_arrays
from lamina.schedule.step import Slice

CPU = torch.device("cpu")


def part(row: int, start: int, stop: int, table_start: int, table: tuple[int, ...], **more: int) -> Slice:
    return Slice(row + 100, start, stop, tuple(range(start, stop)), (7, 8), row, table_start, table, **more)


def test_only_new_and_changed_pages_are_entered() -> None:
    tables = BlockTables(4, CPU)
    tables.update((part(2, 0, 600, 0, (5, 6, 7)), part(0, 0, 10, 0, (9,))))
    assert tables.pages[2, :3].tolist() == [5, 6, 7] and tables.pages[0, 0] == 9
    tables.update((part(2, 600, 601, 1, (16, 17, 18)), part(0, 10, 11, 1, ())))  # two were changed, one is new; nothing is new
    assert tables.pages[2, :4].tolist() == [5, 16, 17, 18] and tables.pages[0, 0] == 9
    assert not tables.pages[[1, 3]].any()


def test_tables_grow_with_the_longest_request_and_keep_what_they_have() -> None:
    """16 blocks at first, then doubled: 17 need 32, 1,000 need 1,024 = 16 * 2**6."""
    tables = BlockTables(3, CPU)
    assert tables.pages.shape == (3, 16)
    tables.update((part(1, 0, 1, 0, tuple(range(1, 17))),))
    assert tables.pages.shape == (3, 16)
    tables.update((part(1, 1, 2, 16, (99,)),))
    assert tables.pages.shape == (3, 32) and tables.pages[1, :17].tolist() == [*range(1, 17), 99]
    tables.update((part(0, 0, 1, 0, tuple(range(1000))),))
    assert tables.pages.shape == (3, 1024) and tables.pages.dtype == torch.int64
    assert tables.pages[0, :1000].tolist() == list(range(1000)) and tables.pages[1, :17].tolist() == [*range(1, 17), 99]


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_those_of_the_requests_at_every_step(seed: int) -> None:
    """Random requests that come, grow, have blocks exchanged and go; a row that is used again shows nothing of the one before."""
    draw, tables = random.Random(seed), BlockTables(5, CPU)
    live: dict[int, list[int]] = {}
    told: dict[int, int] = {}
    for _ in range(300):
        slices = []
        for row in range(5):
            if row in live and draw.random() < 0.1:
                del live[row]
            if row not in live and draw.random() < 0.5:
                live[row], told[row] = [draw.randrange(10**6) for _ in range(draw.randrange(1, 40))], 0
            if row in live and draw.random() < 0.7:
                if draw.random() < 0.3:
                    number = draw.randrange(len(live[row]))
                    live[row][number] = draw.randrange(10**6)
                    told[row] = min(told[row], number)
                live[row] += [draw.randrange(10**6) for _ in range(draw.randrange(3))]
                slices.append(part(row, 0, 1, told[row], tuple(live[row][told[row] :])))
                told[row] = len(live[row])
        tables.update(tuple(slices))
        for row in {item.row for item in slices}:
            assert tables.pages[row, : len(live[row])].tolist() == live[row]


def test_pieces_and_rows_of_a_step() -> None:
    """Rows follow each other slice by slice, padded to 8; the tables are handed on whole, not copied."""
    tables = BlockTables(6, CPU)
    slices = (part(4, 10, 13, 0, (3,), write_from=12, valid_from=2), part(1, 700, 701, 0, (4, 5, 6)), part(5, 0, 2, 0, (8,)))
    tokens, sequences = step_arrays(slices, tables, (4,), (16,), 8, CPU)
    assert tokens.tolist() == [10, 11, 12, 700, 0, 1, 0, 0] == sequences.positions.tolist()
    assert sequences.pieces == (Piece(10, 13, 0, 4, 2, 12), Piece(700, 701, 3, 1), Piece(0, 2, 4, 5))
    assert [piece.rows for piece in sequences.pieces] == [slice(0, 3), slice(3, 4), slice(4, 6)]
    assert sequences.tables is tables.pages and sequences.num_rows == 6 and sequences.longest == 701
    (single,) = sequences.singles[0]
    assert (single.rows.tolist(), single.table_rows.tolist(), single.owners) == ([3], [1], (1,))
    assert sequences.groups[4].closed[2].tolist() == []  # entry 2 closes with token 11, which is at or before 12: it is there


@pytest.mark.parametrize(
    ("write_from", "written"), [(0, [2, 3, 4]), (12, [3, 4]), (13, [3, 4]), (15, [3, 4]), (16, [4]), (20, [])]
)
def test_entries_that_are_in_the_log_are_not_written(write_from: int, written: list[int]) -> None:
    """Tokens 10 to 20 close entries 2, 3 and 4 of 4 tokens, which end at 12, 16 and 20."""
    slices = (part(0, 10, 21, 0, (3,), write_from=write_from),)
    groups = step_arrays(slices, BlockTables(1, CPU), (4,), (), 8, CPU)[1].groups[4]
    assert sorted(groups.closed[2].tolist()) == written


@pytest.mark.parametrize(
    ("start", "valid_from", "live", "carried"),
    [
        (9, 0, 1, 0),  # tokens 8 and before were computed: group 2 was left open
        (8, 0, 0, 1),  # group 1 was closed and left something for group 2
        (0, 0, 0, 0),
        (9, 9, 0, 0),  # nothing exists before
        (8, 8, 0, 0),
        (10, 9, 1, 0),  # one token of the group was computed by the slice before
        (12, 9, 0, 1),
    ],
)
def test_what_an_earlier_step_left_of_a_group(start: int, valid_from: int, live: int, carried: int) -> None:
    slices = (part(0, start, start + 3, 0, (3,), write_from=100, valid_from=valid_from),)
    groups = step_arrays(slices, BlockTables(1, CPU), (4,), (), 8, CPU)[1].groups[4]
    assert (groups.live[0].numel(), groups.carried[0].numel()) == (live, carried)
