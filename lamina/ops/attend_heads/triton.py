"""Attention with grouped keys and values on a GPU, over rows where they lie. `ref.py` is the definition.

    project_heads(x, ...)       queries of a projection; its keys and values are stored
    attend_heads(q, own, ...)   as `ref.attend_heads`
    keep_rows(own, store, rows) after attention: the last rows of each request into its ring
    gate_heads(out, x, ...)     after attention: its output times the sigmoid of gates
    refuses(machine, case)      why they are not served, or None

Launches, order "prefill": one; a program per tile of queries of one request. Order "decode": one over ranges of a row's tiles,
and one that combines them. How a row is cut follows from its position, so that its bits do not depend on the rows beside it; the
grid holds the ranges that a row of `max_context` tokens has, and those past a row's end return at once.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.attend_heads import kernels
from lamina.ops.attend_heads.ref import HeadsCase, Past
from lamina.ops.machine import Machine, is_hopper
from lamina.ops.rope_norm.triton import refuses_machine
from lamina.ops.rows import Rows
from lamina.ops.store import Store
from lamina.ops.store import kernels as store_kernels

Order = Literal["decode", "prefill"]

_LOG2_E = 1.4426950408889634
_MOST_DIM = 256
#: programs that one row of a decode should make
_PROGRAMS = 256
#: values of a head's rows that one program of `project_heads` holds
_PROJECTED = 512


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut.

    heads    of a group in a program.   queries  of a program.   rows  positions of a tile of keys.
    splits   most ranges of a decode's row; `least_tiles` tiles of a range at least.   warps, stages  as in Triton.
    `warps` and `stages` change no bit, the others may.
    """

    heads: int
    queries: int
    rows: int
    warps: int
    stages: int
    splits: int = 1
    least_tiles: int = 1


def refuses(machine: Machine, dim: int) -> str | None:
    """Why heads of `dim` are not served there, in one line, or None."""
    if not 1 <= dim <= _MOST_DIM:
        return f"heads must have 1 to {_MOST_DIM} dims, not {dim}"
    return refuses_machine(machine)


