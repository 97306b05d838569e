"""What ``chaoskit doctor`` looks at: each probe tries one thing that chaoskit needs, and says what it found.

Probes change nothing. What they make (a page of memory, a thread, a child process) is gone when they return.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import socket
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil

from chaoskit.errors import BadInput
from chaoskit.experiment.reference import cache
from chaoskit.health import quarantine
from chaoskit.process.heartbeat_page import Board
from chaoskit.process.host_checks import require_file_size
from chaoskit.process.linux import Starvation, await_readable
from chaoskit.substrate import undo
from chaoskit.substrate.docker import daemon as docker_daemon
from chaoskit.substrate.limits import capabilities, cgroup
from chaoskit.substrate.undo import docker_janitor

_PYTHON_LEAST = (3, 11)
_TORCH_LEAST = (2, 9)
_MEMORY_LEAST_BYTES = 2 * 2**30  # four ranks of the reference job, torch mapped once
_SHM_LEAST_BYTES = 64 * 2**20  # what container engines give /dev/shm by default
_FILES_LEAST, _FILES_WANTED = 256, 1024
_PROCESSES_WANTED = 512  # threads count, too
_WAIT_S = 10.0  # far more than it takes on a machine that is busy
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """What one probe found.

    Attributes:
        name: of what was looked at.
        state: ``ok``, ``limited`` (something works worse, or is not possible) or ``missing``.
        found: in words.
        remedy: what would help; "" where nothing is wrong.
        core: whether nothing can be run where it is missing.
    """

    name: str
    state: str
    found: str
    remedy: str = ""
    core: bool = False


def _judged(name: str, good: bool, found: str, remedy: str, *, core: bool = False) -> DoctorFinding:
    """Without its remedy if it is good; what is not good is missing where it belongs to the core, else limited."""
    return DoctorFinding(
        name,
        "ok" if good else "missing" if core else "limited",
        found,
        "" if good else remedy,
        core,
    )


# -- the interpreter and its packages -----------------------------------------------------------------------------


def python() -> DoctorFinding:
    """Version of the interpreter, on Linux."""
    found = f"{sys.version.split()[0]} on {sys.platform}"
    good = sys.version_info >= _PYTHON_LEAST and sys.platform == "linux"
    return _judged("Python", good, found, "use Python 3.11 or newer on Linux", core=True)


def torch_version() -> DoctorFinding:
    """Version of torch, imported."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return DoctorFinding(
            "torch",
            "missing",
            f"cannot be imported: {error}",
            "pip install 'torch>=2.9'",
            core=True,
        )
    numbers = tuple(int(part) for part in torch.__version__.partition("+")[0].split(".")[:2])
    return _judged(
        "torch", numbers >= _TORCH_LEAST, torch.__version__, "pip install 'torch>=2.9'", core=True
    )


def gloo() -> DoctorFinding:
    """Collectives between CPU processes: gloo, and the loopback interface that it uses."""
    try:
        from torch import distributed

        good = distributed.is_available() and distributed.is_gloo_available()
    except (ImportError, OSError) as error:
        return DoctorFinding(
            "gloo", "missing", f"torch cannot be imported: {error}", "install torch", core=True
        )
    if not good:
        return DoctorFinding(
            "gloo",
            "missing",
            "this torch was built without it",
            "use an official build of torch",
            core=True,
        )
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()),
        ):
            return DoctorFinding(
                "gloo", "ok", "built in, and 127.0.0.1 can be connected to", core=True
            )
    except OSError as error:
        return DoctorFinding(
            "gloo",
            "missing",
            f"no connection over 127.0.0.1: {error}",
            "ip link set lo up",
            core=True,
        )


def gpus() -> DoctorFinding:
    """CUDA devices, and NCCL."""
    try:
        import torch
    except (ImportError, OSError):
        return DoctorFinding("GPUs", "limited", "torch cannot be imported", "install torch")
    if not torch.cuda.is_available():
        return DoctorFinding(
            "GPUs",
            "limited",
            "no CUDA device",
            "device='cuda' needs an NVIDIA GPU and a torch with CUDA",
        )
    names = ", ".join(
        torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())
    )
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return _judged(
        "GPUs", nccl, f"{names}; {'NCCL' if nccl else 'no NCCL'}", "use a build of torch with NCCL"
    )


