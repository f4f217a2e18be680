"""Gemma 3n: a window in four of five layers; the last layers own no keys and values but read those of an earlier layer."""

from collections.abc import Mapping

from lamina.base.errors import ConfigError
from lamina.memory.kinds import Alias, EntryFormat, Memory
from lamina.models.attention_memory import NAMES, attention_memories, every, layer_types, nullable
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Decoder, Defaults, describe_decoder, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.weight_parts import Size, mlp

_DEFAULTS = Defaults(262400, 2048, 16384, 35, 8, 2, 256, 32768, tie_word_embeddings=True)


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Gemma 3n config.json, for all media (the text model is in `text_config`) or for text alone.

    The last `num_kv_shared_layers` layers share the memory of the last layer of their own type before them.
    """
    decoder = read_decoder(values, _DEFAULTS, "text_config" if values.get("model_type") == "gemma3n" else None)
    fields, layers = decoder.fields, decoder.num_layers
    window = nullable(fields, "sliding_window", 512)
    types = layer_types(fields, layers, every(5, layers), window)
    first_shared = layers - _num_shared(fields, types)

    def memories(entry: EntryFormat) -> list[Memory]:
        kept = attention_memories(types[:first_shared], entry, window)
        for layer in range(first_shared, layers):
            source = max(i for i in range(first_shared) if types[i] == types[layer])
            kept.append(Alias(NAMES[types[layer]], layer, NAMES[types[source]], source))
        return kept

    return describe_decoder(decoder, choices, memories, _sizes(decoder, layers - first_shared))


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
    vocab = fields.integer("vocab_size_per_layer_input", default=262144, low=1)
    inner = fields.integer("hidden_size_per_layer_input", default=256, low=1)
    streams = fields.integer("altup_num_inputs", default=4, low=1)
    rank = fields.integer("laurel_rank", default=64, low=1)
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
