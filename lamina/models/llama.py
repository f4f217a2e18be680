"""Llama: full attention in every layer. Llama 4: attention within chunks, and full attention without rotation in some layers."""

from collections.abc import Mapping
from dataclasses import replace

from lamina.base.errors import ConfigError
from lamina.models.attention_memory import CHUNK, FULL, NAMES, attention_memories, layer_types, nullable
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Decoder, Defaults, describe_decoder, flag, layer_numbers, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.network import Attention, Branch, Mlp, Network, Norm, Part, Router
from lamina.models.network_fields import end_tokens, names_of, read_rope
from lamina.models.parts_experts import FusedExperts
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
    decoder = _decoder_4(values)
    fields, layers = decoder.fields, decoder.num_layers
    _, types, chunk = _layers_4(decoder)
    num_sparse = len(_sparse_4(decoder))
    num_experts = _num_experts_4(decoder)
    width, store = decoder.hidden_size, decoder.store
    dense = mlp(store, width, _dense_width_4(decoder))
    sizes = [
        ("attention", decoder.attention(flag(fields, "attention_bias", False)) * layers),
        ("mlp", dense * (layers - num_sparse)),
        ("router", router(store, width, num_experts) * num_sparse),
        ("experts", mlp(decoder.expert_store, width, decoder.mlp_width) * (num_experts * num_sparse)),
        ("shared experts", mlp(store, width, decoder.mlp_width) * num_sparse),
        ("norms", decoder.norms(per_layer=2)),
    ]
    return describe_decoder(decoder, choices, lambda entry: attention_memories(types, entry, None, chunk), sizes)


def network_4(values: Mapping[str, object]) -> Network:
    """What a Llama 4 computes: rotated pairs lie side by side, norms without a weight come after the rotation."""
    decoder = _decoder_4(values)
    fields, dim, num = decoder.fields, decoder.head_dim, _num_experts_4(decoder)
    fields.must_be("hidden_act", "silu")
    rotated, types, chunk = _layers_4(decoder)
    sparse, bias = _sparse_4(decoder), flag(fields, "attention_bias", False)
    eps = fields.number("rms_norm_eps", default=1e-5)
    norm = Norm("", eps, "plain") if flag(fields, "use_qk_norm", True) else None
    temperature = None
    if _is_tuned_4(fields):
        temperature = fields.number("floor_scale", default=8192.0, low=1.0), fields.number("attn_scale", default=0.1), 1.0
    rope = read_rope(fields, dim, decoder.max_positions, 500000.0, is_pairs=True)
    routing = Router("chosen_sigmoid", fields.integer("num_experts_per_tok", default=1, low=1, high=num))
    layers = []
    for number, kind in enumerate(types):
        prefix, is_rotated = f"model.layers.{number}", rotated[number]
        attention = Attention(
            f"{prefix}.self_attn", decoder.num_heads, decoder.kv_heads, dim, dim**-0.5, NAMES[kind], bias, bias,
            rope if is_rotated else None, chunk=chunk if kind == CHUNK else None, q_norm=norm if is_rotated else None,
            k_norm=norm if is_rotated else None, norm_after_rope=True, temperature=None if is_rotated else temperature,
        )  # fmt: skip
        inner: Part = Mlp(f"{prefix}.feed_forward", _dense_width_4(decoder))
        if number in sparse:
            name = f"{prefix}.feed_forward"
            inner = FusedExperts(
                f"{name}.experts", num, decoder.mlp_width, routing, f"{name}.router.weight",
                shared=Mlp(f"{name}.shared_expert", decoder.mlp_width), weighs_input=True,
            )  # fmt: skip
        before, between = (Norm(f"{prefix}.{name}.weight", eps) for name in ("input_layernorm", "post_attention_layernorm"))
        layers.append((Branch(attention, before), Branch(inner, between)))
    return Network(
        decoder.vocab_size, decoder.hidden_size, "model.embed_tokens.weight", tuple(layers), Norm("model.norm.weight", eps),
        None if decoder.tied else "lm_head.weight", end_tokens(values, "text_config"), names=names_of(decoder),
    )  # fmt: skip


def _decoder_4(values: Mapping[str, object]) -> Decoder:
    """The common fields; whether embeddings are tied, `text_config` alone says."""
    decoder = read_decoder(values, _DEFAULTS_4, "text_config" if values.get("model_type") == "llama4" else None)
    return replace(decoder, tied=flag(decoder.fields, "tie_word_embeddings", False))


def _layers_4(decoder: Decoder) -> tuple[list[int], tuple[str, ...], int | None]:
    """(whether each layer has rotary positions, the type of each, the chunk of those that have one)."""
    fields, layers = decoder.fields, decoder.num_layers
    chunk = nullable(fields, "attention_chunk_size", 8192)
    interval = fields.integer("no_rope_layer_interval", default=4, low=1)
    rotated = layer_numbers(fields, "no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(rotated) < layers:
        raise ConfigError(
            fields.prefix + "no_rope_layers", f"{len(rotated)} entries", f"at least one for each of the {layers} layers"
        )
    types = [CHUNK if rotated[layer] and chunk is not None else FULL for layer in range(layers)]
    return rotated, layer_types(fields, layers, types, chunk, CHUNK), chunk


def _sparse_4(decoder: Decoder) -> set[int]:
    """The layers with experts."""
    layers, step = decoder.num_layers, decoder.fields.integer("interleave_moe_layer_step", default=1, low=1)
    listed = layer_numbers(decoder.fields, "moe_layers")
    return {layer for layer in (range(step - 1, layers, step) if listed is None else listed) if layer < layers}


def _is_tuned_4(fields: ConfigFields) -> bool:
    """Whether queries without positions grow with theirs; older files have a number, of which 0 means no."""
    value = fields.get("attn_temperature_tuning")
    if value is not None and not isinstance(value, int):
        raise ConfigError(fields.prefix + "attn_temperature_tuning", value, "true, false or an integer")
    return value is None or bool(value)


def _num_experts_4(decoder: Decoder) -> int:
    return decoder.fields.integer("num_local_experts", "num_experts", default=16, low=1)


def _dense_width_4(decoder: Decoder) -> int:
    return decoder.fields.integer("intermediate_size_mlp", default=16384, low=1)
