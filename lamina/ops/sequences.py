"""The flat arrays of one step that the memory ops read: which rows belong together and where their past is stored.

rows      | sequence 0: query_start[0] .. query_start[1] | sequence 1 ... | padding to a multiple of rows |
sequence  start = tokens seen before the step; positions of its rows are start, start + 1, ...
"""

from dataclasses import dataclass

import torch
from torch import Tensor

#: queries are cut into tiles aligned to this many positions, so that order inside attention depends on the position alone
TILE = 64


def entry_columns(tile: int, ratio: int) -> int:
    """Entry columns for the queries of a tile: what its last position sees, in whole multiples of 64."""
    return -(-((tile + 1) * TILE // ratio) // 64) * 64


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

    rows [B] and sequences [B] as tensors; the same sequences and their positions on the host.
    """

    rows: Tensor
    sequences: Tensor
    owners: tuple[int, ...]
    positions: tuple[int, ...]
    columns: int


@dataclass(frozen=True, slots=True)
class Groups:
    """The compression groups that a step touches, for one ratio, in the order of a descending token count.

    rows      [G, J] row of each token of the group in this step, left to right; only the first counts[g] are real.
    counts    G tokens of the group in this step, descending.
    live      [G'] groups that continue one left open by an earlier step, and their sequences [G'].
    carried   [G''] groups that open in this step but whose predecessor was closed by an earlier one, and their sequences.
    after     [P], [P]: groups whose predecessor is in this step, and that predecessor.
    closed    [C] groups that close; their sequences, entry numbers.
    open      [R'] last groups of their sequences that stay open, and their sequences; `ended` likewise for those that close.
    """

    rows: Tensor
    counts: tuple[int, ...]
    live: tuple[Tensor, Tensor]
    carried: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]
    closed: tuple[Tensor, Tensor, Tensor]
    open: tuple[Tensor, Tensor]
    ended: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Sequences:
    """One step's rows. All tensors are on the device of the model.

    positions     [T] int64, padding included; rows from num_rows on are padding.
    row_multiple  products get a multiple of so many rows.
    starts, stops, first_rows  of each sequence: tokens seen before and after the step, and its first row.
    tables        [R, blocks] int64, the page of each block.   slots  [R, slot pages] int64; slot_pages the same on the host.
    longer        tiles of the sequences with more than one row, one tuple a sequence.
    singles       for each compression ratio (0: no entries) the sequences with one row.
    groups        for each compression ratio the groups touched.
    tails         for each ring length what goes into a ring: (rows [M] of the step, their sequences [M], ring rows [M]).
    """

    positions: Tensor
    num_rows: int
    row_multiple: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    first_rows: tuple[int, ...]
    tables: Tensor
    slots: Tensor
    slot_pages: tuple[tuple[int, ...], ...]
    longer: tuple[tuple[Tile, ...], ...]
    singles: dict[int, tuple[Single, ...]]
    groups: dict[int, Groups]
    tails: dict[int, tuple[Tensor, Tensor, Tensor]]

    def rows_of(self, sequence: int) -> slice:
        """The rows of one sequence."""
        first = self.first_rows[sequence]
        return slice(first, first + self.stops[sequence] - self.starts[sequence])


def make_tiles(starts: tuple[int, ...], stops: tuple[int, ...], first_rows: tuple[int, ...]) -> tuple[tuple[Tile, ...], ...]:
    """The rows of each sequence that has more than one, cut at multiples of TILE positions."""
    found = []
    for sequence, (start, stop, first) in enumerate(zip(starts, stops, first_rows, strict=True)):
        tiles = []
        position = start
        while position < stop and stop - start > 1:
            end = min(stop, (position // TILE + 1) * TILE)
            tiles.append(Tile(sequence, first + position - start, end - position, position // TILE))
            position = end
        if tiles:
            found.append(tuple(tiles))
    return tuple(found)


def make_singles(
    starts: tuple[int, ...], stops: tuple[int, ...], first_rows: tuple[int, ...], ratio: int, device: torch.device
) -> tuple[Single, ...]:
    """The sequences with one row, by the number of their entry columns (ratio 0: none)."""
    alike: dict[int, list[int]] = {}
    for sequence, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        if stop - start == 1:
            alike.setdefault(entry_columns(start // TILE, ratio) if ratio else 0, []).append(sequence)
    return tuple(
        Single(
            rows=torch.tensor([first_rows[sequence] for sequence in owners], device=device),
            sequences=torch.tensor(owners, device=device),
            owners=tuple(owners),
            positions=tuple(starts[sequence] for sequence in owners),
            columns=columns,
        )
        for columns, owners in alike.items()
    )


def make_groups(
    starts: tuple[int, ...], stops: tuple[int, ...], first_rows: tuple[int, ...], ratio: int, device: torch.device
) -> Groups:
    """The groups of `ratio` tokens that rows [start, stop) of each sequence touch."""
    found: list[tuple[int, int, int, int, int]] = []  # (tokens, sequence, group, first row, first position)
    for sequence, (start, stop, first) in enumerate(zip(starts, stops, first_rows, strict=True)):
        for group in range(start // ratio, -(-stop // ratio)):
            low, high = max(start, group * ratio), min(stop, (group + 1) * ratio)
            found.append((high - low, sequence, group, first + low - start, low))
    found.sort(key=lambda item: (-item[0], item[1], item[2]))
    index = {(item[1], item[2]): g for g, item in enumerate(found)}
    width = found[0][0] if found else 0
    rows = [[first + min(j, count - 1) for j in range(width)] for count, _, _, first, _ in found]
    live, carried, after, closed, still_open, ended = [], [], [], [], [], []
    for g, (count, sequence, group, _, low) in enumerate(found):
        if low % ratio:
            live.append((g, sequence))
        elif (sequence, group - 1) in index:
            after.append((g, index[sequence, group - 1]))
        elif low:
            carried.append((g, sequence))
        if (low + count) % ratio == 0:
            closed.append((g, sequence, group))
        if low + count == stops[sequence]:
            (ended if (low + count) % ratio == 0 else still_open).append((g, sequence))

    def columns(items: list[tuple[int, ...]], width: int) -> tuple[Tensor, ...]:
        return torch.tensor(items, dtype=torch.int64, device=device).reshape(-1, width).unbind(1)

    return Groups(
        rows=torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(found), width),
        counts=tuple(item[0] for item in found),
        live=columns(live, 2), carried=columns(carried, 2), after=columns(after, 2), closed=columns(closed, 3),
        open=columns(still_open, 2), ended=columns(ended, 2),
    )  # fmt: skip


def make_tails(
    starts: tuple[int, ...], stops: tuple[int, ...], first_rows: tuple[int, ...], ring: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The last `ring` rows of each sequence, which sequence each belongs to, and where in a ring of that length it goes."""
    rows, owner, where = [], [], []
    for sequence, (start, stop, first) in enumerate(zip(starts, stops, first_rows, strict=True)):
        for position in range(max(start, stop - ring), stop):
            rows.append(first + position - start)
            owner.append(sequence)
            where.append(position % ring)
    rows_t, owner_t, where_t = torch.tensor([rows, owner, where], dtype=torch.int64, device=device).unbind(0)
    return rows_t, owner_t, where_t
