"""Kill of a process: by a signal, or as the tracer of pid 1.

The kernel ignores signals to the pid 1 of a pid namespace from inside. It kills the process for the
option EXITKILL, though, when the tracer ends.

-> ``hand/processes/operations.py`` offers it as an operation.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from ..refusals import ProcessGone, Unable
from . import access, proc, ptrace
from .signals import INIT, send_signal

#: Time for the process to be gone. A large one takes longer: 90 ms for each GB of memory.
_GONE_WITHIN_S = 0.5
_POLL_S = 0.001


def kill(pid: int, ticks: int, announce: Callable[[], None]) -> dict[str, Any]:
    """Kill a process, and return the means and the evidence.

    Args:
        announce: called before pid 1 is killed, as this process may end with it.

    Raises:
        ProcessGone: if the process has ended, or ``pid`` is another one.
        Unable: if the kernel does not allow it.
    """
    began_s = time.monotonic()
    if pid == INIT:
        _kill_as_tracer(pid, ticks, announce)
    else:
        send_signal(pid, ticks, signal.SIGKILL)
    while proc.same_process(pid, ticks) is not None:
        if time.monotonic() > began_s + _GONE_WITHIN_S:
            break
        time.sleep(_POLL_S)
    return {
        "by": "tracer" if pid == INIT else "signal",
        "took_ms": round(1000 * (time.monotonic() - began_s), 1),
        **evidence(pid, ticks),
    }


def evidence(pid: int, ticks: int) -> dict[str, Any]:
    """Return signs of the end of a process.

    ``gone`` is true if it has ended; ``exiting`` if it ends, and runs none of its code any more.
    """
    stat = proc.same_process(pid, ticks)
    if stat is None:
        return {"gone": True}
    return {"gone": False, "state": stat.state, "exiting": stat.is_exiting}


def _kill_as_tracer(pid: int, ticks: int, announce: Callable[[], None]) -> None:
    """Kill a process by the end of a child of this process, which traces it until then."""
    if proc.same_process(pid, ticks) is None:
        raise ProcessGone(pid, ticks)
    report_read, report_write = os.pipe()
    order_read, order_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(report_read)
        os.close(order_write)
        _trace_until_order(pid, report_write, order_read)
    os.close(report_write)
    os.close(order_read)
    try:
        number = int(os.read(report_read, 16) or b"-1")
        if number == 0:
            announce()
    finally:
        os.close(report_read)
        os.close(order_write)  # the order
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    if number != 0:
        if proc.same_process(pid, ticks) is None:
            raise ProcessGone(pid, ticks)
        if number < 0:
            raise Unable("the child that kills has died", "try again")
        raise access.ptrace_refusal(pid)


def _trace_until_order(pid: int, report: int, order: int) -> None:
    """Trace a process, report the number of the error (0 for none), and exit on the order."""
    number = 0
    try:
        ptrace.seize(pid, ptrace.EXIT_KILL)
    except OSError as error:
        number = error.errno or -1
    os.write(report, str(number).encode())
    os.read(order, 1)  # the end of the stream
    os._exit(0)
