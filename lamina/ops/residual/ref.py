"""The definition, in plain PyTorch. `dtype` is what is kept between products; sums are fp32."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.ops.rope_norm import rms_norm


@dataclass(frozen=True, slots=True)
class VectorNorm:
    """x / sqrt(mean of squares + eps) * weight; weight [D] fp32, None: none.   centres  the mean is taken off first."""

    weight: Tensor | None
    eps: float
    centres: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] -> fp32 [T, D]."""
        x = x.float()
        if self.centres:
            x = x - x.sum(-1, keepdim=True) * (1 / x.shape[-1])
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Joint:
    """What follows a part: bias [D] fp32 of its result, a norm of it, its factor; and the norm before the next part.

    kept  factor of the old residual, 0: it is gone.   keeps_normed  what the next part reads is the residual too.
    """

    before: VectorNorm | None
    after: VectorNorm | None = None
    bias: Tensor | None = None
    scale: float = 1.0
    kept: float = 1.0
    keeps_normed: bool = False


def join(x: Tensor, found: Tensor | None, joint: Joint, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(the new residual [T, D] in `dtype`, the next part's input [T, D] in fp32, not rounded).

    x  [T, D] in `dtype`.   found  [T, D], the part's result; None before the first part.
    """
    total = x.float()
    if found is not None:
        found = (found.float() if joint.bias is None else found.float() + joint.bias).to(dtype).float()
        if joint.after is not None:
            found = joint.after.forward(found).to(dtype).float()
        found = found * joint.scale
        total = (found if joint.kept == 0 else total * joint.kept + found).to(dtype).float()
    read = total if joint.before is None else joint.before.forward(total)
    return (read if joint.keeps_normed else total).to(dtype), read
