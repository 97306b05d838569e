"""The launcher's end of a node's disk: the process that stands before a directory of it (``disk_process.py``)."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from chaoskit.errors import HarnessError
from chaoskit.substrate.abilities import FUSE_LIBRARY
from chaoskit.substrate.disk import Trouble
from chaoskit.substrate.servant import Servant
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
        command += [sys.executable, "-m", "chaoskit.substrate.disk_process", str(directory)]
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
    """What is wrong with directories of one run's nodes.

    Args:
        enter: by pid, the command that goes before another one to run it with the mounts of that process.
    """

    def __init__(self, undo: UndoLog, enter: Callable[[int], Sequence[str]]) -> None:
        self._undo, self._enter = undo, enter
        self._disks: dict[tuple[int, Path], Disk] = {}  # by the agent whose node sees it
        self._troubles: dict[int, tuple[Disk, int]] = {}
        self._numbers = itertools.count(1)

    def impose(self, agent_pid: int, directory: Path, trouble: Trouble) -> int:
        """Gives a number. Raises HarnessError, like the others, and if the node has no mounts of its own."""
        key = agent_pid, directory
        if key not in self._disks:
            if _mounts(agent_pid) == _mounts(os.getpid()):
                raise HarnessError("the node has no mounts of its own, so that others would see its disk: run as root")
            self._disks[key] = Disk(directory, self._enter(agent_pid), self._undo)
        number = next(self._numbers)
        self._troubles[number] = self._disks[key], self._disks[key].impose(trouble)
        return number

    def met(self, number: int) -> int:
        """How many operations the trouble has refused or held up so far."""
        disk, trouble = self._troubles[number]
        return disk.met(trouble)

    def lift(self, number: int) -> int:
        """Gives how many operations the trouble has met."""
        disk, trouble = self._troubles[number]
        return disk.lift(trouble)

    def close(self) -> None:
        """To be called when the nodes are gone."""
        for disk in self._disks.values():
            disk.close()
        self._disks.clear()


def _mounts(pid: int) -> str:
    """Which mount namespace a process is in. Raises HarnessError where the process is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError as error:
        raise HarnessError(f"pid {pid} is gone: {error}") from error
