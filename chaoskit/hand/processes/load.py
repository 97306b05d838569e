"""CPU load in the cgroup of this process, so that the others there get less of its CPU limit.

The load is made by children of this process, which the kernel ends with it.

-> ``hand/processes/operations.py`` begins it; ``hand/processes/cpu_group.py``: the limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from .. import PROGRAM_NAME
from ..effects import LastingEffect
from ..refusals import Unable
from . import proc
from .cpu_group import own_cpu_group

#: Time of a measurement of the others: before the load begins, and of each count of its effects.
_WINDOW_S = 1.0
_LOOKS = 10  # at the others before the load, at regular times
#: Limits of the number of children, so that the hand itself gets enough CPU time for its answers.
_BURNERS_MIN, _BURNERS_MAX, _BURNERS_FOR_CPU = 8, 64, 16
#: Time in which a child uses CPU time once and pauses once.
_CYCLE_S = 0.01
#: The load has an effect if the others use this share of their former CPU time at most ...
_EFFECT_SHARE = 0.9
#: ... and their threads wait longer for a CPU, by this part of the time that they lost at least.
_EFFECT_WAIT = 0.25
_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class CpuUse(NamedTuple):
    """The use of CPUs by the threads of this pid namespace but those of hands, up to a moment.

    Attributes:
        at_s: the moment, by ``time.monotonic``.
        by_thread_ns: CPU time, and time in which it was ready and had no CPU, by pid and tid.
    """

    at_s: float
    by_thread_ns: dict[tuple[int, int], tuple[int, int]]


class CpuRates(NamedTuple):
    """The use of CPUs between two moments, in seconds a second, by threads that live at both."""

    cpu: float
    waited: float


class BurnerPlan(NamedTuple):
    """The number of children that use CPU time, and the part of a CPU that each of them wants."""

    children: int
    duty: float


class Load(LastingEffect):
    """Children that use CPU time, as many as leave the others ``cores`` of the group's limit.

    The children begin after a second, in which the others are measured. From then on, each second
    counts if the others used less CPU time than before, and waited longer for a CPU.

    Args:
        cores: number of CPUs that the others keep, if they are always ready to run.

    Raises:
        Unable: if the cgroup has no CPU limit above ``cores``.
    """

    kind = "load"

    def __init__(self, cores: float) -> None:
        group = own_cpu_group()
        if group is None:
            reason = "the cgroup of this hand has no CPU limit that can be read"
            raise Unable(reason, "set a CPU limit of the container, and start the hand by exec")
        if cores >= group.limit_cores:
            reason = f"the CPU limit of the container is {group.limit_cores:g} already"
            raise Unable(reason, "leave it fewer CPUs")
        self._group, self._cores = group, cores
        self._burners: list[int] = []
        self._uses, self._runnable = [cpu_use()], list[int]()
        self._former = CpuRates(0.0, 0.0)
        self._latest = CpuRates(0.0, 0.0)
        self._window_periods = self._periods = 0
        self._next_s = self._uses[0].at_s + _WINDOW_S / _LOOKS

    def next_act_s(self) -> float:
        """Return the time of the next measurement."""
        return self._next_s

    def act(self, now_s: float) -> str:
        """Measure the others, and begin the load after the first second."""
        if now_s < self._next_s:
            return ""
        self._uses.append(cpu_use())
        if not self._burners:
            self._runnable.append(runnable_threads())
            self._next_s = self._uses[-1].at_s + _WINDOW_S / _LOOKS
            return self._begin() if len(self._runnable) >= _LOOKS else ""
        if not any(_is_child(pid) for pid in self._burners):
            return "failed"
        self._count()
        return ""

    def evidence(self) -> dict[str, Any]:
        """Return the CPU time of the others before and now, and the periods that count."""
        return {
            "limit_cores": self._group.limit_cores,
            "burners": sum(_is_child(pid) for pid in self._burners),
            "periods": self._periods,
            "cores_before": round(self._former.cpu, 3),
            "cores_now": round(self._latest.cpu, 3),
            "waited_before": round(self._former.waited, 3),
            "waited_now": round(self._latest.waited, 3),
        }

    def end(self) -> dict[str, Any]:
        """End the children, and return the signs of the load until then."""
        evidence = self.evidence()
        for pid in self._burners:
            if _is_child(pid):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # it was waited for by the tracer
                os.waitpid(pid, 0)
        self._burners = []
        return evidence

    def _begin(self) -> str:
        """Note the former use of the others, and start the children. Return why it failed, or ""."""
        self._former = rates(self._uses[0], self._uses[-1])
        runnable = max(self._former.cpu, sum(self._runnable) / len(self._runnable))
        plan = burner_plan(runnable, self._group.limit_cores, self._cores)
        for _ in range(plan.children):
            try:
                self._burners.append(_start_burner(plan.duty))
            except OSError as error:  # such as a limit of processes
                return str(error)
        self._begin_window()
        return ""

    def _count(self) -> None:
        """Count the periods of a second in which the others were held back by the load."""
        self._latest = rates(self._uses[0], self._uses[-1])
        if is_effect(self._former, self._latest):
            self._periods += max(0, self._throttled() - self._window_periods)
        self._begin_window()

    def _begin_window(self) -> None:
        self._uses = self._uses[-1:]
        self._window_periods = self._throttled()
        self._next_s = self._uses[0].at_s + _WINDOW_S

    def _throttled(self) -> int:
        return self._group.throttled_periods() or 0


def burner_plan(runnable: float, limit_cores: float, cores: float) -> BurnerPlan:
    """Return the children that leave other threads so many CPUs of a limit.

    The kernel gives each thread that is ready an equal part of the limit.

    Args:
        runnable: number of threads of others that are ready, on average.
        limit_cores: limit of all together, as a number of CPUs.
        cores: number of CPUs that the others keep.
    """
    needed_cpus = runnable * (limit_cores / cores - 1)
    most = min(_BURNERS_MAX, max(_BURNERS_MIN, round(_BURNERS_FOR_CPU * limit_cores)))
    count = min(most, max(1, math.ceil(needed_cpus)))
    return BurnerPlan(count, min(1.0, needed_cpus / count))


def is_effect(former: CpuRates, latest: CpuRates) -> bool:
    """Return whether others were held back: less CPU time for them, and longer waits for it."""
    return (
        former.cpu > 0
        and latest.cpu <= _EFFECT_SHARE * former.cpu
        and latest.waited - former.waited >= _EFFECT_WAIT * (former.cpu - latest.cpu)
    )


def rates(begin: CpuUse, end: CpuUse) -> CpuRates:
    """Return the use of CPUs between two moments, of the threads that live at both."""
    pairs = [
        (begin.by_thread_ns[key], used_ns)
        for key, used_ns in end.by_thread_ns.items()
        if key in begin.by_thread_ns
    ]
    lasted_ns = max(end.at_s - begin.at_s, 1e-3) * 1e9
    cpu, waited = (sum(last[kind] - first[kind] for first, last in pairs) for kind in (0, 1))
    return CpuRates(cpu / lasted_ns, waited / lasted_ns)


def cpu_use() -> CpuUse:
    """Return the use of CPUs by all threads but those of hands and their children."""
    by_thread_ns = {}
    for pid, tid in _other_threads():
        schedule = (proc.read(f"/proc/{pid}/task/{tid}/schedstat") or "").split()
        if len(schedule) > 1:
            by_thread_ns[pid, tid] = int(schedule[0]), int(schedule[1])
    return CpuUse(time.monotonic(), by_thread_ns)


def runnable_threads() -> int:
    """Return the number of threads of others that are ready or running."""
    stats = (proc.read_stat(pid, tid) for pid, tid in _other_threads())
    return sum(stat is not None and stat.state == "R" for stat in stats)


def _other_threads() -> Iterator[tuple[int, int]]:
    """Yield pid and tid of each thread but those of hands and their children."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        stat = proc.read_stat(pid)
        if stat is not None and stat.name != PROGRAM_NAME:
            yield from ((pid, tid) for tid in proc.thread_ids(pid))


def _is_child(pid: int) -> bool:
    """Return whether a child of this process runs."""
    stat = proc.read_stat(pid)
    return stat is not None and not stat.has_ended and stat.parent == os.getpid()


def _start_burner(duty: float) -> int:
    """Start a child that uses a part of a CPU until it is killed, and return its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _burn(parent, duty)
    return pid


def _burn(parent: int, duty: float) -> NoReturn:
    """Use a part of a CPU until the parent has ended."""
    try:
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
            signal.signal(signum, signal.SIG_DFL)
        _libc.prctl(_SET_PDEATHSIG, signal.SIGKILL)
        for descriptor in os.listdir("/proc/self/fd"):  # the streams of the hand, above all
            with contextlib.suppress(OSError):
                os.close(int(descriptor))
        while os.getppid() == parent:
            until_s = time.process_time() + duty * _CYCLE_S  # it stands still while held back
            while time.process_time() < until_s:
                pass
            time.sleep((1 - duty) * _CYCLE_S)
    finally:
        os._exit(0)
