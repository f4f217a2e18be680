# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Triton kernels of causal convolutions; `triton.py` calls them and says what each argument is.

Programs are (row, BLOCK channels). The sum of a row is of WIDTH products, oldest first, whatever else is in the step.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.quantise.kernels import rounded
from lamina.ops.rope_norm.kernels import store_as


@triton.jit(do_not_specialize=["slot_column"])
def convolve(
    x, x_stride, taps, bias, out, ring, ring_page, positions, owners, starts, valid_from, slots, slot_stride, slot_column,
    C: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr, ACTIVATES: tl.constexpr,
    IS_SINGLE: tl.constexpr, STORED_BF16: tl.constexpr,
):  # fmt: skip
    """Inputs of the step from x, earlier ones from the ring, none before a request's first. A request's only row is kept."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < C
    owner = tl.load(owners + row)
    if owner < 0:
        store_as(out + row * C + column, tl.zeros((BLOCK,), tl.float32), inside)
        return
    position = tl.load(positions + row)
    start = tl.load(starts + owner)
    first = tl.load(valid_from + owner)
    page = tl.load(slots + owner.to(tl.int64) * slot_stride + slot_column).to(tl.int64)
    ring += page * ring_page
    total = tl.zeros((BLOCK,), tl.float32)
    own = total
    for tap in tl.static_range(WIDTH):
        at = position - (WIDTH - 1 - tap)
        is_own = at >= start
        own = tl.load(x + (row - (WIDTH - 1 - tap)) * x_stride + column, mask=inside & is_own, other=0.0).to(tl.float32)
        place = (tl.maximum(at, 0) % RING).to(tl.int64)
        is_past = (at < start) & (at >= first)
        past = tl.load(ring + place * C + column, mask=inside & is_past, other=0.0).to(tl.float32)
        own = rounded(own, STORED_BF16)
        total += tl.where(is_own, own, past) * tl.load(taps + tap * C + column, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0)
    if ACTIVATES:
        total = total / (1 + tl.exp(-total))
    store_as(out + row * C + column, total, inside)
    if IS_SINGLE:  # the last tap's: no row of the ring that is read lies where it goes
        store_as(ring + (position % RING).to(tl.int64) * C + column, own, inside)


@triton.jit(do_not_specialize=["slot_column"])
def keep(
    x, x_stride, ring, ring_page, positions, owners, stops, slots, slot_stride, slot_column,
    C: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row to its ring, if it is one of the last RING of its request."""
    row = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + row)
    if owner < 0:
        return
    position = tl.load(positions + row)
    if position < tl.load(stops + owner) - RING:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < C
    page = tl.load(slots + owner.to(tl.int64) * slot_stride + slot_column).to(tl.int64)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    store_as(ring + page * ring_page + (position % RING).to(tl.int64) * C + column, value, inside)
