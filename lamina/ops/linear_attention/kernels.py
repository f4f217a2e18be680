# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Triton kernels of linear attention with decay, and of what is around it; `triton.py` calls them and says what each argument is.

    walk         the rows of a request, one after another: a head's state over some columns of values stays in registers
    take_chunks  the chunks of a request, one after another: products alone
    activate     silu of some columns of rows
    gate_normed  a norm of a whole row, times the sigmoid of a gate

x is [queries | keys | values] of all heads.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.gated.kernels import activated
from lamina.ops.quantise.kernels import round_bf16, rounded
from lamina.ops.rope_norm.kernels import INTERPRETED, normed, store_as

#: of products in fp32, on tensor cores: of bf16 it changes nothing
_PRECISION = tl.constexpr("tf32x3")


@triton.jit
def _operand(x, EXACT: tl.constexpr):
    """As products take it: fp32 if EXACT, else bf16, which the interpreter holds in fp32."""
    x = x.to(tl.float32)
    if not EXACT:
        x = round_bf16(x) if INTERPRETED else x.to(tl.bfloat16)
    return x


@triton.jit(do_not_specialize=["slot_column"])
def walk(
    x, x_stride, powers, out, states, state_page, starts, stops, first_rows, slots, slot_stride, slot_column,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WK: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
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
    lane = tl.program_id(1) % PARTS * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, WK)
    live, real = lane < DV, number < DK
    cell = real[:, None] & live[None, :]
    at = (head * DK + number)[:, None] * DV + lane[None, :]
    states += tl.load(slots + request * slot_stride + slot_column).to(tl.int64) * state_page
    state = tl.load(states + at, mask=cell & (start > 0), other=0.0).to(tl.float32)
    kept = tl.load(powers + head * (CHUNK + 1) + 1)
    row = tl.load(first_rows + request).to(tl.int64)
    x += row * x_stride
    out += (row * HEADS + head) * DV + lane
    of_query, of_key, of_value = head * DK + number, (HEADS + head) * DK + number, 2 * HEADS * DK + head * DV + lane
    next_q = tl.load(x + of_query, mask=real, other=0.0)
    next_k = tl.load(x + of_key, mask=real, other=0.0)
    next_v = tl.load(x + of_value, mask=live, other=0.0)
    for done in range(0, count):
        q, k, v = next_q.to(tl.float32), next_k.to(tl.float32), next_v.to(tl.float32)
        more = done + 1 < count
        x += x_stride
        next_q = tl.load(x + of_query, mask=real & more, other=0.0)
        next_k = tl.load(x + of_key, mask=real & more, other=0.0)
        next_v = tl.load(x + of_value, mask=live & more, other=0.0)
        state = rounded(state * kept + k[:, None] * v[None, :], STORED_BF16)
        tl.store(out, tl.sum(state * q[:, None], 0), mask=live)
        out += HEADS * DV
    store_as(states + at, state, cell)


@triton.jit(do_not_specialize=["slot_column"])
def take_chunks(
    x, x_stride, powers, out, states, state_page, starts, stops, first_rows, slots, slot_stride, slot_column,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WK: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    EXACT: tl.constexpr, STORED_BF16: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of the values of a head of one request, in chunks that begin at multiples of CHUNK."""
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + request)
    stop = tl.load(stops + request)
    if stop <= start:
        return
    PARTS: tl.constexpr = (DV + BLOCK - 1) // BLOCK
    head = tl.program_id(1) // PARTS
    lane = tl.program_id(1) % PARTS * BLOCK + tl.arange(0, BLOCK)
    i, number = tl.arange(0, CHUNK), tl.arange(0, WK)
    live, real = lane < DV, number < DK
    cell = real[:, None] & live[None, :]
    at = (head * DK + number)[:, None] * DV + lane[None, :]
    states += tl.load(slots + request * slot_stride + slot_column).to(tl.int64) * state_page
    state = tl.load(states + at, mask=cell & (start > 0), other=0.0).to(tl.float32)
    first_row = tl.load(first_rows + request).to(tl.int64)
    powers += head * (CHUNK + 1)
    since = i[:, None] - i[None, :]
    between = tl.load(powers + tl.maximum(since, 0), mask=since >= 0, other=0.0)
    passed = tl.load(powers + i + 1)
    for chunk in range(start // CHUNK, (stop - 1) // CHUNK + 1):
        first = tl.maximum(start, chunk * CHUNK)
        count = tl.minimum(stop, (chunk + 1) * CHUNK) - first
        is_row = i < count
        row = first_row + first - start
        own = x + row * x_stride
        ahead = i[:, None] * x_stride
        is_there, is_value = is_row[:, None] & real[None, :], is_row[:, None] & live[None, :]
        q = _operand(tl.load(own + head * DK + ahead + number[None, :], mask=is_there, other=0.0), EXACT)
        k = _operand(tl.load(own + (HEADS + head) * DK + ahead + number[None, :], mask=is_there, other=0.0), EXACT)
        v = tl.load(own + 2 * HEADS * DK + head * DV + ahead + lane[None, :], mask=is_value, other=0.0)
        left = tl.load(powers + tl.maximum(count - 1 - i, 0))
        score = tl.dot(q, tl.trans(k), input_precision=_PRECISION) * between
        y = tl.dot(q, _operand(state, EXACT), input_precision=_PRECISION) * passed[:, None]
        y = tl.dot(_operand(score, EXACT), _operand(v, EXACT), y, input_precision=_PRECISION)
        tl.store(out + (row * HEADS + head) * DV + i[:, None] * (HEADS * DV) + lane[None, :], y, mask=is_value)
        taken = _operand(v.to(tl.float32) * left[:, None], EXACT)
        state = tl.dot(tl.trans(k), taken, state * tl.load(powers + count), input_precision=_PRECISION)
        state = rounded(state, STORED_BF16)
    store_as(states + at, state, cell)


@triton.jit
def activate(
    x, x_stride, out, owners, INNER: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, IS_BF16: tl.constexpr
):  # fmt: skip
    """BLOCK columns of a row; rows of padding are zeros."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    live = inside & (tl.load(owners + row) >= 0)
    value = activated(tl.load(x + row * x_stride + column, mask=live, other=0.0).to(tl.float32), ACTIVATION)
    store_as(out + row * INNER + column, rounded(value, IS_BF16), inside)


@triton.jit
def gate_normed(
    y, gate, gate_stride, weight, out, owners, eps, INNER: tl.constexpr, W: tl.constexpr, IS_BF16: tl.constexpr
):  # fmt: skip
    """A row, normed and rounded, times the sigmoid of its gate; rows of padding are zeros."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, W)[None, :]
    inside = column < INNER
    live = inside & (tl.load(owners + row) >= 0)
    value = tl.load(y + row * INNER + column, mask=live, other=0.0)
    value = rounded(normed(value, eps, INNER) * tl.load(weight + column, mask=inside, other=0.0), IS_BF16)
    opening = tl.load(gate + row * gate_stride + column, mask=live, other=0.0).to(tl.float32)
    store_as(out + row * INNER + column, rounded(value / (1.0 + tl.exp(-opening)), IS_BF16), inside)
