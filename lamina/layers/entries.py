"""The stores that a model asks for: which fields of which memory, and how they are encoded."""

from dataclasses import dataclass

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


def store_spec(layer: int, memory: str, codec: EntryCodec, field: str | None = None) -> StoreSpec:
    """A store for all fields of a memory, or for the one named `field`."""
    names = (field,) if field is not None else tuple(name for name, _, _ in codec.fields)
    return StoreSpec(StoreKey(layer, memory, names), codec)
