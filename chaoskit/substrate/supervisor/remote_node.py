"""Kernel and backends of nodes that are reached only through their supervisors.

-> ``supervisor/actions.py``: the supervisor's side. ``core/processes.py`` and ``core/actions.py``:
the interfaces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from chaoskit.errors import HarnessError, NodeUnreachable
from chaoskit.process.linux import TcpTroubles
from chaoskit.substrate.core.actions import CONTROLLERS, Action, Applied
from chaoskit.substrate.core.launched_ranks import LaunchedRank
from chaoskit.substrate.core.processes import Process, Thread
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.supervisor.messages import (
    ApplyAction,
    AskKernel,
    AskWhyNot,
    LiftAction,
    ReleaseNode,
    SendSignal,
)
from chaoskit.substrate.undo import UndoEntry

Answer = TypeVar("Answer")
_ProcessFields = tuple[int, int | None, str]


class KernelAway:
    """The kernel of a node, queried through its supervisor.

    Queries raise HarnessError if the supervisor does not answer, as its processes may still run.
    There are two exceptions. The supervisor may have reported that nothing runs there any more, or
    the platform may confirm that the node is over. The processes then count as gone.

    Args:
        node_is_over: asks the platform whether the node is over, when its supervisor is gone.

    Attributes:
        is_doubted: True if the supervisor may be gone though its stream is open. It is not queried
            then, as an answer may take long.
    """

    def __init__(self, node_is_over: Callable[[], bool] = lambda: False) -> None:
        self.is_doubted = False
        self._link: SupervisorLink | None = None
        self._is_over, self._node_is_over = False, node_is_over

    def reach_by(self, link: SupervisorLink) -> None:
        """Use this supervisor for further queries."""
        self._link, self._is_over = link, False

    def end(self) -> None:
        """Note that the platform has confirmed the end of the node: none of its processes lives."""
        self._is_over = True

    def _query(
        self, question: str, pid: int, ticks: int | None, answer_type: Any, if_gone: Answer
    ) -> Answer:
        """Return the supervisor's answer about a process, or ``if_gone`` if the node is over.

        Raises NodeUnreachable if the supervisor is gone or doubted, and its processes may still run.
        """
        if not self._is_over:
            assert self._link is not None
            try:
                self._require_undoubted()
                answer: Answer = self._link.request(
                    AskKernel, question, pid, ticks, answer_type=answer_type
                )
                return answer
            except NodeUnreachable:
                if not (self._link.has_left or self._node_is_over()):
                    raise
                self.end()
        return if_gone

    def _require_undoubted(self) -> None:
        """Raise NodeUnreachable if the supervisor is doubted."""
        assert self._link is not None
        if self.is_doubted and self._link.is_open():
            raise NodeUnreachable(f"{self._link.name} may be gone")

    def find(self, pid: int) -> Process:
        if_gone: _ProcessFields = (pid, None, "")
        return Process(*self._query("find", pid, None, _ProcessFields, if_gone), self)

    def tree(self, root: Process) -> list[Process]:
        if_gone: list[_ProcessFields] = []
        processes = self._query("tree", root.pid, root.ticks, list[_ProcessFields], if_gone)
        return [Process(*fields, self) for fields in processes]

    def signal(self, process: Process, signum: int) -> None:
        if not self._is_over:
            assert self._link is not None
            try:
                self._require_undoubted()
                self._link.request(SendSignal, process.pid, process.ticks, signum, answer_type=None)
                return
            except NodeUnreachable:
                if not (self._link.has_left or self._node_is_over()):
                    raise
                self.end()
        raise ProcessLookupError(f"{process.name} is gone with its node")

    def is_gone(self, process: Process) -> bool:
        return self._query("is_gone", process.pid, process.ticks, bool, True)

    def is_stopped(self, process: Process) -> bool:
        return self._query("is_stopped", process.pid, process.ticks, bool, False)

    def threads(self, process: Process) -> dict[int, Thread]:
        return self._query("threads", process.pid, process.ticks, dict[int, Thread], {})

    def launched_ranks(self, root: Process) -> dict[Process, LaunchedRank]:
        if_gone: list[tuple[_ProcessFields, LaunchedRank]] = []
        ranks = self._query(
            "launched_ranks",
            root.pid,
            root.ticks,
            list[tuple[_ProcessFields, LaunchedRank]],
            if_gone,
        )
        return {Process(*fields, self): rank for fields, rank in ranks}

    def exit_status(self, process: Process) -> int | None:
        return self._query("exit_status", process.pid, process.ticks, int | None, None)

    def tcp_troubles(self, process: Process) -> TcpTroubles:
        return self._query("tcp_troubles", process.pid, process.ticks, TcpTroubles, TcpTroubles())

    def undo_stop(self, process: Process) -> Sequence[UndoEntry]:
        return ()  # its supervisor ends everything with the runner


class BackendAway:
    """Backend for actions that supervisors carry out.

    Args:
        actions: the kinds of actions that they can apply.
        link: returns the link to the supervisor of a node.
        root: returns the process whose descendants are all processes of a node.
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
        self._nodes = set[str]()  # nodes with actions

    def apply(self, node: str, action: Action) -> Applied:
        link, root = self._link(node), self._root(node)
        self._nodes.add(node)
        return apply_away(link, node, action, root, self._run_directory)

    def release(self, node: str | None = None) -> None:
        for name in self._nodes if node is None else {node} & self._nodes:
            with contextlib.suppress(NodeUnreachable):  # it lifts all of them when its stream ends
                self._link(name).request(ReleaseNode, name, answer_type=None)

    def close(self) -> None:
        """Do nothing: supervisors are closed with their links."""


class AppliedAway:
    """Action in force on a node, which its supervisor counts and lifts.

    Its methods raise HarnessError if the supervisor is gone before the action was lifted.

    Args:
        number: number of the action at its supervisor.
    """

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
                LiftAction, self.number, answer_type=tuple[bool, int]
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
    """Apply an action to a node through its supervisor, and return the handle that lifts it.

    Raises ProcessLookupError if the node is gone, and HarnessError if the action fails.

    Args:
        root: the process whose descendants are all processes of the node, for actions on processes.
        run_directory: directory of the run.
    """
    root_key = (root.pid, root.ticks) if root is not None else (0, None)
    encoded = kind_name(type(action)), msgspec.json.encode(action)
    return AppliedAway(
        link,
        link.request(ApplyAction, node, root_key, str(run_directory), *encoded, answer_type=int),
    )


def why_not(link: SupervisorLink, action: type[Action]) -> str:
    """Return why a supervisor cannot apply an action of this kind; "" if it can.

    Raises HarnessError if the supervisor does not answer.
    """
    reason: str = link.request(AskWhyNot, kind_name(action), answer_type=str)
    return reason


def supported_actions(link: SupervisorLink) -> frozenset[type[Action]]:
    """Return the actions of control groups that a supervisor can apply.

    Raises HarnessError if the supervisor does not answer.
    """
    return frozenset(action for action in CONTROLLERS if not why_not(link, action))


def kind_name(action: type[Action]) -> str:
    """Return the name of a kind of actions in messages: ``module:Class``."""
    return f"{action.__module__}:{action.__qualname__}"
