"""Matrix products with a stored weight [out, in].

linear(x, weight)        [rows, in] x [out, in] -> [rows, out] fp32.
prepared(weight)         the same weight in the order of bytes that products read fastest; done once, at load.
padded_rows(n, m)        rows to give a product so that no row's bits depend on how many others there are.
stable_row_multiple(s)   start-up search for that m on this machine.
"""

from lamina.ops.gemm.ref import linear, padded_rows, prepared, stable_row_multiple

__all__ = ["linear", "padded_rows", "prepared", "stable_row_multiple"]
