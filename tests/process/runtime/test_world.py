"""Tests of torch's own process groups and meshes in a world that can be left: real ranks, real
gloo, FSDP2.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.ranks import Line
from support.waiting import wait_until
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from chaoskit.runtime.group.world import World
from chaoskit.runtime.reduction.clipping import clip_gradients
from chaoskit.runtime.state.sharding import local_part

pytestmark = pytest.mark.costly

CPU = torch.device("cpu")
GLOO_TIMEOUT_S = 600.0  # a rank that leave() does not free exceeds the limit of its test
LATE_S = 15.0  # the timeout of a group that a test waits for; a busy machine needs a part of it to make the world


def make(
    rank: int, size: int, path: Path, timeout_s: float = GLOO_TIMEOUT_S, **arguments: Any
) -> World:
    store = dist.FileStore(str(path), size)
    return World(store, rank, size, CPU, address="127.0.0.1", timeout_s=timeout_s, **arguments)


def await_all(rank: int, size: int, directory: Path) -> None:
    """Return when all ranks have called it."""
    (directory / f"here{rank}").touch()
    wait_until(lambda: len(list(directory.glob("here*"))) == size, f"{size} ranks")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))


def train(mesh: Any, steps: int = 3) -> list[str]:
    """Return the exact losses; the gradient is clipped, which takes collectives of another kind."""
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


def in_worlds(line: Line, directory: Path) -> Any:
    losses = []
    for number, shape in enumerate(({"shard": 4}, {"replicate": 2, "shard": 2}, {"shard": 4})):
        world = make(line.rank, 4, directory / f"world{number}")
        losses.append(train(world.mesh(shape)))
        world.retire()
    return losses


def in_stock_gloo(line: Line, directory: Path) -> Any:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(directory / "gloo"), 4), rank=line.rank, world_size=4
    )
    return [train(dist.device_mesh.init_device_mesh("cpu", (4,)))]


@pytest.mark.slow
@pytest.mark.promise(
    "all of torch's collectives run over gloo, too (meshes, FSDP2 and `all_to_all` included"
)
def test_fsdp2_trains_in_one_world_after_the_other_with_the_bits_of_stock_gloo(
    tmp_path: Path,
) -> None:
    first, second, third = ranks.results(4, in_worlds, tmp_path)[0]
    assert first == third == ranks.results(4, in_stock_gloo, tmp_path)[0][0]
    assert len(second) == 3


def after_one_that_was_never_made(line: Line, directory: Path) -> Any:
    if line.rank == 0:
        with pytest.raises(RuntimeError):
            make(0, 2, directory / "alone", timeout_s=0.1)
    world = make(line.rank, 2, directory / "both", timeout_s=GLOO_TIMEOUT_S)
    losses = train(world.mesh({"shard": 2}), steps=1)
    world.retire()
    return losses


def test_a_rank_that_was_interrupted_while_it_made_a_world_meets_one_that_never_made_any(
    tmp_path: Path,
) -> None:
    """torch counts groups; ranks with different counts would look for each other under different
    names.
    """
    first, second = ranks.results(2, after_one_that_was_never_made, tmp_path)
    assert isinstance(first, list), first
    assert first == second


def stuck(line: Line, directory: Path) -> Any:
    """Stop rank 1; rank 0 waits for it in the collectives of a sharded model, until another thread
    leaves.
    """
    waited = []

    @contextlib.contextmanager
    def waiting() -> Iterator[None]:
        waited.append(time.monotonic())
        yield

    world = make(line.rank, 2, directory / "world", waiting=waiting)
    mesh = world.mesh({"shard": 2})
    train(mesh, 1)
    if line.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    before = len(waited)
    left: list[bool] = []

    def leave() -> None:
        while len(waited) == before:
            time.sleep(0.001)
        left.append(True)
        world.leave()

    threading.Thread(target=leave).start()
    try:
        train(mesh, 1)
    except RuntimeError as error:
        return left, str(error)
    return None


@pytest.mark.promise("shuts down the sockets that the group opened")
def test_a_rank_that_waits_in_a_collective_is_freed(tmp_path: Path) -> None:
    """The rank is freed when its world is left, long before gloo's own timeout of ten minutes."""
    with first_of_two(stuck, tmp_path) as rank:
        left, error = rank.result()
    assert left == [True]
    assert "left" in error or "gloo" in error


