"""Linux process facilities that the standard library does not wrap: death signals, subreapers, /proc."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import getpass
import math
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

#: Errors of a write that may succeed later: the disk, or a quota of it, is full.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4
_FALLOC_FL_KEEP_SIZE = 0x1
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 2**25  # the most that glibc takes
_MODEST = 10  # about a tenth of the time of whoever else wants a CPU

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends. Exits at once if that has happened already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os._exit(1)


def die_of(error: BaseException) -> NoReturn:
    """End this process at once, from any thread: what went wrong in a part of it must not go on unseen."""
    print_error(error)
    os._exit(1)


def print_error(error: BaseException) -> None:
    """Write a traceback to the log of this process, if there is room: a full disk must not take the place of it."""
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
        sys.stderr.flush()


def print_line(line: str) -> None:
    """Write a line to the log of this process, if there is room: no decision depends on it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")


def reserve(fd: int, end: int) -> None:
    """Have a file keep room up to the offset ``end``, where its file system can: then it grows on a full disk, too."""
    fallocate = getattr(_libc, "fallocate64", None)
    if fallocate is not None:
        fallocate(fd, _FALLOC_FL_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(end))


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be ended too."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """The name of the calling thread in ``ps -L`` and ``top`` (15 bytes)."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15])


def raise_priority() -> None:
    """Run before ordinary processes, where that is allowed: for those whose few microseconds decide a recovery."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let no ordinary process take this thread's CPU meanwhile, where that is allowed. For acts of microseconds.

    What it starts meanwhile is an ordinary process.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    lowest = os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO))
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, lowest)
    try:
        yield
    finally:
        try:
            os.sched_setscheduler(0, policy, parameters)
        except (
            PermissionError
        ):  # only a privileged thread may have its children inherit a policy again
            with contextlib.suppress(PermissionError):
                os.sched_setscheduler(0, policy | os.SCHED_RESET_ON_FORK, parameters)


def lower_priority(niceness: int) -> None:
    """Run the calling thread after those that are less nice, unless it is nicer already and may not go back."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


def may_raise_priority() -> bool:
    """Whether the calling thread may take niceness back. What is nicer for a while only must be able to."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, niceness - 1)
    except PermissionError:
        return False
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    return True


def await_readable(descriptors: Iterable[int], timeout_s: float | None = None) -> list[int]:
    """Wait until some of ``descriptors`` can be read, or have hung up; which ones, none at the end of the time.

    ``select`` takes no descriptor above 1,023.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [
        descriptor
        for descriptor, _ in poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
    ]


class DirectoryWatch:
    """Becomes readable when a file in one of some directories grows, or a file comes there (inotify)."""

    _GROWS, _COMES, _OVERFLOW = (
        0x2,
        0x180,
        0x4000,
    )  # IN_MODIFY, IN_CREATE | IN_MOVED_TO, IN_Q_OVERFLOW
    _EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name behind it

    def __init__(self, directories: Iterable[Path]) -> None:
        self._directories: dict[int, Path] = {}
        self._fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        for directory in directories:
            watch = _libc.inotify_add_watch(
                self._fd, os.fsencode(directory), self._GROWS | self._COMES
            )
            if watch < 0:
                os.close(self._fd)
                raise OSError(ctypes.get_errno(), "inotify_add_watch", str(directory))
            self._directories[watch] = directory

    def fileno(self) -> int:
        return self._fd

    def clear(self) -> None:
        """Forget what happened so far."""
        self.changed()

    def changed(self) -> set[Path]:
        """The files that came or have grown since this was last asked."""
        found = set[Path]()
        with contextlib.suppress(BlockingIOError):
            while events := os.read(self._fd, 65536):
                found.update(self._files(events))
        return found

    def _files(self, events: bytes) -> Iterator[Path]:
        at = 0
        while at < len(events):
            watch, mask, _, length = self._EVENT.unpack_from(events, at)
            at += self._EVENT.size + length
            if mask & self._OVERFLOW:  # there were more than the kernel keeps
                for directory in self._directories.values():
                    yield from directory.iterdir()
            elif length and watch in self._directories:
                yield self._directories[watch] / os.fsdecode(events[at - length : at].rstrip(b"\0"))

    def close(self) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def socket_name(path: Path) -> Iterator[str]:
    """A name by which a Unix socket can be bound or connected, however long its path is: the kernel takes 107 bytes."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def more_files() -> str:
    """The limit of open files that this process has, and the remedy."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"a process may open {limit} files here; allow more (`ulimit -n`)"


def reason_of(error: BaseException) -> str:
    """Return an exception as one line; one of a file that may not grow names the limit of this process."""
    reason = f"{type(error).__name__}: {error}"
    return (
        f"{reason}; {file_size_limit()}" if getattr(error, "errno", None) == errno.EFBIG else reason
    )


