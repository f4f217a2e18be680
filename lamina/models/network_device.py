"""Builds and runs what a `Network` says on a GPU. `network_model` is the definition; results differ from it by rounding only.

Every launch's shape follows from the number of rows and from `max_context`, so that a step can be captured in a graph.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.device_altup import DeviceStreams
from lamina.layers.device_heads import DeviceContext, DeviceLayer
from lamina.layers.entries import StoreKey
from lamina.models.device_build_altup import build_streams, refuses_altup
from lamina.models.device_build_delta import build_decayed, build_delta, refuses_decayed, refuses_delta
from lamina.models.device_build_experts import build_fused, build_ungated, refuses_fused, refuses_ungated
from lamina.models.device_build_latent import build_latent, refuses_latent
from lamina.models.device_build_scan import build_channel_scan, build_head_scan, build_scaled, refuses_scan
from lamina.models.device_builder import (
    DeviceBuilder,
    build_attention,
    build_experts,
    build_mlp,
    build_parallel,
    refuses_attention,
    refuses_experts,
    refuses_mlp,
)
from lamina.models.network import Attention, Branch, Experts, Mlp, Network, Parallel, parts_of
from lamina.models.network_model import attentions
from lamina.models.parts_altup import AltUpLayer, Closing, Opening
from lamina.models.parts_delta import DecayedAttention, DeltaRule
from lamina.models.parts_experts import FusedExperts, UngatedExperts
from lamina.models.parts_latent import Latent
from lamina.models.parts_scan import ChannelScan, HeadScan, Scaled
from lamina.models.rope import rope_frequencies
from lamina.ops.attend_heads import softcapped
from lamina.ops.gemm.stored import Activation, StoredWeight
from lamina.ops.gemm.triton import Order, linear
from lamina.ops.machine import Machine, portable_kernels
from lamina.ops.residual import Joint
from lamina.ops.residual.triton import finish, join
from lamina.ops.residual.triton import refuses as residual_refuses
from lamina.ops.rope_norm.triton import rotations
from lamina.ops.rows import Rows
from lamina.ops.store import EntryCodec, Store
from lamina.weights.loader import TensorSource

#: how each kind of part is built
DEVICE_BUILDERS: Mapping[type, Callable[[DeviceBuilder, object], DeviceLayer]] = {
    Attention: build_attention,
    ChannelScan: build_channel_scan,
    DecayedAttention: build_decayed,
    DeltaRule: build_delta,
    Experts: build_experts,
    FusedExperts: build_fused,
    HeadScan: build_head_scan,
    Latent: build_latent,
    Mlp: build_mlp,
    Parallel: build_parallel,
    Scaled: build_scaled,
    UngatedExperts: build_ungated,
}


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A part, and what is done with its result before the next one."""

    layer: DeviceLayer
    joint: Joint
    next_reads_fp8: bool


