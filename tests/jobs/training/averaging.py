"""A job that changes registered state between steps, with ranks that end themselves
meanwhile.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from chaoskit.fixtures.jobs.goal import Goal

DATA = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))

#: Places behind a step at which a rank can end, in the order of the script.
PLACES = ("before", "within", "written", "call", "after")


class Ends:
    """Ends ranks at a place behind a step, each rank once in a run.

    Args:
        fatal: step -> ranks that end when a process with this rank first comes there.
        revisited: step -> ranks that end the second time.
        marks: directory of files that count these visits.
    """

    def __init__(
        self,
        trainer: Any,
        fatal: dict[str, list[int]],
        revisited: dict[str, list[int]],
        place: str,
        marks: str,
    ) -> None:
        self._trainer, self._place, self._marks = trainer, place, marks
        self._visits = [fatal, revisited]

    def __call__(self, place: str) -> None:
        step, rank = self._trainer.step, self._trainer.rank
        if place != self._place:
            return
        for number, fatal in enumerate(self._visits):
            mark = Path(self._marks) / f"{step}-{rank}-{number}"
            if mark.exists():
                continue
            mark.touch()
            if rank in fatal.get(str(step), []):
                os.kill(os.getpid(), signal.SIGKILL)
            return


def build(seed: int, *, norm: bool = False) -> nn.ModuleDict:
    """Return a network with two averages of it, which must always be equal."""
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(32)] if norm else []
    net = nn.Sequential(nn.Linear(6, 32), *middle, nn.Tanh(), nn.Linear(32, 1))
    copies = {
        name: AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)
        for name in ("ema", "again")
    }
    return nn.ModuleDict({"net": net, **copies})


def pairs(average: nn.Module, net: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(average.parameters(), net.parameters(), strict=True)


def train(trainer: Any, **options: Any) -> None:
    """Train a replicated network; see :func:`run`."""
    run(trainer, build(trainer.seed, norm=options.get("how") == "statistics"), **options)


def train_sharded(trainer: Any, **options: Any) -> None:
    """Train the network with FSDP2; see :func:`run`."""
    model, mesh = build(trainer.seed), trainer.mesh()
    for part in model.values():
        fully_shard(part, mesh=mesh)
    run(trainer, model, **options)


def run(
    trainer: Any,
    model: nn.ModuleDict,
    *,
    steps: int,
    how: str = "behind",
    fatal: dict[str, list[int]] | None = None,
    revisited: dict[str, list[int]] | None = None,
    stumbles: int = 0,
    place: str = "",
    marks: str = "",
    ranks: list[int] | None = None,
    step_s: float = 0.01,
    first: int = 0,
    until: dict[str, Any] | None = None,
) -> None:
    """Train, and change what is registered between two steps.

    Args:
        how: the change. ``hook``: averages in ``trainer.after_update``. ``statistics``: like
            ``hook``, and the statistics of a BatchNorm. ``behind``: averages in place. ``data``:
            averages through ``.data``. ``replaced``: averages as new tensors. ``rate``: the
            learning rate. ``mask``: some weights, to 0. ``measured``: the rate, by a collective
            over the average. ``swapped``: the weights, there and back. ``differently``: averages by
            the number of the rank. ``late``: a refused change. ``nothing``: no change.
        fatal, revisited, place, marks: see :class:`Ends`.
        stumbles: step in which rank 1 raises an exception, once, which the script catches.
        ranks: ranks that change the state; None for all.
        first: step behind which the changes begin.
    """
    net = model["net"]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    trainer.register(model=model, optimizer=optimizer)
    ends = Ends(trainer, fatal or {}, revisited or {}, place, marks)

    @torch.no_grad()
    def average(write: Callable[[Tensor, Tensor], object]) -> None:
        for name in ("ema", "again"):
            for number, (old, new) in enumerate(pairs(model[name], net)):
                write(old, new)
                if number == 1:
                    ends("within")

    def measure(shard: int) -> float:
        ends("measured")
        return float(sum(parameter.abs().sum() for parameter in model["ema"].parameters())) * (
            shard + 1
        )

    def change() -> None:
        match how:
            case "hook" | "behind":
                average(lambda old, new: old.lerp_(new, 0.1))
            case "data":
                average(lambda old, new: old.data.mul_(0.9).add_(new.data, alpha=0.1))
            case "replaced":
                average(lambda old, new: setattr(old, "data", old.lerp(new, 0.1)))
            case "rate":
                for group in optimizer.param_groups:
                    group["lr"] *= 0.97
            case "mask":
                net[0].weight.data[::2] = 0.0
            case "measured":
                average(lambda old, new: old.lerp_(new, 0.1))
                size = trainer.all_reduce(measure, shards=3)
                optimizer.param_groups[0]["lr"] = 1e-2 / (1 + size)
            case "swapped":
                stored = {name: tensor.clone() for name, tensor in net.state_dict().items()}
                net.load_state_dict(model["ema"].module.state_dict())
                net.load_state_dict(stored)
            case "statistics":
                average(lambda old, new: old.lerp_(new, 0.1))
                update_bn([DATA[:24]], model["ema"])
            case "differently":
                average(lambda old, new: old.add_(trainer.rank + 1))

    hooked = how in ("hook", "statistics")
    if hooked:
        trainer.after_update(change)
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        if trainer.step == stumbles > 0 and trainer.rank == 1:
            stumbles = 0
            with suppress(ZeroDivisionError), trainer.transaction() as step:
                for _ in step.shards(DATA, batch_size=24):
                    raise ZeroDivisionError
        with trainer.transaction() as step:
            goal.pace(step_s)
            for shard in step.shards(DATA, batch_size=24):
                output = net(shard.batch)
                step.backward((output - shard.batch.sum(1, keepdim=True)).square().mean())
        if how == "late":
            trainer.after_update(change)
        ends("before")
        if not hooked and trainer.step > first and (ranks is None or trainer.rank in ranks):
            change()
        ends("written")
        if place == "call":
            trainer.all_reduce(1.0)
            ends("call")
        ends("after")
        for average_value, again_value in zip(
            model["ema"].parameters(), model["again"].parameters(), strict=True
        ):
            assert torch.equal(average_value, again_value), (
                f"two equal averages differ behind step {trainer.step}"
            )
