"""Linear attention with decay on a GPU, and what is around it. `ref.py` is the definition.

    decayed_attention(x, powers, store, rows, form)     [T, H * Dv] fp32
    activate(x, activation, rows, dtype)                what it reads
    gate_normed(y, gate, weight, eps, rows, dtype)      what the last product of a layer reads
    refuses(machine, dim, heads)                        why they are not served, or None

Form "rows": a program goes through the rows of one request one after another, with some of a head's state in registers; a row's
bits then depend on its own past alone, wherever a request is cut. Form "chunks": chunk by chunk, by products. Its bits depend on
cuts that are no multiples of CHUNK, never on company. One launch each.
"""

from typing import Literal

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.chunks import CHUNK
from lamina.ops.linear_attention import kernels
from lamina.ops.machine import Machine, is_hopper
from lamina.ops.rope_norm.triton import refuses_machine
from lamina.ops.rows import Rows
from lamina.ops.store import Store

Form = Literal["rows", "chunks"]

#: numbers of a state that a program of `walk` holds: of one warp, which waits for no other
_CELLS = 1024
_MOST_DIM = 256
_MOST_INNER = 32768
#: columns of values that a program of `take_chunks` holds on Hopper, and elsewhere (from the machine code: no spills)
_COLUMNS, _FEWER_COLUMNS = 32, 16
#: columns of a row that a program activates
_ACTIVATED = 1024


def refuses(machine: Machine, dim: int, heads: int) -> str | None:
    """Why heads of `dim`, normed together, are not served there, in one line, or None."""
    if not 1 <= dim <= _MOST_DIM:
        return f"heads of linear attention must have 1 to {_MOST_DIM} dims, not {dim}"
    if dim * heads > _MOST_INNER:
        return f"linear attention must have at most {_MOST_INNER} dims of all heads, not {dim * heads}"
    return refuses_machine(machine)


def decayed_attention(
    x: Tensor, powers: Tensor, value_dim: int, store: Store, rows: Rows, form: Form, out: Tensor | None = None
) -> Tensor:
    """`ref.decayed_attention` of H heads with states [Dk, Dv].

    x       [T, H * (2 Dk + Dv)] fp32 or bf16, columns of a wider matrix too: queries, keys and values of all heads.
    powers  [H, CHUNK + 1] fp32, as `Decays` has them.   store  one row of H * Dk * Dv numbers in each slot.
    Returns [T, H * Dv] fp32; rows of padding are not written.
    """
    states, num, heads = store.views[0], x.shape[0], powers.shape[0]
    key_dim = (x.shape[1] // heads - value_dim) // 2
    assert store.place.kind == "slot" and states.shape[2] == heads * key_dim * value_dim
    assert x.shape[1] == heads * (2 * key_dim + value_dim) and x.stride(1) == 1 and powers.is_contiguous()
    if out is None:
        out = torch.empty(num, heads * value_dim, dtype=torch.float32, device=x.device)
    if not num:
        return out
    arguments = (
        x, x.stride(0), powers, out, states, states.stride(0), rows.starts, rows.stops, rows.first_rows, rows.slots,
        rows.slots.shape[1], store.place.column,
    )  # fmt: skip
    shape = {
        "HEADS": heads, "DK": key_dim, "DV": value_dim, "CHUNK": CHUNK, "STORED_BF16": states.dtype == torch.bfloat16,
    }  # fmt: skip
    wide, columns = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    if form == "rows":
        block = min(columns, max(1, _CELLS // wide))
        kernels.walk[(rows.num_requests, heads * triton.cdiv(value_dim, block))](
            *arguments, WK=wide, BLOCK=block, num_warps=1, enable_fp_fusion=False, **shape
        )  # fmt: skip
        return out
    is_exact, block = x.dtype == torch.float32, max(16, min(_COLUMNS if is_hopper(x.device) else _FEWER_COLUMNS, columns))
    kernels.take_chunks[(rows.num_requests, heads * triton.cdiv(value_dim, block))](
        *arguments, WK=max(16, wide), BLOCK=block, EXACT=is_exact, num_warps=4, num_stages=1 if is_exact else 2, **shape
    )  # fmt: skip
    return out


def activate(x: Tensor, activation: str, rows: Rows, dtype: torch.dtype) -> Tensor:
    """act(x) of [T, n], columns of a wider matrix too -> `dtype`, contiguous; rows of padding are zeros."""
    num, inner = x.shape
    assert x.stride(1) == 1
    out = torch.empty(num, inner, dtype=dtype, device=x.device)
    if num:
        block = min(_ACTIVATED, triton.next_power_of_2(inner))
        kernels.activate[(num, triton.cdiv(inner, block))](
            x, x.stride(0), out, rows.owners, INNER=inner, BLOCK=block, ACTIVATION=activation, IS_BF16=dtype == torch.bfloat16,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def gate_normed(
    y: Tensor, gate: Tensor, weight: Tensor, eps: float, rows: Rows, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """y [T, n] fp32, normed and rounded, times the sigmoid of gate [T, n], columns of a wider matrix too -> `dtype`.

    weight  [n] fp32.   Rows of padding are zeros, whatever is in y.
    """
    num, inner = y.shape
    assert y.is_contiguous() and gate.stride(1) == 1
    if out is None:
        out = torch.empty(num, inner, dtype=dtype, device=y.device)
    wide = triton.next_power_of_2(inner)
    if num:
        kernels.gate_normed[(num,)](
            y, gate, gate.stride(0), weight, out, rows.owners, eps, INNER=inner, W=wide, IS_BF16=dtype == torch.bfloat16,
            num_warps=min(8, max(1, wide // 256)), enable_fp_fusion=False,
        )  # fmt: skip
    return out
