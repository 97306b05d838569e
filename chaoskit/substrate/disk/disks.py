"""The launcher's end of the file system over a node's directory (``disk/process.py``).

-> ``core/disk.py``: which operations a trouble fails or delays. ``faults/storage/disk.py``: the
faults. ``limits/capabilities.py`` (``disks``): what this machine must have for them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from chaoskit.errors import HarnessError
from chaoskit.substrate.core.actions import Action, Applied, BreakDisk, CountedAction
from chaoskit.substrate.core.disk import Trouble
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.helper_process import HelperProcess
from chaoskit.substrate.limits.capabilities import FUSE_LIBRARY
from chaoskit.substrate.undo import UndoLog


class ImposeDiskTrouble(msgspec.Struct, frozen=True, tag=True):
    """Start a trouble. Answered by its identifier as ``number``."""

    trouble: Trouble


class LiftDiskTrouble(msgspec.Struct, frozen=True, tag=True):
    """End a trouble. Answered by the number of operations that it affected, as ``met``."""

    number: int


class CountDiskTrouble(msgspec.Struct, frozen=True, tag=True):
    """Request the number of operations that a trouble has affected so far, answered as ``met``."""

    number: int


class DiskTroubleDone(msgspec.Struct, frozen=True, tag=True):
    """Answer to a request.

    Attributes:
        number: identifier of the trouble.
        met: number of affected operations.
        error: why the request failed; "" if it did not.
    """

    number: int = 0
    met: int = 0
    error: str = ""


Request = ImposeDiskTrouble | LiftDiskTrouble | CountDiskTrouble

_answers = msgspec.json.Decoder(DiskTroubleDone)


class Disk(HelperProcess[DiskTroubleDone]):
    """File system over a directory of a node, for all files that the node opens from now on.

    Methods raise HarnessError if its process is gone or does not answer.

    Args:
        enter: command prefix that runs a command in the mount namespace of the node.
        undo: log for the entry that ends the process if the launcher cannot.

    Raises:
        HarnessError: if the file system cannot be mounted.
    """

    def __init__(self, directory: Path, enter: Sequence[str], undo: UndoLog) -> None:
        # mfusepy prefers libfuse 2, which does not mount over a directory that has files
        command = [*enter, "env", f"FUSE_LIBRARY_NAME={FUSE_LIBRARY}"]
        command += [sys.executable, "-m", "chaoskit.substrate.disk.process", str(directory)]
        super().__init__(f"the disk of {directory}", command, _answers, undo)

    def impose(self, trouble: Trouble) -> int:
        """Start a trouble and return its identifier."""
        return self.ask(ImposeDiskTrouble(trouble))[0].number

    def affected_count(self, trouble_id: int) -> int:
        """Return how many operations a trouble has refused or delayed so far."""
        return self.ask(CountDiskTrouble(trouble_id))[0].met

    def lift(self, trouble_id: int) -> int:
        """End a trouble and return how many operations it affected."""
        return self.ask(LiftDiskTrouble(trouble_id))[0].met


class Disks:
    """Backend that breaks directories of one run's nodes.

    A directory is mounted at its first trouble, and stays so until :meth:`close`.

    Args:
        enter: returns the command prefix that runs a command with the mounts of a process, given
            its pid.
        root: returns the process of a node that has the mounts of the node.

    Attributes:
        mounted: file systems in use, by pid of the node's root process and directory.
    """

    actions = frozenset({BreakDisk})

    def __init__(
        self, undo: UndoLog, enter: Callable[[int], Sequence[str]], root: Callable[[str], Process]
    ) -> None:
        self._undo, self._enter, self._root = undo, enter, root
        self.mounted: dict[tuple[int, Path], Disk] = {}

    def apply(self, node: str, action: Action) -> Applied:
        """Break a directory of a node, and return the handle that lifts this.

        Raises HarnessError if the node has no mounts of its own, or the file system cannot be
        mounted.
        """
        assert isinstance(action, BreakDisk)
        disk = self._mounted(self._root(node).pid, action.directory)
        trouble_id = disk.impose(action.trouble)
        return CountedAction(lambda: disk.affected_count(trouble_id), lambda: disk.lift(trouble_id))

    def _mounted(self, root_pid: int, directory: Path) -> Disk:
        """Return the file system over a directory, which is mounted at the first call.

        Raises HarnessError as :meth:`apply`.
        """
        key = root_pid, directory
        if key not in self.mounted:
            if _mounts(root_pid) == _mounts(os.getpid()):
                raise HarnessError(
                    "the node has no mounts of its own, so other nodes would see its disk fault: "
                    "run as root"
                )
            self.mounted[key] = Disk(directory, self._enter(root_pid), self._undo)
        return self.mounted[key]

    def release(self, node: str | None = None) -> None:
        """Do nothing: a mount goes with the node and keeps no process from ending."""

    def close(self) -> None:
        for disk in self.mounted.values():
            disk.close()
        self.mounted.clear()


def _mounts(pid: int) -> str:
    """Return the mount namespace of a process. Raises HarnessError if the process is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError as error:
        raise HarnessError(f"pid {pid} is gone: {error}") from error
