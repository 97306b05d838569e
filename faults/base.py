"""What a fault is: when it strikes, what it does, and how one can see that it took effect.

A fault is a frozen description. The harness waits until the rank that it aims at stands at the trigger, lets the fault
act on that :class:`Target`, and then asks it for evidence until there is some. The act and the evidence never come from
the same source: a signal was sent, the process *is* gone.
"""

from __future__ import annotations

import time
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from chaoskit.errors import BadInput
from chaoskit.messages import Beat, Lever, LeverPulled, Ping, Release, Trigger, WorkerLost
from chaoskit.substrate.base import Cluster
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import TRIGGER_PHASES


@dataclass
class Target:
    """A rank that waits at its trigger, and what was heard of it since.

    Attributes:
        worker: name of the process that had the rank.
        lost: the agent's or coordinator's word that it is gone, once there is one.
        reports: what the worker itself read back after pulling a lever.
        beat: the newest reading of its progress board, with the time it came in.
        pongs: answers of its control thread, by number.
        exited: how its parent saw it end: ("killed", "SIGKILL"), ("exited", "status 1"); known after the run.
    """

    cluster: Cluster
    undo: UndoLog
    fault_id: str
    worker: str
    node: str
    rank: int
    step: int
    phase: str
    pid: int
    tid: int
    ticks: int | None
    injected_ns: int = 0
    lost: WorkerLost | None = None
    reports: list[LeverPulled] = field(default_factory=list)
    beat: tuple[float, Beat] | None = None
    node_heard_s: float = 0.0
    pongs: set[int] = field(default_factory=set)
    exited: tuple[str, str] | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def signal(self, signum: int) -> None:
        """Send a signal to the worker process."""
        self.cluster.signal(self.pid, signum)

    def pull(self, act: str, **options: Any) -> None:
        """Let the worker go on, after doing ``act`` to itself."""
        self.cluster.send(Release(self.worker, self.fault_id, Lever(act, options)))

    def ping(self, number: int) -> None:
        """Ask the worker's control thread for a sign of life."""
        self.cluster.send(Ping(self.worker, number))

    @property
    def seconds_since(self) -> float:
        """Time since the act."""
        return (time.monotonic_ns() - self.injected_ns) / 1e9


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Base of all faults.

    Args:
        rank: the rank to hit; it is hit in whatever process holds it then.
        at_step: the step during which it strikes, counted from 0.
        phase: ``forward``, ``backward``, ``reduce`` or ``optimizer``: the rank is stopped on entering it.
    """

    rank: int
    at_step: int
    phase: str = "forward"

    #: One sentence for the catalogue.
    effect: ClassVar[str] = ""
    #: What makes it effective, for the catalogue.
    evidence: ClassVar[str] = ""
    #: Which real incidents it stands for, for the catalogue.
    stands_for: ClassVar[str] = ""
    #: One sentence: how what it did is put back.
    undo: ClassVar[str] = "nothing is left to undo: the process is replaced, or ends with the run"
    #: Whether every rank that reaches the trigger gets the fault, and not only the first one.
    everywhere: ClassVar[bool] = False

    @classmethod
    def unavailable(cls) -> str:
        """Why this machine cannot do it; "" if it can."""
        return ""

    @property
    def kind(self) -> str:
        return type(self).__name__

    def __str__(self) -> str:
        shown = [
            f"{item.name}={getattr(self, item.name)!r}"
            for item in fields(self)
            if item.default is MISSING or getattr(self, item.name) != item.default
        ]
        return f"{self.kind}({', '.join(shown)})"

    def validate(self, *, nodes: int, steps: int | None) -> None:
        """Refuse what can never strike.

        Raises:
            BadInput: naming the field, its value and the remedy.
        """
        if not 0 <= self.rank < nodes:
            raise BadInput("rank", self.rank, f"use a rank from 0 to {nodes - 1}: the run has {nodes} nodes")
        if self.at_step < 0 or (steps is not None and self.at_step >= steps):
            last = "" if steps is None else f" to {steps - 1}"
            raise BadInput("at_step", self.at_step, f"use a step from 0{last}")
        if self.phase not in TRIGGER_PHASES:
            raise BadInput("phase", self.phase, f"use one of {', '.join(TRIGGER_PHASES)}")

    def trigger(self, fault_id: str) -> Trigger:
        """The moment at which the rank stops and waits."""
        return Trigger(fault_id, self.rank, self.at_step, self.phase)

    def inject(self, target: Target) -> None:
        """Act. What must be put back later is written to ``target.undo`` first.

        Raises:
            ProcessLookupError: if the target ended by itself meanwhile.
        """
        raise NotImplementedError

    def observe(self, target: Target) -> str | None:
        """What the target shows of the fault by now, in words; None while it shows nothing. Called again and again."""
        raise NotImplementedError

    def clean_up(self, target: Target) -> bool:
        """Put back what the run itself did not; True if nothing is left."""
        return True
