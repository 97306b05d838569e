"""The harness's side of a running command: read its logs, and strike each fault at its moment.

-> experiment/injection/injector.py: what happens when a fault strikes, and its evidence.
stacks/log.py: which lines show a step. stacks/ranks.py: which process has a rank.
experiment/run/command_run.py starts the command and ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chaoskit.errors import NodeUnreachable
from chaoskit.experiment.injection.command_rules import CommandLogs
from chaoskit.experiment.injection.injection import Injection, InjectionState
from chaoskit.experiment.injection.injector import GONE, Injector
from chaoskit.experiment.injection.observation import JobObservation
from chaoskit.experiment.injection.ranks_found import variable_of
from chaoskit.experiment.plan.command_plan import CommandExperiment, moment
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import NO_RANK
from chaoskit.faults.network.sides import named_ranks
from chaoskit.faults.target import ProcessExit, Target
from chaoskit.journal import Journal, JournalTail, read_events
from chaoskit.process.linux import DirectoryWatch, describe_status
from chaoskit.rules.log_file import ArrivedPart
from chaoskit.stacks.log import LogReader
from chaoskit.stacks.ranks import Seat, seats, seats_by_node
from chaoskit.substrate.core.base import CommandCluster
from chaoskit.substrate.core.launched_ranks import VARIABLES, LaunchedRank, strength
from chaoskit.substrate.core.processes import HOST, Process
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event, RunEnd
from chaoskit.wire.messages import Message

_POLL_S = 0.005  # pause between two reads of logs that grow
_IDLE_S = 0.1  # pause between two polls while nothing happens; log rules also react to silence
_QUIET_POLL_S = 1.0  # the same without rules, once every fault has acted
_REPORT_S = 0.05
_TRY_AGAIN_S = 0.5  # pause between two strikes of a fault whose node is not reached
_GONE_S = 0.5  # a process that was struck is gone within this time
# a command runner reports a process with a rank within this time, however busy the machine is
_WITNESS_S = 2.0

GOOD = ProcessExit("exited", "status 0")

#: Advice for a command whose processes do not show their ranks in the environment.
NO_VARIABLE = (
    f"no process was started with a variable that holds its rank ({', '.join(VARIABLES)}): "
    "start the ranks by torchrun, or set RANK in the environment of each before it starts, "
    "which torch.multiprocessing.spawn cannot do"
)


class LogRead(Message, frozen=True):
    """Live-view message: the progress that the logs of a command show.

    Attributes:
        step: the highest step so far; None before the first.
        loss: the newest loss; None before the first.
        running: the number of nodes on which the command still runs.
        nodes: the number of all nodes.
    """

    step: int | None
    loss: float | None
    running: int
    nodes: int


class FaultStruck(Message, frozen=True):
    """Live-view message: a fault strikes. ``fault`` is its name in messages and journals."""

    fault: str


class CommandFollower:
    """Follow one run of a command until it ends on every node, and strike its faults.

    Args:
        experiment: the plan of the run.
        cluster: the nodes on which the command runs.
        directory: the directory of the run.
        journal: the harness's journal.
        undo: receives the entries that undo faults if this process is killed.
        watch: receives each :class:`LogRead` and :class:`FaultStruck`.

    Attributes:
        injections: one injection for each fault, in the order of the plan.
        exits: node -> the end of its command; nodes on which it still runs are left out.
        run_end: the reason for the end of the run; ``RunEnd.HARNESS`` until it has ended in order.
        reader: the reader of the logs, with the counts of lines and steps so far.
        record_missed: writes a journal record of each fault that did not act.
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
        self._observation = (
            JobObservation(experiment.running_job.observe_s) if experiment.running_job else None
        )
        self._stalled_s = experiment.stalled_s
        self._logs = {node: cluster.open_log(node) for node in cluster.nodes}
        self.reader = LogReader(experiment.watch)
        self._rules = CommandLogs(experiment.rules, cluster.nodes, journal, time.monotonic())
        self.exits: dict[str, ProcessExit] = {}
        # (node, pid) of a command's process -> its end
        self._command_ends: dict[tuple[str, int], ProcessExit] = {}
        self._struck_ranks: dict[str, int] = {}  # name of a process that was struck -> its rank
        self._node_records = JournalTail(directory / "journal", without=[Event.LOGGED])
        # (node, pid, ticks) of a rank, as its node reports it -> the variable that shows the rank
        self._rank_variables: dict[tuple[str, int, int | None], str] = {}
        # (node, pid, ticks) -> when its node was asked to look for ranks
        self._requested_s: dict[tuple[str, int, int | None], float] = {}
        named_ranks = [fault.rank for fault in experiment.faults if isinstance(fault.rank, int)]
        self._has_one_rank_per_node = max(
            [experiment.ranks, *(rank + 1 for rank in named_ranks)]
        ) <= len(cluster.nodes)
        self._newest_loss: float | None = None
        self._first_step: int | None = None
        self._began_ns = 0
        self._reported_s = self._polled_s = 0.0
        self._woken = asyncio.Event()
        self._follow_task: asyncio.Task[Any] | None = None
        self._injector = Injector(
            experiment.faults,
            journal,
            self._place_of,
            self._woken.set,
            is_patient=self._observation is not None,
        )
        self._tried_s: dict[Injection, float] = {}  # when a fault struck last
        self.injections = self._injector.injections
        self.record_missed = self._injector.record_missed
        self.run_end = RunEnd.HARNESS

    async def follow(self, deadline_s: float) -> bool:
        """Follow the command until it has ended on every node, and strike its faults.

        Args:
            deadline_s: the time of the monotonic clock at which the wait ends.

        Returns:
            True if the command has ended on every node, or the running job was observed for long
            enough. :attr:`run_end` names the reason for the end.

        Raises:
            HarnessError: if a fault could not act.
            BadInput: if a fault refused its input.
        """
        self._follow_task, self._began_ns = asyncio.current_task(), time.monotonic_ns()
        run_end = None
        with self._cluster.heard(), contextlib.ExitStack() as cleanups:
            watched = {
                self._directory / "journal",
                *(self._cluster.log(node).parent for node in self._cluster.nodes),
            }
            for directory in watched:
                # the watch needs it before the first node creates it
                directory.mkdir(parents=True, exist_ok=True)
            changes = DirectoryWatch(watched)
            cleanups.callback(changes.close)
            self._wake_by(changes.fileno(), cleanups)
            for node in self._cluster.nodes if self._observation is None else ():
                self._wake_at_end_of(self._cluster.root(node), cleanups)
            while True:
                self._woken.clear()
                changes.clear()
                self._polled_s = time.monotonic()
                has_ended = self._poll_nodes()
                # after the nodes were polled: includes all that a node wrote before its end
                self._read_logs(to_the_end=has_ended)
                self._report_progress()
                self._strike_due(cleanups)
                # the harness wrote its own journal just now
                if changes.changed() - {self._directory / "journal" / "harness.jsonl"}:
                    self._woken.set()
                await self._poll_targets(has_ended)
                if run_end := RunEnd.ENDED if has_ended else self._reason_to_end(deadline_s):
                    break
                await self._next_change(deadline_s)
        await self._poll_targets(
            has_ended=True
        )  # targets that were struck just before the deadline
        await self._injector.end()
        self._explain_missed()
        self.run_end = run_end
        return run_end in (RunEnd.ENDED, RunEnd.OBSERVED)

    def _reason_to_end(self, deadline_s: float) -> RunEnd | None:
        """Return why the run ends although its command runs; None if it goes on."""
        if self._cluster.why_aborted():
            return RunEnd.ABORTED
        if self._observation is not None and self._is_observed(self._observation):
            return RunEnd.OBSERVED
        if self._is_stalled():
            return RunEnd.STALLED
        return RunEnd.DEADLINE if time.monotonic() >= deadline_s else None

    def _is_observed(self, observation: JobObservation) -> bool:
        """Return whether every fault has acted, and the job was observed for long enough since."""
        if not self._injector.awaits_end:
            return False
        acts_ns = [
            max(injection.target.acted_ns, injection.target.lifted_ns)
            for injection in self.injections
            if injection.target is not None
        ]
        # a pod that has time to end trains on until its end is seen
        acts_ns += [
            injection.evidence[0].observed_ns for injection in self.injections if injection.evidence
        ]
        return observation.is_over(max(acts_ns, default=self.reader.first_ns or 0))

    def _is_stalled(self) -> bool:
        """Return whether the log has shown no step for as long as the plan allows.

        False is returned if the plan has no such limit, and before the first step of a command.
        """
        last_ns = self.reader.last_ns
        if last_ns is None and self._observation is not None:
            last_ns = self._began_ns  # a job that runs already shows steps from the start
        if self._stalled_s is None or last_ns is None:
            return False
        return time.monotonic_ns() - last_ns >= self._stalled_s * 1e9

    async def close(self) -> None:
        """Undo all faults after the run, record the result, and close the logs."""
        if self._follow_task is not None:
            self._follow_task.cancel()
        await self._injector.close()
        for log in self._logs.values():
            log.close()

    def _wake_by(self, descriptor: int, cleanups: contextlib.ExitStack) -> None:
        """Wake the loop of :meth:`follow` whenever a descriptor is readable.

        Closing ``cleanups`` ends this.
        """
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, self._woken.set)
        cleanups.callback(loop.remove_reader, descriptor)

    def _wake_at_end_of(self, process: Process, cleanups: contextlib.ExitStack) -> None:
        """Wake the loop of :meth:`follow` when a process ends.

        Its exit status can be read only for a moment. Nothing happens if the process is gone, or
        runs on another machine: that node writes the end to its journal.
        """
        if process.kernel is not HOST:
            return
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        loop = asyncio.get_running_loop()

        def has_ended() -> None:
            loop.remove_reader(handle)
            self._woken.set()

        loop.add_reader(handle, has_ended)
        cleanups.callback(os.close, handle)
        cleanups.callback(loop.remove_reader, handle)

    async def _next_change(self, deadline_s: float) -> None:
        """Wait for a change of a file, the end of a process or the pause between two polls.

        The deadline ends the wait, too. Two polls are at least ``_POLL_S`` seconds apart.
        """
        idle_s = _IDLE_S if self._needs_polling() else _QUIET_POLL_S
        wait_s = min(idle_s, max(0.0, deadline_s - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), wait_s)
        if (pause_s := self._polled_s + _POLL_S - time.monotonic()) > 0:
            await asyncio.sleep(pause_s)

    def _needs_polling(self) -> bool:
        """Return whether the logs must be polled often.

        They must unless all awaited events change a file or end a process, which wakes the loop.
        """
        ends_are_known = all(
            target.exit is not None or injection.fault.whole_node
            for injection, target in self._injector.in_force
        )
        return self._rules.are_set or not (self._injector.awaits_end and ends_are_known)

    def _place_of(self, worker: str) -> dict[str, Any]:
        """Return the journal's fields ``rank``, ``node``, ``pid`` and ``generation`` of a process.

        The generation of a command's process is always None.
        """
        node, _, pid = worker.rpartition(".")
        return {
            "rank": self._struck_ranks.get(worker),
            "node": node,
            "pid": int(pid),
            "generation": None,
        }

    # -- polling -----------------------------------------------------------------------------------

    def _poll_nodes(self) -> bool:
        """Store the end of each command that has ended; return whether all have.

        An end without a record of its node is stored as ``lost``. A command that ended by itself is
        also noted in the targets on that node, where a process that is gone proves nothing then.
        """
        for node in self._cluster.nodes:
            if node in self.exits or not self._cluster.is_over(node):
                continue
            records = read_events(self._directory / "journal", Event.COMMAND_EXITED)
            end_records = [record for record in records if record.source == node]
            self.exits[node] = (
                ProcessExit(end_records[-1]["how"], end_records[-1]["status"])
                if end_records
                else ProcessExit("lost", "its end was not seen")
            )
            self._command_ends |= {
                (node, record["pid"]): ProcessExit(record["how"], record["status"])
                for record in end_records
            }
            for _, target in self._injector.in_force:
                target.ended_well |= target.node == node and self.exits[node].how == "exited"
        return len(self.exits) == len(self._cluster.nodes)

    def _read_logs(self, *, to_the_end: bool) -> None:
        """Read one chunk of each log, or all of it if nothing writes any more.

        Each line with a step or a loss is recorded in the journal, and the log rules are applied.
        Endless output must not keep the follower from its deadline.
        """
        for node, log in self._logs.items():
            while parts := log.read():
                for part in parts:
                    self._read_part(node, part)
                if not to_the_end:
                    break
        running = [node for node in self._cluster.nodes if node not in self.exits]
        self._rules.tick(running, time.monotonic(), self.reader.highest)

    def _read_part(self, node: str, part: ArrivedPart) -> None:
        """Record the lines of a part of a log that show a step or a loss, and apply the rules."""
        self._rules.feed(node, part.data, time.monotonic(), self.reader.highest)
        read_ns = time.monotonic_ns()
        for line in self.reader.feed(node, part.data, part.t_ns):
            self._newest_loss = self._newest_loss if line.loss is None else float(line.loss)
            if line.step is not None:
                self._note_step(line.step, line.t_ns)
            line_fields: dict[str, Any] = {"node": node, "step": line.step, "loss": line.loss}
            if self._observation is not None:  # else a part counts as arrived when it is read
                line_fields["late_ns"] = max(0, read_ns - line.t_ns)
            self._journal.write(Event.LOGGED, t_ns=line.t_ns, **line_fields)

    def _note_step(self, step: int, t_ns: int) -> None:
        """Note a step of a running job.

        The first one shows which faults come too late: the job may have run for days.
        """
        if self._observation is None:
            return
        self._observation.show(step, t_ns)
        if self._first_step is not None:
            return
        self._first_step = step
        for injection in self.injections:
            at_step = injection.fault.at_step
            if at_step is not None and at_step < step:
                injection.miss(
                    f"the job was at step {step} when the run began: name a later step, or after_s"
                )

    def _report_progress(self) -> None:
        """Send a :class:`LogRead` to the live view, at most once in ``_REPORT_S`` seconds."""
        now_s = time.monotonic()
        if now_s - self._reported_s >= _REPORT_S:
            self._reported_s = now_s
            nodes = len(self._cluster.nodes)
            self._watch(
                LogRead(self.reader.highest, self._newest_loss, nodes - len(self.exits), nodes)
            )

    async def _poll_targets(self, has_ended: bool) -> None:
        """Let due faults act, and give each fault the end of the process that it struck.

        Args:
            has_ended: the command has ended on every node, or the run is ended.

        Raises:
            HarnessError: if a fault could not act.
            BadInput: if a fault refused its input.
        """
        await asyncio.sleep(0)  # lets the faults act that are due
        for injection, target in self._injector.in_force:
            target.logged_step = -1 if self.reader.highest is None else self.reader.highest
            if target.exit is None and not injection.fault.whole_node and target.injected_ns:
                self._poll_target(target, has_ended)
        await self._injector.settle()
        self._injector.check()

    def _poll_target(self, target: Target, has_ended: bool) -> None:
        """Give a fault the end of the process that it struck, if the process has ended.

        The kernel shows the exit status until the parent reaps the process. The command runner
        records the status of the command itself. If both are missed, the end is reported as
        ``GONE``, once the command runner would have reported more.
        """
        process, command_process = target.process, (target.node, target.pid)
        with contextlib.suppress(NodeUnreachable):  # the end of its node is not proved yet
            if (status := process.kernel.exit_status(process)) is not None:
                target.tell_exit(ProcessExit(*describe_status(status)), time.monotonic_ns())
            elif command_process in self._command_ends:
                target.tell_exit(self._command_ends[command_process], time.monotonic_ns())
            elif (has_ended or target.seconds_since > _GONE_S) and (
                process.kernel.find(process.pid).ticks != process.ticks
            ):
                target.tell_exit(GONE, time.monotonic_ns())

    # -- the moment --------------------------------------------------------------------------------

    def _strike_due(self, cleanups: contextlib.ExitStack) -> None:
        """Strike the faults that are due, if the process with the rank exists and is confirmed.

        Each strike is shown to the live view. The other faults stay planned for the next poll.
        """
        tried_before_s = time.monotonic() - _TRY_AGAIN_S
        due = [
            injection
            for injection in self.injections
            if not injection.is_struck
            and self._is_due(injection)
            and self._tried_s.get(injection, tried_before_s) <= tried_before_s
        ]
        if not due or len(self.exits) == len(self._cluster.nodes):
            return
        self._strike(due, cleanups)

    def _strike(self, due: Sequence[Injection], cleanups: contextlib.ExitStack) -> None:
        """Strike those of the faults whose process exists and is confirmed.

        A fault waits for a node that does not answer if its target may be there.
        """
        seats_by_rank, unreached = self._seats()
        strikes: list[tuple[Injection, Target]] = []
        self._read_node_records()
        for injection in due:
            try:
                seat = self._seat_to_strike(injection.fault, seats_by_rank, unreached)
            except NodeUnreachable as error:  # until a node answers, or its end is proved
                injection.note_unreached(str(error))
                continue
            injection.note_unreached("")
            if seat is None or any(target.worker == _worker_name(seat) for _, target in strikes):
                continue  # struck as soon as the process is started again
            struck_ranks = [rank for rank in named_ranks(injection.fault) if rank in seats_by_rank]
            other_nodes = (seats_by_rank[rank].node for rank in struck_ranks)
            struck_nodes = list(dict.fromkeys([seat.node, *other_nodes]))
            if reason := self._cluster.why_spared(struck_nodes, injection.fault.needs):
                injection.miss(f"guard rails forbid it: {reason}")
                continue
            strikes.append((injection, self._target(injection, seat, seats_by_rank)))
            if not injection.fault.node:
                self._struck_ranks[_worker_name(seat)] = seat.rank
            self._wake_at_end_of(seat.process, cleanups)
        if strikes:
            self._injector.strike(strikes)
        for injection, _ in strikes:
            if injection not in self._tried_s:
                self._watch(FaultStruck(injection.fault_id))
            self._tried_s[injection] = time.monotonic()

    def _seat_to_strike(
        self, fault: Fault, seats_by_rank: Mapping[int, Seat], unreached: Sequence[str]
    ) -> Seat | None:
        """Return the process that a fault strikes now; None if it must wait for another turn.

        That of a fault that names a node is the first one there.

        Args:
            fault: the fault.
            seats_by_rank: the process of each rank, as far as it is known.
            unreached: why some nodes do not answer.

        Raises:
            NodeUnreachable: if a rank that the fault names may be on such a node, or its node does
                not answer any more.
        """
        ranks = named_ranks(fault)
        if unreached and not seats_by_rank.keys() >= {*ranks}:
            raise NodeUnreachable(unreached[0])
        seat = self._seat_of(fault, seats_by_rank)
        if seat is None or self._injector.is_doomed(_worker_name(seat), seat.process):
            return None
        if not fault.node and not self._is_known_to_train(fault, seat):
            return None
        others = [seats_by_rank[rank] for rank in ranks if rank in seats_by_rank]
        if any(other.process.is_gone() for other in others if other is not seat):
            return None  # the other side may be on another node when its rank is started again
        return seat

    def _seat_of(self, fault: Fault, seats_by_rank: Mapping[int, Seat]) -> Seat | None:
        """Return the process of a fault's rank, or the first one of its node; None without one.

        Raises NodeUnreachable if the node does not answer.
        """
        if fault.node:
            processes = self._cluster.node(fault.node)
            return Seat(NO_RANK, fault.node, processes[0], variable="") if processes else None
        assert isinstance(fault.rank, int), "roles are drawn when a run is planned"
        return seats_by_rank.get(fault.rank)

    def _is_known_to_train(self, fault: Fault, seat: Seat) -> bool:
        """Return whether the process of a rank may be struck: its node reports it, too.

        The first process of a node may be the launcher of several ranks.
        """
        if not self._is_witnessed(seat):
            return False
        return bool(seat.variable) or self._has_one_rank_per_node or fault.whole_node

    def _seats(self) -> tuple[dict[int, Seat], list[str]]:
        """Return the process of each rank, and why some nodes do not answer.

        The place of a pod in a running job says nothing about its rank.
        """
        ranks: dict[str, Mapping[Process, LaunchedRank]] = {}
        unreached: list[str] = []
        for node in self._cluster.nodes:
            try:
                ranks[node] = self._cluster.ranks(node)
            except NodeUnreachable as error:
                unreached.append(str(error))
        launched_seats = seats(ranks)
        if launched_seats or unreached or self._observation is not None:
            return launched_seats, unreached
        try:
            return seats_by_node({node: self._cluster.node(node) for node in ranks}), []
        except NodeUnreachable as error:
            return {}, [str(error)]

    def _is_due(self, injection: Injection) -> bool:
        """Return whether the step or the time at which the fault strikes has come.

        A time counts from the first step that the log showed. No fault is due before that step.
        """
        fault, reader = injection.fault, self.reader
        if fault.at_step is not None:
            return reader.highest is not None and reader.highest >= fault.at_step
        return (
            fault.after_s is not None
            and reader.first_ns is not None
            and time.monotonic_ns() >= reader.first_ns + fault.after_s * 1e9
        )

    def _is_witnessed(self, seat: Seat) -> bool:
        """Return whether the node of a process, too, reports that it has the rank.

        The first call asks the node to look for ranks. The fault waits for the report, at most
        ``_WITNESS_S`` seconds, after which True is returned: the run is then unknown. A process
        without a variable needs no report. A launcher of ranks is never struck: False is returned.
        """
        strongest = min(
            map(strength, self._rank_variables.values()), default=strength(seat.variable)
        )
        if strength(seat.variable) > strongest:
            return False  # the process is a launcher, and its ranks are gone for now
        if not seat.variable:
            return True
        now_s = time.monotonic()
        process_key = (seat.node, seat.process.pid, seat.process.ticks)
        if self._rank_variables.get(process_key) == seat.variable:
            return True
        if process_key not in self._requested_s:
            self._requested_s[process_key] = now_s
            self._cluster.look_for_ranks(seat.node)
        return now_s > self._requested_s[process_key] + _WITNESS_S

    def _read_node_records(self) -> None:
        """Store the variable of each process with a rank, from new records of the nodes."""
        records = [
            record for record in self._node_records.poll() if record.event == Event.RANK_FOUND
        ]
        self._rank_variables |= {
            (record.source, record["pid"], record["ticks"]): variable_of(record)
            for record in records
        }

    def _target(self, injection: Injection, seat: Seat, seats_by_rank: dict[int, Seat]) -> Target:
        """Return the target of an injection, with the step that the logs show."""
        return Target(
            cluster=self._cluster,
            undo=self._undo,
            fault_id=injection.fault_id,
            worker=_worker_name(seat),
            node=seat.node,
            rank=seat.rank,
            step=-1 if self.reader.highest is None else self.reader.highest,
            phase="",
            process=seat.process,
            tid=seat.process.pid,
            places={rank: other.node for rank, other in seats_by_rank.items()},
            struck_nodes={seat.node},
        )

    def _explain_missed(self) -> None:
        """Mark each fault that never struck as missed, with the reason."""
        for injection in self.injections:
            if injection.state is not InjectionState.PLANNED:
                continue
            if injection.unreached:
                injection.miss(f"it could not act {moment(injection.fault)}: {injection.unreached}")
            elif self._is_due(injection):
                fault = injection.fault
                absent_in_words = f"no process of {fault.place} was found {moment(fault)}"
                is_explained = self._rank_variables or fault.node
                injection.miss(
                    absent_in_words if is_explained else f"{absent_in_words}: {NO_VARIABLE}"
                )
            else:
                shown_in_words = (
                    "no step"
                    if self.reader.highest is None
                    else f"step {self.reader.highest} at most"
                )
                injection.miss(
                    f"it was due {moment(injection.fault)}, but the log shows {shown_in_words}"
                )


def _worker_name(seat: Seat) -> str:
    """Return the name of a process, ``node.pid``."""
    return f"{seat.node}.{seat.process.pid}"