def file_size_limit() -> str:
    """Return the limit of the size of files that this process has, and the remedy."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return "this process has no limit of the size of files, so it is one of the file system"
    return f"files may have {limit} bytes here; allow more (`ulimit -f unlimited`)"


def host_id() -> str:
    """Equal on two processes exactly if they are on one host: one boot of one kernel, one network, one list of pids.

    Nodes that have networks of their own are hosts of their own, though one kernel runs them all: what passes between
    them must cross the network that a fault can cut.
    """
    return f"{kernel_id()}/{os.readlink('/proc/self/ns/net')}"


def kernel_id() -> str:
    """Equal on two processes exactly if one can see the other in /proc."""
    return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}"


@functools.cache
def cpu_model() -> str:
    """The processor, as its maker names it."""
    with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        named = next((line for line in file if line.startswith("model name")), "")
    return named.partition(":")[2].strip() or platform.machine()


def core_count() -> float:
    """How many cores this process may use: those that it may run on, and no more than the quota of its group."""
    return min(float(len(os.sched_getaffinity(0))), *_quotas())


def _quotas() -> list[float]:
    quotas = [math.inf]
    with contextlib.suppress(OSError, ValueError):
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        quotas.append(int(most) / int(period))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup/cpu")
        most, period = (
            group.joinpath(f"cpu.cfs_{name}_us").read_text("ascii") for name in ("quota", "period")
        )
        quotas.append(int(most) / int(period) if int(most) > 0 else math.inf)
    return quotas


def boot_id() -> str:
    """Return what the kernel has named this boot of itself: monotonic clocks are equal within one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third (state) on; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def start_ticks(pid: int) -> int | None:
    """Start time in clock ticks since boot: with the pid, the identity of a process. None if it is gone."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def state(pid: int) -> str | None:
    """R, S, D, T (stopped), Z (zombie) ... or None if the process is gone."""
    fields = _stat_fields(pid)
    return fields[0] if fields else None


def is_stopped(pid: int, ticks: int | None) -> bool:
    """Whether the process that started at ``ticks`` is stopped by a signal."""
    fields = _stat_fields(pid)
    return fields is not None and fields[0] == "T" and int(fields[19]) == ticks


def parent(pid: int) -> int | None:
    """Pid of the parent; None if the process is gone."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else None


def ended_by(pid: int, ticks: int | None) -> int | None:
    """The wait status of a process that has ended and that its parent has not looked at; None for any other one."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] != "Z" or int(fields[19]) != ticks or len(fields) < 50:
        return None
    return int(fields[49])


def reap() -> dict[int, int]:
    """Children that have ended, with their wait statuses."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def describe_status(status: int) -> tuple[str, str]:
    """A wait status in words: ("exited", "status 1"), ("killed", "SIGKILL") or ("dumped", "SIGSEGV")."""
    if os.WIFEXITED(status):
        return "exited", f"status {os.WEXITSTATUS(status)}"
    return "dumped" if os.WCOREDUMP(status) else "killed", signal_name(os.WTERMSIG(status))


def is_ending(pid: int) -> bool:
    """Whether the process is gone, a zombie, or so far into its exit that no code of it runs any more."""
    fields = _stat_fields(pid)
    return fields is None or fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)


