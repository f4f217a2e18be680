"""Attention on a GPU over rows where they lie: those of the step, the ring, the log; one softmax, outputs rotated back.

    attend(...)             what `ref.attend`, `unrotate`, rounding and `quantise_fp8` give one after another
    refuses(machine, case)  why they are not served, or None

Launches, order "prefill": one; a program per query and 64 heads. Order "decode": one over splits of a row's tiles, and one that
combines them. A split is a constant number of tiles, so that a row's bits do not depend on the rows beside it; the grid holds
all splits that the longest row could have, and those past a row's end return at once.
Another launch quantises where a head's width is no multiple of 128.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.attend import AttendCase, Range, Selected, hopper, kernels
from lamina.ops.gemm.stored import BLOCK, Activation, empty_activation
from lamina.ops.machine import Machine, is_hopper
from lamina.ops.rows import Rows
from lamina.ops.store import Store

Order = Literal["decode", "prefill"]

_MAX_SPLITS = 16
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut.

    heads  rows of a tile of scores, rows its columns.   warps, stages  as in Triton.   combine_warps  of the combining launch.
    split  tiles of a split where that makes few splits.   is_gluon  the kernel of `hopper.py`.
    `heads`, `warps`, `stages` and `combine_warps` change no bit, the others do.
    """

    heads: int
    rows: int
    warps: int
    stages: int
    combine_warps: int = 4
    split: int = 4
    is_gluon: bool = False


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, one operation at a time (TRITON_INTERPRET=1); bf16 is wrong there."""
    return bool(triton.knobs.runtime.interpret)


def refuses(machine: Machine, case: AttendCase) -> str | None:
    """Why `case` is not served on `machine`, in one line, or None."""
    if not is_interpreted():
        if machine.device != "cuda":
            return f"runs on NVIDIA GPUs, not on {machine.device}"
        needed = (8, 9) if case.is_fp8 else (8, 0)
        if machine.capability < needed:
            found, least = (".".join(map(str, pair)) for pair in (machine.capability, needed))
            what = "fp8 outputs need" if case.is_fp8 else "needs"
            return f"{what} compute capability {least}, this GPU has {found}"
    if not 0 < case.rope < case.width:
        return f"some dims must be rotated and some not, not {case.rope} of {case.width}"
    if case.rope % 2 or case.width % 2:
        return f"dims are rotated in pairs: {case.rope} of {case.width} must both be even"
    return None


@lru_cache(maxsize=32)
def choose_tiles(heads: int, width: int, rope: int, is_exact: bool, is_fp8: bool, is_hopper: bool) -> Tiles:
    """The tiles for so many heads and rows of a format; from the machine code (registers, spills), and measured where said."""
    if is_exact:
        return Tiles(16, 16, 8 if width > 256 else 4, 1)
    if is_hopper and is_fp8 and (width, rope) == hopper.SHAPE:
        return Tiles(64, 64, 4, 1, is_gluon=True)
    if is_hopper and width > 256:  # products of fewer than 64 heads would not use its large instructions
        return Tiles(64, 64, 8, 2)
    few = max(16, triton.next_power_of_2(heads))
    return Tiles(min(32, few), 32, 8 if width > 256 else 4, 2)


def tiles_for(q: Tensor, window: Store, rope: int) -> Tiles:
    """The tiles for these queries and rows on their machine."""
    first = window.views[0]
    is_fp8 = len(window.views) == 3
    is_exact = torch.float32 in (q.dtype, first.dtype)
    return choose_tiles(q.shape[1], q.shape[2], rope, is_exact, is_fp8, is_hopper(q.device))


def split_tiles(tiles: int, least: int) -> int:
    """Tiles of each split of a row that has at most so many; longer tables make longer splits."""
    return max(least, -(-tiles // _MAX_SPLITS))


@lru_cache(maxsize=32)
def fuses_quantising(nope: int, rope: int) -> bool:
    """Whether the programs hold whole blocks of 128 columns: all parts are such, or make up one together at the end."""
    widths = [width for _, width in kernels.parts_of(nope, rope)]
    return (nope + rope) % BLOCK == 0 and sum(width for width in widths if width % BLOCK) in (0, BLOCK)


def _fields(fields: tuple[Tensor, ...], interpret: bool, is_gluon: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Three fields as the kernels take them; of a format with one field, three times that.

    The interpreter gets bf16 as int16. Gluon gets words: int32 of codes and rotated dims, int64 of scales; all fields begin at
    multiples of 8 bytes, because pages and the fields in them do.
    """
    first, second, third = fields if len(fields) == 3 else fields * 3
    if is_gluon:
        return first.view(torch.int32), second.view(torch.int32), third.view(torch.int64)
    return _seen(first, interpret), _seen(second, interpret), _seen(third, interpret)


def _seen(x: Tensor, interpret: bool) -> Tensor:
    return x.view(torch.int16) if interpret and x.dtype == torch.bfloat16 else x


