"""The process that matches the log rules of a node, beside its agent.

A user's pattern may take any time for a line, and keeps the interpreter's lock meanwhile: in the agent that would hold
up heartbeats, and the node would be lost. The agent forks this process and ends with it. It asks for one look after the
other, and says what the boards of its workers show; so nobody is called hanging while this process is behind. When it
ends by itself the rules are off, and nothing else is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from chaoskit.logrule import LogRule
from chaoskit.logs.watcher import LOOK_S, Standing, WorkerLog
from chaoskit.process.heartbeat_page import Board
from chaoskit.process.linux import die_of, die_with_parent, set_name
from chaoskit.rules import RuleVerdict
from chaoskit.rules.budget import Budget
from chaoskit.wire import frames
from chaoskit.wire.messages import LinesMatched, Message, RuleFired

NAME = "ck-rules"
#: Between two looks so many times the CPU time that the last one took: at most a fifth of a core.
_REST = 4.0


class Look(Message, frozen=True):
    """Read on. ``standings``: of the workers that live."""

    standings: dict[str, Standing]


class Looked(Message, frozen=True):
    """The answer: what is to be told, and the CPU time that it took."""

    told: tuple[RuleFired | LinesMatched, ...]
    cpu_s: float


_decode = frames.decoder(Look | Looked)


def start_log_process(
    node: str, rules: Sequence[LogRule], directory: Path, others: Sequence[socket.socket]
) -> tuple[socket.socket, int]:
    """Fork the process. To be called before this one has any other thread.

    Args:
        directory: where ``WORKER.log`` is for each worker.
        others: sockets of this process, which that one must not hold open.

    Returns:
        Our end of the line to it, and its pid.
    """
    mine, theirs = socket.socketpair()
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        for one in (mine, *others):
            one.close()
        _run(theirs, node, rules, directory, me)
    theirs.close()
    return mine, pid


def _run(
    line: socket.socket, node: str, rules: Sequence[LogRule], directory: Path, agent_pid: int
) -> None:
    """The life of the process. Does not return."""
    try:
        die_with_parent(agent_pid)
        set_name(NAME)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Budget() as budget:
            logs = NodeLogs(node, rules, directory, budget)
            while True:
                order = frames.receive(line, _decode)
                begun_s = time.process_time()
                told = logs.look(order.standings, time.monotonic())
                frames.send(line, Looked(tuple(told), time.process_time() - begun_s))
    except ConnectionError:
        pass  # the agent is gone
    except BaseException as error:  # noqa: BLE001 - a forked child must end here, whatever happened
        die_of(error)
    os._exit(0)


class NodeLogs:
    """The rules on all logs of a node. A rule that is too slow on one of them is off on all.

    Args:
        directory: where ``WORKER.log`` is for each worker.
        budget: what a pattern may take for a line.
    """

    def __init__(
        self, node: str, rules: Sequence[LogRule], directory: Path, budget: Budget
    ) -> None:
        self._node, self._rules, self._directory, self._budget = node, rules, directory, budget
        self._off: set[str] = set()
        self._logs: dict[str, WorkerLog] = {}

    def look(self, standings: dict[str, Standing], now_s: float) -> list[RuleFired | LinesMatched]:
        """Read on in the logs of these workers, and forget all others. Returns what is to be told."""
        for worker in self._logs.keys() - standings:
            self._logs.pop(worker).close()
        told: list[RuleFired | LinesMatched] = []
        for worker, standing in standings.items():
            if worker not in self._logs:
                path = self._directory / f"{worker}.log"
                log = WorkerLog(
                    worker, self._node, self._rules, path, now_s, budget=self._budget, off=self._off
                )
                self._logs[worker] = log
            told += self._logs[worker].look(now_s, standing)
        return told


class LogLine:
    """The agent's end of the line: asks for looks, again and again.

    Args:
        connection: from :func:`start_log_process`.
        boards: of the workers that live, by name.
        tell: is given what is found.
    """

    def __init__(
        self,
        node: str,
        rules: Sequence[LogRule],
        connection: socket.socket,
        boards: Callable[[], Iterable[tuple[str, Board]]],
        tell: Callable[[Message], None],
    ) -> None:
        self._node, self._rules, self._connection = node, rules, connection
        self._boards, self._tell = boards, tell

    async def run(self) -> None:
        """Until it is cancelled, or the process has ended."""
        reader, writer = await asyncio.open_connection(sock=self._connection)
        try:
            while True:
                writer.write(
                    frames.encode(
                        Look({worker: Standing.of(board) for worker, board in self._boards()})
                    )
                )
                looked = await frames.read_message(reader, _decode)
                for message in looked.told:
                    self._tell(message)
                await asyncio.sleep(max(LOOK_S, _REST * looked.cpu_s))
        except ConnectionError:
            self._tell(self._ended())
        finally:
            writer.close()

    def _ended(self) -> RuleFired:
        """Without it no rule is looked at any more on this node."""
        return RuleFired(
            worker="",
            node=self._node,
            rank=-1,
            generation=0,
            since_step=0,
            step=0,
            rule=", ".join(rule.name for rule in self._rules),
            verdict=RuleVerdict.SWITCHED_OFF.value,
            action="alert",
            reason=f"the process that matches patterns on {self._node} has ended",
        )
