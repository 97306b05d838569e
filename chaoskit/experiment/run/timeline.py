"""The way back from each fault, phase by phase, read from the journals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from chaoskit.experiment.run.disruptions import disturbing, standbys_needed_until_ns, words_of
from chaoskit.experiment.run.run import RawRun
from chaoskit.journal import Record
from chaoskit.runlog import phase_baselines
from chaoskit.runlog.history import FinishedStep, History
from chaoskit.runlog.injected import InjectionRecord, Struck
from chaoskit.runlog.outcome import PhaseSpan, Recovery
from chaoskit.runlog.redundancy import restored_ns, windows
from chaoskit.vocabulary import LOG_RULE, RECOVERY_PHASES, Event

#: A loss may be noticed this much earlier than the first sign of the end of its pod.
_BEFORE_SIGN_NS = 2_000_000_000
_ENDS = (Event.COMMIT, Event.SKIP)
_NOTICES = (Event.DETECTED, Event.NONFINITE, Event.CORRUPT, Event.RECORD_LOST)


@dataclass(frozen=True, slots=True)
class Incident:
    """A loss or bad numbers, and what has caused them: a fault, or the end of a pod that the run has not asked for."""

    strike: InjectionRecord | None
    detected: Record
    injected_ns: int
    taken: Record | None = None

    @property
    def cause(self) -> str | None:
        """What has caused it, in words; None if nothing is known."""
        if self.strike is not None:
            return str(self.strike.fault)
        return None if self.taken is None else words_of(self.taken)


class Timeline:
    """Finds the incidents of a run and measures each recovery.

    Attributes:
        windows: when pieces of the state lacked copies.
        taken: records of pods that something other than the run took away, by the time of their first sign.
    """

    def __init__(self, run: RawRun, history: History) -> None:
        self._run, self._history = run, history
        self._index = run.index
        self._config = run.experiment.config
        self._resized = self._index.of(Event.RESIZED)
        self._claims: dict[str, list[InjectionRecord]] = defaultdict(
            list
        )  # worker -> what acted on it itself
        self._wide: list[InjectionRecord] = []  # that may have struck others, too
        for strike in run.injections:
            for worker in strike.target.claims if strike.target is not None else ():
                self._claims[worker].append(strike)
            if strike.fault.whole_node or strike.fault.blameless:
                self._wide.append(strike)
        self.taken = self._index.of(Event.POD_TAKEN)
        self.windows = windows(run.records, self._config.memory_copies)

    def incidents(self) -> tuple[list[Incident], list[Record]]:
        """Detections that belong to a fault, and those that nothing explains (false alarms)."""
        explained: dict[tuple[str, str], Incident] = {}
        alarms = []
        for record in self._index.of(*_NOTICES):
            if record.t_ns > self.end_ns:
                break
            found, taken = self._explanation(record), self._pod_taken(record)
            if taken is not None and (found is None or found[1] < taken.t_ns <= record.t_ns):
                if record.get("rank") is not None:
                    noticed_ns = min(taken.t_ns, record.t_ns)
                    explained.setdefault(
                        (taken["pod"], ""), Incident(None, record, noticed_ns, taken)
                    )
                continue
            if found is None:
                alarms += [record] if _is_alarm(record, bool(explained)) else []
                continue
            strike, acted_ns = found
            if record.event == Event.DETECTED and record["rank"] is None:
                continue  # a spare, or a replacement on its way: no rank has to recover from that
            worker = "" if strike.fault.whole_node else record["worker"]  # a node is one incident
            explained.setdefault((strike.fault_id, worker), Incident(strike, record, acted_ns))
        return sorted(explained.values(), key=lambda incident: incident.injected_ns), _once(alarms)

    def _explanation(self, record: Record) -> tuple[InjectionRecord, int] | None:
        """The strike that a notice belongs to, and when it acted on the worker.

        Corrupt data can be noticed by the rank that receives it, and be the fault of the one that sent it.
        """
        if record.event == Event.RECORD_LOST:
            return None  # no fault takes it away
        for worker in (record["worker"], *record.get("sources", ())):
            if found := self._striker(worker, record):
                return found
        return None

    def _pod_taken(self, record: Record) -> Record | None:
        """The last pod that was taken before a loss, on whose node the lost worker was; None if there is none."""
        if record.event not in (Event.DETECTED, Event.RECORD_LOST):
            return None
        before = [one for one in self.taken if one.t_ns <= record.t_ns + _BEFORE_SIGN_NS]
        return next((one for one in reversed(before) if self._was_lost_with(one, record)), None)

    def _was_lost_with(self, taken: Record, record: Record) -> bool:
        if record.event == Event.RECORD_LOST:  # it lay in the coordinator's pod
            return bool(taken["role"] == "coordinator")
        again = self._index.first(
            Event.NODE_REPLACED, taken.t_ns, lambda one: one["node"] == taken["node"]
        )
        return any(
            node == taken["node"] and (again is None or since_ns <= again.t_ns)
            for node, since_ns in self._places.get(record["worker"], ())
        )

    @cached_property
    def _places(self) -> dict[str, list[tuple[str, int]]]:
        """Worker -> its nodes, each with the time from which on a record names it there."""
        found = {
            worker: [(one.source, one.t_ns) for one in starts]
            for worker, starts in self._starts.items()
        }
        for plan in self._index.of(Event.PLAN):  # the record of its start may be lost with its node
            for member in plan["members"]:
                found.setdefault(member["worker"], [(member["node"], plan.t_ns)])
        return found

    def _striker(self, worker: str, record: Record) -> tuple[InjectionRecord, int] | None:
        """The last one that struck ``worker`` before the notice: what struck it earlier, it had survived."""
        found: tuple[InjectionRecord, int] | None = None
        for strike in (*self._claims.get(worker, ()), *self._wide):
            acted_ns = self._acted_ns(strike, worker, record)
            if (
                acted_ns is not None
                and record.t_ns >= acted_ns
                and (found is None or acted_ns > found[1])
            ):
                found = strike, acted_ns
        return found

    def _acted_ns(self, strike: InjectionRecord, worker: str, record: Record) -> int | None:
        """When ``strike`` acted on ``worker``; None if it did not, or leads to no such notice."""
        target = strike.target
        if target is None or strike.missed or _cause(record) not in strike.fault.leads_to:
            return None
        acted_ns = target.claims.get(worker)
        if strike.fault.blameless and record.event == Event.DETECTED:
            # whatever reads what is bad may print it
            return target.injected_ns if record["cause"] == LOG_RULE else None
        if acted_ns is None and strike.fault.whole_node and self._was_there(worker, target):
            acted_ns = target.injected_ns
        return acted_ns

    def shows(self, strike: InjectionRecord) -> bool:
        """Whether the loss or the bad numbers followed that must follow a fault of this kind.

        Several faults may have led to one loss: it shows each of them.
        """
        if not strike.fault.must_show or strike.target is None:
            return not strike.fault.must_show
        events = (*_NOTICES, Event.NODE_LOST, Event.EVICTED)
        since_ns = strike.target.injected_ns
        return any(
            self._is_shown_by(strike, one)
            for event in events
            for one in self._index.since(event, since_ns)
        )

    def _is_shown_by(self, strike: InjectionRecord, record: Record) -> bool:
        target = strike.target
        if target is None:
            return False
        if record.event in (Event.NODE_LOST, Event.EVICTED) and strike.fault.whole_node:
            return record["node"] in target.struck_nodes and record.t_ns >= target.injected_ns
        if record.event not in _NOTICES or record.event == Event.RECORD_LOST:
            return False
        if not record["worker"]:  # a sum that is not finite names no rank
            return _cause(record) in strike.fault.must_show and record.t_ns >= target.injected_ns
        times = [
            self._acted_ns(strike, one, record)
            for one in (record["worker"], *record.get("sources", ()))
        ]
        return any(acted_ns is not None and record.t_ns >= acted_ns for acted_ns in times)

    def _was_there(self, worker: str, target: Struck) -> bool:
        """Whether ``worker`` was started on a node that was struck before the last act on that."""
        return any(
            record.source in target.struck_nodes and record.t_ns <= target.acted_ns
            for record in self._starts.get(worker, ())
        )

    @cached_property
    def _starts(self) -> dict[str, list[Record]]:
        """Worker -> its starts."""
        found: dict[str, list[Record]] = defaultdict(list)
        for record in self._index.of(Event.WORKER_STARTED):
            found[record["worker"]].append(record)
        return found

    @cached_property
    def end_ns(self) -> int:
        """When the job was over, or its run."""
        ended = self._index.first(Event.JOB_ENDED)
        return self._run.ended_ns if ended is None else ended.t_ns

    @cached_property
    def disturbed_by(self) -> list[Record]:
        """The records of taken pods whose end disturbed the job, or a fault that needed them."""
        returns = self._index.of(Event.NODE_REPLACED, Event.RESUMED)
        return disturbing(
            self.taken, self.end_ns, standbys_needed_until_ns(self._run.injections, returns)
        )

    def impact(self, incident: Incident) -> str:
        """How the job felt the fault, in words."""
        record = incident.detected
        if record.event == Event.NONFINITE:
            return f"step {record['step']}: the contribution of rank {record['owner']} was found to be non-finite"
        if record.event == Event.CORRUPT:
            return f"step {record['step']}: {record['what']} of rank {record['rank']} was corrupt ({record['verdict']})"
        given_up = f"rank {record['rank']} was given up: {record['cause']} ({record['detail']})"
        return given_up if incident.taken is None else f"{given_up}; {words_of(incident.taken)}"

    def recovery(self, incident: Incident) -> Recovery | None:
        """The recovery from one incident; None if no step was committed after it."""
        if incident.detected.get("verdict") == "transient":
            return None  # no rank was replaced: the step was computed again
        regroup = self._index.first(
            Event.PLAN, incident.detected.t_ns, lambda record: bool(record["abort"])
        )
        if regroup is None or self._was_over(incident.detected, regroup.t_ns):
            return None
        place = bisect_left(self._newest_by_then, regroup["generation"])
        if place == len(self._newest_by_then):
            return None
        good = self._history.finished[place]
        generation, good_ns = good.generation, good.end_ns
        step_s = self._step_seconds(incident.injected_ns)
        spans = self._spans(incident, regroup, good, self._full_strength[place], step_s)
        world = self._world(generation)
        full_ns = self._full_strength[place]
        return Recovery(
            cause=self.impact(incident),
            fault=incident.cause,
            injected_s=self._seconds(incident.injected_ns),
            generation=generation,
            world=world,
            spans=spans,
            seconds=(good_ns - incident.injected_ns) / 1e9,
            full_strength_seconds=None
            if full_ns is None
            else (full_ns - incident.injected_ns) / 1e9,
            step_seconds=step_s,
        )

    def _was_over(self, notice: Record, t_ns: int) -> bool:
        """Whether a step that was not finite was committed or skipped by then: what came later has another cause."""
        if notice.event != Event.NONFINITE:
            return False
        ends = (
            self._index.first(event, notice.t_ns, lambda one: one["step"] == notice["step"])
            for event in _ENDS
        )
        return any(end is not None and end.t_ns < t_ns for end in ends)

    def _seconds(self, t_ns: int) -> float:
        return (t_ns - self._run.started_ns) / 1e9

    @cached_property
    def _newest_by_then(self) -> list[int]:
        """By place in the history, the newest membership that has finished a step by then."""
        return list(accumulate((step.generation for step in self._history.finished), max))

    @cached_property
    def _full_strength(self) -> list[int | None]:
        """By place, when the first step from there on ended that had a world of the size that is wanted at its time."""
        found: list[int | None] = []
        next_ns = None
        for step in reversed(self._history.finished):
            next_ns = step.end_ns if step.world == self._full_world(step.end_ns) else next_ns
            found.append(next_ns)
        return found[::-1]

    @cached_property
    def _steps(self) -> tuple[list[float], NDArray[np.float64]]:
        """When each step but the first one ended, and what it took."""
        points = self._history.points(self._run.started_ns)[1:]
        return [point.at_s for point in points], np.array([point.seconds for point in points])

    def _step_seconds(self, before_ns: int) -> float:
        """Median time of the steps before the fault; of all steps, if there are none."""
        ends_s, seconds = self._steps
        count = bisect_right(ends_s, self._seconds(before_ns)) or len(ends_s)
        ordered = np.sort(seconds[:count])
        return float((ordered[(count - 1) // 2] + ordered[count // 2]) / 2) if count else 0.0

    def _world(self, generation: int) -> int:
        """A coordinator may end before it has written its plan down; the members have."""
        for plan in self._index.in_generation(Event.PLAN, generation)[:1]:
            return len(plan["members"])
        return int(self._index.in_generation(Event.REGROUPED, generation)[0]["world"])

    def _full_world(self, t_ns: int) -> int:
        """Ranks of the full world at a time: it may have been resized on purpose."""
        before = bisect_right(self._resized, t_ns, key=lambda record: record.t_ns)
        return int(self._resized[before - 1]["size"]) if before else self._config.nodes

    def _last(self, event: Event, generation: int, after_ns: int) -> Record | None:
        found = self._index.in_generation(event, generation)
        return found[-1] if found and found[-1].t_ns >= after_ns else None

    def _spans(
        self,
        incident: Incident,
        regroup: Record,
        good: FinishedStep,
        full_ns: int | None,
        step_s: float,
    ) -> list[PhaseSpan]:
        start_ns, detected_ns = incident.injected_ns, incident.detected.t_ns
        generation, good_ns = good.generation, good.end_ns
        quiesced = self._last(Event.QUIESCED, regroup["generation"] - 1, detected_ns)
        settled = self._last(Event.REGROUPED, generation, detected_ns)
        restored = self._index.in_generation(Event.RESTORED, generation)
        cause = incident.detected.get("cause", "nonfinite")
        ends = {
            "detected": (detected_ns, phase_baselines.detected(cause, step_s)),
            "quiesced": (quiesced.t_ns if quiesced else regroup.t_ns, phase_baselines.quiesced()),
            "regrouped": (settled.t_ns if settled else regroup.t_ns, phase_baselines.regrouped()),
            "restored": (max((r.t_ns for r in restored), default=0), _restore_reference(restored)),
            "first good step": (
                good_ns,
                phase_baselines.first_good_step(
                    step_s, self._world(generation), self._full_world(good_ns)
                ),
            ),
        }
        if full_ns is not None:
            ends["full strength"] = (
                full_ns,
                (0.0, "a ready spare takes part from the first step on"),
            )
            redundant_ns = self._redundancy(regroup.t_ns)
            if redundant_ns is not None:
                ends["redundancy restored"] = (redundant_ns, (0.0, "training does not wait for it"))
        return self._lay_out(start_ns, ends)

    def _lay_out(
        self, start_ns: int, ends: dict[str, tuple[int, tuple[float, str]]]
    ) -> list[PhaseSpan]:
        """Phases one after the other: what was over before its turn came takes no time."""
        spans, before_ns = [], start_ns
        for name in RECOVERY_PHASES:
            if name not in ends:
                continue
            end_ns, (reference_s, reference) = ends[name]
            end_ns = max(before_ns, end_ns)
            spans.append(
                PhaseSpan(
                    name=name,
                    start_s=self._seconds(before_ns),
                    end_s=self._seconds(end_ns),
                    reference_s=reference_s,
                    reference=reference,
                )
            )
            before_ns = end_ns
        return spans

    def _redundancy(self, regroup_ns: int) -> int | None:
        """When another loss would cost no more than this one: there are spares again, and copies of every piece."""
        spares_ns, copies_ns = self._spares(regroup_ns), restored_ns(self.windows, regroup_ns)
        return None if spares_ns is None or copies_ns is None else max(spares_ns, copies_ns)

    def _spares(self, regroup_ns: int) -> int | None:
        """When as many spares stood ready again as the run asks for, after the regroup took what it needed."""
        times, enough = self._stocks
        place = bisect_right(times, regroup_ns)
        if place and enough[place - 1]:
            return regroup_ns
        return self._next_enough[place] if place < len(times) else None

    @cached_property
    def _stocks(self) -> tuple[list[int], list[bool]]:
        """When the number of ready spares may have changed, and whether there were enough of them from then on."""
        ready: set[str] = set()
        times, enough = [], []
        for record in self._index.of(Event.SPARE_READY, Event.PLAN, Event.DETECTED):
            if record.event == Event.SPARE_READY:
                ready.add(record["worker"])
            elif record.event == Event.PLAN:
                ready -= {member["worker"] for member in record["members"]}
            else:
                ready.discard(record["worker"])
            times.append(record.t_ns)
            enough.append(len(ready) >= self._config.spares)
        return times, enough

    @cached_property
    def _next_enough(self) -> list[int | None]:
        """By place in the stocks, when there were enough again."""
        found: list[int | None] = []
        next_ns = None
        times, enough = self._stocks
        for t_ns, is_enough in zip(reversed(times), reversed(enough), strict=True):
            next_ns = t_ns if is_enough else next_ns
            found.append(next_ns)
        return found[::-1]


def _cause(record: Record) -> str:
    """Why a worker is given up, or would be."""
    return str(record["cause"]) if record.event == Event.DETECTED else str(record.event)


def _is_alarm(record: Record, struck: bool) -> bool:
    """Whether a notice that belongs to no fault is a false alarm.

    Not, where two contradict each other and nothing tells which one is corrupt, and one of them was struck; nor where
    numbers are not finite: the batch may be bad.
    """
    if record.event == Event.CORRUPT:
        return not (record["verdict"] == "undecided" and struck)
    return record.event in (Event.DETECTED, Event.RECORD_LOST)


def raised_by_job(
    losses: Sequence[Record], records: Iterable[Record]
) -> tuple[list[Record], list[Record]]:
    """Split losses that no fault explains: those of an exception in the job, which its worker wrote down, and others.

    A worker that its own code ends is rightly given up: such a loss is no false alarm.
    """
    failed = {record.source for record in records if record.event == Event.FAILED}
    own, others = list[Record](), list[Record]()
    for loss in losses:
        is_own = (
            loss.event == Event.DETECTED and loss["cause"] == "raised" and loss["worker"] in failed
        )
        (own if is_own else others).append(loss)
    return own, others


def alarm_in_words(alarm: Record) -> str:
    """Which worker a false alarm was about, and why."""
    if alarm.event == Event.RECORD_LOST:
        return f"{alarm['node'] or alarm.source}: the coordinator's record was lost ({alarm['detail']})"
    return f"{alarm['worker']}: {alarm['cause']} ({alarm['detail']})"


def _once(alarms: list[Record]) -> list[Record]:
    """Every rank writes down what all of them found: one alarm for each suspect and step."""
    first: dict[object, Record] = {}
    for alarm in alarms:
        step = alarm["step"] if alarm.event == Event.CORRUPT else id(alarm)
        first.setdefault((alarm.get("worker"), step), alarm)
    return list(first.values())


def _restore_reference(restored: list[Record]) -> tuple[float, str]:
    if not restored:
        return phase_baselines.restored(0, "")
    largest = max(restored, key=lambda record: record["size_bytes"])
    return phase_baselines.restored(largest["size_bytes"], largest["transport"])