@lru_cache(maxsize=64)
def choose_tiles(
    group: int, kv_heads: int, dim: int, is_exact: bool, order: Order, is_codes: bool = False, is_hopper: bool = True
) -> Tiles:
    """The tiles for `group` query heads over each of `kv_heads`; from the machine code (registers, spills).

    is_exact  products in fp32.   is_codes  keys and values are e4m3.
    """
    wide = triton.next_power_of_2(dim)
    if order == "decode":
        heads = min(64, max(16, triton.next_power_of_2(group)))
        splits = min(32, max(8, _PROGRAMS // kv_heads))
        if is_exact:
            return Tiles(16, 1, 16, 4, 1, splits, 8)
        return Tiles(heads, 1, 64 if wide <= 128 else 32, 4, 4 if wide <= 128 else 3, splits, 2)
    if is_exact:
        heads = min(16, triton.next_power_of_2(group))
        return Tiles(heads, 16 // heads, 16, 4, 1)
    heads = min(64, triton.next_power_of_2(group))
    if wide > 128:
        return Tiles(heads, 64 // heads, 32, 8, 2)
    return Tiles(heads, (64 if is_codes and not is_hopper else 128) // heads, 64, 8, 2)


def project_heads(
    x: Tensor, bias: Tensor | None, case: HeadsCase, past: Past, rows: Rows, dtype: torch.dtype,
    turns: tuple[Tensor, Tensor] | None, is_pairs: bool, q_norm: tuple[Tensor | None, float] | None = None,
    k_norm: tuple[Tensor | None, float] | None = None, v_norm_eps: float = 0.0, norms_after: bool = False,
    warmth: Tensor | None = None, has_gates: bool = False, norms_all: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Queries [T, H, d] in `dtype`, and the step's rows as stored, one tensor [T, K * d] a field; of a log's store none.

    x       [T, (H + 2K) * d], columns of a wider matrix too, queries first, then keys; bias [(H + 2K) * d] fp32.
    turns   cos, sin [T, r / 2] fp32: the first r dims of queries and keys turn, as pairs (2i, 2i + 1) if `is_pairs`, else
            (i, i + r / 2).
    q_norm, k_norm  (weight [d] fp32 or None, eps) of each head, before the rotation, or after it.   v_norm_eps  0: none.
    norms_all  one norm of all queries and one of all keys, weights [H * d] and [K * d]; before the rotation.
    warmth  [T] fp32 that multiplies queries at last.   has_gates  x and bias have each head's gate [d] behind its query.
    A log's rows are stored from `write_from` on, a large window's where a block is there for them. Where every request has one
    row, a ring's are stored too: what they overwrite is out of every window.
    """
    store, dim = past.store, past.codec.value_dim
    heads, kv_heads, num = case.heads, case.kv_heads, x.shape[0]
    in_log = store.place.kind == "block"
    queries = torch.empty(num, heads, dim, dtype=dtype, device=x.device)
    own: tuple[Tensor, ...] = ()
    if not in_log:
        own = tuple(torch.empty(num, view.shape[2], dtype=view.dtype, device=x.device) for view in store.views)
    wide = triton.next_power_of_2(dim)
    group = max(1, _PROJECTED // wide)
    place = kernels.LOG.value if in_log else kernels.RING.value if rows.is_single else kernels.OWN.value
    if store.place.kind == "window":
        place = kernels.WINDOW_PAGES.value
    tables = _tables(store, rows)
    (kept_k, kept_v), (own_k, own_v) = store.views, own or store.views
    roots = None
    if norms_all and num:
        assert not norms_after
        roots = torch.empty(num, 2, dtype=torch.float32, device=x.device)
        kernels.roots_of_heads[(num, 2 if kv_heads else 1)](
            x, x.stride(0), bias, roots, q_norm[1] if q_norm else 0.0, k_norm[1] if k_norm else 0.0,
            HEADS=heads, KV=kv_heads, D=dim, BLOCK=min(1024, triton.next_power_of_2(heads * dim)),
            IS_BF16=dtype == torch.bfloat16, HAS_GATES=has_gates, enable_fp_fusion=False,
        )  # fmt: skip
    if num:
        kernels.project_heads[(num, triton.cdiv(heads + 2 * kv_heads, group))](
            x, x.stride(0), bias, q_norm[0] if q_norm else None, k_norm[0] if k_norm else None, *(turns or (None, None)), warmth,
            roots, queries, own_k, own_v, kept_k, kept_v, kept_k.stride(0), kept_v.stride(0), rows.positions, rows.owners,
            rows.write_from, rows.table_rows, tables, tables.shape[1], rows.slots, rows.slots.shape[1],
            store.place.column, q_norm[1] if q_norm else 0.0, k_norm[1] if k_norm else 0.0, v_norm_eps,
            HEADS=heads, KV=kv_heads, D=dim, W=wide, GROUP=group, ROPE=2 * turns[0].shape[1] if turns else 0, IS_PAIRS=is_pairs,
            NORMS_Q=q_norm is not None, NORMS_K=k_norm is not None, NORMS_V=v_norm_eps > 0, NORMS_AFTER=norms_after, PLACE=place,
            PAGE_ROWS=store.rows_per_page, IS_BF16=dtype == torch.bfloat16, HAS_GATES=has_gates, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return queries, own


def _tables(store: Store, rows: Rows) -> Tensor:
    """[table rows, blocks] int32: the pages of a request's blocks, of the log or of a large window."""
    place = store.place
    return rows.windows[place.group][place.column] if place.kind == "window" else rows.tables


def gate_heads(out: Tensor, x: Tensor, bias: Tensor | None, heads: int, rows: Rows) -> None:
    """Attention's output [T, H * d] times the sigmoid of its gates, rounded to its type, in place; rows of padding as they are.

    x, bias  as `project_heads` takes them with gates.
    """
    num, dim = out.shape[0], out.shape[1] // heads
    assert out.is_contiguous()
    if num:
        kernels.gate_heads[(num, heads)](
            out, x, x.stride(0), bias, rows.owners, D=dim, W=triton.next_power_of_2(dim), HEADS=heads,
            IS_BF16=out.dtype == torch.bfloat16, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def attend_heads(
    q: Tensor, own: tuple[Tensor, ...], past: Past, case: HeadsCase, rows: Rows, order: Order, max_context: int,
    tiles: Tiles | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention of each query over the keys that it sees, [T, H * d] in q's type; rows of padding are zeros.

    q    [T, H, d] fp32 or bf16.   own  the step's rows as stored, of a ring's store; a log has them already.
    max_context  no request has more tokens after the step.   A row's bits depend on itself and the order.
    """
    assert case.top_k is None, "no selection here"
    num, heads, dim = q.shape
    if out is None:
        out = torch.empty(num, heads * dim, dtype=q.dtype, device=q.device)
    if not num:
        return out
    store, kv_heads = past.store, case.kv_heads
    in_log = store.place.kind == "block"
    is_exact = torch.float32 in (q.dtype, store.views[0].dtype)
    if tiles is None:
        is_codes = store.views[0].dtype == torch.uint8
        tiles = choose_tiles(heads // kv_heads, kv_heads, dim, is_exact, order, is_codes, is_hopper(q.device))
    (kept_k, kept_v), (own_k, own_v) = store.views, own or store.views
    has_cap = case.softcap > 0
    factor = case.scale * (1.0 if has_cap else _LOG2_E)
    common = {
        "HEADS": heads, "D": dim, "W": max(16, triton.next_power_of_2(dim)), "TILE": tiles.rows, "WINDOW": case.window or 0,
        "RESET": case.reset or 0,
    }  # fmt: skip
    walk = {
        "KV": kv_heads, "HEAD_TILE": tiles.heads, "PAGE_ROWS": store.rows_per_page, "IN_LOG": in_log,
        "IN_WINDOW": store.place.kind == "window", "HAS_CAP": has_cap,
        "EXACT": is_exact, "STAGES": tiles.stages, "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip
    parts = kv_heads * triton.cdiv(heads // kv_heads, tiles.heads)
    stored = (own_k, own_v, kept_k, kept_v, kept_k.stride(0), kept_v.stride(0))
    tables = _tables(store, rows)
    paged = (rows.table_rows, tables, tables.shape[1], rows.slots, rows.slots.shape[1], store.place.column)
    if order == "prefill":
        kernels.attend_tiles[(triton.cdiv(num, tiles.queries) + rows.num_requests, parts)](
            q, *stored, rows.owners, rows.starts, rows.stops, rows.first_rows, rows.valid_from, *paged, case.sinks, out, factor,
            case.softcap, num, rows.num_requests, QUERIES=tiles.queries, **common, **walk,
        )  # fmt: skip
        return out
    splits = _grid_splits(min(max_context, case.window or max_context, case.reset or max_context), tiles)
    partial = torch.empty(num * splits * heads * (dim + 2), dtype=torch.float32, device=q.device)
    peaks = partial[num * splits * heads * dim :]
    sums = peaks[num * splits * heads :]
    cut = {"SPLITS": tiles.splits, "LEAST_TILES": tiles.least_tiles}
    kernels.attend_split[(num * parts, splits)](
        q, *stored, rows.positions, rows.owners, rows.starts, rows.first_rows, rows.valid_from, *paged, partial, peaks, sums,
        factor, case.softcap, **common, **walk, **cut,
    )  # fmt: skip
    kernels.combine[(num * heads,)](
        partial, peaks, sums, rows.positions, rows.owners, rows.valid_from, case.sinks, out, splits,
        SPLIT_ROWS=triton.next_power_of_2(tiles.splits), num_warps=1 if dim <= 64 else 2, **common, **cut,
    )  # fmt: skip
    return out


def _grid_splits(seen: int, tiles: Tiles) -> int:
    """Ranges of a query that sees so many positions: they touch one tile more where they begin inside of one."""
    return min(tiles.splits, triton.cdiv(triton.cdiv(seen, tiles.rows) + 1, tiles.least_tiles))


def keep_rows(own: tuple[Tensor, ...], store: Store, rows: Rows) -> None:
    """Writes the last rows of each request into its ring; after attention, which still reads what is overwritten."""
    widths = tuple(view.shape[2] for view in store.views)
    strides = tuple(view.stride(0) for view in store.views)
    if rows.num_rows:
        store_kernels.keep_rows[(rows.num_rows,)](
            own, store_kernels.Fields(store.views, strides), rows.positions, rows.owners, rows.stops, rows.slots,
            rows.slots.shape[1], store.place.column, RING=store.rows_per_page, WIDTHS=widths,
            SIZES=tuple(triton.next_power_of_2(width) for width in widths), num_warps=4,
        )  # fmt: skip
