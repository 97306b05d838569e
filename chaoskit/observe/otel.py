"""Export of spans to OpenTelemetry: over OTLP/HTTP to a collector, or as OTLP/JSON to a file.

-> observe/spans.py: the tree of spans. observe/watching.py: the export of a running launch.
-> cli/training/trace.py: the export of a run that is over.
"""

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
from chaoskit.observe.follower import Follower
from chaoskit.observe.spans import Clock, Span, all_spans, run_span, setback_span, span_id, trace_id
from chaoskit.runlog.account.setback import Setback

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

_PATH = "/v1/traces"
_TIMEOUT_S = 5.0
_BATCH = 512


def validate_endpoint(field: str, url: str) -> str:
    """Return the address that spans are posted to: ``url``, with ``/v1/traces`` if it has no path.

    Raises:
        BadInput: if it is no HTTP address, or the libraries are missing. The field is ``field``.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput(
            field, url, "write the address of an OTLP/HTTP receiver, such as http://localhost:4318"
        )
    require_libraries(field, url)
    return url if parts.path.strip("/") else url.rstrip("/") + _PATH


def require_libraries(field: str, value: str) -> None:
    """Raise BadInput if the libraries for the export are missing."""
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        remedy = "install OpenTelemetry: pip install 'chaoskit[observe]'"
        raise BadInput(field, value, remedy) from None


class Encoder:
    """An encoder of our spans as readable spans.

    The ids of spans and of the trace follow from the run, so that a second export yields the same
    spans.

    Args:
        started: the first record of the harness.
    """

    def __init__(self, started: Record) -> None:
        from opentelemetry.sdk.resources import Resource

        self._clock, self._trace = Clock.of(started), trace_id(started)
        attributes = {
            "service.name": "chaoskit",
            "process.pid": started["pid"],
            "chaoskit.run": started["name"],
        }
        self._resource = Resource(attributes)

    def encode(self, span: Span, parent: Span | None = None) -> Iterator[ReadableSpan]:
        """Yield the encoded ``span`` and its descendants.

        Args:
            parent: the span that contains it; None for the run.
        """
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
        """Return the identity of a span in the trace."""
        from opentelemetry.trace import SpanContext, TraceFlags

        sampled = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(
            self._trace, span_id(self._trace, span.key), is_remote=False, trace_flags=sampled
        )


def encode_run(follower: Follower, started: Record) -> list[ReadableSpan]:
    """Return the spans of a run, or of its part so far. The first span is that of the run.

    Args:
        started: the first record of the harness.
    """
    return list(Encoder(started).encode(all_spans(follower, started)))


def post(spans: Sequence[ReadableSpan], url: str) -> bool:
    """Send ``spans`` to a receiver in batches. Return True if it accepted all of them.

    The first batch that it does not accept is the last one, and is not repeated here. The result is
    True without spans.

    Args:
        url: the address, from :func:`validate_endpoint`.
    """
    from opentelemetry.sdk.trace.export import SpanExportResult

    exporter = _exporter(url)
    batches = [spans[begin : begin + _BATCH] for begin in range(0, len(spans), _BATCH)]
    try:
        return all(exporter.export(batch) is SpanExportResult.SUCCESS for batch in batches)
    finally:
        exporter.shutdown()


def _exporter(url: str) -> SpanExporter:
    """Return an exporter for a receiver."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=url, timeout=_TIMEOUT_S)


def write_file(spans: Sequence[ReadableSpan], path: Path) -> None:
    """Write one line of OTLP/JSON, which collectors can read from files.

    An existing file is replaced. Raise OSError if it cannot be written.
    """
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    message = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    path.write_text(json.dumps(_in_hexadecimal(message)) + "\n", encoding="utf-8")


def _in_hexadecimal(json_part: Any) -> Any:
    """Return a message with ids in hexadecimal instead of base 64.

    OTLP differs in this from protobuf's own JSON.
    """
    if isinstance(json_part, list):
        return [_in_hexadecimal(element) for element in json_part]
    if isinstance(json_part, dict):
        ids = ("traceId", "spanId", "parentSpanId")
        return {
            key: b64decode(content).hex() if key in ids else _in_hexadecimal(content)
            for key, content in json_part.items()
        }
    return json_part


class LiveExport:
    """Live export of recoveries, each when it is over.

    Requests are sent by another thread. An unreachable receiver costs spans, but no time until
    :meth:`finish`.

    Args:
        url: the address, from :func:`validate_endpoint`.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="spans")
        self._requests: list[Future[bool]] = []
        self._queued_keys: set[str] = set()

    def update(self, follower: Follower) -> None:
        """Queue the recoveries and resizes that are complete and were not queued before.

        They are complete with full strength, copies and spares.
        """
        if (started := follower.started) is not None:
            complete = [
                setback
                for setback in follower.accountant.setbacks
                if "redundancy restored" in setback.ends
            ]
            self._queue(follower, started, complete)

    def _queue(self, follower: Follower, started: Record, setbacks: Sequence[Setback]) -> None:
        """Queue the spans of setbacks that were not queued before, and mark them as sent.

        The sender's thread makes one request for all of them. A request that fails is not repeated.
        """
        new = [
            span
            for setback in setbacks
            if (span := setback_span(setback)).key not in self._queued_keys
        ]
        if new:
            self._queued_keys.update(span.key for span in new)
            encoder, run = Encoder(started), run_span(follower, started)
            spans = [encoded for span in new for encoded in encoder.encode(span, run)]
            self._requests.append(self._sender.submit(post, spans, self._url))

    def finish(self, follower: Follower) -> bool:
        """Send the remaining spans and that of the run, and wait for all requests.

        Return True if the receiver accepted all requests. A run without its first record has no
        spans, and the result is True.
        """
        if (started := follower.started) is not None:
            run = all_spans(follower, started)
            run.children = [child for child in run.children if child.key not in self._queued_keys]
            spans = list(Encoder(started).encode(run))
            self._requests.append(self._sender.submit(post, spans, self._url))
        self._sender.shutdown()
        return all(future.exception() is None and future.result() for future in self._requests)
