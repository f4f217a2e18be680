"""From codecs to memory formats, and from a layout to stores."""

from dataclasses import dataclass

from lamina.memory.kinds import EntryFormat, Field
from lamina.ops.store import EntryCodec


@dataclass(frozen=True, slots=True)
class StoreKey:
    """The fields of one memory of one layer that a store serves."""

    layer: int
    memory: str
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A store that a model asks for."""

    key: StoreKey
    codec: EntryCodec


def entry_fields(codec: EntryCodec, rename: str | None = None) -> tuple[Field, ...]:
    """The fields of a codec as the memory plan sees them; `rename` names the only field."""
    return tuple(Field(rename or name, dtype, (elements,)) for name, dtype, elements in codec.fields)


def entry_format(name: str, codec: EntryCodec) -> EntryFormat:
    """The entry format of a codec."""
    return EntryFormat(name, entry_fields(codec))


def store_spec(layer: int, memory: str, codec: EntryCodec, field: str | None = None) -> StoreSpec:
    """A store for all fields of a memory, or for the one named `field`."""
    names = (field,) if field is not None else tuple(name for name, _, _ in codec.fields)
    return StoreSpec(StoreKey(layer, memory, names), codec)
