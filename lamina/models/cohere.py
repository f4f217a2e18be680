"""Cohere 2 (Command R7B, Command A): three layers with a window, then one with full attention; attention and MLP side by side."""

from collections.abc import Mapping

from lamina.models.attention_memory import attention_memories, every, layer_types, nullable
from lamina.models.decoder import Defaults, describe_decoder, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.weight_parts import mlp

_DEFAULTS = Defaults(256000, 8192, 22528, 40, 64, None, None, 8192, tie_word_embeddings=True)


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Cohere 2 config.json; one norm a layer."""
    decoder = read_decoder(values, _DEFAULTS)
    fields, layers = decoder.fields, decoder.num_layers
    window = nullable(fields, "sliding_window", 4096)
    period = fields.integer("sliding_window_pattern", default=4, low=1)
    types = layer_types(fields, layers, every(period, layers), window)
    sizes = [
        ("attention", decoder.attention(flag(fields, "attention_bias", False)) * layers),
        ("mlp", mlp(decoder.store, decoder.hidden_size, decoder.mlp_width) * layers),
        ("norms", decoder.norms(per_layer=1)),
    ]
    return describe_decoder(decoder, choices, lambda entry: attention_memories(types, entry, window), sizes)
