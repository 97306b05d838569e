"""The nodes of a run, whatever runs on them: what is done to them, and by which backend."""

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
    """Base of clusters: the part that needs no coordinator.

    Args:
        make_backends: what carries out actions on the nodes, beside the network's own.
    """

    def __init__(
        self,
        network: Network,
        nodes: tuple[str, ...],
        run_directory: Path,
        make_backends: Callable[[BaseCluster], Iterable[Backend]],
    ) -> None:
        self.nodes = nodes
        self._network, self.run_directory = network, run_directory
        self._backends: list[Backend] = [*make_backends(self), *network.backends()]
        for action, times in Counter(
            action for backend in self._backends for action in backend.actions
        ).items():
            if times > 1:
                raise HarnessError(
                    f"{times} backends carry out {action.__name__}: uninstall what brings the others"
                )
        self._cuts: dict[str, Applied] = {}  # node that was lost -> what isolates it
        self._dropped: Counter[str] = Counter()  # packets, by node that was replaced

    def node(self, node: str) -> list[Process]:
        """Live processes of a node, the first one first."""
        raise NotImplementedError

    def root(self, node: str) -> Process:
        """The process below which everything of a node runs."""
        raise NotImplementedError

    def lose(self, node: str) -> None:
        cut = None if node in self._cuts else self._network.isolate(node)
        if cut is not None:
            self._cuts[node] = cut
        deadline_s = time.monotonic() + _END_S
        while left := self.node(node):
            if time.monotonic() > deadline_s:
                raise HarnessError(
                    f"processes {[process.pid for process in left]} of {node} do not end"
                )
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    process.signal(signal.SIGKILL)
            self._release(node)  # under cgroup v1, what is frozen does not even die
            time.sleep(0.001)

    def together(self, node: str) -> tuple[str, ...]:
        return self.nodes  # of one machine

    def dropped(self, node: str) -> int:
        now = self._cuts[node].shown() if node in self._cuts else 0
        return self._dropped[node] + now

    def mend(self, node: str) -> None:
        """Let the network of a lost node work again. Raises HarnessError if something runs there still."""
        if self.node(node):
            raise HarnessError(f"{node} has processes still: lose it first")
        if node in self._cuts:
            cut = self._cuts.pop(node)
            cut.lift()
            self._dropped[node] += cut.shown()

    def restart(self, node: str) -> None:
        """Start another node under the name of one that was lost."""
        raise NotImplementedError

    async def replace(self, node: str) -> None:
        self.restart(node)

    def apply(self, node: str, action: Action) -> Applied:
        for backend in self._backends:
            if type(action) in backend.actions:
                return backend.apply(node, action)
        raise HarnessError(f"{type(action).__name__} cannot be done to nodes of this substrate")

    def round_trips_ms(
        self, source: str, target: str, count: int = 1, timeout_s: float = 1.0
    ) -> tuple[float, ...]:
        return self._network.round_trips_ms(source, target, count, timeout_s)

    def probe(self, source: str, target: str, timeout_s: float) -> EchoProbe:
        return self._network.probe(source, target, timeout_s)

    def disk(self, node: str) -> Path:
        return disk_directory(self.run_directory, node)

    def _release(self, node: str | None = None) -> None:
        for backend in self._backends:
            backend.release(node)

    def _close_backends(self) -> None:
        for backend in self._backends:
            backend.close()
