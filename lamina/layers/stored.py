"""Weights as they are stored, and several that read the same rows stacked into few products."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.ops.gemm.stored import BLOCK, Activation, StoredWeight


@dataclass(frozen=True, slots=True)
class Part:
    """A projection before it is stacked: its name, its weight, and the type its results are kept in."""

    name: str
    weight: StoredWeight
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a projection's results are: columns [start, stop) of the results of product `product`."""

    product: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Product:
    """One stacked weight, what its results are kept in, and the names of its parts."""

    weight: StoredWeight
    dtype: torch.dtype
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """Projections of the same rows, stacked where format and result type are the same and the scales of fp8 allow it."""

    products: tuple[Product, ...]
    columns: dict[str, Columns]

    def part(self, results: Sequence[Tensor | None], name: str) -> Tensor:
        """The columns of one projection, a strided view [T, out]."""
        found = self.columns[name]
        whole = results[found.product]
        assert whole is not None
        return whole[:, found.start : found.stop]


def stack(parts: Sequence[Part]) -> Stack:
    """Stacks in the order given. Rows of fp8 weights can follow one another only at multiples of 128, where scales begin."""
    groups: list[list[Part]] = []
    for part in parts:
        fitting = next((group for group in groups if _fits(group[-1], part)), None)
        if fitting is None:
            groups.append([part])
        else:
            fitting.append(part)
    products, columns = [], {}
    for number, group in enumerate(groups):
        start = 0
        for part in group:
            stop = start + part.weight.shape[0]
            columns[part.name] = Columns(number, start, stop)
            start = stop
        products.append(Product(_joined([part.weight for part in group]), group[0].dtype, tuple(part.name for part in group)))
    return Stack(tuple(products), columns)


def _fits(last: Part, part: Part) -> bool:
    is_alike = last.dtype == part.dtype and last.weight.codes.dtype == part.weight.codes.dtype
    return is_alike and (not last.weight.is_fp8 or last.weight.shape[0] % BLOCK == 0)


def _joined(weights: list[StoredWeight]) -> StoredWeight:
    if len(weights) == 1:
        return weights[0]
    codes = torch.cat([weight.codes.view(torch.uint8) if weight.is_fp8 else weight.codes for weight in weights])
    if not weights[0].is_fp8:
        return StoredWeight(codes)
    scales = torch.cat([weight.scales for weight in weights if weight.scales is not None])
    return StoredWeight(codes.view(torch.float8_e4m3fn), scales)


def first_rows(weight: StoredWeight, rows: int) -> StoredWeight:
    """The weight without its rows from `rows` on, a view; `rows` is a multiple of 128 or all of them for fp8."""
    if rows == weight.shape[0]:
        return weight
    scales = weight.scales
    return StoredWeight(weight.codes[:rows], scales[: -(-rows // BLOCK)] if scales is not None else None)


def without_codes(x: Activation) -> Activation:
    """The same rows for products that multiply in the activations' own type."""
    return Activation(x.values)
