"""What is between the two products of a feed-forward layer.

gated(h, bias, activation, has_gate, multiplier)   act(multiplier * gate) * up, or act(up) without a gate.
ACTIVATIONS      their names: silu, gelu_tanh, relu2.
`triton.py` (which needs Triton) does it in one launch.
"""

from lamina.ops.gated.ref import ACTIVATIONS, activated, gated

__all__ = ["ACTIVATIONS", "activated", "gated"]
