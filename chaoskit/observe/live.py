"""Heartbeats of a run for observers: in memory, and in a small file for other processes.

-> coordinator/detectors/contact.py: the decision that a node is lost. This view decides nothing.
-> observe/watching.py feeds it from the launcher. observe/frame.py shows silent nodes.
"""

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
_FRESH_S = 2.0  # a node or a file that is silent for so long counts as gone


class Pulse(msgspec.Struct, frozen=True):
    """The activity of a worker in its last heartbeat.

    Attributes:
        phase: the number of a :class:`chaoskit.vocabulary.Phase`.
        age_ms: the time in this phase, in milliseconds.
        loss: the last loss; None if it is not finite.
        heard_ns: the time of the heartbeat, on CLOCK_MONOTONIC.
    """

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
    """The last heartbeats of all nodes.

    Attributes:
        t_ns: the time of the last update, on CLOCK_MONOTONIC.
        nodes: the time of each node's last heartbeat, on CLOCK_MONOTONIC in ns.
        pulses: the activity of each worker that was not lost.
        ended: True once the job has ended.
    """

    t_ns: int = 0
    nodes: dict[str, int] = {}
    pulses: dict[str, Pulse] = {}
    ended: bool = False

    def is_fresh(self, now_ns: int) -> bool:
        """Return True if the last update is less than two seconds old."""
        return now_ns - self.t_ns < _FRESH_S * 1e9

    def is_up(self, node: str, now_ns: int) -> bool:
        """Return True if ``node`` sent a heartbeat in the last two seconds."""
        return now_ns - self.nodes.get(node, 0) < _FRESH_S * 1e9


class Live:
    """The live state of a run, updated with messages of the coordinator. Thread-safe."""

    def __init__(self) -> None:
        self._state = LiveState()
        self._lock = threading.Lock()

    def update(self, message: Any) -> None:
        """Update the state with a message of any type, which also makes it fresh.

        Heartbeats, lost workers and the end of the job change more than its time.
        """
        now_ns = time.monotonic_ns()
        with self._lock:
            state, state.t_ns = self._state, now_ns
            match message:
                case Heartbeat(node, beats):
                    state.nodes[node] = now_ns
                    for beat in beats:
                        loss = beat.loss if math.isfinite(beat.loss) else None
                        progress = (beat.rank, beat.generation, beat.step, beat.phase, beat.age_ms)
                        state.pulses[beat.worker] = Pulse(
                            beat.worker, node, *progress, loss, now_ns
                        )
                case WorkerLost(worker):
                    state.pulses.pop(worker, None)
                case EndJob():
                    state.ended = True

    def state(self) -> LiveState:
        """Return a copy of the state."""
        with self._lock:
            now = self._state
            return LiveState(now.t_ns, dict(now.nodes), dict(now.pulses), now.ended)


class LiveFile:
    """A file that shows a :class:`Live` to other processes, written at most four times a second."""

    def __init__(self, directory: Path, live: Live) -> None:
        self._path, self._live = directory / FILE_NAME, live
        self._written_s = 0.0

    def refresh(self) -> None:
        """Write the file atomically, if a quarter of a second has passed since the last time.

        An error of the disk is ignored: only the live view needs the file.
        """
        now_s = time.monotonic()
        if now_s - self._written_s < _WRITE_EVERY_S:
            return
        self._written_s = now_s
        draft = self._path.with_name(f".{FILE_NAME}")
        try:
            draft.write_bytes(msgspec.json.encode(self._live.state()))
            os.replace(draft, self._path)  # noqa: PTH105 - faster than pathlib, many times a second
        except OSError:
            return


def read_live(directory: Path) -> LiveState:
    """Return the state that the launcher of a run wrote last.

    It is empty, and therefore not fresh, if there is no file or it cannot be read.
    """
    try:
        return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=LiveState)
    except (OSError, msgspec.MsgspecError):
        return LiveState()
