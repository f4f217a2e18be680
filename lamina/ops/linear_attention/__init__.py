"""Linear attention with decay (lightning attention): a sum of key times value, of which each head forgets a fixed share a row.

decays(slopes)                                        what follows from the heads' slopes, made once
decayed_attention(q, k, v, decays, store, sequences)  [T, H, Dv] fp32

The state before the step is read from the store, the state after it is written there. Bits depend on where a sequence is cut
into steps, unless it is cut at multiples of `ops.chunks.CHUNK`; never on company.
"""

from lamina.ops.linear_attention.ref import Decays, decayed_attention, decays

__all__ = ["Decays", "decayed_attention", "decays"]
