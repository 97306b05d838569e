"""Actions that can be applied to a node, as data, and the backends that carry them out.

A fault names an action and never a backend.

-> ``cluster/nodes.py``: which backend carries out an action. ``limits/holds.py``: freezes and caps.
``disk/disks.py``: troubles of a disk. ``core/traffic.py``: actions on the traffic between nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from chaoskit.substrate.core.disk import Trouble


class Action(msgspec.Struct, frozen=True, tag=True):
    """Base of all actions that a cluster can apply to one of its nodes until they are lifted.

    After "Shown", each kind of action names what :meth:`Applied.shown` counts.
    """


class Freeze(Action, frozen=True):
    """Stop every process of the node, and those that they start.

    Shown: 1 while all of them are stopped.
    """


class CapCpu(Action, frozen=True):
    """Limit all processes of the node to ``cores`` together.

    Shown: periods in which the kernel throttled them.
    """

    cores: float


class CapMemory(Action, frozen=True):
    """Limit the node to ``headroom_bytes`` beyond what it uses now.

    Shown: processes that the kernel killed for it.
    """

    headroom_bytes: int


class CapPids(Action, frozen=True):
    """Limit the node to ``further`` more processes and threads than it has now.

    Shown: forks that the kernel refused.
    """

    further: int


class CapWrites(Action, frozen=True):
    """Limit the bytes that the node writes per second to the disk of the run's directory.

    Shown: quarters of a second in which the node used up its allowance.
    """

    bytes_per_s: float


class CapProcessCpu(Action, frozen=True):
    """Limit one process to a share of a CPU. Shown: periods in which the kernel throttled it.

    Attributes:
        pid: pid of the process.
        ticks: its start time in clock ticks; None if it was gone before.
        share: number of CPUs, such as 0.5.
    """

    pid: int
    ticks: int | None
    share: float


class CapProcessMemory(Action, frozen=True):
    """Limit one process to ``headroom_bytes`` beyond what it uses now.

    Shown: how often the kernel killed it for that. ``pid`` and ``ticks`` are as in
    :class:`CapProcessCpu`.
    """

    pid: int
    ticks: int | None
    headroom_bytes: int


class BreakDisk(Action, frozen=True):
    """Apply a trouble to a directory, as the node sees it.

    Shown: operations that were refused or delayed. Files that the node has open already are not
    affected.
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
#: Controllers of all kinds of actions, those on one process included.
CONTROLLERS: dict[type[Action], str] = NODE_CONTROLLERS | {
    CapProcessCpu: "cpu",
    CapProcessMemory: "memory",
}


class Applied(Protocol):
    """An action that was applied to a node and can be lifted."""

    def shown(self) -> int:
        """Return how often the action has taken effect so far.

        The kernel or the process that carries it out counts. The last count stays available after
        :meth:`lift`; for a state such as that of :class:`Freeze` it is 0 then. Raises HarnessError
        if the action was not lifted and its count cannot be read any more, as after the run.
        """

    def lift(self) -> bool:
        """End the action, and return True if nothing is left to undo.

        Otherwise False is returned, and the undo entries stay for the guard or the next sweep. A
        second call returns the same. Raises HarnessError if the process that carries the action out
        is gone.
        """


class Backend(Protocol):
    """Component that carries out some kinds of actions on the nodes of one run.

    Attributes:
        actions: the kinds of actions.
    """

    @property
    def actions(self) -> frozenset[type[Action]]: ...

    def apply(self, node: str, action: Action) -> Applied:
        """Apply an action to a node, and return the handle that counts its effects and lifts it.

        Its undo entry is written first.

        Raises:
            ProcessLookupError: if the node is gone.
            HarnessError: if the action cannot be carried out.
        """

    def release(self, node: str | None = None) -> None:
        """Lift the actions that keep processes of a node, or of all nodes, from ending."""

    def close(self) -> None:
        """Release all resources. It is called when the nodes are gone.

        Actions that are still in force end, here or with the network of the run.
        """


class CountedAction:
    """Applied action with effects that another process counts.

    :meth:`lift` leaves nothing to undo. :meth:`shown` returns the last count after it.

    Args:
        count: asks that process for the current count; raises HarnessError if it does not answer.
        lift: ends the action and returns the last count; raises HarnessError likewise.
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
