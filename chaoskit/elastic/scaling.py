"""Learning rates of a job whose batch follows the world.

    scaling = BatchScaler("square-root", Hyperparameters(lr=3e-4, batch=256, betas=(0.9, 0.95), eps=1e-8))
    scaling.change(step=1000, batch=128)                      # half of the world left
    with scaling.apply(optimizer, step=1000):                 # the user's own values are back afterwards
        optimizer.step()
    scaling.at(1000)                                          # what the journal says of the step

A job that keeps its global batch needs none of this: its numbers do not change with the world.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import msgspec

from chaoskit.errors import BadInput

#: Goyal et al. hold the linear rule from 256 to 8192 samples; past it accuracy falls.
FACTOR_MAX = 32.0


class Hyperparameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an optimizer works with at one batch size.

    Args:
        lr: learning rate.
        batch: samples per step, over all ranks.
        betas: decay of the first and the second moment, of Adam and its kin; None for SGD.
        eps: what is added to the root of the second moment; None for SGD.
        decay: decoupled weight decay, as AdamW has it; an L2 term of the loss is none.
    """

    lr: float
    batch: int
    betas: tuple[float, float] | None = None
    eps: float | None = None
    decay: float = 0.0


class ScalingRule(NamedTuple):
    """How hyper-parameters follow the batch.

    Attributes:
        rate: what the learning rate is multiplied by when the batch is multiplied by a factor.
        adjust: what else changes, for a factor; the learning rate and the batch are left as they are.
    """

    rate: Callable[[float], float]
    adjust: Callable[[Hyperparameters, float], Hyperparameters]


def linear(base: Hyperparameters, factor: float) -> Hyperparameters:
    """SGD: ``lr * k``; momentum stays.

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", sections 2.1 and 3. Their
    momentum correction is not needed: torch's SGD multiplies the momentum buffer by the rate, and keeps no rate in it.
    Weight decay stays, too: a step decays by ``lr * decay``, so samples decay the weights as before.

    Raises:
        BadInput: for Adam and its kin, whose step does not grow with the gradient.
    """
    if base.betas is not None:
        raise BadInput(
            "rule",
            "linear",
            "use square-root: the linear rule holds for SGD, not for optimizers with betas",
        )
    return base


def square_root(base: Hyperparameters, factor: float) -> Hyperparameters:
    """Adam: ``lr * sqrt(k)``, ``beta = 1 - k (1 - beta)`` for both, ``eps / sqrt(k)``.

    Source: Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", definition of the
    square root scaling rule for Adam. Gradient noise falls with ``1 / sqrt(batch)``; time in their equation is
    ``lr**2`` a step. Its constants are ``lr**2 / batch``, ``(1 - beta) / batch`` and ``lr * eps``: the rule keeps them.

    Decoupled weight decay is multiplied by ``sqrt(k)``. This is ours, from the same equation: a step decays the
    weights by ``lr * decay``, and a sample shall decay them as before.

    Raises:
        BadInput: for SGD, and where a beta would not stay above 0.
    """
    if base.betas is None or base.eps is None:
        raise BadInput(
            "rule",
            "square-root",
            "use linear: the square root rule holds for Adam, which has betas and eps",
        )
    betas = tuple(1 - factor * (1 - beta) for beta in base.betas)
    for number, (old, new) in enumerate(zip(base.betas, betas, strict=True), 1):
        if not new > 1e-9:  # ten times 1 - 0.9 is a little less than 1
            remedy = f"grow the batch by less than {1 / (1 - old):.4g}: at {factor:.4g} times nothing is left of the mean"
            raise BadInput(f"beta{number}", old, remedy)
    root = math.sqrt(factor)
    return msgspec.structs.replace(base, betas=betas, eps=base.eps / root, decay=base.decay * root)


def none(base: Hyperparameters, factor: float) -> Hyperparameters:
    """Nothing follows the batch: the user takes care of it."""
    return base


RULES: dict[str, ScalingRule] = {
    "linear": ScalingRule(lambda factor: factor, linear),
    "square-root": ScalingRule(math.sqrt, square_root),
    "none": ScalingRule(lambda factor: 1.0, none),
}


