"""What turns parts of a network into layers on a GPU: tensors in their stored formats, and the stores of what is remembered."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lamina.base.errors import WeightError
from lamina.base.log import event, get_logger
from lamina.layers.device_heads import DeviceHeads, DeviceLayer, DeviceMlp, DeviceRouter, DeviceSparse, DeviceSum, HeadNorm
from lamina.layers.entries import StoreKey
from lamina.layers.stored import Part as Projection
from lamina.layers.stored import stack
from lamina.models.network import Attention, Experts, Mlp, Network, Norm, Parallel, Rope, Router
from lamina.ops.attend_heads import HeadsCase, Past
from lamina.ops.attend_heads.triton import refuses as heads_refuse
from lamina.ops.experts.plain import PlainExperts, StoredExperts
from lamina.ops.gated import ACTIVATIONS
from lamina.ops.gemm.stored import BLOCK, StoredWeight
from lamina.ops.machine import Machine
from lamina.ops.quantise import dequantise_fp4_weight, dequantise_fp8_weight
from lamina.ops.residual import VectorNorm
from lamina.ops.route import RouteCase
from lamina.ops.route.triton import refuses as route_refuses
from lamina.ops.store import EntryCodec, HeadsCodec, Store
from lamina.weights.loader import StoredTensor, TensorSource

_LOG = get_logger(__name__)


@dataclass(slots=True)
class DeviceBuilder:
    """What builders work with: the checkpoint's tensors, each once, and the stores of the arena.

    stores  gives the store of a key with a codec.   builders  how each kind of part is built.
    shared  layers whose keys and values others read.   pasts  where those of each layer lie.
    index_format  of an index's keys.
    """

    network: Network
    source: TensorSource
    dtype: torch.dtype
    stores: Callable[[StoreKey, EntryCodec], Store]
    cache_format: str
    device: torch.device
    builders: Mapping[type, Callable[["DeviceBuilder", object], DeviceLayer]]
    layer: int = 0
    ropes: list[Rope] = field(default_factory=list)
    shared: frozenset[int] = frozenset()
    pasts: dict[int, Past] = field(default_factory=dict)
    index_format: str = "bf16"

    @property
    def width(self) -> int:
        """Of the residual."""
        return self.network.hidden_size

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor in fp32."""
        return self.source.take(name, shape).to(self.device)

    def stored(self, name: str, *shape: int) -> StoredTensor:
        """A tensor as stored, but for fp32 where activations are bf16, which is rounded."""
        found = self.source.take_stored(name, shape).to(self.device)
        if found.kind == "plain" and found.codes.dtype == torch.float32 and self.dtype == torch.bfloat16:
            return StoredTensor("plain", found.codes.to(self.dtype))
        return found

    def weight(self, name: str, rows: int, columns: int) -> StoredWeight:
        """A matrix as products read it."""
        found = self.stored(name, rows, columns)
        if found.kind == "fp4":
            assert found.scales is not None
            event(_LOG, "weight_expanded", tensor=name, stored="fp4", used=str(self.dtype))
            return StoredWeight(dequantise_fp4_weight(found.codes, found.scales).to(self.dtype).contiguous())
        return StoredWeight(found.codes.contiguous(), found.scales)

    def joined(self, names: list[str], rows: list[int]) -> StoredWeight:
        """Matrices that read the residual's width as one; expanded, with a line in the log, where the formats do not allow it."""
        parts = [
            Projection(name, self.weight(name, count, self.width), self.dtype) for name, count in zip(names, rows, strict=True)
        ]
        stacked = stack(parts).products
        if len(stacked) == 1:
            return stacked[0].weight
        event(_LOG, "weight_expanded", tensor=names[0], stored="fp8", used=str(self.dtype))
        return StoredWeight(torch.cat([_expanded(part.weight).to(self.dtype) for part in parts]))

    def biases(self, names: list[str], rows: list[int]) -> Tensor:
        """Vectors as one."""
        return torch.cat([self.take(name, count) for name, count in zip(names, rows, strict=True)])

    def past(self, memory: str, codec: HeadsCodec) -> Past:
        """Where the rows of the layer that is being built lie."""
        return Past(self.stores(StoreKey(self.layer, memory, tuple(name for name, _, _ in codec.fields)), codec), codec)

    def norm(self, norm: Norm) -> VectorNorm:
        """A norm of the residual with its weight."""
        if norm.kind == "plain":
            return VectorNorm(None, norm.eps)
        weight = self.take(norm.name, self.width)
        return VectorNorm(weight + 1 if norm.kind == "rms1" else weight, norm.eps, norm.kind == "layer")

    def head_norm(self, norm: Norm | None, dim: int) -> HeadNorm | None:
        """A norm of a head, or of all heads' dims, with its weight."""
        if norm is None:
            return None
        if norm.kind == "plain":
            return None, norm.eps
        weight = self.take(norm.name, dim)
        return weight + 1 if norm.kind == "rms1" else weight, norm.eps

    def angle(self, rope: Rope | None) -> int | None:
        """The number of a rotary embedding among those of the model."""
        if rope is None:
            return None
        if rope not in self.ropes:
            self.ropes.append(rope)
        return self.ropes.index(rope)

    def build(self, part: object) -> DeviceLayer:
        """The layer of a part."""
        return self.builders[type(part)](self, part)


