"""What lies between two parts of a decoder: the residual with the last part's result, and the norm before the next part.

join(x, found, joint, dtype)   (kept * x + scale * after(found + bias), before(that)).
Joint, VectorNorm              what is done between two parts.
`triton.py` (which needs Triton) does it in one launch.
"""

from lamina.ops.residual.ref import Joint, VectorNorm, join

__all__ = ["Joint", "VectorNorm", "join"]
