"""Operands of products as they lie in memory: a weight in its stored format, activations as the products read them."""

from dataclasses import dataclass

import torch
from torch import Tensor

#: columns that share a scale: of an fp8 activation, and in both directions of an fp8 weight
BLOCK = 128


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A matrix [out, in].

    codes   float8_e4m3fn, bf16 or fp32 [out, in], contiguous.
    scales  fp32 [ceil(out/128), ceil(in/128)] multipliers of float8 codes; None for bf16 and fp32.
    """

    codes: Tensor
    scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def is_fp8(self) -> bool:
        """Whether it has codes and scales."""
        return self.scales is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + (self.scales.nbytes if self.scales is not None else 0)


@dataclass(frozen=True, slots=True)
class GemmCase:
    """What an implementation may refuse.

    width  columns that one product sums over.   groups  products side by side.   is_fp8  whether weight and rows are fp8 codes.
    """

    width: int
    groups: int = 1
    is_fp8: bool = False


@dataclass(frozen=True, slots=True)
class Activation:
    """T rows that enter products.

    values  [T, K] bf16 or fp32: the rows, rounded to the model's activation type.
    codes   float8_e4m3fn [T, K] and scales fp32 [T, ceil(K/128)], powers of two: the same rows as fp8 products read them
            (`quantise_fp8(values, 128)`); None where no product reads them so.
    """

    values: Tensor
    codes: Tensor | None = None
    scales: Tensor | None = None

    @property
    def is_fp8(self) -> bool:
        """Whether it has codes and scales."""
        return self.codes is not None


def empty_activation(rows: int, width: int, dtype: torch.dtype, device: torch.device, is_fp8: bool) -> Activation:
    """Room for one."""
    values = torch.empty(rows, width, dtype=dtype, device=device)
    if not is_fp8:
        return Activation(values)
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device)
    return Activation(values, codes, torch.empty(rows, -(-width // BLOCK), dtype=torch.float32, device=device))
