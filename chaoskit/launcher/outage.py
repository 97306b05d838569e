"""What a launch does when no node of it lives: it starts them again, so that the job goes on from what is stored."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from chaoskit.config import RunConfig
from chaoskit.errors import HarnessError
from chaoskit.experiment.injection.follow import Watch
from chaoskit.launcher.stored import Stored, look_at_stored
from chaoskit.report.summary import duration
from chaoskit.substrate.core.base import Cluster
from chaoskit.wire.messages import EndJob

#: Nodes that lived for longer than this, or than the launch waits, end one outage; their loss is another.
_APART_S = 10.0
#: Pause before nodes are started once more; doubled each time.
_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class NodesLost:
    """No node of the launch lives.

    Attributes:
        stored: the newest snapshot; None for none, and ``nothing_stored`` says why.
        trouble: why they could not be started, or what became of those that were; empty where they are started now.
        left_s: for how long the launch will try further.
    """

    nodes: tuple[str, ...]
    stored: Stored | None
    nothing_stored: str
    trouble: str
    left_s: float

    @property
    def text(self) -> str:
        """In words."""
        if self.stored is None:
            there = f"nothing is stored: {self.nothing_stored}"
        else:
            there = f"step {self.stored.step} is stored in {self.stored.path}, {duration(self.stored.age_s)} old"
        if not self.trouble:
            return f"every node was lost ({', '.join(self.nodes)}): they are started again; {there}"
        return f"no node can be started ({self.trouble}): waiting {duration(self.left_s)} at most; {there}"


class Act(Enum):
    """What follows from a look at which no node lives."""

    START = auto()
    WAIT = auto()
    GIVE_UP = auto()


class Outage:
    """Decides when nodes are started again, and for how long that is tried: a pure state machine.

    Args:
        patience_s: after the first attempt; there is always one.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._begun_s = self._seen_s = self._next_s = -math.inf
        self._pause_s = _PAUSE_S

    def observe(self, now_s: float) -> Act:
        """Take in that no node lives now."""
        if now_s > self._seen_s + max(self._patience_s, _APART_S):
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
        """Whether the outage began at this very look."""
        return now_s == self._begun_s

    def left_s(self, now_s: float) -> float:
        """How long nodes will be tried to be started further."""
        return max(0.0, self._begun_s + self._patience_s - now_s)


class NodeStarter:
    """Starts the nodes of a launch again when none of them lives, and ends the job if that comes to nothing.

    Args:
        directory: of the run.
        watch: told of what is stored, and of each attempt.
    """

    def __init__(self, config: RunConfig, directory: Path, watch: Watch) -> None:
        self._config, self._directory, self._watch = config, directory, watch
        self._outage = Outage(config.replacement_s)
        self._trouble = ""
        self._gave_up = False

    def look(self, cluster: Cluster) -> None:
        """To be called when nothing was heard of the nodes for a moment."""
        if self._gave_up or any(cluster.node(node) for node in cluster.nodes):
            return
        now_s = time.monotonic()
        match self._outage.observe(now_s):
            case Act.START:
                self._start(cluster, now_s)
            case Act.GIVE_UP:
                self._gave_up = True
                tried = f"replacement_s={self._config.replacement_s:g}"
                cluster.send(
                    EndJob(
                        False,
                        f"every node was lost, and none came back in {tried}: {self._trouble}",
                    )
                )

    def _start(self, cluster: Cluster, now_s: float) -> None:
        ended = f"those that were started ended at once; see {self._directory / 'log'}"
        trouble = "" if self._outage.is_first(now_s) else ended
        failed = {}
        for node in cluster.nodes:
            try:
                cluster.restart(node)
            except HarnessError as error:
                failed[node] = str(error)
        if len(failed) == len(cluster.nodes):
            node, why = next(iter(failed.items()))
            trouble = f"{node}: {why}"
        self._trouble = trouble or ended
        stored, nothing_stored = look_at_stored(self._config, self._directory / "journal")
        self._watch(
            NodesLost(cluster.nodes, stored, nothing_stored, trouble, self._outage.left_s(now_s))
        )
