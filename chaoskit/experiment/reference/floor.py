"""The floor: how far apart two right runs of a job end where the sums of its gradients have no fixed order.

Plain PyTorch trains the whole job in the order that exact reduction has, then in others that are drawn by chance, and
measures how far each tensor of weights and optimizer then lies from where it was. No code of the runtime takes part:
what that does wrong in every run widens no floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from chaoskit.errors import HarnessError
from chaoskit.experiment.plan.plan import Experiment
from chaoskit.experiment.reference.plain_process import ask, out_of_reach, samples_of, trained
from chaoskit.plain import Request
from chaoskit.runlog.history import History
from chaoskit.substrate.undo import UndoLog

#: Orders of summation beside the usual one.
ORDERS = 10
#: No further order is begun after so long; a floor of fewer is taken ``ORDERS / orders`` times.
BUDGET_S = 60.0
#: A floor is no lower than this share of a tensor's norm: projections are sums of float32 numbers.
LEAST = 2.0**-22


class Floor(msgspec.Struct, frozen=True):
    """How far right runs of a job lie apart at its end.

    Attributes:
        spread: by path of a tensor, the largest 2-norm of its difference between the usual order of summation and
            another one; at least a unit in the last place of its largest value.
        orders: how many were compared with the usual one.
        is_steady: whether rates, schedules and counts were the same in all of them.
        trained: options, seed and samples; see :func:`chaoskit.experiment.reference.plain_process.trained`. Empty:
            nothing was.
        reason: why there is none.
    """

    spread: dict[str, float] = {}
    orders: int = 0
    is_steady: bool = False
    trained: str = ""
    reason: str = ""

    @property
    def factor(self) -> float:
        """By how much the spread of fewer orders than asked for is widened."""
        return ORDERS / max(1, self.orders)

    def of(self, path: str, norm: float) -> float:
        """Return the floor of a tensor with this 2-norm."""
        return max(self.spread.get(path, 0.0) * self.factor, LEAST * norm)


def floor_of(
    experiment: Experiment, history: History, directory: Path, undo: UndoLog
) -> Floor | None:
    """Measure the floor of a run's job in plain PyTorch, with the samples that its journals name.

    Args:
        directory: of the run; the request and the log of the process stay there.

    Returns:
        None if the process failed: then nothing is known, and the log says why.
    """
    steps = len(history.steps)
    if reason := _why_not(experiment, samples := samples_of(history, steps, experiment), steps):
        return Floor(reason=reason)
    config = experiment.unbroken(
        steps=steps if experiment.is_open_ended else experiment.steps
    ).config
    request = Request(
        config.job,
        config.seed,
        samples,
        orders=list(range(1, ORDERS + 1)),
        budget_s=BUDGET_S,
        skips=config.nonfinite == "skip",
    )
    try:
        answer = ask(request, directory, "floor", undo)
    except HarnessError:
        return None
    return Floor(
        answer.floor, answer.orders, answer.is_steady, trained(experiment, samples), answer.reason
    )


def _why_not(experiment: Experiment, samples: Sequence[object], steps: int) -> str:
    """Return why plain PyTorch is not asked; empty if it is."""
    is_whole = 0 < steps == len(samples)
    untold = f"step {len(samples)} was skipped for a fault, or is not told of"
    return out_of_reach(experiment) or ("" if is_whole else untold)


def is_of(floor: Floor, experiment: Experiment, history: History) -> bool:
    """Whether a floor is that of a run."""
    samples = samples_of(history, steps := len(history.steps), experiment)
    if reason := _why_not(experiment, samples, steps):
        return floor.reason == reason
    return floor.trained == trained(experiment, samples)
