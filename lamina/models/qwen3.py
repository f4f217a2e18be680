"""Qwen2, Qwen3 and Qwen3-MoE: full attention, or a window in the layers that the config says."""

from collections.abc import Mapping

from lamina.models.attention_memory import FULL, WINDOW, attention_memories, layer_types, nullable
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Decoder, Defaults, describe_decoder, flag, layer_numbers, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.network import Experts, Mlp, Network, Part, Router
from lamina.models.plain_network import Plain, plain_network
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
    num_experts, inner, is_sparse = _moe(decoder)
    sparse = sum(is_sparse)
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


def network_2(values: Mapping[str, object]) -> Network:
    """What a Qwen2 computes."""
    decoder = read_decoder(values, _QWEN2)
    return plain_network(values, decoder, Plain(bias=True), *_dense_types(decoder))


def network(values: Mapping[str, object]) -> Network:
    """What a Qwen3 computes."""
    decoder = read_decoder(values, _QWEN3)
    bias = flag(decoder.fields, "attention_bias", False)
    return plain_network(values, decoder, Plain(bias, bias, qk_norm=True), *_dense_types(decoder))


def _dense_types(decoder: Decoder) -> tuple[tuple[str, ...], int | None]:
    """The type of each layer, and the window."""
    layers, window = decoder.num_layers, _window(decoder.fields)
    first = decoder.fields.integer("max_window_layers", default=28)
    default = [WINDOW if window is not None and layer >= first else FULL for layer in range(layers)]
    return layer_types(decoder.fields, layers, default, window), window


def network_moe(values: Mapping[str, object]) -> Network:
    """What a Qwen3-MoE computes."""
    decoder = read_decoder(values, _QWEN3_MOE)
    fields, window, bias = decoder.fields, _window(decoder.fields), flag(decoder.fields, "attention_bias", False)
    num_experts, inner, is_sparse = _moe(decoder)
    top_k = fields.integer("num_experts_per_tok", default=8, low=1, high=max(1, num_experts))
    routing = Router("softmax", top_k, flag(fields, "norm_topk_prob", False))

    def feed_forward(layer: int, prefix: str) -> Part:
        name = f"{prefix}.mlp"
        if not is_sparse[layer]:
            return Mlp(name, decoder.mlp_width)
        return Experts(name, num_experts, inner, routing, f"{name}.gate.weight")

    types = [FULL if window is None else WINDOW] * decoder.num_layers
    return plain_network(values, decoder, Plain(bias, bias, qk_norm=True), types, window, feed_forward)


def _moe(decoder: Decoder) -> tuple[int, int, list[bool]]:
    """(experts, their width, whether each layer has them)."""
    fields = decoder.fields
    num_experts = fields.integer("num_experts", "num_local_experts", default=128)
    step = fields.integer("decoder_sparse_step", default=1, low=1)
    dense_only = layer_numbers(fields, "mlp_only_layers") or []
    layers = range(decoder.num_layers)
    is_sparse = [layer not in dense_only and num_experts > 0 and (layer + 1) % step == 0 for layer in layers]
    return num_experts, fields.integer("moe_intermediate_size", default=768, low=1), is_sparse


def _dense(decoder: Decoder, choices: Choices, bias: bool, out_bias: bool, qk_norm: bool) -> Description:
    """The dense models: with `use_sliding_window` the layers from `max_window_layers` on have a window."""
    layers, (types, window) = decoder.num_layers, _dense_types(decoder)
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
