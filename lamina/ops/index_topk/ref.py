"""The definition, in plain PyTorch; fp32 scores. Source: DeepSeek-V4 lightning indexer."""

import math

import torch
from torch import Tensor

from lamina.ops.gemm import ROW_MULTIPLE, padded_rows
from lamina.ops.sequences import TILE, Sequences
from lamina.ops.store import Store


def _padded_entries(tile: int, ratio: int) -> int:
    """Columns for the queries of a tile: the entries that its last position sees, in whole multiples of 64."""
    return -(-((tile + 1) * TILE // ratio) // 64) * 64


def _scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """queries [n, Hi, d], weights [n, Hi], keys [N, d] -> [n, N]: the heads' clipped products, weighted and summed."""
    num, heads, _ = queries.shape
    products = torch.nn.functional.linear(queries.flatten(0, 1), keys).unflatten(0, (num, heads))
    return products.clamp_(min=0).mul_(weights[:, :, None]).sum(1)


def _select(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """scores [n, N], visible [n] entries -> [n, top_k] the best, ascending, -1 last; ties go to the lowest entry."""
    columns = torch.arange(scores.shape[1], device=scores.device)
    scores = scores.masked_fill_(columns >= visible[:, None], -torch.inf)
    kth = scores.topk(top_k, dim=-1).values[:, -1:]
    above, ties = scores > kth, scores == kth
    room = top_k - above.sum(-1, keepdim=True)
    chosen = above | (ties & (ties.cumsum(-1) <= room) & (columns < visible[:, None]))
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
    device = queries.device
    visible = (sequences.positions + 1) // ratio
    every = torch.arange(top_k, device=device)
    selected = torch.where(every < visible[:, None], every, -1)
    heads = queries.shape[1]
    decoded: dict[int, Tensor] = {}
    for tile in sequences.tiles:
        last = sequences.starts[tile.sequence] + tile.row + tile.count - sequences.first_rows[tile.sequence]
        if last // ratio <= top_k:
            continue
        if tile.sequence not in decoded:
            total = sequences.stops[tile.sequence] // ratio
            buffer = torch.zeros(_padded_entries((sequences.stops[tile.sequence] - 1) // TILE, ratio), queries.shape[2], device=device)
            buffer[:total] = keys.read_first(sequences.tables[tile.sequence], total)
            decoded[tile.sequence] = buffer
        num = padded_rows(tile.count, ROW_MULTIPLE // math.gcd(heads, ROW_MULTIPLE))
        own = slice(tile.row, tile.row + tile.count)
        q = queries.new_zeros(num, heads, queries.shape[2])
        q[: tile.count] = queries[own]
        w = weights.new_zeros(num, heads)
        w[: tile.count] = weights[own]
        scores = _scores(q, w, decoded[tile.sequence][: _padded_entries(tile.index, ratio)])
        selected[own] = _select(scores[: tile.count], visible[own], top_k)
    return selected
