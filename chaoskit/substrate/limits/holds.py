"""Backends that freeze and limit nodes of one run, or single processes, by control groups.

-> ``limits/cgroup.py``: how a group is made and limited. ``faults/nodes/limits.py``: the faults.
``docker/holds.py``: the same for containers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from chaoskit.errors import HarnessError
from chaoskit.substrate.core.actions import (
    NODE_CONTROLLERS,
    Action,
    CapCpu,
    CapMemory,
    CapPids,
    CapProcessCpu,
    CapProcessMemory,
    CapWrites,
    Freeze,
)
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.limits.cgroup import Cgroup, home_of
from chaoskit.substrate.limits.device import device_of
from chaoskit.substrate.undo import UndoLog

_GATHER_S = 5.0
_WINDOW_S = 0.25
_USED_UP = 0.9  # share of a write limit that counts as saturation


class Saturation:
    """Counter of the quarter-second windows in which a group has used up its write limit. Pure.

    A window begins with the first byte after the previous window, as a job writes only now and
    then. It counts if at least 90 % of the limit was written in it.

    Args:
        bytes_per_s: the write limit.
        written_bytes: bytes that the group has written by ``now_s``, as in :meth:`note`.

    Attributes:
        windows: number of such windows so far.
    """

    def __init__(self, bytes_per_s: float, written_bytes: int, now_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._last_reading = (now_s, written_bytes)
        self._window_start: tuple[float, int] | None = None
        self.windows = 0

    def note(self, written_bytes: int, now_s: float) -> None:
        """Process a reading of the bytes written so far.

        A full window may raise ``windows`` by 1.
        """
        if self._window_start is None and written_bytes > self._last_reading[1]:
            self._window_start = self._last_reading
        self._last_reading = (now_s, written_bytes)
        if self._window_start is None or now_s - self._window_start[0] < _WINDOW_S:
            return
        from_s, from_bytes = self._window_start
        self.windows += written_bytes - from_bytes >= _USED_UP * self._bytes_per_s * (
            now_s - from_s
        )
        self._window_start = None


class Hold:
    """A freeze or limit in force on a node.

    Args:
        count: reads its current count, or its current state, from the kernel.
        undo: ends the freeze or limit.
        release: gives the group up, and returns True if nothing is left to undo.
        is_count: True if ``count`` only grows; False if it is a state, which is 0 after the end.
    """

    def __init__(
        self,
        group: Cgroup,
        count: Callable[[], int],
        undo: Callable[[], None],
        release: Callable[[], bool],
        *,
        is_count: bool,
    ) -> None:
        self._group, self._count, self._undo, self._release = group, count, undo, release
        self._is_count, self._last_count = is_count, 0
        self._is_clean: bool | None = None  # once lifted: True if nothing is left

    @property
    def path(self) -> Path:
        """The directory of the control group."""
        return self._group.path

    def shown(self) -> int:
        if self._is_clean is None:
            try:
                self._last_count = self._count()
            except OSError:
                self._last_count = self._last_count if self._is_count else 0
        return self._last_count if self._is_count or self._is_clean is None else 0

    def lift(self) -> bool:
        """End the freeze or limit, and return True if nothing is left.

        Its last count stays available; a state is 0 then. A second call returns the same.
        """
        if self._is_clean is None:
            self.shown()
            with contextlib.suppress(OSError):  # the group is gone
                self._undo()
            self._is_clean = self._release()
        return self._is_clean


class Holds:
    """Backend that freezes and limits nodes of one run.

    All processes of a node are in one group per hierarchy, as version 2 requires.

    Args:
        processes: returns the processes of a node, its agent first.
        directory: directory of the run; writes to the disk below it can be limited.
        preferred_version: version of cgroup to use if both have a controller; as in
            :func:`find_place`.
    """

    def __init__(
        self,
        undo: UndoLog,
        processes: Callable[[str], Sequence[Process]],
        directory: Path,
        *,
        preferred_version: int | None = None,
    ) -> None:
        self.actions = frozenset(NODE_CONTROLLERS)
        self._undo, self._processes, self._directory, self._preferred_version = (
            undo,
            processes,
            directory,
            preferred_version,
        )
        self._groups: dict[str, dict[Path, tuple[Cgroup, list[Hold]]]] = {}

    def apply(self, node: str, action: Action) -> Hold:
        controller = NODE_CONTROLLERS[type(action)]
        with (
            _refusals_explained(f"apply {type(action).__name__} to", node),
            self._without_idle_groups(node),
        ):
            match action:
                case Freeze():
                    group = self._group(node, controller)
                    group.freeze()
                    return self._hold(
                        node, group, lambda: int(group.frozen()), group.thaw, is_count=False
                    )
                case CapCpu(cores):
                    group = self._group(node, controller)
                    group.limit_cpu(cores)
                    return self._hold(
                        node, group, lambda: group.throttled()[0], lambda: group.limit_cpu(None)
                    )
                case CapMemory(headroom_bytes):
                    group = self._group(node, controller)
                    group.limit_memory(headroom_bytes)
                    return self._hold(
                        node, group, group.oom_kills, lambda: group.limit_memory(None)
                    )
                case CapPids(further):
                    group = self._group(node, controller)
                    group.limit_pids(further)
                    return self._hold(
                        node, group, group.refused_forks, lambda: group.limit_pids(None)
                    )
                case CapWrites(bytes_per_s):
                    return self._cap_writes(node, bytes_per_s)
        raise AssertionError(action)

    @contextlib.contextmanager
    def _without_idle_groups(self, node: str) -> Iterator[None]:
        """Remove groups that were created for an action that failed.

        Groups with other actions stay.
        """
        try:
            yield
        except BaseException:
            groups = self._groups.get(node, {})
            for path in [path for path, (_, holds) in groups.items() if not holds]:
                groups.pop(path)[0].remove()
            raise

    def _cap_writes(self, node: str, bytes_per_s: float) -> Hold:
        """Limit the writes of a node, and return the limit in force.

        Raises HarnessError if the directory of the run is on no disk, such as on tmpfs.
        """
        device = device_of(self._directory)
        if device is None:
            raise HarnessError(
                f"{self._directory} is on no disk whose writes can be limited: "
                "use a directory on another disk"
            )
        group = self._group(node, NODE_CONTROLLERS[CapWrites])
        group.limit_writes(device, round(bytes_per_s))
        saturation = Saturation(bytes_per_s, group.written_bytes(device), time.monotonic())

        def windows() -> int:
            saturation.note(group.written_bytes(device), time.monotonic())
            return saturation.windows

        return self._hold(node, group, windows, lambda: group.limit_writes(device, None))

    def release(self, node: str | None = None) -> None:
        for name in [node] if node is not None else list(self._groups):
            for group, holds in list(self._groups.pop(name, {}).values()):
                for hold in list(holds):
                    hold.lift()
                group.remove()

    def close(self) -> None:
        self.release()

    def _group(self, node: str, controller: str) -> Cgroup:
        """Return a group with all processes of the node, which is created if there is none yet.

        Processes that they start meanwhile are born into it.

        Raises:
            ProcessLookupError: if the node has no process.
            HarnessError: if a process does not enter the group within 5 s.
        """
        processes = self._processes(node)
        if not processes:
            raise ProcessLookupError(f"{node} has no process any more")
        agent, groups = processes[0], self._groups.setdefault(node, {})
        home = home_of(controller, agent.pid, self._preferred_version)
        existing = groups.get(home) if home else None
        group = (
            existing[0]
            if existing
            else Cgroup(controller, agent.pid, agent.ticks, self._undo, self._preferred_version)
        )
        groups.setdefault(group.path, (group, []))
        deadline_s = time.monotonic() + _GATHER_S
        while outside := {process.pid for process in processes} - group.pids():
            if time.monotonic() > deadline_s:
                raise HarnessError(
                    f"processes {sorted(outside)} of {node} do not enter {group.path}"
                )
            for pid in outside:
                with contextlib.suppress(ProcessLookupError):  # ended meanwhile
                    group.take(pid)
            processes = self._processes(node)
        return group

    def _hold(
        self,
        node: str,
        group: Cgroup,
        count: Callable[[], int],
        undo: Callable[[], None],
        *,
        is_count: bool = True,
    ) -> Hold:
        """Register an action in force on a group, and return it.

        Args:
            is_count: True if ``count`` only grows; False if it shows the current state.
        """
        groups = self._groups[node]
        _, holds = groups[group.path]

        def release() -> bool:
            holds.remove(hold)
            if holds:
                return True
            groups.pop(group.path, None)
            return group.remove()

        hold = Hold(group, count, undo, release, is_count=is_count)
        holds.append(hold)
        return hold


class ProcessHolds:
    """Backend that limits single processes of nodes, each by a control group of its own.

    Children that a limited process starts later are limited with it.
    """

    actions = frozenset({CapProcessCpu, CapProcessMemory})

    def __init__(self, undo: UndoLog) -> None:
        self._undo = undo
        self._holds: dict[str, list[Hold]] = {}  # by node

    def apply(self, node: str, action: Action) -> Hold:
        with _refusals_explained(f"apply {type(action).__name__} to a process of", node):
            match action:
                case CapProcessCpu(pid, ticks, share):
                    group = Cgroup("cpu", pid, ticks, self._undo)
                    hold = self._hold(node, group, lambda: group.throttled()[0])
                    with _lifted_on_error(hold):
                        group.limit_cpu(share)
                    return hold
                case CapProcessMemory(pid, ticks, headroom_bytes):
                    group = Cgroup("memory", pid, ticks, self._undo)
                    hold = self._hold(node, group, group.oom_kills)
                    with _lifted_on_error(hold):
                        group.limit_memory(headroom_bytes)
                    return hold
        raise AssertionError(action)

    def _hold(self, node: str, group: Cgroup, count: Callable[[], int]) -> Hold:
        """Register a limit on a process of a node, and return it."""
        hold = Hold(group, count, lambda: None, group.remove, is_count=True)
        self._holds.setdefault(node, []).append(hold)
        return hold

    def release(self, node: str | None = None) -> None:
        for name in [node] if node is not None else list(self._holds):
            for hold in self._holds.pop(name, []):
                hold.lift()

    def close(self) -> None:
        self.release()


@contextlib.contextmanager
def _lifted_on_error(hold: Hold) -> Iterator[None]:
    """Lift a hold if the body of a ``with`` fails."""
    try:
        yield
    except BaseException:
        hold.lift()
        raise


@contextlib.contextmanager
def _refusals_explained(act: str, node: str) -> Iterator[None]:
    """Turn OSError of the kernel into HarnessError, but not ProcessLookupError.

    Args:
        act: words of the message before the node, such as "apply Freeze to".
    """
    try:
        yield
    except ProcessLookupError:
        raise
    except OSError as error:
        raise HarnessError(f"the kernel refused to {act} {node}: {error}") from error
