"""Jobs with a mistake of the runtime in their workers: functions are replaced in these processes.

:func:`chaoskit.suites.canary.wrong_worker.order` chooses the mistake and its time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from chaoskit.fixtures.jobs.goal import Goal
from chaoskit.suites.canary.wrong_worker import WrongWorker, local

_DATA = torch.rand(512, 4, generator=torch.Generator().manual_seed(7))
_BATCH = 24
_RATE, _DECAY, _CLIP_NORM = 0.1, 0.05, 0.05
_LARGEST_MANTISSA_BIT = 1 << 22

# -- the job ---------------------------------------------------------------------------------------


def train(
    trainer: Any,
    *,
    steps: int,
    kind: str = "sgd",
    step_s: float = 0.0,
    lines: int = 0,
    waits: bool = True,
) -> None:
    """Train a small model that every rank has whole.

    Args:
        kind: features that a mistake can touch: ``sgd`` (momentum and weight decay), ``clip`` (a
            limit of the gradient, too), ``adam``, or ``norm`` (running statistics).
        step_s: duration of a step, in seconds.
        lines: number of lines that each step prints.
        waits: wait before step 1 until the spares are ready, so that a fault in a later step finds
            them.
    """
    torch.manual_seed(trainer.seed)
    _train(trainer, _model(kind), steps, kind, step_s, lines, waits=waits)


def train_sharded(trainer: Any, *, steps: int, kind: str = "sgd", waits: bool = True) -> None:
    """Train a model that is spread over the ranks (FSDP2), with options as in :func:`train`."""
    mesh = trainer.mesh()
    torch.manual_seed(trainer.seed)
    model = _model(kind)
    fully_shard(model, mesh=mesh)
    _train(trainer, model, steps, kind, 0.0, 0, waits=waits)


def _model(kind: str) -> nn.Sequential:
    middle = nn.BatchNorm1d(16) if kind == "norm" else nn.Tanh()
    return nn.Sequential(nn.Linear(4, 16), middle, nn.Dropout(0.1), nn.Linear(16, 4))


def _train(
    trainer: Any, model: nn.Module, steps: int, kind: str, step_s: float, lines: int, *, waits: bool
) -> None:
    settings: dict[str, Any] = {"lr": _RATE, "momentum": 0.9}
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters, lr=0.01)
        if kind == "adam"
        else torch.optim.SGD(parameters, weight_decay=_DECAY, **settings)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    first = [local(parameter).clone() for parameter in parameters]
    clip_norm = _CLIP_NORM if kind == "clip" else None
    trainer.register(model=model, optimizer=optimizer, scheduler=scheduler, clip_norm=clip_norm)
    worker = WrongWorker(trainer, model, optimizer, scheduler, first=first, steps=steps)
    if worker.mistake:
        globals()[worker.mistake](worker)
    spares = trainer.config.spares if waits and hasattr(trainer, "config") else 0
    ready = Goal(trainer, steps, {"spares": spares} if spares else None)
    while trainer.step < steps:
        ready.is_ahead()
        with trainer.transaction() as step:
            time.sleep(step_s)
            for number in range(lines):
                print(
                    f"line {number} of step {trainer.step}: loss is nan, CUDA error, Traceback (most recent call last)"
                )
            for shard in step.shards(_DATA, batch_size=_BATCH):
                worker.shard = shard.index
                target = shard.batch.roll(1, 1).sin()
                step.backward(nn.functional.mse_loss(model(shard.batch), target))


# -- mistakes with gradients -----------------------------------------------------------------------


def leaves_out_a_shard(worker: WrongWorker) -> None:
    worker.scale_gradient(lambda: 0.0 if worker.is_due and worker.shard == 1 else 1.0)


def counts_a_shard_twice(worker: WrongWorker) -> None:
    worker.scale_gradient(lambda: 2.0 if worker.is_due and worker.shard == 1 else 1.0)


def divides_by_another_count(worker: WrongWorker) -> None:
    worker.scale_gradient(lambda: 4 / 3 if worker.is_due else 1.0)


def scales_gradients(worker: WrongWorker) -> None:
    worker.scale_gradient(lambda: 3.0 if worker.is_due else 1.0)


def has_a_silent_heir(worker: WrongWorker) -> None:
    worker.scale_gradient(lambda: 0.0 if worker.is_due_on_heir else 1.0)


def clips_twice(worker: WrongWorker) -> None:
    _clip(worker, _CLIP_NORM / 2)


def never_clips(worker: WrongWorker) -> None:
    _clip(worker, None)


def _clip(worker: WrongWorker, limit: float | None) -> None:
    """Clip gradients to another norm while the mistake is made; None does not clip."""
    owner = worker.trainer if worker.is_sharded else worker.trainer._committer

    def make(commit: Callable[..., None]) -> Callable[..., None]:
        def wrong(*arguments: Any) -> None:
            owner._clip_norm = limit if worker.is_due else _CLIP_NORM
            commit(*arguments)

        return wrong

    worker.replace(worker.trainer, "_commit", make)


def rounds_gradients(worker: WrongWorker) -> None:
    """Round gradients to bfloat16 on one rank.

    In a sharded job it is the rank's part of the sum, else its contribution to the sum.
    """

    def narrow() -> None:
        if worker.is_due_on_one:
            for gradient in worker.gradients:
                gradient.copy_(gradient.bfloat16())

    if worker.is_sharded:
        worker.before_update(narrow)
        return

    def make(backward: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def wrong(loss: Tensor) -> None:
            backward(loss)
            narrow()

        return wrong

    worker.replace(worker.trainer, "_backward", make)


def _with_gradients_before(worker: WrongWorker, use: Callable[[Tensor, Tensor], object]) -> None:
    """Call ``use`` with each gradient, and that of the step before."""
    before: list[Tensor] = []

    def change() -> None:
        now = [gradient.clone() for gradient in worker.gradients]
        if before and worker.is_due:
            for gradient, old in zip(worker.gradients, before, strict=True):
                use(gradient, old)
        before[:] = now if worker.generation else []

    worker.before_update(change)


def uses_old_gradients(worker: WrongWorker) -> None:
    _with_gradients_before(worker, lambda gradient, old: gradient.copy_(old))


def adds_old_gradients(worker: WrongWorker) -> None:
    _with_gradients_before(worker, lambda gradient, old: gradient.add_(old))


def flips_a_bit_of_a_gradient(worker: WrongWorker) -> None:
    worker.before_update(lambda: _flip(worker.gradients) if worker.is_due_on_one else None)


def _flip(tensors: Iterable[Tensor]) -> None:
    """Flip a bit of the first number that this rank has of a tensor."""
    memory = next(tensor for tensor in tensors if tensor.numel() > 1).view(-1)[:1].view(torch.int32)
    memory.bitwise_xor_(torch.tensor([_LARGEST_MANTISSA_BIT], dtype=torch.int32))


# -- mistakes of the update ------------------------------------------------------------------------


def _skip(worker: WrongWorker, is_skipped: Callable[[], bool]) -> None:
    """Leave out the update of each step for which ``is_skipped`` returns true."""
    worker.around_update(lambda advance: None if is_skipped() else advance())


def skips_the_update(worker: WrongWorker) -> None:
    _skip(worker, lambda: worker.is_due)


def skips_the_update_on_one_rank(worker: WrongWorker) -> None:
    _skip(worker, lambda: worker.is_due_on_one)


def leaves_out_a_parameter(worker: WrongWorker) -> None:
    def change() -> None:
        if worker.is_due:
            next(worker.model.parameters()).grad = None

    worker.before_update(change)


def decays_weights_twice(worker: WrongWorker) -> None:
    def change() -> None:
        if worker.is_due:
            for weight in worker.weights:
                weight.mul_(1 - worker.optimizer.param_groups[0]["lr"] * _DECAY)

    worker.before_update(change)


def doubles_the_learning_rate(worker: WrongWorker) -> None:
    def make(step: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*arguments: Any, **options: Any) -> Any:
            group = worker.optimizer.param_groups[0]
            usual = group["lr"]
            group["lr"] = 2 * usual if worker.is_due else usual
            result = step(*arguments, **options)
            group["lr"] = usual
            return result

        return wrong

    worker.replace(worker.optimizer, "step", make)


def halves_weights(worker: WrongWorker) -> None:
    _after(worker, lambda: [weight.mul_(0.5) for weight in worker.weights])


def _after(worker: WrongWorker, change: Callable[[], object], *, on_one_rank: bool = False) -> None:
    def wrong() -> None:
        if worker.is_due_on_one if on_one_rank else worker.is_due:
            change()

    worker.after_update(wrong)


def steps_the_schedule_twice(worker: WrongWorker) -> None:
    _after(worker, worker.scheduler.step)


def never_steps_the_schedule(worker: WrongWorker) -> None:
    def change(advance: Callable[[], None]) -> None:
        schedulers = worker.state.schedulers
        worker.state.schedulers = () if worker.is_due else schedulers
        advance()
        worker.state.schedulers = schedulers

    worker.around_update(change)


def forgets_momentum(worker: WrongWorker) -> None:
    _after(
        worker, lambda: [moment.zero_() for moment in worker.moments("momentum_buffer", "exp_avg")]
    )


def forgets_one_momentum(worker: WrongWorker) -> None:
    _after(
        worker,
        lambda: [moment.zero_() for moment in worker.moments("momentum_buffer", "exp_avg")[:1]],
    )


def counts_steps_anew(worker: WrongWorker) -> None:
    """Reset the optimizer's count of its steps, by which Adam corrects its moments."""
    _after(worker, lambda: [count.zero_() for count in worker.moments("step")])


