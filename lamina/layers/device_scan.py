"""The layers of `scan.py` on a GPU: weights as stored, the ops' kernels."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lamina.layers.device_heads import DeviceContext, DeviceLayer
from lamina.ops.conv.triton import convolve
from lamina.ops.gemm.stored import Activation, StoredWeight
from lamina.ops.quantise.triton import quantise_rows
from lamina.ops.ssm.triton import GroupNorm, Selection, gate_rows, norm_parts, scan_channels, scan_heads
from lamina.ops.store import Store


@dataclass(frozen=True, slots=True)
class DeviceProjection:
    """A product.   factors  of its columns [out] fp32, or None.   bias [out] fp32, which the factors multiply too, or None."""

    weight: StoredWeight
    bias: Tensor | None
    factors: Tensor | None = None

    def forward(self, x: Activation, context: DeviceContext) -> Tensor:
        """x [T, in] -> [T, out]."""
        if self.bias is None and self.factors is None:
            return context.times(x, self.weight, context.dtype)
        found = context.times(x, self.weight, torch.float32)
        if self.bias is not None:
            found = found + self.bias
        return (found if self.factors is None else found * self.factors).to(context.dtype)


@dataclass(frozen=True, slots=True)
class DeviceConvolution:
    """`scan.Convolution`."""

    taps: Tensor
    bias: Tensor | None
    store: Store

    def forward(self, x: Tensor, context: DeviceContext) -> Tensor:
        """x [T, C] -> silu of the convolution [T, C]."""
        return convolve(x, self.taps, self.bias, self.store, context.rows, context.dtype)


@dataclass(frozen=True, slots=True)
class DeviceHeadScan:
    """`scan.HeadScanLayer`.   bias  of the result, which whoever takes it adds."""

    entry: DeviceProjection
    convolution: DeviceConvolution
    selection: Selection
    store: Store
    norm: GroupNorm | None
    w_out: StoredWeight
    bias: Tensor | None
    shape: tuple[int, int, int, int]

    @property
    def reads_fp8(self) -> bool:
        """Whether its input is multiplied as fp8 where that is done."""
        return self.entry.weight.is_fp8

    def forward(self, x: Activation, context: DeviceContext) -> Tensor:
        """x [T, D] -> [T, D]."""
        heads, width, groups, size = self.shape
        inner, mixed = heads * width, groups * size
        gate, inputs, steps = self.entry.forward(x, context).split([inner, inner + 2 * mixed, heads], dim=-1)
        values, b, c = self.convolution.forward(inputs, context).split([inner, mixed, mixed], dim=-1)
        y = scan_heads(values, steps, self.selection, b, c, groups, self.store, context.rows)
        return _left(y, gate, self.norm, self.w_out, self.bias, context)


@dataclass(frozen=True, slots=True)
class DeviceChannelScan:
    """`scan.ChannelScanLayer`.   norms  of steps, b and c.   bias  of the result, which whoever takes it adds."""

    entry: DeviceProjection
    convolution: DeviceConvolution
    chosen: StoredWeight
    norms: tuple[tuple[Tensor, float], tuple[Tensor, float], tuple[Tensor, float]]
    steps: StoredWeight
    selection: Selection
    store: Store
    w_out: StoredWeight
    bias: Tensor | None

    @property
    def reads_fp8(self) -> bool:
        """Whether its input is multiplied as fp8 where that is done."""
        return self.entry.weight.is_fp8

    def forward(self, x: Activation, context: DeviceContext) -> Tensor:
        """x [T, D] -> [T, D]."""
        dtype = context.dtype
        inputs, gate = self.entry.forward(x, context).chunk(2, dim=-1)
        values = self.convolution.forward(inputs, context)
        chosen = context.times(_read(values, self.chosen, context), self.chosen, dtype)
        low, b, c = norm_parts(chosen, self.norms, dtype).split([weight.shape[0] for weight, _ in self.norms], dim=-1)
        steps = context.times(_read(low.contiguous(), self.steps, context), self.steps, dtype)
        y = scan_channels(values, steps, self.selection, b, c, self.store, context.rows)
        return _left(y, gate, None, self.w_out, self.bias, context)


@dataclass(frozen=True, slots=True)
class DeviceScaled:
    """after * layer(before * x)."""

    layer: DeviceLayer
    before: float
    after: float

    @property
    def bias(self) -> Tensor | None:
        """Of the result, which whoever takes it adds; None where it is multiplied, and added before."""
        return self.layer.bias if self.after == 1 else None

    @property
    def reads_fp8(self) -> bool:
        """Whether its input is multiplied as fp8 where that is done."""
        return self.layer.reads_fp8

    def forward(self, x: Activation, context: DeviceContext) -> Tensor:
        """x [T, D] -> [T, D]."""
        if self.before != 1:
            values = (x.values.float() * self.before).to(context.dtype)
            has_codes = context.has_fp8 and self.layer.reads_fp8
            x = quantise_rows(values) if has_codes else replace(x, values=values, codes=None, scales=None)
        found = self.layer.forward(x, context)
        if self.after == 1:
            return found
        if self.layer.bias is not None:
            found = found.float() + self.layer.bias
        return (found.to(context.dtype).float() * self.after).to(context.dtype)


def _left(
    y: Tensor, gate: Tensor, norm: GroupNorm | None, weight: StoredWeight, bias: Tensor | None, context: DeviceContext
) -> Tensor:
    """What a scan leaves to the residual."""
    out = gate_rows(y, gate, norm, context.rows, context.dtype)
    return context.times(_read(out, weight, context), weight, context.dtype if bias is None else torch.float32)


def _read(values: Tensor, weight: StoredWeight, context: DeviceContext) -> Activation:
    """Rows as a product reads them."""
    return quantise_rows(values) if context.has_fp8 and weight.is_fp8 else Activation(values)
