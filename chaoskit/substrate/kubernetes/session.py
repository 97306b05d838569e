"""One session on a cluster: its objects, from the first one to the end of all.

They belong to one Job. In its pod is the driver of the runs (:mod:`.driver_pod`), and without one the
coordinator. Supervisors end when their stream to the runner does, so the pod of that Job ends with the runner,
Kubernetes removes the Job a little later, and its garbage collector removes all that the Job owns. The runner, its
guard and ``chaoskit cleanup`` only delete the Job sooner.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from chaoskit.errors import BadInput, ChaoskitError
from chaoskit.process.linux import user_at_host
from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.core.run_event import RunEvent
from chaoskit.substrate.kubernetes import template
from chaoskit.substrate.kubernetes.api import rights
from chaoskit.substrate.kubernetes.api.background import BackgroundRequests
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.events import EventWriter
from chaoskit.substrate.kubernetes.machines.machines import Machines, put_back_left
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods import manifests
from chaoskit.substrate.kubernetes.pods.disruption import ENDED_BY, disruption_of, end_of_session
from chaoskit.substrate.kubernetes.pods.pods import Pod, SessionPods
from chaoskit.substrate.supervisor.reception import Reception
from chaoskit.substrate.undo import CommandEntry, Undo, UndoLog

_LEAVE_S = (
    5.0  # which the pod of a session has to end, and the process that uses it to find out why
)
_LOOK_S = 0.1
_BACKGROUND_S = (
    2.0  # time for queued requests at the end of a session, such as Events of the last run
)
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)  # roles go with their namespace
START_MORE_S = 60  # beyond what pods have to start
#: Says in the environment what starts sessions, where that is not the user at this machine: such as a night.
STARTED_BY_VARIABLE = "CHAOSKIT_STARTED_BY"
DEADLINE_S = 24 * 3600  # of a session whose pods run


class Session:
    """The objects that its pods need, and the one with which everything goes.

    Args:
        undo: what must be put back if this process is killed.
        tell: told in a line why pods are waited for, and what is left out or left broken.

    Attributes:
        pods: its pods, but the driver's. machines: those of the cluster, where no driver has them broken.

    Raises:
        BadInput: if the cluster, the namespace or the template cannot be used; nothing is made then.
    """

    def __init__(
        self, options: KubernetesOptions, undo: UndoLog, tell: Callable[[str], None]
    ) -> None:
        options.require()
        self._options, self._undo, self._tell = options, undo, tell
        self._given = template.read(options.template) if options.template else {}
        self.api = KubernetesApi(options.context, options.namespace)
        self._driven = options.driven
        self.name = new_name() if self._driven is None else self._driven.name
        self._runner = options.address or _address_towards(self.api.server)
        token = secrets.token_hex(16) if self._driven is None else self._driven.read("token")
        # an address that was given may be one that is translated on its way here
        self._reception = Reception("" if options.address else self._runner, token)
        self._owner: dict[str, Any] = {}
        self._ends: Undo | None = None
        self.machines = Machines(self.api, self.name, options, undo)
        self._background = BackgroundRequests()
        self._events = EventWriter(self.api, self._background, self.name, tell)
        where = (self._reception, self._runner, self._manifest)
        self.pods = SessionPods(
            self.api, self.name, options, *where, self._tell_of_pods, self._background
        )
        with taking_back(self.close):
            if self._driven is None:
                self._open(token)
            else:
                self._owner = manifests.owner(self._driven.name, self._driven.read("owner"))

    # -- what it makes --------------------------------------------------------------------------------------------

    def _open(self, token: str) -> None:
        pod = Pod(COORDINATOR, f"{self.name}-{COORDINATOR}", self.pods.is_over)
        inside = self._manifest(pod.station, pod.place)
        start_s = math.ceil(self._options.startup_s) + START_MORE_S
        made = manifests.job(self.name, inside, started_by=started_by(), deadline_s=start_s)
        self._ends = self._undo.plan(CommandEntry(shlex.join(end_command(self.name, self.api))))
        self.pods.expect(pod)
        self._owner = manifests.owner(self.name, self.api.create(made)["metadata"]["uid"])
        self.pods.add(pod)
        self.api.create(manifests.secret(self.name, token, self._owner))
        self.api.create(manifests.network_policy(self.name, self._runner, self._owner))
        self.pods.await_arrivals([pod])
        self.api.patch("Job", self.name, {"spec": {"activeDeadlineSeconds": DEADLINE_S}})
        for left in put_back_left(self.api, self._options):
            self._tell(str(left))

    def _manifest(self, station: str, place: str) -> manifests.Manifest:
        runner, owner = f"{self._runner}:{self._reception.address[1]}", self._owner or None
        return manifests.pod(self.name, station, place, runner, self._options, self._given, owner)

    def _tell_of_pods(self, line: str) -> None:
        self._tell(f"waiting for pods: {line}")

    def write_event(self, event: RunEvent, run: str, test: str) -> None:
        """Have an Event about its Job written; see :meth:`EventWriter.write`."""
        self._events.write(event, self._owner, run, test)

    # -- its end --------------------------------------------------------------------------------------------------

    @property
    def is_driven(self) -> bool:
        """Whether a driver holds it; without one the coordinator's pod does."""
        return self._driven is not None

    def is_over(self) -> bool:
        """Whether it can have no runs any more. One without a driver goes with the coordinator's pod."""
        return not self.is_driven and (
            (pod := self.pods.get(COORDINATOR)) is None or not self.pods.serves(pod)
        )

    def explain_end(self) -> str:
        """Return what has ended it from outside, in words; "" if nothing shows that."""
        return explain_end(self.api, self.name, COORDINATOR)

    def close(self) -> None:
        """End everything in its pods, and delete all that it has made."""
        self.pods.close()
        self._reception.close()
        try:
            if self._ends is not None:
                end(self.api, self.name)
                self._ends.done()
                self._ends = None
            elif self._driven is not None:
                for pod in self.pods.all():
                    self.pods.delete(pod, 0)
        finally:
            self._background.close(_BACKGROUND_S)
            self.api.close()


