"""A product with a weight and a bias."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.rounding import rounded
from lamina.ops.gemm import Weight, linear
from lamina.ops.gemm.native import NativeWeight


def product(x: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, in], weight [out, in], bias [out] or None -> weight x + bias [T, out], rounded to `dtype`."""
    if isinstance(weight, NativeWeight):
        return weight.times(x, bias, dtype)
    found = linear(x, weight)
    return rounded(found if bias is None else found + bias, dtype)


@dataclass(frozen=True, slots=True)
class Projection:
    """x -> weight x + bias; weight [out, in], bias [out] or None."""

    weight: Weight
    bias: Tensor | None

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [T, in] -> [T, out]."""
        return product(x, self.weight, self.bias, dtype)