def flips_a_bit_of_a_weight(worker: WrongWorker) -> None:
    _after(worker, lambda: _flip(worker.weights), on_one_rank=True)


def flips_a_bit_of_a_moment(worker: WrongWorker) -> None:
    _after(worker, lambda: _flip(worker.moments("momentum_buffer", "exp_avg")), on_one_rank=True)


def loses_a_number(worker: WrongWorker) -> None:
    """Make a weight NaN."""
    _after(worker, lambda: worker.weights[0].view(-1)[:1].fill_(float("nan")))


def loses_a_moment(worker: WrongWorker) -> None:
    """Make a number of the optimizer's state NaN."""
    _after(
        worker,
        lambda: worker.moments("momentum_buffer", "exp_avg")[0].view(-1)[:1].fill_(float("nan")),
    )


# -- mistakes of a restore -------------------------------------------------------------------------


def restores_the_first_weights(worker: WrongWorker) -> None:
    """Restore an older state, and call it the newest."""
    worker.at_restore(
        lambda: [
            weight.copy_(old) for weight, old in zip(worker.weights, worker.first, strict=True)
        ]
    )


def restores_narrow_weights(worker: WrongWorker) -> None:
    worker.at_restore(lambda: [weight.copy_(weight.bfloat16()) for weight in worker.weights])


