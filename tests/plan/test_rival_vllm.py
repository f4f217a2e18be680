"""The vLLM calculator reproduces that engine's layout from first principles: groups, pages, rows, rows held, reserves, waste.

Expected figures come from the published tables for vLLM 0.33 and from arithmetic done by hand beside each of them, with

    Pro    61 layers: 30 with c4 and index, 31 with c128; a window of 128 in each of the 61
    Flash  43 layers: 21 with c4 and index, 20 with c128, 2 with the window alone
    width 512 (448 + 64 rotated), index width 128; running states: 3 x 4 B a channel, twice where groups overlap
"""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.base.sizes import GiB, KiB, MiB
from lamina.memory.kinds import Alias, EntryFormat, Field, Fold, Log, Memory, Snapshot, Window
from lamina.plan.kept import Kept, NotModelled, kept
from lamina.plan.rival_vllm import Formats, Group, Pages, VllmLayout, formats_for, vllm_layout

#: (cache, index) of the five tables
FORMATS = [("ds_mla", "fp4"), ("ds_mla", "fp8"), ("fp8_row", "fp4"), ("bf16", "fp8"), ("bf16", "fp4")]
#: layers with c4, layers with c128, layers with the window alone
SHAPES = {"pro": (30, 31, 0), "flash": (21, 20, 2)}
POOL = int(26.09 * GiB)


def compressed(c4: int, c128: int, alone: int) -> list[Kept]:
    """What the layers keep, in our fp8 (584 B) and fp4 index (68 B) formats."""
    found: list[Kept] = []
    for layer in range(alone + c128 + c4):
        found.append(Kept("window", "window", layer, 584, size=128))
        if alone <= layer < alone + c128:
            found.append(Kept("c128", "log", layer, 584, stride=128))
            found.append(Kept("c128_fold", "fold", layer, 3 * 512 * 4, period=128, fold_tokens=128))
        elif layer >= alone + c128:
            found.append(Kept("c4", "log", layer, 584, stride=4))
            found.append(Kept("index", "log", layer, 68, stride=4))
            found.append(Kept("c4_fold", "fold", layer, 2 * 3 * 512 * 4, period=4, fold_tokens=8))
            found.append(Kept("index_fold", "fold", layer, 2 * 3 * 128 * 4, period=4, fold_tokens=8))
    return found


def known(layout: VllmLayout | NotModelled) -> VllmLayout:
    assert isinstance(layout, VllmLayout), layout
    return layout


def of(model: str, cache: str, index: str) -> VllmLayout:
    memories = compressed(*SHAPES[model])
    return known(vllm_layout(memories, formats_for(memories, cache, index)))


def by_block(layout: VllmLayout) -> dict[int, list[Group]]:
    found: dict[int, list[Group]] = {}
    for group in layout.groups:
        found.setdefault(group.block_tokens, []).append(group)
    return found


# What layers keep ------------------------------------------------------------------------------------------------------


def test_memories_are_read_as_plain_numbers() -> None:
    row = EntryFormat("fp8", (Field("nope", "e4m3", (448,)), Field("rope", "bf16", (64,)), Field("scale", "e8m0", (8,))))
    open_, next_ = Field("open", "fp32", (1536,)), Field("next", "fp32", (1536,))
    memories: list[Memory] = [
        Window("window", 0, row, 128), Log("c4", 0, row, 4), Fold("c4_fold", 0, (open_, next_), 4, ("open",)),
        Fold("c128_fold", 1, (open_,), 128), Snapshot("state", 2, (Field("s", "fp32", (2, 8)),)),
        Window("chunk", 3, row, 64, reset=64), Window("sinks", 4, row, 9, keep_first=3), Alias("kv", 5, "c4", 0),
        Window("draft_window", 6, row, 128, lag=1), Window("draft_window", 7, row, 128),
    ]  # fmt: skip
    assert kept(memories) == (
        Kept("window", "window", 0, 448 + 2 * 64 + 8, size=128),
        Kept("c4", "log", 0, 584, stride=4),
        # carried over, so two groups of 4; 2 x 1,536 x 4 B
        Kept("c4_fold", "fold", 0, 12_288, period=4, fold_tokens=8),
        Kept("c128_fold", "fold", 1, 6_144, period=128, fold_tokens=128),
        Kept("state", "snapshot", 2, 64),
        Kept("chunk", "window", 3, 584, size=64, reset=64),
        Kept("sinks", "window", 4, 584, size=9, keep_first=3),
    )


