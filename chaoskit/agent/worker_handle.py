"""A worker, as the agent of its node has it: its process, its board, and the connection to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass, field

from chaoskit.agent.standstill import Standstill
from chaoskit.health.clock import apart_ns
from chaoskit.process.heartbeat_page import Board
from chaoskit.process.linux import Starvation
from chaoskit.wire import frames, messages
from chaoskit.wire.messages import Beat, Effort


@dataclass
class Charge:
    """A worker of this node, from the order to start it until its end was seen."""

    name: str
    board: Board
    connection: socket.socket
    standstill: Standstill
    pid: int = 0
    pidfd: int = -1
    writer: asyncio.StreamWriter | None = None
    lost: bool = False
    goes: bool = False  # it may finish what it wants to do, but has no rank any more
    latched: bool = False  # no code of it runs any more
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _starvation: Starvation | None = None
    _starved: tuple[int, int] = (
        0,
        0,
    )  # phase that was seen, and the thread's starvation when it was first seen

    @property
    def lingers(self) -> bool:
        """Whether some of its code may still run, though nobody counts on it any more."""
        return self.lost and bool(self.board.pid) and not self.latched and not self.goes

    def tell(self, message: messages.Message) -> None:
        """Pass a message on, if anybody is there to read it."""
        if self.writer is not None and not self.lost:
            self.writer.write(frames.encode(message))

    def kill(self) -> None:
        """SIGKILL it, if it has a process."""
        self.lost, self.goes = True, False
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def read(self) -> Beat:
        """Return what its board shows. Time in which the agent stood still, too, counts as time without a CPU."""
        board = self.board
        since_ns, phase, now_ns = board.since_ns, board.phase, time.monotonic_ns()
        if self._starvation is None and board.pid:
            self._starvation = Starvation(board.pid, board.tid)
        starved = self._starvation.read_ns() if self._starvation is not None else 0
        if self._starved[0] != since_ns:
            self._starved = (since_ns, starved)
        stood_ns = self.standstill.read_ns(since_ns, now_ns)
        return Beat(
            worker=self.name,
            generation=board.generation,
            rank=board.rank,
            step=board.step,
            phase=phase,
            age_ms=(now_ns - since_ns) / 1e6 if since_ns else 0.0,
            starved_ms=(starved - self._starved[1] + stood_ns) / 1e6,
            commits=board.commits,
            loss=board.loss,
            rehearsal_ms=board.rehearsal_ms,
            effort=_effort(board, starved),
            clock_ms=(board.apart_ns - apart_ns()) / 1e6 if board.apart_ns else 0.0,
            longest_ms=board.longest_ms,
            trained_in=board.trained_in,
        )

    def close(self) -> None:
        """Free what belonged to it. Nobody may wait for its pidfd any more."""
        for descriptor in (self.board.fd, self.board.bell):
            os.close(descriptor)
        if self._starvation is not None:
            self._starvation.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _effort(board: Board, starved_ns: int) -> Effort | None:
    """Where the time of a worker went, as its board shows it. ``starved_ns``: of its main thread, in all."""
    spent = board.spent
    if spent is None:
        return None
    times_ms = (spent_ns / 1e6 for spent_ns in (*spent[2:], starved_ns))
    return Effort(spent.steps, spent.shards, *times_ms)
