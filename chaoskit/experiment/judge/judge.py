"""Turn a raw run of a job into an outcome: evidence, recoveries, checks, and the verdict.

-> runlog/fault_verdict.py (fault_check): a fault without evidence.
experiment/run/recovery_timeline.py: recovery times and false alarms. runlog/history.py,
runlog/torn.py: lost steps, and which are excused. experiment/judge/coverage.py: missing records
make the run unknown. experiment/judge/comparison.py: twin and reference. experiment/directory.py
judges a run again from its directory.
"""

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
from chaoskit.experiment.run.disruptions import check_pods, excuse_failures
from chaoskit.experiment.run.recovery_timeline import (
    Incident,
    Timeline,
    alarm_in_words,
    raised_by_job,
)
from chaoskit.experiment.run.run import RawRun
from chaoskit.experiment.twin.twin import Twin
from chaoskit.journal import Record
from chaoskit.plaintext import plural
from chaoskit.runlog.account import account_for
from chaoskit.runlog.account.time_account import TimeAccount
from chaoskit.runlog.checks import conclude, environment, harness_lost, rules_fired, started_at
from chaoskit.runlog.fault_verdict import fault_check, fault_record
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
def _without_cycle_collector() -> Iterator[None]:
    """Switch the cycle collector off in a ``with`` block.

    On the records of a long run it is as slow as judging. It is switched on again only if it was on
    before.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _RunData:
    """Data that several checks need, computed once from the journals of a run.

    Attributes:
        run, history, timeline: the records of the run, its committed steps, and its incidents.
        incidents: the losses and bad numbers with a known cause.
        exceptions: losses without a fault that an exception in the job explains.
        alarms: detections that nothing explains.
        incident_recoveries: the recovery from each incident; None for an incident without one.
        recoveries: the recoveries without these Nones.
        ledger: the ledger of samples.
        digests, states: the different digests of weights, and of the whole state, at the end.
    """

    def __init__(self, run: RawRun) -> None:
        self.run, self.history = run, History(run.records)
        self.timeline = Timeline(run, self.history)
        self.incidents, unexplained = self.timeline.incidents()
        self.exceptions, self.alarms = raised_by_job(unexplained, run.records)
        self.incident_recoveries = [self.timeline.recovery(incident) for incident in self.incidents]
        self.recoveries = [
            recovery for recovery in self.incident_recoveries if recovery is not None
        ]
        config = run.experiment.config
        self.ledger = self.history.ledger(config.shards_of)
        ends = self.history.ends(config)
        self.digests = {record["weights_digest"] for record in ends}
        self.states = {record["state_digest"] for record in ends}


@_without_cycle_collector()
def judge(
    run: RawRun,
    twin: Twin | None,
    substrate: str,
    reference: Reference | None = None,
    floor: Floor | None = None,
) -> Outcome:
    """Judge ``run`` and return the outcome.

    Args:
        run: the records of the run.
        twin: the unbroken run of the same job, or None if there is none. A run that ended well is
            unknown if its plan asks for one and there is none.
        substrate: the name of the substrate of the nodes.
        reference: the result of plain PyTorch for the first steps, or None if it was not asked for.
            A run that asked for one is unknown without it.
        floor: the distance between the ends of correct runs of the job; None if sums have a fixed
            order, or it was not measured.
    """
    run_data = _RunData(run)
    _, twin_equality = exactness(run.experiment.config, run_data.history)
    ended_well = run.end is not None and run.end.ok
    lacks_floor = bool(
        run.twin_id and twin and floor is None and ended_well and twin_equality == "fast"
    )
    coverage = coverage_of(
        run, run_data.history, Compared(twin, reference, floor, lacks_floor=lacks_floor)
    )
    compared = compare(
        run, run_data.history, run_data.digests, run_data.states, twin, reference, floor
    )
    if not run_data.incidents:
        compared.not_applied[RECOVERED] = "nothing was lost"
    checks = [
        coverage.check(len(run.records), len(run.coverage)),
        *_checks(run_data, twin),
        *compared.checks,
    ]
    if run.harness_lost:
        checks.append(harness_lost(run.records))
    trace = RunTrace(run, run_data.history, run_data.recoveries)
    checks += summary(check_properties(trace, checks), compared=trace.has_replicas)
    checks = excuse_failures(coverage.excuse_failures(checks), run_data.timeline.disturbed_by)
    return _outcome(
        run_data, twin, substrate, checks, compared.not_applied, coverage.verdict(checks)
    )


def _checks(run_data: _RunData, twin: Twin | None) -> list[Check]:
    """Return the checks that need only the journals and the digest of the twin's samples.

    The order of the samples is not compared without a twin. The check of recoveries is left out
    without an incident.
    """
    run, history = run_data.run, run_data.history
    repeat_equality, _ = exactness(run.experiment.config, history)
    return [
        _completed(run, history),
        *(
            fault_check(strike, run.ended_ns, effect_shown=run_data.timeline.shows(strike))
            for strike in run.injections
        ),
        *audit(run.injections, run.records),
        *(
            [_recovered(run, run_data.incidents, run_data.incident_recoveries)]
            if run_data.incidents
            else []
        ),
        *_times_in_order(run_data.recoveries),
        _lost_steps(history, torn_worlds(run.records), run.experiment.max_lost_steps),
        _one_history(history, run_data.digests, run_data.states, repeat_equality),
        _samples(run_data.ledger, history, twin),
        *_exceptions(run, run_data.exceptions),
        *check_pods(run_data.timeline.taken_pods, run_data.timeline.disturbed_by),
        _false_alarms(run, [alarm_in_words(alarm) for alarm in run_data.alarms]),
    ]


def reasons_of(checks: Sequence[Check], verdict: Verdict) -> list[str]:
    """Return the reasons of a verdict, one text a check; empty if the run passed.

    Those of a failed run also name the pods that were taken away meanwhile.
    """
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
    run_data: _RunData,
    twin: Twin | None,
    substrate: str,
    checks: list[Check],
    not_applied: dict[str, str],
    verdict: Verdict,
) -> Outcome:
    """Assemble the outcome from the run's data and the checks, and return it."""
    run, history = run_data.run, run_data.history
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
            _fault_record(run, strike, run_data.incidents, run_data.timeline)
            for strike in run.injections
        ],
        recoveries=run_data.recoveries,
        exposures=exposures(run_data.timeline.windows, run.injections, run.started_ns),
        copies=widest_interval(run.records),
        checks=checks,
        not_applied=not_applied,
        ledger=run_data.ledger,
        lost_steps=history.repeated_steps(),
        false_alarms=len(run_data.alarms),
        weights_digest=min(run_data.digests, default=None),
        twin_weights_digest=twin.weights_digest if twin else None,
        rules_fired=rules_fired(run.records, run.started_ns),
        environment=environment(
            run.coverage, "worker", "chaoskit", "torch", "python", "kernel", "machine"
        ),
        directory=str(run.directory),
        settings=_settings(run.experiment),
        account=_account(run, run_data.alarms),
        hang_limits_ms=limits[-1]["limits_ms"] if limits else {},
        suspects=limits[-1]["suspects"] if limits else 0,
        refused_connections=sum(
            record["count"] for record in run.records if record.event == Event.CONNECTIONS_REFUSED
        ),
    )


