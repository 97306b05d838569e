"""Kinds of entries in an undo log, and how each of them is undone.

-> ``undo/log.py`` writes them. ``undo/replay.py``: in which order they are undone, and how often a
failing one is tried again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from chaoskit.process.linux import is_ending, is_stopped, kill_if_same, start_ticks

#: Prefix of every control group and temporary directory that chaoskit makes. No others are ever
#: removed.
PREFIX = "chaoskit-"
#: Name of the journal's folder in the directory of a run. A run is judged by its journal.
JOURNAL = "journal"
_CGROUP_BUSY_S = 5.0  # a killed process leaves its group only once the kernel has freed it
_CGROUP_LOOK_S = 0.005
_COMMAND_S = 10.0
_CGROUP_FILE_SYSTEMS = ("cgroup", "cgroup2")


class RepairOutcome(StrEnum):
    """Outcome of undoing an entry.

    ``KEPT`` is that of a directory with a journal, which is not removed.
    """

    REPAIRED = "repaired"
    NOTHING_LEFT = "nothing left"
    KEPT = "kept"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class UndoEntry:
    """Base of all entries.

    ``act`` names the kind in the file; kinds of a lower ``order`` are undone first.
    """

    act: ClassVar[str] = ""
    order: ClassVar[int] = 0
    #: Time in which the target may still appear, as another process was asked to create it.
    may_come_s: ClassVar[float] = 0.0
    #: True if nothing is left of the target when its kernel has ended.
    ends_with_kernel: ClassVar[bool] = False

    @property
    def target(self) -> str:
        """The name of the process, group or other thing that undo acts on, for messages."""
        raise NotImplementedError

    def thaw(self) -> None:
        """Let frozen processes of the target continue, as they could not even be killed.

        It is called before any entry is undone. Most kinds do nothing.
        """

    def ends_by_itself(self) -> bool:
        """Return whether the target is a live process that is about to end by itself.

        All that it has started ends with it.
        """
        return False

    def undo(self) -> RepairOutcome:
        """Undo the act, and return the outcome. It is called again after a while if it failed.

        Raises:
            OSError: if it failed, with the reason. ``FAILED`` is returned where none is known.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ContinueEntry(UndoEntry):
    """A process that is about to be stopped; undo continues it.

    Attributes:
        ticks: its start time; None if it was gone before the act, and its pid is not used.
    """

    pid: int
    ticks: int | None

    act: ClassVar[str] = "continue"
    ends_with_kernel: ClassVar[bool] = True

    @property
    def target(self) -> str:
        return f"pid {self.pid}"

    def undo(self) -> RepairOutcome:
        was_stopped = is_stopped(self.pid, self.ticks)
        _signal(self.pid, self.ticks, signal.SIGCONT)  # cancels a pending stop, too
        return RepairOutcome.REPAIRED if was_stopped else RepairOutcome.NOTHING_LEFT


@dataclass(frozen=True, slots=True)
class KillEntry(UndoEntry):
    """A process of chaoskit; undo kills it, but not its children.

    Attributes:
        ticks: its start time; None if it was gone before the act, and its pid is not used.
    """

    pid: int
    ticks: int | None

    act: ClassVar[str] = "kill"
    order: ClassVar[int] = 2
    ends_with_kernel: ClassVar[bool] = True

    @property
    def target(self) -> str:
        return f"pid {self.pid}"

    def undo(self) -> RepairOutcome:
        return _kill(self.pid, self.ticks)


@dataclass(frozen=True, slots=True)
class EndEntry(UndoEntry):
    """A process that ends by itself, with all that it has started, when its runner ends.

    Undo kills it otherwise.

    Attributes:
        ticks: its start time; None if it was gone before the act, and its pid is not used.
    """

    pid: int
    ticks: int | None

    act: ClassVar[str] = "end"
    order: ClassVar[int] = 2
    ends_with_kernel: ClassVar[bool] = True

    @property
    def target(self) -> str:
        return f"pid {self.pid}"

    def ends_by_itself(self) -> bool:
        return _is_alive(self.pid, self.ticks)

    def undo(self) -> RepairOutcome:
        return _kill(self.pid, self.ticks)


@dataclass(frozen=True, slots=True)
class CgroupEntry(UndoEntry):
    """A control group of chaoskit.

    Undo moves its processes to ``home``, where frozen ones continue, and removes it.

    Attributes:
        path: directory of the group.
        home: directory of the group that its processes came from.
    """

    path: str
    home: str

    act: ClassVar[str] = "cgroup"
    order: ClassVar[int] = 3
    ends_with_kernel: ClassVar[bool] = True

    @property
    def target(self) -> str:
        return self.path

    def thaw(self) -> None:
        if _is_cgroup(self.path) and _is_cgroup(self.home):
            evacuate(Path(self.path), Path(self.home))

    def undo(self) -> RepairOutcome:
        path = Path(self.path)
        if not path.is_dir():
            return RepairOutcome.NOTHING_LEFT
        if not _is_cgroup(self.path) or not _is_cgroup(self.home):
            return RepairOutcome.FAILED
        return (
            RepairOutcome.REPAIRED
            if remove_cgroup(path, Path(self.home), patience_s=0.0)
            else RepairOutcome.FAILED
        )


@dataclass(frozen=True, slots=True)
class ContainerEntry(UndoEntry):
    """A container of chaoskit, by its name and the owner in its labels. Undo removes it.

    Attributes:
        daemon: socket of its Docker daemon.
    """

    name: str
    owner: str
    daemon: str

    act: ClassVar[str] = "container"
    order: ClassVar[int] = 4
    may_come_s: ClassVar[float] = 3.0

    @property
    def target(self) -> str:
        return self.name

    def undo(self) -> RepairOutcome:
        # imported here, as it imports HTTP, which takes 30 ms and is rarely needed
        from chaoskit.substrate.undo import docker_janitor

        removed = docker_janitor.remove_container(self.daemon, self.name, self.owner)
        return RepairOutcome.REPAIRED if removed else RepairOutcome.NOTHING_LEFT


