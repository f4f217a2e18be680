"""The index on a GPU: scores of all visible entries, then the places of the best.

    index_topk(...)         the choice of `ref.index_topk`, as places in the log of entries
    refuses(machine, case)  why they are not served, or None

Launches: score; select_places where one program can hold a row of scores, else select_segments before it; the last alone where
no row can see more than top_k entries. Lengths are read on the device: sizes follow from `max_entries`, so a captured graph
replays with any shorter ones. Many rows are worked off in pieces, so that the scores fit a workspace.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.index_topk import IndexCase, kernels
from lamina.ops.machine import Machine, capability_of
from lamina.ops.rows import Rows
from lamina.ops.store import Store

MiB = 1 << 20
#: the most scores that one program holds
_LARGEST = 32768
#: rows of scores so long are not cut in segments
_WHOLE = 8192
#: tiles of so many rows are dealt out by every program
_DEALT_ROWS = 1024
_FORMATS = {"e2m1": "fp4", "e4m3": "fp8", "bf16": "bf16", "fp32": "fp32"}


@dataclass(frozen=True, slots=True)
class Tiles:
    """How scores are computed; no choice changes a bit.

    parts * rows  that share keys, `rows` of them in one product.   entries  keys of a tile.   programs  wanted in a launch.
    registers  the most of a thread.
    """

    parts: int
    rows: int
    entries: int
    warps: int
    stages: int
    programs: int
    registers: int | None = None


#: one row of a request, and several one after another
_SINGLE, _SEVERAL = Tiles(1, 1, 64, 4, 4, 528), Tiles(1, 2, 64, 4, 3, 1056)
#: compute capability 9.0 has registers for twice as many, as products read the queries from shared memory
_HOPPER_SEVERAL = Tiles(2, 2, 64, 4, 3, 1056)
#: fp32 has no tensor cores
_FP32 = Tiles(1, 1, 16, 4, 2, 528)


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, one operation at a time (TRITON_INTERPRET=1); bf16 is wrong there."""
    return bool(triton.knobs.runtime.interpret)


def refuses(machine: Machine, case: IndexCase) -> str | None:
    """Why `case` is not served here, in one line, or None."""
    if not is_interpreted():
        if machine.device != "cuda":
            return f"runs on NVIDIA GPUs, not on {machine.device}"
        if machine.capability < (8, 0):
            return f"needs compute capability 8.0, this GPU has {'.'.join(map(str, machine.capability))}"
    if case.index_format not in _FORMATS.values():
        return f"the index format must be one of {', '.join(_FORMATS.values())}, not {case.index_format}"
    if not 2 <= case.dim <= 128 or case.dim % 2:
        return f"the index dim must be an even number up to 128, not {case.dim}"
    if not 1 <= case.heads <= 128:
        return f"the index heads must be 1 to 128, not {case.heads}"
    if not 1 <= case.top_k <= 2048:
        return f"top_k must be 1 to 2048, not {case.top_k}"
    if segment_size(case.max_entries, case.top_k) is None:
        return f"the entries a row may see must be at most {most_entries(case.top_k)}, not {case.max_entries}"
    return None


def choose_tiles(index_format: str, is_single: bool, capability: tuple[int, int]) -> Tiles:
    """How scores are computed, of one row a request or of several; chosen from the machine code, not yet measured."""
    if index_format == "fp32":
        return _FP32
    if is_single:
        return _SINGLE
    return _HOPPER_SEVERAL if capability == (9, 0) else _SEVERAL


def most_entries(top_k: int) -> int:
    """The longest row that can be chosen from: as many segments as one program holds the best of."""
    return _LARGEST // top_k * _LARGEST


def segment_size(max_entries: int, top_k: int) -> int | None:
    """Scores of a row that one program chooses from at first: all (a power of two), or a segment; None if it cannot be done.

    A segment takes about as long as the best of all segments together. No size changes the result.
    """
    whole = max(16, triton.next_power_of_2(max_entries))
    if whole <= max(_WHOLE, 2 * top_k):
        return whole
    size = max(2048, triton.next_power_of_2(2 * top_k))
    while size < _LARGEST and size < triton.cdiv(max_entries, size) * top_k:
        size *= 2
    return size if triton.cdiv(max_entries, size) * top_k <= _LARGEST else None


