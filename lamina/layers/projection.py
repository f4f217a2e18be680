"""A product with a weight and a bias."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.rounding import rounded
from lamina.ops.gemm import Weight, linear


@dataclass(frozen=True, slots=True)
class Projection:
    """x -> weight x + bias; weight [out, in], bias [out] or None."""

    weight: Weight
    bias: Tensor | None

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [T, in] -> [T, out]."""
        found = linear(x, self.weight)
        return rounded(found if self.bias is None else found + self.bias, dtype)
