"""Builds and runs what a `Network` says. A new kind of part is one line in BUILDERS and a builder beside the others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lamina.base.errors import ConfigError
from lamina.layers.entries import StoreKey
from lamina.layers.heads import Context, GatedMlp, GroupedAttention, RmsNorm
from lamina.layers.rounding import rounded
from lamina.layers.sparse import Route, SparseMlp
from lamina.models.network import Attention, Branch, Experts, Mlp, Network, Norm, Parallel, Rope, Router
from lamina.models.rope import rope_frequencies
from lamina.ops.attend_heads import HeadsCase, Past, softcapped
from lamina.ops.gemm import linear, prepared
from lamina.ops.rope_norm import rope_tables
from lamina.ops.route import route_chosen, route_sigmoid, route_softmax
from lamina.ops.sequences import Sequences
from lamina.ops.store import EntryCodec, HeadsCodec, Store
from lamina.weights.loader import TensorSource


class Layer(Protocol):
    """What a part is once it has its weights."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [T, D], normed -> what is added to the residual [T, D]."""
        ...


@dataclass(slots=True)
class Builder:
    """What builders work with: the checkpoint's tensors, each once, and the stores of the arena.

    stores   gives the store of a key with a codec.   formats  of the cache and of an index.
    shapes   (in, out) of every product with a weight; batched  of batched ones: start-up checks their bits.
    shared   layers whose memory others read.   finishing  what is done after the last layer.
    """

    network: Network
    source: TensorSource
    dtype: torch.dtype
    stores: Callable[[StoreKey, EntryCodec], Store]
    cache_format: str
    index_format: str
    layer: int = 0
    shapes: set[tuple[int, int]] = field(default_factory=set)
    batched: set[tuple[int, int]] = field(default_factory=set)
    ropes: list[Rope] = field(default_factory=list)
    shared: frozenset[int] = frozenset()
    pasts: dict[int, Past] = field(default_factory=dict)
    finishing: list[Callable[[Context], None]] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Of the residual."""
        return self.network.hidden_size

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor in fp32."""
        return self.source.take(name, shape)

    def product(self, weight: Tensor) -> Tensor:
        """A weight [out, in] as products read it."""
        self.shapes.add((weight.shape[1], weight.shape[0]))
        return prepared(weight)

    def store(self, memory: str, codec: EntryCodec, *fields: str) -> Store:
        """The store of the fields (all, unless some are named) of a memory of the layer that is being built."""
        return self.stores(StoreKey(self.layer, memory, fields or tuple(name for name, _, _ in codec.fields)), codec)

    def norm(self, norm: Norm, width: int) -> RmsNorm:
        """A norm with its weight."""
        if norm.kind == "plain":
            return RmsNorm(None, norm.eps)
        weight = self.take(norm.name, width)
        return RmsNorm(weight + 1 if norm.kind == "rms1" else weight, norm.eps, norm.kind == "layer")

    def angle(self, rope: Rope | None) -> int | None:
        """The number of a rotary embedding among those of the model."""
        if rope is None:
            return None
        if rope not in self.ropes:
            self.ropes.append(rope)
        return self.ropes.index(rope)

    def build(self, part: object) -> Layer:
        """The layer of a part."""
        return BUILDERS[type(part)](self, part)


def head_order(dim: int, rope: Rope | None) -> Tensor:
    """The dims of a head in the order in which layers have them: those not rotated, then the rotated ones pair by pair."""
    if rope is None:
        return torch.arange(dim)
    rotated = torch.arange(rope.dim)
    if not rope.is_pairs:
        rotated = rotated.view(2, -1).t().flatten()
    return torch.cat([torch.arange(rope.dim, dim), rotated])


