"""A session on a cluster: its objects, and its beginning and end.

All objects belong to a Job. In its pod is the driver of the runs (:mod:`.driver_pod`), and without
one the coordinator. Supervisors end when their stream to the runner does, so the pod of that Job
ends with the runner. Kubernetes removes the Job a little later, and its garbage collector removes
all that the Job owns. The runner, its guard and ``chaoskit cleanup`` only delete the Job sooner.

-> kubernetes/pods/manifests.py has the objects; kubernetes/ending.py is what the guard runs.
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

_LEAVE_S = 5.0  # time for the pod of a session to end, and for its user to find out why
_LOOK_S = 0.1
_BACKGROUND_S = 2.0  # time for queued requests at the end, such as Events of the last run
#: Answers of a server whose namespace may be deleted: its roles go with it.
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
START_MORE_S = 60  # time in addition to the start of pods
#: Environment variable with the starter of sessions if it is not this user, such as a night.
STARTED_BY_VARIABLE = "CHAOSKIT_STARTED_BY"
DEADLINE_S = 24 * 3600  # deadline of a session whose pods run


class Session:
    """The objects that the pods of a session need, and the Job that owns them.

    Args:
        options: the user's options.
        undo: log of the changes that must be undone if this process is killed.
        tell: shows a line to the user: why pods are waited for, or a machine that is left broken.

    Attributes:
        api: client of the namespace.
        name: name of the session.
        pods: its pods, except the driver's.
        machines: machines of the cluster, for faults without a driver.

    Raises:
        BadInput: if the cluster, the namespace, the image or the template cannot be used.
        HarnessError: if the API server does not answer, or the coordinator's pod does not run in
            time. All objects are deleted after any of these errors.
        OSError: if this machine has no route to the API server, or a driver lacks a file of its
            session.
    """

    def __init__(
        self, options: KubernetesOptions, undo: UndoLog, tell: Callable[[str], None]
    ) -> None:
        options.require()
        self._options, self._undo, self._tell = options, undo, tell
        self._pod_template = template.read(options.template) if options.template else {}
        self.api = KubernetesApi(options.context, options.namespace)
        self._driven = options.driven
        self.name = new_name() if self._driven is None else self._driven.name
        self._runner = options.address or _address_towards(self.api.server)
        token = secrets.token_hex(16) if self._driven is None else self._driven.read("token")
        # a given address may be translated on its way here, so it cannot be bound
        self._reception = Reception("" if options.address else self._runner, token)
        self._owner: dict[str, Any] = {}
        self._end_undo: Undo | None = None
        self.machines = Machines(self.api, self.name, options, undo)
        self._background = BackgroundRequests()
        self._events = EventWriter(self.api, self._background, self.name, tell)
        arguments = (self._reception, self._runner, self._manifest)
        self.pods = SessionPods(
            self.api, self.name, options, *arguments, self._tell_of_pods, self._background
        )
        with undo_on_error(self.close):
            if self._driven is None:
                self._open(token)
            else:
                self._owner = manifests.owner(self._driven.name, self._driven.read("owner"))

    # -- creation of its objects -------------------------------------------------------------------

    def _open(self, token: str) -> None:
        """Create the objects of a session without a driver, and wait for the coordinator's pod.

        Machines that earlier sessions have left broken are then repaired.
        """
        pod = Pod(COORDINATOR, f"{self.name}-{COORDINATOR}", self.pods.is_over)
        pod_manifest = self._manifest(pod.station, pod.place)
        start_s = math.ceil(self._options.startup_s) + START_MORE_S
        job = manifests.job(self.name, pod_manifest, started_by=started_by(), deadline_s=start_s)
        self._end_undo = self._undo.plan(CommandEntry(shlex.join(end_command(self.name, self.api))))
        self.pods.expect(pod)
        self._owner = manifests.owner(self.name, self.api.create(job)["metadata"]["uid"])
        self.pods.add(pod)
        self.api.create(manifests.secret(self.name, token, self._owner))
        self.api.create(manifests.network_policy(self.name, self._runner, self._owner))
        self.pods.await_arrivals([pod])
        self.api.patch("Job", self.name, {"spec": {"activeDeadlineSeconds": DEADLINE_S}})
        for machine in put_back_left(self.api, self._options):
            self._tell(str(machine))

    def _manifest(self, station: str, place: str) -> manifests.Manifest:
        """Return the object of a pod, without its placement on machines."""
        runner, owner = f"{self._runner}:{self._reception.address[1]}", self._owner or None
        return manifests.pod(
            self.name, station, place, runner, self._options, self._pod_template, owner
        )

    def _tell_of_pods(self, line: str) -> None:
        self._tell(f"waiting for pods: {line}")

    def write_event(self, event: RunEvent, run: str, test: str) -> None:
        """Queue an Event about the Job of the session; see :meth:`EventWriter.write`.

        Args:
            run: name of the run's directory.
            test: pytest name of the test of the run; "" outside of a test.
        """
        self._events.write(event, self._owner, run, test)

    # -- end ---------------------------------------------------------------------------------------

    @property
    def is_driven(self) -> bool:
        """True if a driver holds the session; without one the coordinator's pod does."""
        return self._driven is not None

    def is_over(self) -> bool:
        """Return whether the session can have no more runs.

        That is so if it has no driver and its coordinator's pod does not serve any more.
        """
        return not self.is_driven and (
            (pod := self.pods.get(COORDINATOR)) is None or not self.pods.serves(pod)
        )

    def explain_end(self) -> str:
        """Return the event that has ended the session from outside, in words, or "".

        See :func:`explain_end` of this module.
        """
        return explain_end(self.api, self.name, COORDINATOR)

    def close(self) -> None:
        """End all processes in its pods, and delete all its objects; of a driver, only its pods.

        Raises ApiError if the server refuses or does not answer; the undo entry stays then.
        """
        self.pods.close()
        self._reception.close()
        try:
            if self._end_undo is not None:
                end(self.api, self.name)
                self._end_undo.done()
                self._end_undo = None
            elif self._driven is not None:
                for pod in self.pods.all():
                    self.pods.delete(pod, 0)
        finally:
            self._background.close(_BACKGROUND_S)
            self.api.close()


