"""`--what-if draft=3,tp=2`: one choice changed after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lamina.base.config import CACHE_FORMATS, INDEX_FORMATS
from lamina.base.errors import ConfigError
from lamina.base.sizes import parse_bytes
from lamina.plan.records import PlanOptions
from lamina.plan.request_lines import parse_tokens


@dataclass(frozen=True, slots=True)
class Change:
    """One NAME=VALUE."""

    name: str
    value: str

    @property
    def text(self) -> str:
        """As it is written."""
        return f"{self.name}={self.value}"

    def apply(self, options: PlanOptions) -> PlanOptions:
        """The options with this one changed. Raises ConfigError for a value that the name does not have."""
        return _CHANGES[self.name](options, self.value)


def parse_changes(texts: Sequence[str]) -> list[Change]:
    """The changes of all texts in order; several in one are separated by commas. Raises ConfigError."""
    return [_parse(part) for text in texts for part in text.split(",")]


def _parse(text: str) -> Change:
    name, _, value = (part.strip() for part in text.partition("="))
    name = name.lstrip("-").replace("_", "-")
    if name not in _CHANGES or not value:
        raise ConfigError("what-if", text, f"NAME=VALUE with one of {', '.join(_CHANGES)}")
    return Change(name, value)


def parse_count(value: str, name: str) -> int:
    """A whole number. Raises ConfigError."""
    if not (value.isascii() and value.isdigit() and len(value) <= 9):
        raise ConfigError(name, value, "a whole number")
    return int(value)


def parse_share(value: str, name: str) -> float:
    """A share above 0 and at most 1. Raises ConfigError."""
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(name, value, "a number above 0 and at most 1")
    return share


def _one_of(value: str, name: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ConfigError(name, value, f"one of {', '.join(allowed)}")
    return value


_CHANGES: dict[str, Callable[[PlanOptions, str], PlanOptions]] = {
    "draft": lambda old, text: replace(old, draft_tokens=parse_count(text, "draft")),
    "cache-format": lambda old, text: replace(old, cache_format=_one_of(text, "cache-format", CACHE_FORMATS)),
    "index-format": lambda old, text: replace(old, index_format=_one_of(text, "index-format", INDEX_FORMATS)),
    "block-tokens": lambda old, text: replace(old, block_tokens=parse_tokens(text, "block-tokens")),
    "gpu": lambda old, text: replace(old, gpu=text, memory_bytes=None),
    "memory": lambda old, text: replace(old, gpu=None, memory_bytes=parse_bytes(text, "memory")),
    "cache-bytes": lambda old, text: replace(old, cache_bytes=parse_bytes(text, "cache-bytes")),
    "gpus": lambda old, text: replace(old, gpus=parse_count(text, "gpus")),
    "tp": lambda old, text: replace(old, tp=parse_count(text, "tp")),
    "ep": lambda old, text: replace(old, ep=parse_count(text, "ep")),
    "dp": lambda old, text: replace(old, dp=parse_count(text, "dp")),
    "gpu-memory-utilization": lambda old, text: replace(old, gpu_memory_utilization=parse_share(text, "gpu-memory-utilization")),
    "max-step-tokens": lambda old, text: replace(old, max_step_tokens=parse_count(text, "max-step-tokens")),
    "max-requests": lambda old, text: replace(old, max_requests=parse_count(text, "max-requests")),
}
