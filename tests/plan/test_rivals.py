"""A plan beside another engine: rows, ratios, words, and what is said where there is no figure."""

import ast
import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lamina.base.errors import ConfigError
from lamina.base.sizes import GiB, KiB, MiB
from lamina.models.families import describe
from lamina.plan.records import Plan, PlanOptions
from lamina.plan.report import choices_of, make_plan
from lamina.plan.rivals import (
    BYTES,
    COUNT,
    ENGINES,
    SHARE,
    Comparison,
    ComparisonRow,
    compare,
    comparison_json,
    comparison_table,
    rival_of,
    shown,
)

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "tests" / "configs").glob("*.json"))
POOL = int(26.09 * GiB)


def plan_of(name: str, options: PlanOptions) -> Plan:
    values = json.loads((ROOT / "tests" / "configs" / f"{name}.json").read_text())
    return make_plan(describe(values, choices_of(options)), options, name)


def rows_of(comparison: Comparison) -> dict[str, ComparisonRow]:
    """By title; of repeated titles the first."""
    found: dict[str, ComparisonRow] = {}
    for row in comparison.rows:
        found.setdefault(row.title.strip(), row)
    return found


def printed(comparison: Comparison) -> str:
    out = StringIO()
    Console(file=out, width=140).print(comparison_table(comparison))
    return out.getvalue()


@pytest.fixture(scope="module")
def pro() -> Comparison:
    """Pro in fp8 and fp4, a pool of 26.09 GiB, the usual lengths."""
    return compare(plan_of("deepseek-v4-pro", PlanOptions(cache_bytes=POOL)), "vllm")


def test_a_request_of_each_length(pro: Comparison) -> None:
    """Theirs: rows of 1,315,008 B, 4, 16, 128, 512 and 4,096 of the log and 26. Ours: pages of 64 x (584 + 68) x 30 + 2 x 584 x
    31 B, each array rounded up to 128 B, 5 for the slot: 11.1, 25.9, 163.5, 635.5 MiB and 4.93 GiB to within 1 %."""
    rows = rows_of(pro)
    for said, blocks, ours in (
        ("1K", 4, 11.1 * MiB), ("4K", 16, 25.9 * MiB), ("32K", 128, 163.5 * MiB), ("128K", 512, 635.5 * MiB),
        ("1M", 4096, 4.93 * GiB),
    ):  # fmt: skip
        row = rows[f"one request of {said} tokens"]
        assert row.theirs == (blocks + 26) * 1_315_008
        assert row.ours == pytest.approx(ours, rel=0.01)
        assert row.ratio == row.theirs / row.ours


def test_the_waste_of_both_sides(pro: Comparison) -> None:
    waste = [row for row in pro.rows if row.title.strip() == "of it waste"]
    assert [round(100 * (row.theirs or 0), 1) for row in waste] == [50.8, 36.8, 11.5, 4.8, 2.4]
    assert all(row.ours is not None and row.theirs is not None and 0 < row.ours < row.theirs for row in waste)
    assert all(row.unit == SHARE and row.ratio is None for row in waste)


@pytest.mark.parametrize(("name", "ours", "theirs"), [("deepseek-v4-pro", 2_400, 710), ("deepseek-v4-flash", 3_450, 1_017)])
def test_requests_of_1k_in_26_gib(name: str, ours: int, theirs: int) -> None:
    """About 2,400 and 3,450 of ours: 26.09 GiB are 21,690 pages of Pro, 9 a request. A count is better where it is larger."""
    rows = rows_of(compare(plan_of(name, PlanOptions(cache_bytes=POOL)), "vllm"))
    row = rows["such requests in 26.09 GiB"]
    assert row.theirs == theirs and row.ours == pytest.approx(ours, rel=0.01)
    assert row.ratio == pytest.approx((row.ours or 0) / theirs) and row.ratio > 3.3