def select_warps(size: int, most: int = 32) -> int:
    """Warps of a program that chooses among so many: 16 scores a thread, or more."""
    return max(1, min(most if size <= 16384 else 32, size // 512))


def index_topk(
    queries: tuple[Tensor, ...],
    weights: Tensor,
    weight_scale: float,
    keys: Store,
    rows: Rows,
    ratio: int,
    top_k: int,
    max_entries: int,
    order: Literal["decode", "prefill"],
    workspace_bytes: int = 256 * MiB,
) -> Tensor:
    """Where the entries lie that each row attends to.

    queries      fields [T * Hi, ...] as the codec of the keys encodes them.   weights  [T, Hi] fp32, times weight_scale.
    max_entries  no row sees more, (position + 1) // ratio.   order  changes no bit.
    Returns      [T, top_k] int32, ascending by entry: page * rows_per_page + row in the page; then -1, as all of a padding row.
    """
    places = weights.new_empty(weights.shape[0], top_k, dtype=torch.int32)
    if places.numel():
        IndexStep(queries, weights, weight_scale, keys, rows, ratio, top_k, max_entries, order, workspace_bytes).run(places)
    return places


class IndexStep:
    """The launches of one call and the buffers between them; the benchmark runs them one by one."""

    __slots__ = (
        "chunk", "constants", "entries", "is_scored", "is_single", "kept", "key_fields", "keys", "max_entries", "queries",
        "ratio", "rows", "score_stride", "scores", "segment", "segments", "size", "tiles", "top_k", "weight_scale", "weights",
    )  # fmt: skip

    def __init__(
        self,
        queries: tuple[Tensor, ...],
        weights: Tensor,
        weight_scale: float,
        keys: Store,
        rows: Rows,
        ratio: int,
        top_k: int,
        max_entries: int,
        order: Literal["decode", "prefill"],
        workspace_bytes: int = 256 * MiB,
        tiles: Tiles | None = None,
        segment: int | None = None,
        is_single: bool | None = None,
    ) -> None:
        index_format = _FORMATS[keys.codec.fields[0][1]]
        num_rows, heads = weights.shape
        capability = capability_of(weights.device)
        self.is_single = (order == "decode" or rows.is_single) if is_single is None else is_single
        self.tiles = tiles or choose_tiles(index_format, self.is_single, capability)
        self.weights, self.weight_scale, self.rows, self.keys = weights, weight_scale, rows, keys
        self.ratio, self.top_k, self.max_entries = ratio, top_k, max_entries = ratio, top_k, max(1, max_entries)
        self.queries, self.key_fields = tuple(field.contiguous() for field in queries), keys.views
        width = queries[0].shape[-1]
        groups = queries[1].shape[-1] if len(queries) > 1 else 0
        if index_format == "fp4" and groups == 4:  # four scales are read as one word
            self.queries = (self.queries[0], self.queries[1].view(torch.int32))
            self.key_fields = (keys.views[0], keys.views[1].view(torch.int32))
        self.constants = {
            "RATIO": ratio, "TOP_K": top_k, "HEADS": heads,
            "PADDED_HEADS": max(16, triton.next_power_of_2(heads)), "WIDTH": width,
            "PADDED_WIDTH": max(16, triton.next_power_of_2(width)), "GROUPS": groups, "PAGE": keys.rows_per_page,
            "TILE": self.tiles.entries, "FORMAT": index_format, "HAS_FP8": capability >= (8, 9), "STAGES": self.tiles.stages,
            "INTERPRET": is_interpreted(),
        }  # fmt: skip
        self.is_scored = max_entries > top_k
        self.score_stride = triton.cdiv(max_entries, 64) * 64
        whole = segment_size(max_entries, top_k) if segment is None else segment
        assert whole is not None, f"{max_entries} entries"
        self.segments = triton.cdiv(max_entries, whole)
        self.segment = whole if self.segments > 1 else 0
        self.size = whole if self.segments == 1 else max(16, triton.next_power_of_2(self.segments * top_k))
        per_row = 4 * self.score_stride + (8 * self.segments * top_k if self.segment else 0)
        together = self.tiles.parts * self.tiles.rows
        fitting = max(together, workspace_bytes // per_row // together * together)
        self.chunk = min(num_rows, fitting) if self.is_scored else num_rows
        if self.is_scored:
            self.scores = weights.new_empty(self.chunk, self.score_stride, dtype=torch.int32)
            kept = weights.new_empty(2, self.chunk, self.segments, top_k, dtype=torch.int32) if self.segment else None
            self.kept, self.entries = (kept[0], kept[1]) if kept is not None else (self.scores, self.scores)
        else:
            self.scores = self.kept = self.entries = rows.positions

    def run(self, places: Tensor) -> None:
        """All launches in order; places [T, top_k] int32."""
        for first in range(0, places.shape[0], self.chunk):
            count = min(self.chunk, places.shape[0] - first)
            if self.is_scored:
                self.score(first, count)
                self.select_segments(first, count)
            self.select_places(places, first, count)

    def score(self, first: int, count: int) -> None:
        """The scores of rows [first, first + count)."""
        rows, tiles, constants = self.rows, self.tiles, self.constants
        splits = triton.cdiv(self.max_entries, tiles.entries)
        of_rows = triton.cdiv(count, tiles.parts * tiles.rows)
        grid: tuple[int, ...]
        if self.is_single and count <= _DEALT_ROWS:
            kernel, grid = kernels.score_singles, (min(tiles.programs, count * splits),)
            constants = constants | {"PADDED_ROWS": triton.next_power_of_2(count)}
        else:
            kernel, grid = kernels.score, (min(splits, triton.cdiv(tiles.programs, of_rows)), of_rows)
            constants = constants | {"PARTS": tiles.parts, "ROWS": tiles.rows}
        kernel[grid](
            self.queries[0], self.queries[-1], self.weights, self.weights.stride(0), self.weight_scale,
            self.key_fields[0], self.key_fields[-1], self.key_fields[0].stride(0), self.key_fields[-1].stride(0),
            rows.positions, rows.owners, rows.table_rows, rows.tables, rows.tables.stride(0), self.scores, self.score_stride,
            first, count, self.max_entries, **constants, num_warps=tiles.warps, num_stages=tiles.stages,
            maxnreg=tiles.registers,
        )  # fmt: skip

    def select_segments(self, first: int, count: int) -> None:
        """The best of each segment; nothing to do where one program holds a row."""
        if self.segment:
            rows = self.rows
            kernels.select_segments[(self.segments, count)](
                self.scores, self.score_stride, rows.positions, rows.owners, self.kept, self.entries, first, self.max_entries,
                RATIO=self.ratio, TOP_K=self.top_k, PADDED_K=triton.next_power_of_2(self.top_k), SIZE=self.segment,
                num_warps=select_warps(self.segment),
            )  # fmt: skip

    def select_places(self, places: Tensor, first: int, count: int) -> None:
        """places of rows [first, first + count)."""
        rows = self.rows
        stride = self.segments * self.top_k if self.segment else self.score_stride
        kernels.select_places[(count,)](
            self.kept, self.entries, stride, rows.positions, rows.owners, rows.table_rows, rows.tables, rows.tables.stride(0),
            places, first, self.max_entries, self.segments,
            RATIO=self.ratio, TOP_K=self.top_k, PADDED_K=triton.next_power_of_2(self.top_k), SIZE=self.size,
            SEGMENT=self.segment, PAGE=self.keys.rows_per_page, num_warps=select_warps(self.size, 16),
        )  # fmt: skip
