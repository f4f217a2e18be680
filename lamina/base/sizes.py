"""Sizes in and out of words: "26.09GiB", "141GB", 1024."""

import math
import re

from lamina.base.errors import ConfigError

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
    "k": KiB,
    "m": MiB,
    "g": GiB,
    "t": TiB,
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: int | float | str, field: str = "bytes") -> int:
    """Bytes from a number or a text such as 8GiB, 141GB, 512M (binary). Raises ConfigError naming `field`."""
    allowed = "a positive size such as 8GiB, 141GB or 1048576"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(field, value, allowed)
    if isinstance(value, int | float):
        number, factor = float(value), 1
        exact: int | None = value if isinstance(value, int) else None
    else:
        match = _PATTERN.fullmatch(value)
        if match is None or match.group(2).lower() not in _UNITS:
            raise ConfigError(field, value, allowed)
        number, factor = float(match.group(1)), _UNITS[match.group(2).lower()]
        exact = int(match.group(1)) * factor if match.group(1).isdigit() else None
    if not math.isfinite(number) or number <= 0:
        raise ConfigError(field, value, allowed)
    return exact if exact is not None else int(number * factor)


def format_bytes(num_bytes: int) -> str:
    """A size for people: 1.50 GiB, 12.0 KiB, 7 B."""
    for unit, size in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"
