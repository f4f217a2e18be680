"""Rows encoded and kept on a GPU. `ref.py` is the definition; sums over a row have an order of their own, the rest its bits.

    encode_rows(kv, norm, eps, cos, sin, dtype, window, rows)   the step's key-value rows as stored; single rows to their rings
    keep_rows(own, window, rows)                                after attention: the last rows of each request to its ring
    keep_hidden(hidden, store, rows)                            the last hidden vectors of each request to its slot
    encode_queries(q, cos, sin, heads, codec)                   an index's queries as its keys are stored
    project_epilogue(...), query_epilogue(...)                  what follows a projection, in one launch each
    index_epilogue(...)                                         the same of an index of all tokens: keys to their log, queries
    refuses(machine, case)                                      why this machine or these shapes are not served, or None

One launch each. What is written to the arena is not counted in `Store.bytes_written`: only the device knows which rows are real.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.gemm.stored import Activation, empty_activation
from lamina.ops.machine import Machine
from lamina.ops.rope_norm.triton import QUERY_WARPS, activation_pointers, num_blocks, query_tile, refuses_machine
from lamina.ops.rows import Rows
from lamina.ops.store import EntryCodec, Store, StoreCase, kernels

_HIDDEN_COLUMNS = 1024
_FORMATS = {
    ("fp32",): kernels.PLAIN.value,
    ("bf16",): kernels.PLAIN.value,
    ("e4m3", "bf16", "e8m0"): kernels.ENTRY_FP8.value,
    ("e4m3", "fp32"): kernels.INDEX_FP8.value,
    ("e2m1", "e8m0"): kernels.INDEX_FP4.value,
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def refuses(machine: Machine, case: StoreCase) -> str | None:
    """Why `case` is not served, in one line, or None."""
    if case.dtypes not in _FORMATS:
        return f"knows no rows of {' + '.join(case.dtypes)}"
    if case.rope % 2 or case.width % 2 or not 0 < case.rope <= case.width:
        return f"the rotated dims must be pairs at the end of an even width, not the last {case.rope} of {case.width}"
    return refuses_machine(machine)


@dataclass(frozen=True, slots=True)
class Layout:
    """A codec as the kernels know it: their number for its fields, and how a row of each field is held."""

    format: int
    types: tuple[torch.dtype, ...]
    widths: tuple[int, ...]


@cache
def _layout(codec: EntryCodec) -> Layout:
    dtypes = tuple(dtype for _, dtype, _ in codec.fields)
    widths = tuple(-(-elements // 2) if dtype == "e2m1" else elements for _, dtype, elements in codec.fields)  # two codes a byte
    return Layout(_FORMATS[dtypes], tuple(_DTYPES.get(dtype, torch.uint8) for dtype in dtypes), widths)


def layout_of(codec: EntryCodec) -> Layout:
    """A codec's layout, worked out once."""
    return _layout(codec)  # type: ignore[arg-type]  # codecs are frozen records, equal and hashed by their values


def fields_of(store: Store) -> kernels.Fields:
    """Where a store's fields lie."""
    return kernels.Fields(store.views, tuple(view.stride(0) for view in store.views))


def empty_rows(codec: EntryCodec, num: int, device: torch.device) -> tuple[Tensor, ...]:
    """Room for `num` encoded rows."""
    layout = layout_of(codec)
    held = zip(layout.types, layout.widths, strict=True)
    return tuple(torch.empty(num, width, dtype=dtype, device=device) for dtype, width in held)


