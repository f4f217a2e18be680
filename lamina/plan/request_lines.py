"""Lengths and workloads in words: 128K, 1M, 256x4K."""

import re

from lamina.base.errors import ConfigError
from lamina.base.sizes import KiB, MiB
from lamina.plan.records import RequestLine

_TOKENS = re.compile(r"(\d{1,12})([kKmM]?)", re.ASCII)
_LINE = re.compile(r"(\d{1,12})[xX](\S+)", re.ASCII)
_FACTORS = {"": 1, "k": KiB, "m": MiB}


def parse_tokens(text: str, field: str = "context") -> int:
    """Tokens from 1000000, 128K (x 1,024) or 1M (x 1,048,576). Raises ConfigError naming `field`."""
    match = _TOKENS.fullmatch(text.strip())
    tokens = int(match.group(1)) * _FACTORS[match.group(2).lower()] if match else 0
    if not tokens:
        raise ConfigError(field, text, "a whole number of tokens such as 4096, 128K (= 131072) or 1M (= 1048576)")
    return tokens


def parse_contexts(text: str) -> tuple[int, ...]:
    """Lengths separated by commas."""
    return tuple(parse_tokens(part) for part in text.split(","))


def parse_requests(text: str) -> tuple[RequestLine, ...]:
    """COUNTxTOKENS lines separated by commas, such as 1x1M,256x4K. Raises ConfigError."""
    lines = []
    for part in text.split(","):
        match = _LINE.fullmatch(part.strip())
        if not match or not int(match.group(1)):
            raise ConfigError("requests", part, "COUNTxTOKENS, such as 256x4K; several are separated by commas")
        lines.append(RequestLine(int(match.group(1)), parse_tokens(match.group(2), "requests")))
    return tuple(lines)


def format_tokens(tokens: int) -> str:
    """The short form where it is exact: 1M, 128K; else the number."""
    for name, size in (("M", MiB), ("K", KiB)):
        if tokens and tokens % size == 0:
            return f"{tokens // size:,}{name}"
    return f"{tokens:,}"
