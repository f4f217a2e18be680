"""What every stored format consists of, as data: the one list for the memory plan and for the codecs that fill it.

A field is (name, dtype, shape of one row). Sizes follow from `dtypes.nbytes`. Knows nothing of torch.
"""

from typing import TypeAlias

from lamina.base.config import CACHE_FORMATS, INDEX_FORMATS
from lamina.base.errors import ConfigError

FieldData: TypeAlias = tuple[str, str, tuple[int, ...]]

#: elements that share a scale: of an attention entry in fp8, of an index key in fp4, of a latent in fp8
FP8_BLOCK = 64
FP4_BLOCK = 32
LATENT_BLOCK = 128
_SCALE_PAD = 8


def vector(dtype: str, width: int) -> tuple[FieldData, ...]:
    """A vector as it is, in one field `row`."""
    return (("row", dtype, (width,)),)


def attention_entry(cache_format: str, width: int, rope: int) -> tuple[FieldData, ...]:
    """A key that is its own value, `width` dims, the last `rope` of them rotated. `cache_format` is fp8, bf16 or fp32.

    fp8: unrotated dims as e4m3 with a power-of-two scale every 64, rotated ones as bf16 (448 + 128 + 8 = 584 B at 512 dims).
    """
    check_cache_format(cache_format)
    if cache_format != "fp8":
        return vector(cache_format, width)
    nope = width - rope
    if nope <= 0:
        raise ConfigError("cache_format", cache_format, f"bf16 or fp32 where all {width} dims of an entry are rotated")
    scales = -(-nope // FP8_BLOCK)
    return (
        ("nope", "e4m3", (nope,)),
        ("rope", "bf16", (rope,)),
        ("scale", "e8m0", (-(-scales // _SCALE_PAD) * _SCALE_PAD,)),
    )


def index_key(index_format: str, width: int) -> tuple[FieldData, ...]:
    """A key of an index, `width` dims. `index_format` is fp4, fp8, bf16 or fp32.

    fp8: e4m3 and one fp32 scale (132 B at 128 dims).   fp4: a power-of-two scale every 32 (68 B).
    """
    check_index_format(index_format)
    if index_format in ("bf16", "fp32"):
        return vector(index_format, width)
    if width & (width - 1):
        raise ConfigError("index_format", index_format, f"bf16 or fp32 where index_head_dim ({width}) is no power of two")
    if index_format == "fp8":
        return ("code", "e4m3", (width,)), ("scale", "fp32", (1,))
    return ("code", "e2m1", (width,)), ("scale", "e8m0", (-(-width // FP4_BLOCK),))


def latent(cache_format: str, rank: int, rope: int) -> tuple[FieldData, ...]:
    """What all heads' keys and values are made from (`rank` dims), and the rotated dims of the keys (`rope`).

    fp8: e4m3 with an fp32 scale every 128, rotated dims as bf16 (512 + 16 + 128 = 656 B at 512 + 64 dims; bf16: 1,152 B).
    """
    check_cache_format(cache_format)
    if cache_format != "fp8":
        return vector(cache_format, rank + rope)
    return ("latent", "e4m3", (rank,)), ("scale", "fp32", (-(-rank // LATENT_BLOCK),)), ("rope", "bf16", (rope,))


def key_value(cache_format: str, heads: int, key_dim: int, value_dim: int) -> tuple[FieldData, ...]:
    """The keys and values of `heads` heads. fp8: e4m3; its scale is one number per tensor and not part of an entry."""
    check_cache_format(cache_format)
    dtype = "e4m3" if cache_format == "fp8" else cache_format
    return ("k", dtype, (heads, key_dim)), ("v", dtype, (heads, value_dim))


def check_cache_format(cache_format: str) -> None:
    """Refuses what is no cache format."""
    if cache_format not in CACHE_FORMATS:
        raise ConfigError("cache_format", cache_format, f"one of {', '.join(CACHE_FORMATS)}")


def check_index_format(index_format: str) -> None:
    """Refuses what is no index format."""
    if index_format not in INDEX_FORMATS:
        raise ConfigError("index_format", index_format, f"one of {', '.join(INDEX_FORMATS)}")
