"""Spans as OpenTelemetry wants them: over OTLP/HTTP to a collector, or as OTLP/JSON in a file."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from chaoskit.errors import BadInput
from chaoskit.journal import Record
from chaoskit.observe.follow import Follower
from chaoskit.observe.spans import Clock, Span, all_spans, run_span, setback_span, span_id, trace_id
from chaoskit.runlog.account.setback import Setback

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

_PATH = "/v1/traces"
_TIMEOUT_S = 5.0
_BATCH = 512


def validate_endpoint(field: str, url: str) -> str:
    """The address that spans are posted to: ``url``, with ``/v1/traces`` where it has no path.

    Raises:
        BadInput: if it is none, or the libraries are missing.
    """
    place = urlsplit(url)
    if place.scheme not in ("http", "https") or not place.hostname:
        raise BadInput(
            field, url, "write the address of an OTLP/HTTP receiver, such as http://localhost:4318"
        )
    require_libraries(field, url)
    return url if place.path.strip("/") else url.rstrip("/") + _PATH


def require_libraries(field: str, value: str) -> None:
    """Raises BadInput, if nothing can be exported."""
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        remedy = "install OpenTelemetry: pip install 'chaoskit[observe]'"
        raise BadInput(field, value, remedy) from None


class Encoder:
    """Makes readable spans of ours. Names of spans and of the trace follow from the run: exported twice, they are the
    same spans.

    Args:
        started: the first record of the harness.
    """

    def __init__(self, started: Record) -> None:
        from opentelemetry.sdk.resources import Resource

        self._clock, self._trace = Clock.of(started), trace_id(started)
        about = {
            "service.name": "chaoskit",
            "process.pid": started["pid"],
            "chaoskit.run": started["name"],
        }
        self._resource = Resource(about)

    def encode(self, span: Span, parent: Span | None = None) -> Iterator[ReadableSpan]:
        """``span`` and all in it."""
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Status, StatusCode

        unix = self._clock.unix
        yield ReadableSpan(
            name=span.name,
            context=self._context(span),
            parent=self._context(parent) if parent is not None else None,
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(name, timestamp=unix(t_ns)) for name, t_ns in span.moments],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.OK),
            start_time=unix(span.begin_ns),
            end_time=unix(span.end_ns),
            instrumentation_scope=InstrumentationScope("chaoskit"),
        )
        for child in span.children:
            yield from self.encode(child, span)

    def _context(self, span: Span) -> Any:
        from opentelemetry.trace import SpanContext, TraceFlags

        sampled = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(
            self._trace, span_id(self._trace, span.key), is_remote=False, trace_flags=sampled
        )


def encode_run(follower: Follower) -> list[ReadableSpan]:
    """The whole trace of a run that is over, or of what there is of it."""
    assert follower.started is not None, "older runs are refused before"
    return list(Encoder(follower.started).encode(all_spans(follower)))


def post(spans: Sequence[ReadableSpan], url: str) -> bool:
    """Send ``spans`` to a receiver. Whether it took them all."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    exporter = _exporter(url)
    batches = [spans[begin : begin + _BATCH] for begin in range(0, len(spans), _BATCH)]
    try:
        return all(exporter.export(batch) is SpanExportResult.SUCCESS for batch in batches)
    finally:
        exporter.shutdown()


def _exporter(url: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=url, timeout=_TIMEOUT_S)


def write_file(spans: Sequence[ReadableSpan], path: Path) -> None:
    """One line of OTLP/JSON: what collectors read from files, with names of spans in hexadecimal."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    message = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    path.write_text(json.dumps(_in_hexadecimal(message)) + "\n", encoding="utf-8")


def _in_hexadecimal(value: Any) -> Any:
    """OTLP departs from protobuf's own JSON in this: ids are hexadecimal, not base 64."""
    if isinstance(value, list):
        return [_in_hexadecimal(one) for one in value]
    if isinstance(value, dict):
        ids = ("traceId", "spanId", "parentSpanId")
        return {
            key: b64decode(one).hex() if key in ids else _in_hexadecimal(one)
            for key, one in value.items()
        }
    return value


class LiveExport:
    """Sends each recovery when it is over, while the run goes on. A receiver that is away costs the spans, no time.

    Args:
        url: from :func:`validate_endpoint`.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="spans")
        self._sent: list[Future[bool]] = []
        self._done: set[str] = set()

    def update(self, follower: Follower) -> None:
        """Send what is complete: back at full strength, with its copies and spares."""
        if follower.started is not None:
            whole = [
                one for one in follower.accountant.setbacks if "redundancy restored" in one.ends
            ]
            self._send(follower, whole)

    def _send(self, follower: Follower, setbacks: Sequence[Setback]) -> None:
        assert follower.started is not None
        new = [span for one in setbacks if (span := setback_span(one)).key not in self._done]
        if new:
            self._done.update(span.key for span in new)
            encoder, run = Encoder(follower.started), run_span(follower)
            spans = [one for span in new for one in encoder.encode(span, run)]
            self._sent.append(self._sender.submit(post, spans, self._url))

    def finish(self, follower: Follower) -> bool:
        """Send the rest, and the run itself. Whether all was taken."""
        if follower.started is not None:
            run = all_spans(follower)
            run.children = [child for child in run.children if child.key not in self._done]
            spans = list(Encoder(follower.started).encode(run))
            self._sent.append(self._sender.submit(post, spans, self._url))
        self._sender.shutdown()
        return all(future.exception() is None and future.result() for future in self._sent)
