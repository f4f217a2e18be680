"""The definition, in plain PyTorch; all in fp32. Source: manifold-constrained hyper-connections, DeepSeek-V4 report."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lamina.ops.gemm import linear


@dataclass(frozen=True, slots=True)
class Mixer:
    """Weights of one mixer over S streams of width D; rows in the order pre, post, comb (row-major [source, destination]).

    fn [2S + S*S or S, S*D] fp32.   base [rows].   scale [rows], the mixer's three scales (or the head's one) repeated.
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
    """[T, S, D] -> [T, rows]: scaled and biased products of the normed streams; the norm is applied to the few outputs."""
    flat = streams.flatten(1).float()
    norm = torch.rsqrt(flat.square().mean(-1, keepdim=True) + mixer.norm_eps)
    return linear(flat, mixer.fn) * norm * mixer.scale + mixer.base


def _balanced(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """comb [T, S, S] positive -> the same after alternating column and row normalisations, ending on columns.

    Tokens go last, so that each of the many small operations is one pass; on a CPU numpy runs them, whose calls cost less.
    """
    on_cpu = comb.device.type == "cpu"
    c = comb.permute(1, 2, 0).contiguous()  # [S, S, T]
    if on_cpu:
        a, tiny = c.numpy(), np.float32(eps)
        a /= np.add.reduce(a, axis=0, keepdims=True) + tiny
        for _ in range(iterations - 1):
            a /= np.add.reduce(a, axis=1, keepdims=True) + tiny
            a /= np.add.reduce(a, axis=0, keepdims=True) + tiny
    else:
        c /= c.sum(0, keepdim=True) + eps
        for _ in range(iterations - 1):
            c /= c.sum(1, keepdim=True) + eps
            c /= c.sum(0, keepdim=True) + eps
    return c.permute(2, 0, 1)


def hyper_pre(streams: Tensor, mixer: Mixer) -> tuple[Tensor, Tensor, Tensor]:
    """streams [T, S, D] -> (collapsed [T, D] in the streams' dtype, post [T, S] fp32, comb [T, S, S] fp32)."""
    num = streams.shape[1]
    mixes = _mixes(streams, mixer)
    gates = _sigmoid(mixes[:, : 2 * num])
    comb = mixes[:, 2 * num :].unflatten(-1, (num, num)).softmax(-1) + mixer.eps
    collapsed = ((gates[:, :num, None] + mixer.eps) * streams).sum(1)
    return collapsed.to(streams.dtype), 2 * gates[:, num:], _balanced(comb, mixer.iterations, mixer.eps)


def hyper_post(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """streams [T, S, D], output [T, D] -> [T, S, D]: stream k becomes post_k * output + sum over j of comb_jk * stream_j."""
    mixed = torch.matmul(comb.transpose(1, 2), streams.float())
    return mixed.addcmul_(post[:, :, None], output.float()[:, None]).to(streams.dtype)


def hyper_head(streams: Tensor, mixer: Mixer) -> Tensor:
    """streams [T, S, D] -> [T, D] in the streams' dtype."""
    pre = _sigmoid(_mixes(streams, mixer)) + mixer.eps
    return (pre[:, :, None] * streams).sum(1).to(streams.dtype)
