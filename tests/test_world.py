"""torch's own process groups and meshes in a world that can be left: real ranks, real gloo, FSDP2."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import multiprocessing
import os
import signal
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from chaoskit.runtime.clipping import clip_gradients
from chaoskit.runtime.sharding import local_part
from chaoskit.runtime.world import World

pytestmark = pytest.mark.costly

CPU = torch.device("cpu")
WAIT_S = 60.0
GLOO_TIMEOUT_S = 300.0  # what a rank would wait for without leave()
LATE_S = 8.0  # the same where it is waited for
FREED_S = 20.0  # it takes milliseconds; the machine may be busy


def ranks(body: Callable[..., Any], world: int, tmp_path: Path) -> list[Any]:
    """What ``body(rank, directory)`` returns in ``world`` processes; None for those that were killed."""
    torch.set_num_threads(1)  # a forked child hangs after a multi-threaded operation in its parent
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(world):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(body, rank, tmp_path, theirs))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        return [_result(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _child(body: Callable[..., Any], rank: int, tmp_path: Path, pipe: Any) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(body(rank, tmp_path))
    except BaseException:  # noqa: BLE001 - the test shall see it
        pipe.send(traceback.format_exc())
    os._exit(0)  # gloo may complain of groups that are left


def _result(pipe: Any) -> Any:
    if not pipe.poll(WAIT_S):
        raise TimeoutError("a rank gives no result")
    try:
        return pipe.recv()
    except EOFError:
        return None


def make(rank: int, size: int, path: Path, timeout_s: float = GLOO_TIMEOUT_S, **arguments: Any) -> World:
    store = dist.FileStore(str(path), size)
    return World(store, rank, size, CPU, address="127.0.0.1", timeout_s=timeout_s, **arguments)


def everybody(rank: int, size: int, directory: Path) -> None:
    """Return when all ranks have come here."""
    (directory / f"here{rank}").touch()
    deadline_s = time.monotonic() + WAIT_S
    while len(list(directory.glob("here*"))) < size and time.monotonic() < deadline_s:
        time.sleep(0.001)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))


def train(mesh: Any, steps: int = 3) -> list[str]:
    """Losses, exactly; the gradient is clipped, which takes collectives of another kind."""
    sharded = model()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = sharded(torch.ones(4, 8)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(sharded.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss).hex())
    return losses


def in_worlds(rank: int, directory: Path) -> Any:
    losses = []
    for number, shape in enumerate(({"shard": 4}, {"replicate": 2, "shard": 2}, {"shard": 4})):
        world = make(rank, 4, directory / f"world{number}")
        losses.append(train(world.mesh(shape)))
        world.retire()
    return losses


def in_stock_gloo(rank: int, directory: Path) -> Any:
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "gloo"), 4), rank=rank, world_size=4)
    return [train(dist.device_mesh.init_device_mesh("cpu", (4,)))]


def test_fsdp2_trains_in_one_world_after_the_other_with_the_bits_of_stock_gloo(tmp_path: Path) -> None:
    first, second, third = ranks(in_worlds, 4, tmp_path)[0]
    assert first == third == ranks(in_stock_gloo, 4, tmp_path)[0][0]
    assert len(second) == 3


def after_one_that_was_never_made(rank: int, directory: Path) -> Any:
    if rank == 0:
        with pytest.raises(RuntimeError):
            make(0, 2, directory / "alone", timeout_s=0.1)
    world = make(rank, 2, directory / "both", timeout_s=LATE_S)
    losses = train(world.mesh({"shard": 2}), steps=1)
    world.retire()
    return losses


def test_who_was_interrupted_while_it_made_a_world_meets_one_who_never_made_any(tmp_path: Path) -> None:
    first, second = ranks(after_one_that_was_never_made, 2, tmp_path)
    assert isinstance(first, list), first
    assert first == second


def stuck(rank: int, directory: Path) -> Any:
    """Rank 1 stands still; rank 0 waits for it in the collectives of a sharded model, until another thread leaves."""
    waited = []

    @contextlib.contextmanager
    def waiting() -> Iterator[None]:
        waited.append(time.monotonic())
        yield

    world = make(rank, 2, directory / "world", waiting=waiting)
    mesh = world.mesh({"shard": 2})
    train(mesh, 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    before = len(waited)
    left: list[float] = []

    def leave() -> None:
        while len(waited) == before:
            time.sleep(0.001)
        left.append(time.monotonic())
        world.leave()

    threading.Thread(target=leave).start()
    try:
        train(mesh, 1)
    except RuntimeError as error:
        return time.monotonic() - left[0], str(error)
    return None


def test_whoever_waits_in_a_collective_is_freed(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    freed = _first(stuck, tmp_path)
    assert freed[0] < FREED_S
    assert "left" in freed[1] or "gloo" in freed[1]


def too_late(rank: int, directory: Path) -> Any:
    world = make(rank, 2, directory / "world")
    everybody(rank, 2, directory)
    world.leave()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    return None


def test_nothing_is_started_in_a_world_that_was_left(tmp_path: Path) -> None:
    """Nobody would end it before the backend's own time is up."""
    assert ranks(too_late, 2, tmp_path) == ["the process group was left"] * 2


