"""The definition of the number formats in plain PyTorch: comparisons, shifts and products by powers of two, exact anywhere."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

_AMAX_FLOOR_FP8 = 1e-4
_AMAX_FLOOR_FP4 = 6 * 2.0**-126
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e8m0_to_fp32(scales: Tensor) -> Tensor:
    """The values 2^(b-127) of e8m0 bytes, NaN for 255: u8 or float8_e8m0fnu, any shape -> fp32. ValueError for another dtype."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    if scales.dtype != torch.float8_e8m0fnu:
        raise ValueError(f"e8m0 scales are uint8 or float8_e8m0fnu, not {scales.dtype}")
    return scales.to(torch.float32)


def quantise_fp8(x: Tensor, block: int = 64) -> tuple[Tensor, Tensor]:
    """e4m3 codes and one power-of-two scale per `block` values of the last dim.

    x        [..., n] floating point, n >= 1; the last block may be shorter.
    Returns  codes float8_e4m3fn [..., n], scales u8 e8m0 [..., ceil(n/block)].
    Raises   ValueError if n or block is below 1 or x is not floating point.
    Source   reference section 9.1. amax 448 -> byte 127, 449 -> 128, 0 -> 105.
    """
    blocks, n = _blocks(x, block)  # [..., B, block]
    byte = _scale_byte(blocks, _AMAX_FLOOR_FP8, limit_exponent=8, limit_fraction=0x600000)  # 448 = 1.75 * 2^8
    codes = _to_e4m3(blocks * _reciprocal(byte).unsqueeze(-1)).flatten(-2)[..., :n]
    return codes.contiguous(), byte.to(torch.uint8)


def dequantise_fp8(codes: Tensor, scales: Tensor, block: int = 64) -> Tensor:
    """fp32 [..., n] from e4m3 codes (float8_e4m3fn or their u8 bytes) [..., n] and e8m0 scales [..., ceil(n/block)].

    Raises ValueError if they do not fit together.
    """
    return _scaled(_e4m3_to_fp32(codes), e8m0_to_fp32(scales), block)


def quantise_fp8_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes and one fp32 power-of-two scale for the whole last dim.

    x        [..., n] floating point, n >= 1.
    Returns  codes float8_e4m3fn [..., n], scale fp32 [...]; NaN where the row holds an infinity or a NaN.
    Raises   ValueError as quantise_fp8.
    Source   reference section 9.2.
    """
    blocks, _ = _blocks(x, max(x.shape[-1], 1) if x.dim() else 1)
    byte = _scale_byte(blocks, _AMAX_FLOOR_FP8, limit_exponent=8, limit_fraction=0x600000)
    codes = _to_e4m3(blocks * _reciprocal(byte).unsqueeze(-1)).squeeze(-2)
    return codes, e8m0_to_fp32(byte.to(torch.uint8)).squeeze(-1)


def dequantise_fp8_row(codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., n] from e4m3 codes (or their u8 bytes) [..., n] and fp32 scale [...]. Raises ValueError if they do not fit."""
    if scale.dtype != torch.float32 or scale.shape != codes.shape[:-1]:
        expected = list(codes.shape[:-1])
        raise ValueError(f"codes {list(codes.shape)} need fp32 scales {expected}, not {scale.dtype} {list(scale.shape)}")
    return _e4m3_to_fp32(codes).mul_(scale.unsqueeze(-1))


def quantise_fp4(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """Packed e2m1 codes and one power-of-two scale per `block` values of the last dim.

    x        [..., n] floating point, n even and >= 2; the last block may be shorter.
    Returns  packed u8 [..., n/2], low nibble = even index, bit 3 = sign; scales u8 e8m0 [..., ceil(n/block)].
    Raises   ValueError if n is odd or 0, block is below 1 or x is not floating point.
    Source   reference section 9.2. Ties: 0.25->0, 0.75->1, 1.25->1, 1.75->2, 2.5->2, 3.5->4, 5->4.
    """
    blocks, n = _blocks(x, block)
    if n % 2:
        raise ValueError(f"fp4 packs two values a byte: the last dim must be even, not {n}")
    byte = _scale_byte(blocks, _AMAX_FLOOR_FP4, limit_exponent=2, limit_fraction=0x400000)  # 6 = 1.5 * 2^2
    scaled = torch.nan_to_num(blocks * _reciprocal(byte).unsqueeze(-1), nan=0.0).flatten(-2)[..., :n]
    codes = _to_e2m1(scaled)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8), byte.to(torch.uint8)


