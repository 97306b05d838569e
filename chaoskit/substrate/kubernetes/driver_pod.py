"""The pod of a driver, which drives runs where pods cannot reach the client, such as a laptop.

The client creates the Job that owns all objects, with a supervisor in its pod. The stream to that
supervisor passes through the API server. It carries plans, and copies of records. The driver is a
program of this supervisor. It creates the pods of runs and reaches them directly, so no decision of
a run waits for the API server.

-> experiment/remote/driver.py is the driver; experiment/remote/client.py sends the plans to it.
-> kubernetes/port_forward.py carries the stream.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from chaoskit.errors import HarnessError
from chaoskit.plaintext import same_but_ports
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.kubernetes import port_forward, template
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.machines.machines import Machines, put_back_left
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods import manifests
from chaoskit.substrate.kubernetes.pods.diagnosis import PodDiagnosis
from chaoskit.substrate.kubernetes.pods.state import in_words
from chaoskit.substrate.kubernetes.preflight import Preflight
from chaoskit.substrate.kubernetes.session import (
    DEADLINE_S,
    START_MORE_S,
    end,
    end_command,
    explain_end,
    may_write_events,
    new_name,
    started_by,
    undo_on_error,
)
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.supervisor.remote_node import KernelAway
from chaoskit.substrate.undo import CommandEntry, Undo, UndoLog

_LOOK_S = 0.2  # interval of checks of a pod that does not run yet
_STREAM_END_S = 2.0


class DriverPod:
    """A session with a driver: its Job with the driver's pod, and the stream to the supervisor.

    Args:
        options: the user's options.
        tell: shows a line to the user, such as why pods are waited for.

    Raises:
        BadInput: if the options or the template cannot be used.
    """

    substrate = "kubernetes"
    files = Path(manifests.FILES)

    def __init__(self, options: KubernetesOptions, tell: Callable[[str], None]) -> None:
        options.require()
        self._options, self._tell = options, tell
        self._pod_template = template.read(options.template) if options.template else {}
        self._api: KubernetesApi | None = None
        self._name = ""
        self._stream: subprocess.Popen[bytes] | None = None
        self._end_undo: Undo | None = None
        self._machines: Machines | None = None
        self._preflight = Preflight(options, self._pod_template)

    def require(self, demand: RunDemand) -> None:
        """Raise BadInput or HarnessError if a run cannot take place.

        No object has been created for the run then.
        """
        self._preflight.require_run(demand, self._name if self._api is not None else "")

    def open(self, undo: UndoLog) -> SupervisorLink:
        """Create a session, whose end is recorded first, and return the link to its supervisor.

        Machines that earlier sessions have left broken are then repaired. After an error all
        objects of the session are deleted.

        Raises:
            BadInput: if the cluster, the namespace, the image or the template cannot be used.
            HarnessError: if the API server does not answer, or the pod or its supervisor does not
                start in time, with the reason.
        """
        self._preflight.require_session()
        with self._preflight.refusal.remembered(), undo_on_error(self.close):
            api, token = self._connect(), secrets.token_hex(16)
            self._make_objects(api, token, undo)
            pod = self._await_running(api)
            link = self._reach(api, pod, token)
            api.patch("Job", self._name, {"spec": {"activeDeadlineSeconds": DEADLINE_S}})
            self._machines = Machines(api, self._name, self._options, undo)
            for machine in put_back_left(api, self._options):
                self._tell(str(machine))
        self._preflight.note_made()
        return link

    def do(self, name: str, machine: str) -> Callable[[], None]:
        """Pull a lever or put on a mark, and return a function that undoes it.

        See :meth:`Machines.do` for its errors. :meth:`open` must have been called.
        """
        assert self._machines is not None
        return self._machines.do(name, machine)

    def explain_end(self) -> str:
        """Return the event that has ended the session from outside, in words, or "".

        It is "" if no session is open or no such event is proved. A refusal of the API server to
        give the reason is returned in its place.
        """
        return (
            ""
            if self._api is None
            else explain_end(self._api, self._name, manifests.DRIVER_STATION)
        )

    def _require_session(self, api: KubernetesApi, *, has_run: bool) -> None:
        """Raise HarnessError if the session was ended before its driver could be reached."""
        if reason := explain_end(api, self._name, manifests.DRIVER_STATION, has_run=has_run):
            raise HarnessError(f"the session has ended before its first run: {reason}")

    def _connect(self) -> KubernetesApi:
        """Make a client of the API server, choose a name for the session, and return the client.

        Raises BadInput if there is no such cluster.
        """
        self._api = api = KubernetesApi(self._options.context, self._options.namespace)
        self._name = new_name()
        self._diagnosis = PodDiagnosis(api, self._name, self._options)
        return api

    def _make_objects(self, api: KubernetesApi, token: str, undo: UndoLog) -> None:
        """Create the owner without a pod, then the objects that its pod needs, and then the pod.

        The end of the session is written to the undo log first. Raises ApiError.
        """
        start_s = math.ceil(self._options.startup_s) + START_MORE_S
        name, options, pod_template = self._name, self._options, self._pod_template
        pod = manifests.driver(name, options, pod_template)
        job = manifests.job(name, pod, started_by=started_by(), deadline_s=start_s, parallelism=0)
        self._end_undo = undo.plan(CommandEntry(shlex.join(end_command(name, api))))
        owner = manifests.owner(name, api.create(job)["metadata"]["uid"])
        if not options.service_account:
            for manifest in manifests.driver_rights(
                name, api.namespace, owner, writes_events=may_write_events(api)
            ):
                api.create(manifest)
        api.create(manifests.secret(name, token, owner, pod_template))
        api.create(manifests.network_policy(name, "", owner))
        api.patch("Job", name, {"spec": {"parallelism": 1}})

    def _await_running(self, api: KubernetesApi) -> str:
        """Return the name of the driver's pod once it runs. Show meanwhile why it does not.

        Raises BadInput or HarnessError if it does not run in time, or never will.
        """
        until_s, shown_text = time.monotonic() + self._options.startup_s, ""
        selector = (
            f"{manifests.selector(self._name)},{manifests.STATION}={manifests.DRIVER_STATION}"
        )
        while True:
            for pod in api.find("Pod", selector):
                if pod.get("status", {}).get("phase") == "Running":
                    return str(pod["metadata"]["name"])
            reasons = self._diagnosis.pending([manifests.DRIVER_STATION])
            if reasons and not same_but_ports(text := in_words(reasons), shown_text):
                self._tell(f"waiting for pods: {(shown_text := text)}")
            if not reasons:  # the pod may never come
                self._require_session(api, has_run=False)
            if time.monotonic() > until_s or any(reason.is_final for reason in reasons):
                self._require_session(api, has_run=False)
                self._diagnosis.raise_not_running(
                    reasons,
                    [manifests.DRIVER_STATION],
                    "no pod was created for the driver: see the events of its Job",
                )
            time.sleep(_LOOK_S)

    def _reach(self, api: KubernetesApi, pod: str, token: str) -> SupervisorLink:
        """Return a link to the supervisor of the driver's pod, once it can start programs.

        Raises BadInput or HarnessError if it cannot in time.
        """
        limit_s = self._options.startup_s
        self._stream, connection = port_forward.start(
            api, pod, manifests.DRIVER_PORT, token, limit_s
        )
        kernel = KernelAway()
        link = SupervisorLink(connection, "the supervisor of the driver", kernel)
        kernel.reach_by(link)
        try:
            if link.await_ready(limit_s):
                return link
            self._require_session(api, has_run=True)
            reasons, is_late = self._diagnosis.pending([manifests.DRIVER_STATION]), link.is_open()
            self._diagnosis.raise_not_running(
                reasons,
                [manifests.DRIVER_STATION],
                "the supervisor of the driver cannot be reached; see the output above",
                is_late=is_late,
            )
        except BaseException:
            link.close()
            raise

    def _end_stream(self) -> None:
        """End the process that carries the stream. It has 2 s to do so by itself."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                stream.wait(_STREAM_END_S)  # it tells the pod that the stream is over
            stream.kill()
            stream.wait()

    def close(self) -> None:
        """Delete all objects of the session, and end its stream.

        Raises ApiError if the server refuses or does not answer; the undo entry stays then.
        """
        self._end_stream()
        api, self._api = self._api, None
        if api is not None:
            try:
                if self._end_undo is not None:
                    end(api, self._name)
                    self._end_undo.done()
                    self._end_undo = None
            finally:
                api.close()
