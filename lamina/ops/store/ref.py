"""The definition, in plain PyTorch.

A codec lists its fields, taken from `base.formats`, as (name, dtype, elements a row), and turns fp32 [N, width] into one
tensor a field and back. One-byte formats travel as uint8, because moving rows needs no arithmetic.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from lamina.base.formats import (
    FP4_BLOCK,
    FP8_BLOCK,
    LATENT_BLOCK,
    FieldData,
    attention_entry,
    index_key,
    key_value,
    latent,
    vector,
)
from lamina.ops.quantise import (
    dequantise_fp4,
    dequantise_fp8,
    dequantise_fp8_row,
    e8m0_to_fp32,
    hadamard,
    quantise_fp4,
    quantise_fp8,
    quantise_fp8_row,
)

_E4M3_MAX = 448.0


def _flat(fields: tuple[FieldData, ...]) -> tuple[tuple[str, str, int], ...]:
    return tuple((name, dtype, math.prod(shape)) for name, dtype, shape in fields)


class EntryCodec(Protocol):
    """How vectors of one width are stored."""

    @property
    def width(self) -> int:
        """Elements of a vector."""
        ...

    @property
    def fields(self) -> tuple[tuple[str, str, int], ...]:
        """(name, dtype, elements a row) of each field."""
        ...

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """fp32 [N, width] -> one tensor [N, ...] a field."""
        ...

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """One tensor [N, ...] a field -> fp32 [N, width]."""
        ...


@dataclass(frozen=True, slots=True)
class StateCodec:
    """fp32 or bf16 vectors as they are."""

    width: int
    dtype: str = "fp32"

    @property
    def fields(self) -> tuple[tuple[str, str, int], ...]:
        """One field with the row."""
        return _flat(vector(self.dtype, self.width))

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """fp32 [N, width] -> the row in its stored type."""
        return (x if self.dtype == "fp32" else x.to(torch.bfloat16),)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """The stored row -> fp32 [N, width]."""
        return stored[0].float()


@dataclass(frozen=True, slots=True)
class AttentionCodec:
    """fp8: the unrotated dims as e4m3 in blocks of 64 with power-of-two scales, the rotated ones as bf16 (584 B at 448 + 64)."""

    width: int
    rope: int

    @property
    def fields(self) -> tuple[tuple[str, str, int], ...]:
        """nope e4m3, rope bf16, scale e8m0 padded to a multiple of 8."""
        return _flat(attention_entry("fp8", self.width, self.rope))

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """fp32 [N, width] -> codes, rotated dims, scales."""
        nope = self.width - self.rope
        codes, scales = quantise_fp8(x[:, :nope], FP8_BLOCK)
        padded = scales.new_zeros(scales.shape[0], self.fields[2][2])
        padded[:, : scales.shape[1]] = scales
        return codes.view(torch.uint8), x[:, nope:].to(torch.bfloat16), padded

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """Codes, rotated dims, scales -> fp32 [N, width]."""
        codes, rope, scales = stored
        nope = dequantise_fp8(codes.view(torch.float8_e4m3fn), scales[:, : -(-codes.shape[1] // FP8_BLOCK)], FP8_BLOCK)
        return torch.cat([nope, rope.float()], dim=-1)


@dataclass(frozen=True, slots=True)
class IndexCodec:
    """Index keys: fp8 with one fp32 scale a row (132 B at 128), or fp4 with a power-of-two scale every 32 (68 B).

    Keys and queries are multiplied by a Hadamard matrix first, which spreads outliers and leaves exact products unchanged.
    """

    width: int
    format: str

    @property
    def fields(self) -> tuple[tuple[str, str, int], ...]:
        """code and scale."""
        return _flat(index_key(self.format, self.width))

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """fp32 [N, width] -> codes and scales of the Hadamard product."""
        x = hadamard(x)
        if self.format == "fp8":
            codes, scale = quantise_fp8_row(x)
            return codes.view(torch.uint8), scale.unsqueeze(-1)
        return quantise_fp4(x, FP4_BLOCK)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """Codes and scales -> fp32 [N, width], still in the Hadamard basis."""
        codes, scale = stored
        if self.format == "fp8":
            return dequantise_fp8_row(codes.view(torch.float8_e4m3fn), scale.squeeze(-1))
        return dequantise_fp4(codes, scale, FP4_BLOCK)


def attention_codec(cache_format: str, width: int, rope: int) -> EntryCodec:
    """The codec of `cache_format` fp8 | bf16 | fp32 for entries of `width` dims, the last `rope` of them rotated."""
    attention_entry(cache_format, width, rope)  # refuses what cannot be
    return AttentionCodec(width, rope) if cache_format == "fp8" else StateCodec(width, cache_format)


def index_codec(index_format: str, width: int) -> EntryCodec:
    """The codec of `index_format` fp4 | fp8 | bf16 | fp32 for index keys of `width` dims."""
    index_key(index_format, width)  # refuses what cannot be
    return IndexCodec(width, index_format) if index_format in ("fp4", "fp8") else StateCodec(width, index_format)


class KeyValueCodec(Protocol):
    """How keys and values that heads share are stored."""

    @property
    def fields(self) -> tuple[tuple[str, str, int], ...]:
        """(name, dtype, elements a row) of each field."""
        ...

    @property
    def value_dim(self) -> int:
        """Dims of a value."""
        ...

    def keys_values(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """One tensor [..., elements] a field -> fp32 keys [..., K, Dk] and values [..., K, Dv]; views where they are fp32."""
        ...


@dataclass(frozen=True, slots=True)
class HeadsCodec:
    """Keys and values of `heads` heads, each in a field: fp32, bf16, or fp8 (e4m3 as it is, without a scale)."""

    heads: int
    key_dim: int
    value_dim: int
    format: str

    @property
    def width(self) -> int:
        """Elements of a row, keys and values."""
        return self.heads * (self.key_dim + self.value_dim)

    @property
    def fields(self) -> tuple[tuple[str, str, int], ...]:
        """k and v."""
        return _flat(key_value(self.format, self.heads, self.key_dim, self.value_dim))

    def pack(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """fp32 keys [N, K, Dk] and values [N, K, Dv] -> one tensor [N, ...] a field."""
        return tuple(_as_stored(part.flatten(1), self.format) for part in (keys, values))

    def keys_values(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Fields -> keys [..., K, Dk] and values [..., K, Dv]."""
        keys, values = (_from_stored(part, self.format) for part in stored)
        return keys.unflatten(-1, (self.heads, self.key_dim)), values.unflatten(-1, (self.heads, self.value_dim))

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """fp32 [N, width], keys first -> one tensor [N, ...] a field."""
        return tuple(
            _as_stored(part, self.format) for part in x.split([self.heads * self.key_dim, self.heads * self.value_dim], 1)
        )

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """Fields -> fp32 [N, width]."""
        return torch.cat([_from_stored(part, self.format) for part in stored], dim=-1)