def dequantise_fp4(packed: Tensor, scales: Tensor, block: int = 32) -> Tensor:
    """fp32 [..., n] from packed e2m1 (u8 or i8) [..., n/2] and e8m0 scales [..., ceil(n/block)]; else ValueError."""
    if packed.dtype not in (torch.uint8, torch.int8):
        raise ValueError(f"packed fp4 is uint8 or int8, not {packed.dtype}")
    index = packed.view(torch.uint8).to(torch.int32).flatten()
    pairs = _fp4_pairs(packed.device).index_select(0, index).view(packed.shape)  # two fp32 in each int64
    return _scaled(pairs.view(torch.float32), e8m0_to_fp32(scales), block)


def quantise_fp8_weight(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """e4m3 codes [o, i] and u8 e8m0 scales [ceil(o/block), ceil(i/block)], one per square, of a floating point matrix [o, i].

    Edge squares are partial. Raises ValueError if `weight` is no matrix or is empty. Source: reference section 8.3.
    """
    rows, columns = _matrix(weight)
    padded = F.pad(weight.to(torch.float32), (0, -columns % block, 0, -rows % block))
    squares = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block)).transpose(1, 2)  # [O, I, block, block]
    byte = _scale_byte(squares.flatten(-2), _AMAX_FLOOR_FP8, limit_exponent=8, limit_fraction=0x600000)  # [O, I]
    codes = _to_e4m3(squares * _reciprocal(byte)[..., None, None])
    return codes.transpose(1, 2).flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), byte.to(torch.uint8)


