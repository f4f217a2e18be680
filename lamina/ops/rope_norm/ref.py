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
    """positions [n] int, inv_freq [p] fp32 -> cos, sin [n, 2p] fp32, a column for each dim; sin is negative at even dims.

    The angle is an fp32 product, as the weights were trained.
    """
    angles = positions.to(torch.float32)[:, None] * inv_freq
    sin = angles.sin()
    return angles.cos().repeat_interleave(2, dim=-1), torch.stack([-sin, sin], dim=-1).flatten(-2)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., n] -> fp32 [..., n]."""
    x = x.float()
    normed = x * x.square().sum(-1, keepdim=True).mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return normed if weight is None else normed.mul_(weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., 2p], cos and sin (see rope_tables; -sin rotates back) broadcastable to it -> fp32 [..., 2p].

    Pair p is dims (2p, 2p + 1): (a, b) -> (a cos - b sin, b cos + a sin).
    """
    x = x.float()
    swapped = x.view(*x.shape[:-1], -1, 2).flip(-1).view(x.shape)
    return (x * cos).add_(swapped.mul_(sin))


def query_norm_rope(q: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """q [T, H, D], cos and sin [T, r] -> fp32 [T, H, D]; the last r dims are rotated."""
    normed = rms_norm(q, None, eps)
    tail = normed[..., -cos.shape[-1] :]
    tail.copy_(rotate(tail, cos[:, None], sin[:, None]))
    return normed


def entry_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """x [N, D], weight [D], cos and sin [N, r] -> fp32 [N, D]; the last r dims are rotated."""
    normed = rms_norm(x, weight, eps)
    tail = normed[..., -cos.shape[-1] :]
    tail.copy_(rotate(tail, cos, sin))
    return normed


def unrotate(o: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """o [T, H, D] fp32, in place; the last r dims are rotated back by the query's position. Returns o."""
    tail = o[..., -cos.shape[-1] :]
    tail.copy_(rotate(tail, cos[:, None], -sin[:, None]))
    return o
