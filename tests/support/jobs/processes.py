"""The processes of pods of the tests' cluster, which run on this machine."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil

from support.nodes import pods
from support.waiting import wait_until


def kill_container(pod: str) -> None:
    """Kill the first process of a pod's only container, from outside of the pod."""
    (status,) = pods.pods()[pod]["status"]["containerStatuses"]
    container_id = status["containerID"].partition("//")[2]
    wait_until(lambda: _first_process(container_id), f"the process of {pod}").send_signal(
        signal.SIGKILL
    )


def _first_process(container_id: str) -> psutil.Process | None:
    """Return the first process of a container, or None if no process is in its control group."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            groups = Path(f"/proc/{process.pid}/cgroup").read_text(encoding="utf-8")
            if container_id in groups and _pid_inside(process.pid) == 1:
                return process
    return None


def _pid_inside(pid: int) -> int:
    """Return the pid of a process in its own namespace."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[-1]) for line in lines if line.startswith("NSpid:"))
