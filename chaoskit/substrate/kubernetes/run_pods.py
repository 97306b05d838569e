"""The pods of a session during a run: which do not answer, which end, and why.

-> kubernetes/pods/pods.py asks the API server; pods/disruption.py: how an end from outside is
recognised. experiment/run/disruptions.py: its effect on the verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from chaoskit.errors import NodeUnreachable
from chaoskit.journal import Journal
from chaoskit.substrate.kubernetes.pods.actions import ANSWER_S
from chaoskit.substrate.kubernetes.pods.pod_placement import AVOID_S
from chaoskit.substrate.kubernetes.pods.pods import Pod, SessionPods
from chaoskit.vocabulary import Event

_LOOK_S = 0.25  # interval of checks
_TIDY_S = 5.0


class RunPods:
    """Checks of the pods of a run, and the journal records of pods that were taken away.

    Args:
        pods: the pods of the session.
        tell: shows a line to the user: what is waited for.
    """

    def __init__(self, pods: SessionPods, tell: Callable[[str], None]) -> None:
        self._pods, self.tell = pods, tell

    def pod(self, station: str) -> Pod:
        """Return the pod of a station. Raises NodeUnreachable if it has none any more."""
        if (pod := self._pods.get(station)) is None:
            raise NodeUnreachable(f"the pod of {station} is gone")
        return pod

    def together(self, node: str, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return those of ``nodes`` whose pods are on the machine of a node's pod.

        Raises NodeUnreachable if that node has no pod any more.
        """
        stations = {pod.station for pod in self._pods.on(self.pod(node).machine)}
        return tuple(other for other in nodes if other in stations)

    def standbys(self) -> tuple[str, ...]:
        """Return the stations of the pods that stand by."""
        return tuple(pod.station for pod in self._pods.all() if pod.stands_by)

    # -- silence -----------------------------------------------------------------------------------

    async def is_silent(self, station: str) -> bool:
        """Return whether a station's supervisor does not answer though its stream is open.

        Return False after at most 1 s if it answers, has no pod, or its stream ends.
        """
        link = pod.link if (pod := self._pods.get(station)) is not None else None
        return (
            link is not None
            and link.is_open()
            and not await link.answers(ANSWER_S)
            and link.is_open()
        )

    @contextlib.contextmanager
    def doubted(self, station: str) -> Iterator[None]:
        """Make queries about the processes of a station raise NodeUnreachable inside a ``with``."""
        pod = self._pods.get(station)
        before = pod.kernel.is_doubted if pod is not None else False
        if pod is not None:
            pod.kernel.is_doubted = True
        try:
            yield
        finally:
            if pod is not None:
                pod.kernel.is_doubted = before

    def lives(self, station: str) -> bool:
        """Return whether the stream to the supervisor of a station is open."""
        pod = self._pods.get(station)
        return pod is not None and pod.lives()

    def note_silent(self, station: str, since_ns: int = 0) -> None:
        """Note that the supervisor of a station does not answer: its pod is lost, and is deleted.

        Raises NodeUnreachable if it has no pod any more.

        Args:
            since_ns: monotonic time of the first question without an answer; 0 for now.
        """
        self._pods.note_silent(self.pod(station), since_ns)

    def note_end(self, station: str) -> None:
        """Note the time if the processes of a station's pod end or have ended."""
        if (pod := self._pods.get(station)) is not None:
            pod.note_end()

    # -- ends --------------------------------------------------------------------------------------

    async def watch_ends(self, stations: Callable[[], Iterable[str]], run_directory: Path) -> None:
        """Find out why pods end that this run does not end, and write that to the journal.

        The coroutine goes on until it is cancelled. Requests are made in another thread.

        Args:
            stations: returns the stations of the run.
        """
        examination: asyncio.Task[None] | None = None
        while True:
            await asyncio.sleep(_LOOK_S)
            present_stations = tuple(stations())
            if self._note_ends(present_stations) and (examination is None or examination.done()):
                examined = asyncio.to_thread(self._pods.examine_all, present_stations)
                examination = asyncio.create_task(examined)
            self._write_disrupted(run_directory)

    def _note_ends(self, stations: Iterable[str]) -> bool:
        """Note the pods that end. Return whether the reason of an end must be found out.

        Stations without a pod are left out.
        """
        pods = [pod for pod in map(self._pods.get, stations) if pod is not None]
        for pod in pods:
            pod.note_end()
        return self._pods.has_unproven() or any(pod.is_unexplained() for pod in pods)

    def _write_disrupted(self, run_directory: Path) -> None:
        """Write to the substrate's journal the pods that something other than the run ended.

        Each pod is written once. Nothing is written if there are none.
        """
        for pod in self._pods.pop_disrupted():
            assert pod.disruption is not None
            journal = Journal(run_directory / "journal", "substrate", role="substrate")
            identity = {"node": pod.station, "role": pod.role, "pod": pod.place}
            cause = {"cause": pod.disruption.cause, "detail": pod.disruption.detail}
            journal.write(Event.POD_TAKEN, t_ns=pod.first_sign_ns, **identity, **cause)
            journal.close("the record is written")

    def settle_ends(self, stations: Sequence[str], run_directory: Path) -> None:
        """Write the pods that something other than the run ended, at the end of a run.

        It waits a few seconds for deletions of pods, which may find a reason. Nothing is raised if
        the API server is silent.
        """
        self._note_ends(stations)
        self._pods.examine_all(stations)
        self._pods.await_tidy(_TIDY_S)
        self._write_disrupted(run_directory)

    def await_machines(self, run_directory: Path) -> None:
        """Wait until unexplained ends of pods are explained by lost machines, or cannot be.

        Write the pods that were lost with their machines to the journal. This takes up to 90 s.
        """
        if self._pods.has_unproven():
            self.tell(
                "a pod was lost for an unknown reason: "
                f"checking for up to {AVOID_S:g} s whether its machine was lost"
            )
        while self._pods.has_unproven():
            self._pods.examine_machines()
            time.sleep(_LOOK_S)
        self._write_disrupted(run_directory)
