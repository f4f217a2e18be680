"""Llama: full attention in every layer. Llama 4: attention within chunks, and full attention without rotation in some layers."""

from collections.abc import Mapping

from lamina.base.errors import ConfigError
from lamina.models.attention_memory import CHUNK, FULL, attention_memories, layer_types, nullable
from lamina.models.decoder import Defaults, describe_decoder, flag, layer_numbers, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.network import Network
from lamina.models.plain_network import Plain, plain_network
from lamina.models.weight_parts import mlp, router

_DEFAULTS = Defaults(32000, 4096, 11008, 32, 32, None, None, 2048)
_DEFAULTS_4 = Defaults(202048, 5120, 8192, 48, 40, 8, 128, 131072)


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Llama config.json."""
    decoder = read_decoder(values, _DEFAULTS)
    layers = decoder.num_layers
    attention = decoder.attention(flag(decoder.fields, "attention_bias", False))
    dense = mlp(decoder.store, decoder.hidden_size, decoder.mlp_width, flag(decoder.fields, "mlp_bias", False))
    sizes = [("attention", attention * layers), ("mlp", dense * layers), ("norms", decoder.norms(per_layer=2))]
    return describe_decoder(decoder, choices, lambda entry: attention_memories([FULL] * layers, entry, None), sizes)


def network(values: Mapping[str, object]) -> Network:
    """What a Llama computes."""
    decoder = read_decoder(values, _DEFAULTS)
    bias = flag(decoder.fields, "attention_bias", False)
    return plain_network(values, decoder, Plain(bias, bias, flag(decoder.fields, "mlp_bias", False)))


def describe_4(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Llama 4 config.json, for text and images (the text model is in `text_config`) or for text alone.

    A layer with rotary positions sees its chunk only, one without (0 in `no_rope_layers`; by default every fourth) sees all.
    """
    decoder = read_decoder(values, _DEFAULTS_4, "text_config" if values.get("model_type") == "llama4" else None)
    fields, layers = decoder.fields, decoder.num_layers
    chunk = nullable(fields, "attention_chunk_size", 8192)
    interval = fields.integer("no_rope_layer_interval", default=4, low=1)
    rotated = layer_numbers(fields, "no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(rotated) < layers:
        raise ConfigError(
            fields.prefix + "no_rope_layers", f"{len(rotated)} entries", f"at least one for each of the {layers} layers"
        )
    types = [CHUNK if rotated[layer] and chunk is not None else FULL for layer in range(layers)]
    types = list(layer_types(fields, layers, types, chunk, CHUNK))
    step = fields.integer("interleave_moe_layer_step", default=1, low=1)
    sparse = layer_numbers(fields, "moe_layers")
    num_sparse = len({layer for layer in (range(step - 1, layers, step) if sparse is None else sparse) if layer < layers})
    num_experts = fields.integer("num_local_experts", "num_experts", default=16, low=1)
    width, store = decoder.hidden_size, decoder.store
    dense = mlp(store, width, fields.integer("intermediate_size_mlp", default=16384, low=1))
    sizes = [
        ("attention", decoder.attention(flag(fields, "attention_bias", False)) * layers),
        ("mlp", dense * (layers - num_sparse)),
        ("router", router(store, width, num_experts) * num_sparse),
        ("experts", mlp(decoder.expert_store, width, decoder.mlp_width) * (num_experts * num_sparse)),
        ("shared experts", mlp(store, width, decoder.mlp_width) * num_sparse),
        ("norms", decoder.norms(per_layer=2)),
    ]
    return describe_decoder(decoder, choices, lambda entry: attention_memories(types, entry, None, chunk), sizes)
