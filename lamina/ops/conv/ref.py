"""The definition, in plain PyTorch; fp32.

    out[p] = bias + taps[0] x[p - W + 1] + ... + taps[W - 1] x[p]        x before a sequence's first position is 0

Every output is the same sum in the same order, elementwise, so its bits depend on nothing but its W inputs. Inputs are used as
they are stored, also those of this step: a cut between two steps changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.ops.sequences import Sequences, make_tails
from lamina.ops.store import Store


@dataclass(frozen=True, slots=True)
class _Singles:
    """B sequences with one row (decode): their rows [B], and where the W - 1 inputs before each lie.

    pages, places  [W - 1, B].   missing  [W - 1, B, 1] those that do not exist, None where all do.
    """

    rows: Tensor
    pages: Tensor
    places: Tensor
    missing: Tensor | None


def convolve(
    x: Tensor, taps: Tensor, bias: Tensor | None, store: Store, sequences: Sequences, activates: bool = True
) -> Tensor:  # fmt: skip
    """Each row's convolution with its sequence's past, which is read from the store; then the store has the last inputs.

    x      [T, C] float, any strides.   taps  [W, C] fp32, of the oldest input first.   bias  [C] or None.
    store  a ring of at least W rows (a window of W tokens), whose codec holds C elements.
    activates  silu of the sum.
    Returns  [T, C] fp32; rows of padding are zeros.
    """
    width = taps.shape[0]
    stored = store.codec.encode(x)
    x = store.codec.decode(stored)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    key = ("conv", width, store.place, store.rows_per_page)
    plan = sequences.remember(key, lambda: _singles(sequences, width, store))
    if plan is not None:
        inputs = [*_past(store, plan).unbind(0), x.index_select(0, plan.rows)]
        out.index_copy_(0, plan.rows, _summed(inputs, taps, bias, activates))
    for sequence, piece in enumerate(sequences.pieces):
        count = piece.stop - piece.start
        if count > 1:
            whole = torch.cat([_before(store, sequences, sequence, width - 1), x[piece.rows]])
            out[piece.rows] = _summed([whole[tap : tap + count] for tap in range(width)], taps, bias, activates)
    _keep(stored, store, sequences)
    return out


def _summed(inputs: list[Tensor], taps: Tensor, bias: Tensor | None, activates: bool) -> Tensor:
    """inputs  W tensors [n, C], oldest first -> [n, C]. Products and sums one by one: nothing may be fused or reordered."""
    total = inputs[0] * taps[0]
    for tap, values in enumerate(inputs[1:], 1):
        total += values * taps[tap]
    if bias is not None:
        total += bias
    return total / torch.exp(-total).add_(1) if activates else total


def _singles(sequences: Sequences, width: int, store: Store) -> _Singles | None:
    own = [(piece, owner) for owner, piece in enumerate(sequences.pieces) if piece.stop - piece.start == 1]
    if not own:
        return None
    device, size = sequences.positions.device, store.rows_per_page
    facts = [[piece.first_row, owner, piece.start, piece.valid_from] for piece, owner in own]
    rows, owners, starts, valid_from = torch.tensor(facts, dtype=torch.int64, device=device).unbind(1)
    positions = starts + torch.arange(1 - width, 0, device=device)[:, None]
    if store.place.kind == "slot":
        pages = sequences.slots[owners, store.place.column].expand_as(positions)
    else:
        spans = [range(piece.start + 1 - width, piece.start) for piece, _ in own]
        found = [[_page(store, sequences, owner, p) for p in span] for span, (_, owner) in zip(spans, own, strict=True)]
        pages = torch.tensor(found, dtype=torch.int64, device=device).view(len(own), width - 1).t()
    lacks = any(piece.start - piece.valid_from < width - 1 for piece, _ in own)
    return _Singles(rows, pages, positions % size, (positions < valid_from)[..., None] if lacks else None)


def _past(store: Store, plan: _Singles) -> Tensor:
    """[W - 1, B, C]: what came before the rows of several sequences, zeros where nothing did."""
    past = store.read(plan.pages.flatten(), plan.places.flatten()).unflatten(0, plan.places.shape)
    return past if plan.missing is None else past.masked_fill(plan.missing, 0)


def _page(store: Store, sequences: Sequences, sequence: int, position: int) -> int:
    """The page of a sequence's row at `position`; where there is none any page, of which nothing is used."""
    if store.place.kind == "slot":
        return sequences.slot_pages[sequence][store.place.column]
    pages = sequences.windows[sequence][store.place.group].get(position // store.rows_per_page)
    return 0 if pages is None else pages[store.place.column]


def _before(store: Store, sequences: Sequences, sequence: int, count: int) -> Tensor:
    """[count, C]: the inputs before the step of one sequence, zeros where there was none."""
    piece, device = sequences.pieces[sequence], sequences.positions.device
    first = max(piece.start - count, piece.valid_from)
    lacking = count - max(0, piece.start - first)
    zeros = torch.zeros(lacking, store.views[0].shape[2], dtype=torch.float32, device=device)
    if lacking == count:
        return zeros
    span = range(first, piece.start)
    pages = torch.tensor([_page(store, sequences, sequence, p) for p in span], device=device)
    rows = torch.tensor([p % store.rows_per_page for p in span], device=device)
    return torch.cat([zeros, store.read(pages, rows)])


def _keep(stored: tuple[Tensor, ...], store: Store, sequences: Sequences) -> None:
    """Writes the last inputs of each sequence, as stored."""
    rows, pages, where = sequences.remember(("conv kept", store.place, store.rows_per_page), lambda: _kept(store, sequences))
    if rows.shape[0]:
        store.write(pages, where, tuple(part.index_select(0, rows) for part in stored))


def _kept(store: Store, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """(rows of the step, pages, rows of these pages) of what is kept."""
    size, device = store.rows_per_page, sequences.positions.device
    if store.place.kind == "slot":
        rows, owners, where = sequences.remember(("tails", size), lambda: make_tails(sequences.pieces, size, device))
        return rows, sequences.slots[owners, store.place.column], where
    found = []
    for sequence, piece in enumerate(sequences.pieces):
        for block, pages in sequences.windows[sequence][store.place.group].items():
            span = range(max(piece.start, block * size), min(piece.stop, (block + 1) * size))
            found += [(piece.first_row + p - piece.start, pages[store.place.column], p % size) for p in span]
    rows, pages_of, where = torch.tensor(found, dtype=torch.int64, device=device).reshape(-1, 3).unbind(1)
    return rows, pages_of, where
