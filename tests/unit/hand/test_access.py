"""Tests of the reasons for which a hand may not trace a process."""

from __future__ import annotations

import pytest

from chaoskit.hand.processes.access import explain_ptrace
from chaoskit.hand.processes.proc import Credentials

SYS_PTRACE, NET_RAW = 1 << 19, 1 << 13


def credentials(uid: int, capabilities: int = 0, tracer: int = 0) -> Credentials:
    return Credentials((uid,) * 3, (uid,) * 3, capabilities, capabilities, tracer)


@pytest.mark.parametrize(
    ("hand", "target", "yama", "is_dumpable", "reason", "remedy"),
    [
        (credentials(1), credentials(1, tracer=7), None, True, "process 7 traces", "strace"),
        (credentials(1), credentials(2), None, True, "uid 2", "runAsUser: 2 and runAsGroup: 2"),
        (credentials(0), credentials(0, NET_RAW), None, True, "NET_RAW", "NET_RAW, or with SYS"),
        (credentials(1), credentials(1), None, False, "not dumpable", "SYS_PTRACE"),
        (credentials(1), credentials(1), 1, True, "ptrace_scope is 1", "SYS_PTRACE"),
        (credentials(1), credentials(1), 3, True, "ptrace_scope is 3", "boot the node"),
        (credentials(1), credentials(1), 0, True, "the kernel refuses", "seccomp"),
        (credentials(0, SYS_PTRACE), credentials(1), 1, True, "in spite of SYS_PTRACE", "seccomp"),
    ],
)
def test_the_reason_names_what_would_help(
    hand: Credentials,
    target: Credentials,
    yama: int | None,
    is_dumpable: bool,
    reason: str,
    remedy: str,
) -> None:
    unable = explain_ptrace(5, hand, target, yama, is_dumpable)
    assert reason in unable.reason
    assert remedy in unable.remedy
