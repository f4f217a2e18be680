"""Routed experts on a GPU from weights in any format: fp32, bf16, fp8 with a scale for every 128 x 128, or MXFP4 of any width.

    experts_plain(...)    the routed sum of `ref.experts`, with any `Gating`; the shared expert's may be added
    pack_mx(...)          MXFP4 as its kernels read it

Launches as in `triton.py`, whose first and last they share. Weights stay as they are stored and any width is served: this is the
path of other formats and of small models. MXFP4 is expanded in registers, exactly, and multiplied in bf16 or fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.ops.experts import plain_kernels as kernels
from lamina.ops.experts.ref import Gating
from lamina.ops.experts.triton import Places, is_interpreted, sum_places
from lamina.ops.gemm.stored import BLOCK, Activation
from lamina.ops.quantise.triton import quantise_rows

_ROWS = 64
_PLAIN = Gating()
_WARPS, _STAGES = 4, 3
#: (largest mean number of places of an expert, tokens of a tile)
_TOKENS = ((12.0, 16), (48.0, 32), (float("inf"), 64))
#: columns multiplied at a time, of weights without scales
_COLUMNS = {"bf16": 64, "fp32": 32}


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """A matrix of every expert.

    codes   float8_e4m3fn, bf16 or fp32 [E, out, in], contiguous.
    scales  fp32 [E, ceil(out/128), ceil(in/128)] multipliers of float8 codes; None for bf16 and fp32.
    """

    codes: Tensor
    scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """[E, out, in]."""
        num, rows, columns = self.codes.shape
        return num, rows, columns

    @property
    def is_fp8(self) -> bool:
        """Whether it has codes and scales."""
        return self.scales is not None


@dataclass(frozen=True, slots=True)
class MxExperts:
    """A matrix of every expert in MXFP4, as `pack_mx` arranges it: in tiles of 64 rows, in steps of 64 columns.

    codes   u8 [E, tiles, steps, 64, 32]: byte j of a row has column j of the step in its low nibble, column 32 + j in the other.
    scales  u8 e8m0 [E, tiles, steps, 2, 64].   shape  [E, out, in] of the matrix.
    """

    codes: Tensor
    scales: Tensor
    shape: tuple[int, int, int]

    @property
    def is_fp8(self) -> bool:
        """False: it is multiplied in the activations' own type."""
        return False


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """All experts of a layer: gate_up [E, 2I, D], gate rows first, or up alone [E, I, D], and down [E, D, I]."""

    gate_up: StoredExperts | MxExperts
    down: StoredExperts | MxExperts