def test_formats_follow_from_the_widths() -> None:
    memories = compressed(30, 31, 0)
    # 512 channels: the record of 584 B, a byte each, two bytes each; 128 channels: 64 + 128 / 32 = 68, 128 + 4 = 132
    assert formats_for(memories, "ds_mla", "fp4") == Formats("ds_mla + fp4 index", 584, 68, 576)
    assert formats_for(memories, "fp8_row", "fp8") == Formats("fp8_row + fp8 index", 512, 132, 512)
    assert formats_for(memories, "bf16", "fp8") == Formats("bf16 + fp8 index", 1024, 132, 512)


# Groups, pages and rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize(("cache", "index"), FORMATS)
def test_there_are_always_five_groups(model: str, cache: str, index: str) -> None:
    layout = of(model, cache, index)
    assert sorted(group.block_tokens for group in layout.groups) == [4, 8, 64, 64, 256]
    assert layout.scheduler_block == 256  # lcm(256, 64, 4, 8)
    assert layout.hash_block == 4  # gcd
    c4, c128, alone = SHAPES[model]
    blocks = by_block(layout)
    assert blocks[256][0].layers == 2 * c4 + c128 and blocks[256][0].is_log
    assert [group.layers for group in blocks[64]] == ([31, 30] if model == "pro" else [22, 21])
    assert sum(group.layers for group in blocks[64]) == c4 + c128 + alone
    assert (blocks[4][0].layers, blocks[8][0].layers) == (2 * c4, c128)
    assert [group.window for size in (64, 4, 8) for group in blocks[size]] == [128, 128, 8, 128]


def test_pages_are_rounded_up_to_576_bytes() -> None:
    """64 x 584 = 37,376 -> 65 x 576; 64 x 132 = 8,448 -> 15 x 576; 2 x 584 = 1,168 -> 3 x 576; states of 32,768 and 8,192 B."""
    pages = {page.name: page for group in of("pro", "ds_mla", "fp8").groups for page in group.pages}
    assert {name: page.nbytes for name, page in pages.items()} == {
        "c4": 37_440, "index": 8_640, "c128": 1_728, "window": 37_440,
        # raw rows hold kv and score: C4 4 x 2 x (2 x 512) x 4 = 32,768, index 4 x 2 x (2 x 128) x 4 = 8,192, C128 8 x 2 x 512 x 4
        "c4_fold": 57 * 576, "index_fold": 15 * 576, "c128_fold": 57 * 576,
    }  # fmt: skip
    assert (65 * 576, 15 * 576, 3 * 576, 57 * 576) == (37_440, 8_640, 1_728, 32_832)
    exact = {name: page.exact_bytes for name, page in pages.items() if name.endswith("_fold")}
    assert exact == {"c4_fold": 32_768, "index_fold": 8_192, "c128_fold": 32_768}


def test_other_formats_are_rounded_up_to_512_bytes() -> None:
    """64 x 1,024 = 65,536 and 2 x 1,024 = 2,048 need nothing; 64 x 132 = 8,448 -> 17 x 512; 64 x 68 = 4,352 -> 9 x 512."""
    pages = {page.name: page.nbytes for group in of("flash", "bf16", "fp8").groups for page in group.pages}
    assert (pages["c4"], pages["c128"], pages["index"], pages["c128_fold"]) == (65_536, 2_048, 17 * 512, 32_768)
    pages = {page.name: page.nbytes for group in of("flash", "fp8_row", "fp4").groups for page in group.pages}
    assert (pages["c4"], pages["c128"], pages["index"], pages["index_fold"]) == (32_768, 1_024, 9 * 512, 8_192)


