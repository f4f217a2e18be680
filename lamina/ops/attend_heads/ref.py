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
#: so many scores lie near enough to the processor to be worked on by several heads at once
_NEAR = 1 << 16
#: so many rows of a log, and their pages are gathered whole
_WHOLE_PAGES = 1 << 12


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
    """Rows of one tile, its columns in the rows of its sequence, and which of these are hidden: [count, some columns]."""

    rows: slice
    first: int
    columns: int
    hidden: tuple[tuple[slice, Tensor], ...]


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
    """Sequences with one row each that look at as many columns.

    rows      [B] of the step; are_first  they are 0, 1, ... B - 1.   is_from_zero  all see position 0.
    starts, lows  [B]: their positions, and the first that they see.
    column    [B, columns] position of each column, among those that the sequence sees.   hidden [B, 1, columns].
    own       [B] where each query's own column is among B * columns.   fresh  sequences of the plan that see nothing else.
    """

    rows: Tensor
    are_first: bool
    is_from_zero: bool
    pieces: tuple[Piece, ...]
    owners: tuple[int, ...]
    starts: Tensor
    lows: Tensor
    columns: int
    column: Tensor
    hidden: Tensor
    own: Tensor
    fresh: tuple[int, ...]


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
    plan = sequences.remember(("attend_heads", case.window, case.reset, case.top_k), lambda: _plan(case, sequences))
    q = q * case.scale
    selects = case.top_k is not None and sequences.longest > case.top_k
    if len(plan.singles) == 1 and not plan.longer and not selects and plan.singles[0].are_first:
        found = _attend_singles(q, own, past, case, sequences, plan.singles[0])  # a step of decode alone
        return F.pad(found, (0, 0, 0, 0, 0, q.shape[0] - found.shape[0])) if found.shape[0] < q.shape[0] else found
    out = torch.zeros(q.shape[0], case.heads, past.codec.value_dim, dtype=torch.float32, device=q.device)
    for longer in plan.longer:
        _attend_longer(q, own, past, case, sequences, longer, out)
    for single in plan.singles:
        out.index_copy_(0, single.rows, _attend_singles(q, own, past, case, sequences, single))
    if selects:
        assert selected is not None and past.store.place.kind == "block"
        _attend_selected(q, past, case, sequences, selected, out)
    return out


def store_rows(own: tuple[Tensor, ...], past: Past, sequences: Sequences) -> None:
    """Keeps the step's rows, [T, ...] a field: in a log those that are not there yet, in a window the last ones."""
    keep_rows(own, past.store, sequences)


def keep_rows(own: tuple[Tensor, ...], store: Store, sequences: Sequences) -> None:
    """The same for rows that are no keys and values."""
    rows, are_first, pages, where = places_of(store, sequences)
    num = rows.shape[0]
    if num:
        store.write(pages, where, tuple(part[:num] if are_first else part.index_select(0, rows) for part in own))


def places_of(store: Store, sequences: Sequences) -> tuple[Tensor, bool, Tensor, Tensor]:
    """(rows of the step, whether they are its first, pages, rows of these pages) of what is kept of the step."""
    return sequences.remember(("places", store.place, store.rows_per_page), lambda: _places(store, sequences))


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


def _hidden(
    position: int, count: int, look: _Range, case: HeadsCase, piece: Piece, device: torch.device
) -> tuple[tuple[slice, Tensor], ...]:
    """Columns that some of the queries at `position` ... may not see, with [count, columns] of who does not see what."""
    after, last = position + 1 - look.base, position + count - 1
    query = torch.arange(position, position + count, device=device)[:, None]
    column = torch.arange(look.base + after, look.base + look.columns, device=device)
    found = [(slice(after, look.columns), column > query)]
    before = max(_low(last, case, piece), _low(position, case, piece)) - look.base
    if before > 0:
        low = torch.tensor([_low(position + i, case, piece) for i in range(count)], device=device)[:, None]
        found.append((slice(0, before), torch.arange(look.base, look.base + before, device=device) < low))
    return tuple(each for each in found if each[1].shape[1])


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
            rows = slice(tile.row, tile.row + tile.count)
            parts.append(
                _TilePlan(rows, look.base - base, look.columns, _hidden(position, tile.count, look, case, piece, device))
            )
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
    facts = [(p.first_row, p.start, look.base, _low(p.start, case, p)) for p, (_, look) in zip(pieces, members, strict=True)]
    rows, starts, base, low = torch.tensor(facts, device=device).unbind(1)
    column = torch.arange(columns, device=device) + base[:, None]
    hidden = (column > starts[:, None]) | (column < low[:, None])
    own = starts - base + torch.arange(0, len(facts) * columns, columns, device=device)
    order = [first_row for first_row, _, _, _ in facts]
    return _SinglePlan(
        rows, order == list(range(len(facts))), not any(first for _, _, _, first in facts), pieces,
        tuple(sequence for sequence, _ in members), starts, low, columns, column, hidden[:, None], own,
        tuple(number for number, (_, start, _, first) in enumerate(facts) if first == start),
    )  # fmt: skip