@dataclass(frozen=True, slots=True)
class AttendStep:
    """The launches of one call and the buffers between them; `attend` says what the arguments are."""

    q: Tensor
    own: tuple[Tensor, ...]
    window: Store
    size: int
    scope: Selected | Range | None
    scale: float
    sink: Tensor
    rows: Rows
    cos: Tensor
    sin: Tensor
    out: Activation
    order: Order
    tiles: Tiles

    def run(self) -> None:
        """All launches in order."""
        num_rows, heads, width = self.q.shape
        rope = 2 * self.cos.shape[1]
        nope = width - rope
        interpret = is_interpreted()
        scope, rows, tiles, out = self.scope, self.rows, self.tiles, self.out
        own = _fields(self.own, interpret, tiles.is_gluon)
        ring = log = _fields(self.window.views, interpret, tiles.is_gluon)
        ratio, most, page_entries, places = 0, 0, 1, rows.positions
        if scope is not None:
            log = _fields(scope.log.views, interpret, tiles.is_gluon)
            ratio, page_entries = scope.ratio, scope.log.rows_per_page
            most = rows.tables.shape[1] * page_entries
            if isinstance(scope, Selected):
                places = scope.places
                most = places.shape[1]
        is_fp8 = len(self.window.views) == 3
        is_exact = torch.float32 in (self.q.dtype, self.window.views[0].dtype)
        is_bf16 = self.q.dtype == torch.bfloat16
        fuses = out.is_fp8 and fuses_quantising(nope, rope)
        longest = -(-self.size // tiles.rows) + -(-most // tiles.rows)
        each = split_tiles(longest, tiles.split) if self.order == "decode" else 0
        splits = -(-longest // each) if each else 1
        values = _seen(out.values, interpret)
        codes, scales = (out.codes, out.scales) if out.is_fp8 else (values, self.sink)
        partial = peaks = sums = self.sink
        if each:
            partial = self.q.new_empty(num_rows * splits * heads * (width + 2), dtype=torch.float32)
            peaks = partial[num_rows * splits * heads * width :]
            sums = peaks[num_rows * splits * heads :]
        grid = (num_rows * -(-heads // tiles.heads), splits)
        arguments = (
            _seen(self.q, interpret), *own, *ring, *log, places,
            rows.positions, rows.owners, rows.starts, rows.first_rows, rows.valid_from, rows.table_rows, rows.tables, rows.slots,
            self.sink, self.cos, self.sin, values, codes, scales, partial, peaks, sums, self.scale * _LOG2_E,
            *(field.stride(0) for field in ring), *(field.stride(0) for field in log), rows.tables.shape[1], rows.slots.shape[1],
        )  # fmt: skip
        if tiles.is_gluon:
            hopper.attend[grid](
                *arguments, HEADS=heads, SIZE=self.size, RING=self.window.rows_per_page, SLOT_COLUMN=self.window.slot_column,
                RATIO=ratio, IS_SELECTED=isinstance(scope, Selected), MAX_ENTRIES=most, PAGE_ENTRIES=page_entries,
                SPLIT_TILES=each, QUANTISES=fuses, num_warps=4,
            )  # fmt: skip
        else:
            kernels.attend[grid](
                *arguments, HEADS=heads, HEAD_TILE=tiles.heads, NOPE=nope, ROPE=rope,
                SCALE_BYTES=self.window.views[2].shape[2] if is_fp8 else 1, SIZE=self.size, RING=self.window.rows_per_page,
                SLOT_COLUMN=self.window.slot_column, RATIO=ratio, IS_SELECTED=isinstance(scope, Selected), MAX_ENTRIES=most,
                PAGE_ENTRIES=page_entries, TILE=tiles.rows, SPLIT_TILES=each, IS_FP8=is_fp8, EXACT=is_exact, IS_BF16=is_bf16,
                QUANTISES=fuses, STAGES=tiles.stages, INTERPRET=interpret, num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
        if each:
            kernels.combine[(num_rows * heads,)](
                partial, peaks, sums, rows.positions, rows.owners, self.sink, self.cos, self.sin, values, codes, scales,
                HEADS=heads, NOPE=nope, ROPE=rope, WIDTH=triton.next_power_of_2(width), SIZE=self.size, RATIO=ratio,
                MAX_ENTRIES=most, TILE=tiles.rows, SPLIT_TILES=each, SPLITS=splits,
                SPLIT_ROWS=triton.next_power_of_2(splits), IS_BF16=is_bf16, QUANTISES=fuses, INTERPRET=interpret,
                num_warps=tiles.combine_warps,
            )  # fmt: skip
        if out.is_fp8 and not fuses:
            columns = heads * width
            kernels.quantise[(num_rows * -(-columns // BLOCK),)](
                values, codes, scales, COLUMNS=columns, INTERPRET=interpret, num_warps=1
            )


def attend(
    q: Tensor, own: tuple[Tensor, ...], window: Store, size: int, scope: Selected | Range | None, scale: float, sink: Tensor,
    rows: Rows, cos: Tensor, sin: Tensor, is_fp8: bool, order: Order, tiles: Tiles | None = None,
) -> Activation:  # fmt: skip
    """Softmax attention of each query over its window, its entries and a sink, rotated back by the query's position.

    q         [T, H, d] fp32 or bf16, which the outputs are rounded to.   own  the step's own rows as stored, a [T, n] a field.
    window    the ring of older rows; `size` of the window in tokens, the query's own included.
    sink      [H] fp32 logit without a value; +inf gives zeros.   cos, sin  [T, r/2] fp32; the last r dims are rotated.
    is_fp8    whether products will read the outputs as e4m3.
    order     decode: in splits, a few programs a row.   prefill: a program does a whole row.
    Returns   [T, H * d]; rows of padding are zeros. A row's bits depend on itself, the order and the width of the tables or of
              the list of places.
    """
    num_rows, heads, width = q.shape
    out = empty_activation(num_rows, heads * width, q.dtype, q.device, is_fp8)
    if num_rows:
        if tiles is None:
            tiles = tiles_for(q, window, 2 * cos.shape[1])
        AttendStep(q, own, window, size, scope, scale, sink, rows, cos, sin, out, order, tiles).run()
    return out