#: row bytes, then bytes used by the groups of 256, 64, 64, 4 and 8 tokens, and the share of a row that each leaves idle, in %
ROWS = {
    # 30 x 37,440 + 30 x 4,608 + 31 x 1,728; 31 x 37,440; 30 x 37,440; 30 x (32,832 + 8,640); 31 x 32,832
    ("pro", "ds_mla", "fp4"): (1_315_008, (1_315_008, 1_160_640, 1_123_200, 1_244_160, 1_017_792), (0, 11.7, 14.6, 5.4, 22.6)),
    # the index page 8,640 instead of 4,608: 30 x 4,032 = 120,960 more
    ("pro", "ds_mla", "fp8"): (1_435_968, (1_435_968, 1_160_640, 1_123_200, 1_244_160, 1_017_792), (0, 19.2, 21.8, 13.4, 29.1)),
    # 30 x 32,768 + 30 x 4,608 + 31 x 1,024; 31 x 32,768; 30 x 32,768; 30 x (32,768 + 8,192), the widest; 31 x 32,768
    ("pro", "fp8_row", "fp4"): (1_228_800, (1_153_024, 1_015_808, 983_040, 1_228_800, 1_015_808), (6.2, 17.3, 20.0, 0, 17.3)),
    # 30 x 65,536 + 30 x 8,704 + 31 x 2,048; 31 x 65,536; 30 x 65,536
    ("pro", "bf16", "fp8"): (2_290_688, (2_290_688, 2_031_616, 1_966_080, 1_228_800, 1_015_808), (0, 11.3, 14.2, 46.4, 55.7)),
    ("pro", "bf16", "fp4"): (2_167_808, (2_167_808, 2_031_616, 1_966_080, 1_228_800, 1_015_808), (0, 6.3, 9.3, 43.3, 53.1)),
    # 21 x 37,440 + 21 x 4,608 + 20 x 1,728; 22 and 21 x 37,440; 21 x (32,832 + 8,640); 20 x 32,832
    ("flash", "ds_mla", "fp4"): (917_568, (917_568, 823_680, 786_240, 870_912, 656_640), (0, 10.2, 14.3, 5.1, 28.4)),
    ("flash", "ds_mla", "fp8"): (1_002_240, (1_002_240, 823_680, 786_240, 870_912, 656_640), (0, 17.8, 21.6, 13.1, 34.5)),
    ("flash", "fp8_row", "fp4"): (860_160, (805_376, 720_896, 688_128, 860_160, 655_360), (6.4, 16.2, 20.0, 0, 23.8)),
    ("flash", "bf16", "fp8"): (1_600_000, (1_600_000, 1_441_792, 1_376_256, 860_160, 655_360), (0, 9.9, 14.0, 46.2, 59.0)),
    ("flash", "bf16", "fp4"): (1_513_984, (1_513_984, 1_441_792, 1_376_256, 860_160, 655_360), (0, 4.8, 9.1, 43.2, 56.7)),
}


@pytest.mark.parametrize(("key", "expected"), ROWS.items())
def test_rows(key: tuple[str, str, str], expected: tuple[int, tuple[int, ...], tuple[float, ...]]) -> None:
    layout, (row, used, idle) = of(*key), expected
    blocks = by_block(layout)
    groups = [*blocks[256], *blocks[64], *blocks[4], *blocks[8]]
    assert layout.row_bytes == row
    assert tuple(group.used_bytes for group in groups) == used
    assert [100 * layout.idle_fraction(group) for group in groups] == pytest.approx(idle, abs=0.05 + 1e-9)


def test_the_sums_behind_two_rows() -> None:
    assert 30 * 37_440 + 30 * 4_608 + 31 * 1_728 == 1_315_008
    assert 21 * 65_536 + 21 * 8_704 + 20 * 2_048 == 1_600_000


def test_published_block_counts() -> None:
    """A run of Pro printed 21,306 blocks in 26.09 GiB, and 23,120 in 26.46 GiB with byte-a-channel rows."""
    for blocks, gib, cache in ((21_306, 26.09, "ds_mla"), (23_120, 26.46, "fp8_row")):
        assert round(blocks * of("pro", cache, "fp4").row_bytes / GiB, 2) == gib


# Tokens and requests ---------------------------------------------------------------------------------------------------

#: (model, cache, index): permanent bytes per token = row / 256, in flight = 105 times that
PER_TOKEN = {
    ("pro", "ds_mla", "fp4"): (5_137, 539_359), ("pro", "ds_mla", "fp8"): (5_609, 588_971),
    ("pro", "fp8_row", "fp4"): (4_800, 504_000), ("pro", "bf16", "fp8"): (8_948, 939_540),
    ("flash", "ds_mla", "fp4"): (3_584, 376_346), ("flash", "ds_mla", "fp8"): (3_915, 411_075),
    ("flash", "fp8_row", "fp4"): (3_360, 352_800), ("flash", "bf16", "fp8"): (6_250, 656_250),
}  # fmt: skip


