"""What holds the nodes of one run back: freezers and limits around all processes of a node, by control groups."""

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
_USED_UP = 0.9  # share of a limit of writes that counts as all of it


class Saturation:
    """In how many windows of a quarter of a second a group has used up what may pass: a pure state machine.

    A window begins with the first byte after the one before it: a job writes now and then.
    """

    def __init__(self, bytes_per_s: float, written_bytes: int, now_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._last = (now_s, written_bytes)
        self._from: tuple[float, int] | None = None
        self.windows = 0

    def note(self, written_bytes: int, now_s: float) -> None:
        """Take in a reading of what was written so far."""
        if self._from is None and written_bytes > self._last[1]:
            self._from = self._last
        self._last = (now_s, written_bytes)
        if self._from is None or now_s - self._from[0] < _WINDOW_S:
            return
        from_s, from_bytes = self._from
        self.windows += written_bytes - from_bytes >= _USED_UP * self._bytes_per_s * (
            now_s - from_s
        )
        self._from = None


class Hold:
    """One freeze or limit of a node, until it is lifted."""

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
        self._is_count, self._seen = is_count, 0
        self._over: bool | None = None  # once let go: whether nothing is left

    @property
    def path(self) -> Path:
        """The directory of the control group."""
        return self._group.path

    def shown(self) -> int:
        if self._over is None:
            try:
                self._seen = self._count()
            except OSError:
                self._seen = self._seen if self._is_count else 0
        return self._seen if self._is_count or self._over is None else 0

    def lift(self) -> bool:
        """Let the node go; True if nothing is left. What was counted stays known."""
        if self._over is None:
            self.shown()
            with contextlib.suppress(OSError):  # the group is gone
                self._undo()
            self._over = self._release()
        return self._over


class Holds:
    """The backend that freezes and limits nodes of one run. All processes of a node are in one group for each
    hierarchy, as version 2 wants it.

    Args:
        processes: of a node that is named, agent first.
        directory: of the run; the disk below it is the one to which writes are limited.
        prefer: the version of cgroup to use where both have a controller; as in :func:`find_place`.
    """

    def __init__(
        self,
        undo: UndoLog,
        processes: Callable[[str], Sequence[Process]],
        directory: Path,
        *,
        prefer: int | None = None,
    ) -> None:
        self.actions = frozenset(NODE_CONTROLLERS)
        self._undo, self._processes, self._directory, self._prefer = (
            undo,
            processes,
            directory,
            prefer,
        )
        self._groups: dict[str, dict[Path, tuple[Cgroup, list[Hold]]]] = {}

    def apply(self, node: str, action: Action) -> Hold:
        controller = NODE_CONTROLLERS[type(action)]
        with _told(f"apply {type(action).__name__} to", node), self._without_idle_groups(node):
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
        """Where the kernel refuses something, remove the groups that were made for that; others hold the node still."""
        try:
            yield
        except BaseException:
            groups = self._groups.get(node, {})
            for path in [path for path, (_, holds) in groups.items() if not holds]:
                groups.pop(path)[0].remove()
            raise

    def _cap_writes(self, node: str, bytes_per_s: float) -> Hold:
        device = device_of(self._directory)
        if device is None:
            raise HarnessError(
                f"{self._directory} lies on no disk that can limit writes: choose another one"
            )
        group = self._group(node, NODE_CONTROLLERS[CapWrites])
        group.limit_writes(device, round(bytes_per_s))
        seen = Saturation(bytes_per_s, group.written_bytes(device), time.monotonic())

        def windows() -> int:
            seen.note(group.written_bytes(device), time.monotonic())
            return seen.windows

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
        """A group with all processes of the node: those that it starts meanwhile are born into it."""
        processes = self._processes(node)
        if not processes:
            raise ProcessLookupError(f"{node} has no process any more")
        agent, groups = processes[0], self._groups.setdefault(node, {})
        home = home_of(controller, agent.pid, self._prefer)
        known = groups.get(home) if home else None
        group = (
            known[0]
            if known
            else Cgroup(controller, agent.pid, agent.ticks, self._undo, self._prefer)
        )
        groups.setdefault(group.path, (group, []))
        deadline_s = time.monotonic() + _GATHER_S
        while strangers := {process.pid for process in processes} - group.pids():
            if time.monotonic() > deadline_s:
                raise HarnessError(
                    f"processes {sorted(strangers)} of {node} do not enter {group.path}"
                )
            for pid in strangers:
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
        """``is_count``: whether it only ever grows; else it says how things are now."""
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
    """The backend that limits single processes of one run's nodes, each by a control group of its own."""

    actions = frozenset({CapProcessCpu, CapProcessMemory})

    def __init__(self, undo: UndoLog) -> None:
        self._undo = undo
        self._holds: dict[str, list[Hold]] = {}  # by node

    def apply(self, node: str, action: Action) -> Hold:
        with _told(f"apply {type(action).__name__} to a process of", node):
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
    try:
        yield
    except BaseException:
        hold.lift()
        raise


@contextlib.contextmanager
def _told(act: str, node: str) -> Iterator[None]:
    try:
        yield
    except ProcessLookupError:
        raise
    except OSError as error:
        raise HarnessError(f"the kernel refused to {act} {node}: {error}") from error
