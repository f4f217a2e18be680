"""Attention with grouped keys and values by the C kernels: from a projection's rows to what the output product reads.

NativeHeads.project   [T, n] rows of a projection -> queries, own keys and values as stored, gates
NativeHeads.keep      keeps own rows, as `store_rows`
NativeHeads.attend    as `attend_heads`, in an order of sums of its own that depends on a query's position alone
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.ops import native
from lamina.ops.attend_heads.ref import HeadsCase, Past, places_of
from lamina.ops.sequences import Sequences
from lamina.ops.store import HeadsCodec

_FORMATS = {"fp32": (0, torch.float32), "bf16": (1, torch.bfloat16)}
_PLACES = {"block": 0, "slot": 1, "window": 2}


class _Heads(ctypes.Structure):
    """`heads_t` of native.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "heads", "kv_heads", "key_dim", "value_dim", "window", "reset", "format", "is_bf16", "place", "column", "page_rows",
            "rope", "norms", "norm_all", "norm_after", "has_k", "is_gated",
        )),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "q_eps", "k_eps", "v_eps")),
        *((name, ctypes.c_void_p) for name in ("sinks", "q_gain", "k_gain", "bias", "kept_k", "kept_v")),
        ("k_page", ctypes.c_int64), ("v_page", ctypes.c_int64),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Positioning:
    """What is done with the rows of a projection [queries | keys | values | gates].

    bias    [n] or None.
    q_norm, k_norm  (weight or None, eps) of a head's norm, None: none.   v_eps  of the values' norm without a weight, 0 none.
    all_heads  a norm is over all heads together.   after_rope  norms come after the rotation.   has_keys  False: queries alone.
    """

    bias: Tensor | None
    q_norm: tuple[Tensor | None, float] | None
    k_norm: tuple[Tensor | None, float] | None
    v_eps: float
    all_heads: bool
    after_rope: bool
    has_keys: bool
    is_gated: bool


def refuses(case: HeadsCase, past: Past) -> str | None:
    """Why the C kernels do not serve a layer, or None."""
    if native.library() is None:
        return native.why_not()
    if case.top_k is not None or not isinstance(past.codec, HeadsCodec):
        return "rows are selected, or shared by all heads"
    if past.codec.format not in _FORMATS:
        return f"cache_format={past.codec.format}"
    if any(view.stride(2) != 1 or view.stride(1) != view.shape[2] for view in past.store.views):
        return "the rows of a page lie apart"
    return None


