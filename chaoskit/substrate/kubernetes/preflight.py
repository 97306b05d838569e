"""Checks before a run: a run that cannot take place fails before any object is created.

A cluster that refuses a session is asked only once.

-> kubernetes/examination.py has the checks.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Iterator
from contextlib import closing

from chaoskit.errors import BadInput, ChaoskitError, HarnessError
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.kubernetes import template
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.examination import ClusterFinding, Examination
from chaoskit.substrate.kubernetes.options import VARIABLE, KubernetesOptions
from chaoskit.substrate.kubernetes.pods.actions import MACHINE_ACTIONS
from chaoskit.substrate.kubernetes.pods.diagnosis import PodsBarred
from chaoskit.substrate.kubernetes.pods.manifests import Manifest


class FirstRefusal:
    """Remembers the error of a failed attempt, so that the same attempt is not made again.

    Once an attempt has succeeded, no later error is recorded.
    """

    def __init__(self) -> None:
        self._error: ChaoskitError | None = None
        self._pod_count = 0
        self._has_succeeded = False

    def note_success(self) -> None:
        """Note that an attempt has succeeded: another attempt may repair later failures."""
        self._has_succeeded = True

    @contextlib.contextmanager
    def remembered(self, pod_count: int = 0) -> Iterator[None]:
        """Return a context for an attempt, whose error is recorded and raised.

        If the error of an attempt that was not larger is recorded, it is raised instead. Errors
        that may pass are not recorded: an API server that did not answer, and pods that were
        only late.

        Args:
            pod_count: number of pods that the attempt needs; 0 if that does not matter.
        """
        if self._error is not None and pod_count >= self._pod_count:
            raise self._error.with_traceback(None)
        try:
            yield
        except (BadInput, HarnessError) as error:
            if not self._has_succeeded and _is_lasting(error):
                self._error, self._pod_count = error, pod_count
            raise


class Preflight:
    """Checks of a cluster by the process that creates sessions.

    Args:
        options: the user's options.
        pod_template: the template of pods.

    Attributes:
        refusal: memory of the error of a refused session.
    """

    def __init__(self, options: KubernetesOptions, pod_template: Manifest) -> None:
        self._options, self._pod_template = options, pod_template
        self._checked_nodes = 0  # number of nodes that were checked for the present session
        self._is_checked = False
        self.refusal = FirstRefusal()

    def require_session(self) -> None:
        """Raise BadInput or HarnessError if the cluster does not admit a session."""
        with self.refusal.remembered():
            if not self._is_checked:
                with closing(KubernetesApi(self._options.context, self._options.namespace)) as api:
                    require_all(Examination(api, self._options, self._pod_template).of_session())
        self._is_checked = True

    def require_run(self, demand: RunDemand, session: str) -> None:
        """Raise an error if a run cannot take place.

        A run with no more nodes than a checked one of the same session is not checked again,
        unless it breaks machines.

        Args:
            demand: the needs of the run.
            session: name of its session; "" if there is none.

        Raises:
            BadInput, HarnessError: before any object is created.
        """
        require_possible(demand)
        self._require_shared(demand)
        if not session:
            self.require_session()
            self._checked_nodes = 0
        breaks_machines = bool(MACHINE_ACTIONS & demand.actions)
        nodes = demand.nodes + demand.standbys
        if nodes <= self._checked_nodes and not breaks_machines:
            return
        with closing(KubernetesApi(self._options.context, self._options.namespace)) as api:
            require_all(Examination(api, self._options, self._pod_template).of_run(demand, session))
        self._checked_nodes = max(self._checked_nodes, nodes)

    def _require_shared(self, demand: RunDemand) -> None:
        """Raise BadInput if a command needs a directory that its nodes do not share."""
        variable = f"{VARIABLE}SHARED"
        if self._options.shared:
            template.require_mounted(self._pod_template, self._options.shared)
        elif demand.nodes > 1 and any("{run_dir}" in argument for argument in demand.command):
            raise BadInput(
                "command",
                shlex.join(demand.command),
                "pods share no directory for {run_dir}: mount a volume that all pods may write "
                f"(ReadWriteMany) by the template, and set {variable} to its path",
            )

    def note_made(self) -> None:
        """Note that a session was created: the next one is checked anew."""
        self._is_checked = False
        self.refusal.note_success()


def require_possible(demand: RunDemand) -> None:
    """Raise BadInput if no cluster can carry out a run: it needs another device."""
    if demand.device != "cpu":
        raise BadInput("device", demand.device, "use 'cpu': pods support no other device yet")


def require_all(findings: Iterable[ClusterFinding]) -> None:
    """Raise the refusal of the first finding that has one, a BadInput. Later checks are not made."""
    for finding in findings:
        if finding.refusal is not None:
            raise finding.refusal


def _is_lasting(error: ChaoskitError) -> bool:
    """Return whether another attempt would fail with the same error."""
    return isinstance(error, BadInput | PodsBarred) or (
        isinstance(error, ApiError) and error.is_refusal
    )
