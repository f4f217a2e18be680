"""A step's slices as flat arrays."""

import torch
from torch import Tensor

from lamina.ops.gemm import padded_rows
from lamina.ops.sequences import Sequences, make_groups, make_singles, make_tails, make_tiles
from lamina.schedule.step import Slice


def step_arrays(
    slices: tuple[Slice, ...], ratios: tuple[int, ...], rings: tuple[int, ...], multiple: int, device: torch.device
) -> tuple[Tensor, Sequences]:
    """(token ids [T], sequences): rows of the slices one after another, then padding (token 0, position 0) to `multiple` rows."""
    starts, stops = tuple(part.start for part in slices), tuple(part.stop for part in slices)
    tokens: list[int] = []
    positions: list[int] = []
    first_rows = []
    for part in slices:
        first_rows.append(len(tokens))
        tokens.extend(part.tokens)
        positions.extend(range(part.start, part.stop))
    num_rows = len(tokens)
    padding = [0] * (padded_rows(num_rows, multiple) - num_rows)
    width = max((len(part.blocks) for part in slices), default=0)
    tables = [part.blocks + (0,) * (width - len(part.blocks)) for part in slices]
    firsts = tuple(first_rows)
    sequences = Sequences(
        positions=torch.tensor(positions + padding, dtype=torch.int64, device=device),
        num_rows=num_rows,
        row_multiple=multiple,
        starts=starts,
        stops=stops,
        first_rows=firsts,
        tables=torch.tensor(tables, dtype=torch.int64, device=device).reshape(len(slices), width),
        slots=torch.tensor([part.slot for part in slices], dtype=torch.int64, device=device),
        slot_pages=tuple(part.slot for part in slices),
        longer=make_tiles(starts, stops, firsts),
        singles={ratio: make_singles(starts, stops, firsts, ratio, device) for ratio in (0, *ratios)},
        groups={ratio: make_groups(starts, stops, firsts, ratio, device) for ratio in ratios},
        tails={ring: make_tails(starts, stops, firsts, ring, device) for ring in rings},
    )
    return torch.tensor(tokens + padding, dtype=torch.int64, device=device), sequences