@pytest.mark.parametrize(("key", "expected"), PER_TOKEN.items())
def test_bytes_per_token(key: tuple[str, str, str], expected: tuple[int, int]) -> None:
    layout = of(*key)
    assert round(layout.permanent_bytes_per_token) == expected[0]
    assert round(layout.in_flight_bytes_per_token) == expected[1]
    times = (Fraction(1, 256) + Fraction(2, 64) + Fraction(1, 4) + Fraction(1, 8)) / Fraction(1, 256)
    assert times == 105
    assert layout.in_flight_bytes_per_token / layout.permanent_bytes_per_token == pytest.approx(105)


@pytest.mark.parametrize("model", SHAPES)
def test_a_decoding_request_holds_26_rows_besides_its_log(model: str) -> None:
    """Windows: ceil(127 / 64) + 1 = 3, twice; C4 states: ceil(7 / 4) + 1 = 3; C128 states: ceil(127 / 8) + 1 = 17."""
    layout = of(model, "ds_mla", "fp4")
    for tokens in (256, 1000, 4 * KiB, MiB):
        assert layout.held_rows(tokens) == math.ceil(tokens / 256) + 26
    # shorter than its windows: one block of the log, ceil(20 / 64) in each window group, 3 of C4 states, ceil(20 / 8) of C128
    assert layout.held_rows(20) == 1 + 1 + 1 + 3 + 3
    # 26 rows of Pro are 34,190,208 B; the 17 of C128 states 22,355,136 B, 40 % of a request of 4K tokens (42 rows)
    if model == "pro":
        assert 26 * layout.row_bytes == 34_190_208
        assert 17 * layout.row_bytes == 22_355_136 and round(17 / 42, 2) == 0.40


#: length -> (allocated, in MiB below 1M and in GiB there; waste in %); None where the table does not say
WASTE = {
    ("pro", "ds_mla", "fp4"): {256: (33.9, 56.2), 1024: (37.6, 50.8), 4096: (52.7, 36.8), 32768: (193, 11.5), 131072: (675, 4.8),
                               MiB: (5.048, 2.4)},
    # 538 rows of 2,290,688 B at 128K are 1,175.3 MiB; the table's 1,176 is that, rounded up
    ("pro", "bf16", "fp8"): {256: (59.0, 67.7), 1024: (65.5, 61.0), 4096: (91.8, 43.7), 32768: (336, 12.1), 131072: (1175.3, 3.7),
                             MiB: (8.794, 0.8)},
    ("pro", "fp8_row", "fp4"): {256: (None, 55.2), 1024: (None, 50.4), 4096: (None, 37.9), 32768: (None, 15.3),
                                131072: (None, 9.2), MiB: (4.717, 7.1)},
    ("flash", "ds_mla", "fp4"): {256: (23.6, 57.7), 1024: (26.3, 52.1), 4096: (36.8, 37.8), 32768: (135, 11.7),
                                 131072: (471, 4.8), MiB: (3.522, 2.3)},
    ("flash", "bf16", "fp8"): {256: (None, 68.6), 1024: (None, 61.8), 4096: (None, 44.2), 32768: (None, 12.3),
                               131072: (None, 3.8), MiB: (None, 0.8)},
    ("pro", "ds_mla", "fp8"): {4096: (None, 38.9), 32768: (None, 11.9), 131072: (None, 4.6), MiB: (5.513, 2.1)},
    ("flash", "ds_mla", "fp8"): {4096: (None, 39.8), 32768: (None, 12.1), 131072: (None, 4.6), MiB: (None, 2.0)},
}  # fmt: skip


@pytest.mark.parametrize(("key", "lengths"), WASTE.items())
def test_waste(key: tuple[str, str, str], lengths: dict[int, tuple[float | None, float]]) -> None:
    layout = of(*key)
    for tokens, (allocated, waste) in lengths.items():
        assert 100 * layout.waste(tokens) == pytest.approx(waste, abs=0.1), tokens
        if allocated is not None:
            held = layout.held_bytes(tokens) / (GiB if tokens == MiB else MiB)
            assert held == pytest.approx(allocated, rel=0.002), tokens


