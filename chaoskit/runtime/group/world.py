"""The process groups of one generation in torch's registry, which can be left at once.

Sharded models (FSDP2, tensor parallelism) take groups from a device mesh, which takes them from
torch's global registry. :class:`World` fills the registry for one generation and empties it again.
On CPU every group in it is a :class:`LeavableGroup`: a gloo group in which no thread waits inside
gloo, and an abort frees all waiting threads. See :mod:`chaoskit.runtime.group.process_group` for
how this works, and why gloo alone cannot do it. On GPUs it is NCCL, which can be aborted.

-> group/regroup.py: when a generation is over, so that its world is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in __all__
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from chaoskit.runtime.group.process_group import Connections, gloo
from chaoskit.runtime.group.transfers import GroupAborted, Transfer, TransferThread

#: A context in which the caller is shown as waiting for other ranks.
Waiting = Callable[[], AbstractContextManager[None]]

#: The name of the backend in torch.
BACKEND = "chaoskit"

#: The methods that torch calls on a group, in all supported versions.
_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


class _Work(dist.Work):
    """An operation in progress. Waiting for it raises GroupAborted once the group is left."""

    def __init__(self, transfer: Transfer, work: Any, waiting: Waiting) -> None:
        super().__init__()
        self._transfer, self._work, self._waiting = transfer, work, waiting

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the operation is complete.

        Args:
            timeout: ignored; the wait ends with the group or at the backend's own timeout.

        Raises:
            GroupAborted: if the group was left.
            RuntimeError: the backend's own error.
        """
        if self._transfer.done:
            self._transfer.wait()  # raises its error
        else:
            with self._waiting():
                self._transfer.wait()
        return True

    def is_completed(self) -> bool:
        return self._transfer.done

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        self.wait()
        return self._work.get_future()


class LeavableGroup(dist.ProcessGroup):
    """A gloo group with collectives that all ranks can leave at once, by :meth:`leave`.

    It has the methods of a group of torch, each of which starts an operation as :meth:`start` does.

    Args:
        address: the address of this host, as its peers can reach it.
        waiting: entered while a thread waits for other ranks.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        address: str,
        waiting: Waiting = nullcontext,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # another constructor in torch's stubs
        self._connections = Connections()
        backend = gloo(store, rank, size, address, timeout_s)
        self._connections.find()
        # two objects: torch asks this one for a device's backend, and base calls return here
        self._inner = dist.ProcessGroup(store, rank, size)
        for group in (self, self._inner):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(
                torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend
            )
        self._transfers, self._waiting = TransferThread(), waiting
        self._start_lock, self._is_left = threading.Lock(), False

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def start(self, name: str, *arguments: Any) -> _Work:
        """Start the collective with torch's name ``name``, and return the operation in progress.

        Raises:
            GroupAborted: if the group was left.
            RuntimeError: the backend's own error.
        """
        with self._start_lock:
            if self._is_left:  # otherwise it would last until the backend's own timeout
                raise GroupAborted("the process group was left")
            work = getattr(self._inner, name)(*arguments)
            transfer = self._transfers.add(work)
        return _Work(transfer, work, self._waiting)

    def leave(self) -> None:
        """Make all ranks leave all collectives of this group.

        May be called from any thread, and more than once.
        """
        with self._start_lock:
            self._is_left = True
        self._transfers.abort()
        self._connections.shut_down()

    def close(self) -> None:
        """Close the duplicates of sockets, and wait until the backend has no operation left.

        The wait ends with the backend's own timeout. The backend can then be freed at once.
        """
        self._connections.close()
        self._transfers.abort()
        self._transfers.join()


def _collective(name: str) -> Callable[..., _Work]:
    """Return the method that torch calls for the collective ``name``."""

    def call(self: LeavableGroup, *arguments: Any) -> _Work:
        return self.start(name, *arguments)

    return call


for _name in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(LeavableGroup, _name, _collective(_name))


class World:
    """The default group of one generation, and the groups of its meshes.

    A process has one at a time. Making it registers the default group with torch, and waits for all
    ranks. If that fails, nothing stays registered, and the error is raised.

    Args:
        store: where the members exchange addresses; interrupting it ends the wait for a group.
        address: the address of this host, as its peers can reach it.
        timeout_s: the last resort of the backend itself; faults are noticed long before.
        waiting: entered while a thread waits for other ranks.
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
        waiting: Waiting = nullcontext,
    ) -> None:
        self.rank, self.size, self._device = rank, size, device
        self._address, self._timeout_s, self._waiting = address, timeout_s, waiting
        self._store = store  # torch keeps only a part alive, and uses it for further groups
        self._groups: list[LeavableGroup] = []
        self._is_left = False
        is_cuda = device.type == "cuda"
        if not is_cuda:
            _group_makers.append(self._make_group)
            _register_backend()
        try:
            dist.init_process_group(
                "nccl" if is_cuda else f"cpu:{BACKEND}",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if is_cuda else None,
            )
        except BaseException:
            self._forget()
            raise

    def _make_group(self, store: Store, rank: int, size: int) -> LeavableGroup:
        """Return a new group of this world, as torch asks for one.

        It is left at once if the world was left.
        """
        group = LeavableGroup(store, rank, size, self._timeout_s, self._address, self._waiting)
        self._groups.append(group)
        if self._is_left:  # the world was left while the group was built
            group.leave()
        return group

    def mesh(self, sizes: dict[str, int]) -> DeviceMesh:
        """Return a mesh over all ranks.

        It is the object of the last world, brought up to date, if this process has the same rank in
        an equal mesh again.

        Args:
            sizes: the size of each dimension by name; the last one varies fastest.
        """
        new_mesh = init_device_mesh(
            self._device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )
        return _meshes.mesh(self.rank, new_mesh)

    def leave(self) -> None:
        """Make all ranks leave all collectives.

        May be called from any thread, and more than once.
        """
        self._is_left = True
        if self._device.type == "cuda":
            dist.distributed_c10d._abort_process_group()
        for group in list(self._groups):
            group.leave()

    def retire(self, *, keep_caches: bool = False) -> None:
        """Empty torch's registry, so that another world can be made.

        The groups are freed in a thread, as gloo needs 10 ms for each pair.

        Args:
            keep_caches: keep torch's caches of operations on DTensors, for a world in which this
                process has the same place. Do not set it if an error ended the world before a step
                has shown them to be right.
        """
        self._forget()
        if not keep_caches:
            _meshes.forget()
        groups, self._groups = self._groups, []
        # not a daemon: an interpreter that ends while gloo is freed crashes
        threading.Thread(target=_dispose, args=(groups,), name="dispose").start()

    def _forget(self) -> None:
        """Remove this world from torch's registry."""
        if self._make_group in _group_makers:
            _group_makers.remove(self._make_group)
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch numbers groups, and keeps the count if a group fails: all ranks must begin alike
        dist.distributed_c10d._world.group_count = 0


