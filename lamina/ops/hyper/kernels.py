# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment,misc,var-annotated"
"""Triton kernels of hyper-connections: between two sub-layers two launches, `mix` and `collapse`.

mix       streams, out -> new streams; of each range of columns the products with the mixer's rows and the sum of squares
collapse  these, new streams -> post, comb; the collapsed rows, normed and quantised

The products of a token lie in PADDED columns, of which some are never read. SP is S, at least 4, to a power of two; the mixer
of the head has neither comb nor post, and its columns begin with pre.

    k * SP + j           comb [source j, destination k]
    SP * SP + j          pre j
    SP * SP + SP + j     post j
    SP * SP + 2 * SP     the sum of squares

One compiled kernel serves every number of tokens (nothing is specialised on it), and a token is a row of a tile of 16 or a
program of its own: its bits depend on nothing else. The mixer is fp32 and so are the products: bf16 rows are multiplied by three
bf16 parts of a weight, which together are all its 24 bits.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.quantise.kernels import power, quantise_e4m3, round_bf16


@triton.jit
def start(embed, tokens, streams, D: tl.constexpr, S: tl.constexpr, SIZE: tl.constexpr):
    """streams [T, S, D] = S copies of each token's row; an item is SIZE columns of one token."""
    PARTS: tl.constexpr = (D + SIZE - 1) // SIZE
    row = tl.program_id(0) // PARTS
    column = tl.program_id(0) % PARTS * SIZE + tl.arange(0, SIZE)
    value = tl.load(embed + tl.load(tokens + row).to(tl.int64) * D + column, mask=column < D)
    for stream in tl.static_range(S):
        tl.store(streams + (row.to(tl.int64) * S + stream) * D + column, value, mask=column < D)


@triton.jit
def _rounded(x, IS_BF16: tl.constexpr, INTERPRET: tl.constexpr):
    if IS_BF16:
        if INTERPRET:
            x = round_bf16(x)
        else:
            x = x.to(tl.bfloat16).to(tl.float32)
    return x


@triton.jit
def _weights(
    fn, column, inside, D: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, PADDED: tl.constexpr, HAS_COMB: tl.constexpr
):
    """The mixer's rows at some columns of one stream, transposed and in the order above: fp32 [columns, PADDED]."""
    at = tl.arange(0, PADDED)
    k, j = at // SP, at % SP
    if HAS_COMB:
        row = tl.where(k < SP, 2 * S + j * S + k, (k - SP) * S + j)
        used = (j < S) & ((k < S) | ((k >= SP) & (k < SP + 2)))
    else:
        row = j
        used = (j < S) & (k == 0)
    return tl.load(fn + row[None, :] * (S * D) + column[:, None], mask=inside[:, None] & used[None, :], other=0.0)


@triton.jit
def _parts(loaded, IS_BF16: tl.constexpr, INTERPRET: tl.constexpr):
    """Weights as bf16 rows are multiplied by them: all their bits in three bf16 parts. fp32 rows read the first, as it is."""
    if IS_BF16 and not INTERPRET:
        head = loaded.to(tl.bfloat16)
        rest = loaded - head.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        tail = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    else:
        head, middle, tail = loaded, loaded, loaded
    return head, middle, tail