#: of anything but keys and values
LARGE_WINDOWS = "windows too large for a slot have no GPU kernels yet"


def refuses_attention(part: Attention, machine: Machine) -> str | None:
    """Why a layer is not served, or None."""
    if part.norm_all and part.norm_after_rope:
        return "norms over all heads' dims after the rotation: no GPU kernels yet"
    if any(norm is not None and norm.kind == "layer" for norm in (part.q_norm, part.k_norm)):
        return "layer norms of heads: no GPU kernels yet"
    return heads_refuse(machine, part.dim)


def build_attention(builder: DeviceBuilder, part: object) -> DeviceLayer:
    """The layer of an `Attention`."""
    assert isinstance(part, Attention)
    q_name, k_name, v_name, o_name = (f"{part.prefix}.{name}" for name in part.names)
    width, dim = builder.width, part.dim
    names, rows = [q_name, k_name, v_name], [(1 + part.is_gated) * part.heads * dim, part.kv_heads * dim, part.kv_heads * dim]
    is_reader = part.shares is not None
    if part.shares is not None:
        names, rows, past = names[:1], rows[:1], builder.pasts[part.shares]
    else:
        past = builder.past(part.memory, HeadsCodec(part.kv_heads, dim, dim, builder.cache_format))
        builder.pasts[builder.layer] = past
    return DeviceHeads(
        w_in=builder.joined([f"{name}.weight" for name in names], rows),
        b_in=builder.biases([f"{name}.bias" for name in names], rows) if part.bias else None,
        w_out=builder.weight(f"{o_name}.weight", width, part.heads * dim),
        bias=builder.take(f"{o_name}.bias", width) if part.out_bias else None,
        past=past,
        case=HeadsCase(
            part.heads, part.kv_heads, part.scale, part.window, part.chunk, part.softcap,
            builder.take(part.sinks, part.heads) if part.sinks is not None else None,
        ),
        angle=builder.angle(part.rope), is_pairs=part.rope is not None and part.rope.is_pairs,
        q_norm=builder.head_norm(part.q_norm, part.heads * dim if part.norm_all else dim),
        k_norm=None if is_reader else builder.head_norm(part.k_norm, part.kv_heads * dim if part.norm_all else dim),
        v_norm_eps=0.0 if is_reader else part.v_norm_eps,
        norm_after_rope=part.norm_after_rope, temperature=part.temperature, is_gated=part.is_gated,
        shares=part.shares, is_shared=builder.layer in builder.shared, layer=builder.layer,
        norm_all=part.norm_all,
    )  # fmt: skip


def refuses_mlp(part: Mlp, machine: Machine) -> str | None:
    """Why a layer is not served, or None."""
    if part.cut is not None and part.multipliers[0] != 1:
        return "gates that are cut below a quantile and multiplied: no GPU kernels yet"
    return None if part.activation in ACTIVATIONS else f"activation {part.activation}: no GPU kernels yet"


def build_mlp(builder: DeviceBuilder, part: object) -> DeviceMlp:
    """The layer of an `Mlp`."""
    assert isinstance(part, Mlp)
    gate, up, down = part.names
    names = [f"{part.prefix}.{name}" for name in (gate, up) if name is not None]
    rows = [part.width * (1 + part.is_fused)] * len(names)
    return DeviceMlp(
        w_in=builder.joined([f"{name}.weight" for name in names], rows),
        b_in=builder.biases([f"{name}.bias" for name in names], rows) if part.bias else None,
        w_out=builder.weight(f"{part.prefix}.{down}.weight", builder.width, part.width),
        bias=builder.take(f"{part.prefix}.{down}.bias", builder.width) * part.multipliers[1] if part.bias else None,
        activation=part.activation, has_gate=gate is not None or part.is_fused, multipliers=part.multipliers,
        cut=part.cut,
    )  # fmt: skip


