"""Restart of a launch whose nodes are all lost, so that the job goes on from its stored state.

-> ``launcher/stored.py``: which state that is. ``coordinator/handlers/on_node.py``: the loss of
some nodes. ``experiment/injection/job_follower.py`` calls it whenever no message comes.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from chaoskit.config import RunConfig
from chaoskit.errors import HarnessError
from chaoskit.experiment.injection.job_follower import Watch
from chaoskit.launcher.stored import Stored, look_at_stored
from chaoskit.report.summary import duration
from chaoskit.substrate.core.base import Cluster
from chaoskit.wire.messages import EndJob

#: A loss of nodes that lived longer than this, or than the launch waits, is a new outage.
_SEPARATE_OUTAGE_S = 10.0
#: The pause before the next restart in seconds; it is doubled each time.
_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class NodesLost:
    """A report that no node of the launch is alive.

    Attributes:
        stored: the newest snapshot; None if there is none.
        nothing_stored: why there is no snapshot.
        trouble: why nodes could not be started, or ended again; empty if they are being started
            now.
        left_s: how long the launch will go on trying, in seconds.
    """

    nodes: tuple[str, ...]
    stored: Stored | None
    nothing_stored: str
    trouble: str
    left_s: float

    @property
    def text(self) -> str:
        """The report as a sentence."""
        if self.stored is None:
            stored_text = f"nothing is stored: {self.nothing_stored}"
        else:
            age = duration(self.stored.age_s)
            stored_text = f"step {self.stored.step} is stored in {self.stored.path}, {age} old"
        if not self.trouble:
            return f"every node was lost ({', '.join(self.nodes)}): they are started again; {stored_text}"
        return f"no node can be started ({self.trouble}): waiting {duration(self.left_s)} at most; {stored_text}"


class Act(Enum):
    """The consequence of observing that no node is alive."""

    START = auto()  # start all nodes again now
    WAIT = auto()  # the pause after the last start is not over
    GIVE_UP = auto()  # the patience is over: end the job


class Outage:
    """A state machine that decides when nodes are restarted, and for how long that is tried. Pure.

    Args:
        patience_s: how long attempts go on after the first one, in seconds. There is always a first
            one. Nodes that lived longer than this, or than 10 s, begin a new outage when they are
            lost.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._begun_s = self._seen_s = self._next_s = -math.inf
        self._pause_s = _PAUSE_S

    def observe(self, now_s: float) -> Act:
        """Record that no node is alive now, and return what to do.

        Pauses between two starts are doubled until the patience is over.
        """
        if now_s > self._seen_s + max(self._patience_s, _SEPARATE_OUTAGE_S):
            self._begun_s, self._pause_s = now_s, _PAUSE_S
            self._next_s = now_s
        elif now_s >= self._begun_s + self._patience_s:
            return Act.GIVE_UP
        self._seen_s = now_s
        if now_s < self._next_s:
            return Act.WAIT
        self._next_s, self._pause_s = now_s + self._pause_s, 2 * self._pause_s
        return Act.START

    def is_first(self, now_s: float) -> bool:
        """Return True if the outage began at this observation."""
        return now_s == self._begun_s

    def left_s(self, now_s: float) -> float:
        """Return how long attempts will go on, in seconds."""
        return max(0.0, self._begun_s + self._patience_s - now_s)


class NodeStarter:
    """A restarter of all nodes when none is alive. It ends the job if the attempts fail.

    Args:
        directory: the directory of the run.
        watch: receives a report about each attempt, with the stored state.
    """

    def __init__(self, config: RunConfig, directory: Path, watch: Watch) -> None:
        self._config, self._directory, self._watch = config, directory, watch
        self._outage = Outage(config.replacement_s)
        self._trouble = ""
        self._gave_up = False

    def look(self, cluster: Cluster) -> None:
        """Restart all nodes if none is alive, or end the job if that was tried for long enough.

        It is called when no message came for a while.
        """
        if self._gave_up or any(cluster.node(node) for node in cluster.nodes):
            return
        now_s = time.monotonic()
        match self._outage.observe(now_s):
            case Act.START:
                self._start(cluster, now_s)
            case Act.GIVE_UP:
                self._gave_up = True
                patience_text = f"replacement_s={self._config.replacement_s:g}"
                cluster.send(
                    EndJob(
                        False,
                        f"every node was lost, and none came back in {patience_text}: {self._trouble}",
                    )
                )

    def _start(self, cluster: Cluster, now_s: float) -> None:
        """Restart all nodes, and report the attempt.

        A node that cannot be started raises nothing.
        """
        ended_text = f"those that were started ended at once; see {self._directory / 'log'}"
        trouble = "" if self._outage.is_first(now_s) else ended_text
        failures = {}
        for node in cluster.nodes:
            try:
                cluster.restart(node)
            except HarnessError as error:
                failures[node] = str(error)
        if len(failures) == len(cluster.nodes):
            node, reason = next(iter(failures.items()))
            trouble = f"{node}: {reason}"
        self._trouble = trouble or ended_text
        stored, nothing_stored = look_at_stored(self._config, self._directory / "journal")
        self._watch(
            NodesLost(cluster.nodes, stored, nothing_stored, trouble, self._outage.left_s(now_s))
        )
