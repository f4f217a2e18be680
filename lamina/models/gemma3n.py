"""Gemma 3n: a window in four of five layers; the last layers own no keys and values but read those of an earlier layer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist

from lamina.base.errors import ConfigError
from lamina.memory.kinds import Alias, EntryFormat, Memory
from lamina.models.attention_memory import FULL, NAMES, WINDOW, attention_memories, every, layer_types, nullable
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Decoder, Defaults, describe_decoder, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.gemma import rope_of, softcap_of
from lamina.models.network import Attention, Branch, Mlp, Network, Norm
from lamina.models.network_fields import end_tokens, names_of
from lamina.models.parts_altup import AltUpLayer, Closing, Opening
from lamina.models.weight_parts import Size, mlp

_DEFAULTS = Defaults(262400, 2048, 16384, 35, 8, 2, 256, 32768, tie_word_embeddings=True)


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Gemma 3n config.json, for all media (the text model is in `text_config`) or for text alone.

    The last `num_kv_shared_layers` layers share the memory of the last layer of their own type before them.
    """
    decoder = _decoder(values)
    layers, (types, window) = decoder.num_layers, _types(decoder)
    first_shared = layers - _num_shared(decoder.fields, types)

    def memories(entry: EntryFormat) -> list[Memory]:
        kept = attention_memories(types[:first_shared], entry, window)
        for layer in range(first_shared, layers):
            source = _source(types, first_shared, layer)
            kept.append(Alias(NAMES[types[layer]], layer, NAMES[types[source]], source))
        return kept

    return describe_decoder(decoder, choices, memories, _sizes(decoder, layers - first_shared))


