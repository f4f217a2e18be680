"""Rounding to what the engine stores, with gradients that pass straight through: the codecs are the engine's own."""

import torch
from torch import Tensor

from lamina.ops.quantise.ref import dequantise_fp4, dequantise_fp8, hadamard, quantise_fp4, quantise_fp8


def cast(stack: Tensor, storage: str, quantised: bool, dtype: torch.dtype) -> Tensor:
    """fp32 [N, ...] as the forward pass reads it: matrices of `dtype`, the rest fp32; rounded to `storage` if `quantised`."""
    if storage == "fp32":
        return stack
    if quantised and storage == "fp8":
        stack = _straight(stack, _squares)
    elif quantised and storage == "fp4":
        stack = _straight(stack, lambda x: dequantise_fp4(*quantise_fp4(x)))
    return stack.to(dtype)


def to_fp8(x: Tensor, width: int, block: int) -> Tensor:
    """`x` [..., n] with its first `width` dims rounded to e4m3, a power-of-two scale for every `block` of them."""
    rounded = _straight(x[..., :width], lambda y: dequantise_fp8(*quantise_fp8(y, block), block).to(x.dtype))
    return torch.cat([rounded, x[..., width:]], -1)


def to_fp4(x: Tensor) -> Tensor:
    """`x` [..., 128] as an index key or query: the Hadamard transform, then e2m1 with a power-of-two scale for every 32."""
    turned = (x.float() @ hadamard(torch.eye(x.shape[-1], device=x.device))).to(x.dtype)
    return _straight(turned, lambda y: dequantise_fp4(*quantise_fp4(y)).to(x.dtype))


def _squares(stack: Tensor, side: int = 128) -> Tensor:
    """Matrices [N, o, i], each 128 x 128 rounded to e4m3 with one power-of-two scale; ValueError for a partial square."""
    count, rows, columns = stack.shape
    if rows % side or columns % side:
        raise ValueError(f"fp8 matrices here have sides divisible by {side}, not [{rows}, {columns}]")
    cut = stack.view(count, rows // side, side, columns // side, side).transpose(2, 3).flatten(-2)
    rounded = dequantise_fp8(*quantise_fp8(cut, side * side), side * side)
    return rounded.unflatten(-1, (side, side)).transpose(2, 3).reshape(stack.shape)


def _straight(x: Tensor, rounded) -> Tensor:
    with torch.no_grad():
        change = rounded(x.detach()) - x.detach()
    return x + change
