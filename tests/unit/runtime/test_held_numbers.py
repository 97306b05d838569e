"""Numbers of optimizers and schedulers count as unchanged only while every object that holds one is
the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from chaoskit.runtime.state.held_numbers import HeldNumbers
from chaoskit.runtime.state.replica import Replica


def halved(step: int) -> float:
    return 0.5**step


class Bench:
    """An optimizer with a scheduler, and the objects that held its numbers when they were
    remembered.
    """

    def __init__(
        self, scheduler: Callable[[Any], Any] | None = lambda optimizer: LambdaLR(optimizer, halved)
    ) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = AdamW(
            [{"params": [self.model.weight]}, {"params": [self.model.bias], "lr": 0.5}], lr=0.1
        )
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None
        self.numbers = HeldNumbers(
            [self.optimizer], [] if self.scheduler is None else [self.scheduler]
        )
        self.numbers.remember()

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[1]


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda optimizer: LambdaLR(optimizer, halved),
    lambda optimizer: CosineAnnealingLR(optimizer, 10),
    lambda optimizer: MultiStepLR(optimizer, [3, 5]),
    ReduceLROnPlateau,
]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_numbers_are_unchanged_until_a_step_changes_them(scheduler: Callable[[Any], Any]) -> None:
    bench = Bench(scheduler)
    assert bench.numbers.are_unchanged()
    for parameter in bench.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    bench.optimizer.step()
    bench.scheduler.step(*([1.0] if isinstance(bench.scheduler, ReduceLROnPlateau) else []))
    assert not bench.numbers.are_unchanged()
    bench.numbers.remember()
    assert bench.numbers.are_unchanged()
    bench.numbers.forget()
    assert not bench.numbers.are_unchanged()


CHANGES: dict[str, Callable[[Bench], object]] = {
    "a rate": lambda bench: bench.group.update(lr=0.25),
    "a new key": lambda bench: bench.group.update(note="x"),
    "a key less": lambda bench: bench.group.pop("eps"),
    "another group": lambda bench: bench.optimizer.add_param_group(
        {"params": [nn.Parameter(torch.zeros(2))]}
    ),
    "an attribute": lambda bench: setattr(bench.scheduler, "last_epoch", 7),
    "an item of a list": lambda bench: bench.scheduler.base_lrs.__setitem__(0, 0.75),
    "a list for a list": lambda bench: setattr(bench.scheduler, "base_lrs", [0.75, 0.5]),
    "a tuple": lambda bench: bench.group.update(betas=(0.5, 0.75)),
    "a key that is renamed": lambda bench: bench.group.update(
        renamed=bench.group.pop([*bench.group][-1])
    ),
    "groups that are loaded": lambda bench: bench.optimizer.load_state_dict(
        with_rate(bench.optimizer, 0.25)
    ),
    "other groups": lambda bench: setattr(
        bench.optimizer, "param_groups", [*bench.optimizer.param_groups]
    ),
    "a scheduler that is loaded": lambda bench: bench.scheduler.load_state_dict(
        bench.scheduler.state_dict() | {"last_epoch": 9}
    ),
    "a number in the state": lambda bench: bench.optimizer.state[bench.model.weight].update(
        extra=3
    ),
}


def with_rate(optimizer: AdamW, rate: float) -> dict[str, Any]:
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = rate
    return state


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_by_a_script_is_seen(change: str) -> None:
    bench = Bench()
    CHANGES[change](bench)
    assert not bench.numbers.are_unchanged()


def test_a_change_of_a_dict_that_a_scheduler_keeps_is_seen() -> None:
    bench = Bench(lambda optimizer: MultiStepLR(optimizer, [3, 5]))
    bench.scheduler.milestones[7] = 1
    assert not bench.numbers.are_unchanged()


class StatefulScheduler(LRScheduler):
    """A scheduler that keeps its state outside its attributes."""

    elsewhere: list[float] = []  # noqa: RUF012

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [0.1, 0.2]

    def state_dict(self) -> dict[str, Any]:
        return {"elsewhere": list(self.elsewhere)}


class Schedule:
    """A callable with its own numbers."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, step: int) -> float:
        return self.factor


class Wrapper:
    """A scheduler around another one; only its instances have a ``state_dict``."""

    def __init__(self, optimizer: Any) -> None:
        self.inner = LambdaLR(optimizer, halved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def overridden(optimizer: Any) -> Any:
    scheduler = LambdaLR(optimizer, halved)
    scheduler.state_dict = dict  # type: ignore[method-assign,assignment]
    return scheduler


UNTOLD: dict[str, Callable[[Any], Any]] = {
    "a wrapper": Wrapper,
    "an overridden state": overridden,
    "a state of its own": StatefulScheduler,
    "a callable with attributes": lambda optimizer: LambdaLR(optimizer, Schedule()),
    "schedulers in a list": lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, halved), LambdaLR(optimizer, halved)], [5]
    ),
}


@pytest.mark.parametrize("kind", UNTOLD)
def test_numbers_that_can_change_in_place_are_always_taken_for_changed(kind: str) -> None:
    bench = Bench(UNTOLD[kind])
    assert not bench.numbers.are_unchanged()
    bench.numbers.remember()
    assert not bench.numbers.are_unchanged()


def test_a_rate_in_a_tensor_is_always_taken_for_changed() -> None:
    bench = Bench(None)
    assert bench.numbers.are_unchanged()
    bench.group["lr"] = torch.tensor(0.1)
    bench.numbers.remember()
    assert not bench.numbers.are_unchanged()


def test_the_checksum_of_a_replica_follows_what_a_script_sets() -> None:
    model = nn.Linear(2, 2)
    replica = Replica(model, SGD(model.parameters(), lr=0.1), None, shared=False)
    with replica.update():
        pass
    published = replica.scalars_checksum()
    replica.optimizers[0].param_groups[0]["lr"] = 0.2
    changed = replica.scalars_checksum()
    assert changed != published
    assert replica.noted_scalars(fresh=False) == replica.scalars()
    replica.optimizers[0].param_groups[0]["lr"] = 0.1
    assert replica.scalars_checksum() == published
