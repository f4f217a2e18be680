# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Triton kernels of the gated delta rule; `triton.py` calls them and says what each argument is.

    walk         the rows of a request, one after another: a head's state over some columns of values stays in registers
    solve        a chunk of a head: its triangular system, and how its queries weigh its rows
    take_chunks  the chunks of a request, one after another, from what `solve` found: products alone

x is [queries of all groups | keys of all groups | values of all heads]; queries and keys are of any length. A chunk is CHUNK
positions that begin at a multiple of CHUNK, or those of them that the step has.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.chunks_kernels import chunk_of
from lamina.ops.quantise.kernels import rounded
from lamina.ops.rope_norm.kernels import store_as
from lamina.ops.ssm.kernels import softplus

#: of products, on tensor cores. Operands are fp32: with bf16 ones Triton 3.6 gave wrong results on sm_90 from 64 dims on
_PRECISION = tl.constexpr("tf32x3")
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


@triton.jit
def _twice(inverse, system, pair, SIZE: tl.constexpr):
    """Of blocks of SIZE on the diagonal the inverses M -> of blocks of twice the size, M - M L M. L: what is between two."""
    between = tl.where((pair >= SIZE) & (pair < 2 * SIZE), system, 0.0)
    return inverse - tl.dot(inverse, tl.dot(between, inverse, input_precision=_PRECISION), input_precision=_PRECISION)


