"""Reasons for which the kernel refuses an act on a process, and what would allow it.

The rules are those of ``ptrace_may_access`` in the kernel (see ptrace(2)), of signals (kill(2)) and
of Yama.

-> ``hand/processes/held.py`` and ``hand/processes/kill.py`` ask it after a refusal.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..refusals import Unable
from . import proc
from .proc import Credentials

_SYS_PTRACE = 1 << 19
#: Names of capabilities by their number, in capabilities(7).
_CAPABILITIES = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
]


def ptrace_refusal(pid: int) -> Unable:
    """Return why this process may not trace another one."""
    hand, target = proc.credentials(os.getpid()), proc.credentials(pid)
    if hand is None or target is None:
        return Unable(f"process {pid} is gone", "list the processes again")
    return explain_ptrace(pid, hand, target, proc.yama_scope(), _is_dumpable(pid, target))


def signal_refusal(pid: int) -> Unable:
    """Return why this process may not send another one a signal."""
    target = proc.credentials(pid)
    uid = "unknown" if target is None else target.uids[0]
    return Unable(
        f"process {pid} runs as uid {uid}, and this hand as {os.geteuid()} without CAP_KILL",
        f"start the hand with runAsUser: {uid}",
    )


def explain_ptrace(
    pid: int, hand: Credentials, target: Credentials, yama: int | None, is_dumpable: bool
) -> Unable:
    """Return why a hand with some credentials may not trace a process, by the kernel's rules.

    Args:
        yama: Yama's ``ptrace_scope``; None without Yama.
        is_dumpable: False if the kernel protects the process, such as one that changed its uid.
    """
    if target.tracer:
        return Unable(
            f"process {target.tracer} traces process {pid} already", "end the debugger, or strace"
        )
    if yama == 3:
        return Unable(
            "Yama's ptrace_scope is 3: no process may be traced",
            "boot the node with kernel.yama.ptrace_scope=1 or 0",
        )
    if hand.effective & _SYS_PTRACE:
        missing = target.permitted & ~hand.permitted if hand.uids == target.uids else 0
        return Unable(
            f"the kernel refuses to trace process {pid} in spite of SYS_PTRACE",
            "allow ptrace in the seccomp profile and the security module of the node"
            + (f", and add the capabilities {_names(missing)}" if missing else ""),
        )
    uid, gid = hand.uids[1], hand.gids[1]
    if {uid} != set(target.uids) or {gid} != set(target.gids):
        return Unable(
            f"process {pid} runs as uid {target.uids[1]} and gid {target.gids[1]},"
            f" and this hand as {uid} and {gid}",
            f"start the hand with runAsUser: {target.uids[1]} and runAsGroup: {target.gids[1]}",
        )
    if missing := target.permitted & ~hand.permitted:
        return Unable(
            f"process {pid} has capabilities that this hand lacks: {_names(missing)}",
            f"start the hand with the capabilities {_names(missing)}, or with SYS_PTRACE",
        )
    if not is_dumpable:
        return Unable(
            f"process {pid} is not dumpable: it has changed its user, or protects itself",
            "start the hand with the capability SYS_PTRACE",
        )
    if yama:
        return Unable(
            f"Yama's ptrace_scope is {yama}: a process may trace its own children only",
            "start the hand with the capability SYS_PTRACE, or set kernel.yama.ptrace_scope=0",
        )
    return Unable(
        f"the kernel refuses to trace process {pid}",
        "allow ptrace in the seccomp profile and the security module of the node",
    )


def _names(capabilities: int) -> str:
    return ", ".join(_names_of_bits(capabilities))


def _names_of_bits(capabilities: int) -> Iterable[str]:
    for bit in range(capabilities.bit_length()):
        if capabilities >> bit & 1:
            yield _CAPABILITIES[bit] if bit < len(_CAPABILITIES) else f"number {bit}"


def _is_dumpable(pid: int, target: Credentials) -> bool:
    """Return whether the kernel lets the owner of a process read its private files."""
    try:
        return os.stat(f"/proc/{pid}/environ").st_uid == target.uids[1]  # noqa: PTH116
    except OSError:
        return True
