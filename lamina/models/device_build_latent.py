"""Builds attention over latents for a GPU."""

import torch
from torch import Tensor

from lamina.base.log import event, get_logger
from lamina.layers.device_heads import DeviceLayer
from lamina.layers.device_latent import DeviceIndex, DeviceLatent, LowRank
from lamina.layers.entries import StoreKey
from lamina.models.builder import head_order
from lamina.models.device_builder import DeviceBuilder
from lamina.models.network import Rope
from lamina.models.parts_latent import Index, Latent
from lamina.ops.attend_heads import HeadsCase, Past
from lamina.ops.attend_latent.triton import LatentCase, refuses
from lamina.ops.gemm.stored import BLOCK, StoredWeight
from lamina.ops.index_topk import IndexCase
from lamina.ops.index_topk.triton import refuses as refuses_index
from lamina.ops.machine import Machine
from lamina.ops.quantise import dequantise_fp8_weight
from lamina.ops.store import LatentCodec, index_codec

_LOG = get_logger(__name__)


def refuses_latent(part: Latent, machine: Machine) -> str | None:
    """Why a layer is not served, or None."""
    why = refuses(machine, part.rank, part.rope.dim)
    if why is None and part.index is not None:  # every format of its keys has kernels
        index = part.index
        why = refuses_index(machine, IndexCase("bf16", index.heads, index.dim, index.top_k, part.rope.max_positions))
    return why


def build_latent(builder: DeviceBuilder, part: object) -> DeviceLayer:
    """The layer of a `Latent`."""
    assert isinstance(part, Latent)
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
    index = None if part.index is None else _index(builder, part, part.index)
    return DeviceLatent(
        w_in=builder.joined([f"{first}.weight", f"{latent}.weight"], [inputs, rank + turned]), b_in=b_in, low=low,
        kv_norm=builder.take(f"{prefix}.kv_a_layernorm.weight", rank), eps=part.eps, w_key=w_key, w_value=w_value,
        w_out=builder.weight(f"{prefix}.o_proj.weight", width, heads * part.value),
        bias=builder.take(f"{prefix}.o_proj.bias", width) if part.bias else None,
        past=Past(builder.stores(key, codec), codec), case=HeadsCase(heads, 1, part.scale, top_k=index.top_k if index else None),
        dims=LatentCase(heads, part.nope, turned, rank, part.rope.is_pairs), angle=angle, index=index,
    )  # fmt: skip


def _index(builder: DeviceBuilder, part: Latent, index: Index) -> DeviceIndex:
    """The index, with dims in the order of the CPU's: what the formats of keys spread and round is the same."""
    assert part.q_rank is not None
    heads, dim, prefix = index.heads, index.dim, index.prefix
    order = head_order(dim, Rope(part.rope.dim, part.rope.theta))
    w_in = builder.joined([f"{prefix}.wk.weight", f"{prefix}.weights_proj.weight"], [dim, heads])
    w_q = builder.weight(f"{prefix}.wq_b.weight", heads * dim, part.q_rank)
    codec = index_codec(builder.index_format, dim)
    return DeviceIndex(
        w_in=reordered(f"{prefix}.wk.weight", w_in, torch.cat([order, torch.arange(dim, dim + heads)]), dim, builder.dtype),
        w_q=reordered(f"{prefix}.wq_b.weight", w_q, (torch.arange(heads)[:, None] * dim + order).flatten(), dim, builder.dtype),
        k_norm=builder.take(f"{prefix}.k_norm.weight", dim)[order], k_bias=builder.take(f"{prefix}.k_norm.bias", dim)[order],
        eps=index.eps, store=builder.stores(StoreKey(builder.layer, index.memory, tuple(n for n, _, _ in codec.fields)), codec),
        heads=heads, top_k=index.top_k,
    )  # fmt: skip


def reordered(name: str, weight: StoredWeight, order: Tensor, dim: int, dtype: torch.dtype) -> StoredWeight:
    """The rows [heads * dim, in] of a weight in another order, in which each head keeps its place.

    fp8 is expanded to `dtype`, with a line in the log, where a scale is of parts of heads.
    """
    codes = weight.codes
    order = order.to(codes.device)
    if weight.scales is None:
        return StoredWeight(codes[order])
    if BLOCK % dim:
        event(_LOG, "weight_expanded", tensor=name, stored="fp8", used=str(dtype))
        return StoredWeight(dequantise_fp8_weight(codes, weight.scales).to(dtype)[order])
    return StoredWeight(codes.view(torch.uint8)[order].view(codes.dtype), weight.scales)


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