def _attention(builder: Builder, part: object) -> Layer:
    assert isinstance(part, Attention)
    dim, order, width = part.dim, head_order(part.dim, part.rope), builder.width
    codec = HeadsCodec(part.kv_heads, dim, dim, builder.cache_format)

    def projection(name: str, heads: int, *sizes: int, parts: int = 1) -> Tensor:
        """[parts, heads * dim, ...] with queries' and keys' dims in `order` where `name` is theirs."""
        found = builder.take(f"{part.prefix}.{name}", heads * parts * dim, *sizes).view(heads, parts, dim, *sizes)
        return found.transpose(0, 1)

    def ordered(heads: Tensor) -> Tensor:
        return heads[:, order].flatten(0, 1)

    q_name, k_name, v_name, o_name = part.names

    def stacked(kind: str, *sizes: int) -> Tensor:
        queries = projection(f"{q_name}.{kind}", part.heads, *sizes, parts=1 + part.is_gated)
        rows = [ordered(queries[0])]
        if part.shares is None:
            rows.append(ordered(projection(f"{k_name}.{kind}", part.kv_heads, *sizes)[0]))
            rows.append(projection(f"{v_name}.{kind}", part.kv_heads, *sizes)[0].flatten(0, 1))
        if part.is_gated:
            rows.append(queries[1].flatten(0, 1))
        return torch.cat(rows)

    def head_norm(norm: Norm | None, heads: int) -> RmsNorm | None:
        if norm is None:
            return None
        built = builder.norm(norm, heads * dim if part.norm_all else dim)
        if built.weight is None:
            return built
        weight = built.weight.view(-1, dim)[:, order].flatten()
        return RmsNorm(weight, built.eps, built.centres)

    if part.shares is None:
        past = Past(builder.store(part.memory, codec), codec)
        builder.pasts[builder.layer] = past
    else:
        past = builder.pasts[part.shares]
    builder.batched |= {(dim, 64), (dim, 192), (64, dim), (192, dim)}
    layer = GroupedAttention(
        w_in=builder.product(stacked("weight", width)), b_in=stacked("bias") if part.bias else None,
        w_out=builder.product(builder.take(f"{part.prefix}.{o_name}.weight", width, part.heads * dim)),
        b_out=builder.take(f"{part.prefix}.{o_name}.bias", width) if part.out_bias else None,
        past=past, codec=codec,
        case=HeadsCase(
            part.heads, part.kv_heads, part.scale, part.window, part.chunk, part.softcap,
            builder.take(part.sinks, part.heads) if part.sinks is not None else None,
        ),
        angle=builder.angle(part.rope), q_norm=head_norm(part.q_norm, part.heads),
        k_norm=head_norm(part.k_norm, part.kv_heads) if part.shares is None else None,
        v_norm=RmsNorm(None, part.v_norm_eps) if part.v_norm_eps else None, norm_all=part.norm_all,
        norm_after_rope=part.norm_after_rope, is_gated=part.is_gated, shares=part.shares,
        is_shared=builder.layer in builder.shared, layer=builder.layer, temperature=part.temperature,
    )  # fmt: skip
    if layer.is_shared:
        builder.finishing.append(layer.finish)
    return layer


def _mlp(builder: Builder, part: object) -> Layer:
    assert isinstance(part, Mlp)
    gate, up, down = part.names
    rows = [name for name in (gate, up) if name is not None]

    def stacked(kind: str, *sizes: int) -> Tensor:
        return torch.cat([builder.take(f"{part.prefix}.{name}.{kind}", part.width, *sizes) for name in rows])

    return GatedMlp(
        w_in=builder.product(stacked("weight", builder.width)), b_in=stacked("bias") if part.bias else None,
        w_out=builder.product(builder.take(f"{part.prefix}.{down}.weight", builder.width, part.width)),
        b_out=builder.take(f"{part.prefix}.{down}.bias", builder.width) if part.bias else None,
        activation=part.activation, has_gate=gate is not None, multipliers=part.multipliers,
    )  # fmt: skip


def _experts(builder: Builder, part: object) -> Layer:
    assert isinstance(part, Experts)
    gate, up, down = part.names
    width, inner = builder.width, part.width
    gate_up, second = [], []
    for expert in range(part.num):
        prefix = f"{part.prefix}.experts.{expert}"
        both = [builder.take(f"{prefix}.{name}.weight", inner, width) for name in (gate, up)]
        gate_up.append(torch.cat(both))
        second.append(builder.take(f"{prefix}.{down}.weight", width, inner))
    builder.shapes |= {(width, 2 * inner), (inner, width)}
    shared = None
    if part.shared is not None:
        shared = _mlp(builder, part.shared)
        assert isinstance(shared, GatedMlp)
    return SparseMlp(
        gate=builder.product(builder.take(part.gate, part.num, width)), route=router(builder, part.router, part.num),
        gate_up=prepared(torch.stack(gate_up)), down=prepared(torch.stack(second)), shared=shared,
        shared_gate=builder.product(builder.take(part.shared_gate, 1, width)) if part.shared_gate is not None else None,
    )  # fmt: skip


def router(builder: Builder, wanted: Router, num: int) -> Route:
    """How rows choose among `num` experts."""
    top_k, scale, groups, kept = wanted.top_k, wanted.scale, wanted.groups, wanted.kept
    if wanted.kind == "softmax":
        return lambda logits: route_softmax(logits, top_k, wanted.normalises, scale, groups, kept)
    if wanted.kind == "chosen":
        return lambda logits: route_chosen(logits, top_k)
    if wanted.kind == "sigmoid":
        bias = builder.take(wanted.bias, num) if wanted.bias is not None else None
        return lambda logits: route_sigmoid(logits, bias, top_k, wanted.normalises, scale, groups, kept)
    raise ConfigError("router", wanted.kind, "softmax, chosen or sigmoid")


