# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Triton kernels of the draw: weigh, refine, shortlist, draw. Every filter keeps a head of one order (key, then token id), which
is (border, quota): the tokens above a key, and the first `quota` of those that have it.

weigh counts the tokens, and adds up their weights, in BINS by their distance from the peak: 13 of one nat, 3 that go down to 56.
Where the head down to the border's bin is longer than CAP, refine does so again in FINE parts of this bin. shortlist lists ids,
ascending: of the whole head, or of the border's part alone if the head is still too long, or none; the plan of the row says
which. draw finds the border in the list by bisection over keys, then the token. Without a list it walks over the whole row, which
is right and slow: more than CAP tokens within a part (1 / FINE nat), or a head of more than CAP under both top_k and top_p.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.sample.kernels import (
    DRAWN,
    FILTERED,
    FLAGS,
    INF_KEY,
    LOWEST,
    MIN_P,
    NO_ID,
    STATE_ROW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WORDS,
    id_of,
    key_of,
    load_row,
    real,
    row_peak,
    uniform_of,
    value_of,
    weights_of,
)

#: words of a plan: ids in the list (-1: there is none), tokens in the bins above it, whether it is the border's part alone
_SIZE, _ABOVE, _IS_BORDER, _PLAN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
#: 2^-80 of the peak's weight: all lighter tokens together stay below the least number that is drawn, 2^-53. No list has them.
_LIGHT = tl.constexpr(2.0**-80)


@triton.jit
def _bins(x, peak, temperature, BINS: tl.constexpr, FINE: tl.constexpr):
    """Bin of each logit, times FINE, and its part, by its distance from the peak alone: nowhere smaller for a smaller logit."""
    distance = peak.to(tl.float32) - x
    nats = tl.where(distance > 0.0, distance * (1.0 / temperature).to(tl.float32), 0.0)
    steps = tl.where(nats < 13.0, nats, 13.0)
    steps += tl.where(nats < 24.0, tl.maximum(nats - 13.0, 0.0) * (1 / 11), 1.0)
    steps += tl.where(nats < 40.0, tl.maximum(nats - 24.0, 0.0) * 0.0625, 1.0)
    steps += tl.where(nats < 56.0, tl.maximum(nats - 40.0, 0.0) * 0.0625, 1.0)
    return tl.minimum((steps * FINE).to(tl.int32), BINS * FINE - 1)


@triton.jit
def _weigh_bins(bins, weights, counts, masses, BINS: tl.constexpr):
    """Stores number and weight of what is not light, by bin."""
    number = tl.arange(0, BINS)
    count = tl.zeros((BINS,), tl.int32)
    mass = tl.zeros((BINS,), tl.float64)
    for one in tl.static_range(BINS):
        own = (bins == one) & (weights > _LIGHT)
        count = tl.where(number == one, tl.sum(own.to(tl.int32), 0), count)
        mass = tl.where(number == one, tl.sum(tl.where(own, weights, 0.0), 0), mass)
    tl.store(counts + number, count)
    tl.store(masses + number, mass)


