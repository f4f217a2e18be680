"""Layers that scan: a projection, a causal convolution, a selective scan, a gate, and a projection back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.heads import Context, RmsNorm
from lamina.layers.projection import Projection
from lamina.layers.rounding import rounded
from lamina.ops.conv import convolve
from lamina.ops.rope_norm import rms_norm
from lamina.ops.ssm import scan_channels, scan_heads, softplus
from lamina.ops.store import Store


@dataclass(frozen=True, slots=True)
class Convolution:
    """taps [W, C], oldest first; bias [C] or None.   store  the last inputs of each sequence."""

    taps: Tensor
    bias: Tensor | None
    store: Store

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [T, C] -> silu of the convolution [T, C]."""
        return rounded(convolve(x, self.taps, self.bias, self.store, context.sequences), context.dtype)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """decay  [H], or [C, N] for channels; <= 0.   skip [H] or [C].   step_bias likewise.   store  the state of each sequence."""

    decay: Tensor
    skip: Tensor
    step_bias: Tensor
    store: Store


@dataclass(frozen=True, slots=True)
class ChannelScanLayer:
    """C channels with N numbers each, whose steps, b and c are made from the channels.

    entry [2C, D], channels first, then gates.   selection [R + 2N, C]: steps of a low rank R, b and c; `norms` in this order.
    steps [C, R].   exit [D, C].
    """

    entry: Projection
    convolution: Convolution
    selection: Projection
    norms: tuple[RmsNorm, RmsNorm, RmsNorm]
    steps: Projection
    recurrence: Recurrence
    exit: Projection

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [T, D] -> [T, D]."""
        dtype, found = context.dtype, self.recurrence
        inner, gate = self.entry.forward(x, dtype).chunk(2, dim=-1)
        inner = self.convolution.forward(inner, context)
        rank, size = self.steps.weight.shape[1], found.decay.shape[1]
        chosen = self.selection.forward(inner, dtype).split([rank, size, size], dim=-1)
        low, b, c = (rounded(norm.forward(part), dtype) for norm, part in zip(self.norms, chosen, strict=True))
        steps = softplus(self.steps.forward(low, dtype) + found.step_bias)
        y = scan_channels(inner, steps, found.decay, b, c, found.skip, found.store, context.sequences)
        return self.exit.forward(rounded(_gated(y, gate), dtype), dtype)


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """Norm of each of `groups` equal parts of a row.   weight [inner].   before_gate  the gate multiplies what is normed."""

    weight: Tensor
    eps: float
    groups: int
    before_gate: bool

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [T, inner] -> [T, inner]."""
        x = x if self.before_gate else _gated(x, gate)
        normed = rms_norm(x.unflatten(-1, (self.groups, -1)), None, self.eps).flatten(-2).mul_(self.weight)
        return _gated(normed, gate) if self.before_gate else normed


@dataclass(frozen=True, slots=True)
class HeadScanLayer:
    """Heads of channels that share a step; groups of heads share b and c.

    entry [inner + C + H, D]: gates, then what the convolution reads (x of all heads, b and c of all groups), then steps.
    limits  of a step.   norm  None: the gate alone.   exit [D, inner].   shape  (H, P, G, N).
    """

    entry: Projection
    convolution: Convolution
    recurrence: Recurrence
    limits: tuple[float, float]
    norm: GatedNorm | None
    exit: Projection
    shape: tuple[int, int, int, int]

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [T, D] -> [T, D]."""
        dtype, found = context.dtype, self.recurrence
        heads, width, groups, size = self.shape
        inner, mixed = heads * width, groups * size
        gate, inputs, steps = self.entry.forward(x, dtype).split([inner, inner + 2 * mixed, heads], dim=-1)
        values, b, c = self.convolution.forward(inputs, context).split([inner, mixed, mixed], dim=-1)
        steps = softplus(steps + found.step_bias).clamp_(*self.limits)
        parts = values.unflatten(1, (heads, width)), b.unflatten(1, (groups, size)), c.unflatten(1, (groups, size))
        y = scan_heads(parts[0], steps, found.decay, parts[1], parts[2], found.skip, found.store, context.sequences).flatten(1)
        y = _gated(y, gate) if self.norm is None else self.norm.forward(y, gate)
        return self.exit.forward(rounded(y, dtype), dtype)


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * silu(gate)."""
    return (gate / torch.exp(-gate).add_(1)).mul_(x)
