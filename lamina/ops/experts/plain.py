"""Routed experts on a GPU from weights in any format but FP4: fp32, bf16, or fp8 with a scale for every 128 x 128.

    experts_plain(...)    the routed sum of `ref.experts`; the shared expert's may be added

Launches as in `triton.py`, whose first and last they share. Weights stay as they are stored and any width is served: this is the
path of other formats and of small models.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.ops.experts import kernels
from lamina.ops.experts.triton import Places, is_interpreted, sum_places
from lamina.ops.gemm.stored import BLOCK, Activation
from lamina.ops.quantise.triton import quantise_rows

_ROWS = 64
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
    def is_fp8(self) -> bool:
        """Whether it has codes and scales."""
        return self.scales is not None


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """All experts of a layer: gate_up [E, 2I, D], gate rows first, and down [E, D, I]."""

    gate_up: StoredExperts
    down: StoredExperts


def experts_plain(
    x: Activation,
    chosen: Tensor,
    weights: Tensor,
    experts: PlainExperts,
    limit: float,
    shared: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    before_sum: Callable[[], None] | None = None,
) -> Tensor:
    """Sum over each token's experts, added in ascending expert order; an expert below 0 or past the last is nobody's and skipped.

    x         [T, D]. fp8 weights multiply its codes, if it has any; else its values in bf16, or fp32 where they are fp32.
    chosen    [T, k] integers.   weights [T, k] fp32.   limit  clamp of the SwiGLU, 0 = none.
    shared    [T, D], contiguous, to which the sum is added.   before_sum  called before that is launched.
    Returns   [T, D], fp32 rounded to `dtype`. The SwiGLU's result is rounded as x is. A token's bits depend on no other token.
    """
    out = x.values.new_empty(x.values.shape, dtype=dtype)
    chosen = chosen.contiguous()
    partial = _partial(x, chosen, weights.contiguous(), experts, limit) if out.numel() else None
    if before_sum is not None:
        before_sum()
    if partial is not None:
        sum_places(partial, chosen, experts.gate_up.codes.shape[0], shared, out)
    return out


def _partial(x: Activation, chosen: Tensor, weights: Tensor, experts: PlainExperts, limit: float) -> Tensor:
    """[T * k, D] fp32: each place's share of its token."""
    num_experts, width, inner = experts.down.codes.shape
    top_k, num_places = chosen.shape[1], chosen.numel()
    tokens = next(tokens for most, tokens in _TOKENS if num_places / num_experts <= most)
    device = x.values.device
    places = Places.empty(num_places, num_experts, tokens, device)
    places.fill(chosen)
    h = torch.empty(num_places, inner, dtype=x.values.dtype, device=device)
    first = _Product(x, experts.gate_up)
    kernels.plain_gate_up[(places.max_blocks * -(-inner // _ROWS),)](
        *first.operands, weights, h, places.places, *places.blocks, limit,
        K=width, INNER=inner, TOP_K=top_k, ROWS=_ROWS, TOKENS=tokens, HAS_LIMIT=limit > 0, **first.constants,
    )  # fmt: skip
    second = _Product(quantise_rows(h) if experts.down.is_fp8 and x.is_fp8 else Activation(h), experts.down)
    partial = torch.empty(num_places, width, dtype=torch.float32, device=device)
    kernels.plain_down[(places.max_blocks * -(-width // _ROWS),)](
        *second.operands, partial, places.places, *places.blocks,
        K=inner, WIDTH=width, ROWS=_ROWS, TOKENS=tokens, **second.constants,
    )  # fmt: skip
    return partial


class _Product:
    """What both kernels are told of their operands: pointers, and how they are multiplied."""

    __slots__ = ("constants", "operands")

    def __init__(self, x: Activation, matrix: StoredExperts) -> None:
        if matrix.is_fp8 and x.is_fp8:
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
            "BLOCK": BLOCK if matrix.is_fp8 else _COLUMNS[maths], "MATHS": maths, "IS_CODES": matrix.is_fp8, "STAGES": _STAGES,
            "INTERPRET": is_interpreted(), "num_warps": _WARPS, "num_stages": _STAGES,
        }  # fmt: skip
