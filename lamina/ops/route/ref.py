"""The definition, in plain PyTorch; fp32. Source: DeepSeek-V4 router (square root of softplus, bias for selection only)."""

import torch
from torch import Tensor


def _scores(logits: Tensor) -> Tensor:
    # not torch.softplus: its vector body and scalar tail give different bits
    return torch.sqrt(logits.clamp(min=0) + torch.log1p(torch.exp(-logits.abs())))


def route_by_table(logits: Tensor, experts: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """logits [T, E] fp32, experts [T, k] int64 -> (experts, weights [T, k] fp32 that sum to scale)."""
    weights = _scores(logits).gather(1, experts)
    return experts, weights / weights.sum(-1, keepdim=True) * scale


def route(logits: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """logits [T, E] fp32, bias [E] -> (experts [T, k], weights [T, k] that sum to scale). Ties go to the lowest expert."""
    order = torch.sort(_scores(logits) + bias, dim=-1, descending=True, stable=True).indices
    return route_by_table(logits, order[:, :top_k], scale)
