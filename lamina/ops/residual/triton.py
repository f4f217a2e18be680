"""What lies between two parts, on a GPU. `ref.py` is the definition; sums over a row have an order of their own.

    join(x, found, joint, is_fp8)    the next part's input; x becomes the new residual
    finish(x, found, joint)          fp32 hidden vectors after the last part
    refuses(machine, width)          why this machine or this width is not served, or None

One launch each; a row's bits depend on that row only.
"""

import torch
from torch import Tensor

from lamina.ops.gemm.stored import Activation, empty_activation
from lamina.ops.machine import Machine
from lamina.ops.residual import Joint, kernels
from lamina.ops.rope_norm.triton import activation_pointers, num_blocks, refuses_machine

_MOST_WIDTH = 16384


def refuses(machine: Machine, width: int) -> str | None:
    """Why rows of `width` are not served there, in one line, or None."""
    if not 1 <= width <= _MOST_WIDTH:
        return f"the hidden width must be 1 to {_MOST_WIDTH}, not {width}"
    return refuses_machine(machine)


def join(x: Tensor, found: Tensor | None, joint: Joint, is_fp8: bool) -> Activation:
    """The next part's input, rounded to x's type, and its fp8 codes where asked for; x [T, D] becomes the new residual.

    found  [T, D] fp32 or of x's type, the result of the last part; None before the first.
    """
    made = empty_activation(x.shape[0], x.shape[1], x.dtype, x.device, is_fp8)
    _launch(x, found, joint, activation_pointers(made), is_fp8, False)
    return made


def finish(x: Tensor, found: Tensor, joint: Joint) -> Tensor:
    """The final hidden vectors [T, D] in fp32, not rounded; x [T, D] stays as it is."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _launch(x, found, joint, (out, out, out), False, True)
    return out


def _launch(
    x: Tensor, found: Tensor | None, joint: Joint, out: tuple[Tensor, Tensor, Tensor], is_fp8: bool, is_last: bool
) -> None:
    num, width = x.shape
    after, before = joint.after, joint.before
    assert x.is_contiguous() and (found is None or found.is_contiguous())
    if num:
        kernels.join[(num,)](
            x, found, joint.bias, after.weight if after else None, before.weight if before else None, *out,
            after.eps if after else 0.0, before.eps if before else 0.0, joint.scale, joint.kept,
            D=width, BLOCKS=num_blocks(width), HAS_AFTER=after is not None, AFTER_CENTRES=after is not None and after.centres,
            HAS_BEFORE=before is not None, BEFORE_CENTRES=before is not None and before.centres,
            KEEPS_OLD=joint.kept != 0, KEEPS_NORMED=joint.keeps_normed, IS_BF16=x.dtype == torch.bfloat16,
            IS_LAST=is_last, IS_FP8=is_fp8, num_warps=4 if width <= 2048 else 8, enable_fp_fusion=False,
        )  # fmt: skip