@dataclass(frozen=True, slots=True)
class _Sum:
    """Layers that read the same input."""

    layers: tuple[Layer, ...]

    def forward(self, x: Tensor, context: Context) -> Tensor:
        total = self.layers[0].forward(x, context)
        for layer in self.layers[1:]:
            total = total + layer.forward(x, context)
        return rounded(total, context.dtype)


def _parallel(builder: Builder, part: object) -> Layer:
    assert isinstance(part, Parallel)
    return _Sum(tuple(builder.build(each) for each in part.parts))


#: how each kind of part is built
BUILDERS: Mapping[type, Callable[[Builder, object], Layer]] = {
    Attention: _attention,
    Experts: _experts,
    Mlp: _mlp,
    Parallel: _parallel,
}


@dataclass(frozen=True, slots=True)
class _Residual:
    """x + scale * after(layer(before(x)))."""

    layer: Layer
    before: RmsNorm | None
    after: RmsNorm | None
    scale: float

    def forward(self, x: Tensor, context: Context) -> Tensor:
        dtype = context.dtype
        found = self.layer.forward(x if self.before is None else rounded(self.before.forward(x), dtype), context)
        if self.after is not None:
            found = rounded(self.after.forward(found), dtype)
        return rounded(x + (found if self.scale == 1 else found * self.scale), dtype)


class NetworkModel:
    """A loaded network. `forward` gives final hidden vectors; `logits` turns some of them into scores."""

    ratios: tuple[int, ...] = ()

    def __init__(
        self, network: Network, dtype: torch.dtype, embed: Tensor, layers: tuple[tuple[_Residual, ...], ...], norm: RmsNorm,
        head: Tensor, builder: Builder,
    ) -> None:  # fmt: skip
        self.network = network
        self.dtype = dtype
        self.embed = embed
        self.layers = layers
        self.norm = norm
        self.head = head
        self.angles = tuple(rope_frequencies(rope) for rope in builder.ropes)
        self.product_shapes = tuple(sorted(builder.shapes))
        self.batched_shapes = tuple(sorted(builder.batched))
        self.finishing = tuple(builder.finishing)

    def forward(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        """tokens [T] int64 (padding included) -> final hidden vectors [T, D] fp32, normed."""
        context = Context(tokens, sequences, self._tables(sequences.positions), self.dtype)
        x = self.embed[tokens]
        for parts in self.layers:
            for part in parts:
                x = part.forward(x, context)
        for finish in self.finishing:
            finish(context)
        return self.norm.forward(x)

    def _tables(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        found = []
        for inv_freq, factor in self.angles:
            cos, sin = rope_tables(positions, inv_freq)
            found.append((cos * factor, sin * factor) if factor != 1 else (cos, sin))
        return tuple(found)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, D] fp32 (rows padded by the caller) -> [S, V] fp32."""
        found = linear(hidden, self.head)
        if self.network.logit_scale != 1:
            found = found * self.network.logit_scale
        return softcapped(found, self.network.softcap) if self.network.softcap else found


def load_network(
    network: Network, source: TensorSource, dtype: torch.dtype, stores: Callable[[StoreKey, EntryCodec], Store],
    cache_format: str, index_format: str,
) -> NetworkModel:  # fmt: skip
    """Takes every tensor once and binds the layers to their stores. Raises WeightError for a missing, misshapen or unused one."""
    shared = frozenset(
        branch.part.shares
        for branches in network.layers
        for branch in branches
        if isinstance(branch.part, Attention) and branch.part.shares is not None
    )
    builder = Builder(network, source, dtype, stores, cache_format, index_format, shared=shared)
    table = builder.take(network.embed, network.vocab_size, network.hidden_size)
    layers = []
    for number, branches in enumerate(network.layers):
        builder.layer = number
        layers.append(tuple(_residual(builder, branch) for branch in branches))
    norm = builder.norm(network.norm, network.hidden_size)
    head = table if network.head is None else builder.take(network.head, network.vocab_size, network.hidden_size)
    head = builder.product(head)
    embed = rounded(table if network.embed_scale == 1 else table * network.embed_scale, dtype)
    source.finish()
    return NetworkModel(network, dtype, embed, tuple(layers), norm, head, builder)


def _residual(builder: Builder, branch: Branch) -> _Residual:
    layer = builder.build(branch.part)
    before = builder.norm(branch.before, builder.width) if branch.before is not None else None
    after = builder.norm(branch.after, builder.width) if branch.after is not None else None
    return _Residual(layer, before, after, branch.scale)


def check_part(part: object) -> None:
    """Refuses a part that nothing builds."""
    if type(part) not in BUILDERS:
        raise ConfigError("layers", type(part).__name__, f"one of {', '.join(each.__name__ for each in BUILDERS)}")
