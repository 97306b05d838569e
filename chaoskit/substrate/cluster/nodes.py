"""The nodes of a run of a job or a command, and the dispatch of actions to backends.

-> ``core/actions.py``: the actions. ``limits/holds.py``, ``disk/disks.py`` and
``netns/substrate.py``: backends. ``coordinator/handlers/on_node.py``: when the coordinator
considers a node lost.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from chaoskit.config import disk_directory
from chaoskit.errors import HarnessError
from chaoskit.substrate.cluster.network import Network
from chaoskit.substrate.core.actions import Action, Applied, Backend
from chaoskit.substrate.core.echo import EchoProbe
from chaoskit.substrate.core.processes import Process

_END_S = 10.0


class BaseCluster:
    """Base of clusters: the operations that need no coordinator.

    Args:
        make_backends: returns the backends of actions on the nodes, without those of the network.
        kill_container: kills the container of a node that is lost, if it has one.

    Raises:
        HarnessError: if two backends carry out the same kind of action.
    """

    def __init__(
        self,
        network: Network,
        nodes: tuple[str, ...],
        run_directory: Path,
        make_backends: Callable[[BaseCluster], Iterable[Backend]],
        kill_container: Callable[[str], None],
    ) -> None:
        self.nodes = nodes
        self._kill_container = kill_container
        self._network, self.run_directory = network, run_directory
        self._backends: list[Backend] = [*make_backends(self), *network.backends()]
        for action, times in Counter(
            action for backend in self._backends for action in backend.actions
        ).items():
            if times > 1:
                raise HarnessError(
                    f"{times} backends carry out {action.__name__}: "
                    "uninstall the distributions of all but one of them"
                )
        self._cuts: dict[str, Applied] = {}  # lost node -> the action that isolates it
        # replaced node -> packets dropped while it was isolated
        self._dropped: Counter[str] = Counter()

    def node(self, node: str) -> list[Process]:
        """Return the live processes of a node, the ancestor of the others first."""
        raise NotImplementedError

    def root(self, node: str) -> Process:
        """Return the root of the process tree of a node."""
        raise NotImplementedError

    def lose(self, node: str) -> None:
        """Isolate a node, kill its container if it has one, and SIGKILL all its processes.

        Freezes and limits of the node are lifted meanwhile, as frozen processes may not die.
        Raises HarnessError if the container cannot be killed or processes do not end within 10 s.
        """
        cut = None if node in self._cuts else self._network.isolate(node)
        if cut is not None:
            self._cuts[node] = cut
        self._kill_container(node)
        deadline_s = time.monotonic() + _END_S
        while processes := self.node(node):
            if time.monotonic() > deadline_s:
                raise HarnessError(
                    f"processes {[process.pid for process in processes]} of {node} do not end"
                )
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.signal(signal.SIGKILL)
            self._release(node)  # under cgroup v1, frozen processes do not die
            time.sleep(0.001)

    def together(self, node: str) -> tuple[str, ...]:
        return self.nodes  # all run on the same machine

    def dropped(self, node: str) -> int:
        packets = self._cuts[node].shown() if node in self._cuts else 0
        return self._dropped[node] + packets

    def reconnect(self, node: str) -> None:
        """Reconnect the network of a lost node. Raises HarnessError if it still has processes.

        The packets that were dropped stay in the count of :meth:`dropped`.
        """
        if self.node(node):
            raise HarnessError(f"{node} still has processes: end it with lose() first")
        if node in self._cuts:
            cut = self._cuts.pop(node)
            cut.lift()
            self._dropped[node] += cut.shown()

    def restart(self, node: str) -> None:
        """Start another node under the name of a lost one.

        Raises HarnessError if it still has processes, or no other node starts.
        """
        raise NotImplementedError

    async def replace(self, node: str) -> None:
        self.restart(node)

    def apply(self, node: str, action: Action) -> Applied:
        """Apply an action with its backend, and return the handle that lifts it.

        Raises HarnessError if no backend carries out the action or its backend fails, and
        ProcessLookupError if the node is gone.
        """
        for backend in self._backends:
            if type(action) in backend.actions:
                return backend.apply(node, action)
        raise HarnessError(
            f"{type(action).__name__} is not supported by the nodes of this substrate"
        )

    def round_trips_ms(
        self, source: str, target: str, count: int = 1, timeout_s: float = 1.0
    ) -> tuple[float, ...]:
        return self._network.round_trips_ms(source, target, count, timeout_s)

    def probe(self, source: str, target: str, timeout_s: float) -> EchoProbe:
        return self._network.probe(source, target, timeout_s)

    def disk(self, node: str) -> Path:
        return disk_directory(self.run_directory, node)

    def _release(self, node: str | None = None) -> None:
        """Lift the actions that keep processes of a node, or of all nodes, from ending."""
        for backend in self._backends:
            backend.release(node)

    def _close_backends(self) -> None:
        for backend in self._backends:
            backend.close()
