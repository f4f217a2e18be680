"""What a checkpoint directory says it holds, checked before a single tensor is read. Nothing unpickles, nothing is trusted."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from lamina.base.errors import ConfigError, WeightError
from lamina.base.sizes import MiB

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES, _MAX_INDEX_BYTES, _MAX_CONFIG_BYTES = 100 * MiB, 256 * MiB, 1 * MiB
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
#: bits per element of every element type of the safetensors format.
_BITS = {
    name: bits
    for bits, names in (
        (4, "F4"),
        (6, "F6_E2M3 F6_E3M2"),
        (8, "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ"),
        (16, "U16 I16 F16 BF16"),
        (32, "U32 I32 F32"),
        (64, "U64 I64 F64 C64"),
    )
    for name in names.split()
}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file: its shard, name, element type as safetensors spells it, shape and bytes."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_config(directory: Path, name: str = "config.json") -> dict[str, object]:
    """The object in the JSON file `name` of a checkpoint.

    Raises ConfigError if it is missing, larger than 1 MiB, not UTF-8 JSON or not an object.
    """
    path = directory / name
    if not path.is_file():
        raise ConfigError("model", str(directory), f"a directory that holds {name}")
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ConfigError(name, f"{path.stat().st_size} bytes", f"at most {_MAX_CONFIG_BYTES} bytes")
    try:
        config = _parse(path.read_bytes())
    except ValueError as error:
        raise ConfigError(name, str(path), f"a JSON object ({error})") from None
    return config


def list_stored(directory: Path) -> list[Stored]:
    """Every tensor of the checkpoint in `directory`, by shard and position: model.safetensors, or the shards its index names.

    Raises WeightError, in one line, for anything missing, truncated, overlapping, contradictory, pickled or elsewhere.
    """
    single, index = directory / SINGLE, directory / INDEX
    if index.is_file():
        shards = _read_index(index)
        if single.is_file() and SINGLE not in shards:
            raise WeightError(f"{directory} holds both {SINGLE} and {INDEX}, which does not name it: keep one")
        return _read_shards(directory, shards)
    if single.is_file():
        others = sorted(path.name for path in directory.glob("*.safetensors") if path.name != SINGLE)
        if others:
            raise WeightError(
                f"{directory} holds {SINGLE} and {', '.join(others[:3])}, which nothing names: remove what is not used"
            )
        return read_header(single)
    pickled = sorted(path.name for path in directory.glob("*") if path.suffix in _PICKLED)
    if pickled:
        raise WeightError(f"{directory} holds only pickled weights ({pickled[0]}), never read: convert them to safetensors")
    raise WeightError(f"{directory} holds neither {SINGLE} nor {INDEX}")


def read_header(path: Path) -> list[Stored]:
    """The tensors of one safetensors file, by position. WeightError unless its header accounts for exactly the bytes it has."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise WeightError(f"{path.name}: expected a header within its {size} bytes, found one of {length} bytes")
        text = file.read(length)
    try:
        header = _parse(text)
    except ValueError as error:
        raise WeightError(f"{path.name}: expected a JSON object as header, found none ({error})") from None
    header.pop("__metadata__", None)
    spans = sorted((_entry(path, name, entry) for name, entry in header.items()), key=lambda span: (span[0], span[1]))
    position = 0
    for begin, end, stored in spans:
        if begin != position:
            what = "overlaps the tensor before it" if begin < position else f"leaves a hole of {begin - position} bytes before it"
            raise WeightError(f"{path.name}: tensor {stored.name!r} at {begin}..{end} {what}")
        position = end
    if 8 + length + position != size:
        what = "truncated" if 8 + length + position > size else "longer than its header says"
        raise WeightError(f"{path.name} is {what}: expected {8 + length + position} bytes, found {size}")
    return [stored for _, _, stored in spans]


def _parse(text: bytes) -> dict[str, object]:
    """A JSON object without repeated keys; ValueError (one line) for anything else."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if isinstance(value, dict):
        return value
    raise ValueError(f"found a {type(value).__name__}")


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value: dict[str, object] = {}
    for name, item in pairs:
        if name in value:
            raise ValueError(f"key {name!r} is repeated")
        value[name] = item
    return value


def _entry(path: Path, name: str, entry: object) -> tuple[int, int, Stored]:
    """(begin, end, tensor) of one header entry, its own numbers checked against each other."""
    if not isinstance(entry, dict):
        raise WeightError(f"{path.name}: tensor {name!r}: expected an object in the header, found {type(entry).__name__}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise WeightError(f"{path.name}: tensor {name!r}: expected a known dtype, found {dtype!r}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        found = f"{shape!r:.100} and {offsets!r:.100}"
        raise WeightError(f"{path.name}: tensor {name!r}: expected a shape and two offsets, found {found}")
    bits, (begin, end) = math.prod(shape) * _BITS[dtype], offsets
    if bits != 8 * (end - begin):
        expected = f"{(bits + 7) // 8} bytes for {dtype} {shape!r:.100}"
        raise WeightError(f"{path.name}: tensor {name!r}: expected {expected}, found {end - begin}")
    return begin, end, Stored(path, name, dtype, tuple(shape), end - begin)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _read_index(path: Path) -> dict[str, set[str]]:
    """File name -> names of its tensors, as the index tells it."""
    if path.stat().st_size > _MAX_INDEX_BYTES:
        raise WeightError(f"{path.name}: expected at most {_MAX_INDEX_BYTES} bytes, found {path.stat().st_size}")
    try:
        weight_map = _parse(path.read_bytes()).get("weight_map")
    except ValueError as error:
        raise WeightError(f"{path.name}: expected a JSON object, found none ({error})") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError(f"{path.name}: expected an object 'weight_map', found {type(weight_map).__name__}")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or file.startswith(".") or set(file) & set("/\\:\0"):
            raise WeightError(f"{path.name}: tensor {name!r}: expected a plain *.safetensors file name, found {file!r}")
        shards.setdefault(file, set()).add(name)
    return shards


def _read_shards(directory: Path, shards: dict[str, set[str]]) -> list[Stored]:
    found: list[Stored] = []
    for file in sorted(shards):
        if not (directory / file).is_file():
            raise WeightError(f"shard {file} is missing from {directory}: {INDEX} places {len(shards[file])} tensors in it")
        tensors = read_header(directory / file)
        names = {stored.name for stored in tensors}
        if names != shards[file]:
            name = min(names ^ shards[file])
            here, there = (INDEX, file) if name in shards[file] else (file, INDEX)
            raise WeightError(f"tensor {name!r} of {file}: {here} has it, {there} does not")
        found += tensors
    return found
