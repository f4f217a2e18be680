"""The layers of `altup.py` on a GPU. Sums over a row are products with ones, whose order does not depend on the other rows;
everything else works element by element."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.device_heads import DeviceContext, DeviceHeads, DeviceLayer, row_means
from lamina.ops.gemm.stored import Activation, StoredWeight

_SHORTEST = 1e-5


def _as_long_as(x: Tensor, length: Tensor, context: DeviceContext) -> Tensor:
    """Rows x [T, D] at the length [T, 1]."""
    return x * length / row_means(x * x, context).clamp(min=_SHORTEST).sqrt()


def _times(x: Tensor, weight: StoredWeight, context: DeviceContext) -> Tensor:
    """x [T, in] -> fp32 [T, out]."""
    return context.times(Activation(x.to(context.dtype).contiguous()), weight, torch.float32)


def _rounded(x: Tensor, context: DeviceContext) -> Tensor:
    return x.to(context.dtype).float()


@dataclass(frozen=True, slots=True)
class DeviceNorm:
    """x / sqrt(mean of squares + eps) * weight [D] fp32."""

    weight: Tensor
    eps: float

    def forward(self, x: Tensor, context: DeviceContext) -> Tensor:
        """x [T, D] fp32 -> fp32."""
        return x / (row_means(x * x, context) + self.eps).sqrt() * self.weight


@dataclass(frozen=True, slots=True)
class DeviceOpening:
    """`altup.OpenStreams`.   table  [V, L * P] as stored."""

    projections: tuple[StoredWeight, ...]
    table: Tensor
    projection: StoredWeight
    norm: DeviceNorm
    inner: int

    def forward(self, x: Tensor, tokens: Tensor, context: DeviceContext) -> tuple[list[Tensor], list[Tensor]]:
        """Embedded rows x [T, D] -> streams, [T, D] fp32 each; the layers' inputs, [T, P] each."""
        x = x.float()
        known = torch.where(tokens < self.table.shape[0], tokens, 0)
        own = (self.table.index_select(0, known).float() * self.inner**0.5).view(-1, self.inner)
        seen = _rounded(_times(x, self.projection, context) * x.shape[-1] ** -0.5, context).view(-1, self.inner)
        inputs = _rounded((self.norm.forward(seen, context) + own) * 2**-0.5, context).view(x.shape[0], -1, self.inner)
        length = row_means(x * x, context).sqrt()
        others = [_as_long_as(_times(x, projection, context), length, context) for projection in self.projections]
        return [x, *(_rounded(other, context) for other in others)], list(inputs.unbind(1))


@dataclass(frozen=True, slots=True)
class DeviceClosing:
    """`altup.CloseStreams`."""

    projections: tuple[StoredWeight, ...]

    def forward(self, streams: list[Tensor], context: DeviceContext) -> Tensor:
        """Streams -> [T, D] fp32."""
        total, length = streams[0], row_means(streams[0] * streams[0], context).sqrt()
        for stream, projection in zip(streams[1:], self.projections, strict=True):
            total = total + _as_long_as(_times(stream, projection, context), length, context)
        return _rounded(total * (1 / len(streams)), context)


@dataclass(frozen=True, slots=True)
class DeviceNormed:
    """after(layer(before(x)))."""

    layer: DeviceLayer
    before: DeviceNorm
    after: DeviceNorm

    def forward(self, normed: Tensor, context: DeviceContext) -> Tensor:
        """What comes of rows that `before` has normed and rounded."""
        found = self.layer.forward(Activation(normed.to(context.dtype).contiguous()), context).float()
        if self.layer.bias is not None:
            found = found + self.layer.bias
        return self.after.forward(_rounded(found, context), context)


@dataclass(frozen=True, slots=True)
class DeviceAltUp:
    """`altup.AltUp`.   predictions [S * S, S], corrections [S, S] fp32."""

    active: int
    router: StoredWeight
    router_norm: DeviceNorm
    predictions: Tensor
    corrections: Tensor
    attention: DeviceNormed
    mlp: DeviceNormed
    left: StoredWeight
    right: StoredWeight
    laurel_norm: DeviceNorm
    scale: Tensor | None
    gate: StoredWeight
    back: StoredWeight
    last: DeviceNorm

    def forward(self, streams: list[Tensor], given: Tensor, context: DeviceContext) -> list[Tensor]:
        """Streams, and what the layer gets beside them [T, P] -> streams."""
        count, here = len(streams), self.active
        shares = _mixed(self._modes(streams[here], context), self.predictions)
        predicted = []
        for number, stream in enumerate(streams):
            total = stream
            for other in range(count):
                place = number * count + other
                total = total + shares[:, place : place + 1] * streams[other]
            predicted.append(total)
        active = predicted[here]
        normed = _rounded(self.attention.before.forward(active, context), context)
        laurel = normed + self.laurel_norm.forward(_times(_times(normed, self.left, context), self.right, context), context)
        attended = active + self.attention.forward(normed, context)
        both = _rounded((attended + laurel) * (1 / math.sqrt(2)), context)
        computed = both + self.mlp.forward(_rounded(self.mlp.before.forward(both, context), context), context)
        shares = _mixed(self._modes(computed, context), self.corrections) + 1
        off = computed - active
        corrected = [stream + off * shares[:, number : number + 1] for number, stream in enumerate(predicted)]
        first = corrected[here] if self.scale is None else corrected[here] * self.scale
        gate = _times(_rounded(first, context), self.gate, context)
        gate = gate / (torch.exp((gate * gate * 0.044715 + 1.0) * gate * (-2 * 0.7978845608028654)) + 1)
        added = self.last.forward(_times(gate * given, self.back, context), context)
        return [_rounded(corrected[0], context), *(_rounded(stream + added, context) for stream in corrected[1:])]

    def _modes(self, x: Tensor, context: DeviceContext) -> Tensor:
        """x [T, D] -> [T, S]."""
        return torch.tanh(_times(self.router_norm.forward(x, context) * (1 / x.shape[-1]), self.router, context))


def _mixed(modes: Tensor, weights: Tensor) -> Tensor:
    """modes [T, S], weights [n, S] -> [T, n], each sum from the first mode to the last."""
    total = modes[:, :1] * weights[:, 0]
    for mode in range(1, modes.shape[1]):
        total = total + modes[:, mode : mode + 1] * weights[:, mode]
    return total


@dataclass(frozen=True, slots=True)
class DeviceStreams:
    """A whole decoder over several streams.   finishing  layers whose rows others read, which are kept at the end."""

    opening: DeviceOpening
    layers: tuple[DeviceAltUp, ...]
    closing: DeviceClosing
    norm: DeviceNorm
    finishing: tuple[DeviceHeads, ...]

    def forward(self, x: Tensor, tokens: Tensor, context: DeviceContext) -> Tensor:
        """Embedded rows x [T, D] -> final hidden vectors [T, D] fp32, normed."""
        streams, inputs = self.opening.forward(x, tokens, context)
        for layer, given in zip(self.layers, inputs, strict=True):
            streams = layer.forward(streams, given, context)
        for heads in self.finishing:
            heads.finish(context)
        return self.norm.forward(self.closing.forward(streams, context), context)
