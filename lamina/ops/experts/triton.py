"""Routed experts from FP4 weights on a GPU: FP4 is expanded in registers, the products run on tensor cores in fp8 or bf16.

    experts_fp4(...)          the routed sum of `ref.experts_fp4`, from `packed.pack_weights`; the shared expert's may be added
    refuses(machine, case)    why this machine or these shapes are not served, or None

Launches: prepare (1, or 2 for many places), gate-up, quantise, down, sum. Prepare quantises x unless it has codes. Every
buffer's size is fixed by the number of tokens, so a captured graph replays with any routing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.experts import hopper, kernels
from lamina.ops.experts.packed import ExpertsCase, PackedExperts
from lamina.ops.gemm.stored import Activation
from lamina.ops.machine import Machine, is_hopper

#: so many places are aligned by comparing every pair
_SMALL_ALIGN = 64
_CHUNK = 1024
_ITEMS = 8
_SUM_COLUMNS = 512
#: each buffer of integers begins at 16 bytes: a kernel is compiled anew for pointers that do not
_ALIGNED_INTS = 4


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the two products are cut; no choice changes a bit of the result.

    tokens  columns of a tile.   gate_rows, down_rows  its rows.   *_warps, *_stages  as in Triton.
    is_gluon  the kernels of `hopper.py`.
    """

    tokens: int
    gate_rows: int
    gate_warps: int
    gate_stages: int
    down_rows: int
    down_warps: int
    down_stages: int
    is_gluon: bool = False