def thread_state(pid: int, tid: int) -> str | None:
    """The same as :func:`state`, of one thread."""
    try:
        return Path(f"/proc/{pid}/task/{tid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def cpu_ticks(pid: int, tid: int) -> int | None:
    """CPU time of one thread in clock ticks; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/task/{tid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def switches(pid: int, tid: int) -> int | None:
    """How often the kernel has switched a thread off a CPU so far; None if it is gone. Constant while it sleeps."""
    try:
        lines = Path(f"/proc/{pid}/task/{tid}/status").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches:" in line)


def threads(pid: int) -> dict[int, str]:
    """Names of the threads of a process, by tid; empty if it is gone."""
    found = {}
    with contextlib.suppress(OSError):
        for tid in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found[int(tid)] = Path(f"/proc/{pid}/task/{tid}/comm").read_text().strip()
    return found


class Starvation:
    """How long a thread was ready to run but had no CPU. Keeps its /proc files open: they are read many times a second.

    The kernel adds a wait to its account only when it is over. One that lasts is seen by a thread that is in state R
    and neither runs nor is charged for its wait; it counts from the reading before on.
    """

    def __init__(self, pid: int, tid: int) -> None:
        self._fds: list[int] = []
        with contextlib.suppress(OSError):
            for name in ("schedstat", "stat"):
                self._fds.append(
                    os.open(f"/proc/{pid}/task/{tid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
                )
        self._account: list[bytes] = []
        self._since_ns = 0  # when it was last seen to run, or to have no wish to

    def read_ns(self) -> int:
        """Nanoseconds in all; 0 where the kernel does not tell, or the thread is gone."""
        try:
            schedstat, stat = self._fds
            now_ns, account = time.monotonic_ns(), os.pread(schedstat, 128, 0).split()
            if account != self._account or b") R " not in os.pread(stat, 256, 0):
                self._account, self._since_ns = account, now_ns
            return int(account[1]) + now_ns - self._since_ns
        except (OSError, IndexError, ValueError):
            return 0

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def step_back() -> None:
    """Let others have the CPUs first from now on, also while the kernel frees this process: 90 ms a GB of memory.

    To be called by the leader of a session: kernels with autogroups share CPUs out among sessions, and look at the
    niceness of a thread only within its own.
    """
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(
                os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _MODEST)
            )
    with contextlib.suppress(OSError):  # a kernel without them
        Path("/proc/self/autogroup").write_text(str(_MODEST), encoding="ascii")


def keep_freed_memory() -> None:
    """Have glibc keep what is freed: gradients come back every step, and new pages cost more than their sums."""
    mallopt = getattr(_libc, "mallopt", None)  # other C libraries decide by themselves
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def children(pid: int) -> list[int]:
    """Pids of the direct children of a process, whichever of its threads has started them."""
    found = list[int]()
    with contextlib.suppress(OSError):  # the process has ended
        for tid in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has
                found += [
                    int(child)
                    for child in Path(f"/proc/{pid}/task/{tid}/children").read_text().split()
                ]
    return found


def descendants(pid: int) -> list[int]:
    """Pids of all processes below a process, the nearest first."""
    below = children(pid)
    for child in below:
        below += children(child)  # the list grows while it is walked
    return below


def variables(pid: int) -> dict[str, str]:
    """Return the variables with which a process was started; none of a process that may not be read, or is gone."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in data.decode(errors="replace").split("\0"))
    return {
        name: value for name, _, value in reversed([*pairs])
    }  # of two, the first one counts, as for getenv


def restore_signals() -> None:
    """Unblock all signals, and have ended children wait to be asked: a process inherits otherwise from its parent."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def process_name(pid: int) -> str:
    """What ``ps`` calls a process; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


class TcpTroubles(NamedTuple):
    """What TCP of one network namespace has noticed so far.

    Attributes:
        losses: segments that were sent again, without those of which the other side said that it had them already.
        resets: connections that the other side reset or refused.
    """

    losses: int = 0
    resets: int = 0


def tcp_troubles(pid: int, ticks: int | None) -> TcpTroubles:
    """The troubles in the network namespace of the process that started at ``ticks``; none where it is gone.

    The counters are those of /proc/net/snmp (RFC 4022) and /proc/net/netstat. A busy machine answers late, and what is
    sent again for that is answered by a duplicate SACK (RFC 2883).
    """
    count: Counter[str] = Counter()
    if ticks is None or start_ticks(pid) != ticks:
        return TcpTroubles()
    try:
        for name in ("snmp", "netstat"):
            lines = [
                line.split() for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
            ]
            for names, values in zip(lines[::2], lines[1::2], strict=True):
                if names[0] in ("Tcp:", "TcpExt:"):
                    count.update(dict(zip(names[1:], map(int, values[1:]), strict=True)))
    except OSError:
        return TcpTroubles()
    needless = (
        count["TCPDSACKRecvSegs"] or count["TCPDSACKRecv"] + count["TCPDSACKOfoRecv"]
    )  # since Linux 5.9, before
    own_resets = count["TCPAbortOnClose"] + count["TCPAbortOnData"] + count["TCPAbortOnTimeout"]
    return TcpTroubles(
        count["RetransSegs"] - needless, count["EstabResets"] + count["AttemptFails"] - own_resets
    )


def signal_name(signum: int) -> str:
    """``SIGKILL``, ``SIGRTMIN+1``; ``signal 99`` where there is no name. Most real-time signals have none in Python."""
    with contextlib.suppress(ValueError):
        return signal.Signals(signum).name
    offset = signum - signal.SIGRTMIN
    return (
        f"SIGRTMIN+{offset}"
        if 0 < offset < signal.SIGRTMAX - signal.SIGRTMIN
        else f"signal {signum}"
    )


def kill_if_same(pid: int, ticks: int | None, signum: int) -> bool:
    """Send a signal through a pidfd, only if ``pid`` still is the process that started at ``ticks``."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if ticks is not None and start_ticks(pid) != ticks:
            return False
        signal.pidfd_send_signal(handle, signum)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def current_test() -> str:
    """Return the test that pytest runs in this process, as pytest names it; "" outside of a test."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[
        0
    ]  # behind it stands the phase of the test


def user_at_host() -> str:
    """The user of this process and the machine: ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
