"""One OpenTelemetry span for each request, for who wants them (`--otel`, the extra `lamina[otel]`).

Nothing of OpenTelemetry is imported before `open_tracing` is called. Where spans go is said by the standard variables that its
SDK reads (OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, ...). A span has numbers
and names, never a text of a prompt or an answer. It is made when its request has ended, with the times that were measured, and
exported by a thread of the SDK: a request waits for nothing.
"""

from __future__ import annotations

import os
import time
from contextvars import ContextVar
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from lamina.base.errors import ConfigError
from lamina.base.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from starlette.types import ASGIApp, Receive, Scope, Send

    from lamina.server.state import GenerationRecord

#: headers of the request in work that say whose part its span is
_CARRIED = (b"traceparent", b"tracestate")
_incoming: ContextVar[dict[str, str]] = ContextVar("lamina_incoming_trace", default={})  # noqa: B039  never changed in place

_INSTALL = "the package opentelemetry-sdk is not installed: pip install 'lamina[otel]'"


class Tracing:
    """An Observer that turns each ended request into a span."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.model = model
        self._provider = provider
        self._tracer = provider.get_tracer("lamina", __version__)
        self._kind = SpanKind.SERVER
        self._propagator = TraceContextTextMapPropagator()

    def on_response(self, method: str, route: str, status: int, seconds: float) -> None:
        """Nothing: only requests for answers have spans."""

    def on_tokens(self, num_tokens: int, gap_s: float) -> None:
        """Nothing: a span is made once, at the end."""

    def on_generation(self, record: GenerationRecord) -> None:
        """Makes and ends the span of a request that has ended just now."""
        stop_ns = time.time_ns()
        start_ns = stop_ns - round(max(0.0, record.total_s) * 1e9)
        parent = self._propagator.extract(_incoming.get())
        span = self._tracer.start_span("lamina.request", parent, self._kind, start_time=start_ns)
        if span.is_recording():
            attributes: dict[str, str | int | float | tuple[str, ...]] = {
                "gen_ai.operation.name": "generate",
                "gen_ai.request.model": self.model,
                "gen_ai.response.id": record.id,
                "gen_ai.response.finish_reasons": record.finish,
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": record.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
                "gen_ai.usage.reasoning.output_tokens": record.reasoning_tokens,
                "lamina.queued_s": record.queued_s,
                "lamina.prefill_s": record.prefill_s,
                "lamina.decode_s": record.decode_s,
                "lamina.prefix_stop": record.prefix_stop,
            }
            if record.first_token_s is not None:
                attributes["gen_ai.response.time_to_first_chunk"] = record.first_token_s
                span.add_event("first token", timestamp=start_ns + round(record.first_token_s * 1e9))
            attributes |= {f"lamina.held_bytes.{name}": nbytes for name, nbytes in record.held_bytes.items()}
            span.set_attributes(attributes)
            if "error" in record.finish:
                from opentelemetry.trace import Status, StatusCode

                span.set_status(Status(StatusCode.ERROR, "the engine could not finish it"))
        span.end(stop_ns)

    def close(self) -> None:
        """Sends what waits, for a few seconds at most."""
        self._provider.force_flush(5_000)
        self._provider.shutdown()


class KeepTraceHeaders:
    """ASGI middleware: what a request says about the trace that it belongs to, for its span."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request with its headers kept."""
        if scope["type"] == "http":
            found = {name.decode(): value.decode("latin-1")[:512] for name, value in scope["headers"] if name in _CARRIED}
            _incoming.set(found)
        await self._app(scope, receive, send)


def open_tracing(model: str, exporter: SpanExporter | None = None) -> Tracing:
    """Spans that go where the environment says: OTEL_TRACES_EXPORTER, "otlp" if it is not set.

    Raises  ConfigError if OpenTelemetry or the exporter is not installed.
    """
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError("--otel", True, _INSTALL) from None
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if named else {SERVICE_NAME: "lamina"}))
    for one in [exporter] if exporter is not None else _exporters():
        provider.add_span_processor(BatchSpanProcessor(one))
    return Tracing(provider, model)


def _exporters() -> list[SpanExporter]:
    """The exporters that OTEL_TRACES_EXPORTER names, found as the SDK finds them: by their packages' entry points."""
    found = []
    for name in (part.strip() for part in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")):
        if name in ("", "none"):
            continue
        if name == "otlp":
            protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
            name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
        known = {point.name: point for point in entry_points(group="opentelemetry_traces_exporter")}
        if name not in known:
            allowed = f"no such exporter is installed (there are {', '.join(sorted(known))}); lamina[otel] brings otlp over HTTP"
            raise ConfigError("OTEL_TRACES_EXPORTER", name, allowed)
        made: SpanExporter = known[name].load()()
        found.append(made)
    return found
