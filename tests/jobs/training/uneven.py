"""Jobs with a rank that is slow by itself, or is measured to be slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from chaoskit.fixtures.jobs.goal import Goal


class Records:
    """A data set from which rank 1 reads slowly."""

    def __init__(self, trainer: Any, read_s: float) -> None:
        self._trainer, self._read_s = trainer, read_s
        self._data = torch.arange(512, dtype=torch.float32).view(128, 4) / 512

    def __len__(self) -> int:
        return len(self._data)

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        if self._trainer.took_part and self._trainer.rank == 1:
            time.sleep(self._read_s)
        return list(self._data[indices])

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]


def slow_input(trainer: Any, *, steps: int, shard_s: float, read_s: float) -> None:
    """Train on data that rank 1 reads slowly.

    Args:
        read_s: time of a batch on rank 1.
    """
    torch.manual_seed(trainer.seed)
    model = nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    data = Records(trainer, read_s)
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(data, batch_size=48):
                time.sleep(shard_s)
                step.backward(model(shard.batch).square().mean())


class Measured:
    """A board that reports other times than the stopwatch measured, so that the machine's load does
    not matter.

    Args:
        board: the board of the worker.
        parts: returns the current times in seconds: computation and input of a shard, and the wait
            of a step.
    """

    def __init__(self, board: Any, parts: Callable[[], tuple[float, float, float]]) -> None:
        self._board, self._parts = board, parts
        self._steps = self._shards = 0
        self._spent_s = [0.0, 0.0, 0.0]

    def spend(self, total: list[int]) -> None:
        """Report the injected times, in place of the board's method."""
        steps, shards = total[0] - self._steps, total[1] - self._shards
        self._steps, self._shards = total[0], total[1]
        compute_s, input_s, wait_s = self._parts()
        added = (compute_s * shards, input_s * shards, wait_s * steps)
        self._spent_s = [
            spent_s + added_s for spent_s, added_s in zip(self._spent_s, added, strict=True)
        ]
        self._board.spend([total[0], total[1], *(int(part * 1e9) for part in self._spent_s), 0])


def measured(
    trainer: Any,
    *,
    steps: int,
    until: dict[str, Any] | None = None,
    slow: Sequence[int] = (),
    part: str = "compute",
    factor: float = 2.0,
    from_step: int = 6,
    recovers_after: int = 0,
) -> None:
    """All ranks are as fast as the machine is; the times that they tell say that some are slow.

    A shard takes a second of computation and 0.1 s of input, by these times: so much more than it
    really takes that what the kernel tells of a busy machine is nothing beside it.

    Args:
        until: the goal of an open-ended run; see :class:`chaoskit.fixtures.jobs.goal.Goal`.
        slow: ranks of the first world. A rank that replaces one of them later is as fast as the
            others.
        part: what is slow on them: ``compute``, ``input`` or ``wait``, that is the network.
        factor: a shard takes so many times longer there, all in all.
        from_step: from here on.
        recovers_after: steps with fewer shards than at first after which it is slow no more; 0: it
            stays slow.
    """
    torch.manual_seed(trainer.seed)
    model = nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    usual = {"compute": 1.0, "input": 0.1, "wait": 0.1}
    late = dict.fromkeys(usual, 0.0) | {part: (factor - 1) * (usual["compute"] + usual["input"])}
    counts: list[int] = []  # shards of this rank, step by step
    in_first_world: set[int] = set()  # the rank that this worker had there

    def parts() -> tuple[float, float, float]:
        eased = sum(count < max(counts) for count in counts) > recovers_after > 0
        is_slow = not in_first_world.isdisjoint(slow)
        more = (
            late
            if is_slow and trainer.step >= from_step and not eased
            else dict.fromkeys(usual, 0.0)
        )
        return (
            usual["compute"] + more["compute"],
            usual["input"] + more["input"],
            usual["wait"] + more["wait"],
        )

    trainer._stopwatch._board = Measured(trainer._worker.board, parts)
    data = torch.arange(512, dtype=torch.float32).view(128, 4) / 512
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        count = 0
        with trainer.transaction() as step:
            goal.pace(0.02)
            for shard in step.shards(data, batch_size=48):
                in_first_world.update(
                    {trainer.rank} if trainer._worker.board.generation == 1 else ()
                )
                count += trainer.took_part  # not in the rehearsal
                step.backward(model(shard.batch).square().mean())
        counts.append(count)
