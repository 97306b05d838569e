"""Where the runs of a night take place: what it must have, what is left there, and that no two nights meet."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from chaoskit.errors import BadInput, HarnessError
from chaoskit.nightly.traces import own_traces, shared_traces
from chaoskit.nightly.watch import AbortCondition
from chaoskit.osprocess import user_at_host
from chaoskit.substrate.kubernetes import rights
from chaoskit.substrate.kubernetes.api import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.examination import examine_cluster
from chaoskit.substrate.kubernetes.lease import HOLDER, RENEW_S, NamespaceLease
from chaoskit.substrate.kubernetes.machines import put_back_left
from chaoskit.substrate.kubernetes.manifests import SESSION, STARTED_BY
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.session import end, require_allowed, started_by
from chaoskit.substrate.undo import describe, sweep

KUBERNETES = "kubernetes"
#: The Lease of a namespace that a night holds.
LEASE = "chaoskit-night"
_DOCTOR_S = 120.0


class NightPlace(Protocol):
    """What a night asks of the place of its runs."""

    def held(self, tell: Callable[[str], None]) -> AbstractContextManager[list[AbortCondition]]:
        """Keep other nights away. Gives what ends this one if that fails. Raises BadInput where another one runs."""

    def require_fit(self) -> list[str]:
        """Whether runs can take place; what else it lacks, in lines. Raises HarnessError if they cannot."""

    def put_back(self) -> list[str]:
        """Put back what is left of it. Gives a line for each thing."""

    def own_traces(self) -> set[str]:
        """What nothing but this night can have left."""

    def shared_traces(self) -> set[str]:
        """What any run of chaoskit there may have made."""

    def environment(self) -> dict[str, str]:
        """What tells it from others."""


def place_of(substrate: str) -> AbstractContextManager[NightPlace]:
    """The place of a substrate's runs. Raises BadInput if it cannot have any."""
    return _namespace() if substrate == KUBERNETES else _own_machine()


@contextmanager
def _own_machine() -> Iterator[NightPlace]:
    yield OwnMachine()


class OwnMachine:
    """The machine of this process. The lock of the night's directory keeps others away."""

    @contextmanager
    def held(self, tell: Callable[[str], None]) -> Iterator[list[AbortCondition]]:
        """Nothing more is to be done."""
        yield []

    def require_fit(self) -> list[str]:
        """Ask the doctor, as a user would. Raises HarnessError."""
        command = [sys.executable, "-m", "chaoskit", "doctor", "--json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_DOCTOR_S, check=False)
            found = json.loads(done.stdout)
            is_fit, told = found["ok"], [one for one in found["findings"] if one["state"] == "missing"]
        except (OSError, subprocess.TimeoutExpired, ValueError, KeyError) as error:
            raise HarnessError(f"the doctor does not answer: {error}") from None
        missing = [f"{one['name']}: {one['found']}" for one in told]
        if not is_fit:
            raise HarnessError(f"this machine is not fit: {'; '.join(missing)}")
        return [f"not on this machine: {line}" for line in missing]

    def put_back(self) -> list[str]:
        """What its undo log names."""
        return [describe(one) for one in sweep()]

    def own_traces(self) -> set[str]:
        """Of processes, and of what is to be put back."""
        return own_traces()

    def shared_traces(self) -> set[str]:
        """Of what the kernel and the file system hold."""
        return shared_traces()

    def environment(self) -> dict[str, str]:
        """Its name and its kernel."""
        return {"machine": platform.node(), "kernel": platform.release()}


@contextmanager
def _namespace() -> Iterator[NightPlace]:
    options = KubernetesOptions.from_environment(os.environ)
    options.require()
    api = KubernetesApi(options.context, options.namespace)
    try:
        require_allowed(api)
        _require_lease_rights(api)
        yield ClusterNamespace(api, options)
    finally:
        api.close()


def _require_lease_rights(api: KubernetesApi) -> None:
    for one in rights.NIGHT_RIGHTS:
        if lacking := [verb for verb in one.verbs if not api.may(verb, one.group, one.resource)]:
            remedy = f"get the right to {', '.join(lacking)} {one.resource} there, for {one.why}"
            raise BadInput("namespace", api.namespace, remedy)


class ClusterNamespace:
    """A namespace of a Kubernetes cluster, which must allow runs. A Lease there keeps others away."""

    def __init__(self, api: KubernetesApi, options: KubernetesOptions) -> None:
        self._api, self._options = api, options

    @contextmanager
    def held(self, tell: Callable[[str], None]) -> Iterator[list[AbortCondition]]:
        """Hold its Lease."""
        holder = os.environ.setdefault(HOLDER, f"{user_at_host()}, process {os.getpid()}")
        lease = NamespaceLease(self._api, LEASE, holder, what="a night")
        killed = lease.take(tell)
        try:
            for session in self._sessions_of(killed) if killed else ():
                end(self._api, session)
                tell(f"ended session {session} of {killed}, which was killed")
            yield [AbortCondition(lease.renew, RENEW_S)]
        finally:
            try:
                lease.release()
            except ApiError as error:
                tell(f"the Lease {LEASE} could not be given back, and ends by itself: {error}")

    def require_fit(self) -> list[str]:
        """Ask for what a session needs. Raises HarnessError."""
        missing = [f"{one.name}: {one.told}" for one in examine_cluster(self._options) if not one.is_there]
        if missing:
            raise HarnessError(f"this cluster is not fit: {'; '.join(missing)}")
        return []

    def put_back(self) -> list[str]:
        """Of this machine, and machines that were broken."""
        return [*map(describe, sweep()), *put_back_left(self._api, self._options)]

    def own_traces(self) -> set[str]:
        """Of this machine, and sessions that are this night's."""
        return own_traces() | {f"session {name}" for name in self._sessions_of(started_by())}

    def shared_traces(self) -> set[str]:
        """Of this machine."""
        return shared_traces()

    def _sessions_of(self, holder: str) -> set[str]:
        found = [one["metadata"] for one in self._api.find("Job", SESSION)]
        return {one["name"] for one in found if one.get("annotations", {}).get(STARTED_BY) == holder}

    def environment(self) -> dict[str, str]:
        """The cluster, its version and the namespace."""
        return {"cluster": self._api.server, "kubernetes": self._api.version(), "namespace": self._api.namespace}