def pack_mx(codes: Tensor, scales: Tensor, parts: int = 1) -> MxExperts:
    """MXFP4 in the kernels' order, on the device it is on.

    codes  u8 [E, R, K / 2], low nibble = even column.   scales  u8 e8m0 [E, R, K / 32].
    parts  the R rows are so many matrices, one under the other, each of which begins with a tile of its own.
    """
    num, rows, half = codes.shape
    own, columns = rows // parts, 2 * half
    assert own * parts == rows and scales.shape == (num, rows, columns // 32) and columns % 32 == 0
    tiles, steps = -(-own // _ROWS), -(-columns // 64)
    packed = codes.new_zeros(num, parts * tiles, steps, _ROWS, 32, dtype=torch.uint8)
    kept = codes.new_zeros(num, parts * tiles, steps, 2, _ROWS, dtype=torch.uint8)
    for expert in range(num):
        wide = codes.new_zeros(parts, tiles * _ROWS, steps * 64, dtype=torch.uint8)
        own_codes = codes[expert].view(torch.uint8)
        wide[:, :own, :columns] = torch.stack([own_codes & 15, own_codes >> 4], dim=-1).view(parts, own, columns)
        low, high = wide.view(parts * tiles, _ROWS, steps, 2, 32).unbind(3)
        packed[expert] = (low | (high << 4)).transpose(1, 2)
        of_groups = codes.new_zeros(parts, tiles * _ROWS, steps * 2, dtype=torch.uint8)
        of_groups[:, :own, : columns // 32] = scales[expert].view(torch.uint8).view(parts, own, -1)
        kept[expert] = of_groups.view(parts * tiles, _ROWS, steps, 2).permute(0, 2, 3, 1)
    return MxExperts(packed, kept, (num, rows, columns))


def experts_plain(
    x: Activation,
    chosen: Tensor,
    weights: Tensor,
    experts: PlainExperts,
    limit: float,
    shared: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    before_sum: Callable[[], None] | None = None,
    gating: Gating = _PLAIN,
) -> Tensor:
    """Sum over each token's experts, added in ascending expert order; an expert below 0 or past the last is nobody's and skipped.

    x         [T, D]. fp8 weights multiply its codes, if it has any; else its values in bf16, or fp32 where they are fp32.
    chosen    [T, k] integers.   weights [T, k] fp32.   limit  clamp of the SwiGLU, 0 = none.
    gating    what an expert computes; a weight that multiplies its input multiplies the first products.
    shared    [T, D], contiguous, to which the sum is added.   before_sum  called before that is launched.
    Returns   [T, D], fp32 rounded to `dtype`. The SwiGLU's result is rounded as x is. A token's bits depend on no other token.
    """
    out = x.values.new_empty(x.values.shape, dtype=dtype)
    chosen = chosen.contiguous()
    partial = _partial(x, chosen, weights.contiguous(), experts, limit, gating) if out.numel() else None
    if before_sum is not None:
        before_sum()
    if partial is not None:
        sum_places(partial, chosen, experts.down.shape[0], shared, out)
    return out


def _partial(
    x: Activation, chosen: Tensor, weights: Tensor, experts: PlainExperts, limit: float, gating: Gating
) -> Tensor:  # fmt: skip
    """[T * k, D] fp32: each place's share of its token."""
    num_experts, width, inner = experts.down.shape
    top_k, num_places = chosen.shape[1], chosen.numel()
    tokens = next(tokens for most, tokens in _TOKENS if num_places / num_experts <= most)
    device = x.values.device
    places = Places.empty(num_places, num_experts, tokens, device)
    places.fill(chosen)
    h = torch.empty(num_places, inner, dtype=x.values.dtype, device=device)
    first_bias, second_bias = gating.biases or (None, None)
    first = _Product(x, experts.gate_up)
    kernels.plain_gate_up[(places.max_blocks * -(-inner // _ROWS),)](
        *first.operands, first_bias, weights, h, places.places, *places.blocks, limit, gating.alpha, gating.shift,
        K=width, INNER=inner, TOP_K=top_k, ROWS=_ROWS, TOKENS=tokens, HAS_LIMIT=limit > 0, KIND=_kind(gating),
        WEIGHS_INPUT=gating.weighs_input, **first.constants,
    )  # fmt: skip
    second = _Product(quantise_rows(h) if experts.down.is_fp8 and x.is_fp8 else Activation(h), experts.down)
    partial = torch.empty(num_places, width, dtype=torch.float32, device=device)
    kernels.plain_down[(places.max_blocks * -(-width // _ROWS),)](
        *second.operands, second_bias, weights, partial, places.places, *places.blocks,
        K=inner, WIDTH=width, ROWS=_ROWS, TOKENS=tokens, WEIGHS_INPUT=gating.weighs_input, **second.constants,
    )  # fmt: skip
    return partial


def _kind(gating: Gating) -> str:
    """The kernel's name of what is between the products."""
    if gating.ungated is not None:
        return gating.ungated
    return "swiglu" if gating.alpha == 1 and gating.shift == 0 else "scaled"


class _Product:
    """What both kernels are told of their operands: pointers, and how they are multiplied."""

    __slots__ = ("constants", "operands")

    def __init__(self, x: Activation, matrix: StoredExperts | MxExperts) -> None:
        is_packed = isinstance(matrix, MxExperts)
        if is_packed:
            maths = "fp32" if x.values.dtype == torch.float32 else "bf16"
        elif matrix.is_fp8 and x.is_fp8:
            maths = "fp8"
        elif torch.float32 in (x.values.dtype, matrix.codes.dtype):
            maths = "fp32"
        else:
            maths = "codes" if matrix.is_fp8 else "bf16"
        rows = x.codes if maths == "fp8" else x.values
        assert rows is not None and rows.is_contiguous() and matrix.codes.is_contiguous()
        codes = matrix.codes
        if is_interpreted() or maths != "fp8":
            rows, codes = (one.view(torch.uint8) if one.dtype == torch.float8_e4m3fn else one for one in (rows, codes))
        self.operands = (rows, x.scales if maths == "fp8" else None, codes, matrix.scales)
        self.constants = {
            "BLOCK": BLOCK if matrix.is_fp8 else _COLUMNS[maths], "MATHS": maths, "IS_CODES": matrix.is_fp8,
            "IS_PACKED": is_packed, "STAGES": _STAGES, "INTERPRET": is_interpreted(), "num_warps": _WARPS, "num_stages": _STAGES,
        }  # fmt: skip
