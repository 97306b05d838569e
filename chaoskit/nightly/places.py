"""Places of a night's runs: fitness, left-over resources, and exclusion of other nights.

A place is this machine or a namespace of a Kubernetes cluster.

-> nightly/begin.py: the lock of the directory, which excludes nights on this machine.
-> substrate/kubernetes/api/lease.py: the Lease. nightly/traces.py: left-over resources.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from chaoskit.errors import BadInput, HarnessError
from chaoskit.nightly.outcome import LEFT_BEHIND
from chaoskit.nightly.traces import own_traces, shared_traces
from chaoskit.nightly.watch import AbortCondition
from chaoskit.process.linux import user_at_host
from chaoskit.substrate.kubernetes.api import rights
from chaoskit.substrate.kubernetes.api.lease import NamespaceLease
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.examination import examine_cluster
from chaoskit.substrate.kubernetes.machines.machines import put_back_left
from chaoskit.substrate.kubernetes.nights import NIGHT_JOB
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods.manifests import SESSION, STARTED_BY
from chaoskit.substrate.kubernetes.session import (
    STARTED_BY_VARIABLE,
    end,
    require_allowed,
    started_by,
)
from chaoskit.substrate.undo import describe, sweep

KUBERNETES = "kubernetes"
#: The name of the Lease by which a night holds a namespace.
LEASE = "chaoskit-night"
_DOCTOR_S, _ANSWER_S, _POLL_S = 120.0, 10.0, 1.0
#: The seconds that a night waits for an unreachable API server before it begins.
_SERVER_S = 300.0


class NightPlace(Protocol):
    """The operations that a night needs on the place of its runs.

    All but :meth:`put_back` raise HarnessError if a cluster refuses a request or does not answer.
    """

    def held(self, tell: Callable[[str], None]) -> AbstractContextManager[list[AbortCondition]]:
        """Keep other nights away while the context is open.

        It yields conditions, which end this night if the place is lost to another one.

        Args:
            tell: receives lines of progress.

        Raises:
            BadInput: if another night holds the place.
        """

    def require_fit(self) -> list[str]:
        """Check the place, and return a line for each optional feature that it lacks.

        Raise HarnessError if runs are impossible, or this cannot be examined.
        """

    def put_back(self) -> list[str]:
        """Put back resources that are left, and return a line for each, also for one that stays."""

    def own_traces(self) -> set[str]:
        """Return traces that count as left by this night, which fails if new ones stay."""

    def shared_traces(self) -> set[str]:
        """Return traces that any run of chaoskit at the place may have left."""

    def environment(self) -> dict[str, str]:
        """Return properties of the place, for comparisons of nights."""


def place_of(substrate: str, tell: Callable[[str], None]) -> AbstractContextManager[NightPlace]:
    """Return a context manager that opens the place of a substrate's runs.

    It is a namespace for :data:`KUBERNETES`, and this machine for all others. Entering it raises
    BadInput if the place cannot be used.

    Args:
        tell: receives lines of progress.
    """
    return _namespace(tell) if substrate == KUBERNETES else nullcontext(OwnMachine())


class OwnMachine:
    """The machine of this process. The lock of the night's directory keeps other nights away."""

    @contextmanager
    def held(self, tell: Callable[[str], None]) -> Iterator[list[AbortCondition]]:
        """Yield no condition: the lock of the directory is enough."""
        yield []

    def require_fit(self) -> list[str]:
        """Run ``chaoskit doctor``, and return a line for each feature that is missing.

        Raise HarnessError if the machine is not fit or the doctor does not answer.
        """
        command = [sys.executable, "-m", "chaoskit", "doctor", "--json"]
        try:
            completed = subprocess.run(
                command, capture_output=True, text=True, timeout=_DOCTOR_S, check=False
            )
            answer = json.loads(completed.stdout)
            is_fit, absent = (
                answer["ok"],
                [finding for finding in answer["findings"] if finding["state"] == "missing"],
            )
        except (OSError, subprocess.TimeoutExpired, ValueError, KeyError) as error:
            raise HarnessError(f"chaoskit doctor does not answer: {error}") from None
        missing = [f"{finding['name']}: {finding['found']}" for finding in absent]
        if not is_fit:
            raise HarnessError(f"this machine is not fit: {'; '.join(missing)}")
        return [f"not on this machine: {line}" for line in missing]

    def put_back(self) -> list[str]:
        """Put back the resources in the undo log, and return a line for each.

        The night takes resources that stay from :meth:`own_traces`.
        """
        return [describe(undone) for undone in sweep()]

    def own_traces(self) -> set[str]:
        """Return traces in processes and in the undo log."""
        return own_traces()

    def shared_traces(self) -> set[str]:
        """Return traces in the kernel and in the file system."""
        return shared_traces()

    def environment(self) -> dict[str, str]:
        """Return the names of the machine and its kernel."""
        return {"machine": platform.node(), "kernel": platform.release()}


