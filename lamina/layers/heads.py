"""Attention with grouped keys and values, and feed-forward layers of the usual kind.

Rotated dims are the last of a head, in pairs (2i, 2i + 1): whoever loads a checkpoint that has them otherwise permutes the rows
of its projections, which leaves every product of a query with a key as it is.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lamina.layers.projection import product
from lamina.layers.rounding import rounded
from lamina.ops.attend_heads import HeadsCase, Past, attend_heads, softcapped, store_rows
from lamina.ops.attend_heads.native import NativeHeads, gate
from lamina.ops.gated.native import gated
from lamina.ops.gemm import Weight, linear
from lamina.ops.gemm.native import NativeWeight
from lamina.ops.rope_norm import rms_norm, rotate
from lamina.ops.sequences import Sequences
from lamina.ops.store import HeadsCodec

#: two vectors of the widest kind: rows of a multiple of them have no tail that is computed one by one
_VECTORS = 32
#: operations on so many elements run on one thread
_UNSPLIT = 1 << 14
#: rows of a feed-forward layer whose values between its products lie near the processor
_NEAR_ROWS = 256

__all__ = ["Context", "GatedMlp", "GroupedAttention", "RmsNorm", "softcapped"]


@dataclass(frozen=True, slots=True)
class Context:
    """What all layers of a step share.

    tokens  [T] ids.   angles  (cos, sin) [T, r] of each rotary embedding.   dtype  what is kept between products.
    own     rows as stored of layers whose memory other layers read, by layer; kept until the end of the step.
    inputs  [T, n] what each layer gets beside the residual, in models where layers do.
    """

    tokens: Tensor
    sequences: Sequences
    angles: tuple[tuple[Tensor, Tensor], ...]
    dtype: torch.dtype
    own: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)


class Layer(Protocol):
    """What a part of a model is once it has its weights."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [T, D], normed -> what is added to the residual [T, D]."""
        ...


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x / sqrt(mean of squares + eps) * weight, or a layer norm (mean taken off first); weight None: none."""

    weight: Tensor | None
    eps: float
    centres: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n] -> fp32 [..., n]."""
        if self.centres:
            x = x.float()
            x = x - x.sum(-1, keepdim=True) * (1 / x.shape[-1])
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """One attention layer.

    w_in    [(H + 2K) * d (+ H * d of gates at the end), D], queries, keys and values stacked; b_in likewise or None.
    w_out   [D, H * dv]; b_out or None.   angle  which of the context's angles rotates; None: no positions.
    shares  the layer whose rows are read instead of own ones: w_in then has queries alone.   is_shared  others read this layer's.
    narrows where not all rows are wanted, the wanted ones alone come out: [W, D].
    """

    w_in: Weight
    b_in: Tensor | None
    w_out: Weight
    b_out: Tensor | None
    past: Past
    codec: HeadsCodec
    case: HeadsCase
    angle: int | None
    q_norm: RmsNorm | None = None
    k_norm: RmsNorm | None = None
    v_norm: RmsNorm | None = None
    norm_all: bool = False
    norm_after_rope: bool = False
    is_gated: bool = False
    shares: int | None = None
    is_shared: bool = False
    layer: int = 0
    temperature: tuple[float, float, float] | None = None
    narrows: bool = False
    kernels: NativeHeads | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [T, D] -> [T, D]."""
        if self.kernels is not None:
            return self._by_kernels(x, context, self.kernels)
        case, codec, dtype, sequences = self.case, self.codec, context.dtype, context.sequences
        dim, num_kv = codec.key_dim, 0 if self.shares is not None else case.kv_heads
        rows = product(x, self.w_in, self.b_in, dtype)
        widths = [(case.heads + num_kv) * dim, num_kv * codec.value_dim, case.heads * dim * self.is_gated]
        both, values, gates = rows.split_with_sizes(widths, dim=-1)
        queries, keys = self._positioned(both.unflatten(-1, (-1, dim)), context)
        if self.temperature is not None:
            queries = queries * self._temperatures(sequences.positions)
        if self.shares is not None:
            own = context.own[self.shares]
        else:
            values = values.unflatten(-1, (num_kv, codec.value_dim))
            own = codec.pack(keys, values if self.v_norm is None else rounded(self.v_norm.forward(values), dtype))
        in_log = self.past.store.place.kind == "block"
        wanted = sequences.wanted if self.narrows else None
        if self.shares is None and (in_log or wanted is not None):
            store_rows(own, self.past, sequences)
        if wanted is not None:
            queries, gates = queries.index_select(0, wanted), gates.index_select(0, wanted)
            own, sequences = tuple(part.index_select(0, wanted) for part in own), sequences.of_wanted()
        out = rounded(attend_heads(queries, own, self.past, case, sequences).flatten(1), dtype)
        if self.shares is None and not in_log and not self.is_shared and wanted is None:
            store_rows(own, self.past, sequences)
        if self.is_shared:
            context.own[self.layer] = own
        if self.is_gated:
            out = rounded(out / (torch.exp(-gates) + 1), dtype)
        return product(out, self.w_out, self.b_out, dtype)

    def _by_kernels(self, x: Tensor, context: Context, kernels: NativeHeads) -> Tensor:
        """The same by the C kernels."""
        dtype, sequences = context.dtype, context.sequences
        turns = None if self.angle is None else context.angles[self.angle]
        warmth = None
        if self.temperature is not None:
            warmth = sequences.remember(("warmth", self.temperature), lambda: self._temperatures(sequences.positions).flatten())
        queries, own, gates = kernels.project(linear(x, self.w_in), turns, warmth)
        own = own if self.shares is None else context.own[self.shares]
        in_log = self.past.store.place.kind == "block"
        wanted = sequences.wanted if self.narrows else None
        if self.shares is None and (in_log or wanted is not None):
            kernels.keep(own, sequences)
        if wanted is not None:
            queries, own = queries.index_select(0, wanted), tuple(part.index_select(0, wanted) for part in own)
            gates = None if gates is None else gates.index_select(0, wanted)
            sequences = sequences.of_wanted()
        out = kernels.attend(queries, own, sequences)
        if self.shares is None and not in_log and not self.is_shared and wanted is None:
            kernels.keep(own, sequences)
        if self.is_shared:
            context.own[self.layer] = own
        if gates is not None:
            gate(out, gates, dtype)
        return product(out, self.w_out, self.b_out, dtype)

    def finish(self, context: Context) -> None:
        """After the last layer: keeps rows that other layers have read."""
        if self.is_shared and self.past.store.place.kind != "block":
            store_rows(context.own[self.layer], self.past, context.sequences)

    def _positioned(self, both: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Queries [T, H, d] and keys [T, K, d] normed and rotated."""
        heads = self.case.heads
        if not self.norm_after_rope:
            both = self._normed(both, context.dtype)
        if self.angle is not None:
            cos, sin = context.angles[self.angle]
            width = cos.shape[-1]
            if width % _VECTORS == 0 and both.stride(0) % 2 == 0 and both.shape[-1] % 2 == 0 and both.storage_offset() % 2 == 0:
                turns = context.sequences.remember(
                    ("turns", self.angle), lambda: torch.complex(cos[:, ::2], sin[:, 1::2])[:, None]
                )
                pairs = torch.view_as_complex(both[..., -width:].unflatten(-1, (-1, 2)))
                for rows in _pieces(pairs.shape[0], both.shape[1] * width):
                    pairs[rows].mul_(turns[rows])
            elif width == both.shape[-1]:
                both = rotate(both, cos[:, None], sin[:, None])
            else:
                both = torch.cat([both[..., :-width], rotate(both[..., -width:], cos[:, None], sin[:, None])], dim=-1)
            both = rounded(both, context.dtype)
        if self.norm_after_rope:
            both = self._normed(both, context.dtype)
        return both[:, :heads], both[:, heads:]

    def _normed(self, both: Tensor, dtype: torch.dtype) -> Tensor:
        if self.q_norm is None and self.k_norm is None:
            return both
        parts = [both[:, : self.case.heads], both[:, self.case.heads :]]
        for number, norm in enumerate((self.q_norm, self.k_norm)):
            part = parts[number]
            if norm is not None and part.shape[1]:
                parts[number] = norm.forward(part.flatten(1)).view(part.shape) if self.norm_all else norm.forward(part)
        return rounded(torch.cat(parts, dim=1), dtype)

    def _temperatures(self, positions: Tensor) -> Tensor:
        assert self.temperature is not None
        step, amount, first = self.temperature
        return (torch.log(torch.floor((positions.float() + first) / step) + 1.0) * amount + 1.0)[:, None, None]


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate.

    w_in [2I or I, D], gate rows first; b_in, b_out or None; w_out [D, I].   multipliers  of the gate, and of the result.
    cut  the gate counts by how far it lies above its mean plus so many standard deviations, else 0; None: as it is.
    """

    w_in: Weight
    b_in: Tensor | None
    w_out: Weight
    b_out: Tensor | None
    activation: str
    has_gate: bool = True
    multipliers: tuple[float, float] = (1.0, 1.0)
    cut: float | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [T, D] -> [T, D]."""
        if x.shape[0] > _NEAR_ROWS:
            return torch.cat([self.forward(rows, context) for rows in x.split(_NEAR_ROWS)])
        inner = product(x, self.w_in, self.b_in, torch.float32)
        if isinstance(self.w_in, NativeWeight) and self.cut is None:
            inner = gated(inner, self.activation, self.has_gate, self.multipliers[0], context.dtype)
        elif self.has_gate:
            gate, up = inner.chunk(2, dim=-1)
            gate = gate * self.multipliers[0] if self.multipliers[0] != 1 else gate
            gate = gate if self.cut is None else _above(gate, self.cut)
            inner = activated(gate, self.activation).mul_(up)
        else:
            inner = activated(inner, self.activation)
        inner = rounded(inner, context.dtype)
        if self.multipliers[1] == 1:
            return product(inner, self.w_out, self.b_out, context.dtype)
        return rounded(product(inner, self.w_out, self.b_out, torch.float32) * self.multipliers[1], context.dtype)


