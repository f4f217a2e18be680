"""The C kernels of norms and residuals; results differ from the definition's by rounding only."""

from typing import Protocol

import torch
from torch import Tensor

from lamina.ops import native


class Norm(Protocol):
    """x / sqrt(mean of squares + eps) * weight; weight [D] fp32, None: none.   centres  the mean is taken off first."""

    @property
    def weight(self) -> Tensor | None: ...
    @property
    def eps(self) -> float: ...
    @property
    def centres(self) -> bool: ...


#: a norm that is none
_NONE = (False, None, 0.0, False)


def norm(x: Tensor, of: Norm, dtype: torch.dtype) -> Tensor:
    """x [T, D] fp32 -> [T, D] fp32 with the precision of `dtype`."""
    found = native.library()
    assert found is not None
    x = x.contiguous()
    y = torch.empty_like(x)
    weight = native.address(of.weight)
    found.lamina_norm(x.data_ptr(), *x.shape, weight, of.eps, of.centres, y.data_ptr(), dtype == torch.bfloat16)
    return y


def add(x: Tensor, found: Tensor, after: Norm | None, scale: float, share: float, dtype: torch.dtype) -> Tensor:
    """share * x + scale * after(found), a new tensor; x and found [T, D] fp32. `found` may be overwritten."""
    library = native.library()
    assert library is not None and x.shape == found.shape and x.dtype == found.dtype == torch.float32
    x, found = x.contiguous(), found.contiguous()
    y = torch.empty_like(x)
    own = _NONE if after is None else (True, native.address(after.weight), after.eps, after.centres)
    library.lamina_join(
        x.data_ptr(), found.data_ptr(), *x.shape, *own, scale, share, y.data_ptr(), dtype == torch.bfloat16
    )  # fmt: skip
    return y
