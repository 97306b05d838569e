"""What the wall time of a run was spent on, and the ratios that the field computes from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from chaoskit.vocabulary import RECOVERY_PHASES

#: What time can be spent on, beside the phases of a recovery.
PRODUCTIVE, STALLED, RECOMPUTED, RESIZE = "productive", "checkpoint stalls", "recomputed", "resize"
WAITING, START_UP, CLOSING, IN_FLIGHT = "waiting for nodes", "start-up", "closing", "step in flight"

#: Why time is lost where no worker was. Other causes are those of :data:`chaoskit.vocabulary.LOSS_CAUSES`.
PLANNED, UNEXPLAINED, CHECKPOINT = "planned resize", "unexplained", "checkpoint"

#: Phases in which training stands still; after the first good step it goes on.
STANDING_PHASES = RECOVERY_PHASES[:5]

#: Causes that are no failure.
_NO_FAILURE = frozenset({PLANNED, CHECKPOINT, START_UP, WAITING, CLOSING, IN_FLIGHT})

Spent = Mapping[tuple[str, str], int]


class TimeAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Where the wall time went, in seconds. The parts add up to ``wall_s``, and so do ``productive_s`` and ``lost_s``.

    Attributes:
        productive_s: steps that were committed and live on, each once.
        stalled_s: of steps, waiting for a copy of the state to be finished.
        recomputed_s: attempts and committed steps that were thrown away and computed again; batches that were skipped.
        recovery_s: by phase of :data:`chaoskit.vocabulary.RECOVERY_PHASES`, as far as training stood still. The first
            good step is productive for as long as a usual step takes; what it takes beyond that counts here.
        resize_s: what planned changes of the world added to the step after them.
        waiting_s: a worker was ready to train and waited for other nodes.
        startup_s: until the first group of ranks could be used, but for the wait.
        closing_s: after the last step.
        in_flight_s: of a run that is not over, the step that it is in.
        degraded_s: of ``productive_s``, with fewer ranks than the full world; ``missing_s`` weighs it with the share
            of ranks that were missing.
        lost_s: all that is not productive, by cause.
        failures: how often training was set back by something that was not asked for.
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
        """Productive time / wall time."""
        return self.productive_s / self.wall_s if self.wall_s else 0.0

    @property
    def trained_s(self) -> float:
        """Productive time and stalls: what an unbroken run would have spent on the same steps."""
        return self.productive_s + self.stalled_s

    @property
    def failure_s(self) -> float:
        """Time lost to failures: recoveries, what had to be computed again, and waits for nodes after them."""
        return sum(seconds for cause, seconds in self.lost_s.items() if cause not in _NO_FAILURE)

    @property
    def ettr_wall(self) -> float:
        """ETTR per wall-clock hour: ``trained / wall``.

        Effective training time ratio as in Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning
        Research Clusters" (HPCA 2025): productive run time over the wall-clock time of the job run. Waiting in a queue
        counts; unproductive are restarts and the work that is repeated. What a checkpoint costs is not deducted. Its
        expected value with a rate of failures per *wall* hour is ``1 - rate * cost``.
        """
        return self.trained_s / self.wall_s if self.wall_s else 0.0

    @property
    def ettr_productive(self) -> float:
        """ETTR per productive hour: ``trained / (trained + lost to failures) = MTTF / (MTTF + MTTR)``.

        The renewal view of classic availability, in which failures come at a rate per *productive* hour:
        ``T = W (1 + rate * cost)``, as in published models of cluster cost. Start-up, queues and planned changes are
        left out: it says what failures alone cost.
        """
        total_s = self.trained_s + self.failure_s
        return self.trained_s / total_s if total_s else 0.0

    @property
    def mean_recovery_s(self) -> float | None:
        """MTTR: time lost to failures / failures; None without one."""
        return self.failure_s / self.failures if self.failures else None

    @property
    def mean_between_failures_s(self) -> float | None:
        """MTTF on the productive clock: trained time / failures; None without one."""
        return self.trained_s / self.failures if self.failures else None

    @property
    def degraded_share(self) -> float:
        """Of productive time, the share with fewer ranks than the full world."""
        return self.degraded_s / self.productive_s if self.productive_s else 0.0

    def parts(self) -> Iterator[tuple[str, float]]:
        """Every part with its seconds, in the order in which people read them; they sum to the wall time."""
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
        """For JSON, with the ratios."""
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

    Time counts when it was spent: steps that were thrown away since are not productive, whenever that was found out.
    """

    wall_s: float
    goodput: float
    ettr_wall: float
    ettr_productive: float


def recently_of(spent: Spent) -> Recently:
    """From nanoseconds by part and cause, of that part of the run."""
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
    """From nanoseconds by part and cause."""
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
