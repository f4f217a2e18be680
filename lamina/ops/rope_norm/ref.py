"""The definition, in plain PyTorch. Everything is fp32; callers round."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Yarn:
    """Frequency interpolation for long contexts."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float


def inverse_frequencies(dim: int, theta: float, yarn: Yarn | None = None) -> Tensor:
    """Angle per position of each pair, [dim / 2] fp32. Source: DeepSeek-V4 rotary embedding (YaRN ramp between two betas)."""
    frequencies = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if yarn is None:
        return frequencies

    def pair_with(rotations: float) -> float:
        return dim * math.log(yarn.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with(yarn.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def rope_tables(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """positions [n] int, inv_freq [p] fp32 -> cos, sin [n, p] fp32. The angle is an fp32 product, as the weights were trained."""
    angles = positions.to(torch.float32)[:, None] * inv_freq
    return angles.cos(), angles.sin()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., n] -> fp32 [..., n]."""
    x = x.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return normed if weight is None else normed.mul_(weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """x [..., 2p], cos and sin broadcastable to [..., p] -> fp32 [..., 2p]."""
    pairs = x.float().unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    out = torch.empty_like(pairs)
    if inverse:
        out[..., 0] = a * cos + b * sin
        out[..., 1] = b * cos - a * sin
    else:
        out[..., 0] = a * cos - b * sin
        out[..., 1] = b * cos + a * sin
    return out.flatten(-2)


def query_norm_rope(q: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """q [T, H, D], cos and sin [T, p] -> fp32 [T, H, D]; the last 2p dims are rotated."""
    normed = rms_norm(q, None, eps)
    tail = 2 * cos.shape[-1]
    normed[..., -tail:] = rotate(normed[..., -tail:], cos[:, None], sin[:, None])
    return normed


def entry_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """x [N, D], weight [D], cos and sin [N, p] -> fp32 [N, D]; the last 2p dims are rotated."""
    normed = rms_norm(x, weight, eps)
    tail = 2 * cos.shape[-1]
    normed[..., -tail:] = rotate(normed[..., -tail:], cos, sin)
    return normed


def unrotate(o: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """o [T, H, D] fp32, in place; the last 2p dims are rotated back by the query's position. Returns o."""
    tail = 2 * cos.shape[-1]
    o[..., -tail:] = rotate(o[..., -tail:], cos[:, None], sin[:, None], inverse=True)
    return o
