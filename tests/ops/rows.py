"""Rows of memories in an arena full of NaN, and steps over them, for the tests of ops that read and write them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.ops.sequences import Sequences
from lamina.ops.store import EntryCodec, Store
from lamina.runtime.inputs import BlockTables, step_arrays
from lamina.schedule.step import Slice

POISON = 255  # a byte that is NaN as fp32, bf16, e4m3 and e8m0
_VIEWS = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU = torch.device("cpu")


def codes_of(dtype: str, elements: int) -> tuple[torch.dtype, int]:
    """How a field is viewed: its type and elements a row (two fp4 codes share a byte)."""
    return _VIEWS.get(dtype, torch.uint8), elements // 2 if dtype == "e2m1" else elements


def poisoned_store(codec: EntryCodec, pages: int, rows: int, column: int = 0) -> Store:
    """A store of strided views over NaN bytes: rows lie between other bytes, pages apart from each other."""
    widths = [codes_of(dtype, elements) for _, dtype, elements in codec.fields]
    sizes = [rows * width * dtype.itemsize for dtype, width in widths]
    offsets = [64 * (3 + sum(-(-size // 64) + 1 for size in sizes[:number])) for number in range(len(sizes))]
    page_bytes = 64 * (-(-(offsets[-1] + sizes[-1]) // 64) + 2)
    arena = torch.full((pages, page_bytes), POISON, dtype=torch.uint8)
    views = []
    for (dtype, width), offset in zip(widths, offsets, strict=True):
        typed = arena.view(dtype)
        step = dtype.itemsize
        views.append(typed.as_strided((pages, rows, width), (page_bytes // step, width, 1), offset // step))
    return Store(codec, tuple(views), column)


def bytes_of(store: Store) -> Tensor:
    """A copy of all bytes that the store's views lie in."""
    storage = store.views[0].untyped_storage()
    return torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage).clone()


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens [start, stop) of a sequence whose log blocks and slot lie in these pages; the others as in Slice."""

    start: int
    stop: int
    blocks: tuple[int, ...]
    slot: tuple[int, ...]
    valid_from: int = 0
    write_from: int = 0
    num_guesses: int = 0


def arrays(parts: Sequence[Part], ratios: Sequence[int] = (), rings: Sequence[int] = ()) -> Sequences:
    """The flat arrays of one step over `parts`, padded to a multiple of 8 rows; table rows are in another order."""
    num_rows = len(parts) + 3
    slices = tuple(
        Slice(
            number, part.start, part.stop, tuple(range(part.start, part.stop)), part.slot, len(parts) + 1 - number, 0,
            part.blocks, part.write_from, part.valid_from, num_guesses=part.num_guesses,
        )
        for number, part in enumerate(parts)
    )  # fmt: skip
    tables = BlockTables(num_rows, CPU)
    tables.pages += max((page for part in parts for page in part.blocks), default=0)  # what others left behind
    return step_arrays(slices, tables, tuple(ratios), tuple(rings), 8, CPU)[1]


def places(parts: Sequence[Part]) -> list[tuple[int, int, int]]:
    """(row, part, position) of every row that is not padding."""
    found, row = [], 0
    for number, part in enumerate(parts):
        for position in range(part.start, part.stop):
            found.append((row, number, position))
            row += 1
    return found


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two fp32 tensors have the same bits."""
    return torch.equal(left.contiguous().view(torch.int32), right.contiguous().view(torch.int32))
