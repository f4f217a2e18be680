"""What a change costs: causes that add up, words that name them, and plans read back from their JSON."""

import copy
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lamina.base.errors import ConfigError
from lamina.base.sizes import GiB, KiB, MiB
from lamina.plan.diff import Diff, compare_plans, diff_json
from lamina.plan.diff_table import print_diff, signed_bytes
from lamina.plan.facts import read_facts
from lamina.plan.records import PlanOptions, RequestLine
from lamina.plan.report import plan_json
from lamina.plan.source import open_source

CONFIGS = Path(__file__).parent.parent / "configs"
BASE = PlanOptions(contexts=(KiB, MiB))


def diff_of(name: str, was: PlanOptions, now: PlanOptions) -> Diff:
    source = open_source(CONFIGS / f"{name}.json")
    diff = compare_plans(source.facts(was), source.facts(now))
    for number, total in enumerate(diff.totals):
        assert sum(effect.deltas[number] for effect in diff.effects) == total.delta  # the causes are all of it
    return diff


def printed(diff: Diff) -> str:
    out = io.StringIO()
    print_diff(diff, Console(file=out, width=100, highlight=False, markup=False), "title")
    return out.getvalue()


def test_nothing_changes() -> None:
    diff = diff_of("deepseek-v4-pro", BASE, BASE)
    assert diff.same_layout and not diff.choices and not diff.effects and not diff.budget
    assert "Requests take the same bytes" in printed(diff)


def test_wider_entries() -> None:
    diff = diff_of("deepseek-v4-pro", BASE, replace(BASE, cache_format="bf16"))
    assert ("cache_format", "fp8", "bf16") in diff.choices and not diff.same_layout
    effects = {effect.name: effect for effect in diff.effects}
    assert set(effects) == {"window", "c4", "c128", "padding"}
    # 4 and 4,096 blocks: c4 30 x 64 entries x (1,024 - 584) B each; rings 61 x 128 x 440 B, once
    assert effects["c4"].deltas == (4 * 30 * 64 * 440, 4096 * 30 * 64 * 440)
    assert effects["c128"].deltas == (4 * 31 * 2 * 440, 4096 * 31 * 2 * 440)
    assert effects["window"].deltas == (61 * 128 * 440,) * 2
    assert effects["c4"].why == "entries of 1,024 B (bf16), were 584 B (fp8)" == effects["window"].why
    assert effects["padding"].why == "alignment and whole pages"
    # a page of 30 x (64 x 1,024 + 4,352) + 31 x 2,048 = 2,160,128 B instead of 1,291,520; the slot's 61 x 131,072 + 651,264 +
    # 28,672 = 8,675,328 B need 5 of them, as before: 9 and 4,101 pages
    assert [total.delta for total in diff.totals] == [9 * 868_608, 4101 * 868_608]
    assert "c4: entries of 1,024 B (bf16), were 584 B (fp8)" in printed(diff)


def test_draft_blocks() -> None:
    was = replace(BASE, requests=(RequestLine(8192, KiB),), contexts=())
    diff = diff_of("deepseek-v4-flash-0731", was, replace(was, draft_tokens=3))
    effects = {effect.name: effect for effect in diff.effects}
    # three stages with rings of 131 rows of 584 B, and three more rows in 43 rings, for each of 8,192 requests
    assert effects["draft_window"].deltas == (8192 * 3 * 131 * 584,)
    assert effects["draft_window"].why == "new: 3 layers of 584 B (fp8), the last 128 tokens"
    assert effects["window"].deltas == (8192 * 43 * 3 * 584,) and effects["window"].why == "rings of 131 rows, were 128"
    assert 8192 * 3 * 131 * 584 == 1_880_162_304  # +1.75 GiB
    assert "+1.75 GiB at 8,192 x 1K: draft_window: new: 3 layers" in printed(diff)
    back = diff_of("deepseek-v4-flash-0731", replace(was, draft_tokens=3), was)
    assert {effect.name: effect.why for effect in back.effects}["draft_window"].startswith("gone: 3 layers of 584 B")
    assert {effect.name: effect.deltas for effect in back.effects} == {
        effect.name: tuple(-delta for delta in effect.deltas) for effect in diff.effects
    }
    # a state after each of three more rows: two of 3 x 512 fp32 in 21 layers, one in 20; and as many hidden vectors of 4,096
    assert effects["c4_fold"].deltas == (8192 * 3 * 21 * 2 * 3 * 512 * 4,)
    assert effects["c128_fold"].deltas == (8192 * 3 * 20 * 3 * 512 * 4,)
    assert effects["hidden"].deltas == (8192 * 3 * 4096 * 4,)


def test_larger_blocks() -> None:
    options = replace(BASE, contexts=(100, KiB))
    diff = diff_of("deepseek-v4-pro", options, replace(options, block_tokens=512))
    effects = {effect.name: effect for effect in diff.effects}
    # 100 tokens: one block either way, twice as large; 1,024 tokens: 4 of 256 or 2 of 512
    assert effects["c4"].deltas == (30 * 64 * 584, 0) and effects["c4"].why == "blocks of 512 tokens, were 256"