def test_payload_is_exact_entries_windows_and_raw_rows() -> None:
    """Pro at 1K, bytes: entries 256 x (584 + 68) x 30 + 8 x 584 x 31, windows 127 x 584 x 61, and raw rows on average:
    of C4 the group before (4) and 0 to 3 of the open one, 5.5 x (8,192 + 2,048) x 30; of C128 0 to 127, 63.5 x 4,096 x 31."""
    layout = of("pro", "ds_mla", "fp4")
    entries = 5_007_360 + 144_832
    raw = 1_689_600 + 8_062_976
    assert layout.payload_bytes(1024) == entries + 4_524_248 + raw
    # as running results: 30 x (12,288 + 3,072) + 31 x 6,144 = 651,264 = 636 KiB
    assert layout.payload_bytes(1024, raw=False) == entries + 4_524_248 + 636 * KiB
    # two tokens: two rows of each window, two raw rows of each state, no entry
    assert layout.payload_bytes(2) == 2 * (584 * 61 + 10_240 * 30 + 4_096 * 31)
    assert layout.payload_bytes(0) == 0


def test_published_payloads_of_one_long_request() -> None:
    """Payload at 2^20 tokens in GiB, Pro then Flash: ds_mla + fp4, fp8 rows + fp4, ds_mla + fp8; and bf16 + fp8 for Pro."""
    published = [("ds_mla", "fp4", 4.927, 3.441), ("fp8_row", "fp4", 4.382, 3.060), ("ds_mla", "fp8", 5.396, 3.769)]
    for cache, index, pro, flash in published:
        assert of("pro", cache, index).payload_bytes(MiB) / GiB == pytest.approx(pro, abs=5e-4)
        assert of("flash", cache, index).payload_bytes(MiB) / GiB == pytest.approx(flash, abs=5e-4)
    assert of("pro", "bf16", "fp8").payload_bytes(MiB) / GiB == pytest.approx(8.725, abs=5e-4)


#: length -> requests held in 26.09 GiB; with exact raw payload; with running states
MANY = {
    ("pro", "ds_mla", "fp4"): {256: (789, 1_799, 4_334), 1024: (710, 1_441, 2_712), 4096: (507, 803, 1_086)},
    ("pro", "bf16", "fp8"): {1024: (407, 1_044, 1_581)},
    ("flash", "ds_mla", "fp4"): {1024: (1_017, 2_126, 3_872)},
    ("flash", "bf16", "fp8"): {1024: (583, 1_526, 2_256)},
}


@pytest.mark.parametrize(("key", "lengths"), MANY.items())
def test_many_short_requests(key: tuple[str, str, str], lengths: dict[int, tuple[int, int, int]]) -> None:
    layout = of(*key)
    for tokens, (held, raw, running) in lengths.items():
        assert layout.requests_that_fit(POOL, tokens) == held
        assert int(POOL / layout.payload_bytes(tokens)) == raw
        assert int(POOL / layout.payload_bytes(tokens, raw=False)) == running


def test_256_requests_take() -> None:
    """256 x (1 + 26), (4 + 26) and (16 + 26) rows of 1,315,008 B: 8.5, 9.4 and 13.2 GiB."""
    layout = of("pro", "ds_mla", "fp4")
    assert [round(256 * layout.held_bytes(n) / GiB, 1) for n in (256, 1024, 4096)] == [8.5, 9.4, 13.2]


#: batch -> GiB asked for 32K and 1M, Pro then Flash; one chunk's transient, Pro then Flash
RESERVES = {
    2048: ((2.23, 7.09), (1.55, 4.94), (1.03, 0.72)),
    8192: ((8.34, 13.2), (5.82, 9.21), (4.12, 2.87)),
    16384: ((16.5, 21.4), (11.5, 14.9), (8.23, 5.74)),
}


@pytest.mark.parametrize(("batch", "expected"), RESERVES.items())
def test_admission_reserve(batch: int, expected: tuple[tuple[float, float], ...]) -> None:
    for model, reserve, transient in (("pro", expected[0], expected[2][0]), ("flash", expected[1], expected[2][1])):
        layout = of(model, "ds_mla", "fp4")
        found = [layout.reserve_rows(tokens, batch) * layout.row_bytes / GiB for tokens in (32 * KiB, MiB)]
        assert found == pytest.approx(reserve, rel=0.004)
        assert batch * layout.in_flight_bytes_per_token / GiB == pytest.approx(transient, abs=0.0051)


