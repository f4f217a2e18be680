"""Number formats with block scales: cache entries, index keys and stored weights, in and out of fp32.

    quantise_fp8      x [..., n]   -> codes e4m3 [..., n], scales u8 [..., ceil(n/block)]        block 64, attention entries
    quantise_fp8_row  x [..., n]   -> codes e4m3 [..., n], scale fp32 [...]                      index keys in fp8
    quantise_fp4      x [..., n]   -> packed u8 [..., n/2], scales u8 [..., ceil(n/block)]       block 32, index keys in fp4
    quantise_fp8_weight  w [o, i]  -> codes e4m3 [o, i], scales u8 [ceil(o/128), ceil(i/128)]
    quantise_fp4_weight  w [o, i]  -> packed u8 [o, i/2], scales u8 [o, i/32]
    dequantise_*                   -> fp32, the exact product of code and scale
    hadamard          x [..., n]   -> fp32 [..., n], orthonormal, Sylvester order

Scales are powers of two; a u8 scale is an e8m0 byte b = 2^(b-127), 255 = NaN. fp8 scale = 2^ceil(log2(max(amax, 1e-4)/448)),
fp4 scale = 2^ceil(log2(max(amax, 6*2^-126)/6)), both exact. Rounding is to nearest even and keeps the sign of zero.
A last block may be shorter. A block that holds an infinity or a NaN gets scale NaN and codes 0: all of it reads back as NaN.
Finite values that round up to 2^128 read back as infinity. A row's bits never depend on the other rows.
Zero rows are fine; n = 0, an odd n for fp4 and shapes that do not belong together are ValueErrors.
"""

from lamina.ops.quantise.ref import (
    dequantise_fp4,
    dequantise_fp4_weight,
    dequantise_fp8,
    dequantise_fp8_row,
    dequantise_fp8_weight,
    e8m0_to_fp32,
    hadamard,
    quantise_fp4,
    quantise_fp4_weight,
    quantise_fp8,
    quantise_fp8_row,
    quantise_fp8_weight,
)

__all__ = [
    "dequantise_fp4",
    "dequantise_fp4_weight",
    "dequantise_fp8",
    "dequantise_fp8_row",
    "dequantise_fp8_weight",
    "e8m0_to_fp32",
    "hadamard",
    "quantise_fp4",
    "quantise_fp4_weight",
    "quantise_fp8",
    "quantise_fp8_row",
    "quantise_fp8_weight",
]
