"""What eviction must keep, on simulated workloads in small pools (bench/eviction.py has them, larger)."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from lamina.memory.layout import Layout
from lamina.plan.offline import Optimum, ample_pages, offline_optimum
from lamina.plan.simulate import run_trace
from lamina.plan.simulation import SimulationReport

BENCH = Path(__file__).resolve().parents[2] / "bench" / "eviction.py"
#: compressed attention, full attention, scans beside full attention (one large state; many small ones)
LAYOUTS = ["compressed", "attention", "mamba", "mamba-many"]


@cache
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_eviction", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def serve(layout: Layout, work: object, rule: str = "ledger") -> SimulationReport:
    found = bench().simulate(layout, work, rule, keep_served=True)
    assert isinstance(found, SimulationReport)
    return found


def possible(layout: Layout, requests: tuple, run: SimulationReport) -> Optimum:
    unlimited = run_trace(layout, requests, ample_pages(layout, requests), keep_served=True)
    return offline_optimum(layout, requests, run, unlimited)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_long_chats_with_room_for_both_never_evict_each_other(name: str) -> None:
    # 50,000 tokens, then 600 more a turn, answers of 200. What the last turn computed is prompt + answer - 1 tokens: all of it
    # is reused (with logs alone whole blocks of it).
    layout, work = bench().layout_of(name), bench().alternating(12)
    found = serve(layout, work)
    for one in found.served[2:]:
        said = 50_000 + 800 * (one.number // 2 - 1) + 199
        assert one.hit_tokens == (said if layout.has_state else said // layout.block_tokens * layout.block_tokens)
    assert found.evicted_blocks == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_many_chats_share_one_system_prompt(name: str) -> None:
    # The prompt has 8,000 tokens. The first chat computes it; where a checkpoint is needed, it is made when a second chat
    # leaves the first one's path, which may happen while others are on their way as well.
    layout, work = bench().layout_of(name), bench().shared_prompt(200)
    found = serve(layout, work)
    shared = 8000 if layout.has_state else 8000 // layout.block_tokens * layout.block_tokens
    assert all(one.hit_tokens >= shared for one in found.served[4:])
    assert found.evicted_blocks + found.evicted_checkpoints > 150  # what is not shared does not all fit


@pytest.mark.parametrize("name", LAYOUTS)
def test_agents_come_within_two_points_of_the_offline_optimum(name: str) -> None:
    # Two loops at a time and about five in all, in a pool with a quarter more room than two of 200K tokens need.
    layout, work = bench().layout_of(name), bench().agents(200, 1.25, 2)
    found = serve(layout, work)
    best = possible(layout, work.requests, found)
    assert found.hit_rate >= best.bound - 0.02 and best.bound >= best.belady
    assert best.unlimited > 0.95  # of 96 %, the loops' first calls count for more in a short trace
    assert found.evicted_blocks > 2 * layout.blocks_for(200_000)  # loops that had ended went


@pytest.mark.parametrize("every", [40, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_one_off_prompts_do_not_flush_a_shared_prefix(name: str, every: int) -> None:
    # A prefix of 8,000 tokens is used every so many requests; the pool has room for it and 12 of the one-off prompts between.
    # Nothing can tell it from them at its first use; at the second it is new again, and known to have been wanted; with
    # checkpoints the third may only find the log. From the fourth on it is all there (whole blocks of it, where the
    # checkpoint was put at the end of what was evicted). An eighth of them may be lost to chance.
    layout, work = bench().layout_of(name), bench().flood(10 * every, every)
    least = 8000 // layout.block_tokens * layout.block_tokens
    hits = [one.hit_tokens for one in serve(layout, work).served if one.number % every == 0]
    assert len(hits) == 10 and sum(hit >= least for hit in hits[3:]) >= 6
    # the rule that goes by last use alone loses it every time
    assert sum(one.hit_tokens for one in serve(layout, work, "lru").served) == 0


def test_the_benchmark_prints_its_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench().QUICK, "flood", lambda: bench().flood(60, 20))
    bench().main(["--quick", "--traces", "flood", "--layouts", "attention"])
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["trace", "layout", "pages", "lru", "ledger", "offline", "bound", "all"]
    # room: 8,200 tokens are 33 blocks of 256, 12 x 4,000 are 12 x 16, and a page for each of two checkpoints of 13 requests
    assert row.split()[:3] == ["flood", "attention", str(33 + 12 * 16 + 2 * 13)]
