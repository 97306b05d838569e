"""Jobs with one feature of training each: each must give the same bits when the world shrinks and
grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the usual name of this module
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, OneCycleLR, SequentialLR

from chaoskit.fixtures.jobs.goal import Goal

IMAGES = torch.rand(96, 1, 4, 4, generator=torch.Generator().manual_seed(3))
LABELS = (IMAGES.mean((1, 2, 3)) * 40).long() % 4
PAIRS = torch.utils.data.TensorDataset(IMAGES, LABELS)
BATCH = 16
SCHEDULE_STEPS = (
    2000  # more than an open-ended run takes: the unbroken run must have the same schedule
)

Loss = Callable[[Any], Tensor]
Until = dict[str, Any] | None


def _loop(
    trainer: Any,
    steps: int,
    until: Until,
    loss: Loss,
    *,
    before: Callable[[], None] = lambda: None,
    parts: int = 1,
) -> None:
    """Run the training loop of all jobs.

    Args:
        until: the goal of an open-ended run; see :class:`chaoskit.fixtures.jobs.goal.Goal`.
        before: called between the transactions.
        parts: number of backward passes per shard.
    """
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        before()
        with trainer.transaction() as step:
            goal.pace()
            for shard in step.shards(PAIRS, batch_size=BATCH):
                images, labels = shard.batch
                for piece in zip(images.chunk(parts), labels.chunk(parts), strict=True):
                    step.backward(loss(piece) / parts)


def _network(*, norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(1, 8, 3, padding=1)]
    if norm:
        layers.append(nn.BatchNorm2d(8))
    return nn.Sequential(*layers, nn.ReLU(), nn.Dropout(dropout), nn.Flatten(), nn.Linear(128, 4))


def _cross_entropy(model: nn.Module) -> Loss:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Counting(nn.Module):
    """A module that counts and averages its inputs, partly with new tensors instead of writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4, 4, dtype=torch.float64))
        self.register_buffer("low", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32), persistent=False)
        self.register_buffer("scale", torch.full((), 2.0))
        self.seen: Tensor
        self.mean: Tensor
        self.low: Tensor
        self.calls: Tensor
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + x.sum()
            self.mean.lerp_(x.detach().double().mean((0, 1)), 0.1)
            self.low += x.detach().max()
            self.calls += 1
        return x * self.scale + self.mean.float()


def batchnorm(trainer: Any, *, steps: int, until: Until = None) -> None:
    """Train moving buffers of every kind; an evaluation between steps must see committed ones, and
    change nothing.
    """
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(Counting(), *_network(norm=True, dropout=0.2))
    trainer.register(model=model, optimizer=_sgd(model), clip_norm=1.0)
    counting = model[0]
    assert isinstance(counting, Counting)

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(IMAGES)
        model.train()
        if trainer.took_part and int(counting.calls) != trainer.step:
            raise ValueError(
                f"{int(counting.calls)} calls are committed after {trainer.step} steps"
            )

    _loop(trainer, steps, until, _cross_entropy(model), before=evaluate)


def autocast(trainer: Any, *, steps: int, until: Until = None) -> None:
    torch.manual_seed(trainer.seed)
    model = _network(norm=True, dropout=0.2)
    trainer.register(model=model, optimizer=_sgd(model))

    def loss(batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch[0])
        return F.cross_entropy(logits.float(), batch[1])

    _loop(trainer, steps, until, loss)


def half(trainer: Any, *, steps: int, until: Until = None) -> None:
    """Train weights in bfloat16."""
    torch.manual_seed(trainer.seed)
    model = _network().to(torch.bfloat16)
    trainer.register(model=model, optimizer=_sgd(model))
    _loop(
        trainer,
        steps,
        until,
        lambda batch: F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1]),
    )


def accumulation(trainer: Any, *, steps: int, until: Until = None) -> None:
    """Train with two backward passes per shard."""
    torch.manual_seed(trainer.seed)
    model = _network(norm=True, dropout=0.2)
    trainer.register(model=model, optimizer=_sgd(model))
    _loop(trainer, steps, until, _cross_entropy(model), parts=2)


def tied(trainer: Any, *, steps: int, until: Until = None) -> None:
    """Train a matrix that both embeds and reads out, with a shared buffer."""
    torch.manual_seed(trainer.seed)
    embedding, head = nn.Embedding(4, 16), nn.Linear(16, 4, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleList([embedding, nn.BatchNorm1d(16), head])
    trainer.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))

    def loss(batch: Any) -> Tensor:
        if head.weight is not embedding.weight:
            raise ValueError("the weights are not tied any more")
        hidden = torch.tanh(embedding(batch[1]))
        return F.cross_entropy(head(model[1](hidden)), (batch[1] + 1) % 4)

    _loop(trainer, steps, until, loss)


