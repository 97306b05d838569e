"""The harness's side of a running command: reads its logs, strikes at each fault's moment, and gathers evidence."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaoskit.experiment.blackbox.plan import CommandExperiment, moment
from chaoskit.experiment.blackbox.rules import NodeLogs
from chaoskit.experiment.strike import GONE, Strike, Striker
from chaoskit.journal import Journal, JournalTail, read_events
from chaoskit.osprocess import describe_status, ended_by, is_ending, start_ticks
from chaoskit.rules.follow import LogFile
from chaoskit.stacks.log import LogReader
from chaoskit.stacks.ranks import Seat, seats
from chaoskit.substrate.bare import BareCluster
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event, RunEnd
from faults.base import Target

_LOOK_S = 0.005  # between two looks at the logs
_OBSERVE_S = 0.001  # while a fault has no evidence yet: a process that has ended can be asked for a moment only
_TELL_S = 0.05
_FRESH_S = 0.5  # within which a process that was struck is gone
_WITNESS_S = 2.0  # in which a warden, however busy the machine is, tells of a process that has a rank

Exit = tuple[str, str]  # ("exited", "status 0"), ("killed", "SIGKILL")

GOOD: Exit = ("exited", "status 0")


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


class CommandConductor(Striker):
    """Watches over one run of a command.

    Attributes:
        exits: how the command ended, by node.
    """

    def __init__(
        self,
        experiment: CommandExperiment,
        cluster: BareCluster,
        directory: Path,
        journal: Journal,
        undo: UndoLog,
        watch: Callable[[Any], None],
    ) -> None:
        super().__init__(experiment.faults, journal)
        self._cluster, self._directory, self._undo, self._watch = cluster, directory, undo, watch
        self._logs = {node: LogFile(cluster.log(node)) for node in cluster.nodes}
        self.reader = LogReader(experiment.watch)
        self._rules = NodeLogs(experiment.rules, cluster.nodes, journal, time.monotonic())
        self.exits: dict[str, Exit] = {}
        self._roots: dict[int, Exit] = {}  # the same by pid
        self._ranks: dict[str, int] = {}  # of the processes that were struck
        self._nodes_say = JournalTail(directory / "journal", without=[Event.LOGGED])
        self._found: set[tuple[str, int]] = set()  # node, pid: processes of which their nodes said that they have ranks
        self._loss: float | None = None
        self._told_s = 0.0

    def conduct(self, deadline_s: float) -> bool:
        """Until the command has ended on every node; False when the deadline (monotonic clock) passed first."""
        over = False
        while not over and time.monotonic() < deadline_s:
            over = self._look_at_nodes()
            self._read_logs(to_the_end=over)  # after the look: all that a node wrote before its end
            self._tell()
            self._strike_due()
            self._go_on()
            self._look_at_targets(over)
            if not over:
                time.sleep(_OBSERVE_S if any(strike.awaits_evidence for strike in self.strikes) else _LOOK_S)
        self._look_at_targets(over=True)  # at those that were struck just before the deadline
        self._sum_up()
        self._explain_missed()
        self.run_end = RunEnd.ENDED if over else RunEnd.DEADLINE
        return over

    def _place_of(self, worker: str) -> dict[str, Any]:
        node, _, pid = worker.rpartition(".")
        return {"rank": self._ranks.get(worker), "node": node, "pid": int(pid), "generation": None}

    def close(self) -> None:
        """Let go of the logs."""
        for log in self._logs.values():
            log.close()

    # -- what can be seen -------------------------------------------------------------------------------------------

    def _look_at_nodes(self) -> bool:
        """Note how commands have ended. Whether all have."""
        for node in self._cluster.nodes:
            if node in self.exits or not self._cluster.is_over(node):
                continue
            ended = read_events(self._directory / "journal", Event.COMMAND_EXITED)
            ends = [one for one in ended if one.source == node]
            self.exits[node] = (ends[-1]["how"], ends[-1]["status"]) if ends else ("lost", "its end was not seen")
            self._roots |= {one["pid"]: (one["how"], one["status"]) for one in ends}
        return len(self.exits) == len(self._cluster.nodes)

    def _read_logs(self, *, to_the_end: bool) -> None:
        """A part of each; all of it once nothing writes any more. Output without end must not hide the deadline."""
        for node, log in self._logs.items():
            while data := log.read():
                self._rules.feed(node, data, time.monotonic(), self.reader.highest)
                for line in self.reader.feed(node, data, time.monotonic_ns()):
                    self._loss = self._loss if line.loss is None else float(line.loss)
                    self._journal.write(Event.LOGGED, t_ns=line.t_ns, node=node, step=line.step, loss=line.loss)
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

    def _look_at_targets(self, over: bool) -> None:
        for strike in self.strikes:
            if strike.target is not None and not strike.missed:
                self._look_at_target(strike, strike.target, over)
        self._look_for_evidence()

    def _look_at_target(self, strike: Strike, target: Target, over: bool) -> None:
        """How a process that was struck has ended: the kernel tells it until its parent asks; a warden writes it down.

        Where neither does, it is known to be gone, as soon as a warden would have told more.
        """
        if strike.fault.whole_node or strike.effective_ns is not None:
            return
        status = ended_by(target.pid, target.ticks)
        if status is not None:
            target.exited = describe_status(status)
        elif target.pid in self._roots:
            target.exited = self._roots[target.pid]
        elif target.exited is None and (over or target.seconds_since > _FRESH_S):
            target.exited = GONE if start_ticks(target.pid) != target.ticks else None

    # -- the moment -------------------------------------------------------------------------------------------------

    def _strike_due(self) -> None:
        due = [strike for strike in self.strikes if not strike.struck and self._is_due(strike)]
        if not due or len(self.exits) == len(self._cluster.nodes):
            return
        found = seats({node: self._cluster.node(node) for node in self._cluster.nodes})
        for strike in due:
            assert isinstance(strike.fault.rank, int), "roles are drawn when a run is planned"
            seat = found.get(strike.fault.rank)
            if seat is None or self._is_doomed(seat) or not self._is_witnessed(seat):
                continue  # it may be started again: as soon as it is, it is struck
            target = self._target(strike, seat, found)
            self._ranks[target.worker] = seat.rank
            if self._inject(strike, target):
                self._write_down(strike)
                self._watch(FaultStruck(strike.fault_id))

    def _is_due(self, strike: Strike) -> bool:
        fault, reader = strike.fault, self.reader
        if fault.at_step is not None:
            return reader.highest is not None and reader.highest >= fault.at_step
        assert fault.after_s is not None, "checked when the run is planned"
        return reader.first_ns is not None and time.monotonic_ns() >= reader.first_ns + fault.after_s * 1e9

    def _is_doomed(self, seat: Seat) -> bool:
        """Whether it ends, or was struck a moment ago: the same end must not be evidence of two faults."""
        since_ns = time.monotonic_ns() - int(_FRESH_S * 1e9)
        name = _name(seat)
        claims = [strike.target.claims.get(name, 0) for strike in self.strikes if strike.target is not None]
        return is_ending(seat.process.pid) or any(struck_ns > since_ns for struck_ns in claims)

    def _is_witnessed(self, seat: Seat) -> bool:
        """Whether it is the process that has the rank, by the word of its node, too: that is waited for.

        A node that does not tell leaves the run unknown.
        """
        until_s, is_asked = time.monotonic() + _WITNESS_S, False
        self._hear_nodes()
        if not seat.told:
            return not self._found  # else it is a launcher, and its ranks are gone for now
        while time.monotonic() < until_s and not is_ending(seat.process.pid):
            if (seat.node, seat.process.pid) in self._found:
                return True
            if not is_asked:
                self._cluster.look_for_ranks(seat.node)
                is_asked = True
            time.sleep(_OBSERVE_S)
            self._hear_nodes()
        return not is_ending(seat.process.pid)

    def _hear_nodes(self) -> None:
        told = self._nodes_say.poll()
        self._found.update((one.source, one["pid"]) for one in told if one.event == Event.RANK_FOUND)

    def _target(self, strike: Strike, seat: Seat, found: dict[int, Seat]) -> Target:
        return Target(
            cluster=self._cluster,
            undo=self._undo,
            fault_id=strike.fault_id,
            worker=_name(seat),
            node=seat.node,
            rank=seat.rank,
            step=-1 if self.reader.highest is None else self.reader.highest,
            phase="",
            pid=seat.process.pid,
            tid=seat.process.pid,
            ticks=seat.process.ticks,
            places={rank: one.node for rank, one in found.items()},
            struck_nodes={seat.node},
        )

    def _explain_missed(self) -> None:
        for strike in self.strikes:
            if strike.struck:
                continue
            if self._is_due(strike):
                strike.missed = f"no process of rank {strike.fault.rank} was found {moment(strike.fault)}"
            else:
                shown = "no step" if self.reader.highest is None else f"step {self.reader.highest} at most"
                strike.missed = f"it was due {moment(strike.fault)}, and the log shows {shown}"


def _name(seat: Seat) -> str:
    return f"{seat.node}.{seat.process.pid}"
