"""Routed experts from FP4 weights on a GPU: FP4 is expanded in registers, the products run on tensor cores in fp8 or bf16.

    experts_fp4(...)    the routed sum of `ref.experts_fp4`, from `packed.pack_weights`
    refuses(case)       why this machine or these shapes are not served, or None

Launches: prepare (1, or 2 for many places), gate-up, quantise, down, sum. Every buffer's size is fixed by the number of
tokens, so a captured graph replays with any routing.
"""

from dataclasses import dataclass, replace

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.experts import hopper, kernels
from lamina.ops.experts.packed import ExpertsCase, PackedExperts

#: so many places are aligned by comparing every pair
_SMALL_ALIGN = 64
_CHUNK = 1024
_ITEMS = 8
_SUM_COLUMNS = 512


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


def refuses(case: ExpertsCase) -> str | None:
    """Why `case` is not served here, in one line, or None."""
    if not is_interpreted():
        if case.device != "cuda":
            return f"runs on NVIDIA GPUs, not on {case.device}"
        needed = (8, 9) if case.activation == "fp8" else (8, 0)
        if case.capability < needed:
            found, least = (".".join(map(str, pair)) for pair in (case.capability, needed))
            return f"{case.activation} activations need compute capability {least}, this GPU has {found}"
    for name, size in (("hidden", case.hidden), ("inner", case.inner)):
        if size < 1 or size % 128:
            return f"the {name} width must be a multiple of 128, not {size}"
    return None


def choose_tiles(num_places: int, packed: PackedExperts) -> Tiles:
    """The tiles for so many (token, expert) pairs, from the mean number an expert has; measured on one H200."""
    mean = num_places / packed.num_experts
    device = packed.gate_up.codes.device
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    # one block of columns alone does not compile in Gluon 3.6
    is_served = min(packed.hidden, packed.inner) > 128
    is_rebased = packed.gate_up.is_rebased and packed.down.is_rebased
    table = _GENERAL_TILES if not is_rebased else _HOPPER_TILES if is_hopper and is_served else _TILES
    tiles = next(tiles for most, tiles in table if mean <= most)
    return tiles if packed.hidden % tiles.down_rows == 0 else replace(tiles, down_rows=128)


def max_blocks(num_places: int, num_experts: int, tokens: int) -> int:
    """The most blocks of `tokens` places that any routing makes: every expert but the first few has a last block of one."""
    chosen = min(num_places, num_experts)
    return chosen + (num_places - chosen) // tokens


def experts_fp4(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    packed: PackedExperts,
    limit: float,
    tiles: Tiles | None = None,
) -> Tensor:
    """Sum over each token's experts, added in ascending expert order; an expert below 0 or past the last is nobody's and skipped.

    x         [T, D] bf16 or fp32.   chosen [T, k] integers.   weights [T, k] fp32.
    limit     clamp of the SwiGLU, 0 = none.
    tiles     None = `choose_tiles`.
    Returns   [T, D] fp32. A token's bits depend neither on the other tokens nor on the tiles.
    """
    out = x.new_empty(x.shape, dtype=torch.float32)
    if out.numel():
        ExpertsStep(x, chosen, weights, packed, limit, tiles).run(out)
    return out


