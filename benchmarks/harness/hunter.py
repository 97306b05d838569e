"""Kills ranks by their pid at random moments, while everything is warm. Shown every message of the coordinator."""

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
    """One kill. ``starved_s``: the longest that a survivor's main thread waited for a CPU, until all trained again."""

    t_ns: int
    worker: str
    rank: int
    generation: int
    starved_s: float = 0.0


class Hunter:
    """A watch callback. Its timer kills, so that heartbeats, which come at regular intervals, do not choose the moment.

    Args:
        chance: decides moments and victims.
        nodes, spares: the full world, and the warm workers beside it, that a kill waits for.
        window_s: a kill comes at a uniformly random moment of so many seconds, once all is warm.
        last_step: no kill after it, so that there is a way back to measure.
        limit: of kills.
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
            None  # step at which every member had been heard of in this membership
        )
        self._waits: dict[str, int] = {}  # of the survivors, at the moment of the last kill
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
                    self._hear(beats)
                case EndJob():
                    self._over = True
            if self._timer is None and self._warm():
                self._timer = threading.Timer(
                    self._chance.uniform(0.0, self._window_s), self._strike
                )
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        """No more kills."""
        with self._lock:
            self._over = True
            timer = self._timer
        if timer is not None:
            timer.cancel()
            timer.join()

    def _hear(self, beats: tuple[Beat, ...]) -> None:
        self._beats.update((beat.worker, beat) for beat in beats)
        if self._plan is None or self._calm_from is not None:
            return
        known = self._members_heard()
        if len(known) == len(self._plan.members):
            self._calm_from = max(beat.step for beat in known)
            waited = [self._waited_ns(worker) - before for worker, before in self._waits.items()]
            if self.shots and waited:
                self.shots[-1].starved_s = max(waited) / 1e9

    def _waited_ns(self, worker: str) -> int:
        """How long the main thread of a worker was ready to run so far, without a CPU."""
        pid = self._pids[worker]
        clock = Starvation(pid, pid)
        try:
            return clock.read_ns()
        finally:
            clock.close()

    def _members_heard(self) -> list[Beat]:
        """The newest beats of the members, of those that train in the newest membership."""
        assert self._plan is not None
        beats = [self._beats.get(member.worker) for member in self._plan.members]
        return [
            beat for beat in beats if beat is not None and beat.generation == self._plan.generation
        ]

    def _warm(self) -> bool:
        """The world is full and has trained some steps, every spare is ready, and there is time for another kill."""
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
        steps = [beat.step for beat in self._members_heard()]
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
                return  # somebody died without us: that way back would be counted as ours
            self._ready.discard(victim.worker)
            self._calm_from = None
            survivors = [member.worker for member in self._plan.members if member is not victim]
            self._waits = {worker: self._waited_ns(worker) for worker in survivors}
            self.shots.append(
                Shot(time.monotonic_ns(), victim.worker, victim.rank, self._plan.generation)
            )
            os.kill(self._pids[victim.worker], signal.SIGKILL)
