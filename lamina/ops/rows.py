"""One step's rows as tensors on the device, for the kernels: nothing here is read on the host.

Sizes are fixed (T rows, R requests, padding included), so that a captured graph reads new values from the same places.

rows      | request 0: first_rows[0] .. | request 1 ... | padding, whose owner is -1 |
request   its rows are positions starts[r], starts[r] + 1, ... stops[r] - 1; what came before is in its ring, folds and logs
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lamina.ops.sequences import Piece


@dataclass(frozen=True, slots=True)
class Rows:
    """All int32.

    positions   [T] position of each row.
    owners      [T] its request in this step, -1 for padding.
    starts, stops, first_rows  [R] positions of the request's rows, and the first of these rows.
    valid_from  [R] nothing of its window and folds exists before this position.
    write_from  [R] entries that close at or before this position are in the log already, and are only read.
    table_rows  [R] its row of the block tables.
    tables      [table rows, blocks] the page of each block; kept from step to step. Entries that were never set are pages too.
    slots       [R, slot pages].
    is_single   every request has one row at most (decode); known when kernels are launched.
    drafts      [R] how many of its last rows are guesses: what is remembered must be right after each of the rows from there on.
                None: nobody has any.
    windows     of each group of large windows [pages of a block, table rows, blocks], contiguous: as `tables`, by the numbers of
                the blocks; -1 where a request holds none.
    """

    positions: Tensor
    owners: Tensor
    starts: Tensor
    stops: Tensor
    first_rows: Tensor
    valid_from: Tensor
    write_from: Tensor
    table_rows: Tensor
    tables: Tensor
    slots: Tensor
    is_single: bool
    drafts: Tensor | None = field(default=None, kw_only=True)
    windows: tuple[Tensor, ...] = field(default=(), kw_only=True)

    @property
    def num_rows(self) -> int:
        """T, padding included."""
        return self.positions.shape[0]

    @property
    def num_requests(self) -> int:
        """R, padding included."""
        return self.starts.shape[0]


def rows_of(
    pieces: tuple[Piece, ...], slots: tuple[tuple[int, ...], ...], tables: Tensor, num_rows: int, num_requests: int,
    windows: tuple[Tensor, ...] = (),
) -> Rows:  # fmt: skip
    """The rows of `pieces`, padded; everything but the tables is copied to their device. For tests and eager steps."""
    positions, owners = [0] * num_rows, [-1] * num_rows
    for owner, piece in enumerate(pieces):
        for position in range(piece.start, piece.stop):
            row = piece.first_row + position - piece.start
            positions[row], owners[row] = position, owner
    spare = num_requests - len(pieces)
    found = [(p.start, p.stop, p.first_row, p.valid_from, p.write_from, p.table_row, p.drafts) for p in pieces]
    found += [(0,) * 7] * spare
    device = tables.device
    by_request = torch.tensor(found, dtype=torch.int32).t().contiguous().to(device)
    by_row = torch.tensor([positions, owners], dtype=torch.int32).to(device)
    width = len(slots[0]) if slots else 1
    pages = torch.tensor([*slots, *[(0,) * width] * spare], dtype=torch.int32).to(device)
    own_positions, own_owners = by_row.unbind(0)
    starts, stops, first_rows, valid_from, write_from, table_rows, drafts = by_request.unbind(0)
    return Rows(
        own_positions, own_owners, starts, stops, first_rows, valid_from, write_from, table_rows, tables=tables, slots=pages,
        is_single=all(piece.stop - piece.start <= 1 for piece in pieces),
        drafts=drafts if any(piece.drafts for piece in pieces) else None, windows=windows,
    )  # fmt: skip
