"""Bamba and Granite 4 hybrids: Mamba-2 layers with full attention in between. What they remember and weigh; no torch."""

from collections.abc import Mapping

from lamina.models.decoder import Decoder, Defaults, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.recurrent import FULL, LINEAR, Mixer, describe_hybrid, layer_numbers, listed_kinds, read_mamba2, width
from lamina.models.weight_parts import Size, mlp, router

_BAMBA = Defaults(
    vocab_size=128000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=None, max_position_embeddings=262144,
)  # fmt: skip
_GRANITE = Defaults(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=None, head_dim=None, max_position_embeddings=2048,
)  # fmt: skip


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Bamba config. Raises ConfigError naming the field."""
    decoder = read_decoder(values, _BAMBA)
    bias = flag(decoder.fields, "mlp_bias", False)
    feed_forward = [("mlp", mlp(decoder.store, decoder.hidden_size, decoder.mlp_width, bias))]
    return _describe(decoder, choices, _kinds(decoder), feed_forward)


def describe_granite(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Granite hybrid (granitemoehybrid): as Bamba, with experts beside a shared feed-forward layer."""
    decoder = read_decoder(values, _GRANITE)
    fields, store, hidden = decoder.fields, decoder.store, decoder.hidden_size
    experts = width(fields, "num_local_experts", "num_experts", default=8, low=0)
    shared = mlp(store, hidden, width(fields, "shared_intermediate_size", default=1024))
    feed_forward = [("mlp", shared)]
    if experts:
        expert = mlp(decoder.expert_store, hidden, decoder.mlp_width)
        feed_forward = [("router", router(store, hidden, experts)), ("experts", expert * experts), ("shared experts", shared)]
    kinds = listed_kinds(fields, decoder.num_layers, "layer_types", "layers_block_type") or [LINEAR] * decoder.num_layers
    return _describe(decoder, choices, kinds, feed_forward)


def _describe(decoder: Decoder, choices: Choices, kinds: list[str], feed_forward: list[tuple[str, Size]]) -> Description:
    scan = read_mamba2(decoder.fields, decoder.hidden_size)
    attention = decoder.attention(flag(decoder.fields, "attention_bias", False))
    mixers, sizes = [], [("norms", decoder.norms(2))]
    for kind in kinds:
        if kind == FULL:
            mixers.append(Mixer(attends=True))
            sizes.append(("attention", attention))
        else:
            mixers.append(Mixer(attends=False, scan=scan))
            sizes.append(("mamba", scan.weights(decoder.store, decoder.hidden_size)))
        sizes += feed_forward
    return describe_hybrid(decoder, choices, mixers, sizes)


def _kinds(decoder: Decoder) -> list[str]:
    """The kind of each layer, from the list of those that attend or the list of all."""
    attending = layer_numbers(decoder.fields, "attn_layer_indices", decoder.num_layers)
    if attending is not None:
        return [FULL if layer in attending else LINEAR for layer in range(decoder.num_layers)]
    listed = listed_kinds(decoder.fields, decoder.num_layers, "layers_block_type", "layer_types")
    return listed or [LINEAR] * decoder.num_layers