def restores_another_place(worker: WrongWorker) -> None:
    """Shift the rows of a restored tensor by one place."""
    worker.at_restore(lambda: [weight.copy_(weight.roll(1, 0)) for weight in worker.weights[:1]])


def restores_no_momentum(worker: WrongWorker) -> None:
    worker.at_restore(
        lambda: [moment.zero_() for moment in worker.moments("momentum_buffer", "exp_avg")]
    )


def restores_no_count(worker: WrongWorker) -> None:
    worker.at_restore(lambda: [count.zero_() for count in worker.moments("step")])


def restores_no_schedule(worker: WrongWorker) -> None:
    def change() -> None:
        worker.scheduler.last_epoch = 0
        worker.optimizer.param_groups[0]["lr"] = worker.optimizer.param_groups[0]["initial_lr"]

    worker.at_restore(change)


def restores_no_statistics(worker: WrongWorker) -> None:
    """Restore the running means and variances of a new model."""

    def change() -> None:
        for name, memory in worker.state.buffers.committed.items():
            if memory.is_floating_point():
                memory.fill_(1 if name.endswith("var") else 0)
        worker.state.buffers.reset()

    worker.at_restore(change)


# -- mistakes with data and randomness -------------------------------------------------------------


def _seed(
    worker: WrongWorker, change: Callable[[tuple[int, ...]], tuple[int, ...]], *, heir: bool = False
) -> None:
    """Change the key from which the random numbers of a shard are seeded.

    Args:
        change: returns the key that is used in place of its argument.
        heir: the mistake is made on the replacement only.
    """

    def make(seed: Callable[..., None]) -> Callable[..., None]:
        def wrong(*key: int) -> None:
            due = worker.is_due_on_heir if heir else worker.is_due
            seed(*(change(key) if due else key))

        return wrong

    worker.replace(worker.module, "seed_everything", make)


