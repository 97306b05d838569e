"""The line between the harness and workers or checkpoint daemons: real sockets, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from support.waiting import LIMIT_S

from chaoskit.experiment.injection.channel import InjectionChannel
from chaoskit.process.linux import await_readable
from chaoskit.wire.injection_line import dial
from chaoskit.wire.messages import (
    ArmTriggers,
    AskThread,
    DaemonAct,
    InjectionAct,
    ThreadAnswered,
    Trigger,
)


@contextlib.contextmanager
def channel(
    directory: Path, incoming: list[Any]
) -> Iterator[tuple[InjectionChannel, Callable[..., None]]]:
    """Yield an open channel, and a function that runs its loop until a condition holds."""
    planned = (Trigger("fault0", 1, 5, "reduce"),)
    with (
        asyncio.Runner() as runner,
        contextlib.closing(InjectionChannel(directory, planned)) as opened,
    ):

        async def until(condition: Callable[[], object]) -> None:
            deadline_s = time.monotonic() + LIMIT_S
            while not condition():
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.002)

        async def open_it() -> None:
            opened.open(incoming.append)

        runner.run(open_it())
        yield opened, lambda condition: runner.run(until(condition))


def test_a_line_is_armed_heard_and_told(tmp_path: Path) -> None:
    incoming: list[Any] = []
    with channel(tmp_path, incoming) as (opened, let):
        opened.arm_node("node1", Trigger("fault1", -1, -1, "load"))
        line, other = dial(opened.door, "node1", "node1.0"), dial(opened.door, "node2")
        assert line is not None
        assert other is not None
        let(lambda: await_readable([line.fileno()], 0.0))
        armed = line.receive()
        assert isinstance(armed, ArmTriggers)
        assert [trigger.fault for trigger in armed.triggers] == ["fault0", "fault1"]
        line.send(ThreadAnswered("node1.0", 3))
        let(lambda: incoming)
        assert incoming == [ThreadAnswered("node1.0", 3)]
        let(
            lambda: opened.tell(
                "node2", DaemonAct("fault0", InjectionAct("break", {"place": "write"}))
            )
        )
        order = other.receive()
        assert isinstance(order, DaemonAct)
        assert not opened.tell("node1", AskThread(1), "node1.9"), "there is no such worker"
    assert line.receive() is None, "it hung up at its end"
    assert not (tmp_path / "injection").exists()


def test_a_line_without_the_token_is_not_heard(tmp_path: Path) -> None:
    """The socket belongs to this user alone, and a client must know the token, too."""
    incoming: list[Any] = []
    with channel(tmp_path, incoming) as (opened, let):
        assert (tmp_path / "injection").stat().st_mode & 0o777 == 0o600
        wrong = dial(msgspec.structs.replace(opened.door, token="guessed"), "node1", "node1.0")
        early = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        early.connect(str(tmp_path / "injection"))
        early.send(msgspec.json.encode(ThreadAnswered("node1.0", 3)))
        assert wrong is not None
        let(lambda: await_readable([wrong.fileno()], 0.0) and await_readable([early.fileno()], 0.0))
        assert wrong.receive() is None
        assert early.recv(100) == b""
        early.close()
    assert incoming == []


def test_a_plan_of_a_thousand_triggers_arrives_whole(tmp_path: Path) -> None:
    """The plan takes several messages, of which the last is marked as the last."""
    planned = tuple(Trigger(f"fault{number}", 1, number, "reduce") for number in range(1000))
    with (
        asyncio.Runner() as runner,
        contextlib.closing(InjectionChannel(tmp_path, planned)) as opened,
    ):

        async def armed() -> list[ArmTriggers]:
            opened.open(lambda report: None)
            line = dial(opened.door, "node1", "node1.0")
            assert line is not None
            messages: list[ArmTriggers] = []
            while not messages or messages[-1].more:
                await asyncio.sleep(0.001)
                while await_readable([line.fileno()], 0.0):
                    messages.append(line.receive())
            line.close()
            return messages

        parts = runner.run(armed())
    assert [trigger for part in parts for trigger in part.triggers] == [*planned]
    assert len(parts) > 1
