# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Triton kernels of selective scans; `triton.py` calls them and says what each argument is.

    scan         the rows of a request, one after another, over a block of channels whose state stays in registers
    gate_rows    y * silu(gate), and a norm of each group of channels
    norm_rows    norms of parts of a row

Whether a row is its step's only one changes nothing of how it is computed.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.quantise.kernels import rounded
from lamina.ops.rope_norm.kernels import normed, store_as


@triton.jit
def softplus(x):
    """log(1 + exp(x)), also where exp(x) is far below 1."""
    power = tl.exp(-tl.abs(x))
    whole = 1.0 + power
    is_lost = whole == 1.0
    grown = tl.log(whole) * (power / tl.where(is_lost, 1.0, whole - 1.0))
    return tl.maximum(x, 0.0) + tl.where(is_lost, power, grown)


@triton.jit(do_not_specialize=["slot_column", "least", "most"])
def scan(
    x, x_stride, steps, steps_stride, step_bias, decay, b, b_stride, c, c_stride, skip, out, states, state_page,
    starts, stops, first_rows, slots, slot_stride, slot_column, least, most,
    HEADS: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NW: tl.constexpr, BLOCK: tl.constexpr,
    BY_CHANNEL: tl.constexpr, STORED_BF16: tl.constexpr,
):  # fmt: skip
    """BLOCK of a head's P channels of one request. BY_CHANNEL: steps and skips [P] and decays [P, N], else one a head."""
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + request)
    count = tl.load(stops + request) - start
    if count <= 0:
        return
    PARTS: tl.constexpr = (P + BLOCK - 1) // BLOCK
    head = tl.program_id(1) // PARTS
    lane = tl.program_id(1) % PARTS * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, NW)
    live, real = lane < P, number < N
    cell = live[:, None] & real[None, :]
    channel = head * P + lane
    at = channel[:, None] * N + number[None, :]
    if BY_CHANNEL:
        factor = channel
        rate = tl.load(decay + at, mask=cell, other=0.0)
        has_factor = live
    else:
        factor = head + tl.zeros((1,), tl.int32)  # one for all channels
        has_factor = factor >= 0
        rate = tl.load(decay + factor)[:, None]
    offset = tl.load(step_bias + factor, mask=has_factor, other=0.0)
    straight = tl.load(skip + factor, mask=has_factor, other=0.0)
    page = tl.load(slots + request * slot_stride + slot_column).to(tl.int64)
    states += page * state_page
    state = tl.load(states + at, mask=cell & (start > 0), other=0.0).to(tl.float32)
    row = tl.load(first_rows + request).to(tl.int64)
    x += row * x_stride + channel
    steps += row * steps_stride + factor
    b += row * b_stride + head // GROUP * N + number
    c += row * c_stride + head // GROUP * N + number
    out += row * (HEADS * P) + channel
    next_x = tl.load(x, mask=live, other=0.0)
    next_step = tl.load(steps, mask=has_factor, other=0.0)
    next_b = tl.load(b, mask=real, other=0.0)
    next_c = tl.load(c, mask=real, other=0.0)
    for done in range(0, count):
        taken, step = next_x.to(tl.float32), next_step.to(tl.float32)
        key, query = next_b.to(tl.float32), next_c.to(tl.float32)
        more = done + 1 < count
        x += x_stride
        steps += steps_stride
        b += b_stride
        c += c_stride
        next_x = tl.load(x, mask=live & more, other=0.0)
        next_step = tl.load(steps, mask=has_factor & more, other=0.0)
        next_b = tl.load(b, mask=real & more, other=0.0)
        next_c = tl.load(c, mask=real & more, other=0.0)
        step = tl.maximum(softplus(step + offset), least, propagate_nan=tl.PropagateNan.ALL)
        step = tl.minimum(step, most, propagate_nan=tl.PropagateNan.ALL)
        state = tl.exp(step[:, None] * rate) * state + (step * taken)[:, None] * key[None, :]
        state = rounded(state, STORED_BF16)
        y = tl.sum(state * query[None, :], 1) + straight * taken
        tl.store(out, y, mask=live)
        out += HEADS * P
    store_as(states + at, state, cell)


@triton.jit
def gate_rows(
    y, gate, gate_stride, weight, out, owners, eps,
    INNER: tl.constexpr, SIZE: tl.constexpr, W: tl.constexpr, NORMS: tl.constexpr, BEFORE: tl.constexpr, IS_BF16: tl.constexpr,
):  # fmt: skip
    """SIZE channels of one row: a group of a norm, before the gate or after it; rows of padding are zeros."""
    row = tl.program_id(0).to(tl.int64)
    own = tl.arange(0, W)[None, :]
    column = tl.program_id(1) * SIZE + own
    inside = (own < SIZE) & (column < INNER)
    live = inside & (tl.load(owners + row) >= 0)
    value = tl.load(y + row * INNER + column, mask=live, other=0.0)
    opening = tl.load(gate + row * gate_stride + column, mask=live, other=0.0).to(tl.float32)
    opening = opening / (1 + tl.exp(-opening))
    if NORMS:
        if not BEFORE:
            value = value * opening
        value = normed(value, eps, SIZE) * tl.load(weight + column, mask=inside, other=0.0)
        if BEFORE:
            value = value * opening
    else:
        value = value * opening
    store_as(out + row * INNER + column, rounded(value, IS_BF16), inside)


@triton.jit
def norm_rows(
    x, x_stride, weight, out, eps, FIRST: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr,
    IS_BF16: tl.constexpr,
):  # fmt: skip
    """Columns FIRST to FIRST + SIZE of one row of WIDTH."""
    row = tl.program_id(0).to(tl.int64)
    own = tl.arange(0, W)[None, :]
    inside = own < SIZE
    value = tl.load(x + row * x_stride + FIRST + own, mask=inside, other=0.0).to(tl.float32)
    value = normed(value, eps, SIZE) * tl.load(weight + own, mask=inside, other=0.0)
    store_as(out + row * WIDTH + FIRST + own, rounded(value, IS_BF16), inside)
