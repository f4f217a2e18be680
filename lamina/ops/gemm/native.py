"""Products by the C kernels: weights stored panel by panel, each result one chain of multiply-adds over `in`."""

import torch
from torch import Tensor

from lamina.ops import native

_BF16 = torch.bfloat16


class NativeWeight:
    """A weight [out, in] as `native.c` reads it.   shape  [out, in]."""

    __slots__ = ("_address", "_function", "_memory", "shape")

    def __init__(self, weight: Tensor) -> None:
        found = native.library()
        assert found is not None
        out, width = weight.shape
        panel = found.lamina_panel()
        self.shape = (out, width)
        self._memory = torch.empty(-(-out // panel) * panel * width + 16)  # torch's memory begins at 64 bytes
        self._address = -(-self._memory.data_ptr() // 64) * 64
        self._function = found.lamina_linear
        source = weight.float().contiguous()
        found.lamina_pack(source.data_ptr(), out, width, self._address)

    def times(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """x [..., in] fp32 -> [..., out] fp32, plus bias [out], with the precision of `dtype`."""
        out, width = self.shape
        assert x.shape[-1] == width and x.dtype == torch.float32
        rows = x if x.dim() == 2 else x.reshape(-1, width)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        num = rows.shape[0]
        y = torch.empty(num, out)
        self._function(
            rows.data_ptr(), num, width, rows.stride(0), self._address, out, None if bias is None else bias.data_ptr(),
            y.data_ptr(), out, dtype == _BF16,
        )  # fmt: skip
        return y if x.dim() == 2 else y.view(*x.shape[:-1], out)
