"""From a GPU's memory to the pool and to requests that fit, every step by hand on a model of a few kilobytes."""

from dataclasses import replace

import pytest

from lamina.base.errors import ConfigError
from lamina.memory.kinds import EntryFormat, Field, Fold, Log, Memory, Snapshot, Window
from lamina.memory.layout import make_layout
from lamina.models.description import Description, WeightPart
from lamina.plan.budget import UNUSED, step_bytes, weight_lines
from lamina.plan.records import Mesh, PlanOptions, RequestLine
from lamina.plan.report import make_plan
from lamina.plan.workloads import checkpoint_range, together, workload

KV = EntryFormat("u8", (Field("k", "u8", (128,)), Field("v", "u8", (128,))))  # 256 B
WEIGHTS = (
    WeightPart("attention", 0, 400_001, "tensor"),
    WeightPart("experts", 0, 300_000, "expert"),
    WeightPart("norms", 0, 10_000, "none"),
)
#: two layers, two fields of 128 B: blocks of 16 tokens are pages of 2 x 2 x 16 x 128 = 8,192 B
SMALL = Description(
    "small", (Log("kv", 0, KV, 1), Log("kv", 1, KV, 1)), None, 4096, vocab_size=1000, hidden_size=64, cache_format="u8",
    index_format=None, weights=WEIGHTS, notes=("made up",),
)  # fmt: skip
#: workspace: 10 x 32 x 64 x 2 = 40,960, and 10 x 256 = 2,560, and 2 x 1,000 x 8 = 16,000; in all 59,520 B
OPTIONS = PlanOptions(memory_bytes=1_000_000, block_tokens=16, max_step_tokens=10, max_requests=2, contexts=(32,))


def test_the_pool_is_what_is_left() -> None:
    plan = make_plan(SMALL, replace(OPTIONS, tp=2), "small")
    assert [line.gpu_bytes for line in plan.weights] == [200_001, 150_000, 10_000]  # the odd byte counts on the fullest GPU
    assert plan.weights_bytes == 710_001
    assert plan.workspace == (("activations of a step", 40_960), ("entries of a step", 2_560), ("logits", 16_000))
    budget = plan.budget
    assert (budget.memory_bytes, budget.usable_bytes, budget.weights_bytes, budget.workspace_bytes) == (
        1_000_000, 900_000, 360_001, 59_520,
    )  # fmt: skip
    assert plan.pool_bytes == 900_000 - 360_001 - 59_520 == 480_479
    assert plan.page_bytes == 8192 and plan.pages == plan.blocks == 58 and plan.slots is None  # 58 x 8,192 = 475,136
    assert plan.workloads[0].pages == 2 and plan.workloads[0].fits == 29 and budget.missing_bytes == 0


def test_replicas_have_a_pool_each() -> None:
    # tp 1: weights 710,001; left 900,000 - 710,001 - 59,520 = 130,479 = 15 pages: 7 requests of 2 pages on each of 3 replicas
    plan = make_plan(SMALL, replace(OPTIONS, dp=3, requests=(RequestLine(21, 32),)), "small")
    assert plan.pages == 15 and plan.mesh == Mesh(3, 1, 3)
    assert plan.workloads[0].fits == 21
    assert plan.together is not None
    assert (plan.together.pages, plan.together.pool_pages, plan.together.fits) == (42, 45, True)
    more = make_plan(SMALL, replace(OPTIONS, dp=3, requests=(RequestLine(22, 32),)), "small").together
    assert more is not None and more.pages == 44 and more.fits is False  # 44 of 45 pages, but no request is split over replicas


def test_experts_spread_over_replicas() -> None:
    # ep 3 over dp 3: 400,001 + 100,000 + 10,000
    plan = make_plan(SMALL, replace(OPTIONS, dp=3, ep=3), "small")
    assert plan.budget.weights_bytes == 510_001


def test_the_fullest_gpu_counts_where_experts_do_not_divide() -> None:
    def experts(mesh: Mesh, count: int | None) -> int:
        return weight_lines(WEIGHTS, mesh, count)[1].gpu_bytes

    # 10 experts of 30,000 B: over 4 GPUs 3, 3, 2 and 2 of them
    assert experts(Mesh(4, 1, 4, 4), 10) == 90_000 and experts(Mesh(4, 1, 4, 4), None) == 75_000
    assert experts(Mesh(8, 8, 1, 4), 10) == 45_000  # 4 groups of 2 GPUs, each expert cut in two
    assert experts(Mesh(4, 4, 1), 10) == 75_000  # cut, not spread: always even
    assert experts(Mesh(10, 1, 10, 10), 10) == 30_000
    with pytest.raises(ConfigError, match=r"ep=16.*at most 10"):
        experts(Mesh(16, 1, 16, 16), 10)


