"""The definition, in plain PyTorch; fp32 scores. Source: DeepSeek-V4 lightning indexer."""

import math

import torch
from torch import Tensor

from lamina.ops.gemm import ROW_MULTIPLE, padded_rows
from lamina.ops.sequences import TILE, Sequences, Tile, entry_columns
from lamina.ops.store import Store


def _scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """queries [B, n, Hi, d], weights [B, n, Hi], keys [B, N, d] -> [B, n, N]: the heads' clipped products, weighted and summed."""
    batch, count, heads, dim = queries.shape
    num = padded_rows(count, ROW_MULTIPLE // math.gcd(heads, ROW_MULTIPLE))
    if num != count:
        queries = torch.cat([queries, queries.new_zeros(batch, num - count, heads, dim)], dim=1)
    products = torch.bmm(queries.flatten(1, 2), keys.transpose(1, 2)).unflatten(1, (num, heads))[:, :count]
    return products.clamp_(min=0).mul_(weights[..., None]).sum(2)


def _select(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """scores [n, N], visible [n] entries -> [n, top_k] the best, ascending, -1 last; ties go to the lowest entry."""
    columns = torch.arange(scores.shape[1], device=scores.device)
    is_visible = columns < visible[:, None]
    scores = scores.masked_fill_(~is_visible, -torch.inf)
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

    queries  [T, Hi, d] fp32, rotated and in the keys' basis and precision.   weights  [T, Hi] fp32.   keys  the log of index keys.
    Returns  [T, top_k] int64, entry numbers ascending, then -1; None if no query sees more than top_k entries.
    """
    if not sequences.stops or max(sequences.stops) // ratio <= top_k:
        return None
    visible = (sequences.positions + 1) // ratio
    every = torch.arange(top_k, device=queries.device)
    selected = torch.where(every < visible[:, None], every, -1)
    alike: dict[int, list[Tile]] = {}
    decoded: dict[int, Tensor] = {}
    for tile in sequences.tiles:
        start, stop, first = sequences.starts[tile.sequence], sequences.stops[tile.sequence], sequences.first_rows[tile.sequence]
        if (start + tile.row + tile.count - first) // ratio <= top_k:
            continue
        columns = entry_columns(tile.index, ratio)
        if stop - start == 1:
            alike.setdefault(columns, []).append(tile)
            continue
        if tile.sequence not in decoded:
            tables = sequences.tables[tile.sequence : tile.sequence + 1]
            decoded[tile.sequence] = keys.read_logs(tables, (stop // ratio,), entry_columns((stop - 1) // TILE, ratio))
        own = slice(tile.row, tile.row + tile.count)
        scores = _scores(queries[None, own], weights[None, own], decoded[tile.sequence][:, :columns])[0]
        selected[own] = _select(scores, visible[own], top_k)
    for columns, tiles in alike.items():  # one query each: the same products, batched
        own = torch.tensor([tile.row for tile in tiles])
        tables = sequences.tables[[tile.sequence for tile in tiles]]
        counts = tuple(sequences.stops[tile.sequence] // ratio for tile in tiles)
        scores = _scores(queries[own, None], weights[own, None], keys.read_logs(tables, counts, columns))[:, 0]
        selected[own] = _select(scores, visible[own], top_k)
    return selected
