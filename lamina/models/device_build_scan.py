"""How layers that scan are built on a GPU."""

import torch
from torch import Tensor

from lamina.base.errors import ConfigError
from lamina.layers.device_heads import DeviceLayer
from lamina.layers.device_scan import DeviceChannelScan, DeviceConvolution, DeviceHeadScan, DeviceProjection, DeviceScaled
from lamina.layers.entries import StoreKey
from lamina.models.device_builder import LARGE_WINDOWS, DeviceBuilder
from lamina.models.parts_scan import ChannelScan, HeadScan, Scaled, Stored
from lamina.models.recurrent import inputs_dtype
from lamina.ops.machine import Machine
from lamina.ops.ssm.triton import GroupNorm, Selection
from lamina.ops.ssm.triton import refuses as scan_refuses
from lamina.ops.store import StateCodec, Store


def refuses_scan(part: ChannelScan | HeadScan, machine: Machine) -> str | None:
    """Why a layer is not served, or None."""
    if isinstance(part, ChannelScan):
        return scan_refuses(machine, part.size, max(part.rank, part.size))
    return scan_refuses(machine, part.size, 1 if part.norm_eps is None else part.heads * part.width // part.groups)


def build_channel_scan(builder: DeviceBuilder, part: object) -> DeviceLayer:
    """The layer of a `ChannelScan`."""
    assert isinstance(part, ChannelScan)
    prefix, channels, size, rank = part.prefix, part.channels, part.size, part.rank
    widths = {"dt": rank, "b": size, "c": size}
    norms = tuple((builder.take(f"{prefix}.{name}_layernorm.weight", n), part.eps) for name, n in widths.items())
    return DeviceChannelScan(
        entry=_projection(builder, f"{prefix}.in_proj", 2 * channels, part.bias, None),
        convolution=build_convolution(builder, f"{prefix}.conv1d", channels, part.kernel, part.conv_bias, part.stored),
        chosen=builder.weight(f"{prefix}.x_proj.weight", rank + 2 * size, channels), norms=(norms[0], norms[1], norms[2]),
        steps=builder.weight(f"{prefix}.dt_proj.weight", channels, rank),
        selection=_selection(builder, prefix, (channels, size), builder.take(f"{prefix}.dt_proj.bias", channels)),
        store=build_state(builder, channels * size, part.stored),
        w_out=builder.weight(f"{prefix}.out_proj.weight", builder.width, channels),
        bias=builder.take(f"{prefix}.out_proj.bias", builder.width) if part.bias else None,
    )  # fmt: skip


def build_head_scan(builder: DeviceBuilder, part: object) -> DeviceLayer:
    """The layer of a `HeadScan`."""
    assert isinstance(part, HeadScan)
    prefix, heads, inner, mixed = part.prefix, part.heads, part.heads * part.width, part.groups * part.size
    sizes = (inner, inner, mixed, mixed, heads)
    factors = None
    if any(factor != 1 for factor in part.multipliers):
        each = [torch.full((size,), factor) for size, factor in zip(sizes, part.multipliers, strict=True)]
        factors = torch.cat(each).to(builder.device)
    norm = None
    if part.norm_eps is not None:
        norm = GroupNorm(builder.take(f"{prefix}.norm.weight", inner), part.norm_eps, part.groups, part.before_gate)
    return DeviceHeadScan(
        entry=_projection(builder, f"{prefix}.in_proj", sum(sizes), part.in_bias, factors),
        convolution=build_convolution(builder, f"{prefix}.conv1d", inner + 2 * mixed, part.kernel, part.conv_bias, part.stored),
        selection=_selection(builder, prefix, (heads,), builder.take(f"{prefix}.dt_bias", heads), part.limits),
        store=build_state(builder, inner * part.size, part.stored), norm=norm,
        w_out=builder.weight(f"{prefix}.out_proj.weight", builder.width, inner),
        bias=builder.take(f"{prefix}.out_proj.bias", builder.width) if part.out_bias else None,
        shape=(heads, part.width, part.groups, part.size),
    )  # fmt: skip


def build_scaled(builder: DeviceBuilder, part: object) -> DeviceLayer:
    """The layer of a `Scaled`."""
    assert isinstance(part, Scaled)
    return DeviceScaled(builder.build(part.part), part.before, part.after)


def _projection(builder: DeviceBuilder, name: str, rows: int, bias: bool, factors: Tensor | None) -> DeviceProjection:
    weight = builder.weight(f"{name}.weight", rows, builder.width)
    return DeviceProjection(weight, builder.take(f"{name}.bias", rows) if bias else None, factors)


def build_convolution(
    builder: DeviceBuilder, prefix: str, channels: int, kernel: int, bias: bool, stored: Stored
) -> DeviceConvolution:  # fmt: skip
    """`{prefix}.weight` [C, 1, W] and `{prefix}.bias` [C], and the window "conv"."""
    dtype = inputs_dtype(stored.inputs, builder.cache_format)
    if dtype not in ("fp32", "bf16"):
        raise ConfigError("torch_dtype", dtype, "float32 or bfloat16, or a cache_format of fp32")
    taps = builder.take(f"{prefix}.weight", channels, 1, kernel)[:, 0].t().contiguous()
    found = builder.take(f"{prefix}.bias", channels) if bias else None
    store = _store(builder, "conv", "x", StateCodec(channels, dtype))
    return DeviceConvolution(taps, found, store)


def _selection(
    builder: DeviceBuilder, prefix: str, decay: tuple[int, ...], step_bias: Tensor,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Selection:  # fmt: skip
    """The decays of shape `decay`, and a skip for each of its rows."""
    rates = -torch.exp(builder.take(f"{prefix}.A_log", *decay))
    return Selection(rates, builder.take(f"{prefix}.D", decay[0]), step_bias, limits)


def build_state(builder: DeviceBuilder, numbers: int, stored: Stored) -> Store:
    return _store(builder, "state", "state", StateCodec(numbers, stored.state))


def _store(builder: DeviceBuilder, memory: str, field: str, codec: StateCodec) -> Store:
    store = builder.stores(StoreKey(builder.layer, memory, (field,)), codec)
    if store.place.kind != "slot":
        raise ConfigError("device", str(builder.device), f"cpu (the {memory} of layer {builder.layer}: {LARGE_WINDOWS})")
    return store
