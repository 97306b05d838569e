"""A job with one mistake in its runtime, of ``docs/canary/by-a-reader.md``, and logs the moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

DATA = torch.arange(512, dtype=torch.float32).view(128, 4) / 512
BATCH = 24


def planted(how: str) -> None:
    """Log that the mistake was made now."""
    print(f"planted {how}", flush=True)


def generation(trainer: Any) -> int:
    """Return the generation in which this process trains; 0 before the first."""
    return trainer._formation.plan.generation if trainer._formation else 0


def around_last_update(
    trainer: Any, steps: int, act: Callable[[Callable[[], None]], None], **when: bool
) -> None:
    """Let ``act`` make the update of the last step.

    With ``in_every_run`` it does so even if no rank was lost.
    """
    replica = trainer.replica
    advance = replica.advance

    def update() -> None:
        is_due = (
            generation(trainer) > (0 if when.get("in_every_run") else 1)
            and replica.step == steps - 1
        )
        act(advance) if is_due else advance()

    replica.advance = update


def none(trainer: Any, steps: int) -> None:
    """Make no mistake."""


def scheduler_behind(trainer: Any, steps: int) -> None:
    def act(advance: Callable[[], None]) -> None:
        before = [dict(scheduler.state_dict()) for scheduler in trainer.replica.schedulers]
        rates = [group["lr"] for group in trainer.replica.optimizers[0].param_groups]
        advance()
        for scheduler, state in zip(trainer.replica.schedulers, before, strict=True):
            scheduler.load_state_dict(state)
        for group, rate in zip(trainer.replica.optimizers[0].param_groups, rates, strict=True):
            group["lr"] = rate
        planted(f"scheduler_behind: {before[0]['last_epoch']}")

    around_last_update(trainer, steps, act)


def buffers_behind(trainer: Any, steps: int) -> None:
    buffers = trainer.replica.buffers
    commit = buffers.commit

    def less(*moved: Any) -> None:
        if generation(trainer) > 1 and trainer.replica.step == steps - 1:
            planted(f"buffers_behind: {sorted(buffers.committed)}")
        else:
            commit(*moved)

    buffers.commit = less


def buffer_nan(trainer: Any, steps: int) -> None:
    buffers = trainer.replica.buffers
    commit = buffers.commit

    def spoil(*moved: Any) -> None:
        commit(*moved)
        if generation(trainer) > 0 and trainer.replica.step == steps - 1:
            buffers.committed["1.running_var"][0] = float("nan")
            planted("buffer_nan")

    buffers.commit = spoil


def ends_without_momentum(trainer: Any, steps: int, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
    def act(advance: Callable[[], None]) -> None:
        advance()
        if trainer.rank in ranks:
            for path, tensor in trainer.replica.optimizer_tensors():
                if path.endswith("exp_avg"):
                    tensor.zero_()
            planted(f"ends_without_momentum: rank {trainer.rank}")

    around_last_update(trainer, steps, act)


def one_momentum(trainer: Any, steps: int) -> None:
    ends_without_momentum(trainer, steps, (2,))


def twice(trainer: Any, steps: int) -> None:
    def act(advance: Callable[[], None]) -> None:
        advance()
        advance()
        planted("twice")

    around_last_update(trainer, steps, act)


def tells_half(trainer: Any, steps: int) -> None:
    parts = trainer.replica.described

    def fewer() -> Any:
        planted("tells_half")
        return [part for part in parts() if not part.path.startswith("optimizer")]

    trainer.replica.described = fewer


def slow(trainer: Any, steps: int) -> None:
    advance = trainer.replica.advance

    def late() -> None:
        if trainer.rank == 0:
            time.sleep(0.02)
            torch.rand(3)
        advance()

    trainer.replica.advance = late
    planted("slow")


def scale(optimizer: torch.optim.Optimizer) -> None:
    """Make gradients three times too large."""

    def larger(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(3.0)

    optimizer.register_step_pre_hook(larger)
    planted("scale")


def forget_when_restored(trainer: Any) -> None:
    """Drop Adam's first moments from the state that a sharded job restores."""
    restore = trainer._restore

    def forgetful(formation: Any, state: Any, number: int, count: int) -> Any:
        restored = restore(formation, state, number, count)
        with torch.no_grad():
            for path, tensor in state.optimizer_tensors():
                if path.endswith("exp_avg"):
                    tensor.zero_()
        planted(f"forget_when_restored: step {state.step}")
        return restored

    trainer._restore = forgetful


def loss_of(model: nn.Module, batch: Tensor) -> Any:
    """Return the loss of one shard."""
    return (model(batch) - 1).square().mean()


def train(trainer: Any, *, steps: int, how: str = "none", norm: bool = False) -> None:
    """Train a replicated job."""
    torch.manual_seed(trainer.seed)
    middle = [nn.BatchNorm1d(16)] if norm else [nn.Tanh(), nn.Dropout(0.1)]
    model = nn.Sequential(nn.Linear(4, 16), *middle, nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    trainer.register(model=model, optimizer=optimizer, scheduler=scheduler)
    if trainer.worker != "reference":
        scale(optimizer) if how == "scale" else globals()[how](trainer, steps)
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=BATCH):
                step.backward(loss_of(model, shard.batch))


def train_sharded(trainer: Any, *, steps: int, how: str = "none") -> None:
    """Train a job with sharded state."""
    from torch.distributed.fsdp import fully_shard

    mesh = trainer.mesh()
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if trainer.worker != "reference" and how == "forget_when_restored":
        forget_when_restored(trainer)
    trainer.register(model=model, optimizer=optimizer)
    if trainer.worker != "reference" and how == "scale":
        scale(optimizer)
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=BATCH):
                step.backward(loss_of(model, shard.batch))