#: (largest mean number of places of an expert, tiles) for rebased fp8. One H200, 256 experts of 4096 x 2048, 6 a token, us of
#: gate-up + down:
_TILES = (
    # 1 token: 23 + 14; gate rows 128: 25, 256: 28; down rows 128: 14
    (0.1, Tiles(16, 64, 4, 4, 64, 4, 4)),
    # 8 tokens: 104 + 56; gate rows 128: 106, 64: 123; down rows 128: 56, 64: 64.   32 tokens: 287-292 + 155
    # 256 tokens: 537-554 + 288; gate rows 128: 572; tiles of 32 tokens: 665 + 328
    (12.0, Tiles(16, 256, 4, 4, 256, 4, 3)),
    # 1,024 tokens: 693 + 376; tiles of 16: 1,011 + 552, of 64: 1,336 + 580
    (26.0, Tiles(32, 256, 4, 4, 256, 4, 4)),
    (float("inf"), Tiles(64, 128, 4, 3, 128, 4, 3)),
)
#: bf16, and fp8 that is not rebased: a sum for each scale takes more registers. bf16, 1 / 8 / 32 / 256 tokens:
#: 57 / 337 / 923 / 1,688 us; beyond 512 tokens chosen from the machine code (no spills), not measured
_GENERAL_TILES = (
    (0.1, Tiles(16, 64, 4, 4, 64, 4, 4)),
    (12.0, Tiles(16, 256, 4, 4, 256, 4, 3)),
    (26.0, Tiles(32, 128, 4, 3, 128, 4, 3)),
    (float("inf"), Tiles(64, 128, 8, 3, 128, 8, 3)),
)
#: rebased fp8 on compute capability 9.0
_HOPPER_TILES = (
    # 1 token: 19.1 + 11.6; gate rows 128: 20.5, 256: 23.7; tiles of 16: 20.2 + 12.4
    (0.1, Tiles(8, 64, 4, 4, 64, 4, 4, True)),
    # 8 tokens: 98 + 52; gate rows 128: 101, 256: 101; down rows 64: 53, 256: 54; 6 stages: 102 + 55; tiles of 16: 99.5 + 54
    (0.5, Tiles(8, 64, 4, 4, 128, 4, 3, True)),
    # 32 tokens: 279 + 146.5; gate rows 64: 280, 256: 282; 6 stages: 291 + 155; tiles of 16: 281 + 148.5
    (2.0, Tiles(8, 128, 4, 4, 128, 4, 4, True)),
    # 256 tokens: 537 + 281; 3 stages: 558 + 286; rows 256: 560 + 316; tiles of 8: 561 + 282.5
    (12.0, Tiles(16, 128, 4, 4, 128, 4, 4, True)),
    # 1,024 tokens: 688 + 373; rows 128: 740 + 387; tiles of 16: 1,038 + 553, of 64: 1,034 + 546
    (26.0, Tiles(32, 256, 4, 4, 256, 4, 4, True)),
    # 2,048 tokens: 1,129 + 604; 3 stages: 1,185 + 604; tiles of 32: 1,287 + 664
    (float("inf"), Tiles(64, 128, 4, 4, 128, 4, 4, True)),
)


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, one operation at a time (TRITON_INTERPRET=1); bf16 is wrong there."""
    return bool(triton.knobs.runtime.interpret)


def refuses(machine: Machine, case: ExpertsCase) -> str | None:
    """Why `case` is not served here, in one line, or None."""
    if not is_interpreted():
        if machine.device != "cuda":
            return f"runs on NVIDIA GPUs, not on {machine.device}"
        needed = (8, 9) if case.activation == "fp8" else (8, 0)
        if machine.capability < needed:
            found, least = (".".join(map(str, pair)) for pair in (machine.capability, needed))
            return f"{case.activation} activations need compute capability {least}, this GPU has {found}"
    for name, size in (("hidden", case.hidden), ("inner", case.inner)):
        if size < 1 or size % 128:
            return f"the {name} width must be a multiple of 128, not {size}"
    return None


def choose_tiles(num_places: int, packed: PackedExperts) -> Tiles:
    """The tiles for so many (token, expert) pairs, from the mean number an expert has; measured on one H200."""
    mean = num_places / packed.num_experts
    device = packed.gate_up.codes.device
    # one block of columns alone does not compile in Gluon 3.6
    is_served = min(packed.hidden, packed.inner) > 128
    is_rebased = packed.gate_up.is_rebased and packed.down.is_rebased
    table = _GENERAL_TILES if not is_rebased else _HOPPER_TILES if is_hopper(device) and is_served else _TILES
    tiles = next(tiles for most, tiles in table if mean <= most)
    return tiles if packed.hidden % tiles.down_rows == 0 else replace(tiles, down_rows=128)


def max_blocks(num_places: int, num_experts: int, tokens: int) -> int:
    """The most blocks of `tokens` places that any routing makes: every expert but the first few has a last block of one."""
    chosen = min(num_places, num_experts)
    return chosen + (num_places - chosen) // tokens


@dataclass(frozen=True, slots=True)
class Places:
    """Buffers for (token, expert) pairs sorted by expert, in blocks of at most `tokens` of one expert; all int32.

    places  [pairs] sorted.   block_expert, block_first, block_rows  [max_blocks], of which num_blocks [1] are used.
    counts, firsts  [E], of an expert.
    """

    places: Tensor
    block_expert: Tensor
    block_first: Tensor
    block_rows: Tensor
    counts: Tensor
    firsts: Tensor
    num_blocks: Tensor
    tokens: int
    max_blocks: int

    @staticmethod
    def empty(num_places: int, num_experts: int, tokens: int, device: torch.device) -> "Places":
        """For so many pairs, routed in any way."""
        most = max_blocks(num_places, num_experts, tokens)
        sizes = [num_places, *[most] * 3, *[num_experts] * 2, 1]
        room = [-(-size // _ALIGNED_INTS) * _ALIGNED_INTS for size in sizes]
        whole: Tensor = torch.empty(sum(room), dtype=torch.int32, device=device)
        parts = (part[:size] for part, size in zip(torch.split(whole, room), sizes, strict=True))
        places, block_expert, block_first, block_rows, counts, firsts, num_blocks = parts
        return Places(places, block_expert, block_first, block_rows, counts, firsts, num_blocks, tokens, most)

    @property
    def blocks(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What kernels take of the blocks."""
        return self.block_expert, self.block_first, self.block_rows, self.num_blocks

    def fill(self, chosen: Tensor, x: Tensor | None = None, codes: Tensor | None = None, scales: Tensor | None = None) -> None:
        """From each token's choices; other programs of the launch quantise x, if there is one, to codes and scales."""
        num_places, num_experts = self.places.numel(), self.counts.numel()
        items = scales.numel() if scales is not None else 0
        programs = triton.cdiv(items, _ITEMS)
        quantised = (x, codes, scales, items)
        if num_places <= _SMALL_ALIGN:
            size = max(16, triton.next_power_of_2(num_places))
            kernels.prepare_few[(1 + programs,)](
                chosen, self.places, *self.blocks, num_places, num_experts, *quantised,
                TOKENS=self.tokens, SIZE=size, ITEMS=_ITEMS, QUANTISES=x is not None, INTERPRET=is_interpreted(),
            )  # fmt: skip
            return
        chunk = min(_CHUNK, triton.next_power_of_2(num_places))
        kernels.prepare_many[(num_experts + programs,)](
            chosen, self.places, self.counts, self.firsts, num_places, num_experts, *quantised,
            CHUNK=chunk, ITEMS=_ITEMS, QUANTISES=x is not None, INTERPRET=is_interpreted(),
        )  # fmt: skip
        size = triton.next_power_of_2(num_experts)
        kernels.align_blocks[(1,)](self.counts, self.firsts, *self.blocks, num_experts, TOKENS=self.tokens, SIZE=size)


