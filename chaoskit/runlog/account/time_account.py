"""The account of a run's wall time, and the ratios that are computed from it.

-> runlog/account/accountant.py: which record spends time on which part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from chaoskit.vocabulary import RECOVERY_PHASES

#: Parts of the time, beside the phases of a recovery.
PRODUCTIVE, STALLED, RECOMPUTED, RESIZE = "productive", "checkpoint stalls", "recomputed", "resize"
WAITING, START_UP, CLOSING, IN_FLIGHT = "waiting for nodes", "start-up", "closing", "step in flight"

#: Causes of lost time without a lost worker. Other causes are those of
#: :data:`chaoskit.vocabulary.LOSS_CAUSES`.
PLANNED, UNEXPLAINED, CHECKPOINT = "planned resize", "unexplained", "checkpoint"

#: Phases in which training makes no progress; after the first good step it goes on.
STANDING_PHASES = RECOVERY_PHASES[:5]

#: Causes that are not failures.
_NO_FAILURE = frozenset({PLANNED, CHECKPOINT, START_UP, WAITING, CLOSING, IN_FLIGHT})

Spent = Mapping[tuple[str, str], int]


class TimeAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The wall time of a run by its use, in seconds.

    The parts add up to ``wall_s``, and so do ``productive_s`` and ``lost_s``.

    Attributes:
        wall_s: the wall time.
        productive_s: steps that were committed and kept, each once.
        stalled_s: the time of steps in which ranks waited for a copy of the state.
        recomputed_s: attempts and committed steps that were thrown away and computed again, and
            skipped batches.
        recovery_s: phase of :data:`chaoskit.vocabulary.RECOVERY_PHASES` -> the time in which
            training made no progress. The first good step is productive for as long as a usual step
            takes; the time beyond that counts here.
        resize_s: the time that planned changes of the world added to the step after them.
        waiting_s: the time in which a worker was ready to train and waited for other nodes.
        startup_s: the time until the first group of ranks could be used, without that wait.
        closing_s: the time after the last step.
        in_flight_s: the time of the current step of a run that is not over.
        degraded_s: the part of ``productive_s`` with fewer ranks than the full world.
        missing_s: that part, weighted with the share of ranks that were missing.
        lost_s: cause -> time that is not productive.
        failures: how often training was set back by an event that was not planned.
        steps: the number of finished steps, skipped ones too.
    """

    wall_s: float
    productive_s: float
    stalled_s: float
    recomputed_s: float
    recovery_s: dict[str, float]
    resize_s: float
    waiting_s: float
    startup_s: float
    closing_s: float
    in_flight_s: float
    degraded_s: float
    missing_s: float
    lost_s: dict[str, float]
    failures: int
    steps: int

    @property
    def goodput(self) -> float:
        """Productive time divided by wall time; 0 without wall time."""
        return self.productive_s / self.wall_s if self.wall_s else 0.0

    @property
    def trained_s(self) -> float:
        """Seconds of productive time and stalls.

        An unbroken run would have spent this time on the same steps.
        """
        return self.productive_s + self.stalled_s

    @property
    def failure_s(self) -> float:
        """Seconds lost to failures: recoveries, recomputed steps, waits for nodes after them."""
        return sum(seconds for cause, seconds in self.lost_s.items() if cause not in _NO_FAILURE)

    @property
    def ettr_wall(self) -> float:
        """ETTR per wall-clock hour: ``trained / wall``.

        Effective training time ratio as in Kokolis et al., "Revisiting Reliability in Large-Scale
        Machine Learning Research Clusters" (HPCA 2025). It is productive run time over the
        wall-clock time of the job run. Waiting in a queue counts; restarts and repeated work are
        unproductive.
        The cost of checkpoints is not deducted. Its expected value with a rate of failures per
        *wall* hour is ``1 - rate * cost``.
        """
        return self.trained_s / self.wall_s if self.wall_s else 0.0

    @property
    def ettr_productive(self) -> float:
        """ETTR per productive hour: ``trained / (trained + lost to failures) = MTTF / (MTTF +
        MTTR)``.

        The renewal view of classic availability, in which failures come at a rate per *productive*
        hour. Published models of cluster cost use ``T = W (1 + rate * cost)``. Start-up, queues
        and planned changes are left out, so it is the cost of failures alone.
        """
        total_s = self.trained_s + self.failure_s
        return self.trained_s / total_s if total_s else 0.0

    @property
    def mean_recovery_s(self) -> float | None:
        """MTTR: seconds lost to failures / failures; None without a failure."""
        return self.failure_s / self.failures if self.failures else None

    @property
    def mean_between_failures_s(self) -> float | None:
        """MTTF on the productive clock: trained seconds / failures; None without a failure."""
        return self.trained_s / self.failures if self.failures else None

    @property
    def degraded_share(self) -> float:
        """The share of productive time, from 0 to 1, with fewer ranks than the full world."""
        return self.degraded_s / self.productive_s if self.productive_s else 0.0

    def parts(self) -> Iterator[tuple[str, float]]:
        """Yield every part with its seconds, in the order of reports; they sum to the wall time."""
        yield PRODUCTIVE, self.productive_s
        yield STALLED, self.stalled_s
        yield RECOMPUTED, self.recomputed_s
        yield from self.recovery_s.items()
        yield RESIZE, self.resize_s
        yield WAITING, self.waiting_s
        yield START_UP, self.startup_s
        yield CLOSING, self.closing_s
        yield IN_FLIGHT, self.in_flight_s

    def plain(self) -> dict[str, Any]:
        """Return the account and its ratios as JSON values."""
        ratios = {
            "goodput": self.goodput,
            "ettr_wall": self.ettr_wall,
            "ettr_productive": self.ettr_productive,
            "mean_recovery_s": self.mean_recovery_s,
            "mean_between_failures_s": self.mean_between_failures_s,
        }
        return ratios | dict(msgspec.to_builtins(self))


