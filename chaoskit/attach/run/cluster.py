"""The nodes of a run on a job that runs already.

-> substrate/core/base.py: the interface. attach/run/node.py: a node. attach/logs/: its log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from chaoskit.attach.guards.guard_rails import GuardRails
from chaoskit.attach.guards.guarded_job import GuardedNode
from chaoskit.attach.guards.hand_choice import MACHINE_WIDE
from chaoskit.attach.jobs.job_state import COMPLETE
from chaoskit.attach.jobs.watch import JobWatch
from chaoskit.attach.logs.files import FOLDER
from chaoskit.attach.pods.silent_loss import SilentLosses
from chaoskit.attach.run.logs import AttachedLogs
from chaoskit.attach.run.node import AttachedNode
from chaoskit.errors import HarnessError
from chaoskit.experiment.run.command_run import NODE_ROLES
from chaoskit.journal import Journal
from chaoskit.rules.log_file import ArrivingLog
from chaoskit.substrate.cluster.without_coordinator import WithoutCoordinator
from chaoskit.substrate.core.actions import Action, Applied, Backend
from chaoskit.substrate.core.command_environment import CommandEnvironment
from chaoskit.substrate.core.echo import EchoProbe
from chaoskit.substrate.core.launched_ranks import LaunchedRank
from chaoskit.substrate.core.processes import Process
from chaoskit.vocabulary import Event

_PLACE_ROLE = NODE_ROLES[1]
_LOGS_SOURCE = "logs"  # of the journal with holes and lives of logs


class RunGuards(NamedTuple):
    """The guard rails of a run.

    Attributes:
        rails: limits of the nodes that faults may strike, and protected labels.
        why_aborted: returns why the user wants the run to end; "" while it may go on.
    """

    rails: GuardRails
    why_aborted: Callable[[], str]


class AttachedCluster(WithoutCoordinator):
    """The places of a running job as nodes. Nothing is started there but hands.

    Args:
        nodes: the nodes by name, with standing hands.
        watch: the places of the job.
        logs: the logs, in the files of :meth:`log`.
        backends: the backends of actions.
        losses: ends pods in silence.
        run_directory: the directory of the run.
        guards: what may end the run, or keep a fault from a node.
    """

    port = 0
    interface = ""

    def __init__(
        self,
        nodes: Mapping[str, AttachedNode],
        watch: JobWatch,
        logs: AttachedLogs,
        backends: Sequence[Backend],
        losses: SilentLosses,
        run_directory: Path,
        guards: RunGuards,
    ) -> None:
        self.nodes = tuple(nodes)
        self._nodes = nodes
        self._watch, self._logs, self._backends = watch, logs, backends
        self._losses, self._guards = losses, guards
        self._struck = set[str]()  # nodes that faults have struck
        self._has_seen_job = False
        self.run_directory = run_directory
        self._journals: dict[str, Journal] = {}
        self._settled = set[str]()  # nodes whose end is in their journals

    # -- processes ---------------------------------------------------------------------------------

    def node(self, node: str) -> list[Process]:
        return self._nodes[node].processes()

    def root(self, node: str) -> Process:
        return self._nodes[node].root()

    def ranks(self, node: str) -> Mapping[Process, LaunchedRank]:
        return self._nodes[node].seen_ranks()  # the event loop waits for no hand here

    def look_for_ranks(self, node: str) -> None:
        self._nodes[node].wake()

    # -- the job -----------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path | None:
        return None  # those of the job are not known

    @property
    def paths(self) -> Mapping[str, str]:
        return {}

    def host(self, node: str) -> str:
        return self._nodes[node].address()

    def disk(self, node: str) -> Path:
        raise HarnessError(f"the directories of {node} are not known: it was not started here")

    def start(
        self,
        node: str,
        command: tuple[str, ...],
        environment: CommandEnvironment,
        directory: str,
    ) -> None:
        raise HarnessError(f"nothing is started on {node}: its job runs already")

    def is_over(self, node: str) -> bool:
        """Return whether the job has ended by itself, or is gone."""
        if node not in self._settled and self._has_ended():
            self._settle(node)
        return node in self._settled

    def _has_ended(self) -> bool:
        """Return whether the object of the job has ended, or is gone.

        Pods without such an object never end for good: another one may come.
        """
        job = self._watch.places().job
        self._has_seen_job = self._has_seen_job or job is not None
        return bool(job.outcome) if job is not None else self._has_seen_job

    def _settle(self, node: str) -> None:
        """Write the end of a node's container, unless its exit code is not known."""
        place, outcome = self._nodes[node].place, self._watch.places().job
        is_complete = outcome is not None and outcome.outcome == COMPLETE
        pods = [] if place is None else [*place.former_pods, *([place.pod] if place.pod else [])]
        codes = [pod.container(self._nodes[node].container).exit_code for pod in pods]
        # of a job that has failed, a container that ended well was asked to end
        known_codes = [0] if is_complete else [code for code in codes if code]
        if known_codes and (journal := self._journals.get(node)) is not None:
            code = known_codes[-1]
            journal.write(Event.COMMAND_EXITED, pid=1, how="exited", status=f"status {code}")
        self._settled.add(node)

    def log(self, node: str) -> Path:
        return self.run_directory / FOLDER / f"{node}.log"

    def open_log(self, node: str) -> ArrivingLog:
        return self._logs.arriving(node)

    def why_aborted(self) -> str:
        """Return why the run must end: the user wants it, or the job is not watched any more."""
        errors = [node.error for node in self._nodes.values()] + [self._watch.error]
        unwatched = next((repr(error) for error in errors if error is not None), "")
        return self._guards.why_aborted() or (
            f"the job is not watched any more: {unwatched}" if unwatched else ""
        )

    def why_spared(self, nodes: Sequence[str], actions: Collection[type[Action]]) -> str:
        is_machine_wide = bool(actions) and MACHINE_WIDE.issuperset(actions)
        struck = {*self._struck}
        for node in nodes:
            for other in self.together(node) if is_machine_wide else (node,):
                if reason := self._why_not(other, struck):
                    return f"{other}: {reason}"
                struck.add(other)
        self._struck = struck
        return ""

    def _why_not(self, node: str, struck: Collection[str]) -> str:
        """Return why a node may not be struck besides others; "" if it may."""
        pod = self._nodes[node].pod
        if pod is None:
            return ""  # a fault finds no process there
        guarded = GuardedNode(node, pod.name, pod.uid, pod.node, pod.labels)
        return self._guards.rails.why_not(guarded, struck, len(self.nodes))

    # -- actions -----------------------------------------------------------------------------------

    def apply(self, node: str, action: Action) -> Applied:
        for backend in self._backends:
            if type(action) in backend.actions:
                return backend.apply(node, action)
        raise HarnessError(f"{type(action).__name__} is not supported in a job that runs already")

    def lose(self, node: str) -> None:
        self._losses.lose(node)

    def together(self, node: str) -> tuple[str, ...]:
        pod = self._nodes[node].pod
        if pod is None:
            return (node,)
        others = ((name, other.pod) for name, other in self._nodes.items())
        return tuple(name for name, other in others if other is not None and other.node == pod.node)

    def dropped(self, node: str) -> int:
        return self._losses.dropped(node)

    async def replace(self, node: str) -> None:
        _no_replacement(node)

    def round_trips_ms(
        self, source: str, target: str, count: int = 1, timeout_s: float = 1.0
    ) -> tuple[float, ...]:
        return _no_echoes()

    def probe(self, source: str, target: str, timeout_s: float) -> EchoProbe:
        return _no_echoes()

    # -- the run -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Write to the journals what happens at the places, and follow the logs."""
        directory = self.run_directory / "journal"
        self._logs.open(Journal(directory, _LOGS_SOURCE, role=_LOGS_SOURCE))
        for name, node in self._nodes.items():
            self.log(name).touch()  # also of a node that prints nothing
            self._journals[name] = Journal(directory, name, role=_PLACE_ROLE, node=name)
            node.observe(self._journals[name], self._logs)
        yield

    def end(self) -> None:
        """Lift all actions, and end the hands and the followers; the job goes on."""
        with contextlib.ExitStack() as ended:
            ended.callback(self._logs.close)
            for node in self._nodes.values():
                node.stop()  # all of them, before the first one is awaited
            for node in self._nodes.values():
                ended.callback(node.close)
            for backend in self._backends:
                ended.callback(backend.close)


def _no_replacement(node: str) -> NoReturn:
    """Raise the HarnessError of a request for another node. Never returns."""
    raise HarnessError(f"the controller of the job replaces the pod of {node}, not this run")


def _no_echoes() -> NoReturn:
    """Raise the HarnessError of a measurement of round trips. Never returns."""
    raise HarnessError("round trips are not measured in a job that runs already")