def sum_places(partial: Tensor, chosen: Tensor, num_experts: int, shared: Tensor | None, out: Tensor) -> None:
    """out [T, D] = shared [T, D] + the rows of each token in `partial` [T * k, D], ascending expert by ascending expert."""
    rows, width = out.shape
    assert shared is None or shared.is_contiguous()
    size = min(_SUM_COLUMNS, triton.next_power_of_2(width))
    kernels.sum_experts[(rows, triton.cdiv(width, size))](
        partial, chosen, shared, out, num_experts, WIDTH=width, TOP_K=chosen.shape[1], SIZE=size,
        HAS_SHARED=shared is not None, INTERPRET=is_interpreted(),
    )  # fmt: skip


def experts_fp4(
    x: Tensor | Activation,
    chosen: Tensor,
    weights: Tensor,
    packed: PackedExperts,
    limit: float,
    tiles: Tiles | None = None,
    shared: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    before_sum: Callable[[], None] | None = None,
) -> Tensor:
    """Sum over each token's experts, added in ascending expert order; an expert below 0 or past the last is nobody's and skipped.

    x         [T, D] bf16 or fp32; codes that it has are used.   chosen [T, k] integers.   weights [T, k] fp32.
    limit     clamp of the SwiGLU, 0 = none.
    tiles     None = `choose_tiles`.
    shared    [T, D], contiguous, to which the sum is added.   before_sum  called before that is launched.
    Returns   [T, D], fp32 rounded to `dtype`. A token's bits depend neither on the other tokens nor on the tiles.
    """
    values = x.values if isinstance(x, Activation) else x
    out = values.new_empty(values.shape, dtype=dtype)
    step = ExpertsStep(x, chosen, weights, packed, limit, tiles, shared) if out.numel() else None
    if step is not None:
        step.products()
    if before_sum is not None:
        before_sum()
    if step is not None:
        step.sum(out)
    return out


