"""What Docker can do to a node: pause it, and limit what it may use. Whether it did is read from the kernel."""

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
from chaoskit.substrate.limits.cgroup import Cgroup, Place, find_place
from chaoskit.substrate.limits.holds import Hold, Holds
from chaoskit.substrate.undo import UndoLog
from chaoskit.substrate.undo.docker_janitor import call, endpoint

#: What Docker does to a container, whatever this user may do to control groups.
BY_DOCKER = frozenset({Freeze, CapCpu, CapMemory, CapPids})
_PERIOD_US = 20_000  # as in a group of our own
_QUOTA_US_MIN = 1_000
_UNLIMITED = -1
_ALL_BYTES = 2**62  # Docker takes no -1 for memory
_EXIT_S = 5.0
_PAUSE_S = 10.0
_OK = 200


class ContainerHolds(Holds):
    """The same holds as of other nodes, on the groups of their containers.

    Args:
        containers: by node, as they are now.
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


def _place(container: Container, controller: str) -> Place:
    """Where the kernel keeps the container's group, by our own mounts: it sees others."""
    try:
        mounts, groups = (
            Path("/proc/self/mounts").read_text(),
            Path(f"/proc/{container.pid}/cgroup").read_text(),
        )
    except OSError:
        raise ProcessLookupError(f"{container.station} has no container any more") from None
    first = "".join(
        line for line in mounts.splitlines(keepends=True) if line.split()[2] != "cgroup2"
    )
    # where there are both versions Docker uses the first one, for the freezer, too
    place = find_place(controller, first, groups) or find_place(controller, mounts, groups)
    if place is None:
        raise HarnessError(f"no cgroup hierarchy with the {controller} controller is mounted")
    return place


class ContainerGroup(Cgroup):
    """The group of a container: set through Docker, read from the kernel. It goes with its container.

    Where the kernel or Docker refuses, all raise OSError.
    """

    def __init__(self, container: Container, place: Place) -> None:
        self._version, self._home, self.path = place.version, place.home, place.home
        self._container = container
        self._kills = 0

    @contextmanager
    def _held_by(self, what: str, *, on: bool) -> Iterator[None]:
        """While something is held the container is not to be used for another run."""
        from docker.errors import DockerException

        if on:
            self._container.held.add(what)
        try:
            yield
        except DockerException as error:
            raise OSError(str(error)) from error
        if not on:
            self._container.held.discard(what)

    def limit_cpu(self, cpu_fraction: float | None) -> None:
        quota_us = (
            _UNLIMITED
            if cpu_fraction is None
            else max(_QUOTA_US_MIN, round(cpu_fraction * _PERIOD_US))
        )
        with self._held_by("cpu", on=cpu_fraction is not None):
            self._container.handle.update(cpu_period=_PERIOD_US, cpu_quota=quota_us)

    def limit_memory(self, headroom_bytes: int | None) -> None:
        used = "memory.current" if self._version == 2 else "memory.usage_in_bytes"
        with self._held_by("memory", on=headroom_bytes is not None):
            if headroom_bytes is None:
                # by version 1 the limit of both together is set last, and must be no less; by 2 that of swap alone
                both = _UNLIMITED if self._version == 2 else _ALL_BYTES
                self._container.handle.update(mem_limit=_ALL_BYTES, memswap_limit=both)
            else:
                most = int(self._read(used)) + headroom_bytes
                self._container.handle.update(mem_limit=most, memswap_limit=most)

    def oom_kills(self) -> int:
        """Where the kernel has chosen the supervisor, its container is gone, and only Docker can tell."""
        try:
            self._kills = super().oom_kills()
        except OSError:
            return self._kills + self._oom_killed()
        return self._kills

    def _oom_killed(self) -> bool:
        with contextlib.suppress(OSError), self._held_by("memory", on=False):
            self._container.handle.wait(timeout=_EXIT_S)  # before that it is not known
            return bool(self._container.state()["OOMKilled"])
        return False

    def limit_pids(self, further: int | None) -> None:
        most = _UNLIMITED if further is None else int(self._read("pids.current")) + further
        with self._held_by("pids", on=further is not None):
            # the SDK has no word for it
            url = f"/containers/{self._container.handle.id}/update"
            status, said = call(endpoint(), "POST", url, {"PidsLimit": most})
            if status != _OK:
                raise OSError(f"status {status}: {said}")

    def limit_writes(self, device: str, bytes_per_s: int | None) -> None:
        """In the container's group itself: Docker sets this only when it makes a container."""
        with self._held_by("io", on=bytes_per_s is not None):
            super().limit_writes(device, bytes_per_s)

    def freeze(self) -> None:
        with self._held_by("freezer", on=True):
            self._pause()

    def _pause(self) -> None:
        """On a busy machine the kernel may not freeze all processes in the time that runc gives it: ask again."""
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
        """Whether nothing holds the container any more. The group stays with it."""
        return not self._container.held or not self._container.lives()
