"""Whether and how hard the model is asked to think: the spellings that clients use."""

from collections.abc import Mapping

from lamina.base.errors import ConfigError
from lamina.chat.records import Json

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def thinking_options(values: Mapping[str, Json]) -> tuple[bool | None, str | None]:
    """(thinking, effort) as `ChatOptions` takes them; None where the request says nothing, so that the format decides.

    values  a request's fields: thinking (true, false, or {"type": "enabled" | "disabled"}), enable_thinking, reasoning_effort,
            reasoning ({"effort": ...}), and chat_template_kwargs, whose spellings of them come first. Others are ignored.
    Thinking is on if one of the switches is. Effort "none" switches it off whatever they say; an unknown effort is "high".
    Raises ConfigError naming a switch that is neither true nor false.
    """
    kwargs = values.get("chat_template_kwargs")
    merged = {**values, **kwargs} if isinstance(kwargs, Mapping) else values
    said = [state for name in ("thinking", "enable_thinking") if (state := _switch(name, merged.get(name))) is not None]
    effort = merged.get("reasoning_effort")
    nested = merged.get("reasoning")
    if effort is None and isinstance(nested, Mapping):
        effort = nested.get("effort")
    if not isinstance(effort, str):
        return (any(said) if said else None), None
    if effort == "none":
        return False, "none"
    return (any(said) if said else None), effort if effort in EFFORTS else "high"


def _switch(name: str, value: Json) -> bool | None:
    """One switch: on, off, or not set."""
    if isinstance(value, Mapping):
        kind = value.get("type")
        if kind in ("enabled", "adaptive"):
            return True
        if kind == "disabled":
            return False
        raise ConfigError(f"{name}.type", kind, "enabled, adaptive or disabled")
    if value is None or isinstance(value, bool):
        return value
    raise ConfigError(name, value, 'true, false, or {"type": "enabled"} or {"type": "disabled"}')
