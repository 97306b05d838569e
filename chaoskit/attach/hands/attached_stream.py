"""The stream of a hand: the standard streams of its container, over a WebSocket.

-> substrate/kubernetes/api/requests.py (``attach`` and ``exec``) opens it.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from chaoskit.process.linux import await_readable

_INPUT, _OUTPUT, _ERRORS, _STATUS = 0, 1, 2, 3
_ERRORS_MAX_BYTES = 4096


class AttachedStream:
    """The input and output of a container, as :class:`chaoskit.attach.hands.hand.HandStream`.

    One thread may receive while others send. A connection that delivers only a part of a message,
    or takes no data, has broken after the time limit of the WebSocket.

    Args:
        web_socket: WebSocket of :meth:`.api.requests.KubernetesApi.attach` or its ``exec``.
    """

    def __init__(self, web_socket: Any) -> None:
        self._web_socket, self._socket = web_socket, web_socket.sock
        self._send_lock = threading.Lock()
        self._errors = b""  # the last bytes of the standard error stream
        self._status = ""  # the message at the end of the stream

    def complaint(self) -> str:
        """Return why the program has ended, as it or the API server says; "" if neither does."""
        lines = self._errors.decode(errors="replace").strip().splitlines()
        return "; ".join(text for text in (self._status, *lines[-1:]) if text)

    def receive(self, limit_s: float) -> bytes | None:
        """Return output of the container; b"" at its end, and None if none came in time.

        Raises OSError if the connection has ended otherwise. That does not show the container's end.
        """
        from websocket import ABNF, WebSocketException

        try:
            pending = getattr(self._socket, "pending", lambda: 0)()  # decrypted, but not read
            if not pending and not await_readable([self._socket.fileno()], limit_s):
                return None
            opcode, frame = self._web_socket.recv_data_frame(control_frame=True)
        except (WebSocketException, ValueError, AttributeError) as error:  # closed meanwhile
            raise ConnectionError(f"the stream has broken: {error}") from None
        if opcode == ABNF.OPCODE_CLOSE:
            raise ConnectionError("the stream was closed, and no end of its container reported")
        if opcode != ABNF.OPCODE_BINARY or not frame.data:
            return None
        channel, data = frame.data[0], bytes(frame.data[1:])
        if channel == _STATUS:
            self._status = _message(data)
            return b""
        if channel == _ERRORS:
            self._errors = (self._errors + data)[-_ERRORS_MAX_BYTES:]
        return data if channel == _OUTPUT and data else None

    def send(self, data: bytes) -> None:
        """Send input to the container. Raises OSError if the stream has ended."""
        from websocket import WebSocketException

        try:
            with self._send_lock:
                self._web_socket.send_binary(bytes([_INPUT]) + data)
        except (WebSocketException, AttributeError) as error:  # closed meanwhile
            raise ConnectionError(f"the stream has broken: {error}") from None

    def close(self) -> None:
        """End the connection, without waiting. The container reads the end of its input."""
        self._web_socket.abort()  # a thread that receives leaves
        self._web_socket.shutdown()


def _message(status: bytes) -> str:
    """Return the message of a failure in the status of the API server; "" for a success."""
    try:
        record = json.loads(status)
        return " ".join(str(record["message"]).split()) if record["status"] == "Failure" else ""
    except (ValueError, KeyError, TypeError):
        return ""