def test_admission_prefill_hits_tables_and_hashes(pro: Comparison) -> None:
    admit = [row for row in pro.rows if row.title.strip() == "free to admit it"]
    # 6,810 rows for 32K, 10,778 for 1M; ours only what the request reaches: the same as the request
    assert [admit[2].theirs, admit[4].theirs] == [6_810 * 1_315_008, 10_778 * 1_315_008]
    assert [row.ours for row in admit] == [row.ours for row in pro.rows if row.title.startswith("one request")]
    rows = rows_of(pro)
    page = rows["one request of 1K tokens"].ours / 9
    # 8,192 tokens: 32 pages, all permanent; 8,192 x 105 rows / 256
    assert rows["a prefill of 8K tokens, in flight"].ours == 32 * page
    assert rows["a prefill of 8K tokens, in flight"].theirs == pytest.approx(8_192 * 105 * 1_315_008 / 256)
    assert rows["a token, for the rest of its request"].theirs == 1_315_008 / 256
    # 22 rows against 4 pages at a multiple of 128; elsewhere at most 5 and the open block
    assert rows["a point to hit, after 1M tokens"].theirs == 22 * 1_315_008
    assert rows["a point to hit, after 1M tokens"].ours == 4 * page
    worst = rows["the same at any other token, at most"]
    assert worst.ours == 6 * page and worst.theirs is None and worst.ratio is None
    ends = rows["tokens between places where a hit can end"]
    assert (ends.ours, ends.theirs) == (1, 256)
    # 4,096 int32 against 2 x 430,080 int32; 2^20 / 256 hashes against 2^20 / 4
    assert (rows["block tables of 1M tokens"].ours, rows["block tables of 1M tokens"].theirs) == (16 * KiB, 8 * 430_080)
    assert (rows["hashes of 1M tokens"].ours, rows["hashes of 1M tokens"].theirs) == (4_096, 262_144)


@pytest.mark.parametrize(("name", "bf16", "fp8"), [("deepseek-v4-pro", 8.71, 9.5), ("deepseek-v4-flash", 12.47, 13.7)])
@pytest.mark.parametrize("engine", ENGINES)
def test_against_a_stack_of_61_mla_layers(name: str, bf16: float, fp8: float, engine: str) -> None:
    """Stack: 61 x (576 + 128) x 2 B x 2^20 = 83.875 GiB, as served 61 x 788 B x 2^20 = 46.94 GiB. Pro in bf16: 30 layers of
    2^18 x (1,024 + 256) B + 31 of 2^13 x 1,024 B + 61 x 128 x 1,024 B = 9.625 GiB, in fp8 4.918 GiB; Flash 6.724 and 3.435."""
    comparison = compare(plan_of(name, PlanOptions(cache_bytes=POOL)), engine)
    plain, served = comparison.rows[-2:]
    assert plain.title.startswith("61 layers of MLA + DSA") and "bf16 on both sides" in plain.title
    assert (plain.theirs, served.theirs) == (61 * 704 * 2 * MiB, 61 * 788 * MiB)
    if name.endswith("pro"):
        assert plain.ours == 30 * 2**18 * 1_280 + 31 * 2**13 * 1_024 + 61 * 128 * 1_024
        assert served.ours == 30 * 2**18 * 652 + 31 * 2**13 * 584 + 61 * 128 * 584
    assert plain.ratio == pytest.approx(bf16, abs=0.005) and served.ratio == pytest.approx(fp8, abs=0.05)
    assert any("needs bf16 for both caches on both sides" in sentence for sentence in comparison.assumptions)


