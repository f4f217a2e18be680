"""The published figures, from the configs alone: what requests of DeepSeek-V4 and of an MLA + DSA stack take.

V4's arrays, in bytes (all but the scales of a short array are multiples of 128, so alignment adds little):

  entry   fp8: 448 + 64 x 2 + 8 = 584        bf16: 512 x 2 = 1,024
  index   fp4: 64 + 4 = 68    fp8: 128 + 4 = 132    bf16: 256
  block of 256 tokens: 64 entries and 64 keys of a c4 layer, 2 entries of a c128 layer
    c4    64 x 584 = 37,376      index fp4  64 x 68 = 4,352      c128  2 x 448 + 2 x 128 + 128 (16 B of scales) = 1,280
  Pro page    30 x (37,376 + 4,352) + 31 x 1,280 = 1,291,520      Flash page  21 x 41,728 + 20 x 1,280 = 901,888
"""

import json
from pathlib import Path

import pytest

from lamina.base.sizes import GiB, KiB, MiB, parse_bytes
from lamina.plan.records import Plan, PlanOptions
from lamina.plan.report import plan_json
from lamina.plan.source import open_source

CONFIGS = Path(__file__).parent.parent / "configs"
POOL = parse_bytes("26.09GiB")
LENGTHS = (KiB, 4 * KiB, 32 * KiB, 128 * KiB, MiB)


def plan_of(name: str, **options: object) -> Plan:
    return open_source(CONFIGS / f"{name}.json").plan(PlanOptions(**options))  # type: ignore[arg-type]


def at(plan: Plan, tokens: int):
    return next(line for line in plan.workloads if line.context == tokens)


def test_pro_as_it_is_served() -> None:
    plan = plan_of("deepseek-v4-pro", cache_bytes=POOL)
    assert plan.page_bytes == 1_291_520 and plan.block_tokens == 256
    # the slot: 61 rings of 128 x 584 = 74,752; folds 30 x 12,288 + 30 x 3,072 + 31 x 6,144; hidden 7,168 x 4:
    # 4,559,872 + 651,264 + 28,672 = 5,239,808 B, more than 4 pages (5,166,080)
    assert plan.slot_pages == 5
    # pages: 1K 4 + 5, 4K 16 + 5, 32K 128 + 5, 128K 512 + 5, 1M 4,096 + 5
    assert [line.pages for line in plan.workloads] == [9, 21, 133, 517, 4101]
    sizes = [line.bytes_per_request for line in plan.workloads]
    assert [round(size / MiB, 2) for size in sizes[:4]] == [11.09, 25.87, 163.81, 636.78] and round(sizes[4] / GiB, 2) == 4.93
    # at most 1 % more than the payload that the design was calculated with
    for size, aim in zip(sizes, (11.1 * MiB, 25.9 * MiB, 163.5 * MiB, 635.5 * MiB, 4.93 * GiB), strict=True):
        assert size <= 1.01 * aim
    # 26.09 GiB = 28,013,924,188 B = 21,690 pages; 9 a request
    assert plan.pages == 21_690 and at(plan, KiB).fits == 2_410
    # a checkpoint at 1K, where nothing is open: 61 x 127 rows (56,960 + 16,256 + 1,024 aligned), halves of the overlapping
    # folds 30 x (6,144 + 1,536), hidden 28,672: 4,787,712 B, 4 pages; 21,690 / 13
    assert at(plan, KiB).checkpoint_bytes == 4 * 1_291_520 and at(plan, KiB).fits_with_checkpoint == 1_668
    assert plan.checkpoint_range == (4, 5) and plan.checkpoint_pages == 5
    assert [line.binds for line in plan.workloads] == ["slots", "log", "log", "log", "log"]
    assert plan.layout.replay == 7_747  # 61 x 127


def test_flash_as_it_is_served() -> None:
    plan = plan_of("deepseek-v4-flash", cache_bytes=POOL)
    assert plan.page_bytes == 901_888
    # 43 x 74,752 + 21 x 15,360 + 20 x 6,144 + 16,384 = 3,676,160 B, more than 4 pages (3,607,552)
    assert plan.slot_pages == 5 and [line.pages for line in plan.workloads] == [9, 21, 133, 517, 4101]
    assert [round(line.bytes_per_request / MiB, 2) for line in plan.workloads[:3]] == [7.74, 18.06, 114.39]
    assert round(at(plan, MiB).bytes_per_request / GiB, 2) == 3.44
    assert plan.pages == 31_061 and at(plan, KiB).fits == 3_451  # 28,013,924,188 / 901,888; / 9
    assert plan.layout.replay == 5_461  # 43 x 127


