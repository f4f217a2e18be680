"""Residual streams of which a layer computes one and predicts the others. Source: AltUp (Baykal et al. 2023), Gemma 3n."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.heads import Context, Layer, RmsNorm, activated, softcapped
from lamina.layers.rounding import rounded
from lamina.ops.gemm import Weight, linear

_SHORTEST = 1e-5


def _mean_square(x: Tensor) -> Tensor:
    """x [..., D] -> [..., 1]."""
    return x.square().sum(-1, keepdim=True) * (1 / x.shape[-1])


def _as_long_as(x: Tensor, length: Tensor) -> Tensor:
    """Rows x [T, D] at the length [T, 1]."""
    return x * length / _mean_square(x).clamp(min=_SHORTEST).sqrt()


@dataclass(frozen=True, slots=True)
class OpenStreams:
    """projections  S - 1 of [D, D].   table [V, L * P], projection [L * P, D] and its norm give each of L layers its input."""

    projections: tuple[Weight, ...]
    table: Tensor
    projection: Weight
    norm: RmsNorm
    inner: int

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Embedded rows x [T, D] -> streams [T, S, D]; leaves the layers' inputs, [T, P] each, in the context."""
        dtype = context.dtype
        tokens = torch.where(context.tokens < self.table.shape[0], context.tokens, 0)
        own = (self.table[tokens] * self.inner**0.5).unflatten(-1, (-1, self.inner))
        seen = rounded(linear(x, self.projection) * x.shape[-1] ** -0.5, dtype).unflatten(-1, (-1, self.inner))
        context.inputs.extend(rounded((self.norm.forward(seen) + own) * 2**-0.5, dtype).unbind(1))
        length = _mean_square(x).sqrt()
        others = [_as_long_as(linear(x, projection), length) for projection in self.projections]
        return rounded(torch.stack([x, *others], dim=1), dtype)


@dataclass(frozen=True, slots=True)
class CloseStreams:
    """projections  S - 1 of [D, D]."""

    projections: tuple[Weight, ...]

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [T, S, D] -> [T, D]."""
        total, length = x[:, 0], _mean_square(x[:, 0]).sqrt()
        for stream, projection in enumerate(self.projections, start=1):
            total = total + _as_long_as(linear(x[:, stream], projection), length)
        return rounded(total * (1 / x.shape[1]), context.dtype)


@dataclass(frozen=True, slots=True)
class Mixing:
    """How streams follow from each other: router [S, D] and its norm, predictions [S * S, S], corrections [S, S]."""

    router: Weight
    norm: RmsNorm
    predictions: Weight
    corrections: Weight

    def _modes(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, S]."""
        return softcapped(linear(self.norm.forward(x) * (1 / x.shape[-1]), self.router), 1.0)

    def predict(self, streams: Tensor, active: int) -> Tensor:
        """streams [T, S, D] before a layer -> what they would be after it."""
        shares = linear(self._modes(streams[:, active]), self.predictions).unflatten(-1, (streams.shape[1], -1))
        total = streams
        for stream in range(streams.shape[1]):
            total = total + shares[:, :, stream, None] * streams[:, None, stream]
        return total

    def correct(self, predicted: Tensor, active: int, computed: Tensor) -> Tensor:
        """predicted [T, S, D], of which stream `active` turned out as computed [T, D] -> [T, S, D]."""
        shares = linear(self._modes(computed), self.corrections) + 1
        return predicted + (computed - predicted[:, active])[:, None] * shares[..., None]


@dataclass(frozen=True, slots=True)
class Normed:
    """after(layer(before(x)))."""

    layer: Layer
    before: RmsNorm
    after: RmsNorm


@dataclass(frozen=True, slots=True)
class AltUp:
    """One layer. left [R, D] and right [D, R] with a norm are its second residual; gate [P, D] and back [D, P] with a norm put
    the layer's own input into the streams after the first.   number  of the layer.   scale [D] or None.
    """

    number: int
    active: int
    mixing: Mixing
    attention: Normed
    mlp: Normed
    left: Weight
    right: Weight
    laurel_norm: RmsNorm
    scale: Tensor | None
    gate: Weight
    back: Weight
    last: RmsNorm
    activation: str

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Streams [T, S, D] -> [T, S, D]."""
        dtype = context.dtype
        predicted = self.mixing.predict(x, self.active)
        active = predicted[:, self.active]
        normed = rounded(self.attention.before.forward(active), dtype)
        laurel = normed + self.laurel_norm.forward(linear(rounded(linear(normed, self.left), dtype), self.right))
        attended = active + self.attention.after.forward(self.attention.layer.forward(normed, context))
        both = rounded((attended + laurel) * (1 / math.sqrt(2)), dtype)
        inner = self.mlp.layer.forward(rounded(self.mlp.before.forward(both), dtype), context)
        corrected = self.mixing.correct(predicted, self.active, both + self.mlp.after.forward(inner))
        first = corrected[:, self.active]
        first = rounded(first if self.scale is None else first * self.scale, dtype)
        gated = activated(linear(first, self.gate), self.activation) * context.inputs[self.number]
        added = self.last.forward(linear(rounded(gated, dtype), self.back))
        return rounded(torch.cat([corrected[:, :1], corrected[:, 1:] + added[:, None]], dim=1), dtype)