def _account(run: RawRun, alarms: list[Record]) -> TimeAccount:
    """Return the account of the run's wall time, without false alarms among the losses."""
    return account_for(
        run.records,
        run.ended_ns,
        started_ns=run.started_ns,
        full_world=run.experiment.config.nodes,
        spares=run.experiment.config.spares,
        false_alarms=[alarm["worker"] for alarm in alarms if alarm.event == Event.DETECTED],
    )


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings chosen for this run that are not fields of the outcome itself."""
    config, max_lost_steps = experiment.config, experiment.max_lost_steps
    # ``tell_state_at`` follows from the choice of a reference
    excluded = {"job", "tell_state_at", *Outcome.__struct_fields__}
    default = RunConfig(job=config.job)
    chosen = {
        field: getattr(config, field) for field in config.__struct_fields__ if field not in excluded
    }
    changed = {
        field: setting for field, setting in chosen.items() if setting != getattr(default, field)
    }
    return changed | ({"max_lost_steps": max_lost_steps} if max_lost_steps else {})


# -- faults ----------------------------------------------------------------------------------------


def _fault_record(
    run: RawRun, strike: InjectionRecord, incidents: list[Incident], timeline: Timeline
) -> FaultRecord:
    """Return the record of a fault for the outcome, with the losses and bad numbers it caused."""
    impacts = [
        EvidenceRecord(
            level="impactful",
            at_s=(incident.detected.t_ns - run.started_ns) / 1e9,
            observed=timeline.impact(incident),
        )
        for incident in incidents
        if incident.strike is strike
    ]
    return fault_record(strike, run.started_ns, _position_when_struck, impacts)


def _position_when_struck(target: Struck) -> str:
    """Return in words where the rank was when the fault struck.

    A rank that waited at no hook was about at the step that is named.
    """
    rank_in_words = f"rank {target.rank} (pid {target.pid})"
    if not target.waiting:
        return f"{rank_in_words} was alive, about step {target.step}"
    if target.waiting != target.worker:
        return f"{rank_in_words} was about to be read by {target.waiting}, at step {target.step}"
    return f"{rank_in_words} waited in {target.phase} of step {target.step}"


# -- checks ----------------------------------------------------------------------------------------


def _completed(run: RawRun, history: History) -> Check:
    """Return the check that the job did all of its steps within the deadline.

    It also fails if the job ended with an error, or no rank recorded its end. An open-ended job may
    do more steps than planned.
    """
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
        problems.append("no rank recorded its end")
    return conclude(
        COMPLETED, problems, plural(len(history.steps), "step"), looked_at=len(history.steps)
    )


def _recovered(
    run: RawRun, incidents: Sequence[Incident], incident_recoveries: Sequence[Recovery | None]
) -> Check:
    """Return the check that a new membership finished a step after each incident.

    In a run that ended well, an incident without a recovery counts only if training went on
    without the lost rank: it may have struck in the last step, or have needed no new membership.
    """
    without_recovery = [
        incident
        for incident, recovery in zip(incidents, incident_recoveries, strict=True)
        if recovery is None
    ]
    ended_well = run.end is not None and run.end.ok
    unrecovered = [
        incident
        for incident in without_recovery
        if not ended_well or _went_on_without(incident, run.records)
    ]
    incidents_in_words = plural(len(incidents), "incident")
    problems = [
        f"no step was finished by a new membership after {len(unrecovered)} of {incidents_in_words}"
    ]
    count_in_words = plural(len(incidents) - len(without_recovery), "recovery", "recoveries")
    return conclude(
        RECOVERED, problems if unrecovered else [], count_in_words, looked_at=len(incidents)
    )


def _times_in_order(recoveries: Sequence[Recovery]) -> list[Check]:
    """Return a check with the verdict error if a recovery ended before its fault struck.

    Then no time of the run can be trusted. Otherwise the list is empty.
    """
    too_early = [recovery for recovery in recoveries if recovery.seconds <= 0]
    detail = "; ".join(
        f"a recovery of {recovery.seconds:.3f} s: clocks of processes differ"
        for recovery in too_early[:1]
    )
    return (
        [Check(name="times are in order", verdict=Verdict.ERROR, detail=detail)]
        if too_early
        else []
    )


def _went_on_without(incident: Incident, records: Sequence[Record]) -> bool:
    """Return whether steps without a lost rank's contribution were committed after its loss.

    The run ended well. Non-finite numbers need no new membership: the step is computed again.
    """
    loss = incident.detected
    if loss.event != Event.DETECTED:
        return False
    contributed_steps = (
        record["step"]
        for record in records
        if record.event == Event.REDUCE and record.source == loss["worker"]
    )
    last_step = max(contributed_steps, default=-1)
    return any(
        record.event == Event.COMMIT and record["step"] > last_step and record.t_ns > loss.t_ns
        for record in records
    )


def _lost_steps(history: History, worlds: Sequence[TornWorld], max_lost_steps: int) -> Check:
    """Return the check that no more committed steps were computed again than the plan allows.

    Steps that were lost with all ranks inside one update do not count.
    """
    lost_count, repeated_count = lost_without_reason(history, worlds), history.repeated_steps()
    problems = (
        [
            f"{lost_count} committed steps were lost and computed again, max_lost_steps={max_lost_steps}"
        ]
        if lost_count > max_lost_steps
        else []
    )
    torn_in_words = (
        f"; {repeated_count - lost_count} in an update in which every rank ended"
        if repeated_count > lost_count
        else ""
    )
    return conclude(
        COMMITTED_STEPS,
        problems,
        f"{lost_count} lost, beside the step in flight{torn_in_words}",
        looked_at=len(history.steps),
    )


def _one_history(history: History, weights: set[str], states: set[str], reduction: str) -> Check:
    """Return the check that every step has one result, and all ranks one final state."""
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
    """Return the check that every sample was used exactly once, and in the order of the twin.

    The order is not compared without a twin, or if samples are missing or repeated.
    """
    problems = [f"missing: {sample}" for sample in ledger.missing] + [
        f"repeated: {sample}" for sample in ledger.repeated
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
    """Return a failed check if the job raised an exception by itself; else an empty list.

    The exception that ended the run does not count, since the reason of the end names it.
    """
    reason = run.end.reason if run.end is not None else ""
    workers_by_error: dict[str, list[str]] = {}
    for loss in losses:
        if loss["detail"] not in reason:
            workers_by_error.setdefault(loss["detail"], []).append(loss["worker"])
    problems = [
        f"{', '.join(worker_names)}: {error}" for error, worker_names in workers_by_error.items()
    ]
    return (
        [conclude("no exception in the job", problems, "", looked_at=len(problems))]
        if problems
        else []
    )


def _false_alarms(run: RawRun, alarms: list[str]) -> Check:
    """Return the check that every detection belongs to a fault.

    Detections are in the coordinator's journal, so the check is unknown if that is empty and there
    is no alarm.
    """
    record_counts = [
        writer.records
        for file in run.coverage.values()
        for writer in file.writers
        if writer.role == "coordinator"
    ]
    return conclude(
        "no false alarm", alarms, "every detection belongs to a fault", looked_at=sum(record_counts)
    )
