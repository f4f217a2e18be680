"""Sinkhorn's rounds of the hyper-connections, with their gradient: one Triton kernel each way, or autograd on a CPU."""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build: `sinkhorn` uses autograd there
    triton = None

EPS = 1e-6
ROUNDS = 20
_HALVES = 2 * ROUNDS - 1  # columns after the softmax, then rows and columns in turn


def sinkhorn(logits: Tensor) -> Tensor:
    """Column-stochastic mixing matrices [T, 4, 4] of fp32 logits [T, 4, 4] (source, destination): reference section 5.2."""
    if logits.is_cuda:
        return _Sinkhorn.apply(logits.contiguous())
    c = torch.softmax(logits, dim=-1) + EPS
    for half in range(_HALVES):
        c = c / (c.sum(dim=1 if half % 2 == 0 else 2, keepdim=True) + EPS)
    return c


if triton is not None:

    @triton.jit
    def _forward(logits, kept, out, rows, HALVES: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        at = row[:, None, None] * 16 + tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        mask = row[:, None, None] < rows
        x = tl.load(logits + at, mask=mask, other=0.0)
        x = tl.exp(x - tl.max(x, axis=2)[:, :, None])
        x = x / tl.sum(x, axis=2)[:, :, None]
        tl.store(kept + at, x, mask=mask)
        x += EPS
        for half in range(HALVES):
            if half % 2 == 0:
                x = x / (tl.sum(x, axis=1)[:, None, :] + EPS)
            else:
                x = x / (tl.sum(x, axis=2)[:, :, None] + EPS)
            tl.store(kept + (half + 1) * rows.to(tl.int64) * 16 + at, x, mask=mask)
        tl.store(out + at, x, mask=mask)

    @triton.jit
    def _backward(kept, gradient, out, rows, HALVES: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        at = row[:, None, None] * 16 + tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        mask = row[:, None, None] < rows
        g = tl.load(gradient + at, mask=mask, other=0.0)
        for step in range(HALVES):
            half = HALVES - 1 - step
            y = tl.load(kept + (half + 1) * rows.to(tl.int64) * 16 + at, mask=mask, other=0.25)
            x = tl.load(kept + half * rows.to(tl.int64) * 16 + at, mask=mask, other=0.25)
            if half == 0:
                x += EPS
            # y = x / (sum x + eps)  =>  dx = (dy - sum(dy y)) / (sum x + eps)
            if half % 2 == 0:
                g = (g - tl.sum(g * y, axis=1)[:, None, :]) / (tl.sum(x, axis=1)[:, None, :] + EPS)
            else:
                g = (g - tl.sum(g * y, axis=2)[:, :, None]) / (tl.sum(x, axis=2)[:, :, None] + EPS)
        p = tl.load(kept + at, mask=mask, other=0.25)
        g = p * (g - tl.sum(g * p, axis=2)[:, :, None])
        tl.store(out + at, g, mask=mask)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        rows = logits.shape[0]
        kept = logits.new_empty((_HALVES + 1, rows, 16))
        out = torch.empty_like(logits)
        _forward[(triton.cdiv(rows, 64),)](logits, kept, out, rows, _HALVES, EPS, 64, num_warps=4)
        ctx.save_for_backward(kept)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        rows = kept.shape[1]
        gradient = gradient.contiguous()
        out = torch.empty_like(gradient)
        _backward[(triton.cdiv(rows, 64),)](kept, gradient, out, rows, _HALVES, EPS, 64, num_warps=4)
        return out