def test_the_budget() -> None:
    was = PlanOptions(memory_bytes=141 * 10**9, gpus=8, contexts=(KiB,))
    diff = diff_of("deepseek-v4-pro", was, replace(was, gpus=16))
    shifts = {shift.name: shift for shift in diff.budget}
    experts = shifts["weights: experts"]
    assert experts.was is not None and experts.now is not None and abs(experts.was - 2 * experts.now) <= 1
    assert "weights: norms" not in shifts and "usable memory" not in shifts  # every GPU has all norms, and the same memory
    pool = shifts["pool"]
    assert pool.delta == -sum(shift.delta or 0 for shift in diff.budget if shift.name != "pool")
    assert [(name, before, after) for name, before, after in diff.choices] == [("gpus", "8", "16"), ("tp", "8", "16")]
    assert diff.fits[0].was is not None and diff.fits[0].now is not None and diff.fits[0].now > diff.fits[0].was
    text = printed(diff)
    assert "weights: experts" in text and "fit after" in text


def test_only_lengths_that_both_have_are_compared() -> None:
    diff = diff_of("deepseek-v4-pro", BASE, replace(BASE, contexts=(4096, MiB)))
    assert [column.context for column in diff.columns] == [MiB]
    none = diff_of("deepseek-v4-pro", BASE, replace(BASE, contexts=(5,)))
    assert not none.columns and "no length in common" in printed(none)
    # as many tokens, but another number of requests
    assert not diff_of("deepseek-v4-pro", BASE, replace(BASE, contexts=(), requests=(RequestLine(2, KiB),))).columns


def test_lines_with_counts_are_summed() -> None:
    was = PlanOptions(requests=(RequestLine(2, KiB), RequestLine(3, 2 * KiB)))
    diff = diff_of("deepseek-v4-pro", was, replace(was, cache_format="bf16"))
    # 2 x 9 and 3 x 13 pages of 868,608 B more
    assert [total.delta for total in diff.totals] == [18 * 868_608, 39 * 868_608]
    assert "all lines" in printed(diff) and signed_bytes(57 * 868_608) in printed(diff)


def test_signed_sizes() -> None:
    assert [signed_bytes(n) for n in (0, 5, -5, int(1.9 * GiB), -KiB)] == ["0 B", "+5 B", "-5 B", "+1.90 GiB", "-1.00 KiB"]


def test_other_models_can_be_compared() -> None:
    one, two = (open_source(CONFIGS / f"{name}.json").facts(PlanOptions()) for name in ("deepseek-v4-pro", "gemma-3-27b"))
    diff = compare_plans(one, two)
    assert (diff.was, diff.now) == ("deepseek-v4-pro", "gemma-3-27b")
    assert {effect.name for effect in diff.effects} >= {"c4", "kv"}
    json.dumps(diff_json(diff), allow_nan=False)
    printed(diff)


def test_json() -> None:
    was = PlanOptions(cache_bytes=GiB, contexts=(KiB,))
    found = json.loads(json.dumps(diff_json(diff_of("deepseek-v4-pro", was, replace(was, cache_format="bf16"))), allow_nan=False))
    assert found["choices"] == [{"name": name, "from": a, "to": b} for name, a, b in (
        ("cache_format", "fp8", "bf16"), ("page_bytes", "1291520", "2160128"))]  # fmt: skip
    (line,) = found["workloads"]
    assert line["delta_bytes"] == 9 * 868_608 == sum(part["delta_bytes"] for part in line["parts"])
    # 1 GiB is 831 pages of 1,291,520 B, or 497 of 2,160,128 B; 9 a request
    assert (line["from_fits"], line["to_fits"]) == (92, 55)


# Plans from files ----------------------------------------------------------------------------------------------------


def test_a_plan_is_the_same_after_its_json() -> None:
    source = open_source(CONFIGS / "gemma-3-27b.json")
    for options in (PlanOptions(), PlanOptions(gpu="h100", gpus=2, requests=(RequestLine(3, 100),))):
        whole = plan_json(source.plan(options))
        assert read_facts(json.loads(json.dumps(whole))) == read_facts(whole) == source.facts(options)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("model",), 3, "plan.model=3"), (("layout_id",), None, "plan.layout_id"), (("memories",), {}, "plan.memories"),
        (("memories", 0), 1, r"plan.memories\[0\]=1"), (("memories", 0, "layers"), -1, r"plan.memories\[0\].layers=-1"),
        (("memories", 0, "entry_bytes"), 1.5, "entry_bytes=1.5"), (("memories", 0, "entry_bytes"), True, "entry_bytes=True"),
        (("workloads", 0, "bytes_per_request"), 7, "the sum of its memories"), (("workloads", 0, "fits"), "many", "fits='str'"),
        (("workloads", 0, "memories"), [1] * 10_000, "memories='list'"), (("weights", 0, "gpu_bytes"), 2**70, "gpu_bytes"),
        (("options",), None, "plan.options"), (("gpu",), [], "plan.gpu"), (("pool_bytes",), "x" * 10_000, "pool_bytes='str'"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_plan(path: tuple[str | int, ...], value: object, expected: str) -> None:
    whole = plan_json(open_source(CONFIGS / "gemma-3-27b.json").plan(PlanOptions(gpu="h100")))
    broken = copy.deepcopy(whole)
    place = broken
    for key in path[:-1]:
        place = place[key]  # type: ignore[index,assignment]
    place[path[-1]] = value  # type: ignore[index]
    with pytest.raises(ConfigError, match=expected) as found:
        read_facts(broken)
    assert len(str(found.value)) < 200


def test_texts_of_a_plan_cannot_command_a_terminal() -> None:
    whole = plan_json(open_source(CONFIGS / "gemma-3-27b.json").plan(PlanOptions()))
    whole["cache_format"] = whole["model"] = "\x1b[31mred\n"
    facts = read_facts(whole)
    assert facts.model == facts.choices["cache_format"] == "\ufffd[31mred\ufffd"
