"""What attention layers remember, as data: grouped keys and values, latents, index keys. Shared by the families; no torch.

Tensor parallelism: key/value heads are divided over the GPUs of a group, and where there are fewer heads than GPUs each GPU
has one. Latents, index keys and entries that all heads share are replicated on every GPU.
"""

from collections.abc import Iterable, Sequence

from lamina.base.errors import ConfigError
from lamina.base.formats import FieldData, check_cache_format, check_index_format, key_value
from lamina.memory.kinds import EntryFormat, Field, Log, Memory, Window
from lamina.models.config_fields import ConfigFields
from lamina.models.description import Choices

FULL, WINDOW, CHUNK = "full_attention", "sliding_attention", "chunked_attention"
#: what a memory of each layer type is called
NAMES = {FULL: "kv", WINDOW: "window", CHUNK: "chunk"}
_SIZES = {WINDOW: "sliding_window", CHUNK: "attention_chunk_size"}
MAX_LAYERS = 10_000


def stored_fields(fields: Iterable[FieldData]) -> tuple[Field, ...]:
    """Fields of a format as the memory plan sees them."""
    return tuple(Field(name, dtype, shape) for name, dtype, shape in fields)


def entry_format(name: str, fields: Iterable[FieldData]) -> EntryFormat:
    """The entry format `name` with these fields."""
    return EntryFormat(name, stored_fields(fields))


def check_choices(choices: Choices) -> None:
    """Refuses choices that no family can serve."""
    for name, value, low in (("tensor_parallel", choices.tensor_parallel, 1), ("draft_tokens", choices.draft_tokens, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= 2**20:
            raise ConfigError(name, value, f"an integer of at least {low}")
    if choices.cache_format is not None:
        check_cache_format(choices.cache_format)
    if choices.index_format is not None:
        check_index_format(choices.index_format)


def check_heads(heads: int, tensor_parallel: int) -> None:
    """Refuses a group of GPUs that cannot share the query heads evenly."""
    if heads % tensor_parallel:
        raise ConfigError("tensor_parallel", tensor_parallel, f"a divisor of num_attention_heads ({heads})")


def local_kv_heads(kv_heads: int, tensor_parallel: int) -> int:
    """Key/value heads on one GPU: an equal share, or one that several GPUs hold alike."""
    if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        allowed = f"a divisor or a multiple of num_key_value_heads ({kv_heads})"
        raise ConfigError("tensor_parallel", tensor_parallel, allowed)
    return max(1, kv_heads // tensor_parallel)


def key_value_entry(
    cache_format: str, kv_heads: int, head_dim: int, tensor_parallel: int, value_dim: int | None = None
) -> EntryFormat:
    """Keys and values of one token on one GPU: fields k and v, [kv heads on this GPU, head_dim]."""
    heads = local_kv_heads(kv_heads, tensor_parallel)
    return entry_format(cache_format, key_value(cache_format, heads, head_dim, value_dim or head_dim))


def layer_types(
    fields: ConfigFields, num_layers: int, default: Sequence[str], size: int | None, local: str = WINDOW
) -> tuple[str, ...]:
    """The type of each layer from `layer_types`, or `default` where the config has no such list.

    local   the type that is not full attention.   size  of its window or chunk; None refuses layers of that type.
    """
    listed = fields.items("layer_types")
    if listed is not None and len(listed) != num_layers:
        raise ConfigError(f"{fields.prefix}layer_types", f"{len(listed)} entries", f"one for each of the {num_layers} layers")
    types = default if listed is None else listed
    for layer, kind in enumerate(types):
        if kind not in (FULL, local):
            raise ConfigError(f"{fields.prefix}layer_types[{layer}]", kind, f"{FULL} or {local}")
    if size is None and local in types:
        raise ConfigError(fields.prefix + _SIZES[local], None, f"an integer where layers have {local}")
    return tuple(str(kind) for kind in types)


def every(period: int, num_layers: int, otherwise: str = WINDOW) -> list[str]:
    """Full attention in every `period`-th layer, the last of each group; `otherwise` in the others."""
    return [otherwise if (layer + 1) % period else FULL for layer in range(num_layers)]


def attention_memories(types: Sequence[str], entry: EntryFormat, window: int | None, chunk: int | None = None) -> list[Memory]:
    """One memory a layer: all tokens, the last `window`, or those since the last multiple of `chunk`."""
    kept: list[Memory] = []
    for layer, kind in enumerate(types):
        if kind == WINDOW and window is not None:
            kept.append(Window(NAMES[kind], layer, entry, window))
        elif kind == CHUNK and chunk is not None:
            kept.append(Window(NAMES[kind], layer, entry, chunk, reset=chunk))
        else:
            kept.append(Log(NAMES[FULL], layer, entry, 1))
    return kept


def hidden_field(memories: Sequence[Memory], hidden_size: int) -> Field | None:
    """The final hidden vector that a slot keeps; None where nothing but logs is remembered, so that there is no slot."""
    has_slot = any(memory.kind not in ("log", "alias") for memory in memories)
    return Field("hidden", "fp32", (hidden_size,)) if has_slot else None


def nullable(fields: ConfigFields, name: str, default: int | None, low: int = 1) -> int | None:
    """An integer, or None where the config says null; `default` where it says nothing."""
    if name not in fields.values:
        return default
    return fields.integer(name, low=low) if fields.values[name] is not None else None


def replicated_note(choices: Choices) -> tuple[str, ...]:
    """What is said of memories that all heads read, where several GPUs share the heads."""
    num = choices.tensor_parallel
    return (
        (f"all heads read the same entries, so each of the {num} GPUs that share the heads holds all of them",) if num > 1 else ()
    )


def unused_index_note(choices: Choices) -> tuple[str, ...]:
    """What is said to a user who chose an index format for a model without an index."""
    return (f"index_format={choices.index_format} is not used: this model has no index",) if choices.index_format else ()
