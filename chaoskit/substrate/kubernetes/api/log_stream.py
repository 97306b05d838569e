"""The stream of a pod's log, as an answer of the API server that grows.

-> kubernetes/api/requests.py opens it.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
from typing import Any

_CHUNK_BYTES = 1 << 16


class StreamCut(OSError):
    """The connection of a stream broke before the end of the answer.

    Attributes:
        has_lost_data: True if a part of the answer had arrived that could not be read.
    """

    def __init__(self, text: str, *, has_lost_data: bool = False) -> None:
        super().__init__(text)
        self.has_lost_data = has_lost_data


class LogStream:
    """The body of an answer, read while it grows.

    Args:
        answer: the answer of the HTTP client, of which only the headers were read.
    """

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        # the client forgets its socket once the answer has ended
        self._socket: socket.socket | None = getattr(answer.connection, "sock", None)
        self._chunks = answer.stream(_CHUNK_BYTES)

    def read(self) -> bytes:
        """Return the next data, or b"" at the end of the answer.

        Raises:
            TimeoutError: if no data arrived within the limit of the request.
            StreamCut: if the connection broke, or another thread called :meth:`interrupt`.
        """
        from urllib3.exceptions import HTTPError, ReadTimeoutError

        try:
            return next(self._chunks, b"")
        except ReadTimeoutError:
            raise TimeoutError("the stream of the log is silent") from None
        except (HTTPError, OSError, ValueError, AttributeError) as error:
            cause = error.args[-1] if error.args else None
            raise StreamCut(
                f"the stream of the log broke: {error}",
                has_lost_data=isinstance(cause, http.client.IncompleteRead),
            ) from None

    def interrupt(self) -> None:
        """End a :meth:`read` of another thread, and let no further one wait.

        These return the data that has arrived before, and raise StreamCut after that.
        """
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # not the method of SSLSocket, which changes an object that the other thread uses
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(Exception):
            self._answer.close()
