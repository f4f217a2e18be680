"""Builds attention over latents for a GPU."""

import torch

from lamina.base.errors import ConfigError
from lamina.base.log import event, get_logger
from lamina.layers.device_heads import DeviceLayer
from lamina.layers.device_latent import DeviceLatent, LowRank
from lamina.layers.entries import StoreKey
from lamina.models.device_builder import DeviceBuilder
from lamina.models.parts_latent import Latent
from lamina.ops.attend_heads import HeadsCase, Past
from lamina.ops.attend_latent.triton import LatentCase, refuses
from lamina.ops.gemm.stored import StoredWeight
from lamina.ops.machine import Machine
from lamina.ops.quantise import dequantise_fp8_weight
from lamina.ops.store import LatentCodec

_LOG = get_logger(__name__)

#: of a cache with latents as fp8
FP8_LATENTS = "latents as fp8: no GPU kernels yet, only as bf16 and fp32"


def refuses_latent(part: Latent, machine: Machine) -> str | None:
    """Why a layer is not served, or None."""
    if part.index is not None:
        return "an index that selects what attention over latents reads: no GPU kernels yet"
    return refuses(machine, part.rank, part.rope.dim)


def build_latent(builder: DeviceBuilder, part: object) -> DeviceLayer:
    """The layer of a `Latent`. ConfigError for a cache format that has no kernels."""
    assert isinstance(part, Latent) and part.index is None
    if builder.cache_format == "fp8":
        raise ConfigError("cache_format", builder.cache_format, f"bf16 or fp32 ({FP8_LATENTS})")
    width, heads, rank, turned, prefix = builder.width, part.heads, part.rank, part.rope.dim, part.prefix
    angle = builder.angle(part.rope)
    assert angle is not None
    inputs = part.q_rank or heads * (part.nope + turned)
    first = f"{prefix}.{'q_proj' if part.q_rank is None else 'q_a_proj'}"
    latent = f"{prefix}.kv_a_proj_with_mqa"
    b_in = None
    if part.bias:
        none = torch.zeros(inputs, dtype=torch.float32, device=builder.device)
        own = none if part.q_rank is None else builder.take(f"{first}.bias", inputs)
        b_in = torch.cat([own, builder.take(f"{latent}.bias", rank + turned)])
    low = None
    if part.q_rank is not None:
        low = LowRank(
            builder.take(f"{prefix}.q_a_layernorm.weight", part.q_rank), part.eps,
            builder.weight(f"{prefix}.q_b_proj.weight", heads * (part.nope + turned), part.q_rank),
        )  # fmt: skip
    codec = LatentCodec(rank, turned, builder.cache_format)
    key = StoreKey(builder.layer, part.memory, tuple(name for name, _, _ in codec.fields))
    w_key, w_value = _halves(builder, part)
    return DeviceLatent(
        w_in=builder.joined([f"{first}.weight", f"{latent}.weight"], [inputs, rank + turned]), b_in=b_in, low=low,
        kv_norm=builder.take(f"{prefix}.kv_a_layernorm.weight", rank), eps=part.eps, w_key=w_key, w_value=w_value,
        w_out=builder.weight(f"{prefix}.o_proj.weight", width, heads * part.value),
        bias=builder.take(f"{prefix}.o_proj.bias", width) if part.bias else None,
        past=Past(builder.stores(key, codec), codec), case=HeadsCase(heads, 1, part.scale),
        dims=LatentCase(heads, part.nope, turned, rank, part.rope.is_pairs), angle=angle,
    )  # fmt: skip


def _halves(builder: DeviceBuilder, part: Latent) -> tuple[StoredWeight, StoredWeight]:
    """What each head's queries are multiplied by, [H * rank, nope], and what it finds, [H * value, rank]; fp8 is expanded."""
    name = f"{part.prefix}.kv_b_proj.weight"
    both = builder.weight(name, part.heads * (part.nope + part.value), part.rank)
    codes = both.codes
    if both.scales is not None:
        event(_LOG, "weight_expanded", tensor=name, stored="fp8", used=str(builder.dtype))
        codes = dequantise_fp8_weight(both.codes, both.scales).to(builder.dtype)
    keys, values = codes.view(part.heads, -1, part.rank).split_with_sizes((part.nope, part.value), dim=1)
    return (
        StoredWeight(keys.transpose(1, 2).flatten(0, 1).contiguous()),
        StoredWeight(values.flatten(0, 1).contiguous()),
    )  # fmt: skip