def _dispose(groups: list[LeavableGroup]) -> None:
    """Close the groups, wait for their operations, and free them."""
    for group in groups:
        group.close()
    groups.clear()


class _Meshes:
    """torch's caches of operations on DTensors, kept from one world to the next.

    They take half a second to fill. torch finds entries by the shape of the mesh, and puts that
    mesh into results. It belongs to a world that was left, in which this process may have had
    another rank. If a process has the same place again, the old mesh object is brought up to date
    and reused. Otherwise all caches are cleared.
    """

    def __init__(self) -> None:
        self._rank = -1
        self._mesh: DeviceMesh | None = None

    def mesh(self, rank: int, new_mesh: DeviceMesh) -> DeviceMesh:
        """Return ``new_mesh``, or the old mesh that now stands for it.

        If a world has several meshes, only those of the last one are cached.
        """
        old_mesh = self._mesh
        if (
            old_mesh is None
            or rank != self._rank
            or old_mesh != new_mesh
            or _names(old_mesh) != _names(new_mesh)
        ):
            self.forget()
            self._rank, self._mesh = rank, new_mesh
            return new_mesh
        vars(old_mesh).clear()
        vars(old_mesh).update(vars(new_mesh))
        return old_mesh

    def forget(self) -> None:
        """Clear torch's caches, and forget the old mesh."""
        from torch.distributed.tensor import DTensor, _redistribute

        self._mesh = None
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        for owner, name in (
            (torch._C, "_clear_DTensor_sharding_propagator_cache"),
            (_redistribute, _PLANNER_CACHE),
        ):
            if (clear := getattr(owner, name, None)) is not None:  # newer versions of torch only
                clear()


_PLANNER_CACHE = "clear_redistribute_planner_cache"


def _names(mesh: DeviceMesh) -> object:
    """Return the group names of a mesh, or an object that equals nothing if torch has none."""
    return getattr(mesh, "_dim_group_names", object())


_meshes = _Meshes()
_group_makers: list[Callable[[Store, int, int], LeavableGroup]] = []


def _register_backend() -> None:
    """Register the backend with torch, unless it is registered."""
    if BACKEND in dist.Backend.backend_list:
        return

    def make(options: Any, _: Any) -> LeavableGroup:
        return _group_makers[-1](options.store, options.group_rank, options.group_size)

    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu"])