def end(api: KubernetesApi, session: str) -> None:
    """Delete the objects of a session: its Job, which owns them, and its pods at once.

    Raises ApiError.
    """
    api.delete("Job", session)
    for pod in api.find("Pod", manifests.selector(session)):
        api.delete("Pod", pod["metadata"]["name"], grace_s=0)


def end_from_outside(api: KubernetesApi, session: str, user: str) -> None:
    """End a session of another process, which can find out the reason. Raises ApiError.

    The Job is annotated with ``user``, and stays until its pod has ended or 5 s are over. All
    objects of the session are deleted.
    """
    with contextlib.suppress(ApiError):
        api.patch("Job", session, {"metadata": {"annotations": {ENDED_BY: user}}})
    api.delete("Job", session, owned_first=True)
    until_s = time.monotonic() + _LEAVE_S
    while time.monotonic() < until_s and any(api.find("Job", manifests.selector(session))):
        time.sleep(_LOOK_S)
    end(api, session)


def explain_end(api: KubernetesApi, session: str, station: str, *, has_run: bool = True) -> str:
    """Return the event that has ended a session from outside, in words, or "" if none is proved.

    "" is returned, too, if the API server does not answer. If the rights are missing, the refusal
    is returned.

    Args:
        station: station of the Job's pod.
        has_run: True if that pod has existed, so that its absence is a proof.
    """
    try:
        namespace, job = _find(api, "Namespace", api.namespace), _find(api, "Job", session)
        selector = f"{manifests.selector(session)},{manifests.STATION}={station}"
        pods = list(api.find("Pod", selector)) if namespace is not None else []
    except ApiError as error:
        return (
            f"the API server refuses to give the reason: {error}"
            if error.status in _REFUSED
            else ""
        )
    first_pod = disruption_of(pods[0] if pods else None) if pods or has_run else None
    return end_of_session(session, namespace, job, first_pod)


def _find(api: KubernetesApi, kind: str, name: str) -> dict[str, Any] | None:
    """Return an object, or None if there is none. Raises ApiError."""
    try:
        return api.get(kind, name)
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return None


@contextlib.contextmanager
def undo_on_error(close: Callable[[], None]) -> Iterator[None]:
    """Call ``close`` if the body of a ``with`` fails.

    The error of the body is raised. A ChaoskitError of ``close`` is added to it as a note.
    """
    try:
        yield
    except BaseException as error:
        try:
            close()
        except ChaoskitError as close_error:
            error.add_note(f"objects may be left on the cluster: {close_error}")
        raise


def end_command(session: str, api: KubernetesApi) -> list[str]:
    """Return the command by which an undo guard ends a session.

    The guard may have another environment.
    """
    arguments = json.dumps({"session": session, "server": api.server, **api.arguments})
    return [sys.executable, "-m", "chaoskit.substrate.kubernetes.ending", arguments]


def started_by() -> str:
    """Return the starter of a session for its Job: a night, or the user and the machine."""
    return os.environ.get(STARTED_BY_VARIABLE) or user_at_host()


def new_name() -> str:
    """Return a new name for a session and its objects."""
    return f"chaoskit-{secrets.token_hex(4)}"


def find_namespace(api: KubernetesApi) -> manifests.Manifest:
    """Return the object of the namespace.

    Raises:
        BadInput: if the namespace does not exist.
        ApiError: if the server refuses to give it or does not answer.
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
    """Refuse a namespace whose owners have not allowed runs in it.

    Raises:
        BadInput: if the namespace does not exist, does not allow runs, or may not be read.
        ApiError: if the server did not answer: a later attempt may succeed.
    """
    name = api.namespace
    if name.startswith("kube-"):
        raise BadInput("namespace", name, "use one of your own: this one belongs to the cluster")
    try:
        namespace = find_namespace(api)
    except ApiError as error:
        if not error.is_refusal:
            raise
        raise BadInput(
            "context", api.server, f"use a cluster that grants you access: {error}"
        ) from None
    if namespace["metadata"].get("labels", {}).get(manifests.ALLOWED) != manifests.ALLOWED_VALUE:
        remedy = f"kubectl label namespace {name} {manifests.ALLOWED}={manifests.ALLOWED_VALUE}"
        raise BadInput("namespace", name, f"allow runs that break things there: {remedy}")


def may_write_events(api: KubernetesApi) -> bool:
    """Return whether the user may write Events, and so grant that to a driver.

    Raises ApiError if the server does not answer.
    """
    return all(
        api.may(verb, right.group, right.resource)
        for right in rights.EVENT_RIGHTS
        for verb in right.verbs
    )


def _address_towards(server: str) -> str:
    """Return this machine's IPv4 address on the way to the API server.

    Pods reach it if their network is connected to that of the API server. Raises OSError if there
    is no route.
    """
    url = urlsplit(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((str(url.hostname), url.port or 443))
        address: str = probe.getsockname()[0]
    return address
