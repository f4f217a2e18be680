"""The flat arrays of one step that the memory ops read: which rows belong together and where their past is stored.

rows      | sequence 0: first_row .. | sequence 1 ... | padding to a multiple of rows |
sequence  start = tokens seen before the step; positions of its rows are start, start + 1, ...
past      | does not exist | window and fold | start ...       log entries | are there, read only | are written |
                           ^ valid_from                                                          ^ write_from
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import torch
from torch import Tensor

#: queries are cut into tiles aligned to this many positions, so that order inside attention depends on the position alone
TILE = 64

_Derived = TypeVar("_Derived")
#: of each block of a large window that is there, its pages
WindowPages = dict[int, tuple[int, ...]]


def entry_columns(tile: int, ratio: int) -> int:
    """Entry columns for the queries of a tile: what its last position sees, in whole multiples of 64."""
    return -(-((tile + 1) * TILE // ratio) // 64) * 64


def blocks_used(counts: tuple[int, ...], rows_per_block: int) -> int:
    """Blocks that hold the entries of the longest of some logs with `counts` entries; at least one."""
    return max(1, -(-max(counts) // rows_per_block))


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, stop) of one sequence, in rows from first_row on.

    table_row   its row of the block tables.
    valid_from  nothing of its window and folds exists before this position.
    write_from  entries that close at or before this position are in the log already, and are only read.
    drafts      how many of its last tokens are guesses: what is remembered must be right after each of the rows from there on.
    """

    start: int
    stop: int
    first_row: int
    table_row: int
    valid_from: int = 0
    write_from: int = 0
    drafts: int = 0

    @property
    def rows(self) -> slice:
        """Its rows of the step."""
        return slice(self.first_row, self.first_row + self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive rows [row, row + count) of one sequence whose positions share a tile; `index` = position // TILE."""

    sequence: int
    row: int
    count: int
    index: int


@dataclass(frozen=True, slots=True)
class Single:
    """Sequences with one row each in this step (decode) that have as many entry columns: they are computed together.

    rows, table_rows  [B] as tensors.   owners, positions, valid_from  sequences, the rows' positions, where the past begins.
    """

    rows: Tensor
    table_rows: Tensor
    owners: tuple[int, ...]
    positions: tuple[int, ...]
    valid_from: tuple[int, ...]
    columns: int


@dataclass(frozen=True, slots=True)
class Groups:
    """The compression groups that a step touches, for one ratio, in the order of a descending token count.

    rows      [G, J] row of each token of the group in this step, left to right; only the first counts[g] are real.
    counts    G tokens of the group in this step, descending.
    live      [G'] groups that continue one left open by an earlier step, their sequences, and the tokens seen before [G'].
    carried   [G''] groups that open in this step but whose predecessor was closed by an earlier one, likewise.
    after     [P], [P]: groups whose predecessor is in this step, and that predecessor.
    closed    [C] groups that close and whose entries are to be written; their table rows, entry numbers.
    open      [R'] last groups of their sequences that stay open, their sequences, and the tokens seen after them.
    ended     likewise groups that close, at the end of their sequence or where what follows are guesses.
    within    by the number of a group's tokens, less one, what `open` is of groups that have guesses after these.
    """

    rows: Tensor
    counts: tuple[int, ...]
    live: tuple[Tensor, Tensor, Tensor]
    carried: tuple[Tensor, Tensor, Tensor]
    after: tuple[Tensor, Tensor]
    closed: tuple[Tensor, Tensor, Tensor]
    open: tuple[Tensor, Tensor, Tensor]
    ended: tuple[Tensor, Tensor, Tensor]
    within: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sequences:
    """One step's rows. All tensors are on the device of the model.

    positions     [T] int64, padding included; rows from num_rows on are padding.
    row_multiple  products get a multiple of so many rows.
    pieces        one a sequence.
    tables        [table rows, blocks] int64, the page of each block; it is kept from step to step and has more than is in use.
    slots         [R, slot pages] int64; slot_pages the same on the host.
    longer        tiles of the sequences with more than one row, one tuple a sequence.
    singles       for each compression ratio (0: no entries) the sequences with one row.
    groups        for each compression ratio the groups touched.
    tails         for each ring length what goes into a ring: (rows [M] of the step, their sequences [M], ring rows [M]).
    windows       of each sequence, for each group of large windows, the pages of its blocks.
    wanted        [W] rows whose final hidden vectors are read: the last of each sequence, in order, then any of them as padding;
                  None: all. A model may leave the others zero.
    """

    positions: Tensor
    num_rows: int
    row_multiple: int
    pieces: tuple[Piece, ...]
    tables: Tensor
    slots: Tensor
    slot_pages: tuple[tuple[int, ...], ...]
    longer: tuple[tuple[Tile, ...], ...]
    singles: dict[int, tuple[Single, ...]]
    groups: dict[int, Groups]
    tails: dict[int, tuple[Tensor, Tensor, Tensor]]
    windows: tuple[tuple[WindowPages, ...], ...] = ()
    wanted: Tensor | None = None
    _derived: dict[object, object] = field(default_factory=dict, repr=False, compare=False)

    def remember(self, key: object, make: Callable[[], _Derived]) -> _Derived:
        """What follows from the step alone, made by the first layer that asks for it."""
        if key not in self._derived:
            self._derived[key] = make()
        return cast(_Derived, self._derived[key])

    def alike(self, ratio: int) -> tuple[Single, ...]:
        """The sequences with one row, by the number of entries that they may see; `singles` where the step has them."""
        if ratio in self.singles:
            return self.singles[ratio]
        return self.remember(("alike", ratio), lambda: make_singles(self.pieces, ratio, self.positions.device))

    def of_wanted(self) -> "Sequences":
        """The step as it is for the wanted rows alone, when all others are stored: a row of each sequence, each its last."""
        assert self.wanted is not None
        wanted = self.wanted

        def make() -> Sequences:
            pieces = tuple(
                replace(piece, start=piece.stop - 1, first_row=number, write_from=piece.stop)
                for number, piece in enumerate(self.pieces)
            )
            return replace(
                self, positions=self.positions[wanted], num_rows=len(pieces), pieces=pieces, longer=(), singles={}, groups={},
                tails={}, wanted=None, _derived={},
            )  # fmt: skip

        return self.remember("of wanted", make)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence after the step; 0 where there is none."""
        return max((piece.stop for piece in self.pieces), default=0)


def make_tiles(pieces: tuple[Piece, ...]) -> tuple[tuple[Tile, ...], ...]:
    """The rows of each sequence that has more than one, cut at multiples of TILE positions."""
    found = []
    for sequence, piece in enumerate(pieces):
        tiles = []
        position = piece.start
        while position < piece.stop and piece.stop - piece.start > 1:
            end = min(piece.stop, (position // TILE + 1) * TILE)
            tiles.append(Tile(sequence, piece.first_row + position - piece.start, end - position, position // TILE))
            position = end
        if tiles:
            found.append(tuple(tiles))
    return tuple(found)


def make_singles(pieces: tuple[Piece, ...], ratio: int, device: torch.device) -> tuple[Single, ...]:
    """The sequences with one row, by the number of their entry columns (ratio 0: none)."""
    alike: dict[int, list[int]] = {}
    for sequence, piece in enumerate(pieces):
        if piece.stop - piece.start == 1:
            alike.setdefault(entry_columns(piece.start // TILE, ratio) if ratio else 0, []).append(sequence)
    found = []
    for columns, owners in alike.items():
        own = [pieces[sequence] for sequence in owners]
        places = torch.tensor([[piece.first_row for piece in own], [piece.table_row for piece in own]], device=device)
        found.append(
            Single(
                rows=places[0],
                table_rows=places[1],
                owners=tuple(owners),
                positions=tuple(piece.start for piece in own),
                valid_from=tuple(piece.valid_from for piece in own),
                columns=columns,
            )
        )
    return tuple(found)


def make_groups(pieces: tuple[Piece, ...], ratio: int, device: torch.device) -> Groups:
    """The groups of `ratio` tokens that rows [start, stop) of each sequence touch."""
    found: list[tuple[int, int, int, int, int]] = []  # (tokens, sequence, group, first row, first position)
    for sequence, piece in enumerate(pieces):
        for group in range(piece.start // ratio, -(-piece.stop // ratio)):
            low, high = max(piece.start, group * ratio), min(piece.stop, (group + 1) * ratio)
            found.append((high - low, sequence, group, piece.first_row + low - piece.start, low))
    found.sort(key=lambda item: (-item[0], item[1], item[2]))
    index = {(item[1], item[2]): g for g, item in enumerate(found)}
    width = found[0][0] if found else 0
    rows = [[first + min(j, count - 1) for j in range(width)] for count, _, _, first, _ in found]
    live: list[tuple[int, int, int]] = []
    carried: list[tuple[int, int, int]] = []
    after: list[tuple[int, int]] = []
    still_open: list[tuple[int, int, int]] = []
    ended: list[tuple[int, int, int]] = []
    closed: list[tuple[int, int, int]] = []
    within: dict[int, list[tuple[int, int, int]]] = {}
    for g, (count, sequence, group, _, low) in enumerate(found):
        piece, end = pieces[sequence], low + count
        if (sequence, group - 1) in index:
            after.append((g, index[sequence, group - 1]))
        elif low > piece.valid_from:  # an earlier step left something of this group, or of the one before
            (live if low % ratio else carried).append((g, sequence, low))
        if end % ratio == 0 and end > piece.write_from:
            assert not piece.valid_from or group * ratio >= piece.valid_from, "an entry is to be written whose tokens are lost"
            closed.append((g, piece.table_row, group))
        if end >= piece.stop - piece.drafts:
            (ended if end % ratio == 0 else still_open).append((g, sequence, end))
        for seen in range(max(low + 1, piece.stop - piece.drafts), end):
            within.setdefault(seen - low - 1, []).append((g, sequence, seen))

    def columns(items: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        first, second, third = torch.tensor(items, dtype=torch.int64, device=device).reshape(-1, 3).unbind(1)
        return first, second, third

    following, before = torch.tensor(after, dtype=torch.int64, device=device).reshape(-1, 2).unbind(1)
    return Groups(
        rows=torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(found), width),
        counts=tuple(item[0] for item in found),
        live=columns(live), carried=columns(carried), after=(following, before), closed=columns(closed),
        open=columns(still_open), ended=columns(ended), within={j: columns(items) for j, items in within.items()},
    )  # fmt: skip


def make_tails(pieces: tuple[Piece, ...], ring: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The last `ring` rows of each sequence, which sequence each belongs to, and where in a ring of that length it goes."""
    rows, owner, where = [], [], []
    for sequence, piece in enumerate(pieces):
        for position in range(max(piece.start, piece.stop - ring), piece.stop):
            rows.append(piece.first_row + position - piece.start)
            owner.append(sequence)
            where.append(position % ring)
    rows_t, owner_t, where_t = torch.tensor([rows, owner, where], dtype=torch.int64, device=device).unbind(0)
    return rows_t, owner_t, where_t
