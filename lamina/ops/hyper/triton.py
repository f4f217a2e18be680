"""Hyper-connections on a GPU: what lies between two sub-layers, in two launches.

    start(embed, tokens, S)         streams of a step's rows
    boundary(streams, out, ...)     new streams, and the normed input of the next sub-layer
    end(streams, out, ...)          final hidden vectors; `end_with_streams` gives the last streams too
    refuses(machine, case)          why this machine or these shapes are not served, or None

A row's bits depend on its own values alone, not on the number of rows.
"""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.gemm.stored import Activation, empty_activation
from lamina.ops.hyper import HyperCase, kernels
from lamina.ops.hyper.ref import Mixer
from lamina.ops.machine import Machine

_MOST_STREAMS, _MOST_HIDDEN = 8, 8192
_START_COLUMNS = 2048
#: columns of a range; `collapse` adds the ranges
_COLUMNS = 64
#: tokens of a tile of `mix`, and of a program of `collapse` that balances
_TILE, _BALANCED = 16, 8
#: programs of `mix` from which on each takes several tiles of tokens, whose weights it reads once
_PROGRAMS = 768
_MIX_WARPS = 4


@dataclass(frozen=True, slots=True)
class Boundary:
    """streams [T, S, D] and x, the sub-layer's input [T, D]; post [T, S] and comb [T, S, S] fp32 mix its output back."""

    streams: Tensor
    x: Activation
    post: Tensor
    comb: Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """Constants of both kernels that follow from the shape; part of the definition of a row's bits.

    columns  of a range; `splits` ranges are summed by `collapse`.   padded  columns of a token's products.
    """

    columns: int
    splits: int
    slots: int
    padded: int
    collapse_warps: int

    @staticmethod
    def of(streams: int, hidden: int, has_comb: bool) -> "Cut":
        slots = max(4, triton.next_power_of_2(streams))
        used = slots * slots + 2 * slots if has_comb else slots
        return Cut(
            _COLUMNS, -(-hidden // _COLUMNS), slots, max(16, triton.next_power_of_2(used + 1)),
            4 if hidden <= 1024 else 8,
        )  # fmt: skip


def refuses(machine: Machine, case: HyperCase) -> str | None:
    """Why `case` is not served here, in one line, or None."""
    if not _is_interpreted():
        if machine.device != "cuda":
            return f"runs on NVIDIA GPUs, not on {machine.device}"
        if machine.capability < (8, 0):
            return f"needs compute capability 8.0, this GPU has {'.'.join(map(str, machine.capability))}"
    if not 1 <= case.streams <= _MOST_STREAMS:
        return f"the number of streams must be 1 to {_MOST_STREAMS}, not {case.streams}"
    if not 1 <= case.hidden <= _MOST_HIDDEN:
        return f"the hidden width must be 1 to {_MOST_HIDDEN}, not {case.hidden}"
    return None


def start(embed: Tensor, tokens: Tensor, num_streams: int) -> Tensor:
    """embed [V, D], tokens [T] integers -> [T, S, D]: each token's row, S times."""
    rows, width = tokens.shape[0], embed.shape[1]
    streams = torch.empty(rows, num_streams, width, dtype=embed.dtype, device=embed.device)
    size = min(_START_COLUMNS, triton.next_power_of_2(width))
    programs = rows * triton.cdiv(width, size)
    if programs:
        kernels.start[(programs,)](embed, tokens, streams, D=width, S=num_streams, SIZE=size)
    return streams


def boundary(
    streams: Tensor,
    out: Tensor | None,
    post: Tensor | None,
    comb: Tensor | None,
    mixer: Mixer,
    norm_weight: Tensor,
    dtype: torch.dtype,
    is_fp8: bool,
    out2: Tensor | None = None,
) -> Boundary:
    """`hyper_post` of a sub-layer's output, `hyper_pre` of the next one, its norm, and quantisation.

    streams  [T, S, D] in `dtype`, contiguous.
    out      [T, D], contiguous, with the post and comb that came with its input; None before the first sub-layer, whose streams
             stay as they are.   out2  [T, D] added to it before it is rounded.
    mixer    rows pre, post, comb; fn contiguous; its norm_eps is that of both norms.   norm_weight [D] fp32.
    is_fp8   the input gets codes too.
    """
    num_tokens, num_streams, width = streams.shape
    new_post = streams.new_empty(num_tokens, num_streams, dtype=torch.float32)
    new_comb = streams.new_empty(num_tokens, num_streams, num_streams, dtype=torch.float32)
    x = empty_activation(num_tokens, width, dtype, streams.device, is_fp8)
    mixed = _run(streams, out, out2, post, comb, mixer, norm_weight, dtype, x, (new_post, new_comb))
    return Boundary(mixed, x, new_post, new_comb)


def end(
    streams: Tensor,
    out: Tensor | None,
    post: Tensor | None,
    comb: Tensor | None,
    mixer: Mixer,
    norm_weight: Tensor,
    dtype: torch.dtype,
    out2: Tensor | None = None,
) -> Tensor:
    """As `boundary` after the last sub-layer, with the head's mixer: hidden vectors [T, D] fp32, normed, not rounded."""
    return end_with_streams(streams, out, post, comb, mixer, norm_weight, dtype, out2)[0]


def end_with_streams(
    streams: Tensor,
    out: Tensor | None,
    post: Tensor | None,
    comb: Tensor | None,
    mixer: Mixer,
    norm_weight: Tensor,
    dtype: torch.dtype,
    out2: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`end`, and the streams [T, S, D] that the hidden vectors were made of."""
    hidden = streams.new_empty(streams.shape[0], streams.shape[2], dtype=torch.float32)
    return hidden, _run(streams, out, out2, post, comb, mixer, norm_weight, dtype, Activation(hidden), None)


def _run(
    streams: Tensor,
    out: Tensor | None,
    out2: Tensor | None,
    post: Tensor | None,
    comb: Tensor | None,
    mixer: Mixer,
    norm_weight: Tensor,
    dtype: torch.dtype,
    x: Activation,
    mixes: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Both launches; fills x and `mixes`, the new post and comb. Returns the new streams."""
    assert isinstance(mixer.fn, Tensor), "weights in C's order are for CPUs"
    given = (streams, mixer.fn, *(one for one in (out, out2, post, comb) if one is not None))
    assert all(one.is_contiguous() for one in given) and streams.dtype == dtype
    step = BoundaryStep(streams, out, out2, post, comb, mixer, norm_weight, x, mixes)
    if streams.numel():
        step.mix()
        step.collapse()
    return step.mixed


class BoundaryStep:
    """The two launches of one call and the buffers between them; the benchmark runs them one by one."""

    __slots__ = (
        "comb", "cut", "is_bf16", "mixed", "mixer", "mixes", "norm_weight", "out", "out2", "post", "products", "streams", "x",
    )  # fmt: skip

    def __init__(
        self,
        streams: Tensor,
        out: Tensor | None,
        out2: Tensor | None,
        post: Tensor | None,
        comb: Tensor | None,
        mixer: Mixer,
        norm_weight: Tensor,
        x: Activation,
        mixes: tuple[Tensor, Tensor] | None,
    ) -> None:
        num_tokens, num_streams, width = streams.shape
        self.streams, self.out, self.out2, self.post, self.comb = streams, out, out2, post, comb
        self.mixer, self.norm_weight, self.x, self.mixes = mixer, norm_weight, x, mixes
        self.is_bf16 = streams.dtype == torch.bfloat16
        self.cut = Cut.of(num_streams, width, mixes is not None)
        self.mixed = streams if out is None else torch.empty_like(streams)
        self.products = streams.new_empty(num_tokens, self.cut.splits, self.cut.padded, dtype=torch.float32)

    def mix(self, tiles: int | None = None) -> None:
        """New streams and partial products.   tiles  of a program, None = by the number of tokens; changes no bit."""
        num_tokens, num_streams, width = self.streams.shape
        cut, every = self.cut, triton.cdiv(num_tokens, _TILE)
        tiles = tiles or triton.cdiv(every * cut.splits, _PROGRAMS)
        kernels.mix[(cut.splits, triton.cdiv(every, tiles))](
            self.streams, self.out, self.out2, self.post, self.comb, self.mixer.fn, self.mixed, self.products, num_tokens, tiles,
            D=width, S=num_streams, SP=cut.slots, PADDED=cut.padded, COLUMNS=cut.columns,
            HAS_OUT=self.out is not None, HAS_OUT2=self.out2 is not None, HAS_COMB=self.mixes is not None,
            IS_BF16=self.is_bf16, TILE=_TILE, INTERPRET=_is_interpreted(), num_warps=_MIX_WARPS, num_stages=1,
        )  # fmt: skip

    def collapse(self) -> None:
        """What the products say: post, comb, and the sub-layer's input."""
        num_tokens, num_streams, width = self.streams.shape
        cut, mixer, x = self.cut, self.mixer, self.x
        post, comb = self.mixes or (None, None)
        balancers = triton.cdiv(num_tokens, _BALANCED) if self.mixes is not None else 0
        kernels.collapse[(balancers + num_tokens,)](
            self.mixed, self.products, mixer.base, mixer.scale, self.norm_weight, post, comb,
            x.values, None if x.codes is None else x.codes.view(torch.uint8), x.scales, num_tokens,
            D=width, WIDTH=max(128, triton.next_power_of_2(width)), S=num_streams, SP=cut.slots, PADDED=cut.padded,
            SPLITS=cut.splits, SPLITS_PADDED=triton.next_power_of_2(cut.splits), ITERATIONS=mixer.iterations,
            EPS=mixer.eps, NORM_EPS=mixer.norm_eps, HAS_COMB=self.mixes is not None, FP8=x.is_fp8, IS_BF16=self.is_bf16,
            KEEPS_FP32=self.mixes is None, BALANCED=_BALANCED, INTERPRET=_is_interpreted(), num_warps=cut.collapse_warps,
        )  # fmt: skip


def _is_interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)
