"""Cohere 2 (Command R7B, Command A): three layers with a window, then one with full attention; attention and MLP side by side."""

from collections.abc import Mapping

from lamina.models.attention_memory import NAMES, WINDOW, attention_memories, every, layer_types, nullable
from lamina.models.decoder import Decoder, Defaults, describe_decoder, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.network import Attention, Branch, Mlp, Network, Norm, Parallel
from lamina.models.network_fields import end_tokens, names_of, read_rope
from lamina.models.weight_parts import mlp

_DEFAULTS = Defaults(256000, 8192, 22528, 40, 64, None, None, 8192, tie_word_embeddings=True)
_ALLOWED = {"use_parallel_block": True, "use_gated_activation": True, "use_qk_norm": False, "rotary_pct": 1.0}


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Cohere 2 config.json; one norm a layer."""
    decoder = read_decoder(values, _DEFAULTS)
    fields, layers = decoder.fields, decoder.num_layers
    types, window = _types(decoder)
    sizes = [
        ("attention", decoder.attention(flag(fields, "attention_bias", False)) * layers),
        ("mlp", mlp(decoder.store, decoder.hidden_size, decoder.mlp_width) * layers),
        ("norms", decoder.norms(per_layer=1)),
    ]
    return describe_decoder(decoder, choices, lambda entry: attention_memories(types, entry, window), sizes)


def network(values: Mapping[str, object]) -> Network:
    """What a Cohere 2 computes: layers with a window have rotary positions, those with full attention none."""
    decoder = read_decoder(values, _DEFAULTS)
    fields, dim = decoder.fields, decoder.head_dim
    fields.must_be("hidden_act", "silu")
    for name, allowed in _ALLOWED.items():
        fields.must_be(name, allowed)
    (types, window), bias = _types(decoder), flag(fields, "attention_bias", False)
    eps = fields.number("layer_norm_eps", default=1e-5)
    rope = read_rope(fields, dim, decoder.max_positions, 10000.0, is_pairs=True)
    layers = []
    for number, kind in enumerate(types):
        prefix, is_local = f"model.layers.{number}", kind == WINDOW
        attention = Attention(
            f"{prefix}.self_attn", decoder.num_heads, decoder.kv_heads, dim, dim**-0.5, NAMES[kind], bias, bias,
            rope if is_local else None, window=window if is_local else None,
        )  # fmt: skip
        both = Parallel((attention, Mlp(f"{prefix}.mlp", decoder.mlp_width)))
        layers.append((Branch(both, Norm(f"{prefix}.input_layernorm.weight", eps, "layer")),))
    return Network(
        decoder.vocab_size, decoder.hidden_size, "model.embed_tokens.weight", tuple(layers),
        Norm("model.norm.weight", eps, "layer"), None if decoder.tied else "lm_head.weight", end_tokens(values),
        logit_scale=fields.number("logit_scale", default=0.0625), names=names_of(decoder),
    )  # fmt: skip


def _types(decoder: Decoder) -> tuple[tuple[str, ...], int | None]:
    """The type of each layer, and the window."""
    fields, layers = decoder.fields, decoder.num_layers
    window = nullable(fields, "sliding_window", 4096)
    period = fields.integer("sliding_window_pattern", default=4, low=1)
    return layer_types(fields, layers, every(period, layers), window), window
