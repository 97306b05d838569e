"""Nodes of an attached run on this machine: a process with a rank, and a real hand, for each.

They need no cluster. A test writes their logs, and chooses what they refuse.

-> ``support/hand/pipes.py`` starts the hands.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from chaoskit.attach.hands.hand_kernel import HandKernel
from chaoskit.errors import NodeUnreachable
from chaoskit.experiment.injection.command_follower import CommandFollower
from chaoskit.experiment.plan.command_plan import CommandExperiment, RunningJob
from chaoskit.journal import Journal, Record, read_events
from chaoskit.rules.log_file import ArrivedPart
from chaoskit.stacks import LogPatterns
from chaoskit.substrate.cluster.without_coordinator import WithoutCoordinator
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.core.launched_ranks import LaunchedRank
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event
from faults.base import Fault
from support.hand.pipes import hand_on_processes
from support.waiting import LIMIT_S

PATTERNS = LogPatterns(step=r"step (\d+)")


class RankNode:
    """A node with one rank, and a hand.

    Attributes:
        process: the process of the rank.
        hand: the client of the hand.
        hand_process: the hand.
        kernel: the kernel of the node, by its hand.
    """

    def __init__(self, rank: int, ended: ExitStack) -> None:
        self._rank, self._ended = rank, ended
        self.hand, self.hand_process = ended.enter_context(hand_on_processes())
        self.kernel = HandKernel(lambda: self.hand, lambda: False)
        self.start()

    def start(self) -> None:
        """Start the process of the rank, as a launcher does after its end."""
        environment = {**os.environ, "RANK": str(self._rank)}
        self.process = subprocess.Popen(["sleep", "600"], env=environment)
        self._ended.callback(self.process.wait)
        self._ended.callback(self.process.kill)
        self.root = self.kernel.find(self.process.pid)

    def silence(self) -> None:
        """Stop the hand: its stream stays open, and nothing is answered."""
        self._ended.callback(self.answer)  # a stopped hand holds the processes that it has stopped
        self.hand_process.send_signal(signal.SIGSTOP)

    def answer(self) -> None:
        """Let the hand go on."""
        self.hand_process.send_signal(signal.SIGCONT)


class WrittenLog:
    """A log that a test writes, with the time at which each part arrived."""

    def __init__(self) -> None:
        self.parts: list[ArrivedPart] = []

    def read(self) -> Sequence[ArrivedPart]:
        parts, self.parts = self.parts, []
        return parts

    def close(self) -> None:
        """Do nothing."""


class HandCluster(WithoutCoordinator):
    """Nodes with ranks in the order of their names: ``llama-0`` has rank 0.

    Attributes:
        rank_nodes: the nodes by name.
        logs: their logs.
        spared: node -> the reason for which guard rails spare it.
        applying: called in place of each action.
        applied: the actions that were applied, each with its node.
    """

    port = 0
    interface = ""
    checkpoints = None
    paths: Mapping[str, str] = {}

    def __init__(self, count: int, directory: Path, ended: ExitStack) -> None:
        self.nodes = tuple(f"llama-{number}" for number in range(count))
        self.rank_nodes = {name: RankNode(number, ended) for number, name in enumerate(self.nodes)}
        self.logs = {name: WrittenLog() for name in self.nodes}
        self.spared: dict[str, str] = {}
        self.asked_to_spare: list[tuple[str, ...]] = []
        self.applying: Callable[[str, Action], Applied] | None = None
        self._directory = directory
        self._journals = {
            name: Journal(directory / "journal", name, role="place", node=name)
            for name in self.nodes
        }
        for journal in self._journals.values():
            ended.callback(journal.close)

    def show_step(self, step: int, *, node: str = "llama-0", ago_s: float = 0.0) -> None:
        """Let the log of a node show a step that arrived some seconds ago."""
        t_ns = time.monotonic_ns() - int(ago_s * 1e9)
        self.logs[node].parts.append(ArrivedPart(b"step %d\n" % step, t_ns))
        with self.log(node).open("ab") as file:  # wakes the follower
            file.write(b"step %d\n" % step)

    def node(self, node: str) -> list[Process]:
        rank_node = self.rank_nodes[node]
        return rank_node.kernel.tree(rank_node.root)

    def root(self, node: str) -> Process:
        return self.rank_nodes[node].root

    def ranks(self, node: str) -> Mapping[Process, LaunchedRank]:
        rank_node = self.rank_nodes[node]
        return rank_node.kernel.launched_ranks(rank_node.root)

    def look_for_ranks(self, node: str) -> None:
        for process, launched in self.ranks(node).items():
            self._journals[node].write(
                Event.RANK_FOUND,
                rank=launched.rank,
                pid=process.pid,
                ticks=process.ticks,
                variable=launched.variable,
            )

    def heard(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_over(self, node: str) -> bool:
        return False

    def log(self, node: str) -> Path:
        return self._directory / "log" / f"{node}.log"

    def open_log(self, node: str) -> WrittenLog:
        return self.logs[node]

    def why_aborted(self) -> str:
        return ""

    def why_spared(self, nodes: Sequence[str], actions: Any) -> str:
        self.asked_to_spare.append(tuple(nodes))
        return next((self.spared[node] for node in nodes if node in self.spared), "")

    def apply(self, node: str, action: Action) -> Applied:
        if self.applying is None:
            raise NodeUnreachable(f"{node} has no hand")
        return self.applying(node, action)

    def together(self, node: str) -> tuple[str, ...]:
        return (node,)


class FollowedRun:
    """A run on a :class:`HandCluster`, which a test advances.

    Attributes:
        cluster: the nodes.
        follower: the follower of the run.
    """

    def __init__(
        self, cluster: HandCluster, faults: Sequence[Fault], directory: Path, undo: UndoLog
    ) -> None:
        self.cluster, self._directory = cluster, directory
        experiment = CommandExperiment(
            name="llama",
            command=(),
            watch=PATTERNS,
            nodes=len(cluster.nodes),
            ranks=len(cluster.nodes),
            seed=0,
            faults=tuple(faults),
            working_directory="",
            deadline_s=LIMIT_S,
            running_job=RunningJob("statefulset/llama", "ml", 0.0),
        )
        self._journal = Journal(directory / "journal", "harness", role="harness")
        nodes: Any = cluster
        self.follower = CommandFollower(
            experiment, nodes, directory, self._journal, undo, lambda message: None
        )

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Let the run go on until a condition holds."""
        until_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < until_s, what
            await asyncio.sleep(0.005)

    def records(self, event: Event) -> list[Record]:
        """Return the records of the run that the harness has written so far."""
        return read_events(self._directory / "journal", event)

    async def drive(self, story: Callable[[FollowedRun], Any], deadline_s: float = LIMIT_S) -> bool:
        """Follow the run while a story of the test goes on, and end it with the story.

        Return True if the run ended by itself before.
        """
        follow = asyncio.create_task(self.follower.follow(time.monotonic() + deadline_s))
        acts = asyncio.create_task(story(self))
        try:
            await asyncio.wait([follow, acts], return_when=asyncio.FIRST_COMPLETED)
            if acts.done():
                acts.result()
            if not follow.done():
                follow.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                return await follow
            return False
        finally:
            acts.cancel()
            await self.follower.close()
            self._journal.close()


@contextlib.contextmanager
def followed_run(count: int, directory: Path, *faults: Fault) -> Iterator[FollowedRun]:
    """Start nodes with ranks and hands, and end all of them when the context ends."""
    with ExitStack() as ended, contextlib.closing(UndoLog()) as undo:
        yield FollowedRun(HandCluster(count, directory, ended), faults, directory, undo)
