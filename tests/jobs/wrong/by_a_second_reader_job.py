"""A job with one mistake in its runtime, of ``docs/canary/by-a-second-reader.md``, and logs the
moment.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from by_a_reader_job import BATCH, DATA, generation, loss_of, planted
from torch import Tensor, nn

from chaoskit.fixtures.jobs.goal import Goal

_SKIPPED_AT = 3
_LATE_AT = 6
_SLOW_AT, _SLOW_S = 4, 0.3


class Job:
    """The target of mistakes: a trainer, its registered objects, and its last step."""

    def __init__(
        self, trainer: Any, optimizers: list[torch.optim.Optimizer], scheduler: Any, steps: int
    ) -> None:
        self.trainer, self.optimizers, self.scheduler, self.last = (
            trainer,
            optimizers,
            scheduler,
            steps - 1,
        )

    @property
    def state(self) -> Any:
        """The registered state."""
        return self.trainer.state if hasattr(self.trainer, "rehearses") else self.trainer.replica

    @property
    def has_recovered(self) -> bool:
        """True if a later membership than the first one trains."""
        return generation(self.trainer) > 1

    def after_last_update(self, change: Callable[[], object], is_due: Callable[[], bool]) -> None:
        """Call ``change`` after the last update, before any other process reads the state."""
        state, advance = self.state, self.state.advance

        def update() -> None:
            advance()
            if is_due() and state.step == self.last:
                with torch.no_grad():
                    change()

        state.advance = update

    def set_schedule_back(self) -> None:
        """Set the schedule back by one step, with its rate."""
        self.scheduler.last_epoch -= 1
        group = self.optimizers[0].param_groups[0]
        group["lr"] *= 2
        planted(f"schedule: {self.scheduler.last_epoch}, {group['lr']}")

    def forget_momentum(self) -> None:
        """Set Adam's first moments to zero."""
        for path, tensor in self.state.optimizer_tensors():
            if path.endswith("exp_avg"):
                tensor.zero_()
        planted(f"forget_momentum: rank {self.trainer.rank}")


def none(job: Job) -> None:
    """Make no mistake."""


def schedule_when_recovered(job: Job) -> None:
    job.after_last_update(job.set_schedule_back, lambda: job.has_recovered)


def schedule_unless_twin(job: Job) -> None:
    """Set back the schedule of a batch that follows the world, except in the twin, which is given
    its sizes.
    """
    is_twin = bool(job.trainer.config.follow.schedule)
    job.after_last_update(
        job.set_schedule_back, lambda: generation(job.trainer) > 0 and not is_twin
    )


def schedule_always(job: Job) -> None:
    job.after_last_update(job.set_schedule_back, lambda: generation(job.trainer) > 0)


def newcomer_schedule(job: Job) -> None:
    """Reset the schedule of every process that takes over a state."""
    load = job.state.load_scalars

    def load_less(data: bytes, step: int) -> None:
        load(data, step)
        if step > 0:
            job.scheduler.last_epoch = 0
            planted(f"newcomer_schedule: {job.trainer.worker} at step {step}")

    job.state.load_scalars = load_less


def skip_decays(job: Job) -> None:
    committer = job.trainer._committer
    skip = committer.skip

    def decay(*given: Any) -> None:
        with torch.no_grad():
            for parameter in job.state.parameters:
                parameter.mul_(0.9)
        planted(f"skip_decays: step {job.trainer.step}")
        skip(*given)

    committer.skip = decay


def skip_good(job: Job) -> None:
    backward = job.trainer._backward

    def spoil(loss: Tensor) -> None:
        is_due = generation(job.trainer) > 0 and job.trainer.step == _SKIPPED_AT
        if is_due:
            planted(f"skip_good: {float(loss)}")
        backward(loss * math.nan if is_due else loss)

    job.trainer._backward = spoil


def skip_other_shards(job: Job) -> None:
    committer = job.trainer._committer
    skip = committer.skip

    def skip_another(formation: Any, result: Any, contribution: Any) -> None:
        if job.has_recovered:
            planted(f"skip_other_shards: {result.shards}")
            result = dataclasses.replace(result, shards=(2,))
        skip(formation, result, contribution)

    committer.skip = skip_another


def lost_after_telling(job: Job) -> None:
    tell = job.trainer.journal_state

    def tell_before() -> None:
        tell()
        if job.has_recovered and job.trainer.step == job.last + 1:
            with torch.no_grad():
                job.forget_momentum()

    job.trainer.journal_state = tell_before


