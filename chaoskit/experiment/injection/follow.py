"""The harness's side of a running job: hears the coordinator, and knows when the moment of each fault has come."""

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
from chaoskit.faults.target import Exit, Target
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
    InjectionReport,
    Message,
    Resume,
    Trigger,
    WorkerFailed,
    WorkerLost,
    WorldSize,
)

Watch = Callable[[Any], None]
#: Called with the cluster whenever nothing was heard for a moment: no node lives, or no coordinator.
WhenSilent = Callable[[Cluster], None]

_SILENT_S = 0.2
_SLOW_HEARTBEAT_S = 0.25  # of a node, once the faults of a run are over
_SLOWEST_HEARTBEAT_S = 1.0
_HEARTBEATS_PER_S = 8  # of all nodes together then
_TOGETHER_S = 3.0  # how long a rank waits at its hook for another one that is due at the same moment of a step
_TOGETHER_IN_RECOVERY_S = 1.0  # where some of the ranks may never come


class JobFollower:
    """Follows one run of a job until it ends, and has its faults act.

    Attributes:
        injections: one for each fault, in the order of the plan.
        run_end: why the run was over.
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
        self._reports = deque[InjectionReport]()  # of ranks and checkpoint daemons, not heard yet
        self._standing: list[AtHook] = []  # ranks that stand, and are not looked at yet
        self._requests, self._when_silent = requests or Requests(), when_silent
        self._config = experiment.config
        self._roster = Roster()
        self._detections = 0
        self._woken = asyncio.Event()
        self._wakes_s = math.inf  # when it is to wake without a message
        self._is_slow = False
        self._following: asyncio.Task[Any] | None = None
        self._injector = Injector(experiment.faults, journal, self._place_of, self._woken.set)
        self._replacer = NodeReplacer(
            cluster, self._config.node_replacements, journal, self._config.startup_s
        )
        self.injections = self._injector.injections
        self.tell_missed = self._injector.tell_missed
        self.run_end = RunEnd.HARNESS

    @property
    def first_node(self) -> str:
        """Where rank 0 is, in the newest membership: it commits what is stored. Empty before the first."""
        return self._roster.places.get(0, "")

    @property
    def is_idle(self) -> bool:
        """Whether no fault has acted."""
        return not self._injector.in_force

    async def follow(self, deadline_s: float) -> EndJob | None:
        """Until the job ends; None when the deadline (on the monotonic clock) passed first.

        Raises:
            HarnessError: if the coordinator died, or a fault could not act. BadInput: if the job refused its input.
        """
        self._following = asyncio.current_task()
        loop = asyncio.get_running_loop()
        self._requests.on_new = partial(_wake, loop, self._woken)
        if self._channel is not None:
            self._channel.open(self._take_report)
        limit = asyncio.timeout_at(None if deadline_s == math.inf else deadline_s)
        try:
            with self._cluster.heard():
                try:
                    async with limit:
                        end = await self._until_end()
                finally:
                    await self._replacer.close()
        except TimeoutError:
            if not limit.expired():  # else it is another's, such as a socket's
                raise
            self.run_end = RunEnd.DEADLINE
            await self._injector.end()
            return None
        self.run_end = RunEnd.ENDED
        return end

    async def _until_end(self) -> EndJob:
        while True:
            for request in self._requests.take():
                self._say(request)
            try:
                message = await self._next_message()
            except ConnectionError as error:
                await self._injector.settle()
                self.run_end = RunEnd.COORDINATOR_LOST
                raise HarnessError(f"the coordinator ended early: {error}; see its log") from error
            self._injector.check()
            if message is not None:
                self._watch(message)
                self._hear(message)
            if isinstance(message, EndJob):
                await self._injector.end()
                self._injector.check()
                return message
            self._hear_reports()
            self._strike_due()
            await asyncio.sleep(0)  # what is due acts, and what waits for this message goes on
            self._slow_down()

    def _slow_down(self) -> None:
        """Be shown few heartbeats once no fault needs them: each wakes this process beside what it measures."""
        if not self.injections or self._is_slow or not self._injector.awaits_end:
            return
        self._is_slow = True
        pace_s = len(self._cluster.nodes) / _HEARTBEATS_PER_S
        self._cluster.pace(min(max(_SLOW_HEARTBEAT_S, pace_s), _SLOWEST_HEARTBEAT_S))

    async def _next_message(self) -> Any | None:
        """The next message; None where something else is to be done first."""
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
        """Wait for a message, or for the time at which something is due; False if neither came for a while."""
        loop, descriptor, now_s = (
            asyncio.get_running_loop(),
            self._cluster.fileno(),
            time.monotonic(),
        )
        timer = (
            None
            if self._wakes_s == math.inf
            else loop.call_later(self._wakes_s - now_s, self._woken.set)
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
        roster = self._roster
        return {
            "rank": roster.rank_of(worker),
            "node": roster.node_of(worker),
            "pid": roster.pid_of(worker),
            "generation": roster.generation,
        }

    def _hear(self, message: Any) -> None:
        self._requests.hear(message)
        self._replacer.hear(message)
        match message:
            case WorldSize(wanted=wanted):
                self._cluster.provide(wanted)
            case WorkerFailed(refused=(field, value, remedy)):
                raise BadInput(field, _Literal(value), remedy)
        lost = self._roster.member(message.worker) if isinstance(message, WorkerLost) else None
        if not isinstance(message, WorkerLost):
            self._roster.hear(message)
        self._injector.deliver(message)
        if isinstance(message, WorkerLost):
            self._roster.hear(message)
            self._count_detection(message, had_rank=lost is not None)

    def _count_detection(self, lost: WorkerLost, *, had_rank: bool) -> None:
        """The n-th loss that answers a fault is the moment of those that strike after detection."""
        injection = next(
            (one for one in self.injections if not one.answered and explains(one, lost)), None
        )
        if injection is None or not had_rank:
            return
        injection.answered = True
        self._detections += 1
        for other in self.injections:
            if (
                other.fault.during == "detection"
                and other.fault.recovery == self._detections
                and not other.is_struck
            ):
                self._strike_directly(other, missed_if_absent=True)

    # -- the moment -----------------------------------------------------------------------------------------------

    def _take_report(self, report: InjectionReport) -> None:
        self._reports.append(report)
        self._woken.set()

    def _hear_reports(self) -> None:
        """What workers, and checkpoint daemons of nodes, say themselves."""
        while self._reports:
            report = self._reports.popleft()
            self._watch(report)
            if isinstance(report, AtHook):
                self._standing.append(report)
            else:
                self._injector.deliver(report)

    def _look_at_standing(self) -> None:
        """Workers that stand at a trigger, as soon as the coordinator has told which ranks they have."""
        standing, self._standing = self._standing, []
        for hook in standing:
            injection = next(one for one in self.injections if one.fault_id == hook.fault)
            if injection.is_struck:
                if injection.target is None or not injection.target.offer_hook(hook):
                    self._let_go(hook)  # it came after the rank that was struck
            elif hook.generation > self._roster.generation:
                self._standing.append(hook)
            elif injection.state is InjectionState.PLANNED:
                injection.stand(hook, time.monotonic())
            else:
                self._standing.append(hook)  # another one is looked at first

    def _let_go(self, hook: AtHook) -> None:
        assert self._channel is not None
        self._channel.tell(
            self._roster.node_of(hook.worker), Resume(hook.fault, InjectionAct("none")), hook.worker
        )

    def _strike_due(self) -> None:
        """Strike each rank that stands at a hook, with all that are due there; and those that are due by their time."""
        self._look_at_standing()
        now_s, begun_s = time.monotonic(), self._roster.first_commit_s
        self._wakes_s = math.inf
        for injection in self.injections:
            if injection.hook is not None and not self._awaits_others(injection, now_s):
                self._strike_together(
                    [one for one in self.injections if one.hook and one.place == injection.place]
                )
        for injection in self.injections:
            after_s = injection.fault.after_s
            if after_s is None or begun_s is None or injection.is_struck:
                continue
            if now_s < begun_s + after_s:
                self._wakes_s = min(self._wakes_s, begun_s + after_s)
            elif not injection.fault.from_outside:
                self._arm(injection)
            elif not self._strike_directly(injection):
                self._wakes_s = min(self._wakes_s, now_s + _SILENT_S)

    def _awaits_others(self, injection: Injection, now_s: float) -> bool:
        """Whether another rank that is due at the same moment may still come."""
        limit_s = _TOGETHER_S if injection.fault.during is None else _TOGETHER_IN_RECOVERY_S
        if now_s >= injection.hook_s + limit_s:
            return False
        awaits = any(
            other.state is InjectionState.PLANNED
            and self._roster.holder(other.fault.rank) is not None
            for other in self.injections
            if other.place == injection.place
            and isinstance(other.fault.rank, int)
            and other.fault.rank != injection.fault.rank
        )
        if awaits:
            self._wakes_s = min(self._wakes_s, injection.hook_s + limit_s)
        return awaits

    def _strike_together(self, injections: list[Injection]) -> None:
        aimed = [
            (one, target) for one in injections if (target := self._target_at_hook(one)) is not None
        ]
        if aimed:
            self._injector.strike(aimed)

    def _target_at_hook(self, injection: Injection) -> Target | None:
        """What the fault is to strike; None where that is gone, or ends already."""
        hook = injection.hook
        assert hook is not None
        worker, rank, tid = hook.worker, hook.rank, hook.tid
        process = self._cluster.worker(self._roster.node_of(worker), hook.pid)
        if (
            self._roster.is_lost(worker) or process.is_gone()
        ):  # the process that has the rank next may be struck
            self._let_go(hook)
            injection.step_back()
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
                self._let_go(hook)
                return None
        return self._target(
            injection, worker, rank, process, tid, hook.step, hook.phase, waiting=hook.worker
        )

    def _strike_directly(self, injection: Injection, *, missed_if_absent: bool = False) -> bool:
        """Strike the process that has the rank now, wherever it stands. Whether there is one: else the moment is
        missed, or the next process to have the rank is struck."""
        holder = self._roster.holder(injection.fault.rank)
        process = None if holder is None else self._process_of(holder)
        if holder is None or process is None or self._injector.is_doomed(holder.worker, process):
            if missed_if_absent:
                injection.miss(
                    f"no process held rank {injection.fault.rank} {injection.fault.moment}"
                )
            return False
        step, phase = self._roster.step, injection.fault.during or ""
        target = self._target(
            injection, holder.worker, holder.rank, process, process.pid, step, phase
        )
        self._injector.strike([(injection, target)])
        return True

    def _arm(self, injection: Injection) -> None:
        """Have the process that has the rank now stop at the next entry of the phase."""
        holder = self._roster.holder(injection.fault.rank)
        if holder is not None and holder.worker != injection.armed:
            rank, role = injection.fault.place_of_rank
            trigger = Trigger(injection.fault_id, rank, -1, injection.fault.phase, role=role)
            assert self._channel is not None
            if self._channel.tell(holder.node, ArmTriggers((trigger,)), holder.worker):
                injection.armed = holder.worker

    def _say(self, message: Message) -> None:
        with contextlib.suppress(
            OSError
        ):  # a coordinator that is gone: what waits for an answer asks again
            self._cluster.send(message)

    def _process_of(self, holder: Holder) -> Process:
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

    # -- after the run --------------------------------------------------------------------------------------------

    async def close(self, records: list[Record]) -> None:
        """All processes are gone. What is known only now is evidence, too; then everything is put back.

        Args:
            records: of the journals: which rank was struck too late, and how a target's parent saw it end.
        """
        if self._following is not None:
            self._following.cancel()
        self._look_back(records)
        await self._injector.settle()
        await self._injector.close()
        self._requests.on_new = lambda: None

    def _look_back(self, records: list[Record]) -> None:
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
                target.tell_exit(Exit(record["how"], record["status"]), record.t_ns)
            elif target.gone_ns:
                target.tell_exit(GONE, target.gone_ns)


class _Literal(str):
    """A value that is shown as it came, without further quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    loop.call_soon_threadsafe(woken.set)


def explains(injection: Injection, lost: WorkerLost) -> bool:
    """Whether the loss is the doing of the fault."""
    target = injection.struck
    if target is None or lost.cause not in injection.fault.leads_to:
        return False
    return lost.worker in target.claims or (
        injection.fault.whole_node and lost.node in target.struck_nodes
    )
