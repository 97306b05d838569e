"""What was trained, read from the journals: the committed steps, the ranks that gave to them, and what went wrong."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from chaoskit.config import RunConfig
from chaoskit.journal import Record
from chaoskit.runlog.outcome import Ledger, StepPoint
from chaoskit.vocabulary import Event


@dataclass
class Step:
    """One step number, over all generations that worked on it.

    Attributes:
        commits: generation -> records of the ranks that committed it there.
        skips: the same for a batch that was skipped.
        contributions: generation -> rank -> the rank's last contribution.
    """

    commits: dict[int, list[Record]] = field(default_factory=lambda: defaultdict(list))
    skips: dict[int, list[Record]] = field(default_factory=lambda: defaultdict(list))
    contributions: dict[int, dict[int, Record]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def generation(self) -> int:
        """The generation whose result lives on: the last one that finished the step."""
        return max((*self.commits, *self.skips))

    @property
    def skipped(self) -> bool:
        return self.generation in self.skips

    @property
    def finishers(self) -> list[Record]:
        """Records of the ranks that finished the step in that generation."""
        return [*self.commits.get(self.generation, ()), *self.skips.get(self.generation, ())]

    def trained(self) -> Iterator[tuple[int, list[int], Record]]:
        """Shard, its samples and the record that tells of them, of all that was given in that generation."""
        for record in self.contributions[self.generation].values():
            size = len(record["samples"]) // max(1, len(record["shards"]))
            for place, shard in enumerate(record["shards"]):
                yield shard, record["samples"][place * size : (place + 1) * size], record


class FinishedStep(NamedTuple):
    """How a step was finished in the generation whose result lives on, with the last rank."""

    number: int
    generation: int
    world: int
    end_ns: int


class Repeated(NamedTuple):
    """A step whose result in a generation does not live on: it was committed there ``before``, and in one ``after``."""

    step: int
    before: int
    after: int


class History:
    """The finished steps of a run, by number."""

    def __init__(self, records: Iterable[Record]) -> None:
        found: dict[int, Step] = defaultdict(Step)
        self._last_generation: dict[str, int] = {}
        self._ends: list[Record] = []
        for record in records:
            event, fields = record.event, record.fields
            if event in (Event.COMMIT, Event.REDUCE, Event.REGROUPED):
                known = self._last_generation.get(record.source, 0)
                self._last_generation[record.source] = max(known, fields["generation"])
            if event == Event.COMMIT:
                found[fields["step"]].commits[fields["generation"]].append(record)
            elif event == Event.REDUCE:
                found[fields["step"]].contributions[fields["generation"]][fields["rank"]] = record
            elif event == Event.SKIP:
                found[fields["step"]].skips[fields["generation"]].append(record)
            elif event == Event.FINISHED:
                self._ends.append(record)
        self.steps = {
            number: step for number, step in sorted(found.items()) if step.commits or step.skips
        }

    @cached_property
    def finished(self) -> list[FinishedStep]:
        """One for each step, by number."""
        found = []
        for number, step in self.steps.items():
            records = step.finishers
            end_ns = max(record.t_ns for record in records)
            found.append(FinishedStep(number, step.generation, records[0]["world"], end_ns))
        return found

    def losses(self) -> list[float | None]:
        """Loss of every step from 0; None where the batch was skipped or the step is missing."""
        last = max(self.steps, default=-1)
        return [self._loss(number) for number in range(last + 1)]

    def _loss(self, number: int) -> float | None:
        step = self.steps.get(number)
        if step is None or step.skipped:
            return None
        loss = step.finishers[0]["loss"]
        return math.nan if loss is None else float(loss)  # JSON has no NaN

    def points(self, started_ns: int) -> list[StepPoint]:
        """One point a step; a step is finished when the last rank has finished it."""
        points: list[StepPoint] = []
        for step in self.finished:
            at_s = (step.end_ns - started_ns) / 1e9
            before_s = points[-1].at_s if points else at_s
            points.append(
                StepPoint(
                    step=step.number,
                    loss=self._loss(step.number),
                    at_s=at_s,
                    seconds=at_s - before_s,
                    generation=step.generation,
                    world=step.world,
                )
            )
        return points

    def violations(self, reduction: str) -> list[str]:
        """Where the history is not one line: gaps, or ranks that committed different results for a step.

        A step that is committed again, because all ranks that had committed it were lost, has the same result if the
        reduction is exact; else it may be rounded in another way, or be made of another batch.
        """
        found = [
            f"step {number} is missing"
            for number in range(max(self.steps, default=-1))
            if number not in self.steps
        ]
        for number, step in self.steps.items():
            by_generation = [
                {(record["loss"], record["grad_sum"]) for record in one}
                for one in step.commits.values()
            ]
            lines = [set().union(*by_generation)] if reduction == "exact" else by_generation
            if (different := max((len(results) for results in lines), default=1)) > 1:
                found.append(f"step {number} was committed with {different} different results")
            if step.commits and step.skips:
                found.append(f"step {number} was both committed and skipped")
        return found

    def ends(self, config: RunConfig) -> list[Record]:
        """What ranks finished with.

        Where the batch follows the world, without ranks that took the last step alone and left: the others took it
        again, with a batch of their own.
        """
        last = self.steps.get(max(self.steps, default=-1))
        if config.follow is None or last is None:
            return self._ends
        alone = {
            record.source
            for one in (last.commits, last.skips)
            for records in one.values()
            for record in records
        }
        gone = {
            source for source in alone if self._last_generation.get(source, 0) < last.generation
        }
        return [end for end in self._ends if end.source not in gone]

    def repeated(self) -> list[Repeated]:
        """Steps that were committed, and that were committed again in a later generation."""
        return [
            Repeated(number, old, step.generation)
            for number, step in self.steps.items()
            if (old := _thrown_away(step))
        ]

    def lost(self) -> list[Repeated]:
        """Those of them that were not in flight.

        Of the steps that only ranks now lost had committed, the last one of a generation was still in flight for all
        other ranks. Older ones were not: a rank that takes over a copy of an older state repeats them.
        """
        repeated = self.repeated()
        in_flight = {one.before: one.step for one in repeated}  # the last one of each generation
        return [
            one
            for one in repeated
            if in_flight[one.before] != one.step or self._has_survivors(self.steps[one.step])
        ]

    def repeated_steps(self) -> int:
        """Steps that were committed, and that were computed again all the same."""
        return len(self.lost())

    def repeated_beside_survivors(self) -> list[int]:
        """Steps that were computed again although a rank that had committed them was still a member."""
        return [
            number
            for number, step in self.steps.items()
            if _thrown_away(step) and self._has_survivors(step)
        ]

    def _has_survivors(self, step: Step) -> bool:
        committers = [
            r.source for g, records in step.commits.items() if g < step.generation for r in records
        ]
        return any(self._last_generation.get(source, 0) >= step.generation for source in committers)

    def ledger(self, shards_of: Callable[[int, int], int]) -> Ledger:
        """Every shard of every finished step, exactly once. ``shards_of``: how many a step in such a world has."""
        missing, repeated, skipped = [], [], []
        samples = 0
        for number, step in self.steps.items():
            owners: dict[int, list[int]] = defaultdict(list)
            for rank, record in step.contributions[step.generation].items():
                samples += len(record["samples"])
                for shard in record["shards"]:
                    owners[shard].append(rank)
            wanted = range(shards_of(number, step.finishers[0]["world"]))
            missing += [f"step {number} shard {shard}" for shard in wanted if shard not in owners]
            repeated += [
                f"step {number} shard {shard}" for shard, ranks in owners.items() if len(ranks) > 1
            ]
            if step.skipped:
                shards = sorted({shard for record in step.finishers for shard in record["shards"]})
                skipped.append(f"step {number}: shards {shards} are not finite")
        return Ledger(
            steps=len(self.steps),
            samples=samples,
            missing=missing,
            repeated=repeated,
            skipped=skipped,
        )

    def schedule(self) -> tuple[tuple[int, int], ...]:
        """(step, shards) wherever the batch has another number of them than before."""
        found: list[tuple[int, int]] = []
        for number, step in self.steps.items():
            shards = sum(
                len(record["shards"]) for record in step.contributions[step.generation].values()
            )
            if not found or found[-1][1] != shards:
                found.append((number, shards))
        return tuple(found)

    def samples_digest(self) -> str:
        """SHA-256 of the samples of every step, by shard: equal if the same data was trained in the same order."""
        digest = hashlib.sha256()
        for number, step in self.steps.items():
            by_shard = sorted((shard, samples) for shard, samples, _ in step.trained())
            digest.update(repr((number, by_shard)).encode())
        return digest.hexdigest()


def _thrown_away(step: Step) -> int:
    """The last generation that committed the step and whose result does not live on; 0 if there is none."""
    return max(
        (generation for generation in step.commits if generation < step.generation), default=0
    )
