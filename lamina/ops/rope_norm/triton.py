"""Norms and rotations on a GPU. `ref.py` is the definition; sums over a row have an order of their own, the rest its bits.

    rotations(positions, inv_freq, ratio)                 cos, sin [T, r / 2] fp32
    norm_quantise(x, weight, eps, dtype, is_fp8)          Activation [T, n]
    query_norm_rope(q, cos, sin, heads, eps)              [T, H, d]
    refuses(machine, case)                                why this machine or these shapes are not served, or None

One launch each; a row's bits depend on that row only.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.gemm.stored import Activation, empty_activation
from lamina.ops.machine import Machine
from lamina.ops.rope_norm import RopeNormCase, kernels

#: one warp a program: a head's sum needs no other, and its order is the same for every number of heads
QUERY_WARPS = 1
#: from so many rows on a program has more heads: fewer instructions a head, where there are programs enough
_MANY_ROWS = 257
_ANGLES = 256


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, one operation at a time (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)


def refuses_machine(machine: Machine) -> str | None:
    """Why kernels without tensor cores are not served there, in one line, or None."""
    if is_interpreted():
        return None
    if machine.device != "cuda":
        return f"runs on NVIDIA GPUs, not on {machine.device}"
    if machine.capability < (8, 0):
        return f"needs compute capability 8.0, this GPU has {'.'.join(map(str, machine.capability))}"
    return None


def refuses(machine: Machine, case: RopeNormCase) -> str | None:
    """Why `case` is not served, in one line, or None."""
    if case.rope % 2 or case.dim % 2 or not 0 < case.rope <= case.dim:
        return f"the rotated dims must be pairs at the end of an even dim, not the last {case.rope} of {case.dim}"
    return refuses_machine(machine)


def rotations(positions: Tensor, inv_freq: Tensor, ratio: int = 1) -> tuple[Tensor, Tensor]:
    """cos, sin [T, p] fp32 at position // ratio * ratio, a column for each pair; -sin turns back.

    positions  [T] int32 below 2^24.   inv_freq  [p] fp32.   ratio  tokens that share an entry, turned as the first of them.
    """
    pairs = inv_freq.shape[0]
    num = positions.shape[0] * pairs
    cos, sin = torch.empty(2, positions.shape[0], pairs, dtype=torch.float32, device=positions.device).unbind(0)
    kernels.rotations[(triton.cdiv(num, _ANGLES),)](
        positions, inv_freq, cos, sin, num, RATIO=ratio, PAIRS=pairs, SIZE=_ANGLES, enable_fp_fusion=False
    )
    return cos, sin


def norm_quantise(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, is_fp8: bool) -> Activation:
    """x rounded to `dtype`, its norm, rounded again, and its fp8 codes where asked for.

    x  [T, n] fp32, or of `dtype` already; columns of a wider matrix too.   weight  [n] fp32.
    """
    made = empty_activation(x.shape[0], x.shape[1], dtype, x.device, is_fp8)
    kernels.norm_quantise[(x.shape[0],)](
        x, x.stride(0), weight, *activation_pointers(made), eps,
        K=x.shape[1], BLOCKS=num_blocks(x.shape[1]), IS_BF16=dtype == torch.bfloat16, IS_FP8=is_fp8,
        enable_fp_fusion=False,
    )  # fmt: skip
    return made


def query_norm_rope(q: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float) -> Tensor:
    """The heads' norm and rotation, rounded to q's type: a new tensor [T, H, d].

    q  [T, H * d] bf16 or fp32; columns of a wider matrix too.   cos, sin  [T, r / 2]; the last r dims of a head turn.
    """
    dim = q.shape[1] // heads
    out = q.new_empty(q.shape[0], heads, dim)
    group, width = query_tile(q.shape[0], dim, 512)
    kernels.query_norm_rope[(q.shape[0] * triton.cdiv(heads, group),)](
        q, q.stride(0), out, cos, sin, eps,
        HEADS=heads, D=dim, ROPE=2 * cos.shape[1], GROUP=group, W=width, num_warps=QUERY_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def activation_pointers(made: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """Values, codes as bytes, scales; where there are no codes, what no kernel reads."""
    if made.codes is None or made.scales is None:
        return made.values, made.values, made.values
    return made.values, made.codes.view(torch.uint8), made.scales


def num_blocks(width: int) -> int:
    """Blocks of 128 columns in a tile of a row."""
    return int(triton.next_power_of_2(triton.cdiv(width, 128)))


def query_tile(rows: int, dim: int, values: int) -> tuple[int, int]:
    """Heads that one program turns, some `values` of them or twice as many, and the columns of its tile."""
    width = max(2, int(triton.next_power_of_2(dim)))
    return max(1, values * (2 if rows >= _MANY_ROWS else 1) // width), width
