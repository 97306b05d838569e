"""Tests of the messages that observers of a coordinator get, and of observers that do not read."""

from __future__ import annotations

import contextlib
import itertools
import socket
from pathlib import Path
from typing import Any

import pytest
from support.nodes.coordinators import CoordinatorProcess, serving
from support.waiting import LIMIT_S, wait_until

from chaoskit.coordinator.observers import ObserverPace
from chaoskit.errors import Refused
from chaoskit.wire import frames
from chaoskit.wire.messages import (
    AgentHello,
    Beat,
    GroupBroken,
    Heard,
    Heartbeat,
    ObserverHello,
    Welcome,
)

BEAT_S = 0.04
#: Far more than the buffers of two sockets hold.
UNREAD_BYTES = 2**25
LARGE = tuple(Beat(f"node0.{number}", 1, 0, 1, 1, 1.0, 0.0, 1, 0.0) for number in range(500))


def shown_s(heartbeat_s: float, until_s: float, *events_s: float) -> list[float]:
    """Return the times of shown heartbeats of a node, which come every 40 ms, with events at
    ``events_s``.
    """
    pace, shown, coming = ObserverPace(heartbeat_s), [], sorted(events_s)
    for number in range(round(until_s / BEAT_S)):
        now_s = number * BEAT_S
        while coming and coming[0] <= now_s:
            assert pace.shows(GroupBroken("a.0", 1, ""), coming.pop(0))
        if pace.shows(Heartbeat("a", ()), now_s):
            shown.append(now_s)
    return shown


def test_an_observer_is_shown_heartbeats_at_its_own_rate() -> None:
    gaps = [later - earlier for earlier, later in itertools.pairwise(shown_s(0.25, 10.0))]
    assert min(gaps) >= 0.25
    assert max(gaps) <= 0.25 + BEAT_S
    assert len(shown_s(0.0, 10.0)) == 250, "all of them"


def test_each_node_has_a_rate_of_its_own() -> None:
    pace = ObserverPace(1.0)
    assert [pace.shows(Heartbeat(node, ()), 0.0) for node in ("a", "b", "a")] == [True, True, False]


def test_when_something_happens_every_heartbeat_is_shown() -> None:
    """An observer then measures times, such as that of a recovery."""
    shown = shown_s(0.25, 10.0, 5.0)
    assert len([time_s for time_s in shown if 5.0 <= time_s < 7.0]) == 50
    assert len([time_s for time_s in shown if time_s < 5.0]) <= 20
    assert len([time_s for time_s in shown if time_s >= 7.0]) <= 12


@pytest.mark.parametrize("heartbeat_s", [-1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(heartbeat_s: float) -> None:
    frame = frames.encode(ObserverHello(heartbeat_s))
    with pytest.raises(Refused):
        frames.FrameSplitter().feed(frame)


class Agent:
    """A node that sends messages, and knows when they were received."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self._line = coordinator.connect(AgentHello("node0", "host", 1))
        assert isinstance(frames.receive(self._line), Welcome)
        self._count = 0

    def say(self, *said: Any) -> None:
        for message in said:
            frames.send(self._line, message)

    def await_answer(self) -> None:
        """Wait until the coordinator has received all messages."""
        self._line.settimeout(0.1)
        first = self._count = self._count + 1
        splitter, answers = frames.FrameSplitter(), []

        def is_answered() -> bool:
            self.say(Heartbeat("node0", (), self._count))
            self._count += 1
            try:
                answers.extend(splitter.feed(self._line.recv(65536)))
            except TimeoutError:
                return False
            return any(isinstance(answer, Heard) and answer.sent_ns >= first for answer in answers)

        wait_until(is_answered, "an answer")
        self._line.settimeout(LIMIT_S)


def read_until(line: socket.socket, enough: int, kind: type[Any]) -> list[Any]:
    """Return this many messages of a kind, or those until the connection ends."""
    messages: list[Any] = []
    try:
        while len(messages) < enough:
            message = frames.receive(line)
            messages += [message] if isinstance(message, kind) else []
    except ConnectionError:
        pass
    return messages


def test_an_observer_that_does_not_read_is_spared_heartbeats(tmp_path: Path) -> None:
    """An observer gets the next heartbeats when it reads again, and everything else."""
    with serving(tmp_path) as coordinator:
        observer, agent = coordinator.connect(ObserverHello()), Agent(coordinator)
        large = Heartbeat("node0", LARGE)
        count = UNREAD_BYTES // len(frames.encode(large))
        agent.say(*(large for _ in range(count)))
        agent.await_answer()
        agent.say(GroupBroken("node0.0", 1, "the end"))
        agent.await_answer()
        shown = 0
        while not isinstance(message := frames.receive(observer), GroupBroken):
            shown += isinstance(message, Heartbeat) and bool(message.beats)
        assert 0 < shown < count / 2


def test_an_observer_may_change_its_rate(tmp_path: Path) -> None:
    """A second greeting asks for it: from then on it gets a heartbeat of each node now and then."""
    with serving(tmp_path) as coordinator:
        observer, agent = coordinator.connect(ObserverHello()), Agent(coordinator)
        observer.setblocking(False)
        splitter = frames.FrameSplitter()

        def count_shown() -> int:
            agent.say(*(Heartbeat("node0", ()) for _ in range(100)))
            agent.await_answer()
            data = b""
            with contextlib.suppress(BlockingIOError):
                while piece := observer.recv(65536):
                    data += piece
            return len(
                [message for message in splitter.feed(data) if isinstance(message, Heartbeat)]
            )

        assert count_shown() >= 100
        frames.send(observer, ObserverHello(LIMIT_S))
        wait_until(lambda: count_shown() <= 2, "few heartbeats")


def test_an_observer_that_does_not_read_is_disconnected(tmp_path: Path) -> None:
    """Messages that it must not miss are kept for it, but not without end. Others go on."""
    with serving(tmp_path) as coordinator:
        stopped, agent = coordinator.connect(ObserverHello()), Agent(coordinator)
        count = 32
        large = GroupBroken("node0.0", 1, "x" * (UNREAD_BYTES // count))
        agent.say(*(large for _ in range(count)))
        agent.await_answer()
        other = coordinator.connect(ObserverHello())
        assert read_until(other, 1, Welcome)
        assert len(read_until(stopped, count, GroupBroken)) < count
