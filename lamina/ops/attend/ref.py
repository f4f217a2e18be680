"""The definition, in plain PyTorch; fp32.

Order depends on the query's position alone: queries are taken in tiles aligned to 64 positions; a tile's window columns
start at a multiple of 64 whatever the ring holds, its entry columns are entry numbers, both of a fixed count per tile.
Columns that a query may not see weigh exactly 0, so it does not matter what else is in them.

    columns of tile a | positions 64(a - back) ... 64a + 63 | entries 0 ... entries(a) - 1 |
Source: DeepSeek-V4 report, sparse attention with a sink.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lamina.ops.gemm import ROW_MULTIPLE, padded_rows
from lamina.ops.sequences import TILE, Sequences, Tile
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


def _entry_columns(tile: int, ratio: int) -> int:
    """Entry columns of a tile: what its last position sees, in whole multiples of 64."""
    return -(-((tile + 1) * TILE // ratio) // 64) * 64


def _window_rows(sequence: int, fresh: Tensor, window: Store, size: int, back: int, sequences: Sequences) -> tuple[int, Tensor]:
    """First position and rows [n, D] of the window columns of all tiles of a sequence; zeros where nothing is visible."""
    start, stop = sequences.starts[sequence], sequences.stops[sequence]
    base = (start // TILE - back) * TILE
    rows = torch.zeros(((stop - 1) // TILE + 1) * TILE - base, fresh.shape[1])
    oldest = max(0, start - size + 1)
    if oldest < start:
        ring = torch.arange(oldest, start) % window.rows_per_page
        pages = sequences.slots[sequence, window.slot_column].expand(start - oldest)
        rows[oldest - base : start - base] = window.read(pages, ring)
    rows[start - base : stop - base] = fresh[sequences.rows_of(sequence)]
    return base, rows


def _pad_queries(q: Tensor) -> Tensor:
    """q [n, H, D] -> [n', H, D] with n' * H a multiple of the rows that keep bits stable; added queries are zeros."""
    num = padded_rows(q.shape[0], ROW_MULTIPLE // math.gcd(q.shape[1], ROW_MULTIPLE))
    return q if num == q.shape[0] else torch.cat([q, q.new_zeros(num - q.shape[0], *q.shape[1:])])


def _scores(q: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
    """q [n, H, D], rows [N, D] or [n, N, D], bias [count <= n, N] -> [n, H, N]."""
    if rows.dim() == 2:
        scores = torch.nn.functional.linear(q.flatten(0, 1), rows).unflatten(0, q.shape[:2])
    else:
        scores = torch.bmm(q, rows.transpose(1, 2))
    scores[: bias.shape[0]] += bias[:, None]
    return scores


def _weighted(weights: Tensor, rows: Tensor) -> Tensor:
    """weights [n, H, N], rows [N, D] or [n, N, D] -> [n, H, D]."""
    if rows.dim() == 2:
        return (weights.flatten(0, 1) @ rows).unflatten(0, weights.shape[:2])
    return torch.bmm(weights, rows)


def _attend_scopes(q: Tensor, scopes: list[tuple[Tensor, Tensor]], sink: Tensor) -> Tensor:
    """q [n, H, D] scaled, scopes (rows, bias), sink [H] -> [n, H, D]: one softmax over all scopes and the sink."""
    weights = torch.cat([_scores(q, rows, bias) for rows, bias in scopes], dim=-1)
    peak = weights.amax(-1, keepdim=True).clamp_(min=_LOWEST)
    weights.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True).add_(torch.exp(sink[:, None] - peak)).clamp_(min=1e-30)
    out, column = None, 0
    for rows, _ in scopes:
        part = _weighted(weights[..., column : column + rows.shape[-2]], rows)
        out = part if out is None else out.add_(part)
        column += rows.shape[-2]
    assert out is not None
    return out.div_(total)


class _Entries:
    """The entries of one sequence, read once and served tile by tile."""

    def __init__(self, scope: EntryScope, sequence: int, sequences: Sequences) -> None:
        self.scope = scope
        self.table = sequences.tables[sequence]
        stop = sequences.stops[sequence]
        self.count = stop // scope.ratio
        columns = _entry_columns((stop - 1) // TILE, scope.ratio)
        queries = stop - sequences.starts[sequence]
        few = scope.selected is not None and queries * scope.selected.shape[1] < self.count
        self.rows: Tensor | None = None
        if self._is_dense(columns) or not few:
            self.rows = scope.log.read_first(self.table, self.count)
            self.rows = torch.cat([self.rows, self.rows.new_zeros(columns - self.count, self.rows.shape[1])])

    def _is_dense(self, columns: int) -> bool:
        """Whether a tile masks all entries; it depends on the tile alone."""
        return self.scope.selected is None or columns <= max(DENSE_ENTRIES, 2 * self.scope.selected.shape[1])

    def of_tile(self, tile: Tile, position: int, num: int) -> tuple[Tensor, Tensor]:
        """(rows, bias) for the tile's queries, the first at `position`, padded to `num` queries."""
        columns = _entry_columns(tile.index, self.scope.ratio)
        if self.scope.selected is None:
            assert self.rows is not None
            return self.rows[:columns], _entry_bias(position, tile.count, self.scope.ratio, columns)
        selected = self.scope.selected[tile.row : tile.row + tile.count]
        if self._is_dense(columns):
            assert self.rows is not None
            return self.rows[:columns], _selected_bias(selected, columns)
        wanted = selected.clamp(min=0)
        if self.rows is not None:
            rows = self.rows[wanted]
        else:
            rows = self.scope.log.read(*self.scope.log.page_and_row(self.table, wanted.flatten())).unflatten(0, wanted.shape)
        if num != tile.count:
            rows = torch.cat([rows, rows.new_zeros(num - tile.count, *rows.shape[1:])])
        return rows, torch.where(selected < 0, -torch.inf, 0.0)


def attend(
    q: Tensor, fresh: Tensor, window: Store, size: int, entries: EntryScope | None, scale: float, sink: Tensor, sequences: Sequences
) -> Tensor:
    """Softmax attention of each query over its window, its entries and a sink.

    q        [T, H, D] fp32.   fresh  [T, D] fp32, the step's own keys (= values) as stored.   window  ring of older ones.
    size     window in tokens, the query's own included.   sink  [H] fp32 logit without a value; +inf gives zeros.
    Returns  [T, H, D] fp32; rows of padding are zeros.
    """
    out = torch.zeros_like(q)
    scaled = q * scale
    back = -(-(size - 1) // TILE)
    sequence, base, rows, near = -1, 0, fresh, None
    for tile in sequences.tiles:
        if tile.sequence != sequence:
            sequence = tile.sequence
            base, rows = _window_rows(sequence, fresh, window, size, back, sequences)
            near = None if entries is None else _Entries(entries, sequence, sequences)
        position = sequences.starts[sequence] + tile.row - sequences.first_rows[sequence]
        own = _pad_queries(scaled[tile.row : tile.row + tile.count])
        first = (tile.index - back) * TILE - base
        scopes = [(rows[first : first + (back + 1) * TILE], _window_bias(position, tile.count, size, back))]
        if near is not None:
            scopes.append(near.of_tile(tile, position, own.shape[0]))
        out[tile.row : tile.row + tile.count] = _attend_scopes(own, scopes, sink)[: tile.count]
    return out
