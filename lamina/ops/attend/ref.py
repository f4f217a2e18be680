"""The definition, in plain PyTorch; fp32.

Order depends on the query's position alone: queries are taken in tiles aligned to 64 positions; a tile's window columns
start at a multiple of 64 whatever the ring holds, its entry columns are entry numbers, both of a fixed count per tile.
Columns that a query may not see weigh exactly 0, so it does not matter what else is in them, as long as it is finite.

    columns of tile a | positions 64(a - back) ... 64a + 63 | entries 0 ... entries(a) - 1 |

Sequences with one query (decode) are computed together where they have as many columns: the same products, batched.
Source: DeepSeek-V4 report, sparse attention with a sink.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lamina.ops.gemm import MIN_COLUMNS, padded_rows
from lamina.ops.sequences import TILE, Sequences, Single, Tile, blocks_used, entry_columns
from lamina.ops.store import Store

#: tiles that see more entries than this gather the selected ones a query at a time; others mask
DENSE_ENTRIES = 2048
_LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class EntryScope:
    """Compressed entries: all that are visible, or `selected` [T, k] entry numbers, ascending, -1 last."""

    log: Store
    ratio: int
    selected: Tensor | None

    def is_dense(self, columns: int) -> bool:
        """Whether queries with that many entry columns mask all of them instead of gathering; it depends on the tile alone."""
        return self.selected is None or columns <= max(DENSE_ENTRIES, 2 * self.selected.shape[1])


@lru_cache(maxsize=32)
def _zeros(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows to pad with; read, never written."""
    return torch.zeros(rows, width, dtype=dtype)


@lru_cache(maxsize=256)
def _window_bias(position: int, count: int, size: int, oldest: int) -> Tensor:
    """[count, window columns]: 0 where query position + i sees the column, none older than `oldest` (see _oldest), else -inf."""
    base, columns = _window_columns(position, size)
    column = torch.arange(base, base + columns)
    query = torch.arange(position, position + count)[:, None]
    seen = (column <= query) & (column > query - size) & (column >= oldest)
    return torch.where(seen, 0.0, -torch.inf)


def _oldest(position: int, size: int, valid_from: int) -> int:
    """The oldest position that a query may see by itself: valid_from, or 0 where no query of the tile looks back that far."""
    return valid_from if valid_from > _window_columns(position, size)[0] else 0


@lru_cache(maxsize=256)
def _entry_bias(position: int, count: int, ratio: int, columns: int) -> Tensor:
    """[count, columns]: 0 where query position + i sees the entry, else -inf."""
    visible = (torch.arange(position, position + count)[:, None] + 1) // ratio
    return torch.where(torch.arange(columns) < visible, 0.0, -torch.inf)


@lru_cache(maxsize=16)
def _single_bias(positions: tuple[int, ...], oldest: tuple[int, ...], size: int, ratio: int, columns: int) -> Tensor:
    """[B, 1, window columns + entry columns] for one query at each position; ratio 0 leaves the entries out."""
    parts = [torch.stack([_window_bias(position, 1, size, old) for position, old in zip(positions, oldest, strict=True)])]
    if ratio:
        parts.append(torch.stack([_entry_bias(position, 1, ratio, columns) for position in positions]))
    return torch.cat(parts, dim=-1)


def _selected_bias(selected: Tensor, columns: int) -> Tensor:
    """selected [n, k] -> [n, columns]: 0 where an entry is selected, else -inf."""
    bias = torch.full((selected.shape[0], columns + 1), -torch.inf)
    bias.scatter_(1, torch.where(selected < 0, columns, selected), 0.0)
    return bias[:, :columns]


