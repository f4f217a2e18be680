"""Whether and how hard the model is asked to think: the spellings that clients use."""

from collections.abc import Mapping

from lamina.base.errors import ConfigError
from lamina.chat.records import Json

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def thinking_options(values: Mapping[str, Json]) -> tuple[bool | None, str | None]:
    """(thinking, effort) as `ChatOptions` takes them; None where the request says nothing, so that the format decides.

    values  a request's fields: thinking (true, false, or {"type": "enabled" | "disabled"}), enable_thinking, reasoning_effort,
            reasoning ({"effort": ...}), and chat_template_kwargs, whose spellings of them come first. Others are ignored.
    Thinking is on if one of the switches is. Effort "none" switches it off whatever they say.
    Raises ConfigError naming a switch that is neither true nor false, or an effort that is none of EFFORTS.
    """
    kwargs = values.get("chat_template_kwargs")
    merged = {**values, **kwargs} if isinstance(kwargs, Mapping) else values
    said = [state for name in ("thinking", "enable_thinking") if (state := _switch(name, merged.get(name))) is not None]
    effort = _effort(values, kwargs if isinstance(kwargs, Mapping) else {})
    return False if effort == "none" else any(said) if said else None, effort


def _effort(values: Mapping[str, Json], kwargs: Mapping[str, Json]) -> str | None:
    """The first effort that is named."""
    places: list[tuple[str, Json]] = [
        ("chat_template_kwargs.reasoning_effort", kwargs.get("reasoning_effort")),
        ("reasoning_effort", values.get("reasoning_effort")),
    ]
    for start, nested in (("chat_template_kwargs.", kwargs.get("reasoning")), ("", values.get("reasoning"))):
        if isinstance(nested, Mapping):
            places.append((f"{start}reasoning.effort", nested.get("effort")))
    for name, effort in places:
        if effort is not None:
            if not isinstance(effort, str) or effort not in EFFORTS:
                raise ConfigError(name, effort, f"one of {', '.join(EFFORTS)}")
            return effort
    return None


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
