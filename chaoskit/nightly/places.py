"""Where the runs of a night take place: what it must have, what is left there, and that no two nights meet."""

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
#: The Lease of a namespace that a night holds.
LEASE = "chaoskit-night"
_DOCTOR_S, _ANSWER_S, _LOOK_S = 120.0, 10.0, 1.0
#: So long a night waits for an API server that does not answer, before it begins.
_SERVER_S = 300.0


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


def place_of(substrate: str, tell: Callable[[str], None]) -> AbstractContextManager[NightPlace]:
    """The place of a substrate's runs. Raises BadInput if it cannot have any."""
    return _namespace(tell) if substrate == KUBERNETES else nullcontext(OwnMachine())


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
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_DOCTOR_S, check=False
            )
            found = json.loads(done.stdout)
            is_fit, told = (
                found["ok"],
                [one for one in found["findings"] if one["state"] == "missing"],
            )
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
def _namespace(tell: Callable[[str], None]) -> Iterator[NightPlace]:
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
    """Wait for a server that is away for a while: a night that does not begin is a night that is lost."""
    until_s, is_told = time.monotonic() + _SERVER_S, False
    while not api.answers(_ANSWER_S) and time.monotonic() < until_s:
        if not is_told:
            tell(f"waiting for the API server {api.server}, {_SERVER_S:g} s at most")
        is_told = True
        time.sleep(_LOOK_S)


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
        """Hold its Lease, and end what a holder has left that died."""
        # a number of a process comes again, as in a container that is started anew
        me = os.environ[STARTED_BY_VARIABLE] = (
            f"{user_at_host()}, process {os.getpid()}, {secrets.token_hex(3)}"
        )
        lease = NamespaceLease(
            self._api, LEASE, me, what="a night", job=os.environ.get(NIGHT_JOB, "")
        )
        killed = lease.take(tell)
        with lease.renewed():
            try:
                if killed:
                    self._end_sessions(killed, tell)
                yield [AbortCondition(lambda: lease.trouble, _LOOK_S)]
            finally:
                try:
                    self._end_sessions(me, tell)
                    lease.release()
                except ApiError as error:
                    tell(f"the Lease {LEASE} could not be given back, and ends by itself: {error}")

    def _end_sessions(self, holder: str, tell: Callable[[str], None]) -> None:
        for session in self._sessions_of(holder):
            end(self._api, session)
            tell(f"ended session {session} of {holder}")
        for left in put_back_left(self._api, self._options):
            tell(str(left))

    def require_fit(self) -> list[str]:
        """Ask for what a session needs. Raises HarnessError."""
        missing = [
            f"{one.name}: {one.told}" for one in examine_cluster(self._options) if not one.is_there
        ]
        if missing:
            raise HarnessError(f"this cluster is not fit: {'; '.join(missing)}")
        return []

    def put_back(self) -> list[str]:
        """Of this machine, and machines that were broken."""
        left = put_back_left(self._api, self._options)
        return [
            *map(describe, sweep()),
            *(str(one) if one.is_back else f"{LEFT_BEHIND}: {one.told}" for one in left),
        ]

    def own_traces(self) -> set[str]:
        """Of this machine, and sessions that are this night's."""
        return own_traces() | {f"session {name}" for name in self._sessions_of(started_by())}

    def shared_traces(self) -> set[str]:
        """Of this machine."""
        return shared_traces()

    def _sessions_of(self, holder: str) -> set[str]:
        found = [one["metadata"] for one in self._api.find("Job", SESSION)]
        return {
            one["name"] for one in found if one.get("annotations", {}).get(STARTED_BY) == holder
        }

    def environment(self) -> dict[str, str]:
        """The cluster, its version and the namespace."""
        return {
            "cluster": self._api.server,
            "kubernetes": self._api.version(),
            "namespace": self._api.namespace,
        }
