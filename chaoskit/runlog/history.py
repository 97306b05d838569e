"""The history of a training, read from the journals: committed steps, contributing ranks and
repeated work.

-> runlog/torn.py: lost steps that are excused. experiment/run/recovery_timeline.py: losses and
recoveries. experiment/properties/steps.py: rules that every commit must keep. runlog/account/: the
time of each step.
"""

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
    """A step number, over all generations that worked on it.

    Attributes:
        commits: generation -> records of the ranks that committed the step there.
        skips: generation -> records of the ranks that skipped a batch there.
        contributions: generation -> rank -> the record of the rank's last contribution.
    """

    commits: dict[int, list[Record]] = field(default_factory=lambda: defaultdict(list))
    skips: dict[int, list[Record]] = field(default_factory=lambda: defaultdict(list))
    contributions: dict[int, dict[int, Record]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def generation(self) -> int:
        """The generation with the result that was kept: the last one that finished the step."""
        return max((*self.commits, *self.skips))

    @property
    def skipped(self) -> bool:
        """True if the generation with the kept result skipped the batch of the step."""
        return self.generation in self.skips

    @property
    def finishers(self) -> list[Record]:
        """Commits and skips of the step, of all ranks in the generation with the kept result."""
        return [*self.commits.get(self.generation, ()), *self.skips.get(self.generation, ())]

    def trained(self) -> Iterator[tuple[int, list[int], Record]]:
        """Yield (shard, its samples, record of its contribution) for each shard of the step.

        They are those of the generation with the kept result. Nothing is yielded if no rank
        recorded its contribution there.
        """
        for record in self.contributions[self.generation].values():
            sample_count = len(record["samples"]) // max(1, len(record["shards"]))
            for position, shard in enumerate(record["shards"]):
                yield (
                    shard,
                    record["samples"][position * sample_count : (position + 1) * sample_count],
                    record,
                )


class FinishedStep(NamedTuple):
    """The end of a step in the generation with the result that was kept.

    Attributes:
        number: the number of the step.
        generation: that generation.
        world: its number of ranks.
        end_ns: the time at which its last rank finished the step.
    """

    number: int
    generation: int
    world: int
    end_ns: int


class Repeated(NamedTuple):
    """A step committed ``before``, and again in the generation ``after``, which was kept."""

    step: int
    before: int
    after: int


class History:
    """The finished steps of a run, folded from its records.

    Attributes:
        steps: number -> step, for each step that a rank has committed or skipped, in order.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        steps: dict[int, Step] = defaultdict(Step)
        self._last_generations: dict[str, int] = {}
        self._end_records: list[Record] = []
        for record in records:
            event, fields = record.event, record.fields
            if event in (Event.COMMIT, Event.REDUCE, Event.REGROUPED):
                newest_generation = self._last_generations.get(record.source, 0)
                self._last_generations[record.source] = max(newest_generation, fields["generation"])
            if event == Event.COMMIT:
                steps[fields["step"]].commits[fields["generation"]].append(record)
            elif event == Event.REDUCE:
                steps[fields["step"]].contributions[fields["generation"]][fields["rank"]] = record
            elif event == Event.SKIP:
                steps[fields["step"]].skips[fields["generation"]].append(record)
            elif event == Event.FINISHED:
                self._end_records.append(record)
        self.steps = {
            number: step for number, step in sorted(steps.items()) if step.commits or step.skips
        }

    @cached_property
    def finished(self) -> list[FinishedStep]:
        """The finished steps, by number."""
        finished = []
        for number, step in self.steps.items():
            records = step.finishers
            end_ns = max(record.t_ns for record in records)
            finished.append(FinishedStep(number, step.generation, records[0]["world"], end_ns))
        return finished

    def losses(self) -> list[float | None]:
        """Return the loss of every step from 0; None for a skipped batch or a missing step.

        A loss that was recorded as null is NaN.
        """
        last_step = max(self.steps, default=-1)
        return [self._loss(number) for number in range(last_step + 1)]

    def _loss(self, number: int) -> float | None:
        """Return the loss of a step; None if the batch was skipped or the step is missing."""
        step = self.steps.get(number)
        if step is None or step.skipped:
            return None
        loss = step.finishers[0]["loss"]
        return math.nan if loss is None else float(loss)  # JSON has no NaN

    def points(self, started_ns: int) -> list[StepPoint]:
        """Return one point for each step, with times in seconds since ``started_ns``.

        A step is finished when the last rank has finished it.
        """
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
        """Return, in words, each contradiction in the history.

        These are missing steps, different results of a step, and steps both committed and skipped.

        A step is committed again if all ranks that had committed it were lost. It has the same
        result if the reduction is exact. Otherwise it may be rounded differently, or be made of
        another batch.

        Args:
            reduction: the required equality of repeated steps, ``exact`` or ``fast``.
        """
        problems = [
            f"step {number} is missing"
            for number in range(max(self.steps, default=-1))
            if number not in self.steps
        ]
        for number, step in self.steps.items():
            by_generation = [
                {(record["loss"], record["grad_sum"]) for record in records}
                for records in step.commits.values()
            ]
            result_sets = [set().union(*by_generation)] if reduction == "exact" else by_generation
            if (result_count := max((len(results) for results in result_sets), default=1)) > 1:
                problems.append(
                    f"step {number} was committed with {result_count} different results"
                )
            if step.commits and step.skips:
                problems.append(f"step {number} was both committed and skipped")
        return problems

    def ends(self, config: RunConfig) -> list[Record]:
        """Return the records with which ranks finished.

        If the batch follows the world, ranks that took the last step alone and left are excluded.
        The others took it again, with a batch of their own.
        """
        last_step = self.steps.get(max(self.steps, default=-1))
        if config.follow is None or last_step is None:
            return self._end_records
        sources = {
            record.source
            for by_generation in (last_step.commits, last_step.skips)
            for records in by_generation.values()
            for record in records
        }
        left_sources = {
            source
            for source in sources
            if self._last_generations.get(source, 0) < last_step.generation
        }
        return [end for end in self._end_records if end.source not in left_sources]

    def repeated(self) -> list[Repeated]:
        """Return the steps that were committed, and committed again in a later generation."""
        return [
            Repeated(number, discarded_generation, step.generation)
            for number, step in self.steps.items()
            if (discarded_generation := _discarded_generation(step))
        ]

    def lost(self) -> list[Repeated]:
        """Return the repeated steps that were not in flight.

        Among steps that only lost ranks had committed, the last one of a generation was still in
        flight for all other ranks. Older ones were not: a rank that restores an older state repeats
        them. A step that a remaining rank had committed was not in flight either.
        """
        repeated = self.repeated()
        # generation -> its last repeated step
        in_flight = {step.before: step.step for step in repeated}
        return [
            step
            for step in repeated
            if in_flight[step.before] != step.step or self._has_survivors(self.steps[step.step])
        ]

    def repeated_steps(self) -> int:
        """Return the number of steps that were committed, not in flight, and computed again."""
        return len(self.lost())

    def repeated_beside_survivors(self) -> list[int]:
        """Return the steps that were computed again beside a rank that had committed them."""
        return [
            number
            for number, step in self.steps.items()
            if _discarded_generation(step) and self._has_survivors(step)
        ]

    def _has_survivors(self, step: Step) -> bool:
        """Return whether a rank with an earlier commit of the step was still a member later."""
        committers = [
            record.source
            for generation, records in step.commits.items()
            if generation < step.generation
            for record in records
        ]
        return any(
            self._last_generations.get(source, 0) >= step.generation for source in committers
        )

    def ledger(self, shards_of: Callable[[int, int], int]) -> Ledger:
        """Return the ledger of samples, where every shard of a finished step must be exactly once.

        It lists shards that are missing or that several ranks trained, and skipped batches.

        Args:
            shards_of: returns the number of shards, from the number of the step and of its ranks.
        """
        missing, repeated, skipped = [], [], []
        samples = 0
        for number, step in self.steps.items():
            owners: dict[int, list[int]] = defaultdict(list)
            for rank, record in step.contributions[step.generation].items():
                samples += len(record["samples"])
                for shard in record["shards"]:
                    owners[shard].append(rank)
            expected = range(shards_of(number, step.finishers[0]["world"]))
            missing += [f"step {number} shard {shard}" for shard in expected if shard not in owners]
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
        """Return (step, shards) for the first step and for each change of the number of shards."""
        changes: list[tuple[int, int]] = []
        for number, step in self.steps.items():
            shards = sum(
                len(record["shards"]) for record in step.contributions[step.generation].values()
            )
            if not changes or changes[-1][1] != shards:
                changes.append((number, shards))
        return tuple(changes)

    def samples_digest(self) -> str:
        """Return the SHA-256 of the samples of every step, by shard.

        It is equal for two runs that trained the same data in the same order.
        """
        digest = hashlib.sha256()
        for number, step in self.steps.items():
            by_shard = sorted((shard, samples) for shard, samples, _ in step.trained())
            digest.update(repr((number, by_shard)).encode())
        return digest.hexdigest()


def _discarded_generation(step: Step) -> int:
    """Return the last generation with a commit of the step that was not kept; 0 if none has."""
    return max(
        (generation for generation in step.commits if generation < step.generation), default=0
    )
