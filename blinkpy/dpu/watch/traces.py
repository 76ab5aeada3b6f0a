"""OpenTelemetry traces: a span for each request with generations, with a child span for each phase of its
first choice.

Spans are made after the request ends, from times that the access log also uses. A thread of OpenTelemetry
sends them, and drops spans if its queue is full. The client's `traceparent` is the parent. Attribute names
follow OpenTelemetry's conventions for generative AI.
"""

import time
from typing import TYPE_CHECKING, Any

from blinkpy.config import WatchOptions
from blinkpy.dpu.watch.access_log import EndedRequest, RequestPhases, ending_of, phases_of
from blinkpy.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

PARENT_HEADERS = (b"traceparent", b"tracestate")
EXPORT_S = 5  # time limit for sending a batch of spans


def make_tracer(options: WatchOptions, model: str) -> "RequestTracer | None":
    """A tracer for the endpoint of the options, or None without an endpoint."""
    if not options.otlp_traces_endpoint:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return RequestTracer(BatchSpanProcessor(OTLPSpanExporter(options.otlp_traces_endpoint, timeout=EXPORT_S)), model)


class RequestTracer:
    """Makes the spans of ended requests. processor: OpenTelemetry's span processor, which sends them."""

    def __init__(self, processor: "SpanProcessor", model: str):
        from opentelemetry.propagate import extract
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        self._extract, self._set_span, self._server, self._error = extract, set_span_in_context, SpanKind.SERVER, StatusCode.ERROR
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win.
        resource = Resource.create().merge(Resource({"service.version": __version__}))
        if resource.attributes.get("service.name", "").startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "blinkpy"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer, self._model = self._provider.get_tracer("blinkpy", __version__), model

    def request(self, request: EndedRequest, ended: float) -> None:
        """Make the spans of a request with generations. ended: its end, s of the monotonic clock."""
        offset = time.time_ns() - time.monotonic_ns()  # between the two clocks

        def at(seconds: float) -> int:
            return int(seconds * 1e9) + offset

        first = request.generations[0]
        phases = phases_of(first)
        given = {name.decode(): value.decode("latin-1") for name, value in request.headers if name in PARENT_HEADERS}
        parent = self._extract(given)
        attributes = self._attributes(request, phases)
        start = at(request.arrival)
        span = self._tracer.start_span("llm_request", parent, self._server, attributes, start_time=start)
        below = self._set_span(span, parent)
        begin = request.arrival
        for name, seconds in zip(RequestPhases._fields, phases, strict=True):
            if seconds is None:
                break
            inner = self._tracer.start_span(name, below, start_time=at(begin))
            begin += seconds
            inner.end(at(begin))
        if any(generation.error is not None for generation in request.generations):
            span.set_status(self._error)
        span.end(at(ended))

    def _attributes(self, request: EndedRequest, phases: RequestPhases) -> dict[str, Any]:
        generations = request.generations
        first = generations[0]
        attributes: dict[str, Any] = {
            "http.request.method": request.method,
            "url.path": request.path,
            "http.response.status_code": request.status,
            "gen_ai.request.model": self._model,
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.n": len(generations),
            "gen_ai.usage.input_tokens": first.prompt_length,
            "gen_ai.usage.output_tokens": sum(generation.tokens for generation in generations),
            "gen_ai.response.finish_reasons": [ending_of(generation) for generation in generations],
            "blinkpy.cached_tokens": first.cached_tokens,
        }
        if first.first_event:
            attributes["gen_ai.latency.time_to_first_token"] = first.first_event - first.arrival
        for name, seconds in zip(RequestPhases._fields, phases, strict=True):
            if seconds is not None:
                attributes[f"gen_ai.latency.time_in_{name}"] = seconds
        return attributes

    def close(self) -> None:
        """Send the waiting spans, within about EXPORT_S."""
        self._provider.force_flush(EXPORT_S * 1000)
        self._provider.shutdown()
