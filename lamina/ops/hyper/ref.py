"""The definition, in plain PyTorch; all in fp32. Source: manifold-constrained hyper-connections, DeepSeek-V4 report."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.ops.gemm import linear


@dataclass(frozen=True, slots=True)
class Mixer:
    """Weights of one mixer over S streams of width D.

    fn [2S + S*S or S, S*D] fp32, rows in the order pre, post, comb (row-major [source, destination]).   base [rows].   scale [3 or 1].
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    iterations: int
    eps: float
    norm_eps: float


def _sigmoid(x: Tensor) -> Tensor:
    # not torch.sigmoid: its vector body and scalar tail give different bits
    return 1 / (1 + torch.exp(-x))


def _mixes(streams: Tensor, mixer: Mixer) -> Tensor:
    """[T, S, D] -> [T, rows]: the normed streams times fn; the norm is applied to the few outputs."""
    flat = streams.flatten(1).float()
    return linear(flat, mixer.fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + mixer.norm_eps)


def hyper_pre(streams: Tensor, mixer: Mixer) -> tuple[Tensor, Tensor, Tensor]:
    """streams [T, S, D] -> (collapsed [T, D] in the streams' dtype, post [T, S] fp32, comb [T, S, S] fp32)."""
    num = streams.shape[1]
    mixes, base, scale = _mixes(streams, mixer), mixer.base, mixer.scale
    gates = _sigmoid(mixes[:, : 2 * num] * scale[:2].repeat_interleave(num) + base[: 2 * num])
    pre, post = gates[:, :num] + mixer.eps, 2 * gates[:, num:]
    comb = (mixes[:, 2 * num :] * scale[2] + base[2 * num :]).unflatten(-1, (num, num)).softmax(-1) + mixer.eps
    comb /= comb.sum(-2, keepdim=True).add_(mixer.eps)
    for _ in range(mixer.iterations - 1):
        comb /= comb.sum(-1, keepdim=True).add_(mixer.eps)
        comb /= comb.sum(-2, keepdim=True).add_(mixer.eps)
    collapsed = (pre[:, :, None] * streams).sum(1)
    return collapsed.to(streams.dtype), post, comb


def hyper_post(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """streams [T, S, D], output [T, D] -> [T, S, D]: stream k becomes post_k * output + sum over j of comb_jk * stream_j."""
    mixed = torch.matmul(comb.transpose(1, 2), streams.float())
    return mixed.addcmul_(post[:, :, None], output.float()[:, None]).to(streams.dtype)


def hyper_head(streams: Tensor, mixer: Mixer) -> Tensor:
    """streams [T, S, D] -> [T, D] in the streams' dtype."""
    pre = _sigmoid(_mixes(streams, mixer) * mixer.scale + mixer.base) + mixer.eps
    return (pre[:, :, None] * streams).sum(1).to(streams.dtype)
