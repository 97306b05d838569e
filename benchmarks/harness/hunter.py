"""A watch callback that kills ranks by their pid at random moments of a run that is fully warm."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

from chaoskit.process.linux import Starvation, is_ending
from chaoskit.wire.messages import Beat, EndJob, Heartbeat, Plan, WorkerLost, WorkerReady

#: Steps that every rank must have committed in a new membership before the next kill may be drawn.
_CALM_STEPS = 3


@dataclass
class Shot:
    """A kill.

    ``starved_s``: the longest wait of a survivor's main thread for a CPU, until all ranks trained
    again.
    """

    t_ns: int
    worker: str
    rank: int
    generation: int
    starved_s: float = 0.0


class Hunter:
    """A watch callback that kills ranks.

    A timer picks the moments: heartbeats arrive at regular intervals and would bias them.

    Args:
        chance: the source of moments and victims.
        nodes, spares: the numbers of members and warm spares that a kill waits for.
        window_s: the window after the world is warm, in which a kill comes at a uniformly random
            moment.
        last_step: the last step with a kill, so that the recovery can be measured.
        limit: the largest number of kills.
    """

    def __init__(
        self,
        chance: random.Random,
        *,
        nodes: int,
        spares: int,
        window_s: float,
        last_step: int,
        limit: int,
    ) -> None:
        self._chance, self._window_s = chance, window_s
        self._nodes, self._spares = nodes, spares
        self._last_step, self._limit = last_step, limit
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._pids: dict[str, int] = {}
        self._ready: set[str] = set()
        self._plan: Plan | None = None
        self._beats: dict[str, Beat] = {}
        self._calm_from: int | None = (
            None  # step at which every member had sent a heartbeat of this membership
        )
        self._waits: dict[
            str, int
        ] = {}  # nanoseconds of each survivor without a CPU, at the moment of the last kill
        self._over = False
        self.shots: list[Shot] = []

    def __call__(self, message: Any) -> None:
        with self._lock:
            match message:
                case WorkerReady(worker, _, endpoint):
                    self._pids[worker] = endpoint.pid
                    self._ready.add(worker)
                case WorkerLost(worker):
                    self._ready.discard(worker)
                case Plan() if self._plan is None or message.generation > self._plan.generation:
                    self._plan, self._calm_from = message, None
                case Heartbeat(_, beats):
                    self._record_beats(beats)
                case EndJob():
                    self._over = True
            if self._timer is None and self._warm():
                self._timer = threading.Timer(
                    self._chance.uniform(0.0, self._window_s), self._strike
                )
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        """Cancel the timer; no rank is killed afterwards."""
        with self._lock:
            self._over = True
            timer = self._timer
        if timer is not None:
            timer.cancel()
            timer.join()

    def _record_beats(self, beats: tuple[Beat, ...]) -> None:
        self._beats.update((beat.worker, beat) for beat in beats)
        if self._plan is None or self._calm_from is not None:
            return
        member_beats = self._member_beats()
        if len(member_beats) == len(self._plan.members):
            self._calm_from = max(beat.step for beat in member_beats)
            waited = [self._waited_ns(worker) - before for worker, before in self._waits.items()]
            if self.shots and waited:
                self.shots[-1].starved_s = max(waited) / 1e9

    def _waited_ns(self, worker: str) -> int:
        """Return the nanoseconds during which the main thread of ``worker`` was ready to run and
        had no CPU.
        """
        pid = self._pids[worker]
        clock = Starvation(pid, pid)
        try:
            return clock.read_ns()
        finally:
            clock.close()

    def _member_beats(self) -> list[Beat]:
        """Return the newest beat of each member that trains in the newest membership."""
        assert self._plan is not None
        beats = [self._beats.get(member.worker) for member in self._plan.members]
        return [
            beat for beat in beats if beat is not None and beat.generation == self._plan.generation
        ]

    def _warm(self) -> bool:
        """Return whether the world is full and trained some steps, all spares are ready, and a kill
        can be measured.
        """
        if (
            self._over
            or self._plan is None
            or self._calm_from is None
            or len(self.shots) >= self._limit
        ):
            return False
        members = {member.worker for member in self._plan.members}
        if len(members) < self._nodes or len(self._ready - members) < self._spares:
            return False
        steps = [beat.step for beat in self._member_beats()]
        return (
            len(steps) == len(members)
            and self._calm_from + _CALM_STEPS <= min(steps) < self._last_step
        )

    def _strike(self) -> None:
        with self._lock:
            self._timer = None
            if not self._warm() or self._plan is None:
                return
            victim = self._chance.choice(self._plan.members)
            if any(is_ending(self._pids[member.worker]) for member in self._plan.members):
                return  # a rank died by another cause: its recovery would be counted as that of a kill
            self._ready.discard(victim.worker)
            self._calm_from = None
            survivors = [member.worker for member in self._plan.members if member is not victim]
            self._waits = {worker: self._waited_ns(worker) for worker in survivors}
            self.shots.append(
                Shot(time.monotonic_ns(), victim.worker, victim.rank, self._plan.generation)
            )
            os.kill(self._pids[victim.worker], signal.SIGKILL)
