"""Lamina: an inference engine whose memory is exact, explained and reused."""

from lamina.base.errors import CapacityError, ConfigError, LaminaError, WeightError
from lamina.engine.llm import LLM
from lamina.engine.outputs import CompletionOutput, Delta, Logprob, RequestOutput, Usage
from lamina.schedule.sampling_params import SamplingParams

__all__ = [
    "LLM", "CapacityError", "CompletionOutput", "ConfigError", "Delta", "LaminaError", "Logprob", "RequestOutput",
    "SamplingParams", "Usage", "WeightError",
]  # fmt: skip
__version__ = "0.1.0"