def too_late(line: Line, directory: Path) -> Any:
    world = make(line.rank, 2, directory / "world")
    await_all(line.rank, 2, directory)
    world.leave()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    return None


def test_nothing_is_started_in_a_world_that_was_left(tmp_path: Path) -> None:
    """A collective after leave() is refused: it would end only with the backend's own timeout."""
    assert ranks.results(2, too_late, tmp_path) == ["the process group was left"] * 2


def half_sent(line: Line, directory: Path, timeout_s: float) -> Any:
    """Leave as rank 0 in the middle of a send to rank 1, which is stopped: gloo never ends such a
    send.
    """
    world = make(line.rank, 2, directory / "world", timeout_s=timeout_s)
    data = torch.ones(2**25)
    if line.rank == 1:
        dist.irecv(data, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
    work = dist.isend(data, 1)
    while not any(_unsent_bytes(handle) for handle in world._groups[0]._connections._handles):
        time.sleep(0.001)
    world.leave()
    world.retire()
    del work, world
    gc.collect()
    disposing = [thread for thread in threading.enumerate() if thread.name == "dispose"]
    line.send(len(disposing))
    for thread in disposing:
        thread.join()
    line.send("disposed")


def _unsent_bytes(handle: int) -> int:
    return int.from_bytes(fcntl.ioctl(handle, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def test_the_garbage_collector_does_not_wait_for_what_a_world_that_was_left_has_under_way(
    tmp_path: Path,
) -> None:
    """The collection returns; another thread holds the group until its send has ended, after ten
    minutes here.
    """
    with first_of_two(half_sent, tmp_path, GLOO_TIMEOUT_S) as rank:
        assert rank.receive() == 1


def test_a_world_that_was_left_is_freed_when_all_that_it_had_under_way_has_ended(
    tmp_path: Path,
) -> None:
    """The thread that holds the group ends with the timeout of the backend."""
    with first_of_two(half_sent, tmp_path, LATE_S) as rank:
        assert rank.receive() in (0, 1)
        assert rank.receive() == "disposed"


@contextlib.contextmanager
def first_of_two(body: Callable[..., Any], *arguments: Any) -> Iterator[ranks.Rank]:
    """Run ``body`` on two ranks and yield rank 0; rank 1 gives no result."""
    started = ranks.start(2, body, *arguments)
    try:
        yield started[0]
    finally:
        started.destroy()


def place_after_place(line: Line, directory: Path) -> Any:
    """Make worlds one after the other, each left as by a recovery.

    Returns the losses, and the number of sharding decisions of torch in each world.
    """
    results = []
    for number, (rank, shape) in enumerate(
        (
            (line.rank, {"shard": 4}),
            (line.rank, {"shard": 4}),
            (3 - line.rank, {"shard": 4}),
            (3 - line.rank, {"replicate": 2, "shard": 2}),
            (3 - line.rank, {"replicate": 2, "shard": 2}),
            (line.rank, {"shard": 4}),
        )
    ):
        world = make(rank, 4, directory / f"world{number}")
        mesh = world.mesh(shape)
        with counted() as decisions:
            losses = train(mesh)
        assert mesh.get_coordinate() == ((rank,) if len(shape) == 1 else divmod(rank, 2))
        groups = [
            getattr(mesh, "_pg_registry", {}).get(group.group_name, group)
            for group in mesh.get_all_groups()
        ]
        assert groups == mesh.get_all_groups()  # torch.compile uses these groups
        results.append((losses, len(decisions)))
        world.leave()
        world.retire(keep_caches=True)
    return results


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Provide the list of operations for which torch decides a sharding during the context."""
    decide, operations = ShardingPropagator._propagate_tensor_meta_non_cached, []

    def count(self: ShardingPropagator, schema: Any) -> Any:
        operations.append(str(schema))
        return decide(self, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = count
    yield operations
    ShardingPropagator._propagate_tensor_meta_non_cached = decide


def test_what_torch_knows_is_kept_where_a_process_has_its_old_place(tmp_path: Path) -> None:
    for result in ranks.results(4, place_after_place, tmp_path):
        losses, decisions = zip(*result, strict=True)
        assert losses[0] == losses[1] == losses[2] == losses[5]
        assert losses[3] == losses[4]
        assert all(decisions[number] for number in (0, 2, 3, 5))
        assert decisions[1] == decisions[4] == 0


def clipped(line: Line, directory: Path) -> Any:
    """Return, for each mesh, gradients that were clipped by torch, and by chaoskit."""
    gradients = []
    for number, shape in enumerate(({"shard": 4}, {"replicate": 2, "shard": 2})):
        world = make(line.rank, 4, directory / f"world{number}")
        mesh = world.mesh(shape)
        for clip in (nn.utils.clip_grad_norm_, clip_gradients):
            for most in (1e-3, 1e3):
                sharded = model()
                fully_shard(sharded, mesh=mesh)
                sharded(torch.full((4, 8), 1.0 + line.rank)).square().mean().backward()
                clip(list(sharded.parameters()), most)
                gradients.append(
                    torch.cat(
                        [
                            local_part(parameter.grad)[0].flatten()
                            for parameter in sharded.parameters()
                        ]
                    )
                )
        world.retire()
    return [gradient.tolist() for gradient in gradients]


def test_gradients_are_clipped_as_torch_does(tmp_path: Path) -> None:
    for gradients in ranks.results(4, clipped, tmp_path):
        small, large, ours_small, ours_large = (
            torch.tensor(gradient) for gradient in gradients[:4]
        )
        assert 0 < small.norm() < 1e-3 < large.norm()
        torch.testing.assert_close(ours_small, small, rtol=1e-5, atol=0)
        assert torch.equal(ours_large, large)
        torch.testing.assert_close(
            torch.tensor(gradients[6]), torch.tensor(gradients[4]), rtol=1e-5, atol=0
        )
        assert gradients[7] == gradients[5]


def another_rank(line: Line, directory: Path) -> Any:
    """Give every process another rank in the second world; torch must not use the boxes of the
    first one.
    """
    boxes = []
    for number, rank in enumerate((line.rank, 2 - line.rank)):
        world = make(rank, 3, directory / f"world{number}")
        sharded = nn.Linear(4, 7, bias=False)
        fully_shard(sharded, mesh=world.mesh({"shard": 3}))
        optimizer = torch.optim.AdamW(sharded.parameters())
        sharded(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        moment = optimizer.state[sharded.weight]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert moment.device_mesh.get_coordinate() == (rank,)
        boxes.append(
            [
                (local_part(tensor)[2].start, tuple(local_part(tensor)[0].shape))
                for tensor in (sharded.weight, moment)
            ]
        )
        world.retire()
    return boxes


def test_what_torch_remembers_of_a_left_world_is_forgotten(tmp_path: Path) -> None:
    boxes = [((0, 0), (3, 4)), ((3, 0), (3, 4)), ((6, 0), (1, 4))]
    for rank, rank_boxes in enumerate(ranks.results(3, another_rank, tmp_path)):
        assert rank_boxes == [[boxes[rank]] * 2, [boxes[2 - rank]] * 2]


def interrupted(line: Line, directory: Path) -> Any:
    """Wait for ranks that never come, until the store gives up; the registry is empty
    afterwards.
    """

    class Interrupted(dist.Store):  # type: ignore[name-defined,misc]
        def set(self, key: str, value: bytes) -> None:
            raise ConnectionError("interrupted by a newer plan")

    with pytest.raises(Exception, match="interrupted"):
        World(Interrupted(), 0, 2, CPU, address="127.0.0.1", timeout_s=GLOO_TIMEOUT_S)
    world = make(0, 1, directory / "alone")
    return train(world.mesh({"shard": 1}), 1)


def test_a_world_that_is_never_complete_leaves_no_trace(tmp_path: Path) -> None:
    assert len(ranks.results(1, interrupted, tmp_path)[0]) == 1


def deserted(line: Line, directory: Path) -> Any:
    """Leave as rank 0, and live on; rank 1 does not know, and waits for rank 0."""
    world = make(line.rank, 2, directory / "world")
    await_all(line.rank, 2, directory)
    done = directory / "done"
    if line.rank == 0:
        world.leave()
        return wait_until(done.exists, "the end of rank 1's collective")
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    finally:
        done.touch()
    return None


@pytest.mark.promise(
    "every rank out within milliseconds; then a new world can be entered in the same process"
)
def test_a_rank_that_has_not_heard_is_freed_by_those_that_leave(tmp_path: Path) -> None:
    """The collective of a rank ends with an error when another rank leaves the world and lives
    on.
    """
    first, second = ranks.results(2, deserted, tmp_path)
    assert first
    assert "gloo" in second
