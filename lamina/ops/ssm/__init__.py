"""Selective scans: a state that decays, takes in each row of a sequence, and is read by it. All fp32.

scan_channels(x, steps, decay, b, c, skip, store, sequences)   [T, C]: each channel has numbers with a decay each (Mamba-1).
scan_heads(x, steps, decay, b, c, skip, store, sequences)      [T, H, P]: a head has one decay, groups share b and c (Mamba-2).
softplus(x)   log(1 + exp(x)), whose bits depend on x alone.
CHUNK         rows of a sequence are taken in chunks that begin at multiples of so many positions.

The state before the step is read from the store, the state after it is written there. Bits depend on where a sequence is cut
into steps, unless it is cut at multiples of CHUNK; never on company.
"""

from lamina.ops.chunks import CHUNK
from lamina.ops.ssm.ref import scan_channels, scan_heads, softplus

__all__ = ["CHUNK", "scan_channels", "scan_heads", "softplus"]
