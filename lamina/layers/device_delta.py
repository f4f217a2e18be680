"""The layers of `delta.py` and `lightning.py` on a GPU: weights as stored, the ops' kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.device_heads import DeviceContext
from lamina.layers.device_scan import DeviceConvolution
from lamina.ops.delta.triton import Rule, gated_delta
from lamina.ops.gemm.stored import Activation, StoredWeight
from lamina.ops.linear_attention.triton import Form, activate, decayed_attention, gate_normed
from lamina.ops.quantise.triton import quantise_rows
from lamina.ops.ssm.triton import GroupNorm, gate_rows
from lamina.ops.store import Store


@dataclass(frozen=True, slots=True)
class DeviceDelta:
    """`delta.DeltaLayer`.

    entry  [2 G Dk + 2 H Dv (+ 2 H), D]: queries, keys and values, gates; and what is learnt, and steps, unless they are `gates`
           [2 H, D], where formats differ.
    """

    entry: StoredWeight
    gates: StoredWeight | None
    convolution: DeviceConvolution
    rule: Rule
    store: Store
    norm: GroupNorm
    w_out: StoredWeight

    @property
    def bias(self) -> Tensor | None:
        """None: it has none."""
        return None

    @property
    def reads_fp8(self) -> bool:
        """Whether its input is multiplied as fp8 where that is done."""
        return self.entry.is_fp8

    def forward(self, x: Activation, context: DeviceContext) -> Tensor:
        """x [T, D] -> [T, D]."""
        rule, dtype = self.rule, context.dtype
        values = rule.heads * rule.value_dim
        mixed = 2 * rule.groups * rule.key_dim + values
        found = context.times(x, self.entry, dtype)
        gates = found[:, mixed + values :] if self.gates is None else context.times(x, self.gates, dtype)
        learns, steps = gates.chunk(2, dim=-1)
        inputs = self.convolution.forward(found[:, :mixed], context)
        y = gated_delta(inputs, learns, steps, rule, self.store, context.rows)
        out = gate_rows(y, found[:, mixed : mixed + values], self.norm, context.rows, dtype)
        return context.times(_read(out, self.w_out, context), self.w_out, dtype)


@dataclass(frozen=True, slots=True)
class DeviceLightning:
    """`lightning.LightningLayer`.

    entry   [3 H dim (+ H dim), D]: queries, keys and values; and gates, unless they are `gates` [H dim, D], where formats differ.
    powers  [H, CHUNK + 1] fp32 of the heads' decays.   norm  weight [H dim] fp32, eps.
    """

    entry: StoredWeight
    gates: StoredWeight | None
    powers: Tensor
    store: Store
    norm: tuple[Tensor, float]
    w_out: StoredWeight
    dim: int
    activation: str

    @property
    def bias(self) -> Tensor | None:
        """None: it has none."""
        return None

    @property
    def reads_fp8(self) -> bool:
        """Whether its input is multiplied as fp8 where that is done."""
        return self.entry.is_fp8

    def forward(self, x: Activation, context: DeviceContext) -> Tensor:
        """x [T, D] -> [T, D]."""
        rows, dtype, (weight, eps) = context.rows, context.dtype, self.norm
        mixed = 3 * weight.shape[0]
        found = context.times(x, self.entry, dtype)
        gates = found[:, mixed:] if self.gates is None else context.times(x, self.gates, dtype)
        inputs = activate(found[:, :mixed], self.activation, rows, dtype)
        y = decayed_attention(inputs, self.powers, self.dim, self.store, rows, _form(context))
        out = gate_normed(y, gates, weight, eps, rows, dtype)
        return context.times(_read(out, self.w_out, context), self.w_out, dtype)


def _form(context: DeviceContext) -> Form:
    """How rows are taken in: one after another, or in chunks, whose bits follow from where a request is cut."""
    is_exact = context.is_strict or context.order == "decode" or context.dtype == torch.float32
    return "rows" if is_exact else "chunks"


def _read(values: Tensor, weight: StoredWeight, context: DeviceContext) -> Activation:
    """Rows as a product reads them."""
    return quantise_rows(values) if context.has_fp8 and weight.is_fp8 else Activation(values)
