"""Spans: one for each request, with its numbers, in the trace of who asked; nothing of OpenTelemetry where it is not wanted."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from lamina.base.errors import ConfigError
from lamina.server.state import GenerationRecord
from lamina.server.tracing import KeepTraceHeaders, open_tracing

memory = pytest.importorskip(
    "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="opentelemetry-sdk is not installed"
)

RECORD = GenerationRecord(
    id="r1", owner="somebody", prompt_tokens=100, cached_tokens=40, completion_tokens=15, reasoning_tokens=3,
    finish=("stop", "length"), first_token_s=0.5, total_s=1.5, queued_s=0.3, prefill_s=0.2, decode_s=1.0,
    prefix_stop="40 tokens reused: the rest was never stored", held_bytes={"window": 1000, "c4": 20},
)  # fmt: skip
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def span_of(record: GenerationRecord, headers: list[tuple[bytes, bytes]]) -> object:
    """The one span that a request with these headers leaves."""
    exporter = memory.InMemorySpanExporter()
    tracing = open_tracing("tiny", exporter)

    async def app(scope: object, receive: object, send: object) -> None:
        tracing.on_response("POST", "/v1/completions", 200, 1.0)
        tracing.on_tokens(1, 0.1)
        tracing.on_generation(record)

    asyncio.run(KeepTraceHeaders(app)({"type": "http", "headers": headers}, None, None))  # type: ignore[arg-type]
    tracing.close()
    (span,) = exporter.get_finished_spans()
    return span


def test_a_span_has_the_numbers_of_its_request() -> None:
    span = span_of(RECORD, [])
    expected = {
        "gen_ai.request.model": "tiny", "gen_ai.response.id": "r1", "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 15, "gen_ai.usage.cache_read.input_tokens": 40,
        "gen_ai.response.time_to_first_chunk": 0.5, "lamina.queued_s": 0.3, "lamina.held_bytes.window": 1000,
    }  # fmt: skip
    assert {name: span.attributes[name] for name in expected} == expected
    assert span.end_time - span.start_time == 1_500_000_000
    (event,) = span.events
    assert event.timestamp - span.start_time == 500_000_000
    assert span.parent is None
    assert span.resource.attributes["service.name"] == "lamina"


def test_a_span_belongs_to_the_trace_of_who_asked() -> None:
    span = span_of(RECORD, [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())])
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT


@pytest.mark.parametrize(
    "header", [b"", b"00-zz-zz-01", b"\xff\xfe", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"9" * 9999]
)
def test_a_header_that_is_no_trace_begins_a_new_one(header: bytes) -> None:
    assert span_of(RECORD, [(b"traceparent", header)]).parent is None


def test_a_failed_request_is_an_error() -> None:
    span = span_of(replace(RECORD, finish=("error",), first_token_s=None), [])
    assert span.status.status_code.name == "ERROR"
    assert "gen_ai.response.time_to_first_chunk" not in span.attributes


def test_who_asked_is_not_told() -> None:
    assert "somebody" not in span_of(RECORD, []).to_json()


def test_exporters_are_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nothing_like_it")
    with pytest.raises(ConfigError, match=r"OTEL_TRACES_EXPORTER='nothing_like_it'.*console"):
        open_tracing("tiny")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    open_tracing("tiny").close()


def test_nothing_of_it_is_imported_before_it_is_wanted() -> None:
    names = "('opentelemetry', 'nicegui', 'torch')"
    code = f"import sys, lamina.server.run, lamina.server.tracing; print([n for n in {names} if n in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
