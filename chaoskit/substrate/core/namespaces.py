"""Anonymous kernel namespaces, each of which vanishes with its last user.

Its contents (links, addresses, rules, queues; mounts) vanish with it, so that nothing is left to
clean up.

-> ``supervisor/programs.py``: a program enters its namespace before it begins.
``network/fabric.py``: the namespaces of a run, and the links between them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

#: Name of a node's network interface inside its own namespace.
INSIDE = "eth0"

_CLONE_NEWNET = 0x40000000
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_SELF = "/proc/thread-self/ns/net"

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, system_call: str) -> None:
    """Raise OSError with the errno of a system call, unless its result is 0."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{system_call}: {os.strerror(number)}")


def create() -> int:
    """Return the descriptor of a new network namespace, which the caller must close.

    The descriptor is not inherited by child processes.

    Raises:
        OSError: if this process may not create one.
    """
    with _restored():
        _check(_libc.unshare(_CLONE_NEWNET), "unshare")
        return os.open(_SELF, os.O_RDONLY | os.O_CLOEXEC)


def enter(descriptor: int) -> None:
    """Move the calling thread, and what it starts from now on, into the network namespace.

    Raises OSError if this process may not enter it.

    Args:
        descriptor: as returned by :func:`create`.
    """
    _check(_libc.setns(descriptor, _CLONE_NEWNET), "setns")


@contextlib.contextmanager
def entered(descriptor: int) -> Iterator[None]:
    """Move the calling thread into the network namespace for the duration of a ``with``.

    A socket stays in the namespace that it was created in. Raises OSError as :func:`enter`.
    """
    with _restored():
        enter(descriptor)
        yield


def leave_mounts() -> None:
    """Give this process and its later children a mount namespace of their own.

    Other processes do not see what is mounted in it. Raises OSError if that is not permitted.
    """
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "mount")


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Return the calling thread to its network namespace at the end of a ``with``."""
    original = os.open(_SELF, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        enter(original)
        os.close(original)
