"""A step's slices as flat arrays, and the block tables that stay on the device from step to step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.ops.gemm import padded_rows
from lamina.ops.sequences import Piece, Sequences, make_groups, make_singles, make_tails, make_tiles
from lamina.schedule.step import Slice

_FIRST_BLOCKS = 16


class BlockTables:
    """The block table of every running request, one a row: a step brings what is new, whatever the length of the requests.

    pages  [num_rows, blocks] int64 page of each block. It grows with the longest request so far; what a request left behind in
           its row, and what was never set, are pages of the arena too, and belong to nobody.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.pages = torch.zeros(num_rows, _FIRST_BLOCKS, dtype=torch.int64, device=device)

    def update(self, slices: Sequence[Slice]) -> None:
        """Enters the slices' new and changed pages: one upload of three numbers a page."""
        rows: list[int] = []
        blocks: list[int] = []
        pages: list[int] = []
        for part in slices:
            rows += [part.row] * len(part.table)
            blocks += range(part.table_start, part.table_start + len(part.table))
            pages += part.table
        if not pages:
            return
        self._make_room(max(blocks) + 1)
        new = torch.tensor([rows, blocks, pages], dtype=torch.int64, device=self.pages.device)
        self.pages[new[0], new[1]] = new[2]

    def _make_room(self, num_blocks: int) -> None:
        num_rows, width = self.pages.shape
        if num_blocks > width:
            while width < num_blocks:
                width *= 2
            grown = self.pages.new_zeros(num_rows, width)
            grown[:, : self.pages.shape[1]] = self.pages
            self.pages = grown


def step_arrays(
    slices: Sequence[Slice], tables: BlockTables, ratios: tuple[int, ...], rings: tuple[int, ...], multiple: int,
    device: torch.device,
) -> tuple[Tensor, Sequences]:  # fmt: skip
    """(token ids [T], sequences): rows of the slices one after another, then padding (token 0, position 0) to `multiple` rows.

    Enters the slices' new blocks into the tables.
    """
    tables.update(slices)
    tokens: list[int] = []
    positions: list[int] = []
    found = []
    for part in slices:
        piece = Piece(part.start, part.stop, len(tokens), part.row, part.valid_from, part.write_from, part.num_guesses)
        found.append(piece)
        tokens.extend(part.tokens)
        positions.extend(range(part.start, part.stop))
    num_rows = len(tokens)
    padding = [0] * (padded_rows(num_rows, multiple) - num_rows)
    pieces = tuple(found)
    wanted = None
    if len(pieces) < num_rows and all(part.num_logprobs is None and not part.num_guesses for part in slices):
        last = [piece.rows.stop - 1 for piece in pieces]
        last += last[:1] * (padded_rows(len(last), multiple) - len(last))
        wanted = torch.tensor(last, dtype=torch.int64, device=device)
    sequences = Sequences(
        positions=torch.tensor(positions + padding, dtype=torch.int64, device=device),
        num_rows=num_rows,
        row_multiple=multiple,
        pieces=pieces,
        tables=tables.pages,
        slots=torch.tensor([part.slot for part in slices], dtype=torch.int64, device=device),
        slot_pages=tuple(part.slot for part in slices),
        longer=make_tiles(pieces),
        singles={ratio: make_singles(pieces, ratio, device) for ratio in ((0, *ratios) if ratios else ())},
        groups={ratio: make_groups(pieces, ratio, device) for ratio in ratios},
        tails={ring: make_tails(pieces, ring, device) for ring in rings},
        windows=tuple(tuple(dict(blocks) for blocks in part.windows) for part in slices),
        wanted=wanted,
    )
    return torch.tensor(tokens + padding, dtype=torch.int64, device=device), sequences
