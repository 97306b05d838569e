"""The floor: the distance between the ends of two correct runs of a job if the sums of its
gradients have no fixed order.

Plain PyTorch trains the whole job in the order of exact reduction, then in random orders. It
measures the distance of each tensor of weights and optimizer from its value in the first. No code
of the runtime takes part, so an error of the runtime cannot widen the floor.

-> experiment/reference/ending.py (check_near): how many floors a run may be away from its twin.
plain.py: the training. experiment/harness.py (_floor): which runs have a floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from chaoskit.errors import HarnessError
from chaoskit.experiment.plan.plan import Experiment
from chaoskit.experiment.reference.plain_process import ask, inputs_digest, out_of_reach, samples_of
from chaoskit.plain import Request
from chaoskit.runlog.history import History
from chaoskit.substrate.undo import UndoLog

#: Number of orders of summation beside the usual one.
ORDERS = 10
#: Time in seconds after which no further order is begun. A floor of fewer orders is widened by
#: ``ORDERS / orders``.
BUDGET_S = 60.0
#: Least floor, as a share of a tensor's norm: projections are sums of float32 numbers.
LEAST = 2.0**-22


class Floor(msgspec.Struct, frozen=True):
    """The distance between the ends of correct runs of a job.

    Attributes:
        spread: path of a tensor -> the largest 2-norm of its difference between the usual order of
            summation and another one. It is at least a unit in the last place of the largest value.
        orders: the number of orders that were compared with the usual one.
        is_steady: rates, schedules and counts were equal in all of them.
        trained: the digest of options, seed and samples; see
            :func:`chaoskit.experiment.reference.plain_process.inputs_digest`. Empty if nothing was
            trained.
        reason: the reason why there is no floor; "" if there is one.
    """

    spread: dict[str, float] = {}
    orders: int = 0
    is_steady: bool = False
    trained: str = ""
    reason: str = ""

    @property
    def factor(self) -> float:
        """The factor that widens the spread if fewer orders than :data:`ORDERS` were compared."""
        return ORDERS / max(1, self.orders)

    def of(self, path: str, norm: float) -> float:
        """Return the floor of the tensor at ``path``, as a distance; ``norm`` is its 2-norm."""
        return max(self.spread.get(path, 0.0) * self.factor, LEAST * norm)


def floor_of(
    experiment: Experiment, history: History, directory: Path, undo: UndoLog
) -> Floor | None:
    """Measure the floor of a run's job in plain PyTorch, with the samples that its journals name.

    Args:
        experiment: the plan of the run.
        history: the committed steps of the run.
        directory: the directory of the run, which receives the request and the log of the process.
        undo: receives the entry that ends the process if this one is killed.

    Returns:
        The floor; without distances, but with a reason, if PyTorch cannot train the job. None if
        the process failed, for a reason that its log holds.
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
        answer.floor,
        answer.orders,
        answer.is_steady,
        inputs_digest(experiment, samples),
        answer.reason,
    )


def _why_not(experiment: Experiment, samples: Sequence[object], steps: int) -> str:
    """Return why plain PyTorch cannot train the job; empty if it can."""
    is_whole = 0 < steps == len(samples)
    gap_in_words = f"step {len(samples)} was skipped for a fault, or is not told of"
    return out_of_reach(experiment) or ("" if is_whole else gap_in_words)


def belongs_to(floor: Floor, experiment: Experiment, history: History) -> bool:
    """Return whether a floor was measured for a run, or is missing for the same reason."""
    samples = samples_of(history, steps := len(history.steps), experiment)
    if reason := _why_not(experiment, samples, steps):
        return floor.reason == reason
    return floor.trained == inputs_digest(experiment, samples)
