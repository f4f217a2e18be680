"""The gated delta rule on a GPU. `ref.py` is the definition.

    gated_delta(x, learns, steps, rule, store, rows)   [T, H * Dv] fp32
    refuses(machine, key_dim)                          why it is not served, or None

One launch, in which a program goes through the rows of one request one after another, with some of a head's state in registers: a
row's bits depend on its own past alone, wherever a request is cut.
"""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.delta import kernels
from lamina.ops.machine import Machine
from lamina.ops.rope_norm.triton import refuses_machine
from lamina.ops.rows import Rows
from lamina.ops.store import Store

#: numbers of a state that a program of `walk` holds: of one warp, which waits for no other
_CELLS = 1024
_MOST_KEY = 256


@dataclass(frozen=True, slots=True)
class Rule:
    """The numbers of a layer.

    decay, step_bias  [H] fp32: a row forgets softplus(step + step_bias) * decay, a logarithm, decay <= 0.
    groups of heads share queries and keys of `key_dim`; values have `value_dim`.
    """

    decay: Tensor
    step_bias: Tensor
    groups: int
    key_dim: int
    value_dim: int

    @property
    def heads(self) -> int:
        """H."""
        return self.decay.shape[0]


def refuses(machine: Machine, key_dim: int) -> str | None:
    """Why keys of `key_dim` are not served there, in one line, or None."""
    if not 1 <= key_dim <= _MOST_KEY:
        return f"keys of the delta rule must have 1 to {_MOST_KEY} dims, not {key_dim}"
    return refuses_machine(machine)


def gated_delta(
    x: Tensor, learns: Tensor, steps: Tensor, rule: Rule, store: Store, rows: Rows, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    """`ref.gated_delta` with gates as a projection gives them: sigmoid(learns), and what `rule` makes of the steps.

    x      [T, 2 G Dk + H Dv] fp32 or bf16: queries and keys of all groups, of any length, then values of all heads.
    learns, steps  [T, H] fp32 or bf16.   All may be columns of wider matrices.
    store  one row of H * Dk * Dv numbers in each slot.
    Returns [T, H * Dv] fp32; rows of padding are not written.
    """
    states, num, heads, key_dim, value_dim = store.views[0], x.shape[0], rule.heads, rule.key_dim, rule.value_dim
    assert store.place.kind == "slot" and states.shape[2] == heads * key_dim * value_dim
    assert x.shape[1] == 2 * rule.groups * key_dim + heads * value_dim and all(part.stride(1) == 1 for part in (x, learns, steps))
    if out is None:
        out = torch.empty(num, heads * value_dim, dtype=torch.float32, device=x.device)
    if not num:
        return out
    shape = {"HEADS": heads, "GROUPS": rule.groups, "DK": key_dim}
    gates = (learns, learns.stride(0), steps, steps.stride(0), rule.step_bias, rule.decay)
    requests = (rows.starts, rows.stops, rows.first_rows)
    slots = (rows.slots, rows.slots.shape[1], store.place.column)
    is_bf16, scale = states.dtype == torch.bfloat16, key_dim**-0.5
    wide = triton.next_power_of_2(key_dim)
    block = min(triton.next_power_of_2(value_dim), max(1, _CELLS // wide))
    kernels.walk[(rows.num_requests, heads * triton.cdiv(value_dim, block))](
        x, x.stride(0), *gates, out, states, states.stride(0), *requests, *slots, scale,
        DV=value_dim, WK=wide, BLOCK=block, STORED_BF16=is_bf16, num_warps=1, enable_fp_fusion=False, **shape,
    )  # fmt: skip
    return out
