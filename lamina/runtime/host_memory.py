"""How the C library hands out the model's temporaries on a CPU."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc malloc.h
_LARGEST_KEPT = 32 << 20  # the most that glibc accepts


def keep_freed_memory() -> bool:
    """Lets freed temporaries be used again instead of being given back and faulted in anew; whether the C library took it.

    By default every tensor over 128 KiB to 32 MiB is mapped and unmapped: a norm of 1,024 x 1,024 floats then takes ten
    times as long as its arithmetic (measured, docs/LOG.md).
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