def frozen(trainer: Any, *, steps: int, until: Until = None) -> None:
    """Train with a first layer that never learns and a last one that rests; weight decay must not
    move it meanwhile.
    """
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )
    model[1].requires_grad_(False)
    trainer.register(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    )
    resting: list[Tensor] = []

    def before() -> None:
        rests = 4 <= trainer.step < 12
        model[5].requires_grad_(not rests)
        if not rests:
            resting.clear()
        elif not resting:
            resting.append(model[5].weight.detach().clone())
        if resting and not torch.equal(resting[0], model[5].weight):
            raise ValueError("a frozen layer moved")

    _loop(trainer, steps, until, _cross_entropy(model), before=before)


class Experts(nn.Module):
    """A model that sends each batch through one of four experts; the last one is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 4) for _ in range(4))
        self.gate = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        chosen = int(flat.sum() * 1000) % 3
        return self.experts[chosen](flat) * torch.sigmoid(self.gate(flat))


def experts(trainer: Any, *, steps: int, until: Until = None) -> None:
    """Train parameters with gradients from some shards, or from none: then no optimizer changes
    them.
    """
    torch.manual_seed(trainer.seed)
    model = Experts()
    untouched = model.experts[3].weight.detach().clone()
    trainer.register(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    )
    _loop(trainer, steps, until, _cross_entropy(model))
    if not torch.equal(untouched, model.experts[3].weight):
        raise ValueError("an expert moved that no shard has chosen")


class Ensemble(nn.Module):
    """A model of members side by side, with averaged logits."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(_network() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = torch.stack([member(x) for member in self.members]).mean(0)
        return logits


def optimizers(trainer: Any, *, steps: int, until: Until = None) -> None:
    """Train a member for each kind of optimizer, and one without any, with three kinds of
    schedules.
    """
    torch.manual_seed(trainer.seed)
    optim = torch.optim
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda weights: optim.SGD(weights, lr=0.02, momentum=0.9, nesterov=True),
        lambda weights: optim.Adam(weights, lr=1e-2, amsgrad=True),
        lambda weights: optim.AdamW(weights, lr=1e-2, foreach=True),
        lambda weights: optim.AdamW(weights, lr=1e-2, fused=True),
        lambda weights: optim.Adagrad(weights, lr=1e-2),
        lambda weights: optim.RMSprop(weights, lr=1e-3, momentum=0.5, centered=True),
        lambda weights: optim.Adafactor(weights, lr=1e-2),
        lambda weights: optim.NAdam(weights, lr=1e-3),
        lambda weights: optim.RAdam(weights, lr=1e-3),
        lambda weights: optim.Adamax(weights, lr=1e-3),
        lambda weights: optim.ASGD(weights, lr=1e-2),
        lambda weights: optim.Rprop(weights, lr=1e-3),
    ]
    model = Ensemble(len(kinds) + 1)
    made = [kind(member.parameters()) for kind, member in zip(kinds, model.members, strict=False)]
    warm = [LinearLR(made[2], 0.1, total_iters=5), ExponentialLR(made[2], 0.9)]
    schedules = [
        ExponentialLR(made[0], 0.95),
        OneCycleLR(made[1], max_lr=2e-2, total_steps=SCHEDULE_STEPS),
        SequentialLR(made[2], warm, milestones=[5]),
    ]
    order: list[int] = []
    for number, optimizer in enumerate(made):
        optimizer.register_step_post_hook(lambda *_, number=number: order.append(number))
    trainer.register(model=model, optimizer=made, scheduler=schedules)

    def check_order() -> None:
        if order != list(range(len(made))) * (len(order) // len(made)):
            raise ValueError(f"the optimizers stepped in the order {order}")
        order.clear()

    _loop(trainer, steps, until, _cross_entropy(model), before=check_order)


def compiling_late(trainer: Any, *, steps: int, until: Until = None, reset: bool) -> None:
    """Train; rank 1 compiles again in the middle of a step, for longer than a step may take.

    Args:
        reset: reset torch's compiler before, including callbacks of others.
    """
    torch.manual_seed(trainer.seed)
    model = _network()
    long_s = 2.5 * trainer.config.hang_floor_ms / 1000

    def slowly(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        time.sleep(long_s if trainer.took_part else 0.0)
        return graph.forward

    fast = torch.compile(model, backend=slowly, dynamic=False)
    trainer.register(model=model, optimizer=_sgd(model))

    def loss(batch: Any) -> Tensor:
        if trainer.took_part and trainer.step >= 12 and trainer.rank == 1:
            with torch.no_grad():
                fast(batch[0][:1])  # a shape that was not compiled
        return F.cross_entropy(fast(batch[0]), batch[1])

    def forget() -> None:
        if reset and trainer.step == 12 and trainer.rank == 1:
            torch.compiler.reset()

    _loop(trainer, steps, until, loss, before=forget)


def compiled(trainer: Any, *, steps: int, until: Until = None, backend: str) -> None:
    torch.manual_seed(trainer.seed)
    model = _network(norm=True)
    fast = torch.compile(model, backend=backend)
    trainer.register(model=model, optimizer=_sgd(model))

    def evaluate() -> None:
        """Compile again, for another mode and another batch size."""
        if trainer.step % 10 == 5:
            with trainer.long_phase("evaluation"), torch.no_grad():
                fast.eval()
                fast(IMAGES)
                fast.train()

    _loop(trainer, steps, until, _cross_entropy(fast), before=evaluate)
