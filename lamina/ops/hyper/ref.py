"""The definition, in plain PyTorch; all in fp32. Source: manifold-constrained hyper-connections, DeepSeek-V4 report."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lamina.ops.gemm import Weight, linear


@dataclass(frozen=True, slots=True)
class Mixer:
    """Weights of one mixer over S streams of width D; rows in the order pre, post, comb (row-major [source, destination]).

    fn [2S + S*S or S, S*D] fp32.   base [rows].   scale [rows], the mixer's three scales (or the head's one) repeated.
    """

    fn: Weight
    base: Tensor
    scale: Tensor
    iterations: int
    eps: float
    norm_eps: float


def _sigmoid(x: Tensor) -> Tensor:
    # not torch.sigmoid: its vector body and scalar tail give different bits
    return torch.exp(-x).add_(1).reciprocal_()


def _mixes(streams: Tensor, mixer: Mixer) -> Tensor:
    """[T, S, D] -> [T, rows]: scaled and biased products of the normed streams; the norm is applied to the few outputs."""
    flat = streams.flatten(1).float()
    norm = flat.square().sum(-1, keepdim=True).mul_(1 / flat.shape[-1]).add_(mixer.norm_eps).rsqrt_()
    return linear(flat, mixer.fn).mul_(norm).mul_(mixer.scale).add_(mixer.base)


def _balanced(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """comb [T, S, S] positive -> the same after alternating column and row normalisations, ending on columns.

    Tokens go last, so that each of the many small operations is one pass; on a CPU numpy runs them, whose calls cost less.
    """
    matrix = comb.permute(1, 2, 0).contiguous()  # [S, S, T]
    if comb.device.type == "cpu":
        _balance(matrix.numpy(), iterations, np.float32(eps))
    else:
        matrix /= matrix.sum(0) + eps
        for _ in range(iterations - 1):
            matrix /= matrix.sum(1, keepdim=True) + eps
            matrix /= matrix.sum(0) + eps
    return matrix.permute(2, 0, 1)


def _balance(matrix: np.ndarray, iterations: int, eps: np.float32) -> None:
    """The same in place for an array [S, S, T]. Sums start from eps; positional arguments and reused outputs save calls."""
    columns, rows = np.empty_like(matrix[0]), np.empty_like(matrix[:, :1])
    total, divide, flat_rows = np.add.reduce, np.divide, rows[:, 0]
    total(matrix, 0, None, columns, False, eps)
    divide(matrix, columns, matrix)
    for _ in range(iterations - 1):
        total(matrix, 1, None, flat_rows, False, eps)
        divide(matrix, rows, matrix)
        total(matrix, 0, None, columns, False, eps)
        divide(matrix, columns, matrix)


def hyper_pre(streams: Tensor, mixer: Mixer) -> tuple[Tensor, Tensor, Tensor]:
    """streams [T, S, D] -> (collapsed [T, D] in the streams' dtype, post [T, S] fp32, comb [T, S, S] fp32)."""
    num = streams.shape[1]
    mixes = _mixes(streams, mixer)
    gates = _sigmoid(mixes[:, : 2 * num])
    comb = mixes[:, 2 * num :].reshape(-1, num, num).softmax(-1) + mixer.eps
    collapsed = ((gates[:, :num, None] + mixer.eps) * streams).sum(1)
    return collapsed.to(streams.dtype), 2 * gates[:, num:], _balanced(comb, mixer.iterations, mixer.eps)


def hyper_post(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """streams [T, S, D], output [T, D] -> [T, S, D]: stream k becomes post_k * output + sum over j of comb_jk * stream_j."""
    x, out = streams.float(), post[:, :, None] * output.float()[:, None]
    for source in range(streams.shape[1]):  # one batched product of tiny matrices takes 4 to 20 times as long
        out.addcmul_(comb[:, source, :, None], x[:, source, None])
    return out.to(streams.dtype)


def hyper_head(streams: Tensor, mixer: Mixer) -> Tensor:
    """streams [T, S, D] -> [T, D] in the streams' dtype."""
    pre = _sigmoid(_mixes(streams, mixer)) + mixer.eps
    return (pre[:, :, None] * streams).sum(1).to(streams.dtype)
