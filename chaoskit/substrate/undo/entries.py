"""What an undo log says: one kind of entry for each kind of thing that must be put back, and how that is done."""

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

#: Every control group that chaoskit makes is named like this, and no other is ever removed. So is every temporary
#: directory.
PREFIX = "chaoskit-"
#: In a directory of runs, below the directory of each: what that is judged by.
JOURNAL = "journal"
_CGROUP_BUSY_S = 5.0  # a process that was killed leaves its group only when the kernel has freed it
_CGROUP_LOOK_S = 0.005
_COMMAND_S = 10.0
_CGROUP_FILE_SYSTEMS = ("cgroup", "cgroup2")


class RepairOutcome(StrEnum):
    """What came of an entry."""

    REPAIRED = "repaired"
    NOTHING_LEFT = "nothing left"
    KEPT = "kept"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class UndoEntry:
    """Base of all entries. ``act`` names the kind in the file; those of a lower ``order`` are undone first."""

    act: ClassVar[str] = ""
    order: ClassVar[int] = 0
    #: For how long what was not found may still come: its maker was asked, and is another process.
    may_come_s: ClassVar[float] = 0.0

    @property
    def target(self) -> str:
        """What is put back, for people."""
        raise NotImplementedError

    def let_go(self) -> None:
        """Before any entry is undone: let processes go on that could not even be killed as they are."""

    def ends_by_itself(self) -> bool:
        """Whether it is a process that ends in order, with all that it has started, and has not ended yet."""
        return False

    def undo(self) -> RepairOutcome:
        """Put it back. Called again after a while where it failed. Raises OSError where it failed, too."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ProcessEntry(UndoEntry):
    """A process, by pid and start time. No start time: it was gone before the act, and its number is another one's."""

    pid: int
    ticks: int | None

    @property
    def target(self) -> str:
        return f"pid {self.pid}"

    def _lives(self) -> bool:
        return (
            self.ticks is not None
            and start_ticks(self.pid) == self.ticks
            and not is_ending(self.pid)
        )

    def _signal(self, signum: int) -> bool:
        """Send a signal; False if the process is gone. Raises OSError if it may not be sent."""
        if not self._lives():
            return False
        if not kill_if_same(self.pid, self.ticks, signum) and self._lives():
            raise PermissionError(f"no signal can be sent to pid {self.pid}")
        return True


@dataclass(frozen=True, slots=True)
class ContinueEntry(ProcessEntry):
    """A process that is about to be stopped."""

    act: ClassVar[str] = "continue"

    def undo(self) -> RepairOutcome:
        was_stopped = is_stopped(self.pid, self.ticks)
        self._signal(signal.SIGCONT)  # takes back a stop that is on its way, too
        return RepairOutcome.REPAIRED if was_stopped else RepairOutcome.NOTHING_LEFT


@dataclass(frozen=True, slots=True)
class KillEntry(ProcessEntry):
    """A process of ours, to be killed; what it has started is not."""

    act: ClassVar[str] = "kill"
    order: ClassVar[int] = 2

    def undo(self) -> RepairOutcome:
        return (
            RepairOutcome.REPAIRED if self._signal(signal.SIGKILL) else RepairOutcome.NOTHING_LEFT
        )


@dataclass(frozen=True, slots=True)
class EndEntry(KillEntry):
    """A process that sees the end of its runner, and then ends with all that it has started; killed if it does not."""

    act: ClassVar[str] = "end"

    def ends_by_itself(self) -> bool:
        return self._lives()


@dataclass(frozen=True, slots=True)
class CgroupEntry(UndoEntry):
    """A control group of ours. What is in it goes back to ``home``, where what was frozen goes on."""

    path: str
    home: str

    act: ClassVar[str] = "cgroup"
    order: ClassVar[int] = 3

    @property
    def target(self) -> str:
        return self.path

    def let_go(self) -> None:
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
    """A container of ours, by its name and the owner in its labels. ``daemon``: the socket of its Docker daemon."""

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
        from chaoskit.substrate.undo import (
            docker_janitor,
        )  # HTTP takes 30 ms to import, and mostly nothing needs it

        removed = docker_janitor.remove_container(self.daemon, self.name, self.owner)
        return RepairOutcome.REPAIRED if removed else RepairOutcome.NOTHING_LEFT


@dataclass(frozen=True, slots=True)
class DirectoryEntry(UndoEntry):
    """A temporary directory of ours. One that holds a journal is kept: the run in it can be judged."""

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
    """A command that puts something back, for what other distributions break. It must end with status 0 where nothing
    is left to do, too, and within 10 s.
    """

    words: str  # separated as a shell does; no shell runs it

    act: ClassVar[str] = "command"
    order: ClassVar[int] = 1  # when processes go on, and before they are ended

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
    """Return what of an entry stands in its file."""
    return {"entry": number, "act": entry.act, **asdict(entry)}


def from_json(line: dict[str, Any]) -> UndoEntry | None:
    """Return the entry that a line holds; None if it holds none."""
    kind = _KINDS.get(str(line.get("act")))
    if kind is None or not isinstance(line.get("entry"), int):
        return None
    named = {one.name: one.type for one in fields(kind)}
    known = all(
        name in line and isinstance(line[name], _JSON_TYPES[str(of)]) for name, of in named.items()
    )
    return kind(**{name: line[name] for name in named}) if known else None


def remove_cgroup(path: Path, home: Path, patience_s: float = _CGROUP_BUSY_S) -> bool:
    """Move the processes of a control group of ours to ``home``, where what was frozen goes on, and remove it.

    Args:
        patience_s: for how long a group that is still busy is tried again.

    Returns:
        False if it cannot be removed.
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
    """Move the processes of a control group to ``home``."""
    with contextlib.suppress(OSError):  # the group is gone
        for pid in (path / "cgroup.procs").read_text().split():
            with contextlib.suppress(
                OSError
            ):  # the process is ending: it leaves the group by itself
                ((home if home.is_dir() else path.parent) / "cgroup.procs").write_text(pid)


def _is_cgroup(path: str) -> bool:
    """Whether a path lies in a hierarchy of control groups, without a link on its way: a file may say anything."""
    if os.path.realpath(path) != path:
        return False
    mounts = [
        line.split()
        for line in Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()
    ]
    places = {fields[1]: fields[2] for fields in mounts if Path(path).is_relative_to(fields[1])}
    return bool(places) and places[max(places, key=len)] in _CGROUP_FILE_SYSTEMS
