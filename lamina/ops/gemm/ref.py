"""Products in fp32. On CPU the library picks other kernels for few rows than for many, with other bits:
a multiple of 8 rows gives the same bits for every count (measured; `unstable_shapes` checks it at start-up)."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE = 8
MIN_COLUMNS = 16


def padded_rows(num_rows: int, multiple: int = ROW_MULTIPLE) -> int:
    """The next multiple, at least one."""
    return max(1, -(-num_rows // multiple)) * multiple


def prepared(weight: Tensor) -> Tensor:
    """The same weight [..., out, in], stored with `out` fastest and, below 16, with zero rows behind the view.

    Few rows then read it in fewer passes (measured: 1.3 x), and no product has fewer than 16 columns: for some such
    counts (5, 6, 7, 9, 10) the library's bits depend on the number of rows whatever it is a multiple of.
    """
    columns = weight.transpose(-1, -2)  # [..., in, out]
    spare = max(0, MIN_COLUMNS - columns.shape[-1])
    stored = F.pad(columns, (0, spare)) if spare else columns.contiguous()
    return stored.transpose(-1, -2)[..., : weight.shape[-2], :]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] any float, weight [out, in] fp32 -> [..., out] fp32. Rows are the caller's to pad."""
    x = x if x.dtype == torch.float32 else x.float()
    out, width = weight.shape
    if weight.stride(0) == 1 and weight.stride(1) > out:  # prepared, with zero rows behind the view
        whole = weight.as_strided((weight.stride(1), width), weight.stride())
        return F.linear(x, whole)[..., :out]
    return F.linear(x, weight)


def unstable_shapes(shapes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The (in, out) shapes for which a row's bits depend on the number of rows, on this machine and thread count."""
    generator = torch.Generator().manual_seed(0)
    bad = []
    for width_in, width_out in sorted(set(shapes)):
        weight = prepared(torch.randn(width_out, width_in, generator=generator))
        x = torch.randn(64, width_in, generator=generator)
        full = linear(x, weight)
        parts = [(0, 8), (8, 24), (5, 37), (0, 64)]
        if not all(torch.equal(linear(x[a:b].clone(), weight), full[a:b]) for a, b in parts):
            bad.append((width_in, width_out))
    return bad
