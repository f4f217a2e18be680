"""How layers that scan are built."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.base.errors import ConfigError
from lamina.layers.heads import Context, RmsNorm
from lamina.layers.projection import Projection
from lamina.layers.rounding import rounded
from lamina.layers.scan import ChannelScanLayer, Convolution, GatedNorm, HeadScanLayer, Recurrence
from lamina.models.builder import Builder, Layer, build_projection
from lamina.models.parts_scan import ChannelScan, HeadScan, Scaled, Stored
from lamina.models.recurrent import inputs_dtype
from lamina.ops.ssm import CHUNK
from lamina.ops.store import StateCodec


def channel_scan(builder: Builder, part: object) -> Layer:
    """The layer of a `ChannelScan`."""
    assert isinstance(part, ChannelScan)
    prefix, channels, size, rank = part.prefix, part.channels, part.size, part.rank
    bias = builder.take(f"{prefix}.dt_proj.bias", channels)
    steps = Projection(builder.product(builder.take(f"{prefix}.dt_proj.weight", channels, rank)), None)
    widths = {"dt": rank, "b": size, "c": size}
    norms = tuple(RmsNorm(builder.take(f"{prefix}.{name}_layernorm.weight", n), part.eps) for name, n in widths.items())
    return ChannelScanLayer(
        entry=build_projection(builder, f"{prefix}.in_proj", 2 * channels, builder.width, part.bias),
        convolution=build_convolution(builder, f"{prefix}.conv1d", channels, part.kernel, part.conv_bias, part.stored),
        selection=build_projection(builder, f"{prefix}.x_proj", rank + 2 * size, channels, False),
        norms=(norms[0], norms[1], norms[2]), steps=steps,
        recurrence=_recurrence(builder, prefix, (channels, size), (channels, size), part.stored, bias),
        exit=build_projection(builder, f"{prefix}.out_proj", builder.width, channels, part.bias),
    )  # fmt: skip


def head_scan(builder: Builder, part: object) -> Layer:
    """The layer of a `HeadScan`."""
    assert isinstance(part, HeadScan)
    prefix, heads, inner, mixed = part.prefix, part.heads, part.heads * part.width, part.groups * part.size
    sizes = (inner, inner, mixed, mixed, heads)
    factors = torch.cat([torch.full((size,), factor) for size, factor in zip(sizes, part.multipliers, strict=True)])
    weight = builder.take(f"{prefix}.in_proj.weight", sum(sizes), builder.width)
    bias = builder.take(f"{prefix}.in_proj.bias", sum(sizes)) if part.in_bias else None
    norm = None
    if part.norm_eps is not None:
        norm = GatedNorm(builder.take(f"{prefix}.norm.weight", inner), part.norm_eps, part.groups, part.before_gate)
    shared = heads // part.groups * part.width
    builder.batched |= {(part.size, CHUNK), (CHUNK, part.width), (CHUNK, part.size), (part.size, shared)}
    state, step_bias = (heads, part.width, part.size), builder.take(f"{prefix}.dt_bias", heads)
    return HeadScanLayer(
        entry=Projection(builder.product(weight * factors[:, None]), None if bias is None else bias * factors),
        convolution=build_convolution(builder, f"{prefix}.conv1d", inner + 2 * mixed, part.kernel, part.conv_bias, part.stored),
        recurrence=_recurrence(builder, prefix, (heads,), state, part.stored, step_bias),
        limits=part.limits, norm=norm, exit=build_projection(builder, f"{prefix}.out_proj", builder.width, inner, part.out_bias),
        shape=(heads, part.width, part.groups, part.size),
    )  # fmt: skip


def build_convolution(builder: Builder, prefix: str, channels: int, kernel: int, bias: bool, stored: Stored) -> Convolution:
    """A causal convolution of each channel: `{prefix}.weight` [C, 1, W] and `{prefix}.bias` [C], and the window "conv"."""
    dtype = inputs_dtype(stored.inputs, builder.cache_format)
    if dtype not in ("fp32", "bf16"):
        raise ConfigError("torch_dtype", dtype, "float32 or bfloat16, or a cache_format of fp32")
    taps = builder.take(f"{prefix}.weight", channels, 1, kernel)[:, 0].t().contiguous()
    found = builder.take(f"{prefix}.bias", channels) if bias else None
    return Convolution(taps, found, builder.store("conv", StateCodec(channels, dtype), "x"))


def _recurrence(
    builder: Builder, prefix: str, decay: tuple[int, ...], state: tuple[int, ...], stored: Stored, step_bias: Tensor
) -> Recurrence:
    """The decays of shape `decay`, a skip for each of its rows, and the state in the snapshot "state"."""
    store = builder.store("state", StateCodec(torch.Size(state).numel(), stored.state), "state")
    rates = -torch.exp(builder.take(f"{prefix}.A_log", *decay))
    return Recurrence(rates, builder.take(f"{prefix}.D", decay[0]), step_bias, store)


@dataclass(frozen=True, slots=True)
class _ScaledLayer:
    """after * layer(before * x)."""

    layer: Layer
    before: float
    after: float

    def forward(self, x: Tensor, context: Context) -> Tensor:
        found = self.layer.forward(x if self.before == 1 else rounded(x * self.before, context.dtype), context)
        return found if self.after == 1 else rounded(found * self.after, context.dtype)


def scaled(builder: Builder, part: object) -> Layer:
    """The layer of a `Scaled`."""
    assert isinstance(part, Scaled)
    return _ScaledLayer(builder.build(part.part), part.before, part.after)