def end(api: KubernetesApi, session: str) -> None:
    """Delete what a session has made: its job, with which everything goes, and its pods at once. Raises ApiError."""
    api.delete("Job", session)
    for pod in api.find("Pod", manifests.selector(session)):
        api.delete("Pod", pod["metadata"]["name"], grace_s=0)


def end_from_outside(api: KubernetesApi, session: str, user: str) -> None:
    """End a session of another process, which can find out what has ended it. Raises ApiError.

    Its Job says so, and stays until its pod has ended, or a few seconds are over.
    """
    with contextlib.suppress(ApiError):
        api.patch("Job", session, {"metadata": {"annotations": {ENDED_BY: user}}})
    api.delete("Job", session, last=True)
    until_s = time.monotonic() + _LEAVE_S
    while time.monotonic() < until_s and any(api.find("Job", manifests.selector(session))):
        time.sleep(_LOOK_S)
    end(api, session)


def explain_end(api: KubernetesApi, session: str, station: str, *, has_run: bool = True) -> str:
    """Return what has ended a session from outside, in words; "" if nothing shows that.

    Args:
        station: the one of the Job's pod. has_run: whether that pod has been there.
    """
    try:
        namespace, job = _find(api, "Namespace", api.namespace), _find(api, "Job", session)
        selector = f"{manifests.selector(session)},{manifests.STATION}={station}"
        pods = list(api.find("Pod", selector)) if namespace is not None else []
    except ApiError as error:
        return f"the API server does not say why: {error}" if error.status in _REFUSED else ""
    first_pod = disruption_of(pods[0] if pods else None) if pods or has_run else None
    return end_of_session(session, namespace, job, first_pod)


def _find(api: KubernetesApi, kind: str, name: str) -> dict[str, Any] | None:
    try:
        return api.get(kind, name)
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return None


@contextlib.contextmanager
def taking_back(close: Callable[[], None]) -> Iterator[None]:
    """Take back what a ``with`` has made, where it fails. Its own error is raised, whatever becomes of that."""
    try:
        yield
    except BaseException as error:
        try:
            close()
        except ChaoskitError as left:
            error.add_note(f"what was made is left: {left}")
        raise


def end_command(session: str, api: KubernetesApi) -> list[str]:
    """What ends a session from outside, for a guard that knows no Kubernetes, and may have another environment."""
    told = json.dumps({"session": session, "server": api.server, **api.arguments})
    return [sys.executable, "-m", "chaoskit.substrate.kubernetes.ending", told]


def started_by() -> str:
    """Whose a session is, as its Job says: the night's that it is a part of, or the user's at this machine."""
    return os.environ.get(STARTED_BY_VARIABLE) or user_at_host()


def new_name() -> str:
    """A name for a session and its objects."""
    return f"chaoskit-{secrets.token_hex(4)}"


def find_namespace(api: KubernetesApi) -> manifests.Manifest:
    """Return the object of the namespace.

    Raises:
        BadInput: if the namespace is not there. ApiError: if the server does not say.
    """
    try:
        return api.get("Namespace", api.namespace)
    except ApiError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            raise BadInput(
                "namespace", api.namespace, f"create it: kubectl create namespace {api.namespace}"
            ) from None
        raise


def require_allowed(api: KubernetesApi) -> None:
    """Refuse a namespace whose owners have not said that runs may take place in it.

    Raises:
        BadInput: if the namespace is not there, or does not allow runs, or may not be read.
        ApiError: if the server did not answer: a later attempt may succeed.
    """
    name = api.namespace
    if name.startswith("kube-"):
        raise BadInput("namespace", name, "use one of your own: this one is the cluster's")
    try:
        namespace = find_namespace(api)
    except ApiError as error:
        if not error.is_refusal:
            raise
        raise BadInput("context", api.server, f"use a cluster that lets you in: {error}") from None
    if namespace["metadata"].get("labels", {}).get(manifests.ALLOWED) != manifests.ALLOWED_VALUE:
        remedy = f"kubectl label namespace {name} {manifests.ALLOWED}={manifests.ALLOWED_VALUE}"
        raise BadInput("namespace", name, f"allow runs that break things there: {remedy}")


def may_write_events(api: KubernetesApi) -> bool:
    """Return whether the user may write Events, and so grant that to a driver. Raises ApiError."""
    return all(
        api.may(verb, right.group, right.resource)
        for right in rights.EVENT_RIGHTS
        for verb in right.verbs
    )


def _address_towards(server: str) -> str:
    """This machine's address on the way to the API server: pods reach it if their network and that one are joined."""
    place = urlsplit(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((str(place.hostname), place.port or 443))
        address: str = way.getsockname()[0]
    return address
