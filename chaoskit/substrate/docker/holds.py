"""Limits that Docker sets on nodes: pause, CPU, memory, processes.

Their effect is read from the kernel.

-> substrate/limits/holds.py: the actions on nodes, and how their effects are counted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from chaoskit.errors import HarnessError
from chaoskit.substrate.core.actions import CapCpu, CapMemory, CapPids, Freeze
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.docker.container import Container
from chaoskit.substrate.limits.cgroup import Cgroup, CgroupPlace, find_place
from chaoskit.substrate.limits.holds import Hold, Holds
from chaoskit.substrate.undo import UndoLog
from chaoskit.substrate.undo.docker_janitor import call, endpoint

#: Actions that Docker carries out, whatever rights this user has over control groups.
BY_DOCKER = frozenset({Freeze, CapCpu, CapMemory, CapPids})
_PERIOD_US = 20_000  # the period of the harness's own groups
_QUOTA_US_MIN = 1_000
_UNLIMITED = -1
_ALL_BYTES = 2**62  # Docker takes no -1 for memory
_EXIT_S = 5.0
_PAUSE_S = 10.0
_OK = 200


class ContainerHolds(Holds):
    """Holds on nodes by the control groups of their containers.

    Args:
        containers: node -> its container; the caller updates the mapping.
    """

    def __init__(
        self,
        undo: UndoLog,
        processes: Callable[[str], Sequence[Process]],
        directory: Path,
        containers: dict[str, Container],
    ) -> None:
        super().__init__(undo, processes, directory)
        self._containers = containers

    def _group(self, node: str, controller: str) -> Cgroup:
        container, groups = self._containers[node], self._groups.setdefault(node, {})
        place = _place(container, controller)
        if place.home not in groups:
            groups[place.home] = (ContainerGroup(container, place), [])
        return groups[place.home][0]

    def _hold(
        self,
        node: str,
        group: Cgroup,
        count: Callable[[], int],
        undo: Callable[[], None],
        *,
        is_count: bool = True,
    ) -> Hold:
        before = count() if is_count else 0  # the group is as old as its container
        return super()._hold(node, group, lambda: count() - before, undo, is_count=is_count)


def _place(container: Container, controller: str) -> CgroupPlace:
    """Return the place of a container's control group, by the mounts of this process.

    The container sees other mounts. Raises ProcessLookupError if the container is gone, and
    HarnessError if the controller is not mounted.
    """
    try:
        mounts, groups = (
            Path("/proc/self/mounts").read_text(),
            Path(f"/proc/{container.pid}/cgroup").read_text(),
        )
    except OSError:
        raise ProcessLookupError(f"{container.station} has no container any more") from None
    version_1 = "".join(
        line for line in mounts.splitlines(keepends=True) if line.split()[2] != "cgroup2"
    )
    # where both versions exist Docker uses version 1, for the freezer, too
    place = find_place(controller, version_1, groups) or find_place(controller, mounts, groups)
    if place is None:
        raise HarnessError(f"no cgroup hierarchy with the {controller} controller is mounted")
    return place


class ContainerGroup(Cgroup):
    """The control group of a container: set through Docker, read from the kernel.

    It vanishes with its container. Methods raise OSError if the kernel or Docker refuses, except
    :meth:`oom_kills` and :meth:`remove`.
    """

    def __init__(self, container: Container, place: CgroupPlace) -> None:
        self._version, self._home, self.path = place.version, place.home, place.home
        self._container = container
        self._kills = 0

    @contextmanager
    def _held_by(self, limit: str, *, on: bool) -> Iterator[None]:
        """Mark the container as held while a limit is on: it must not serve another run.

        The context manager turns errors of Docker into OSError.
        """
        from docker.errors import DockerException

        if on:
            self._container.limits_in_force.add(limit)
        try:
            yield
        except DockerException as error:
            raise OSError(str(error)) from error
        if not on:
            self._container.limits_in_force.discard(limit)

    def limit_cpu(self, cpu_fraction: float | None) -> None:
        quota_us = (
            _UNLIMITED
            if cpu_fraction is None
            else max(_QUOTA_US_MIN, round(cpu_fraction * _PERIOD_US))
        )
        with self._held_by("cpu", on=cpu_fraction is not None):
            self._container.handle.update(cpu_period=_PERIOD_US, cpu_quota=quota_us)

    def limit_memory(self, headroom_bytes: int | None) -> None:
        usage_file = "memory.current" if self._version == 2 else "memory.usage_in_bytes"
        with self._held_by("memory", on=headroom_bytes is not None):
            if headroom_bytes is None:
                # version 1 limits the sum of memory and swap, version 2 limits swap alone
                swap_limit = _UNLIMITED if self._version == 2 else _ALL_BYTES
                self._container.handle.update(mem_limit=_ALL_BYTES, memswap_limit=swap_limit)
            else:
                limit_bytes = int(self._read(usage_file)) + headroom_bytes
                self._container.handle.update(mem_limit=limit_bytes, memswap_limit=limit_bytes)

    def oom_kills(self) -> int:
        """Return the number of processes that the kernel has killed for lack of memory.

        If the kernel chose the supervisor, its container is gone, and the last kill is read from
        Docker.
        """
        try:
            self._kills = super().oom_kills()
        except OSError:
            return self._kills + self._oom_killed()
        return self._kills

    def _oom_killed(self) -> bool:
        """Return whether Docker reports that the container ended for lack of memory.

        Return False if it does not end within 5 s, or Docker cannot be asked.
        """
        with contextlib.suppress(OSError), self._held_by("memory", on=False):
            # the state shows the kill only after the exit
            self._container.handle.wait(timeout=_EXIT_S)
            return bool(self._container.state()["OOMKilled"])
        return False

    def limit_pids(self, further: int | None) -> None:
        limit = _UNLIMITED if further is None else int(self._read("pids.current")) + further
        with self._held_by("pids", on=further is not None):
            # the SDK does not offer this limit
            url = f"/containers/{self._container.handle.id}/update"
            status, text = call(endpoint(), "POST", url, {"PidsLimit": limit})
            if status != _OK:
                raise OSError(f"status {status}: {text}")

    def limit_writes(self, device: str, bytes_per_s: int | None) -> None:
        """Limit writes in the kernel's group itself.

        Docker sets this limit only when it creates a container.
        """
        with self._held_by("io", on=bytes_per_s is not None):
            super().limit_writes(device, bytes_per_s)

    def freeze(self) -> None:
        with self._held_by("freezer", on=True):
            self._pause()

    def _pause(self) -> None:
        """Pause the container, and try again where the kernel did not freeze all processes in time.

        On a busy machine the time that runc gives the kernel may be too short. The tries end after
        10 s. Raises the SDK's errors.
        """
        from docker.errors import APIError

        deadline_s = time.monotonic() + _PAUSE_S
        while True:
            try:
                self._container.handle.pause()
                return
            except APIError as error:
                if "unable to freeze" not in str(error) or time.monotonic() > deadline_s:
                    raise

    def thaw(self) -> None:
        with self._held_by("freezer", on=False):
            self._container.handle.unpause()

    def remove(self) -> bool:
        """Return whether no limit holds the container any more, or the container is gone.

        Nothing is removed: the group stays as long as the container.
        """
        return not self._container.limits_in_force or not self._container.lives()