def test_formats_that_the_other_engine_lacks_are_said() -> None:
    options = PlanOptions(cache_format="fp32", index_format="bf16")
    comparison = compare(plan_of("deepseek-v4-pro", options), "vllm")
    # bf16 entries and fp8 keys: 26 + 4 rows of 2,290,688 B
    assert rows_of(comparison)["one request of 1K tokens"].theirs == 30 * 2_290_688
    assert sum("not like for like" in sentence for sentence in comparison.assumptions) == 2
    # in fp32 there is no fp8 row; no pool, so nothing is said of what fits
    assert not any("as both are served" in row.title or "such requests" in row.title for row in comparison.rows)
    assert compare(plan_of("deepseek-v4-pro", options), "sglang").not_modelled.startswith("fp32 entries")
    # keys of bf16 are fp8 there: 1,430,208 B a page of 256 tokens
    theirs = rows_of(compare(plan_of("deepseek-v4-pro", PlanOptions(index_format="bf16")), "sglang"))
    assert theirs["a token, for the rest of its request"].theirs == 1_430_208 / 256


def test_drafts_are_on_our_side_only() -> None:
    with_drafts = compare(plan_of("deepseek-v4-pro", PlanOptions(draft_tokens=3)), "vllm")
    without = compare(plan_of("deepseek-v4-pro", PlanOptions()), "vllm")
    assert any("draft" in sentence for sentence in with_drafts.assumptions)
    assert not any("draft" in sentence for sentence in without.assumptions)
    key = "one request of 1K tokens"
    assert rows_of(with_drafts)[key].theirs == rows_of(without)[key].theirs
    assert (rows_of(with_drafts)[key].ours or 0) >= (rows_of(without)[key].ours or 0)


def test_pools_that_are_split(pro: Comparison) -> None:
    comparison = compare(plan_of("deepseek-v4-pro", PlanOptions(cache_bytes=POOL)), "sglang")
    rows = rows_of(comparison)
    assert rows["a token of the window pool"].theirs == 45_285
    assert rows["share of the pool set aside for windows"].theirs == pytest.approx(0.470, abs=5e-4)
    assert rows["set aside for 256 slots before a request runs"].theirs == 257 * 15.5 * MiB
    # 4 full pages of 1,307,328 B, 2 window pages of 256 x 45,285 B and 15.5 MiB
    assert rows["one request of 1K tokens"].theirs == 4 * 1_307_328 + 512 * 45_285 + 15.5 * MiB
    assert rows["such requests in 26.09 GiB"].theirs == 426
    assert rows["one request of 1K tokens"].ours == rows_of(pro)["one request of 1K tokens"].ours


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_known_family_has_figures_or_a_reason(path: Path, engine: str) -> None:
    plan = plan_of(path.stem, PlanOptions(cache_bytes=POOL))
    comparison = compare(plan, engine)
    assert bool(comparison.rows) != bool(comparison.not_modelled)
    assert (comparison.engine + " " + comparison.version) == ENGINES[engine]
    for row in comparison.rows:
        assert row.unit in (BYTES, COUNT, SHARE)
        assert all(side is None or side >= 0 for side in (row.ours, row.theirs)), row
        assert row.unit != SHARE or all(side is None or side < 1 for side in (row.ours, row.theirs)), row
    for row in comparison.rows:
        if row.title.startswith("one request of"):
            assert row.ratio is not None and 0.5 < row.ratio < 12, row
    json.dumps(comparison_json(comparison), allow_nan=False)
    text = printed(comparison)
    assert all(shown(row.unit, row.theirs) in text for row in comparison.rows)
    assert comparison.rows or comparison.not_modelled in " ".join(text.split())


def test_other_families_by_hand() -> None:
    """One figure each for 4K tokens.

    Llama 8B: 32 layers x 4,096 B. Gemma 27B: 256 + 6 x 65 rows of 10 x 16 x 8,192 B. Qwen3-Next: (4 + 3) rows of 12 x 1,056 x
    2,048 B. V3.2: 61 x 788 B. All in bf16, but the last."""
    for name, theirs in (
        ("llama-3.1-8b", 32 * 4096 * 4096), ("gemma-3-27b", (256 + 6 * 65) * 1_310_720), ("qwen3-next-80b", 7 * 12 * 1056 * 2048),
        ("deepseek-v3.2", 61 * 788 * 4096),
    ):  # fmt: skip
        options = PlanOptions(contexts=(4096,))
        assert rows_of(compare(plan_of(name, options), "vllm"))["one request of 4K tokens"].theirs == theirs, name


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="against='other' is not valid: one of vllm, sglang"):
        compare(plan_of("llama-3.1-8b", PlanOptions()), "other")


