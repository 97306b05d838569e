"""Signals to processes, sent through a pidfd where the kernel has it.

-> ``hand/processes/kill.py``: kills; ``hand/processes/operations.py`` offers signals as an operation.
"""

from __future__ import annotations

import contextlib
import os
import signal

from ..refusals import ProcessGone, Unable
from . import access, proc

#: The first process of a pid namespace.
INIT = 1


def send_signal(pid: int, ticks: int, signum: int) -> None:
    """Send a signal to a process.

    Raises:
        ProcessGone: if the process has ended, or ``pid`` is another one.
        Unable: if the kernel does not allow it, or would drop the signal.
    """
    handle = _open_process(pid)
    try:
        if proc.same_process(pid, ticks) is None:
            raise ProcessGone(pid, ticks)
        if pid == INIT and not proc.has_handler(pid, signum):
            raise _dropped_by_init(signum)
        if handle is None:
            os.kill(pid, signum)
        else:
            signal.pidfd_send_signal(handle, signum)
    except ProcessLookupError:
        raise ProcessGone(pid, ticks) from None
    except PermissionError:
        raise access.signal_refusal(pid) from None
    finally:
        if handle is not None:
            os.close(handle)


def _dropped_by_init(signum: int) -> Unable:
    name = f"signal {signum}"
    with contextlib.suppress(ValueError):  # most real-time signals have no name
        name = signal.Signals(signum).name
    return Unable(
        f"process 1 has no handler for {name}: the kernel drops signals to pid 1 from inside its"
        " pid namespace then",
        "kill or stop it, which is done without a signal; or start the training as a child of a"
        " small init such as tini",
    )


def _open_process(pid: int) -> int | None:
    """Return a descriptor that stays with the process when its pid is another one's later.

    None is returned if the process is gone, the kernel is older than 5.3, or a seccomp profile
    refuses the call.
    """
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