@pytest.mark.parametrize(("index_format", "key"), [("fp4", 68), ("fp8", 132)])
def test_pro_at_a_million_tokens(index_format: str, key: int) -> None:
    plan = plan_of("deepseek-v4-pro", index_format=index_format, contexts=(MiB,))
    memories = {line.name: line for line in plan.memories}
    # per native token: c4 30 x 584 / 4, index 30 x key / 4 (33 B in fp8 for each layer), c128 31 x 584 / 128 (4.5625)
    assert memories["c4"].bytes_per_token == 30 * 146 and memories["c4"].layers == 30
    assert memories["index"].bytes_per_token == 30 * key / 4
    assert memories["c128"].bytes_per_token == 31 * 4.5625
    live = sum(plan.layout.live_bytes(MiB)[name] for name in ("c4", "c128", "index"))
    assert live == MiB * (30 * 146 + 30 * key / 4 + 31 * 4.5625)
    # 4.91 and 5.38 GiB; 4.92 and 5.39 with the windows' 61 x 127 x 584 B; in whole pages and with the slot 4,101 pages of
    # 1,291,520 B = 4.93 GiB, and of 30 x (37,376 + 8,448) + 31 x 1,280 = 1,414,400 B = 5.40 GiB
    assert round(live / GiB, 2) == {"fp4": 4.91, "fp8": 5.38}[index_format]
    assert plan.page_bytes == {"fp4": 1_291_520, "fp8": 1_414_400}[index_format]
    assert round(at(plan, MiB).bytes_per_request / GiB, 2) == {"fp4": 4.93, "fp8": 5.40}[index_format]


@pytest.mark.parametrize(("index_format", "page", "pages", "aim"), [("fp4", 901_888, 4101, 3.44), ("fp8", 987_904, 4100, 3.77)])
def test_flash_at_a_million_tokens(index_format: str, page: int, pages: int, aim: float) -> None:
    # fp8 keys: 21 x (37,376 + 8,448) + 20 x 1,280 = 987,904 B, and the slot's 3,676,160 B fit in 4 such pages
    plan = plan_of("deepseek-v4-flash", index_format=index_format, contexts=(MiB,))
    assert plan.page_bytes == page and at(plan, MiB).bytes_per_request == pages * page
    assert round(pages * page / GiB, 2) == aim


def test_pro_in_bf16() -> None:
    plan = plan_of("deepseek-v4-pro", cache_format="bf16", index_format="bf16", contexts=(MiB, 1_000_000))
    # c4 layers: 2^18 x (1,024 + 256) = 320 MiB each; c128 layers: 2^13 x 1,024 = 8 MiB each; no alignment in whole blocks
    assert at(plan, MiB).log_bytes == (30 * 320 + 31 * 8) * MiB == 9_848 * MiB
    assert round(9_848 / 1024, 3) == 9.617
    windows = 61 * 128 * 1024
    assert round((9_848 * MiB + windows) / GiB, 3) == 9.625
    assert next(line for line in plan.memories if line.name == "window").fixed_bytes_per_request == windows
    # 10^6 tokens: 250,000 entries and keys in 30 layers, 7,812 entries in 31: 9,600,000,000 + 247,984,128 B
    live = plan.layout.live_bytes(10**6)
    growing = 30 * 250_000 * 1_280 + 31 * 7_812 * 1_024
    assert live["c4"] + live["c128"] + live["index"] == growing and round(growing / GiB, 2) == 9.17
    flash = plan_of("deepseek-v4-flash", cache_format="bf16", index_format="bf16", contexts=(MiB,))
    # 21 x 320 + 20 x 8 = 6,880 MiB, 6.72 GiB
    assert at(flash, MiB).log_bytes == 6_880 * MiB and round(6_880 / 1024, 2) == 6.72


