"""Actions on a supervisor's node, and queries to its kernel, for the runner.

-> ``supervisor/remote_node.py``: the runner's side. ``limits/holds.py`` and ``network/packets.py``:
the backends.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import msgspec

from chaoskit.errors import HarnessError
from chaoskit.substrate.core.actions import CONTROLLERS, Action, Applied, Backend
from chaoskit.substrate.core.processes import HOST, Process
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.limits.holds import Holds, ProcessHolds
from chaoskit.substrate.network.packets import ReceivedPackets, Sending
from chaoskit.substrate.supervisor.messages import (
    ApplyAction,
    AskEchoes,
    AskKernel,
    AskWhyNot,
    LiftAction,
    ReleaseNode,
    SendSignal,
)
from chaoskit.substrate.undo import UndoLog

#: Kinds of actions that every supervisor can apply.
ACTIONS = frozenset(CONTROLLERS)
_QUESTIONS = (
    "find",
    "tree",
    "is_gone",
    "is_stopped",
    "threads",
    "launched_ranks",
    "exit_status",
    "tcp_troubles",
)


class NodeActions:
    """Executor of queries and actions.

    It undoes its changes when it closes. If its process is killed, the guard of its undo log does.

    Args:
        network: True to support actions on the packets that the node receives, too.
    """

    def __init__(self, *, network: bool = False) -> None:
        self._packets = ReceivedPackets() if network else None
        self._undo: UndoLog | None = None
        self._backends: dict[str, list[Backend]] = {}  # by the directory of a run
        self._roots: dict[str, Process] = {}  # by node
        self._applied: dict[int, Applied] = {}  # until they are lifted
        self._nodes: dict[int, str] = {}  # applied -> node
        self._reported: dict[int, int] = {}  # applied and in force -> count last reported

    @staticmethod
    def encode(result: Any) -> bytes:
        """Return a result as JSON for the runner."""
        return msgspec.json.encode(result)

    def carry_out(
        self,
        request: AskKernel
        | SendSignal
        | AskWhyNot
        | ApplyAction
        | LiftAction
        | AskEchoes
        | ReleaseNode,
    ) -> bytes:
        """Carry out a request and return its answer as JSON.

        Raises:
            ProcessLookupError, OSError, HarnessError: if it fails.
            KeyError: if it concerns an action that was never applied, or was lifted.
        """
        match request:
            case AskKernel(_, question, pid, ticks):
                return self.encode(self._query(question, Process(pid, ticks, "")))
            case SendSignal(_, pid, ticks, signum):
                Process(pid, ticks, "the process").signal(signum)
                return self.encode(None)
            case AskWhyNot(_, kind):
                return self.encode(self._why_not(kind))
            case ApplyAction():
                return self.encode(self._apply(request))
            case LiftAction(_, applied):
                return self.encode(self._lift(applied))
            case AskEchoes(_, applied):
                sending = self._applied[applied]
                assert isinstance(sending, Sending)
                return self.encode(sending.results_ms())
            case ReleaseNode(_, node):
                self._release(node)
                return self.encode(None)

    def _query(self, question: str, process: Process) -> Any:
        """Return the kernel's answer about a process, with processes as tuples.

        Raises HarnessError if there is no such question.
        """
        if question not in _QUESTIONS:
            raise HarnessError(
                f"{question!r} is not a query about processes: install the same version of "
                "chaoskit for runner and supervisor"
            )
        answer = getattr(HOST, question)(process.pid if question == "find" else process)
        if isinstance(answer, Process):
            return _to_fields(answer)
        if question == "tree":
            return [_to_fields(process) for process in answer]
        if question == "launched_ranks":
            return [(_to_fields(process), rank) for process, rank in answer.items()]
        return answer

    def _why_not(self, kind: str) -> str:
        """Return why an action of this kind cannot be applied here; "" if it can."""
        action = _resolve_kind(kind)
        if self._packets is not None and action in self._packets.actions:
            return self._packets.why_not(action)
        return (
            capabilities.why_not(action)
            if action in ACTIONS
            else f"no supervisor supports {action.__name__}"
        )

    def _apply(self, request: ApplyAction) -> int:
        """Apply an action and return its number, which is that of the request."""
        action = msgspec.json.decode(request.action, type=_resolve_kind(request.kind))
        self._roots[request.node] = Process(*request.root, "")
        number = request.number
        self._applied[number] = self._backend(type(action), request.run_directory).apply(
            request.node, action
        )
        self._nodes[number], self._reported[number] = request.node, 0
        return number

    def _backend(self, kind: type[Action], run_directory: str) -> Backend:
        """Return the backend of a kind of actions. Raises HarnessError if there is none."""
        if self._packets is not None and kind in self._packets.actions:
            return self._packets
        if kind not in ACTIONS:
            raise HarnessError(f"no supervisor supports {kind.__name__}")
        return next(
            backend for backend in self._backends_of_run(run_directory) if kind in backend.actions
        )

    def _lift(self, number: int) -> tuple[bool, int]:
        """End an action. Return whether nothing of it is left, and its last count."""
        applied = self._applied.pop(number)
        self._reported.pop(number, None)
        return applied.lift(), applied.shown()

    @property
    def has_actions_in_force(self) -> bool:
        """True if an action is in force, so that counts may change."""
        return bool(self._reported)

    def changed_counts(self) -> Iterator[tuple[int, int]]:
        """Yield the counts that have changed since they were last reported."""
        for number, reported in self._reported.items():
            count = reported
            with contextlib.suppress(OSError, HarnessError):  # its process may be gone
                count = self._applied[number].shown()
            if count != reported:
                self._reported[number] = count
                yield number, count

    def release_programs(self, programs: Iterable[tuple[int, int | None]]) -> None:
        """Lift actions that keep processes from ending, on nodes with a root in ``programs``."""
        names = set(programs)
        for node in [node for node, root in self._roots.items() if (root.pid, root.ticks) in names]:
            self._release(node)

    def release_all(self) -> None:
        """Lift the actions that keep processes from ending, on all nodes."""
        for node in self._roots:
            self._release(node)

    def _release(self, node: str) -> None:
        """Lift the actions that keep processes of a node from ending."""
        for number in [number for number in self._reported if self._nodes[number] == node]:
            del self._reported[number]  # its count can still be requested
        for backend in itertools.chain.from_iterable(self._backends.values()):
            backend.release(node)

    def guards(self) -> set[int]:
        """Return the pid of the undo log's guard, a child of this process, or the empty set."""
        return (
            {self._undo.guard_pid}
            if self._undo is not None and self._undo.guard_pid is not None
            else set()
        )

    def forget(self) -> None:
        """Close the undo log in a forked child, without undoing anything."""
        if self._undo is not None:
            self._undo.forget()

    def close(self) -> None:
        """End all actions in force, and undo all changes of this machine."""
        self._reported.clear()
        for backend in itertools.chain.from_iterable(self._backends.values()):
            backend.close()
        if self._packets is not None:
            self._packets.close()
        if self._undo is not None:
            self._undo.close()

    def _backends_of_run(self, run_directory: str) -> list[Backend]:
        """Return the backends of a run, which are created for its first action."""
        self._undo = self._undo or UndoLog()
        if run_directory not in self._backends:
            holds = Holds(self._undo, self._processes, Path(run_directory))
            self._backends[run_directory] = [holds, ProcessHolds(self._undo)]
        return self._backends[run_directory]

    def _processes(self, node: str) -> list[Process]:
        return HOST.tree(self._roots[node])


def _resolve_kind(name: str) -> type[Action]:
    """Return the class named ``module:Class``. Raises HarnessError if it cannot be imported."""
    module, _, attribute = name.partition(":")
    try:
        return cast("type[Action]", getattr(import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise HarnessError(f"the supervisor cannot import the action {name}: {error}") from error


def _to_fields(process: Process) -> tuple[int, int | None, str]:
    return process.pid, process.ticks, process.name
