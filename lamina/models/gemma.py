"""Gemma 2 and 3: a window in most layers, full attention in every second or sixth; four norms a layer."""

from collections.abc import Mapping

from lamina.models.attention_memory import attention_memories, every, layer_types, nullable
from lamina.models.decoder import Decoder, Defaults, describe_decoder, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.weight_parts import mlp

_GEMMA2 = Defaults(256000, 2304, 9216, 26, 8, 4, 256, 8192, tie_word_embeddings=True)
_GEMMA3 = Defaults(262208, 2304, 9216, 26, 8, 4, 256, 131072, tie_word_embeddings=True)


def describe_2(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Gemma 2 config.json."""
    return _describe(read_decoder(values, _GEMMA2), choices, period=2, qk_norm=False)


def describe_3(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Gemma 3 config.json, for text and images (the text model is in `text_config`) or for text alone."""
    decoder = read_decoder(values, _GEMMA3, "text_config" if values.get("model_type") == "gemma3" else None)
    period = decoder.fields.integer("sliding_window_pattern", default=6, low=1)
    return _describe(decoder, choices, period, qk_norm=True)


def _describe(decoder: Decoder, choices: Choices, period: int, qk_norm: bool) -> Description:
    fields, layers = decoder.fields, decoder.num_layers
    fields.must_be("use_bidirectional_attention", False)
    window = nullable(fields, "sliding_window", 4096)
    types = layer_types(fields, layers, every(period, layers), window)
    sizes = [
        ("attention", decoder.attention(flag(fields, "attention_bias", False), qk_norm=qk_norm) * layers),
        ("mlp", mlp(decoder.store, decoder.hidden_size, decoder.mlp_width) * layers),
        ("norms", decoder.norms(per_layer=4)),
    ]
    return describe_decoder(decoder, choices, lambda entry: attention_memories(types, entry, window), sizes)
