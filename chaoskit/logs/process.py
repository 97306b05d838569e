"""The process that matches the log rules of a node, beside its agent.

A user's pattern may take any time for a line, and holds the interpreter lock meanwhile. In the
agent that would delay heartbeats, and the node would be lost. The agent forks this process, which
ends with the agent. The agent requests one look after the other, each with the state of the
workers' boards. A rank is therefore never reported as hanging because this process is behind. If
the process ends by itself, the rules are off and nothing else is affected.

-> ``logs/watcher.py``: the rules on one log. ``rules/budget.py``: the time limit of a pattern.
-> ``coordinator/handlers/on_rule_fired.py``: what follows from a report.
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
from chaoskit.logs.watcher import LOOK_S, RankStanding, WatchedLog
from chaoskit.process.linux import die_of, die_with_parent, set_name
from chaoskit.process.progress_board import Board
from chaoskit.rules import RuleVerdict
from chaoskit.rules.budget import Budget
from chaoskit.wire import frames
from chaoskit.wire.messages import LinesMatched, Message, RuleFired

NAME = "ck-rules"
#: Pause between two looks, as a multiple of the last one's CPU time: at most a fifth of a core is
#: used.
_REST = 4.0


class LookAtLogs(Message, frozen=True):
    """Request to read further parts of the logs.

    Attributes:
        standings: worker -> its state, for all live workers.
    """

    standings: dict[str, RankStanding]


class Looked(Message, frozen=True):
    """Answer to a look.

    Attributes:
        reports: messages for the coordinator.
        cpu_s: CPU time that the look took.
    """

    reports: tuple[RuleFired | LinesMatched, ...]
    cpu_s: float


_decode = frames.decoder(LookAtLogs | Looked)


def start_log_process(
    node: str, rules: Sequence[LogRule], directory: Path, others: Sequence[socket.socket]
) -> tuple[socket.socket, int]:
    """Fork the process. Call this before this process has any other thread.

    Args:
        node: name of the node.
        rules: the rules on each log.
        directory: directory of the logs, ``WORKER.log`` for each worker.
        others: sockets of this process that the new one must close.

    Returns:
        This process's end of the connection, and the pid of the new process.
    """
    agent_end, process_end = socket.socketpair()
    agent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        for inherited in (agent_end, *others):
            inherited.close()
        _run(process_end, node, rules, directory, agent_pid)
    process_end.close()
    return agent_end, pid


def _run(
    connection: socket.socket, node: str, rules: Sequence[LogRule], directory: Path, agent_pid: int
) -> None:
    """Serve requests until the agent is gone. Does not return."""
    try:
        die_with_parent(agent_pid)
        set_name(NAME)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Budget() as budget:
            logs = NodeLogs(node, rules, directory, budget)
            while True:
                request = frames.receive(connection, _decode)
                begun_s = time.process_time()
                reports = logs.look(request.standings, time.monotonic())
                frames.send(connection, Looked(tuple(reports), time.process_time() - begun_s))
    except ConnectionError:
        pass  # the agent has ended
    except BaseException as error:  # noqa: BLE001 - a forked child must end here, whatever happened
        die_of(error)
    os._exit(0)


class NodeLogs:
    """The rules on all logs of a node.

    A rule that is too slow on one of them is switched off on all.

    Args:
        node: name of the node.
        rules: the rules on each log.
        directory: directory of the logs, ``WORKER.log`` for each worker.
        budget: CPU time that a pattern may take for a line.
    """

    def __init__(
        self, node: str, rules: Sequence[LogRule], directory: Path, budget: Budget
    ) -> None:
        self._node, self._rules, self._directory, self._budget = node, rules, directory, budget
        self._switched_off: set[str] = set()
        self._logs: dict[str, WatchedLog] = {}

    def look(
        self, standings: dict[str, RankStanding], now_s: float
    ) -> list[RuleFired | LinesMatched]:
        """Read the new parts of these workers' logs, and close all other logs.

        Return the reports for the coordinator. The file of a new worker is opened when it exists.

        Args:
            standings: state of each live worker, by its name.
            now_s: present time on the monotonic clock.
        """
        for worker in self._logs.keys() - standings:
            self._logs.pop(worker).close()
        reports: list[RuleFired | LinesMatched] = []
        for worker, standing in standings.items():
            if worker not in self._logs:
                path = self._directory / f"{worker}.log"
                log = WatchedLog(
                    worker,
                    self._node,
                    self._rules,
                    path,
                    now_s,
                    budget=self._budget,
                    switched_off=self._switched_off,
                )
                self._logs[worker] = log
            reports += self._logs[worker].look(now_s, standing)
        return reports


class LogLine:
    """The agent's end of the connection, which requests looks repeatedly.

    Args:
        node: name of the node.
        rules: the rules, for the report of their end.
        connection: from :func:`start_log_process`.
        boards: returns the boards of live workers, by name.
        send: called with each report.
    """

    def __init__(
        self,
        node: str,
        rules: Sequence[LogRule],
        connection: socket.socket,
        boards: Callable[[], Iterable[tuple[str, Board]]],
        send: Callable[[Message], None],
    ) -> None:
        self._node, self._rules, self._connection = node, rules, connection
        self._boards, self._send = boards, send

    async def run(self) -> None:
        """Request looks and send their reports, until cancelled or until the process has ended.

        The end of the process is reported as rules that are switched off.
        """
        reader, writer = await asyncio.open_connection(sock=self._connection)
        try:
            while True:
                writer.write(
                    frames.encode(
                        LookAtLogs(
                            {worker: RankStanding.of(board) for worker, board in self._boards()}
                        )
                    )
                )
                looked = await frames.read_message(reader, _decode)
                for report in looked.reports:
                    self._send(report)
                await asyncio.sleep(max(LOOK_S, _REST * looked.cpu_s))
        except ConnectionError:
            self._send(self._ended())
        finally:
            writer.close()

    def _ended(self) -> RuleFired:
        """Return the report that all rules are switched off on this node."""
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
