"""Hosts that execute experiments: this process, or a driver on another machine
(:mod:`chaoskit.experiment.remote`).

-> experiment/remote/client.py: the host with a driver. experiment/harness.py: what a host is asked
to run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from chaoskit.experiment.injection.job_follower import Watch
from chaoskit.experiment.plan.command_plan import CommandExperiment
from chaoskit.experiment.plan.plan import Experiment
from chaoskit.experiment.run.command_run import CommandRun, execute_command
from chaoskit.experiment.run.run import RawRun, execute
from chaoskit.experiment.twin.twin import SessionTwins, TwinCache
from chaoskit.plaintext import tell_on_stderr
from chaoskit.substrate import registry
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.core.base import Substrate
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.undo import UndoLog


@runtime_checkable
class ExperimentHost(Protocol):
    """Executor of experiments.

    Afterwards all records of a run are in its directory on this machine.

    Attributes:
        name: the name of the substrate that nodes come from.
        undo: receives the entries that clean up if this process is killed.
    """

    name: str
    undo: UndoLog

    @property
    def twins(self) -> TwinCache | SessionTwins:
        """The cache of unbroken runs on the same machines.

        Their numbers depend on the processor.
        """

    def require(self, demand: RunDemand) -> None:
        """Raise BadInput or HarnessError if a run cannot take place there; make nothing."""

    def reach(self) -> None:
        """Connect to the executor of the next run, so that :attr:`twins` are of the same machines.

        Raises:
            BadInput, HarnessError: if it cannot be reached.
        """

    def why_not(self, action: type[Action]) -> str:
        """Return why an action of this kind cannot be done to nodes there; "" if it can.

        Raises:
            BadInput, HarnessError: if the executor cannot be reached.
        """

    def execute(
        self,
        experiment: Experiment,
        directory: Path,
        *,
        watch: Watch | None,
        port: int,
        twin_id: str,
    ) -> RawRun:
        """Run a job and return its records.

        The arguments are those of :func:`chaoskit.experiment.run.run.execute`; ``watch`` may be
        None.

        Raises:
            BadInput: if the plan or the job's input is refused.
            HarnessError: if chaoskit itself failed, or the code of a fault.
            JournalFull: if ``directory`` has no room for the harness's journal.
        """

    def execute_command(
        self, experiment: CommandExperiment, directory: Path, *, watch: Watch | None, twin_id: str
    ) -> CommandRun:
        """Run a command and return its records.

        See :func:`chaoskit.experiment.run.command_run.execute_command` for the arguments;
        ``watch`` may be None.

        Raises:
            BadInput: if the plan or the input of a fault is refused.
            HarnessError: if chaoskit itself failed, or the code of a fault.
            JournalFull: if ``directory`` has no room for the harness's journal.
        """

    def close(self) -> None:
        """End all processes that the host has started."""


class LocalHost:
    """Host that executes experiments in this process, with nodes of a substrate."""

    def __init__(self, substrate: Substrate) -> None:
        self._substrate = substrate
        self.name, self.undo = substrate.name, substrate.undo
        self.twins = SessionTwins() if getattr(substrate, "is_elsewhere", False) else TwinCache()

    def require(self, demand: RunDemand) -> None:
        """Raise BadInput or HarnessError if the substrate cannot hold a run."""
        self._substrate.require(demand)

    def reach(self) -> None:
        """Do nothing: the executor is this process."""

    def why_not(self, action: type[Action]) -> str:
        """Return why this kind of action cannot be done to the substrate's nodes; "" if it can."""
        return self._substrate.why_not(action)

    def execute(
        self,
        experiment: Experiment,
        directory: Path,
        *,
        watch: Watch | None,
        port: int,
        twin_id: str,
    ) -> RawRun:
        """Run a job from this process and return its records.

        See :func:`chaoskit.experiment.run.run.execute` for the errors.
        """
        return execute(
            experiment,
            self._substrate,
            directory,
            watch=watch or _ignore,
            port=port,
            twin_id=twin_id,
        )

    def execute_command(
        self, experiment: CommandExperiment, directory: Path, *, watch: Watch | None, twin_id: str
    ) -> CommandRun:
        """Run a command from this process and return its records.

        See :func:`chaoskit.experiment.run.command_run.execute_command` for the errors.
        """
        return execute_command(
            experiment, self._substrate, directory, watch=watch or _ignore, twin_id=twin_id
        )

    def close(self) -> None:
        """Close the substrate."""
        self._substrate.close()


def demand_of(experiment: Experiment | CommandExperiment) -> RunDemand:
    """Return the part of a plan that a host must be able to provide."""
    actions = frozenset(action for fault in experiment.faults for action in fault.needs)
    if isinstance(experiment, CommandExperiment):
        return RunDemand(experiment.nodes, actions=actions, command=tuple(experiment.command))
    config = experiment.config
    standbys = sum(fault.needs_standby for fault in experiment.faults)
    return RunDemand(config.nodes_max, standbys, actions, device=config.device)


def make_host(name: str, *, docker_image: str = "") -> ExperimentHost:
    """Return a host with nodes of the substrate of that name.

    The names are those of :func:`chaoskit.substrate.registry.make`.

    On Kubernetes the host is a pod of its own, unless this process is in the cluster: pods must
    reach the driver of their run.

    Args:
        name: the name of the substrate, or ``module:factory``.
        docker_image: an image with chaoskit for the substrate ``docker``; "" for the default.

    Raises:
        BadInput: if there is no such substrate, or this machine cannot have it.
    """
    if name == registry.KUBERNETES:
        from chaoskit.experiment.remote.client import RemoteHost
        from chaoskit.substrate.kubernetes.driver_pod import DriverPod
        from chaoskit.substrate.kubernetes.options import KubernetesOptions

        options = KubernetesOptions.from_environment(os.environ)
        if options.has_driver:
            return RemoteHost(DriverPod(options, tell_on_stderr), tell_on_stderr)
    host = registry.make(name, docker_image=docker_image)
    return host if isinstance(host, ExperimentHost) else LocalHost(host)


def _ignore(message: Any) -> None:
    """Drop a message."""
