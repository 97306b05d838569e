"""Linux process facilities that the standard library lacks: death signals, subreapers, /proc.

-> substrate/supervisor/programs.py starts and ends the processes of a node;
substrate/limits/cgroup.py limits them.
"""

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

#: Errors of a write that may succeed later: the disk or a quota is full.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4
_FALLOC_FL_KEEP_SIZE = 0x1
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 2**25  # the most that glibc accepts
_MODEST = 10  # about a tenth of the CPU time of a competing process

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends.

    Exit at once, with status 1, if the parent is gone already.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os._exit(1)


def die_of(error: BaseException) -> NoReturn:
    """Print an error and end this process at once, from any thread, with status 1.

    A failed part must not leave the other parts running unnoticed.
    """
    print_error(error)
    os._exit(1)


def print_error(error: BaseException) -> None:
    """Write a traceback to stderr, the log of this process.

    A full disk is ignored, as its error would hide the first one.
    """
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
        sys.stderr.flush()


def print_line(line: str) -> None:
    """Write a line to stderr, the log of this process.

    A full disk is ignored, as no decision depends on the line.
    """
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")


def reserve(fd: int, end: int) -> None:
    """Reserve disk space for a file up to the offset ``end``, if its file system can.

    The file can then grow on a full disk, too. Its size does not change, and errors are ignored.
    """
    fallocate = getattr(_libc, "fallocate64", None)
    if fallocate is not None:
        fallocate(fd, _FALLOC_FL_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(end))


def adopt_orphans() -> None:
    """Become the parent of descendants when their own parent ends, so that they can be ended."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Set the name of the calling thread in ``ps -L`` and ``top`` (15 bytes)."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15])


def raise_priority() -> None:
    """Raise the priority of this process above ordinary ones; without permission, change nothing.

    It is for processes on which the duration of a recovery depends.
    """
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep ordinary processes off this thread's CPU for the duration of a ``with``, if permitted.

    It is for acts of microseconds. Processes that are started meanwhile are ordinary ones.
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
        except PermissionError:  # only a privileged thread may clear the flag
            with contextlib.suppress(PermissionError):
                os.sched_setscheduler(0, policy | os.SCHED_RESET_ON_FORK, parameters)


def lower_priority(niceness: int) -> None:
    """Set the niceness of the calling thread.

    A thread that is nicer already stays so if it may not raise its priority.
    """
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


def may_raise_priority() -> bool:
    """Return whether the calling thread may raise its priority, to undo a temporary lowering."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, niceness - 1)
    except PermissionError:
        return False
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    return True


def await_readable(descriptors: Iterable[int], timeout_s: float | None = None) -> list[int]:
    """Return those of ``descriptors`` that can be read or have hung up; none after ``timeout_s``.

    Without a timeout, wait until there is one. Unlike ``select``, it accepts descriptors above
    1,023.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [
        descriptor
        for descriptor, _ in poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
    ]


class DirectoryWatch:
    """Descriptor that is readable when a file in some directories grows or appears (inotify).

    Raises:
        OSError: if a directory cannot be watched, or the limits of inotify are reached.
    """

    # IN_MODIFY, IN_CREATE | IN_MOVED_TO, IN_Q_OVERFLOW
    _GROWS, _COMES, _OVERFLOW = 0x2, 0x180, 0x4000
    _EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows

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
        """Return the descriptor to wait for."""
        return self._fd

    def clear(self) -> None:
        """Forget all changes so far."""
        self.changed()

    def changed(self) -> set[Path]:
        """Return the files that have appeared or grown since the last call, without waiting.

        After an overflow of the kernel's queue, all files of the directories are returned.
        """
        files = set[Path]()
        with contextlib.suppress(BlockingIOError):
            while events := os.read(self._fd, 65536):
                files.update(self._files(events))
        return files

    def _files(self, events: bytes) -> Iterator[Path]:
        offset = 0
        while offset < len(events):
            watch, mask, _, length = self._EVENT.unpack_from(events, offset)
            offset += self._EVENT.size + length
            if mask & self._OVERFLOW:  # the kernel's queue was full
                for directory in self._directories.values():
                    yield from directory.iterdir()
            elif length and watch in self._directories:
                yield self._directories[watch] / os.fsdecode(
                    events[offset - length : offset].rstrip(b"\0")
                )

    def close(self) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def socket_name(path: Path) -> Iterator[str]:
    """Yield a name under which a Unix socket can be bound or connected, however long its path is.

    The kernel accepts 107 bytes. The name holds inside the ``with``.

    Raises:
        OSError: if the directory of the socket cannot be opened.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def more_files() -> str:
    """Return a sentence with the limit of open files of this process, and the remedy."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"a process may open {limit} files here; allow more (`ulimit -n`)"


def reason_of(error: BaseException) -> str:
    """Return an exception as text: its class and its message.

    For EFBIG, the file size limit of this process is added.
    """
    reason = f"{type(error).__name__}: {error}"
    return (
        f"{reason}; {file_size_limit()}" if getattr(error, "errno", None) == errno.EFBIG else reason
    )


def file_size_limit() -> str:
    """Return a sentence with the limit of file sizes of this process, and the remedy."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return "this process has no limit of the size of files, so the limit is the file system's"
    return f"files may have {limit} bytes here; allow more (`ulimit -f unlimited`)"