def encode_rows(
    kv: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, dtype: torch.dtype, window: Store, rows: Rows
) -> tuple[Tensor, ...]:
    """The rows' keys and values as the window stores them, one tensor [T, w] a field.

    kv        [T, d] fp32 or `dtype`; columns of a wider matrix too.   norm  [d] fp32.
    cos, sin  [T, r / 2] at the rows' positions.   dtype  what is rounded to before and after.
    Where every request has one row, it is in the ring afterwards: a ring's row is overwritten only when no query sees it.
    """
    own = empty_rows(window.codec, kv.shape[0], kv.device)
    entry = kernels.Entry(kv, kv.stride(0), norm, own, fields_of(window))
    kernels.encode_rows[(kv.shape[0],)](
        entry, cos, sin, rows.positions, rows.owners, rows.slots, rows.slots.stride(0), window.slot_column, eps,
        **_entry_constants(window, cos, dtype, rows), enable_fp_fusion=False,
    )  # fmt: skip
    return own


def project_epilogue(
    low: Tensor, low_norm: Tensor, kv: Tensor, kv_norm: Tensor, eps: float, cos: Tensor, sin: Tensor, dtype: torch.dtype,
    is_fp8: bool, window: Store, rows: Rows,
) -> tuple[Activation, tuple[Tensor, ...]]:  # fmt: skip
    """(norm_quantise(low, ...), encode_rows(kv, ...)) in one launch, the same bits."""
    made = empty_activation(low.shape[0], low.shape[1], dtype, low.device, is_fp8)
    own = empty_rows(window.codec, kv.shape[0], kv.device)
    kernels.project_epilogue[(kv.shape[0], 2)](
        kernels.LowRank(low, low.stride(0), low_norm, *activation_pointers(made)),
        kernels.Entry(kv, kv.stride(0), kv_norm, own, fields_of(window)),
        cos, sin, rows.positions, rows.owners, rows.slots, rows.slots.stride(0), window.slot_column, eps,
        K=low.shape[1], BLOCKS=num_blocks(low.shape[1]), IS_FP8=is_fp8,
        **_entry_constants(window, cos, dtype, rows), enable_fp_fusion=False,
    )  # fmt: skip
    return made, own


def keep_rows(own: tuple[Tensor, ...], window: Store, rows: Rows) -> None:
    """Writes the last rows of each request into its ring; after attention, which still reads what is overwritten."""
    widths = layout_of(window.codec).widths
    kernels.keep_rows[(rows.num_rows,)](
        own, fields_of(window), rows.positions, rows.owners, rows.stops, rows.slots, rows.slots.stride(0), window.slot_column,
        RING=window.rows_per_page, WIDTHS=widths, SIZES=tuple(triton.next_power_of_2(width) for width in widths),
        num_warps=1,
    )  # fmt: skip


def keep_hidden(hidden: Tensor, store: Store | None, rows: Rows) -> None:
    """Writes the last of each request's rows of hidden [T, D] into its slot, if hidden vectors are kept at all, and each that may
    turn out to be the last. The one after q tokens goes to row q mod the rows that the slot has.
    """
    if store is None:
        return
    (view,) = store.views
    width, states = hidden.shape[1], store.rows_per_page
    assert view.shape[2] == view.stride(1) == width
    size = min(_HIDDEN_COLUMNS, triton.next_power_of_2(width))
    backs = 1 if rows.drafts is None else states
    kernels.keep_hidden[(rows.num_requests, triton.cdiv(width, size), backs)](
        hidden, hidden.stride(0), view, view.stride(0), rows.starts, rows.stops, rows.first_rows,
        rows.starts if rows.drafts is None else rows.drafts, rows.slots, rows.slots.stride(0), store.slot_column,
        WIDTH=width, SIZE=size, STATES=states,
    )  # fmt: skip


