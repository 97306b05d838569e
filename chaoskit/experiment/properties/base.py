"""The type of a property, the data that properties are computed from, and the limit of a hang.

-> experiment/properties/__init__.py: the table of all properties.
coordinator/detectors/phase_limits.py: the limit that the runtime itself uses for a hang.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from chaoskit.config import RunConfig
from chaoskit.experiment.properties.promised import FIRST_STEP_ALLOWANCES, KNOWN_STEPS, YOUNG_STEPS
from chaoskit.experiment.run.run import RawRun
from chaoskit.journal import Record
from chaoskit.runlog.history import History
from chaoskit.runlog.injected import InjectionRecord, Struck
from chaoskit.runlog.outcome import Recovery
from chaoskit.vocabulary import HUNG, Event

Kind = Literal["safety", "liveness"]

#: Added to every bound: a process of a crowded machine may wait so long for a CPU.
SLACK_S = 10.0


class RunTrace:
    """The journals of one run, with values that several properties need.

    Attributes:
        run, history, recoveries: the records of the run, its committed steps, and its recoveries.
        config: the settings of the run.
        of, first: return records by event and time; see :class:`chaoskit.runlog.index.Index`.
    """

    def __init__(self, run: RawRun, history: History, recoveries: list[Recovery]) -> None:
        self.run, self.history, self.recoveries = run, history, recoveries
        self.config: RunConfig = run.experiment.config
        self.of, self.first = run.index.of, run.index.first

    @cached_property
    def members(self) -> dict[int, dict[str, int]]:
        """Generation -> worker -> rank."""
        return {
            plan["generation"]: {member["worker"]: member["rank"] for member in plan["members"]}
            for plan in self.of(Event.PLAN)
        }

    @cached_property
    def lost_ns(self) -> dict[str, int]:
        """Worker -> the time in ns at which it was first given up."""
        return {record["worker"]: record.t_ns for record in reversed(self.of(Event.DETECTED))}

    @cached_property
    def settled_ns(self) -> dict[int, int]:
        """Generation -> the time in ns at which all of its members had its group."""
        return {record["generation"]: record.t_ns for record in self.of(Event.SETTLED)}

    @property
    def end_ns(self) -> int:
        """The end of the job in ns; if it was not recorded, the end of the run."""
        end_record = self.first(Event.JOB_ENDED)
        return end_record.t_ns if end_record else self.run.ended_ns

    @cached_property
    def commits(self) -> dict[tuple[int, int], list[Record]]:
        """(Step, generation) -> the commits of its ranks; empty for any other key.

        Skipped batches are no commits.
        """
        steps = self.history.steps.items()
        commits = {
            (number, generation): records
            for number, step in steps
            for generation, records in step.commits.items()
        }
        return defaultdict(list, commits)

    def holders(self, worker: str, before_ns: int) -> int:
        """Return the number of ranks that held the same piece of a sharded state as ``worker``.

        A piece is the part of the state that one rank holds. The last step counts that the worker
        committed before ``before_ns``; 0 if there is none.
        """
        own_commits = [
            record
            for record in self.of(Event.COMMIT)
            if record.source == worker and record.t_ns < before_ns
        ]
        if not own_commits:
            return 0
        last_commit = own_commits[-1]
        return sum(
            commit["piece"] == last_commit["piece"]
            for commit in self.commits[last_commit["step"], last_commit["generation"]]
        )

    @cached_property
    def has_replicas(self) -> bool:
        """True if some ranks held the same part of the state; always True without sharding."""
        if not self.config.job.sharded:
            return True
        return any(
            len({commit["piece"] for commit in commits}) < len(commits)
            for commits in self.commits.values()
        )

    def confirmed(self, *kinds: str) -> list[tuple[InjectionRecord, Struck]]:
        """Return the faults of these kinds that took effect, each with its target.

        Args:
            kinds: the names of the kinds, such as ``Kill``.
        """
        return [
            (injection, injection.target)
            for injection in self.run.injections
            if injection.fault.kind in kinds
            and not injection.missed
            and injection.effective_ns is not None
            and injection.target is not None
        ]

    def struck_by(self, worker: str) -> list[str]:
        """Return the kinds of the faults that acted on ``worker``, such as ``Kill``.

        A fault on a whole node counts only for the workers that its records name.
        """
        strikes = [
            (injection, injection.target)
            for injection in self.run.injections
            if injection.target is not None and not injection.missed
        ]
        return [injection.fault.kind for injection, target in strikes if worker in target.claims]

    @cached_property
    def _quiet_s(self) -> list[float]:
        """Durations in seconds of the steps without a recovery, the shortest first."""
        points = self.history.points(self.run.started_ns)
        return sorted(
            later.seconds
            for earlier, later in pairwise(points)
            if earlier.generation == later.generation
        )

    @property
    def usual_step_s(self) -> float:
        """The 90th percentile of steps without a recovery, in seconds; 0 without such steps."""
        quiet_s = self._quiet_s
        return quiet_s[len(quiet_s) * 9 // 10] if quiet_s else 0.0

    @cached_property
    def slowest_recovery_s(self) -> float:
        """The longest time in seconds from a plan that interrupts a step to its first commit.

        It is 0 without such a plan.
        """
        first_ns: dict[int, int] = {}
        for record in self.of(Event.COMMIT):
            first_ns.setdefault(record["generation"], record.t_ns)
        plans = [
            plan for plan in self.of(Event.PLAN) if plan["abort"] and plan["generation"] in first_ns
        ]
        return max(
            ((first_ns[plan["generation"]] - plan.t_ns) / 1e9 for plan in plans), default=0.0
        )

    def steps_before(self, t_ns: int) -> int:
        """Return the number of steps that were committed before a time."""
        return len({record["step"] for record in self.of(Event.COMMIT) if record.t_ns < t_ns})

    def hang_limit_s(self, t_ns: int) -> float:
        """Return for how many seconds a phase may last at a time before its rank is suspected.

        It follows from all steps and recoveries of the run. No phase is longer than its step, and
        each suspect before this time may have doubled the limit.
        """
        suspect_count = sum(
            record["cause"] == HUNG and record.t_ns < t_ns for record in self.of(Event.DETECTED)
        )
        young_factor = 1 + YOUNG_STEPS / max(KNOWN_STEPS, self.steps_before(t_ns))
        allowance_s = max(self.config.hang_floor_ms / 1000, self.slowest_recovery_s)
        learned_s = (
            max(self._quiet_s, default=0.0) * young_factor + FIRST_STEP_ALLOWANCES * allowance_s
        )
        return float(max(self.config.hang_steps * self.usual_step_s, learned_s) * 2**suspect_count)


#: Violations of a property in words, or None if the property does not apply to the run.
Finding = list[str] | None


@dataclass(frozen=True)
class Property:
    """A row of the table of partial failures.

    Attributes:
        number: the number of the row.
        kind: a safety property must never be violated; a liveness property must come true within
            ``bound``.
        name: the name of the check.
        sentence: the property in words.
        find: returns its violations in a run, in words; None if it does not apply to the run.
        shown_by: the check of the judge that is the same property, if any; then ``find`` is not
            called.
        bound: the time limit of a liveness property, and its origin.
    """

    number: int
    kind: Kind
    name: str
    sentence: str
    find: Callable[[RunTrace], Finding] = lambda trace: None
    shown_by: str = ""
    bound: str = ""

    @property
    def label(self) -> str:
        """A short and unique name, such as ``9S``."""
        return f"{self.number}{self.kind[0].upper()}"

    @property
    def title(self) -> str:
        """The name of the check in an outcome."""
        return self.shown_by or f"property {self.label}: {self.name}"
