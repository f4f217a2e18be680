"""FP4 expert weights as the GPU kernels read them, and what an implementation is asked about.

Rows are cut in tiles of 64, columns in blocks of 128. A tile and block is 4,096 contiguous bytes: two halves of 64 columns, each
[64 rows, 32 bytes]. A half has 32 "low" columns and 32 "high" ones; each lie in one group of 32 columns, which share a scale.
For products in bf16, byte j of a half holds low column j in its low nibble and high column j in the other.
For products in fp8, word w (32 bits) of a half holds low and high columns 4w .. 4w + 3, so arranged that a byte permutation
expands them:

    bits 4n .. 4n + 2         magnitude of low column 4w + n        n = 0 .. 3
    bits 16 + 4n .. 18 + 4n   magnitude of high column 4w + n
    bit 8n + 7                sign of low column 4w + n
    bit 8n + 3                sign of high column 4w + n

Scales are int32 [tile, block, 64 rows], one byte for each of the four groups, the first in the lowest. For products in fp8, a
matrix whose scales span at most 11 binades in every row is *rebased*: the byte is 8 times the binades above the row's least
scale, so that adding it to an e4m3 code multiplies by the scale, exactly; and the row has an fp32 factor. Otherwise the byte is
the e8m0 byte itself and the factor 1. Groups of zeros do not count: their scale means nothing.
gate_up has eight rows of the gate, the same eight of up, the next eight of the gate, and so on: one thread holds both of a pair.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

#: what the products multiply the FP4 weights with
Activation = Literal["fp8", "bf16"]

#: binades from 2^-6 * 0.5 to 6 that e4m3 holds as normal numbers: (0.5 .. 6) * 2^-5 .. (0.5 .. 6) * 2^6
REBASED_BINADES = 11
_REBASED_SHIFT = 122  # factor = 2^(least scale byte - 127 + 5)


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """What an implementation may refuse: how it would multiply, and widths D and I."""

    activation: Activation
    hidden: int
    inner: int


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One matrix [R, K] of every expert.

    codes  u8 [E, R/64, K/128, 4096].   scales  int32 [E, R/64, K/128, 64].   factors  fp32 [E, R/64, 64].   is_rebased  as above.
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor
    is_rebased: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of all three."""
        return self.codes.nbytes + self.scales.nbytes + self.factors.nbytes


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """All experts of a layer: gate_up [2I, D] and down [D, I], arranged for products with `activation`."""

    gate_up: PackedMatrix
    down: PackedMatrix
    activation: Activation

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate_up.codes.shape[0]

    @property
    def hidden(self) -> int:
        """D."""
        return self.gate_up.codes.shape[2] * 128

    @property
    def inner(self) -> int:
        """I."""
        return self.down.codes.shape[2] * 128