def host_id() -> str:
    """Return an identity that is equal for two processes exactly if they are on one host.

    A host is one boot of one kernel, one network and one list of pids. Nodes with networks of their
    own count as hosts of their own, though one kernel runs them all. Traffic between them must
    cross the network that a fault can cut.
    """
    return f"{kernel_id()}/{os.readlink('/proc/self/ns/net')}"


def kernel_id() -> str:
    """Return an identity that is equal for two processes exactly if they share /proc.

    Each of the two can then see the other there.
    """
    return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}"


@functools.cache
def cpu_model() -> str:
    """Return the name of the processor, or the machine type if the kernel gives no name."""
    with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        model_line = next((line for line in file if line.startswith("model name")), "")
    return model_line.partition(":")[2].strip() or platform.machine()


def core_count() -> float:
    """Return how many cores this process may use; a fraction if a quota limits them.

    The affinity and the quota of the control group count.
    """
    return min(float(len(os.sched_getaffinity(0))), *_cpu_quotas())


def _cpu_quotas() -> list[float]:
    quotas = [math.inf]
    with contextlib.suppress(OSError, ValueError):
        quota_us, period_us = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        quotas.append(int(quota_us) / int(period_us))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup/cpu")
        quota_us, period_us = (
            group.joinpath(f"cpu.cfs_{name}_us").read_text("ascii") for name in ("quota", "period")
        )
        quotas.append(int(quota_us) / int(period_us) if int(quota_us) > 0 else math.inf)
    return quotas


def boot_id() -> str:
    """Return the identity of this boot of the kernel.

    Monotonic clocks are equal within one boot.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third (state) on; None without a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it is gone.

    A zombie has its start time, too. Pid and start time together identify a process.
    """
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def state(pid: int) -> str | None:
    """Return the state of a process: R, S, D, T (stopped), Z (zombie) and others.

    None is returned if the process is gone.
    """
    fields = _stat_fields(pid)
    return fields[0] if fields else None


def is_stopped(pid: int, ticks: int | None) -> bool:
    """Return whether the process that started at ``ticks`` is stopped by a signal.

    False if it is gone, or ``pid`` is another process by now; also if ``ticks`` is None.
    """
    fields = _stat_fields(pid)
    return fields is not None and fields[0] == "T" and int(fields[19]) == ticks


def parent(pid: int) -> int | None:
    """Return the pid of the parent; None if the process is gone."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else None


def ended_by(pid: int, ticks: int | None) -> int | None:
    """Return the wait status of a process that has ended and was not reaped.

    None for any other process, also if ``pid`` is not the one that started at ``ticks``.
    """
    fields = _stat_fields(pid)
    if fields is None or fields[0] != "Z" or int(fields[19]) != ticks or len(fields) < 50:
        return None
    return int(fields[49])


def reap() -> dict[int, int]:
    """Reap children that have ended, and return their wait statuses by pid."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def describe_status(status: int) -> tuple[str, str]:
    """Return the kind of a wait status, and its number or signal.

    Examples are ("exited", "status 1"), ("killed", "SIGKILL") and ("dumped", "SIGSEGV").
    """
    if os.WIFEXITED(status):
        return "exited", f"status {os.WEXITSTATUS(status)}"
    return "dumped" if os.WCOREDUMP(status) else "killed", signal_name(os.WTERMSIG(status))


def is_ending(pid: int) -> bool:
    """Return whether a process is gone, a zombie, or runs none of its own code any more."""
    fields = _stat_fields(pid)
    return fields is None or fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)


