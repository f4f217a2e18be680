# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""The Triton kernel of the gated delta rule; `triton.py` calls it and says what each argument is.

    walk         the rows of a request, one after another: a head's state over some columns of values stays in registers

x is [queries of all groups | keys of all groups | values of all heads]; queries and keys are of any length.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.quantise.kernels import rounded
from lamina.ops.rope_norm.kernels import store_as
from lamina.ops.ssm.kernels import softplus

#: added to the sum of squares of a query or a key
_EPS = tl.constexpr(1e-6)


@triton.jit
def _over_length(squares):
    """1 / length of a vector whose squares add up to that."""
    return 1.0 / tl.sqrt(squares + _EPS)


@triton.jit(do_not_specialize=["slot_column"])
def walk(
    x, x_stride, learns, learns_stride, steps, steps_stride, step_bias, decay, out, states, state_page,
    starts, stops, first_rows, slots, slot_stride, slot_column, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WK: tl.constexpr, BLOCK: tl.constexpr,
    STORED_BF16: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of the values of a head of one request."""
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + request)
    count = tl.load(stops + request) - start
    if count <= 0:
        return
    PARTS: tl.constexpr = (DV + BLOCK - 1) // BLOCK
    head = tl.program_id(1) // PARTS
    group = head // (HEADS // GROUPS)
    lane = tl.program_id(1) % PARTS * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, WK)
    live, real = lane < DV, number < DK
    cell = real[:, None] & live[None, :]
    at = (head * DK + number)[:, None] * DV + lane[None, :]
    states += tl.load(slots + request * slot_stride + slot_column).to(tl.int64) * state_page
    state = tl.load(states + at, mask=cell & (start > 0), other=0.0).to(tl.float32)
    rate, offset = tl.load(decay + head), tl.load(step_bias + head)
    row = tl.load(first_rows + request).to(tl.int64)
    x += row * x_stride
    of_query, of_key, of_value = group * DK + number, (GROUPS + group) * DK + number, 2 * GROUPS * DK + head * DV + lane
    learns += row * learns_stride + head
    steps += row * steps_stride + head
    out += (row * HEADS + head) * DV + lane
    next_q = tl.load(x + of_query, mask=real, other=0.0)
    next_k = tl.load(x + of_key, mask=real, other=0.0)
    next_v = tl.load(x + of_value, mask=live, other=0.0)
    next_learn, next_step = tl.load(learns), tl.load(steps)
    for done in range(0, count):
        q, k, v = next_q.to(tl.float32), next_k.to(tl.float32), next_v.to(tl.float32)
        learn, step = next_learn.to(tl.float32), next_step.to(tl.float32)
        more = done + 1 < count
        x += x_stride
        learns += learns_stride
        steps += steps_stride
        next_q = tl.load(x + of_query, mask=real & more, other=0.0)
        next_k = tl.load(x + of_key, mask=real & more, other=0.0)
        next_v = tl.load(x + of_value, mask=live & more, other=0.0)
        next_learn, next_step = tl.load(learns, mask=more, other=0.0), tl.load(steps, mask=more, other=0.0)
        q = q * (_over_length(tl.sum(q * q, 0)) * scale)
        k = k * _over_length(tl.sum(k * k, 0))
        state = state * tl.exp(softplus(step + offset) * rate)
        new = (v - tl.sum(state * k[:, None], 0)) / (1.0 + tl.exp(-learn))
        y = tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * new
        state = rounded(state + k[:, None] * new[None, :], STORED_BF16)
        tl.store(out, y, mask=live)
        out += HEADS * DV
    store_as(states + at, state, cell)