def pack_weights(
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    activation: Activation = "fp8",
    may_rebase: bool = True,
) -> PackedExperts:
    """The weights of a layer in the kernels' order, on the device they are on.

    gate_up  u8 [E, 2I, D/2], gate rows first; low nibble = even column.   gate_up_scales  u8 e8m0 [E, 2I, D/32].
    down     u8 [E, D, I/2].   down_scales  u8 [E, D, I/32].
    activation  fp8: x and the SwiGLU's result are rounded to e4m3 with a scale for every 128.   bf16: to bf16.
    may_rebase  False keeps the e8m0 bytes whatever they are.
    Raises   ValueError if D or I is not a multiple of 128, or the shapes do not belong together.
    """
    num, rows, half = gate_up.shape
    hidden, inner = 2 * half, rows // 2
    if hidden % 128 or rows % 256:
        raise ValueError(f"FP4 experts need widths that are multiples of 128, not hidden {hidden} and inner {rows / 2:g}")
    expected = {
        "gate_up_scales": (gate_up_scales, (num, rows, hidden // 32)),
        "down": (down, (num, hidden, inner // 2)),
        "down_scales": (down_scales, (num, hidden, inner // 32)),
    }
    for name, (found, shape) in expected.items():
        if tuple(found.shape) != shape:
            raise ValueError(f"gate_up {list(gate_up.shape)} needs {name} {list(shape)}, not {list(found.shape)}")
    by_words = activation == "fp8"
    may_rebase = may_rebase and by_words
    matrices = _pack(gate_up, gate_up_scales, inner, by_words, may_rebase), _pack(down, down_scales, 0, by_words, may_rebase)
    return PackedExperts(*matrices, activation)


def _pack(codes: Tensor, scales: Tensor, paired: int, by_words: bool, may_rebase: bool) -> PackedMatrix:
    """`paired`: this many rows of gate come before as many of up; 0 for a plain matrix."""
    num, rows, half = codes.shape
    tiles, blocks = rows // 64, half // 64
    packed = codes.new_empty(num, tiles, blocks, 4096, dtype=torch.uint8)
    words = torch.empty(num, tiles, blocks, 64, dtype=torch.int32, device=codes.device)
    factors = torch.ones(num, tiles, 64, device=codes.device)
    own = [_Rows.of(codes[expert], scales[expert], paired) for expert in range(num)] if num else []
    is_rebased = may_rebase and all(rows.span <= REBASED_BINADES for rows in own)
    for expert in range(num):
        part = own[expert]
        packed[expert] = _pack_codes(_paired(codes[expert].view(torch.uint8), paired), by_words)
        bytes_ = part.scales
        if is_rebased:
            bytes_ = (8 * (bytes_.to(torch.int16) - part.least[:, None]).clamp_(0, REBASED_BINADES)).to(torch.uint8)
            factors[expert] = torch.exp2(part.least.float() - _REBASED_SHIFT).view(tiles, 64)
        # little endian: the first group is the lowest byte
        words[expert] = bytes_.contiguous().view(torch.int32).view(tiles, 64, blocks).transpose(1, 2)
    return PackedMatrix(packed, words, factors, is_rebased)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Scales of one expert, u8 [R, K/32], rows in the kernels' order; the least of each row, int16 [R], and the widest span."""

    scales: Tensor
    least: Tensor
    span: int

    @staticmethod
    def of(codes: Tensor, scales: Tensor, paired: int) -> "_Rows":
        codes, scales = _paired(codes.view(torch.uint8), paired), _paired(scales.view(torch.uint8), paired)
        is_zero = ((codes & 0x77).view(*scales.shape, 16) == 0).all(-1)
        value = scales.to(torch.int16)
        least = value.masked_fill(is_zero, 255).amin(1)
        most = value.masked_fill(is_zero, 0).amax(1)
        least = torch.minimum(least, most)  # of a row of zeros
        return _Rows(scales, least, int((most - least).max()))


def _paired(rows: Tensor, paired: int) -> Tensor:
    """[2 * paired, n], gate rows first -> eight rows of gate, the same of up, and so on."""
    if not paired:
        return rows
    return rows.view(2, paired // 8, 8, -1).transpose(0, 1).reshape(rows.shape)


def _pack_codes(packed: Tensor, by_words: bool) -> Tensor:
    """u8 [R, K/2], two neighbours in a byte -> u8 [R/64, K/128, 4096]."""
    rows, width = packed.shape
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).view(rows // 64, 64, width // 64, 2, 2, 32)
    low, high = codes.unbind(4)  # [R/64, 64, K/128, half, 32]
    if by_words:
        low, high = (part.view(*part.shape[:-1], 8, 4) for part in (low, high))  # [.., word, n]
        magnitude, sign = torch.cat([low & 7, high & 7], dim=-1), torch.stack([high >> 3, low >> 3], dim=-1).flatten(-2)
        nibbles = magnitude | (sign << 3)  # [.., word, 8], the lowest first
        low, high = nibbles[..., 0::2].flatten(-2), nibbles[..., 1::2].flatten(-2)  # of each byte
    return (low | (high << 4)).permute(0, 2, 3, 1, 4).reshape(rows // 64, width // 64, 4096)
