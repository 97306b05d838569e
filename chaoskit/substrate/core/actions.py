"""What can be done to a node, as data, and the backends that carry it out: a fault names an action, and no backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from chaoskit.substrate.core.disk import Trouble


class Action(msgspec.Struct, frozen=True, tag=True):
    """Base of everything that a cluster can be asked to do to one of its nodes until it is lifted."""


class Freeze(Action, frozen=True):
    """Have every process of the node stand still, and those that they start. Shown: 1 while all of them do."""


class CapCpu(Action, frozen=True):
    """Leave all processes of the node so many cores together. Shown: periods in which the kernel held them back."""

    cores: float


class CapMemory(Action, frozen=True):
    """Leave the node so many bytes beyond what it uses now. Shown: processes of it that the kernel killed for them."""

    headroom_bytes: int


class CapPids(Action, frozen=True):
    """Leave the node so many processes and threads beyond those there are. Shown: how many the kernel refused it."""

    further: int


class CapWrites(Action, frozen=True):
    """Leave the node so many bytes a second that it writes to the disk of the run's directory.

    Shown: quarters of a second in which it wrote all that it may.
    """

    bytes_per_s: float


class CapProcessCpu(Action, frozen=True):
    """Leave one process this share of a CPU. Shown: periods in which the kernel held it back."""

    pid: int
    ticks: int | None
    share: float


class CapProcessMemory(Action, frozen=True):
    """Leave one process so many bytes beyond what it uses now. Shown: how often the kernel killed it for them."""

    pid: int
    ticks: int | None
    headroom_bytes: int


class BreakDisk(Action, frozen=True):
    """Let something be wrong with a directory, as the node sees it. Shown: operations that were refused or held up.

    Files that the node has open already are not struck.
    """

    directory: Path
    trouble: Trouble


#: The controller of the kernel that carries out each kind of action on a node.
NODE_CONTROLLERS: dict[type[Action], str] = {
    Freeze: "freezer",
    CapCpu: "cpu",
    CapMemory: "memory",
    CapPids: "pids",
    CapWrites: "io",
}
#: The same, with those on one process.
CONTROLLERS: dict[type[Action], str] = NODE_CONTROLLERS | {
    CapProcessCpu: "cpu",
    CapProcessMemory: "memory",
}


class Applied(Protocol):
    """An action in force."""

    def shown(self) -> int:
        """Return how often it has met something so far, as the kernel or the process that carries it out counts it.

        What was counted stays known after :meth:`lift`. Raises HarnessError when the run is over.
        """

    def lift(self) -> bool:
        """End it; True if nothing is left to undo. Ending it again changes nothing."""


class Backend(Protocol):
    """Carries out some kinds of actions on the nodes of one run.

    Attributes:
        actions: the kinds.
    """

    @property
    def actions(self) -> frozenset[type[Action]]: ...

    def apply(self, node: str, action: Action) -> Applied:
        """Do it. What undoes it is written ahead.

        Raises:
            ProcessLookupError: where the node is gone. HarnessError: where it cannot be done.
        """

    def release(self, node: str | None = None) -> None:
        """Lift what keeps processes of a node, or of all nodes, from ending."""

    def close(self) -> None:
        """Let go of everything. To be called when the nodes are gone."""


class Counted:
    """An action in force that some other process counts for us.

    Args:
        count: asks it. lift: ends the action, and gives the last count.
    """

    def __init__(self, count: Callable[[], int], lift: Callable[[], int]) -> None:
        self._count, self._lift = count, lift
        self._last: int | None = None

    def shown(self) -> int:
        return self._count() if self._last is None else self._last

    def lift(self) -> bool:
        if self._last is None:
            self._last = self._lift()
        return True