def test_a_share_of_the_memory() -> None:
    # 0.7 x 1,000,000 is 700,000, not 699,999 as the product of two floats could be cut to
    assert make_plan(SMALL, replace(OPTIONS, gpu_memory_utilization=0.7), "small").budget.usable_bytes == 700_000
    assert int(0.29 * 100) == 28 and make_plan(
        SMALL, replace(OPTIONS, memory_bytes=100, gpu_memory_utilization=0.29), "small"
    ).budget.usable_bytes == 29  # fmt: skip


def test_what_does_not_fit_is_said() -> None:
    plan = make_plan(SMALL, replace(OPTIONS, memory_bytes=500_000), "small")
    # 450,000 usable, 710,001 + 59,520 needed
    assert plan.budget.missing_bytes == 319_521
    assert plan.pool_bytes == plan.pages == 0 and plan.workloads[0].fits == plan.workloads[0].fits_with_checkpoint == 0


def test_without_a_memory_nothing_is_claimed() -> None:
    plan = make_plan(SMALL, replace(OPTIONS, memory_bytes=None, requests=(RequestLine(2, 33),)), "small")
    assert plan.pool_bytes is plan.pages is plan.blocks is plan.slots is None
    assert plan.workloads[0].fits is plan.workloads[0].fits_with_checkpoint is None
    assert plan.together is not None and plan.together.pages == 2 * 3 and plan.together.fits is None


def test_a_pool_of_its_own_ignores_gpu_and_weights() -> None:
    plan = make_plan(SMALL, replace(OPTIONS, cache_bytes=8192 * 5 + 8191), "small")
    assert plan.pages == 5 and plan.workloads[0].fits == 2 and plan.budget.weights_bytes is None
    assert make_plan(SMALL, replace(OPTIONS, cache_bytes=8191), "small").pages == 0


def test_weights_that_are_not_loaded() -> None:
    lines = weight_lines([WeightPart("draft blocks", 5, 10, UNUSED), WeightPart("nothing", 0, 0)], Mesh())
    assert [(line.component, line.nbytes, line.gpu_bytes) for line in lines] == [("draft blocks", 10, 0)]
    with pytest.raises(ConfigError, match=r"odd\.split='rows'"):
        weight_lines([WeightPart("odd", 1, 1, "rows")], Mesh())