class ExpertsStep:
    """The launches of one call and the buffers between them; the benchmark runs them one by one."""

    __slots__ = (
        "chosen", "h", "h_codes", "h_scales", "has_codes", "interpret", "is_fp8", "limit", "num_places", "packed", "partial",
        "places", "shared", "shares", "tiles", "top_k", "x", "x_codes", "x_scales",
    )  # fmt: skip

    def __init__(
        self,
        x: Tensor | Activation,
        chosen: Tensor,
        weights: Tensor,
        packed: PackedExperts,
        limit: float,
        tiles: Tiles | None = None,
        shared: Tensor | None = None,
    ) -> None:
        given = x if isinstance(x, Activation) else Activation(x)
        num_tokens, self.top_k = chosen.shape
        self.num_places = num_tokens * self.top_k
        self.tiles = tiles or choose_tiles(self.num_places, packed)
        self.x, self.chosen, self.shares = given.values.contiguous(), chosen.contiguous(), weights.contiguous()
        self.packed, self.limit, self.shared = packed, limit, shared
        self.is_fp8 = packed.activation == "fp8"
        self.has_codes = self.is_fp8 and given.is_fp8
        self.interpret = is_interpreted()
        self.places = Places.empty(self.num_places, packed.num_experts, self.tiles.tokens, self.x.device)
        width, inner = packed.hidden, packed.inner
        narrow = torch.float32 if self.interpret else torch.bfloat16
        self.h = self.x.new_empty(self.num_places, inner, dtype=self.x.dtype if self.is_fp8 else narrow)
        if self.is_fp8:
            assert given.codes is None or (given.codes.is_contiguous() and given.scales is not None)
            self.x_codes, self.x_scales = (given.codes, given.scales) if self.has_codes else _fp8(self.x, num_tokens, width)
            self.h_codes, self.h_scales = _fp8(self.x, self.num_places, inner)
        else:  # the scales are never read
            self.x_codes, self.h_codes = self.x.to(narrow), self.h
            self.x_scales = self.h_scales = self.x.new_empty(1, dtype=torch.float32)
        self.partial = self.x.new_empty(self.num_places, width, dtype=torch.float32)

    def run(self, out: Tensor) -> None:
        """All launches in order; out [T, D]."""
        self.products()
        self.sum(out)

    def products(self) -> None:
        """All launches but the last."""
        self.prepare()
        self.gate_up()
        self.quantise_inner()
        self.down()

    def prepare(self) -> None:
        """The places of each expert, and the blocks; x to fp8."""
        if self.is_fp8 and not self.has_codes:
            self.places.fill(self.chosen, self.x, self.x_codes, self.x_scales)
        else:
            self.places.fill(self.chosen)

    def gate_up(self) -> None:
        """h = the SwiGLU's result times the routing weight, rows in the order of `places`."""
        packed, tiles, matrix = self.packed, self.tiles, self.packed.gate_up
        if tiles.is_gluon:
            hopper.gate_up[(self.places.max_blocks * (2 * packed.inner // tiles.gate_rows),)](
                self.x_codes, self.x_scales, matrix.codes, matrix.scales, matrix.factors, self.shares, self.h,
                self.places.places, *self.places.blocks, self.limit,
                K=packed.hidden, INNER=packed.inner, TOP_K=self.top_k, ROWS=tiles.gate_rows, TOKENS=tiles.tokens,
                HAS_LIMIT=self.limit > 0, STAGES=tiles.gate_stages, WARPS=tiles.gate_warps,
                num_warps=tiles.gate_warps,
            )  # fmt: skip
            return
        kernels.gate_up[(self.places.max_blocks * (2 * packed.inner // tiles.gate_rows),)](
            self.x_codes, self.x_scales, matrix.codes, matrix.scales, matrix.factors, self.shares, self.h,
            self.places.places, *self.places.blocks, self.limit,
            K=packed.hidden, INNER=packed.inner, TOP_K=self.top_k, ROWS=tiles.gate_rows, TOKENS=tiles.tokens,
            HAS_LIMIT=self.limit > 0, FP8=self.is_fp8, REBASED=matrix.is_rebased, STAGES=tiles.gate_stages,
            INTERPRET=self.interpret, num_warps=tiles.gate_warps, num_stages=tiles.gate_stages,
        )  # fmt: skip

    def quantise_inner(self) -> None:
        """h to fp8; nothing to do in bf16. Rows of nobody's places are quantised too: whatever they hold, nobody reads it."""
        if self.is_fp8:
            items = self.h_scales.numel()
            kernels.quantise[(triton.cdiv(items, _ITEMS),)](
                self.h, self.h_codes, self.h_scales, items, ITEMS=_ITEMS, INTERPRET=self.interpret
            )

    def down(self) -> None:
        """One row of `partial` for each place."""
        packed, tiles, matrix = self.packed, self.tiles, self.packed.down
        if tiles.is_gluon:
            hopper.down[(self.places.max_blocks * (packed.hidden // tiles.down_rows),)](
                self.h_codes, self.h_scales, matrix.codes, matrix.scales, matrix.factors, self.partial,
                self.places.places, *self.places.blocks,
                K=packed.inner, WIDTH=packed.hidden, ROWS=tiles.down_rows, TOKENS=tiles.tokens, STAGES=tiles.down_stages,
                WARPS=tiles.down_warps, num_warps=tiles.down_warps,
            )  # fmt: skip
            return
        kernels.down[(self.places.max_blocks * (packed.hidden // tiles.down_rows),)](
            self.h_codes, self.h_scales, matrix.codes, matrix.scales, matrix.factors, self.partial,
            self.places.places, *self.places.blocks,
            K=packed.inner, WIDTH=packed.hidden, ROWS=tiles.down_rows, TOKENS=tiles.tokens,
            FP8=self.is_fp8, REBASED=matrix.is_rebased, STAGES=tiles.down_stages,
            INTERPRET=self.interpret, num_warps=tiles.down_warps, num_stages=tiles.down_stages,
        )  # fmt: skip

    def sum(self, out: Tensor) -> None:
        """out [T, D] = shared + the rows of each token, ascending expert by ascending expert."""
        sum_places(self.partial, self.chosen, self.packed.num_experts, self.shared, out)


def _fp8(x: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    return codes, x.new_empty(rows, width // 128, dtype=torch.float32)
