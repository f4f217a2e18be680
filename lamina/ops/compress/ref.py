"""The definition, in plain PyTorch; fp32.

The fold of a group keeps, per channel, (max, sum of weights, weighted sum) of a softmax over its tokens. With overlap an
entry also covers the group before, through the first half of the projection; that half is folded ahead into `next`:

    token t of group i:   first half  -> next[i]  (what group i gives to entry i + 1)
                          second half -> open[i]  (entry i; starts from next[i - 1])

The state after q tokens is in row q mod the rows that there are, so that after guesses an older one can be gone on from.
Source: DeepSeek-V4 report, compressed attention; running form after online softmax.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.ops.rope_norm import entry_norm_rope, rope_tables
from lamina.ops.sequences import Groups, Sequences
from lamina.ops.store import Store


@dataclass(frozen=True, slots=True)
class Compressor:
    """What compresses one memory of one layer.

    norm [d] fp32, inv_freq [p] fp32.   open, next  fold states in the slot (next only with overlap).   log  where entries go.
    """

    ratio: int
    norm: Tensor
    inv_freq: Tensor
    eps: float
    open: Store
    next: Store | None
    log: Store


def fold(state: Tensor, values: Tensor, gates: Tensor, groups: Groups) -> dict[int, Tensor]:
    """Folds the step's tokens into `state` [G, 3, d] (max, sum, weighted sum), in place, each group left to right.

    values, gates  [T, d] fp32 of all rows of the step; groups.rows says which rows are whose.
    Returns the states that `groups.within` asks for, by the same numbers.
    """
    within: dict[int, Tensor] = {}
    for j in range(groups.rows.shape[1]):
        active = sum(1 for count in groups.counts if count > j)  # a prefix: counts descend
        rows = groups.rows[:active, j]
        value, gate = values[rows], gates[rows]
        peak, total, weighted = state[:active].unbind(1)
        new_peak = torch.maximum(peak, gate)
        keep, add = peak.sub_(new_peak).exp_(), gate.sub_(new_peak).exp_()
        total.mul_(keep).add_(add)
        weighted.mul_(keep).add_(value.mul_(add))
        peak.copy_(new_peak)
        if j in groups.within:
            within[j] = state[groups.within[j][0]]
    return within


def _empty(groups: Groups, width: int, device: torch.device) -> Tensor:
    state = torch.zeros(len(groups.counts), 3, width, device=device)
    state[:, 0] = -torch.inf
    return state


def _load(state: Tensor, where: tuple[Tensor, Tensor, Tensor], store: Store, slots: Tensor) -> None:
    group, sequence, seen = where
    if group.numel():
        stored = store.read_stored(slots[sequence, store.slot_column], seen % store.rows_per_page)
        state[group] = store.codec.decode(stored).view(group.shape[0], 3, -1)


def _save(states: Tensor, where: tuple[Tensor, Tensor, Tensor], store: Store, slots: Tensor) -> None:
    """states  [n, 3, d] of the groups of `where`."""
    _, sequence, seen = where
    if sequence.numel():
        pages = slots[sequence, store.slot_column]
        store.write(pages, seen % store.rows_per_page, store.codec.encode(states.flatten(1)))


def compress(compressor: Compressor, values: Tensor, gates: Tensor, sequences: Sequences) -> None:
    """Folds one step and appends the entries that close.

    values, gates  [T, d] or, with overlap, [T, 2d] fp32 (first half: for the next entry); gates have the position bias added.
    """
    groups = sequences.groups[compressor.ratio]
    width = compressor.norm.shape[0]
    if compressor.next is None:
        state = _empty(groups, width, values.device)
        _load(state, groups.live, compressor.open, sequences.slots)
        within = fold(state, values, gates, groups)
    else:
        both = _empty(groups, 2 * width, values.device)
        ahead, state = both[..., :width], both[..., width:]
        _load(ahead, groups.live, compressor.next, sequences.slots)
        _load(state, groups.live, compressor.open, sequences.slots)
        _load(state, groups.carried, compressor.open, sequences.slots)
        if groups.after[0].numel() == 0:
            of_both = fold(both, values, gates, groups)
            within_ahead = {j: found[..., :width] for j, found in of_both.items()}
            within = {j: found[..., width:] for j, found in of_both.items()}
        else:  # what a group gives to the next must be known before that one is folded
            within_ahead = fold(ahead, values[:, :width], gates[:, :width], groups)
            state[groups.after[0]] = ahead[groups.after[1]]
            within = fold(state, values[:, width:], gates[:, width:], groups)
        _save(ahead[groups.ended[0]], groups.ended, compressor.open, sequences.slots)
        _save(ahead[groups.open[0]], groups.open, compressor.next, sequences.slots)
        for j, found in within_ahead.items():
            _save(found, groups.within[j], compressor.next, sequences.slots)
    _save(state[groups.open[0]], groups.open, compressor.open, sequences.slots)
    for j, found in within.items():
        _save(found, groups.within[j], compressor.open, sequences.slots)
    group, table_row, entry = groups.closed
    if group.numel() == 0:
        return
    done = state[group]
    cos, sin = rope_tables(entry * compressor.ratio, compressor.inv_freq)
    entries = entry_norm_rope(done[:, 2] / done[:, 1], compressor.norm, cos, sin, compressor.eps)
    log = compressor.log
    pages = sequences.tables[table_row, entry // log.rows_per_page]
    log.write(pages, entry % log.rows_per_page, log.codec.encode(entries))
