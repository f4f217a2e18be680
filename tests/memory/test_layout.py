"""Where bytes lie: the shipped shapes against the design's numbers, and rules that hold for every layout."""

from dataclasses import replace

import pytest

from lamina.base.errors import ConfigError
from lamina.base.sizes import GiB, KiB, MiB
from lamina.memory.kinds import EntryFormat, Field, Fold, Log, Snapshot, Window
from lamina.memory.layout import ALIGNMENT, Layout, Span, bytes_by_memory, make_layout
from lamina.memory.plan import requests_that_fit
from tests.memory.shapes import (
    BF16,
    FP8,
    FP32,
    INDEX_FP4,
    INDEX_FP8,
    PRO_RATIOS,
    logs_only,
    scans_only,
    tiny,
    v4_flash,
    v4_memories,
    v4_pro,
)

LAYOUTS = {
    "pro": v4_pro, "flash": v4_flash, "pro_bf16": lambda: v4_pro(BF16, INDEX_FP8), "pro_fp32": lambda: v4_pro(FP32),
    "pro_drafts": lambda: v4_pro(draft_tokens=3), "tiny": tiny, "logs": logs_only, "scans": scans_only,
}  # fmt: skip


def test_pro_and_flash_have_the_designs_numbers() -> None:
    pro, flash = v4_pro(), v4_flash()
    raw = 64 * (584 + 68) * 30 + 2 * 584 * 31
    assert raw <= pro.page_bytes <= raw + 61 * 3 * ALIGNMENT
    assert (pro.block_tokens, flash.block_tokens) == (256, 256)
    assert (pro.slot_pages, flash.slot_pages) == (5, 5)
    assert {pro.checkpoint_pages(p) for p in range(127, 390)} == {4, 5}
    assert {flash.checkpoint_pages(p) for p in range(127, 390)} == {4, 5}
    assert (pro.replay, flash.replay) == (7747, 5461)


@pytest.mark.parametrize(("tokens", "mib"), [(1024, 11.1), (4096, 25.9), (32768, 163.8)])
def test_pro_request_sizes(tokens: int, mib: float) -> None:
    pro = v4_pro()
    assert round(pro.pages_for(tokens) * pro.page_bytes / MiB, 1) == mib


def test_requests_in_the_published_pool() -> None:
    pool = int(26.09 * GiB)
    assert requests_that_fit(v4_pro(), pool, 1024) >= 2400
    assert requests_that_fit(v4_flash(), pool, 1024) >= 3440


def test_state_of_a_pro_request_is_636_kib() -> None:
    slot = bytes_by_memory(v4_pro().slot_spans)
    assert slot["c4_fold"] + slot["index_fold"] + slot["c128_fold"] == 636 * KiB
    assert slot["window"] == 61 * 128 * 584


@pytest.mark.parametrize("name", LAYOUTS)
def test_spans_are_aligned_and_do_not_overlap(name: str) -> None:
    layout = LAYOUTS[name]()
    for position in (None, 0, 1, 127, 128, 130, 1000):
        lists = [layout.block_spans, layout.slot_spans] if position is None else [layout.checkpoint_spans(position)]
        for spans in lists:
            check_spans(layout, spans)


def check_spans(layout: Layout, spans: tuple[Span, ...]) -> None:
    ends: dict[int, int] = {}
    page_of: dict[tuple[int, str], int] = {}
    for span in sorted(spans, key=lambda s: (s.page, s.offset, s.rows)):
        assert span.offset % ALIGNMENT == 0
        if span.rows:
            assert span.offset >= ends.get(span.page, 0), "two arrays overlap"
            ends[span.page] = span.offset + span.nbytes
            assert ends[span.page] <= layout.page_bytes
            key = (span.layer, span.memory)
            assert page_of.setdefault(key, span.page) == span.page, "a memory of a layer crosses two pages"


