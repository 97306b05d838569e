"""Connections: messages are ordered within a connection, and can be lost with it at any moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulation.engine import Engine, Process

CLIENT, SERVER = 0, 1
#: A kernel that has nothing to send acknowledges so much later.
_DELAYED_S = 0.04
#: The site of the coordinator; the other sites have the names of nodes.
COORDINATOR = "coordinator"


class Line:
    """A TCP connection between two processes.

    Args:
        latency_s: shortest and longest time that a message takes.
        severed: returns whether the network lets nothing through to this end now.
    """

    def __init__(
        self,
        engine: Engine,
        client: Process,
        server: Process,
        latency_s: tuple[float, float],
        severed: Callable[[int], bool] = lambda to: False,
    ) -> None:
        self._engine, self._ends = engine, (client, server)
        self.latency_s, self._severed = latency_s, severed
        self._held: tuple[list[Any], list[Any]] = (
            [],
            [],
        )  # to each end: TCP sends it again when the network heals
        self._hear: list[Callable[[Any], None] | None] = [None, None]
        self._end: list[Callable[[], None] | None] = [None, None]
        self._arrival_s = [0.0, 0.0]  # of the last message to each end
        self._broken = False
        self._closed = [False, False]
        self._acknowledged = False
        for side, process in enumerate(self._ends):
            process.ends.append(lambda side=side: self._die(side))

    def bind(self, side: int, hear: Callable[[Any], None], end: Callable[[], None]) -> None:
        """Set the functions that ``side`` calls for a message and for the end of the stream."""
        self._hear[side], self._end[side] = hear, end

    def send(self, side: int, message: Any) -> None:
        """Send a message from ``side`` to the other side."""
        if not (self._broken or self._closed[side]):
            self._post(1 - side, self._arrive, 1 - side, message)

    def close(self, side: int) -> None:
        """Close the connection at ``side``.

        The other end notices that after all earlier messages.
        """
        if not self._closed[side]:
            self._closed[side] = True
            if not self._broken:
                self._post(1 - side, self._finish, 1 - side)

    def cut(self) -> None:
        """Break the connection.

        Messages on the way are lost; each end notices that in its own time.
        """
        if not self._broken:
            self._broken = True
            for side in (CLIENT, SERVER):
                self._engine.after(self._engine.uniform(0.0001, 0.05), self._finish, side)

    def _die(self, side: int) -> None:
        """Close the connection of a process that ended.

        The kernel may or may not deliver what it still has.
        """
        if self._engine.random.random() < 0.5:
            self.close(side)
        elif not self._broken:
            self._closed[side] = self._broken = True
            self._post(1 - side, self._finish, 1 - side)

    def _latency(self) -> float:
        return self._engine.uniform(*self.latency_s)

    def release(self) -> None:
        """Send the held messages to each end that the network reaches again."""
        for to, held in enumerate(self._held):
            if held and not self._severed(to):
                waiting = held[:]
                held.clear()
                for act, arguments in waiting:
                    self._post(to, act, *arguments)

    def probe(self) -> None:
        """Send something from the server that only the kernel at the other end sees.

        It draws no random number, so that the other draws of a seed stay the same.
        """
        self._cross(CLIENT, self._acknowledge)

    def _acknowledge(self) -> None:
        if not self._ends[CLIENT].paused:
            self._engine.after(_DELAYED_S, self._cross, SERVER, self._note_acknowledged)

    def _note_acknowledged(self) -> None:
        self._acknowledged = True

    def _cross(self, to: int, act: Callable[[], None]) -> None:
        if not (self._broken or self._severed(to)):  # else it would arrive too late to matter
            self._engine.after(self.latency_s[1], act)

    def take_acknowledged(self) -> bool:
        """Return whether an acknowledgement has come since the last call."""
        acknowledged, self._acknowledged = self._acknowledged, False
        return acknowledged

    def client_alive(self) -> bool:
        """Return whether the client process lives, as a kernel on the same host knows."""
        return self._ends[CLIENT].alive

    def _post(self, to: int, act: Callable[..., None], *arguments: Any) -> None:
        if self._held[to] or self._severed(to):
            self._held[to].append((act, arguments))
            return
        now_s = self._engine.now_s
        self._arrival_s[to] = max(self._arrival_s[to], now_s + self._latency())
        self._engine.after(self._arrival_s[to] - now_s, act, *arguments)

    def _arrive(self, side: int, message: Any) -> None:
        if not self._broken:
            self._ends[side].run(self._hand_over, side, message)

    def _hand_over(self, side: int, message: Any) -> None:
        hear = self._hear[side]
        if hear is not None and not self._closed[side]:
            hear(message)

    def _finish(self, side: int) -> None:
        self._ends[side].run(self._report_end, side)

    def _report_end(self, side: int) -> None:
        end, self._end[side] = self._end[side], None
        if end is not None and not self._closed[side]:
            self._closed[side] = True
            end()