class NativeHeads:
    """A layer that `refuses` does not refuse.   dtype  what values between ops are rounded to."""

    def __init__(self, case: HeadsCase, past: Past, positioning: Positioning, dtype: torch.dtype) -> None:
        found = native.library()
        assert found is not None and isinstance(past.codec, HeadsCodec)
        codec, store, p = past.codec, past.store, positioning
        keys, values = store.views
        number, self._stored = _FORMATS[codec.format]
        self._case, self._past, self._positioning, self._dtype = case, past, positioning, dtype
        self._k_width, self._v_width = codec.heads * codec.key_dim, codec.heads * codec.value_dim
        item = keys.element_size()
        pages = [view.stride(0) * item for view in store.views]
        self._kept = (ctypes.c_void_p * 2)(keys.data_ptr(), values.data_ptr())
        self._row_bytes = (ctypes.c_int64 * 2)(self._k_width * item, self._v_width * item)
        self._page_bytes = (ctypes.c_int64 * 2)(*pages)
        q_norm, k_norm = p.q_norm or (None, 0.0), p.k_norm or (None, 0.0)
        self._heads = _Heads(
            heads=case.heads, kv_heads=case.kv_heads, key_dim=codec.key_dim, value_dim=codec.value_dim,
            window=case.window or 0, reset=case.reset or 0, format=number, is_bf16=dtype == torch.bfloat16,
            place=_PLACES[store.place.kind], column=store.place.column, page_rows=store.rows_per_page, rope=0,
            norms=(p.q_norm is not None) + 2 * (p.k_norm is not None) + 4 * (p.v_eps > 0), norm_all=p.all_heads,
            norm_after=p.after_rope, has_k=p.has_keys, is_gated=p.is_gated, scale=case.scale, softcap=case.softcap,
            q_eps=q_norm[1], k_eps=k_norm[1], v_eps=p.v_eps, sinks=native.address(case.sinks), q_gain=native.address(q_norm[0]),
            k_gain=native.address(k_norm[0]), bias=native.address(p.bias), kept_k=keys.data_ptr(), kept_v=values.data_ptr(),
            k_page=pages[0], v_page=pages[1],
        )  # fmt: skip
        self._at = ctypes.addressof(self._heads)
        self._project, self._keep, self._attend = found.lamina_project, found.lamina_keep, found.lamina_attend

    def project(
        self, rows: Tensor, turns: tuple[Tensor, Tensor] | None, warmth: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        """rows [T, n] fp32 -> queries [T, H, D] scaled, own keys and values [T, K * D] as stored (none without keys), gates.

        turns   cos and sin [T, r], as `rope_tables` gives them; the last r dims of a head turn, in pairs (2i, 2i + 1).
        warmth  [T] factors of queries.
        """
        case, p = self._case, self._positioning
        num, dim = rows.shape[0], self._heads.key_dim
        q = torch.empty(num, case.heads, dim)
        own: tuple[Tensor, ...] = ()
        if p.has_keys:
            own = torch.empty(num, self._k_width, dtype=self._stored), torch.empty(num, self._v_width, dtype=self._stored)
        gates = torch.empty(num, case.heads * dim) if p.is_gated else None
        cos, sin = (None, None) if turns is None else turns
        self._heads.rope = 0 if cos is None else cos.shape[1]
        self._project(
            self._at, rows.data_ptr(), num, rows.stride(0), native.address(cos), native.address(sin), native.address(warmth),
            q.data_ptr(), *((own[0].data_ptr(), own[1].data_ptr()) if own else (None, None)), native.address(gates),
        )  # fmt: skip
        return q, own, gates

    def keep(self, own: tuple[Tensor, ...], sequences: Sequences) -> None:
        """Keeps the step's rows where the layer's lie."""
        store = self._past.store
        key = ("native places", store.place, store.rows_per_page)
        rows, pages, where = sequences.remember(key, lambda: _contiguous(places_of(store, sequences)))
        num = rows.shape[0]
        if num:
            sources = (ctypes.c_void_p * 2)(own[0].data_ptr(), own[1].data_ptr())
            places = rows.data_ptr(), pages.data_ptr(), where.data_ptr()
            self._keep(num, *places, 2, sources, self._row_bytes, self._kept, self._page_bytes)
            store.bytes_written += num * store.row_bytes

    def attend(self, q: Tensor, own: tuple[Tensor, ...], sequences: Sequences) -> Tensor:
        """q [T, H, D] scaled, own rows as stored -> [T, H * Dv] fp32, rounded; rows of padding are zeros."""
        num, heads = q.shape[0], self._heads
        pieces, table = _pieces(self._past, sequences)
        out = torch.empty(num, heads.heads * heads.value_dim)
        self._attend(
            self._at, q.data_ptr(), own[0].data_ptr(), own[1].data_ptr(), pieces.data_ptr(), pieces.shape[0], table.data_ptr(),
            table.stride(0), sequences.num_rows, num, out.data_ptr(),
        )  # fmt: skip
        return out


def gate(out: Tensor, gates: Tensor, dtype: torch.dtype) -> None:
    """out [T, n] <- out / (1 + e^-gates), rounded."""
    found = native.library()
    assert found is not None
    found.lamina_gate(out.data_ptr(), gates.data_ptr(), out.numel(), dtype == torch.bfloat16)


def _contiguous(places: tuple[Tensor, bool, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    rows, _, pages, where = places
    return rows.contiguous(), pages.contiguous(), where.contiguous()


def _pieces(past: Past, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """([R, 6] int64 `piece_t` of native.c, the table [*, width] int64 of pages that `table_row` is a row of)."""
    place = past.store.place

    def in_table() -> tuple[Tensor, Tensor]:
        facts = [
            (p.first_row, p.stop - p.start, p.start, p.valid_from, p.table_row if place.kind == "block" else number, 0)
            for number, p in enumerate(sequences.pieces)
        ]
        return torch.tensor(facts, dtype=torch.int64), sequences.tables if place.kind == "block" else sequences.slots

    def in_windows() -> tuple[Tensor, Tensor]:
        of_group = [pages[place.group] for pages in sequences.windows]
        firsts = [min(pages, default=0) for pages in of_group]
        width = max((max(pages, default=0) - first for pages, first in zip(of_group, firsts, strict=True)), default=0) + 1
        table = [[pages[first + i][place.column] if first + i in pages else 0 for i in range(width)]
                 for pages, first in zip(of_group, firsts, strict=True)]  # fmt: skip
        facts = [
            (p.first_row, p.stop - p.start, p.start, p.valid_from, number, first)
            for number, (p, first) in enumerate(zip(sequences.pieces, firsts, strict=True))
        ]
        return torch.tensor(facts, dtype=torch.int64), torch.tensor(table, dtype=torch.int64)

    if place.kind == "window":
        return sequences.remember(("native pieces", place), in_windows)
    return sequences.remember(("native pieces", place.kind), in_table)
