"""The definition, in plain PyTorch; fp32 scores. Source: DeepSeek-V4 lightning indexer."""

import math

import torch
from torch import Tensor

from lamina.ops.gemm import padded_rows
from lamina.ops.sequences import Sequences, blocks_used, entry_columns
from lamina.ops.store import Store

#: up to so many rows a whole stable sort takes less time than the search for ties; the result is the same
_SORTED_ROWS = 8
#: so many entries are scored at once
_SCORED_COLUMNS = 4096


def _scores(queries: Tensor, weights: Tensor, keys: Tensor, multiple: int) -> Tensor:
    """queries [B, n, Hi, d], weights [B, n, Hi], keys [B, N, d] -> [B, n, N]: clipped products, weighted, summed."""
    batch, count, heads, dim = queries.shape
    num = padded_rows(count, multiple // math.gcd(heads, multiple))
    if num != count:
        queries = torch.cat([queries, queries.new_zeros(batch, num - count, heads, dim)], dim=1)
    flat, found = queries.flatten(1, 2), []
    for part in keys.split(_SCORED_COLUMNS, dim=1):
        products = torch.bmm(flat, part.transpose(1, 2)).view(batch, num, heads, -1)[:, :count]
        found.append(products.clamp_(min=0).mul_(weights[..., None]).sum(2))
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def _select(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """scores [n, N], visible [n] entries -> [n, top_k] the best, ascending, -1 last; ties go to the lowest entry."""
    columns = torch.arange(scores.shape[1], device=scores.device)
    is_visible = columns < visible[:, None]
    scores = scores.masked_fill_(~is_visible, -torch.inf)
    if scores.shape[0] <= _SORTED_ROWS:
        best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :top_k].sort(dim=-1).values
        return torch.where(best < visible[:, None], best, -1)
    kth = scores.topk(top_k, dim=-1).values[:, -1:]
    above, ties = scores > kth, (scores == kth) & is_visible
    room = top_k - above.sum(-1, keepdim=True)
    chosen = above | (ties & (ties.cumsum(-1) <= room))
    row, column = chosen.nonzero(as_tuple=True)
    rank = torch.arange(row.numel(), device=row.device) - torch.searchsorted(row, row)
    selected = torch.full((scores.shape[0], top_k), -1, dtype=torch.int64, device=scores.device)
    selected[row, rank] = column
    return selected


def index_topk(queries: Tensor, weights: Tensor, keys: Store, sequences: Sequences, ratio: int, top_k: int) -> Tensor | None:
    """The entries that each query attends to.

    queries  [T, Hi, d] fp32, rotated and in the keys' basis and precision.   weights  [T, Hi] fp32.   keys  their log.
    Returns  [T, top_k] int64, entry numbers ascending, then -1; None if no query sees more than top_k entries.
    """
    if sequences.longest // ratio <= top_k:
        return None
    visible = (sequences.positions + 1) // ratio
    every = torch.arange(top_k, device=queries.device)
    selected = torch.where(every < visible[:, None], every, -1)
    for tiles in sequences.longer:
        piece, decoded = sequences.pieces[tiles[0].sequence], None
        for tile in tiles:
            if (piece.start + tile.row + tile.count - piece.first_row) // ratio <= top_k:
                continue
            if decoded is None:
                count, row = (piece.stop // ratio,), piece.table_row
                table = sequences.tables[row : row + 1, : blocks_used(count, keys.rows_per_page)]
                decoded = keys.read_logs(table, count, entry_columns(tiles[-1].index, ratio))
            own = slice(tile.row, tile.row + tile.count)
            columns = entry_columns(tile.index, ratio)
            scores = _scores(queries[None, own], weights[None, own], decoded[:, :columns], sequences.row_multiple)[0]
            selected[own] = _select(scores, visible[own], top_k)
    for single in sequences.alike(ratio):  # one query each: the same products, batched
        counts = tuple((position + 1) // ratio for position in single.positions)
        if max(counts) > top_k:
            tables = sequences.tables[:, : blocks_used(counts, keys.rows_per_page)].index_select(0, single.table_rows)
            rows = keys.read_logs(tables, counts, single.columns)
            scores = _scores(queries[single.rows, None], weights[single.rows, None], rows, sequences.row_multiple)[:, 0]
            selected[single.rows] = _select(scores, visible[single.rows], top_k)
    return selected