def test_the_reserve_of_32k_row_by_row() -> None:
    """16,384 tokens in flight: log 128; windows ceil(16,511 / 64) + 1 = 259, twice; C4 ceil(16,391 / 4) + 1 = 4,099; C128
    ceil(16,511 / 8) + 1 = 2,065. Together 6,810 rows, of which 6,682 for windows and states."""
    layout = of("pro", "ds_mla", "fp4")
    rows = sorted((group.block_tokens, group.reserved(32 * KiB, 16_384)) for group in layout.groups)
    assert rows == [(4, 4_099), (8, 2_065), (64, 259), (64, 259), (256, 128)]
    assert layout.reserve_rows(32 * KiB) == 6_810
    assert layout.window_share(32 * KiB) == pytest.approx(6_682 / 6_810) and round(6_682 / 6_810, 3) == 0.981
    assert round(layout.window_share(MiB), 2) == 0.62  # 6,682 / (4,096 + 6,682)
    # a chunk's permanent part is 8,192 / 256 = 32 rows: 40 MiB, 28 MiB for Flash
    assert round(32 * layout.row_bytes / MiB) == 40 and round(32 * of("flash", "ds_mla", "fp4").row_bytes / MiB) == 28


def test_reported_reserves() -> None:
    """4,227 and 2,129 blocks of states were reported for Flash: both follow from 16,896 tokens in flight, two batches of
    8,192 and 32 requests of 8 rows each: ceil((7 + 16,896) / 4) + 1 and ceil((127 + 16,896) / 8) + 1."""
    layout = of("flash", "ds_mla", "fp8")
    blocks = by_block(layout)
    assert [blocks[size][0].reserved(MiB, 2 * (8_192 + 32 * 8)) for size in (4, 8)] == [4_227, 2_129]


def test_a_point_to_hit_is_22_rows() -> None:
    """Windows 2 x ceil(127 / 64) = 4, C4 states ceil(7 / 4) = 2, C128 states ceil(127 / 8) = 16, which no hit reads."""
    pro, flash = of("pro", "ds_mla", "fp4"), of("flash", "ds_mla", "fp4")
    assert pro.hit_rows(256) == pro.hit_rows(MiB) == flash.hit_rows(4096) == 22
    assert round(22 * pro.row_bytes / MiB, 2) == 27.59 and round(22 * flash.row_bytes / MiB, 2) == 19.25
    assert by_block(pro)[8][0].hit(256) == 16 and round(16 * pro.row_bytes / MiB, 2) == 20.07


def test_tables_and_hashes() -> None:
    """1M tokens: 2^20 / 4 + 2^20 / 8 + 2 x 2^20 / 64 + 2^20 / 256 entries, two int32 tables; a hash every 4 tokens."""
    layout = of("pro", "ds_mla", "fp4")
    assert layout.table_entries(MiB) == 262_144 + 131_072 + 2 * 16_384 + 4_096 == 430_080
    assert layout.table_bytes(MiB) == 430_080 * 8 and round(layout.table_bytes(MiB) / MiB, 2) == 3.28
    assert 256 * layout.table_bytes(MiB) == 840 * MiB
    assert layout.table_entries(128 * KiB) == 53_760 and layout.table_bytes(128 * KiB) == 420 * KiB
    assert layout.hashes(MiB) == 262_144


# Other families --------------------------------------------------------------------------------------------------------


def attention(full: int, windows: int = 0, size: int = 0, row: int = 4096) -> list[Kept]:
    """Layers of full attention, then of windows, with `row` bytes a token."""
    found = [Kept("kv", "log", layer, row, stride=1) for layer in range(full)]
    return found + [Kept("window", "window", full + layer, row, size=size) for layer in range(windows)]


def test_full_attention_is_one_group_of_16_tokens() -> None:
    """32 layers of 8 heads x 128 x (k, v) x 2 B = 4,096 B: a block of 16 tokens is 2 MiB, and a request wastes less than one."""
    layout = known(vllm_layout(attention(32)))
    assert [(group.block_tokens, group.layers) for group in layout.groups] == [(16, 32)]
    assert layout.row_bytes == 32 * 4096 * 16 == 2 * MiB
    assert layout.held_rows(4096) == 256 and layout.waste(4096) == 0
    assert layout.held_rows(4097) == 257 and layout.waste(4097) == pytest.approx(1 - 4097 / 4112)
    # nothing is only in flight, nothing but the log need be cached for a hit
    assert layout.in_flight_bytes_per_token == layout.permanent_bytes_per_token == 32 * 4096
    assert layout.hit_rows(4096) == 0 and layout.reserve_rows(4097) == 257
    assert layout.hashes(MiB) == 65_536 and layout.table_entries(MiB) == 65_536


