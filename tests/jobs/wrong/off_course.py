"""A job that goes wrong after a recovery, alike on all ranks: only the distance from the twin shows
it.

The mistake is in the last step, after which no loss is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from chaoskit.fixtures.jobs.gpt_model import GPT, next_byte_loss

DATA = torch.randint(0, 256, (64, 17), generator=torch.Generator().manual_seed(5))
BATCH = 24
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def none(state: Any) -> None:
    """Make the update of a faithful runtime."""
    state.advance_rightly()


def doubles_the_rate(state: Any) -> None:
    """Double every learning rate."""
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    for group in groups:
        group["lr"] *= 2
    state.advance_rightly()
    for group in groups:
        group["lr"] /= 2


def halves_the_weights(state: Any) -> None:
    """Halve one tensor."""
    state.advance_rightly()
    with torch.no_grad():
        state.parameters[3].mul_(0.5)


def forgets_momentum(state: Any) -> None:
    """Reset the optimizer's state, except its count of steps."""
    for path, tensor in state.optimizer_tensors():
        if not path.endswith("/step"):
            tensor.zero_()
    state.advance_rightly()


def train(
    trainer: Any,
    *,
    steps: int,
    how: str = "none",
    optimizer: str = "momentum",
    at: int = -1,
    clip_norm: float | None = 1.0,
    dtype: str = "float32",
) -> None:
    """Train a replicated model.

    Args:
        how: the mistake, in step ``at`` (-1: the last one), if there was a recovery before.
    """
    model = _model(trainer).to(getattr(torch, dtype))
    trainer.register(
        model=model, optimizer=OPTIMIZERS[optimizer](model.parameters()), clip_norm=clip_norm
    )
    if trainer.worker != "reference":
        _watch(trainer, trainer.replica, how, at % steps)
    _learn(trainer, model, steps)


def train_sharded(trainer: Any, *, steps: int, how: str = "none", optimizer: str = "adamw") -> None:
    """Train a sharded model; the mistake is in the last step."""
    model = _model(trainer)
    fully_shard(model, mesh=trainer.mesh())
    trainer.register(model=model, optimizer=OPTIMIZERS[optimizer](model.parameters()))
    if trainer.worker != "reference":
        _watch(trainer, trainer.state, how, steps - 1)
    _learn(trainer, model, steps)


def _model(trainer: Any) -> GPT:
    torch.manual_seed(trainer.seed)
    return GPT(layers=1, heads=2, channels=16, context=16, dropout=0.1)


def _learn(trainer: Any, model: GPT, steps: int) -> None:
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=BATCH):
                step.backward(next_byte_loss(model, shard.batch))


def _watch(trainer: Any, state: Any, how: str, at: int) -> None:
    state.advance_rightly = state.advance

    def advance() -> None:
        recovered = trainer._formation is not None and trainer._formation.plan.generation > 1
        (globals()[how] if recovered and trainer.step == at else none)(state)

    state.advance = advance
