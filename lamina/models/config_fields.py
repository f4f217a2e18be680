"""Reading a checkpoint's config.json with errors that name the field."""

import sys
from collections.abc import Mapping, Sequence

from lamina.base.errors import ConfigError


class ConfigFields:
    """Typed access to a config; a wrong type or a missing field without a default raises ConfigError naming it."""

    def __init__(self, values: Mapping[str, object], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def get(self, *names: str) -> object:
        """The value of the first of the names that is there and not null, else None."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def integer(self, *names: str, default: int | None = None, low: int = 0, high: int = 2**40) -> int:
        """An integer in [low, high]."""
        value = self.get(*names)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(self.prefix + names[0], value, f"an integer from {low} to {high}")
        return value

    def number(self, *names: str, default: float | None = None, low: float = 0.0) -> float:
        """A finite number of at least `low`."""
        value = self.get(*names)
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= sys.float_info.max:
            raise ConfigError(self.prefix + names[0], value, f"a number of at least {low}")
        return float(value)

    def items(self, *names: str) -> list[object] | None:
        """A list, or None where there is none."""
        value = self.get(*names)
        if value is not None and not isinstance(value, list):
            raise ConfigError(self.prefix + names[0], value, "a list")
        return value

    def nested(self, *names: str) -> "ConfigFields | None":
        """An object, or None where there is none."""
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(self.prefix + names[0], value, "an object")
        return ConfigFields(value, f"{self.prefix}{names[0]}.")

    def must_be(self, name: str, allowed: object) -> None:
        """Refuses a field that is present with another value than the one this engine implements."""
        value = self.values.get(name)
        if value is not None and value != allowed:
            raise ConfigError(self.prefix + name, value, f"{allowed!r}, the only one supported")


def check_end_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raises ConfigError for an end token that is none of the vocabulary: no answer would end with it."""
    outside = next((token for token in tokens if token >= vocab_size), None)
    if outside is not None:
        raise ConfigError(name, outside, f"a token id below vocab_size ({vocab_size})")
