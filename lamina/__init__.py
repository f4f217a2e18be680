"""Lamina: an inference engine whose memory is exact, explained and reused."""

from importlib import import_module
from typing import TYPE_CHECKING

from lamina.base.version import __version__

if TYPE_CHECKING:
    from lamina.base.errors import CapacityError, ConfigError, LaminaError, WeightError
    from lamina.engine.llm import LLM
    from lamina.engine.outputs import CompletionOutput, Delta, Logprob, RequestOutput, Usage
    from lamina.schedule.sampling_params import SamplingParams

__all__ = [
    "LLM", "CapacityError", "CompletionOutput", "ConfigError", "Delta", "LaminaError", "Logprob", "RequestOutput",
    "SamplingParams", "Usage", "WeightError", "__version__",
]  # fmt: skip
#: where each name lives; loaded when it is first asked for, so that planning needs no torch
_HOMES = {
    "LLM": "engine.llm", "CapacityError": "base.errors", "ConfigError": "base.errors", "LaminaError": "base.errors",
    "WeightError": "base.errors", "CompletionOutput": "engine.outputs", "Delta": "engine.outputs", "Logprob": "engine.outputs",
    "RequestOutput": "engine.outputs", "Usage": "engine.outputs", "SamplingParams": "schedule.sampling_params",
}  # fmt: skip


def __getattr__(name: str) -> object:
    """A public name, from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
