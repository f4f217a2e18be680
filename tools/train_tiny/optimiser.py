"""Muon for hidden matrices, AdamW for the rest; every tensor of a step fixed in place, so that a CUDA graph can hold it."""

import torch
from torch import Tensor

_BETAS = (0.9, 0.95)
_MOMENTUM = 0.95
_DECAY = 0.1


class Optimiser:
    """Both rules over stacked parameters: `muon` fp32 [N, ..., o, i], each matrix its orthogonalised update; `adam` of any shape.

    `rate` is a tensor: 1 at the peak, written by the caller before each step. `muon_rate` and `adam_rate` are the peaks.
    """

    def __init__(self, muon: list[Tensor], adam: list[Tensor], muon_rate: float = 2.5e-3, adam_rate: float = 3e-3) -> None:
        self.muon, self.adam, self.muon_rate, self.adam_rate = muon, adam, muon_rate, adam_rate
        device = (muon + adam)[0].device
        self.rate = torch.zeros((), device=device)
        self.steps = torch.zeros((), device=device)
        self.momentum = [torch.zeros_like(p) for p in muon]
        self.first = [torch.zeros_like(p) for p in adam]
        self.second = [torch.zeros_like(p) for p in adam]
        self.norm = torch.zeros((), device=device)

    @torch.no_grad()
    def step(self) -> None:
        """One update from the parameters' `.grad`, clipped to a global norm of 1."""
        gradients = [p.grad for p in self.muon + self.adam]
        self.norm.copy_(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        scale = (1.0 / (self.norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)
        self.steps += 1
        for p, momentum in zip(self.muon, self.momentum, strict=True):
            momentum.mul_(_MOMENTUM).add_(p.grad)
            update = orthogonal((p.grad + _MOMENTUM * momentum).flatten(0, -3)).view_as(p)
            rate = self.rate * self.muon_rate
            p.mul_(1 - rate * _DECAY)
            p.sub_(update * (rate * 0.2 * max(p.shape[-2:]) ** 0.5))
        correct1, correct2 = 1 - _BETAS[0] ** self.steps, 1 - _BETAS[1] ** self.steps
        for p, first, second in zip(self.adam, self.first, self.second, strict=True):
            first.lerp_(p.grad, 1 - _BETAS[0])
            second.mul_(_BETAS[1]).addcmul_(p.grad, p.grad, value=1 - _BETAS[1])
            p.sub_(self.rate * self.adam_rate * (first / correct1) / ((second / correct2).sqrt() + 1e-8))

    def state(self) -> list[Tensor]:
        return [self.steps, *self.momentum, *self.first, *self.second]


def orthogonal(x: Tensor) -> Tensor:
    """Near the closest matrices with orthonormal rows or columns to `x` [N, o, i]: five Newton-Schulz steps in bf16."""
    y = x.to(torch.bfloat16)
    tall = y.shape[-2] > y.shape[-1]
    if tall:
        y = y.transpose(-1, -2)
    y = y / (torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = y @ y.transpose(-1, -2)
        y = 3.4445 * y + (-4.7750 * square + 2.0315 * square @ square) @ y
    return (y.transpose(-1, -2) if tall else y).float()
