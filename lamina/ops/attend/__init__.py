"""Attention: one softmax over a window, compressed entries and a sink logit.

attend(q, own, window, size, entries, scale, sink, sequences) -> [T, H, D] fp32.
"""

from lamina.ops.attend.ref import EntryScope, attend

__all__ = ["EntryScope", "attend"]
