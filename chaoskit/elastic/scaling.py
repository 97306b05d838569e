"""Learning rates of a job with a batch that depends on the size of the world.

    scaling = BatchScaler("square-root", Hyperparameters(lr=3e-4, batch=256, betas=(0.9, 0.95),
    eps=1e-8))
    scaling.change(step=1000, batch=128)                      # half of the world left
    with scaling.apply(optimizer, step=1000):                 # restores the user's values
        optimizer.step()
    scaling.at(1000)                                          # values of the step

A job that keeps its global batch needs none of this: its numbers do not change with the world.

-> runtime/state/batch_follows_world.py applies it in a trainer; config.py: the setting ``follow``.
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
    """Hyper-parameters of an optimizer at one batch size.

    Args:
        lr: learning rate.
        batch: samples per step, over all ranks.
        betas: decay of the first and the second moment, of Adam and its kin; None for SGD.
        eps: constant that is added to the root of the second moment; None for SGD.
        decay: decoupled weight decay, as in AdamW; an L2 term of the loss does not count.
    """

    lr: float
    batch: int
    betas: tuple[float, float] | None = None
    eps: float | None = None
    decay: float = 0.0


class ScalingRule(NamedTuple):
    """Rule by which hyper-parameters follow the batch.

    Attributes:
        rate: returns the multiplier of the learning rate for a factor on the batch.
        adjust: returns the other values for a factor; learning rate and batch stay as they are. It
            raises BadInput for values that the rule does not cover.
    """

    rate: Callable[[float], float]
    adjust: Callable[[Hyperparameters, float], Hyperparameters]


def linear(base: Hyperparameters, factor: float) -> Hyperparameters:
    """Return ``base`` unchanged: the linear rule for SGD multiplies only the learning rate.

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
    sections 2.1 and 3. Their momentum correction is not needed: torch's SGD multiplies the momentum
    buffer by the rate, and keeps no rate in it. Weight decay stays, too: a step decays by ``lr *
    decay``, so samples decay the weights as before.

    Raises:
        BadInput: for Adam and its kin, because their step does not grow with the gradient.
    """
    if base.betas is not None:
        raise BadInput(
            "rule",
            "linear",
            "use square-root: the linear rule holds for SGD, not for optimizers with betas",
        )
    return base


def square_root(base: Hyperparameters, factor: float) -> Hyperparameters:
    """Return the values of ``base`` under the square root rule for Adam, except the learning rate.

    The rule uses ``lr * sqrt(k)``, ``beta = 1 - k (1 - beta)`` for both betas, and
    ``eps / sqrt(k)``. Here ``k`` is ``factor``; the learning rate is multiplied elsewhere.

    Source: Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms",
    definition of the square root scaling rule for Adam. Gradient noise falls with ``1 /
    sqrt(batch)``; time in their equation is ``lr**2`` a step. Its constants are ``lr**2 / batch``,
    ``(1 - beta) / batch`` and ``lr * eps``: the rule keeps them.

    Decoupled weight decay is multiplied by ``sqrt(k)``. The source does not have this part; it
    follows from the same equation: a step decays the weights by ``lr * decay``, and a sample shall
    decay them as before.

    Raises:
        BadInput: for SGD, and if a beta would not stay above 0.
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
    """Leave all values as they are: the user adapts them to the batch."""
    return base


RULES: dict[str, ScalingRule] = {
    "linear": ScalingRule(lambda factor: factor, linear),
    "square-root": ScalingRule(math.sqrt, square_root),
    "none": ScalingRule(lambda factor: 1.0, none),
}


class Change(NamedTuple):
    """Change of the batch: from ``step`` on, a step takes ``batch`` samples.

    The multiplier of the rate before it was ``multiplier_before``.
    """

    step: int
    batch: int
    multiplier_before: float


class Effective(msgspec.Struct, frozen=True, kw_only=True):
    """Effective values of a step, for the journal.

    Args:
        step: number of the step.
        samples: number of samples of the step, over all ranks.
        factor: ratio of the batch to that of the base.
        multiplier: ratio of the learning rate to that of the user's own schedule.
        values: the hyper-parameters of the base, scaled to this step.
    """

    step: int
    samples: int
    factor: float
    multiplier: float
    values: Hyperparameters


class BatchScaler:
    """Hyper-parameters at every step of a run with a batch that changes.

    The values at a step follow from the base and the batch, not from the sizes between. At the
    batch of the base they are those of the base, bit for bit.

    A higher rate is reached on a line of ``warmup_steps`` (Goyal et al. 2017, section 2.2). A lower
    one holds at once, because the old one is too high for the smaller batch. Betas and eps never
    wait: they belong to the noise of the gradient. Adam's bias correction counts steps of any size,
    which matters only in the first steps of a run.

    Args:
        rule: name in :data:`RULES`.
        base: the hyper-parameters that the user chose, and the batch for which they were chosen.
        warmup_steps: steps from a change to its full rate; the step of the change still has the
            rate before it. 0 for a change at once.
        changes: (step, batch) of earlier changes, such as :attr:`changes` of a run that goes on.

    Raises:
        BadInput: for a wrong argument or value of ``base``, or one that the source of the rule does
            not cover.
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
        """Let each step from ``step`` on take ``batch`` samples.

        A second change at the same step replaces the first.

        Raises:
            BadInput: if the step lies before the last change, or the batch is below 1, or the rule
                does not cover it. Nothing changes.
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
        """Return the multiplier of the user's learning rate at ``step``."""
        change = self._at(step)
        reached = self._rule.rate(change.batch / self.base.batch)
        passed = step - change.step
        if change.multiplier_before >= reached or passed >= self.warmup_steps:
            return reached
        rise = (reached - change.multiplier_before) * (passed / self.warmup_steps)
        return min(reached, change.multiplier_before + rise)

    def at(self, step: int) -> Effective:
        """Return the effective values of ``step``."""
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
        """Put the values of ``step`` into ``param_groups`` until the ``with`` block is left.

        Each group's own values are scaled, so a schedule goes on as written, and a checkpoint never
        has a scaled value. Nothing changes under the rule "none", and inside another such block for
        the same optimizer.

        Args:
            optimizer: an optimizer of torch, or an object with its ``param_groups``.
            step: number of the step that it is about to make.

        Raises:
            BadInput: for an optimizer that the source of the rule does not cover.
        """
        if optimizer in self._applied:
            yield
            return
        # all are computed before the first is written: a refused group leaves none changed
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
        """Return the values to write into a parameter group at ``step``."""
        if self._rule is RULES["none"]:
            return {}
        values = read_group(group, self.base.batch)
        self._rule.adjust(values, 1.0)  # refuses an optimizer that the rule does not cover
        adjusted = self._adjusted(values, step)
        scaled: dict[str, Any] = {"lr": values.lr * self.multiplier(step)}
        if adjusted.betas is not None:
            scaled |= {"betas": adjusted.betas, "eps": adjusted.eps}
        if adjusted.decay:
            scaled["weight_decay"] = adjusted.decay
        return scaled


def read_group(group: dict[str, Any], batch: int, lr: float | None = None) -> Hyperparameters:
    """Return the hyper-parameters of a parameter group of torch at ``batch``.

    ``lr`` replaces the learning rate of the group, if it is given.

    Raises:
        BadInput: for a group of an optimizer for which no rule is known, or a rate in a tensor.
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
    # AdamW has this flag; without it, weight decay is part of the gradient, and the rule covers it
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
