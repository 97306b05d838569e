"""Torn worlds: memberships with all members lost inside the same update, the one case in which
copies may cost steps.

A copy of the state is then as old as the interval between two copies allows. All data is read from
the journals. The keeper of each node, which holds the copies in its checkpoint daemon, records that
a worker ended inside an update, and the interval of its copies.

-> runlog/history.py (lost): which repeated steps count as lost. daemon/copy_budget.py: how often
the state is copied. experiment/judge/judge.py (_lost_steps): the check with ``max_lost_steps``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chaoskit.journal import Record
from chaoskit.runlog.history import History, Repeated
from chaoskit.runlog.outcome import CopyInterval
from chaoskit.vocabulary import Event


@dataclass(frozen=True, slots=True)
class TornWorld:
    """A membership with all members lost inside the same update.

    Attributes:
        generation: the generation of the membership.
        step: the number of steps that had been committed before the update.
        every: one of so many commits was copied; 1 if no keeper recorded it.
    """

    generation: int
    step: int
    every: int

    def explains(self, repeated: Repeated) -> bool:
        """Return whether the step was committed before that update, and again afterwards.

        It must have been committed in this generation or an earlier one.
        """
        return repeated.step < self.step and repeated.before <= self.generation < repeated.after


def torn_worlds(records: Iterable[Record]) -> list[TornWorld]:
    """Return all torn worlds, in the order in which they ended.

    A world is torn only if the keepers of all its members recorded the same update.

    Args:
        records: the records of the run, by time.
    """
    members: dict[int, set[str]] = {}
    torn_steps: dict[int, dict[str, int]] = defaultdict(dict)
    intervals: dict[int, dict[str, int]] = defaultdict(dict)
    worlds = []
    for record in records:
        if record.event == Event.PLAN:
            members[record["generation"]] = {member["worker"] for member in record["members"]}
        elif record.event == Event.COPY_INTERVAL:
            intervals[record["generation"]][record["worker"]] = record["every"]
        elif record.event == Event.TORN:
            generation = record["generation"]
            torn_steps[generation][record["worker"]] = record["step"]
            steps = {torn_steps[generation].get(worker) for worker in members.get(generation, ())}
            if steps == {record["step"]}:
                every = max(intervals[generation].values(), default=1)
                worlds.append(TornWorld(generation, record["step"], every))
    return worlds


def lost_without_reason(history: History, worlds: Sequence[TornWorld]) -> int:
    """Return the number of steps that were computed again and that no torn world explains.

    A world explains the steps since its last copy, which are fewer than ``every``. If there are
    more, it explains none: the copies were older than allowed.
    """
    lost_steps = history.lost()
    for world in worlds:
        explained_steps = [repeated for repeated in history.repeated() if world.explains(repeated)]
        if len(explained_steps) < world.every:
            lost_steps = [repeated for repeated in lost_steps if not world.explains(repeated)]
    return len(lost_steps)


def widest_interval(records: Iterable[Record]) -> CopyInterval | None:
    """Return the longest interval between two copies that a keeper planned.

    None is returned if no keeper recorded one.
    """
    intervals = [interval_of(record) for record in records if record.event == Event.COPY_INTERVAL]
    return max(intervals, key=lambda interval: (interval.steps, interval.seconds), default=None)


def interval_of(record: Record) -> CopyInterval:
    """Return the interval in a record ``copy_interval``."""
    return CopyInterval(steps=record["every"], seconds=record["every"] * record["step_ms"] / 1e3)
