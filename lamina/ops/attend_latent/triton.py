"""Attention over latents on a GPU, over rows where they lie. `ref.py` is the definition.

    project_latent(q, latent, ...)        queries of a projection in their two parts; latents and rotated keys are stored
    attend_latent(q, q_turned, past, ...) as `attend_heads` with one row that is key and value of all heads
    refuses(machine, rank, rope)          why they are not served, or None

Launches are those of `attend_heads/triton.py`: a program has a part of the heads, which share what it reads. Rows that an index
lists are read one by one; a query that sees no more than are listed for it has the same bits whatever others see.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.attend_heads import HeadsCase, Past
from lamina.ops.attend_heads import kernels as heads_kernels
from lamina.ops.attend_heads.triton import Order, Tiles
from lamina.ops.attend_latent import kernels
from lamina.ops.machine import Machine, capability_of
from lamina.ops.rope_norm.triton import refuses_machine
from lamina.ops.rows import Rows
from lamina.ops.store import Store

_LOG2_E = 1.4426950408889634
_MOST_RANK, _MOST_ROPE = 512, 64
#: values of heads' rows that one program of `project_latent` holds
_PROJECTED = 512
#: unnormalised outputs of a decode's row, over its ranges and heads
_PARTS = 2048


@dataclass(frozen=True, slots=True)
class LatentCase:
    """nope, rope  dims of a head's query, in this order; the last turn, in pairs (2i, 2i + 1) if `is_pairs`, else (i, i + r/2).

    rank  of the latents.
    """

    heads: int
    nope: int
    rope: int
    rank: int
    is_pairs: bool


def refuses(machine: Machine, rank: int, rope: int) -> str | None:
    """Why latents of `rank` and rotated keys of `rope` dims are not served there, in one line, or None."""
    if not 1 <= rank <= _MOST_RANK:
        return f"latents must have 1 to {_MOST_RANK} dims, not {rank}"
    if not 2 <= rope <= _MOST_ROPE or rope % 2:
        return f"rotated keys of latents must have 2 to {_MOST_ROPE} dims, an even number, not {rope}"
    return refuses_machine(machine)


@lru_cache(maxsize=64)
def choose_tiles(
    heads: int, rank: int, is_exact: bool, order: Order, capability: tuple[int, int] = (9, 0), is_listed: bool = False,
    is_codes: bool = False,
) -> Tiles:  # fmt: skip
    """The tiles for `heads` over latents of `rank`; from the machine code (registers, shared memory, spills).

    is_listed  each query has rows of its own, few of them: programs have one query, and its ranges are shorter.
    is_codes   latents are e4m3.
    """
    if is_listed:
        found = choose_tiles(max(heads, 16), rank, is_exact, order, capability, is_codes=is_codes)
        return replace(found, queries=1, least_tiles=max(1, found.least_tiles // 2))
    is_decode, wide = order == "decode", rank > 256
    splits = max(8, min(32, _PARTS // triton.next_power_of_2(heads))) if is_decode else 1
    if is_exact:
        of_heads = 16 if is_decode else min(16, triton.next_power_of_2(heads))
        return Tiles(of_heads, 16 // of_heads, 16, 4, 1, splits, 8)
    has_room = capability in ((8, 0), (9, 0), (10, 0))  # other GPUs have 99 KiB of shared memory for a program
    if is_codes and capability == (8, 0):  # no registers to expand so many
        has_room = False
    rows = 64 if capability == (9, 0) else 32 if has_room or not wide else 16
    stages = 2 if has_room and (capability == (9, 0) or not is_codes) else 1
    most = 64 if has_room else 32
    of_heads = min(most, triton.next_power_of_2(heads))
    if is_decode:
        of_heads = max(16, of_heads)
    return Tiles(of_heads, 1 if is_decode else most // of_heads, rows, 8, stages, splits, 256 // rows)


def project_latent(
    q: Tensor, q_bias: Tensor | None, latent: Tensor, latent_bias: Tensor | None, gain: Tensor, eps: float,
    turns: tuple[Tensor, Tensor], case: LatentCase, past: Past, rows: Rows, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries in `dtype`: the dims that do not turn [T, H * nope], and those that do [T, H * rope]. Writes the step's rows.

    q       [T, H * (nope + rope)] and latent [T, rank + rope], columns of wider matrices too; biases fp32 or None.
    gain    [rank] fp32 of the latent's norm.   turns  cos, sin [T, rope / 2] fp32.   Rows are stored from `write_from` on.
    """
    num, store = q.shape[0], past.store
    plain = torch.empty(num, case.heads * case.nope, dtype=dtype, device=q.device)
    turned = torch.empty(num, case.heads * case.rope, dtype=dtype, device=q.device)
    wide = triton.next_power_of_2(max(case.nope, case.rope))
    group = max(1, min(triton.next_power_of_2(case.heads), _PROJECTED // wide))
    if num:
        kernels.project_latent[(num, 1 + triton.cdiv(case.heads, group))](
            q, q.stride(0), q_bias, latent, latent.stride(0), latent_bias, gain, *turns, plain, turned, *_fields(store),
            rows.positions, rows.owners, rows.write_from, rows.table_rows, rows.tables, rows.tables.shape[1], eps,
            HEADS=case.heads, NOPE=case.nope, WN=triton.next_power_of_2(case.nope), R=case.rank,
            WR=triton.next_power_of_2(case.rank), P=case.rope, WP=triton.next_power_of_2(case.rope), GROUP=group,
            IS_PAIRS=case.is_pairs, PAGE_ROWS=store.rows_per_page, IS_BF16=dtype == torch.bfloat16, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return plain, turned


def _fields(store: Store) -> tuple[Tensor, Tensor, Tensor, int, int, int]:
    """Latents, their scales and rotated keys, and how far apart pages of each are; all in one where they are no codes."""
    latents, scales, turns = store.views if len(store.views) == 3 else store.views * 3
    return latents, scales, turns, latents.stride(0), scales.stride(0), turns.stride(0)


def attend_latent(
    q: Tensor, q_turned: Tensor, past: Past, case: HeadsCase, rows: Rows, order: Order, max_context: int,
    tiles: Tiles | None = None, places: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention of each query over all rows up to its own, [T, H * rank] in q's type; rows of padding are zeros.

    q  [T, H * rank] fp32 or bf16, against latents.   q_turned [T, H * rope], against rotated keys.
    max_context  no request has more tokens after the step.   A row's bits depend on itself and the order.
    places  [T, case.top_k] int32, where the rows lie that each query attends to instead: page * rows_per_page + row in the page,
            all that it sees or so many of them.
    """
    assert case.window is None and case.sinks is None, "latents have no windows and sinks here"
    assert (places is None) == (case.top_k is None)
    num, heads, store = q.shape[0], case.heads, past.store
    rank, rope = q.shape[1] // heads, q_turned.shape[1] // heads
    out = torch.empty(num, heads * rank, dtype=q.dtype, device=q.device)
    if not num:
        return out
    is_exact = torch.float32 in (q.dtype, store.views[0].dtype)
    top_k = case.top_k or 0
    is_codes = len(store.views) > 1
    tiles = tiles or choose_tiles(heads, rank, is_exact, order, capability_of(q.device), top_k > 0, is_codes)
    wide = max(16, triton.next_power_of_2(rank))
    common = {
        "HEADS": heads, "R": rank, "WR": wide, "P": rope, "WP": max(16, triton.next_power_of_2(rope)),
        "HEAD_TILE": tiles.heads, "TILE": tiles.rows, "PAGE_ROWS": store.rows_per_page, "EXACT": is_exact,
        "STAGES": tiles.stages, "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip
    factor = case.scale * _LOG2_E
    parts = triton.cdiv(heads, tiles.heads)
    log = _fields(store)
    paged = (rows.table_rows, rows.tables, rows.tables.shape[1])
    if order == "prefill" and places is not None:
        kernels.attend_listed[(num, parts)](
            q, q_turned, *log, rows.positions, rows.owners, places, out, factor, TOP_K=top_k, **common
        )  # fmt: skip
        return out
    if order == "prefill":
        kernels.attend_tiles[(triton.cdiv(num, tiles.queries) + rows.num_requests, parts)](
            q, q_turned, *log, rows.owners, rows.starts, rows.stops, rows.first_rows, *paged, out, factor, num,
            rows.num_requests, QUERIES=tiles.queries, **common,
        )  # fmt: skip
        return out
    most = min(max_context, top_k) if top_k else max_context
    splits = min(tiles.splits, triton.cdiv(triton.cdiv(most, tiles.rows) + 1, tiles.least_tiles))
    partial = torch.empty(num * splits * heads * (rank + 2), dtype=torch.float32, device=q.device)
    peaks = partial[num * splits * heads * rank :]
    sums = peaks[num * splits * heads :]
    cut = {"SPLITS": tiles.splits, "LEAST_TILES": tiles.least_tiles}
    kernels.attend_split[(num * parts, splits)](
        q, q_turned, *log, rows.positions, rows.owners, *paged, places, partial, peaks, sums, factor,
        TOP_K=top_k, **common, **cut,
    )  # fmt: skip
    heads_kernels.combine[(num * heads,)](
        partial, peaks, sums, rows.positions, rows.owners, rows.valid_from, None, out, splits,
        HEADS=heads, D=rank, W=wide, TILE=tiles.rows, SPLIT_ROWS=triton.next_power_of_2(tiles.splits), WINDOW=0, RESET=0,
        MOST=top_k,
        num_warps=1 if rank <= 64 else 8, **cut,
    )  # fmt: skip
    return out
