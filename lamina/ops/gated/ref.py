"""The definition, in plain PyTorch; fp32. Not torch's own activations: vector body and scalar tail give different bits there."""

import torch
from torch import Tensor

ACTIVATIONS = ("silu", "gelu_tanh", "relu2")


def activated(x: Tensor, activation: str) -> Tensor:
    """silu, gelu_tanh or relu2 of x."""
    if activation == "silu":
        return x / (torch.exp(-x) + 1)
    if activation == "relu2":
        return x.clamp(min=0).square()
    if activation == "gelu_tanh":  # 0.5 x (1 + tanh(y)) = x / (1 + exp(-2y))
        return x / (torch.exp((x * x * 0.044715 + 1.0) * x * (-2 * 0.7978845608028654)) + 1)
    raise ValueError(f"activation={activation!r}, allowed: {', '.join(ACTIVATIONS)}")


def gated(h: Tensor, bias: Tensor | None, activation: str, has_gate: bool, multiplier: float = 1.0) -> Tensor:
    """h [T, 2I] = [gate | up], or [T, I] without a gate; bias as wide or None -> fp32 [T, I]."""
    h = h.float() if bias is None else h.float() + bias
    if not has_gate:
        return activated(h, activation)
    gate, up = h.chunk(2, dim=-1)
    return activated(gate * multiplier, activation) * up
