"""Control groups of chaoskit: limits of CPU, memory, processes and writes, and the freezer.

Both versions of cgroup are supported. A group is created beside the one that its first process is
in. There it may hold processes under either version, and the same limits from above apply. Children
of its processes are in it, too. Its removal is written to the undo log first. Only directories with
the prefix of chaoskit are ever created or removed.

-> ``limits/holds.py``: which group a node or process gets, and when it is removed.
``undo/entries.py`` (``CgroupEntry``): the removal after a crash. ``docker/holds.py``: limits of
containers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from chaoskit.process.linux import start_ticks
from chaoskit.substrate.undo import CgroupEntry, UndoLog
from chaoskit.substrate.undo.entries import PREFIX, remove_cgroup

_PERIOD_US = 20_000  # short, so that a throttled process is slow but never stops for long
_QUOTA_US_MIN = 1_000  # the kernel's minimum
_MEMORY_FILES = {
    1: ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    2: ("memory.current", "memory.max", "memory.swap.max"),
}
_V1_NAMES = {"io": "blkio"}  # controllers with another name in version 1
_FREEZER = "freezer"  # part of version 2 itself, where frozen processes can still be killed
# By version of cgroup: the file of the freezer, and the texts that freeze and thaw.
_FREEZERS = {1: ("freezer.state", "FROZEN", "THAWED"), 2: ("cgroup.freeze", "1", "0")}
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class CgroupPlace:
    """Location of a process in the hierarchy of one controller.

    Attributes:
        version: 1 or 2.
        home: directory of the group that the process is in.
        parent: directory in which a group for the process can be created.
    """

    version: int
    home: Path
    parent: Path


def find_place(
    controller: str, mounts: str, groups: str, preferred_version: int | None = None
) -> CgroupPlace | None:
    """Return the location of a process in the hierarchy of ``controller``.

    None is returned if the hierarchy is not mounted.

    Args:
        controller: ``cpu``, ``memory``, ``pids``, ``io`` or ``freezer``.
        mounts: text of /proc/self/mounts.
        groups: text of /proc/PID/cgroup.
        preferred_version: version to use if both have the controller. None means 1, but 2 for the
            freezer.
    """
    mounted = [line.split() for line in mounts.splitlines()]
    paths = {names: path for _, names, path in (line.split(":", 2) for line in groups.splitlines())}
    name = _V1_NAMES.get(controller, controller)
    mounts_v1 = [
        fields[1] for fields in mounted if fields[2] == "cgroup" and name in fields[3].split(",")
    ]
    joined = [path for names, path in paths.items() if name in names.split(",")]
    mounts_v2 = [fields[1] for fields in mounted if fields[2] == "cgroup2"]
    v1 = _place(1, mounts_v1[0], joined[0]) if mounts_v1 and joined else None
    v2 = _place(2, mounts_v2[0], paths[""]) if mounts_v2 and "" in paths else None
    return (
        (v2 or v1)
        if (preferred_version or (2 if controller == _FREEZER else 1)) == 2
        else (v1 or v2)
    )


def _place(version: int, mount: str, path: str) -> CgroupPlace:
    """Return the place of a group, whose parent is the group itself if it is the root."""
    home = Path(mount) / path.lstrip("/")
    return CgroupPlace(version, home, home if path == "/" else home.parent)


def _locate(controller: str, pid: int, preferred_version: int | None = None) -> CgroupPlace | None:
    """Return the place of a process, or None if it is gone or the controller is not mounted."""
    with contextlib.suppress(OSError):
        # use this process's mounts: a container has others
        mounts, groups = (
            Path("/proc/self/mounts").read_text(),
            Path(f"/proc/{pid}/cgroup").read_text(),
        )
        return find_place(controller, mounts, groups, preferred_version)
    return None


def home_of(controller: str, pid: int, preferred_version: int | None = None) -> Path | None:
    """Return the directory of the group that a process is in.

    None is returned if the process is gone, or the controller is not mounted.

    Args:
        preferred_version: as in :func:`find_place`.
    """
    place = _locate(controller, pid, preferred_version)
    return None if place is None else place.home


def version(controller: str, preferred_version: int | None = None) -> int | None:
    """Return the cgroup version, 1 or 2, that has ``controller`` for processes like this one.

    None is returned if none has.
    """
    place = _locate(controller, os.getpid(), preferred_version)
    return None if place is None else place.version


def unavailable(controller: str) -> str:
    """Return why processes like this one cannot be put into a group of ``controller``.

    The reason is "" if they can.
    """
    place = _locate(controller, os.getpid())
    if place is None:
        return f"no cgroup hierarchy with the {controller} controller is mounted"
    if place.version == 2 and controller != _FREEZER:
        try:
            enabled = (place.parent / "cgroup.subtree_control").read_text().split()
        except OSError:
            enabled = []
        if controller not in enabled:
            return (
                f"cgroup v2 does not give the {controller} controller to groups in {place.parent}"
            )
    if not os.access(place.parent, os.W_OK) or not os.access(place.home / "cgroup.procs", os.W_OK):
        return f"{place.parent} is not writable: run as root, or have the {controller} controller delegated to you"
    return ""


class Cgroup:
    """A control group that holds a process, and others that are added.

    The constructor creates it and moves the process into it. Its methods set the limits of the
    group, and raise OSError if the kernel refuses or the group is gone; :meth:`remove` raises
    nothing.

    Args:
        controller: as in :func:`find_place`, like ``preferred_version``.
        ticks: start time of the process ``pid``.

    Attributes:
        path: directory of the group.

    Raises:
        ProcessLookupError: if the process is gone, or the controller is not mounted.
        OSError: if the kernel refuses the group.
        HarnessError: if the undo entry cannot be written.
    """

    def __init__(
        self,
        controller: str,
        pid: int,
        ticks: int | None,
        undo: UndoLog,
        preferred_version: int | None = None,
    ) -> None:
        place = _locate(controller, pid, preferred_version)
        if place is None or ticks is None or start_ticks(pid) != ticks:
            raise ProcessLookupError(f"pid {pid} is not the pid of the target process any more")
        self._version, self._home = place.version, place.home
        self.path = (
            place.parent / f"{PREFIX}{os.getpid()}-{next(_numbers)}-{pid}-{secrets.token_hex(4)}"
        )
        self._undo = undo.plan(CgroupEntry(str(self.path), str(self._home)))
        try:
            self.path.mkdir()
        except OSError:
            self._undo.done()  # a group of this name is not this one
            raise
        with self._removed_on_error():
            self.take(pid)

    def take(self, pid: int) -> None:
        """Move a process into the group, with all of its threads. Raises OSError if it is gone."""
        self._write("cgroup.procs", str(pid))

    def pids(self) -> set[int]:
        """Return the pids in the group, of processes that were moved there or started there."""
        return set(map(int, self._read("cgroup.procs").split()))

    @contextmanager
    def _removed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.remove()
            raise

    def _write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def _read(self, name: str) -> str:
        return (self.path / name).read_text()

    def _table(self, name: str) -> dict[str, int]:
        """Return the counters of a file of the group that has a name and a number on each line."""
        return {
            key: int(number)
            for key, number in (line.split() for line in self._read(name).splitlines())
        }

    # -- CPU ---------------------------------------------------------------------------------------

    def limit_cpu(self, cpus: float | None) -> None:
        """Limit the group to a number of CPUs, such as 0.5; None lifts the limit.

        A limit below 0.05, the least that the kernel allows, becomes 0.05.
        """
        quota_us = None if cpus is None else max(_QUOTA_US_MIN, round(cpus * _PERIOD_US))
        if self._version == 2:
            self._write("cpu.max", f"{'max' if quota_us is None else quota_us} {_PERIOD_US}")
        else:
            self._write("cpu.cfs_period_us", str(_PERIOD_US))
            self._write("cpu.cfs_quota_us", str(-1 if quota_us is None else quota_us))

    def throttled(self) -> tuple[int, float]:
        """Return the number of periods in which the kernel throttled the group, and their time.

        The time is the sum over all threads, in seconds.
        """
        table = self._table("cpu.stat")
        seconds = (
            table["throttled_usec"] / 1e6 if self._version == 2 else table["throttled_time"] / 1e9
        )
        return table["nr_throttled"], seconds

    # -- memory ------------------------------------------------------------------------------------

    def limit_memory(self, headroom_bytes: int | None) -> None:
        """Limit the group to ``headroom_bytes`` more than it uses now, without swap.

        None lifts the limit.
        """
        used, most, swap = _MEMORY_FILES[self._version]
        if headroom_bytes is None:
            with contextlib.suppress(OSError):  # a kernel without swap has no such file
                self._write(swap, self._unlimited)  # first: the limit of memory may not exceed it
            self._write(most, self._unlimited)
            return
        limit = int(self._read(used)) + headroom_bytes
        self._write(most, str(limit))
        with contextlib.suppress(OSError):
            self._write(swap, "0" if self._version == 2 else str(limit))

    @property
    def _unlimited(self) -> str:
        return "max" if self._version == 2 else "-1"

    def oom_kills(self) -> int:
        """Return how many processes the kernel has killed because the group's memory ran out."""
        table = self._table("memory.events" if self._version == 2 else "memory.oom_control")
        return table.get("oom_kill", 0)

    # -- processes and threads ---------------------------------------------------------------------

    def limit_pids(self, further: int | None) -> None:
        """Limit the group to ``further`` more processes and threads than now.

        None lifts the limit.
        """
        most = "max" if further is None else str(int(self._read("pids.current")) + further)
        self._write("pids.max", most)

    def refused_forks(self) -> int:
        """Return how many new processes and threads the kernel has refused to this group."""
        return self._table("pids.events")["max"]

    # -- writes ------------------------------------------------------------------------------------

    def limit_writes(self, device: str, bytes_per_s: int | None) -> None:
        """Limit the writes of the group to a disk such as ``254:0``; None or 0 lifts the limit.

        Under version 1 only writes that bypass the page cache, or that a process waits for, are
        limited.
        """
        if self._version == 2:
            self._write("io.max", f"{device} wbps={bytes_per_s or 'max'}")
        else:
            self._write("blkio.throttle.write_bps_device", f"{device} {bytes_per_s or 0}")

    def written_bytes(self, device: str) -> int:
        """Return the bytes that this group has written to a disk.

        Under version 1 writes that wait for the limit are counted, too.
        """
        lines = self._read(
            "io.stat" if self._version == 2 else "blkio.throttle.io_service_bytes"
        ).splitlines()
        of_device = [words for line in lines if (words := line.split()) and words[0] == device]
        if self._version == 2:
            counts = [
                word.removeprefix("wbytes=")
                for words in of_device
                for word in words
                if word.startswith("wbytes=")
            ]
        else:
            counts = [words[2] for words in of_device if words[1] == "Write"]
        return sum(map(int, counts))

    # -- the freezer -------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Order the kernel to stop every process of the group; :meth:`frozen` says when it has."""
        name, frozen, _ = _FREEZERS[self._version]
        self._write(name, frozen)

    def thaw(self) -> None:
        """Let the processes of the group continue."""
        name, _, thawed = _FREEZERS[self._version]
        self._write(name, thawed)

    def frozen(self) -> bool:
        """Return whether all processes of the group are frozen, according to the kernel."""
        if self._version == 2:
            return self._table("cgroup.events").get("frozen") == 1
        return self._read("freezer.state").strip() == "FROZEN"

    # -- the end -----------------------------------------------------------------------------------

    def remove(self) -> bool:
        """Move the remaining processes back to the group's home, and remove the group.

        Returns:
            True if the group is gone; False if it cannot be removed within 5 s. Its undo entry then
            stays open.
        """
        is_gone = remove_cgroup(self.path, self._home)
        if is_gone:
            self._undo.done()
        return is_gone
