"""A process group of one generation that can be left at once.

gloo cannot abort: after a kill only the ring neighbours get an error, and its ``abort`` and ``shutdown`` unblock
nobody. What does: shutting down the sockets that the group opened (1.5 ms until everybody is out). They are recognised
as the connected sockets that appeared in this process while the group was built with eager connections; the listening
one must stay, because gloo ends the process when ``accept`` fails. :mod:`chaoskit.runtime.group.transfers` frees those
whom gloo then forgets. NCCL has an abort of its own.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]  # public, though not in __all__

from chaoskit.runtime.group.collective import GroupFailed, Work
from chaoskit.runtime.group.transfers import WaitingLine

_foreign: set[str] = set()
_foreign_lock = threading.Lock()


def disown(fd: int) -> None:
    """Tell that socket ``fd`` does not belong to a process group that may be under construction."""
    with _foreign_lock:
        _foreign.add(os.readlink(f"/proc/self/fd/{fd}"))


def reown(fd: int) -> None:
    """Forget ``fd``, before it is closed."""
    with _foreign_lock:
        _foreign.discard(os.readlink(f"/proc/self/fd/{fd}"))


class Group:
    """Collectives of one generation, over gloo or NCCL, with one interface.

    Args:
        store: where the members exchange addresses.
        address: of this host, as its peers can reach it.
        timeout_s: last resort of the backend itself; faults are noticed long before.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        *,
        address: str,
        timeout_s: float,
    ) -> None:
        self.rank, self.size, self._device = rank, size, device
        self._aborted = False
        self._line: WaitingLine | None = None
        self._connections = Connections()
        if device.type == "cuda":
            self._backend: Any = _nccl(store, rank, size, device, timeout_s)
        else:
            self._backend = gloo(store, rank, size, address, timeout_s)
            self._connections.find()
            self._line = WaitingLine()

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        """Start to send."""
        return self._start(self._backend.send, [tensor], dst, tag)

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        """Start to receive into ``tensor``."""
        return self._start(self._backend.recv, [tensor], src, tag)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Start to sum ``tensor`` over all ranks, in place."""
        return self._start(self._backend.allreduce, [tensor])

    def _start(self, operation: Callable[..., Any], *arguments: Any) -> Work:
        try:
            work = operation(*arguments)
        except RuntimeError as error:
            _fail(error)
        return _Operation(self._line.add(work) if self._line is not None else work)

    @contextmanager
    def coalesce(self) -> Iterator[None]:
        """Issue the point-to-point calls of the block as one batch (NCCL; gloo starts each at once)."""
        if self._device.type != "cuda":
            yield
            return
        self._backend._start_coalescing(self._device)
        try:
            yield
        finally:
            try:
                self._backend._end_coalescing(self._device)
            except RuntimeError as error:
                _fail(error)

    def close(self) -> None:
        """Free what this object holds beside the backend, and wait until that can be freed without waiting."""
        self._connections.close()
        if self._line is not None:
            self._line.abort()
            self._line.join()

    def abort(self) -> None:
        """Get every rank out of every collective of this group. May be called from any thread, more than once."""
        if self._aborted:
            return
        self._aborted = True
        if self._line is None:
            self._backend.abort()
            return
        self._line.abort()
        self._connections.shut_down()


class _Operation:
    """An operation under way, which fails with the group."""

    __slots__ = ("_work",)

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            _fail(error)


def _fail(error: RuntimeError) -> NoReturn:
    """Raise what an error of the backend means: a device without memory, or a broken one, is no fault of the group."""
    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError, GroupFailed)):
        raise error
    raise GroupFailed(str(error)) from error


class Connections:
    """The connected sockets that appear in this process while a gloo group is built: made before it, asked after."""

    def __init__(self) -> None:
        self._before = _sockets()
        self._handles: list[int] = []

    def find(self) -> None:
        """The group is built: remember what it has opened."""
        self._handles = _connected(self._before)

    def shut_down(self) -> None:
        """End every transfer on these connections, at once and on both sides."""
        handles, self._handles = self._handles, []
        for handle in handles:
            _shut_down(handle)

    def close(self) -> None:
        """Forget them; the group's own descriptors stay open."""
        handles, self._handles = self._handles, []
        for handle in handles:
            os.close(handle)


def gloo(store: Store, rank: int, size: int, address: str, timeout_s: float) -> ProcessGroupGloo:
    """gloo's own group, every pair connected.

    Args:
        address: of this host, as its peers can reach it.
        timeout_s: after which an operation fails that nobody ended.
    """
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    backend = ProcessGroupNCCL(store, rank, size, options)
    backend.eager_connect_single_device(device)
    return backend


def _sockets() -> dict[int, str]:
    """Descriptors of this process that are sockets, each with its inode: numbers are reused, inodes are not."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed meanwhile, or the listing itself
        if link.startswith("socket:"):
            found[int(name)] = link
    return found


def _connected(before: dict[int, str]) -> list[int]:
    """Duplicates of the connected TCP sockets that are not in ``before`` and not known to be somebody else's.

    What was accepted by a listener of ``before`` is somebody else's, too.
    """
    with _foreign_lock:
        known = _foreign.union(before.values())
    ports = _listening_ports(before)
    handles = []
    for descriptor, link in _sockets().items():
        if link in known:
            continue
        try:
            handle = os.dup(descriptor)
        except OSError:
            continue  # closed meanwhile
        peer = socket.socket(fileno=handle)
        listening = peer.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        internet = peer.family in (socket.AF_INET, socket.AF_INET6)
        ours = internet and not listening and peer.getsockname()[1] not in ports
        peer.detach()
        if ours:
            handles.append(handle)
        else:
            os.close(handle)
    return handles


def _listening_ports(sockets: dict[int, str]) -> set[int]:
    """Local ports on which one of these sockets accepts connections."""
    ports = set()
    for descriptor in sockets:
        try:
            listener = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue  # closed meanwhile
        with listener:
            internet = listener.family in (socket.AF_INET, socket.AF_INET6)
            if internet and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(listener.getsockname()[1])
    return ports


def _shut_down(handle: int) -> None:
    connection = socket.socket(fileno=handle)
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the peer was faster
    finally:
        connection.close()
