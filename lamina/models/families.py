"""Which families of models are known by their config.json: one line each. Needs no torch.

`describe` serves the memory plan; the families that also run have a line in `registry.py`.
"""

from collections.abc import Callable, Mapping

from lamina.base.errors import ConfigError
from lamina.models import (
    bamba,
    cohere,
    deepseek_v3,
    deepseek_v4_memory,
    falcon_h1,
    gemma,
    gemma3n,
    gpt_oss,
    jamba,
    llama,
    minimax,
    mistral,
    nemotron_h,
    qwen3,
    qwen3_next,
)
from lamina.models.description import Choices, Description

Describe = Callable[[Mapping[str, object], Choices], Description]

#: by model_type of config.json
FAMILIES: dict[str, Describe] = {
    "cohere2": cohere.describe,
    "deepseek_v2": deepseek_v3.describe_2,
    "deepseek_v3": deepseek_v3.describe,
    "deepseek_v32": deepseek_v3.describe_32,
    "deepseek_v4": deepseek_v4_memory.describe,
    "gemma2": gemma.describe_2,
    "gemma3": gemma.describe_3,
    "gemma3_text": gemma.describe_3,
    "gemma3n": gemma3n.describe,
    "gemma3n_text": gemma3n.describe,
    "gpt_oss": gpt_oss.describe,
    "llama": llama.describe,
    "llama4": llama.describe_4,
    "llama4_text": llama.describe_4,
    "ministral": mistral.describe_ministral,
    "ministral3": mistral.describe_ministral3,
    "mistral": mistral.describe,
    "mistral3": mistral.describe_3,
    "qwen2": qwen3.describe_2,
    "qwen3": qwen3.describe,
    "qwen3_moe": qwen3.describe_moe,
    "bamba": bamba.describe,
    "falcon_h1": falcon_h1.describe,
    "granitemoehybrid": bamba.describe_granite,
    "jamba": jamba.describe,
    "minimax": minimax.describe,
    "minimax_m1": minimax.describe,
    "minimax_text_01": minimax.describe,
    "MiniMaxM1": minimax.describe,
    "MiniMaxText01": minimax.describe,
    "nemotron_h": nemotron_h.describe,
    "qwen3_next": qwen3_next.describe,
}


def describe(values: Mapping[str, object], choices: Choices = Choices()) -> Description:  # noqa: B008
    """The description of a config.json. Raises ConfigError for an unknown model_type, naming the known ones."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError("model_type", kind, f"one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[kind](values, choices)
