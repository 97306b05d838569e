"""The events of a watch at the API server.

-> requests.py opens the answer to a watch request.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi

#: Event without an object: it only has the version from which a later watch can continue.
BOOKMARK = "BOOKMARK"
_ERROR = "ERROR"
_CHUNK_BYTES = 1 << 16


class WatchStream:
    """A watch at the API server.

    Args:
        api: client of the namespace.
        kind: kind of the watched objects.
        version: resource version after which the events begin.
        selector: label selector; "" for all.
        name: name of the only object to be watched; "" for all.
        silence_s: seconds without any event after which the stream fails.

    Raises:
        ApiError: if the server refuses the watch or does not answer; with status 410 if it does not
            keep events since that version any more.
    """

    def __init__(
        self,
        api: KubernetesApi,
        kind: str,
        version: str,
        *,
        selector: str = "",
        name: str = "",
        silence_s: float,
    ) -> None:
        self._server = api.server
        self._answer = api.open_watch(
            kind, version, selector=selector, name=name, silence_s=silence_s
        )

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield type and object of each event, until the server or :meth:`close` ends the stream.

        Raises:
            ApiError: if the stream breaks or is silent for too long, with status 0; if the server
                reports an error, with its status.
        """
        from urllib3.exceptions import HTTPError

        rest = b""
        try:
            for chunk in self._answer.stream(_CHUNK_BYTES, decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from map(self._event, filter(None, lines))
        except (HTTPError, OSError, AttributeError, ValueError) as error:
            # the last two come from a stream that is closed while it is read
            raise ApiError(f"the watch at {self._server} has broken: {error}") from None

    def close(self) -> None:
        """End the stream, also while another thread reads from it. Raises nothing."""
        with contextlib.suppress(Exception):  # a stream that has ended already
            self._answer.shutdown()
        with contextlib.suppress(Exception):
            self._answer.close()

    def _event(self, line: bytes) -> tuple[str, dict[str, Any]]:
        """Return type and object of an event. Raises ApiError for an error that the server reports."""
        try:
            event = json.loads(line)
        except ValueError:  # text of a proxy on the way
            text = f"{self._server} sent text that is not JSON: {line[:60]!r}"
            raise ApiError(text, HTTPStatus.BAD_GATEWAY) from None
        if event["type"] == _ERROR:
            status = event["object"]
            raise ApiError(str(status.get("message")), int(status.get("code") or 0))
        return str(event["type"]), event["object"]
