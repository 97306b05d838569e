"""Control groups of our own around processes: limits of CPU, memory, processes and writes, and the freezer; v1 or v2.

A group lies beside the one that its first process is in, so that it may hold processes under either version, and within
the same limits from above. Whatever its processes start is in it, too. Its removal is written ahead; only directories
with our prefix are ever made or removed.
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

_PERIOD_US = 20_000  # short, so that a throttled process is slow and does not stand still for long
_QUOTA_US_MIN = 1_000  # the kernel's least
_MEMORY_FILES = {
    1: ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    2: ("memory.current", "memory.max", "memory.swap.max"),
}
_V1_NAMES = {"io": "blkio"}  # controllers that version 2 calls otherwise
_FREEZER = "freezer"  # part of version 2 itself, where frozen processes can still be killed
# By version of cgroup: the file of the freezer, and what is written there to freeze and to thaw.
_FREEZERS = {1: ("freezer.state", "FROZEN", "THAWED"), 2: ("cgroup.freeze", "1", "0")}
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Place:
    """Where one controller keeps the group of a process.

    Attributes:
        version: 1 or 2.
        home: directory of the group that the process is in.
        parent: directory in which a group for it can be made.
    """

    version: int
    home: Path
    parent: Path


def find_place(
    controller: str, mounts: str, groups: str, prefer: int | None = None
) -> Place | None:
    """Where ``controller`` keeps the process; None if it is not mounted.

    Args:
        controller: ``cpu``, ``memory``, ``pids``, ``io`` or ``freezer``.
        mounts: text of /proc/self/mounts. groups: text of /proc/PID/cgroup.
        prefer: the version to use where a controller is in both. None: 1, but 2 for the freezer.
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
    return (v2 or v1) if (prefer or (2 if controller == _FREEZER else 1)) == 2 else (v1 or v2)


def _place(version: int, mount: str, path: str) -> Place:
    home = Path(mount) / path.lstrip("/")
    return Place(version, home, home if path == "/" else home.parent)


def _locate(controller: str, pid: int, prefer: int | None = None) -> Place | None:
    with contextlib.suppress(OSError):
        # by our own mounts: those of a container are others
        mounts, groups = (
            Path("/proc/self/mounts").read_text(),
            Path(f"/proc/{pid}/cgroup").read_text(),
        )
        return find_place(controller, mounts, groups, prefer)
    return None


def home_of(controller: str, pid: int, prefer: int | None = None) -> Path | None:
    """Directory of the group in which ``controller`` has the process now; ``prefer`` as in :func:`find_place`."""
    place = _locate(controller, pid, prefer)
    return None if place is None else place.home


def version(controller: str, prefer: int | None = None) -> int | None:
    """Which version of cgroup keeps ``controller`` for processes like this one: 1, 2, or None for neither."""
    place = _locate(controller, os.getpid(), prefer)
    return None if place is None else place.version


