# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Gate-up and down for compute capability 9.0, in Gluon: as `kernels.py`, for fp8 and rebased weights alone, with the same bits.

What Triton does not do by itself: the four products of a block are in flight while the next weights are expanded, tiles of eight
tokens, and two barriers for each block of 128 columns.
"""

from triton.experimental import gluon  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon import language as gl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon.language.nvidia.ampere import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    async_copy,
)
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.6 .. 3.9: renamed on the way
_copy = async_copy.async_load if "async_load" in dir(async_copy) else async_copy.async_copy_global_to_shared


@gluon.jit
def _tables(word, GROUP: gl.constexpr):
    """e4m3 codes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, times 2^(binades - 5), in two words for each row."""
    step = (word >> (8 * GROUP)) & 0xFF
    return step * 0x01010100 + 0x14100800, step * 0x01010101 + 0x24201C18


@gluon.jit
def _expand(packed, word, HALF: gl.constexpr):
    low_table, low_next = _tables(word, 2 * HALF)
    high_table, high_next = _tables(word, 2 * HALF + 1)
    zero = packed.to(gl.int32) * 0
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c;
        and.b32 a, $2, 0x77777777;
        prmt.b32 b, $3, $7, a;
        shr.b32 a, a, 16;
        prmt.b32 a, $11, $15, a;
        shl.b32 c, $2, 4;
        lop3.b32 $0, $2, 0x80808080, b, 0xEA;
        lop3.b32 $1, c, 0x80808080, a, 0xEA;
        }""",
        "=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [packed, low_table[:, None] + zero, low_next[:, None] + zero, high_table[:, None] + zero, high_next[:, None] + zero],
        dtype=(gl.uint8, gl.uint8),
        is_pure=True,
        pack=4,
    )
    return low.to(gl.float8e4nv, bitcast=True), high.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _product(
    x, x_scales, weights, scales, factors, row_of_x, live, slot_row, first_row,
    K: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, MMA: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """[ROWS, TOKENS] fp32: rows first_row .. of the matrices of all experts times the rows of x.

    row_of_x, live    [4 * TOKENS] in the layout of copies: the row of each token, four times over (a group of 32 columns each).
    slot_row  [TOKENS] in the layout of the products' columns; of a dead slot the row of a live one.
    """
    BLOCKS: gl.constexpr = K // 128
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=4)
    CODES: gl.constexpr = gl.SwizzledSharedLayout(vec=16, per_phase=4, max_phase=2, order=[1, 0])
    X: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=8, rank=2)
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    first_in = gl.allocate_shared_memory(gl.uint8, [STAGES, ROWS, 32], CODES)  # first halves: 64 columns each
    second_in = gl.allocate_shared_memory(gl.uint8, [STAGES, ROWS, 32], CODES)
    words_in = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    x_in = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 4 * TOKENS, 32], X)

    byte = gl.arange(0, 32, layout=gl.SliceLayout(0, BYTES))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, BYTES))
    of_codes = (row // 64 * (BLOCKS * 4096) + row % 64 * 32)[:, None] + byte[None, :]
    weights += first_row * (64 * BLOCKS)
    word_row = gl.arange(0, ROWS, layout=WORDS)
    of_words = word_row // 64 * (BLOCKS * 64) + word_row % 64
    scales += first_row * BLOCKS
    group = gl.arange(0, 4 * TOKENS, layout=gl.SliceLayout(1, BYTES)) // TOKENS
    x += (row_of_x * K + group * 32)[:, None] + byte[None, :]
    x_scales += slot_row * BLOCKS

    for k in gl.static_range(STAGES - 1):
        if k < BLOCKS:
            _copy(first_in.index(k), weights + k * 4096 + of_codes)
            _copy(second_in.index(k), weights + (k * 4096 + 2048) + of_codes)
            _copy(words_in.index(k), scales + k * 64 + of_words)
            _copy(x_in.index(k), x + k * 128, mask=live[:, None])
        async_copy.commit_group()
    total = gl.zeros([ROWS, TOKENS], gl.float32, MMA)
    zero = gl.zeros([ROWS, TOKENS], gl.float32, MMA)
    share = gl.load(x_scales)
    for k in range(BLOCKS):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()  # the compiler puts a barrier after the wait and another before the loads
        ahead = k + STAGES - 1
        if ahead < BLOCKS:
            at = ahead % STAGES
            _copy(first_in.index(at), weights + ahead * 4096 + of_codes)
            _copy(second_in.index(at), weights + (ahead * 4096 + 2048) + of_codes)
            _copy(words_in.index(at), scales + ahead * 64 + of_words)
            _copy(x_in.index(at), x + ahead * 128, mask=live[:, None])
        async_copy.commit_group()
        next_share = gl.load(x_scales + min(k + 1, BLOCKS - 1))
        stage = k % STAGES
        own = x_in.index(stage)
        word = words_in.index(stage).load(gl.SliceLayout(1, A))
        low, high = _expand(first_in.index(stage).load(A), word, 0)
        block = warpgroup_mma(low, own.slice(0, TOKENS, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        block = warpgroup_mma(high, own.slice(TOKENS, TOKENS, 0).permute((1, 0)), block, is_async=True)
        low2, high2 = _expand(second_in.index(stage).load(A), word, 1)
        block = warpgroup_mma(low2, own.slice(2 * TOKENS, TOKENS, 0).permute((1, 0)), block, is_async=True)
        block = warpgroup_mma(high2, own.slice(3 * TOKENS, TOKENS, 0).permute((1, 0)), block, is_async=True)
        product = warpgroup_mma_wait(0, deps=(block,))
        total += product * share[None, :]
        share = next_share
    factor = gl.load(factors + first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA)))
    return total * factor[:, None]


@gluon.jit
def gate_up(
    x, x_scales, weights, scales, factors, shares, h, places, block_expert, block_first, block_rows, num_blocks, limit,
    K: gl.constexpr, INNER: gl.constexpr, TOP_K: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    HAS_LIMIT: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """h[sorted place, INNER] = silu(gate) * up * share: one block of tokens, ROWS / 2 of its columns."""
    TILES: gl.constexpr = 2 * INNER // ROWS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, TOKENS, 32])
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [WARPS, 1], [1, 0])
    block = gl.program_id(0) // TILES
    tile = gl.program_id(0) % TILES
    if block >= gl.load(num_blocks):
        return
    expert = gl.load(block_expert + block).to(gl.int64)
    first = gl.load(block_first + block)
    rows = gl.load(block_rows + block)
    copied = gl.arange(0, 4 * TOKENS, layout=gl.SliceLayout(1, BYTES)) % TOKENS
    row_of_x = (gl.load(places + first + copied, mask=copied < rows, other=0) // TOP_K).to(gl.int64)
    slot = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, MMA))
    slot_row = (gl.load(places + first + gl.where(slot < rows, slot, 0)) // TOP_K).to(gl.int64)
    total = _product(
        x, x_scales, weights, scales, factors, row_of_x, copied < rows, slot_row,
        expert * (2 * INNER) + tile * ROWS, K, ROWS, TOKENS, STAGES, WARPS, MMA, BYTES,
    )  # fmt: skip
    turns = total.reshape([ROWS // 16, 2, 8, TOKENS])  # eight rows of gate, eight of up
    gate, up = turns.permute((0, 2, 3, 1)).reshape([ROWS // 2, TOKENS, 2]).split()
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [WARPS // 4, 4], [0, 1])
    gate, up = gl.convert_layout(gate, OUT), gl.convert_layout(up, OUT)
    if HAS_LIMIT:  # comparisons, so that a NaN stays one
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
    slot = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, OUT))
    live = slot < rows
    share = gl.load(shares + gl.load(places + first + slot, mask=live, other=0), mask=live, other=0.0)
    act = gate / (1 + gl.exp(-gate)) * up * share[None, :]
    column = tile * (ROWS // 2) + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, OUT))
    out = h + (first + slot).to(gl.int64)[None, :] * INNER + column[:, None]
    gl.store(out, act.to(h.dtype.element_ty), mask=live[None, :])


@gluon.jit
def down(
    h, h_scales, weights, scales, factors, partial, places, block_expert, block_first, block_rows, num_blocks,
    K: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """partial[place, WIDTH] = h @ down: one block of tokens, ROWS of its columns."""
    TILES: gl.constexpr = WIDTH // ROWS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, TOKENS, 32])
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [WARPS, 1], [1, 0])
    block = gl.program_id(0) // TILES
    tile = gl.program_id(0) % TILES
    if block >= gl.load(num_blocks):
        return
    expert = gl.load(block_expert + block).to(gl.int64)
    first = gl.load(block_first + block)
    rows = gl.load(block_rows + block)
    copied = gl.arange(0, 4 * TOKENS, layout=gl.SliceLayout(1, BYTES)) % TOKENS
    slot = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, MMA))
    total = _product(
        h, h_scales, weights, scales, factors, (first + copied).to(gl.int64), copied < rows,
        (first + gl.where(slot < rows, slot, 0)).to(gl.int64), expert * WIDTH + tile * ROWS,
        K, ROWS, TOKENS, STAGES, WARPS, MMA, BYTES,
    )  # fmt: skip
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [WARPS // 4, 4], [0, 1])
    total = gl.convert_layout(total, OUT)
    slot = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, OUT))
    place = gl.load(places + first + slot, mask=slot < rows, other=0).to(gl.int64)
    column = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    out = partial + place[None, :] * WIDTH + column[:, None]
    gl.store(out, total.to(partial.dtype.element_ty), mask=(slot < rows)[None, :])
