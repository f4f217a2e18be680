"""What is between the two products of a feed-forward layer, on a GPU, in one launch. `ref.py` is the definition.

gated(h, bias, activation, has_gate, multiplier, dtype, is_fp8)   as the next product reads it
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.gated import kernels
from lamina.ops.gemm.stored import BLOCK, Activation, empty_activation
from lamina.ops.rope_norm.triton import activation_pointers

_ITEMS = 4


def gated(
    h: Tensor, bias: Tensor | None, activation: str, has_gate: bool, multiplier: float, dtype: torch.dtype, is_fp8: bool
) -> Activation:
    """act(multiplier * gate) * up of rows h [T, 2 * I] = [gate | up], or act(up) of [T, I], rounded to `dtype`.

    h  fp32 or `dtype`, contiguous.   bias  as wide as h, fp32, or None.   is_fp8  whether fp8 codes are made too.
    """
    rows, inner = h.shape[0], h.shape[1] // (2 if has_gate else 1)
    assert h.is_contiguous()
    result = empty_activation(rows, inner, dtype, h.device, is_fp8)
    items = rows * triton.cdiv(inner, BLOCK)
    if items:
        kernels.gated[(triton.cdiv(items, _ITEMS),)](
            h, bias, *activation_pointers(result), items, multiplier, INNER=inner, HAS_GATE=has_gate, ACTIVATION=activation,
            IS_BF16=dtype == torch.bfloat16, IS_FP8=is_fp8, ITEMS=_ITEMS,
        )  # fmt: skip
    return result