def test_latents_and_index_keys_share_one_group() -> None:
    """61 layers of 656 + 132 B: 48,068 B a token, without waste."""
    memories = [Kept(name, "log", layer, n, stride=1) for layer in range(61) for name, n in (("latent", 656), ("index", 132))]
    layout = known(vllm_layout(memories))
    assert len(layout.groups) == 1 and layout.permanent_bytes_per_token == 61 * 788 == 48_068
    assert layout.held_bytes(MiB) / GiB == pytest.approx(46.94, abs=0.005)


def test_windows_are_cut_into_groups_of_the_smallest_size() -> None:
    """62 layers, 10 full and 52 with a window of 1,024, 8,192 B a token: groups of 10, so 6 groups of windows, 8 places of
    them empty; a row is 10 x 16 x 8,192 B. At 128K: 8,192 rows and 6 x (ceil(1,023 / 16) + 1 = 65)."""
    layout = known(vllm_layout(attention(10, 52, 1024, 8192)))
    assert [group.layers for group in layout.groups] == [10, 10, 10, 10, 10, 10, 2]
    assert layout.row_bytes == 10 * 16 * 8192 == 1_310_720
    assert layout.held_rows(128 * KiB) == 8_192 + 6 * 65 == 8_582
    assert layout.notes == ("groups of 10 layers, 8 places of them empty",)
    # payload: 128K x 10 x 8,192 B and 1,023 rows of 52 layers
    assert layout.payload_bytes(128 * KiB) == 10 * 8192 * 128 * KiB + 52 * 1023 * 8192
    # in flight: 16,384 tokens more in each window group; a hit needs 6 x ceil(1,023 / 16)
    assert layout.reserve_rows(128 * KiB) == 8_192 + 6 * (math.ceil((1023 + 16_384) / 16) + 1)
    assert layout.hit_rows(4096) == 6 * 64
    assert layout.scheduler_block == layout.hash_block == 16


def test_groups_of_about_equal_size_are_padded_to_the_larger() -> None:
    """12 full and 13 windows become 13 + 13, because 13 < 1.5 x 12; 20 and 30 do not: 20, 20 and 10 with 10 empty."""
    layout = known(vllm_layout(attention(12, 13, 128)))
    assert [group.layers for group in layout.groups] == [12, 13] and layout.row_bytes == 13 * 16 * 4096
    layout = known(vllm_layout(attention(20, 30, 128)))
    assert [group.layers for group in layout.groups] == [20, 20, 10] and layout.row_bytes == 20 * 16 * 4096


def test_windows_alone_are_one_group() -> None:
    """32 layers with a window of 4,096: ceil(4,095 / 16) + 1 = 257 rows at any greater length."""
    layout = known(vllm_layout(attention(0, 32, 4096)))
    assert len(layout.groups) == 1 and layout.held_rows(MiB) == 257 and layout.permanent_bytes_per_token == 0


def test_chunked_attention_keeps_everything_unless_switched_on() -> None:
    """48 layers, 12 full and 36 in chunks of 8,192: by default all 48 keep all tokens; switched on, 3 groups of at most
    8,192 / 16 = 512 blocks."""
    memories = attention(12) + [Kept("chunk", "window", 12 + n, 4096, size=8192, reset=8192) for n in range(36)]
    off, on = known(vllm_layout(memories)), known(vllm_layout(memories, chunked=True))
    assert len(off.groups) == 1 and off.held_bytes(MiB) == 48 * 4096 * MiB and "hybrid manager is off" in off.notes[0]
    assert [group.layers for group in on.groups] == [12, 12, 12, 12]
    assert on.held_rows(MiB) == 65_536 + 3 * 512 and on.held_rows(1600) == 100 * 4
    assert on.hit_rows(3 * 8192) == 0 and on.hit_rows(8192 + 33) == 3 * 3
    # payload: the chunk that is open
    assert on.payload_bytes(8192 + 33) == 4096 * (12 * 8225 + 36 * 33)
    assert on.reserve_rows(MiB) == 65_536 + 3 * math.ceil((8192 + 16_384) / 16)


