"""How fast each rank is, from what the boards of their workers say. Pure: counts steps, and knows no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from statistics import median
from typing import NamedTuple

from chaoskit.wire.messages import Beat, Effort

#: A pace is the median over as many samples; half of them are needed to change it.
WINDOW_SAMPLES = 5
#: Steps may be much shorter than what a scheduler does to them: the samples cover at least so much time.
WINDOW_S = 0.5
_SAMPLES_MAX = 256


@dataclass(frozen=True, slots=True)
class Pace:
    """What a rank needs, in seconds: for one shard ``compute_s`` and ``input_s``; for one step ``wait_s`` in the
    reduction and ``other_s`` for the rest. ``starved_s``: of a shard, time without a CPU; more than that, where steps
    are waited for with a busy thread.
    """

    compute_s: float
    input_s: float
    wait_s: float = 0.0
    other_s: float = 0.0
    starved_s: float = 0.0

    @property
    def shard_s(self) -> float:
        """One shard, from its fetch to its sum."""
        return self.compute_s + self.input_s

    @property
    def own_s(self) -> float:
        """The computation of one shard, as far as nobody else had the CPU."""
        return max(0.0, self.compute_s - self.starved_s)


class _Sample(NamedTuple):
    """Of the steps between two beats. ``took_s``: all of them together."""

    pace: Pace
    took_s: float


class _Window:
    """The last samples of one worker."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES_MAX)
        self.is_fresh = False  # since somebody looked

    def hear(self, effort: Effort) -> None:
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
        pace = Pace(
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
        return sum(sample.took_s for sample in self._samples)

    @property
    def is_full(self) -> bool:
        enough = len(self._samples) >= WINDOW_SAMPLES and self._covered_s >= WINDOW_S
        return enough or len(self._samples) == _SAMPLES_MAX

    @property
    def latest(self) -> Pace:
        """Of the last sample alone."""
        return self._samples[-1].pace

    def pace(self) -> Pace:
        """The median of each part by itself: a single slow step moves none of them."""
        paces = [sample.pace for sample in self._samples]
        return Pace(*(median(getattr(pace, one.name) for pace in paces) for one in fields(Pace)))


@dataclass(frozen=True, slots=True)
class Round:
    """Every member has taken a step since the last round, or several if they are shorter than a heartbeat.

    ``paces``: by worker, what is usual for it. ``latest``: in these steps alone.
    """

    paces: Mapping[str, Pace]
    latest: Mapping[str, Pace]


class Paces:
    """Hears beats, and says how fast the members are as soon as all of them have something new to tell."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def hear(self, beats: Iterable[Beat]) -> None:
        """Beats of live workers."""
        for beat in beats:
            if beat.effort is None:
                continue
            if beat.worker not in self._windows:
                self._windows[beat.worker] = _Window(Effort())
            self._windows[beat.worker].hear(beat.effort)

    def round(self, members: Collection[str]) -> Round | None:
        """The paces of ``members``; None before each of them has taken a step since the last time.

        Whoever is no member is forgotten: it may come back years later.
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