class Change(NamedTuple):
    """From this step on, a step takes ``batch`` samples; the rate's multiplier was ``multiplier_before``."""

    step: int
    batch: int
    multiplier_before: float


class Effective(msgspec.Struct, frozen=True, kw_only=True):
    """What a step works with: for the journal.

    Args:
        step: which.
        samples: per step, over all ranks.
        factor: of the batch, against the base.
        multiplier: of the learning rate, against the user's own schedule.
        values: the base's hyper-parameters at this step.
    """

    step: int
    samples: int
    factor: float
    multiplier: float
    values: Hyperparameters


class BatchScaler:
    """Hyper-parameters at every step of a run whose batch changes.

    What holds at a step follows from the base and the batch, not from the sizes between; at the base's batch it is the
    base, bit for bit. A higher rate is reached on a line of ``warmup_steps`` (Goyal et al. 2017, section 2.2); a lower
    one holds at once, for the old one is too high for the smaller batch. Betas and eps never wait: they belong to the
    gradient's noise. Adam's bias correction counts steps of any size, which matters in a run's first steps only.

    Args:
        rule: name in :data:`RULES`.
        base: the hyper-parameters that the user chose, and the batch for which they were chosen.
        warmup_steps: from a change on; the step of the change has the rate of before. 0: at once.
        changes: (step, batch) of what happened before, such as :attr:`changes` of a run that goes on.

    Raises:
        BadInput: for what the rule's source does not cover.
    """

    def __init__(
        self,
        rule: str,
        base: Hyperparameters,
        *,
        warmup_steps: int = 0,
        changes: Iterable[tuple[int, int]] = (),
    ) -> None:
        if rule not in RULES:
            raise BadInput("rule", rule, f"use one of {', '.join(RULES)}")
        if warmup_steps < 0:
            raise BadInput("warmup_steps", warmup_steps, "use 0 or more")
        _validate(base)
        self.base, self.warmup_steps = base, warmup_steps
        self._rule = RULES[rule]
        self._changes = [Change(0, base.batch, 1.0)]
        self._rule.adjust(base, 1.0)
        self._applied: WeakSet[Any] = WeakSet()
        for step, batch in changes:
            self.change(step, batch)

    @property
    def changes(self) -> list[tuple[int, int]]:
        """(step, batch) of every change, oldest first."""
        return [(change.step, change.batch) for change in self._changes[1:]]

    def change(self, step: int, batch: int) -> None:
        """From ``step`` on a step takes ``batch`` samples. A second change at one step replaces the first.

        Raises:
            BadInput: if the step lies before the last change, or the rule does not cover the batch. Nothing changes.
        """
        last = self._changes[-1]
        if step < last.step:
            raise BadInput("step", step, f"use {last.step} or more: the batch changed there")
        if batch < 1:
            raise BadInput("batch", batch, "use 1 or more")
        factor = batch / self.base.batch
        if self._rule is not RULES["none"] and not 1 / FACTOR_MAX <= factor <= FACTOR_MAX:
            remedy = f"stay within {FACTOR_MAX:g} times the base's {self.base.batch}: no rule is known to hold farther"
            raise BadInput("batch", batch, remedy)
        self._rule.adjust(self.base, factor)
        before = self.multiplier(step)
        if step == last.step and len(self._changes) > 1:
            before = self._changes.pop().multiplier_before
        if batch != self._changes[-1].batch:
            self._changes.append(Change(step, batch, before))

    def multiplier(self, step: int) -> float:
        """What the user's learning rate is multiplied by at ``step``."""
        change = self._at(step)
        reached = self._rule.rate(change.batch / self.base.batch)
        passed = step - change.step
        if change.multiplier_before >= reached or passed >= self.warmup_steps:
            return reached
        rise = (reached - change.multiplier_before) * (passed / self.warmup_steps)
        return min(reached, change.multiplier_before + rise)

    def at(self, step: int) -> Effective:
        """What ``step`` works with."""
        batch, multiplier = self._at(step).batch, self.multiplier(step)
        values = msgspec.structs.replace(
            self._adjusted(self.base, step), lr=self.base.lr * multiplier, batch=batch
        )
        factor = batch / self.base.batch
        return Effective(
            step=step, samples=batch, factor=factor, multiplier=multiplier, values=values
        )

    @contextmanager
    def apply(self, optimizer: Any, step: int) -> Iterator[None]:
        """Inside of it ``param_groups`` hold what ``step`` works with; afterwards what they held before.

        Each group's own values are scaled, so a schedule goes on as its author wrote it, and a checkpoint never
        holds a scaled value. Inside of another such block for the same optimizer it does nothing.

        Args:
            optimizer: of torch, or with its ``param_groups``.
            step: number of the step that it is about to make.

        Raises:
            BadInput: for an optimizer that the rule's source does not cover.
        """
        if optimizer in self._applied:
            yield
            return
        # All are computed before the first is written: a refused group leaves none changed.
        scaled = [self._group(group, step) for group in optimizer.param_groups]
        pairs = list(zip(optimizer.param_groups, scaled, strict=True))
        before = [{name: group[name] for name in values} for group, values in pairs]
        self._applied.add(optimizer)
        try:
            for group, values in pairs:
                group.update(values)
            yield
        finally:
            for (group, _), values in zip(pairs, before, strict=True):
                group.update(values)
            self._applied.discard(optimizer)

    def _at(self, step: int) -> Change:
        return next(
            (change for change in reversed(self._changes) if change.step <= step), self._changes[0]
        )

    def _adjusted(self, values: Hyperparameters, step: int) -> Hyperparameters:
        batch = self._at(step).batch
        return (
            values
            if batch == self.base.batch
            else self._rule.adjust(values, batch / self.base.batch)
        )

    def _group(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        """What to write into a parameter group at ``step``."""
        if self._rule is RULES["none"]:
            return {}
        values = read_group(group, self.base.batch)
        self._rule.adjust(
            values, 1.0
        )  # an optimizer that the rule does not cover is refused before the first change
        adjusted = self._adjusted(values, step)
        scaled: dict[str, Any] = {"lr": values.lr * self.multiplier(step)}
        if adjusted.betas is not None:
            scaled |= {"betas": adjusted.betas, "eps": adjusted.eps}
        if adjusted.decay:
            scaled["weight_decay"] = adjusted.decay
        return scaled


def read_group(group: dict[str, Any], batch: int, lr: float | None = None) -> Hyperparameters:
    """What a parameter group of torch's works with at ``batch``; ``lr``: instead of its own.

    Raises:
        BadInput: for a group of an optimizer for which no rule is known.
    """
    if not isinstance(group["lr"], float | int):
        raise BadInput("lr", group["lr"], "use a number: a tensor may be part of a captured graph")
    betas = group.get("betas")
    if not ({"betas", "eps", "amsgrad"} <= set(group) or {"momentum", "dampening"} <= set(group)):
        raise BadInput(
            "optimizer", sorted(set(group) - {"params"}), "use SGD, Adam or AdamW, or rule none"
        )
    if group.get("amsgrad"):
        raise BadInput(
            "amsgrad", True, "leave it out: its maximum remembers the noise of other batches"
        )
    if group.get("dampening"):
        raise BadInput(
            "dampening",
            group["dampening"],
            "use 0: the linear rule was shown for momentum without it",
        )
    # torch's AdamW is an Adam with this flag; without it weight decay is part of the gradient, and the rule covers it.
    decay = group["weight_decay"] if group.get("decoupled_weight_decay") else 0.0
    rate = group["lr"] if lr is None else lr
    return Hyperparameters(lr=rate, batch=batch, betas=betas, eps=group.get("eps"), decay=decay)


def _validate(base: Hyperparameters) -> None:
    if not (base.lr > 0 and math.isfinite(base.lr)):
        raise BadInput("lr", base.lr, "use a number above 0")
    if base.batch < 1:
        raise BadInput("batch", base.batch, "use 1 or more")
    for number, beta in enumerate(base.betas or (), 1):
        if not 0 <= beta < 1:
            raise BadInput(f"beta{number}", beta, "use 0 or more, and less than 1")
    if base.eps is not None and not (base.eps >= 0 and math.isfinite(base.eps)):
        raise BadInput("eps", base.eps, "use 0 or more")
    if not (base.decay >= 0 and math.isfinite(base.decay)):
        raise BadInput("decay", base.decay, "use 0 or more")
