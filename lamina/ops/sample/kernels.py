# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Triton kernels of sampling: edits and peaks, log-probabilities, and what the kernels of `draw/` share with them. `triton.py`
calls them and says what each buffer is; `batch.py` has the words of a record.

A row is cut into chunks of CHUNK tokens, one program each, and put together again in the order of the chunks: no sum's order
depends on another row. Logits are ordered by integer keys and, among equals, by token id.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.sample import batch

WORDS = tl.constexpr(batch.WORDS)
TEMPERATURE, TOP_P, MIN_P = tl.constexpr(batch.TEMPERATURE), tl.constexpr(batch.TOP_P), tl.constexpr(batch.MIN_P)
UNIFORM, SEED, CHILD = tl.constexpr(batch.UNIFORM), tl.constexpr(batch.SEED), tl.constexpr(batch.CHILD)
POSITION, TOP_K = tl.constexpr(batch.POSITION), tl.constexpr(batch.TOP_K)
REPETITION, PRESENCE = tl.constexpr(batch.REPETITION), tl.constexpr(batch.PRESENCE)
FREQUENCY, STATE_ROW = tl.constexpr(batch.FREQUENCY), tl.constexpr(batch.STATE_ROW)
EDIT_START, EDIT_STOP, FLAGS = tl.constexpr(batch.EDIT_START), tl.constexpr(batch.EDIT_STOP), tl.constexpr(batch.FLAGS)
MASK = tl.constexpr(batch.MASK)
DRAWN, FILTERED, EDITED = tl.constexpr(batch.IS_DRAWN), tl.constexpr(batch.IS_FILTERED), tl.constexpr(batch.IS_EDITED)
SEEDED, NEGATIVE = tl.constexpr(batch.IS_SEEDED), tl.constexpr(batch.IS_NEGATIVE)
#: keys of +inf and -inf, an id that no token has, what is less than every packed peak
INF_KEY, LOWEST = tl.constexpr(0x7F800000), tl.constexpr(-0x7F800001)
NO_ID = tl.constexpr(0x7FFFFFFF)
NOTHING = tl.constexpr(-(1 << 63))
_NO_EDIT = tl.constexpr(0x7FFFFFFF << 32)