def seeds_by_step_only(worker: WrongWorker) -> None:
    _seed(worker, lambda key: key[:2])


def seeds_by_shard_only(worker: WrongWorker) -> None:
    _seed(worker, lambda key: (key[0], key[2]))


def has_an_heir_with_another_seed(worker: WrongWorker) -> None:
    _seed(worker, lambda key: (key[0] + 1, *key[1:]), heir=True)


def leaves_dropout_off(worker: WrongWorker) -> None:
    def make(backward: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def wrong(loss: Tensor) -> None:
            backward(loss)
            worker.model.train(not worker.is_due)

        return wrong

    worker.replace(worker.trainer, "_backward", make)


def computes_other_samples(worker: WrongWorker) -> None:
    """Compute other samples than are recorded."""

    def make(fetch: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(dataset: Any, samples: list[int], *arguments: Any, **options: Any) -> Any:
            due = worker.is_due
            return fetch(
                dataset,
                [sample ^ 1 for sample in samples] if due else samples,
                *arguments,
                **options,
            )

        return wrong

    worker.replace(worker.trainer, "_fetch", make)


def _deal(
    worker: WrongWorker, deal: Callable[[Callable[..., list[int]], int, int], list[int]]
) -> None:
    trainer, key = worker.trainer, (len(_DATA), _BATCH)
    samplers = trainer._samplers if worker.is_sharded else trainer._work._samplers
    sampler = worker.module.Sampler(*key, trainer.config.shard_count, trainer.seed)
    samplers[key] = sampler

    def make(samples: Callable[..., list[int]]) -> Callable[..., list[int]]:
        def wrong(step: int, shard: int, *more: Any) -> list[int]:
            return deal(samples, step, shard) if worker.is_due else samples(step, shard, *more)

        return wrong

    worker.replace(sampler, "samples", make)


def deals_the_next_step(worker: WrongWorker) -> None:
    _deal(worker, lambda samples, step, shard: samples(step + 1, shard))


def deals_a_sample_twice(worker: WrongWorker) -> None:
    """Use a sample twice, and another one never."""

    def deal(samples: Callable[..., list[int]], step: int, shard: int) -> list[int]:
        first, _, *others = samples(step, shard)
        return [first, first, *others]

    _deal(worker, deal)


# -- mistakes in reports ---------------------------------------------------------------------------


def tells_the_loss_before(worker: WrongWorker) -> None:
    last: list[float] = []

    def make(mean: Callable[..., float]) -> Callable[..., float]:
        def wrong(*arguments: Any) -> float:
            now = mean(*arguments)
            before = last[-1] if last and worker.is_due else now
            last[:] = [now]
            return before

        return wrong

    if worker.generation or not worker.is_sharded:  # a rehearsal of a sharded job commits nothing
        worker.replace(sys.modules[type(worker.trainer._committer).__module__], "_mean_loss", make)


def mistakes() -> list[str]:
    """Return the names of all mistakes that can be ordered."""
    return [
        name
        for name, function in globals().items()
        if "worker" in getattr(function, "__annotations__", {}) and name[0] != "_"
    ]
