"""Refusal of runs before anything of them is made. A cluster that refuses a session is asked once."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Iterator
from contextlib import closing

from chaoskit.errors import BadInput, ChaoskitError, HarnessError
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.examination import ClusterFinding, Examination
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods.actions import MACHINE_ACTIONS
from chaoskit.substrate.kubernetes.pods.diagnosis import PodsBarred
from chaoskit.substrate.kubernetes.pods.manifests import Manifest


class FirstRefusal:
    """Remembers why an attempt failed, as long as none has succeeded: further ones are not made then."""

    def __init__(self) -> None:
        self._error: ChaoskitError | None = None
        self._size = 0
        self._has_succeeded = False

    def note_success(self) -> None:
        """An attempt has succeeded: what fails later may be mended by another attempt."""
        self._has_succeeded = True

    @contextlib.contextmanager
    def remembered(self, size: int = 0) -> Iterator[None]:
        """Raise what an attempt of this size, or of a smaller one, was refused with; else note why this one is.

        An API server that did not answer is asked again, and so are pods that were only late.
        """
        if self._error is not None and size >= self._size:
            raise self._error.with_traceback(None)
        try:
            yield
        except (BadInput, HarnessError) as error:
            if not self._has_succeeded and _is_lasting(error):
                self._error, self._size = error, size
            raise


class Preflight:
    """Checks of a cluster by the process that makes sessions.

    Args:
        given: the template of pods.
    """

    def __init__(self, options: KubernetesOptions, given: Manifest) -> None:
        self._options, self._given = options, given
        self._checked_nodes = 0  # of the session that is there
        self._is_checked = False
        self.refusal = FirstRefusal()

    def require_session(self) -> None:
        """Refuse a session that the cluster does not let be made. Raises BadInput, HarnessError."""
        with self.refusal.remembered():
            if not self._is_checked:
                with closing(KubernetesApi(self._options.context, self._options.namespace)) as api:
                    require_all(Examination(api, self._options, self._given).of_session())
        self._is_checked = True

    def require_run(self, demand: RunDemand, session: str) -> None:
        """Refuse a run that cannot take place. ``session``: its name; "" if none has been made.

        Raises:
            BadInput, HarnessError: before anything is made.
        """
        require_possible(demand)
        if not session:
            self.require_session()
            self._checked_nodes = 0
        breaks_machines = bool(MACHINE_ACTIONS & demand.actions)
        nodes = demand.nodes + demand.standbys
        if nodes <= self._checked_nodes and not breaks_machines:
            return
        with closing(KubernetesApi(self._options.context, self._options.namespace)) as api:
            require_all(Examination(api, self._options, self._given).of_run(demand, session))
        self._checked_nodes = max(self._checked_nodes, nodes)

    def note_made(self) -> None:
        """A session was made: the next one is checked anew."""
        self._is_checked = False
        self.refusal.note_success()


def require_possible(demand: RunDemand) -> None:
    """Refuse a run that no cluster can have. Raises BadInput."""
    if demand.command:
        remedy = "use the substrate local, netns or docker, or give a job: pods run no commands"
        raise BadInput("command", shlex.join(demand.command), remedy)
    if demand.device != "cpu":
        raise BadInput("device", demand.device, "use 'cpu': no GPU was tried in pods yet")


def require_all(findings: Iterable[ClusterFinding]) -> None:
    """Refuse by the first thing that is missing. Raises BadInput."""
    for finding in findings:
        if finding.refusal is not None:
            raise finding.refusal


def _is_lasting(error: ChaoskitError) -> bool:
    """Return whether another attempt would fail with the same error."""
    return isinstance(error, BadInput | PodsBarred) or (
        isinstance(error, ApiError) and error.is_refusal
    )
