"""The agent's handle of a worker: its process, its board, and the connection to it.

-> agent/agent.py starts the worker through runtime/worker/zygote.py, and notices its end.
process/progress_board.py: the board; runtime/worker/process.py: the other end of the connection.
"""

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
from chaoskit.process.linux import Starvation
from chaoskit.process.progress_board import Board
from chaoskit.wire import frames, messages
from chaoskit.wire.messages import Beat, Effort


@dataclass
class WorkerHandle:
    """A worker of this node, from the order to start it until its end was detected.

    Attributes:
        name: the name of the worker.
        board: its progress board.
        connection: the agent's end of the connection to it.
        standstill: meter of the pauses of this agent.
        pid: its process; 0 before it is forked.
        pidfd: descriptor of the process; -1 for none.
        writer: the connection for asyncio; None before it is open.
        lost: its loss is reported or ordered, so its messages and beats end.
        is_leaving: it has no rank any more, but may run until its grace period is over.
        latched: its life latch broke: none of its code runs any more.
        ended: set when its process has ended.
    """

    name: str
    board: Board
    connection: socket.socket
    standstill: Standstill
    pid: int = 0
    pidfd: int = -1
    writer: asyncio.StreamWriter | None = None
    lost: bool = False
    is_leaving: bool = False
    latched: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _starvation: Starvation | None = None
    _starved: tuple[int, int] = (0, 0)  # start of the phase, and starvation when first read

    @property
    def lingers(self) -> bool:
        """True if the process of a lost worker may still run code; False in a grace period."""
        return self.lost and bool(self.board.pid) and not self.latched and not self.is_leaving

    def send(self, message: messages.Message) -> None:
        """Send a message to the worker; drop it if the worker is lost or not connected yet."""
        if self.writer is not None and not self.lost:
            self.writer.write(frames.encode(message))

    def kill(self) -> None:
        """Kill the worker's process, if it has one, and mark the worker as lost."""
        self.lost, self.is_leaving = True, False
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def read(self) -> Beat:
        """Return a reading of its board, as part of a heartbeat.

        Time in which the agent itself was paused counts as time without a CPU, too.
        """
        board = self.board
        since_ns, phase, now_ns = board.since_ns, board.phase, time.monotonic_ns()
        if self._starvation is None and board.pid:
            self._starvation = Starvation(board.pid, board.tid)
        starved_ns = self._starvation.read_ns() if self._starvation is not None else 0
        if self._starved[0] != since_ns:
            self._starved = (since_ns, starved_ns)
        stood_ns = self.standstill.read_ns(since_ns, now_ns)
        return Beat(
            worker=self.name,
            generation=board.generation,
            rank=board.rank,
            step=board.step,
            phase=phase,
            age_ms=(now_ns - since_ns) / 1e6 if since_ns else 0.0,
            starved_ms=(starved_ns - self._starved[1] + stood_ns) / 1e6,
            commits=board.commits,
            loss=board.loss,
            rehearsal_ms=board.rehearsal_ms,
            effort=_effort(board, starved_ns),
            clock_ms=(board.apart_ns - apart_ns()) / 1e6 if board.apart_ns else 0.0,
            longest_ms=board.longest_ms,
            trained_in=board.trained_in,
        )

    def close(self) -> None:
        """Close its descriptors, except the connection. The loop must not watch the pidfd now."""
        for descriptor in (self.board.fd, self.board.bell):
            os.close(descriptor)
        if self._starvation is not None:
            self._starvation.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _effort(board: Board, starved_ns: int) -> Effort | None:
    """Return the distribution of a worker's time, from its board; None while that is inconsistent.

    Args:
        starved_ns: total time that its main thread had no CPU.
    """
    spent = board.spent
    if spent is None:
        return None
    times_ms = (spent_ns / 1e6 for spent_ns in (*spent[2:], starved_ns))
    return Effort(spent.steps, spent.shards, *times_ms)