@dataclass(frozen=True, slots=True)
class DirectoryEntry(UndoEntry):
    """A temporary directory of chaoskit.

    Undo removes it, unless a directory in it holds a journal: that run can still be judged. A
    directory of another user or with another prefix is not removed, and the undo fails.
    """

    path: str

    act: ClassVar[str] = "directory"
    order: ClassVar[int] = 5

    @property
    def target(self) -> str:
        return self.path

    def undo(self) -> RepairOutcome:
        path = Path(self.path)
        if not path.is_dir():
            return RepairOutcome.NOTHING_LEFT
        if (
            path.is_symlink()
            or not path.name.startswith(PREFIX)
            or path.stat().st_uid != os.geteuid()
        ):
            return RepairOutcome.FAILED
        if any(path.glob(f"*/{JOURNAL}")):
            return RepairOutcome.KEPT
        shutil.rmtree(path)
        return RepairOutcome.REPAIRED


@dataclass(frozen=True, slots=True)
class CommandEntry(UndoEntry):
    """A command that undoes a change of another distribution.

    It must end within 10 s, and with status 0 also if nothing is left to undo.
    """

    words: str  # split like a shell's command line, but run without a shell

    act: ClassVar[str] = "command"
    order: ClassVar[int] = 1  # after processes continue, and before they are killed

    @property
    def target(self) -> str:
        return self.words

    def undo(self) -> RepairOutcome:
        import shlex
        import subprocess

        ended = subprocess.run(
            shlex.split(self.words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMMAND_S,
            check=False,
        )
        if ended.returncode:
            raise OSError(
                f"it ended with status {ended.returncode}: {ended.stderr.decode(errors='replace').strip()}"
            )
        return RepairOutcome.REPAIRED


_KINDS: dict[str, type[UndoEntry]] = {
    kind.act: kind
    for kind in (
        ContinueEntry,
        KillEntry,
        EndEntry,
        CgroupEntry,
        ContainerEntry,
        DirectoryEntry,
        CommandEntry,
    )
}
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "str": (str,),
}


def to_json(entry: UndoEntry, number: int) -> dict[str, Any]:
    """Return the entry as a JSON object for a line of the undo file."""
    return {"entry": number, "act": entry.act, **asdict(entry)}


def from_json(line: dict[str, Any]) -> UndoEntry | None:
    """Return the entry that a line of an undo file holds, or None if it holds no valid entry."""
    kind = _KINDS.get(str(line.get("act")))
    if kind is None or not isinstance(line.get("entry"), int):
        return None
    types = {field.name: field.type for field in fields(kind)}
    is_complete = all(
        name in line and isinstance(line[name], _JSON_TYPES[str(type_name)])
        for name, type_name in types.items()
    )
    return kind(**{name: line[name] for name in types}) if is_complete else None


def _is_alive(pid: int, ticks: int | None) -> bool:
    """Return whether the process with this pid and start time still runs its own code."""
    return ticks is not None and start_ticks(pid) == ticks and not is_ending(pid)


def _signal(pid: int, ticks: int | None, signum: int) -> bool:
    """Send a signal to a process, and return whether the process was there to receive it.

    Raises OSError if the signal may not be sent.
    """
    if not _is_alive(pid, ticks):
        return False
    if not kill_if_same(pid, ticks, signum) and _is_alive(pid, ticks):
        raise PermissionError(f"no signal can be sent to pid {pid}")
    return True


def _kill(pid: int, ticks: int | None) -> RepairOutcome:
    """Kill a process, and return ``REPAIRED``, or ``NOTHING_LEFT`` if it was gone.

    Raises OSError if it may not be killed.
    """
    return (
        RepairOutcome.REPAIRED
        if _signal(pid, ticks, signal.SIGKILL)
        else RepairOutcome.NOTHING_LEFT
    )


def remove_cgroup(path: Path, home: Path, patience_s: float = _CGROUP_BUSY_S) -> bool:
    """Move the processes of a control group of chaoskit to ``home``, and remove the group.

    Frozen processes continue there.

    Args:
        patience_s: time for which removal of a busy group is retried; 0 for one try.

    Returns:
        True if the group is gone; False if it cannot be removed, or is not one of chaoskit.
    """
    if not path.name.startswith(PREFIX) or not (path / "cgroup.procs").is_file():
        return not path.exists()
    deadline_s = time.monotonic() + patience_s
    while True:
        evacuate(path, home)
        try:
            path.rmdir()
        except FileNotFoundError:
            return True  # another janitor was faster
        except OSError:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_CGROUP_LOOK_S)
        else:
            return True


def evacuate(path: Path, home: Path) -> None:
    """Move the processes of a control group to ``home``, or to its parent if ``home`` is gone."""
    with contextlib.suppress(OSError):  # the group is gone
        for pid in (path / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # an ending process leaves by itself
                ((home if home.is_dir() else path.parent) / "cgroup.procs").write_text(pid)


def _is_cgroup(path: str) -> bool:
    """Return whether a path lies in a hierarchy of control groups.

    A path with a symbolic link does not count: it comes from a file and cannot be trusted.
    """
    if os.path.realpath(path) != path:
        return False
    mounts = [
        line.split()
        for line in Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()
    ]
    places = {fields[1]: fields[2] for fields in mounts if Path(path).is_relative_to(fields[1])}
    return bool(places) and places[max(places, key=len)] in _CGROUP_FILE_SYSTEMS
