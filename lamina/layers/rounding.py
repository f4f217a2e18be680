"""Where activations are rounded. Products are fp32 everywhere; `dtype` says what is kept between them."""

import torch
from torch import Tensor

from lamina.base.errors import ConfigError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def activation_dtype(name: str) -> torch.dtype:
    """fp32 or bf16 by name; raises ConfigError for anything else."""
    if name not in _DTYPES:
        raise ConfigError("dtype", name, f"one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x with the precision of `dtype`, held in fp32."""
    if dtype == torch.float32 == x.dtype:
        return x
    return x.to(dtype).float()
