"""Incidents of a run, their causes, false alarms, and the recovery from each, phase by phase.

-> runlog/outcome.py: the recovery time that a test asserts on. runlog/account/accountant.py: the
use of the whole run's time; it follows a live run, too. faults/base.py: the causes of a loss that a
fault explains (``leads_to``). experiment/judge/judge.py turns all of it into checks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from chaoskit.experiment.run.disruptions import (
    disturbing_pods,
    standbys_needed_until_ns,
    taken_in_words,
)
from chaoskit.experiment.run.run import RawRun
from chaoskit.journal import Record
from chaoskit.runlog import phase_baselines
from chaoskit.runlog.history import FinishedStep, History
from chaoskit.runlog.injected import InjectionRecord, Struck
from chaoskit.runlog.outcome import PhaseSpan, Recovery
from chaoskit.runlog.redundancy import restored_ns, windows
from chaoskit.vocabulary import LOG_RULE, RECOVERY_PHASES, Event

#: A loss may be noticed this much earlier than the first sign that its pod ends.
_BEFORE_SIGN_NS = 2_000_000_000
_ENDS = (Event.COMMIT, Event.SKIP)
_NOTICES = (Event.DETECTED, Event.NONFINITE, Event.CORRUPT, Event.RECORD_LOST)


@dataclass(frozen=True, slots=True)
class Incident:
    """A loss or bad numbers, with the cause: a fault, or the unexpected end of a pod.

    Attributes:
        strike: the fault that caused it, or None.
        detected: the record of the detection.
        injected_ns: the time at which the fault acted on the worker, or the pod began to end; at
            the latest that of the detection.
        taken_pod: the record of the pod that caused it, or None.
    """

    strike: InjectionRecord | None
    detected: Record
    injected_ns: int
    taken_pod: Record | None = None

    @property
    def cause(self) -> str | None:
        """The cause in words, or None if it is not known."""
        if self.strike is not None:
            return str(self.strike.fault)
        return None if self.taken_pod is None else taken_in_words(self.taken_pod)


class Timeline:
    """The incidents of a run, and the recovery from each.

    Attributes:
        windows: the times during which pieces of a sharded state lacked copies.
        taken_pods: records of pods that something other than the run took away, by the time of
            their first sign.
    """

    def __init__(self, run: RawRun, history: History) -> None:
        self._run, self._history = run, history
        self._index = run.index
        self._config = run.experiment.config
        self._resize_records = self._index.of(Event.RESIZED)
        # worker -> faults that acted on this worker itself
        self._direct_strikes: dict[str, list[InjectionRecord]] = defaultdict(list)
        # faults that may have struck further workers
        self._wide_strikes: list[InjectionRecord] = []
        for strike in run.injections:
            for worker in strike.target.claims if strike.target is not None else ():
                self._direct_strikes[worker].append(strike)
            if strike.fault.whole_node or strike.fault.blameless:
                self._wide_strikes.append(strike)
        self.taken_pods = self._index.of(Event.POD_TAKEN)
        self.windows = windows(run.records, self._config.memory_copies)

    def incidents(self) -> tuple[list[Incident], list[Record]]:
        """Return the incidents by time, and the detections without a known cause.

        Each of these detections is a false alarm, unless :func:`raised_by_job` explains it. A
        detection after the end of the job is ignored. The loss of a worker without a rank that a
        fault or a pod explains is no incident. Non-finite numbers that no fault explains are in
        neither list.
        """
        incidents: dict[tuple[str, str], Incident] = {}
        alarms = []
        for record in self._index.of(*_NOTICES):
            if record.t_ns > self.end_ns:
                break
            explanation, taken_pod = self._explanation(record), self._pod_taken(record)
            if taken_pod is not None and (
                explanation is None or explanation[1] < taken_pod.t_ns <= record.t_ns
            ):
                if record.get("rank") is not None:
                    noticed_ns = min(taken_pod.t_ns, record.t_ns)
                    incidents.setdefault(
                        (taken_pod["pod"], ""), Incident(None, record, noticed_ns, taken_pod)
                    )
                continue
            if explanation is None:
                alarms += [record] if _is_alarm(record, bool(incidents)) else []
                continue
            strike, acted_ns = explanation
            if record.event == Event.DETECTED and record["rank"] is None:
                continue  # a spare, or a replacement that is starting: no rank has to recover
            # all losses on a node are one incident
            worker = "" if strike.fault.whole_node else record["worker"]
            incidents.setdefault((strike.fault_id, worker), Incident(strike, record, acted_ns))
        return sorted(
            incidents.values(), key=lambda incident: incident.injected_ns
        ), _unique_alarms(alarms)

    def _explanation(self, record: Record) -> tuple[InjectionRecord, int] | None:
        """Return the fault that a notice belongs to and when it acted on the worker, or None.

        Corrupt data may be noticed by the rank that receives it, while the fault struck the rank
        that sent it.
        """
        if record.event == Event.RECORD_LOST:
            return None  # no fault removes the coordinator's record
        for worker in (record["worker"], *record.get("sources", ())):
            if explanation := self._last_strike(worker, record):
                return explanation
        return None

    def _pod_taken(self, record: Record) -> Record | None:
        """Return the last pod taken before a loss with the lost worker on its node, or None.

        The first sign of the pod's end may come up to two seconds after the loss.
        """
        if record.event not in (Event.DETECTED, Event.RECORD_LOST):
            return None
        earlier_pods = [
            taken_pod
            for taken_pod in self.taken_pods
            if taken_pod.t_ns <= record.t_ns + _BEFORE_SIGN_NS
        ]
        return next(
            (
                taken_pod
                for taken_pod in reversed(earlier_pods)
                if self._was_lost_with(taken_pod, record)
            ),
            None,
        )

    def _was_lost_with(self, taken_pod: Record, record: Record) -> bool:
        """Return whether a loss followed from the end of a pod: the worker was on its node then."""
        if record.event == Event.RECORD_LOST:  # the record was in the coordinator's pod
            return bool(taken_pod["role"] == "coordinator")
        replacement = self._index.first(
            Event.NODE_REPLACED,
            taken_pod.t_ns,
            lambda replaced: replaced["node"] == taken_pod["node"],
        )
        return any(
            node == taken_pod["node"] and (replacement is None or since_ns <= replacement.t_ns)
            for node, since_ns in self._nodes_of_workers.get(record["worker"], ())
        )

    @cached_property
    def _nodes_of_workers(self) -> dict[str, list[tuple[str, int]]]:
        """Worker -> its nodes, each with the time from which a record shows the worker there."""
        nodes_of_workers = {
            worker: [(start.source, start.t_ns) for start in starts]
            for worker, starts in self._starts.items()
        }
        for plan in self._index.of(Event.PLAN):  # the record of a start may be lost with its node
            for member in plan["members"]:
                nodes_of_workers.setdefault(member["worker"], [(member["node"], plan.t_ns)])
        return nodes_of_workers

    def _last_strike(self, worker: str, record: Record) -> tuple[InjectionRecord, int] | None:
        """Return the last fault that struck ``worker`` before the notice, and when; or None.

        The worker survived earlier faults.
        """
        latest: tuple[InjectionRecord, int] | None = None
        for strike in (*self._direct_strikes.get(worker, ()), *self._wide_strikes):
            acted_ns = self._acted_ns(strike, worker, record)
            if (
                acted_ns is not None
                and record.t_ns >= acted_ns
                and (latest is None or acted_ns > latest[1])
            ):
                latest = strike, acted_ns
        return latest

    def _acted_ns(self, strike: InjectionRecord, worker: str, record: Record) -> int | None:
        """Return when ``strike`` acted on ``worker``, in ns; None if it explains no such notice."""
        target = strike.target
        if target is None or strike.missed or _cause(record) not in strike.fault.leads_to:
            return None
        acted_ns = target.claims.get(worker)
        if strike.fault.blameless and record.event == Event.DETECTED:
            # any process that reads the bad data may print a matching line
            return target.injected_ns if record["cause"] == LOG_RULE else None
        if acted_ns is None and strike.fault.whole_node and self._was_started_there(worker, target):
            acted_ns = target.injected_ns
        return acted_ns

    def shows(self, strike: InjectionRecord) -> bool:
        """Return whether the loss or bad numbers followed that a fault of this kind must cause.

        It is True for a fault that need not cause any.

        One loss may show several faults.
        """
        if not strike.fault.must_show or strike.target is None:
            return not strike.fault.must_show
        events = (*_NOTICES, Event.NODE_LOST, Event.EVICTED)
        since_ns = strike.target.injected_ns
        return any(
            self._is_shown_by(strike, record)
            for event in events
            for record in self._index.since(event, since_ns)
        )

    def _is_shown_by(self, strike: InjectionRecord, record: Record) -> bool:
        """Return whether a notice is the one that a fault must cause."""
        target = strike.target
        if target is None:
            return False
        if record.event in (Event.NODE_LOST, Event.EVICTED) and strike.fault.whole_node:
            return record["node"] in target.struck_nodes and record.t_ns >= target.injected_ns
        if record.event not in _NOTICES or record.event == Event.RECORD_LOST:
            return False
        if not record["worker"]:  # a non-finite sum names no rank
            return _cause(record) in strike.fault.must_show and record.t_ns >= target.injected_ns
        times = [
            self._acted_ns(strike, worker, record)
            for worker in (record["worker"], *record.get("sources", ()))
        ]
        return any(acted_ns is not None and record.t_ns >= acted_ns for acted_ns in times)

    def _was_started_there(self, worker: str, target: Struck) -> bool:
        """Return whether ``worker`` was started on a struck node before the last act there."""
        return any(
            record.source in target.struck_nodes and record.t_ns <= target.acted_ns
            for record in self._starts.get(worker, ())
        )

    @cached_property
    def _starts(self) -> dict[str, list[Record]]:
        """Worker -> the records of its starts."""
        starts: dict[str, list[Record]] = defaultdict(list)
        for record in self._index.of(Event.WORKER_STARTED):
            starts[record["worker"]].append(record)
        return starts

    @cached_property
    def end_ns(self) -> int:
        """The end of the job in ns; the end of the run if the job's end was not recorded."""
        end_record = self._index.first(Event.JOB_ENDED)
        return self._run.ended_ns if end_record is None else end_record.t_ns

    @cached_property
    def disturbed_by(self) -> list[Record]:
        """The records of taken pods that the job, or a fault, still needed."""
        returns = self._index.of(Event.NODE_REPLACED, Event.RESUMED)
        return disturbing_pods(
            self.taken_pods, self.end_ns, standbys_needed_until_ns(self._run.injections, returns)
        )

    def impact(self, incident: Incident) -> str:
        """Return in words how the job was affected by the incident."""
        record = incident.detected
        if record.event == Event.NONFINITE:
            return f"step {record['step']}: the contribution of rank {record['owner']} was found to be non-finite"
        if record.event == Event.CORRUPT:
            return f"step {record['step']}: {record['what']} of rank {record['rank']} was corrupt ({record['verdict']})"
        given_up = f"rank {record['rank']} was given up: {record['cause']} ({record['detail']})"
        return (
            given_up
            if incident.taken_pod is None
            else f"{given_up}; {taken_in_words(incident.taken_pod)}"
        )

    def recovery(self, incident: Incident) -> Recovery | None:
        """Return the recovery from an incident, phase by phase.

        The result is None if no step was finished by a new membership after it, or none was needed:
        the step was computed again, or its batch was skipped.
        """
        if incident.detected.get("verdict") == "transient":
            return None  # the step was computed again without a replacement
        regroup = self._index.first(
            Event.PLAN, incident.detected.t_ns, lambda record: bool(record["abort"])
        )
        if regroup is None or self._was_finished_by(incident.detected, regroup.t_ns):
            return None
        position = bisect_left(self._newest_generations, regroup["generation"])
        if position == len(self._newest_generations):
            return None
        good_step = self._history.finished[position]
        generation, good_ns = good_step.generation, good_step.end_ns
        step_s = self._step_seconds(incident.injected_ns)
        spans = self._spans(incident, regroup, good_step, self._full_strength_ns[position], step_s)
        world = self._world_size(generation)
        full_ns = self._full_strength_ns[position]
        return Recovery(
            cause=self.impact(incident),
            fault=incident.cause,
            injected_s=self._since_start_s(incident.injected_ns),
            generation=generation,
            world=world,
            spans=spans,
            seconds=(good_ns - incident.injected_ns) / 1e9,
            full_strength_seconds=None
            if full_ns is None
            else (full_ns - incident.injected_ns) / 1e9,
            step_seconds=step_s,
        )

    def _was_finished_by(self, notice: Record, t_ns: int) -> bool:
        """Return whether a non-finite step was finished by then.

        A later event then has another cause.
        """
        if notice.event != Event.NONFINITE:
            return False
        ends = (
            self._index.first(event, notice.t_ns, lambda record: record["step"] == notice["step"])
            for event in _ENDS
        )
        return any(end is not None and end.t_ns < t_ns for end in ends)

    def _since_start_s(self, t_ns: int) -> float:
        """Return a time in seconds since the start of the run."""
        return (t_ns - self._run.started_ns) / 1e9

    @cached_property
    def _newest_generations(self) -> list[int]:
        """The newest generation that has finished a step so far, by place in the history."""
        return list(accumulate((step.generation for step in self._history.finished), max))

    @cached_property
    def _full_strength_ns(self) -> list[int | None]:
        """The end in ns of the next step in a world of full size, by place in the history.

        It is None where no such step follows.
        """
        ends_ns: list[int | None] = []
        next_ns = None
        for step in reversed(self._history.finished):
            next_ns = step.end_ns if step.world == self._full_world_size(step.end_ns) else next_ns
            ends_ns.append(next_ns)
        return ends_ns[::-1]

    @cached_property
    def _step_durations(self) -> tuple[list[float], NDArray[np.float64]]:
        """The end of each step but the first, in seconds since the start, and its duration."""
        points = self._history.points(self._run.started_ns)[1:]
        return [point.at_s for point in points], np.array([point.seconds for point in points])

    def _step_seconds(self, before_ns: int) -> float:
        """Return the median duration, in seconds, of the steps before a time, or else of all steps.

        It is 0 without steps.
        """
        ends_s, seconds = self._step_durations
        count = bisect_right(ends_s, self._since_start_s(before_ns)) or len(ends_s)
        ordered = np.sort(seconds[:count])
        return float((ordered[(count - 1) // 2] + ordered[count // 2]) / 2) if count else 0.0

    def _world_size(self, generation: int) -> int:
        """Return the number of ranks in a generation.

        A coordinator may end before it has written its plan; then the members' records give the
        number.
        """
        for plan in self._index.in_generation(Event.PLAN, generation)[:1]:
            return len(plan["members"])
        return int(self._index.in_generation(Event.REGROUPED, generation)[0]["world"])

    def _full_world_size(self, t_ns: int) -> int:
        """Return the number of ranks of the full world at a time; planned resizes change it.

        Before the first one it is the number of nodes in the plan.
        """
        resize_count = bisect_right(self._resize_records, t_ns, key=lambda record: record.t_ns)
        return (
            int(self._resize_records[resize_count - 1]["size"])
            if resize_count
            else self._config.nodes
        )

    def _last_record(self, event: Event, generation: int, after_ns: int) -> Record | None:
        """Return a generation's last record of an event; None if it is before ``after_ns``."""
        records = self._index.in_generation(event, generation)
        return records[-1] if records and records[-1].t_ns >= after_ns else None

    def _spans(
        self,
        incident: Incident,
        regroup: Record,
        good_step: FinishedStep,
        full_ns: int | None,
        step_s: float,
    ) -> list[PhaseSpan]:
        """Return the phases of a recovery, each with its reference duration.

        Args:
            incident: the loss or bad numbers.
            regroup: the record of the plan that followed.
            good_step: the first step that a new membership finished.
            full_ns: the end of the first step at full strength, or None.
            step_s: the usual duration of a step.
        """
        start_ns, detected_ns = incident.injected_ns, incident.detected.t_ns
        generation, good_ns = good_step.generation, good_step.end_ns
        quiesced_record = self._last_record(Event.QUIESCED, regroup["generation"] - 1, detected_ns)
        regrouped_record = self._last_record(Event.REGROUPED, generation, detected_ns)
        restored_records = self._index.in_generation(Event.RESTORED, generation)
        cause = incident.detected.get("cause", "nonfinite")
        phase_ends = {
            "detected": (detected_ns, phase_baselines.detected(cause, step_s)),
            "quiesced": (
                quiesced_record.t_ns if quiesced_record else regroup.t_ns,
                phase_baselines.quiesced(),
            ),
            "regrouped": (
                regrouped_record.t_ns if regrouped_record else regroup.t_ns,
                phase_baselines.regrouped(),
            ),
            "restored": (
                max((record.t_ns for record in restored_records), default=0),
                _restore_reference(restored_records),
            ),
            "first good step": (
                good_ns,
                phase_baselines.first_good_step(
                    step_s, self._world_size(generation), self._full_world_size(good_ns)
                ),
            ),
        }
        if full_ns is not None:
            phase_ends["full strength"] = (
                full_ns,
                (0.0, "a ready spare takes part from the first step on"),
            )
            redundant_ns = self._redundant_ns(regroup.t_ns)
            if redundant_ns is not None:
                phase_ends["redundancy restored"] = (
                    redundant_ns,
                    (0.0, "training does not wait for it"),
                )
        return self._in_sequence(start_ns, phase_ends)

    def _in_sequence(
        self, start_ns: int, phase_ends: dict[str, tuple[int, tuple[float, str]]]
    ) -> list[PhaseSpan]:
        """Return the phases in sequence.

        A phase that ended before the one before it takes no time.

        Args:
            start_ns: the begin of the first phase.
            phase_ends: phase -> its end in ns, and its reference: seconds and explanation.
        """
        spans, before_ns = [], start_ns
        for name in RECOVERY_PHASES:
            if name not in phase_ends:
                continue
            end_ns, (reference_s, reference) = phase_ends[name]
            end_ns = max(before_ns, end_ns)
            spans.append(
                PhaseSpan(
                    name=name,
                    start_s=self._since_start_s(before_ns),
                    end_s=self._since_start_s(end_ns),
                    reference_s=reference_s,
                    reference=reference,
                )
            )
            before_ns = end_ns
        return spans

    def _redundant_ns(self, regroup_ns: int) -> int | None:
        """Return when spares and copies were complete again, in ns; None if they never were.

        From then on another loss would cost no more than this one.
        """
        spares_ns, copies_ns = (
            self._spares_ready_ns(regroup_ns),
            restored_ns(self.windows, regroup_ns),
        )
        return None if spares_ns is None or copies_ns is None else max(spares_ns, copies_ns)

    def _spares_ready_ns(self, regroup_ns: int) -> int | None:
        """Return when all spares were ready after a regroup, in ns; None if they never were.

        The result is the time of the regroup itself if they were ready then.
        """
        times, is_full_after = self._spare_levels
        position = bisect_right(times, regroup_ns)
        if position and is_full_after[position - 1]:
            return regroup_ns
        return self._spares_full_ns[position] if position < len(times) else None

    @cached_property
    def _spare_levels(self) -> tuple[list[int], list[bool]]:
        """Times in ns at which the number of spares may change, and whether it is full afterwards.

        Both lists have the same length.
        """
        ready: set[str] = set()
        times, is_full_after = [], []
        for record in self._index.of(Event.SPARE_READY, Event.PLAN, Event.DETECTED):
            if record.event == Event.SPARE_READY:
                ready.add(record["worker"])
            elif record.event == Event.PLAN:
                ready -= {member["worker"] for member in record["members"]}
            else:
                ready.discard(record["worker"])
            times.append(record.t_ns)
            is_full_after.append(len(ready) >= self._config.spares)
        return times, is_full_after

    @cached_property
    def _spares_full_ns(self) -> list[int | None]:
        """The next time in ns at which enough spares were ready, by place in the levels.

        It is None where that never happened.
        """
        times_ns: list[int | None] = []
        next_ns = None
        times, is_full_after = self._spare_levels
        for t_ns, is_full in zip(reversed(times), reversed(is_full_after), strict=True):
            next_ns = t_ns if is_full else next_ns
            times_ns.append(next_ns)
        return times_ns[::-1]


def _cause(record: Record) -> str:
    """Return the cause of a loss; for bad numbers, the name of the event."""
    return str(record["cause"]) if record.event == Event.DETECTED else str(record.event)


def _is_alarm(record: Record, has_incident: bool) -> bool:
    """Return whether a notice without a fault is a false alarm.

    Numbers that are not finite are none, because the batch may be bad. Nor are ranks that
    contradict each other, if it is undecided which one is corrupt, and a fault has struck.
    """
    if record.event == Event.CORRUPT:
        return not (record["verdict"] == "undecided" and has_incident)
    return record.event in (Event.DETECTED, Event.RECORD_LOST)


def raised_by_job(
    losses: Sequence[Record], records: Iterable[Record]
) -> tuple[list[Record], list[Record]]:
    """Split losses without a fault into those of an exception in the job, and all others.

    Return both lists.

    A worker that is ended by its own code is rightly given up, so its loss is no false alarm.
    """
    failed_workers = {record.source for record in records if record.event == Event.FAILED}
    raised, other_losses = list[Record](), list[Record]()
    for loss in losses:
        is_raised = (
            loss.event == Event.DETECTED
            and loss["cause"] == "raised"
            and loss["worker"] in failed_workers
        )
        (raised if is_raised else other_losses).append(loss)
    return raised, other_losses


def alarm_in_words(alarm: Record) -> str:
    """Return the worker of a false alarm and the reason, in words."""
    if alarm.event == Event.RECORD_LOST:
        return (
            f"{alarm['node'] or alarm.source}: the coordinator's log was lost ({alarm['detail']})"
        )
    return f"{alarm['worker']}: {alarm['cause']} ({alarm['detail']})"


def _unique_alarms(alarms: list[Record]) -> list[Record]:
    """Return the alarms, with corrupt data once for each suspect and step.

    Every rank records the findings of all ranks.
    """
    by_suspect: dict[object, Record] = {}
    for alarm in alarms:
        step = alarm["step"] if alarm.event == Event.CORRUPT else id(alarm)
        by_suspect.setdefault((alarm.get("worker"), step), alarm)
    return list(by_suspect.values())


def _restore_reference(restored: list[Record]) -> tuple[float, str]:
    """Return the reference in seconds for restoring the largest state, and its explanation."""
    if not restored:
        return phase_baselines.restored(0, "")
    largest = max(restored, key=lambda record: record["size_bytes"])
    return phase_baselines.restored(largest["size_bytes"], largest["transport"])