def compiler() -> DoctorFinding:
    """What ``torch.compile`` needs on a CPU: a C++ compiler and Python's headers."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    path = next(filter(None, map(shutil.which, names)), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    lacking = [] if path else [f"none of {', '.join(names)} is on the PATH"]
    lacking += [] if header.is_file() else [f"no {header}"]
    remedy = "install g++ and the headers of this Python; jobs without torch.compile need neither"
    return _judged("compiler", not lacking, "; ".join(lacking) or f"{path}, Python.h", remedy)


def extras() -> list[DoctorFinding]:
    """Packages of the optional groups, one finding a group; those for developers of chaoskit are left out."""
    groups: dict[str, list[str]] = {}
    for requirement in requires("chaoskit") or []:
        package, _, condition = requirement.partition(";")
        if "extra ==" in condition:
            group = condition.rpartition("extra ==")[2].strip(" '\"")
            groups.setdefault(group, []).append(package.strip())
    groups.pop("dev", None)
    return [_extra(group, packages) for group, packages in groups.items()]


def _extra(group: str, packages: list[str]) -> DoctorFinding:
    found, lacking = [], []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lacking.append(package)
    said = [", ".join(found)] if found else []
    said += [f"not installed: {', '.join(lacking)}"] if lacking else []
    return _judged(
        f"extra {group}", not lacking, "; ".join(said), f"pip install 'chaoskit[{group}]'"
    )


# -- the kernel ---------------------------------------------------------------------------------------------------


def fork() -> DoctorFinding:
    """A child is forked, its end is seen through a pidfd."""
    try:
        seen = _fork_and_see()
    except OSError as error:
        return DoctorFinding(
            "fork, pidfd",
            "missing",
            str(error),
            "raise ulimit -u; use Linux 5.3 or newer",
            core=True,
        )
    remedy = "use Linux 5.3 or newer, outside a sandbox that hides process ends"
    found = (
        "a child's end is seen at once"
        if seen
        else f"a child's end was not seen within {_WAIT_S:g} s"
    )
    return _judged("fork, pidfd", seen, found, remedy, core=True)


def _fork_and_see() -> bool:
    asked, answer = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # the child touches nothing that a thread could hold
            pid = os.fork()
        if pid == 0:
            os.close(answer)
            os.read(asked, 1)  # ends with its parent's end of the pipe
            os._exit(0)
        os.close(answer)
        answer = -1
        try:
            handle = os.pidfd_open(pid)
            try:
                return bool(await_readable([handle], _WAIT_S))
            finally:
                os.close(handle)
        finally:
            os.waitpid(pid, 0)
    finally:
        os.close(asked)
        if answer >= 0:
            os.close(answer)


def death_signal() -> DoctorFinding:
    """``PR_SET_PDEATHSIG``: what this process has is read, and set to the same again."""
    libc, held = ctypes.CDLL(None, use_errno=True), ctypes.c_int(-1)
    good = (
        libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(held)) == 0
        and libc.prctl(_PR_SET_PDEATHSIG, held.value) == 0
    )
    found = "can be set" if good else os.strerror(ctypes.get_errno())
    remedy = "nothing may outlive its owner: run where prctl is allowed"
    return _judged("PR_SET_PDEATHSIG", good, found, remedy, core=True)


def robust_mutex(robust: bool = True, wait_s: float = _WAIT_S) -> DoctorFinding:
    """A thread locks the latch of a progress board and ends: the kernel must wake the thread that waits for it.

    Args:
        robust: False asks the kernel for a latch that it does not break.
        wait_s: time for the kernel to wake it.
    """
    with _Latch(robust) as latch:
        woken = latch.is_broken_by_its_owner(wait_s)
    found = (
        "broken by the kernel when its owner ends" if woken else "not broken when its owner ends"
    )
    return _judged(
        "robust mutexes",
        woken,
        found,
        "use glibc; else a process's end is seen later, through its pidfd",
    )


class _Latch:
    """A progress board for a probe."""

    def __init__(self, robust: bool = True) -> None:
        self._robust = robust

    def __enter__(self) -> _Latch:
        self._board = Board.create(self._robust)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._board.bell)
        os.close(self._board.fd)

    def is_broken_by_its_owner(self, wait_s: float) -> bool:
        owner = threading.Thread(target=self._board.sign_on)
        owner.start()
        owner.join()
        watcher = threading.Thread(target=self._board.await_death, daemon=True)
        watcher.start()
        watcher.join(wait_s)
        return not watcher.is_alive()


def starvation() -> DoctorFinding:
    """How long a thread waited for a CPU, as the kernel tells it."""
    meter = Starvation(os.getpid(), threading.get_native_id())
    waited_ns = meter.read_ns()
    meter.close()
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    try:
        good = len(path.read_text().split()) == 3
    except OSError:
        good = False
    found = (
        f"this thread has waited {waited_ns / 1e6:.1f} ms for a CPU so far"
        if good
        else f"{path} cannot be read"
    )
    remedy = "use a kernel with CONFIG_SCHED_INFO; else a rank that gets no CPU may be called hung"
    return _judged("schedstat", good, found, remedy)


def memfd() -> DoctorFinding:
    """Unnamed shared memory, in which state and progress lie."""
    try:
        handle = os.memfd_create("chaoskit-probe", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(handle, 0, 2**20)
        finally:
            os.close(handle)
    except OSError as error:
        return DoctorFinding(
            "memfd",
            "missing",
            str(error),
            "allow memfd_create, and give the container memory",
            core=True,
        )
    return DoctorFinding("memfd", "ok", "a megabyte was given", core=True)


def control_groups() -> list[DoctorFinding]:
    """Whether a process may be put into a group of its own, for each controller that a fault uses."""
    return [_control_group(controller) for controller in ("cpu", "memory", "pids", "io", "freezer")]


def _control_group(controller: str) -> DoctorFinding:
    reason, number = cgroup.unavailable(controller), cgroup.version(controller)
    remedy = "run as root, or delegate the controller (systemd: Delegate=yes)"
    return _judged(
        f"cgroup {controller}", not reason, reason or f"v{number}, groups can be made", remedy
    )


def networks() -> list[DoctorFinding]:
    """What the substrate netns needs: networks of their own for nodes, and the means to break them."""
    lacking = capabilities.namespaces()
    how = (
        "this user may make them"
        if capabilities.privileged()
        else "a user namespace gives the rights to make them"
    )
    remedy = "run as root, or allow user namespaces (sysctl user.max_user_namespaces); install util-linux"
    found = [_judged("network namespaces", not lacking, lacking or how, remedy)]
    if lacking:
        return found
    reason = capabilities.rules()
    remedy = "install nftables, on a kernel with nf_tables: packets are dropped, refused and doubled by its rules"
    found.append(_judged("nftables", not reason, reason or "rules can be added", remedy))
    netem, reason = "netem" in capabilities.disciplines(), capabilities.delays()
    means = "by netem" if netem else "by NFQUEUE and a process of ours: the kernel has no netem"
    remedy = "load sch_netem, or install iptables on a kernel with NFQUEUE"
    found.append(_judged("packet delays", not reason, reason or means, remedy))
    reason = capabilities.rates()
    return [*found, _judged("link rates", not reason, reason or "by HTB", "load sch_htb")]


def containers() -> DoctorFinding:
    """What the substrate docker needs. No container is made for this."""
    reason = docker_daemon.unavailable()
    remedy = "start a Docker daemon on this machine, be root, and pip install 'chaoskit[docker]'"
    return _judged(
        "docker",
        not reason,
        reason or f"a daemon at {docker_janitor.endpoint()}, and rights",
        remedy,
    )


def disks() -> DoctorFinding:
    """Whether something can be wrong with the disk of a node, and of no other."""
    reason = capabilities.disks()
    remedy = "run as root on a kernel with FUSE, and install libfuse3 (Debian: libfuse3-3)"
    return _judged(
        "disks that fail",
        not reason,
        reason or "by FUSE, in the mount namespace of the node",
        remedy,
    )


# -- resources ----------------------------------------------------------------------------------------------------


def cores() -> DoctorFinding:
    """CPUs that this process may use."""
    number = len(os.sched_getaffinity(0))
    return _judged(
        "cores",
        number >= 2,
        f"{number} of {os.cpu_count()}",
        "use two or more: one makes every run slow",
    )


def memory() -> DoctorFinding:
    """Memory that can still be had."""
    found = psutil.virtual_memory()
    said = f"{found.available / 2**30:.1f} of {found.total / 2**30:.1f} GiB available"
    return _judged(
        "memory",
        found.available >= _MEMORY_LEAST_BYTES,
        said,
        "free 2 GiB, or train with fewer nodes",
    )


def shared_memory() -> DoctorFinding:
    """``/dev/shm``: not for chaoskit itself, but for data loaders with workers, and NCCL."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return DoctorFinding("/dev/shm", "limited", str(error), "mount a tmpfs there")
    free = found.f_bavail * found.f_frsize
    remedy = "docker run --shm-size=1g: data loaders with workers need it"
    return _judged("/dev/shm", free > _SHM_LEAST_BYTES, f"{free / 2**30:.1f} GiB free", remedy)