def test_entries_of_a_step_are_those_of_the_fullest_layer() -> None:
    entry = EntryFormat("u8", (Field("x", "u8", (100,)),))
    memories: list[Memory] = [
        Log("kv", 0, entry, 1), Window("window", 1, entry, 8), Log("c4", 1, entry, 4), Fold("fold", 1, KV.fields, 4),
        Snapshot("state", 2, KV.fields),
    ]  # fmt: skip
    assert step_bytes(memories) == 125  # layer 1: a window's row and a quarter of an entry; states are not made per token
    assert step_bytes([]) == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"draft_tokens": 8}, "draft=8"), ({"draft_tokens": -1}, "draft=-1"), ({"max_step_tokens": 0}, "max-step-tokens"),
        ({"max_requests": 0}, "max-requests"), ({"gpu_memory_utilization": 1.5}, "gpu-memory-utilization"),
        ({"memory_bytes": 0}, "memory"), ({"contexts": (4097,)}, "context=4097.*4096 tokens, the model's maximum"),
        ({"requests": (RequestLine(1, 5000),)}, "requests=5000"), ({"block_tokens": 0}, "block_tokens"), ({"tp": 0}, "tp=0"),
    ],
)  # fmt: skip
def test_bad_choices(change: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make_plan(SMALL, replace(OPTIONS, **change), "small")


# Workloads -----------------------------------------------------------------------------------------------------------


def test_lengths_go_as_far_as_the_model() -> None:
    some = replace(OPTIONS, contexts=())
    assert [line.context for line in make_plan(SMALL, some, "small").workloads] == [1024, 4096]
    assert [line.context for line in make_plan(replace(SMALL, max_positions=500), some, "small").workloads] == [500]
    both = replace(some, contexts=(7,), requests=(RequestLine(3, 9),))
    assert [(line.context, line.requests) for line in make_plan(SMALL, both, "small").workloads] == [(7, None), (9, 3)]


def test_padding_is_taken_apart() -> None:
    # one log of 100 B an entry, 8 tokens a block: 800 B, a page of 896; a window of 3 x 100 B = 300 -> 384 and a hidden vector of
    # 8 B -> 128 in a slot of one page
    entry = EntryFormat("u8", (Field("x", "u8", (100,)),))
    layout = make_layout([Log("kv", 0, entry, 1), Window("window", 0, entry, 3)], Field("hidden", "u8", (8,)), 8)
    assert layout.page_bytes == 896 and layout.slot_pages == 1
    line = workload(layout, 13, 4, 10, 1)
    assert (line.log_bytes, line.slot_bytes, line.bytes_per_request) == (2 * 896, 896, 3 * 896)
    assert line.live_bytes == 13 * 100 + 2 * 100 + 8
    assert line.open_bytes == 3 * 100 and line.block_padding_bytes == 2 * 96 and line.slot_padding_bytes == 896 - 208
    assert line.live_bytes + line.open_bytes + line.block_padding_bytes + line.slot_padding_bytes == line.bytes_per_request
    assert line.padding_fraction == 1 - 1508 / 2688
    assert dict(line.rows) == {"kv": 1600, "window": 300, "hidden": 8, "padding": 3 * 896 - 1908}
    # 10 pages: 3 requests of 3, or 2 with a checkpoint of one page each
    assert (line.fits, line.fits_with_checkpoint, line.binds, line.requests) == (3, 2, "log", 4)
    assert workload(layout, 8, None, 10, 1).binds == "log"  # a page each: what grows is named
    assert workload(layout, 1, None, None, 1).fits is None


def test_slots_bind_short_requests() -> None:
    entry = EntryFormat("u8", (Field("x", "u8", (100,)),))
    layout = make_layout([Log("kv", 0, entry, 1), *(Window("window", n, entry, 8) for n in range(3))], block_tokens=8)
    assert layout.slot_pages == 3  # three rings of 800 B, a page of 896 B
    assert [workload(layout, n, None, 100, 1).binds for n in (8, 16, 24, 25)] == ["slots", "slots", "log", "log"]


def test_a_model_without_logs_has_slots_only() -> None:
    layout = make_layout([Snapshot("state", 0, (Field("s", "fp32", (1000,)),))], Field("hidden", "fp32", (8,)))
    for tokens in (1, 100_000):
        line = workload(layout, tokens, None, 7, 2)
        assert (line.log_bytes, line.slot_bytes, line.fits, line.binds) == (0, layout.page_bytes, 14, "slots")
        assert line.open_bytes == line.block_padding_bytes == 0 and line.slot_padding_bytes == layout.page_bytes - 4032


def test_the_largest_requests_are_placed_first() -> None:
    layout = make_layout(SMALL.memories, block_tokens=16)
    lines = [RequestLine(2, 16), RequestLine(2, 48)]  # 2 x 1 page and 2 x 3 pages on two replicas of 4 pages
    found = together(layout, lines, 4, 2)
    assert found is not None and (found.pages, found.pool_pages, found.fits) == (8, 8, True)
    tight = together(layout, [RequestLine(3, 48)], 4, 2)
    assert tight is not None and tight.fits is False
    assert together(layout, [], 4, 2) is None


@pytest.mark.parametrize("lag", [0, 1])
def test_checkpoints_of_all_lengths_are_in_the_range(lag: int) -> None:
    entry = EntryFormat("u8", (Field("x", "u8", (100,)),))
    memories: list[Memory] = [Log("c4", 0, entry, 4)]
    for layer in range(6):
        memories += [Window("window", layer, entry, 5), Fold("fold", layer, (Field("s", "fp32", (150,)),), 4, lag=lag)]
    layout = make_layout(memories, Field("hidden", "u8", (8,)), 32)
    fewest, most = checkpoint_range(layout)
    found = {layout.checkpoint_pages(position) for position in range(32, 400)}
    assert (fewest, most) == (min(found), max(found)) and fewest < most
    assert checkpoint_range(make_layout(SMALL.memories, block_tokens=16)) == (0, 0)
