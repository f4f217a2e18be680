"""The loader's inverse: fp32 values into the stored forms a checkpoint uses, and into one safetensors file."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lamina.ops.quantise import dequantise_fp4_weight, dequantise_fp8_weight, quantise_fp4_weight, quantise_fp8_weight


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor as it is stored, its scales if it has any, and the fp32 values a reader gets back."""

    stored: Tensor
    scale: Tensor | None
    values: Tensor


def encode(values: Tensor, storage: str) -> Encoded:
    """`values` fp32 in the form `storage`: fp32, bf16, fp8 or fp4.

    fp8 is e4m3 [o, i] with e8m0 scales per 128x128, fp4 packed I8 [o, i/2] with e8m0 scales per 32.
    Raises ValueError for another storage, or for what the codecs refuse.
    """
    if storage == "fp32":
        return Encoded(values, None, values)
    if storage == "bf16":
        stored = values.to(torch.bfloat16)
        return Encoded(stored, None, stored.to(torch.float32))
    if storage == "fp8":
        codes, scale = quantise_fp8_weight(values)
        return Encoded(codes, scale.view(torch.float8_e8m0fnu), dequantise_fp8_weight(codes, scale))
    if storage == "fp4":
        packed, scale = quantise_fp4_weight(values)
        return Encoded(packed.view(torch.int8), scale.view(torch.float8_e8m0fnu), dequantise_fp4_weight(packed, scale))
    raise ValueError(f"storage={storage!r} is not valid: fp32, bf16, fp8 or fp4")


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes `tensors` to `path` in the layout every reader of safetensors knows as PyTorch's."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)  # the library leaves it to its owner alone
