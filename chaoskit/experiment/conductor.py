"""The harness's side of a running job: strikes with each fault at its moment, and gathers evidence."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

from chaoskit.errors import BadInput, HarnessError
from chaoskit.experiment.aim import Holder, Roster
from chaoskit.experiment.plan import Experiment
from chaoskit.experiment.requests import Requests
from chaoskit.experiment.strike import GONE, Strike, Striker
from chaoskit.journal import Journal, Record
from chaoskit.messages import (
    Arm,
    EndJob,
    Heartbeat,
    HookReached,
    Lever,
    LeverPulled,
    Message,
    Pong,
    Release,
    Trigger,
    WorkerFailed,
    WorkerLost,
    WorldSize,
)
from chaoskit.osprocess import is_ending, start_ticks, undisturbed
from chaoskit.substrate.base import Cluster
from chaoskit.substrate.object_proxy import ObjectProxy
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event, RunEnd
from faults.base import Target

Watch = Callable[[Any], None]
#: Called with the cluster whenever nothing was heard for a moment: no node lives, or no coordinator.
WhenSilent = Callable[[Cluster], None]

_IDLE_S = 0.2
_OBSERVE_S = 0.004  # where a rank stands at its hook, or a fault has just acted
_LOOK_SHARE = 0.02  # of the time since the act: the longer its evidence takes, the less often it is looked for
_FRESH_S = 0.5  # within which the loss of a rank that was struck becomes known
_TOLD_AGAIN_S = 1.0  # an order may be lost with a coordinator
_TOGETHER_S = 3.0  # how long a rank waits at its hook for another one that is due at the same moment of a step
_TOGETHER_IN_RECOVERY_S = 1.0  # where some of the ranks may never come


class Conductor(Striker):
    """Hears everything, and acts when the moment of a fault has come."""

    def __init__(
        self,
        experiment: Experiment,
        cluster: Cluster,
        journal: Journal,
        undo: UndoLog,
        watch: Watch,
        store: ObjectProxy | None = None,
        requests: Requests | None = None,
        when_silent: WhenSilent | None = None,
    ) -> None:
        super().__init__(experiment.faults, journal)
        self._cluster, self._undo, self._watch, self._store = cluster, undo, watch, store
        self._requests, self._when_silent = requests or Requests(), when_silent
        self._config = experiment.config
        self._roster = Roster()
        self._detections = 0

    def conduct(self, deadline_s: float) -> EndJob | None:
        """Until the job ends; None when the deadline (on the monotonic clock) passed first.

        Raises:
            HarnessError: if the coordinator died. BadInput: if the job refused its input.
        """
        while time.monotonic() < deadline_s:
            for request in self._requests.take():
                self._say(request)
            try:
                message = self._cluster.receive(self._patience_s())
            except ConnectionError as error:
                self._look_for_evidence()
                self.run_end = RunEnd.COORDINATOR_LOST
                raise HarnessError(f"the coordinator ended early: {error}; see its log") from error
            if message is not None:
                self._watch(message)
                self._hear(message)
            elif self._when_silent is not None:
                self._when_silent(self._cluster)
            if isinstance(message, EndJob):
                self._note_acts()
                self._look_for_evidence()
                self._sum_up()
                self.run_end = RunEnd.ENDED
                return message
            self._strike_due()
            self._go_on()
            self._look_for_evidence()
        self.run_end = RunEnd.DEADLINE
        return None

    def _place_of(self, worker: str) -> dict[str, Any]:
        roster = self._roster
        return {
            "rank": roster.rank_of(worker),
            "node": roster.node_of(worker),
            "pid": roster.pid_of(worker),
            "generation": roster.generation,
        }

    @property
    def first_node(self) -> str:
        """Where rank 0 is, in the newest membership: it commits what is stored. Empty before the first."""
        return self._roster.places.get(0, "")

    def _patience_s(self) -> float:
        """How long to wait for a message before there may be something to do without one."""
        if any(strike.hook for strike in self.strikes):
            return _OBSERVE_S
        begun_s, now_s = self._roster.first_commit_s, time.monotonic()
        times = [strike.fault.after_s for strike in self.strikes if not strike.struck]
        due = [begun_s + after_s - now_s for after_s in times if after_s is not None and begun_s is not None]
        looks = [_LOOK_SHARE * one.target.seconds_since for one in self.strikes if one.target and one.awaits_evidence]
        acting = [(one.fault, one.target) for one in self.strikes if one.target and not one.missed]
        acts = [fault.next_act_s(target) - target.seconds_since for fault, target in acting]
        return max(_OBSERVE_S, min([_IDLE_S, *due, *looks, *(wait_s for wait_s in acts if wait_s > 0)]))

    def _hear(self, message: Any) -> None:
        self._requests.hear(message)
        match message:
            case HookReached():
                self._answer(message)
                return
            case WorldSize(wanted=wanted):
                self._cluster.provide(wanted)
            case WorkerFailed(refused=(field, value, remedy)):
                raise BadInput(field, _Literal(value), remedy)
        lost = self._roster.member(message.worker) if isinstance(message, WorkerLost) else None
        if not isinstance(message, WorkerLost):
            self._roster.hear(message)
        for strike in self.strikes:
            if strike.target is not None and not strike.missed:
                _note(strike.target, message)
                strike.fault.again(strike.target, message)
        if isinstance(message, WorkerLost):
            self._roster.hear(message)
            self._count_detection(message, had_rank=lost is not None)

    def _count_detection(self, lost: WorkerLost, *, had_rank: bool) -> None:
        """The n-th loss that answers a fault is the moment of those that strike after detection."""
        strike = next((one for one in self.strikes if not one.answered and explains(one, lost)), None)
        if strike is None or not had_rank:
            return
        strike.answered = True
        self._detections += 1
        for other in self.strikes:
            if other.fault.during == "detection" and other.fault.recovery == self._detections and not other.struck:
                self._strike_directly(other, missed_if_absent=True)

    # -- the moment -----------------------------------------------------------------------------------------------

    def _answer(self, hook: HookReached) -> None:
        """A worker stands at a trigger."""
        strike = next(strike for strike in self.strikes if strike.fault_id == hook.fault)
        if not strike.struck:
            if strike.hook is None:
                strike.hook, strike.hook_s = hook, time.monotonic()
            return
        if strike.target is not None and strike.fault.again(strike.target, hook):
            return
        # said twice because the answer was lost: the same again; else whoever came after the one that was struck
        said = strike.target.releases.get(hook.worker) if strike.target is not None else None
        self._say(said or Release(hook.worker, hook.fault, Lever("none")))

    def _strike_due(self) -> None:
        """Strike whoever stands at a hook, together with all that are due there; and those whose time has come."""
        now_s = time.monotonic()
        for strike in self.strikes:
            if strike.hook is not None and not self._awaits_others(strike, now_s):
                self._strike_together([one for one in self.strikes if one.hook and one.place == strike.place])
        begun_s = self._roster.first_commit_s
        for strike in self.strikes:
            after_s = strike.fault.after_s
            if after_s is not None and begun_s is not None and now_s >= begun_s + after_s and not strike.struck:
                if strike.fault.from_outside:
                    self._strike_directly(strike)
                else:
                    self._arm(strike)

    def _awaits_others(self, strike: Strike, now_s: float) -> bool:
        """Whether another rank that is due at the same moment may still come."""
        limit_s = _TOGETHER_S if strike.fault.during is None else _TOGETHER_IN_RECOVERY_S
        if now_s - strike.hook_s > limit_s:
            return False
        return any(
            other.hook is None and not other.struck and self._roster.holder(other.fault.rank) is not None
            for other in self.strikes
            if other.place == strike.place
            and isinstance(other.fault.rank, int)
            and other.fault.rank != strike.fault.rank
        )

    def _strike_together(self, strikes: list[Strike]) -> None:
        """At one moment: whoever is struck must not have been seen to go by another one that is."""
        with undisturbed():
            struck = [strike for strike in strikes if self._strike_at_hook(strike)]
        for strike in struck:
            self._write_down(strike)

    def _strike_at_hook(self, strike: Strike) -> bool:
        """Whether it was injected."""
        hook, strike.hook = strike.hook, None
        assert hook is not None
        worker, rank, pid, tid = hook.worker, hook.rank, hook.pid, hook.tid
        if self._roster.is_lost(worker) or is_ending(pid):  # it may be whoever has the rank next
            self._say(Release(hook.worker, hook.fault, Lever("none")))
            return False
        if strike.fault.rank == "healer":
            healer = self._roster.member(hook.peer)
            if healer is None or self._is_doomed(healer):
                strike.missed = f"the healer {hook.peer} was lost before it could be struck"
                self._say(Release(hook.worker, hook.fault, Lever("none")))
                return False
            worker, rank, pid, tid = healer.worker, healer.rank, healer.pid, healer.pid
        target = self._target(strike, worker, rank, pid, tid, hook.step, hook.phase, waiting=hook.worker)
        return self._inject(strike, target)

    def _strike_directly(self, strike: Strike, *, missed_if_absent: bool = False) -> None:
        """Strike whoever has the rank now, wherever it stands. Nobody has it: a moment that passes is missed."""
        holder = self._roster.holder(strike.fault.rank)
        if holder is None or self._is_doomed(holder):
            if missed_if_absent:
                strike.missed = f"nobody held rank {strike.fault.rank} {strike.fault.moment}"
            return
        worker, pid, step = holder.worker, holder.pid, self._roster.step
        target = self._target(strike, worker, holder.rank, pid, pid, step, strike.fault.during or "")
        if self._inject(strike, target):
            self._write_down(strike)

    def _is_doomed(self, holder: Holder) -> bool:
        """Whether it ends, or was struck a moment ago: the same death must not be evidence of two faults."""
        since_ns = time.monotonic_ns() - int(_FRESH_S * 1e9)
        claims = [strike.target.claims.get(holder.worker, 0) for strike in self.strikes if strike.target is not None]
        return is_ending(holder.pid) or any(struck_ns > since_ns for struck_ns in claims)

    def _arm(self, strike: Strike) -> None:
        """Have whoever has the rank now stop at the next entry of the phase."""
        holder, (armed, armed_s), now_s = self._roster.holder(strike.fault.rank), strike.armed, time.monotonic()
        if holder is not None and (holder.worker != armed or now_s > armed_s + _TOLD_AGAIN_S):
            strike.armed = (holder.worker, now_s)
            trigger = Trigger(strike.fault_id, -1, -1, strike.fault.phase)
            self._say(Arm(holder.node, holder.worker, trigger))

    def _say(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # a coordinator that is gone: whoever waits for an answer asks again
            self._cluster.send(message)

    def _target(
        self, strike: Strike, worker: str, rank: int, pid: int, tid: int, step: int, phase: str, waiting: str = ""
    ) -> Target:
        node = self._roster.node_of(worker)
        rack = self._config.rack(node)
        return Target(
            cluster=self._cluster,
            undo=self._undo,
            fault_id=strike.fault_id,
            worker=worker,
            node=node,
            rank=rank,
            step=step,
            phase=phase,
            pid=pid,
            tid=tid,
            ticks=start_ticks(pid),
            waiting=waiting,
            places=self._roster.places,
            rack=tuple(name for name in self._cluster.nodes if self._config.rack(name) == rack),
            struck_nodes={node},
            config=self._config,
            store=self._store,
        )

    # -- after the run --------------------------------------------------------------------------------------------

    def look_back(self, records: list[Record]) -> None:
        """What is known only after the run: who was struck too late, and how a target's parent saw it end."""
        exits = {record["worker"]: record for record in records if record.event == Event.WORKER_EXITED}
        ended_ns = min((record.t_ns for record in records if record.event == Event.JOB_ENDED), default=math.inf)
        for strike in self.strikes:
            if strike.target is None or strike.missed:
                continue
            if strike.target.injected_ns > ended_ns:
                strike.missed = "the job had ended"
            if strike.missed or strike.effective_ns is not None:
                continue
            record, seen_ns = exits.get(strike.target.worker), strike.target.gone_ns
            if record is not None:
                strike.target.exited, seen_ns = (record["how"], record["status"]), record.t_ns
            elif seen_ns:
                strike.target.exited = GONE
            else:
                continue
            observed = strike.fault.observe(strike.target)
            if observed is not None:
                self._confirm(strike, seen_ns, observed)


class _Literal(str):
    """A value that is shown as it came, without further quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explains(strike: Strike, lost: WorkerLost) -> bool:
    """Whether the loss is the doing of the fault."""
    target = strike.target
    if target is None or strike.missed or lost.cause not in strike.fault.leads_to:
        return False
    return lost.worker in target.claims or (strike.fault.whole_node and lost.node in target.struck_nodes)


def _note(target: Target, message: Any) -> None:
    """Keep what ``message`` says about the target of a fault."""
    match message:
        case WorkerLost(worker):
            if worker in target.claims:
                target.losses[worker] = message
            if worker == target.worker:
                target.lost = message
        case LeverPulled(fault=fault) if fault == target.fault_id:  # of whatever worker: some strike several
            target.reports.append(message)
        case Pong(worker, number) if worker == target.worker:
            target.pongs.add(number)
        case Heartbeat(node, beats) if node == target.node:
            now_s = time.monotonic()
            for beat in beats:
                if beat.worker == target.worker:
                    target.beat = (now_s, beat)
