"""A plan beside another engine's memory for the same model: what each takes, row by row, and under which assumptions.

The other side comes from its calculator (`rival_vllm`, `rival_sglang`), fed with what layers keep; ours from the plan's layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lamina.base.errors import ConfigError
from lamina.base.sizes import GiB, MiB, format_bytes
from lamina.memory.layout import Layout
from lamina.plan.kept import Kept, NotModelled, kept
from lamina.plan.records import Plan
from lamina.plan.request_lines import format_tokens
from lamina.plan.rival_sglang import VERSION as SGLANG_VERSION
from lamina.plan.rival_sglang import SglangPools, sglang_pools
from lamina.plan.rival_vllm import BATCHED_TOKENS, BATCHES, VllmLayout, formats_for, vllm_layout
from lamina.plan.rival_vllm import VERSION as VLLM_VERSION

ENGINES = {"vllm": f"vLLM {VLLM_VERSION}", "sglang": f"SGLang {SGLANG_VERSION}"}
BYTES, COUNT, SHARE = "bytes", "count", "share"
#: an entry of a block table
_TABLE_ENTRY = 4
#: a stack of MLA layers with a DSA index: layers, channels of a latent and of an index key, and their bytes as served in fp8
_STACK_LAYERS, _STACK_LATENT, _STACK_KEY, _STACK_LATENT_FP8, _STACK_KEY_FP8 = 61, 576, 128, 656, 132


class Rival(Protocol):
    """What every calculator answers for one request of a length."""

    def held_bytes(self, num_tokens: int) -> int:
        """Bytes allocated."""

    def payload_bytes(self, num_tokens: int) -> float:
        """Bytes of them that matter."""

    def requests_that_fit(self, pool_bytes: int, num_tokens: int) -> int:
        """How many run at once in a pool."""


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One figure of both sides; None where there is none.

    unit   bytes, count, or share (of 1).   more_is_better  for a count of requests.
    """

    title: str
    unit: str
    ours: float | None
    theirs: float | None
    more_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        """How many times better ours is; None for shares and where a side is missing or zero."""
        if self.unit == SHARE or not self.ours or not self.theirs:
            return None
        return self.ours / self.theirs if self.more_is_better else self.theirs / self.ours


@dataclass(frozen=True, slots=True)
class Comparison:
    """A plan against an engine. not_modelled: why there are no rows; "" where there are."""

    model: str
    engine: str
    version: str
    rows: tuple[ComparisonRow, ...]
    assumptions: tuple[str, ...]
    not_modelled: str = ""


def rival_of(plan: Plan, engine: str) -> tuple[VllmLayout | SglangPools | NotModelled, tuple[str, ...]]:
    """The engine's calculator for the plan's model, and how it stores the entries, a sentence each.

    Raises ConfigError for an unknown engine.
    """
    if engine not in ENGINES:
        raise ConfigError("against", engine, f"one of {', '.join(ENGINES)}")
    memories = kept(plan.description.memories)
    if not any(one.kind == "fold" for one in memories):
        rival = vllm_layout(memories) if engine == "vllm" else sglang_pools(memories)
        return rival, ("both sides store the same bytes per entry",)
    cache, index = plan.description.cache_format, plan.description.index_format or "fp8"
    stored = index if index in ("fp4", "fp8") else "fp8"
    notes = [] if stored == index else [f"not like for like: it has no {index} index keys, theirs are {stored}"]
    if engine == "vllm":
        notes += [] if cache in ("fp8", "bf16") else [f"not like for like: it has no {cache} entries, theirs are bf16"]
        formats = formats_for(memories, "ds_mla" if cache == "fp8" else "bf16", stored)
        told = f"it stores entries of {formats.entry_bytes:,} B and index keys of {formats.index_bytes:,} B ({formats.name})"
        return vllm_layout(memories, formats), (told, *notes)
    if cache != "fp8":
        return NotModelled(f"{cache} entries: only its fp8 pools are known here"), ()
    key = formats_for(memories, "ds_mla", stored).index_bytes
    return sglang_pools([replace(one, row_bytes=key) if one.name == "index" else one for one in memories]), tuple(notes)


def compare(plan: Plan, engine: str) -> Comparison:
    """The plan beside `engine`, "vllm" or "sglang". Raises ConfigError for another name."""
    rival, notes = rival_of(plan, engine)
    name, _, version = ENGINES[engine].partition(" ")
    if isinstance(rival, NotModelled):
        return Comparison(plan.model, name, version, (), (), rival.reason)
    rows = _requests(plan, rival)
    assumptions = [f"theirs is calculated from the rules of {ENGINES[engine]}, not measured", *notes]
    if plan.layout.draft_tokens:
        assumptions.append("draft blocks and draft rows are counted on our side only, which favours it")
    if isinstance(rival, VllmLayout):
        rows += _vllm_rows(plan, rival)
        assumptions += [*_vllm_assumptions(rival), *rival.notes]
    else:
        rows += _sglang_rows(plan, rival)
        assumptions += _SGLANG_ASSUMPTIONS
    stack = _stack_rows(rival.kept)
    if stack:
        rows += stack
        assumptions += _STACK_ASSUMPTIONS
    return Comparison(plan.model, name, version, tuple(rows), tuple(assumptions))