def _pieces(num_rows: int, width: int) -> list[slice]:
    """Rows so few that an operation on them is not split among threads: a split may end inside a vector."""
    step = max(1, _UNSPLIT // max(1, width))
    return [slice(first, first + step) for first in range(0, num_rows, step)]


def _above(x: Tensor, cut: float) -> Tensor:
    """x [T, n], less its mean and `cut` standard deviations, at least 0."""
    share = 1 / x.shape[-1]
    x = x - x.sum(-1, keepdim=True) * share
    return (x - (x.square().sum(-1, keepdim=True) * share).sqrt() * cut).clamp_(min=0)


def activated(x: Tensor, activation: str) -> Tensor:
    """silu, gelu_tanh or relu2 of x [T, n], a new tensor.

    Torch's own give different bits in their vector body and in their scalar tail: they are used where there can be no tail.
    """
    if activation != "relu2" and x.dim() == 2 and x.shape[1] % _VECTORS == 0 and x.shape[1] <= _UNSPLIT:
        found = torch.empty(x.shape)
        for rows in _pieces(*x.shape):
            if activation == "silu":
                torch.ops.aten.silu.out(x[rows], out=found[rows])
            else:
                torch.ops.aten.gelu.out(x[rows], approximate="tanh", out=found[rows])
        return found
    if activation == "silu":
        return x / (torch.exp(-x).add_(1))
    if activation == "relu2":
        return x.clamp(min=0).square_()
    if activation == "gelu_tanh":  # 0.5 x (1 + tanh(y)) = x / (1 + exp(-2y))
        y = (x * x * 0.044715 + 1.0).mul_(x).mul_(-2 * 0.7978845608028654)
        return x / torch.exp(y).add_(1)
    raise ValueError(f"activation={activation!r}, allowed: silu, gelu_tanh, relu2")