@contextmanager
def _namespace(tell: Callable[[str], None]) -> Iterator[NightPlace]:
    """Yield the namespace that the environment names, and close its connections afterwards.

    Raise BadInput if the namespace does not allow runs, or if rights are missing.
    """
    options = KubernetesOptions.from_environment(os.environ)
    options.require()
    api = KubernetesApi(options.context, options.namespace)
    try:
        _await_server(api, tell)
        require_allowed(api)
        _require_lease_rights(api)
        yield ClusterNamespace(api, options)
    finally:
        api.close()


def _await_server(api: KubernetesApi, tell: Callable[[str], None]) -> None:
    """Wait until the API server answers, but at most five minutes, and report the wait once.

    A short outage therefore does not cost the night. Return in either case.
    """
    until_s, is_reported = time.monotonic() + _SERVER_S, False
    while not api.answers(_ANSWER_S) and time.monotonic() < until_s:
        if not is_reported:
            tell(f"waiting for the API server {api.server}, {_SERVER_S:g} s at most")
        is_reported = True
        time.sleep(_POLL_S)


def _require_lease_rights(api: KubernetesApi) -> None:
    """Raise BadInput if the rights to hold a Lease are missing."""
    for right in rights.NIGHT_RIGHTS:
        if lacking := [
            verb for verb in right.verbs if not api.may(verb, right.group, right.resource)
        ]:
            remedy = (
                f"get the right to {', '.join(lacking)} {right.resource} there, for {right.why}"
            )
            raise BadInput("namespace", api.namespace, remedy)


class ClusterNamespace:
    """A namespace of a Kubernetes cluster that allows runs.

    A Lease there keeps other nights away.
    """

    def __init__(self, api: KubernetesApi, options: KubernetesOptions) -> None:
        self._api, self._options = api, options

    @contextmanager
    def held(self, tell: Callable[[str], None]) -> Iterator[list[AbortCondition]]:
        """Hold the Lease, and yield the condition that it was lost.

        Sessions of a holder that died are ended first. When the context is left, sessions of this
        night are ended and the Lease is released; a failure to do so is only reported. The
        environment of this process names the night as the origin of its sessions.

        Raises:
            BadInput: if another night holds the Lease.
        """
        # a process number may be reused, as in a container that is restarted
        holder = os.environ[STARTED_BY_VARIABLE] = (
            f"{user_at_host()}, process {os.getpid()}, {secrets.token_hex(3)}"
        )
        lease = NamespaceLease(
            self._api, LEASE, holder, holder_kind="a night", job=os.environ.get(NIGHT_JOB, "")
        )
        dead_holder = lease.take(tell)
        with lease.renewed():
            try:
                if dead_holder:
                    self._end_sessions(dead_holder, tell)
                yield [AbortCondition(lambda: lease.trouble, _POLL_S)]
            finally:
                try:
                    self._end_sessions(holder, tell)
                    lease.release()
                except ApiError as error:
                    tell(f"the Lease {LEASE} could not be released, and will expire: {error}")

    def _end_sessions(self, holder: str, tell: Callable[[str], None]) -> None:
        """End the sessions of a holder, put back broken machines, and report each of them."""
        for session in self._sessions_of(holder):
            end(self._api, session)
            tell(f"ended session {session} of {holder}")
        for machine in put_back_left(self._api, self._options):
            tell(str(machine))

    def require_fit(self) -> list[str]:
        """Examine the cluster, and return no lines. Raise HarnessError if no session can run."""
        missing = [
            f"{finding.name}: {finding.text}"
            for finding in examine_cluster(self._options)
            if not finding.is_there
        ]
        if missing:
            raise HarnessError(f"this cluster is not fit: {'; '.join(missing)}")
        return []

    def put_back(self) -> list[str]:
        """Put back resources of this machine and broken machines; return a line for each.

        The line of a machine that stays broken begins with :data:`LEFT_BEHIND`.
        """
        restored = put_back_left(self._api, self._options)
        return [
            *map(describe, sweep()),
            *(
                str(machine) if machine.is_back else f"{LEFT_BEHIND}: {machine.text}"
                for machine in restored
            ),
        ]

    def own_traces(self) -> set[str]:
        """Return traces on this machine, and the sessions of this night."""
        return own_traces() | {f"session {name}" for name in self._sessions_of(started_by())}

    def shared_traces(self) -> set[str]:
        """Return traces on this machine."""
        return shared_traces()

    def _sessions_of(self, holder: str) -> set[str]:
        """Return the names of the sessions that a holder has started."""
        metadata = [job["metadata"] for job in self._api.find("Job", SESSION)]
        return {
            job["name"] for job in metadata if job.get("annotations", {}).get(STARTED_BY) == holder
        }

    def environment(self) -> dict[str, str]:
        """Return the address of the API server, the version of Kubernetes and the namespace."""
        return {
            "cluster": self._api.server,
            "kubernetes": self._api.version(),
            "namespace": self._api.namespace,
        }
