"""Qwen2, Qwen3 and Qwen3-MoE: full attention, or a window in the layers that the config says."""

from collections.abc import Mapping

from lamina.models.attention_memory import FULL, WINDOW, attention_memories, layer_types, nullable
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Decoder, Defaults, describe_decoder, flag, layer_numbers, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.weight_parts import mlp, router

_QWEN2 = Defaults(151936, 4096, 22016, 32, 32, 32, None, 32768)
_QWEN3 = Defaults(151936, 4096, 22016, 32, 32, 32, 128, 32768)
_QWEN3_MOE = Defaults(151936, 2048, 6144, 24, 32, 4, None, 32768)


def describe_2(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Qwen2 (or 2.5) config.json: biases of query, key and value, no norms of them."""
    decoder = read_decoder(values, _QWEN2)
    return _dense(decoder, choices, bias=True, out_bias=False, qk_norm=False)


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Qwen3 config.json."""
    decoder = read_decoder(values, _QWEN3)
    bias = flag(decoder.fields, "attention_bias", False)
    return _dense(decoder, choices, bias, bias, qk_norm=True)


def describe_moe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Qwen3-MoE config.json; with `use_sliding_window` every layer has a window."""
    decoder = read_decoder(values, _QWEN3_MOE)
    fields, layers, width = decoder.fields, decoder.num_layers, decoder.hidden_size
    num_experts = fields.integer("num_experts", "num_local_experts", default=128)
    step = fields.integer("decoder_sparse_step", default=1, low=1)
    dense_only = layer_numbers(fields, "mlp_only_layers") or []
    sparse = sum(layer not in dense_only and num_experts > 0 and (layer + 1) % step == 0 for layer in range(layers))
    inner = fields.integer("moe_intermediate_size", default=768, low=1)
    sizes = [
        ("attention", decoder.attention(flag(fields, "attention_bias", False), qk_norm=True) * layers),
        ("mlp", mlp(decoder.store, width, decoder.mlp_width) * (layers - sparse)),
        ("router", router(decoder.store, width, num_experts) * sparse),
        ("experts", mlp(decoder.expert_store, width, inner) * (num_experts * sparse)),
        ("norms", decoder.norms(per_layer=2)),
    ]
    window = _window(fields)
    types = [FULL if window is None else WINDOW] * layers
    return describe_decoder(decoder, choices, lambda entry: attention_memories(types, entry, window), sizes)


def _dense(decoder: Decoder, choices: Choices, bias: bool, out_bias: bool, qk_norm: bool) -> Description:
    """The dense models: with `use_sliding_window` the layers from `max_window_layers` on have a window."""
    layers, window = decoder.num_layers, _window(decoder.fields)
    first = decoder.fields.integer("max_window_layers", default=28)
    default = [WINDOW if window is not None and layer >= first else FULL for layer in range(layers)]
    types = layer_types(decoder.fields, layers, default, window)
    sizes = [
        ("attention", decoder.attention(bias, out_bias, qk_norm) * layers),
        ("mlp", mlp(decoder.store, decoder.hidden_size, decoder.mlp_width) * layers),
        ("norms", decoder.norms(per_layer=2)),
    ]
    return describe_decoder(decoder, choices, lambda entry: attention_memories(types, entry, window), sizes)


def _window(fields: ConfigFields) -> int | None:
    """`sliding_window`, which counts only with `use_sliding_window`."""
    window = nullable(fields, "sliding_window", 4096)
    return window if flag(fields, "use_sliding_window", False) else None
