"""Builds and runs what a `Network` says. A new kind of part is one line in BUILDERS and a builder beside the others."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor

from lamina.layers.entries import StoreKey
from lamina.layers.heads import Context, GatedMlp, GroupedAttention, RmsNorm
from lamina.layers.rounding import rounded
from lamina.models.build_altup import altup_layer, closing, opening
from lamina.models.build_delta import decayed_attention, delta_rule
from lamina.models.build_experts import fused_experts, listed_experts, ungated_experts
from lamina.models.build_latent import build_latent
from lamina.models.build_scan import channel_scan, head_scan, scaled
from lamina.models.builder import Builder, Layer, head_order
from lamina.models.network import Attention, Branch, Experts, Mlp, Network, Norm, Parallel
from lamina.models.parts_altup import AltUpLayer, Closing, Opening
from lamina.models.parts_delta import DecayedAttention, DeltaRule
from lamina.models.parts_experts import FusedExperts, UngatedExperts
from lamina.models.parts_latent import Latent
from lamina.models.parts_scan import ChannelScan, HeadScan, Scaled
from lamina.models.rope import rope_frequencies
from lamina.ops.attend_heads import HeadsCase, Past, native, softcapped
from lamina.ops.gemm import MIN_COLUMNS, Weight, linear
from lamina.ops.native import library
from lamina.ops.residual.native import add, norm
from lamina.ops.rope_norm import rope_tables
from lamina.ops.sequences import Sequences
from lamina.ops.store import EntryCodec, HeadsCodec, Store
from lamina.weights.loader import TensorSource


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
    wide = max(dim, MIN_COLUMNS)
    q_norm = head_norm(part.q_norm, part.heads)
    k_norm = head_norm(part.k_norm, part.kv_heads) if part.shares is None else None
    biases = stacked("bias") if part.bias else None
    case = HeadsCase(
        part.heads, part.kv_heads, part.scale, part.window, part.chunk, part.softcap,
        builder.take(part.sinks, part.heads) if part.sinks is not None else None,
    )  # fmt: skip
    kernels = None
    if native.refuses(case, past) is None and not any(norm is not None and norm.centres for norm in (q_norm, k_norm)):
        norms = tuple(None if norm is None else (norm.weight, norm.eps) for norm in (q_norm, k_norm))
        kernels = native.NativeHeads(
            case, past, native.Positioning(
                biases, norms[0], norms[1], part.v_norm_eps, part.norm_all, part.norm_after_rope, part.shares is None,
                part.is_gated,
            ), builder.dtype,
        )  # fmt: skip
    else:
        builder.batched |= {(dim, 64), (dim, 192), (64, wide), (192, wide)}
    layer = GroupedAttention(
        w_in=builder.product(stacked("weight", width)), b_in=biases,
        w_out=builder.product(builder.take(f"{part.prefix}.{o_name}.weight", width, part.heads * dim)),
        b_out=builder.take(f"{part.prefix}.{o_name}.bias", width) if part.out_bias else None,
        past=past, codec=codec, case=case, angle=builder.angle(part.rope), q_norm=q_norm, k_norm=k_norm,
        v_norm=RmsNorm(None, part.v_norm_eps) if part.v_norm_eps else None, norm_all=part.norm_all,
        norm_after_rope=part.norm_after_rope, is_gated=part.is_gated, shares=part.shares,
        is_shared=builder.layer in builder.shared, layer=builder.layer, temperature=part.temperature, kernels=kernels,
    )  # fmt: skip
    if layer.is_shared:
        builder.finishing.append(layer.finish)
    return layer


def _mlp(builder: Builder, part: object) -> Layer:
    assert isinstance(part, Mlp)
    gate, up, down = part.names
    rows = [name for name in (gate, up) if name is not None]

    def stacked(kind: str, *sizes: int) -> Tensor:
        height = part.width * (1 + part.is_fused)
        return torch.cat([builder.take(f"{part.prefix}.{name}.{kind}", height, *sizes) for name in rows])

    return GatedMlp(
        w_in=builder.product(stacked("weight", builder.width)), b_in=stacked("bias") if part.bias else None,
        w_out=builder.product(builder.take(f"{part.prefix}.{down}.weight", builder.width, part.width)),
        b_out=builder.take(f"{part.prefix}.{down}.bias", builder.width) if part.bias else None,
        activation=part.activation, has_gate=gate is not None or part.is_fused, multipliers=part.multipliers,
        cut=part.cut,
    )  # fmt: skip


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
    AltUpLayer: altup_layer,
    Attention: _attention,
    ChannelScan: channel_scan,
    Closing: closing,
    DecayedAttention: decayed_attention,
    DeltaRule: delta_rule,
    Experts: listed_experts,
    FusedExperts: fused_experts,
    HeadScan: head_scan,
    Latent: build_latent,
    Mlp: _mlp,
    Opening: opening,
    Parallel: _parallel,
    Scaled: scaled,
    UngatedExperts: ungated_experts,
}


@dataclass(frozen=True, slots=True)
class _Residual:
    """kept * x + scale * after(layer(before(x))). narrows: the layer gives wanted rows alone where not all are wanted."""

    layer: Layer
    before: RmsNorm | None
    after: RmsNorm | None
    scale: float
    kept: float
    keeps_normed: bool
    narrows: bool = False
    by_kernels: bool = False

    def forward(self, x: Tensor, context: Context) -> Tensor:
        dtype = context.dtype
        if self.by_kernels:
            return self._by_kernels(x, context)
        read = x if self.before is None else rounded(self.before.forward(x), dtype)
        found = self.layer.forward(read, context)
        if self.after is not None:
            found = rounded(self.after.forward(found), dtype)
        x = read if self.keeps_normed else x
        if self.narrows and context.sequences.wanted is not None:
            x = x.index_select(0, context.sequences.wanted)
        found = found if self.scale == 1 else found * self.scale
        if self.kept == 0:
            return rounded(found, dtype)
        return rounded((x if self.kept == 1 else x * self.kept) + found, dtype)

    def _by_kernels(self, x: Tensor, context: Context) -> Tensor:
        """The same by the C kernels."""
        dtype = context.dtype
        read = x if self.before is None else norm(x, self.before, dtype)
        found = self.layer.forward(read, context)
        x = read if self.keeps_normed else x
        if self.narrows and context.sequences.wanted is not None:
            x = x.index_select(0, context.sequences.wanted)
        return add(x, found, self.after, self.scale, self.kept, dtype)


class NetworkModel:
    """A loaded network. `forward` gives final hidden vectors; `logits` turns some of them into scores."""

    ratios: tuple[int, ...] = ()

    def __init__(
        self, network: Network, dtype: torch.dtype, embed: Tensor, layers: tuple[tuple[Layer, ...], ...], norm: RmsNorm,
        head: Weight, builder: Builder,
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
        self.narrows = any(isinstance(part, _Residual) and part.narrows for parts in layers for part in parts)

    def forward(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        """tokens [T] int64 (padding included) -> final hidden vectors [T, D] fp32, normed."""
        context = Context(tokens, sequences, self._tables(sequences.positions), self.dtype)
        x = self.embed[tokens]
        for parts in self.layers:
            for part in parts:
                x = part.forward(x, context)
        for finish in self.finishing:
            finish(context)
        x = norm(x, self.norm, torch.float32) if library() is not None else self.norm.forward(x)
        if self.narrows and sequences.wanted is not None:
            num = len(sequences.pieces)
            return x.new_zeros(tokens.shape[0], x.shape[1]).index_copy_(0, sequences.wanted[:num], x[:num])
        return x

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
    shared = frozenset(part.shares for part in attentions(network.layers) if part.shares is not None)
    builder = Builder(network, source, dtype, stores, cache_format, index_format, shared=shared, builders=BUILDERS)
    table = builder.take(network.embed, network.vocab_size, network.hidden_size)
    first = () if network.opening is None else ((builder.build(network.opening),),)
    layers = []
    for number, branches in enumerate(network.layers):
        builder.layer = number
        layers.append(tuple(_residual(builder, branch) for branch in branches))
    if network.closing is None and layers:
        layers[-1] = _narrowed(layers[-1])
    last = () if network.closing is None else ((builder.build(network.closing),),)
    norm = builder.norm(network.norm, network.hidden_size)
    is_tied = network.head is None or (network.head_may_miss and not source.has(network.head))
    own = table if is_tied else builder.take(str(network.head), network.vocab_size, network.hidden_size)
    head = builder.product(own)
    embed = rounded(table if network.embed_scale == 1 else table * network.embed_scale, dtype)
    source.finish()
    return NetworkModel(network, dtype, embed, (*first, *layers, *last), norm, head, builder)


def _narrowed(layer: tuple[_Residual, ...]) -> tuple[_Residual, ...]:
    """The last layer: once its attention has stored the step's rows, the rest is computed for wanted rows alone.

    Only where all that follows the attention works row by row.
    """
    parts = list(layer)
    while parts and isinstance(parts[-1].layer, GatedMlp):
        parts.pop()
    attention = parts[-1].layer if parts else None
    if not isinstance(attention, GroupedAttention) or attention.shares is not None or attention.is_shared:
        return layer
    parts[-1] = replace(parts[-1], layer=replace(attention, narrows=True), narrows=True)
    return (*parts, *layer[len(parts) :])


def attentions(part: object) -> Iterator[Attention]:
    """Those in a part, or in several."""
    if isinstance(part, Attention):
        yield part
    inner = part if isinstance(part, tuple) else [getattr(part, each.name) for each in fields(part)] if is_dataclass(part) else []
    for each in inner:
        yield from attentions(each)


def _residual(builder: Builder, branch: Branch) -> _Residual:
    layer = builder.build(branch.part)
    before = builder.norm(branch.before, builder.width) if branch.before is not None else None
    after = builder.norm(branch.after, builder.width) if branch.after is not None else None
    by_kernels = library() is not None and builder.network.opening is None
    return _Residual(layer, before, after, branch.scale, branch.kept, branch.keeps_normed, by_kernels=by_kernels)
