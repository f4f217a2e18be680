"""gpt-oss: a window and full attention in turn, a learned sink logit per head, experts in MXFP4."""

from collections.abc import Mapping

from lamina.models.attention_memory import attention_memories, every, layer_types, nullable
from lamina.models.decoder import Defaults, describe_decoder, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.weight_parts import router

_DEFAULTS = Defaults(201088, 2880, 2880, 36, 64, 8, 64, 131072)


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a gpt-oss config.json. A sink is a logit joined to the softmax: a weight, and no byte of memory."""
    decoder = read_decoder(values, _DEFAULTS)
    fields, layers, width = decoder.fields, decoder.num_layers, decoder.hidden_size
    window = nullable(fields, "sliding_window", 128)
    types = layer_types(fields, layers, every(2, layers), window)
    num_experts = fields.integer("num_local_experts", "num_experts", default=128, low=1)
    inner, store, experts = decoder.mlp_width, decoder.store, decoder.expert_store
    attention = decoder.attention(flag(fields, "attention_bias", True)) + store.tensor(decoder.num_heads)
    expert = experts.linear(2 * inner, width, bias=True) + experts.linear(width, inner, bias=True)
    sizes = [
        ("attention", attention * layers),
        ("router", router(store, width, num_experts, bias=True) * layers),
        ("experts", expert * (num_experts * layers)),
        ("norms", decoder.norms(per_layer=2)),
    ]
    return describe_decoder(decoder, choices, lambda entry: attention_memories(types, entry, window), sizes)
