"""/metrics: counters only grow, one request is one whatever its n, and nothing in it can take serving down."""

import math
import re

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from lamina.base.config import EngineConfig
from lamina.engine.client import EngineClient
from lamina.engine.client_counters import summed, without_gauges
from lamina.engine.wire import GrammarStats, MemoryState, Stats
from lamina.server.metrics import Histogram, Metrics
from lamina.server.settings import ServerSettings
from lamina.server.state import GenerationRecord, ServerState

STATS = Stats(
    time_s=1.0, running=2, waiting=1, free_pages=50, held_pages=30, cached_pages=20, prompt_tokens=100, cached_tokens=40,
    computed_tokens=80, drawn_tokens=20, steps=10, prefill_s=0.5, decode_s=0.25, preemptions=1, evictions=3, late_results=2,
    lookups=5, misses={"full hit": 2, "never stored": 3}, finished={"stop": 1, "length": 2},
    memories=(MemoryState("window", 1000, 500), MemoryState("c4", 2000, 0)), requests=(),
    grammars=GrammarStats((0, 2, 0, 1, *[0] * 10), 0.03, 4, 2, 5000, 1, {"invalid": 1, "busy": 2}),
    drafts=6, draft_tokens=18, accepted_drafts=11, accepted_by_place=(5, 4, 2),
)  # fmt: skip


