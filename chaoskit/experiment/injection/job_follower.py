"""The harness's side of a running job: read the coordinator's messages, and strike each fault at
its moment.

-> experiment/injection/injector.py: what happens when a fault strikes, and its evidence.
experiment/injection/channel.py and runtime/step/hooks.py: ranks that wait for their fault.
experiment/run/run.py starts the job and ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from chaoskit.errors import BadInput, HarnessError
from chaoskit.experiment.injection.channel import InjectionChannel
from chaoskit.experiment.injection.injection import Injection, InjectionState
from chaoskit.experiment.injection.injector import GONE, Injector
from chaoskit.experiment.injection.replacing import NodeReplacer
from chaoskit.experiment.injection.roster import Holder, Roster
from chaoskit.experiment.plan.plan import Experiment
from chaoskit.experiment.plan.requests import Requests
from chaoskit.faults.target import ProcessExit, Target
from chaoskit.journal import Journal, Record
from chaoskit.substrate.core.base import Cluster
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.object_store.proxy import ObjectProxy
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event, RunEnd
from chaoskit.wire.messages import (
    ArmTriggers,
    AtHook,
    EndJob,
    InjectionAct,
    InjectionOrder,
    InjectionReport,
    Message,
    Resume,
    Trigger,
    WorkerFailed,
    WorkerLost,
    WorldSize,
)

Watch = Callable[[Any], None]
#: Called with the cluster whenever no message came for a moment: all nodes or the coordinator may
#: be lost.
WhenSilent = Callable[[Cluster], None]

_SILENT_S = 0.2
_SLOW_HEARTBEAT_S = 0.25  # heartbeat of a node, once the faults of a run are over
_SLOWEST_HEARTBEAT_S = 1.0
_HEARTBEATS_PER_S = 8  # heartbeats of all nodes together, then
# a rank waits so long at its hook for another one that is due at the same moment of a step
_OTHERS_WAIT_S = 3.0
_OTHERS_WAIT_IN_RECOVERY_S = 1.0  # shorter, because some of the ranks may never come


class JobFollower:
    """Follow one run of a job until it ends, and strike its faults.

    Args:
        experiment: the plan of the run.
        cluster: the nodes of the run, and the connection to its coordinator.
        journal: the harness's journal.
        undo: receives the entries that undo faults if this process is killed.
        watch: receives every message of the coordinator and of the channel.
        store: the proxy in front of the object store; None if no fault strikes the store.
        channel: the sockets to workers and checkpoint daemons; None for a run without faults.
        requests: requests of users and schedulers while the run lasts.
        when_silent: called with the cluster whenever no message came for 0.2 s; None to wait.

    Attributes:
        injections: one injection for each fault, in the order of the plan.
        run_end: the reason for the end of the run; ``RunEnd.HARNESS`` until it has ended in order.
        record_missed: writes a journal record of each fault that did not act.
    """

    def __init__(
        self,
        experiment: Experiment,
        cluster: Cluster,
        journal: Journal,
        undo: UndoLog,
        watch: Watch,
        store: ObjectProxy | None = None,
        channel: InjectionChannel | None = None,
        requests: Requests | None = None,
        when_silent: WhenSilent | None = None,
    ) -> None:
        self._cluster, self._undo, self._watch, self._store = cluster, undo, watch, store
        self._channel = channel
        # from ranks and checkpoint daemons, not dispatched yet
        self._reports = deque[InjectionReport]()
        # ranks that wait at a hook, and have no injection yet
        self._waiting_hooks: list[AtHook] = []
        self._requests, self._when_silent = requests or Requests(), when_silent
        self._config = experiment.config
        self._roster = Roster()
        self._detection_count = 0
        self._woken = asyncio.Event()
        self._next_wake_s = math.inf  # monotonic time of the next wake-up without a message
        self._is_slowed = False
        self._follow_task: asyncio.Task[Any] | None = None
        self._injector = Injector(experiment.faults, journal, self._place_of, self._woken.set)
        self._replacer = NodeReplacer(
            cluster, self._config.node_replacements, journal, self._config.startup_s
        )
        self.injections = self._injector.injections
        self.record_missed = self._injector.record_missed
        self.run_end = RunEnd.HARNESS

    @property
    def first_node(self) -> str:
        """The node of rank 0 in the newest membership; empty before the first.

        Rank 0 commits stored states.
        """
        return self._roster.places.get(0, "")

    @property
    def is_idle(self) -> bool:
        """True if no fault has acted, or all were missed."""
        return not self._injector.in_force

    async def follow(self, deadline_s: float) -> EndJob | None:
        """Follow the job and return its end, or None after the deadline.

        Lost nodes are replaced meanwhile, if the plan allows it.

        Args:
            deadline_s: a time of the monotonic clock, in seconds; infinite for none.

        Raises:
            HarnessError: if the coordinator died, or a fault could not act.
            BadInput: if the job, or a fault, refused its input.
        """
        self._follow_task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        self._requests.on_new = partial(_wake, loop, self._woken)
        if self._channel is not None:
            self._channel.open(self._queue_report)
        timeout = asyncio.timeout_at(None if deadline_s == math.inf else deadline_s)
        try:
            with self._cluster.heard():
                try:
                    async with timeout:
                        end = await self._follow_until_end()
                finally:
                    await self._replacer.close()
        except TimeoutError:
            if not timeout.expired():  # else a timeout inside, such as that of a socket
                raise
            self.run_end = RunEnd.DEADLINE
            await self._injector.end()
            return None
        self.run_end = RunEnd.ENDED
        return end

    async def _follow_until_end(self) -> EndJob:
        """Dispatch messages and strike faults until the job ends; return its end.

        Raises:
            HarnessError: if the connection to the coordinator is lost, or a fault could not act.
            BadInput: if the job, or a fault, refused its input.
        """
        while True:
            for request in self._requests.take():
                self._send(request)
            try:
                message = await self._next_message()
            except ConnectionError as error:
                await self._injector.settle()
                self.run_end = RunEnd.COORDINATOR_LOST
                raise HarnessError(f"the coordinator ended early: {error}; see its log") from error
            self._injector.check()
            if message is not None:
                self._watch(message)
                self._dispatch(message)
            if isinstance(message, EndJob):
                await self._injector.end()
                self._injector.check()
                return message
            self._dispatch_reports()
            self._strike_due()
            # lets due faults act, and lets tasks go on that wait for this message
            await asyncio.sleep(0)
            self._slow_down()

    def _slow_down(self) -> None:
        """Ask the nodes for fewer heartbeats, once, when no fault needs them any more.

        Each heartbeat wakes this process, which disturbs measurements.
        """
        if not self.injections or self._is_slowed or not self._injector.awaits_end:
            return
        self._is_slowed = True
        interval_s = len(self._cluster.nodes) / _HEARTBEATS_PER_S
        self._cluster.pace(min(max(_SLOW_HEARTBEAT_S, interval_s), _SLOWEST_HEARTBEAT_S))

    async def _next_message(self) -> Any | None:
        """Wait for a message of the coordinator and return it; None if a fault may be due first.

        None is also returned after a silence, for which ``when_silent`` is called.
        """
        if not self._woken.is_set() and (message := self._cluster.receive(0.0)) is not None:
            return message
        is_silent = not await self._wait_for_news()
        self._woken.clear()
        if is_silent and self._when_silent is not None:
            if (message := self._cluster.receive(0.0)) is not None:
                return message
            self._when_silent(self._cluster)
        return None

    async def _wait_for_news(self) -> bool:
        """Wait for a message, a report, a request or the time at which a fault is due.

        Returns:
            False if none of them came for ``_SILENT_S`` seconds. Without ``when_silent`` the wait
            has no limit.
        """
        loop, descriptor, now_s = (
            asyncio.get_running_loop(),
            self._cluster.fileno(),
            time.monotonic(),
        )
        timer = (
            None
            if self._next_wake_s == math.inf
            else loop.call_later(self._next_wake_s - now_s, self._woken.set)
        )
        loop.add_reader(descriptor, self._woken.set)
        try:
            async with asyncio.timeout(None if self._when_silent is None else _SILENT_S):
                await self._woken.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(descriptor)
            if timer is not None:
                timer.cancel()
        return True

    def _place_of(self, worker: str) -> dict[str, Any]:
        """Return the journal's fields ``rank``, ``node``, ``pid`` and ``generation`` of a worker.

        Rank and pid are None if they are not known.
        """
        roster = self._roster
        return {
            "rank": roster.rank_of(worker),
            "node": roster.node_of(worker),
            "pid": roster.pid_of(worker),
            "generation": roster.generation,
        }

    def _dispatch(self, message: Any) -> None:
        """Pass a message of the coordinator to requests, replacements, roster and faults.

        A new size of the world is provided by the cluster. A loss reaches the roster last, so that
        a fault can still read the rank of the lost worker.

        Raises:
            BadInput: if the job refused its input.
        """
        self._requests.hear(message)
        self._replacer.hear(message)
        match message:
            case WorldSize(wanted=size):
                self._cluster.provide(size)
            case WorkerFailed(refused=(field, value, remedy)):
                raise BadInput(field, _Literal(value), remedy)
        lost_member = (
            self._roster.member(message.worker) if isinstance(message, WorkerLost) else None
        )
        if not isinstance(message, WorkerLost):
            self._roster.hear(message)
        self._injector.deliver(message)
        if isinstance(message, WorkerLost):
            self._roster.hear(message)
            self._count_detection(message, had_rank=lost_member is not None)

    def _count_detection(self, lost: WorkerLost, *, had_rank: bool) -> None:
        """Count losses that faults caused, and strike the faults due after so many of them.

        Only the first loss by each fault counts.

        Args:
            lost: the loss.
            had_rank: the worker had a rank; otherwise the loss does not count.
        """
        injection = next(
            (
                candidate
                for candidate in self.injections
                if not candidate.is_loss_detected and explains(candidate, lost)
            ),
            None,
        )
        if injection is None or not had_rank:
            return
        injection.is_loss_detected = True
        self._detection_count += 1
        for other in self.injections:
            if (
                other.fault.during == "detection"
                and other.fault.recovery == self._detection_count
                and not other.is_struck
            ):
                self._strike_directly(other, missed_if_absent=True)

    # -- the moment --------------------------------------------------------------------------------

    def _queue_report(self, report: InjectionReport) -> None:
        """Store a report of a worker or checkpoint daemon until the next turn of the loop."""
        self._reports.append(report)
        self._woken.set()

    def _dispatch_reports(self) -> None:
        """Pass the reports of workers and checkpoint daemons to the live view and to the faults."""
        while self._reports:
            report = self._reports.popleft()
            self._watch(report)
            if isinstance(report, AtHook):
                self._waiting_hooks.append(report)
            else:
                self._injector.deliver(report)

    def _assign_waiting_hooks(self) -> None:
        """Assign workers that wait at a hook to their injections.

        A worker waits until the coordinator has published its rank, and while another worker waits
        for the same fault. A worker that comes after the strike goes on without a fault, unless the
        fault answers it, too.
        """
        hooks, self._waiting_hooks = self._waiting_hooks, []
        for hook in hooks:
            injection = next(
                candidate for candidate in self.injections if candidate.fault_id == hook.fault
            )
            if injection.is_struck:
                if injection.target is None or not injection.target.offer_hook(hook):
                    self._resume(hook)  # this rank came after the one that was struck
            elif hook.generation > self._roster.generation:
                self._waiting_hooks.append(hook)
            elif injection.state is InjectionState.PLANNED:
                injection.wait_at_hook(hook, time.monotonic())
            else:
                self._waiting_hooks.append(hook)  # another rank waits for this injection already

    def _resume(self, hook: AtHook) -> None:
        """Let a worker that waits at a hook go on without a fault."""
        resume = Resume(hook.fault, InjectionAct("none"))
        self._send_order(self._roster.node_of(hook.worker), resume, hook.worker)

    def _send_order(self, node: str, order: InjectionOrder, worker: str) -> bool:
        """Send an order to a worker.

        Returns:
            True if the order was sent; False if there is no channel, or the worker is not connected
            or does not read its orders.
        """
        return self._channel is not None and self._channel.tell(node, order, worker)

    def _strike_due(self) -> None:
        """Strike ranks that wait at hooks with all faults due there, then faults due by time.

        A fault that is due by time and needs the help of its rank does not strike yet: the rank is
        ordered to stop at a hook. A fault without a process to strike is tried again after a
        moment. The next wake-up is set to the moment at which the next fault is due.
        """
        self._assign_waiting_hooks()
        now_s, first_commit_s = time.monotonic(), self._roster.first_commit_s
        self._next_wake_s = math.inf
        for injection in self.injections:
            if injection.hook is not None and not self._awaits_others(injection, now_s):
                self._strike_together(
                    [
                        other
                        for other in self.injections
                        if other.hook and other.moment_key == injection.moment_key
                    ]
                )
        for injection in self.injections:
            after_s = injection.fault.after_s
            if after_s is None or first_commit_s is None or injection.is_struck:
                continue
            if now_s < first_commit_s + after_s:
                self._next_wake_s = min(self._next_wake_s, first_commit_s + after_s)
            elif not injection.fault.from_outside:
                self._arm(injection)
            elif not self._strike_directly(injection):
                self._next_wake_s = min(self._next_wake_s, now_s + _SILENT_S)

    def _awaits_others(self, injection: Injection, now_s: float) -> bool:
        """Return whether another rank that is due at the same moment may still come.

        The wait ends after ``_OTHERS_WAIT_S`` seconds, or ``_OTHERS_WAIT_IN_RECOVERY_S`` in a recovery.
        The next wake-up is at the end of the wait, at the latest.
        """
        limit_s = _OTHERS_WAIT_S if injection.fault.during is None else _OTHERS_WAIT_IN_RECOVERY_S
        if now_s >= injection.hook_s + limit_s:
            return False
        may_come = any(
            other.state is InjectionState.PLANNED
            and self._roster.holder(other.fault.rank) is not None
            for other in self.injections
            if other.moment_key == injection.moment_key
            and isinstance(other.fault.rank, int)
            and other.fault.rank != injection.fault.rank
        )
        if may_come:
            self._next_wake_s = min(self._next_wake_s, injection.hook_s + limit_s)
        return may_come

    def _strike_together(self, injections: list[Injection]) -> None:
        """Strike the ranks that wait for these faults, all in the same turn of the event loop.

        A fault without a waiting rank, or with a rank that is being lost, does not strike.
        """
        strikes = [
            (injection, target)
            for injection in injections
            if injection.hook is not None
            and (target := self._target_at_hook(injection, injection.hook)) is not None
        ]
        if strikes:
            self._injector.strike(strikes)

    def _target_at_hook(self, injection: Injection, hook: AtHook) -> Target | None:
        """Return the target of a fault with a rank at its hook; None if the rank is being lost.

        In that case the rank goes on, and the fault waits for the next process at the hook. A
        fault on a healer that was lost is marked as missed.
        """
        worker, rank, tid = hook.worker, hook.rank, hook.tid
        process = self._cluster.worker(self._roster.node_of(worker), hook.pid)
        # the next process with this rank may be struck
        if self._roster.is_lost(worker) or process.is_gone():
            self._resume(hook)
            injection.return_to_planned()
            return None
        if injection.fault.rank == "healer":
            healer = self._roster.member(hook.peer)
            if healer is not None:
                worker, rank, tid, process = (
                    healer.worker,
                    healer.rank,
                    healer.pid,
                    self._process_of(healer),
                )
            if healer is None or self._injector.is_doomed(worker, process):
                injection.miss(f"the healer {hook.peer} was lost before it could be struck")
                self._resume(hook)
                return None
        return self._target(
            injection, worker, rank, process, tid, hook.step, hook.phase, waiting=hook.worker
        )

    def _strike_directly(self, injection: Injection, *, missed_if_absent: bool = False) -> bool:
        """Strike the process that has the rank now, at any point of its step.

        Args:
            injection: the fault.
            missed_if_absent: mark the fault as missed if no process has the rank; else the next
                process with it may be struck.

        Returns:
            True if a process was struck.
        """
        holder = self._roster.holder(injection.fault.rank)
        process = None if holder is None else self._process_of(holder)
        if holder is None or process is None or self._injector.is_doomed(holder.worker, process):
            if missed_if_absent:
                injection.miss(
                    f"rank {injection.fault.rank} was held by no process {injection.fault.moment}"
                )
            return False
        step, phase = self._roster.step, injection.fault.during or ""
        target = self._target(
            injection, holder.worker, holder.rank, process, process.pid, step, phase
        )
        self._injector.strike([(injection, target)])
        return True

    def _arm(self, injection: Injection) -> None:
        """Make the process that has the rank now stop at the next entry of the fault's phase.

        A process that was ordered so before is not ordered again. Nothing is ordered if no process
        has the rank, or its process cannot be reached; the next call tries again.
        """
        holder = self._roster.holder(injection.fault.rank)
        if holder is not None and holder.worker != injection.armed_worker:
            rank, role = injection.fault.place_of_rank
            trigger = Trigger(injection.fault_id, rank, -1, injection.fault.phase, role=role)
            if self._send_order(holder.node, ArmTriggers((trigger,)), holder.worker):
                injection.armed_worker = holder.worker

    def _send(self, message: Message) -> None:
        """Send a request to the coordinator; a connection that is lost is ignored."""
        # the coordinator may be gone: requests that wait for an answer are sent again
        with contextlib.suppress(OSError):
            self._cluster.send(message)

    def _process_of(self, holder: Holder) -> Process:
        """Return the process of a holder of a rank, on its node."""
        return self._cluster.worker(holder.node, holder.pid)

    def _target(
        self,
        injection: Injection,
        worker: str,
        rank: int,
        process: Process,
        tid: int,
        step: int,
        phase: str,
        waiting: str = "",
    ) -> Target:
        """Return the target of an injection: a process, and the place and step where it is.

        Args:
            injection: the fault.
            worker, rank, process: the worker to strike, its rank and its process.
            tid: the thread that trains, or the pid if it is not known.
            step, phase: the place of the worker, as far as it is known.
            waiting: the worker that waits at the fault's hook; "" if none does.
        """
        node = self._roster.node_of(worker)
        rack = self._config.rack(node)
        return Target(
            cluster=self._cluster,
            undo=self._undo,
            fault_id=injection.fault_id,
            worker=worker,
            node=node,
            rank=rank,
            step=step,
            phase=phase,
            process=process,
            tid=tid,
            waiting=waiting,
            places=self._roster.places,
            rack=tuple(name for name in self._cluster.nodes if self._config.rack(name) == rack),
            struck_nodes={node},
            config=self._config,
            store=self._store,
            channel=self._channel,
        )

    # -- after the run -----------------------------------------------------------------------------

    async def close(self, records: list[Record]) -> None:
        """Collect the evidence known only after the end of all processes, and undo all faults.

        Args:
            records: the end of the job and the exits of workers, from the journals: they show which
                fault struck too late, and how its target ended.
        """
        if self._follow_task is not None:
            self._follow_task.cancel()
        self._read_exits(records)
        await self._injector.settle()
        await self._injector.close()
        self._requests.on_new = lambda: None

    def _read_exits(self, records: list[Record]) -> None:
        """Give each fault that lacks evidence the exit of its target, if the exit is known.

        A fault that struck after the end of the job is marked as missed.
        """
        exits = {
            record["worker"]: record for record in records if record.event == Event.WORKER_EXITED
        }
        ended_ns = min(
            (record.t_ns for record in records if record.event == Event.JOB_ENDED), default=math.inf
        )
        for injection, target in self._injector.in_force:
            target.end()
            record = exits.get(target.worker)
            if target.injected_ns > ended_ns:
                injection.miss("the job had ended")
            elif injection.evidence:
                continue
            elif record is not None:
                target.tell_exit(ProcessExit(record["how"], record["status"]), record.t_ns)
            elif target.gone_ns:
                target.tell_exit(GONE, target.gone_ns)


class _Literal(str):
    """A value of an error that is shown as it was received, without further quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    """Wake the follower from another thread."""
    loop.call_soon_threadsafe(woken.set)


def explains(injection: Injection, lost: WorkerLost) -> bool:
    """Return whether a fault caused a loss; False before the fault has struck.

    The cause must fit, and the fault must have struck the worker or its node.
    """
    target = injection.struck
    if target is None or lost.cause not in injection.fault.leads_to:
        return False
    return lost.worker in target.claims or (
        injection.fault.whole_node and lost.node in target.struck_nodes
    )
