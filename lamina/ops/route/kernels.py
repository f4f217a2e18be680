# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""The Triton kernel of expert routing: a program of one warp for each token.

Exponential and logarithm are written out to a bit or so of fp32: the instructions that GPUs have for them lose all relative
precision where a score is small, and experts would be chosen by their errors.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit
def _exp(x):
    """e^x of -87 <= x <= 0."""
    n = (x * 1.4426950408889634 - 0.5).to(tl.int32)  # towards zero: to the nearest of values that are not positive
    whole = n.to(tl.float32)
    r = tl.fma(whole, 2.12194440e-4, tl.fma(whole, -0.693359375, x))  # the logarithm of 2 in two parts
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    value = tl.fma(p, r * r, r) + 1
    return value * ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _log1p(u):
    """log(1 + u) of 0 <= u <= 1, as 2 atanh(u / (2 + u))."""
    s = tl.div_rn(u, 2 + u)
    q = s * s
    p = tl.fma(q, 0.06666667, 0.07692308)
    p = tl.fma(p, q, 0.09090909)
    p = tl.fma(p, q, 0.11111111)
    p = tl.fma(p, q, 0.14285715)
    p = tl.fma(p, q, 0.2)
    p = tl.fma(p, q, 0.33333334)
    return 2 * tl.fma(p * q, s, s)


@triton.jit
def _scores(logits):
    """sqrt(softplus(logits)), with a square root of e^x where that is what is left of it; NaN stays NaN."""
    size = tl.where(logits == logits, tl.abs(logits), 0.0)
    low = logits < -20
    power = _exp(-tl.minimum(tl.where(low, 0.5 * size, size), 87.0))
    soft = tl.sqrt_rn(tl.maximum(logits, 0.0) + _log1p(power))
    soft = tl.where(low, tl.where(size > 103.97, 0.0, power), soft)
    return tl.where(logits == logits, soft, logits)


@triton.jit
def route(
    logits, bias, table, tokens, owners, chosen, weights, scale,
    EXPERTS: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr, HAS_TABLE: tl.constexpr,
):  # fmt: skip
    """chosen and weights [T, TOP_K]: of a row of padding -1 and 0."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    own = place < TOP_K
    at = row * TOP_K + place
    is_padding = tl.load(owners + row) < 0
    logits += row * EXPERTS
    if HAS_TABLE:
        token = tl.load(tokens + row).to(tl.int64)
        found = tl.load(table + token * TOP_K + place, mask=own, other=0).to(tl.int32)
    else:
        expert = tl.arange(0, SIZE)
        inside = expert < EXPERTS
        value = _scores(tl.load(logits + expert, mask=inside, other=0.0)) + tl.load(bias + expert, mask=inside, other=0.0)
        value = tl.where(value == 0, 0.0, value)  # -0 is no less than 0
        bits = tl.where(value == value, value.to(tl.int32, bitcast=True), 0x7FC00000)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # ordered as the values are, NaN first
        key = tl.where(inside, key, -2147483648)
        found = tl.zeros((PLACES,), tl.int32)
        for j in tl.static_range(TOP_K):
            best = tl.min(tl.where(key == tl.max(key, 0), expert, SIZE), 0)
            found = tl.where(place == j, best, found)
            key = tl.where(expert == best, -2147483648, key)
    share = tl.where(own, _scores(tl.load(logits + found, mask=own, other=0.0)), 0.0)
    total = tl.sum(share, 0)
    tl.store(chosen + at, tl.where(is_padding, -1, found), mask=own)
    tl.store(weights + at, tl.where(is_padding, 0.0, tl.div_rn(share, total) * scale), mask=own)


@triton.jit
def _ordered(x):
    """Integers ordered as the values are, NaN first."""
    x = tl.where(x == 0, 0.0, x)  # -0 is no less than 0
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _in_groups(wanted, expert, inside, EACH: tl.constexpr, KEPT: tl.constexpr, IS_PAIR: tl.constexpr):
    """Whether an expert is in one of the KEPT groups of EACH whose best, or sum of the two best if IS_PAIR, is the largest."""
    SIZE: tl.constexpr = wanted.shape[0]
    worth = tl.zeros((SIZE,), tl.float32)
    number = expert // EACH
    for group in tl.static_range(SIZE // EACH):
        own = tl.where(inside & (number == group), wanted, -float("inf"))
        best = tl.max(own, 0)
        if IS_PAIR:
            first = tl.min(tl.where((own == best) & (number == group), expert, SIZE), 0)
            best += tl.max(tl.where(expert == first, -float("inf"), own), 0)
        worth = tl.where(number == group, best, worth)
    key = tl.where(inside, _ordered(worth), -2147483648)
    kept = expert < 0
    for _ in tl.static_range(KEPT):
        first = tl.min(tl.where(key == tl.max(key, 0), expert, SIZE), 0)
        is_best = number == first // EACH
        kept = kept | is_best
        key = tl.where(is_best, -2147483648, key)
    return kept


@triton.jit
def route_plain(
    logits, bias, owners, chosen, weights, scale,
    EXPERTS: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr, KIND: tl.constexpr,
    NORMALISES: tl.constexpr, GROUPS: tl.constexpr = 1, KEPT: tl.constexpr = 1,
):  # fmt: skip
    """chosen and weights [T, TOP_K] by softmax of all, softmax or sigmoids of the chosen, or sigmoids; of padding -1 and 0."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    own = place < TOP_K
    at = row * TOP_K + place
    is_padding = tl.load(owners + row) < 0
    expert = tl.arange(0, SIZE)
    inside = expert < EXPERTS
    value = tl.load(logits + row * EXPERTS + expert, mask=inside, other=-float("inf"))
    score = value
    if KIND == "sigmoid" or KIND == "chosen_sigmoid":
        score = 1 / (1 + tl.exp(-value))
    if KIND == "softmax":
        score = tl.exp(value - tl.max(value, 0))
        score = score / tl.sum(tl.where(inside, score, 0.0), 0)
    wanted = score if KIND == "sigmoid" else value
    if bias is not None:
        wanted = wanted + tl.load(bias + expert, mask=inside, other=0.0)
    key = tl.where(inside, _ordered(wanted), -2147483648)
    if GROUPS > 1:
        key = tl.where(_in_groups(wanted, expert, inside, EXPERTS // GROUPS, KEPT, KIND == "sigmoid"), key, -2147483648)
    found = tl.zeros((PLACES,), tl.int32)
    share = tl.zeros((PLACES,), tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.min(tl.where(key == tl.max(key, 0), expert, SIZE), 0)
        of_best = tl.sum(tl.where(expert == best, value if KIND == "chosen" else score, 0.0), 0)
        found = tl.where(place == j, best, found)
        share = tl.where(place == j, of_best, share)
        key = tl.where(expert == best, -2147483648, key)
    if KIND == "chosen":
        share = tl.where(own, share, -float("inf"))
        share = tl.exp(share - tl.max(share, 0))
        share = tl.div_rn(share, tl.sum(share, 0))
    elif NORMALISES:
        share = tl.div_rn(share, tl.sum(share, 0) + (1e-20 if KIND == "sigmoid" else 0.0))
    tl.store(chosen + at, tl.where(is_padding, -1, found), mask=own)
    tl.store(weights + at, tl.where(is_padding, 0.0, share * scale), mask=own)
