"""torch's registry of process groups for one generation, which can be left at once.

Whoever shards a model (FSDP2, tensor parallelism) takes groups from a device mesh, and that takes them from torch's
global registry. :class:`World` fills the registry for one generation and empties it again. On CPU every group in it is
a :class:`LeavableGroup`: gloo, but nobody waits inside gloo, and an abort frees all who wait (see
:mod:`chaoskit.runtime.group.process_group` for how, and for why gloo alone cannot do it). On GPUs it is NCCL, which can
be aborted.
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
from chaoskit.runtime.group.transfers import GroupAborted, Transfer, WaitingLine

#: Shows, for as long as it is entered, that the caller waits for other ranks.
Waiting = Callable[[], AbstractContextManager[None]]

#: Under this name torch knows the backend.
BACKEND = "chaoskit"

#: What torch calls on a group, in any of the versions that we support.
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
    """An operation under way; waiting for it ends with the group at the latest."""

    def __init__(self, transfer: Transfer, work: Any, waiting: Waiting) -> None:
        super().__init__()
        self._transfer, self._work, self._waiting = transfer, work, waiting

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._transfer.done:
            self._transfer.wait()  # for its error
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
    """A gloo group that :meth:`leave` gets every rank out of.

    Args:
        address: of this host, as its peers can reach it.
        waiting: is entered while somebody waits for other ranks.
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
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's types know another constructor only
        self._connections = Connections()
        backend = gloo(store, rank, size, address, timeout_s)
        self._connections.find()
        # twice: torch asks this object for the backend of a device, and a call of the base class would come back here
        self._inner = dist.ProcessGroup(store, rank, size)
        for group in (self, self._inner):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(
                torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend
            )
        self._line, self._waiting = WaitingLine(), waiting
        self._starting, self._left = threading.Lock(), False

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def start(self, name: str, *arguments: Any) -> _Work:
        """Start the collective that torch calls ``name``."""
        with self._starting:
            if self._left:  # nobody would end it before the backend's own time is up
                raise GroupAborted("the process group was left")
            work = getattr(self._inner, name)(*arguments)
            transfer = self._line.add(work)
        return _Work(transfer, work, self._waiting)

    def leave(self) -> None:
        """Get every rank out of every collective of this group. May be called from any thread, more than once."""
        with self._starting:
            self._left = True
        self._line.abort()
        self._connections.shut_down()

    def close(self) -> None:
        """Free what this object holds beside the backend, and wait until that can be freed without waiting."""
        self._connections.close()
        self._line.abort()
        self._line.join()


def _collective(name: str) -> Callable[..., _Work]:
    def call(self: LeavableGroup, *arguments: Any) -> _Work:
        return self.start(name, *arguments)

    return call


for _name in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(LeavableGroup, _name, _collective(_name))


class World:
    """The default group of one generation, and what meshes are made of it. One at a time in a process.

    Args:
        store: where the members exchange addresses; interrupting it ends what waits for a group to be built.
        address: of this host, as its peers can reach it.
        timeout_s: last resort of the backend itself; faults are noticed long before.
        waiting: is entered while somebody waits for other ranks.
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
        self._store = (
            store  # torch keeps a part of it only, and asks it again for every further group
        )
        self._groups: list[LeavableGroup] = []
        self._left = False
        cuda = device.type == "cuda"
        if not cuda:
            _makers.append(self._make)
            _register()
        try:
            dist.init_process_group(
                "nccl" if cuda else f"cpu:{BACKEND}",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if cuda else None,
            )
        except BaseException:
            self._forget()
            raise

    def _make(self, store: Store, rank: int, size: int) -> LeavableGroup:
        group = LeavableGroup(store, rank, size, self._timeout_s, self._address, self._waiting)
        self._groups.append(group)
        if self._left:  # while it was built
            group.leave()
        return group

    def mesh(self, sizes: dict[str, int]) -> DeviceMesh:
        """A mesh over all ranks; its dimensions by name, the last one varies fastest."""
        made = init_device_mesh(
            self._device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )
        return _remembered.mesh(self.rank, made)

    def leave(self) -> None:
        """Get every rank out of every collective. May be called from any thread, more than once."""
        self._left = True
        if self._device.type == "cuda":
            dist.distributed_c10d._abort_process_group()
        for group in list(self._groups):
            group.leave()

    def retire(self, *, remember: bool = False) -> None:
        """Empty torch's registry, so that another world can be made. Freeing gloo takes 10 ms a pair: in a thread.

        Args:
            remember: what torch has found out about operations on DTensors, for a world in which this process has the
                same place. Not to be asked for when an error ended the world before any step had shown it to be right.
        """
        self._forget()
        if not remember:
            _remembered.forget()
        groups, self._groups = self._groups, []
        # no daemon: an interpreter that ends while gloo is freed crashes
        threading.Thread(target=_dispose, args=(groups,), name="dispose").start()

    def _forget(self) -> None:
        if self._make in _makers:
            _makers.remove(self._make)
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch names groups by a count, which it leaves when a group could not be made: all ranks must begin with one
        dist.distributed_c10d._world.group_count = 0


def _dispose(groups: list[LeavableGroup]) -> None:
    for group in groups:
        group.close()
    groups.clear()


class _Meshes:
    """What torch remembers of operations on DTensors, half a second's work, from one world to the next.

    It finds that again by the shape of their mesh, and gives results that mesh: of a world that was left, in which this
    process may have had another rank. So where a process has its old place a mesh is not another object but the old
    one, brought up to date; else all of it is forgotten.
    """

    def __init__(self) -> None:
        self._rank = -1
        self._known: DeviceMesh | None = None

    def mesh(self, rank: int, made: DeviceMesh) -> DeviceMesh:
        """``made``, or what stands for it. Of several meshes in one world nothing is remembered but of the last one."""
        known = self._known
        if known is None or rank != self._rank or known != made or _names(known) != _names(made):
            self.forget()
            self._rank, self._known = rank, made
            return made
        vars(known).clear()
        vars(known).update(vars(made))
        return known

    def forget(self) -> None:
        """Whatever there is."""
        from torch.distributed.tensor import DTensor, _redistribute

        self._known = None
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        for owner, name in (
            (torch._C, "_clear_DTensor_sharding_propagator_cache"),
            (_redistribute, _PLANNER_CACHE),
        ):
            if (
                clear := getattr(owner, name, None)
            ) is not None:  # older versions have no such caches
                clear()


_PLANNER_CACHE = "clear_redistribute_planner_cache"


def _names(mesh: DeviceMesh) -> object:
    """Of the groups behind a mesh; in a version of torch that has none, something that equals nothing."""
    return getattr(mesh, "_dim_group_names", object())


_remembered = _Meshes()
_makers: list[Callable[[Store, int, int], LeavableGroup]] = []


def _register() -> None:
    """Tell torch of the backend, once."""
    if BACKEND in dist.Backend.backend_list:
        return

    def make(options: Any, _: Any) -> LeavableGroup:
        return _makers[-1](options.store, options.group_rank, options.group_size)

    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu"])