def half_sent(rank: int, directory: Path) -> Any:
    """Rank 0 leaves in the middle of what it sends to rank 1, which stands still: gloo never ends such a send."""
    world = make(rank, 2, directory / "world", timeout_s=LATE_S)
    data = torch.ones(2**25)
    if rank == 1:
        dist.irecv(data, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
    work = dist.isend(data, 1)
    while not any(_unsent_bytes(handle) for handle in world._groups[0]._connections._handles):
        time.sleep(0.001)
    world.leave()
    world.retire()
    del work, world
    begun_s = time.monotonic()
    gc.collect()
    collected_s = time.monotonic() - begun_s
    for thread in [one for one in threading.enumerate() if one.name == "dispose"]:
        thread.join()
    return collected_s, time.monotonic() - begun_s


def _unsent_bytes(handle: int) -> int:
    return int.from_bytes(fcntl.ioctl(handle, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def test_the_garbage_collector_does_not_wait_for_what_a_world_that_was_left_has_under_way(tmp_path: Path) -> None:
    collected_s, disposed_s = _first(half_sent, tmp_path)
    assert collected_s < LATE_S / 2 < disposed_s, "the group must be held until its send has ended"


def _first(body: Callable[..., Any], tmp_path: Path) -> Any:
    """The result of rank 0, though rank 1 gives none."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    _, other = context.Pipe(duplex=False)
    processes = [context.Process(target=_child, args=(body, rank, tmp_path, (theirs, other)[rank])) for rank in (0, 1)]
    for process in processes:
        process.start()
    try:
        return _result(mine)
    finally:
        for process in processes:
            process.kill()
            process.join()


def place_after_place(rank: int, directory: Path) -> Any:
    """Worlds one after the other, each left as by a recovery: losses, and how much torch had to find out in each."""
    found = []
    for number, (mine, shape) in enumerate(
        (
            (rank, {"shard": 4}),
            (rank, {"shard": 4}),
            (3 - rank, {"shard": 4}),
            (3 - rank, {"replicate": 2, "shard": 2}),
            (3 - rank, {"replicate": 2, "shard": 2}),
            (rank, {"shard": 4}),
        )
    ):
        world = make(mine, 4, directory / f"world{number}")
        mesh = world.mesh(shape)
        with counted() as decisions:
            losses = train(mesh)
        assert mesh.get_coordinate() == ((mine,) if len(shape) == 1 else divmod(mine, 2))
        groups = [getattr(mesh, "_pg_registry", {}).get(group.group_name, group) for group in mesh.get_all_groups()]
        assert groups == mesh.get_all_groups()  # these are what torch.compile uses
        found.append((losses, len(decisions)))
        world.leave()
        world.retire(remember=True)
    return found


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Operations whose sharding torch decides meanwhile."""
    decide, found = ShardingPropagator._propagate_tensor_meta_non_cached, []

    def count(self: ShardingPropagator, schema: Any) -> Any:
        found.append(str(schema))
        return decide(self, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = count
    yield found
    ShardingPropagator._propagate_tensor_meta_non_cached = decide


def test_what_torch_knows_is_kept_where_a_process_has_its_old_place(tmp_path: Path) -> None:
    for found in ranks(place_after_place, 4, tmp_path):
        losses, decisions = zip(*found, strict=True)
        assert losses[0] == losses[1] == losses[2] == losses[5]
        assert losses[3] == losses[4]
        assert all(decisions[number] for number in (0, 2, 3, 5))
        assert decisions[1] == decisions[4] == 0


def clipped(rank: int, directory: Path) -> Any:
    """Per mesh: gradients that were clipped by torch, and by us."""
    found = []
    for number, shape in enumerate(({"shard": 4}, {"replicate": 2, "shard": 2})):
        world = make(rank, 4, directory / f"world{number}")
        mesh = world.mesh(shape)
        for clip in (nn.utils.clip_grad_norm_, clip_gradients):
            for most in (1e-3, 1e3):
                sharded = model()
                fully_shard(sharded, mesh=mesh)
                sharded(torch.full((4, 8), 1.0 + rank)).square().mean().backward()
                clip(list(sharded.parameters()), most)
                found.append(torch.cat([local_part(one.grad)[0].flatten() for one in sharded.parameters()]))
        world.retire()
    return [one.tolist() for one in found]


def test_gradients_are_clipped_as_torch_does(tmp_path: Path) -> None:
    for found in ranks(clipped, 4, tmp_path):
        small, large, ours_small, ours_large = (torch.tensor(one) for one in found[:4])
        assert 0 < small.norm() < 1e-3 < large.norm()
        torch.testing.assert_close(ours_small, small, rtol=1e-5, atol=0)
        assert torch.equal(ours_large, large)
        torch.testing.assert_close(torch.tensor(found[6]), torch.tensor(found[4]), rtol=1e-5, atol=0)
        assert found[7] == found[5]


def another_rank(rank: int, directory: Path) -> Any:
    """In the second world every process has another rank; torch must not give it the boxes of its first one."""
    found = []
    for number, mine in enumerate((rank, 2 - rank)):
        world = make(mine, 3, directory / f"world{number}")
        sharded = nn.Linear(4, 7, bias=False)
        fully_shard(sharded, mesh=world.mesh({"shard": 3}))
        optimizer = torch.optim.AdamW(sharded.parameters())
        sharded(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        moment = optimizer.state[sharded.weight]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert moment.device_mesh.get_coordinate() == (mine,)
        found.append([(local_part(one)[2].start, tuple(local_part(one)[0].shape)) for one in (sharded.weight, moment)])
        world.retire()
    return found


def test_what_torch_remembers_of_a_left_world_is_forgotten(tmp_path: Path) -> None:
    boxes = [((0, 0), (3, 4)), ((3, 0), (3, 4)), ((6, 0), (1, 4))]
    for rank, found in enumerate(ranks(another_rank, 3, tmp_path)):
        assert found == [[boxes[rank]] * 2, [boxes[2 - rank]] * 2]


def interrupted(rank: int, directory: Path) -> Any:
    """Nobody else comes: the store gives up, and the registry is empty afterwards."""

    class Interrupted(dist.Store):  # type: ignore[name-defined,misc]
        def set(self, key: str, value: bytes) -> None:
            raise ConnectionError("interrupted by a newer plan")

    with pytest.raises(Exception, match="interrupted"):
        World(Interrupted(), 0, 2, CPU, address="127.0.0.1", timeout_s=GLOO_TIMEOUT_S)
    world = make(0, 1, directory / "alone")
    return train(world.mesh({"shard": 1}), 1)


def test_a_world_that_is_never_complete_leaves_no_trace(tmp_path: Path) -> None:
    assert len(ranks(interrupted, 1, tmp_path)[0]) == 1


def deserted(rank: int, directory: Path) -> Any:
    """Rank 0 leaves, and lives on; rank 1 has not heard of it, and waits for rank 0."""
    world = make(rank, 2, directory / "world")
    everybody(rank, 2, directory)
    done = directory / "done"
    if rank == 0:
        world.leave()
        deadline_s = time.monotonic() + WAIT_S
        while not done.exists() and time.monotonic() < deadline_s:
            time.sleep(0.001)
        return done.exists()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    finally:
        done.touch()
    return None


def test_who_has_not_heard_is_freed_by_those_who_leave(tmp_path: Path) -> None:
    first, second = ranks(deserted, 2, tmp_path)
    assert first
    assert "gloo" in second