def test_no_figures_is_a_sentence() -> None:
    comparison = compare(plan_of("llama-3.1-8b", PlanOptions()), "sglang")
    assert comparison.rows == () and "without compressor states" in comparison.not_modelled
    assert printed(comparison).startswith("SGLang 0.5.23 is not modelled for this model: models without compressor states")
    assert comparison_json(comparison)["not_modelled"] == comparison.not_modelled


def test_json_has_every_row(pro: Comparison) -> None:
    values = json.loads(json.dumps(comparison_json(pro)))
    assert (values["model"], values["engine"], values["version"]) == ("deepseek-v4-pro", "vLLM", "0.33")
    assert values["not_modelled"] is None
    assert len(values["rows"]) == len(pro.rows) and len(values["assumptions"]) == len(pro.assumptions)
    row = values["rows"][0]
    assert row == {"title": "one request of 1K tokens", "unit": "bytes", "ours": pro.rows[0].ours, "theirs": 30 * 1_315_008,
                   "ratio": pro.rows[0].ratio}  # fmt: skip


def test_the_table_says_everything(pro: Comparison) -> None:
    text = printed(pro)
    for row in pro.rows:
        assert row.title.strip() in text
    for words in ("deepseek-v4-pro beside vLLM 0.33", "37.62 MiB", "50.8%", "8.340 GiB", "4.115 GiB", "27.59 MiB", "262,144"):
        assert words in text
    for sentence in pro.assumptions:
        assert sentence in " ".join(text.split())


@pytest.mark.parametrize(
    ("unit", "value", "expected"),
    [
        (BYTES, None, "-"), (SHARE, 0.508, "50.8%"), (COUNT, 2410, "2,410"), (BYTES, 9.5 * GiB, "9.500 GiB"),
        (BYTES, 37.62 * MiB, "37.62 MiB"), (BYTES, 16384, "16,384 B"),
        (BYTES, 5136.75, "5,137 B"), (BYTES, 12.25, "12.2 B"), (BYTES, 0, "0 B"),
    ],
)  # fmt: skip
def test_figures_in_words(unit: str, value: float | None, expected: str) -> None:
    assert shown(unit, value) == expected


def test_a_row_without_a_side_has_no_ratio() -> None:
    assert ComparisonRow("x", BYTES, 2, 6).ratio == 3
    assert ComparisonRow("x", COUNT, 6, 2, more_is_better=True).ratio == 3
    assert [ComparisonRow("x", BYTES, *sides).ratio for sides in ((None, 2), (2, None), (0, 2), (2, 0))] == [None] * 4


def test_the_calculators_are_for_plans_alone() -> None:
    """Nothing but the plan and its command line imports them, and each needs no other of ours but what layers keep."""
    for path in (ROOT / "lamina").rglob("*.py"):
        names = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
        }
        inside = path.relative_to(ROOT / "lamina").parts[0]
        if any(name.startswith("lamina.plan.rival") for name in names):
            assert inside == "plan" or path.name == "plan.py", path
        if path.name in ("rival_vllm.py", "rival_sglang.py"):
            assert {name for name in names if name.startswith("lamina")} == {"lamina.plan.kept"}


def test_a_rival_answers_for_any_length() -> None:
    rival, notes = rival_of(plan_of("deepseek-v4-flash", PlanOptions()), "vllm")
    assert rival.held_bytes(1024) == 30 * 917_568 and "584 B" in notes[0]  # type: ignore[union-attr]
