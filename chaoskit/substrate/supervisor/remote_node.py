"""The kernel and the backends of nodes that only the stream to their supervisor reaches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from chaoskit.errors import HarnessError
from chaoskit.process.linux import TcpTroubles
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.core.processes import Process, Thread
from chaoskit.substrate.supervisor.client import SupervisorGone, SupervisorLink
from chaoskit.substrate.supervisor.messages import (
    ApplyAction,
    AskKernel,
    AskWhyNot,
    LiftAction,
    ReleaseNode,
    SendSignal,
)
from chaoskit.substrate.undo import UndoEntry

Value = TypeVar("Value")
_Described = tuple[int, int | None, str]


class KernelAway:
    """The kernel of a node, as its supervisor sees it.

    That no supervisor answers is no word of its processes: it is an error, unless it has said that it leaves, or
    whatever keeps the node says that it is over.

    Args:
        node_is_over: asks what keeps the node, when its supervisor is gone.

    Attributes:
        is_doubted: whether its supervisor may be gone though its stream is open: then it is asked nothing, as an answer
            may not come for long.
    """

    def __init__(self, node_is_over: Callable[[], bool] = lambda: False) -> None:
        self.is_doubted = False
        self._link: SupervisorLink | None = None
        self._is_over, self._node_is_over = False, node_is_over

    def reach_by(self, link: SupervisorLink) -> None:
        """Ask this supervisor from now on."""
        self._link, self._is_over = link, False

    def end(self) -> None:
        """The node is over, by the word of what keeps it, such as the end of its container: nothing of it lives."""
        self._is_over = True

    def _look(self, question: str, pid: int, ticks: int | None, value: Any, gone: Value) -> Value:
        if not self._is_over:
            assert self._link is not None
            try:
                self._require_undoubted()
                found: Value = self._link.request(AskKernel, question, pid, ticks, value=value)
                return found
            except SupervisorGone:
                if not (self._link.has_left or self._node_is_over()):
                    raise
                self.end()
        return gone

    def _require_undoubted(self) -> None:
        assert self._link is not None
        if self.is_doubted and self._link.is_open():
            raise SupervisorGone(f"{self._link.name} may be gone")

    def find(self, pid: int) -> Process:
        nothing: _Described = (pid, None, "")
        return Process(*self._look("find", pid, None, _Described, nothing), self)

    def tree(self, root: Process) -> list[Process]:
        nothing: list[_Described] = []
        found = self._look("tree", root.pid, root.ticks, list[_Described], nothing)
        return [Process(*one, self) for one in found]

    def signal(self, process: Process, signum: int) -> None:
        if not self._is_over:
            assert self._link is not None
            try:
                self._require_undoubted()
                self._link.request(SendSignal, process.pid, process.ticks, signum, value=None)
                return
            except SupervisorGone:
                if not (self._link.has_left or self._node_is_over()):
                    raise
                self.end()
        raise ProcessLookupError(f"{process.name} is gone with its node")

    def is_gone(self, process: Process) -> bool:
        return self._look("is_gone", process.pid, process.ticks, bool, True)

    def is_stopped(self, process: Process) -> bool:
        return self._look("is_stopped", process.pid, process.ticks, bool, False)

    def threads(self, process: Process) -> dict[int, Thread]:
        return self._look("threads", process.pid, process.ticks, dict[int, Thread], {})

    def tcp_troubles(self, process: Process) -> TcpTroubles:
        return self._look("tcp_troubles", process.pid, process.ticks, TcpTroubles, TcpTroubles())

    def undo_stop(self, process: Process) -> Sequence[UndoEntry]:
        return ()  # its supervisor ends everything when the runner is gone


class BackendAway:
    """The backend of actions that supervisors carry out.

    Args:
        actions: those that they can.
        link: of a node. root: the process below which a node runs.
    """

    def __init__(
        self,
        actions: frozenset[type[Action]],
        link: Callable[[str], SupervisorLink],
        root: Callable[[str], Process],
        run_directory: Path,
    ) -> None:
        self.actions = actions
        self._link, self._root, self._run_directory = link, root, run_directory
        self._nodes = set[str]()  # on which something was done

    def apply(self, node: str, action: Action) -> Applied:
        link, root = self._link(node), self._root(node)
        self._nodes.add(node)
        return apply_away(link, node, action, root, self._run_directory)

    def release(self, node: str | None = None) -> None:
        for name in self._nodes if node is None else {node} & self._nodes:
            with contextlib.suppress(SupervisorGone):  # it lifts everything when its stream ends
                self._link(name).request(ReleaseNode, name, value=None)

    def close(self) -> None:
        """Supervisors are closed with their links."""


class AppliedAway:
    """An action in force on a node. ``number``: by which its supervisor knows it."""

    def __init__(self, link: SupervisorLink, number: int) -> None:
        self._link, self.number = link, number
        self._is_clean: bool | None = None

    def shown(self) -> int:
        if not self._link.is_open() and self._is_clean is None:
            raise HarnessError(f"{self._link.name} is gone")
        return self._link.shown.get(self.number, 0)

    def lift(self) -> bool:
        if self._is_clean is None:
            self._is_clean, last = self._link.request(
                LiftAction, self.number, value=tuple[bool, int]
            )
            self._link.shown[self.number] = last
        return self._is_clean


def apply_away(
    link: SupervisorLink,
    node: str,
    action: Action,
    root: Process | None = None,
    run_directory: Path = Path(),
) -> AppliedAway:
    """Have a supervisor do something to a node. Raises HarnessError if it cannot.

    Args:
        root: the first process of the node, for what is done to processes. run_directory: of the run that it is of.
    """
    first = (root.pid, root.ticks) if root is not None else (0, None)
    told = kind_name(type(action)), msgspec.json.encode(action)
    return AppliedAway(
        link, link.request(ApplyAction, node, first, str(run_directory), *told, value=int)
    )


def why_not(link: SupervisorLink, action: type[Action]) -> str:
    """Why a supervisor cannot do an action of this kind; "" if it can."""
    reason: str = link.request(AskWhyNot, kind_name(action), value=str)
    return reason


def kind_name(action: type[Action]) -> str:
    """As it travels: ``module:Class``."""
    return f"{action.__module__}:{action.__qualname__}"
