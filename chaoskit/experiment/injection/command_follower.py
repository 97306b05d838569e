"""The harness's side of a running command: reads its logs, and knows when the moment of each fault has come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaoskit.experiment.injection.command_rules import NodeLogs
from chaoskit.experiment.injection.injection import Injection, InjectionState
from chaoskit.experiment.injection.injector import GONE, Injector
from chaoskit.experiment.injection.ranks_found import variable_of
from chaoskit.experiment.plan.command_plan import CommandExperiment, moment
from chaoskit.faults.target import Exit, Target
from chaoskit.journal import Journal, JournalTail, read_events
from chaoskit.process.linux import DirectoryWatch, describe_status, ended_by, start_ticks
from chaoskit.rules.follow import LogFile
from chaoskit.stacks.log import LogReader
from chaoskit.stacks.ranks import Seat, seats
from chaoskit.substrate.core.base import CommandCluster
from chaoskit.substrate.core.launched_ranks import VARIABLES, strength
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event, RunEnd

_LOOK_S = 0.005  # between two looks at logs that grow
_IDLE_S = 0.1  # between two looks where nothing happens: rules tell of silence
_OVER_S = 1.0  # the same without rules, once every fault has acted
_TELL_S = 0.05
_FRESH_S = 0.5  # within which a process that was struck is gone
_WITNESS_S = (
    2.0  # in which a warden, however busy the machine is, tells of a process that has a rank
)

GOOD = Exit("exited", "status 0")

#: What a user does whose ranks cannot be told from their environment.
NO_VARIABLE = (
    f"no process was started with a variable that tells its rank ({', '.join(VARIABLES)}): "
    "start the ranks by torchrun, or set RANK in the environment of each before it starts, "
    "which torch.multiprocessing.spawn cannot do"
)


@dataclass(frozen=True, slots=True)
class LogRead:
    """For live views: what the logs have shown so far, and on how many of all nodes the command still runs."""

    step: int | None
    loss: float | None
    running: int
    nodes: int


@dataclass(frozen=True, slots=True)
class FaultStruck:
    """For live views: a fault strikes."""

    fault: str


class CommandFollower:
    """Follows one run of a command until it ends on every node, and has its faults act.

    Attributes:
        injections: one for each fault, in the order of the plan.
        exits: how the command ended, by node.
        run_end: why the run was over.
    """

    def __init__(
        self,
        experiment: CommandExperiment,
        cluster: CommandCluster,
        directory: Path,
        journal: Journal,
        undo: UndoLog,
        watch: Callable[[Any], None],
    ) -> None:
        self._cluster, self._directory, self._undo, self._watch = cluster, directory, undo, watch
        self._journal = journal
        self._stalled_s = experiment.stalled_s
        self._logs = {node: LogFile(cluster.log(node)) for node in cluster.nodes}
        self.reader = LogReader(experiment.watch)
        self._rules = NodeLogs(experiment.rules, cluster.nodes, journal, time.monotonic())
        self.exits: dict[str, Exit] = {}
        self._roots: dict[int, Exit] = {}  # the same by pid
        self._ranks: dict[str, int] = {}  # of the processes that were struck
        self._nodes_say = JournalTail(directory / "journal", without=[Event.LOGGED])
        self._found: dict[
            tuple[str, int], str
        ] = {}  # node, pid of a rank, by its node -> the variable that tells it
        self._asked_s: dict[tuple[str, int], float] = {}  # the same, of which they were asked: when
        named = [fault.rank for fault in experiment.faults if isinstance(fault.rank, int)]
        self._one_a_node = max([experiment.ranks, *(rank + 1 for rank in named)]) <= len(
            cluster.nodes
        )
        self._loss: float | None = None
        self._told_s = self._looked_s = 0.0
        self._woken = asyncio.Event()
        self._following: asyncio.Task[Any] | None = None
        self._injector = Injector(experiment.faults, journal, self._place_of, self._woken.set)
        self.injections = self._injector.injections
        self.tell_missed = self._injector.tell_missed
        self.run_end = RunEnd.HARNESS

    async def follow(self, deadline_s: float) -> bool:
        """Follow the command until it has ended on every node; return whether it has.

        It is not waited for when the deadline (monotonic clock) has passed, or when its log has stalled.

        Raises:
            HarnessError: if a fault could not act.
        """
        self._following = asyncio.current_task()
        over = stalled = False
        with contextlib.ExitStack() as opened:
            watched = {
                self._directory / "journal",
                *(log.path.parent for log in self._logs.values()),
            }
            for directory in watched:
                directory.mkdir(
                    parents=True, exist_ok=True
                )  # else the first node to write makes it
            changes = DirectoryWatch(watched)
            opened.callback(changes.close)
            self._wake_by(changes.fileno(), opened)
            for node in self._cluster.nodes:
                self._wake_at_end_of(self._cluster.root(node).pid, opened)
            while True:
                self._woken.clear()
                changes.clear()
                self._looked_s = time.monotonic()
                over = self._look_at_nodes()
                self._read_logs(
                    to_the_end=over
                )  # after the look: all that a node wrote before its end
                self._tell()
                self._strike_due(opened)
                if changes.changed() - {
                    self._directory / "journal" / "harness.jsonl"
                }:  # it was written just now
                    self._woken.set()
                await self._look_at_targets(over)
                stalled = not over and self._is_stalled()
                if over or stalled or time.monotonic() >= deadline_s:
                    break
                await self._next_change(deadline_s)
        await self._look_at_targets(over=True)  # at those that were struck just before the deadline
        await self._injector.end()
        self._explain_missed()
        self.run_end = RunEnd.ENDED if over else RunEnd.STALLED if stalled else RunEnd.DEADLINE
        return over

    def _is_stalled(self) -> bool:
        """Return whether the log has shown no step for as long as the plan allows."""
        last_ns = self.reader.last_ns
        if self._stalled_s is None or last_ns is None:
            return False
        return time.monotonic_ns() - last_ns >= self._stalled_s * 1e9

    async def close(self) -> None:
        """The run is over: put everything back, and let go of the logs."""
        if self._following is not None:
            self._following.cancel()
        await self._injector.close()
        for log in self._logs.values():
            log.close()

    def _wake_by(self, descriptor: int, opened: contextlib.ExitStack) -> None:
        """Look again whenever a descriptor is readable."""
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, self._woken.set)
        opened.callback(loop.remove_reader, descriptor)

    def _wake_at_end_of(self, pid: int, opened: contextlib.ExitStack) -> None:
        """Look again as soon as a process has ended: it can be asked for a moment only how it did."""
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        loop = asyncio.get_running_loop()

        def has_ended() -> None:
            loop.remove_reader(handle)
            self._woken.set()

        loop.add_reader(handle, has_ended)
        opened.callback(os.close, handle)
        opened.callback(loop.remove_reader, handle)

    async def _next_change(self, deadline_s: float) -> None:
        """Wait until something may have changed, and a moment between two looks."""
        idle_s = _IDLE_S if self._looks_by_time() else _OVER_S
        wait_s = min(idle_s, max(0.0, deadline_s - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), wait_s)
        if (pause_s := self._looked_s + _LOOK_S - time.monotonic()) > 0:
            await asyncio.sleep(pause_s)

    def _looks_by_time(self) -> bool:
        """Return whether something is looked for of which no file and no end of a process tells."""
        ends_are_known = all(
            target.exit is not None or injection.fault.whole_node
            for injection, target in self._injector.in_force
        )
        return self._rules.are_set or not (self._injector.awaits_end and ends_are_known)

    def _place_of(self, worker: str) -> dict[str, Any]:
        node, _, pid = worker.rpartition(".")
        return {"rank": self._ranks.get(worker), "node": node, "pid": int(pid), "generation": None}

    # -- what can be seen -------------------------------------------------------------------------------------------

    def _look_at_nodes(self) -> bool:
        """Note how commands have ended. Whether all have."""
        for node in self._cluster.nodes:
            if node in self.exits or not self._cluster.is_over(node):
                continue
            ended = read_events(self._directory / "journal", Event.COMMAND_EXITED)
            ends = [one for one in ended if one.source == node]
            self.exits[node] = (
                Exit(ends[-1]["how"], ends[-1]["status"])
                if ends
                else Exit("lost", "its end was not seen")
            )
            self._roots |= {one["pid"]: Exit(one["how"], one["status"]) for one in ends}
            for _, target in self._injector.in_force:
                target.ended_well |= target.node == node and self.exits[node].how == "exited"
        return len(self.exits) == len(self._cluster.nodes)

    def _read_logs(self, *, to_the_end: bool) -> None:
        """A part of each; all of it once nothing writes any more. Output without end must not hide the deadline."""
        for node, log in self._logs.items():
            while data := log.read():
                self._rules.feed(node, data, time.monotonic(), self.reader.highest)
                for line in self.reader.feed(node, data, time.monotonic_ns()):
                    self._loss = self._loss if line.loss is None else float(line.loss)
                    self._journal.write(
                        Event.LOGGED, t_ns=line.t_ns, node=node, step=line.step, loss=line.loss
                    )
                if not to_the_end:
                    break
        running = [node for node in self._cluster.nodes if node not in self.exits]
        self._rules.tick(running, time.monotonic(), self.reader.highest)

    def _tell(self) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= _TELL_S:
            self._told_s = now_s
            nodes = len(self._cluster.nodes)
            self._watch(LogRead(self.reader.highest, self._loss, nodes - len(self.exits), nodes))

    async def _look_at_targets(self, over: bool) -> None:
        """How processes that were struck have ended, before anything else is looked at."""
        await asyncio.sleep(0)  # what is due acts
        for injection, target in self._injector.in_force:
            if target.exit is None and not injection.fault.whole_node and target.injected_ns:
                self._look_at_target(target, over)
        await self._injector.settle()
        self._injector.check()

    def _look_at_target(self, target: Target, over: bool) -> None:
        """How a process that was struck has ended: the kernel tells it until its parent asks; a warden writes it down.

        Where neither does, it is known to be gone, as soon as a warden would have told more.
        """
        status = ended_by(target.pid, target.process.ticks)
        if status is not None:
            target.tell_exit(Exit(*describe_status(status)), time.monotonic_ns())
        elif target.pid in self._roots:
            target.tell_exit(self._roots[target.pid], time.monotonic_ns())
        elif (over or target.seconds_since > _FRESH_S) and start_ticks(
            target.pid
        ) != target.process.ticks:
            target.tell_exit(GONE, time.monotonic_ns())

    # -- the moment -------------------------------------------------------------------------------------------------

    def _strike_due(self, opened: contextlib.ExitStack) -> None:
        due = [one for one in self.injections if not one.is_struck and self._is_due(one)]
        if not due or len(self.exits) == len(self._cluster.nodes):
            return
        found = seats({node: self._cluster.node(node) for node in self._cluster.nodes})
        aimed: list[tuple[Injection, Target]] = []
        self._hear_nodes()
        for injection in due:
            assert isinstance(injection.fault.rank, int), "roles are drawn when a run is planned"
            seat = found.get(injection.fault.rank)
            if seat is None or any(target.worker == _name(seat) for _, target in aimed):
                continue  # it may be started again: as soon as it is, it is struck
            if self._injector.is_doomed(_name(seat), seat.process) or not self._is_witnessed(seat):
                continue
            if not (seat.variable or self._one_a_node or injection.fault.whole_node):
                continue  # the first process of a node is the launcher of several ranks
            aimed.append((injection, self._target(injection, seat, found)))
            self._ranks[_name(seat)] = seat.rank
            self._wake_at_end_of(seat.process.pid, opened)
        if aimed:
            self._injector.strike(aimed)
        for injection, _ in aimed:
            self._watch(FaultStruck(injection.fault_id))

    def _is_due(self, injection: Injection) -> bool:
        fault, reader = injection.fault, self.reader
        if fault.at_step is not None:
            return reader.highest is not None and reader.highest >= fault.at_step
        assert fault.after_s is not None, "checked when the run is planned"
        return (
            reader.first_ns is not None
            and time.monotonic_ns() >= reader.first_ns + fault.after_s * 1e9
        )

    def _is_witnessed(self, seat: Seat) -> bool:
        """Return whether the process has the rank by the word of its node, too: that is waited for.

        A node that does not tell leaves the run unknown.
        """
        strongest = min(map(strength, self._found.values()), default=strength(seat.variable))
        if strength(seat.variable) > strongest:
            return False  # it is a launcher, and its ranks are gone for now
        if not seat.variable:
            return True
        place, now_s = (seat.node, seat.process.pid), time.monotonic()
        if self._found.get(place) == seat.variable:
            return True
        if place not in self._asked_s:
            self._asked_s[place] = now_s
            self._cluster.look_for_ranks(seat.node)
        return now_s > self._asked_s[place] + _WITNESS_S

    def _hear_nodes(self) -> None:
        found = [record for record in self._nodes_say.poll() if record.event == Event.RANK_FOUND]
        self._found |= {(record.source, record["pid"]): variable_of(record) for record in found}

    def _target(self, injection: Injection, seat: Seat, found: dict[int, Seat]) -> Target:
        return Target(
            cluster=self._cluster,
            undo=self._undo,
            fault_id=injection.fault_id,
            worker=_name(seat),
            node=seat.node,
            rank=seat.rank,
            step=-1 if self.reader.highest is None else self.reader.highest,
            phase="",
            process=seat.process,
            tid=seat.process.pid,
            places={rank: one.node for rank, one in found.items()},
            struck_nodes={seat.node},
        )

    def _explain_missed(self) -> None:
        for injection in self.injections:
            if injection.state is not InjectionState.PLANNED:
                continue
            if self._is_due(injection):
                absent = (
                    f"no process of rank {injection.fault.rank} was found {moment(injection.fault)}"
                )
                injection.miss(absent if self._found else f"{absent}: {NO_VARIABLE}")
            else:
                shown = (
                    "no step"
                    if self.reader.highest is None
                    else f"step {self.reader.highest} at most"
                )
                injection.miss(f"it was due {moment(injection.fault)}, and the log shows {shown}")


def _name(seat: Seat) -> str:
    return f"{seat.node}.{seat.process.pid}"
