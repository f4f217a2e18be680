"""Root-mean-square norms and rotary position embedding.

rms_norm(x, weight, eps)               x * rsqrt(mean(x^2) + eps) * weight over the last dim, fp32 inside.
inverse_frequencies(dim, theta, yarn)  [dim / 2] fp32; YaRN where asked, no attention-temperature factor.
rope_tables(positions, inv_freq)       cos, sin [n, dim] fp32, a column for each dim.
rotate(x, cos, sin)                    interleaved pairs (2p, 2p+1) of the last dim, fp32; -sin rotates back.
query_norm_rope(q, cos, sin, eps)      per-head norm without weight, then rotation of the last dims.
entry_norm_rope(x, weight, cos, sin, eps)  norm with weight, then rotation of the last dims: a key/value or an entry.
unrotate(o, cos, sin)                  the attention output back by the query's own position.
RopeNormCase                           the shapes that `triton.py` (which needs Triton) serves or refuses.
"""

from dataclasses import dataclass

from lamina.ops.rope_norm.ref import (
    Yarn,
    entry_norm_rope,
    inverse_frequencies,
    query_norm_rope,
    rms_norm,
    rope_tables,
    rotate,
    unrotate,
)

__all__ = [
    "RopeNormCase",
    "Yarn",
    "entry_norm_rope",
    "inverse_frequencies",
    "query_norm_rope",
    "rms_norm",
    "rope_tables",
    "rotate",
    "unrotate",
]


@dataclass(frozen=True, slots=True)
class RopeNormCase:
    """dim  of a head.   rope  its last dims, which turn."""

    dim: int
    rope: int
