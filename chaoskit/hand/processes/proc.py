"""Facts about processes, read from /proc.

-> ``hand/processes/operations.py`` answers with them; ``hand/processes/tracer.py`` finds threads by them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

#: Variables that carry a rank, the strongest first, and those that are needed to compute one. A hand
#: sends no others: an environment has secrets.
RANK_VARIABLES = (
    "RANK",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NNODES",
    "SLURM_NTASKS",
    "TORCHELASTIC_RESTART_COUNT",
)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PF_EXITING = 0x4
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"


class Stat(NamedTuple):
    """Fields of /proc/PID/stat.

    Attributes:
        ticks: start time in clock ticks since the boot.
        cpu_ticks: CPU time in clock ticks, user and system.
        is_exiting: True if the process runs none of its own code any more.
        exit_code: wait status of a zombie; 0 also without the right to read it.
    """

    name: str
    state: str
    parent: int
    ticks: int
    cpu_ticks: int
    is_exiting: bool
    exit_code: int

    @property
    def has_ended(self) -> bool:
        """True for a zombie."""
        return self.state in "ZX"


class Credentials(NamedTuple):
    """Identity and rights of a process, as in /proc/PID/status.

    Attributes:
        uids: real, effective and saved user.
        gids: real, effective and saved group.
        permitted: permitted capabilities, as bits.
        effective: effective capabilities, as bits.
        tracer: pid of the process that traces it; 0 for none.
    """

    uids: tuple[int, int, int]
    gids: tuple[int, int, int]
    permitted: int
    effective: int
    tracer: int


class Look(NamedTuple):
    """State of a process at one moment.

    Two looks at a process that is stopped have the same ``cpu_ticks`` and ``switches``.

    Attributes:
        states: number of threads in each state, such as S, R, D, T (stopped) and t (traced).
        switches: context switches of all threads.
    """

    state: str
    is_exiting: bool
    cpu_ticks: int
    switches: int
    states: dict[str, int]

    def as_fields(self) -> dict[str, Any]:
        """Return the look as fields of an answer."""
        return {
            "state": self.state,
            "exiting": self.is_exiting,
            "cpu_ticks": self.cpu_ticks,
            "switches": self.switches,
            "threads": sum(self.states.values()),
            "states": self.states,
        }


def read_stat(pid: int, tid: int | None = None) -> Stat | None:
    """Return the fields of a process, or of one of its threads; None if it is gone."""
    path = f"/proc/{pid}/stat" if tid is None else f"/proc/{pid}/task/{tid}/stat"
    text = read(path)
    if text is None:
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Stat(
        name=head.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        ticks=int(fields[19]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        is_exiting=bool(int(fields[6]) & _PF_EXITING),
        exit_code=int(fields[49]),
    )


def same_process(pid: int, ticks: int) -> Stat | None:
    """Return the fields of the process that started at ``ticks``; None if it has ended.

    A zombie has ended.
    """
    stat = read_stat(pid)
    return None if stat is None or stat.ticks != ticks or stat.has_ended else stat


def exit_status(pid: int, stat: Stat) -> int | None:
    """Return the wait status of a zombie; None for another process, or where it is not known.

    The kernel shows 0 instead of the status if this process lacks the right of
    ``PTRACE_MODE_READ_FSCREDS``. It asks the same right for the links in /proc/PID/ns, and refuses
    them; so a link that can be read proves that the status is true.
    """
    if not stat.has_ended:
        return None
    try:
        os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None
    return stat.exit_code


def credentials(pid: int) -> Credentials | None:
    """Return the identity and the rights of a process; None if it is gone."""
    text = read(f"/proc/{pid}/status")
    if text is None:
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    real_uid, effective_uid, saved_uid, _ = map(int, fields["Uid"].split())
    real_gid, effective_gid, saved_gid, _ = map(int, fields["Gid"].split())
    return Credentials(
        (real_uid, effective_uid, saved_uid),
        (real_gid, effective_gid, saved_gid),
        int(fields["CapPrm"], 16),
        int(fields["CapEff"], 16),
        int(fields["TracerPid"]),
    )


def has_handler(pid: int, signum: int) -> bool:
    """Return whether a process catches a signal; False if it is gone."""
    for line in (read(f"/proc/{pid}/status") or "").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def thread_ids(pid: int) -> list[int]:
    """Return the ids of a process's threads; empty if it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def process_of(tid: int) -> int | None:
    """Return the pid of the process that a thread belongs to; None if the thread is gone."""
    for line in (read(f"/proc/{tid}/status") or "").splitlines():
        if line.startswith("Tgid:"):
            return int(line.split()[1])
    return None


