"""The errors a user can meet. Each message is one line: what, found, allowed."""

#: characters of a wrong value that a message repeats
_SHOWN = 200


class LaminaError(Exception):
    """Root of all errors that are meant for the user."""


class ConfigError(LaminaError, ValueError):
    """A setting the user can fix: names the field, the value and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        super().__init__(f"{field}={shown} is not valid: {allowed}")


class KeywordError(ConfigError, TypeError):
    """A keyword argument that there is not: whose, its name and value, and what to write instead."""

    def __init__(self, owner: str, name: str, value: object, hint: str) -> None:
        super().__init__(name, value, hint)
        self.args = (f"{owner} has no argument {name!r}: {hint}",)


class MissingError(ConfigError):
    """A setting that names something which is not there, or no longer."""


class BusyError(LaminaError, RuntimeError):
    """What could be served another time: everything that it needs is taken."""


class CapacityError(LaminaError, RuntimeError):
    """Something that does not fit: says what is needed, what there is and what would help."""


class WeightError(LaminaError, RuntimeError):
    """A checkpoint that is not what its config says: names the tensor, what was expected and what was found."""