def _window_columns(position: int, size: int) -> tuple[int, int]:
    """First position and number of the window columns of the tile that `position` is in."""
    back = -(-(size - 1) // TILE)
    return (position // TILE - back) * TILE, (back + 1) * TILE


def _pad_queries(q: Tensor, multiple: int) -> Tensor:
    """q [B, n, H, D] -> [B, n', H, D] with n' * H a multiple of the rows that keep bits stable; added queries are zeros."""
    num = padded_rows(q.shape[1], multiple // math.gcd(q.shape[2], multiple))
    if num == q.shape[1]:
        return q
    padded = q.new_zeros(q.shape[0], num, *q.shape[2:])
    padded[:, : q.shape[1]] = q
    return padded


def _attend_scopes(q: Tensor, scopes: list[Tensor], bias: Tensor, sink: Tensor, multiple: int) -> Tensor:
    """q [B, n, H, D] scaled, scopes of rows [B, N, D], bias [B, n, sum of N], sink [H] -> [B, n, H, D]: one softmax over all."""
    batch, count, heads, dim = q.shape
    flat = _pad_queries(q, multiple).flatten(1, 2)  # [B, n' * H, D]
    weights = [torch.bmm(flat, rows.transpose(1, 2)) for rows in scopes]
    joint = weights[0] if len(weights) == 1 else torch.cat(weights, dim=-1)
    scores = joint.view(batch, -1, heads, joint.shape[-1])
    scores[:, :count] += bias[:, :, None]
    peak = scores.amax(-1, keepdim=True).clamp_(min=_LOWEST)
    scores.sub_(peak).exp_()
    total = scores.sum(-1, keepdim=True).add_(torch.exp(sink[:, None] - peak)).clamp_(min=1e-30)
    out, column = None, 0
    for rows in scopes:
        part = torch.bmm(joint[..., column : column + rows.shape[1]], rows)
        out = part if out is None else out.add_(part)
        column += rows.shape[1]
    assert out is not None
    return out.view(batch, -1, heads, dim)[:, :count].div_(total[:, :count])


def attend(
    q: Tensor, own: tuple[Tensor, ...], window: Store, size: int, entries: EntryScope | None, scale: float, sink: Tensor,
    sequences: Sequences,
) -> Tensor:  # fmt: skip
    """Softmax attention of each query over its window, its entries and a sink.

    q        [T, H, D] fp32.   own  the step's own keys (= values) as stored, one [T, ...] a field.   window  ring of older ones.
    size     window in tokens, the query's own included.   sink  [H] fp32 logit without a value; +inf gives zeros.
    Returns  [T, H, D] fp32; rows of padding are zeros.
    """
    out = torch.zeros_like(q)
    task = _Task(q * scale, own, window, size, entries, sink, sequences, out)
    for tiles in sequences.longer:
        task.attend_sequence(tiles)
    for single in sequences.alike(0 if entries is None else entries.ratio):
        task.attend_single(single)
    return out


def attend_block(
    q: Tensor, own: tuple[Tensor, ...], window: Store, size: int, scale: float, sink: Tensor, sequences: Sequences
) -> Tensor:
    """Softmax attention of the rows of each sequence over the last `size` rows of its ring, all of its own rows, and a sink.

    Nothing is causal: every row of a sequence sees what the others see. All sequences have as many rows, which are no part of
    the ring. Arguments and result as in `attend`, `size` without the rows themselves.
    """
    out, pieces, codec = torch.zeros_like(q), sequences.pieces, window.codec
    count = pieces[0].stop - pieces[0].start
    width = padded_rows(count, MIN_COLUMNS)
    bias = torch.full((len(pieces), 1, size + width), -torch.inf)
    fields: list[list[Tensor]] = [[] for _ in own]
    for number, piece in enumerate(pieces):
        assert piece.stop - piece.start == count
        oldest = max(piece.valid_from, piece.start - size)
        missing = size - (piece.start - oldest)
        bias[number, 0, missing : size + count] = 0
        page = sequences.slot_pages[number][window.slot_column]
        for field, (rows, found) in enumerate(zip(own, fields, strict=True)):
            past = window.ring_rows(field, page, oldest, piece.start)
            ends = (_zeros(missing, rows.shape[1], rows.dtype), _zeros(width - count, rows.shape[1], rows.dtype))
            found += [ends[0], *past, rows[piece.rows], ends[1]]
    near = codec.decode(tuple(torch.cat(found) for found in fields)).view(len(pieces), size + width, -1)
    picked = torch.cat([q[piece.rows] for piece in pieces]).view(len(pieces), count, *q.shape[1:]) * scale
    attended = _attend_scopes(picked, [near], bias, sink, sequences.row_multiple)
    for number, piece in enumerate(pieces):
        out[piece.rows] = attended[number]
    return out


@dataclass(frozen=True, slots=True)
class _Task:
    """The arguments of one `attend`, with `q` scaled and the output to fill."""

    q: Tensor
    own: tuple[Tensor, ...]
    window: Store
    size: int
    entries: EntryScope | None
    sink: Tensor
    sequences: Sequences
    out: Tensor

    def attend_sequence(self, tiles: tuple[Tile, ...]) -> None:
        """All tiles of one sequence, one after another; its past is read once."""
        sequences, sequence, entries = self.sequences, tiles[0].sequence, self.entries
        multiple, piece = sequences.row_multiple, sequences.pieces[sequence]
        start, stop = piece.start, piece.stop
        base, _ = _window_columns(start, self.size)
        rows = self._window_rows((sequence,), (stop - 1) // TILE * TILE + TILE - base)[0]
        known = None
        if entries is not None:
            most = entry_columns(tiles[-1].index, entries.ratio)
            counts = (stop // entries.ratio,)
            table = sequences.tables[piece.table_row : piece.table_row + 1, : blocks_used(counts, entries.log.rows_per_page)]
            known = entries.log.read_logs(table, counts, most)
        for tile in tiles:
            own = slice(tile.row, tile.row + tile.count)
            position = start + tile.row - piece.first_row
            first, columns = _window_columns(position, self.size)
            near = rows[None, first - base : first - base + columns]
            bias = _window_bias(position, tile.count, self.size, _oldest(position, self.size, piece.valid_from))
            if entries is None or known is None:
                self.out[own] = _attend_scopes(self.q[None, own], [near], bias[None], self.sink, multiple)[0]
                continue
            columns = entry_columns(tile.index, entries.ratio)
            if not entries.is_dense(columns):
                assert entries.selected is not None
                selected = entries.selected[own]
                far = known[0, selected.clamp(min=0)]
                both = torch.cat([bias, torch.where(selected < 0, -torch.inf, 0.0)], dim=-1)[:, None]
                scopes = [near.expand(tile.count, -1, -1), far]
                self.out[own] = _attend_scopes(self.q[own, None], scopes, both, self.sink, multiple)[:, 0]
                continue
            if entries.selected is None:
                far_bias = _entry_bias(position, tile.count, entries.ratio, columns)
            else:
                far_bias = _selected_bias(entries.selected[own], columns)
            both = torch.cat([bias, far_bias], dim=-1)[None]
            self.out[own] = _attend_scopes(self.q[None, own], [near, known[:, :columns]], both, self.sink, multiple)[0]

    def attend_single(self, single: Single) -> None:
        """One query of each of several sequences, all with the same number of entry columns."""
        _, columns = _window_columns(0, self.size)
        scopes, bias = [self._window_rows(single.owners, columns)], None
        if self.entries is None:
            bias = self._single_bias(single, 0)
        else:
            rows, bias = self._single_entries(self.entries, single)
            scopes.append(rows)
        q = self.q.index_select(0, single.rows)[:, None]
        found = _attend_scopes(q, scopes, bias, self.sink, self.sequences.row_multiple)
        self.out.index_copy_(0, single.rows, found[:, 0])

    def _single_entries(self, entries: EntryScope, single: Single) -> tuple[Tensor, Tensor]:
        """Rows [B, N, D] of the entries of B sequences with one query each, and the bias [B, 1, ...] of window and entries."""
        tables, log = self.sequences.tables, entries.log
        if entries.is_dense(single.columns):
            counts = tuple((position + 1) // entries.ratio for position in single.positions)
            used = tables[:, : blocks_used(counts, log.rows_per_page)].index_select(0, single.table_rows)
            rows = log.read_logs(used, counts, single.columns)
            if entries.selected is None:
                return rows, self._single_bias(single, entries.ratio)
            far = _selected_bias(entries.selected.index_select(0, single.rows), single.columns)
        else:
            assert entries.selected is not None
            selected = entries.selected.index_select(0, single.rows)
            wanted = selected.clamp(min=0)
            pages = tables[single.table_rows[:, None], wanted // log.rows_per_page]
            rows = log.read(pages.flatten(), (wanted % log.rows_per_page).flatten()).view(*wanted.shape, -1)
            far = torch.where(selected < 0, -torch.inf, 0.0)
        return rows, torch.cat([self._single_bias(single, 0), far[:, None]], dim=-1)

    def _single_bias(self, single: Single, ratio: int) -> Tensor:
        """[B, 1, ...] of the window, and of the entries unless ratio is 0."""
        old = (_oldest(at, self.size, first) for at, first in zip(single.positions, single.valid_from, strict=True))
        return _single_bias(single.positions, tuple(old), self.size, ratio, single.columns if ratio else 0)

    def _window_rows(self, owners: tuple[int, ...], columns: int) -> Tensor:
        """[B, columns, D]: the window columns of B sequences from the first of their first query's on; zeros where nothing is."""
        sequences, window = self.sequences, self.window
        fields = []
        for field, own in enumerate(self.own):
            zeros = _zeros(columns, own.shape[1], own.dtype)
            parts = []
            for sequence in owners:
                piece = sequences.pieces[sequence]
                base, _ = _window_columns(piece.start, self.size)
                oldest = max(piece.valid_from, piece.start - self.size + 1)
                page = sequences.slot_pages[sequence][window.slot_column]
                parts.append(zeros[: oldest - base])
                parts += window.ring_rows(field, page, oldest, piece.start)
                parts += [own[piece.rows], zeros[: base + columns - piece.stop]]
            fields.append(torch.cat(parts))
        return window.codec.decode(tuple(fields)).view(len(owners), columns, -1)
