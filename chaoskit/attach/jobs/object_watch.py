"""A thread that lists and watches the objects of one kind, and goes on after each error.

-> ``watch.py`` has one for each kind of objects that belong to a job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from chaoskit.attach.jobs.pod_state import as_version
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.api.watch_stream import BOOKMARK, WatchStream

#: Seconds without an event after which a watch is opened anew. An idle API server sends a bookmark
#: once a minute, so a quiet watch is opened some times a minute, which costs one request.
SILENCE_S = 15.0
#: Pause after an error. It doubles with each further error, up to the longest pause.
_PAUSE_S = 0.25
_PAUSE_MAX_S = 2.0
#: Pause before a stream that was open is opened anew, in case that each one breaks at once.
_REOPEN_S = 0.05
_CLOSE_S = 5.0


class ObjectWatch:
    """A thread that lists objects of a kind, and watches them from then on.

    After an error it goes on from the last event. It lists again if the server has forgotten that,
    or if an unexpected exception came in the way of a list or an event.

    Args:
        api: client of the namespace.
        kind: kind of the objects.
        on_list: called on the thread with the objects of a list and its resource version.
        on_event: called on the thread with type and object of each event.
        selector: label selector; "" for all.
        name: name of the only object; "" for all.
        silence_s: seconds without an event after which the watch is opened anew.

    Attributes:
        heard_s: monotonic time of the last answer of the server that was passed on; 0 before the
            first list.
        trouble: the error because of which nothing is heard, or because of which a list or an event
            was not passed on; "" while the watch is open.
        error: the first unexpected exception; None for none. Events may be lost since then.
    """

    def __init__(
        self,
        api: KubernetesApi,
        kind: str,
        on_list: Callable[[Sequence[Any], int], None],
        on_event: Callable[[str, Any], None],
        *,
        selector: str = "",
        name: str = "",
        silence_s: float = SILENCE_S,
    ) -> None:
        self._api, self._kind, self._silence_s = api, kind, silence_s
        self._on_list, self._on_event = on_list, on_event
        self._selector, self._name = selector, name
        self._over = threading.Event()
        self._stream: WatchStream | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch-{kind}", daemon=True)
        self.heard_s = 0.0
        self.trouble = ""
        self.error: Exception | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for its end for at most 5 s."""
        self._over.set()
        if (stream := self._stream) is not None:
            stream.close()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        """List and watch until the watch is closed. This runs in the thread."""
        version, pause_s = "", _PAUSE_S
        while not self._over.is_set():
            try:
                if not version:
                    version = self._list()
                stream = self._stream = WatchStream(
                    self._api,
                    self._kind,
                    version,
                    selector=self._selector,
                    name=self._name,
                    silence_s=self._silence_s,
                )
                if self._over.is_set():  # closed before the stream could be seen
                    stream.close()
                    return
                self._note_answer(time.monotonic())
                pause_s = _PAUSE_S
                for event, entry in stream:
                    heard_s, version = time.monotonic(), str(entry["metadata"]["resourceVersion"])
                    if event != BOOKMARK:
                        self._on_event(event, entry)
                    self._note_answer(heard_s)
                self._over.wait(_REOPEN_S)  # the server ends each watch after some minutes
            except ApiError as error:
                if error.status == HTTPStatus.GONE:
                    version = ""
                    self._over.wait(_REOPEN_S)
                elif error.is_silence and self._stream is not None:  # an open stream has broken
                    self._over.wait(_REOPEN_S)
                else:
                    self.trouble = str(error)
                    self._over.wait(pause_s)
                    pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            except Exception as error:  # noqa: BLE001 - else the places would be old without a sign
                self.trouble = f"the watch of {self._kind} met an unexpected error: {error!r}"
                self.error = self.error or error
                version = ""  # a list has whatever was not passed on
                self._over.wait(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            finally:
                self._end_stream()

    def _list(self) -> str:
        """Pass a list on, and return its resource version."""
        objects, version = self._api.list_all(self._kind, self._selector, self._name)
        heard_s = time.monotonic()
        self._on_list(objects, as_version(version))
        self._note_answer(heard_s)
        return version

    def _note_answer(self, heard_s: float) -> None:
        """Note that an answer of the server was passed on."""
        self.heard_s, self.trouble = heard_s, ""

    def _end_stream(self) -> None:
        """Close the present stream, if there is one."""
        if (stream := self._stream) is not None:
            self._stream = None
            stream.close()
