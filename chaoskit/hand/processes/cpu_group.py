"""The CPU limit of the cgroup of this process, and the periods in which the kernel enforced it.

In a container, the mount of cgroups often shows the group of the container only.

-> ``hand/processes/load.py`` uses the limit up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from . import proc

_MOUNT = "/sys/fs/cgroup"


class CpuGroup(NamedTuple):
    """A cgroup with a limit of CPU time.

    Attributes:
        directory: its directory.
        limit_cores: the limit, as a number of CPUs.
    """

    directory: str
    limit_cores: float

    def throttled_periods(self) -> int | None:
        """Return the number of periods in which processes of the group were held back so far."""
        lines = (proc.read(f"{self.directory}/cpu.stat") or "").splitlines()
        counts = (line.split()[1] for line in lines if line.startswith("nr_throttled "))
        return next(map(int, counts), None)


def own_cpu_group() -> CpuGroup | None:
    """Return the cgroup of this process; None if it has no CPU limit, or none that can be read."""
    for directory in _directories(proc.read("/proc/self/cgroup") or ""):
        unified = (proc.read(f"{directory}/cpu.max") or "").split()
        quota_us = proc.read(f"{directory}/cpu.cfs_quota_us")
        period_us = proc.read(f"{directory}/cpu.cfs_period_us")
        if unified:
            limit = limit_cores(*unified)
        elif quota_us and period_us:
            limit = limit_cores(quota_us, period_us)
        else:
            continue
        group = CpuGroup(directory, limit)
        return group if limit and group.throttled_periods() is not None else None
    return None


def limit_cores(quota_us: str, period_us: str) -> float:
    """Return the limit of a cgroup as a number of CPUs; 0 for none.

    Args:
        quota_us: its CPU time in a period. ``max`` and -1 stand for no limit.
        period_us: the period.
    """
    if quota_us.strip() == "max" or int(quota_us) < 0:
        return 0.0
    return int(quota_us) / int(period_us)


def _directories(memberships: str) -> Iterator[str]:
    """Yield the directories in which the files of the group may be, the most exact ones first.

    Args:
        memberships: the text of /proc/self/cgroup.
    """
    roots = []
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            roots.append((_MOUNT, path))
        elif "cpu" in controllers.split(","):
            roots += [(f"{_MOUNT}/{name}", path) for name in (controllers, "cpu")]
    for root, path in roots:
        yield f"{root}{path.rstrip('/')}"
    for root, _ in roots:
        yield root
