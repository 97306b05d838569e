"""Connections: ordered within one, in any order between two, and lost at any moment with all that is on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulation.engine import Engine, Process

CLIENT, SERVER = 0, 1
#: A kernel that has nothing to send acknowledges so much later.
_DELAYED_S = 0.04
#: The site of the coordinator; the others bear the names of nodes.
COORDINATOR = "coordinator"


class Line:
    """A TCP connection between two processes.

    Args:
        latency_s: shortest and longest time that a message takes.
        severed: whether nothing comes through to this end now.
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
        """What the process at ``side`` does with a message, and with the end of the stream."""
        self._hear[side], self._end[side] = hear, end

    def send(self, side: int, message: Any) -> None:
        """From ``side`` to the other one."""
        if not (self._broken or self._closed[side]):
            self._post(1 - side, self._arrive, 1 - side, message)

    def close(self, side: int) -> None:
        """The other end hears of it after all that was sent before."""
        if not self._closed[side]:
            self._closed[side] = True
            if not self._broken:
                self._post(1 - side, self._finish, 1 - side)

    def cut(self) -> None:
        """The connection breaks: what is on the way is lost, and each end hears of it in its own time."""
        if not self._broken:
            self._broken = True
            for side in (CLIENT, SERVER):
                self._engine.after(self._engine.uniform(0.0001, 0.05), self._finish, side)

    def _die(self, side: int) -> None:
        """The process at ``side`` ended: the kernel says so, and may or may not deliver what it still has."""
        if self._engine.random.random() < 0.5:
            self.close(side)
        elif not self._broken:
            self._closed[side] = self._broken = True
            self._post(1 - side, self._finish, 1 - side)

    def _latency(self) -> float:
        return self._engine.uniform(*self.latency_s)

    def release(self) -> None:
        """The network may have healed."""
        for to, held in enumerate(self._held):
            if held and not self._severed(to):
                waiting = held[:]
                held.clear()
                for act, arguments in waiting:
                    self._post(to, act, *arguments)

    def probe(self) -> None:
        """The server sends something that only the kernel at the other end sees. Draws nothing: the seed's own draws
        stay what they were."""
        self._cross(CLIENT, self._acknowledge)

    def _acknowledge(self) -> None:
        if not self._ends[CLIENT].paused:
            self._engine.after(_DELAYED_S, self._cross, SERVER, self._note_acknowledged)

    def _note_acknowledged(self) -> None:
        self._acknowledged = True

    def _cross(self, to: int, act: Callable[[], None]) -> None:
        if not (
            self._broken or self._severed(to)
        ):  # else it is sent again when it is not waited for any more
            self._engine.after(self.latency_s[1], act)

    def take_acknowledged(self) -> bool:
        """Whether an acknowledgement has come since this was last asked."""
        found, self._acknowledged = self._acknowledged, False
        return found

    def client_alive(self) -> bool:
        """What the kernel knows of the other process, on one host."""
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
