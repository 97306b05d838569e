"""Probes of ``chaoskit doctor``. Each tests one feature that chaoskit needs, and returns a finding.

Probes change nothing. Objects that they make (a page of memory, a thread, a child process) are gone
when they return.

-> cli/machine/doctor.py prints the findings, and exits by them.
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
from chaoskit.process.host_checks import require_file_size
from chaoskit.process.linux import Starvation, await_readable
from chaoskit.process.progress_board import Board
from chaoskit.substrate import undo
from chaoskit.substrate.docker import daemon as docker_daemon
from chaoskit.substrate.limits import capabilities, cgroup
from chaoskit.substrate.undo import docker_janitor

_PYTHON_LEAST = (3, 11)
_TORCH_LEAST = (2, 9)
_MEMORY_LEAST_BYTES = (
    2 * 2**30
)  # enough for four ranks of the reference job, with torch mapped once
_SHM_LEAST_BYTES = 64 * 2**20  # the default size of /dev/shm in container engines
_FILES_LEAST, _FILES_WANTED = 256, 1024
_PROCESSES_WANTED = 512  # threads are counted, too
_WAIT_S = 10.0  # far more than a busy machine needs
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """The finding of one probe.

    Attributes:
        name: the feature that was tested.
        state: ``ok``, ``limited`` (something works worse, or is not possible) or ``missing``.
        found: the observation in words.
        remedy: a remedy; "" if none is needed.
        core: True if no run is possible without the feature.
    """

    name: str
    state: str
    found: str
    remedy: str = ""
    core: bool = False


def _finding(
    name: str, is_good: bool, found: str, remedy: str, *, core: bool = False
) -> DoctorFinding:
    """Return a finding. A bad one is missing if it belongs to the core, otherwise limited.

    Args:
        remedy: is left out of a good finding.
    """
    return DoctorFinding(
        name,
        "ok" if is_good else "missing" if core else "limited",
        found,
        "" if is_good else remedy,
        core,
    )


# -- the interpreter and its packages --------------------------------------------------------------


def python() -> DoctorFinding:
    """Return the finding about Python: missing unless it is 3.11 or newer, on Linux."""
    version_text = f"{sys.version.split()[0]} on {sys.platform}"
    is_good = sys.version_info >= _PYTHON_LEAST and sys.platform == "linux"
    return _finding("Python", is_good, version_text, "use Python 3.11 or newer on Linux", core=True)


def torch_version() -> DoctorFinding:
    """Import torch, and return the finding about it: missing unless it is 2.9 or newer."""
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
    return _finding(
        "torch", numbers >= _TORCH_LEAST, torch.__version__, "pip install 'torch>=2.9'", core=True
    )


def gloo() -> DoctorFinding:
    """Return the finding about collectives between CPU processes.

    They are missing if torch cannot be imported or has no gloo, or if 127.0.0.1 cannot be connected
    to.
    """
    try:
        from torch import distributed

        is_good = distributed.is_available() and distributed.is_gloo_available()
    except (ImportError, OSError) as error:
        return DoctorFinding(
            "gloo", "missing", f"torch cannot be imported: {error}", "install torch", core=True
        )
    if not is_good:
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
    """Return the finding about GPUs: limited without torch, a CUDA device or NCCL."""
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
    return _finding(
        "GPUs", nccl, f"{names}; {'NCCL' if nccl else 'no NCCL'}", "use a build of torch with NCCL"
    )


def compiler() -> DoctorFinding:
    """Return the finding about the C++ compiler: limited without it or without Python's headers.

    On a CPU, ``torch.compile`` needs both.
    """
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    path = next(filter(None, map(shutil.which, names)), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    lacking = [] if path else [f"none of {', '.join(names)} is on the PATH"]
    lacking += [] if header.is_file() else [f"no {header}"]
    remedy = "install g++ and the headers of this Python; jobs without torch.compile need neither"
    return _finding("compiler", not lacking, "; ".join(lacking) or f"{path}, Python.h", remedy)


def extras() -> list[DoctorFinding]:
    """Return a finding for each optional group of packages, except that of developers."""
    groups: dict[str, list[str]] = {}
    for requirement in requires("chaoskit") or []:
        package, _, condition = requirement.partition(";")
        if "extra ==" in condition:
            group = condition.rpartition("extra ==")[2].strip(" '\"")
            groups.setdefault(group, []).append(package.strip())
    groups.pop("dev", None)
    return [_extra(group, packages) for group, packages in groups.items()]


def _extra(group: str, packages: list[str]) -> DoctorFinding:
    """Return the finding about one group, with the packages that are missing."""
    installed, lacking = [], []
    for package in packages:
        try:
            installed.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lacking.append(package)
    parts = [", ".join(installed)] if installed else []
    parts += [f"not installed: {', '.join(lacking)}"] if lacking else []
    return _finding(
        f"extra {group}", not lacking, "; ".join(parts), f"pip install 'chaoskit[{group}]'"
    )


# -- the kernel ------------------------------------------------------------------------------------


def fork() -> DoctorFinding:
    """Return the finding about processes: missing if no pidfd reports the end of a forked child."""
    try:
        reported = _reports_end_of_child()
    except OSError as error:
        return DoctorFinding(
            "fork, pidfd",
            "missing",
            str(error),
            "raise ulimit -u; use Linux 5.3 or newer",
            core=True,
        )
    remedy = "use Linux 5.3 or newer, outside a sandbox that hides process ends"
    observation = (
        "the end of a child is reported at once"
        if reported
        else f"the end of a child was not reported within {_WAIT_S:g} s"
    )
    return _finding("fork, pidfd", reported, observation, remedy, core=True)


def _reports_end_of_child() -> bool:
    """Fork a child, end it, and return True if its pidfd reports the end in time.

    Raise OSError if no child or no pidfd can be made.
    """
    request, answer = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # the child uses nothing that a thread could hold
            pid = os.fork()
        if pid == 0:
            os.close(answer)
            os.read(request, 1)  # ends when the parent closes its end of the pipe
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
        os.close(request)
        if answer >= 0:
            os.close(answer)


def death_signal() -> DoctorFinding:
    """Return the finding about ``PR_SET_PDEATHSIG``: missing if it cannot be set.

    The present value is read, and set again.
    """
    libc, present = ctypes.CDLL(None, use_errno=True), ctypes.c_int(-1)
    is_good = (
        libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(present)) == 0
        and libc.prctl(_PR_SET_PDEATHSIG, present.value) == 0
    )
    observation = "can be set" if is_good else os.strerror(ctypes.get_errno())
    remedy = "run where prctl is allowed: processes must end with the process that started them"
    return _finding("PR_SET_PDEATHSIG", is_good, observation, remedy, core=True)


def robust_mutex(robust: bool = True, wait_s: float = _WAIT_S) -> DoctorFinding:
    """Return the finding about latches, by which the end of a process is noticed.

    They are limited if the kernel does not wake the waiting thread when the owner ends.

    Args:
        robust: False requests a latch that the kernel does not break.
        wait_s: the time in which the kernel must wake the thread.
    """
    with _Latch(robust) as latch:
        woken = latch.is_broken_by_its_owner(wait_s)
    observation = (
        "broken by the kernel when its owner ends" if woken else "not broken when its owner ends"
    )
    return _finding(
        "robust mutexes",
        woken,
        observation,
        "use glibc; else a process's end is seen later, through its pidfd",
    )


class _Latch:
    """A progress board whose latch a probe tests."""

    def __init__(self, robust: bool = True) -> None:
        self._robust = robust

    def __enter__(self) -> _Latch:
        self._board = Board.create(self._robust)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._board.bell)
        os.close(self._board.fd)

    def is_broken_by_its_owner(self, wait_s: float) -> bool:
        """Lock the latch in a thread that ends. Return True if the kernel breaks it in time."""
        owner = threading.Thread(target=self._board.sign_on)
        owner.start()
        owner.join()
        watcher = threading.Thread(target=self._board.await_death, daemon=True)
        watcher.start()
        watcher.join(wait_s)
        return not watcher.is_alive()


def starvation() -> DoctorFinding:
    """Return the finding about schedstat, which has the time that a thread waited for a CPU.

    It is limited if the file cannot be read.
    """
    meter = Starvation(os.getpid(), threading.get_native_id())
    waited_ns = meter.read_ns()
    meter.close()
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    try:
        is_good = len(path.read_text().split()) == 3
    except OSError:
        is_good = False
    observation = (
        f"this thread has waited {waited_ns / 1e6:.1f} ms for a CPU so far"
        if is_good
        else f"{path} cannot be read"
    )
    remedy = "use a kernel with CONFIG_SCHED_INFO; else a rank that gets no CPU may be called hung"
    return _finding("schedstat", is_good, observation, remedy)


def memfd() -> DoctorFinding:
    """Return the finding about unnamed shared memory, which holds state and progress.

    It is missing if 1 MiB cannot be allocated.
    """
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
            "allow memfd_create, and give the container more memory",
            core=True,
        )
    return DoctorFinding("memfd", "ok", "1 MiB was allocated", core=True)


def control_groups() -> list[DoctorFinding]:
    """Return a finding for each cgroup controller that faults use.

    A controller is limited if no group can be made for a process.
    """
    return [_control_group(controller) for controller in ("cpu", "memory", "pids", "io", "freezer")]


def _control_group(controller: str) -> DoctorFinding:
    """Return the finding about one cgroup controller."""
    reason, number = cgroup.unavailable(controller), cgroup.version(controller)
    remedy = "run as root, or delegate the controller (systemd: Delegate=yes)"
    return _finding(
        f"cgroup {controller}", not reason, reason or f"v{number}, groups can be made", remedy
    )


def networks() -> list[DoctorFinding]:
    """Return findings about the requirements of the substrate netns.

    They are network namespaces for nodes, and the means to break their networks. The means are
    not checked without namespaces.
    """
    lacking = capabilities.namespaces()
    permission = (
        "this user may create them"
        if capabilities.privileged()
        else "a user namespace gives the rights to create them"
    )
    remedy = "run as root, or allow user namespaces (sysctl user.max_user_namespaces); install util-linux"
    findings = [_finding("network namespaces", not lacking, lacking or permission, remedy)]
    if lacking:
        return findings
    reason = capabilities.rules()
    remedy = "install nftables, on a kernel with nf_tables: packets are dropped, refused and doubled by its rules"
    findings.append(_finding("nftables", not reason, reason or "rules can be added", remedy))
    netem, reason = "netem" in capabilities.disciplines(), capabilities.delays()
    means = "by netem" if netem else "by NFQUEUE and a process of chaoskit: the kernel has no netem"
    remedy = "load sch_netem, or install iptables on a kernel with NFQUEUE"
    findings.append(_finding("packet delays", not reason, reason or means, remedy))
    reason = capabilities.rates()
    return [*findings, _finding("link rates", not reason, reason or "by HTB", "load sch_htb")]


def containers() -> DoctorFinding:
    """Return the finding about the substrate docker: limited without a daemon or rights.

    No container is made.
    """
    reason = docker_daemon.unavailable()
    remedy = "start a Docker daemon on this machine, be root, and pip install 'chaoskit[docker]'"
    return _finding(
        "docker",
        not reason,
        reason or f"a daemon at {docker_janitor.endpoint()}, and rights",
        remedy,
    )


def disks() -> DoctorFinding:
    """Return the finding about disks: limited if the disk of a single node cannot have faults."""
    reason = capabilities.disks()
    remedy = "run as root on a kernel with FUSE, and install libfuse3 (Debian: libfuse3-3)"
    return _finding(
        "disks that fail",
        not reason,
        reason or "by FUSE, in the mount namespace of the node",
        remedy,
    )


# -- resources -------------------------------------------------------------------------------------


def cores() -> DoctorFinding:
    """Return the finding about CPUs: limited if this process may use fewer than two."""
    number = len(os.sched_getaffinity(0))
    return _finding(
        "cores",
        number >= 2,
        f"{number} of {os.cpu_count()}",
        "use two or more CPUs: every run is slow on one CPU",
    )


def memory() -> DoctorFinding:
    """Return the finding about memory: limited if less than 2 GiB is available."""
    sizes = psutil.virtual_memory()
    observation = f"{sizes.available / 2**30:.1f} of {sizes.total / 2**30:.1f} GiB available"
    return _finding(
        "memory",
        sizes.available >= _MEMORY_LEAST_BYTES,
        observation,
        "free 2 GiB, or train with fewer nodes",
    )


def shared_memory() -> DoctorFinding:
    """Return the finding about ``/dev/shm``: limited if no more than 64 MiB is free.

    Data loaders with workers and NCCL need it; chaoskit does not.
    """
    try:
        filesystem = os.statvfs("/dev/shm")
    except OSError as error:
        return DoctorFinding("/dev/shm", "limited", str(error), "mount a tmpfs there")
    free = filesystem.f_bavail * filesystem.f_frsize
    remedy = "docker run --shm-size=1g: data loaders with workers need it"
    return _finding("/dev/shm", free > _SHM_LEAST_BYTES, f"{free / 2**30:.1f} GiB free", remedy)


def open_files() -> DoctorFinding:
    """Return the finding about the limit of open files: limited below 1024, missing below 256.

    Each rank has a socket to every other rank.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = sys.maxsize if soft == resource.RLIM_INFINITY else soft
    observation = f"at most {_limit(soft)} (could be raised to {_limit(hard)})"
    remedy = f"ulimit -n {_FILES_WANTED}"
    if number < _FILES_LEAST:
        return DoctorFinding("open files", "missing", observation, remedy, core=True)
    return _finding("open files", number >= _FILES_WANTED, observation, remedy)


