"""What Prometheus reads at /metrics: the engine's counters as its last `Stats` tells them, and what the server itself counts.

Nothing here is global and nothing here can fail a request: a value that cannot be is left out and counted in
`lamina_metrics_errors_total`. Counters only grow, over the engine's restarts too. A request with n > 1 is one request, and
each of its n answers is one output. Work is done per request and per step of news, never per token.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lamina.base.version import __version__
from lamina.engine.wire import GRAMMAR_S, Stats
from lamina.server.routing import route
from lamina.server.state import GenerationRecord, ServerState

FIRST_TOKEN_S = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)  # fmt: skip
PER_TOKEN_S = (.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 10, 20, 40)  # fmt: skip
REQUEST_S = (.01, .05, .1, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
#: a label with more values than this has the rest under "other"
MAX_LABEL_VALUES = 64

#: counters of `Stats`: attribute, name without _total, sentence
_ENGINE_COUNTERS = (
    ("prompt_tokens", "lamina_prompt_tokens", "Tokens of the prompts that were looked up."),
    ("cached_tokens", "lamina_cached_tokens", "Tokens of prompts that needed no computing, as they were found in the cache."),
    ("computed_tokens", "lamina_computed_tokens", "Tokens that went through the model, of prompts and of answers."),
    ("drawn_tokens", "lamina_generation_tokens", "Tokens drawn."),
    ("steps", "lamina_engine_steps", "Steps of the engine."),
    ("prefill_s", "lamina_engine_prefill_seconds", "Time of steps that computed prompts."),
    ("decode_s", "lamina_engine_decode_seconds", "Time of steps that only computed answers."),
    ("preemptions", "lamina_preemptions", "Requests put aside for others; what they remember is kept."),
    ("evictions", "lamina_evictions", "Pieces of the cache dropped to make room."),
    ("late_results", "lamina_late_results", "Results that came after their request had ended, and were dropped."),
    ("lookups", "lamina_prefix_lookups", "Lookups of a prompt's prefix in the cache."),
    ("drafts", "lamina_spec_decode_num_drafts", "Steps of a request with tokens drafted ahead."),
    ("draft_tokens", "lamina_spec_decode_num_draft_tokens", "Tokens drafted ahead."),
    ("accepted_drafts", "lamina_spec_decode_num_accepted_tokens", "Tokens drafted ahead that were then drawn."),
)  # fmt: skip
_ENGINE_MAPS = (
    ("moves", "lamina_moved_states", "how", "States of prompts that other engines computed, or wanted, by what became of them."),
    ("moved_bytes", "lamina_moved_bytes", "way", "Bytes of states that moved between engines."),
    ("misses", "lamina_prefix_lookup_stops", "reason", "Lookups by the reason why no more was found."),
    ("finished", "lamina_outputs_finished", "finished_reason", "Outputs the engine has ended, by reason; n > 1 are n outputs."),
    (
        "accepted_by_place",
        "lamina_spec_decode_num_accepted_tokens_per_pos",
        "position",
        "Tokens drafted ahead that were then drawn, by their place among those of a step, from 0.",
    ),
)


class Histogram:
    """Observations in buckets with these upper bounds, in ascending order."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Adds one value. Raises ValueError if it is negative or not a number: a sum would go down or be lost."""
        if not 0 <= value < math.inf:
            raise ValueError(f"cannot observe {value}")
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), cumulative, the last one +Inf."""
        found, sum_ = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts):
            sum_ += count
            found.append((bound, float(sum_)))
        return found


class Metrics(Collector):
    """All that /metrics shows of one server: its Observer, and a listener of its engine's statistics. Its methods never raise."""

    def __init__(self, state: ServerState, with_process: bool = True) -> None:
        self.model = state.model_name
        self.errors = 0
        self._state = state
        self._stats: Stats | None = None
        self._engine: dict[tuple[str, str], float] = {}  # (name, label) of what the engine counts
        self._counts: dict[tuple[str, str], int] = {}
        self._http: dict[tuple[str, str], int] = {}
        self._histograms = {
            "first_token": Histogram(FIRST_TOKEN_S), "per_token": Histogram(PER_TOKEN_S),
            "e2e": Histogram(REQUEST_S), "queued": Histogram(REQUEST_S), "prefill": Histogram(REQUEST_S),
            "decode": Histogram(REQUEST_S), "prompt_tokens": Histogram(TOKENS), "generation_tokens": Histogram(TOKENS),
        }  # fmt: skip
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        if with_process:
            ProcessCollector(registry=self.registry)

    # What the server tells -------------------------------------------------------------------------------------------

    def on_tokens(self, num_tokens: int, gap_s: float) -> None:
        """Nothing: tokens are the engine's to count, and times are taken once a request."""

    def on_generation(self, record: GenerationRecord) -> None:
        """A prompt has ended: one request, whatever its n; if one of its outputs did not just stop, that is its reason."""
        others = [reason for reason in record.finish if reason != "stop"]
        self.count("finished", others[-1] if others else "stop")
        self.count("cancelled", by="abort" in record.finish)
        self.observe("e2e", record.total_s)
        if record.first_token_s is None:
            return
        self.observe("first_token", record.first_token_s)
        later = record.completion_tokens - len(record.finish)  # tokens after the first one of each output
        if later > 0:
            self.observe("per_token", (record.total_s - record.first_token_s) * len(record.finish) / later)
        self.observe("queued", record.queued_s)
        self.observe("prefill", record.prefill_s)
        self.observe("decode", record.decode_s)
        self.observe("prompt_tokens", record.prompt_tokens)
        self.observe("generation_tokens", record.completion_tokens)

    def on_response(self, method: str, route: str, status: int, seconds: float) -> None:
        """An answer has ended. route  its pattern, never the path that a client wrote."""
        key = (route or "other", str(status))
        if key not in self._http and len(self._http) >= 8 * MAX_LABEL_VALUES:
            key = ("other", str(status))
        self._http[key] = self._http.get(key, 0) + 1
        self.count("rejected", by=status == 429)

    def count(self, what: str, label: str = "", by: int = 1) -> None:
        """More of: finished (by reason), rejected, cancelled."""
        key = (what, label)
        if key not in self._counts and sum(name == what for name, _ in self._counts) >= MAX_LABEL_VALUES:
            key = (what, "other")
        self._counts[key] = self._counts.get(key, 0) + by

    def observe(self, what: str, value: float) -> None:
        """One observation, in seconds or tokens; one that cannot be is left out and counted."""
        try:
            self._histograms[what].observe(value)
        except (ValueError, TypeError):
            self.errors += 1

    def on_stats(self, stats: Stats) -> None:
        """The engine's news; a listener of EngineClient, whose counters go on over the engine's restarts."""
        self._stats = stats
        for attribute, name, _ in _ENGINE_COUNTERS:
            self._put((name, ""), _number(stats, attribute))
        for reason, count in stats.misses.items():
            self._put(("lamina_prefix_lookup_stops", reason), count)
        for reason, count in stats.finished.items():
            self._put(("lamina_outputs_finished", reason), count)
        for how, count in stats.moves.items():
            self._put(("lamina_moved_states", how), count)
        for way, count in stats.moved_bytes.items():
            self._put(("lamina_moved_bytes", way), count)
        for place, count in enumerate(stats.accepted_by_place):
            self._put(("lamina_spec_decode_num_accepted_tokens_per_pos", str(place)), count)

    def _put(self, key: tuple[str, str], value: float) -> None:
        """Keeps a counter's value; one that goes down or is no number is left out and counted."""
        if self._engine.get(key, 0.0) <= value < math.inf:
            self._engine[key] = value
        else:
            self.errors += 1

    # What Prometheus reads -------------------------------------------------------------------------------------------

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """(the page, its content type) for this Accept header."""
        encode, content_type = choose_encoder(accept)
        try:
            return encode(self.registry), content_type
        except Exception:  # a library that cannot write one series must not take the endpoint down
            self.errors += 1
            return (
                f"# TYPE lamina_metrics_errors_total counter\nlamina_metrics_errors_total {self.errors}\n".encode(),
                content_type,
            )

    def collect(self) -> Iterator[Metric]:
        """Families for the registry; one that cannot be built is left out and counted."""
        for part in (
            self._collect_engine,
            self._collect_grammars,
            self._collect_gauges,
            self._collect_server,
            self._collect_histograms,
        ):
            try:
                families = list(part())
            except Exception:  # as above
                self.errors += 1
                continue
            yield from families
        yield self._counter(
            "lamina_metrics_errors", "Values that were left out of these metrics because they cannot be.", self.errors
        )

    def _collect_engine(self) -> Iterator[Metric]:
        for _, name, words in _ENGINE_COUNTERS:
            yield self._counter(name, words, self._engine.get((name, ""), 0.0))
        for _, name, label, words in _ENGINE_MAPS:
            yield self._labelled(
                name, words, label, {key: value for (found, key), value in self._engine.items() if found == name}
            )
        yield self._counter(
            "lamina_engine_restarts", "Times the engine was started again after it had died.", self._state.client.num_restarts
        )

    def _collect_grammars(self) -> Iterator[Metric]:
        stats = self._stats
        if stats is None:
            return
        found = stats.grammars
        times = Histogram(GRAMMAR_S)
        times.counts, times.total = list(found.compiled), found.total_s
        family = HistogramMetricFamily(
            "lamina_grammar_compile_seconds", "Time that a grammar took to compile.", labels=["model_name"]
        )
        family.add_metric([self.model], times.buckets(), times.total)
        yield family
        yield self._counter("lamina_grammar_hits", "Requests whose grammar was compiled before.", found.hits)
        yield self._counter("lamina_grammars_evicted", "Compiled grammars dropped to make room.", found.evicted)
        words = "Grammars refused: invalid, late (too slow to compile), busy (all threads had late ones)."
        yield self._labelled("lamina_grammar_refusals", words, "reason", found.refused)
        yield self._gauge("lamina_grammars_kept", "Compiled grammars that are kept.", found.kept)
        yield self._gauge("lamina_grammars_kept_bytes", "Bytes of compiled grammars that are kept.", found.kept_bytes)

    def _collect_gauges(self) -> Iterator[Metric]:
        stats, is_up = self._stats, self._state.client.state == "ready"
        yield self._gauge("lamina_engine_up", "1 while the engine serves, else 0.", is_up)
        info = GaugeMetricFamily("lamina_build_info", "Always 1.", labels=["model_name", "version"])
        info.add_metric([self.model, __version__], 1)
        yield info
        if stats is None or not is_up:
            return
        yield self._gauge("lamina_num_requests_running", "Requests that run.", stats.running)
        yield self._gauge("lamina_num_requests_waiting", "Requests that wait.", stats.waiting)
        pages = {"free": stats.free_pages, "held": stats.held_pages, "cached": stats.cached_pages}
        yield self._gauges("lamina_pages", "Pages of the memory by state.", "state", pages)
        share = stats.held_pages / max(1, sum(pages.values()))
        yield self._gauge("lamina_held_pages_ratio", "Share of the pages that running requests hold, 0 to 1.", share)
        held = {row.name: row.held_bytes for row in stats.memories}
        cached = {row.name: row.cached_bytes for row in stats.memories}
        yield self._gauges("lamina_memory_held_bytes", "Bytes held by running requests, by memory.", "memory", held)
        yield self._gauges("lamina_memory_cached_bytes", "Bytes kept for reuse, by memory.", "memory", cached)

    def _collect_server(self) -> Iterator[Metric]:
        counts, counters = self._counts, self._state.counters
        total = lambda what: sum(n for (name, _), n in counts.items() if name == what)
        yield self._counter("lamina_requests", "Requests for an answer that were taken; n > 1 is one.", counters.prompts)
        reasons = {label: n for (name, label), n in counts.items() if name == "finished"}
        words = "Requests that ended, by reason; with n > 1 the reason of an output that did not just stop."
        yield self._labelled("lamina_requests_finished", words, "finished_reason", reasons)
        yield self._gauge("lamina_requests_open", "Requests taken that have not ended.", self._state.in_flight)
        words = "Requests refused with 429, as too many were in work."
        yield self._counter("lamina_requests_rejected", words, total("rejected"))
        yield self._counter("lamina_requests_cancelled", "Requests cancelled before their end.", total("cancelled"))
        yield self._counter("lamina_disconnects", "Clients that went away before their answer's end.", counters.disconnects)
        yield self._counter("lamina_late_pieces", "News of outputs that nobody waited for any more.", counters.late_pieces)
        family = CounterMetricFamily("lamina_http_requests", "HTTP answers by endpoint and status.",
                                     labels=["model_name", "endpoint", "status"])  # fmt: skip
        for (endpoint, status), n in sorted(self._http.items()):
            family.add_metric([self.model, endpoint, status], n)
        yield family

    def _collect_histograms(self) -> Iterator[Metric]:
        names = {
            "first_token": ("lamina_time_to_first_token_seconds", "From taking a request to its first token."),
            "per_token": ("lamina_time_per_output_token_seconds", "Mean time between an output's tokens after the first."),
            "e2e": ("lamina_e2e_request_latency_seconds", "From taking a request to its end."),
            "queued": ("lamina_request_queue_time_seconds", "Time a request waited in the engine."),
            "prefill": ("lamina_request_prefill_time_seconds", "From running to the first token."),
            "decode": ("lamina_request_decode_time_seconds", "From the first token to the last."),
            "prompt_tokens": ("lamina_request_prompt_tokens", "Tokens of a request's prompt."),
            "generation_tokens": ("lamina_request_generation_tokens", "Tokens of all outputs of a request."),
        }
        for key, (name, words) in names.items():
            histogram = self._histograms[key]
            family = HistogramMetricFamily(name, words, labels=["model_name"])
            family.add_metric([self.model], histogram.buckets(), histogram.total)
            yield family

    def _counter(self, name: str, words: str, value: float) -> Metric:
        return self._labelled(name, words, None, {"": value})

    def _labelled(self, name: str, words: str, label: str | None, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, words, labels=["model_name", *([label] if label else [])])
        for key, value in sorted(values.items()):
            family.add_metric([self.model, *([key.replace(" ", "_").replace("-", "_")] if label else [])], value)
        return family

    def _gauge(self, name: str, words: str, value: float) -> Metric:
        return self._gauges(name, words, None, {"": value})

    def _gauges(self, name: str, words: str, label: str | None, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, words, labels=["model_name", *([label] if label else [])])
        for key, value in values.items():
            if not 0 <= value < math.inf:
                self.errors += 1
                continue
            family.add_metric([self.model, *([key] if label else [])], value)
        return family


def _number(stats: Stats, attribute: str) -> float:
    value: float = getattr(stats, attribute)
    return value


def routes(state: ServerState) -> list[Route]:
    """GET /metrics of this server, whose metrics begin to listen here."""
    metrics = Metrics(state)
    state.observers.append(metrics)
    state.client.add_listener(metrics.on_stats)

    async def show(request: Request) -> Response:
        page, content_type = metrics.text(request.headers.get("accept", ""))
        return Response(page, media_type=content_type)

    return [route("/metrics", show)]
