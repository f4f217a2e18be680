"""Compression on a GPU; `ref.py` is the definition, its order of operations is kept.

    compress(folding, values, gates, cos, sin, rows)      folds one step, appends the entries that close
    compress_pair(main, index, ..., rows)                    the same for a layer's entries and its index's keys together
    refuses(machine, case)                                   why this machine or these shapes are not served, or None

One launch where every request has one row; else one for the entries, which reads the states, and one that writes the states.
"""

from typing import NamedTuple

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.compress import CompressCase, Folding, kernels
from lamina.ops.machine import Machine
from lamina.ops.rope_norm.triton import refuses_machine
from lamina.ops.rows import Rows
from lamina.ops.store.triton import fields_of, layout_of

__all__ = ["Folding", "compress", "compress_pair", "refuses"]

#: one more than the tokens whose loads are under way together; the order of the fold does not depend on it
_STAGES = 8
_WARPS = 4


def refuses(machine: Machine, case: CompressCase) -> str | None:
    """Why `case` is not served, in one line, or None."""
    if case.rope % 2 or case.width % 2 or not 0 < case.rope <= case.width:
        return f"the rotated dims must be pairs at the end of an even width, not the last {case.rope} of {case.width}"
    if case.width > 4096:
        return f"a program folds up to 4096 channels, not {case.width}"
    return refuses_machine(machine)


class _Constants(NamedTuple):
    """Of one memory, known when its kernel is compiled."""

    width: int
    tile: int
    format: int
    widths: tuple[int, ...]
    log_rows: int


_NONE = _Constants(0, 0, 0, (), 0)


def compress(folding: Folding, values: Tensor, gates: Tensor, cos: Tensor, sin: Tensor, rows: Rows) -> None:
    """Folds one step and appends the entries that close.

    values, gates  [T, d] or, with overlap, [T, 2d] fp32, columns of a wider matrix too; the bias is added here.
    cos, sin       [T, r / 2] at the first position of each row's group.
    """
    _launch(folding, values, gates, None, None, None, cos, sin, rows)


def compress_pair(
    main: Folding, main_values: Tensor, main_gates: Tensor,
    index: Folding, index_values: Tensor, index_gates: Tensor,
    cos: Tensor, sin: Tensor, rows: Rows,
) -> None:  # fmt: skip
    """`compress` of two memories with one ratio and one set of rotated dims, in the launches of one; the same bits."""
    assert main.ratio == index.ratio and (main.next is None) == (index.next is None)
    _launch(main, main_values, main_gates, index, index_values, index_gates, cos, sin, rows)


def _launch(
    main: Folding, values: Tensor, gates: Tensor,
    index: Folding | None, index_values: Tensor | None, index_gates: Tensor | None,
    cos: Tensor, sin: Tensor, rows: Rows,
) -> None:  # fmt: skip
    memory, constants = _memory(main, values, gates), _constants(main)
    other, other_constants = None, _NONE
    if index is not None and index_values is not None and index_gates is not None:
        other, other_constants = _memory(index, index_values, index_gates), _constants(index)
    batch = kernels.Batch(
        rows.positions, rows.owners, rows.starts, rows.stops, rows.first_rows, rows.valid_from, rows.write_from,
        rows.table_rows, rows.tables, rows.tables.stride(0), rows.slots, rows.slots.stride(0), rows.drafts,
    )  # fmt: skip
    has_drafts, states = rows.drafts is not None, main.open.rows_per_page
    for state in (main.open, main.next, *((index.open, index.next) if index is not None else ())):
        assert state is None or (state.rows_per_page == states and state.views[0].stride(1) == state.views[0].shape[2])
    memories = 1 if other is None else 2
    stages = 0 if rows.is_single else min(_STAGES, main.ratio + 1)
    for is_saving in (True,) if rows.is_single else (False, True):
        programs = rows.num_rows if rows.is_single or not is_saving else rows.num_requests
        kernels.compress[(programs, memories)](
            memory, other, batch, cos, sin, *_columns(main), *_columns(index or main), main.eps, (index or main).eps,
            IS_SINGLE=rows.is_single, SAVES=is_saving, STATES=states, HAS_DRAFTS=has_drafts, RATIO=main.ratio,
            ROPE=2 * cos.shape[1], STAGES=stages,
            D=constants.width, W=constants.tile, FORMAT=constants.format, WIDTHS=constants.widths, LOG_ROWS=constants.log_rows,
            INDEX_D=other_constants.width, INDEX_W=other_constants.tile, INDEX_FORMAT=other_constants.format,
            INDEX_WIDTHS=other_constants.widths, INDEX_LOG_ROWS=other_constants.log_rows,
            num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def _memory(folding: Folding, values: Tensor, gates: Tensor) -> kernels.Memory:
    opened = folding.open.views[0]
    ahead = folding.next.views[0] if folding.next is not None else None
    return kernels.Memory(
        values, values.stride(0), gates, gates.stride(0), folding.ape, folding.norm, opened, opened.stride(0),
        ahead, ahead.stride(0) if ahead is not None else 0, fields_of(folding.log),
    )  # fmt: skip


def _columns(folding: Folding) -> tuple[int, int]:
    return folding.open.slot_column, folding.next.slot_column if folding.next is not None else 0


def _constants(folding: Folding) -> _Constants:
    log = folding.log
    width = folding.norm.shape[0]
    tile = max(2, int(triton.next_power_of_2(width)))
    layout = layout_of(log.codec)
    return _Constants(width, tile, layout.format, layout.widths, log.rows_per_page)