class Recently(msgspec.Struct, frozen=True, kw_only=True):
    """The ratios of :class:`TimeAccount` over the last part of a run, ``wall_s`` long.

    Time counts when it was spent. Steps that were thrown away since are not productive, even if
    that was found later.
    """

    wall_s: float
    goodput: float
    ettr_wall: float
    ettr_productive: float


def recently_of(spent: Spent) -> Recently:
    """Return the ratios of a part of a run, from its nanoseconds by part and cause."""
    account = account_of(spent, degraded_ns=0, missing_ns=0.0, failures=0, steps=0)
    return Recently(
        wall_s=account.wall_s,
        goodput=account.goodput,
        ettr_wall=account.ettr_wall,
        ettr_productive=account.ettr_productive,
    )


def account_of(
    spent: Spent, *, degraded_ns: int, missing_ns: float, failures: int, steps: int
) -> TimeAccount:
    """Return the account of a run, from its nanoseconds by part and cause.

    Args:
        spent: (part, cause) -> nanoseconds.
        degraded_ns: the productive time with fewer ranks than the full world.
        missing_ns: that time, weighted with the share of ranks that were missing.
        failures: how often training was set back by an event that was not planned.
        steps: the number of finished steps, skipped ones too.
    """
    parts, causes = Counter[str](), Counter[str]()
    for (part, cause), amount_ns in spent.items():
        parts[part] += amount_ns
        if part != PRODUCTIVE:
            causes[cause] += amount_ns
    return TimeAccount(
        wall_s=sum(spent.values()) / 1e9,
        productive_s=parts[PRODUCTIVE] / 1e9,
        stalled_s=parts[STALLED] / 1e9,
        recomputed_s=parts[RECOMPUTED] / 1e9,
        recovery_s={phase: parts[phase] / 1e9 for phase in STANDING_PHASES},
        resize_s=parts[RESIZE] / 1e9,
        waiting_s=parts[WAITING] / 1e9,
        startup_s=parts[START_UP] / 1e9,
        closing_s=parts[CLOSING] / 1e9,
        in_flight_s=parts[IN_FLIGHT] / 1e9,
        degraded_s=degraded_ns / 1e9,
        missing_s=missing_ns / 1e9,
        lost_s={cause: amount_ns / 1e9 for cause, amount_ns in sorted(causes.items()) if amount_ns},
        failures=failures,
        steps=steps,
    )
