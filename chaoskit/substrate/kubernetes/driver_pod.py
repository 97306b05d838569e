"""The pod of a driver. It drives runs where pods cannot reach the client, such as a laptop.

The client makes the Job that owns everything, and in its pod a supervisor. The stream to that passes through the API
server: plans take it, and copies of records. The driver, a program of that supervisor, makes the pods of runs, and
reaches them directly: no decision of a run waits for the API server.
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
    taking_back,
)
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.supervisor.remote_node import KernelAway
from chaoskit.substrate.undo import CommandEntry, Undo, UndoLog

_LOOK_S = 0.2  # between two looks at a pod that does not run yet
_FAREWELL_S = 2.0


class DriverPod:
    """One session: its Job with the driver's pod, and the stream to the supervisor in it.

    Args:
        tell: told in a line why pods are waited for.
    """

    substrate = "kubernetes"
    files = Path(manifests.FILES)

    def __init__(self, options: KubernetesOptions, tell: Callable[[str], None]) -> None:
        options.require()
        self._options, self._tell = options, tell
        self._given = template.read(options.template) if options.template else {}
        self._api: KubernetesApi | None = None
        self._name = ""
        self._stream: subprocess.Popen[bytes] | None = None
        self._ends: Undo | None = None
        self._machines: Machines | None = None
        self._preflight = Preflight(options, self._given)

    def require(self, demand: RunDemand) -> None:
        """Refuse a run that cannot take place. Raises BadInput, HarnessError, before anything is made."""
        self._preflight.require_run(demand, self._name if self._api is not None else "")

    def open(self, undo: UndoLog) -> SupervisorLink:
        """Make a session, whose end is written ahead, and come to its supervisor.

        Raises:
            BadInput: if the cluster, the namespace or the template cannot be used; nothing is made then. HarnessError:
                if the pod does not run in time, with the reason.
        """
        self._preflight.require_session()
        with self._preflight.refusal.remembered(), taking_back(self.close):
            api, token = self._connect(), secrets.token_hex(16)
            self._make_objects(api, token, undo)
            pod = self._await_running(api)
            link = self._reach(api, pod, token)
            api.patch("Job", self._name, {"spec": {"activeDeadlineSeconds": DEADLINE_S}})
            self._machines = Machines(api, self._name, self._options, undo)
            for left in put_back_left(api, self._options):
                self._tell(str(left))
        self._preflight.note_made()
        return link

    def do(self, name: str, machine: str) -> Callable[[], None]:
        """Pull a lever, or put a mark on; see :class:`Machines`."""
        assert self._machines is not None
        return self._machines.do(name, machine)

    def explain_end(self) -> str:
        """Return what has ended the session from outside, in words; "" if nothing shows that."""
        return (
            ""
            if self._api is None
            else explain_end(self._api, self._name, manifests.DRIVER_STATION)
        )

    def _require_session(self, api: KubernetesApi, *, has_run: bool) -> None:
        """Raises HarnessError if something has ended the session before its driver could be reached."""
        if why := explain_end(api, self._name, manifests.DRIVER_STATION, has_run=has_run):
            raise HarnessError(f"the session has ended before its first run: {why}")

    def _connect(self) -> KubernetesApi:
        self._api = api = KubernetesApi(self._options.context, self._options.namespace)
        self._name = new_name()
        self._diagnosis = PodDiagnosis(api, self._name, self._options)
        return api

    def _make_objects(self, api: KubernetesApi, token: str, undo: UndoLog) -> None:
        """The owner first, with no pod yet; then what its pod needs, and then the pod."""
        start_s = math.ceil(self._options.startup_s) + START_MORE_S
        name, options, given = self._name, self._options, self._given
        pod = manifests.driver(name, options, given)
        job = manifests.job(name, pod, started_by=started_by(), deadline_s=start_s, parallelism=0)
        self._ends = undo.plan(CommandEntry(shlex.join(end_command(name, api))))
        owner = manifests.owner(name, api.create(job)["metadata"]["uid"])
        if not options.service_account:
            for made in manifests.driver_rights(
                name, api.namespace, owner, writes_events=may_write_events(api)
            ):
                api.create(made)
        api.create(manifests.secret(name, token, owner, given))
        api.create(manifests.network_policy(name, "", owner))
        api.patch("Job", name, {"spec": {"parallelism": 1}})

    def _await_running(self, api: KubernetesApi) -> str:
        """The name of the driver's pod, once it runs. Says meanwhile why it does not."""
        until_s, shown = time.monotonic() + self._options.startup_s, ""
        selector = (
            f"{manifests.selector(self._name)},{manifests.STATION}={manifests.DRIVER_STATION}"
        )
        while True:
            for one in api.find("Pod", selector):
                if one.get("status", {}).get("phase") == "Running":
                    return str(one["metadata"]["name"])
            told = self._diagnosis.pending([manifests.DRIVER_STATION])
            if told and not same_but_ports(text := in_words(told), shown):
                self._tell(f"waiting for pods: {(shown := text)}")
            if not told:  # its pod may never come
                self._require_session(api, has_run=False)
            if time.monotonic() > until_s or any(one.is_final for one in told):
                self._require_session(api, has_run=False)
                self._diagnosis.raise_not_running(
                    told,
                    [manifests.DRIVER_STATION],
                    "no pod of the driver was made: see the events of its job",
                )
            time.sleep(_LOOK_S)

    def _reach(self, api: KubernetesApi, pod: str, token: str) -> SupervisorLink:
        """A stream to its supervisor, which takes a moment until it listens."""
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
            told, is_late = self._diagnosis.pending([manifests.DRIVER_STATION]), link.is_open()
            self._diagnosis.raise_not_running(
                told,
                [manifests.DRIVER_STATION],
                "its supervisor cannot be reached; see above",
                is_late=is_late,
            )
        except BaseException:
            link.close()
            raise

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                stream.wait(_FAREWELL_S)  # it tells the pod that the stream is over
            stream.kill()
            stream.wait()

    def close(self) -> None:
        """Delete all that the session has made. Its stream has ended, or ends now."""
        self._end_stream()
        api, self._api = self._api, None
        if api is not None:
            try:
                if self._ends is not None:
                    end(api, self._name)
                    self._ends.done()
                    self._ends = None
            finally:
                api.close()
