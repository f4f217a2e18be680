"""Matrix products with a stored weight [out, in].

linear(x, weight)     [rows, in] x [out, in] -> [rows, out] fp32.
prepared(weight)      the same weight in the order of bytes that products read fastest; done once, at load.
padded_rows(n)        rows to give a product so that no row's bits depend on how many others there are.
unstable_shapes(...)  start-up check of that promise on this machine.
"""

from lamina.ops.gemm.ref import ROW_MULTIPLE, linear, padded_rows, prepared, unstable_shapes

__all__ = ["ROW_MULTIPLE", "linear", "padded_rows", "prepared", "unstable_shapes"]
