"""Tensors by canonical name out of a checkpoint directory, each exactly once: in fp32 whatever the files store, or as stored."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lamina.base.errors import WeightError
from lamina.ops.quantise import dequantise_fp4_weight, dequantise_fp8_weight, e8m0_to_fp32
from lamina.weights.headers import Stored, list_stored, read_config
from lamina.weights.names import NameScheme, Place

__all__ = ["Checkpoint", "Ignored", "StoredTensor", "TensorSource", "read_config"]

_PLAIN = ("F32", "BF16", "F16")
_INTEGERS = ("I64", "I32", "I16", "I8", "U8")
_SCALES = ("F8_E8M0", "U8", "F32")
_FP8_BLOCK, _FP4_BLOCK = 128, 32


@dataclass(frozen=True, slots=True)
class Ignored:
    """Stored tensors that the name scheme knows and the model does not use."""

    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in its stored format.

    kind    plain: bf16 or fp32 values.   fp8: float8_e4m3fn [o, i], fp32 scales [ceil(o/128), ceil(i/128)], multipliers.
            fp4: packed e2m1 u8 [o, i/2], low nibble = even column, e8m0 scales u8 [o, i/32].
    """

    kind: Literal["plain", "fp8", "fp4"]
    codes: Tensor
    scales: Tensor | None = None

    def to(self, device: torch.device) -> "StoredTensor":
        """The same on another device."""
        return StoredTensor(self.kind, self.codes.to(device), self.scales.to(device) if self.scales is not None else None)


class TensorSource(Protocol):
    """What a model takes its weights from; each tensor once."""

    def has(self, name: str) -> bool:
        """Whether there is such a tensor, taken or not."""
        ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """In fp32."""
        ...

    def take_int(self, name: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        """As int64."""
        ...

    def take_stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """As stored."""
        ...

    def finish(self) -> None:
        """All were taken."""
        ...


@dataclass(frozen=True, slots=True)
class _Source:
    """A canonical tensor: the stored one, which part of it, and the shape of that part."""

    stored: Stored
    place: Place
    shape: tuple[int, ...]


class TensorFiles(Protocol):
    """The files that a checkpoint's tensors lie in."""

    @property
    def plain(self) -> frozenset[str]:
        """Element types that `read` gives as floating-point values in the stored shape."""
        ...

    def tensors(self) -> list[Stored]:
        """All of them, from headers alone."""
        ...

    def read(self, stored: Stored, place: Place) -> Tensor:
        """The stored elements of `place`, possibly a view of the mapped file: not to be written or kept."""
        ...

    def close(self) -> None:
        """Lets go of the files."""
        ...


class SafetensorsFiles:
    """`TensorFiles` of a directory."""

    plain = frozenset(_PLAIN)

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shards: dict[Path, safe_open] = {}

    def tensors(self) -> list[Stored]:
        """All of them; see `headers.list_stored`."""
        return list_stored(self._directory)

    def read(self, stored: Stored, place: Place) -> Tensor:
        """The elements as they are stored."""
        try:
            if stored.path not in self._shards:
                self._shards[stored.path] = safe_open(stored.path, framework="pt", device="cpu")
            if place.index is None:
                whole: Tensor = self._shards[stored.path].get_tensor(stored.name)
                return whole
            part: Tensor = self._shards[stored.path].get_slice(stored.name)[
                place.index : place.index + 1, place.start : place.stop
            ]
            return part.squeeze(0)
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())
            raise WeightError(f"tensor {stored.name!r} cannot be read from {stored.path.name}: {reason}") from None

    def close(self) -> None:
        """Unmaps them."""
        self._shards.clear()


