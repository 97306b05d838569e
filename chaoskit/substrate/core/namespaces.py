"""Namespaces without a name: each vanishes with its last user.

Whatever is in one (links, addresses, rules, queues; mounts) goes with it, so that nothing is left to be cleaned up.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

#: A node's link to the others, in a namespace of its own.
INSIDE = "eth0"

_CLONE_NEWNET = 0x40000000
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_SELF = "/proc/thread-self/ns/net"

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def create() -> int:
    """A new namespace, as a descriptor that is not inherited.

    Raises:
        OSError: if this process may not make one.
    """
    with _restored():
        _check(_libc.unshare(_CLONE_NEWNET), "unshare")
        return os.open(_SELF, os.O_RDONLY | os.O_CLOEXEC)


def enter(descriptor: int) -> None:
    """Move the calling thread into the namespace. What it starts from now on begins there. Raises OSError."""
    _check(_libc.setns(descriptor, _CLONE_NEWNET), "setns")


@contextlib.contextmanager
def entered(descriptor: int) -> Iterator[None]:
    """Be in the namespace meanwhile. A socket stays in the one where it was made. Raises OSError."""
    with _restored():
        enter(descriptor)
        yield


def leave_mounts() -> None:
    """Give this process, and all that it starts from now on, mounts of its own: others do not see what is added.

    Raises:
        OSError: if it may not have them.
    """
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "mount")


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    mine = os.open(_SELF, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        enter(mine)
        os.close(mine)