class ExpertsStep:
    """The launches of one call and the buffers between them; the benchmark runs them one by one."""

    __slots__ = (
        "block_expert", "block_first", "block_rows", "chosen", "counts", "firsts", "h", "h_codes", "h_scales", "interpret",
        "is_fp8", "limit", "max_blocks", "num_blocks", "num_places", "packed", "partial", "places", "shares", "tiles", "top_k",
        "x", "x_codes", "x_scales",
    )  # fmt: skip

    def __init__(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        packed: PackedExperts,
        limit: float,
        tiles: Tiles | None = None,
    ) -> None:
        num_tokens, self.top_k = chosen.shape
        self.num_places = num_tokens * self.top_k
        self.tiles = tiles or choose_tiles(self.num_places, packed)
        self.x, self.chosen, self.shares = x.contiguous(), chosen.contiguous(), weights.contiguous()
        self.packed, self.limit = packed, limit
        self.is_fp8 = packed.activation == "fp8"
        self.interpret = is_interpreted()
        self.max_blocks = max_blocks(self.num_places, packed.num_experts, self.tiles.tokens)
        sizes = [self.num_places, *[self.max_blocks] * 3, *[packed.num_experts] * 2, 1]
        whole: Tensor = torch.empty(sum(sizes), dtype=torch.int32, device=x.device)
        parts = torch.split(whole, sizes)
        self.places, self.block_expert, self.block_first, self.block_rows, self.counts, self.firsts, self.num_blocks = parts
        width, inner = packed.hidden, packed.inner
        narrow = torch.float32 if self.interpret else torch.bfloat16
        self.h = x.new_empty(self.num_places, inner, dtype=x.dtype if self.is_fp8 else narrow)
        if self.is_fp8:
            self.x_codes, self.x_scales = _fp8(x, num_tokens, width)
            self.h_codes, self.h_scales = _fp8(x, self.num_places, inner)
        else:  # the scales are never read
            self.x_codes, self.h_codes = self.x.to(narrow), self.h
            self.x_scales = self.h_scales = x.new_empty(1, dtype=torch.float32)
        self.partial = x.new_empty(self.num_places, width, dtype=torch.float32)

    def run(self, out: Tensor) -> None:
        """All launches in order; out [T, D]."""
        self.prepare()
        self.gate_up()
        self.quantise_inner()
        self.down()
        self.sum(out)

    def prepare(self) -> None:
        """The places of each expert, and the blocks; x to fp8."""
        num_experts, tokens = self.packed.num_experts, self.tiles.tokens
        blocks = (self.block_expert, self.block_first, self.block_rows, self.num_blocks)
        items = self.x_scales.numel() if self.is_fp8 else 0
        x = (self.x, self.x_codes, self.x_scales, items)
        programs = triton.cdiv(items, _ITEMS)
        if self.num_places <= _SMALL_ALIGN:
            size = max(16, triton.next_power_of_2(self.num_places))
            kernels.prepare_few[(1 + programs,)](
                self.chosen, self.places, *blocks, self.num_places, num_experts, *x,
                TOKENS=tokens, SIZE=size, ITEMS=_ITEMS, INTERPRET=self.interpret,
            )  # fmt: skip
            return
        chunk = min(_CHUNK, triton.next_power_of_2(self.num_places))
        kernels.prepare_many[(num_experts + programs,)](
            self.chosen, self.places, self.counts, self.firsts, self.num_places, num_experts, *x,
            CHUNK=chunk, ITEMS=_ITEMS, INTERPRET=self.interpret,
        )  # fmt: skip
        size = triton.next_power_of_2(num_experts)
        kernels.align_blocks[(1,)](self.counts, self.firsts, *blocks, num_experts, TOKENS=tokens, SIZE=size)

    def gate_up(self) -> None:
        """h = the SwiGLU's result times the routing weight, rows in the order of `places`."""
        packed, tiles, matrix = self.packed, self.tiles, self.packed.gate_up
        if tiles.is_gluon:
            hopper.gate_up[(self.max_blocks * (2 * packed.inner // tiles.gate_rows),)](
                self.x_codes, self.x_scales, matrix.codes, matrix.scales, matrix.factors, self.shares, self.h, self.places,
                self.block_expert, self.block_first, self.block_rows, self.num_blocks, self.limit,
                K=packed.hidden, INNER=packed.inner, TOP_K=self.top_k, ROWS=tiles.gate_rows, TOKENS=tiles.tokens,
                HAS_LIMIT=self.limit > 0, STAGES=tiles.gate_stages, WARPS=tiles.gate_warps,
                num_warps=tiles.gate_warps,
            )  # fmt: skip
            return
        kernels.gate_up[(self.max_blocks * (2 * packed.inner // tiles.gate_rows),)](
            self.x_codes, self.x_scales, matrix.codes, matrix.scales, matrix.factors, self.shares, self.h, self.places,
            self.block_expert, self.block_first, self.block_rows, self.num_blocks, self.limit,
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
            hopper.down[(self.max_blocks * (packed.hidden // tiles.down_rows),)](
                self.h_codes, self.h_scales, matrix.codes, matrix.scales, matrix.factors, self.partial, self.places,
                self.block_expert, self.block_first, self.block_rows, self.num_blocks,
                K=packed.inner, WIDTH=packed.hidden, ROWS=tiles.down_rows, TOKENS=tiles.tokens, STAGES=tiles.down_stages,
                WARPS=tiles.down_warps, num_warps=tiles.down_warps,
            )  # fmt: skip
            return
        kernels.down[(self.max_blocks * (packed.hidden // tiles.down_rows),)](
            self.h_codes, self.h_scales, matrix.codes, matrix.scales, matrix.factors, self.partial, self.places,
            self.block_expert, self.block_first, self.block_rows, self.num_blocks,
            K=packed.inner, WIDTH=packed.hidden, ROWS=tiles.down_rows, TOKENS=tiles.tokens,
            FP8=self.is_fp8, REBASED=matrix.is_rebased, STAGES=tiles.down_stages,
            INTERPRET=self.interpret, num_warps=tiles.down_warps, num_stages=tiles.down_stages,
        )  # fmt: skip

    def sum(self, out: Tensor) -> None:
        """out [T, D] = the rows of each token, ascending expert by ascending expert."""
        width = self.packed.hidden
        size = min(_SUM_COLUMNS, triton.next_power_of_2(width))
        kernels.sum_experts[(out.shape[0], triton.cdiv(width, size))](
            self.partial, self.chosen, out, self.packed.num_experts, WIDTH=width, TOP_K=self.top_k, SIZE=size
        )


def _fp8(x: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    return codes, x.new_empty(rows, width // 128, dtype=torch.float32)