def network(values: Mapping[str, object]) -> Network:
    """What a Gemma 3n computes: each layer computes one of several streams, and adds its own input to the others."""
    decoder = _decoder(values)
    fields, dim, layers = decoder.fields, decoder.head_dim, decoder.num_layers
    (types, window), bias = _types(decoder), flag(fields, "attention_bias", False)
    for name in ("hidden_activation", "hidden_act"):
        fields.must_be(name, "gelu_pytorch_tanh")
    first_shared, sizes = layers - _num_shared(fields, types), _extra(fields)
    active = fields.integer("altup_active_idx", default=0, high=sizes.streams - 1)
    eps, scales = fields.number("rms_norm_eps", default=1e-6), flag(fields, "altup_correct_scale", True)
    ropes = {kind: rope_of(fields, decoder, kind) for kind in (FULL, WINDOW)}
    cuts, widths = _cuts(decoder), _mlp_widths(decoder)

    def layer(number: int) -> AltUpLayer:
        prefix, kind, is_reader = f"model.layers.{number}", types[number], number >= first_shared

        def norm(name: str) -> Norm:
            return Norm(f"{prefix}.{name}.weight", eps)

        attention = Attention(
            f"{prefix}.self_attn", decoder.num_heads, decoder.kv_heads, dim, 1.0, NAMES[kind], bias, bias, ropes[kind],
            window=window if kind == WINDOW else None, q_norm=norm("self_attn.q_norm"), k_norm=norm("self_attn.k_norm"),
            v_norm_eps=eps, shares=_source(types, first_shared, number) if is_reader else None,
        )  # fmt: skip
        inner = Mlp(f"{prefix}.mlp", widths[number], "gelu_tanh", cut=cuts[number])
        return AltUpLayer(
            prefix, Branch(attention, norm("input_layernorm"), norm("post_attention_layernorm")),
            Branch(inner, norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")), sizes.streams, active,
            sizes.rank, sizes.inner, scales, norm("post_per_layer_input_norm"), eps, "gelu_tanh",
        )  # fmt: skip

    # checkpoints may have what readers of another layer's memory would need otherwise
    unused = tuple(
        f"model.layers.{number}.self_attn.{name}." for number in range(first_shared, layers)
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )  # fmt: skip
    return Network(
        decoder.vocab_size, decoder.hidden_size, "model.embed_tokens.weight",
        tuple((Branch(layer(each), None, kept=0.0),) for each in range(layers)),
        Norm("model.norm.weight", eps), None if decoder.tied else "lm_head.weight", end_tokens(values, "text_config"),
        decoder.hidden_size**0.5, softcap=softcap_of(fields, "final_logit_softcapping", 30.0),
        names=names_of(decoder, ignored=unused), closing=Closing("model", sizes.streams),
        opening=Opening("model", sizes.streams, layers, sizes.inner, sizes.vocab, eps),
    )  # fmt: skip


def _decoder(values: Mapping[str, object]) -> Decoder:
    """The common fields; whether embeddings are tied, a config for all media says outside of `text_config`."""
    decoder = read_decoder(values, _DEFAULTS, "text_config" if values.get("model_type") == "gemma3n" else None)
    name = "tie_word_embeddings"
    return replace(decoder, tied=flag(ConfigFields(values), name, True)) if decoder.is_nested else decoder


def _types(decoder: Decoder) -> tuple[tuple[str, ...], int | None]:
    """The type of each layer, and the window."""
    fields, layers = decoder.fields, decoder.num_layers
    fields.must_be("use_bidirectional_attention", False)
    window = nullable(fields, "sliding_window", 512)
    return layer_types(fields, layers, every(5, layers), window), window


def _source(types: tuple[str, ...], first_shared: int, layer: int) -> int:
    """The layer whose memory a layer reads that has none of its own."""
    return max(i for i in range(first_shared) if types[i] == types[layer])


@dataclass(frozen=True, slots=True)
class _Extra:
    """What such models have beside attention and MLP: a table of `vocab` rows with `inner` columns a layer, `streams`, laurel."""

    vocab: int
    inner: int
    streams: int
    rank: int


def _extra(fields: ConfigFields) -> _Extra:
    return _Extra(
        fields.integer("vocab_size_per_layer_input", default=262144, low=1),
        fields.integer("hidden_size_per_layer_input", default=256, low=1),
        fields.integer("altup_num_inputs", default=4, low=1), fields.integer("laurel_rank", default=64, low=1),
    )  # fmt: skip


def _cuts(decoder: Decoder) -> list[float | None]:
    """For each layer how many standard deviations above their mean gates begin to count; None: all do. The config says which
    share of a normal distribution lies below."""
    layers = decoder.num_layers
    listed = decoder.fields.get("activation_sparsity_pattern")
    if listed is None:
        listed = [0.95 if layer < 10 < layers else 0.0 for layer in range(layers)]
    shares = listed if isinstance(listed, list) else []
    found = [float(share) for share in shares if isinstance(share, int | float) and not isinstance(share, bool) and share < 1]
    if len(found) != layers or len(shares) != layers:
        name, allowed = f"{decoder.fields.prefix}activation_sparsity_pattern", f"a share below 1 for each of the {layers} layers"
        raise ConfigError(name, listed, allowed)
    return [NormalDist().inv_cdf(share) if share > 0 else None for share in found]


def _mlp_widths(decoder: Decoder) -> list[int]:
    """MLP widths: one for each layer, or one for all."""
    listed = decoder.fields.get("intermediate_size")
    if not isinstance(listed, list):
        return [decoder.mlp_width] * decoder.num_layers
    found = [width for width in listed if isinstance(width, int) and not isinstance(width, bool) and 1 <= width <= 2**40]
    if len(found) != decoder.num_layers or len(listed) != decoder.num_layers:
        allowed = f"an integer for each of the {decoder.num_layers} layers, or one for all"
        raise ConfigError(decoder.fields.prefix + "intermediate_size", f"{len(listed)} entries", allowed)
    return found


def _num_shared(fields: ConfigFields, types: tuple[str, ...]) -> int:
    """Trailing layers without keys and values of their own; each type among them must come before them too."""
    count = fields.integer("num_kv_shared_layers", default=15, high=len(types) - 1)
    missing = set(types) - set(types[: len(types) - count])
    if count and missing:
        raise ConfigError(
            fields.prefix + "num_kv_shared_layers", count, f"fewer: {missing.pop()} comes first among the shared layers"
        )
    return count


def _sizes(decoder: Decoder, num_shared: int) -> list[tuple[str, Size]]:
    """Blocks of all layers. Beside attention and MLP: an embedding per layer, low-rank residuals (laurel) and AltUp streams."""
    fields, store, width, layers = decoder.fields, decoder.store, decoder.hidden_size, decoder.num_layers
    extra = _extra(fields)
    vocab, inner, streams, rank = extra.vocab, extra.inner, extra.streams, extra.rank
    bias, queries = flag(fields, "attention_bias", False), decoder.num_heads * decoder.head_dim
    reader = store.linear(queries, width, bias) + store.linear(width, queries, bias) + store.tensor(decoder.head_dim)
    per_layer = store.linear(inner, width) + store.linear(width, inner) + store.tensor(width)
    altup = store.linear(streams, streams) + store.linear(streams**2, streams) + store.linear(streams, width)
    altup += store.tensor(width) * 2
    return [
        ("per-layer embedding", store.tensor(vocab, layers * inner)),
        ("per-layer input", per_layer * layers + store.linear(layers * inner, width) + store.tensor(inner)),
        ("attention", decoder.attention(bias, qk_norm=True) * (layers - num_shared) + reader * num_shared),
        *(("mlp", mlp(store, width, mlp_width)) for mlp_width in _mlp_widths(decoder)),
        ("laurel", (store.linear(rank, width) + store.linear(width, rank) + store.tensor(width)) * layers),
        ("altup", altup * layers + store.linear(width, width) * (2 * (streams - 1))),
        ("norms", decoder.norms(per_layer=4)),
    ]
