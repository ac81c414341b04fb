"""Telemetry: spans to an OpenTelemetry collector, by the library of that project.

Comes in: spans as plain values. Goes out: OTLP over HTTP, where the variables OTEL_EXPORTER_OTLP_*
say, which are that project's own. Needs `keepstep[otel]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from keepstep.edge.os.needs import has_package
from keepstep.errors import ConfigError, StoreError

SERVICE = "keepstep"


class SpanLike(Protocol):
    """What is read of a span; see `dashboard.spans.IncidentSpan`."""

    @property
    def trace_id(self) -> int: ...
    @property
    def span_id(self) -> int: ...
    @property
    def parent_id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def began_ns(self) -> int: ...
    @property
    def ended_ns(self) -> int: ...
    @property
    def attributes(self) -> dict[str, Any]: ...
    @property
    def ok(self) -> bool | None: ...


def send_spans(incidents: Iterable[Iterable[SpanLike]]) -> int:
    """How many spans were sent. Raises ConfigError: the library is missing; StoreError: the
    collector did not take them."""
    if not has_package("opentelemetry.sdk") or not has_package("opentelemetry.exporter.otlp"):
        raise ConfigError(
            "--spans: expected the OpenTelemetry SDK, found none: pip install 'keepstep[otel]'"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    exporter: Any = OTLPSpanExporter()
    try:
        made = [span for incident in incidents for span in _made(incident)]
        if made and exporter.export(made) is not SpanExportResult.SUCCESS:
            raise StoreError(
                "--spans: expected a collector that takes OTLP over HTTP where "
                "OTEL_EXPORTER_OTLP_ENDPOINT says, found none; its library says why above"
            )
        return len(made)
    finally:
        exporter.shutdown()


def _made(incident: Iterable[SpanLike]) -> Iterator[Any]:
    """The library's own objects."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    resource = Resource.create({"service.name": SERVICE})
    for span in incident:
        sampled = TraceFlags(TraceFlags.SAMPLED)
        parent = (
            SpanContext(span.trace_id, span.parent_id, False, sampled) if span.parent_id else None
        )
        code = {None: StatusCode.UNSET, True: StatusCode.OK, False: StatusCode.ERROR}[span.ok]
        yield ReadableSpan(
            name=span.name,
            context=SpanContext(span.trace_id, span.span_id, False, sampled),
            parent=parent,
            resource=resource,
            attributes=span.attributes,
            kind=SpanKind.INTERNAL,
            status=Status(code),
            start_time=span.began_ns,
            end_time=span.ended_ns,
        )
