"""Products in fp32. On CPU the library picks other kernels for few rows than for many, with other bits: some multiple of
rows (4 where it was measured) gives the same bits for every count. Start-up finds the smallest that does on the machine."""

from collections.abc import Callable, Iterable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.ops import native
from lamina.ops.gemm.native import NativeWeight
from lamina.ops.gemm.stored import BLOCK, Activation, StoredWeight
from lamina.ops.quantise import dequantise_fp8_weight, e8m0_to_fp32, quantise_fp8

#: a matrix [out, in] as `linear` reads it
Weight = Tensor | NativeWeight
#: several, [E, out, in]
Weights = Tensor | tuple[NativeWeight, ...]

ROW_MULTIPLES = (4, 8, 16, 32)
MIN_COLUMNS = 16


def padded_rows(num_rows: int, multiple: int) -> int:
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


@cache
def _has_packed_products() -> bool:
    """Whether this torch has oneDNN, and the two private operations by which it multiplies with a packed weight."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        _ = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    except AttributeError:
        return False
    return True


def packed(weight: Tensor) -> Weight:
    """The same weight [out, in] as `linear` alone reads it fastest: as the C kernels want it; without them in oneDNN's order
    (1.15 x at 1,024 rows, 1.5 x at 8), and where torch comes without that `prepared`. Bits do not depend on the number of rows.
    """
    if weight.device.type == "cpu" and native.library() is not None:
        return NativeWeight(weight)
    if weight.device.type != "cpu" or not _has_packed_products():
        return prepared(weight)
    stored: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous(), None)
    return stored


def packed_each(weights: Tensor) -> Weights:
    """Weights [E, out, in], each as `linear` reads it fastest; one at a time, so that little more than they is held."""
    if weights.device.type == "cpu" and native.library() is not None:
        return tuple(NativeWeight(weight) for weight in weights)
    return prepared(weights)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [..., in] any float, weight [out, in] fp32 -> [..., out] fp32. Rows are the caller's to pad."""
    x = x if x.dtype == torch.float32 else x.float()
    if isinstance(weight, NativeWeight):
        return weight.times(x)
    if weight.is_mkldnn:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return found
    out, width = weight.shape
    if weight.stride(0) == 1 and weight.stride(1) > out:  # prepared, with zero rows behind the view
        whole = weight.as_strided((weight.stride(1), width), weight.stride())
        return F.linear(x, whole)[..., :out]
    return F.linear(x, weight)


def batched_linear(x: Tensor, columns: Tensor) -> Tensor:
    """x [B, n, in], columns [B, in, out] fp32 -> [B, n, out]; below 16 columns with zeros beside them, as `prepared` says."""
    out = columns.shape[2]
    if out >= MIN_COLUMNS:
        return torch.bmm(x, columns)
    return torch.bmm(x, F.pad(columns, (0, MIN_COLUMNS - out)))[..., :out]


def stable_row_multiple(shapes: Iterable[tuple[int, int]], batched_shapes: Iterable[tuple[int, int]] = ()) -> int | None:
    """The smallest multiple of rows with which no row's bits depend on their number.

    shapes  (in, out) of the products with stored weights.   batched_shapes  (in, out) of batched products (attention).
    None if there is none on this machine and thread count.
    """
    wanted = [(shape, False) for shape in sorted(set(shapes))] + [(shape, True) for shape in sorted(set(batched_shapes))]
    return next((m for m in ROW_MULTIPLES if not any(is_unstable(*shape, m, batched) for shape, batched in wanted)), None)


def is_unstable(width_in: int, width_out: int, multiple: int, is_batched: bool = False) -> bool:
    """Whether some count of rows that is a multiple of `multiple` gives a row other bits than 128 rows do."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width_out, width_in, generator=generator)
    x = torch.randn(128, width_in, generator=generator)
    if is_batched:
        columns = weight.transpose(0, 1).contiguous()
        return _depends(lambda x, batch: torch.bmm(x.expand(batch, -1, -1), columns.expand(batch, -1, -1))[-1], x, multiple)
    return any(_depends(_product_with(order(weight)), x, multiple) for order in (prepared, packed))


def _product_with(stored: Weight) -> Callable[[Tensor, int], Tensor]:
    return lambda x, _: linear(x, stored)


def _depends(product: Callable[[Tensor, int], Tensor], x: Tensor, multiple: int) -> bool:
    """Whether rows of x [128, in] get other bits in products of a few multiples of `multiple` rows than in one of all."""
    full = product(x, 3)
    for times in (1, 2, 3, 5, 9):
        count = min(times * multiple, 121 // multiple * multiple)
        if not torch.equal(product(x[7 : 7 + count].clone(), 1), full[7 : 7 + count]):
            return True
    return False


def linear_stored(x: Activation, weight: StoredWeight, exact: torch.dtype = torch.float32) -> Tensor:
    """x [T, in] times weight [out, in] -> [T, out] in `exact`: what the operands mean, multiplied.

    An fp8 weight is multiplied by x's codes if it has them, else by its values; other weights always by its values.
    """
    return grouped_linear(x, weight, 1, exact)


def grouped_linear(x: Activation, weights: StoredWeight, groups: int, exact: torch.dtype = torch.float32) -> Tensor:
    """x [T, G * K], weights [G * N, K] -> [T, G * N]: columns g * K .. of x times rows g * N .. of the weights."""
    values, matrix = x.values.to(exact), weights.codes.to(exact)
    if weights.scales is not None:
        matrix = dequantise_fp8_weight(weights.codes, weights.scales, BLOCK).to(exact)
        if x.codes is not None and x.scales is not None:
            values = x.codes.to(exact) * x.scales.to(exact).repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]
    own = zip(values.chunk(groups, dim=1), matrix.chunk(groups))
    return torch.cat([F.linear(columns, rows) for columns, rows in own], dim=1)


def quantise_rows(values: Tensor) -> Activation:
    """values [T, K] with codes and a power of two for every 128 columns."""
    codes, scales = quantise_fp8(values, BLOCK)
    return Activation(values, codes, e8m0_to_fp32(scales))


def swiglu_quantise(h: Tensor, limit: float, dtype: torch.dtype, is_fp8: bool) -> Activation:
    """silu(gate) * up of rows h [T, 2 * I] = [gate | up] in fp32, rounded to `dtype`, with codes if is_fp8; limit 0 = none."""
    gate, up = h.float().chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    values = (gate / torch.exp(-gate).add_(1) * up).to(dtype)
    return quantise_rows(values) if is_fp8 else Activation(values)
