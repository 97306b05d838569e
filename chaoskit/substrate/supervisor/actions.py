"""What a supervisor does to the processes of its node, and sees of them, for a runner that cannot itself."""

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

#: Kinds of actions that every supervisor does.
ACTIONS = frozenset(CONTROLLERS)
_QUESTIONS = ("find", "tree", "is_gone", "is_stopped", "threads", "tcp_troubles")


class Acts:
    """Answers questions and carries out actions. What it breaks is put back when it closes; its own guard sees to it
    if it is killed.

    Args:
        network: whether it changes the network of its node, instead of what runs there.
    """

    def __init__(self, *, network: bool = False) -> None:
        self._packets = ReceivedPackets() if network else None
        self._undo: UndoLog | None = None
        self._backends: dict[str, list[Backend]] = {}  # by the directory of a run
        self._roots: dict[str, Process] = {}  # by node
        self._applied: dict[int, Applied] = {}  # until they are lifted
        self._nodes: dict[int, str] = {}  # applied -> where
        self._told: dict[int, int] = {}  # applied and in force -> count that the runner knows

    @staticmethod
    def encode(value: Any) -> bytes:
        """As the runner reads it."""
        return msgspec.json.encode(value)

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
        """Gives the answer. Raises ProcessLookupError, OSError, HarnessError."""
        match request:
            case AskKernel(_, question, pid, ticks):
                return self.encode(self._look(question, Process(pid, ticks, "")))
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

    def _look(self, question: str, process: Process) -> Any:
        if question not in _QUESTIONS:
            raise HarnessError(
                f"{question!r} is no question about processes: runner and supervisor differ"
            )
        found = getattr(HOST, question)(process.pid if question == "find" else process)
        if isinstance(found, Process):
            return _described(found)
        if question == "tree":
            return [_described(one) for one in found]
        return found

    def _why_not(self, kind: str) -> str:
        action = _kind(kind)
        if self._packets is not None and action in self._packets.actions:
            return self._packets.why_not(action)
        return (
            capabilities.why_not(action)
            if action in ACTIONS
            else f"no supervisor does {action.__name__}"
        )

    def _apply(self, request: ApplyAction) -> int:
        action = msgspec.json.decode(request.action, type=_kind(request.kind))
        self._roots[request.node] = Process(*request.root, "")
        number = request.number
        self._applied[number] = self._backend(type(action), request.run_directory).apply(
            request.node, action
        )
        self._nodes[number], self._told[number] = request.node, 0
        return number

    def _backend(self, kind: type[Action], run_directory: str) -> Backend:
        if self._packets is not None and kind in self._packets.actions:
            return self._packets
        if kind not in ACTIONS:
            raise HarnessError(f"no supervisor does {kind.__name__}")
        return next(backend for backend in self._of_run(run_directory) if kind in backend.actions)

    def _lift(self, number: int) -> tuple[bool, int]:
        """Whether nothing of it is left, and the last count."""
        applied = self._applied.pop(number)
        self._told.pop(number, None)
        return applied.lift(), applied.shown()

    @property
    def in_force(self) -> bool:
        """Whether something is to be counted."""
        return bool(self._told)

    def counted(self) -> Iterator[tuple[int, int]]:
        """The counts that have changed since they were last told."""
        for number, told in self._told.items():
            count = told
            with contextlib.suppress(OSError, HarnessError):  # what it looks at may be gone
                count = self._applied[number].shown()
            if count != told:
                self._told[number] = count
                yield number, count

    def release_programs(self, programs: Iterable[tuple[int, int | None]]) -> None:
        """Lift what keeps processes of nodes from ending of which these are the first ones."""
        names = set(programs)
        for node in [node for node, root in self._roots.items() if (root.pid, root.ticks) in names]:
            self._release(node)

    def release_all(self) -> None:
        """Lift what keeps processes from ending."""
        for node in self._roots:
            self._release(node)

    def _release(self, node: str) -> None:
        for number in [number for number in self._told if self._nodes[number] == node]:
            del self._told[number]  # what it has met is still to be asked
        for backend in itertools.chain.from_iterable(self._backends.values()):
            backend.release(node)

    def guards(self) -> set[int]:
        """Pid of the guard of what is in force, which is a child of this process."""
        return (
            {self._undo.guard_pid}
            if self._undo is not None and self._undo.guard_pid is not None
            else set()
        )

    def forget(self) -> None:
        """In a child, which undoes nothing."""
        if self._undo is not None:
            self._undo.forget()

    def close(self) -> None:
        """Put everything back."""
        self._told.clear()
        for backend in itertools.chain.from_iterable(self._backends.values()):
            backend.close()
        if self._packets is not None:
            self._packets.close()
        if self._undo is not None:
            self._undo.close()

    def _of_run(self, run_directory: str) -> list[Backend]:
        self._undo = self._undo or UndoLog()
        if run_directory not in self._backends:
            holds = Holds(self._undo, self._processes, Path(run_directory))
            self._backends[run_directory] = [holds, ProcessHolds(self._undo)]
        return self._backends[run_directory]

    def _processes(self, node: str) -> list[Process]:
        return HOST.tree(self._roots[node])


def _kind(name: str) -> type[Action]:
    module, _, attribute = name.partition(":")
    try:
        return cast("type[Action]", getattr(import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise HarnessError(f"the supervisor knows no action {name}: {error}") from error


def _described(process: Process) -> tuple[int, int | None, str]:
    return process.pid, process.ticks, process.name
