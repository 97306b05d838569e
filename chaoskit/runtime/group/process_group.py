"""A process group of one generation that can be left at once.

gloo cannot abort. After a kill only the ring neighbours get an error, and its ``abort`` and
``shutdown`` unblock no thread. Shutting down the sockets that the group opened does (1.5 ms until
all ranks are out). They are the connected sockets that appeared in this process while the group was
built with eager connections. The listening socket must stay open, because gloo ends the process
when ``accept`` fails. :mod:`chaoskit.runtime.group.transfers` frees the waiters that gloo then
forgets. NCCL has its own abort.

-> group/regroup.py: when a group is built, aborted and freed. group/world.py: the groups of sharded
jobs.
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
from chaoskit.runtime.group.transfers import TransferThread

_foreign_links: set[str] = set()
_foreign_lock = threading.Lock()


def disown(fd: int) -> None:
    """Mark socket ``fd`` as not belonging to a process group that may be under construction.

    An abort of that group would otherwise shut it down.
    """
    with _foreign_lock:
        _foreign_links.add(os.readlink(f"/proc/self/fd/{fd}"))


def reown(fd: int) -> None:
    """Remove the mark of ``fd``. Call it before the socket is closed."""
    with _foreign_lock:
        _foreign_links.discard(os.readlink(f"/proc/self/fd/{fd}"))


class Group:
    """The collectives of one generation, over gloo or NCCL, with one interface.

    To start an operation, and to wait for it, raises GroupFailed if a rank is lost or the group is
    left. Making the group returns once all ranks are connected; it raises errors of ``store`` and
    of the backend.

    Args:
        store: where the members exchange addresses.
        address: the address of this host, as its peers can reach it.
        timeout_s: the last resort of the backend itself; faults are noticed long before.
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
        self._transfers: TransferThread | None = None
        self._connections = Connections()
        if device.type == "cuda":
            self._backend: Any = _nccl(store, rank, size, device, timeout_s)
        else:
            self._backend = gloo(store, rank, size, address, timeout_s)
            self._connections.find()
            self._transfers = TransferThread()

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        """Start to send ``tensor`` to rank ``dst``, and return the transfer."""
        return self._start(self._backend.send, [tensor], dst, tag)

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        """Start to receive into ``tensor`` from rank ``src``, and return the transfer."""
        return self._start(self._backend.recv, [tensor], src, tag)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Start to sum ``tensor`` over all ranks, in place, and return the transfer."""
        return self._start(self._backend.allreduce, [tensor])

    def _start(self, operation: Callable[..., Any], *arguments: Any) -> Work:
        """Start an operation of the backend, and return its transfer.

        Raise GroupFailed if the group is to blame for an error.
        """
        try:
            work = operation(*arguments)
        except RuntimeError as error:
            _fail(error)
        return _Operation(self._transfers.add(work) if self._transfers is not None else work)

    @contextmanager
    def coalesce(self) -> Iterator[None]:
        """Issue the point-to-point calls of the block as one batch.

        This is for NCCL; gloo starts each call at once.
        """
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
        """Close the duplicates of sockets, and wait until the backend has no operation left.

        The wait ends with the backend's own timeout. The backend can then be freed at once.
        """
        self._connections.close()
        if self._transfers is not None:
            self._transfers.abort()
            self._transfers.join()

    def abort(self) -> None:
        """Make all ranks leave all collectives of this group.

        May be called from any thread, and more than once.
        """
        if self._aborted:
            return
        self._aborted = True
        if self._transfers is None:
            self._backend.abort()
            return
        self._transfers.abort()
        self._connections.shut_down()


class _Operation:
    """An operation in progress. Waiting for it raises GroupFailed for errors of the group."""

    __slots__ = ("_work",)

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            _fail(error)


def _fail(error: RuntimeError) -> NoReturn:
    """Raise GroupFailed for an error of the backend.

    Errors of the device itself, such as a lack of memory, are raised unchanged.
    """
    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError, GroupFailed)):
        raise error
    raise GroupFailed(str(error)) from error


class Connections:
    """The connected sockets that appear in this process while a gloo group is built.

    Make the object before the group, and call :meth:`find` after it.
    """

    def __init__(self) -> None:
        self._before = _sockets()
        self._handles: list[int] = []

    def find(self) -> None:
        """Find and duplicate the sockets that the group has opened.

        Call it once the group is built.
        """
        self._handles = _connected(self._before)

    def shut_down(self) -> None:
        """End every transfer on these connections, at once and on both sides."""
        handles, self._handles = self._handles, []
        for handle in handles:
            _shut_down(handle)

    def close(self) -> None:
        """Close the duplicates; the group's own descriptors stay open."""
        handles, self._handles = self._handles, []
        for handle in handles:
            os.close(handle)


def gloo(store: Store, rank: int, size: int, address: str, timeout_s: float) -> ProcessGroupGloo:
    """Return torch's gloo group with all pairs connected.

    Args:
        store: where the members exchange addresses.
        address: the address of this host, as its peers can reach it.
        timeout_s: the time after which an operation fails.
    """
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """Return torch's NCCL group with all ranks connected."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    backend = ProcessGroupNCCL(store, rank, size, options)
    backend.eager_connect_single_device(device)
    return backend


def _sockets() -> dict[int, str]:
    """Return the socket descriptors of this process, each with its inode.

    Inodes identify sockets, as descriptor numbers are reused.
    """
    inodes = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed meanwhile, or the listing itself
        if link.startswith("socket:"):
            inodes[int(name)] = link
    return inodes


def _connected(before: dict[int, str]) -> list[int]:
    """Return duplicates of the connected TCP sockets that have appeared since ``before``.

    Disowned sockets are left out, and sockets that a listener of ``before`` has accepted.
    """
    with _foreign_lock:
        excluded_links = _foreign_links.union(before.values())
    ports = _listening_ports(before)
    handles = []
    for descriptor, link in _sockets().items():
        if link in excluded_links:
            continue
        try:
            handle = os.dup(descriptor)
        except OSError:
            continue  # closed meanwhile
        connection = socket.socket(fileno=handle)
        is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
        is_of_group = is_internet and not is_listening and connection.getsockname()[1] not in ports
        connection.detach()
        if is_of_group:
            handles.append(handle)
        else:
            os.close(handle)
    return handles


def _listening_ports(sockets: dict[int, str]) -> set[int]:
    """Return the local ports on which one of these sockets accepts connections."""
    ports = set()
    for descriptor in sockets:
        try:
            listener = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue  # closed meanwhile
        with listener:
            is_internet = listener.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(listener.getsockname()[1])
    return ports


def _shut_down(handle: int) -> None:
    """Shut down the connection of a socket descriptor, and close the descriptor."""
    connection = socket.socket(fileno=handle)
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the peer was faster
    finally:
        connection.close()