def thread_state(pid: int, tid: int) -> str | None:
    """Return the state of a thread, as :func:`state` does for a process; None if it is gone."""
    try:
        return Path(f"/proc/{pid}/task/{tid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def cpu_ticks(pid: int, tid: int) -> int | None:
    """Return the CPU time of a thread in clock ticks; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/task/{tid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def switches(pid: int, tid: int) -> int | None:
    """Return the number of context switches of a thread; None if it is gone.

    The number is constant while the thread sleeps.
    """
    try:
        lines = Path(f"/proc/{pid}/task/{tid}/status").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches:" in line)


def threads(pid: int) -> dict[int, str]:
    """Return the names of a process's threads by thread id; empty if it is gone."""
    names = {}
    with contextlib.suppress(OSError):
        for tid in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                names[int(tid)] = Path(f"/proc/{pid}/task/{tid}/comm").read_text().strip()
    return names


class Starvation:
    """Meter of the time that a thread was ready to run but had no CPU.

    It keeps its /proc files open, as they are read many times a second. The kernel accounts for a
    wait only when it is over. A wait that lasts shows as a thread in state R that neither runs nor
    is charged for waiting. It is counted from the previous reading on.
    """

    def __init__(self, pid: int, tid: int) -> None:
        self._fds: list[int] = []
        with contextlib.suppress(OSError):
            for name in ("schedstat", "stat"):
                self._fds.append(
                    os.open(f"/proc/{pid}/task/{tid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
                )
        self._account: list[bytes] = []
        self._since_ns = 0  # time of the last reading at which it did not wait

    def read_ns(self) -> int:
        """Return the total in nanoseconds; 0 if it is unknown, or the thread is gone."""
        try:
            schedstat, stat = self._fds
            now_ns, account = time.monotonic_ns(), os.pread(schedstat, 128, 0).split()
            if account != self._account or b") R " not in os.pread(stat, 256, 0):
                self._account, self._since_ns = account, now_ns
            return int(account[1]) + now_ns - self._since_ns
        except (OSError, IndexError, ValueError):
            return 0

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            os.close(self._fds.pop())


def step_back() -> None:
    """Give other processes precedence on the CPUs for the rest of this process.

    This includes the time in which the kernel frees the process (90 ms per GB of memory). To be
    called by the leader of a session: kernels with autogroups share CPUs among sessions, and
    compare niceness only within one.
    """
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(
                os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _MODEST)
            )
    with contextlib.suppress(OSError):  # a kernel without autogroups
        Path("/proc/self/autogroup").write_text(str(_MODEST), encoding="ascii")


def keep_freed_memory() -> None:
    """Make glibc keep freed memory.

    Gradients return every step, and new pages cost more time than the sums in them.
    """
    mallopt = getattr(_libc, "mallopt", None)  # missing in other C libraries
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def children(pid: int) -> list[int]:
    """Return the pids of a process's direct children, of all its threads; empty if it is gone."""
    pids = list[int]()
    with contextlib.suppress(OSError):  # the process has ended
        for tid in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                pids += [
                    int(child)
                    for child in Path(f"/proc/{pid}/task/{tid}/children").read_text().split()
                ]
    return pids


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes below a process, the nearest first."""
    below = children(pid)
    for child in below:
        below += children(child)  # the list grows during iteration
    return below


def variables(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it cannot be read."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (pair.partition("=") for pair in data.decode(errors="replace").split("\0"))
    # of two variables with one name the first counts, as for getenv
    return {name: text for name, _, text in reversed([*pairs])}


def restore_signals() -> None:
    """Unblock all signals and reset SIGCHLD, as a process inherits both from its parent."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def process_name(pid: int) -> str:
    """Return the name of a process in ``ps``; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


class TcpTroubles(NamedTuple):
    """TCP error counters of one network namespace.

    Attributes:
        losses: retransmitted segments, without those that the other side reported as duplicates.
        resets: connections that the other side reset or refused.
    """

    losses: int = 0
    resets: int = 0


def tcp_troubles(pid: int, ticks: int | None) -> TcpTroubles:
    """Return the counters for the process that started at ``ticks``; zeros if it is gone.

    Zeros are returned if ``ticks`` is None, too. The counters are those of its network namespace,
    in /proc/net/snmp (RFC 4022) and /proc/net/netstat. A busy machine answers late, and needless
    retransmissions are answered by a duplicate SACK (RFC 2883).
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
    # the first counter exists since Linux 5.9
    needless_count = count["TCPDSACKRecvSegs"] or count["TCPDSACKRecv"] + count["TCPDSACKOfoRecv"]
    own_resets = count["TCPAbortOnClose"] + count["TCPAbortOnData"] + count["TCPAbortOnTimeout"]
    return TcpTroubles(
        count["RetransSegs"] - needless_count,
        count["EstabResets"] + count["AttemptFails"] - own_resets,
    )


def signal_name(signum: int) -> str:
    """Return ``SIGKILL`` or ``SIGRTMIN+1``; ``signal 99`` for a signal without a name.

    Python has no names for most real-time signals.
    """
    with contextlib.suppress(ValueError):
        return signal.Signals(signum).name
    offset = signum - signal.SIGRTMIN
    return (
        f"SIGRTMIN+{offset}"
        if 0 < offset < signal.SIGRTMAX - signal.SIGRTMIN
        else f"signal {signum}"
    )


def kill_if_same(pid: int, ticks: int | None, signum: int) -> bool:
    """Send a signal through a pidfd if ``pid`` is still the process that started at ``ticks``.

    If ``ticks`` is None, the process is not checked.

    Returns:
        True if the signal was sent; False if the process is gone or another one, or the signal is
        not permitted.
    """
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
    """Return pytest's name of the test that runs in this process; "" outside of a test."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]  # the phase follows


def user_at_host() -> str:
    """Return the user of this process and the machine: ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the uid may have no name in a container
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