@triton.jit
def key_of(x):
    """int32 in the order of x, which is no NaN; the two zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed_of(x, ids, live):
    """int64 whose largest is the largest x and of equals the lowest id; a NaN is -inf."""
    key = key_of(tl.where(x == x, x, -float("inf")))
    return tl.where(live, (key.to(tl.int64) << 32) | (ids ^ NO_ID).to(tl.int64), NOTHING)


@triton.jit
def id_of(packed):
    return (packed & 0x7FFFFFFF).to(tl.int32) ^ NO_ID


@triton.jit
def real(record, WORD: tl.constexpr):
    return tl.load(record + WORD).to(tl.float64, bitcast=True)


@triton.jit
def _edit(x, ids, record, words, state, VOCAB: tl.constexpr, CHUNK: tl.constexpr, STATE: tl.constexpr):
    """Bias and bans (a ban is a bias of -inf), penalties, then the mask; `words` holds the row's edits by ascending id."""
    first_id = tl.min(ids, 0)
    low = tl.load(record + EDIT_START)
    stop = tl.load(record + EDIT_STOP)
    high = stop
    while low < high:  # the first edit of this chunk
        middle = (low + high) // 2
        is_before = (tl.load(words + middle) >> 32) < first_id
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    word = tl.load(words + low, mask=low < stop, other=_NO_EDIT)
    while (word >> 32) < first_id + CHUNK:
        bias = (word & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        x = tl.where(ids == (word >> 32), x + bias, x)
        low += 1
        word = tl.load(words + low, mask=low < stop, other=_NO_EDIT)
    if STATE:
        state_row = tl.load(record + STATE_ROW)
        if state_row >= 0:
            repetition = real(record, REPETITION).to(tl.float32)
            seen = tl.load(state + state_row * VOCAB + ids, mask=ids < VOCAB, other=0)
            count = seen & 0x7FFFFFFF
            scaled = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
            x = tl.where(seen != 0, scaled, x)
            x = x - real(record, FREQUENCY).to(tl.float32) * count.to(tl.float32)
            x = x - tl.where(count > 0, real(record, PRESENCE).to(tl.float32), 0.0)
    mask = tl.load(record + MASK)
    if mask > 0:
        bits = tl.load(words + mask + (ids >> 6), mask=ids < VOCAB, other=0)
        x = tl.where(((bits >> (ids & 63).to(tl.int64)) & 1) != 0, x, -float("inf"))
    return x


@triton.jit
def peaks(
    logits, stride, edited, words, state, packed, faults,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EDITS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """The packed peak of each chunk, and whether it holds what no row may; edited logits of the rows that are edited."""
    chunk = tl.program_id(0) % CHUNKS
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    live = ids < VOCAB
    x = tl.load(logits + row * stride + ids, mask=live, other=-float("inf"))
    fault = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    if EDITS:
        record = words + row * WORDS
        if (tl.load(record + FLAGS) & EDITED) != 0:
            x = _edit(x, ids, record, words, state, VOCAB, CHUNK, STATE)
            fault = tl.maximum(fault, tl.max((x != x).to(tl.int32), 0))
            tl.store(edited + row * VOCAB + ids, x, mask=live)
    tl.store(packed + row * CHUNKS + chunk, tl.max(packed_of(x, ids, live), 0))
    tl.store(faults + row * CHUNKS + chunk, fault)


@triton.jit
def row_peak(packed, row, CHUNKS: tl.constexpr, CHUNKS2: tl.constexpr):
    chunks = tl.arange(0, CHUNKS2)
    return tl.max(tl.load(packed + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=NOTHING), 0)


@triton.jit
def load_row(logits, stride, edited, row, flags, ids, live, VOCAB: tl.constexpr, EDITS: tl.constexpr):
    """Logits of a row as they are drawn from; -inf where not live."""
    lowest = -float("inf")
    if EDITS:
        is_edited = (flags & EDITED) != 0
        x = tl.load(logits + row * stride + ids, mask=live & (is_edited == 0), other=lowest)
        other = tl.load(edited + row * VOCAB + ids, mask=live & is_edited, other=lowest)
        x = tl.where(is_edited, other, x)
    else:
        x = tl.load(logits + row * stride + ids, mask=live, other=lowest)
    return x


@triton.jit
def weights_of(x, peak, temperature, min_p):
    """fp64, 1 at the peak."""
    weights = tl.exp((x.to(tl.float64) - peak) / temperature)
    return tl.where(weights >= min_p, weights, 0.0)


@triton.jit
def _times(a, b):
    """Low and high half of a product of two uint64."""
    a_low, a_high = a & 0xFFFFFFFF, a >> 32
    b_low, b_high = b & 0xFFFFFFFF, b >> 32
    first = a_low * b_low
    middle = a_high * b_low + (first >> 32)
    other = a_low * b_high + (middle & 0xFFFFFFFF)
    return (other << 32) | (first & 0xFFFFFFFF), a_high * b_high + (middle >> 32) + (other >> 32)


@triton.jit
def uniform_of(record, flags):
    """The row's number in (0, 1): as given, or as `draws.uniform` defines it (Philox 4x64, 10 rounds)."""
    key0 = tl.load(record + SEED).to(tl.uint64)
    key1 = ((flags & NEGATIVE) != 0).to(tl.uint64)
    c1 = tl.load(record + POSITION).to(tl.uint64)
    c2 = tl.load(record + CHILD).to(tl.uint64)
    c0 = key1 * 0 + 1
    c3 = key1 * 0
    for _ in tl.static_range(10):
        low0, high0 = _times(c0, tl.full((), 0xD2E7470EE14C6C93, tl.uint64))
        low1, high1 = _times(c2, tl.full((), 0xCA5A826395121157, tl.uint64))
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 += tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
        key1 += tl.full((), 0xBB67AE8584CAA73B, tl.uint64)
    drawn = ((c0 >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return tl.where((flags & SEEDED) != 0, drawn, real(record, UNIFORM))


@triton.jit
def partition(logits, stride, rows, tops, sums, VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Largest logit of each chunk, and the sum of its exponentials beside it."""
    chunk = tl.program_id(0) % CHUNKS
    place = (tl.program_id(0) // CHUNKS).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    row = tl.load(rows + place).to(tl.int64)
    x = tl.load(logits + row * stride + ids, mask=ids < VOCAB, other=-float("inf"))
    top = tl.max(x, 0)
    shifted = tl.where(x == -float("inf"), x, x - top)
    tl.store(tops + place * CHUNKS + chunk, top)
    tl.store(sums + place * CHUNKS + chunk, tl.sum(tl.exp(shifted.to(tl.float64)), 0))


@triton.jit
def _norm(tops, sums, place, CHUNKS: tl.constexpr, CHUNKS2: tl.constexpr):
    """The row's largest logit and, in fp32, the logarithm of the sum of exponentials beside it."""
    chunks = tl.arange(0, CHUNKS2)
    top = tl.load(tops + place * CHUNKS + chunks, mask=chunks < CHUNKS, other=-float("inf"))
    part = tl.load(sums + place * CHUNKS + chunks, mask=chunks < CHUNKS, other=0.0)
    peak = tl.max(top, 0)
    shifted = tl.where(top == -float("inf"), top, top - peak)
    return peak, tl.log(tl.sum(part * tl.exp(shifted.to(tl.float64)), 0)).to(tl.float32)


@triton.jit
def rank(
    logits, stride, rows, tokens, tops, sums, above, best,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS2: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """In each chunk: how many log-probabilities are larger than the token's, and the packed K largest."""
    chunk = tl.program_id(0) % CHUNKS
    place = (tl.program_id(0) // CHUNKS).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    live = ids < VOCAB
    base = logits + tl.load(rows + place).to(tl.int64) * stride
    peak, log_total = _norm(tops, sums, place, CHUNKS, CHUNKS2)
    x = (tl.load(base + ids, mask=live, other=-float("inf")) - peak) - log_total
    own = (tl.load(base + tl.load(tokens + place)) - peak) - log_total
    tl.store(above + place * CHUNKS + chunk, tl.sum((live & (x > own)).to(tl.int32), 0))
    packed = packed_of(x, ids, live)
    for one in range(K):
        most = tl.max(packed, 0)
        tl.store(best + (place * CHUNKS + chunk) * K + one, most)
        packed = tl.where(packed == most, NOTHING, packed)


@triton.jit
def report(
    logits, stride, rows, tokens, tops, sums, above, best, logprobs, ranks, top_ids, top_logprobs,
    CHUNKS: tl.constexpr, CHUNKS2: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The chunks of each row put together."""
    place = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS2)
    peak, log_total = _norm(tops, sums, place, CHUNKS, CHUNKS2)
    own = tl.load(logits + tl.load(rows + place).to(tl.int64) * stride + tl.load(tokens + place))
    tl.store(logprobs + place, (own - peak) - log_total)
    larger = tl.load(above + place * CHUNKS + chunks, mask=chunks < CHUNKS, other=0)
    tl.store(ranks + place, 1 + tl.sum(larger, 0))
    if K > 0:
        at = tl.arange(0, SIZE)
        packed = tl.load(best + place * (CHUNKS * K) + at, mask=at < CHUNKS * K, other=NOTHING)
        for one in range(K):
            most = tl.max(packed, 0)
            tl.store(top_ids + place * K + one, id_of(most))
            tl.store(top_logprobs + place * K + one, value_of((most >> 32).to(tl.int32)))
            packed = tl.where(packed == most, NOTHING, packed)
