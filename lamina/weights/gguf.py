"""The tensors of a GGUF file, in fp32 whatever the file stores, a piece of rows at a time."""

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.base.errors import ConfigError, WeightError
from lamina.weights.gguf_header import QUANTISED, Converted, GgufTensor
from lamina.weights.headers import Stored
from lamina.weights.names import Place

_AS_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PIECE_VALUES = 1 << 22


class GgufFiles:
    """`TensorFiles` of one GGUF file. Values come as they were before the file was written: rows in order, nothing added.

    tensors  as the family names them.   Raises ConfigError if some are quantised and the library that reads them is not there.
    """

    def __init__(self, path: Path, tensors: Iterable[Converted]) -> None:
        self._path = path
        self._tensors: dict[str, Converted] = {}
        for one in tensors:
            if one.name in self._tensors:
                both = f"{self._tensors[one.name].tensor.name!r} and {one.tensor.name!r}"
                raise WeightError(f"tensor {one.name!r} is stored twice in {path.name}: {both}")
            self._tensors[one.name] = one
        dtypes = {one.tensor.dtype for one in self._tensors.values()}
        self._decode = _quantised(path) if dtypes & QUANTISED else None
        self.plain = frozenset(dtypes)

    def tensors(self) -> list[Stored]:
        """All of them, in the file's order."""
        return [Stored(self._path, n, o.tensor.dtype, o.tensor.shape, o.tensor.nbytes) for n, o in self._tensors.items()]

    def read(self, stored: Stored, place: Place) -> Tensor:
        """fp32, its own memory. Raises WeightError if the file became shorter, or heads do not divide the rows."""
        one = self._tensors[stored.name]
        values = self._values(one.tensor)
        if one.pair_heads:
            values = _in_halves(values, one, self._path.name)
        if one.shift:
            values -= one.shift
        if place.index is None:
            return values
        return values[place.index, place.start : place.stop]

    def close(self) -> None:
        """Nothing is held open."""

    def _values(self, tensor: GgufTensor) -> Tensor:
        width = tensor.shape[-1]
        num_rows = math.prod(tensor.shape[:-1])
        row_bytes = tensor.nbytes // num_rows
        values = torch.empty(num_rows, width)
        step = max(1, _PIECE_VALUES // width)
        try:
            with self._path.open("rb") as file:
                file.seek(tensor.offset)
                for row in range(0, num_rows, step):
                    count = min(step, num_rows - row)
                    piece = np.fromfile(file, np.uint8, count * row_bytes)
                    if piece.size != count * row_bytes:
                        raise WeightError(f"tensor {tensor.name!r}: {self._path.name} became shorter while it was read")
                    values[row : row + count] = self._decoded(piece.reshape(count, row_bytes), tensor.dtype)
        except OSError as error:
            raise WeightError(f"tensor {tensor.name!r} cannot be read from {self._path.name}: {error.strerror}") from None
        return values.reshape(tensor.shape)

    def _decoded(self, rows: NDArray[np.uint8], dtype: str) -> Tensor:
        """rows [R, bytes] -> [R, W]."""
        if dtype in _AS_STORED:
            return torch.from_numpy(rows).view(_AS_STORED[dtype])
        assert self._decode is not None
        return torch.from_numpy(self._decode(rows, dtype))


def _in_halves(values: Tensor, one: Converted, file: str) -> Tensor:
    """Rows of a head as first elements of all pairs, then second ones; the file has each pair's two side by side."""
    rows = values.shape[0]
    if rows % (2 * one.pair_heads):
        raise WeightError(f"{file}: tensor {one.tensor.name!r}: expected rows of pairs in {one.pair_heads} heads, found {rows}")
    pairs = values.reshape(one.pair_heads, rows // one.pair_heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(values.shape)


def _quantised(path: Path) -> Callable[[NDArray[np.uint8], str], NDArray[np.float32]]:
    """Rows of blocks of a quantised type -> fp32, by the library of the format's authors."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("model", path.name, "a GGUF file of F32, F16 and BF16; for a quantised one install lamina[gguf]")
    quants = importlib.import_module("gguf.quants")
    types = importlib.import_module("gguf.constants")

    def decode(rows: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
        return _dequantised(quants, types, rows, dtype, path)

    return decode


def _dequantised(quants: ModuleType, types: ModuleType, rows: NDArray[np.uint8], dtype: str, path: Path) -> NDArray[np.float32]:
    try:
        values: NDArray[np.float32] = quants.dequantize(rows, types.GGMLQuantizationType[dtype])
    except (KeyError, NotImplementedError):
        raise ConfigError("model", path.name, f"a GGUF file without {dtype}, which this release of gguf does not read") from None
    return values