def test_states_raise_the_block_of_attention() -> None:
    """12 layers of 2,048 B a token beside 36 with a state of 2,097,152 B and 3 of 4 convolution rows of 16,384 B:
    2,146,304 / 2,048 = 1,048 -> blocks of 1,056 tokens (66 x 16); a page of 2,162,688 B, 0.76 % of it padding."""
    memories = attention(12, row=2048)
    for layer in range(12, 48):
        memories.append(Kept("conv", "window", layer, 16_384, size=4))
        memories.append(Kept("state", "snapshot", layer, 2_097_152))
    layout = known(vllm_layout(memories))
    assert {group.block_tokens for group in layout.groups} == {1056}
    assert [(group.layers, group.is_state) for group in layout.groups] == [(12, False), (12, True), (12, True), (12, True)]
    assert layout.row_bytes == 12 * 2_162_688 and "(0.76% of it padding)" in layout.notes[0]
    assert [page.exact_bytes for group in layout.groups[1:] for page in group.pages] == [49_152 + 2_097_152] * 3
    assert layout.held_rows(100) == 1 + 3 and layout.held_rows(4096) == 4 + 3
    assert layout.payload_bytes(4096) == 12 * 2048 * 4096 + 36 * 2_146_304
    assert layout.hit_rows(4096) == 3 and layout.reserve_rows(4096) == 7 and layout.table_entries(10_560) == 10 + 3
    # a prompt shorter than a block is never hit
    assert layout.scheduler_block == 1056


@pytest.mark.parametrize(
    ("memories", "word"),
    [
        ([], "nothing"),
        ([Kept("window", "window", 0, 8, size=4, keep_first=2)], "keep their first"),
        ([Kept("c4", "log", 0, 8, stride=4)], "several tokens"),
        ([Kept("state", "snapshot", 0, 8)], "states alone"),
        ([Kept("kv", "log", 0, 8, stride=1), Kept("window", "window", 1, 16, size=9)], "different bytes per token"),
        ([*attention(1), Kept("state", "snapshot", 1, 64), Kept("state", "snapshot", 2, 65)], "different sizes"),
        (compressed(1, 1, 0), "without a format"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_said(memories: list[Kept], word: str) -> None:
    found = vllm_layout(memories)
    assert isinstance(found, NotModelled) and word in found.reason


def test_compressed_shapes_that_are_not_known() -> None:
    formats = Formats("x", 584, 68, 576)
    odd = [Kept("fold", "fold", 0, 96, period=2, fold_tokens=4)]
    log = [*compressed(1, 0, 0), Kept("c3", "log", 9, 8, stride=3)]
    for memories, word in ((odd, "fold beside"), (log, "entries of 3 tokens")):
        found = vllm_layout(memories, formats)
        assert isinstance(found, NotModelled) and word in found.reason


@given(
    st.integers(0, 40), st.integers(0, 40), st.integers(0, 5), st.sampled_from(FORMATS), st.integers(1, 2**21),
    st.integers(1, 2**21),
)  # fmt: skip
def test_any_compressed_stack(c4: int, c128: int, alone: int, formats: tuple[str, str], one: int, other: int) -> None:
    """Every layer cache is in one group; no group is wider than a row; longer requests never take less; payload fits."""
    memories = compressed(c4, c128, alone)
    if not c4 + c128:
        return
    layout = known(vllm_layout(memories, formats_for(memories, *formats)))
    assert sum(group.layers for group in layout.groups) == len(memories)
    assert all(0 <= layout.idle_fraction(group) < 1 for group in layout.groups)
    assert all(page.nbytes >= page.exact_bytes for group in layout.groups for page in group.pages)
    short, long = sorted((one, other))
    assert layout.held_rows(short) <= layout.held_rows(long) <= layout.reserve_rows(long)
    assert layout.payload_bytes(short) <= layout.payload_bytes(long) < layout.held_bytes(long)
    fit = layout.requests_that_fit(POOL, long)
    assert fit * layout.held_bytes(long) <= POOL < (fit + 1) * layout.held_bytes(long) + layout.row_bytes


def test_a_groups_sums() -> None:
    group = Group((Pages("a", 2, 100, 90), Pages("b", 1, 50, 50)), 64, window=128)
    assert (group.used_bytes, group.layers, group.is_log) == (250, 3, False)