def test_an_mla_stack_with_an_index() -> None:
    # bf16: 61 x (576 + 128) x 2 B; as served: 61 x (656 + 132) B a token; at 2^20 tokens, which is past this model's maximum
    served, plain = plan_of("deepseek-v3.2"), plan_of("deepseek-v3.2", cache_format="bf16", index_format="bf16")
    assert [sum(line.bytes_per_token for line in plan.memories) for plan in (served, plain)] == [61 * 788, 61 * 1_408]
    assert round(61 * 788 * MiB / GiB, 2) == 46.94 and round(61 * 1_408 * MiB / GiB, 2) == 83.88
    # against V4-Pro's 9.617 GiB in bf16: 8.7 times
    assert round(61 * 1_408 * MiB / (9_848 * MiB), 1) == 8.7


def test_memories_say_what_they_are() -> None:
    plan = plan_json(plan_of("deepseek-v4-pro"))
    found = {line["name"]: line for line in plan["memories"]}
    assert list(found) == ["window", "c128", "c128_fold", "c4", "index", "c4_fold", "index_fold", "hidden"]
    window, c128, fold = found["window"], found["c128"], found["c4_fold"]
    assert (window["kind"], window["layers"], window["entry_bytes"], window["bytes_per_token"]) == ("window", 61, 584, 0)
    assert window["fixed_bytes_per_request"] == 61 * 128 * 584 and window["lifetime"] == "the last 128 tokens"
    assert sum(field["bytes"] for field in window["fields"]) == 584 and window["format"] == "fp8"
    assert (c128["kind"], c128["layers"], c128["tokens_per_entry"], c128["fixed_bytes_per_request"]) == ("log", 31, 128, 0)
    assert c128["layer_ids"] == [0, 1, *range(3, 60, 2)] and c128["lifetime"] == "kept to the end of the request"
    # two running softmaxes of three fp32 numbers for 512 channels: 2 x 3 x 512 x 4 B in 30 layers
    assert (fold["kind"], fold["entry_bytes"], fold["fixed_bytes_per_request"]) == ("fold", 12_288, 30 * 12_288)
    assert found["index"]["format"] == "fp4" and found["hidden"]["entry_bytes"] == 7_168 * 4


def test_json_is_strict_and_complete() -> None:
    for path in sorted(CONFIGS.glob("*.json")):
        plan = open_source(path).plan(PlanOptions(memory_bytes=141 * 10**9))
        text = json.dumps(plan_json(plan), allow_nan=False)
        back = json.loads(text)
        assert back["model"] == path.stem
        needed = "model layout_id block_tokens page_bytes slot_pages checkpoint_pages weights_bytes memories workloads"
        assert set(needed.split()) <= set(back)
        lines = "name kind layers entry_bytes tokens_per_entry bytes_per_token fixed_bytes_per_request lifetime"
        loads = "context requests log_bytes slot_bytes bytes_per_request padding_fraction fits binds"
        assert all(set(lines.split()) <= set(line) for line in back["memories"])
        assert all(set(loads.split()) <= set(line) for line in back["workloads"])
        assert back["weights_bytes"] == sum(line["bytes"] for line in back["weights"])
        assert sum(line["layers"] for line in back["memories"] if line["name"] != "hidden") == len(plan.layout.memories)
        for line in back["workloads"]:
            parts = ("live_bytes", "open_block_bytes", "block_padding_bytes", "slot_padding_bytes")
            assert sum(line[part] for part in parts) == line["bytes_per_request"] == line["log_bytes"] + line["slot_bytes"]
            assert sum(line["memories"].values()) == line["bytes_per_request"] == line["pages"] * back["page_bytes"]
            assert all(line[part] >= 0 for part in parts) and 0 <= line["padding_fraction"] < 1
            assert line["padding_fraction"] == pytest.approx(1 - line["live_bytes"] / line["bytes_per_request"])
            assert line["fits"] == back["pages"] // line["peak_pages"] and line["peak_pages"] >= line["pages"]
            assert line["peak_pages"] == line["pages"] or plan.layout.tails


def test_each_format_changes_its_bytes_and_nothing_else() -> None:
    plain, other = plan_of("deepseek-v4-flash"), plan_of("deepseek-v4-flash", cache_format="bf16")
    assert plain.layout_id != other.layout_id
    one, two = ({line.name: line for line in plan.memories} for plan in (plain, other))
    assert {name for name in one if one[name] != two[name]} == {"window", "c4", "c128"}
    assert (two["c4"].entry_bytes, two["c4"].format, one["c4"].format) == (1024, "bf16", "fp8")


