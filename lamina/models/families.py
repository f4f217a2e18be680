"""Which families of models are known by their config.json: one line each. Needs no torch.

`describe` serves the memory plan, `network` says what those that run compute. A new family is its file and a line in each table.
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
from lamina.models.network import Network

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

#: what those that run compute, as data, by model_type; a family with a model of its own is in `registry.py`
NETWORKS: dict[str, Callable[[Mapping[str, object]], Network]] = {
    "bamba": bamba.network,
    "cohere2": cohere.network,
    "deepseek_v2": deepseek_v3.network_2,
    "deepseek_v3": deepseek_v3.network_3,
    "deepseek_v32": deepseek_v3.network_32,
    "falcon_h1": falcon_h1.network,
    "gemma2": gemma.network_2,
    "gemma3": gemma.network_3,
    "gemma3_text": gemma.network_3,
    "gemma3n": gemma3n.network,
    "gemma3n_text": gemma3n.network,
    "gpt_oss": gpt_oss.network,
    "granitemoehybrid": bamba.network_granite,
    "jamba": jamba.network,
    "llama": llama.network,
    "llama4": llama.network_4,
    "llama4_text": llama.network_4,
    "minimax": minimax.network,
    "minimax_m1": minimax.network_original,
    "minimax_text_01": minimax.network_original,
    "MiniMaxM1": minimax.network_original,
    "MiniMaxText01": minimax.network_original,
    "ministral": mistral.network_ministral,
    "ministral3": mistral.network_ministral3,
    "mistral": mistral.network,
    "mistral3": mistral.network_3,
    "nemotron_h": nemotron_h.network,
    "qwen2": qwen3.network_2,
    "qwen3": qwen3.network,
    "qwen3_moe": qwen3.network_moe,
    "qwen3_next": qwen3_next.network,
}


def describe(values: Mapping[str, object], choices: Choices = Choices()) -> Description:  # noqa: B008
    """The description of a config.json. Raises ConfigError for an unknown model_type, naming the known ones."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError("model_type", kind, f"one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[kind](values, choices)
