"""Order of recovery and starts of workers: a pure state machine.

A replacement worker imports, builds and rehearses for seconds of CPU time. Started at the moment of
a loss, it would take that time from the ranks that are about to repeat the step. So starts wait
until every rank has committed in the new generation.

-> coordinator/membership/worker_placement.py decides which workers are started;
coordinator/handlers/on_heartbeat.py and coordinator/commit.py release the starts that wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from chaoskit.wire.messages import Beat

Start = TypeVar("Start")

#: A generation that commits nothing for this long may need the replacement.
PATIENCE_S = 2.0


class Deferral(Generic[Start]):
    """Queue of starts that are held while a generation has yet to commit its first step."""

    def __init__(self) -> None:
        self._generation = 0
        self._until_s: float | None = None  # None: nothing is being recovered
        self._world = 0
        # worker -> its commits when it was first seen in the generation
        self._commits: dict[str, int] = {}
        self._recovered: set[str] = set()
        self._held: list[Start] = []

    @property
    def held(self) -> tuple[Start, ...]:
        """The starts that wait."""
        return tuple(self._held)

    def recover(self, generation: int, world: int, now_s: float) -> None:
        """Hold starts until all ``world`` ranks have committed in ``generation``.

        They are held no longer than :data:`PATIENCE_S`.
        """
        self._generation, self._world = generation, world
        self._commits, self._recovered = {}, set()
        self._until_s = now_s + PATIENCE_S

    def submit(self, start: Start) -> list[Start]:
        """Return ``start`` in a list if it can be done now; otherwise hold it, and return none."""
        if self._until_s is None:
            return [start]
        self._held.append(start)
        return []

    def observe(self, beats: Iterable[Beat], now_s: float) -> list[Start]:
        """Take in the progress of workers, and return the starts that have waited long enough.

        These are all that are held, or none.
        """
        if self._until_s is None:
            return []
        self._recovered.update(beat.worker for beat in beats if self._has_committed(beat))
        if now_s < self._until_s and len(self._recovered) < self._world:
            return []
        return self.release()

    def release(self) -> list[Start]:
        """Return all held starts, and hold none until the next :meth:`recover`."""
        self._until_s = None
        held, self._held = self._held, []
        return held

    def _has_committed(self, beat: Beat) -> bool:
        if beat.generation != self._generation:
            return False
        return beat.commits > self._commits.setdefault(beat.worker, beat.commits)