def look(pid: int) -> Look | None:
    """Return the state of a process; None if it is gone."""
    process = read_stat(pid)
    if process is None:
        return None
    states: dict[str, int] = {}
    switches = 0
    for tid in thread_ids(pid):
        thread = read_stat(pid, tid)
        if thread is not None:
            states[thread.state] = states.get(thread.state, 0) + 1
            switches += _switches(pid, tid)
    return Look(process.state, process.is_exiting, process.cpu_ticks, switches, states)


def threads(pid: int) -> Iterator[dict[str, Any]]:
    """Yield the threads of a process as fields of an answer; none if it is gone."""
    for tid in thread_ids(pid):
        thread = read_stat(pid, tid)
        if thread is not None:
            yield {
                "tid": tid,
                "name": thread.name,
                "state": thread.state,
                "cpu_ticks": thread.cpu_ticks,
                "switches": _switches(pid, tid),
            }


def process_fields(pid: int) -> dict[str, Any] | None:
    """Return a process as fields of an answer; None if it is gone.

    A zombie is not gone. Its ``status`` is the wait status, and is missing where it is not known.
    """
    stat = read_stat(pid)
    if stat is None:
        return None
    record: dict[str, Any] = {
        "pid": pid,
        "ticks": stat.ticks,
        "parent": stat.parent,
        "name": stat.name,
        "state": stat.state,
        "exiting": stat.is_exiting,
    }
    status = exit_status(pid, stat)
    if status is not None:
        record["status"] = status
    return record


def processes(with_variables: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the processes of this pid namespace as fields of an answer.

    ``environ`` is "read", "denied" or "gone". The field ``needs`` of a process whose environment
    is denied has the uid and the gid that a hand needs in order to read it.

    Args:
        with_variables: False leaves out owners and environments, which take most of the time.
    """
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        record = process_fields(pid)
        if record is None:
            continue
        if with_variables:
            owner = credentials(pid)
            if owner is None:
                continue
            environ, variables = rank_variables(pid)
            record.update(uid=owner.uids[1], environ=environ, variables=variables)
            if environ == "denied":
                record["needs"] = {"uid": owner.uids[1], "gid": owner.gids[1]}
        yield record


def rank_variables(pid: int) -> tuple[str, dict[str, str]]:
    """Return if the environment of a process can be read, and its variables that carry a rank.

    A variable whose value is not a number is left out.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123  # as in read
            pairs = [pair.partition(b"=") for pair in file.read().split(b"\0")]
    except PermissionError:
        return "denied", {}
    except OSError:
        return "gone", {}
    variables: dict[str, str] = {}
    for name_bytes, _, value_bytes in pairs:
        name, value = name_bytes.decode("ascii", "replace"), value_bytes.decode("ascii", "replace")
        if name in RANK_VARIABLES and value.isdecimal():
            variables.setdefault(name, value)  # of two with one name the first counts, as in getenv
    return "read", variables


def yama_scope() -> int | None:
    """Return Yama's ``ptrace_scope``; None for a kernel without Yama."""
    text = read(_YAMA)
    return None if text is None else int(text)


def _switches(pid: int, tid: int) -> int:
    lines = (read(f"/proc/{pid}/task/{tid}/status") or "").splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches:" in line)


def read(path: str) -> str | None:
    """Return the text of a file; None if it cannot be read, as its process is gone."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  # a hot path
            return file.read()
    except OSError:
        return None