@pytest.mark.parametrize("name", LAYOUTS)
def test_checkpoints_fit_into_the_slot_that_they_freeze(name: str) -> None:
    layout = LAYOUTS[name]()
    for position in [*range(0, 12), *range(120, 140), 256, 257, 1000]:
        assert layout.checkpoint_pages(position) <= layout.slot_pages
        rows = [sum(count for _, count in ranges) for ranges in layout.slot_live(position)]
        assert rows == [span.rows for span in layout.checkpoint_spans(position)]
        assert all(r <= span.rows for r, span in zip(rows, layout.slot_spans, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_live_bytes_are_the_rows_of_blocks_and_slot(name: str) -> None:
    layout = LAYOUTS[name]()
    for position in (0, 1, 4, 127, 128, 129, 256, 600):
        found = {memory: 0 for memory in layout.live_bytes(position)}
        for block in range(layout.blocks_for(position) if layout.has_logs else 0):
            for span, rows in zip(layout.block_spans, layout.block_live(block, position), strict=True):
                assert rows == layout.block_rows(span, block, position)
                found[span.memory] += rows * span.row_bytes
        for span in layout.checkpoint_spans(position):
            found[span.memory] += span.nbytes
        assert found == layout.live_bytes(position)


def test_layout_id_changes_with_anything_that_moves_a_byte() -> None:
    entry = EntryFormat("e", (Field("a", "u8", (256,)),))
    base = [Log("log", 0, entry, 4), Window("w", 0, entry, 2), Fold("f", 0, (Field("s", "fp32", (4,)),), 4)]
    hidden = Field("hidden", "fp32", (8,))
    variants = {
        "base": make_layout(base, hidden, 16),
        "block": make_layout(base, hidden, 32),
        "draft": make_layout(base, hidden, 16, draft_tokens=1),
        "hidden": make_layout(base, Field("hidden", "fp32", (9,)), 16),
        "no hidden": make_layout(base, None, 16),
        "name": make_layout([replace(base[0], name="other"), *base[1:]], hidden, 16),
        "layer": make_layout([base[0], replace(base[1], layer=1), base[2]], hidden, 16),
        "dtype": make_layout([*base[:2], Fold("f", 0, (Field("s", "int32", (4,)),), 4)], hidden, 16),
        "shape": make_layout([*base[:2], Fold("f", 0, (Field("s", "fp32", (2, 2)),), 4)], hidden, 16),
        "size": make_layout([base[0], replace(base[1], size=3), base[2]], hidden, 16),
        "order": make_layout([base[1], base[0], base[2]], hidden, 16),
    }
    del variants["order"]  # the order between logs and windows moves nothing
    assert len({layout.layout_id for layout in variants.values()}) == len(variants)
    assert variants["base"].layout_id == make_layout(list(base), hidden, 16).layout_id


@pytest.mark.parametrize("block_tokens", [0, -128, 1, 64, 127, 129, 200])
def test_hostile_block_tokens(block_tokens: int) -> None:
    with pytest.raises(ConfigError, match="block_tokens"):
        make_layout(v4_memories(PRO_RATIOS), Field("hidden", "bf16", (7168,)), block_tokens)


def test_a_page_must_hold_one_layers_slot() -> None:
    memories = [Window("w", 0, FP8, 128), Log("index", 0, INDEX_FP4, 4)]
    with pytest.raises(ConfigError, match="larger"):
        make_layout(memories, None, 128)
    chosen = make_layout(memories)
    assert chosen.page_bytes >= 128 * 584 and chosen.block_tokens % 4 == 0


def test_strides_must_nest() -> None:
    with pytest.raises(ConfigError, match="stride"):
        make_layout([Log("a", 0, FP8, 4), Log("b", 1, FP8, 6)])


def test_block_sizes_chosen_for_models_that_store_every_token() -> None:
    big = EntryFormat("kv", (Field("kv", "bf16", (64, 1024)),))
    assert make_layout([Log("kv", 0, big, 1)]).block_tokens == 16
    small = EntryFormat("kv", (Field("kv", "bf16", (1024,)),))
    layout = make_layout([Log("kv", layer, small, 1) for layer in range(2)])
    assert layout.block_tokens == 64 and layout.page_bytes == 256 * KiB, "prefixes of logs alone are hit in whole blocks"
    with_slot = make_layout([*(Log("kv", layer, small, 1) for layer in range(2)), Window("w", 2, small, 8)])
    assert with_slot.page_bytes >= 512 * KiB > with_slot.page_bytes // 2


def test_a_model_without_logs_has_pages_of_512_kib_and_blocks_without_pages() -> None:
    layout = make_layout([Snapshot("s", 0, (Field("s", "fp32", (64,)),))])
    assert layout.page_bytes == 512 * KiB and not layout.has_logs and layout.pages_for(10_000) == layout.slot_pages == 1
