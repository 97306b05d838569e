"""The launcher's end of a node's disk: the process that stands before a directory of it (``disk/process.py``)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from chaoskit.errors import HarnessError
from chaoskit.substrate.core.actions import Action, Applied, BreakDisk, Counted
from chaoskit.substrate.core.disk import Trouble
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.helper_process import Servant
from chaoskit.substrate.limits.capabilities import FUSE_LIBRARY
from chaoskit.substrate.undo import UndoLog


class ImposeTrouble(msgspec.Struct, frozen=True, tag=True):
    """Answered by the number of the trouble."""

    trouble: Trouble


class LiftTrouble(msgspec.Struct, frozen=True, tag=True):
    """Answered by how many operations have met it."""

    number: int


class CountTrouble(msgspec.Struct, frozen=True, tag=True):
    """Answered by how many operations have met it so far."""

    number: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """What became of a request. ``error``: why it failed, or ""."""

    number: int = 0
    met: int = 0
    error: str = ""


Request = ImposeTrouble | LiftTrouble | CountTrouble

_answers = msgspec.json.Decoder(Done)


class Disk(Servant[Done]):
    """Makes a directory of a node one that can be troubled, for all files that the node opens from then on.

    Args:
        enter: the command that goes before another one to run it in the mount namespace of the node.
        undo: gets the entry that ends the process if the launcher cannot.

    Raises:
        HarnessError: if the directory cannot be mounted over.
    """

    def __init__(self, directory: Path, enter: Sequence[str], undo: UndoLog) -> None:
        # libfuse 2, which mfusepy takes where it finds both, mounts over no directory that has files
        command = [*enter, "env", f"FUSE_LIBRARY_NAME={FUSE_LIBRARY}"]
        command += [sys.executable, "-m", "chaoskit.substrate.disk.process", str(directory)]
        super().__init__(f"the disk of {directory}", command, _answers, undo)

    def impose(self, trouble: Trouble) -> int:
        """Gives the number of the trouble. Raises HarnessError, like the others."""
        return self.ask(ImposeTrouble(trouble))[0].number

    def met(self, number: int) -> int:
        """How many operations were refused or held up so far."""
        return self.ask(CountTrouble(number))[0].met

    def lift(self, number: int) -> int:
        """Gives how many operations have met it."""
        return self.ask(LiftTrouble(number))[0].met


class Disks:
    """The backend that breaks directories of one run's nodes.

    Args:
        enter: by pid, the command that goes before another one to run it with the mounts of that process.
        root: of a node, the process that has the mounts of the node.

    Attributes:
        mounted: those that stand before directories now, by the process of the node that sees them.
    """

    actions = frozenset({BreakDisk})

    def __init__(
        self, undo: UndoLog, enter: Callable[[int], Sequence[str]], root: Callable[[str], Process]
    ) -> None:
        self._undo, self._enter, self._root = undo, enter, root
        self.mounted: dict[tuple[int, Path], Disk] = {}

    def apply(self, node: str, action: Action) -> Applied:
        """Raises HarnessError also if the node has no mounts of its own."""
        assert isinstance(action, BreakDisk)
        disk = self._mounted(self._root(node).pid, action.directory)
        number = disk.impose(action.trouble)
        return Counted(lambda: disk.met(number), lambda: disk.lift(number))

    def _mounted(self, agent_pid: int, directory: Path) -> Disk:
        key = agent_pid, directory
        if key not in self.mounted:
            if _mounts(agent_pid) == _mounts(os.getpid()):
                raise HarnessError(
                    "the node has no mounts of its own, so that others would see its disk: run as root"
                )
            self.mounted[key] = Disk(directory, self._enter(agent_pid), self._undo)
        return self.mounted[key]

    def release(self, node: str | None = None) -> None:
        """No disk keeps a process from ending: its mount goes with the node."""

    def close(self) -> None:
        for disk in self.mounted.values():
            disk.close()
        self.mounted.clear()


def _mounts(pid: int) -> str:
    """Which mount namespace a process is in. Raises HarnessError where the process is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError as error:
        raise HarnessError(f"pid {pid} is gone: {error}") from error
