"""Events of the Kubernetes API about the Job of a session: ``kubectl describe job`` shows the history of its runs."""

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
    """Return an Event as it is sent to the server.

    Args:
        job: the reference to the Job that the Event is about.
        note: the words of the Event.
        unix_ns: its time on the wall clock.
        instance: the pod, or the machine, of the process that writes it.
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
    """Return the words of an Event: a text, shortened where it is too long, with the run and its test."""
    where = f" [run {run}{f', test {test}' if test else ''}]"
    room = max(0, _NOTE_LENGTH - len(where.encode()))
    data = " ".join(text.split()).encode()
    if len(data) > room:
        data = data[: max(0, room - len(_SHORTENED))] + _SHORTENED.encode()
    return (data + where.encode())[:_NOTE_LENGTH].decode(errors="ignore")


class EventWriter:
    """Writes events of runs as Events about the Job of a session. No run waits for it, and none fails by it.

    Args:
        background: makes the requests.
        session: name of the session.
        tell: shows people a line, once, if the server refuses Events.
    """

    def __init__(
        self,
        api: KubernetesApi,
        background: BackgroundRequests,
        session: str,
        tell: Callable[[str], None],
    ) -> None:
        self._api, self._background, self._session, self._tell = api, background, session, tell
        self._instance = socket.gethostname()  # of a pod its name
        self._is_refused = False
        self._left_out = 0  # requests of which an Event has told that they were left out

    def write(self, event: RunEvent, job: Manifest, run: str, test: str) -> None:
        """Have an Event written, and return at once.

        Args:
            job: the reference to the Job of the session.
            run: name of the run's directory.
            test: the test of the run, as pytest names it; "" outside of a test.
        """
        if self._is_refused:
            return
        unix_ns = time.time_ns() - time.monotonic_ns() + event.t_ns
        name = f"{self._session}.{unix_ns:x}.{secrets.token_hex(2)}"  # kubectl sorts those of one second by name
        make = partial(event_manifest, event, job, self._api.namespace, name=name, unix_ns=unix_ns)
        self._background.submit(
            partial(self._create, make, event.text, run, test), refused=self._note_refusal
        )

    def _create(self, make: Callable[..., Manifest], text: str, run: str, test: str) -> None:
        left_out = self._background.left_out
        if left_out > self._left_out:
            text += f"; {left_out - self._left_out} labels or Events before this one were left out"
        try:
            self._api.create(make(note=note_of(text, run, test), instance=self._instance))
        except ApiError as error:
            if (
                error.status != HTTPStatus.CONFLICT
            ):  # an attempt before this one was carried out, and not answered
                raise
        self._left_out = left_out

    def _note_refusal(self, error: ApiError) -> None:
        if error.status not in _LACKS_RIGHT:
            self._tell(f"an Event was refused: {error}")
        elif not self._is_refused:
            self._is_refused = True
            self._tell(
                f"no Events are written of faults, losses and recoveries (create events is needed): {error}"
            )