def _places(store: Store, sequences: Sequences) -> tuple[Tensor, bool, Tensor, Tensor]:
    size = store.rows_per_page
    if store.place.kind == "slot":
        key = ("tails of a ring", size)
        rows, owner, where = sequences.remember(key, lambda: make_tails(sequences.pieces, size, sequences.positions.device))
        return rows, _are_first(sequences, rows.shape[0]), sequences.slots[owner, store.place.column], where
    found: list[tuple[int, int, int]] = []
    if store.place.kind == "block":
        for piece in sequences.pieces:
            first = max(piece.start, piece.write_from)
            found += [(piece.first_row + p - piece.start, piece.table_row, p) for p in range(first, piece.stop)]
        rows, table_row, position = _columns_of(found, sequences.positions.device)
        return rows, _are_first(sequences, len(found)), sequences.tables[table_row, position // size], position % size
    for sequence, piece in enumerate(sequences.pieces):
        pages = sequences.windows[sequence][store.place.group]
        for block, of_block in pages.items():
            first, stop = max(piece.start, block * size), min(piece.stop, (block + 1) * size)
            page = of_block[store.place.column]
            found += [(piece.first_row + p - piece.start, page, p % size) for p in range(first, stop)]
    rows, page_of, where = _columns_of(found, sequences.positions.device)
    return rows, False, page_of, where


def _are_first(sequences: Sequences, count: int) -> bool:
    """Whether `count` rows that are kept in order are all rows of the step."""
    return count == sequences.num_rows


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
    """Keys and values [B, columns, K, D] of several sequences; where a column is hidden, of another that is not."""
    store, batch = past.store, len(single.owners)
    in_log = store.place.kind == "block"
    if in_log and single.columns % store.rows_per_page == 0 and batch * single.columns >= _WHOLE_PAGES and single.is_from_zero:
        return _single_pages(past, sequences, single)
    key = ("single rows", id(single), store.place, store.rows_per_page)
    pages, rows = sequences.remember(key, lambda: _single_index(store, sequences, single))
    found = store.read_stored(pages, rows)
    if not in_log:
        for field, part in zip(found, own, strict=True):
            for fresh in single.fresh:  # nothing is stored
                field[fresh * single.columns : (fresh + 1) * single.columns] = 0
            field.index_copy_(0, single.own, part[:batch] if single.are_first else part.index_select(0, single.rows))
    return past.codec.keys_values(tuple(field.view(batch, single.columns, -1) for field in found))


def _single_pages(past: Past, sequences: Sequences, single: _SinglePlan) -> tuple[Tensor, Tensor]:
    """The same by whole pages of a log, which is faster for many; hidden columns have zeros as values."""
    size, batch = past.store.rows_per_page, len(single.owners)

    def find() -> Tensor:
        device = single.rows.device
        table_rows = torch.tensor([piece.table_row for piece in single.pieces], device=device)[:, None]
        block = torch.arange(single.columns // size, device=device)
        return sequences.tables[table_rows, torch.minimum(block, (single.starts // size)[:, None])].flatten()

    pages = sequences.remember(("single pages", id(single), size), find)
    stored = tuple(view.index_select(0, pages).view(batch, single.columns, -1) for view in past.store.views)
    keys, values = past.codec.keys_values(stored)
    for row, piece in enumerate(single.pieces):
        if piece.stop < single.columns:
            values[row, piece.stop :] = 0
    return keys, values


def _single_index(store: Store, sequences: Sequences, single: _SinglePlan) -> tuple[Tensor, Tensor]:
    """(pages, rows of these) [B * columns] of the columns of a plan; a hidden one is another that the sequence sees."""
    size, place, device = store.rows_per_page, store.place, single.rows.device
    in_log = place.kind == "block"
    last = single.starts if in_log else torch.maximum(single.starts - 1, single.lows)
    column = torch.minimum(torch.maximum(single.column, single.lows[:, None]), last[:, None])
    if place.kind == "slot":
        owners = torch.tensor(single.owners, device=device)
        pages = sequences.slots[owners, place.column][:, None].expand(-1, single.columns)
        return pages.flatten(), (column % size).flatten()
    block = column // size
    if in_log:
        table_rows = torch.tensor([piece.table_row for piece in single.pieces], device=device)
        return sequences.tables[table_rows[:, None], block].flatten(), (column - block * size).flatten()
    first = [min(sequences.windows[owner][place.group], default=0) for owner in single.owners]
    width = max(
        max(sequences.windows[owner][place.group], default=0) - low for owner, low in zip(single.owners, first, strict=True)
    )
    table = [
        [sequences.windows[owner][place.group].get(low + i, (0,) * (place.column + 1))[place.column] for i in range(width + 1)]
        for owner, low in zip(single.owners, first, strict=True)
    ]
    near = (block - torch.tensor(first, device=device)[:, None]).clamp_(0, width)
    return torch.tensor(table, device=device).gather(1, near).flatten(), (column - block * size).flatten()


# Products -------------------------------------------------------------------------------------------------------------


def _attend_longer(
    q: Tensor, own: tuple[Tensor, ...], past: Past, case: HeadsCase, sequences: Sequences, longer: _LongerPlan, out: Tensor
) -> None:
    """All tiles of one sequence; its rows are read once."""
    keys, values = past.codec.keys_values(
        _rows(own, past, sequences, longer.sequence, (longer.base, longer.columns, longer.low))
    )  # [N, K, D]
    keys, values = keys.permute(1, 2, 0), values.transpose(0, 1)
    group = case.heads // case.kv_heads
    for tile in longer.tiles:
        at = slice(tile.first, tile.first + tile.columns)
        count = tile.rows.stop - tile.rows.start
        rows = q[tile.rows].view(count, case.kv_heads, group, q.shape[2]).transpose(0, 1)  # [K, n, G, D]
        step = case.kv_heads if case.heads * count * tile.columns <= _NEAR else 1
        for head in range(0, case.kv_heads, step):
            part = case if step > 1 else _of_head(case, head)
            near = slice(head, head + step)
            found = _attend(rows[near], keys[near, :, at], values[near, at], tile.hidden, part, sequences.row_multiple)
            out[tile.rows].view(count, case.kv_heads, group, -1)[:, near] = found.transpose(0, 1)


def _attend_singles(
    q: Tensor, own: tuple[Tensor, ...], past: Past, case: HeadsCase, sequences: Sequences, single: _SinglePlan
) -> Tensor:
    """One query of each of several sequences: the products of all of them, head by head, or of all heads, one by one.

    Returns [B, H, Dv].
    """
    keys, values = _single_rows(own, past, sequences, single)  # [B, N, K, D]
    batch, group, multiple = len(single.owners), case.heads // case.kv_heads, sequences.row_multiple
    num = padded_rows(1, multiple // math.gcd(group, multiple))
    rows = (q[:batch] if single.are_first else q.index_select(0, single.rows)).view(batch, case.kv_heads, group, -1)
    if num > 1:  # a product gets a multiple of rows
        rows = rows[:, :, None].expand(-1, -1, num, -1, -1)
    rows = rows.reshape(batch, case.kv_heads, num * group, -1)
    hidden = single.hidden[:, None]  # [B, 1, 1, N]
    by_head = case.kv_heads <= batch
    if by_head:
        rows, keys, values, hidden = rows.transpose(0, 1), keys.permute(2, 0, 3, 1), values.permute(2, 0, 1, 3), single.hidden
    else:
        keys, values = keys.permute(0, 2, 3, 1), values.permute(0, 2, 1, 3)
    scores = rows.new_empty(*rows.shape[:3], single.columns)
    for part, of_part, into in zip(rows, keys, scores, strict=True):
        torch.bmm(part, of_part, out=into)
    if case.softcap:
        scores = softcapped(scores, case.softcap)
    scores.masked_fill_(hidden, -torch.inf)
    sinks = None
    if case.sinks is not None:
        sinks = case.sinks.view(-1, 1, group, 1) if by_head else case.sinks.view(1, -1, group, 1)
        sinks = sinks.repeat(1, 1, num, 1)
    scores = _softmax(scores, sinks)
    found = torch.stack([batched_linear(part, of_part) for part, of_part in zip(scores, values, strict=True)])[:, :, :group]
    return (found.transpose(0, 1) if by_head else found).reshape(batch, case.heads, -1)


def _attend_selected(q: Tensor, past: Past, case: HeadsCase, sequences: Sequences, selected: Tensor, out: Tensor) -> None:
    """Queries that see more than they attend to: each gathers the rows that were selected for it, in whole multiples of 64."""
    store, size, top_k = past.store, past.store.rows_per_page, selected.shape[1]
    rows, owners = sequences.remember(("selecting", top_k), lambda: _selecting(top_k, sequences))
    spare = -top_k % TILE
    hidden = ((slice(top_k, top_k + spare), torch.ones(1, spare, dtype=torch.bool, device=q.device)),)
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


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, hidden: tuple[tuple[slice, Tensor], ...], case: HeadsCase, multiple: int
) -> Tensor:
    """q [B, n, G, D] scaled, keys [B, D, N], values [B, N, Dv], hidden [n or 1, columns] of ranges of columns -> [B, n, G, Dv].

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
    for columns, mask in hidden:
        real[:, :count, :, columns].masked_fill_(mask[None, :, None], -torch.inf)
    sinks = None if case.sinks is None else case.sinks.view(-1, 1, group, 1)  # [B or 1, 1, G, 1]
    weights = _softmax(real, sinks).view(scores.shape)
    return batched_linear(weights, values).view(batch, num, group, -1)[:, :count]


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of scores [..., N], which are overwritten; sinks broadcast to [..., 1]."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, out=scores)
    peak = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    scores = scores.sub_(peak).exp_()
    return scores.div_(scores.sum(-1, keepdim=True) + torch.exp(sinks - peak))


def softcapped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap). Not torch.tanh: its vector body and scalar tail give different bits."""
    return cap - (2 * cap) / (torch.exp(x * (2 / cap)) + 1)