@triton.jit(do_not_specialize=["num_requests"])
def solve(
    x, x_stride, learns, learns_stride, steps, steps_stride, step_bias, decay, solved, scores, factors,
    starts, stops, first_rows, num_requests, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, WK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk of a head. Of each of its rows, in the order of columns j of the chunk's rows:

    solved   [CHUNK] (I + A)^-1 * learns, of which the values less what the state has at their keys make the new ones.
    scores   [CHUNK] of the new values.
    factors  [4] of what the state before gives to the row's key, of what it gives to the row's query, of what the state takes
             in of the row's key, and of the state before in the one after.
    """
    owner, count, row = chunk_of(tl.program_id(0), starts, stops, first_rows, num_requests, CHUNK)
    if owner < 0:
        return
    head = tl.program_id(1)
    group = head // (HEADS // GROUPS)
    i, j, number = tl.arange(0, CHUNK), tl.arange(0, CHUNK), tl.arange(0, WK)
    is_row = i < count
    learns += row * learns_stride + head
    steps += row * steps_stride + head
    step = tl.load(steps + i * steps_stride, mask=is_row, other=0.0).to(tl.float32)
    forgets = tl.where(is_row, softplus(step + tl.load(step_bias + head)) * tl.load(decay + head), 0.0)
    learn = tl.load(learns + i * learns_stride, mask=is_row, other=0.0).to(tl.float32)
    learn = tl.where(is_row, 1.0 / (1.0 + tl.exp(-learn)), 0.0)
    x += row * x_stride + group * DK
    at = i[:, None] * x_stride + number[None, :]
    is_there = is_row[:, None] & (number < DK)[None, :]
    q = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
    k = tl.load(x + GROUPS * DK + at, mask=is_there, other=0.0).to(tl.float32)
    over_q = _over_length(tl.sum(q * q, 1)) * scale
    over_k = _over_length(tl.sum(k * k, 1))
    by_key = tl.dot(k, tl.trans(k), input_precision=_PRECISION) * over_k[:, None] * over_k[None, :]
    by_query = tl.dot(q, tl.trans(k), input_precision=_PRECISION) * over_q[:, None] * over_k[None, :]
    sums = tl.cumsum(forgets.to(tl.float64), 0)  # differences follow, of a number's two halves
    total = tl.sum(forgets.to(tl.float64), 0)
    high = sums.to(tl.float32)
    low = (sums - high.to(tl.float64)).to(tl.float32)
    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    between = tl.exp(tl.where(i[:, None] >= j[None, :], between, -float("inf")))
    place = row * HEADS + head
    to = i[:, None] * (HEADS * CHUNK) + j[None, :]
    store_as(scores + place * CHUNK + to, between * by_query, is_row[:, None])
    system = tl.where(i[:, None] > j[None, :], between * by_key * learn[:, None], 0.0)
    pair = i[:, None] ^ j[None, :]
    inverse = tl.where(pair == 0, 1.0, tl.where(pair == 1, -system, 0.0))
    inverse = _twice(inverse, system, pair, 2)
    inverse = _twice(inverse, system, pair, 4)
    inverse = _twice(inverse, system, pair, 8)
    inverse = _twice(inverse, system, pair, 16)
    inverse = _twice(inverse, system, pair, 32)
    store_as(solved + place * CHUNK + to, inverse * learn[None, :], is_row[:, None])
    passed, left = tl.exp(high), tl.exp((total - sums).to(tl.float32))
    factors += place * 4 + i * (HEADS * 4)
    tl.store(factors, passed * over_k, mask=is_row)
    tl.store(factors + 1, passed * over_q, mask=is_row)
    tl.store(factors + 2, left * over_k, mask=is_row)
    tl.store(factors + 3, tl.exp(total.to(tl.float32)) + tl.zeros((CHUNK,), tl.float32), mask=is_row)


@triton.jit(do_not_specialize=["slot_column"])
def take_chunks(
    x, x_stride, solved, scores, factors, out, states, state_page, starts, stops, first_rows, slots, slot_stride, slot_column,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WK: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, STORED_BF16: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of the values of a head of one request."""
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + request)
    stop = tl.load(stops + request)
    if stop <= start:
        return
    PARTS: tl.constexpr = (DV + BLOCK - 1) // BLOCK
    head = tl.program_id(1) // PARTS
    group = head // (HEADS // GROUPS)
    lane = tl.program_id(1) % PARTS * BLOCK + tl.arange(0, BLOCK)
    i, number = tl.arange(0, CHUNK), tl.arange(0, WK)
    live, real = lane < DV, number < DK
    cell = real[:, None] & live[None, :]
    at = (head * DK + number)[:, None] * DV + lane[None, :]
    states += tl.load(slots + request * slot_stride + slot_column).to(tl.int64) * state_page
    state = tl.load(states + at, mask=cell & (start > 0), other=0.0).to(tl.float32)
    first_row = tl.load(first_rows + request).to(tl.int64)
    chunk = start // CHUNK
    while chunk * CHUNK < stop:
        first = tl.maximum(start, chunk * CHUNK)
        count = tl.minimum(stop, (chunk + 1) * CHUNK) - first
        is_row = i < count
        row = first_row + first - start
        own = x + row * x_stride
        ahead = i[:, None] * x_stride
        is_key, is_value = is_row[:, None] & real[None, :], is_row[:, None] & live[None, :]
        q = tl.load(own + group * DK + ahead + number[None, :], mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(own + (GROUPS + group) * DK + ahead + number[None, :], mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(own + 2 * GROUPS * DK + head * DV + ahead + lane[None, :], mask=is_value, other=0.0).to(tl.float32)
        place = row * HEADS + head
        to = i[:, None] * (HEADS * CHUNK) + i[None, :]
        inverse = tl.load(solved + place * CHUNK + to, mask=is_row[:, None], other=0.0)
        score = tl.load(scores + place * CHUNK + to, mask=is_row[:, None], other=0.0)
        of_row = factors + place * 4 + i * (HEADS * 4)
        by_key = tl.load(of_row, mask=is_row, other=0.0)
        by_query = tl.load(of_row + 1, mask=is_row, other=0.0)
        taken = tl.load(of_row + 2, mask=is_row, other=0.0)
        kept = tl.load(factors + place * 4 + 3)
        v -= tl.dot(k, state, input_precision=_PRECISION) * by_key[:, None]
        new = tl.dot(inverse, v, input_precision=_PRECISION)
        y = tl.dot(q, state, input_precision=_PRECISION) * by_query[:, None]
        y = tl.dot(score, new, y, input_precision=_PRECISION)
        tl.store(out + place * DV + i[:, None] * (HEADS * DV) + lane[None, :], y, mask=is_value)
        new = new * taken[:, None]
        state = rounded(tl.dot(tl.trans(k), new, state * kept, input_precision=_PRECISION), STORED_BF16)
        chunk += 1
    store_as(states + at, state, cell)
