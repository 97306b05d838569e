"""Worlds of which every member ended inside one and the same update: the one case in which copies may cost steps.

A copy of the state is then as old as the interval between two copies allows. Everything is read from the journals: the
keeper of each node writes down that an ended worker has left half an update, and how often it copies.
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
    """A membership that ended so.

    Attributes:
        step: steps that had been committed before the update.
        every: one of so many commits was copied.
    """

    generation: int
    step: int
    every: int

    def explains(self, repeated: Repeated) -> bool:
        """Whether the step was committed before that update, and again in a later generation."""
        return repeated.step < self.step and repeated.before <= self.generation < repeated.after


def torn_worlds(records: Iterable[Record]) -> list[TornWorld]:
    """Return all of them, in the order in which they ended."""
    members: dict[int, set[str]] = {}
    torn: dict[int, dict[str, int]] = defaultdict(dict)
    intervals: dict[int, dict[str, int]] = defaultdict(dict)
    found = []
    for record in records:
        if record.event == Event.PLAN:
            members[record["generation"]] = {member["worker"] for member in record["members"]}
        elif record.event == Event.COPY_INTERVAL:
            intervals[record["generation"]][record["worker"]] = record["every"]
        elif record.event == Event.TORN:
            generation = record["generation"]
            torn[generation][record["worker"]] = record["step"]
            steps = {torn[generation].get(worker) for worker in members.get(generation, ())}
            if steps == {record["step"]}:
                every = max(intervals[generation].values(), default=1)
                found.append(TornWorld(generation, record["step"], every))
    return found


def lost_without_reason(history: History, worlds: Sequence[TornWorld]) -> int:
    """Committed steps that were computed again, and that no torn world explains.

    A world explains as many as an interval between two copies holds, beside the step in flight. If there are more, it
    explains none: the copies were older than they may be.
    """
    lost = history.lost()
    for world in worlds:
        again = [repeated for repeated in history.repeated() if world.explains(repeated)]
        if len(again) < world.every:
            lost = [repeated for repeated in lost if not world.explains(repeated)]
    return len(lost)


def widest_interval(records: Iterable[Record]) -> CopyInterval | None:
    """Return the longest interval between two copies that a keeper planned; None if none made any."""
    told = [interval_of(record) for record in records if record.event == Event.COPY_INTERVAL]
    return max(told, key=lambda interval: (interval.steps, interval.seconds), default=None)


def interval_of(record: Record) -> CopyInterval:
    """Return what a record ``copy_interval`` tells."""
    return CopyInterval(steps=record["every"], seconds=record["every"] * record["step_ms"] / 1e3)