@dataclass(frozen=True, slots=True)
class LatentCodec:
    """One row that all heads share: `rank` dims, which are the value, and `rope` rotated ones; both together are the key.

    fp8: the first part as e4m3 with an fp32 scale, a power of two, every 128; the rotated part as bf16.
    """

    rank: int
    rope: int
    format: str

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.rank + self.rope

    @property
    def value_dim(self) -> int:
        """Dims of a value."""
        return self.rank

    @property
    def fields(self) -> tuple[tuple[str, str, int], ...]:
        """The row; in fp8 latent, scale and rope."""
        return _flat(latent(self.format, self.rank, self.rope))

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """fp32 [N, width] -> one tensor [N, ...] a field."""
        if self.format != "fp8":
            return (_as_stored(x, self.format),)
        codes, scales = quantise_fp8(x[:, : self.rank], LATENT_BLOCK)
        return codes.view(torch.uint8), e8m0_to_fp32(scales), x[:, self.rank :].to(torch.bfloat16)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """Fields [..., elements] -> fp32 [..., width]."""
        if self.format != "fp8":
            return stored[0].float()
        codes, scales, rope = stored
        each = scales.repeat_interleave(LATENT_BLOCK, dim=-1)[..., : self.rank]
        return torch.cat([_from_stored(codes, "fp8").mul_(each), rope.float()], dim=-1)

    def keys_values(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Fields -> keys [..., 1, width] and values [..., 1, rank], a part of the keys."""
        rows = self.decode(stored).unsqueeze(-2)
        return rows, rows[..., : self.rank]


def _as_stored(x: Tensor, format: str) -> Tensor:
    if format == "fp8":
        return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return x if format == "fp32" else x.to(torch.bfloat16)


def _from_stored(x: Tensor, format: str) -> Tensor:
    return (x.view(torch.float8_e4m3fn) if format == "fp8" else x).float()


@dataclass(frozen=True, slots=True)
class Place:
    """Where rows are addressed: by the request's blocks, in its slot, or in the blocks of its large windows.

    column  which page of the slot, or of the window's block.   group  number of the large window's group.
    """

    kind: Literal["block", "slot", "window"]
    column: int = 0
    group: int = 0


class Store:
    """The rows of one memory of one layer: a view [pages, rows a page, elements] of the arena for each field."""

    def __init__(
        self, codec: EntryCodec, views: tuple[Tensor, ...], slot_column: int = 0, place: Place | None = None
    ) -> None:  # fmt: skip
        self.codec = codec
        self.views = views
        self.slot_column = slot_column  # which of a slot's pages holds the rows; logs are addressed by block instead
        self.place = place or Place("slot", slot_column)
        self.rows_per_page = views[0].shape[1]
        self.row_bytes = sum(view.shape[2] * view.element_size() for view in views)
        self.bytes_written = 0
        self._lines = _lines(views)

    def write(self, pages: Tensor, rows: Tensor, stored: tuple[Tensor, ...]) -> None:
        """Writes N encoded rows at (pages [N], rows [N])."""
        if self._lines is None:
            for view, values in zip(self.views, stored, strict=True):
                view[pages, rows] = values
        else:
            index = pages * self._lines[1] + rows
            for line, values in zip(self._lines[0], stored, strict=True):
                line.index_copy_(0, index, values)
        self.bytes_written += pages.shape[0] * self.row_bytes

    def read_stored(self, pages: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        """One new tensor [N, ...] a field: the encoded rows at (pages [N], rows [N])."""
        if self._lines is None:
            return tuple(view[pages, rows] for view in self.views)
        index = pages * self._lines[1] + rows
        return tuple(line.index_select(0, index) for line in self._lines[0])

    def read(self, pages: Tensor, rows: Tensor) -> Tensor:
        """fp32 [N, width] at (pages [N], rows [N])."""
        return self.codec.decode(tuple(view[pages, rows] for view in self.views))

    def write_first(self, pages: Tensor, stored: tuple[Tensor, ...]) -> None:
        """Writes N encoded rows, each as the first row of its page: states and hidden vectors have one."""
        for view, values in zip(self.views, stored, strict=True):
            view[:, 0].index_copy_(0, pages, values)
        self.bytes_written += pages.shape[0] * self.row_bytes

    def read_first(self, pages: Tensor) -> Tensor:
        """fp32 [N, width]: the first row of each page."""
        return self.codec.decode(tuple(view[:, 0].index_select(0, pages) for view in self.views))

    def read_logs(self, tables: Tensor, counts: tuple[int, ...], columns: int) -> Tensor:
        """fp32 [R, columns, width]: the first rows of R logs with block tables [R, blocks]; zeros from counts[r] on."""
        blocks = tables[:, : -(-columns // self.rows_per_page)]
        found = tuple(view.index_select(0, blocks.flatten()).flatten(0, 1) for view in self.views)
        rows = self.codec.decode(found).view(blocks.shape[0], -1, self.codec.width)[:, :columns]
        if rows.shape[1] < columns:
            rows = torch.cat([rows, rows.new_zeros(rows.shape[0], columns - rows.shape[1], rows.shape[2])], dim=1)
        for row, count in zip(rows, counts, strict=True):
            row[count:] = 0  # whatever lies there: a block's unused rows, or the padding of the table
        return rows

    def ring_rows(self, field: int, page: int, start: int, stop: int) -> list[Tensor]:
        """Rows of one field at positions [start, stop) of a ring, oldest first, as stored: one or two views."""
        view = self.views[field][page]
        first, count = start % self.rows_per_page, stop - start
        head = min(count, self.rows_per_page - first)
        return [view[first : first + head], view[: count - head]]


def _lines(views: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], int] | None:
    """The rows of all pages of each field one after another, as far apart as a page's rows are, and rows from page to page.

    None if pages are no whole number of rows apart, or not the same number in all fields. One index finds rows faster than two.
    """
    apart = set()
    for view in views:
        whole = (
            view.dim() == 3 and view.stride(2) == 1 and view.stride(1) == view.shape[2] and view.stride(0) % view.shape[2] == 0
        )
        apart.add(view.stride(0) // view.shape[2] if whole and view.device.type == "cpu" else 0)
    if len(apart) != 1 or 0 in apart:
        return None
    rows = next(iter(apart))
    sizes = [((view.shape[0] - 1) * rows + view.shape[1], view.shape[2]) for view in views]
    return tuple(view.as_strided(size, (size[1], 1)) for view, size in zip(views, sizes, strict=True)), rows