class Checkpoint:
    """The tensors of `directory` under the canonical names of `scheme`, read one at a time.

    Opening reads headers only. `on_tensor(done, total)` is called after each tensor, scales included, that is not ignored.
    files  where they lie: by default the safetensors of `directory`.
    Raises WeightError, in one line, for files that are missing, damaged, pickled or name a tensor twice.
    """

    def __init__(
        self, directory: Path, scheme: NameScheme, on_tensor: Callable[[int, int], None] | None = None,
        files: TensorFiles | None = None,
    ) -> None:  # fmt: skip
        self._directory = directory
        self._files = SafetensorsFiles(directory) if files is None else files
        self._scheme = scheme
        self._on_tensor = on_tensor
        self._sources: dict[str, _Source] = {}
        self._used: set[str] = set()
        ignored: list[int] = []
        tensors = self._files.tensors()
        for stored, name in zip(tensors, scheme.rename_all(tensor.name for tensor in tensors), strict=True):
            if scheme.is_ignored(name):
                ignored.append(stored.nbytes)
                continue
            for place in scheme.places(name, stored.shape):
                self._add(place, stored)
        self.ignored = Ignored(len(ignored), sum(ignored))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the canonical tensor `name`, taken or not; ignored ones it does not."""
        return name in self._sources

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name` as fp32 `shape`, its own memory, finite; the tensor and its scales count as used.

        Stored as F32, BF16 or F16; or, with shape [o, i], as e4m3 with a scale per 128x128, or as packed e2m1, I8 or U8 [o, i/2],
        with a scale per 32.
        Raises WeightError naming the tensor, what was expected and what was found; also if it was taken before.
        """
        source = self._claim(name)
        stored = source.stored
        if stored.dtype in ("I8", "U8") and len(shape) == 2:
            values = self._take_fp4(name, source, shape)
        elif source.shape != shape:
            raise _unexpected(name, f"shape {list(shape)}", source)
        elif stored.dtype == "F8_E4M3" and len(shape) == 2:
            expected = (-(-shape[0] // _FP8_BLOCK), -(-shape[1] // _FP8_BLOCK))
            values = dequantise_fp8_weight(self._read(source), self._take_scale(name, expected, "F8_E4M3"), _FP8_BLOCK)
        elif stored.dtype in self._files.plain:
            values = self._read(source).to(torch.float32, copy=True)
        else:
            raise _unexpected(name, "F32, BF16, F16, or an F8_E4M3 or packed FP4 matrix", source)
        _check_finite(name, values)
        self._report()
        return values

    def take_stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor `name` of logical `shape` in the format it is stored in, on the CPU; it may be a view of the mapped file.

        F16 comes as fp32. Raises WeightError as `take`: codes and scales are checked to be finite.
        """
        source = self._claim(name)
        stored = source.stored
        if stored.dtype in ("I8", "U8") and len(shape) == 2:
            packed, scales = self._fp4_parts(name, source, shape)
            taken = StoredTensor("fp4", packed, _as_powers(name, scales))
        elif source.shape != shape:
            raise _unexpected(name, f"shape {list(shape)}", source)
        elif stored.dtype == "F8_E4M3" and len(shape) == 2:
            expected = (-(-shape[0] // _FP8_BLOCK), -(-shape[1] // _FP8_BLOCK))
            scales = self._take_scale(name, expected, "F8_E4M3")
            codes = self._read(source)
            if bool(((codes.view(torch.uint8) & 127) == 127).any()):
                raise WeightError(f"tensor {name!r}: expected finite values, found an infinity or a NaN")
            taken = StoredTensor("fp8", codes, scales if scales.dtype == torch.float32 else e8m0_to_fp32(scales))
            _check_finite(name, taken.scales)
        elif stored.dtype in self._files.plain:
            values = self._read(source)
            taken = StoredTensor("plain", values.float() if stored.dtype == "F16" else values)
            _check_finite(name, values)
        else:
            raise _unexpected(name, "F32, BF16, F16, or an F8_E4M3 or packed FP4 matrix", source)
        self._report()
        return taken

    def take_int(self, name: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        """The integer tensor `name` as int64 `shape`, every value in low <= value < high. Raises WeightError as `take`."""
        source = self._claim(name)
        if source.shape != shape or source.stored.dtype not in _INTEGERS:
            raise _unexpected(name, f"integers {list(shape)}", source)
        values = self._read(source).to(torch.int64, copy=True)
        if values.numel():
            smallest, largest = (int(bound) for bound in torch.aminmax(values))
            if smallest < low or largest >= high:
                found = smallest if smallest < low else largest
                raise WeightError(f"tensor {name!r}: expected values from {low} to {high - 1}, found {found}")
        self._report()
        return values

    def finish(self) -> None:
        """Closes the files. WeightError, with the count and up to five names, if a tensor that is not ignored was never taken."""
        self._files.close()
        unused = [name for name in self._sources if name not in self._used]
        if unused:
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            plural = "tensors are" if len(unused) > 1 else "tensor is"
            raise WeightError(f"{len(unused)} {plural} not used by this model: {', '.join(map(repr, unused[:5]))}{more}")

    def _add(self, place: Place, stored: Stored) -> None:
        shape = stored.shape if place.index is None else (place.stop - place.start, *stored.shape[2:])
        first = self._sources.setdefault(place.name, _Source(stored, place, shape))
        if first.stored is not stored or first.place is not place:
            both = " and ".join(f"{tensor.name!r} in {tensor.path.name}" for tensor in (first.stored, stored))
            raise WeightError(f"tensor {place.name!r} is stored twice: {both}")

    def _claim(self, name: str) -> _Source:
        if name not in self._sources:
            raise WeightError(f"tensor {name!r} is missing from {self._directory}")
        if name in self._used:
            raise WeightError(f"tensor {name!r} was taken twice")
        self._used.add(name)
        return self._sources[name]

    def _take_fp4(self, name: str, source: _Source, shape: tuple[int, ...]) -> Tensor:
        packed, scale = self._fp4_parts(name, source, shape)
        if scale.dtype != torch.float32:
            return dequantise_fp4_weight(packed, scale, _FP4_BLOCK)
        ones = torch.full(scale.shape, 127, dtype=torch.uint8)
        return dequantise_fp4_weight(packed, ones, _FP4_BLOCK) * scale.repeat_interleave(_FP4_BLOCK, dim=1)

    def _fp4_parts(self, name: str, source: _Source, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Packed codes u8 [rows, columns/2], stored so or as [rows, columns/32, 16], and their scales, fp32 or e8m0 as u8."""
        rows, columns = shape
        blocks = (rows, columns // _FP4_BLOCK, _FP4_BLOCK // 2)
        if columns % _FP4_BLOCK or source.shape not in ((rows, columns // 2), blocks):
            raise _unexpected(name, f"packed FP4 {[rows, columns // 2]} for {list(shape)}", source)
        scale = self._take_scale(name, (rows, columns // _FP4_BLOCK), "packed FP4")
        return self._read(source).view(torch.uint8).reshape(rows, columns // 2), scale

    def _take_scale(self, weight: str, shape: tuple[int, ...], kind: str) -> Tensor:
        """The scales of `weight`: fp32, or e8m0 as u8."""
        name = self._scheme.scale_name(weight)
        if name not in self._sources:
            raise WeightError(f"tensor {weight!r} is stored as {kind}: expected its scales {name!r}, found none")
        source = self._claim(name)
        if source.stored.dtype not in _SCALES or source.shape != shape:
            raise _unexpected(name, f"scales {list(shape)} in {', '.join(_SCALES)}", source)
        scale = self._read(source)
        if scale.dtype == torch.float32:
            return scale
        scale = scale.view(torch.uint8)
        if (scale == 255).any():
            raise WeightError(f"tensor {name!r}: expected finite scales, found 255 (NaN)")
        return scale

    def _read(self, source: _Source) -> Tensor:
        """The stored elements, possibly a view of the mapped file: not to be written or kept."""
        return self._files.read(source.stored, source.place)

    def _report(self) -> None:
        if self._on_tensor is not None:
            self._on_tensor(len(self._used), len(self._sources))


def _as_powers(name: str, scales: Tensor) -> Tensor:
    """fp32 scales as e8m0 bytes; those that are bytes already, unchanged."""
    if scales.dtype != torch.float32:
        return scales
    _check_finite(name, scales)
    bits = scales.view(torch.int32)
    if bool(((bits & 0x7FFFFF) != 0).any()) or bool((bits <= 0).any()):
        raise WeightError(f"tensor {name!r}: expected FP4 scales that are powers of two, found others")
    return (bits >> 23).to(torch.uint8)


def _check_finite(name: str, values: Tensor | None) -> None:
    if values is not None and values.numel() and not all(torch.isfinite(bound) for bound in torch.aminmax(values)):
        raise WeightError(f"tensor {name!r}: expected finite values, found an infinity or a NaN")


def _unexpected(name: str, expected: str, source: _Source) -> WeightError:
    """The error for a tensor that is not what was asked for; says how the file spells it, if otherwise than the model."""
    alias = "" if source.stored.name == name else f" (stored as {source.stored.name!r})"
    return WeightError(f"tensor {name!r}: expected {expected}, found {source.stored.dtype} {list(source.shape)}{alias}")
