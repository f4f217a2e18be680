"""What turns parts of a network into layers works with: the checkpoint's tensors, and the stores of what is remembered."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lamina.base.errors import ConfigError
from lamina.layers.entries import StoreKey
from lamina.layers.heads import Context, Layer, RmsNorm
from lamina.layers.projection import Projection
from lamina.models.network import Network, Norm, Rope
from lamina.ops.attend_heads import Past
from lamina.ops.gemm import Weight, Weights, packed, packed_each
from lamina.ops.store import EntryCodec, Store
from lamina.weights.loader import TensorSource

__all__ = ["Builder", "Layer", "head_order"]


@dataclass(slots=True)
class Builder:
    """What builders work with: the checkpoint's tensors, each once, and the stores of the arena.

    stores   gives the store of a key with a codec.   formats  of the cache and of an index.
    shapes   (in, out) of every product with a weight; batched  of batched ones: start-up checks their bits.
    shared   layers whose memory others read.   finishing  what is done after the last layer.
    builders  how each kind of part is built.
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
    builders: Mapping[type, Callable[["Builder", object], Layer]] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Of the residual."""
        return self.network.hidden_size

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor in fp32."""
        return self.source.take(name, shape)

    def product(self, weight: Tensor) -> Weight:
        """A weight [out, in] as products read it."""
        found = packed(weight)
        if isinstance(found, Tensor):
            self.shapes.add((weight.shape[1], weight.shape[0]))
        return found

    def products(self, weights: Tensor) -> Weights:
        """Weights [E, out, in] as products read each of them."""
        found = packed_each(weights)
        if isinstance(found, Tensor):
            self.shapes.add((weights.shape[2], weights.shape[1]))
        return found

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
        """The layer of a part. Raises ConfigError for one that nothing builds."""
        build = self.builders.get(type(part))
        if build is None:
            known = ", ".join(each.__name__ for each in self.builders)
            raise ConfigError("layers", type(part).__name__, f"one of {known}")
        return build(self, part)


def head_order(dim: int, rope: Rope | None) -> Tensor:
    """The dims of a head in the order in which layers have them: those not rotated, then the rotated ones pair by pair."""
    if rope is None:
        return torch.arange(dim)
    num_rotated = rope.dim + rope.dim % 2  # an odd share of a head's dims: its last pair is whole
    rotated = torch.arange(num_rotated)
    if not rope.is_pairs:
        rotated = rotated.view(2, -1).t().flatten()
    return torch.cat([torch.arange(num_rotated, dim), rotated])


def build_projection(builder: Builder, name: str, rows: int, columns: int, bias: bool) -> Projection:
    """`{name}.weight` [rows, columns], and `{name}.bias` [rows] if there is one."""
    weight = builder.product(builder.take(f"{name}.weight", rows, columns))
    return Projection(weight, builder.take(f"{name}.bias", rows) if bias else None)
