"""The heartbeats of a run, kept for whoever looks at it: in memory, and in a small file that other processes read."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.wire.messages import EndJob, Heartbeat, WorkerLost

FILE_NAME = "live.json"
_WRITE_EVERY_S = 0.25
_FRESH_S = 2.0  # a node, or a file, that says nothing for so long is not there


class Pulse(msgspec.Struct, frozen=True):
    """What one worker did when it was last heard. ``loss`` is None where there is none that is finite."""

    worker: str
    node: str
    rank: int
    generation: int
    step: int
    phase: int
    age_ms: float
    loss: float | None
    heard_ns: int


class LiveState(msgspec.Struct):
    """``nodes``: when each was last heard, on CLOCK_MONOTONIC."""

    t_ns: int = 0
    nodes: dict[str, int] = {}
    pulses: dict[str, Pulse] = {}
    ended: bool = False

    def is_fresh(self, now_ns: int) -> bool:
        """Whether it tells of now."""
        return now_ns - self.t_ns < _FRESH_S * 1e9

    def is_up(self, node: str, now_ns: int) -> bool:
        """Whether ``node`` was heard a moment ago."""
        return now_ns - self.nodes.get(node, 0) < _FRESH_S * 1e9


class Live:
    """Hears what the coordinator says. Thread-safe."""

    def __init__(self) -> None:
        self._state = LiveState()
        self._lock = threading.Lock()

    def hear(self, message: Any) -> None:
        """Take in one message."""
        now_ns = time.monotonic_ns()
        with self._lock:
            state, state.t_ns = self._state, now_ns
            match message:
                case Heartbeat(node, beats):
                    state.nodes[node] = now_ns
                    for beat in beats:
                        loss = beat.loss if math.isfinite(beat.loss) else None
                        where = (beat.rank, beat.generation, beat.step, beat.phase, beat.age_ms)
                        state.pulses[beat.worker] = Pulse(beat.worker, node, *where, loss, now_ns)
                case WorkerLost(worker):
                    state.pulses.pop(worker, None)
                case EndJob():
                    state.ended = True

    def state(self) -> LiveState:
        """A copy that does not change any more."""
        with self._lock:
            now = self._state
            return LiveState(now.t_ns, dict(now.nodes), dict(now.pulses), now.ended)


class LiveFile:
    """Shows a :class:`Live` to other processes, four times a second at most."""

    def __init__(self, directory: Path, live: Live) -> None:
        self._path, self._live = directory / FILE_NAME, live
        self._written_s = 0.0

    def refresh(self) -> None:
        """Write it anew, if it is time. A disk that is full costs the picture and nothing else."""
        now_s = time.monotonic()
        if now_s - self._written_s < _WRITE_EVERY_S:
            return
        self._written_s = now_s
        draft = self._path.with_name(f".{FILE_NAME}")
        try:
            draft.write_bytes(msgspec.json.encode(self._live.state()))
            os.replace(draft, self._path)  # noqa: PTH105 - many times a second
        except OSError:
            return


def read_live(directory: Path) -> LiveState:
    """What the launcher of the run in ``directory`` wrote last; nothing where it wrote nothing."""
    try:
        return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=LiveState)
    except (OSError, msgspec.MsgspecError):
        return LiveState()
