"""Spans reach a collector that speaks OTLP over HTTP, with their ids, times and words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from keepstep.dashboard.spans import IncidentSpan
from keepstep.edge.net import telemetry
from keepstep.errors import ConfigError, StoreError

ROOT = IncidentSpan(7, 1, 0, "keepstep recovery", 1000, 5000, {"keepstep.lost_steps": 1}, True)
LINK = IncidentSpan(7, 2, 1, "restarted", 1000, 3000, {"keepstep.why": "rank 1 was killed"})


class Collector:
    """Takes what is posted, and answers with `status`."""

    def __init__(self, status: int) -> None:
        self.bodies: list[tuple[str, bytes]] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                bodies.append((self.path, self.rfile.read(length)))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture(params=[200])
def collector(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    made = Collector(request.param)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_an_incident_arrives_as_it_is(collector: Collector) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    assert telemetry.send_spans([[ROOT, LINK]]) == 2
    [(path, body)] = collector.bodies
    assert path == "/v1/traces"
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    service = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert service["service.name"] == "keepstep"
    root, link = (span for scope in resource.scope_spans for span in scope.spans)
    assert (root.name, link.name) == ("keepstep recovery", "restarted")
    assert root.trace_id == link.trace_id == (7).to_bytes(16, "big")
    assert link.parent_span_id == root.span_id == (1).to_bytes(8, "big")
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (1000, 5000)
    assert root.attributes[0].value.int_value == 1
    assert link.attributes[0].value.string_value == "rank 1 was killed"


@pytest.mark.parametrize("collector", [400], indirect=True)
def test_a_collector_that_refuses_is_an_error(collector: Collector) -> None:
    with pytest.raises(StoreError, match="OTEL_EXPORTER_OTLP_ENDPOINT"):
        telemetry.send_spans([[ROOT]])


def test_nothing_to_send_asks_nobody(collector: Collector) -> None:
    assert telemetry.send_spans([]) == 0 and collector.bodies == []


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "has_package", lambda name: False)
    with pytest.raises(ConfigError, match=r"pip install 'keepstep\[otel\]'"):
        telemetry.send_spans([[ROOT]])
