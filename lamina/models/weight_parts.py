"""Counting the weights of standard blocks: parameters, and the bytes a checkpoint stores them in. No tensors.

A family adds up `Size`s per component, layer by layer, and turns them into `WeightPart`s with `weight_parts`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lamina.base.dtypes import nbytes
from lamina.base.errors import ConfigError
from lamina.models.config_fields import ConfigFields
from lamina.models.description import WeightPart

#: how each component is divided over GPUs; what is not named here is cut by tensor parallelism
_SPLITS = {
    "experts": "expert", "router": "none", "norms": "none", "index": "none", "compressor": "none", "hyper-connections": "none",
}  # fmt: skip
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class Size:
    """Parameters (scales of quantised weights not counted) and bytes (scales included)."""

    num_params: int = 0
    nbytes: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(self.num_params + other.num_params, self.nbytes + other.nbytes)

    def __mul__(self, times: int) -> "Size":
        return Size(self.num_params * times, self.nbytes * times)


@dataclass(frozen=True, slots=True)
class Storage:
    """How a checkpoint stores weights: everything in `dtype`; the matrices of linear layers in `codes` where that is given.

    block   (rows, columns) of a matrix [out, in] that share one scale; 0 means all of them.   scale  dtype of a scale.
    """

    dtype: str = "bf16"
    codes: str | None = None
    block: tuple[int, int] = (128, 128)
    scale: str = "fp32"

    def tensor(self, *shape: int, dtype: str | None = None) -> Size:
        """A tensor that is never quantised."""
        count = math.prod(shape)
        return Size(count, nbytes(dtype or self.dtype, count))

    def linear(self, outputs: int, inputs: int, bias: bool = False) -> Size:
        """The matrix [outputs, inputs] of a linear layer, with its scales if quantised, and its bias if it has one."""
        extra = self.tensor(outputs) if bias else Size()
        if self.codes is None:
            return self.tensor(outputs, inputs) + extra
        rows, columns = (side or whole for side, whole in zip(self.block, (outputs, inputs), strict=True))
        scales = -(-outputs // rows) * -(-inputs // columns)
        return Size(outputs * inputs, nbytes(self.codes, outputs * inputs) + nbytes(self.scale, scales)) + extra

    @property
    def plain(self) -> "Storage":
        """The same without quantisation, for layers that a checkpoint leaves alone."""
        return Storage(self.dtype)


def storage_of(fields: ConfigFields, outer: ConfigFields | None = None) -> Storage:
    """How the checkpoint of a config stores its linear layers, from `dtype` (or `torch_dtype`) and `quantization_config`.

    outer   the config around a nested one: asked where the nested one says nothing.
    FP8 has an fp32 scale per block of `weight_block_size` or, without one, per matrix (`scale_fmt` ue8m0 says that it is a
    power of two, not how it is stored; static scales of activations, one a matrix, are not counted); MXFP4 is for experts
    only, and 32 codes share a scale.
    Raises ConfigError for an unknown type or quantisation.
    """
    sources = [source for source in (fields, outer) if source is not None]
    dtype = "bf16"
    for source in reversed(sources):
        name = source.get("dtype", "torch_dtype")
        if name is not None and name != "auto":
            if not isinstance(name, str) or name.removeprefix("torch.") not in _DTYPES:
                raise ConfigError(source.prefix + "dtype", name, f"one of {', '.join(_DTYPES)}")
            dtype = _DTYPES[name.removeprefix("torch.")]
    quantised = next((q for q in (source.nested("quantization_config") for source in sources) if q is not None), None)
    if quantised is None:
        return Storage(dtype)
    method = quantised.get("quant_method")
    if method == "mxfp4":
        return Storage(dtype, "e2m1", (1, 32), "e8m0")
    if method != "fp8":
        raise ConfigError(quantised.prefix + "quant_method", method, "fp8 or mxfp4; without it weights count in their dtype")
    quantised.must_be("fmt", "e4m3")
    return Storage(dtype, "e4m3", _block(quantised))


def _block(quantised: ConfigFields) -> tuple[int, int]:
    sides = quantised.items("weight_block_size")
    if sides is None:
        return 0, 0
    found = [side for side in sides if isinstance(side, int) and not isinstance(side, bool) and 1 <= side <= 2**20]
    if len(sides) != 2 or len(found) != 2:
        raise ConfigError(quantised.prefix + "weight_block_size", sides, "two integers of at least 1, or null")
    return found[0], found[1]


def gqa_attention(
    store: Storage, hidden: int, heads: int, kv_heads: int, head_dim: int, bias: bool = False, out_bias: bool | None = None,
    qk_norm: tuple[int, int] | None = None,
) -> Size:  # fmt: skip
    """Query, key, value and output projections of grouped-query attention; norms of queries and keys of the given widths.

    bias   of query, key and value.   out_bias  of the output projection; None as `bias`.
    """
    width, kv_width = heads * head_dim, kv_heads * head_dim
    size = store.linear(width, hidden, bias) + store.linear(kv_width, hidden, bias) * 2
    size += store.linear(hidden, width, bias if out_bias is None else out_bias)
    return size + (store.tensor(qk_norm[0]) + store.tensor(qk_norm[1]) if qk_norm is not None else Size())


def mlp(store: Storage, hidden: int, width: int, bias: bool = False, gated: bool = True) -> Size:
    """Gate (if gated), up and down projection."""
    return store.linear(width, hidden, bias) * (2 if gated else 1) + store.linear(hidden, width, bias)


def router(store: Storage, hidden: int, num_experts: int, bias: bool = False, dtype: str | None = None) -> Size:
    """The matrix that scores experts; never quantised."""
    size = store.tensor(num_experts, hidden, dtype=dtype)
    return size + (store.tensor(num_experts, dtype=dtype) if bias else Size())


def embedding_and_head(store: Storage, vocab: int, hidden: int, tied: bool) -> list[tuple[str, Size]]:
    """Embedding and head, never quantised; a head that is the embedding is not counted again."""
    table = store.tensor(vocab, hidden)
    return [("embedding", table)] if tied else [("embedding", table), ("head", table)]


def weight_parts(sizes: Iterable[tuple[str, Size]], splits: dict[str, str] | None = None) -> tuple[WeightPart, ...]:
    """(component, size) pairs, added up per component in order of appearance; empty ones are left out.

    splits   how a component is divided where that differs from the usual: "tensor", "expert" or "none".
    """
    totals: dict[str, Size] = {}
    for component, size in sizes:
        totals[component] = totals.get(component, Size()) + size
    how = _SPLITS | (splits or {})
    return tuple(
        WeightPart(component, size.num_params, size.nbytes, how.get(component, "tensor"))
        for component, size in totals.items()
        if size.nbytes
    )
