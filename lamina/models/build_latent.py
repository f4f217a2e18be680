"""Builds attention over latents."""

import torch
from torch import Tensor

from lamina.layers.heads import RmsNorm
from lamina.layers.latent import LatentAttention, LatentIndex
from lamina.models.builder import Builder, Layer, head_order
from lamina.models.network import Norm, Rope
from lamina.models.parts_latent import Index, Latent
from lamina.ops.attend_heads import HeadsCase, Past
from lamina.ops.gemm import MIN_COLUMNS
from lamina.ops.sequences import TILE
from lamina.ops.store import LatentCodec, index_codec


def build_latent(builder: Builder, part: object) -> Layer:
    """The layer of a `Latent`."""
    assert isinstance(part, Latent)
    width, heads, rank, turned = builder.width, part.heads, part.rank, part.rope.dim
    angle = builder.angle(part.rope)
    assert angle is not None
    dim = part.nope + turned
    tail = head_order(turned, part.rope)
    order = torch.cat([torch.arange(part.nope), part.nope + tail])

    def queries(name: str, inputs: int) -> Tensor:
        return builder.take(f"{part.prefix}.{name}.weight", heads * dim, inputs).view(heads, dim, inputs)[:, order].flatten(0, 1)

    def low(name: str, rows: int, *sizes: int) -> Tensor:
        return builder.take(f"{part.prefix}.{name}", rows, *sizes)

    key_order = torch.cat([torch.arange(rank), rank + tail])
    if part.q_rank is None:
        first, w_q, q_norm = queries("q_proj", width), None, None
    else:
        first = low("q_a_proj.weight", part.q_rank, width)
        w_q = builder.product(queries("q_b_proj", part.q_rank))
        q_norm = builder.norm(Norm(f"{part.prefix}.q_a_layernorm.weight", part.eps), part.q_rank)
    w_in = [first, low("kv_a_proj_with_mqa.weight", rank + turned, width)[key_order]]
    splits = [first.shape[0], rank, turned]
    biases = []
    if part.bias:
        biases.append(first.new_zeros(first.shape[0]) if part.q_rank is None else low("q_a_proj.bias", part.q_rank))
        biases.append(low("kv_a_proj_with_mqa.bias", rank + turned)[key_order])
    index = None
    if part.index is not None:
        index, rows = _index(builder, part, part.index)
        w_in += rows
        splits += [each.shape[0] for each in rows]
        biases += [each.new_zeros(each.shape[0]) for each in rows if part.bias]

    both = builder.take(f"{part.prefix}.kv_b_proj.weight", heads * (part.nope + part.value), rank)
    keys, values = both.view(heads, -1, rank).split_with_sizes((part.nope, part.value), dim=1)
    codec = LatentCodec(rank, turned, builder.cache_format)
    wide = max(rank, MIN_COLUMNS)  # products have no fewer columns inside
    builder.batched |= {(part.nope, wide), (rank, max(part.value, MIN_COLUMNS))}
    builder.batched |= {(rank + turned, TILE), (rank + turned, 3 * TILE), (TILE, wide), (3 * TILE, wide)}
    top_k = part.index.top_k if part.index is not None else None
    if top_k is not None:
        gathered = top_k + -top_k % TILE
        builder.batched |= {(rank + turned, gathered), (gathered, wide)}
    return LatentAttention(
        w_in=builder.product(torch.cat(w_in)), b_in=torch.cat(biases) if biases else None, splits=tuple(splits),
        w_q=w_q, q_norm=q_norm, kv_norm=builder.norm(Norm(f"{part.prefix}.kv_a_layernorm.weight", part.eps), rank),
        w_key=keys.contiguous(), w_value=values.transpose(1, 2).contiguous(),
        w_out=builder.product(low("o_proj.weight", width, heads * part.value)),
        b_out=low("o_proj.bias", width) if part.bias else None,
        past=Past(builder.store(part.memory, codec), codec), codec=codec,
        case=HeadsCase(heads, 1, part.scale, top_k=top_k), angle=angle, index=index,
    )  # fmt: skip


def _index(builder: Builder, part: Latent, index: Index) -> tuple[LatentIndex, list[Tensor]]:
    """The index, and what it adds to the product with the layer's input: its key, and the weights of its heads."""
    assert part.q_rank is not None
    heads, dim = index.heads, index.dim
    order = head_order(dim, Rope(part.rope.dim, part.rope.theta))
    w_q = builder.take(f"{index.prefix}.wq_b.weight", heads * dim, part.q_rank).view(heads, dim, part.q_rank)[:, order]
    key = builder.take(f"{index.prefix}.wk.weight", dim, builder.width)[order]
    weights = builder.take(f"{index.prefix}.weights_proj.weight", heads, builder.width)
    codec = index_codec(builder.index_format, dim)
    builder.batched |= {(dim, TILE), (dim, 3 * TILE)}
    return LatentIndex(
        w_q=builder.product(w_q.flatten(0, 1)),
        k_norm=RmsNorm(builder.take(f"{index.prefix}.k_norm.weight", dim)[order], index.eps, centres=True),
        k_bias=builder.take(f"{index.prefix}.k_norm.bias", dim)[order],
        store=builder.store(index.memory, codec), heads=heads, top_k=index.top_k,
    ), [key, weights]  # fmt: skip
