"""Feed-forward experts with a clamped SwiGLU.

experts(x, chosen, weights, gate_up, down, limit, row_multiple, gating)   routed sum [T, D] fp32.
swiglu(x, gate_up, down, limit, weight, gating, expert)   one dense expert [T, D] fp32.
Gating(alpha, shift, biases, weighs_input)   what experts of other families compute.
experts_fp4(x, chosen, weights, gate_up, down, limit, activation)   routed sum from FP4 weights, activations in fp8 or bf16.
pack_weights(...)                                   FP4 weights in the order of the GPU kernels.
On GPUs, with Triton: `triton.py` for FP4, `plain.py` for every other format.
"""

from lamina.ops.experts.packed import Activation, ExpertsCase, PackedExperts, pack_weights
from lamina.ops.experts.ref import Gating, experts, experts_fp4, swiglu

__all__ = ["Activation", "ExpertsCase", "Gating", "PackedExperts", "experts", "experts_fp4", "pack_weights", "swiglu"]
