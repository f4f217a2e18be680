"""The definition, in plain PyTorch; fp32.

Order depends on the query's position alone, as in `attend`: queries are taken in tiles aligned to 64 positions, and a tile looks
at a fixed range of columns, of which each query's mask hides those it may not see. A hidden column weighs exactly 0.

    columns of a tile | first position that any of its queries sees, down to a multiple of 64 ... its last position | padding |

Sequences with one query (decode) that look at as many columns are computed together: the same products, batched.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.ops.gemm import batched_linear, padded_rows
from lamina.ops.sequences import TILE, Piece, Sequences, Tile, make_tails
from lamina.ops.store import KeyValueCodec, Store

#: up to so many columns tiles take them in steps of TILE, beyond in steps of an eighth of the power of two below
_FINE_COLUMNS = 512
#: so many elements of selected rows are gathered at once
_GATHERED = 1 << 24


@dataclass(frozen=True, slots=True)
class HeadsCase:
    """What is the same for all queries of a layer.

    heads, kv_heads  H and K.   scale  of the scores.   softcap  cap * tanh(score / cap), 0 none.
    window  tokens that a query sees, its own included; None all.   reset  it sees none before the last multiple of this.
    sinks   [H] fp32 logits without a value, or None.
    top_k   a query that sees more tokens attends to so many of them, which are selected for it; None all. For logs alone.
    """

    heads: int
    kv_heads: int
    scale: float
    window: int | None = None
    reset: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """Where a layer's rows lie, and how they are read: `codec` is that of `store`."""

    store: Store
    codec: KeyValueCodec


@dataclass(frozen=True, slots=True)
class _Range:
    """What a tile or a query looks at: `columns` positions from `base` on."""

    base: int
    columns: int


@dataclass(frozen=True, slots=True)
class _TilePlan:
    """Rows of one tile, its columns in the rows of its sequence, and hidden [count, columns]."""

    rows: slice
    first: int
    columns: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class _LongerPlan:
    """A sequence with more than one row: positions [base, base + columns) are gathered, those of [low, stop) exist."""

    piece: Piece
    sequence: int
    base: int
    columns: int
    low: int
    tiles: tuple[_TilePlan, ...]


@dataclass(frozen=True, slots=True)
class _SinglePlan:
    """Sequences with one row each that look at as many columns. hidden [B, 1, 1, columns]."""

    rows: Tensor
    pieces: tuple[Piece, ...]
    owners: tuple[int, ...]
    bases: tuple[int, ...]
    lows: tuple[int, ...]
    columns: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """What layers with the same window do with a step."""

    longer: tuple[_LongerPlan, ...]
    singles: tuple[_SinglePlan, ...]


def attend_heads(
    q: Tensor, own: tuple[Tensor, ...], past: Past, case: HeadsCase, sequences: Sequences, selected: Tensor | None = None
) -> Tensor:
    """Softmax attention of each query over the keys that it sees.

    q      [T, H, Dk] fp32.   own  the step's rows as stored, one tensor [T, ...] a field; rows of a log are in the log already.
    selected  [T, case.top_k] int64 positions of a log, ascending, of queries that see more than top_k; no other row is read.
    Returns  [T, H, Dv] fp32; rows of padding are zeros.
    """
    out = torch.zeros(q.shape[0], case.heads, past.codec.value_dim, dtype=torch.float32, device=q.device)
    plan = sequences.remember(("attend_heads", case.window, case.reset, case.top_k), lambda: _plan(case, sequences))
    q = q * case.scale
    for longer in plan.longer:
        _attend_longer(q, own, past, case, sequences, longer, out)
    for single in plan.singles:
        _attend_singles(q, own, past, case, sequences, single, out)
    if case.top_k is not None and sequences.longest > case.top_k:
        assert selected is not None and past.store.place.kind == "block"
        _attend_selected(q, past, case, sequences, selected, out)
    return out


def store_rows(own: tuple[Tensor, ...], past: Past, sequences: Sequences) -> None:
    """Keeps the step's rows, [T, ...] a field: in a log those that are not there yet, in a window the last ones."""
    keep_rows(own, past.store, sequences)


