"""Matrix products with a stored weight [out, in].

linear(x, weight)        [rows, in] x [out, in] -> [rows, out] fp32.
batched_linear(x, m)     [B, rows, in] x [B, in, out] -> [B, rows, out] fp32; never fewer than MIN_COLUMNS columns inside.
prepared(weight)         the same weight in the order of bytes that products read fastest; done once, at load.
packed(weight)           the same as the machine multiplies with it fastest, for `linear` alone.
packed_each(weights)     of each of several, [E, out, in].
Weight                   what `linear` reads: a tensor, or one that is packed for the C kernels.
padded_rows(n, m)        rows to give a product so that no row's bits depend on how many others there are.
stable_row_multiple(s)   start-up search for that m on this machine.

Operands as they are stored (`stored.py`): Activation, StoredWeight, and GemmCase, what an implementation may refuse.

linear_stored(x, weight)          [T, in] x [out, in] -> [T, out] fp32, codes or values of x as the weight asks.
grouped_linear(x, weights, G)     [T, G * K] x [G * N, K] -> [T, G * N], group by group.
quantise_rows(values)             rows with codes and scales.
swiglu_quantise(h, limit, ...)    silu(gate) * up of [gate | up], with codes and scales.

On GPUs: `triton.py`, which needs Triton.
"""

from lamina.ops.gemm.ref import (
    MIN_COLUMNS,
    Weight,
    Weights,
    batched_linear,
    grouped_linear,
    linear,
    linear_stored,
    packed,
    packed_each,
    padded_rows,
    prepared,
    quantise_rows,
    stable_row_multiple,
    swiglu_quantise,
)
from lamina.ops.gemm.stored import Activation, GemmCase, StoredWeight, empty_activation

__all__ = [
    "MIN_COLUMNS",
    "Activation",
    "GemmCase",
    "StoredWeight",
    "Weight",
    "Weights",
    "batched_linear",
    "empty_activation",
    "grouped_linear",
    "linear",
    "linear_stored",
    "packed",
    "packed_each",
    "padded_rows",
    "prepared",
    "quantise_rows",
    "stable_row_multiple",
    "swiglu_quantise",
]
