"""Random numbers by counter: a draw is a pure function of (seed, child, output position).

There is no stream to keep, so batching, preemption and forks cannot change an answer.
"""

from numpy.random import Philox

_MASK = (1 << 64) - 1


def uniform(seed: int, child: int, position: int) -> float:
    """The uniform number in (0, 1), ends excluded, of output token `position` of output `child` under `seed`.

    seed      any integer in [-2**63, 2**64); all of them differ.
    child     which of the n outputs, in [0, 2**64).
    position  index of the token in the output, in [0, 2**64).
    Returns   a multiple of 2**-53 (odd), so that the ends cannot be reached by rounding.
    Raises    ValueError outside those ranges.
    """
    if not (-(1 << 63) <= seed <= _MASK and 0 <= child <= _MASK and 0 <= position <= _MASK):
        raise ValueError(f"seed={seed} child={child} position={position}: 64-bit integers are needed, child and position from 0")
    key = (seed & _MASK) | (int(seed < 0) << 64)
    raw = Philox(key=key, counter=(position << 64) | (child << 128)).random_raw()
    return ((int(raw) >> 12) + 0.5) * 2.0**-52
