"""Feed-forward experts with a clamped SwiGLU.

experts(x, chosen, weights, gate_up, down, limit, row_multiple)   routed sum [T, D] fp32.
swiglu(x, gate_up, down, limit, weight)             one dense expert [T, D] fp32.
"""

from lamina.ops.experts.ref import experts, swiglu

__all__ = ["experts", "swiglu"]
