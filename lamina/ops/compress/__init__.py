"""Compression of groups of tokens into log entries.

compress(compressor, values, gates, sequences)
    Folds the step's tokens into the running softmax of their groups, token by token from left to right; where a group
    closes: norm, rotation at the position of the group's first token, encode, append to the log.
"""

from lamina.ops.compress.ref import Compressor, compress, fold

__all__ = ["Compressor", "compress", "fold"]
