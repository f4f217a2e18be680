"""The shape that most families share: attention with grouped keys and values in every layer, and an MLP. No tensors, no torch.

A family's file says its defaults (those of the official config class), which layers see what, and what its blocks weigh.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lamina.base.errors import ConfigError
from lamina.memory.kinds import EntryFormat, Memory
from lamina.models.attention_memory import (
    MAX_LAYERS,
    check_choices,
    check_heads,
    hidden_field,
    key_value_entry,
    local_kv_heads,
    nullable,
    unused_index_note,
)
from lamina.models.config_fields import ConfigFields
from lamina.models.description import Choices, Description
from lamina.models.weight_parts import Size, Storage, embedding_and_head, gqa_attention, storage_of, weight_parts


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a family's config class says where a config.json is silent. None: hidden_size / heads, or as many as query heads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    head_dim: int | None
    max_position_embeddings: int
    tie_word_embeddings: bool = False


@dataclass(frozen=True, slots=True)
class Decoder:
    """The fields of a config.json that all these families have.

    store   how linear layers are stored.   expert_store  how routed experts are; the only ones that MXFP4 touches.
    """

    model_type: str
    fields: ConfigFields
    store: Storage
    expert_store: Storage
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    tied: bool
    is_nested: bool
    default_mlp_width: int

    @property
    def mlp_width(self) -> int:
        """The width of MLPs. Raises ConfigError where it is not one number for all layers."""
        return self.fields.integer("intermediate_size", default=self.default_mlp_width, low=1)

    def attention(self, bias: bool = False, out_bias: bool | None = None, qk_norm: bool = False) -> Size:
        """Projections of one layer; norms of queries and keys are per head."""
        norms = (self.head_dim, self.head_dim) if qk_norm else None
        return gqa_attention(self.store, self.hidden_size, self.num_heads, self.kv_heads, self.head_dim, bias, out_bias, norms)

    def norms(self, per_layer: int) -> Size:
        """Norms of the hidden width: so many a layer, and the final one."""
        return self.store.tensor(self.hidden_size) * (per_layer * self.num_layers + 1)


def read_decoder(values: Mapping[str, object], defaults: Defaults, nested: str | None = None) -> Decoder:
    """The common fields. `nested` names the object that holds them in a config for text and images; weights there count alone.

    Raises ConfigError naming the field for wrong types, sizes out of range, and head counts that do not belong together.
    """
    outer = ConfigFields(values)
    inner = outer.nested(nested) if nested is not None else None
    if nested is not None and inner is None:
        inner = ConfigFields({}, f"{nested}.")
    fields = outer if inner is None else inner
    hidden = fields.integer("hidden_size", default=defaults.hidden_size, low=1)
    heads = fields.integer("num_attention_heads", default=defaults.num_attention_heads, low=1)
    kv_heads = nullable(fields, "num_key_value_heads", defaults.num_key_value_heads) or heads
    if heads % kv_heads:
        raise ConfigError(fields.prefix + "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    head_dim = nullable(fields, "head_dim", defaults.head_dim)
    if head_dim is None:
        if hidden % heads:
            raise ConfigError(fields.prefix + "hidden_size", hidden, f"a multiple of num_attention_heads ({heads})")
        head_dim = hidden // heads
    store = storage_of(fields, outer)
    return Decoder(
        model_type=str(outer.get("model_type")), fields=fields, store=store.plain if store.codes == "e2m1" else store,
        expert_store=store,
        vocab_size=fields.integer("vocab_size", default=defaults.vocab_size, low=1), hidden_size=hidden,
        num_layers=fields.integer("num_hidden_layers", default=defaults.num_hidden_layers, low=1, high=MAX_LAYERS),
        num_heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        max_positions=fields.integer("max_position_embeddings", default=defaults.max_position_embeddings, low=1),
        tied=flag(fields, "tie_word_embeddings", flag(outer, "tie_word_embeddings", defaults.tie_word_embeddings)),
        is_nested=inner is not None, default_mlp_width=defaults.intermediate_size,
    )  # fmt: skip


def flag(fields: ConfigFields, name: str, default: bool) -> bool:
    """A boolean field."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(fields.prefix + name, value, "true or false")
    return value


def layer_numbers(fields: ConfigFields, name: str) -> list[int] | None:
    """A list of layer numbers, or None where there is none."""
    listed = fields.items(name)
    if listed is None:
        return None
    found = [layer for layer in listed if isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < MAX_LAYERS]
    if len(found) != len(listed):
        raise ConfigError(fields.prefix + name, listed, "a list of layer numbers")
    return found


def describe_decoder(
    decoder: Decoder,
    choices: Choices,
    memories_of: Callable[[EntryFormat], Sequence[Memory]],
    sizes: Iterable[tuple[str, Size]],
    notes: Sequence[str] = (),
) -> Description:
    """The description of a family of this shape; bf16 where no cache format is chosen.

    memories_of   the memories of all layers, given the entry of one layer's keys and values on one GPU.
    sizes         (component, size) of all layers; embedding and head are added here.
    """
    check_choices(choices)
    check_heads(decoder.num_heads, choices.tensor_parallel)
    cache_format = choices.cache_format or "bf16"
    entry = key_value_entry(cache_format, decoder.kv_heads, decoder.head_dim, choices.tensor_parallel)
    memories = tuple(memories_of(entry))
    said = list(notes)
    if decoder.is_nested:
        said.append("the text model alone: weights and embeddings of images and sound are not counted")
    if cache_format == "fp8":
        said.append("fp8 keys and values have one scale per tensor, which is not part of an entry")
    if local_kv_heads(decoder.kv_heads, choices.tensor_parallel) * choices.tensor_parallel > decoder.kv_heads:
        said.append(f"each of the {decoder.kv_heads} key/value heads is on several of the {choices.tensor_parallel} GPUs")
    if choices.draft_tokens:
        said.append("the config has no draft block: drafts are taken to come from outside the model")
    table = embedding_and_head(decoder.store, decoder.vocab_size, decoder.hidden_size, decoder.tied)
    return Description(
        model_type=decoder.model_type, memories=memories, hidden=hidden_field(memories, decoder.hidden_size),
        max_positions=decoder.max_positions, vocab_size=decoder.vocab_size, hidden_size=decoder.hidden_size,
        cache_format=cache_format, index_format=None, weights=weight_parts([*table, *sizes]),
        notes=(*said, *unused_index_note(choices)),
    )  # fmt: skip