def read(metrics: Metrics) -> dict[tuple[str, str], float]:
    """(series, its labels without the model) to value, as Prometheus' own parser reads the page."""
    page, content_type = metrics.text()
    assert content_type.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.name.startswith("lamina_"):
                assert labels.pop("model_name") == "tiny"
            key = (sample.name, ",".join(f"{key}={value}" for key, value in sorted(labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def make() -> tuple[ServerState, Metrics]:
    """The state of a server whose engine was never started, and its metrics."""
    state = ServerState(ServerSettings(names=("tiny",)), EngineClient(EngineConfig(model="nowhere")))
    state.client.state = "ready"
    return state, Metrics(state)


def record(**changes: object) -> GenerationRecord:
    whole = GenerationRecord(
        id="r1", owner="", prompt_tokens=100, cached_tokens=40, completion_tokens=15, reasoning_tokens=0,
        finish=("stop", "stop", "stop"), first_token_s=0.5, total_s=1.7, queued_s=0.3, prefill_s=0.2, decode_s=1.2,
        prefix_stop="full hit", held_bytes={},
    )  # fmt: skip
    return replace(whole, **changes)


def test_every_number_of_the_engine_is_there() -> None:
    _, metrics = make()
    metrics.on_stats(STATS)
    found = read(metrics)
    assert found["lamina_num_requests_running", ""] == 2
    assert found["lamina_num_requests_waiting", ""] == 1
    assert {state: found["lamina_pages", f"state={state}"] for state in ("free", "held", "cached")} == {
        "free": 50, "held": 30, "cached": 20,
    }  # fmt: skip
    assert found["lamina_held_pages_ratio", ""] == 0.3
    drafts = [found[f"lamina_spec_decode_num_{what}_total", ""] for what in ("drafts", "draft_tokens", "accepted_tokens")]
    by_place = [found["lamina_spec_decode_num_accepted_tokens_per_pos_total", f"position={place}"] for place in range(3)]
    assert (drafts, by_place) == ([6, 18, 11], [5, 4, 2])
    assert summed(STATS, STATS).accepted_by_place == (10, 8, 4) and summed(STATS, STATS).draft_tokens == 36
    assert found["lamina_memory_held_bytes", "memory=window"] == 1000
    assert found["lamina_memory_cached_bytes", "memory=window"] == 500
    assert found["lamina_memory_held_bytes", "memory=c4"] == 2000
    totals = {"prompt_tokens": 100, "cached_tokens": 40, "computed_tokens": 80, "generation_tokens": 20, "engine_steps": 10,
              "engine_prefill_seconds": 0.5, "engine_decode_seconds": 0.25, "preemptions": 1, "evictions": 3, "late_results": 2,
              "prefix_lookups": 5, "engine_restarts": 0, "metrics_errors": 0}  # fmt: skip
    assert {name: found[f"lamina_{name}_total", ""] for name in totals} == totals
    assert found["lamina_prefix_lookup_stops_total", "reason=full_hit"] == 2
    assert found["lamina_prefix_lookup_stops_total", "reason=never_stored"] == 3
    assert found["lamina_outputs_finished_total", "finished_reason=length"] == 2


def test_units_are_in_the_names() -> None:
    _, metrics = make()
    metrics.on_stats(STATS)
    names = {name for name, _ in read(metrics) if name.startswith("lamina_")}
    assert all(re.fullmatch(r"lamina_[a-z0-9_]+", name) for name in names)
    assert not [name for name in names if re.search(r"_(s|ms|us|millis|kb|mb)(_total|_sum|_count|_bucket)?$", name)]


def test_an_engine_that_is_gone_has_counters_but_no_gauges() -> None:
    state, metrics = make()
    metrics.on_stats(STATS)
    before = read(metrics)
    state.client.state, state.client.num_restarts = "restarting", 1
    after = read(metrics)
    assert (before["lamina_engine_up", ""], after["lamina_engine_up", ""]) == (1, 0)
    assert after["lamina_engine_restarts_total", ""] == 1
    assert ("lamina_num_requests_running", "") in before and ("lamina_num_requests_running", "") not in after
    assert [key for key in before if key[0].endswith("_total") and after[key] < before[key]] == []


def test_values_that_cannot_be_are_left_out_and_counted() -> None:
    _, metrics = make()
    metrics.on_stats(STATS)
    bad = msgspec.structs.replace(
        STATS, prompt_tokens=-5, prefill_s=math.nan, steps=3, running=-1, memories=(MemoryState("window", -9, 1),)
    )
    metrics.on_stats(bad)
    metrics.observe("first_token", -1.0)
    metrics.observe("first_token", math.nan)
    found = read(metrics)
    assert found["lamina_prompt_tokens_total", ""] == 100
    assert found["lamina_engine_prefill_seconds_total", ""] == 0.5
    assert found["lamina_engine_steps_total", ""] == 10
    assert ("lamina_num_requests_running", "") not in found
    assert found["lamina_num_requests_waiting", ""] == 1
    assert found["lamina_time_to_first_token_seconds_count", ""] == 0
    assert found["lamina_metrics_errors_total", ""] >= 7
    metrics.on_stats(msgspec.structs.replace(STATS, steps=12))
    assert read(metrics)["lamina_engine_steps_total", ""] == 12


def test_a_part_that_fails_leaves_the_others() -> None:
    state, metrics = make()
    metrics.on_stats(STATS)
    del state.counters
    found = read(metrics)
    assert ("lamina_requests_total", "") not in found
    assert found["lamina_num_requests_running", ""] == 2
    assert found["lamina_metrics_errors_total", ""] == 1


def test_a_request_with_three_answers_is_one_request() -> None:
    state, metrics = make()
    state.enter()
    assert read(metrics)["lamina_requests_open", ""] == 1
    state.observers.append(metrics)
    state.leave(record())
    found = read(metrics)
    assert found["lamina_requests_total", ""] == 1
    assert found["lamina_requests_open", ""] == 0
    assert found["lamina_requests_finished_total", "finished_reason=stop"] == 1
    names = ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
             "time_per_output_token_seconds", "request_generation_tokens")  # fmt: skip
    assert {name: found[f"lamina_{name}_count", ""] for name in names} == dict.fromkeys(names, 1)
    assert found["lamina_time_to_first_token_seconds_sum", ""] == 0.5
    # three outputs at once took 1.2 s for 12 tokens after their first ones: 4 each
    assert found["lamina_time_per_output_token_seconds_sum", ""] == pytest.approx(0.3)
    assert found["lamina_request_prompt_tokens_sum", ""] == 100
    assert found["lamina_request_generation_tokens_sum", ""] == 15
    assert found["lamina_requests_cancelled_total", ""] == 0


def test_a_request_that_was_cancelled_before_its_first_token() -> None:
    _, metrics = make()
    metrics.on_generation(record(finish=("abort",), first_token_s=None, completion_tokens=0))
    found = read(metrics)
    assert found["lamina_requests_cancelled_total", ""] == 1
    assert found["lamina_requests_finished_total", "finished_reason=abort"] == 1
    assert found["lamina_time_to_first_token_seconds_count", ""] == 0
    assert found["lamina_e2e_request_latency_seconds_count", ""] == 1


def test_labels_are_bounded() -> None:
    _, metrics = make()
    for n in range(2000):
        metrics.on_response("GET", f"/{n}", 404, 0.1)
        metrics.count("finished", f"reason {n}")
    found = read(metrics)
    assert sum(name == "lamina_http_requests_total" for name, _ in found) <= 513
    assert found["lamina_http_requests_total", "endpoint=other,status=404"] == 2000 - 512
    assert sum(name == "lamina_requests_finished_total" for name, _ in found) <= 65


def test_an_answer_of_429_counts_as_rejected() -> None:
    _, metrics = make()
    metrics.on_response("POST", "/v1/completions", 429, 0.1)
    metrics.on_response("POST", "/v1/completions", 200, 0.1)
    found = read(metrics)
    assert found["lamina_requests_rejected_total", ""] == 1
    assert found["lamina_http_requests_total", "endpoint=/v1/completions,status=200"] == 1


def test_two_servers_in_one_process_share_nothing() -> None:
    (_, one), (_, other) = make(), make()
    one.on_stats(STATS)
    assert ("lamina_num_requests_running", "") not in read(other)


def test_the_other_format_of_prometheus() -> None:
    page, content_type = make()[1].text("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert page.endswith(b"# EOF\n")


def test_buckets_are_cumulative_and_borders_belong_below() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]


def test_what_grammars_cost_is_there() -> None:
    _, metrics = make()
    metrics.on_stats(STATS)
    found = read(metrics)
    assert found["lamina_grammar_compile_seconds_count", ""] == 3 and found["lamina_grammar_compile_seconds_sum", ""] == 0.03
    assert found["lamina_grammar_compile_seconds_bucket", "le=0.0025"] == 2
    assert (
        found["lamina_grammar_refusals_total", "reason=busy"] == 2
        and found["lamina_grammar_refusals_total", "reason=invalid"] == 1
    )
    assert found["lamina_grammar_hits_total", ""] == 4 and found["lamina_grammars_evicted_total", ""] == 1
    assert found["lamina_grammars_kept", ""] == 2 and found["lamina_grammars_kept_bytes", ""] == 5000
    both = summed(STATS, STATS)
    assert both.grammars.compiled[1] == 4 and both.grammars.kept == 2 and both.grammars.refused == {"invalid": 2, "busy": 4}
    assert without_gauges(STATS).grammars.kept == 0
