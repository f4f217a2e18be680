"""What a GGUF file says it holds, checked before a single tensor is read. Needs no torch, and no library.

Layout, all little-endian: "GGUF", version u32, number of tensors u64, number of metadata entries u64; the entries (key, type,
value); of each tensor name, dims (the contiguous one first), element type, offset; then, aligned, the tensors' bytes. A string
is its length u64 and UTF-8. Source: docs/gguf.md of ggml. Every count and length is held against what the file still has.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np

from lamina.base.errors import WeightError
from lamina.base.sizes import MiB

SUFFIX = ".gguf"
Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | tuple[Scalar, ...]
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MAX_HEADER_BYTES, _MAX_ENTRIES, _MAX_TENSORS, _MAX_ITEMS = 256 * MiB, 1 << 16, 1 << 18, 1 << 22
_MAX_KEY_BYTES, _MAX_NAME_BYTES, _MAX_DIMS = 1 << 16, 1 << 8, 4
_LEAST_ENTRY, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
#: by number: name, elements of a block, bytes of a block
_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
#: element types that come in blocks, which the library gguf reads
QUANTISED = frozenset(name for name, block, _ in _TYPES.values() if block > 1)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its name, element type as GGML spells it, shape (the contiguous dim last), where its bytes are and how many."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Converted:
    """A tensor under the name that a config.json's family has for it, and what to undo of how its values were written.

    pair_heads  heads whose rotated pairs were put side by side among their rows; 0: rows are as they were.
    shift       what was added to every value.
    """

    name: str
    tensor: GgufTensor
    pair_heads: int = 0
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class GgufFile:
    """metadata  by key; an array is a tuple."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path) -> GgufFile:
    """The header of the file at `path`; an unchanged file is parsed once.

    Raises WeightError, in one line, unless every count, length, type and offset fits the bytes that the file has.
    """
    try:
        stat = path.stat()
        return _read(path.resolve(), stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise WeightError(f"{path.name} cannot be read: {error.strerror or error}") from None


@lru_cache(maxsize=4)
def _read(path: Path, size: int, changed_ns: int) -> GgufFile:
    with path.open("rb", buffering=MiB) as file:
        reader = _Reader(path.name, file, size)
        if size < 4 or reader.take(4) != _MAGIC:
            raise WeightError(f"{path.name}: expected a GGUF file, found another kind of file")
        version = reader.number("I")
        if version not in _VERSIONS:
            other = " (big-endian, or no GGUF)" if version > 0xFFFF else ""
            raise WeightError(f"{path.name}: expected GGUF version 2 or 3, little-endian, found {version}{other}")
        num_tensors = reader.count("tensors", _MAX_TENSORS, _LEAST_TENSOR)
        num_entries = reader.count("metadata entries", _MAX_ENTRIES, _LEAST_ENTRY)
        metadata = _metadata(reader, num_entries)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise WeightError(f"{path.name}: expected general.alignment to be a power of two, found {alignment!r:.40}")
        if metadata.get("split.count", 0) not in (0, 1):
            raise WeightError(f"{path.name} is one of {metadata['split.count']} parts: join them to one file first")
        found = [_tensor(reader) for _ in range(num_tensors)]
        start = -(-reader.position // alignment) * alignment
    return GgufFile(path, metadata, _placed(path.name, found, start, size, alignment))


def shown(value: Value | None) -> Value | None:
    """A value for a message: what is long is cut, an array is told by its length."""
    if isinstance(value, tuple):
        return f"an array of {len(value)}"
    return value[:80] if isinstance(value, str) else value


class _Reader:
    """The header's bytes in order; never past the end of the file, never past the most that a header may have."""

    def __init__(self, name: str, file: BinaryIO, size: int) -> None:
        self.name = name
        self.position = 0
        self._file = file
        self._end = min(size, _MAX_HEADER_BYTES)

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self._end - self.position:
            raise WeightError(
                f"{self.name} is truncated, or no GGUF file: at byte {self.position} its header wants {num_bytes} more bytes, "
                f"{self._end - self.position} are there"
            )
        found = self._file.read(num_bytes)
        if len(found) != num_bytes:
            raise WeightError(f"{self.name} became shorter while it was read")
        self.position += num_bytes
        return found

    def number(self, code: str) -> int | float:
        value: int | float = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]
        return value

    def count(self, what: str, most: int, least_bytes: int) -> int:
        """A count of things that take `least_bytes` each."""
        count = int(self.number("Q"))
        room = self._end - self.position
        if count > most or count * least_bytes > room:
            raise WeightError(f"{self.name}: expected at most {min(most, room // least_bytes)} {what}, found {count}")
        return count

    def text(self, what: str, most: int = _MAX_HEADER_BYTES) -> str:
        length = int(self.number("Q"))
        if length > most:
            raise WeightError(f"{self.name}: expected {what} of at most {most} bytes, found {length}")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise WeightError(f"{self.name}: expected {what} in UTF-8, found other bytes") from None


def _metadata(reader: _Reader, num_entries: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(num_entries):
        key = reader.text("a metadata key", _MAX_KEY_BYTES)
        if key in metadata:
            raise WeightError(f"{reader.name}: metadata key {key!r:.80} is repeated")
        kind = int(reader.number("I"))
        metadata[key] = _array(reader, key) if kind == _ARRAY else _scalar(reader, key, kind)
    return metadata


def _scalar(reader: _Reader, key: str, kind: int) -> Scalar:
    if kind == _STRING:
        return reader.text(f"the text {key!r:.80}")
    if kind not in _NUMBERS:
        raise WeightError(f"{reader.name}: metadata {key!r:.80}: expected a known type, found {kind}")
    value = reader.number(_NUMBERS[kind])
    return bool(value) if kind == _BOOL else _shortest(value) if kind == 6 else value


def _array(reader: _Reader, key: str) -> tuple[Scalar, ...]:
    kind = int(reader.number("I"))
    if kind != _STRING and kind not in _NUMBERS:
        raise WeightError(f"{reader.name}: metadata {key!r:.80}: expected an array of numbers or texts, found type {kind}")
    width = 8 if kind == _STRING else struct.calcsize(_NUMBERS[kind])
    count = reader.count(f"items of {key!r:.80}", _MAX_ITEMS, width)
    if kind == _STRING:
        return tuple(reader.text(f"the texts {key!r:.80}") for _ in range(count))
    values = struct.unpack(f"<{count}{_NUMBERS[kind]}", reader.take(count * width))
    if kind == _BOOL:
        return tuple(map(bool, values))
    return tuple(map(_shortest, values)) if kind == 6 else values


def _shortest(value: float) -> float:
    """The decimal that was rounded to this fp32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tensor(reader: _Reader) -> tuple[str, int, tuple[int, ...], int]:
    """(name, element type, shape, offset) as the file has them, the shape turned round."""
    name = reader.text("a tensor's name", _MAX_NAME_BYTES)
    num_dims = int(reader.number("I"))
    if not 1 <= num_dims <= _MAX_DIMS:
        raise WeightError(f"{reader.name}: tensor {name!r}: expected 1 to {_MAX_DIMS} dims, found {num_dims}")
    dims = struct.unpack(f"<{num_dims}Q", reader.take(8 * num_dims))
    return name, int(reader.number("I")), tuple(reversed(dims)), int(reader.number("Q"))


def _placed(
    file: str, found: list[tuple[str, int, tuple[int, ...], int]], start: int, size: int, alignment: int
) -> tuple[GgufTensor, ...]:
    """The tensors, by position, each inside the file and apart from the others."""
    tensors: list[GgufTensor] = []
    names: set[str] = set()
    for name, kind, shape, offset in found:
        if kind not in _TYPES:
            raise WeightError(f"{file}: tensor {name!r}: expected a known element type, found number {kind}")
        dtype, block, block_bytes = _TYPES[kind]
        if name in names:
            raise WeightError(f"{file}: tensor {name!r} is stored twice")
        names.add(name)
        if 0 in shape or shape[-1] % block:
            raise WeightError(f"{file}: tensor {name!r}: expected blocks of {block} for {dtype}, found {list(shape)}")
        nbytes = math.prod(shape) // block * block_bytes
        if offset % alignment:
            raise WeightError(f"{file}: tensor {name!r}: expected an offset that is a multiple of {alignment}, found {offset}")
        if start + offset + nbytes > size:
            end = start + offset + nbytes
            raise WeightError(f"{file} is truncated: tensor {name!r} ends at byte {end}, the file at {size}")
        tensors.append(GgufTensor(name, dtype, shape, start + offset, nbytes))
    tensors.sort(key=lambda tensor: tensor.offset)
    for before, after in pairwise(tensors):
        if before.offset + before.nbytes > after.offset:
            raise WeightError(f"{file}: tensor {after.name!r} overlaps {before.name!r}")
    return tuple(tensors)