def encode_queries(q: Tensor, cos: Tensor, sin: Tensor, heads: int, codec: EntryCodec) -> tuple[Tensor, ...]:
    """An index's queries, rotated and encoded as its keys: one tensor [T * Hi, w] a field.

    q  [T, Hi * di], rounded; columns of a wider matrix too.   cos, sin  [T, r / 2]; the last r dims of a head turn.
    """
    out = empty_rows(codec, q.shape[0] * heads, q.device)
    layout = layout_of(codec)
    group, width = query_tile(q.shape[0], codec.width, 256)
    kernels.encode_queries[(q.shape[0] * triton.cdiv(heads, group),)](
        kernels.Queries(q, q.stride(0), out), cos, sin,
        HEADS=heads, D=codec.width, ROPE=2 * cos.shape[1], GROUP=group, W=width,
        FORMAT=layout.format, WIDTHS=layout.widths, num_warps=QUERY_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def query_epilogue(
    q: Tensor, index_q: Tensor, cos: Tensor, sin: Tensor, heads: int, index_heads: int, eps: float, codec: EntryCodec
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(query_norm_rope(q, ...), encode_queries(index_q, ...)) in one launch, the same bits."""
    dim = q.shape[1] // heads
    out = q.new_empty(q.shape[0], heads, dim)
    fields = empty_rows(codec, q.shape[0] * index_heads, q.device)
    layout = layout_of(codec)
    group, width = query_tile(q.shape[0], dim, 512)
    index_group, index_width = query_tile(q.shape[0], codec.width, 256)
    programs = triton.cdiv(heads, group) + triton.cdiv(index_heads, index_group)
    kernels.query_epilogue[(q.shape[0] * programs,)](
        kernels.Queries(q, q.stride(0), (out,)), kernels.Queries(index_q, index_q.stride(0), fields), cos, sin, eps,
        HEADS=heads, D=dim, GROUP=group, W=width,
        INDEX_HEADS=index_heads, INDEX_D=codec.width, INDEX_GROUP=index_group, INDEX_W=index_width,
        ROPE=2 * cos.shape[1], FORMAT=layout.format, WIDTHS=layout.widths, num_warps=QUERY_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out, fields


def index_epilogue(
    keys: Tensor, weight: Tensor, bias: Tensor, eps: float, queries: Tensor | None, heads: int, cos: Tensor, sin: Tensor,
    dtype: torch.dtype, store: Store, rows: Rows,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """Keeps the step's index keys, from `write_from` on; the queries encoded as these are, [T * Hi, w] a field, if there are any.

    keys     [T, di] as projected, columns of a wider matrix too; weight, bias [di] fp32 of their layer norm.
    queries  [T, Hi * di] rounded to `dtype`.   cos, sin  [T, r / 2]; the last r dims of a key and of a head turn.
    """
    codec, num = store.codec, keys.shape[0]
    layout = layout_of(codec)
    out = store.views if queries is None else empty_rows(codec, num * heads, keys.device)
    asked = keys if queries is None else queries
    group, width = query_tile(num, codec.width, 256)
    if num:
        kernels.index_epilogue[(num, 1 if queries is None else 1 + triton.cdiv(heads, group))](
            kernels.Key(keys, keys.stride(0), weight, bias, fields_of(store)), kernels.Queries(asked, asked.stride(0), out),
            cos, sin, rows.positions, rows.owners, rows.write_from, rows.table_rows, rows.tables, rows.tables.shape[1], eps,
            HEADS=heads, D=codec.width, ROPE=2 * cos.shape[1], GROUP=group, W=width, PAGE_ROWS=store.rows_per_page,
            FORMAT=layout.format, WIDTHS=layout.widths, IS_BF16=dtype == torch.bfloat16, num_warps=QUERY_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return None if queries is None else out


def _entry_constants(window: Store, cos: Tensor, dtype: torch.dtype, rows: Rows) -> dict[str, object]:
    codec = window.codec
    layout = layout_of(codec)
    return {
        "D": codec.width, "ROPE": 2 * cos.shape[1], "W": triton.next_power_of_2(codec.width), "RING": window.rows_per_page,
        "FORMAT": layout.format, "WIDTHS": layout.widths, "IS_BF16": dtype == torch.bfloat16, "IS_SINGLE": rows.is_single,
    }  # fmt: skip
