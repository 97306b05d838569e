"""Events of the Kubernetes API about the Job of a session.

``kubectl describe job`` shows the history of its runs.

-> experiment/run/run_events.py: which records of a run become events.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus

from chaoskit.substrate.core.run_event import RunEvent
from chaoskit.substrate.kubernetes.api.background import BackgroundRequests
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.pods.manifests import Manifest

#: The reporting controller of all these Events.
CONTROLLER = "chaoskit"
_NOTE_LENGTH = 1024  # the API server refuses a longer one
_SHORTENED = "..."
_LACKS_RIGHT = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


def event_manifest(
    event: RunEvent,
    job: Manifest,
    namespace: str,
    *,
    name: str,
    note: str,
    unix_ns: int,
    instance: str,
) -> Manifest:
    """Return an Event as the manifest that is sent to the server.

    Args:
        event: the event of a run.
        job: the reference to the Job that the Event is about.
        namespace: namespace of the Event.
        name: name of the Event.
        note: text of the Event.
        unix_ns: time of the event on the wall clock.
        instance: the pod or the machine of the process that writes the Event.
    """
    at = datetime.fromtimestamp(unix_ns // 1000 / 1e6, UTC)
    second = f"{at:%Y-%m-%dT%H:%M:%SZ}"
    about = {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": job["name"],
        "uid": job["uid"],
    }
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "involvedObject": {**about, "namespace": namespace},
        "reason": event.reason,
        "action": event.action,
        "message": note,
        "type": "Warning" if event.is_warning else "Normal",
        "source": {"component": CONTROLLER},
        "reportingComponent": CONTROLLER,
        "reportingInstance": instance,
        "eventTime": f"{at:%Y-%m-%dT%H:%M:%S.%fZ}",
        "firstTimestamp": second,
        "lastTimestamp": second,
        "count": 1,
    }


def note_of(text: str, run: str, test: str) -> str:
    """Return the text of an Event on one line, with the run and its test at the end.

    The text is shortened if the API server would refuse its length.
    """
    source = f" [run {run}{f', test {test}' if test else ''}]"
    size_limit = max(0, _NOTE_LENGTH - len(source.encode()))
    data = " ".join(text.split()).encode()
    if len(data) > size_limit:
        data = data[: max(0, size_limit - len(_SHORTENED))] + _SHORTENED.encode()
    return (data + source.encode())[:_NOTE_LENGTH].decode(errors="ignore")


class EventWriter:
    """Writes events of runs as Events about the Job of a session.

    No run waits for them or fails because of them.

    Args:
        background: makes the requests.
        session: name of the session.
        tell: shows a line to the user if the server refuses an Event. A missing right is shown
            once.
    """

    def __init__(
        self,
        api: KubernetesApi,
        background: BackgroundRequests,
        session: str,
        tell: Callable[[str], None],
    ) -> None:
        self._api, self._background, self._session, self._tell = api, background, session, tell
        self._instance = socket.gethostname()  # in a pod, the name of the pod
        self._is_refused = False
        self._left_out = 0  # left-out requests that an Event has reported

    def write(self, event: RunEvent, job: Manifest, run: str, test: str) -> None:
        """Queue an Event and return at once. Nothing is queued once the right was refused.

        Args:
            event: the event of a run.
            job: the reference to the Job of the session.
            run: name of the run's directory.
            test: pytest name of the test of the run; "" outside of a test.
        """
        if self._is_refused:
            return
        unix_ns = time.time_ns() - time.monotonic_ns() + event.t_ns
        # kubectl sorts Events of the same second by name
        name = f"{self._session}.{unix_ns:x}.{secrets.token_hex(2)}"
        make = partial(event_manifest, event, job, self._api.namespace, name=name, unix_ns=unix_ns)
        self._background.submit(
            partial(self._create, make, event.text, run, test), on_refused=self._note_refusal
        )

    def _create(self, make: Callable[..., Manifest], text: str, run: str, test: str) -> None:
        """Create an Event, which also reports left-out requests. This runs in the background.

        Raises ApiError.
        """
        left_out = self._background.left_out
        if left_out > self._left_out:
            text += f"; {left_out - self._left_out} labels or Events before this one were left out"
        try:
            self._api.create(make(note=note_of(text, run, test), instance=self._instance))
        except ApiError as error:
            # a conflict: an earlier attempt was carried out and not answered
            if error.status != HTTPStatus.CONFLICT:
                raise
        self._left_out = left_out

    def _note_refusal(self, error: ApiError) -> None:
        """Show the refusal of an Event to the user. Without the right, write no more Events."""
        if error.status not in _LACKS_RIGHT:
            self._tell(f"the API server refused an Event: {error}")
        elif not self._is_refused:
            self._is_refused = True
            self._tell(
                "faults, losses and recoveries are not written as Events: "
                f"the right to create events is missing: {error}"
            )