def refuses_experts(part: Experts, machine: Machine) -> str | None:
    """Why a layer is not served, or None."""
    return refuses_routed(part.router, part.num, part.shared, machine)


def refuses_routed(router: Router, num: int, shared: Mlp | None, machine: Machine) -> str | None:
    """Why routing among `num` experts and the shared one are not served, or None."""
    if router.groups > 1 and router.kind not in ("softmax", "sigmoid"):
        return f"routing in groups by {router.kind}: no GPU kernels"
    if shared is not None and (why := refuses_mlp(shared, machine)):
        return why
    return route_refuses(machine, RouteCase(num, router.top_k))


def build_experts(builder: DeviceBuilder, part: object) -> DeviceLayer:
    """The layer of an `Experts`."""
    assert isinstance(part, Experts)
    width, inner = builder.width, part.width
    gate_up, down = GatheredExperts(part.num, 2, builder.dtype), GatheredExperts(part.num, 1, builder.dtype)
    for expert in range(part.num):
        names = [f"{part.prefix}.experts.{expert}.{name}.weight" for name in part.names]
        for number, name in enumerate(names[:2]):
            gate_up.put(name, expert, number, builder.stored(name, inner, width))
        down.put(names[2], expert, 0, builder.stored(names[2], width, inner))
    shared = build_mlp(builder, part.shared) if part.shared is not None else None
    return DeviceSparse(
        gate=builder.weight(part.gate, part.num, width), router=build_router(builder, part.router, part.num),
        experts=PlainExperts(gate_up.experts(), down.experts()), shared=shared,
        shared_gate=builder.weight(part.shared_gate, 1, width) if part.shared_gate is not None else None,
    )  # fmt: skip


def build_router(builder: DeviceBuilder, router: Router, num: int) -> DeviceRouter:
    bias = builder.take(router.bias, num) if router.bias is not None else None
    is_chosen = router.kind in ("chosen", "chosen_sigmoid")  # whose weights are as they are
    return DeviceRouter(
        router.kind, router.top_k, router.normalises and not is_chosen, 1.0 if is_chosen else router.scale, bias,
        router.groups, router.kept,
    )  # fmt: skip


def build_parallel(builder: DeviceBuilder, part: object) -> DeviceLayer:
    """The layer of a `Parallel`."""
    assert isinstance(part, Parallel)
    return DeviceSum(tuple(builder.build(each) for each in part.parts))


class GatheredExperts:
    """One matrix of every expert, [E, parts * rows, columns] as stored, filled one after another."""

    def __init__(self, num: int, parts: int, dtype: torch.dtype) -> None:
        self.num, self.parts, self.dtype = num, parts, dtype
        self.first: StoredTensor | None = None

    def put(self, name: str, expert: int, part: int, tensor: StoredTensor) -> None:
        """The part-th rows of one expert. WeightError, with its name, for a tensor that is stored otherwise than the first."""
        tensor = self._plain(name, tensor)
        rows, columns = tensor.codes.shape
        if self.first is None:
            self.first = tensor
            self.codes = tensor.codes.new_empty(self.num, self.parts * rows, columns)
            if tensor.scales is not None:
                self.scales = tensor.scales.new_empty(self.num, self.parts * tensor.scales.shape[0], tensor.scales.shape[1])
        if tensor.codes.dtype != self.codes.dtype:
            raise WeightError(
                f"tensor {name!r}: expected {self.codes.dtype} as the layer's other experts, found {tensor.codes.dtype}"
            )
        self.codes[expert, part * rows : (part + 1) * rows] = tensor.codes
        if tensor.scales is not None:
            count = tensor.scales.shape[0]
            self.scales[expert, part * count : (part + 1) * count] = tensor.scales

    def _plain(self, name: str, tensor: StoredTensor) -> StoredTensor:
        """fp4, and fp8 whose scales do not fit the stack, expanded."""
        if tensor.scales is None or (tensor.kind == "fp8" and (self.parts == 1 or tensor.codes.shape[0] % BLOCK == 0)):
            return tensor
        event(_LOG, "weight_expanded", tensor=name, stored=tensor.kind, used=str(self.dtype))
        expand = dequantise_fp4_weight if tensor.kind == "fp4" else dequantise_fp8_weight
        return StoredTensor("plain", expand(tensor.codes, tensor.scales).to(self.dtype))

    def experts(self) -> StoredExperts:
        """All of them."""
        assert self.first is not None
        return StoredExperts(self.codes, self.scales if self.first.scales is not None else None)


def _expanded(weight: StoredWeight) -> Tensor:
    """fp32."""
    return weight.codes.float() if weight.scales is None else dequantise_fp8_weight(weight.codes, weight.scales)
