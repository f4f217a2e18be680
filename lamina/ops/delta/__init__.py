"""The gated delta rule: a state that forgets, and is corrected by what each row says should be found at its key.

gated_delta(q, k, v, forgets, learns, store, sequences)   [T, H, Dv] fp32; G heads of queries and keys serve H of values.

The state before the step is read from the store, the state after it is written there. Bits depend on where a sequence is cut
into steps, unless it is cut at multiples of `ops.chunks.CHUNK`; never on company.
"""

from lamina.ops.delta.ref import gated_delta

__all__ = ["gated_delta"]