def wrong_collective(job: Job) -> None:
    module = sys.modules["chaoskit.runtime.step.collectives"]
    combine = module.combine

    def without_division(parts: Any, op: str) -> Tensor:
        if job.has_recovered:
            planted(f"wrong_collective: {op}")
        return combine(parts, "sum" if job.has_recovered else op)  # type: ignore[no-any-return]

    vars(module)["combine"] = without_division


def unshuffled(job: Job) -> None:
    from chaoskit.data.permutation import Permutation

    Permutation.__call__ = lambda self, places: places  # type: ignore[method-assign]
    planted("unshuffled")


def silent_hook(job: Job) -> None:
    callbacks = job.trainer._callbacks
    call = callbacks._call

    def call_less(name: str, hooks: Any, happening: Any) -> None:
        if name == "on_fault":
            planted(f"silent_hook: {happening}")
        else:
            call(name, hooks, happening)

    callbacks._call = call_less


def slow_optimizer_idle(job: Job) -> None:
    optimizer = job.optimizers[1]
    step = optimizer.step

    def idle() -> None:
        if job.has_recovered:
            planted(f"slow_optimizer_idle: step {job.trainer.step}")
        else:
            step()

    optimizer.step = idle  # type: ignore[method-assign,assignment]


def sharded_buffers(job: Job) -> None:
    def change() -> None:
        for name, buffer in job.state.model.named_buffers():
            if "running" in name:
                planted(f"sharded_buffers: {name}")
                buffer.fill_(1 if name.endswith("var") else 0)

    job.after_last_update(change, lambda: job.has_recovered)


def silent_rank(job: Job) -> None:
    if job.trainer.worker == "node2.0":
        job.trainer.journal_state = lambda: None
        job.after_last_update(job.forget_momentum, lambda: job.has_recovered)


def late_nan(job: Job) -> None:
    """Delay a fault's change of gradients by some steps."""
    from chaoskit.runtime.injection.numbers import Poison

    poison = Poison._on_gradient

    def wait(self: Any, gradient: Tensor) -> Tensor:
        if job.trainer.step < _LATE_AT:
            return gradient
        planted(f"late_nan: step {job.trainer.step}")
        return poison(self, gradient)

    Poison._on_gradient = wait  # type: ignore[method-assign]


def slow_update(job: Job) -> None:
    advance = job.state.advance

    def late() -> None:
        if generation(job.trainer) == 1 and job.state.step == _SLOW_AT:
            planted("slow_update")
            time.sleep(_SLOW_S)
        advance()

    job.state.advance = late


def _model(*, norm: bool) -> nn.Sequential:
    middle = [nn.Identity(), nn.BatchNorm1d(16)] if norm else [nn.Tanh(), nn.Dropout(0.1)]
    return nn.Sequential(nn.Linear(4, 16), *middle, nn.Linear(16, 1))


def train(
    trainer: Any,
    *,
    steps: int,
    how: str = "none",
    rate: float = 1e-2,
    period: int = 5,
    bad: int = -1,
    shards: int = 0,
    until: dict[str, Any] | None = None,
) -> None:
    """Train a replicated job with two optimizers.

    Args:
        how: the mistake.
        rate: learning rate of the second optimizer, which has the last layer.
        period: period of the schedule, in steps.
        bad: step in which the loss of shard 1 is NaN.
        shards: shards of an average that is computed behind each step; 0: none is.
    """
    torch.manual_seed(trainer.seed)
    model = _model(norm=False)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(model[0].parameters(), lr=1e-2),
        torch.optim.SGD(model[3].parameters(), lr=rate),
    ]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], step_size=period, gamma=0.7)
    trainer.register(model=model, optimizer=optimizers, scheduler=scheduler)
    trainer.on_fault(lambda loss: print(f"lost {loss}", flush=True))
    if trainer.worker != "reference":
        globals()[how](Job(trainer, optimizers, scheduler, steps))
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        with trainer.transaction() as step:
            goal.pace()
            for shard in step.shards(DATA, batch_size=BATCH):
                is_bad = trainer.step == bad and shard.index == 1
                step.backward(loss_of(model, shard.batch) * (math.nan if is_bad else 1.0))
        if shards:
            mean = trainer.all_reduce(float, "mean", shards=shards)
            print(f"step {trainer.step}: {mean}", flush=True)


def train_sharded(trainer: Any, *, steps: int, how: str = "none", norm: bool = False) -> None:
    """Train a job with sharded state."""
    from torch.distributed.fsdp import fully_shard

    mesh = trainer.mesh()
    torch.manual_seed(trainer.seed)
    model = _model(norm=norm)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    trainer.register(model=model, optimizer=optimizer, scheduler=scheduler)
    if trainer.worker != "reference":
        globals()[how](Job(trainer, [optimizer], scheduler, steps))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=BATCH):
                step.backward(loss_of(model, shard.batch))