def test_drafts_make_rings_longer_and_add_blocks() -> None:
    plan = plan_of("deepseek-v4-flash-0731", draft_tokens=5)
    found = {line.name: line for line in plan.memories}
    # three DSpark stages; every ring has 128 + 5 rows
    assert found["draft_window"].layers == 3 and found["draft_window"].fixed_bytes_per_request == 3 * 133 * 584
    assert found["window"].fixed_bytes_per_request == 43 * 133 * 584
    assert "draft_window" not in {line.name for line in plan_of("deepseek-v4-flash-0731").memories}


def test_a_window_is_a_window_however_long_the_request() -> None:
    plan = plan_of("gemma-3-27b", contexts=(32 * KiB, 128 * KiB))
    found = {line.name: line for line in plan.memories}
    # 16 heads of 128 for keys and values in bf16: 8,192 B; 10 layers keep all, 52 the last 1,024
    assert found["kv"].bytes_per_token == 10 * 8_192 and found["kv"].fixed_bytes_per_request == 0
    assert found["window"].bytes_per_token == 0 and found["window"].fixed_bytes_per_request == 52 * 1_024 * 8_192 == 416 * MiB
    short, long = (dict(line.rows) for line in plan.workloads)
    assert long["window"] == short["window"] and long["kv"] == 4 * short["kv"] == 10 * GiB
    assert 52 * 1_023 * 8_192 <= long["window"] < 1.1 * 52 * 1_024 * 8_192


def test_a_chunk_is_cleared_but_must_fit() -> None:
    plan = plan_of("llama-4-scout", contexts=(8 * KiB - 1, 8 * KiB, 32 * KiB), cache_bytes=100 * GiB)
    found = {line.name: line for line in plan.memories}
    # 8 heads of 128 for keys and values in bf16: 4,096 B; 36 layers keep a chunk of 8,192 tokens, 12 keep all
    assert found["chunk"].fixed_bytes_per_request == 36 * 8_192 * 4_096 == 1_152 * MiB and found["chunk"].bytes_per_token == 0
    assert found["chunk"].lifetime == "the last 8192 tokens, cleared every 8192"
    assert found["kv"].bytes_per_token == 12 * 4_096
    full, cleared, long = plan.workloads
    live = [plan.layout.live_bytes(line.context)["chunk"] for line in plan.workloads]
    assert live == [36 * 8_191 * 4_096, 0, 0]  # the next token starts a chunk of its own at 8,192 and at 32,768
    assert full.pages > cleared.pages and dict(cleared.rows)["chunk"] == 0
    # what it held on its way has to fit: a whole chunk, whatever the length
    for line in (cleared, long):
        chunk_pages = line.peak_pages - line.pages
        assert 1_152 * MiB <= chunk_pages * plan.page_bytes <= 1.01 * 1_152 * MiB
        assert line.fits is not None and plan.pages is not None and line.fits == plan.pages // line.peak_pages


def test_one_state_for_a_request_of_any_length() -> None:
    plan = plan_of("jamba-1.5-mini", contexts=(KiB, 128 * KiB))
    found = {line.name: line for line in plan.memories}
    # 28 Mamba layers: a state of 8,192 channels x 16 in fp32 (524,288 B), 4 rows of 8,192 channels in bf16 for the convolution
    assert found["state"].fixed_bytes_per_request == 28 * 524_288 and found["state"].bytes_per_token == 0
    assert found["conv"].fixed_bytes_per_request == 28 * 4 * 16_384
    assert found["kv"].bytes_per_token == 4 * 2 * 8 * 128 * 2
    assert plan.workloads[0].slot_bytes == plan.workloads[1].slot_bytes


def test_tensor_parallel_divides_what_heads_divide() -> None:
    one, two = plan_of("gemma-3-27b"), plan_of("gemma-3-27b", gpus=2)
    assert two.memories[0].entry_bytes * 2 == one.memories[0].entry_bytes
    one, two = plan_of("deepseek-v4-pro"), plan_of("deepseek-v4-pro", gpus=2)
    assert two.layout_id == one.layout_id  # one vector for all heads: every GPU has it
