"""Calls of ptrace(2), which the standard library lacks.

The kernel ties a traced thread to the thread that traces it: all calls come from one thread.

-> ``hand/processes/tracer.py`` holds processes by them; ``hand/processes/kill.py`` kills pid 1 by them.
"""

from __future__ import annotations

import ctypes
import os

_DETACH = 17
_GETEVENTMSG, _SEIZE, _INTERRUPT = 0x4201, 0x4206, 0x4207
#: Options of :func:`seize`: trace new threads from their begin; kill if the tracer ends.
TRACE_CLONE, EXIT_KILL = 0x8, 0x100000
#: Option of waitpid(2) for threads of other processes.
WAIT_ALL = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def seize(tid: int, options: int) -> None:
    """Trace a thread, without stopping it.

    Raises:
        ProcessLookupError: if the thread is gone.
        PermissionError: if the kernel refuses, or the thread is traced or a zombie.
    """
    _call(_SEIZE, tid, options)


def interrupt(tid: int) -> None:
    """Have a traced thread stop. waitpid(2) reports the stop."""
    _call(_INTERRUPT, tid)


def settle(tid: int) -> None:
    """Wait until a thread that has reported its stop has left its CPU."""
    message = ctypes.c_ulong()
    _call(_GETEVENTMSG, tid, ctypes.addressof(message))


def detach(tid: int, signum: int = 0) -> None:
    """Let a thread that is stopped run untraced, after it gets a signal; 0 for none."""
    _call(_DETACH, tid, signum)


def event_of(status: int) -> int:
    """Return the event of a wait status; 0 for a stop before the delivery of a signal."""
    return status >> 16


def _call(request: int, tid: int, data: int = 0) -> None:
    if _libc.ptrace(request, tid, None, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"ptrace of thread {tid}")