# Rows ------------------------------------------------------------------------------------------------------------------


def _requests(plan: Plan, rival: VllmLayout | SglangPools) -> list[ComparisonRow]:
    """A request of each length, what of it is waste, and how many fit."""
    rows = []
    loads = {load.context: load for load in plan.workloads}
    for tokens, load in loads.items():
        said = format_tokens(tokens)
        rows.append(ComparisonRow(f"one request of {said} tokens", BYTES, load.bytes_per_request, rival.held_bytes(tokens)))
        rows.append(ComparisonRow("  of it waste", SHARE, load.padding_fraction, rival.waste(tokens)))
        if plan.pool_bytes:
            ours = plan.pool_bytes // plan.page_bytes // load.peak_pages
            title = f"  such requests in {format_bytes(plan.pool_bytes)}"
            rows.append(ComparisonRow(title, COUNT, ours, rival.requests_that_fit(plan.pool_bytes, tokens), more_is_better=True))
        if isinstance(rival, VllmLayout):
            ours = plan.layout.peak_pages(tokens) * plan.page_bytes
            rows.append(ComparisonRow("  free to admit it", BYTES, ours, rival.reserve_rows(tokens) * rival.row_bytes))
    return rows


def _vllm_rows(plan: Plan, rival: VllmLayout) -> list[ComparisonRow]:
    layout, page = plan.layout, plan.page_bytes
    longest = min(MiB, plan.description.max_positions)
    block = rival.scheduler_block
    point = max(block, max((load.context for load in plan.workloads), default=block) // block * block)
    checkpoint = (layout.checkpoint_pages(point) + layout.tail_pages(point)) * page
    said = format_tokens(longest)
    rows = [
        ComparisonRow("a token, for the rest of its request", BYTES, page / layout.block_tokens if layout.has_logs else 0,
                      rival.permanent_bytes_per_token),
        ComparisonRow("a token of a prefill, in flight", BYTES, _growth(layout, BATCHED_TOKENS) * page / BATCHED_TOKENS,
                      rival.in_flight_bytes_per_token),
        ComparisonRow(f"a prefill of {format_tokens(BATCHED_TOKENS)} tokens, in flight", BYTES,
                      _growth(layout, BATCHED_TOKENS) * page, BATCHED_TOKENS * rival.in_flight_bytes_per_token),
        ComparisonRow(f"a point to hit, after {format_tokens(point)} tokens", BYTES, checkpoint,
                      rival.hit_rows(point) * rival.row_bytes),
        ComparisonRow("  the same at any other token, at most", BYTES, _worst_checkpoint(plan), None),
        ComparisonRow("tokens between places where a hit can end", COUNT, 1 if layout.has_state else layout.block_tokens, block),
        ComparisonRow(f"block tables of {said} tokens", BYTES, _table_bytes(layout, longest), rival.table_bytes(longest)),
        ComparisonRow(f"hashes of {said} tokens", COUNT, layout.blocks_for(longest), rival.hashes(longest)),
    ]  # fmt: skip
    return [row for row in rows if row.ours or row.theirs]


def _growth(layout: Layout, tokens: int) -> int:
    """Pages that one step of so many tokens takes at most: its blocks, and of each large window what is live at its end."""
    return layout.block_pages(tokens) + layout.most_tail_pages(tokens)


def _worst_checkpoint(plan: Plan) -> int:
    """Own pages, those of full large windows, and the open block."""
    tails = plan.layout.most_tail_pages(plan.description.max_positions)
    return (plan.checkpoint_range[1] + tails + (1 if plan.layout.has_logs else 0)) * plan.page_bytes \
        if plan.layout.has_state else 0  # fmt: skip


def _table_bytes(layout: Layout, tokens: int) -> int:
    """One entry a block, one a block of each large window."""
    return _TABLE_ENTRY * (layout.block_pages(tokens) + sum(tail.most_blocks(tokens) for tail in layout.tails))


def _sglang_rows(plan: Plan, rival: SglangPools) -> list[ComparisonRow]:
    requests = plan.options.max_requests
    return [
        ComparisonRow("a token, for the rest of its request", BYTES, plan.page_bytes / plan.block_tokens, rival.full_token_bytes),
        ComparisonRow("a token of the window pool", BYTES, None, rival.swa_token_bytes),
        ComparisonRow("share of the pool set aside for windows", SHARE, 0.0, rival.swa_share()),
        ComparisonRow(f"set aside for {requests:,} slots before a request runs", BYTES, 0, rival.slots_bytes(requests)),
        ComparisonRow("  a slot of a running request", BYTES, plan.slot_pages * plan.page_bytes, rival.slot_bytes),
    ]


def _stack_rows(memories: Sequence[Kept]) -> list[ComparisonRow]:
    """The model against an MLA + DSA stack of 61 layers, 1M tokens: entries and whole windows, no states."""
    folds = [one for one in memories if one.kind == "fold"]
    if not any(one.name == "index" for one in memories) or not folds:
        return []
    entry, key = formats_for(memories, "bf16", "fp8").entry_bytes, 2 * (formats_for(memories, "bf16", "fp8").index_bytes - 4)
    bf16 = sum(_entries(one) * (key if one.name == "index" else entry) for one in memories)
    rows = [
        ComparisonRow(f"{_STACK_LAYERS} layers of MLA + DSA against these, 1M tokens, bf16 on both sides", BYTES, bf16,
                      _STACK_LAYERS * 2 * (_STACK_LATENT + _STACK_KEY) * MiB)
    ]  # fmt: skip
    window = next((one.row_bytes for one in memories if one.kind == "window"), 0)
    if 0 < window < entry:
        served = sum(_entries(one) * one.row_bytes for one in memories if one.kind != "fold")
        rows.append(
            ComparisonRow("  the same as both are served, in fp8", BYTES, served,
                          _STACK_LAYERS * (_STACK_LATENT_FP8 + _STACK_KEY_FP8) * MiB)
        )  # fmt: skip
    return rows


def _entries(one: Kept) -> int:
    """Entries after 1M tokens; states are not counted."""
    return MiB // one.stride if one.kind == "log" else one.size if one.kind == "window" else 0


# Words -----------------------------------------------------------------------------------------------------------------


def _vllm_assumptions(rival: VllmLayout) -> list[str]:
    return [
        "theirs is a decoding request that keeps no point to hit, its windows at the worst alignment (on average up to one row "
        "for each window group less); its null block is not counted, which favours it",
        "waste is what is not payload; theirs: exact entries, size - 1 rows of windows, raw rows of open compressor groups on "
        "average; ours: what is live at that length",
        f"to admit a request it asks for {BATCHES} batches of {BATCHED_TOKENS:,} tokens in flight (async scheduling); ours asks "
        "for the pages that the request reaches",
        "a point to hit: its rows of windows and states; ours a checkpoint's own pages and those of large windows. Blocks of "
        "logs are shared on both sides. Hits of ours end where a checkpoint is, or, if all memories are logs, at a block",
        "block tables: two of int32 for each of its groups, in absolute positions; one of ours",
    ]


_SGLANG_ASSUMPTIONS = [
    "pools are split by its default ratio of 0.1 window tokens for a full token; slots are as many as run, one more, which "
    "favours it; all three come out of the same bytes",
    "a running request holds its window, an open page and what waits for eviction: 512 window tokens; C128 states are raw rings "
    "(online mode is off)",
    "waste counts what a request holds; what the split leaves unused is in the number of requests that fit",
    "its points to hit, its tables and its transients are not modelled",
]
_STACK_ASSUMPTIONS = [
    "the MLA + DSA stack: a latent of 576 channels and an index key of 128 for every token and layer, at 2 bytes a channel; as "
    "served 656 + 132 bytes. The bf16 ratio needs bf16 for both caches on both sides, which nobody serves (index keys are fp8 or "
    "fp4); the fp8 ratio is like for like. Entries and full windows are counted, states and padding are not",
]


def comparison_json(comparison: Comparison) -> dict[str, object]:
    """The comparison as plain values that JSON can hold: bytes and counts as numbers, shares of 1, null for unknown."""
    return {
        "model": comparison.model,
        "engine": comparison.engine,
        "version": comparison.version,
        "rows": [
            {"title": row.title.strip(), "unit": row.unit, "ours": row.ours, "theirs": row.theirs, "ratio": row.ratio}
            for row in comparison.rows
        ],
        "assumptions": list(comparison.assumptions),
        "not_modelled": comparison.not_modelled or None,
    }


def comparison_table(comparison: Comparison) -> RenderableType:
    """The rows as a table, and below it the assumptions; for a rich console."""
    if comparison.not_modelled:
        return Text(f"{comparison.engine} {comparison.version} is not modelled for this model: {comparison.not_modelled}.")
    title = Text(f"{comparison.model} beside {comparison.engine} {comparison.version}")
    grid = Table(title=title, title_justify="left", title_style="bold")
    grid.add_column()
    for heading in ("Lamina", comparison.engine, "times better"):
        grid.add_column(heading, justify="right")
    for row in comparison.rows:
        ratio = row.ratio
        grid.add_row(row.title, shown(row.unit, row.ours), shown(row.unit, row.theirs), "" if ratio is None else f"{ratio:,.2f}")
    return Group(grid, "Assumptions:", *(Text(f"- {sentence}.") for sentence in comparison.assumptions))


def shown(unit: str, value: float | None) -> str:
    """A figure for people; "-" where there is none."""
    if value is None:
        return "-"
    if unit == SHARE:
        return f"{value:.1%}"
    if unit == COUNT:
        return f"{value:,.0f}"
    if value >= GiB:
        return f"{value / GiB:,.3f} GiB"
    if value >= MiB:
        return f"{value / MiB:,.2f} MiB"
    return f"{value:,.0f} B" if value == int(value) or value >= 1000 else f"{value:,.1f} B"