@triton.jit
def _tile(
    streams, out, out2, post, comb, tile, num_tokens, column, inside,
    D: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr, HAS_OUT: tl.constexpr, HAS_OUT2: tl.constexpr,
):  # fmt: skip
    """What is read of a tile of tokens: rows of each stream, of the outputs, and post, comb by source and destination."""
    token = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    live = token < num_tokens
    both = live[:, None] & inside[None, :]
    read = ()
    for j in tl.static_range(S):
        read += (tl.load(streams + (token * S + j)[:, None] * D + column[None, :], mask=both, other=0.0),)
    if HAS_OUT:
        read += (tl.load(out + token[:, None] * D + column[None, :], mask=both, other=0.0),)
        if HAS_OUT2:
            read += (tl.load(out2 + token[:, None] * D + column[None, :], mask=both, other=0.0),)
        else:
            read += (tl.zeros((1, 1), tl.float32),)
        for k in tl.static_range(S):
            read += (tl.load(post + token * S + k, mask=live, other=0.0),)
        for k in tl.static_range(S * S):
            read += (tl.load(comb + token * (S * S) + k, mask=live, other=0.0),)
    return read


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def mix(
    streams, out, out2, post, comb, fn, mixed, products, num_tokens, num_tiles,
    D: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_OUT: tl.constexpr, HAS_OUT2: tl.constexpr, HAS_COMB: tl.constexpr, IS_BF16: tl.constexpr, TILE: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of every stream, of num_tiles tiles of TILE tokens. products [T, ranges of columns, PADDED].

    The weights are read once and kept; of more than 4 streams they are too large for it, and are read again with every tile.
    """
    KEEPS: tl.constexpr = S <= 4
    SPLITS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    SUM: tl.constexpr = SP * SP + 2 * SP if HAS_COMB else SP
    split = tl.program_id(0)
    column = split * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < D
    first = tl.program_id(1) * num_tiles
    last = tl.minimum(first + num_tiles, (num_tokens + TILE - 1) // TILE)
    ahead = _tile(streams, out, out2, post, comb, first, num_tokens, column, inside, D, S, TILE, HAS_OUT, HAS_OUT2)
    loaded = ()
    for k in tl.static_range(S if KEEPS else 0):
        loaded += (_weights(fn + k * D, column, inside, D, S, SP, PADDED, HAS_COMB),)
    tl.debug_barrier()  # all loads are under way before the first is waited for
    kept = ()  # of each stream
    for k in tl.static_range(S if KEEPS else 0):
        kept += (_parts(loaded[k], IS_BF16, INTERPRET),)
    for tile in range(first, last):
        read = ahead
        ahead = _tile(streams, out, out2, post, comb, tile + 1, num_tokens, column, inside, D, S, TILE, HAS_OUT, HAS_OUT2)
        token = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        live = token < num_tokens
        both = live[:, None] & inside[None, :]
        if HAS_OUT:
            own = read[S].to(tl.float32)
            if HAS_OUT2:
                own += read[S + 1].to(tl.float32)
            own = _rounded(own, IS_BF16, INTERPRET)
        total = tl.zeros((TILE, PADDED), tl.float32)
        squares = tl.zeros((TILE,), tl.float32)
        for k in tl.static_range(S):
            if HAS_OUT:
                new = read[S + 2 + k][:, None] * own
                for j in tl.static_range(S):
                    new = tl.fma(read[2 * S + 2 + j * S + k][:, None], read[j].to(tl.float32), new)
                new = _rounded(new, IS_BF16, INTERPRET)
                at = (token * S + k)[:, None] * D + column[None, :]
                tl.store(mixed + at, new.to(mixed.dtype.element_ty), mask=both)
            else:
                new = read[k].to(tl.float32)
            squares += tl.sum(new * new, 1)
            if KEEPS:
                head, middle, tail = kept[k]
            else:
                weights = _weights(fn + k * D, column, inside, D, S, SP, PADDED, HAS_COMB)
                head, middle, tail = _parts(weights, IS_BF16, INTERPRET)
            if IS_BF16 and not INTERPRET:
                narrow = new.to(tl.bfloat16)
                total = tl.dot(narrow, tail, total)
                total = tl.dot(narrow, middle, total)
                total = tl.dot(narrow, head, total)
            else:
                total = tl.dot(new, head, total, input_precision="ieee")
        of = tl.arange(0, PADDED)[None, :]
        total = tl.where(of == SUM, squares[:, None], total)
        tl.store(products + (token * SPLITS + split)[:, None] * PADDED + of, total, mask=live[:, None])


@triton.jit
def _inverse(x, INTERPRET: tl.constexpr):
    """1 / x to a bit or so, in one instruction."""
    if INTERPRET:
        found = 1 / x
    else:
        found = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return found


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _balance(
    products, base, scale, post, comb, program, num_tokens,
    D: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr,
    ITERATIONS: tl.constexpr, EPS: tl.constexpr, NORM_EPS: tl.constexpr, BALANCED: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """post, and comb after its alternating normalisations. A thread has one source j and all destinations k."""
    token = program * BALANCED + tl.arange(0, BALANCED)
    split, column = tl.arange(0, SPLITS_PADDED), tl.arange(0, PADDED)
    at = (token.to(tl.int64)[:, None] * SPLITS + split[None, :])[:, :, None] * PADDED + column[None, None, :]
    live = ((token < num_tokens)[:, None] & (split < SPLITS)[None, :])[:, :, None]
    parts = tl.load(products + at, mask=live, other=0.0)
    j = tl.arange(0, SP)[None, :]
    used = j < S
    post_scale = tl.load(scale + S + j, mask=used, other=0.0)
    post_base = tl.load(base + S + j, mask=used, other=0.0)
    comb_scale, comb_base = (), ()
    for k in tl.static_range(S):
        comb_scale += (tl.load(scale + 2 * S + j * S + k, mask=used, other=0.0),)
        comb_base += (tl.load(base + 2 * S + j * S + k, mask=used, other=0.0),)
    tl.debug_barrier()  # all loads are under way before the first is waited for
    mixes = tl.sum(parts, 1)  # [BALANCED, PADDED]
    index = tl.zeros((BALANCED, SP), tl.int32) + j
    norm = tl.rsqrt(tl.gather(mixes, index * 0 + (SP * SP + 2 * SP), 1) * (1 / (S * D)) + NORM_EPS)
    whole = (token < num_tokens)[:, None] & used
    gate = tl.gather(mixes, index + (SP * SP + SP), 1) * norm * post_scale + post_base
    tl.store(post + token.to(tl.int64)[:, None] * S + j, 2 * _sigmoid(gate), mask=whole)
    to = ()  # destinations, [BALANCED, SP] each
    for k in tl.static_range(S):
        to += (tl.gather(mixes, index + k * SP, 1) * norm * comb_scale[k] + comb_base[k],)
    most = to[0]
    for k in tl.static_range(1, S):
        most = tl.maximum(most, to[k], propagate_nan=tl.PropagateNan.ALL)
    total = tl.zeros((BALANCED, SP), tl.float32)
    powers = ()
    for k in tl.static_range(S):
        powers += (tl.exp(to[k] - most),)
        total += powers[k]
    total = 1 / total
    to = ()
    for k in tl.static_range(S):
        value = tl.where(used, powers[k] * total + EPS, 0.0)
        to += (value / (tl.sum(value, 1) + EPS)[:, None],)
    for _ in range(ITERATIONS - 1):
        even, odd = to[0] + EPS, tl.zeros((BALANCED, SP), tl.float32)  # two shorter chains of sums
        for k in tl.static_range(1, S):
            if k % 2:
                odd += to[k]
            else:
                even += to[k]
        share = _inverse(even + odd, INTERPRET)
        balanced = ()
        for k in tl.static_range(S):
            value = to[k] * share
            balanced += (value * _inverse(tl.sum(value, 1) + EPS, INTERPRET)[:, None],)
        to = balanced
    for k in tl.static_range(S):
        tl.store(comb + token.to(tl.int64)[:, None] * (S * S) + j * S + k, to[k], mask=whole)


@triton.jit(do_not_specialize=["num_tokens"])
def collapse(
    streams, products, base, scale, norm_weight, post, comb, values, codes, scales, num_tokens,
    D: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, PADDED: tl.constexpr,
    SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr, ITERATIONS: tl.constexpr, EPS: tl.constexpr, NORM_EPS: tl.constexpr,
    HAS_COMB: tl.constexpr, FP8: tl.constexpr, IS_BF16: tl.constexpr, KEEPS_FP32: tl.constexpr,
    BALANCED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """First the programs that balance, which take longest, then one for each token. KEEPS_FP32: the normed row is not rounded."""
    PRE: tl.constexpr = SP * SP if HAS_COMB else 0
    SUM: tl.constexpr = SP * SP + 2 * SP if HAS_COMB else SP
    program = tl.program_id(0)
    if HAS_COMB:
        balancers = (num_tokens + BALANCED - 1) // BALANCED
        if program < balancers:
            _balance(
                products, base, scale, post, comb, program, num_tokens,
                D, S, SP, PADDED, SPLITS, SPLITS_PADDED, ITERATIONS, EPS, NORM_EPS, BALANCED, INTERPRET,
            )  # fmt: skip
            return
        program -= balancers
    token = program.to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < D
    split, of = tl.arange(0, SPLITS_PADDED), tl.arange(0, PADDED)
    rows = ()
    for j in tl.static_range(S):
        rows += (tl.load(streams + (token * S + j) * D + column, mask=inside, other=0.0),)
    weight = tl.load(norm_weight + column, mask=inside, other=0.0)
    gate_scale, gate_base = (), ()
    for j in tl.static_range(S):
        gate_scale += (tl.load(scale + j),)
        gate_base += (tl.load(base + j),)
    tl.debug_barrier()  # all loads are under way before the first is waited for
    parts = products + (token * SPLITS + split)[:, None] * PADDED + of[None, :]
    mixes = tl.sum(tl.load(parts, mask=(split < SPLITS)[:, None], other=0.0), 0)
    norm = tl.rsqrt(tl.sum(tl.where(of == SUM, mixes, 0.0), 0) * (1 / (S * D)) + NORM_EPS)
    total = tl.zeros((WIDTH,), tl.float32)
    for j in tl.static_range(S):
        gate = tl.sum(tl.where(of == PRE + j, mixes, 0.0), 0) * norm * gate_scale[j] + gate_base[j]
        total = tl.fma(rows[j].to(tl.float32), _sigmoid(gate) + EPS, total)
    total = _rounded(total, IS_BF16, INTERPRET)
    total = total * tl.rsqrt(tl.sum(total * total, 0) * (1 / D) + NORM_EPS) * weight
    if not KEEPS_FP32:
        total = _rounded(total, IS_BF16, INTERPRET)
    tl.store(values + token * D + column, total.to(values.dtype.element_ty), mask=inside)
    if FP8:
        BLOCKS: tl.constexpr = WIDTH // 128
        code, byte = quantise_e4m3(total.reshape(BLOCKS, 128), 1)
        block = tl.arange(0, BLOCKS)
        place = block[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(codes + token * D + place, code, mask=place < D)
        tl.store(scales + token * ((D + 127) // 128) + block, power(byte), mask=block < (D + 127) // 128)
