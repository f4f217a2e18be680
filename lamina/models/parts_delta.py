"""Layers with the gated delta rule and with decayed linear attention, as data: what `build_delta.py` builds. No torch."""

from dataclasses import dataclass

from lamina.models.parts_scan import Stored


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """`heads` heads of values of `value_dim` dims; groups of them share one of `groups` heads of queries and keys of `key_dim`.

    prefix  of in_proj_qkvz and in_proj_ba (both group by group), conv1d, A_log, dt_bias, norm and out_proj.
    kernel  taps of the convolution over queries, keys and values.   eps  of the gated norm of a head.
    """

    prefix: str
    groups: int
    key_dim: int
    heads: int
    value_dim: int
    kernel: int
    eps: float
    stored: Stored


@dataclass(frozen=True, slots=True)
class DecayedAttention:
    """Heads of `dim` dims, of which each forgets exp(-slope) a token.

    prefix  of qkv_proj (head by head), output_gate, norm and out_proj.   eps  of the norm of all heads together.
    """

    prefix: str
    dim: int
    slopes: tuple[float, ...]
    eps: float
    stored: Stored
    activation: str = "silu"