def file_size() -> DoctorFinding:
    """Return the finding about the limit of file sizes: missing if it is too low.

    Journals, logs and copies of the state grow.
    """
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
    """Return the finding about processes and threads: limited if fewer than 512 are allowed.

    The lower limit counts, of ulimit and of the control group.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = {"ulimit": sys.maxsize if soft == resource.RLIM_INFINITY else soft}
    with contextlib.suppress(
        OSError, ValueError
    ):  # the file does not exist here, or contains "max"
        group = cgroup.find_place(
            "pids", Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text()
        )
        if group is not None:
            limits["control group"] = int((group.home / "pids.max").read_text())
    least = min(limits, key=lambda name: limits[name])
    observation = (
        "no limit" if limits[least] == sys.maxsize else f"at most {limits[least]} ({least})"
    )
    remedy = f"ulimit -u {_PROCESSES_WANTED}, or docker run --pids-limit={_PROCESSES_WANTED}"
    return _finding("processes", limits[least] >= _PROCESSES_WANTED, observation, remedy)


def _limit(number: int) -> str:
    """Return a limit as text; "any number" if it is infinite."""
    return "any number" if number == resource.RLIM_INFINITY else str(number)


# -- chaoskit's own state --------------------------------------------------------------------------


def runtime_directory() -> DoctorFinding:
    """Return the finding about the directory of the undo log: missing if it cannot be written.

    No fault may be injected without it.
    """
    try:
        observation, is_good = f"{undo.runtime_directory()} can be written", True
    except BadInput as error:
        observation, is_good = error.remedy, False
    return _finding(
        "undo directory",
        is_good,
        observation,
        "set XDG_RUNTIME_DIR to a directory that is yours alone",
        core=True,
    )


def state_directory() -> DoctorFinding:
    """Return the finding about the directory with the list of cordoned nodes.

    It is limited if it cannot be written.
    """
    try:
        is_good, observation = _can_be_written(quarantine.state_directory())
    except BadInput as error:
        is_good, observation = False, error.remedy
    return _finding(
        "state directory",
        is_good,
        observation,
        "set XDG_STATE_HOME to a directory that can be written",
    )


def cache_directory() -> DoctorFinding:
    """Return the finding about the directory in which unbroken runs are kept for later sessions.

    It is limited if it cannot be written.
    """
    is_good, observation = _can_be_written(cache.directory_of("twins"))
    remedy = f"set {cache.VARIABLE} to a directory that can be written: else each session trains its unbroken runs"
    return _finding("cache directory", is_good, observation, remedy)


def _can_be_written(directory: Path) -> tuple[bool, str]:
    """Return True if a directory can be written or made, and the observation in words."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir():
        return False, f"{existing}: no directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        return False, f"{existing}: read-only"
    return True, f"{directory} can be {'written' if existing == directory else 'made'}"


def left_behind() -> DoctorFinding:
    """Return the finding about leftovers of killed runs: limited if there are any."""
    left = undo.left_behind()
    return _finding(
        "undo", not left, ", ".join(left) or "no leftovers of killed runs", "chaoskit cleanup"
    )


Probe = Callable[[], DoctorFinding | list[DoctorFinding]]

#: The probes in the order of their output. Probes without torch come first: forks are cheaper then.
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