@triton.jit
def _border_bin(
    counts, masses, row, record, above, mass_above, needed,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS2: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The bin with the border; number and weight of the tokens above it, number of those in it."""
    chunks, number = tl.arange(0, CHUNKS2), tl.arange(0, BINS)
    at = (row * CHUNKS + chunks)[:, None] * BINS + number[None, :]
    live = (chunks < CHUNKS)[:, None] & (number >= 0)[None, :]
    count = tl.sum(tl.load(counts + at, mask=live, other=0), 0)
    mass = tl.sum(tl.load(masses + at, mask=live, other=0.0), 0)
    top_k = tl.load(record + TOP_K)
    has_top_k = (top_k > 0) & (top_k < VOCAB)
    is_enough = tl.where(has_top_k, above + tl.cumsum(count, 0) >= top_k, mass_above + tl.cumsum(mass, 0) >= needed)
    last = tl.min(tl.where(is_enough, number, BINS - 1), 0)
    above += tl.sum(tl.where(number < last, count, 0), 0)
    mass_above += tl.sum(tl.where(number < last, mass, 0.0), 0)
    return last, above, mass_above, tl.sum(tl.where(number == last, count, 0), 0)


@triton.jit
def _before(counts, row, chunk, first, last, CHUNKS: tl.constexpr, CHUNKS2: tl.constexpr, BINS: tl.constexpr):
    """Number of tokens of the bins from first to last in earlier chunks."""
    chunks, number = tl.arange(0, CHUNKS2), tl.arange(0, BINS)
    at = (row * CHUNKS + chunks)[:, None] * BINS + number[None, :]
    live = (chunks < chunk)[:, None] & ((number >= first) & (number <= last))[None, :]
    return tl.sum(tl.sum(tl.load(counts + at, mask=live, other=0), 1), 0)


@triton.jit
def _needed(sums, row, record, CHUNKS: tl.constexpr, CHUNKS2: tl.constexpr):
    """The weight that a nucleus of the whole row reaches."""
    chunks = tl.arange(0, CHUNKS2)
    return real(record, TOP_P) * tl.sum(tl.load(sums + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=0.0), 0)


@triton.jit
def weigh(
    logits, stride, edited, words, packed, sums, counts, masses,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS2: tl.constexpr, BINS: tl.constexpr,
    FINE: tl.constexpr, EDITS: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    """Sum of the weights of each chunk of the rows that are drawn; of rows with top_k or top_p also by bin."""
    chunk = tl.program_id(0) % CHUNKS
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    record = words + row * WORDS
    flags = tl.load(record + FLAGS)
    if (flags & DRAWN) == 0:
        return
    peak = value_of((row_peak(packed, row, CHUNKS, CHUNKS2) >> 32).to(tl.int32)).to(tl.float64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_row(logits, stride, edited, row, flags, ids, ids < VOCAB, VOCAB, EDITS)
    temperature = real(record, TEMPERATURE)
    weights = weights_of(x, peak, temperature, real(record, MIN_P))
    place = row * CHUNKS + chunk
    tl.store(sums + place, tl.sum(weights, 0))
    if FILTERS:
        bins = tl.where((flags & FILTERED) != 0, _bins(x, peak, temperature, BINS, FINE) // FINE, BINS)
        _weigh_bins(bins, weights, counts + place * BINS, masses + place * BINS, BINS)


@triton.jit
def refine(
    logits, stride, edited, words, packed, sums, counts, masses, fine_counts, fine_masses,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS2: tl.constexpr, BINS: tl.constexpr,
    FINE: tl.constexpr, CAP: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """As weigh, by the parts of the bin with the border, where the head is long."""
    chunk = tl.program_id(0) % CHUNKS
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    record = words + row * WORDS
    flags = tl.load(record + FLAGS)
    if (flags & FILTERED) == 0:
        return
    needed = _needed(sums, row, record, CHUNKS, CHUNKS2)
    last, above, _, own = _border_bin(counts, masses, row, record, 0, 0.0, needed, VOCAB, CHUNKS, CHUNKS2, BINS)
    if above + own > CAP:
        peak = value_of((row_peak(packed, row, CHUNKS, CHUNKS2) >> 32).to(tl.int32)).to(tl.float64)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = load_row(logits, stride, edited, row, flags, ids, ids < VOCAB, VOCAB, EDITS)
        temperature = real(record, TEMPERATURE)
        weights = weights_of(x, peak, temperature, real(record, MIN_P))
        bins = _bins(x, peak, temperature, BINS, FINE) - last * FINE  # parts of other bins are outside
        place = (row * CHUNKS + chunk) * FINE
        _weigh_bins(bins, weights, fine_counts + place, fine_masses + place, FINE)


@triton.jit
def shortlist(
    logits, stride, edited, words, packed, sums, counts, masses, fine_counts, fine_masses, heads, listed, plans,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS2: tl.constexpr, BINS: tl.constexpr,
    FINE: tl.constexpr, CAP: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """The plan of each row and its list; where only the border's part is listed, also the weight of each chunk above it."""
    chunk = tl.program_id(0) % CHUNKS
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    record = words + row * WORDS
    flags = tl.load(record + FLAGS)
    if (flags & FILTERED) == 0:
        return
    needed = _needed(sums, row, record, CHUNKS, CHUNKS2)
    last, above, mass_above, own = _border_bin(counts, masses, row, record, 0, 0.0, needed, VOCAB, CHUNKS, CHUNKS2, BINS)
    before = _before(counts, row, chunk, 0, last - 1, CHUNKS, CHUNKS2, BINS)
    size = above + own
    first = last * 0
    if size > CAP:
        part, above, mass_above, own = _border_bin(
            fine_counts, fine_masses, row, record, above, mass_above, needed, VOCAB, CHUNKS, CHUNKS2, FINE
        )
        last = last * FINE + part
        size = above + own
        top_k = tl.load(record + TOP_K)
        has_both = (top_k > 0) & (top_k < VOCAB) & (real(record, TOP_P) < 1.0)
        if size > CAP:
            before = _before(fine_counts, row, chunk, part, part, CHUNKS, CHUNKS2, FINE)
            first = last
            size = tl.where((own > CAP) | has_both, -1, own)
        else:
            before += _before(fine_counts, row, chunk, 0, part, CHUNKS, CHUNKS2, FINE)
    else:
        before += _before(counts, row, chunk, last, last, CHUNKS, CHUNKS2, BINS)
        last = last * FINE + FINE - 1
    if chunk == 0:
        plan = plans + row * _PLAN
        tl.store(plan + _SIZE, size)
        tl.store(plan + _ABOVE, above)
        tl.store(plan + _IS_BORDER, (first > 0).to(tl.int32))
    if size >= 0:
        peak = value_of((row_peak(packed, row, CHUNKS, CHUNKS2) >> 32).to(tl.int32)).to(tl.float64)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = load_row(logits, stride, edited, row, flags, ids, ids < VOCAB, VOCAB, EDITS)
        temperature = real(record, TEMPERATURE)
        weights = weights_of(x, peak, temperature, real(record, MIN_P))
        bins = _bins(x, peak, temperature, BINS, FINE)
        is_listed = (weights > _LIGHT) & (bins >= first) & (bins <= last)
        place = before + tl.cumsum(is_listed.to(tl.int32), 0) - 1
        tl.store(listed + row * CAP + place, ids, mask=is_listed & (place < CAP))
        tl.store(heads + row * CHUNKS + chunk, tl.sum(tl.where(bins < first, weights, 0.0), 0))


@triton.jit
def _pick(weights, ids, before, target):
    """The first id whose cumulative weight exceeds the target (no id: NO_ID), and the last that has any weight (-1)."""
    reached = before + tl.cumsum(weights, 0)
    first = tl.min(tl.where((reached > target) & (weights > 0.0), ids, NO_ID), 0)
    return first, tl.max(tl.where(weights > 0.0, ids, -1), 0)


@triton.jit
def _kept(key, border, quota, seen):
    """Whether each key is in the head; `seen` of the border's equals came before."""
    is_equal = key == border
    rank = seen + tl.cumsum(is_equal.to(tl.int32), 0)
    return (key > border) | (is_equal & (rank <= quota))


@triton.jit
def _quota(needed, above, each):
    """How many equals of weight `each` it takes to bring `above` to `needed`: at least one."""
    many = tl.where(each > 0.0, (needed - above) / each, 2147483520.0)
    quota = tl.maximum(tl.minimum(tl.ceil(many), 2147483520.0), 1.0)
    quota = tl.where((quota > 1.0) & (above + (quota - 1.0) * each >= needed), quota - 1.0, quota)
    quota = tl.where(above + quota * each < needed, quota + 1.0, quota)
    return quota.to(tl.int32)


@triton.jit
def _search(key, values, low, high, needed):
    """The largest key such that the values from it upwards reach `needed`; `low` if none does."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        is_enough = tl.sum(tl.where(key >= middle.to(tl.int32), values, 0.0), 0) >= needed
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _search_row(
    logits, stride, edited, row, flags, peak, temperature, min_p, above, low, high, needed,
    VOCAB: tl.constexpr, TILE: tl.constexpr, EDITS: tl.constexpr, BY_COUNT: tl.constexpr,
):  # fmt: skip
    """_search over the keys above `above` of a whole row, seven pivots a pass."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    lane = tl.arange(0, 8)
    while low < high:
        step = (high - low + 8) // 8
        reached = tl.zeros((8,), tl.float64)
        for first in range(0, VOCAB, TILE):
            ids = first + tl.arange(0, TILE)
            x = load_row(logits, stride, edited, row, flags, ids, ids < VOCAB, VOCAB, EDITS)
            key = tl.where(ids < VOCAB, key_of(x), LOWEST - 1)
            if BY_COUNT:
                values = tl.full((TILE,), 1.0, tl.float64)
            else:
                values = tl.where(key > above, weights_of(x, peak, temperature, min_p), 0.0)
            for one in tl.static_range(1, 8):
                pivot = (low + one * step).to(tl.int32)
                reached += tl.where(lane == one, tl.sum(tl.where(key >= pivot, values, 0.0), 0), 0.0)
        pivots = low + lane * step
        best = tl.max(tl.where((lane == 0) | ((reached >= needed) & (pivots <= high)), lane, 0), 0)
        low = low + best * step
        high = tl.minimum(high, low + step - 1)
    return low.to(tl.int32)


@triton.jit
def _measure_row(
    logits, stride, edited, row, flags, peak, temperature, min_p, border,
    VOCAB: tl.constexpr, TILE: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """Number and weight of a row's tokens above `border`."""
    number = tl.zeros((), tl.int32)
    total = tl.zeros((), tl.float64)
    for first in range(0, VOCAB, TILE):
        ids = first + tl.arange(0, TILE)
        x = load_row(logits, stride, edited, row, flags, ids, ids < VOCAB, VOCAB, EDITS)
        is_above = (ids < VOCAB) & (key_of(x) > border)
        number += tl.sum(is_above.to(tl.int32), 0)
        total += tl.sum(tl.where(is_above, weights_of(x, peak, temperature, min_p), 0.0), 0)
    return number, total


@triton.jit
def _draw_listed(
    logits, stride, edited, row, flags, peak, temperature, min_p, top_k, top_p, uniform, total, listed, size,
    VOCAB: tl.constexpr, CAP: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """The token drawn from a list that holds every border; all of it in registers."""
    place = tl.arange(0, CAP)
    live = place < size
    ids = tl.load(listed + row * CAP + place, mask=live, other=0)
    x = load_row(logits, stride, edited, row, flags, ids, live, VOCAB, EDITS)
    weights = tl.where(live, weights_of(x, peak, temperature, min_p), 0.0)
    key = tl.where(live, key_of(x), LOWEST - 1)
    high = tl.max(key, 0)
    border = tl.min(tl.where(live, key, high), 0)
    quota = tl.full((), NO_ID, tl.int32)
    if (top_k > 0) & (top_k < size):
        border = _search(key, tl.where(live, 1.0, 0.0).to(tl.float64), border, high, top_k.to(tl.float64))
        quota = top_k.to(tl.int32) - tl.sum((key > border).to(tl.int32), 0)
    if top_p < 1.0:
        if (top_k > 0) & (top_k < VOCAB):  # the total is of what top_k keeps
            total = tl.sum(tl.where(_kept(key, border, quota, 0), weights, 0.0), 0)
        needed = top_p * total
        head = tl.where(_kept(key, border, quota, 0), weights, 0.0)
        nucleus = _search(key, head, border, high, needed)
        above = tl.sum(tl.where(key > nucleus, weights, 0.0), 0)
        fewer = _quota(needed, above, weights_of(value_of(nucleus), peak, temperature, min_p))
        quota = tl.where(nucleus == border, tl.minimum(quota, fewer), fewer)
        border = nucleus
    weights = tl.where(_kept(key, border, quota, 0), weights, 0.0)
    target = uniform * tl.max(tl.cumsum(weights, 0), 0)
    first, last = _pick(weights, ids, 0.0, target)
    return tl.where(first < NO_ID, first, last)


@triton.jit
def _draw_row(
    logits, stride, edited, row, flags, peak, high, temperature, min_p, top_k, top_p, uniform, total,
    VOCAB: tl.constexpr, TILE: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """The same for a row whose list would be too long, from memory."""
    border = tl.full((), LOWEST, tl.int32)
    quota = tl.full((), NO_ID, tl.int32)
    has_top_k = (top_k > 0) & (top_k < VOCAB)
    if has_top_k:
        border = _search_row(
            logits, stride, edited, row, flags, peak, temperature, min_p, border, border, high, top_k.to(tl.float64),
            VOCAB, TILE, EDITS, True,
        )  # fmt: skip
        number, above = _measure_row(
            logits, stride, edited, row, flags, peak, temperature, min_p, border, VOCAB, TILE, EDITS
        )  # fmt: skip
        quota = top_k.to(tl.int32) - number
        total = above + quota.to(tl.float64) * weights_of(value_of(border), peak, temperature, min_p)
    if top_p < 1.0:
        needed = top_p * total
        nucleus = _search_row(
            logits, stride, edited, row, flags, peak, temperature, min_p, border, border, high, needed,
            VOCAB, TILE, EDITS, False,
        )  # fmt: skip
        _, above = _measure_row(logits, stride, edited, row, flags, peak, temperature, min_p, nucleus, VOCAB, TILE, EDITS)
        fewer = _quota(needed, above, weights_of(value_of(nucleus), peak, temperature, min_p))
        quota = tl.where(nucleus == border, tl.minimum(quota, fewer), fewer)
        border = nucleus
    # Two walks in token order: the total, then the token.
    target = tl.full((), float("inf"), tl.float64)
    token = tl.full((), NO_ID, tl.int32)
    for is_second in range(2):
        reached = tl.zeros((), tl.float64)
        last = tl.full((), -1, tl.int32)
        seen = tl.zeros((), tl.int32)
        for first in range(0, VOCAB, TILE):
            ids = first + tl.arange(0, TILE)
            x = load_row(logits, stride, edited, row, flags, ids, ids < VOCAB, VOCAB, EDITS)
            key = tl.where(ids < VOCAB, key_of(x), LOWEST - 1)
            weights = tl.where(_kept(key, border, quota, seen), weights_of(x, peak, temperature, min_p), 0.0)
            one, other = _pick(weights, ids, reached, target)
            token = tl.minimum(token, one)
            last = tl.maximum(last, other)
            seen += tl.sum((key == border).to(tl.int32), 0)
            reached += tl.sum(weights, 0)
        if is_second == 0:
            target = uniform * reached
        else:
            token = tl.where(token < NO_ID, token, last)
    return token


@triton.jit
def _find_chunk(parts, uniform, CHUNKS2: tl.constexpr):
    """The chunk in which the cumulative weight exceeds the target; what it is before the chunk, and the target."""
    chunks = tl.arange(0, CHUNKS2)
    reached = tl.cumsum(parts, 0)
    target = uniform * tl.max(reached, 0)
    chunk = tl.min(tl.where((reached > target) & (parts > 0.0), chunks, CHUNKS2), 0)
    chunk = tl.where(chunk < CHUNKS2, chunk, tl.max(tl.where(parts > 0.0, chunks, 0), 0))
    return chunk, tl.sum(tl.where(chunks == chunk - 1, reached, 0.0), 0), target


@triton.jit
def _draw_chunk(
    logits, stride, edited, row, flags, peak, temperature, min_p, chunk, before, target, border, quota, seen,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """The token drawn, which is in this chunk."""
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_row(logits, stride, edited, row, flags, ids, ids < VOCAB, VOCAB, EDITS)
    weights = tl.where(_kept(key_of(x), border, quota, seen), weights_of(x, peak, temperature, min_p), 0.0)
    first, last = _pick(weights, ids, before, target)
    return tl.where(first < NO_ID, first, last)


@triton.jit
def _draw_border(
    logits, stride, edited, row, flags, peak, temperature, min_p, top_k, top_p, uniform, total, above, parts, listed, size,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS2: tl.constexpr, CAP: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """The token drawn where the list has the border and equals, and `parts` the weight of each chunk above the list."""
    place = tl.arange(0, CAP)
    live = place < size
    ids = tl.load(listed + row * CAP + place, mask=live, other=0)
    x = load_row(logits, stride, edited, row, flags, ids, live, VOCAB, EDITS)
    weights = tl.where(live, weights_of(x, peak, temperature, min_p), 0.0)
    key = tl.where(live, key_of(x), LOWEST - 1)
    high = tl.max(key, 0)
    border = tl.min(tl.where(live, key, high), 0)
    if top_p < 1.0:
        needed = top_p * total - tl.sum(parts, 0)
        border = _search(key, weights, border, high, needed)
        heavier = tl.sum(tl.where(key > border, weights, 0.0), 0)
        quota = _quota(needed, heavier, weights_of(value_of(border), peak, temperature, min_p))
    else:
        wanted = top_k.to(tl.int32) - above
        border = _search(key, tl.where(live, 1.0, 0.0).to(tl.float64), border, high, wanted.to(tl.float64))
        quota = wanted - tl.sum((key > border).to(tl.int32), 0)
    weights = tl.where(_kept(key, border, quota, 0), weights, 0.0)
    chunks = tl.arange(0, CHUNKS2)
    for one in range(CHUNKS):
        parts += tl.where(chunks == one, tl.sum(tl.where(ids // CHUNK == one, weights, 0.0), 0), 0.0)
    chunk, before, target = _find_chunk(parts, uniform, CHUNKS2)
    seen = tl.sum(((key == border) & (ids < chunk * CHUNK)).to(tl.int32), 0)
    return _draw_chunk(
        logits, stride, edited, row, flags, peak, temperature, min_p, chunk, before, target, border, quota, seen,
        VOCAB, CHUNK, EDITS,
    )  # fmt: skip


@triton.jit
def draw(
    logits, stride, edited, words, packed, faults, sums, heads, listed, plans, table_rows, last_tokens, state, tokens, is_bad,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS2: tl.constexpr, CAP: tl.constexpr,
    EDITS: tl.constexpr, DRAWS: tl.constexpr, FILTERS: tl.constexpr, ROWS: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Each row's token, 0 if the row is bad, to wherever it is needed."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS2)
    top = row_peak(packed, row, CHUNKS, CHUNKS2)
    high = (top >> 32).to(tl.int32)
    token = id_of(top)
    fault = tl.max(tl.load(faults + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=0), 0) != 0
    fault = fault | (high >= INF_KEY) | (high <= LOWEST)
    record = words + row * WORDS
    if DRAWS:
        flags = tl.load(record + FLAGS)
        if ((flags & DRAWN) != 0) & (fault == 0):
            peak = value_of(high).to(tl.float64)
            uniform = uniform_of(record, flags)
            temperature, min_p, top_p = real(record, TEMPERATURE), real(record, MIN_P), real(record, TOP_P)
            parts = tl.load(sums + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=0.0)
            drawn = token
            is_listed = False
            if FILTERS:
                is_listed = (flags & FILTERED) != 0
                if is_listed:
                    plan = plans + row * _PLAN
                    top_k, size, total = tl.load(record + TOP_K), tl.load(plan + _SIZE), tl.sum(parts, 0)
                    if size < 0:
                        drawn = _draw_row(
                            logits, stride, edited, row, flags, peak, high, temperature, min_p, top_k, top_p, uniform, total,
                            VOCAB, CAP // 2, EDITS,
                        )  # fmt: skip
                    elif tl.load(plan + _IS_BORDER) != 0:
                        above = tl.load(plan + _ABOVE)
                        parts = tl.load(heads + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=0.0)
                        drawn = _draw_border(
                            logits, stride, edited, row, flags, peak, temperature, min_p, top_k, top_p, uniform, total, above,
                            parts, listed, size, VOCAB, CHUNK, CHUNKS, CHUNKS2, CAP, EDITS,
                        )  # fmt: skip
                    else:
                        drawn = _draw_listed(
                            logits, stride, edited, row, flags, peak, temperature, min_p, top_k, top_p, uniform, total, listed,
                            size, VOCAB, CAP, EDITS,
                        )  # fmt: skip
            if not is_listed:
                chunk, before, target = _find_chunk(parts, uniform, CHUNKS2)
                drawn = _draw_chunk(
                    logits, stride, edited, row, flags, peak, temperature, min_p, chunk, before, target, LOWEST - 1, 0, 0,
                    VOCAB, CHUNK, EDITS,
                )  # fmt: skip
            token = tl.where((drawn >= 0) & (drawn < VOCAB), drawn, token)
    token = tl.where(fault, 0, token)
    tl.store(tokens + row, token.to(tokens.dtype.element_ty))
    tl.store(is_bad + row, fault.to(tl.uint8))
    if ROWS:
        table_row = tl.load(table_rows + row)
        if table_row >= 0:
            tl.store(last_tokens + table_row, token)
    if COUNTS:
        state_row = tl.load(record + STATE_ROW)
        if (state_row >= 0) & (fault == 0):
            at = state + state_row * VOCAB + token
            tl.store(at, tl.load(at) + 1)
