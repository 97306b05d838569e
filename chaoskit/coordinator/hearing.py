"""What is heard: every message of a worker, a node or an observer goes to whoever decides about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from chaoskit.config import RunConfig
from chaoskit.coordinator.inheritance import Inheritance
from chaoskit.coordinator.losses import difference
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.limits import Limits
from chaoskit.coordinator.membership.policies import Policies
from chaoskit.coordinator.membership.repeats import Repeats
from chaoskit.coordinator.outputs import Note, Output, Remember, Send, Show
from chaoskit.coordinator.schedules.save_schedule import Timetable, halting_step
from chaoskit.errors import Refused
from chaoskit.vocabulary import CORRUPT, Event
from chaoskit.wire.lease import REPORT_SHARE
from chaoskit.wire.messages import (
    Accuse,
    EndJob,
    Formed,
    GroupBroken,
    Halt,
    Healed,
    HealthReport,
    Heard,
    Heartbeat,
    LendNodes,
    LinesMatched,
    LinksMeasured,
    LinksTested,
    NoticeCancelled,
    ReturnNodes,
    RuleFired,
    ScaleTo,
    Sealed,
    SourceFailed,
    SpotNotice,
    StopWorker,
    WorkerDone,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)

#: What a coordinator listens to, beside heartbeats.
_HEARD = (
    *(WorkerReady, WorkerFailed, WorkerDone, Formed, Healed, GroupBroken, Accuse),
    *(
        WorkerLost,
        LinksTested,
        LinksMeasured,
        HealthReport,
        Sealed,
        SourceFailed,
        LinesMatched,
        RuleFired,
    ),
    *(ScaleTo, LendNodes, SpotNotice, NoticeCancelled, ReturnNodes, Halt, EndJob),
)
#: A heartbeat that follows so many intervals after one that was answered is answered, too.
_UNANSWERED_BEATS = 1.2
#: A lease that is longer is hardly shorter by an answer that is left out.
_LONG_LEASE_BEATS = 25


class Hearing(Inheritance):
    """Decisions, by what others say."""

    def __init__(
        self,
        config: RunConfig,
        memory: Sequence[Remember],
        now_s: float,
        policies: Policies,
        limits: Limits,
    ) -> None:
        super().__init__(config, memory, now_s, policies, limits)
        self._repeats = Repeats(tolerated=config.nodes)
        self._beats_are_fresh = False
        self._answered_s: dict[str, float] = {}  # by node
        beat_s = config.heartbeat_ms / 1000 * REPORT_SHARE
        # a short lease is prolonged as often as can be
        self._answer_s = (
            _UNANSWERED_BEATS * beat_s
            if config.coordinator_outage_s > _LONG_LEASE_BEATS * beat_s
            else 0.0
        )
        self._timetable = Timetable(config.disk.every_s if config.disk is not None else 0.0)

    def hear(self, message: Any, now_s: float) -> list[Output]:
        """A message of an agent, of a worker through its agent, or of an observer.

        Raises:
            Refused: if it is none that a coordinator listens to.
        """
        if isinstance(message, Heartbeat):  # nearly all that is ever heard
            return [Show(message), *self._hear_beats(message, now_s)]
        if not isinstance(message, _HEARD):
            raise Refused(f"unexpected {type(message).__name__}")
        if not isinstance(
            message, WorkerFailed
        ):  # most of these are a matter of the agent, which reports the loss
            self._facts.note(message)
        looked = self._look_at_beats(now_s)  # they were said before this, and may not hold after it
        shown: list[Output] = [Show(message)]
        for listen in (self._hear_worker, self._hear_node, self._hear_observer):
            if (outputs := listen(message, shown, now_s)) is not None:
                return looked + outputs
        raise AssertionError(f"{type(message).__name__} is heard by none")

    def _hear_worker(self, message: Any, shown: list[Output], now_s: float) -> list[Output] | None:
        match message:
            case WorkerReady():
                return shown + self._note_ready(
                    message, now_s
                )  # shown before the plan that it makes possible
            case WorkerFailed(worker, error, fatal):
                fatal = fatal or self._repeats.note(error, self._watch.committed, worker)
                if not fatal or self._membership.outlives(worker):
                    return []  # the agent reports the loss
                self._facts.note(message)
                return shown + self._advance(events.JobFailed(error), now_s)
            case WorkerDone(worker, step, digest, generation):
                if self._is_of_the_past(generation):
                    return shown
                among = self._policies.compared(self._config, self._membership.members)
                problem = self._results.note(worker, digest, among)
                event = events.JobFailed(problem) if problem else events.WorkerDone(worker, step)
                return self._advance(event, now_s) + shown
            case Formed(worker, generation):
                return shown + self._note_formed(worker, generation, now_s)
            case Healed(worker, generation):
                if self._is_of_the_past(generation):
                    return shown
                return shown + self._advance(events.Healed(worker, generation), now_s)
            case GroupBroken():
                self._note_broken(message, now_s)
                return shown
            case Accuse():
                return self._hear_accusation(message, now_s) + shown
        return None

    def _hear_accusation(self, message: Accuse, now_s: float) -> list[Output]:
        """Every rank accuses. A worker that is lost already, for whatever reason, has left copies all the same."""
        outputs: list[Output] = []
        fresh = tuple(name for name in message.accused if not self._membership.is_convicted(name))
        if message.cause == CORRUPT and fresh:
            outputs += self._advance(events.Convicted(fresh), now_s)
        for name in message.accused:
            if name in self._membership.members:
                outputs += self._stop_and_lose(name, message.cause, message.detail, now_s)
        return outputs

    def _hear_node(self, message: Any, shown: list[Output], now_s: float) -> list[Output] | None:
        match message:
            case WorkerLost(worker, node, cause, detail, detected_ns, trained_in):
                if self._end is not None and not self._end.ok:
                    return []  # the loss follows from the failure that ended the job
                if self._membership.host_of(worker) is None:
                    return [
                        Send(node, StopWorker(worker, cause))
                    ]  # is in the record: need not be said again
                lost = events.WorkerLost(worker, cause, detail, detected_ns, trained_in=trained_in)
                self._ended.add(worker)
                settled = self._note_trained(trained_in, now_s)
                if (
                    self._membership.host_of(worker) is None
                ):  # it was to leave as soon as its generation had worked
                    self._ended.discard(worker)
                    return settled
                return settled + self._lose_worker(lost, now_s)
            case LinksTested(node, number, unreachable):
                self._links.answer(node, number, unreachable)
                return self._look_at_links(now_s)
            case LinksMeasured():
                return self._hear_of_links(message, now_s)
            case HealthReport():
                return self._note_health(message, now_s)
            case Sealed(node, snapshots, number, committed):
                return (
                    self._advance(events.Sealed(node, snapshots, number, committed), now_s) + shown
                )
            case SourceFailed(_, snapshot, corrupt):
                return self._advance(events.SourceFailed(snapshot, corrupt), now_s) + shown
            case LinesMatched(worker, rules):
                self._rulings.note_matches(worker, rules)
                return []
            case RuleFired():
                return shown + self._follow_rule(message, now_s)
        return None

    def _hear_observer(
        self, message: Any, shown: list[Output], now_s: float
    ) -> list[Output] | None:
        match message:
            case ScaleTo() | LendNodes() | SpotNotice() | NoticeCancelled() | ReturnNodes():
                return self._ask_for(message, now_s)
            case Halt():
                return [*shown, *self._halt(message, now_s)]
            case EndJob(reason=reason):
                return self._advance(
                    events.JobFailed(reason), now_s
                )  # remembered, like every decision
        return None

    def _halt(self, wish: Halt, now_s: float) -> list[Output]:
        """Have all ranks end after the same step. A job without ranks ends now."""
        if not self._membership.world:
            return self._advance(events.JobFailed(wish.reason_without_ranks), now_s)
        if self._halt_order is None:
            heard_s = self._config.heartbeat_ms / 1000
            self._halt_order = Halt(
                wish.reason, halting_step(self._watch.committed, self._watch.step_s, heard_s)
            )
        return self._tell_halt(sorted(self._membership.nodes))

    def _hear_beats(self, heartbeat: Heartbeat, now_s: float) -> list[Output]:
        heard = self._answer_beat(heartbeat, now_s)
        if heartbeat.node not in self._membership.nodes:
            return heard  # it waits for the others
        self._contact.beat(heartbeat.node, now_s)
        live = [
            beat for beat in heartbeat.beats if self._membership.host_of(beat.worker) is not None
        ]
        settled = [output for beat in live for output in self._note_trained(beat.trained_in, now_s)]
        self._watch.hear(live, now_s)
        self._workload.hear(live)
        for beat in live:
            self._timetable.saw(beat.step, beat.generation, now_s)
        self._beats_are_fresh = True
        started = self._start(self._deferral.observe(heartbeat.beats, now_s), now_s)
        return [*heard, *settled, *started, *self._look_at_clocks(heartbeat, now_s)]

    def _answer_beat(self, heartbeat: Heartbeat, now_s: float) -> list[Output]:
        """Prolong the lease of a node, with each second heartbeat: each answer wakes its agent up."""
        if now_s < self._answered_s.get(heartbeat.node, -math.inf) + self._answer_s:
            return []
        self._answered_s[heartbeat.node] = now_s
        return [Send(heartbeat.node, Heard(heartbeat.sent_ns))]

    def _look_at_beats(self, now_s: float) -> list[Output]:
        """What follows from the beats of all nodes together, if any was heard since the last look."""
        if not self._beats_are_fresh:
            return []
        self._beats_are_fresh = False
        return [
            *self._dismiss_behind(now_s),
            *self._look_for_hangs(now_s),
            *self._look_at_workload(now_s),
        ]

    def _note_ready(self, ready: WorkerReady, now_s: float) -> list[Output]:
        known, fingerprint = self._membership.is_ready(ready.worker), self._membership.fingerprint
        if (
            fingerprint
            and ready.fingerprint != fingerprint
            and self._membership.host_of(ready.worker) is not None
        ):
            return self._stop_and_lose(
                ready.worker, "differs", difference(ready.fingerprint, fingerprint), now_s
            )
        event = events.WorkerReady(ready.worker, ready.node, ready.endpoint, ready.fingerprint)
        outputs = self._advance(event, now_s)
        if not known and ready.worker in self._membership.spares:
            outputs.append(Note(Event.SPARE_READY, {"worker": ready.worker}))
        return outputs

    def _is_of_the_past(self, generation: int) -> bool:
        """Whether a member speaks of a piece of the state that it must take over again."""
        return self._config.job.sharded and generation != self._membership.generation
