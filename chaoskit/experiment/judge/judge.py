"""Turns a raw run into an outcome: evidence, recoveries, checks, and the verdict that follows from them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

from chaoskit.config import RunConfig
from chaoskit.experiment.judge.comparison import compare, exactness
from chaoskit.experiment.judge.coverage import Compared, coverage_of
from chaoskit.experiment.judge.fault_audit import audit
from chaoskit.experiment.plan.plan import Experiment
from chaoskit.experiment.properties import RunTrace, check_properties, summary
from chaoskit.experiment.reference.floor import Floor
from chaoskit.experiment.reference.reference import Reference
from chaoskit.experiment.run.disruptions import NAME as PODS_CHECK
from chaoskit.experiment.run.disruptions import check_pods, spare
from chaoskit.experiment.run.run import RawRun
from chaoskit.experiment.run.timeline import Incident, Timeline, alarm_in_words, raised_by_job
from chaoskit.experiment.twin.twin import Twin
from chaoskit.journal import Record
from chaoskit.plaintext import plural
from chaoskit.runlog.account import account_for
from chaoskit.runlog.account.time_account import TimeAccount
from chaoskit.runlog.findings import (
    conclude,
    environment,
    fault_check,
    fault_record,
    harness_lost,
    rules_fired,
    started_at,
)
from chaoskit.runlog.history import History
from chaoskit.runlog.injected import InjectionRecord, Struck
from chaoskit.runlog.outcome import (
    COMMITTED_STEPS,
    COMPLETED,
    RECOVERED,
    Check,
    EvidenceRecord,
    FaultRecord,
    Ledger,
    Outcome,
    Recovery,
)
from chaoskit.runlog.redundancy import exposures
from chaoskit.runlog.torn import TornWorld, lost_without_reason, torn_worlds, widest_interval
from chaoskit.vocabulary import Event, Verdict


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Put the collector of cycles off: over the records of a long run it takes as long as what is computed."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Told:
    """What the journals of a run tell."""

    def __init__(self, run: RawRun) -> None:
        self.run, self.history = run, History(run.records)
        self.timeline = Timeline(run, self.history)
        self.incidents, unexplained = self.timeline.incidents()
        self.exceptions, self.alarms = raised_by_job(unexplained, run.records)
        self.ways_back = [self.timeline.recovery(incident) for incident in self.incidents]
        self.recoveries = [recovery for recovery in self.ways_back if recovery is not None]
        config = run.experiment.config
        self.ledger = self.history.ledger(config.shards_of)
        ends = self.history.ends(config)
        self.digests = {record["weights_digest"] for record in ends}
        self.states = {record["state_digest"] for record in ends}


@_uncollected()
def judge(
    run: RawRun,
    twin: Twin | None,
    substrate: str,
    reference: Reference | None = None,
    floor: Floor | None = None,
) -> Outcome:
    """Everything that can be said about ``run``.

    Args:
        twin: what the same job does unbroken, if that is known.
        reference: what plain PyTorch makes of its first steps, where that was asked for.
        floor: how far right runs of the job end apart, where sums have no fixed order.
    """
    told = _Told(run)
    _, order = exactness(run.experiment.config, told.history)
    ended_well = run.end is not None and run.end.ok
    lacks_floor = bool(run.twin_id and twin and floor is None and ended_well and order == "fast")
    coverage = coverage_of(
        run, told.history, Compared(twin, reference, floor, lacks_floor=lacks_floor)
    )
    compared = compare(run, told.history, told.digests, told.states, twin, reference, floor)
    if not told.incidents:
        compared.not_applied[RECOVERED] = "nothing was lost"
    checks = [
        coverage.check(len(run.records), len(run.coverage)),
        *_checks(told, twin),
        *compared.checks,
    ]
    if run.harness_lost:
        checks.append(harness_lost(run.records))
    trace = RunTrace(run, told.history, told.recoveries)
    checks += summary(check_properties(trace, checks), compared=trace.has_replicas)
    checks = spare(coverage.spare(checks), told.timeline.disturbed_by)
    return _outcome(told, twin, substrate, checks, compared.not_applied, coverage.verdict(checks))


def _checks(told: _Told, twin: Twin | None) -> list[Check]:
    """What is said of a run by its journals, and of its samples by the twin."""
    run, history = told.run, told.history
    again, _ = exactness(run.experiment.config, history)
    return [
        _completed(run, history),
        *(
            fault_check(strike, run.ended_ns, shown=told.timeline.shows(strike))
            for strike in run.injections
        ),
        *audit(run.injections, run.records),
        *([_recovered(run, told.incidents, told.ways_back)] if told.incidents else []),
        *_in_order(told.recoveries),
        _lost_steps(history, torn_worlds(run.records), run.experiment.max_lost_steps),
        _one_history(history, told.digests, told.states, again),
        _samples(told.ledger, history, twin),
        *_exceptions(run, told.exceptions),
        *check_pods(told.timeline.taken, told.timeline.disturbed_by),
        _false_alarms(run, [alarm_in_words(alarm) for alarm in told.alarms]),
    ]


def reasons_of(checks: Sequence[Check], verdict: Verdict) -> list[str]:
    """Return the reasons of a verdict. A run that fails names the pods, too, that were taken away meanwhile."""
    if verdict == Verdict.PASSED:
        return []
    reasons = [f"{check.name}: {check.detail}" for check in checks if check.verdict == verdict]
    if verdict == Verdict.FAILED:
        reasons += [
            check.detail
            for check in checks
            if (check.name, check.verdict) == (PODS_CHECK, Verdict.UNKNOWN)
        ]
    return reasons


def _outcome(
    told: _Told,
    twin: Twin | None,
    substrate: str,
    checks: list[Check],
    not_applied: dict[str, str],
    verdict: Verdict,
) -> Outcome:
    run, history = told.run, told.history
    config = run.experiment.config
    limits = [record for record in run.records if record.event == Event.HANG_LIMITS]
    return Outcome(
        name=run.experiment.name,
        job=f"{run.experiment.job} {config.job.options or ''}".strip(),
        substrate=substrate,
        nodes=config.nodes,
        spares=config.spares,
        seed=config.seed,
        reduction=config.reduction,
        started=started_at(run.coverage, run.started_ns),
        wall_s=(run.ended_ns - run.started_ns) / 1e9,
        verdict=verdict,
        reasons=reasons_of(checks, verdict),
        steps=history.points(run.started_ns),
        twin_losses=twin.losses if twin else None,
        faults=[
            _fault_record(run, strike, told.incidents, told.timeline) for strike in run.injections
        ],
        recoveries=told.recoveries,
        exposures=exposures(told.timeline.windows, run.injections, run.started_ns),
        copies=widest_interval(run.records),
        checks=checks,
        not_applied=not_applied,
        ledger=told.ledger,
        lost_steps=history.repeated_steps(),
        false_alarms=len(told.alarms),
        weights_digest=min(told.digests, default=None),
        twin_weights_digest=twin.weights_digest if twin else None,
        rules_fired=rules_fired(run.records, run.started_ns),
        environment=environment(
            run.coverage, "worker", "chaoskit", "torch", "python", "kernel", "machine"
        ),
        directory=str(run.directory),
        settings=_settings(run.experiment),
        account=_account(run, told.alarms),
        hang_limits_ms=limits[-1]["limits_ms"] if limits else {},
        suspects=limits[-1]["suspects"] if limits else 0,
        refused_connections=sum(
            record["count"] for record in run.records if record.event == Event.CONNECTIONS_REFUSED
        ),
    )


def _account(run: RawRun, alarms: list[Record]) -> TimeAccount:
    return account_for(
        run.records,
        run.ended_ns,
        started_ns=run.started_ns,
        full_world=run.experiment.config.nodes,
        spares=run.experiment.config.spares,
        false_alarms=[alarm["worker"] for alarm in alarms if alarm.event == Event.DETECTED],
    )


def _settings(experiment: Experiment) -> dict[str, Any]:
    """What was chosen for this run, and is not a field of the outcome itself."""
    config, most = experiment.config, experiment.max_lost_steps
    told = {
        "job",
        "tell_state_at",
        *Outcome.__struct_fields__,
    }  # the second goes with the wish for a reference
    default = RunConfig(job=config.job)
    chosen = {
        field: getattr(config, field) for field in config.__struct_fields__ if field not in told
    }
    other = {field: value for field, value in chosen.items() if value != getattr(default, field)}
    return other | ({"max_lost_steps": most} if most else {})


# -- faults -------------------------------------------------------------------------------------------------------


def _fault_record(
    run: RawRun, strike: InjectionRecord, incidents: list[Incident], timeline: Timeline
) -> FaultRecord:
    felt = [
        EvidenceRecord(
            level="impactful",
            at_s=(incident.detected.t_ns - run.started_ns) / 1e9,
            observed=timeline.impact(incident),
        )
        for incident in incidents
        if incident.strike is strike
    ]
    return fault_record(strike, run.started_ns, _stood, felt)


def _stood(target: Struck) -> str:
    """Where the rank was when the fault struck, in words."""
    place = f"rank {target.rank} (pid {target.pid})"
    if not target.waiting:
        return f"{place} was alive, about step {target.step}"
    if target.waiting != target.worker:
        return f"{place} was about to be read by {target.waiting}, at step {target.step}"
    return f"{place} stood in {target.phase} of step {target.step}"


# -- checks -------------------------------------------------------------------------------------------------------


def _completed(run: RawRun, history: History) -> Check:
    problems = []
    if run.deadline_passed:
        problems.append(
            f"the run did not end within its deadline of {run.experiment.deadline_s:g} s"
        )
    elif run.end is not None and not run.end.ok:
        problems.append(run.end.reason)
    elif (steps := run.experiment.steps) is not None and not (
        len(history.steps) == steps or (run.experiment.is_open_ended and len(history.steps) > steps)
    ):
        problems.append(f"{len(history.steps)} of {steps} steps were finished")
    elif not history.steps:
        problems.append("no step was finished")
    elif not any(record.event == Event.FINISHED for record in run.records):
        problems.append("no rank wrote down how it ended")
    return conclude(
        COMPLETED, problems, plural(len(history.steps), "step"), looked_at=len(history.steps)
    )


def _recovered(
    run: RawRun, incidents: Sequence[Incident], ways_back: Sequence[Recovery | None]
) -> Check:
    without = [
        incident
        for incident, way_back in zip(incidents, ways_back, strict=True)
        if way_back is None
    ]
    over = run.end is not None and run.end.ok
    missing = [
        incident for incident in without if not over or _went_on_without(incident, run.records)
    ]
    struck = plural(len(incidents), "incident")
    problems = [f"no step was finished by a new membership after {len(missing)} of {struck}"]
    found = plural(len(incidents) - len(without), "recovery", "recoveries")
    return conclude(RECOVERED, problems if missing else [], found, looked_at=len(incidents))


def _in_order(recoveries: Sequence[Recovery]) -> list[Check]:
    """An error where a recovery ended before its fault struck: then no time of the run means anything."""
    wrong = [recovery for recovery in recoveries if recovery.seconds <= 0]
    detail = "; ".join(
        f"a recovery of {recovery.seconds:.3f} s: clocks of processes differ"
        for recovery in wrong[:1]
    )
    return [Check(name="times are in order", verdict=Verdict.ERROR, detail=detail)] if wrong else []


def _went_on_without(incident: Incident, records: Sequence[Record]) -> bool:
    """Whether steps to which a lost rank gave nothing were committed after its loss, in a run that ended well.

    Numbers that are found bad need no new membership: the step is computed again.
    """
    loss = incident.detected
    if loss.event != Event.DETECTED:
        return False
    given = (
        one["step"] for one in records if one.event == Event.REDUCE and one.source == loss["worker"]
    )
    last = max(given, default=-1)
    return any(
        one.event == Event.COMMIT and one["step"] > last and one.t_ns > loss.t_ns for one in records
    )


def _lost_steps(history: History, worlds: Sequence[TornWorld], most: int) -> Check:
    lost, spared = lost_without_reason(history, worlds), history.repeated_steps()
    problems = (
        [f"{lost} committed steps were lost and computed again, max_lost_steps={most}"]
        if lost > most
        else []
    )
    torn = f"; {spared - lost} in an update in which every rank ended" if spared > lost else ""
    return conclude(
        COMMITTED_STEPS,
        problems,
        f"{lost} lost, beside the step in flight{torn}",
        looked_at=len(history.steps),
    )


def _one_history(history: History, weights: set[str], states: set[str], reduction: str) -> Check:
    problems = history.violations(reduction)
    if len(weights) > 1:
        problems.append(f"ranks ended with {len(weights)} different sets of weights")
    elif len(states) > 1:
        problems.append(f"ranks ended with {len(states)} different states of the optimizer")
    return conclude(
        "one committed history",
        problems,
        "each step once, with one result on every rank",
        looked_at=len(history.steps),
    )


def _samples(ledger: Ledger, history: History, twin: Twin | None) -> Check:
    problems = [f"missing: {item}" for item in ledger.missing] + [
        f"repeated: {item}" for item in ledger.repeated
    ]
    if twin is not None and not problems and history.samples_digest() != twin.samples_digest:
        problems.append("other samples, or another order, than the unbroken run")
    return conclude(
        "every sample exactly once",
        problems,
        f"{ledger.samples} samples in {ledger.steps} steps",
        looked_at=ledger.samples,
    )


def _exceptions(run: RawRun, losses: Sequence[Record]) -> list[Check]:
    """A failed check where the job raised by itself, unless the run ended of the same exception and says so."""
    reason = run.end.reason if run.end is not None else ""
    workers: dict[str, list[str]] = {}
    for loss in losses:
        if loss["detail"] not in reason:
            workers.setdefault(loss["detail"], []).append(loss["worker"])
    problems = [f"{', '.join(names)}: {error}" for error, names in workers.items()]
    return (
        [conclude("no exception in the job", problems, "", looked_at=len(problems))]
        if problems
        else []
    )


def _false_alarms(run: RawRun, alarms: list[str]) -> Check:
    """An alarm that was raised is in the coordinator's journal: without that nothing is known."""
    heard = [
        writer.records
        for file in run.coverage.values()
        for writer in file.writers
        if writer.role == "coordinator"
    ]
    return conclude(
        "no false alarm", alarms, "every detection belongs to a fault", looked_at=sum(heard)
    )
