"""How layers with experts are built."""

import torch
from torch import Tensor

from lamina.base.errors import ConfigError
from lamina.layers.heads import GatedMlp
from lamina.layers.projection import Projection
from lamina.layers.sparse import Route, SparseMlp
from lamina.models.builder import Builder, Layer, build_projection
from lamina.models.network import Experts, Mlp, Router
from lamina.models.parts_experts import FusedExperts, UngatedExperts
from lamina.ops.experts import Gating
from lamina.ops.gemm import Weights
from lamina.ops.route import route_chosen, route_sigmoid, route_softmax


def build_router(builder: Builder, wanted: Router, num: int) -> Route:
    """How rows choose among `num` experts."""
    top_k, scale, groups, kept = wanted.top_k, wanted.scale, wanted.groups, wanted.kept
    if wanted.kind == "softmax":
        return lambda logits: route_softmax(logits, top_k, wanted.normalises, scale, groups, kept)
    if wanted.kind in ("chosen", "chosen_sigmoid"):
        return lambda logits: route_chosen(logits, top_k, wanted.kind == "chosen_sigmoid")
    if wanted.kind == "sigmoid":
        bias = builder.take(wanted.bias, num) if wanted.bias is not None else None
        return lambda logits: route_sigmoid(logits, bias, top_k, wanted.normalises, scale, groups, kept)
    raise ConfigError("router", wanted.kind, "softmax, chosen, chosen_sigmoid or sigmoid")


def build_shared(builder: Builder, part: Mlp | None) -> GatedMlp | None:
    """The expert that every row visits."""
    if part is None:
        return None
    shared = builder.build(part)
    assert isinstance(shared, GatedMlp)
    return shared


def listed_experts(builder: Builder, part: object) -> Layer:
    """The layer of an `Experts`."""
    assert isinstance(part, Experts)
    gate, up, down = part.names
    width, inner = builder.width, part.width
    gate_up, second = [], []
    for expert in range(part.num):
        prefix = f"{part.prefix}.experts.{expert}"
        both = [builder.take(f"{prefix}.{name}.weight", inner, width) for name in (gate, up)]
        gate_up.append(torch.cat(both))
        second.append(builder.take(f"{prefix}.{down}.weight", width, inner))
    return SparseMlp(
        gate=builder.product(builder.take(part.gate, part.num, width)), route=build_router(builder, part.router, part.num),
        gate_up=builder.products(torch.stack(gate_up)), down=builder.products(torch.stack(second)),
        shared=build_shared(builder, part.shared),
        shared_gate=builder.product(builder.take(part.shared_gate, 1, width)) if part.shared_gate is not None else None,
    )  # fmt: skip


def fused_experts(builder: Builder, part: object) -> Layer:
    """The layer of a `FusedExperts`."""
    assert isinstance(part, FusedExperts)
    num, width, inner = part.num, builder.width, part.width

    def stacked(name: str, rows: int, columns: int) -> Tensor:
        """[E, rows, columns]: rows are what comes out of the product."""
        if part.is_packed:
            return torch.stack([builder.take(f"{part.prefix}.{e}.{name}.weight", rows, columns) for e in range(num)])
        return builder.take(f"{part.prefix}.{name}", num, columns, rows).transpose(1, 2)

    def halves(both: Tensor) -> Tensor:
        """Gate first, in dim 1 of [E, 2I, ...]."""
        return torch.cat([both[:, ::2], both[:, 1::2]], dim=1) if part.is_interleaved else both

    biases = None
    if part.bias:
        first = halves(builder.take(f"{part.prefix}.gate_up_proj_bias", num, 2 * inner))
        biases = (first, builder.take(f"{part.prefix}.down_proj_bias", num, width))
    return SparseMlp(
        gate=builder.product(builder.take(part.gate, num, width)), route=build_router(builder, part.router, num),
        gate_up=builder.products(halves(stacked("gate_up_proj", 2 * inner, width))),
        down=builder.products(stacked("down_proj", width, inner)),
        shared=build_shared(builder, part.shared), gate_bias=builder.take(part.gate_bias, num) if part.gate_bias else None,
        limit=part.limit, gating=Gating(part.alpha, part.shift, biases, part.weighs_input),
    )  # fmt: skip


def ungated_experts(builder: Builder, part: object) -> Layer:
    """The layer of an `UngatedExperts`."""
    assert isinstance(part, UngatedExperts)
    width, inner, outer = builder.width, part.width, part.latent or builder.width

    def stacked(name: str, rows: int, columns: int) -> Weights:
        found = [builder.take(f"{part.prefix}.experts.{e}.{name}.weight", rows, columns) for e in range(part.num)]
        return builder.products(torch.stack(found))

    def projection(name: str, rows: int, columns: int) -> Projection | None:
        return build_projection(builder, f"{part.prefix}.{name}", rows, columns, part.latent_bias) if part.latent else None

    return SparseMlp(
        gate=builder.product(builder.take(part.gate, part.num, width)), route=build_router(builder, part.router, part.num),
        gate_up=stacked("up_proj", inner, outer), down=stacked("down_proj", outer, inner),
        shared=build_shared(builder, part.shared), gating=Gating(ungated=part.activation),
        enter=projection("fc1_latent_proj", outer, width), leave=projection("fc2_latent_proj", width, outer),
    )  # fmt: skip