def dequantise_fp8_weight(weight: Tensor, scale: Tensor, block: int = 128) -> Tensor:
    """fp32 [o, i] = e4m3(weight) * scale[o // block, i // block].

    weight   float8_e4m3fn (or its u8 bytes) [o, i].
    scale    e8m0 (float8_e8m0fnu or u8) or fp32, [ceil(o/block), ceil(i/block)]; a multiplier, whatever the file calls it.
    Raises   ValueError if the shapes do not belong together.
    Source   reference section 8.3.
    """
    rows, columns = _matrix(weight)
    expected = (-(-rows // block), -(-columns // block))
    if tuple(scale.shape) != expected:
        raise ValueError(f"a weight [{rows}, {columns}] needs scales {list(expected)}, not {list(scale.shape)}")
    values = scale if scale.dtype == torch.float32 else e8m0_to_fp32(scale)
    by_row = values.repeat_interleave(block, dim=0)[:rows]  # [o, I]
    return _e4m3_to_fp32(weight).mul_(by_row.repeat_interleave(block, dim=1)[:, :columns])


def quantise_fp4_weight(weight: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """Packed u8 [o, i/2] and u8 e8m0 scales [o, i/block] of a floating point matrix [o, i]; ValueError unless block divides i."""
    rows, columns = _matrix(weight)
    if columns % block:
        raise ValueError(f"fp4 weights need a width divisible by {block}, not [{rows}, {columns}]")
    return quantise_fp4(weight, block)


def dequantise_fp4_weight(packed: Tensor, scale: Tensor, block: int = 32) -> Tensor:
    """fp32 [o, i] = e2m1(nibble) * scale[o, i // block].

    packed   i8 or u8 [o, i/2], low nibble = even column.   scale  e8m0 (float8_e8m0fnu or u8) [o, i/block].
    Raises   ValueError if the shapes do not belong together.
    Source   reference section 8.3.
    """
    _matrix(packed)
    return dequantise_fp4(packed, scale, block)


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of the last dim, Sylvester order; its own inverse up to rounding.

    x        [..., n] floating point, n a power of two. Returns fp32 [..., n].
    Raises   ValueError for another n.
    A butterfly of additions, pairs at distance 1, 2, 4, ..., then one product with n^-0.5: a row's bits depend on that row only.
    """
    n = x.shape[-1] if x.dim() else 0
    if n < 1 or n & (n - 1):
        raise ValueError(f"hadamard needs a last dim that is a power of two, not {n}")
    rows = x.numel() // n
    y = x.to(torch.float32).reshape(rows, n).t().clone(memory_format=torch.contiguous_format)  # [n, rows]: long runs of additions
    spare, distance = torch.empty_like(y), 1
    while distance < n:
        shape = (n // (2 * distance), 2, distance * rows)
        first, second = y.view(shape).unbind(1)
        torch.add(first, second, out=spare.view(shape)[:, 0])
        torch.sub(first, second, out=spare.view(shape)[:, 1])
        y, spare, distance = spare, y, 2 * distance
    return (y * n**-0.5).t().reshape(x.shape)


def _blocks(x: Tensor, block: int) -> tuple[Tensor, int]:
    """x as fp32 [..., B, block], its last block filled with zeros, and n."""
    if not x.is_floating_point() or x.element_size() < 2:
        raise ValueError(f"only floating point tensors of 16 bits or more are quantised, not {x.dtype}")
    n = x.shape[-1] if x.dim() else 0
    if n < 1 or block < 1:
        raise ValueError(f"the last dim and the block must be at least 1, not {n} and {block}")
    return F.pad(x.to(torch.float32), (0, -n % block)).unflatten(-1, (-(-n // block), block)), n


def _scale_byte(blocks: Tensor, floor: float, limit_exponent: int, limit_fraction: int) -> Tensor:
    """int32 e8m0 bytes [...] of the smallest 2^e with amax <= limit * 2^e.

    limit = (1 + limit_fraction / 2^23) * 2^limit_exponent. Read off the bits of amax: a rounded log2 errs next to powers of two.
    """
    amax = blocks.abs().amax(dim=-1).clamp_min(floor)
    bits = amax.view(torch.int32) & 0x7FFFFFFF  # the largest of many may be a NaN with a sign
    exponent = bits >> 23
    byte = exponent - limit_exponent + ((bits & 0x7FFFFF) > limit_fraction)
    return torch.where(exponent == 255, 255, byte)


def _reciprocal(byte: Tensor) -> Tensor:
    """fp32 1 / scale of int32 e8m0 bytes 1..253 (exact), NaN for 255."""
    return torch.where(byte == 255, torch.nan, ((254 - byte) << 23).view(torch.float32))


def _to_e4m3(scaled: Tensor) -> Tensor:
    """Rounded to nearest even, NaN to code 0 (its block's scale says so). Not every device's cast saturates, hence the clamp."""
    return torch.nan_to_num(scaled, nan=0.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _to_e2m1(scaled: Tensor) -> Tensor:
    """fp32 numbers 0..15, the codes of |scaled| <= 6, rounded to nearest even.

    The codes grow by 2, 1 and 1/2 per unit below 2, from 2 to 4 and above: three lines, of which the lowest, rounded, is it.
    """
    size = scaled.abs()
    codes = torch.minimum(torch.round(2 * size), torch.minimum(torch.round(size) + 2, torch.round(size / 2) + 4))
    return codes + 8 * torch.signbit(scaled)


def _e4m3_to_fp32(codes: Tensor) -> Tensor:
    """The values of e4m3 codes (float8_e4m3fn or their u8 bytes), a new fp32 tensor of the same shape."""
    if codes.dtype == torch.float8_e4m3fn:
        codes = codes.view(torch.uint8)
    if codes.dtype != torch.uint8:
        raise ValueError(f"e4m3 codes are float8_e4m3fn or uint8, not {codes.dtype}")
    return _e4m3_values(codes.device).index_select(0, codes.to(torch.int32).flatten()).view(codes.shape)


def _matrix(weight: Tensor) -> tuple[int, int]:
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"a weight is a non-empty matrix, not {list(weight.shape)}")
    return weight.shape[0], weight.shape[1]


def _scaled(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """`values` [..., n] times scales [..., ceil(n/block)], one per block; may reuse the memory of `values`."""
    n = values.shape[-1]
    expected = (*values.shape[:-1], -(-n // block))
    if tuple(scales.shape) != expected:
        raise ValueError(f"{list(values.shape)} values need scales {list(expected)} at block {block}, not {list(scales.shape)}")
    if n % block:
        return values.mul_(scales.repeat_interleave(block, dim=-1)[..., :n])
    values.unflatten(-1, (n // block, block)).mul_(scales.unsqueeze(-1))
    return values


@functools.cache
def _e4m3_values(device: torch.device) -> Tensor:
    """fp32 [256] by code: a look-up is several times faster than the cast."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(device=device, dtype=torch.float32)


@functools.cache
def _fp4_pairs(device: torch.device) -> Tensor:
    """int64 [256], each the bits of the two fp32 values (even, odd) of a packed byte."""
    values = (*_E2M1, *(-value for value in _E2M1))
    pairs = torch.tensor([[values[byte & 15], values[byte >> 4]] for byte in range(256)], dtype=torch.float32)
    return pairs.view(torch.int64).flatten().to(device)
