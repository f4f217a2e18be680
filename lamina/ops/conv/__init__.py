"""Causal convolution of each channel alone over the last W inputs of its sequence, as scans of all kinds have before them.

convolve(x, taps, bias, store, sequences, activates)   [T, C] fp32; keeps the last inputs in the store.
Channels of any kind: what is mixed later (x, B and C of a scan; queries, keys and values of a delta rule) lies side by side.
"""

from lamina.ops.conv.ref import convolve

__all__ = ["convolve"]