def open_files() -> DoctorFinding:
    """Limit of open files: each rank has a socket to every other one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = sys.maxsize if soft == resource.RLIM_INFINITY else soft
    found = f"at most {_limit(soft)} (could be raised to {_limit(hard)})"
    remedy = f"ulimit -n {_FILES_WANTED}"
    if number < _FILES_LEAST:
        return DoctorFinding("open files", "missing", found, remedy, core=True)
    return _judged("open files", number >= _FILES_WANTED, found, remedy)


def file_size() -> DoctorFinding:
    """Check the limit of the size of files: journals, logs and copies of the state grow."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        require_file_size()
    except BadInput as error:
        return DoctorFinding(
            "file size", "missing", f"at most {soft} bytes", error.remedy, core=True
        )
    limited = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft} bytes"
    return DoctorFinding("file size", "ok", limited)


def processes() -> DoctorFinding:
    """Limits of processes and threads, by ulimit and by the control group."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = {"ulimit": sys.maxsize if soft == resource.RLIM_INFINITY else soft}
    with contextlib.suppress(OSError, ValueError):  # not mounted here, or "max"
        place = cgroup.find_place(
            "pids", Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text()
        )
        if place is not None:
            limits["control group"] = int((place.home / "pids.max").read_text())
    least = min(limits, key=lambda name: limits[name])
    found = "no limit" if limits[least] == sys.maxsize else f"at most {limits[least]} ({least})"
    remedy = f"ulimit -u {_PROCESSES_WANTED}, or docker run --pids-limit={_PROCESSES_WANTED}"
    return _judged("processes", limits[least] >= _PROCESSES_WANTED, found, remedy)


def _limit(number: int) -> str:
    return "any number" if number == resource.RLIM_INFINITY else str(number)


# -- chaoskit's own state -----------------------------------------------------------------------------------------


def runtime_directory() -> DoctorFinding:
    """Where undo is written ahead; without it nothing may be broken."""
    try:
        found, good = f"{undo.runtime_directory()} can be written", True
    except BadInput as error:
        found, good = error.remedy, False
    return _judged(
        "undo directory",
        good,
        found,
        "set XDG_RUNTIME_DIR to a directory that is yours alone",
        core=True,
    )


def state_directory() -> DoctorFinding:
    """Check the directory with the list of nodes that are kept out."""
    try:
        good, found = _can_be_written(quarantine.state_directory())
    except BadInput as error:
        good, found = False, error.remedy
    return _judged(
        "state directory", good, found, "set XDG_STATE_HOME to a directory that can be written"
    )


def cache_directory() -> DoctorFinding:
    """Check the directory in which unbroken runs are kept for later sessions."""
    good, found = _can_be_written(cache.directory_of("twins"))
    remedy = f"set {cache.VARIABLE} to a directory that can be written: else each session trains its unbroken runs"
    return _judged("cache directory", good, found, remedy)


def _can_be_written(directory: Path) -> tuple[bool, str]:
    """Return whether a directory can be written, or made, and what was found."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir():
        return False, f"{existing}: no directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        return False, f"{existing}: read-only"
    return True, f"{directory} can be {'written' if existing == directory else 'made'}"


def left_behind() -> DoctorFinding:
    """What runs that were killed have left to put back."""
    left = undo.left_behind()
    return _judged(
        "undo", not left, ", ".join(left) or "nothing is left to put back", "chaoskit cleanup"
    )


Probe = Callable[[], DoctorFinding | list[DoctorFinding]]

#: In the order in which they are told. Those that need no torch come first: a fork is cheaper without it.
PROBES: tuple[Probe, ...] = (
    python,
    fork,
    death_signal,
    robust_mutex,
    memfd,
    starvation,
    control_groups,
    networks,
    containers,
    disks,
    cores,
    memory,
    shared_memory,
    open_files,
    file_size,
    processes,
    runtime_directory,
    state_directory,
    cache_directory,
    left_behind,
    torch_version,
    gloo,
    gpus,
    compiler,
    extras,
)
