"""What a property is, and what it is computed from."""

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
from chaoskit.runlog.injected import InjectionRecord
from chaoskit.runlog.outcome import Recovery
from chaoskit.vocabulary import HUNG, Event

Kind = Literal["safety", "liveness"]

#: Added to every bound: how long processes of a crowded machine may wait for a CPU without being broken.
SLACK_S = 10.0


class RunTrace:
    """One run as its journals tell it."""

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
        """Worker -> when it was given up."""
        return {record["worker"]: record.t_ns for record in reversed(self.of(Event.DETECTED))}

    @cached_property
    def settled_ns(self) -> dict[int, int]:
        """Generation -> when all of its members had its group."""
        return {record["generation"]: record.t_ns for record in self.of(Event.SETTLED)}

    @property
    def end_ns(self) -> int:
        """When the job ended; else the run."""
        ended = self.first(Event.JOB_ENDED)
        return ended.t_ns if ended else self.run.ended_ns

    @cached_property
    def commits(self) -> dict[tuple[int, int], list[Record]]:
        """(Step, generation) -> the commits of its ranks."""
        steps = self.history.steps.items()
        found = {
            (number, generation): one
            for number, step in steps
            for generation, one in step.commits.items()
        }
        return defaultdict(list, found)

    def holders(self, worker: str, before_ns: int) -> int:
        """Ranks that held what ``worker`` held of a sharded state, in the last step that it committed before then."""
        mine = [
            record
            for record in self.of(Event.COMMIT)
            if record.source == worker and record.t_ns < before_ns
        ]
        if not mine:
            return 0
        last = mine[-1]
        return sum(
            one["piece"] == last["piece"] for one in self.commits[last["step"], last["generation"]]
        )

    @cached_property
    def has_replicas(self) -> bool:
        """Whether some ranks held the same part of the state: all of it, where the job is not sharded."""
        if not self.config.job.sharded:
            return True
        return any(
            len({one["piece"] for one in commits}) < len(commits)
            for commits in self.commits.values()
        )

    def confirmed(self, *kinds: str) -> list[InjectionRecord]:
        """The faults of these kinds that took effect."""
        struck = [one for one in self.run.injections if one.fault.kind in kinds and not one.missed]
        return [one for one in struck if one.effective_ns is not None]

    def struck_by(self, worker: str) -> list[str]:
        """Kinds of the faults that acted on ``worker``."""
        hit = [
            (one, one.target)
            for one in self.run.injections
            if one.target is not None and not one.missed
        ]
        return [one.fault.kind for one, target in hit if worker in target.claims]

    @cached_property
    def _quiet_s(self) -> list[float]:
        """Durations of the steps that no recovery fell into, the shortest first."""
        points = self.history.points(self.run.started_ns)
        return sorted(
            later.seconds
            for earlier, later in pairwise(points)
            if earlier.generation == later.generation
        )

    @property
    def usual_step_s(self) -> float:
        """Nine of ten quiet steps took no longer: one that waited for minutes is not usual."""
        quiet_s = self._quiet_s
        return quiet_s[len(quiet_s) * 9 // 10] if quiet_s else 0.0

    @cached_property
    def slowest_recovery_s(self) -> float:
        """The longest time from a plan that interrupts a step to the first commit of its generation."""
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
        """How many steps were committed before this moment."""
        return len({record["step"] for record in self.of(Event.COMMIT) if record.t_ns < t_ns})

    def hang_limit_s(self, t_ns: int) -> float:
        """How long a phase may last at this moment before its rank is suspected, whatever kind of phase it is.

        No phase is longer than its step, and suspects before this moment may each have doubled the limit.
        """
        suspects = sum(
            record["cause"] == HUNG and record.t_ns < t_ns for record in self.of(Event.DETECTED)
        )
        young = 1 + YOUNG_STEPS / max(KNOWN_STEPS, self.steps_before(t_ns))
        allowance_s = max(self.config.hang_floor_ms / 1000, self.slowest_recovery_s)
        learned_s = max(self._quiet_s, default=0.0) * young + FIRST_STEP_ALLOWANCES * allowance_s
        return float(max(self.config.hang_steps * self.usual_step_s, learned_s) * 2**suspects)


#: What violates a property, in words; None: it says nothing about this run.
Finding = list[str] | None


@dataclass(frozen=True)
class Property:
    """One row of the table of partial failures.

    Attributes:
        number: of the row.
        kind: safety must never be violated; liveness must come true within ``bound``.
        name: of the check.
        sentence: what holds.
        find: what violates it in a run.
        shown_by: the check of the judge that is the same thing, where there is one; then ``find`` is not asked.
        bound: of liveness, and where it comes from.
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
        """Short and unique, as ``9S``."""
        return f"{self.number}{self.kind[0].upper()}"

    @property
    def title(self) -> str:
        """Name of the check in an outcome."""
        return self.shown_by or f"property {self.label}: {self.name}"
