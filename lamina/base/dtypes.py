"""Element types by name, with their sizes. Knows nothing of torch."""

from lamina.base.errors import ConfigError

#: bits per element of every stored type; "e2m1" packs two codes a byte, low nibble first.
DTYPE_BITS = {"fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "e4m3": 8, "e8m0": 8, "u8": 8, "e2m1": 4, "int32": 32, "int64": 64}


def nbytes(dtype: str, num_elements: int) -> int:
    """Bytes of `num_elements` of `dtype`, packed; an odd count of 4-bit codes takes a whole last byte."""
    if dtype not in DTYPE_BITS:
        raise ConfigError("dtype", dtype, f"one of {', '.join(DTYPE_BITS)}")
    return (DTYPE_BITS[dtype] * num_elements + 7) // 8
