"""Which tensors a model needs, against those that a checkpoint's headers list. No tensor is read; needs no torch.

`weights/loader.py` makes the same judgements when it reads; a test holds the two together.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lamina.base.errors import WeightError
from lamina.weights.gguf_header import QUANTISED
from lamina.weights.headers import Stored
from lamina.weights.names import NameScheme, Place

_PLAIN = ("F32", "BF16", "F16")
_INTEGERS = ("I64", "I32", "I16", "I8", "U8")
_SCALES = ("F8_E8M0", "U8", "F32")
_FP8_BLOCK, _FP4_BLOCK = 128, 32
#: after so many tensors that are not there, the checkpoint is another model's
_MOST_MISSING = 10_000


@dataclass(frozen=True, slots=True)
class Needed:
    """A tensor that a model takes, by its canonical name; integers are not quantised and keep their type."""

    name: str
    shape: tuple[int, ...]
    is_integer: bool = False


@dataclass(frozen=True, slots=True)
class Findings:
    """What is right and wrong with a checkpoint's tensors. Counts are of tensors, scales included.

    num_found       needed and right.   missing, unused  names.   wrong  sentences that name the tensor, expected and found.
    is_complete     False if the search was broken off, because too many were missing: the names are then only the first.
    ignored, ignored_bytes  known, and not used.   loaded_bytes  of the needed ones as fp32 or int64, as they are computed with.
    """

    num_found: int
    missing: tuple[str, ...]
    wrong: tuple[str, ...]
    unused: tuple[str, ...]
    is_complete: bool
    ignored: int
    ignored_bytes: int
    loaded_bytes: int


@dataclass(frozen=True, slots=True)
class _Source:
    """A canonical tensor: the stored one, which part of it, and the shape of that part."""

    stored: Stored
    place: Place
    shape: tuple[int, ...]


@dataclass(slots=True)
class _Search:
    """Looks needed tensors up, one after the other."""

    scheme: NameScheme
    sources: dict[str, _Source] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, place: Place, stored: Stored) -> None:
        shape = stored.shape if place.index is None else (place.stop - place.start, *stored.shape[2:])
        first = self.sources.setdefault(place.name, _Source(stored, place, shape)).stored
        if first is not stored:
            both = " and ".join(f"{tensor.name!r} in {tensor.path.name}" for tensor in (first, stored))
            self.wrong.append(f"tensor {place.name!r} is stored twice: {both}")

    def judge(self, need: Needed) -> None:
        """Marks the tensor and its scales as used, and notes what is wrong with them."""
        source = self.sources.get(need.name)
        if source is None:
            self.missing.append(need.name)
            return
        self.used.add(need.name)
        dtype = source.stored.dtype
        if need.is_integer:
            if source.shape != need.shape or dtype not in _INTEGERS:
                self._note(need.name, f"integers {list(need.shape)}", source)
        elif dtype in ("I8", "U8") and len(need.shape) == 2:
            self._judge_fp4(need, source)
        elif source.shape != need.shape:
            self._note(need.name, f"shape {list(need.shape)}", source)
        elif dtype == "F8_E4M3" and len(need.shape) == 2:
            rows, columns = need.shape
            self._judge_scale(need.name, (-(-rows // _FP8_BLOCK), -(-columns // _FP8_BLOCK)), "F8_E4M3")
        elif dtype not in _PLAIN and dtype not in QUANTISED:
            self._note(need.name, "F32, BF16, F16, or an F8_E4M3 or packed FP4 matrix", source)

    def _judge_fp4(self, need: Needed, source: _Source) -> None:
        rows, columns = need.shape
        if columns % _FP4_BLOCK or source.shape != (rows, columns // 2):
            self._note(need.name, f"packed FP4 {[rows, columns // 2]} for {list(need.shape)}", source)
        self._judge_scale(need.name, (rows, columns // _FP4_BLOCK), "packed FP4")

    def _judge_scale(self, weight: str, shape: tuple[int, ...], kind: str) -> None:
        name = self.scheme.scale_name(weight)
        source = self.sources.get(name)
        if source is None:
            self.wrong.append(f"tensor {weight!r} is stored as {kind}: expected its scales {name!r}, found none")
            return
        self.used.add(name)
        if source.stored.dtype not in _SCALES or source.shape != shape:
            self._note(name, f"scales {list(shape)} in {', '.join(_SCALES)}", source)

    def _note(self, name: str, expected: str, source: _Source) -> None:
        alias = "" if source.stored.name == name else f" (stored as {source.stored.name!r})"
        self.wrong.append(f"tensor {name!r}: expected {expected}, found {source.stored.dtype} {list(source.shape)}{alias}")


def check_tensors(tensors: Sequence[Stored], scheme: NameScheme, needed: Iterable[Needed]) -> Findings:
    """What is missing, wrong and left over among `tensors`, for a model that needs `needed` under the names of `scheme`."""
    search, ignored = _Search(scheme), []
    for stored, name in zip(tensors, scheme.rename_all(tensor.name for tensor in tensors), strict=True):
        if scheme.is_ignored(name):
            ignored.append(stored.nbytes)
            continue
        try:
            for place in scheme.places(name, stored.shape):
                search.add(place, stored)
        except WeightError as error:
            search.wrong.append(str(error))
    loaded_bytes, is_complete = 0, True
    for need in needed:
        search.judge(need)
        loaded_bytes += math.prod(need.shape) * (8 if need.is_integer else 4)
        if len(search.missing) >= _MOST_MISSING:
            is_complete = False
            break
    unused = tuple(name for name in search.sources if name not in search.used) if is_complete else ()
    return Findings(
        num_found=len(search.used), missing=tuple(search.missing), wrong=tuple(search.wrong), unused=unused,
        is_complete=is_complete, ignored=len(ignored), ignored_bytes=sum(ignored), loaded_bytes=loaded_bytes,
    )  # fmt: skip