class DeviceNetworkModel:
    """A loaded network.

    first  what is done before the first part.   has_fp8  products with fp8 weights multiply fp8 rows.
    is_strict  bits never depend on where a request is cut.   streams  the decoder instead of `steps`, where it has several.
    """

    ratios: tuple[int, ...] = ()

    def __init__(
        self, network: Network, dtype: torch.dtype, embed: Tensor, first: Joint, steps: tuple[DeviceStep, ...],
        head: StoredWeight, angles: tuple[tuple[Tensor, float], ...], has_fp8: bool, only_portable: bool,
        is_strict: bool = False, streams: DeviceStreams | None = None,
    ) -> None:  # fmt: skip
        self.network = network
        self.dtype = dtype
        self.embed = embed
        self.first = first
        self.steps = steps
        self.head = head
        self.angles = angles
        self.has_fp8 = has_fp8
        self.only_portable = only_portable
        self.is_strict = is_strict
        self.streams = streams

    def forward(self, tokens: Tensor, rows: Rows, order: Order, max_context: int) -> Tensor:
        """tokens [T] int32 (0 for padding) -> final hidden vectors [T, D] fp32, normed.

        order        decode or prefill: which of the two fixed orders of sums the products and attention take.
        max_context  no request has more tokens after the step.
        """
        with portable_kernels(self.only_portable):
            tables = self._tables(rows.positions)
            context = DeviceContext(rows, order, max_context, tables, self.dtype, self.has_fp8, self.is_strict)
            x = self._embedded(tokens)
            if self.streams is not None:
                return self.streams.forward(x, tokens, context)
            read = join(x, None, self.first, self.has_fp8 and self.steps[0].layer.reads_fp8)
            for step in self.steps[:-1]:
                read = join(x, step.layer.forward(read, context), step.joint, step.next_reads_fp8)
            last = self.steps[-1]
            return finish(x, last.layer.forward(read, context), last.joint)

    def logits(self, hidden: Tensor, order: Order) -> Tensor:
        """hidden [S, D] fp32, rounded to the activations' type -> [S, V] fp32."""
        with portable_kernels(self.only_portable):
            found = linear(Activation(hidden.to(self.dtype)), self.head, torch.float32, order)
        if self.network.logit_scale != 1:
            found = found * self.network.logit_scale
        return softcapped(found, self.network.softcap) if self.network.softcap else found

    def _embedded(self, tokens: Tensor) -> Tensor:
        x = self.embed.index_select(0, tokens)
        if self.network.embed_scale != 1:
            x = x.float() * self.network.embed_scale
        return x.to(self.dtype)

    def _tables(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        found = []
        for inv_freq, factor in self.angles:
            cos, sin = rotations(positions, inv_freq)
            found.append((cos * factor, sin * factor) if factor != 1 else (cos, sin))
        return tuple(found)


def load_device_network(
    network: Network, source: TensorSource, dtype: torch.dtype, stores: Callable[[StoreKey, EntryCodec], Store],
    cache_format: str, device: torch.device, has_fp8: bool, only_portable: bool = False,
    is_strict: bool = False, index_format: str = "bf16",
) -> DeviceNetworkModel:  # fmt: skip
    """Takes every tensor once, moves it to the device in its stored format, and binds the layers to their stores.

    has_fp8        products with fp8 weights read fp8 rows; else rows of `dtype`.
    only_portable  no kernel is chosen that runs on one kind of GPU only.
    is_strict      bits never depend on where a request is cut.
    index_format   of an index's keys.
    Raises WeightError for a missing, misshapen or unused tensor; ConfigError for a window that is too large.
    """
    shared = frozenset(part.shares for part in attentions(network.layers) if part.shares is not None)
    builder = DeviceBuilder(
        network, source, dtype, stores, cache_format, device, DEVICE_BUILDERS, shared=shared, index_format=index_format
    )
    table = builder.weight(network.embed, network.vocab_size, network.hidden_size)
    if network.opening is not None:
        streams = build_streams(builder, network)
        head = _head(builder, table)
        source.finish()
        return DeviceNetworkModel(
            network, dtype, _rows_of(table), Joint(None), (), head, _angles(builder), has_fp8, only_portable, is_strict, streams
        )  # fmt: skip
    branches: list[Branch] = []
    layers: list[DeviceLayer] = []
    norms = []
    for number, parts in enumerate(network.layers):
        builder.layer = number
        for branch in parts:
            branches.append(branch)
            layers.append(builder.build(branch.part))
            norms.append(tuple(None if norm is None else builder.norm(norm) for norm in (branch.before, branch.after)))
    last = builder.norm(network.norm)
    head = _head(builder, table)
    source.finish()
    steps = []
    for number, (branch, layer, (_, after)) in enumerate(zip(branches, layers, norms, strict=True)):
        is_last = number + 1 == len(layers)
        keeps_normed = not is_last and branches[number + 1].keeps_normed
        joint = Joint(
            last if is_last else norms[number + 1][0], after, layer.bias, branch.scale, branch.kept, keeps_normed
        )  # fmt: skip
        steps.append(DeviceStep(layer, joint, not is_last and has_fp8 and layers[number + 1].reads_fp8))
    first = Joint(norms[0][0], keeps_normed=branches[0].keeps_normed)
    return DeviceNetworkModel(
        network, dtype, _rows_of(table), first, tuple(steps), head, _angles(builder), has_fp8, only_portable, is_strict
    )  # fmt: skip


def _head(builder: DeviceBuilder, table: StoredWeight) -> StoredWeight:
    """The head, or the embedding once more."""
    network = builder.network
    is_tied = network.head is None or (network.head_may_miss and not builder.source.has(network.head))
    return table if is_tied else builder.weight(str(network.head), network.vocab_size, network.hidden_size)


def _angles(builder: DeviceBuilder) -> tuple[tuple[Tensor, float], ...]:
    """The frequencies of each rotary embedding, and what its cosines and sines are multiplied by."""
    return tuple((inv_freq.to(builder.device), factor) for inv_freq, factor in map(rope_frequencies, builder.ropes))


def _rows_of(table: StoredWeight) -> Tensor:
    """The embedding's rows."""
    assert table.scales is None, "an embedding has no scales"
    return table.codes


def refuses_network(network: Network, machine: Machine) -> str | None:
    """Why a network is not served on a machine, in one line, or None."""
    return "; ".join(dict.fromkeys(why for why in refusals_of(network, machine).values() if why)) or None


def refusals_of(network: Network, machine: Machine) -> dict[str, str | None]:
    """For each kind of part that a network has, why its kernels do not serve all of its layers, in one line, or None."""
    found: dict[str, dict[str, None]] = {"Residual": {}}
    whole = residual_refuses(machine, network.hidden_size)
    if whole:
        found["Residual"][whole] = None
    for part in parts_of(network):
        why, whys = _refusal(part, machine), found.setdefault(type(part).__name__, {})
        if why:
            whys[why] = None
    return {name: "; ".join(whys) or None for name, whys in found.items()}


def _refusal(part: object, machine: Machine) -> str | None:
    if isinstance(part, AltUpLayer):
        return refuses_altup(part, machine)
    if isinstance(part, Opening | Closing):
        return None
    if isinstance(part, Attention):
        if part.shares is not None:
            return "layers that share their keys and values, outside of streams: no GPU kernels yet"
        return refuses_attention(part, machine)
    if isinstance(part, Mlp):
        return refuses_mlp(part, machine)
    if isinstance(part, Experts):
        return refuses_experts(part, machine)
    if isinstance(part, FusedExperts):
        return refuses_fused(part, machine)
    if isinstance(part, UngatedExperts):
        return refuses_ungated(part, machine)
    if isinstance(part, Scaled):
        return _refusal(part.part, machine)
    if isinstance(part, ChannelScan | HeadScan):
        return refuses_scan(part, machine)
    if isinstance(part, DeltaRule):
        return refuses_delta(part, machine)
    if isinstance(part, DecayedAttention):
        return refuses_decayed(part, machine)
    if isinstance(part, Latent):
        return refuses_latent(part, machine)
    return f"{type(part).__name__} layers have no GPU kernels yet"
