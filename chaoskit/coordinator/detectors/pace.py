"""The pace of each rank, from the progress boards of the workers.

Pure: it counts steps and reads no clock.

-> runtime/step/stopwatch.py measures the times in the worker; agent/worker_handle.py reads them.
coordinator/detectors/balance.py and stragglers.py judge the paces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from statistics import median
from typing import NamedTuple

from chaoskit.wire.messages import Beat, Effort

#: Least number of samples of a pace, which is their median: half of them are needed to change it.
WINDOW_SAMPLES = 5
#: Least time that the samples cover: the scheduler can delay a rank for much longer than a step.
WINDOW_S = 0.5
_SAMPLES_MAX = 256


@dataclass(frozen=True, slots=True)
class RankPace:
    """The times in seconds that a rank needs for a shard and for a step.

    Attributes:
        compute_s: computation of one shard.
        input_s: input of one shard.
        wait_s: wait in the reduction of one step.
        other_s: rest of one step.
        starved_s: time without a CPU during one shard; it is larger where a busy thread waits for
            steps.
    """

    compute_s: float
    input_s: float
    wait_s: float = 0.0
    other_s: float = 0.0
    starved_s: float = 0.0

    @property
    def shard_s(self) -> float:
        """The time for one shard, from its fetch to its sum."""
        return self.compute_s + self.input_s

    @property
    def own_s(self) -> float:
        """The computation of one shard, without the time in which other processes had the CPU."""
        return max(0.0, self.compute_s - self.starved_s)


class _Sample(NamedTuple):
    """The pace in the steps between two beats. ``took_s`` is the duration of all of them."""

    pace: RankPace
    took_s: float


class _Window:
    """The last samples of one worker."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES_MAX)
        self.is_fresh = False  # a sample was added since the last round

    def hear(self, effort: Effort) -> None:
        """Add a sample of the steps since the last one, if there are any."""
        before = self._effort
        steps, shards = effort.steps - before.steps, effort.shards - before.shards
        if steps <= 0 or shards <= 0:
            return
        self._effort = effort
        compute_s, input_s = (
            (effort.compute_ms - before.compute_ms) / 1e3,
            (effort.input_ms - before.input_ms) / 1e3,
        )
        wait_s = (effort.wait_ms - before.wait_ms) / 1e3
        other_s = (effort.other_ms - before.other_ms) / 1e3
        starved_s = max(0.0, effort.starved_ms - before.starved_ms) / 1e3
        pace = RankPace(
            compute_s / shards,
            input_s / shards,
            wait_s / steps,
            other_s / steps,
            starved_s / shards,
        )
        self._samples.append(_Sample(pace, compute_s + input_s + wait_s + other_s))
        self.is_fresh = True
        while (
            len(self._samples) > WINDOW_SAMPLES
            and self._covered_s - self._samples[0].took_s >= WINDOW_S
        ):
            self._samples.popleft()

    @property
    def _covered_s(self) -> float:
        """The duration of all steps in the window."""
        return sum(sample.took_s for sample in self._samples)

    @property
    def is_full(self) -> bool:
        """True if there are enough samples for a median."""
        enough = len(self._samples) >= WINDOW_SAMPLES and self._covered_s >= WINDOW_S
        return enough or len(self._samples) == _SAMPLES_MAX

    @property
    def latest(self) -> RankPace:
        """The pace of the last sample alone."""
        return self._samples[-1].pace

    def pace(self) -> RankPace:
        """Return the median of each part of the pace, which a single slow step does not change."""
        paces = [sample.pace for sample in self._samples]
        return RankPace(
            *(median(getattr(pace, part.name) for pace in paces) for part in fields(RankPace))
        )


@dataclass(frozen=True, slots=True)
class Round:
    """The paces of all members, each of which has taken one or more steps since the last round.

    Attributes:
        paces: worker -> its usual pace.
        latest: worker -> its pace in the steps since the last round.
    """

    paces: Mapping[str, RankPace]
    latest: Mapping[str, RankPace]


class Paces:
    """Paces of all workers, from their beats, in rounds: all members take a step in each."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def hear(self, beats: Iterable[Beat]) -> None:
        """Take in beats of live workers. A beat without an effort changes nothing."""
        for beat in beats:
            if beat.effort is None:
                continue
            if beat.worker not in self._windows:
                self._windows[beat.worker] = _Window(Effort())
            self._windows[beat.worker].hear(beat.effort)

    def round(self, members: Collection[str]) -> Round | None:
        """Return the paces of ``members``, once each has taken a step since the last round.

        None is returned before, and as long as a member has too few samples. Workers that are no
        members are forgotten, because their samples would be out of date.
        """
        for worker in [worker for worker in self._windows if worker not in members]:
            del self._windows[worker]
        windows = [self._windows[worker] for worker in members if worker in self._windows]
        if len(windows) < len(members) or not all(window.is_fresh for window in windows):
            return None
        for window in windows:
            window.is_fresh = False
        if not all(window.is_full for window in windows):
            return None
        by_worker = {worker: self._windows[worker] for worker in members}
        paces = {worker: window.pace() for worker, window in by_worker.items()}
        return Round(paces, {worker: window.latest for worker, window in by_worker.items()})
