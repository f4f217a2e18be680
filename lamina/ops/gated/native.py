"""The C kernel of what stands between the products of a feed-forward layer."""

import torch
from torch import Tensor

from lamina.ops import native

_KINDS = {"silu": 0, "gelu_tanh": 1, "relu2": 2}


def gated(wide: Tensor, activation: str, has_gate: bool, factor: float, dtype: torch.dtype) -> Tensor:
    """wide [T, 2 * I] = [gate | up], or [T, I] without a gate -> act(factor * gate) * up [T, I], rounded; wide is contiguous."""
    found = native.library()
    assert found is not None
    rows, width = wide.shape[0], wide.shape[1] // (1 + has_gate)
    y = torch.empty(rows, width)
    kind = _KINDS[activation]
    found.lamina_gated(wide.data_ptr(), rows, width, has_gate, kind, factor, y.data_ptr(), dtype == torch.bfloat16)
    return y