def unavailable(controller: str) -> str:
    """Why processes like this one cannot be put into a group of ``controller``, as in :func:`find_place`; else ""."""
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
    """A group that holds a process, and whatever else it is given. Limits of the group are set through it.

    Args:
        prefer: as in :func:`find_place`.

    Raises:
        ProcessLookupError: if the process is gone. OSError: if the kernel refuses the group.
    """

    def __init__(
        self, controller: str, pid: int, ticks: int | None, undo: UndoLog, prefer: int | None = None
    ) -> None:
        place = _locate(controller, pid, prefer)
        if place is None or ticks is None or start_ticks(pid) != ticks:
            raise ProcessLookupError(f"pid {pid} is not the process that was aimed at any more")
        self._version, self._home = place.version, place.home
        self.path = (
            place.parent / f"{PREFIX}{os.getpid()}-{next(_numbers)}-{pid}-{secrets.token_hex(4)}"
        )
        self._undo = undo.plan(CgroupEntry(str(self.path), str(self._home)))
        try:
            self.path.mkdir()
        except OSError:
            self._undo.done()  # whatever has this name is another's
            raise
        with self._removed_on_error():
            self.take(pid)

    def take(self, pid: int) -> None:
        """Put a further process into the group, with all of its threads. Raises OSError if it is gone."""
        self._write("cgroup.procs", str(pid))

    def pids(self) -> set[int]:
        """Processes in the group, whether they were put there or were born there."""
        return set(map(int, self._read("cgroup.procs").split()))

    @contextmanager
    def _removed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.remove()
            raise

    def _write(self, name: str, value: str) -> None:
        (self.path / name).write_text(value)

    def _read(self, name: str) -> str:
        return (self.path / name).read_text()

    def _table(self, name: str) -> dict[str, int]:
        return {
            key: int(value)
            for key, value in (line.split() for line in self._read(name).splitlines())
        }

    # -- CPU ----------------------------------------------------------------------------------------------------

    def limit_cpu(self, cpu_fraction: float | None) -> None:
        """Let the group have so many CPUs; None lifts the limit."""
        quota_us = (
            None if cpu_fraction is None else max(_QUOTA_US_MIN, round(cpu_fraction * _PERIOD_US))
        )
        if self._version == 2:
            self._write("cpu.max", f"{'max' if quota_us is None else quota_us} {_PERIOD_US}")
        else:
            self._write("cpu.cfs_period_us", str(_PERIOD_US))
            self._write("cpu.cfs_quota_us", str(-1 if quota_us is None else quota_us))

    def throttled(self) -> tuple[int, float]:
        """How often the kernel held the group back for its quota, and for how many seconds of its threads in all."""
        table = self._table("cpu.stat")
        seconds = (
            table["throttled_usec"] / 1e6 if self._version == 2 else table["throttled_time"] / 1e9
        )
        return table["nr_throttled"], seconds

    # -- memory -------------------------------------------------------------------------------------------------

    def limit_memory(self, headroom_bytes: int | None) -> None:
        """Let the group use ``headroom_bytes`` more than it does now, without swap; None lifts the limit."""
        used, most, swap = _MEMORY_FILES[self._version]
        if headroom_bytes is None:
            with contextlib.suppress(OSError):  # a kernel without swap has no such file
                self._write(swap, self._unlimited)  # first: no limit of memory may be above it
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
        """How many processes of this group the kernel has killed because its memory was used up."""
        table = self._table("memory.events" if self._version == 2 else "memory.oom_control")
        return table.get("oom_kill", 0)

    # -- processes and threads ----------------------------------------------------------------------------------

    def limit_pids(self, further: int | None) -> None:
        """Let the group have so many more processes and threads than now; None lifts the limit."""
        most = "max" if further is None else str(int(self._read("pids.current")) + further)
        self._write("pids.max", most)

    def refused_forks(self) -> int:
        """How many processes and threads the kernel has refused to this group."""
        return self._table("pids.events")["max"]

    # -- writes -------------------------------------------------------------------------------------------------

    def limit_writes(self, device: str, bytes_per_s: int | None) -> None:
        """Let so many bytes a second pass to a disk (``254:0``); None lifts the limit. Under version 1 only what a
        process writes through, or waits for, counts.
        """
        if self._version == 2:
            self._write("io.max", f"{device} wbps={bytes_per_s or 'max'}")
        else:
            self._write("blkio.throttle.write_bps_device", f"{device} {bytes_per_s or 0}")

    def written_bytes(self, device: str) -> int:
        """Bytes that this group has written to a disk; under version 1 also those that wait for the limit."""
        lines = self._read(
            "io.stat" if self._version == 2 else "blkio.throttle.io_service_bytes"
        ).splitlines()
        of_device = [words for line in lines if (words := line.split()) and words[0] == device]
        if self._version == 2:
            found = [
                word.removeprefix("wbytes=")
                for words in of_device
                for word in words
                if word.startswith("wbytes=")
            ]
        else:
            found = [words[2] for words in of_device if words[1] == "Write"]
        return sum(map(int, found))

    # -- the freezer --------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Have every process of the group stand still."""
        name, frozen, _ = _FREEZERS[self._version]
        self._write(name, frozen)

    def thaw(self) -> None:
        """Let them go on."""
        name, _, thawed = _FREEZERS[self._version]
        self._write(name, thawed)

    def frozen(self) -> bool:
        """Whether the kernel says that all of them stand still."""
        if self._version == 2:
            return self._table("cgroup.events").get("frozen") == 1
        return self._read("freezer.state").strip() == "FROZEN"

    # -- the end ------------------------------------------------------------------------------------------------

    def remove(self) -> bool:
        """Move what is left in the group back to where it came from, and remove the group; True if that is done."""
        gone = remove_cgroup(self.path, self._home)
        if gone:
            self._undo.done()
        return gone
