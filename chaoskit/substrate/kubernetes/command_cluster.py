"""The nodes of a run of a command, in pods.

-> substrate/cluster/bare.py: what they have in common with nodes on this host.
kubernetes/run_pods.py: pods that do not answer, or are taken away.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from chaoskit.errors import BadInput, HarnessError, NodeUnreachable
from chaoskit.substrate.cluster.bare import BareCluster, StartsCommands
from chaoskit.substrate.cluster.network import Network
from chaoskit.substrate.cluster.node_files import RemoteFiles
from chaoskit.substrate.kubernetes.run_pods import RunPods
from chaoskit.substrate.supervisor.client import ANSWER_S, SupervisorLink
from chaoskit.substrate.supervisor.sources import Source

_LOOK_S = 0.25  # interval of checks
#: A pod whose supervisor does not answer for so long is lost. A command may outlast a shorter
#: interruption of the network.
SILENT_S = 10.0
#: Most bytes of the log of a command that did not end by itself, from the end of the run on. No
#: verdict reads them, and a command may have printed gigabytes.
_LATE_LOG_BYTES = 4 * 2**20
_ANSWER_S = 5.0  # a request that waits longer would keep the event loop from its deadline


class PodCommandCluster(BareCluster):
    """The nodes of a run of a command, each in a pod.

    While an event loop runs, pods are checked: one that is silent for 10 s is lost and deleted, and
    ends of pods are explained in the journal. From then on a request to a pod fails after 5 s.

    Args:
        files: the files of runs on nodes.
        pods: the pods of the session.
        sources: directories of this host that each node gets a copy of, by path.
        shared: a directory that all pods share, for this run only; None if there is none.

    Raises:
        BadInput: if the directory is not shared by all pods, or cannot be written.
        HarnessError: if backends or the network cannot be made.
    """

    def __init__(
        self,
        substrate: StartsCommands,
        network: Network,
        nodes: tuple[str, ...],
        run_directory: Path,
        files: RemoteFiles,
        pods: RunPods,
        sources: Mapping[str, Source],
        shared: Path | None,
    ) -> None:
        self._files, self._pods, self._sources, self._shared = files, pods, sources, shared
        self._settled = set[str]()  # nodes with a command that is over, and records that are here
        self._silent_since_s: dict[str, float] = {}
        super().__init__(substrate, network, nodes, run_directory)
        with contextlib.ExitStack() as undone:
            undone.callback(files.collect, run_directory)
            undone.callback(self._remove_shared)
            for node in nodes:  # now, so that the command starts on all nodes at the same time
                files.prepare_command(node, run_directory, sources.values())
            if shared is not None:
                self._require_shared(shared)
            undone.pop_all()

    def _link(self, node: str) -> SupervisorLink:
        """Return the link to the supervisor of a node. Raises NodeUnreachable if it has none."""
        pod = self._pods.pod(node)
        if pod.link is None:
            raise NodeUnreachable(f"the pod of {node} is gone")
        return pod.link

    def _require_shared(self, shared: Path) -> None:
        """Raise BadInput unless a file that the first pod writes is there for all of them."""
        remedy = "mount a volume there that all pods may write at once (ReadWriteMany)"
        trial, first = shared.with_name(f"{shared.name}-trial"), self._link(self.nodes[0])
        try:
            first.write(trial / "file", b"")
            apart = [node for node in self.nodes if not self._link(node).has_file(trial / "file")]
            first.remove_directory(trial)
        except NodeUnreachable:
            raise
        except HarnessError as error:
            raise BadInput("shared", str(shared.parent), f"{remedy}: {error}") from None
        if apart:
            problem = f"{', '.join(apart)} does not see what {self.nodes[0]} has written"
            raise BadInput("shared", str(shared.parent), f"{remedy}: {problem}")

    # -- the command -------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path | None:
        if self._shared is not None:
            return self._shared
        return super().checkpoints if len(self.nodes) == 1 else None

    @property
    def paths(self) -> Mapping[str, str]:
        return {path: self._copy(source) for path, source in self._sources.items()}

    @property
    def _copies(self) -> Mapping[str, str]:
        return {
            str(self._files.source_folder / source.digest): self._copy(source)
            for source in self._sources.values()
        }

    def _copy(self, source: Source) -> str:
        """Return the path of the run's own copy of a source on nodes."""
        return str(self._home / "source" / source.digest)

    @property
    def _home(self) -> Path:
        return self._files.home(self.run_directory)

    def is_over(self, node: str) -> bool:
        if node in self._settled:
            return True
        self._pods.note_end(node)  # its time is that of the loss, not of the next check
        runner = self._runners[node]
        with contextlib.suppress(NodeUnreachable):  # the end of its pod is not proved yet
            link = self._link(node)
            if link.is_open() and runner.pid not in link.exits:
                return False
            if runner.is_gone():
                self._files.settle(node, self.run_directory)
                self._settled.add(node)
        return node in self._settled

    # -- the pods ----------------------------------------------------------------------------------

    def lose(self, node: str) -> None:
        """Delete the pod of a node, and wait until no process of it is left.

        Raises HarnessError if that fails.
        """
        self._kill_container(node)

    def together(self, node: str) -> tuple[str, ...]:
        return self._pods.together(node, self.nodes)

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Let the running event loop read the reports of supervisors, and check the pods.

        Raises NodeUnreachable on entry if one of them is gone.
        """
        with contextlib.ExitStack() as reading:
            for node in self.nodes:
                link = self._link(node)
                reading.enter_context(link.heard())
                link.answer_s = _ANSWER_S  # until the end of the run
            watches = [
                asyncio.create_task(watch)
                for watch in (
                    self._pods.watch_ends(lambda: self.nodes, self.run_directory),
                    self._watch_silence(),
                )
            ]
            try:
                yield
            finally:
                for watch in watches:
                    watch.cancel()
                for watch in watches:
                    if watch.done() and not watch.cancelled():
                        watch.result()  # raise the error of a failed watch

    async def _watch_silence(self) -> None:
        """Note pods as lost that do not answer for :data:`SILENT_S` seconds.

        A pod whose stream has ended counts as silent, too, until its end is proved.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            nodes = [node for node in self.nodes if node not in self._settled]
            silent = await asyncio.gather(*map(self._pods.is_silent, nodes))
            now_s = time.monotonic()
            for node, is_silent in zip(nodes, silent, strict=True):
                if not is_silent and self._pods.lives(node):
                    self._silent_since_s.pop(node, None)
                    continue
                since_s = self._silent_since_s.setdefault(node, now_s)
                if now_s - since_s > SILENT_S:
                    self._silent_since_s[node] = math.inf  # once
                    with contextlib.suppress(NodeUnreachable):
                        self._pods.note_silent(node, int(since_s * 1e9))

    # -- the end -----------------------------------------------------------------------------------

    def end(self) -> None:
        """End every process of the run, and collect its journals and logs.

        The shared directory of the run is removed. Pods that something other than the run ended
        are written to the journal, which takes up to 90 s if a machine may be lost.
        """
        try:
            self._pods.settle_ends(self.nodes, self.run_directory)
        finally:
            with contextlib.ExitStack() as ended:
                ended.callback(self._remove_shared)
                ended.callback(self._files.collect, self.run_directory, _LATE_LOG_BYTES)
                super().end()
        if sys.exception() is None:  # after an error no verdict needs an explanation
            self._pods.await_machines(self.run_directory)

    def _remove_shared(self) -> None:
        """Remove the shared directory of the run, by the first pod that can.

        The verdict does not depend on it: the user is told of a directory that stays.
        """
        failure = "no pod is left"
        for node in self.nodes:
            try:
                link = self._link(node)
                link.answer_s = ANSWER_S
                if self._shared is not None:
                    link.remove_directory(self._shared)
                    return
            except HarnessError as error:
                failure = str(error)
        if self._shared is not None:
            self._pods.tell(f"{self._shared} could not be removed: {failure}")
