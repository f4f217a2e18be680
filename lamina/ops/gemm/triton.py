"""Products with stored weights on a GPU.

    linear(x, weight, out_dtype, order)            x @ weight.T
    grouped_linear(x, weights, groups, ...)        of each group its own columns of x and rows of the weight
    grouped_linear_quantised(x, weights, groups, ...)   the same as the next fp8 product reads it
    linear_pair(x, weight, wide_weight, ...)       an fp8 and a bf16 weight from the same rows in one launch
    swiglu_quantise(h, limit, dtype, is_fp8)       the clamped SwiGLU of a dense expert, as the next product reads it
    refuses(machine, case)                         why this machine or these shapes are not served, or None

order "decode" cuts the columns of narrow weights in ranges, so that few rows keep a whole GPU reading; "prefill" never does.
Either has one order of sums, a function of the weight's shape: a row's bits depend neither on the other rows nor on their number.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.experimental.gluon.language import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    NVMMASharedLayout,
)
from triton.experimental.gluon.nvidia.hopper import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    TensorDescriptor,
)

from lamina.ops.gemm import hopper, kernels
from lamina.ops.gemm.stored import BLOCK, Activation, GemmCase, StoredWeight, empty_activation
from lamina.ops.machine import Machine, capability_of, is_hopper
from lamina.ops.quantise.triton import quantise_rows

Order = Literal["decode", "prefill"]

#: programs that a decode product should have (two for each of an H200's 132 units), and most ranges of columns
_PROGRAMS, _MOST_SPLITS = 192, 16
#: counters of a stream, and streams that may run such products at the same time
_COUNTERS, _STREAMS = 1 << 16, 16
_SWIGLU_ITEMS = 4
#: rows of x that smaller tiles of a decode product serve better than `hopper.py`, by MATHS. On an H200, 32 rows: six fp8 products
#: 79.6 us, with hopper.py 64.6; a bf16 head 260, 272, a bf16 gate 6.6, 7.0
_FEW_TOKENS = {"fp8": 16, "bf16": 32}
#: rows that `linear_pair` serves in one launch: 32 rows 16.0 us, as two products 20.4
_PAIR_TOKENS = 32
#: programs that a large tile of a decode product should have on an H200
_FULL = 96
_SWIZZLED = {bits: NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2) for bits in (8, 16)}


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut. block and splits fix the order of sums; nothing else changes a bit.

    block   columns of an instruction chain's tile.   splits  ranges of columns.   tokens, rows  a tile of the result.
    is_tokens_first  x is the left operand.   warps, stages  as in Triton.
    is_ahead  starts while the kernel before it ends, and fetches weights to L2 meanwhile (compute capability 9.0 and later).
    is_gluon  the kernel of `hopper.py`.   runs  ranges that one program of it adds up.
    """

    block: int
    splits: int
    tokens: int
    rows: int
    is_tokens_first: bool
    warps: int
    stages: int
    is_ahead: bool = False
    is_gluon: bool = False
    runs: int = 1


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, one operation at a time (TRITON_INTERPRET=1); bf16 is wrong there."""
    return bool(triton.knobs.runtime.interpret)


def refuses(machine: Machine, case: GemmCase) -> str | None:
    """Why `case` is not served here, in one line, or None."""
    if not is_interpreted():
        if machine.device != "cuda":
            return f"runs on NVIDIA GPUs, not on {machine.device}"
        if machine.capability < (8, 0):
            return f"needs compute capability 8.0, this GPU has {'.'.join(map(str, machine.capability))}"
    if case.is_fp8 and case.groups > 1 and _common_block(case.width) < 32:
        return f"fp8 groups need a width that is a multiple of 32, not {case.width}"
    return None


def linear(
    x: Activation, weight: StoredWeight, out_dtype: torch.dtype, order: Order = "prefill", out: Tensor | None = None
) -> Tensor:
    """x [T, in] times weight [out, in] -> [T, out], fp32 sums rounded to out_dtype at the end.

    An fp8 weight is multiplied by x's codes if it has them, else by its values; other weights always by its values.
    order  "decode" for few rows, "prefill" for any number; a row's bits depend on the order chosen.
    out    where to write, rows of any stride; None = a new tensor.
    """
    return grouped_linear(x, weight, 1, out_dtype, order, out)


def grouped_linear(
    x: Activation,
    weights: StoredWeight,
    groups: int,
    out_dtype: torch.dtype,
    order: Order = "prefill",
    out: Tensor | None = None,
    cut: Cut | None = None,
) -> Tensor:
    """x [T, G * K], weights [G * N, K] -> [T, G * N]: columns g * K .. of x times rows g * N .. of the weights."""
    num_tokens = x.values.shape[0]
    total, width = weights.shape
    if out is None:
        out = torch.empty(num_tokens, total, dtype=out_dtype, device=x.values.device)
    if not num_tokens:
        return out
    maths = _maths(x, weights)
    cut = cut or choose_cut(num_tokens, total // groups, width, groups, maths, order, is_hopper(out.device))
    launch = _launch_hopper if cut.is_gluon else _launch
    launch(x, weights, groups, cut, out)
    return out


def grouped_linear_quantised(
    x: Activation, weights: StoredWeight, groups: int, dtype: torch.dtype, order: Order = "prefill"
) -> Activation:
    """quantise_rows(grouped_linear(x, weights, groups, dtype, order)), the same bits; for few rows in one launch."""
    num_tokens = x.values.shape[0]
    total, width = weights.shape
    device = x.values.device
    cut = choose_cut(num_tokens, total // groups, width, groups, _maths(x, weights), order, is_hopper(device))
    is_served = order == "decode" and not cut.is_gluon and BLOCK % cut.rows == 0 and cut.splits * BLOCK > cut.rows
    if not is_served or total // groups % BLOCK or not num_tokens:
        return quantise_rows(grouped_linear(x, weights, groups, dtype, order))
    result = empty_activation(num_tokens, total, dtype, device, True)
    _launch(x, weights, groups, cut, result.values, result)
    return result


def linear_pair(
    x: Activation,
    weight: StoredWeight,
    wide_weight: StoredWeight,
    out_dtype: torch.dtype,
    wide_dtype: torch.dtype,
    order: Order = "decode",
) -> tuple[Tensor, Tensor]:
    """(linear(x, weight, out_dtype, order), linear(x, wide_weight, wide_dtype, order)), the same bits.

    One launch for few rows in the decode order, x with codes, an fp8 weight and a bf16 one; else two.
    """
    num_tokens, (rows, width), wide_rows = x.values.shape[0], weight.shape, wide_weight.shape[0]
    device = x.values.device
    is_served = order == "decode" and wide_weight.codes.dtype == torch.bfloat16 and _maths(x, weight) == "fp8"
    if not is_served or not 0 < num_tokens <= _PAIR_TOKENS:
        return linear(x, weight, out_dtype, order), linear(x, wide_weight, wide_dtype, order)
    of_x, x_scales, of_w, w_scales = _operands(x, weight, "fp8")
    out = torch.empty(num_tokens, rows, dtype=out_dtype, device=device)
    wide_out = torch.empty(num_tokens, wide_rows, dtype=wide_dtype, device=device)
    cut = choose_cut(num_tokens, rows, width, 1, "fp8", order)  # as on any GPU: both have the same tiles
    wide = choose_cut(num_tokens, wide_rows, width, 1, "bf16", order)
    is_ahead = cut.is_ahead and capability_of(device) >= (9, 0)
    assert (cut.tokens, cut.rows, cut.warps) == (wide.tokens, wide.rows, wide.warps)
    token_tiles = triton.cdiv(num_tokens, cut.tokens)
    tiles, wide_tiles = (triton.cdiv(n, cut.rows) * token_tiles for n in (rows, wide_rows))
    sizes = [count * c.splits * c.tokens * c.rows for count, c in ((tiles, cut), (wide_tiles, wide))]
    partial, wide_partial = torch.empty(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    kernels.linear_pair[(tiles * cut.splits + wide_tiles * wide.splits,)](
        of_x, x_scales, x.values, of_w, w_scales, wide_weight.codes, out, wide_out, partial, wide_partial,
        _counters(device, tiles + wide_tiles), num_tokens, rows, wide_rows,
        OUT=rows, WIDE_OUT=wide_rows, K=width, BLOCK=cut.block, WIDE_BLOCK=wide.block, TOKENS=cut.tokens, ROWS=cut.rows,
        SPLITS=cut.splits, WIDE_SPLITS=wide.splits, STAGES=cut.stages, AHEAD=is_ahead, INTERPRET=is_interpreted(),
        num_warps=cut.warps, num_stages=cut.stages, launch_pdl=is_ahead,
    )  # fmt: skip
    return out, wide_out


def swiglu_quantise(h: Tensor, limit: float, dtype: torch.dtype, is_fp8: bool) -> Activation:
    """silu(gate) * up of rows h [T, 2 * I] = [gate | up], fp32 or act, as the next product reads it.

    limit  gate is at most this, up within +-; 0 = no clamp.   dtype  of the values, to which the fp32 result is rounded.
    """
    rows, inner = h.shape[0], h.shape[1] // 2
    result = empty_activation(rows, inner, dtype, h.device, is_fp8)
    items = rows * triton.cdiv(inner, BLOCK)
    if items:
        codes, scales = result.values, result.values
        if result.codes is not None and result.scales is not None:
            codes, scales = result.codes.view(torch.uint8), result.scales
        kernels.swiglu[(triton.cdiv(items, _SWIGLU_ITEMS),)](
            h, result.values, codes, scales, items, limit,
            INNER=inner, HAS_LIMIT=limit > 0, IS_BF16=dtype == torch.bfloat16, FP8=is_fp8, ITEMS=_SWIGLU_ITEMS,
        )  # fmt: skip
    return result


@functools.lru_cache(maxsize=4096)
def choose_cut(num_tokens: int, rows: int, width: int, groups: int, maths: str, order: Order, is_hopper: bool = False) -> Cut:
    """The cut for so many tokens. `block` and `splits` do not depend on them.

    A prefill's is that of the next power of two: the powers are what is computed before an engine is ready, so that no other
    number of tokens compiles a kernel.
    """
    is_decode = order == "decode"
    if not is_decode:
        num_tokens = triton.next_power_of_2(num_tokens)
    block = {"fp8": 128, "codes": 128, "wide": 128, "bf16": 64, "fp32": 32}[maths]
    if groups > 1 and maths in ("fp8", "codes") and width % BLOCK:
        block = _common_block(width)
    if maths == "fp32":
        splits = _splits(groups * triton.cdiv(rows, 32), triton.cdiv(width, block)) if is_decode else 1
        return Cut(block, splits, 32, 32, False, 4, 2)
    splits = _splits(groups * triton.cdiv(rows, 64), triton.cdiv(width, block)) if is_decode else 1
    is_expanded = maths in ("codes", "wide")  # from registers, which only the left operand may come from
    is_whole = width % block == 0 and block == (64 if maths == "bf16" else BLOCK) and (groups == 1 or rows % BLOCK == 0)
    if is_hopper and is_whole and not is_expanded and num_tokens > (_FEW_TOKENS[maths] if is_decode else 256):
        return _hopper_cut(num_tokens, rows, groups, maths == "fp8", block, splits, is_decode)
    if is_decode:
        if num_tokens > 64 and maths != "wide":  # whose registers would spill
            return Cut(block, splits, 64, 128, False, 4, 3, True)
        tokens = min(64, max(16, triton.next_power_of_2(num_tokens)))
        return Cut(block, splits, tokens, 64, False, 4, 4 if tokens > 32 else 5, True)
    if num_tokens <= 64:
        return Cut(block, 1, 64, 64, not is_expanded, 4, 4)
    if num_tokens <= 256 or is_expanded:
        return Cut(block, 1, 64, 128, not is_expanded, 4, 3)
    return Cut(block, 1, 128, 128, True, 8, 3)


def _hopper_cut(num_tokens: int, rows: int, groups: int, is_fp8: bool, block: int, splits: int, is_ahead: bool) -> Cut:
    """The largest tiles that still fill the machine; two ranges of one program are fewer partial sums to write."""

    def programs(tokens: int, rows_of_tile: int) -> int:
        return groups * triton.cdiv(rows, rows_of_tile) * triton.cdiv(num_tokens, tokens) * splits

    tokens = 64 if num_tokens <= 64 or programs(64, 128) <= 132 else 128
    if not is_fp8 and splits == 1 and tokens == 128 and programs(128, 256) >= 132:
        return Cut(block, 1, 128, 256, True, 4, 4, is_ahead, True)
    runs = 2 if splits > 1 and programs(tokens, 128) >= 2 * _FULL else 1
    return Cut(block, splits, tokens, 128, True, 4, 8 if tokens == 64 else 6, is_ahead, True, runs)


def _launch(
    x: Activation, weights: StoredWeight, groups: int, cut: Cut, out: Tensor, quantised: Activation | None = None
) -> None:
    """The kernel of `kernels.py`, which writes out, the values of `quantised` if given, and then its codes and scales."""
    num_tokens, (total, width) = x.values.shape[0], weights.shape
    maths = _maths(x, weights)
    of_x, x_scales, of_w, w_scales = _operands(x, weights, maths)
    is_ahead = cut.is_ahead and capability_of(out.device) >= (9, 0)
    tiles = groups * triton.cdiv(total // groups, cut.rows) * triton.cdiv(num_tokens, cut.tokens)
    partial = counters = codes = scales = out
    if quantised is not None:
        assert quantised.codes is not None and quantised.scales is not None
        codes, scales = quantised.codes.view(torch.uint8), quantised.scales
    if cut.splits > 1 or quantised is not None:
        partial = torch.empty(tiles * cut.splits * cut.tokens * cut.rows, dtype=torch.float32, device=out.device)
        counters = _counters(out.device, tiles)
    kernels.linear[(tiles * cut.splits,)](
        of_x, x_scales, of_w, w_scales, out, codes, scales, partial, counters, num_tokens, out.stride(0),
        OUT=total // groups, K=width, GROUPS=groups, BLOCK=cut.block, TOKENS=cut.tokens, ROWS=cut.rows, SPLITS=cut.splits,
        MATHS=maths, W_CODES=weights.is_fp8, TOKENS_FIRST=cut.is_tokens_first, STAGES=cut.stages, AHEAD=is_ahead,
        QUANTISES=quantised is not None, INTERPRET=is_interpreted(),
        num_warps=cut.warps, num_stages=cut.stages, launch_pdl=is_ahead,
    )  # fmt: skip


def _launch_hopper(x: Activation, weights: StoredWeight, groups: int, cut: Cut, out: Tensor) -> None:
    """The kernel of `hopper.py`."""
    num_tokens, (total, width) = x.values.shape[0], weights.shape
    of_x, x_scales, of_w, w_scales = _operands(x, weights, _maths(x, weights))
    layout = _SWIZZLED[8 * of_x.itemsize]
    x_in = TensorDescriptor(of_x, [num_tokens, groups * width], [groups * width, 1], [cut.tokens, cut.block], layout)
    w_in = TensorDescriptor(of_w, [total, width], [width, 1], [cut.rows, cut.block], layout)
    tiles = groups * triton.cdiv(total // groups, cut.rows) * triton.cdiv(num_tokens, cut.tokens)
    parts = cut.splits // cut.runs
    partial = counters = out
    if parts > 1:
        partial = torch.empty(tiles * parts * cut.tokens * cut.rows, dtype=torch.float32, device=out.device)
        counters = _counters(out.device, 2 * tiles)
    hopper.linear[(min(tiles * parts, _multiprocessors(out.device)),)](
        x_in, x_scales, w_in, w_scales, out, partial, counters, num_tokens, tiles * parts, out.stride(0),
        OUT=total // groups, K=width, GROUPS=groups, BLOCK=cut.block, TOKENS=cut.tokens, ROWS=cut.rows,
        PARTS=parts, RUNS=cut.runs, STAGES=cut.stages, AHEAD=cut.is_ahead, num_warps=cut.warps, launch_pdl=cut.is_ahead,
    )  # fmt: skip


def _splits(tiles: int, blocks: int) -> int:
    """The least power of two that makes enough programs, as far as every range has the same number of blocks (at least two)."""
    splits = 1
    while tiles * splits < _PROGRAMS and splits < _MOST_SPLITS and blocks % (2 * splits) == 0 and blocks >= 4 * splits:
        splits *= 2
    return splits


def _common_block(width: int) -> int:
    """The largest power of two, at most 128, that divides `width`."""
    return min(BLOCK, width & -width)


def _maths(x: Activation, weight: StoredWeight) -> str:
    """The kernel's MATHS."""
    is_bf16 = x.values.dtype == torch.bfloat16
    if weight.scales is None:
        return "bf16" if is_bf16 and weight.codes.dtype == torch.bfloat16 else "fp32"
    if x.codes is not None:
        return "fp8" if is_interpreted() or capability_of(weight.codes.device) >= (8, 9) else "codes"
    return "wide" if is_bf16 else "fp32"


def _operands(x: Activation, weight: StoredWeight, maths: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and its scales, the weight and its scales; scales that are not read are some tensor."""
    codes = weight.codes
    if weight.scales is None:
        return x.values, x.values, codes, codes
    if maths != "fp8" or is_interpreted():
        codes = codes.view(torch.uint8)
    if x.codes is None or x.scales is None:
        return x.values, x.values, codes, weight.scales
    return x.codes if maths == "fp8" and not is_interpreted() else x.codes.view(torch.uint8), x.scales, codes, weight.scales


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _all_counters(device: torch.device) -> Tensor:
    """Zeros; every launch leaves them so. Made by the first product, which must not be one that is being captured."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run one product before capturing a graph"
    return torch.zeros(_STREAMS, _COUNTERS, dtype=torch.int32, device=device)


@functools.cache
def _counters_of(device: torch.device, stream: int) -> Tensor:
    """Those of one stream: products on different streams may run at the same time."""
    place = _counters_of.cache_info().currsize
    return _all_counters(device)[place % _STREAMS]


def _counters(device: torch.device, tiles: int) -> Tensor:
    assert tiles <= _COUNTERS, f"{tiles} tiles of a product that is cut in ranges; the prefill order serves so many rows"
    return _counters_of(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
