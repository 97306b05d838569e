"""What executes experiments: this process, or a driver that a stream leads to (:mod:`chaoskit.experiment.remote`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from chaoskit.experiment.injection.follow import Watch
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
    """Executes experiments. When it has, all that was written down of them is in the run's directory here.

    Attributes:
        name: of the substrate from which nodes come there.
        undo: what must be put back here if this process is killed.
    """

    name: str
    undo: UndoLog

    @property
    def twins(self) -> TwinCache | SessionTwins:
        """Unbroken runs on the same machines: their numbers depend on the processor."""

    def require(self, demand: RunDemand) -> None:
        """Refuse a run that cannot take place there, before anything of it is made. Raises BadInput, HarnessError."""

    def reach(self) -> None:
        """Have what executes the next run, so that :attr:`twins` are of the same machines. Raises HarnessError."""

    def why_not(self, action: type[Action]) -> str:
        """Why an action of this kind cannot be done to nodes there; "" if it can."""

    def execute(
        self,
        experiment: Experiment,
        directory: Path,
        *,
        watch: Watch | None,
        port: int,
        twin_id: str,
    ) -> RawRun:
        """Run a job; see :func:`chaoskit.experiment.run.run.execute`."""

    def execute_command(
        self, experiment: CommandExperiment, directory: Path, *, watch: Watch | None, twin_id: str
    ) -> CommandRun:
        """Run a command; see :func:`chaoskit.experiment.run.command_run.execute_command`."""

    def close(self) -> None:
        """End everything that it has started."""


class LocalHost:
    """This process, with nodes of a substrate."""

    def __init__(self, substrate: Substrate) -> None:
        self._substrate = substrate
        self.name, self.undo = substrate.name, substrate.undo
        self.twins = SessionTwins() if getattr(substrate, "is_elsewhere", False) else TwinCache()

    def require(self, demand: RunDemand) -> None:
        self._substrate.require(demand)

    def reach(self) -> None:
        """It is this process."""

    def why_not(self, action: type[Action]) -> str:
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
        return execute_command(
            experiment, self._substrate, directory, watch=watch or _ignore, twin_id=twin_id
        )

    def close(self) -> None:
        self._substrate.close()


def demand_of(experiment: Experiment | CommandExperiment) -> RunDemand:
    """Return the part of a plan that a host is asked about."""
    actions = frozenset(action for fault in experiment.faults for action in fault.needs)
    if isinstance(experiment, CommandExperiment):
        return RunDemand(experiment.nodes, actions=actions, command=tuple(experiment.command))
    config = experiment.config
    standbys = sum(fault.needs_standby for fault in experiment.faults)
    return RunDemand(config.nodes_max, standbys, actions, device=config.device)


def make_host(name: str, *, docker_image: str = "") -> ExperimentHost:
    """A host with nodes of the substrate of that name; see :func:`chaoskit.substrate.registry.make`.

    On Kubernetes it is a pod of its own, unless this process is in the cluster: pods must reach what drives their runs.

    Raises:
        BadInput: if there is none, or this machine cannot have it.
    """
    if name == registry.KUBERNETES:
        from chaoskit.experiment.remote.client import RemoteHost
        from chaoskit.substrate.kubernetes.driver_pod import DriverPod
        from chaoskit.substrate.kubernetes.options import KubernetesOptions

        options = KubernetesOptions.from_environment(os.environ)
        if options.has_driver:
            return RemoteHost(DriverPod(options, tell_on_stderr), tell_on_stderr)
    made = registry.make(name, docker_image=docker_image)
    return made if isinstance(made, ExperimentHost) else LocalHost(made)


def _ignore(message: Any) -> None:
    """Drop the message."""