def keep_rows(own: tuple[Tensor, ...], store: Store, sequences: Sequences) -> None:
    """The same for rows that are no keys and values."""
    rows, pages, where = sequences.remember(("places", store.place, store.rows_per_page), lambda: _places(store, sequences))
    if rows.shape[0]:
        store.write(pages, where, tuple(part.index_select(0, rows) for part in own))


# Plans ----------------------------------------------------------------------------------------------------------------


def _columns(count: int) -> int:
    """Columns for a tile that looks at `count` positions."""
    step = TILE if count <= _FINE_COLUMNS else max(TILE, 1 << (count.bit_length() - 4))
    return -(-count // step) * step


def _range(tile: int, window: int | None, reset: int | None) -> _Range:
    """What the queries at positions TILE * tile ... look at."""
    first, last = tile * TILE, tile * TILE + TILE - 1
    low = 0 if window is None else max(0, first - window + 1)
    if reset is not None:
        low = max(low, first - first % reset)
    base = low // TILE * TILE
    return _Range(base, _columns(last + 1 - base))


def _low(position: int, case: HeadsCase, piece: Piece) -> int:
    """The first position that the query at `position` sees."""
    low = 0
    if case.window is not None:
        low = max(position - case.window + 1, piece.valid_from)
    if case.reset is not None:
        low = max(low, position - position % case.reset, piece.valid_from)
    return max(0, low)


def _plan(case: HeadsCase, sequences: Sequences) -> _Plan:
    device = sequences.positions.device
    longer = []
    for whole in sequences.longer:
        piece = sequences.pieces[whole[0].sequence]
        tiles = _seeing_all(whole, piece, case.top_k)
        if not tiles:
            continue
        ranges = [_range(tile.index, case.window, case.reset) for tile in tiles]
        base = min(each.base for each in ranges)
        stop = max(each.base + each.columns for each in ranges)
        parts = []
        for tile, look in zip(tiles, ranges, strict=True):
            position = piece.start + tile.row - piece.first_row
            lows = torch.tensor([_low(position + i, case, piece) for i in range(tile.count)], device=device)
            column = torch.arange(look.base, look.base + look.columns, device=device)
            query = torch.arange(position, position + tile.count, device=device)
            hidden = (column > query[:, None]) | (column < lows[:, None])
            parts.append(_TilePlan(slice(tile.row, tile.row + tile.count), look.base - base, look.columns, hidden))
        low = _low(piece.start, case, piece)
        longer.append(_LongerPlan(piece, tiles[0].sequence, base, stop - base, low, tuple(parts)))
    alike: dict[int, list[tuple[int, _Range]]] = {}
    for sequence, piece in enumerate(sequences.pieces):
        if piece.stop - piece.start == 1 and (case.top_k is None or piece.stop <= case.top_k):
            look = _range(piece.start // TILE, case.window, case.reset)
            alike.setdefault(look.columns, []).append((sequence, look))
    singles = [_single(case, sequences, columns, members) for columns, members in alike.items()]
    return _Plan(tuple(longer), tuple(singles))


def _seeing_all(tiles: tuple[Tile, ...], piece: Piece, top_k: int | None) -> tuple[Tile, ...]:
    """The rows of tiles that attend to all that they see: those that see no more than `top_k`."""
    if top_k is None:
        return tiles
    counts = [min(tile.count, top_k - piece.start - tile.row + piece.first_row) for tile in tiles]
    return tuple(Tile(tile.sequence, tile.row, count, tile.index) for tile, count in zip(tiles, counts, strict=True) if count > 0)


def _selecting(top_k: int, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """The rows [R] that see more than `top_k`, and their rows [R] of the block tables."""
    found = [
        (piece.first_row + position - piece.start, piece.table_row)
        for piece in sequences.pieces
        for position in range(max(piece.start, top_k), piece.stop)
    ]
    rows, tables = torch.tensor(found, dtype=torch.int64, device=sequences.positions.device).reshape(-1, 2).unbind(1)
    return rows, tables


def _single(case: HeadsCase, sequences: Sequences, columns: int, members: Sequence[tuple[int, _Range]]) -> _SinglePlan:
    device = sequences.positions.device
    pieces = tuple(sequences.pieces[sequence] for sequence, _ in members)
    bases = tuple(look.base for _, look in members)
    lows = tuple(_low(piece.start, case, piece) for piece in pieces)
    facts = [(p.first_row, p.start, base, low) for p, base, low in zip(pieces, bases, lows, strict=True)]
    rows, starts, base, low = torch.tensor(facts, device=device).unbind(1)
    column = torch.arange(columns, device=device) + base[:, None]
    hidden = (column > starts[:, None]) | (column < low[:, None])
    return _SinglePlan(rows, pieces, tuple(sequence for sequence, _ in members), bases, lows, columns, hidden[:, None, None])


def _places(store: Store, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """(rows of the step, pages, rows of these pages) of what is kept of the step."""
    size = store.rows_per_page
    found: list[tuple[int, int, int]] = []
    if store.place.kind == "block":
        for piece in sequences.pieces:
            first = max(piece.start, piece.write_from)
            found += [(piece.first_row + p - piece.start, piece.table_row, p) for p in range(first, piece.stop)]
        rows, table_row, position = _columns_of(found, sequences.positions.device)
        return rows, sequences.tables[table_row, position // size], position % size
    if store.place.kind == "slot":
        rows, owner, where = make_tails(sequences.pieces, size, sequences.positions.device)
        return rows, sequences.slots[owner, store.place.column], where
    for sequence, piece in enumerate(sequences.pieces):
        pages = sequences.windows[sequence][store.place.group]
        for block, of_block in pages.items():
            first, stop = max(piece.start, block * size), min(piece.stop, (block + 1) * size)
            page = of_block[store.place.column]
            found += [(piece.first_row + p - piece.start, page, p % size) for p in range(first, stop)]
    return _columns_of(found, sequences.positions.device)


def _columns_of(found: Sequence[tuple[int, int, int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = torch.tensor(found, dtype=torch.int64, device=device).reshape(-1, 3).unbind(1)
    return first, second, third


# Rows -----------------------------------------------------------------------------------------------------------------


def _stored(store: Store, sequence: int, sequences: Sequences, first: int, stop: int) -> list[list[Tensor]]:
    """Rows at positions [first, stop) of a sequence as stored: for each field the pieces that lie together, oldest first."""
    size, found = store.rows_per_page, []
    piece, position = sequences.pieces[sequence], first
    if store.place.kind == "block":
        pages = sequences.tables[piece.table_row, first // size : -(-stop // size)]
        skip = first % size
        return [[view.index_select(0, pages).flatten(0, 1)[skip : skip + stop - first]] for view in store.views]
    while position < stop:
        end = min(stop, (position // size + 1) * size)
        if store.place.kind == "slot":
            page = sequences.slot_pages[sequence][store.place.column]
        else:
            page = sequences.windows[sequence][store.place.group][position // size][store.place.column]
        found.append((page, position % size, end - position))
        position = end
    return [[view[page, row : row + count] for page, row, count in found] for view in store.views]


def _rows(
    own: tuple[Tensor, ...], past: Past, sequences: Sequences, sequence: int, span: tuple[int, int, int]
) -> tuple[Tensor, ...]:
    """The rows of a sequence at `columns` positions from `base` on, those before `low` and after its last zeros; as stored."""
    base, columns, low = span
    piece, store = sequences.pieces[sequence], past.store
    in_log = store.place.kind == "block"
    stop = min(piece.stop, base + columns) if in_log else piece.start
    low = min(max(low, base), stop)
    old = _stored(store, sequence, sequences, low, stop) if low < stop else [[] for _ in store.views]
    found = []
    for field, (parts, view) in enumerate(zip(old, store.views, strict=True)):
        empty = view.new_zeros(max(low - base, base + columns - piece.stop, 0), view.shape[2])
        new = [] if in_log else [own[field][piece.rows]]
        found.append(torch.cat([empty[: low - base], *parts, *new, empty[: base + columns - piece.stop]]))
    return tuple(found)


def _single_rows(own: tuple[Tensor, ...], past: Past, sequences: Sequences, single: _SinglePlan) -> tuple[Tensor, Tensor]:
    """Keys and values [B, columns, K, D] of several sequences; positions that do not exist have zeros as values."""
    store, size = past.store, past.store.rows_per_page
    if store.place.kind == "block":
        key = ("blocks", single.owners, single.columns, size)
        index, skip = sequences.remember(key, lambda: _block_index(single, sequences, size))
        if skip is None:
            stored = tuple(view.index_select(0, index).view(len(single.owners), -1, view.shape[2]) for view in store.views)
            stored = tuple(part[:, : single.columns] for part in stored)
        else:
            stored = tuple(view[index, skip] for view in store.views)
        keys, values = past.codec.keys_values(stored)
    else:
        spans = zip(single.owners, single.bases, single.lows, strict=True)
        each = [_rows(own, past, sequences, owner, (base, single.columns, low)) for owner, base, low in spans]
        keys, values = past.codec.keys_values(tuple(torch.stack(parts) for parts in zip(*each, strict=True)))
        return keys, values
    if values.data_ptr() == store.views[-1].data_ptr():
        raise AssertionError("values must be a copy")
    for row, (piece, base, low) in enumerate(zip(single.pieces, single.bases, single.lows, strict=True)):
        values[row, piece.stop - base :] = 0
        if low > base:
            values[row, : low - base] = 0
    return keys, values


def _block_index(single: _SinglePlan, sequences: Sequences, size: int) -> tuple[Tensor, Tensor | None]:
    """Which pages of a log hold the columns, and, unless they start with a page each, which rows."""
    tables, device = sequences.tables, sequences.positions.device
    rows = torch.tensor([piece.table_row for piece in single.pieces], device=device)
    last = torch.tensor([(piece.stop - 1) // size for piece in single.pieces], device=device)[:, None]
    if not any(single.bases):
        block = torch.arange(-(-single.columns // size), device=device)[None]
        return tables[rows[:, None], torch.minimum(block, last)].flatten(), None
    position = torch.tensor(single.bases, device=device)[:, None] + torch.arange(single.columns, device=device)
    return tables[rows[:, None], torch.minimum(position // size, last)], position % size


# Products -------------------------------------------------------------------------------------------------------------


def _attend_longer(
    q: Tensor, own: tuple[Tensor, ...], past: Past, case: HeadsCase, sequences: Sequences, longer: _LongerPlan, out: Tensor
) -> None:
    """All tiles of one sequence; its rows are read once."""
    keys, values = past.codec.keys_values(
        _rows(own, past, sequences, longer.sequence, (longer.base, longer.columns, longer.low))
    )  # [N, K, D]
    keys, values = keys.permute(1, 2, 0), values.transpose(0, 1)
    for tile in longer.tiles:
        at = slice(tile.first, tile.first + tile.columns)
        count = tile.rows.stop - tile.rows.start
        rows = q[tile.rows].view(count, case.kv_heads, -1, q.shape[2]).transpose(0, 1)  # [K, n, G, D]
        found = _attend(rows, keys[..., at], values[:, at], tile.hidden[None, :, None], case, sequences.row_multiple)
        out[tile.rows] = found.transpose(0, 1).reshape(count, case.heads, -1)


def _attend_singles(
    q: Tensor, own: tuple[Tensor, ...], past: Past, case: HeadsCase, sequences: Sequences, single: _SinglePlan, out: Tensor
) -> None:
    """One query of each of several sequences: the products of all of them, head by head, or of all heads, one by one."""
    keys, values = _single_rows(own, past, sequences, single)  # [B, N, K, D]
    rows = q.index_select(0, single.rows).view(len(single.owners), case.kv_heads, 1, -1, q.shape[2])  # [B, K, 1, G, D]
    found = out.new_empty(len(single.owners), case.kv_heads, case.heads // case.kv_heads, out.shape[2])
    if case.kv_heads <= len(single.owners):
        for head in range(case.kv_heads):
            part = _of_head(case, head)
            of_head = keys[:, :, head].transpose(1, 2), values[:, :, head]
            found[:, head] = _attend(rows[:, head], *of_head, single.hidden, part, sequences.row_multiple)[:, 0]
    else:
        for row in range(len(single.owners)):
            of_row = keys[row].permute(1, 2, 0), values[row].transpose(0, 1)
            found[row] = _attend(rows[row], *of_row, single.hidden[row], case, sequences.row_multiple)[:, 0]
    out.index_copy_(0, single.rows, found.flatten(1, 2))


def _attend_selected(q: Tensor, past: Past, case: HeadsCase, sequences: Sequences, selected: Tensor, out: Tensor) -> None:
    """Queries that see more than they attend to: each gathers the rows that were selected for it, in whole multiples of 64."""
    store, size, top_k = past.store, past.store.rows_per_page, selected.shape[1]
    rows, owners = sequences.remember(("selecting", top_k), lambda: _selecting(top_k, sequences))
    spare = -top_k % TILE
    hidden = (torch.arange(top_k + spare, device=q.device) >= top_k)[None, None, None]
    row_elements = sum(view.shape[2] for view in store.views)
    at_once = max(1, _GATHERED // ((top_k + spare) * row_elements))
    for first in range(0, rows.shape[0], at_once):
        part, table = rows[first : first + at_once], owners[first : first + at_once]
        where = F.pad(selected[part], (0, spare))
        pages, where = sequences.tables[table[:, None], where // size], where % size
        keys, values = past.codec.keys_values(tuple(view[pages, where] for view in store.views))  # [B, k, K, D]
        queries = q[part].view(part.shape[0], case.kv_heads, 1, -1, q.shape[2])
        found = out.new_empty(part.shape[0], case.kv_heads, case.heads // case.kv_heads, out.shape[2])
        for head in range(case.kv_heads):
            of_head = keys[:, :, head].transpose(1, 2), values[:, :, head]
            found[:, head] = _attend(queries[:, head], *of_head, hidden, _of_head(case, head), sequences.row_multiple)[:, 0]
        out.index_copy_(0, part, found.flatten(1, 2))


def _of_head(case: HeadsCase, head: int) -> HeadsCase:
    """The case of the query heads of one key/value head."""
    if case.sinks is None:
        return case
    group = case.heads // case.kv_heads
    sinks = case.sinks[head * group : (head + 1) * group]
    return HeadsCase(group, 1, case.scale, case.window, case.reset, case.softcap, sinks)


def _attend(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, case: HeadsCase, multiple: int) -> Tensor:
    """q [B, n, G, D] scaled, keys [B, D, N], values [B, N, Dv], hidden broadcastable to [B, n, G, N] -> [B, n, G, Dv].

    B are key/value heads of one sequence, or one key/value head of several.
    """
    batch, count, group, dim = q.shape
    num = padded_rows(count, multiple // math.gcd(group, multiple))
    flat = q.reshape(batch, count * group, dim)
    if num != count:
        flat = torch.cat([flat, flat.new_zeros(batch, (num - count) * group, dim)], dim=1)
    scores = torch.bmm(flat, keys)
    if case.softcap:
        scores = softcapped(scores, case.softcap)
    real = scores.view(batch, num, group, -1)
    real[:, :count].masked_fill_(hidden, -torch.inf)
    if case.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sinks = case.sinks.view(-1, group)[:, None, :, None]  # [B or 1, 1, G, 1]
        peak = torch.maximum(real.amax(-1, keepdim=True), sinks)
        real = real.sub_(peak).exp_()
        real.div_(real.sum(-1, keepdim=True) + torch.exp(sinks - peak))
        weights = scores
    return batched_linear(weights, values).view(batch, num, group, -1)[:, :count]


def softcapped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap). Not torch.tanh: its vector body and scalar tail give different bits."""
    return cap - (2 * cap) / (torch.exp(x * (2 / cap)) + 1)
