"""The definition, in plain PyTorch; fp32.

Order depends on the query's position alone: queries are taken in tiles aligned to 64 positions; a tile's window columns
start at a multiple of 64 whatever the ring holds, its entry columns are entry numbers, both of a fixed count per tile.
Columns that a query may not see weigh exactly 0, so it does not matter what else is in them, as long as it is finite.

    columns of tile a | positions 64(a - back) ... 64a + 63 | entries 0 ... entries(a) - 1 |

A sequence with one query (decode) is computed together with others that have as many columns: the same products, batched.
Source: DeepSeek-V4 report, sparse attention with a sink.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lamina.ops.gemm import ROW_MULTIPLE, padded_rows
from lamina.ops.sequences import TILE, Sequences, Tile, entry_columns
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


@lru_cache(maxsize=256)
def _window_bias(position: int, count: int, size: int, back: int) -> Tensor:
    """[count, (back + 1) * TILE]: 0 where query position + i sees the column, else -inf."""
    base = (position // TILE - back) * TILE
    column = torch.arange(base, base + (back + 1) * TILE)
    query = torch.arange(position, position + count)[:, None]
    seen = (column <= query) & (column > query - size) & (column >= 0)
    return torch.where(seen, 0.0, -torch.inf)


@lru_cache(maxsize=256)
def _entry_bias(position: int, count: int, ratio: int, columns: int) -> Tensor:
    """[count, columns]: 0 where query position + i sees the entry, else -inf."""
    visible = (torch.arange(position, position + count)[:, None] + 1) // ratio
    return torch.where(torch.arange(columns) < visible, 0.0, -torch.inf)


def _selected_bias(selected: Tensor, columns: int) -> Tensor:
    """selected [n, k] -> [n, columns]: 0 where an entry is selected, else -inf."""
    bias = torch.full((selected.shape[0], columns + 1), -torch.inf)
    bias.scatter_(1, torch.where(selected < 0, columns, selected), 0.0)
    return bias[:, :columns]


def _pad_queries(q: Tensor) -> Tensor:
    """q [B, n, H, D] -> [B, n', H, D] with n' * H a multiple of the rows that keep bits stable; added queries are zeros."""
    num = padded_rows(q.shape[1], ROW_MULTIPLE // math.gcd(q.shape[2], ROW_MULTIPLE))
    return q if num == q.shape[1] else torch.cat([q, q.new_zeros(q.shape[0], num - q.shape[1], *q.shape[2:])], dim=1)


def _attend_scopes(q: Tensor, scopes: list[tuple[Tensor, Tensor]], sink: Tensor) -> Tensor:
    """q [B, n, H, D] scaled, scopes of (rows [B, N, D], bias [B, n, N]), sink [H] -> [B, n, H, D]: one softmax over all."""
    batch, count, heads, dim = q.shape
    flat = _pad_queries(q).flatten(1, 2)  # [B, n' * H, D]
    weights = torch.cat([torch.bmm(flat, rows.transpose(1, 2)) for rows, _ in scopes], dim=-1)
    scores = weights.view(batch, -1, heads, weights.shape[-1])
    scores[:, :count] += torch.cat([bias for _, bias in scopes], dim=-1)[:, :, None]
    peak = scores.amax(-1, keepdim=True).clamp_(min=_LOWEST)
    scores.sub_(peak).exp_()
    total = scores.sum(-1, keepdim=True).add_(torch.exp(sink[:, None] - peak)).clamp_(min=1e-30)
    out, column = None, 0
    for rows, _ in scopes:
        part = torch.bmm(weights[..., column : column + rows.shape[1]], rows)
        out = part if out is None else out.add_(part)
        column += rows.shape[1]
    assert out is not None
    return out.view(batch, -1, heads, dim)[:, :count].div_(total[:, :count])


def attend(
    q: Tensor, fresh: Tensor, window: Store, size: int, entries: EntryScope | None, scale: float, sink: Tensor, sequences: Sequences
) -> Tensor:
    """Softmax attention of each query over its window, its entries and a sink.

    q        [T, H, D] fp32.   fresh  [T, D] fp32, the step's own keys (= values) as stored.   window  ring of older ones.
    size     window in tokens, the query's own included.   sink  [H] fp32 logit without a value; +inf gives zeros.
    Returns  [T, H, D] fp32; rows of padding are zeros.
    """
    out = torch.zeros_like(q)
    task = _Task(q * scale, fresh, window, size, -(-(size - 1) // TILE), entries, sink, sequences, out)
    alike: dict[int, list[Tile]] = {}
    for tile in sequences.tiles:
        if sequences.stops[tile.sequence] - sequences.starts[tile.sequence] == 1:
            columns = 0 if entries is None else entry_columns(tile.index, entries.ratio)
            alike.setdefault(columns, []).append(tile)
        elif sequences.first_rows[tile.sequence] == tile.row:
            task.attend_sequence([other for other in sequences.tiles if other.sequence == tile.sequence])
    for columns, tiles in alike.items():
        task.attend_single(tiles, columns)
    return out


@dataclass(frozen=True, slots=True)
class _Task:
    """The arguments of one `attend`, with `q` scaled and the output to fill; `back` = tiles of window before a query's own."""

    q: Tensor
    fresh: Tensor
    window: Store
    size: int
    back: int
    entries: EntryScope | None
    sink: Tensor
    sequences: Sequences
    out: Tensor

    def attend_sequence(self, tiles: list[Tile]) -> None:
        """All tiles of one sequence, one after another; its past is read once."""
        sequences, sequence = self.sequences, tiles[0].sequence
        base, rows = self._window_rows(sequence)
        known = None if self.entries is None else self._entry_rows(self.entries, sequence)
        for tile in tiles:
            own = slice(tile.row, tile.row + tile.count)
            position = sequences.starts[sequence] + tile.row - sequences.first_rows[sequence]
            first = (tile.index - self.back) * TILE - base
            near = rows[None, first : first + (self.back + 1) * TILE]
            bias = _window_bias(position, tile.count, self.size, self.back)[None]
            if self.entries is None or known is None:
                self.out[own] = _attend_scopes(self.q[None, own], [(near, bias)], self.sink)[0]
                continue
            columns = entry_columns(tile.index, self.entries.ratio)
            if self.entries.selected is None:
                far = (known[None, :columns], _entry_bias(position, tile.count, self.entries.ratio, columns)[None])
            elif self.entries.is_dense(columns):
                far = (known[None, :columns], _selected_bias(self.entries.selected[own], columns)[None])
            else:
                selected = self.entries.selected[own]
                far = (known[selected.clamp(min=0)], torch.where(selected < 0, -torch.inf, 0.0)[:, None])
                scopes = [(near.expand(tile.count, -1, -1), bias.transpose(0, 1)), far]
                self.out[own] = _attend_scopes(self.q[own, None], scopes, self.sink)[:, 0]
                continue
            self.out[own] = _attend_scopes(self.q[None, own], [(near, bias), far], self.sink)[0]

    def attend_single(self, tiles: list[Tile], columns: int) -> None:
        """One query of each of several sequences, all with the same number of entry columns."""
        sequences = self.sequences
        owners = torch.tensor([tile.sequence for tile in tiles])
        own = torch.tensor([tile.row for tile in tiles])
        positions = tuple(sequences.starts[tile.sequence] for tile in tiles)
        rows, where, at, bias = _single_window(positions, self.size, self.back, self.window.rows_per_page)
        pages = sequences.slots[owners, self.window.slot_column][:, None].expand(where.shape)
        near = self.window.read(pages.flatten(), where.flatten()).unflatten(0, where.shape)
        near[rows] = 0  # columns that nobody sees may hold anything
        near[torch.arange(len(tiles)), at] = self.fresh[own]
        scopes = [(near, bias)]
        if self.entries is not None:
            scopes.append(self._single_entries(self.entries, owners, own, positions, columns))
        self.out[own] = _attend_scopes(self.q[own, None], scopes, self.sink)[:, 0]

    def _single_entries(
        self, entries: EntryScope, owners: Tensor, own: Tensor, positions: tuple[int, ...], columns: int
    ) -> tuple[Tensor, Tensor]:
        """(rows [B, N, D], bias [B, 1, N]) of the entries of B sequences with one query each."""
        tables = self.sequences.tables[owners]
        if not entries.is_dense(columns):
            assert entries.selected is not None
            selected = entries.selected[own]
            wanted = selected.clamp(min=0)
            pages = tables.gather(1, wanted // entries.log.rows_per_page)
            rows = entries.log.read(pages.flatten(), (wanted % entries.log.rows_per_page).flatten())
            return rows.unflatten(0, wanted.shape), torch.where(selected < 0, -torch.inf, 0.0)[:, None]
        counts = tuple((position + 1) // entries.ratio for position in positions)
        rows = entries.log.read_logs(tables, counts, columns)
        if entries.selected is not None:
            return rows, _selected_bias(entries.selected[own], columns)[:, None]
        return rows, torch.stack([_entry_bias(position, 1, entries.ratio, columns) for position in positions])

    def _window_rows(self, sequence: int) -> tuple[int, Tensor]:
        """First position and rows [n, D] of the window columns of all tiles of a sequence; zeros where nothing is visible."""
        sequences, window = self.sequences, self.window
        start, stop = sequences.starts[sequence], sequences.stops[sequence]
        base = (start // TILE - self.back) * TILE
        rows = torch.zeros(((stop - 1) // TILE + 1) * TILE - base, self.fresh.shape[1])
        oldest = max(0, start - self.size + 1)
        if oldest < start:
            ring = torch.arange(oldest, start) % window.rows_per_page
            pages = sequences.slots[sequence, window.slot_column].expand(start - oldest)
            rows[oldest - base : start - base] = window.read(pages, ring)
        rows[start - base : stop - base] = self.fresh[sequences.rows_of(sequence)]
        return base, rows

    def _entry_rows(self, entries: EntryScope, sequence: int) -> Tensor:
        """Every entry of one sequence, [columns of its last tile, D], zeros beyond the last."""
        stop = self.sequences.stops[sequence]
        columns = entry_columns((stop - 1) // TILE, entries.ratio)
        return entries.log.read_logs(self.sequences.tables[sequence : sequence + 1], (stop // entries.ratio,), columns)[0]


@lru_cache(maxsize=8)
def _single_window(positions: tuple[int, ...], size: int, back: int, ring: int) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor, Tensor]:
    """For one query at each position: columns that hold nothing visible (indices), ring rows [B, N], own column [B], bias [B, 1, N]."""
    at = torch.tensor(positions)
    base = (at // TILE - back) * TILE
    column = base[:, None] + torch.arange((back + 1) * TILE)
    older = (column < at[:, None]) & (column > at[:, None] - size) & (column >= 0)
    bias = torch.stack([_window_bias(position, 1, size, back) for position in positions])
    row, col = (~older).nonzero(as_tuple=True)
    return (row, col), torch.where(older, column % ring, 0), at - base, bias
