"""Turn a raw run of a command into an outcome. A check without data is unknown, never passed.

-> stacks/course.py: which steps were lost; stacks/felt.py: when training paused or went back.
experiment/run/legibility.py: logs whose steps cannot be counted. runlog/fault_verdict.py
(fault_check): a fault without evidence; experiment/judge/command_audit.py: one that struck another
process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chaoskit.experiment.injection.command_follower import GOOD
from chaoskit.experiment.judge.command_audit import audit
from chaoskit.experiment.judge.command_coverage import coverage_of
from chaoskit.experiment.plan.command_plan import moment
from chaoskit.experiment.run.command_run import CommandRun
from chaoskit.experiment.run.disruptions import DEPENDENT, check_pods, excuse_failures
from chaoskit.experiment.run.legibility import why_silent, why_uncountable
from chaoskit.experiment.run.log_ends import hints, log_ends
from chaoskit.experiment.run.run import LATER
from chaoskit.experiment.run.running_job import check_hands, goes_on, last_act_ns, why_unclear
from chaoskit.experiment.twin.command_twin import CommandTwin, failed_nodes, taken_nodes, unfinished
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import NO_RANK
from chaoskit.plaintext import plural
from chaoskit.runlog.checks import (
    compared_with_itself,
    conclude,
    environment,
    harness_lost,
    rules_fired,
    started_at,
)
from chaoskit.runlog.fault_verdict import fault_check, fault_record
from chaoskit.runlog.injected import InjectionRecord, Struck
from chaoskit.runlog.outcome import (
    COMPLETED,
    RECOVERED,
    Check,
    EvidenceRecord,
    FaultRecord,
    Outcome,
    PhaseSpan,
    Recovery,
    StepPoint,
)
from chaoskit.stacks.course import Course, Usual, differs
from chaoskit.stacks.felt import Felt, look, usual_step_s
from chaoskit.vocabulary import Verdict

STACK = "command"
LOSSES = "losses equal the twin's"
_SILENT_SHARE = 10  # one step among so many may have no loss
#: Seconds for which the processes of a deleted pod, or of a container that is killed, may still live.
_SETTLE_S = 3.0


def judge_command(run: CommandRun, twin: CommandTwin | None, substrate: str) -> Outcome:
    """Judge ``run`` and return the outcome.

    Args:
        run: the records of the run.
        twin: the unbroken run of the same command or job, or None if there is none.
        substrate: the name of the substrate of the nodes.
    """
    experiment, lines = run.experiment, run.lines
    if twin is not None and experiment.running_job is not None:
        twin = twin.observed_part(lines)
    # the twin of a running job ends where the run does, so its end proves no recovery
    whole_twin = twin if experiment.running_job is None else None
    first_ns = min(
        (strike.target.injected_ns for strike in _injected_faults(run)), default=math.inf
    )
    course = Course(lines, twin.usual if twin and twin.counts else Usual.before(lines, first_ns))
    recoveries = [
        recovery for strike in _injected_faults(run) if (recovery := _recovery(run, course, strike))
    ]
    coverage, not_applied = coverage_of(run, twin), _not_applied(run, twin)
    uncountable_reason = (twin.uncountable if twin else "") or why_uncountable(
        run, course.usual, twin.counts if twin else {}
    )
    if run.experiment.running_job is not None:
        uncountable_reason = uncountable_reason or why_unclear(run)
    checks = [
        coverage.check(len(run.records), len(run.coverage)),
        *(
            [_unless_unclear(goes_on(run), uncountable_reason), *check_hands(run)]
            if run.experiment.running_job is not None
            else [_completed(run, course, twin, uncountable_reason)]
        ),
        _shows_steps(run, course, twin, uncountable_reason),
        *(fault_check(strike, run.ended_ns) for strike in run.injections),
        *audit(run, is_whole=not coverage.blind),
        *(
            [_unless_unclear(_recovered(run, course, recoveries, whole_twin), uncountable_reason)]
            if RECOVERED not in not_applied
            else []
        ),
        _unless_unclear(_steps_kept(run, course), uncountable_reason),
    ]
    if twin is not None and run.run_id and twin.run_id == run.run_id:
        checks.append(compared_with_itself("twin", run.run_id))
    if LOSSES not in not_applied:
        checks.append(_unless_unclear(_losses(run, course, twin), uncountable_reason))
    if run.harness_lost:
        checks.append(harness_lost(run.records))
    checks += check_pods(run.disturbing_pods, run.disturbing_pods)
    checks = excuse_failures(checks, run.disturbing_pods, (*DEPENDENT, LOSSES))
    verdict = coverage.verdict(checks)
    return Outcome(
        name=experiment.name,
        job=experiment.job,
        stack=STACK,
        substrate=substrate,
        nodes=experiment.nodes,
        spares=0,
        seed=experiment.seed,
        reduction="",
        started=started_at(run.coverage, run.started_ns),
        wall_s=(run.ended_ns - run.started_ns) / 1e9,
        verdict=verdict,
        reasons=_reasons(run, checks, verdict),
        steps=_points(run, course),
        twin_losses=_twin_losses(twin),
        faults=[_fault_record(run, course, strike) for strike in run.injections],
        recoveries=recoveries,
        checks=checks,
        not_applied=not_applied,
        ledger=None,
        lost_steps=course.lost_steps(),
        false_alarms=None,
        rules_fired=rules_fired(run.records, run.started_ns),
        log_ends=log_ends(run, failed_nodes(run)) if verdict != Verdict.PASSED else [],
        # the torch version is known to the command alone
        environment=environment(run.coverage, "warden", "chaoskit", "python", "kernel", "machine"),
        directory=str(run.directory),
        settings=_settings(run),
    )


def _reasons(run: CommandRun, checks: list[Check], verdict: Verdict) -> list[str]:
    """Return why a run did not pass, one text a check, then advice; empty if it passed."""
    if verdict == Verdict.PASSED:
        return []
    return [
        *(f"{check.name}: {check.detail}" for check in checks if check.verdict == verdict),
        *hints(run),
    ]


def _settings(run: CommandRun) -> dict[str, Any]:
    """Return the settings chosen for this run that are not fields of the outcome itself."""
    experiment = run.experiment
    chosen = {
        "step pattern": experiment.watch.step,
        "loss pattern": experiment.watch.loss,
        "rank pattern": experiment.watch.rank,
        "tolerance": experiment.watch.tolerance,
        "ranks": experiment.ranks,
        "max_lost_steps": experiment.max_lost_steps,
        "stalled_s": experiment.stalled_s,
        "rules": experiment.rules,
    }
    return {name: setting for name, setting in chosen.items() if setting}


def _not_applied(run: CommandRun, twin: CommandTwin | None) -> dict[str, str]:
    """Return name -> reason for each check that does not apply to the run; these are left out."""
    reasons = {}
    if run.experiment.running_job is not None:
        reasons[COMPLETED] = "the job goes on after the run"
    if not _injected_faults(run):
        reasons[RECOVERED] = "no fault struck"
    if run.experiment.watch.loss is None:
        reasons[LOSSES] = "there is no pattern for losses"
    elif twin is None and run.twin_id != LATER:
        reasons[LOSSES] = "the unbroken run is not known"
    return reasons


def _injected_faults(run: CommandRun) -> list[_InjectedFault]:
    """Return the faults that were injected, without those that were missed."""
    return [
        _InjectedFault(strike.fault, strike.target, strike.effective_ns or 0)
        for strike in run.injections
        if strike.target is not None and not strike.missed
    ]


@dataclass(frozen=True, slots=True)
class _InjectedFault:
    """A fault that was injected.

    Attributes:
        fault: the fault.
        target: the process that it struck.
        effective_ns: the time of the first evidence of its effect; 0 without evidence.
    """

    fault: Fault
    target: Struck
    effective_ns: int

    @property
    def done_ns(self) -> int:
        """The time in ns from which the fault is in force."""
        return self.target.done_ns


# -- the course ------------------------------------------------------------------------------------


def _points(run: CommandRun, course: Course) -> list[StepPoint]:
    """Return one point for each step, at the last time that it was shown.

    Of several losses the smallest counts, and NaN before any number.
    """
    points: list[StepPoint] = []
    losses = course.losses()
    for step, shown_step in course.steps.items():
        at_s = (shown_step.at_ns[-1] - run.started_ns) / 1e9
        points.append(
            StepPoint(
                step=step,
                loss=losses[step][0] if step in losses else None,
                at_s=at_s,
                seconds=at_s - points[-1].at_s if points else 0.0,
                generation=shown_step.attempt,
                world=0,
            )
        )
    return points


def _twin_losses(twin: CommandTwin | None) -> list[float | None] | None:
    """Return the twin's losses by step, with None for a step without one.

    None is returned if the twin shows no losses at all.
    """
    if twin is None or not twin.losses or twin.highest is None:
        return None
    return [
        twin.losses[step][0] if step in twin.losses else None for step in range(twin.highest + 1)
    ]


def _recovery(run: CommandRun, course: Course, strike: _InjectedFault) -> Recovery | None:
    """Return the recovery from a fault, from the injection to the first new step after its effect.

    A fault without an effect is over with the next step, unless the run ended badly: the effect may
    be missing in the log. None is returned if the log shows no such step.
    """
    injected_ns, effect = strike.target.injected_ns, _effect(run, course, strike)
    end_record = (
        effect.end if effect else None if unfinished(run) else course.next_record(strike.done_ns)
    )
    if end_record is None:
        return None
    at_ns, step = end_record
    seconds, step_s = (at_ns - injected_ns) / 1e9, usual_step_s(course, injected_ns)
    start_s = (injected_ns - run.started_ns) / 1e9
    span = PhaseSpan(
        name="first good step",
        start_s=start_s,
        end_s=start_s + seconds,
        reference_s=step_s,
        reference="one usual step",
    )
    return Recovery(
        cause=_impact(run, course, strike) or "the log shows no effect on the training",
        fault=str(strike.fault),
        injected_s=start_s,
        generation=course.steps[step].attempt,
        world=0,
        spans=[span],
        seconds=seconds,
        full_strength_seconds=None,
        step_seconds=step_s,
    )


def _effect(run: CommandRun, course: Course, strike: _InjectedFault) -> Felt | None:
    """Return the effect of a fault on the training, as the log shows it, or None."""
    injected_ns = strike.target.injected_ns
    later_strikes_ns = [
        later_fault.target.injected_ns
        for later_fault in _injected_faults(run)
        if later_fault.target.injected_ns > injected_ns
    ]
    settle_s = 0.0
    if run.experiment.running_job is not None:
        settle_s = max(_SETTLE_S, (strike.effective_ns - strike.done_ns) / 1e9)
    return look(course, strike.done_ns, min(later_strikes_ns, default=math.inf), settle_s)


def _impact(run: CommandRun, course: Course, strike: _InjectedFault) -> str:
    """Return in words how the job was affected by a fault; "" if the log does not show it.

    Without an effect in the log it is the first reason why the run ended badly, if it did.
    """
    effect, problems = _effect(run, course, strike), unfinished(run)
    if effect is None:
        return problems[0] if problems else ""
    if effect.back is not None:
        return f"the log went back from step {effect.step} to step {effect.back}"
    return f"no new step was shown for {effect.pause_s:.2f} s after step {effect.step}"


# -- faults ----------------------------------------------------------------------------------------


def _fault_record(run: CommandRun, course: Course, strike: InjectionRecord) -> FaultRecord:
    """Return the record of a fault for the outcome, with its effect on the training, if any."""
    impacts = []
    if strike.target is not None and not strike.missed:
        injected_fault = _InjectedFault(strike.fault, strike.target, strike.effective_ns or 0)
        if impact := _impact(run, course, injected_fault):
            effect = _effect(run, course, injected_fault)
            at_ns = effect.end[0] if effect and effect.end else run.ended_ns
            at_s = (at_ns - run.started_ns) / 1e9
            impacts = [EvidenceRecord(level="impactful", at_s=at_s, observed=impact)]
    return fault_record(strike, run.started_ns, _state_when_struck, impacts, moment(strike.fault))


def _state_when_struck(target: Struck) -> str:
    """Return in words which step the log showed when the fault struck."""
    shown_in_words = (
        "the log showed no step yet" if target.step < 0 else f"the log showed step {target.step}"
    )
    process_in_words = f"rank {target.rank} (pid {target.pid} on {target.node})"
    if target.rank == NO_RANK:
        process_in_words = f"the first process of {target.node} (pid {target.pid})"
    return f"{process_in_words} was alive, and {shown_in_words}; its phase is not known"


# -- checks ----------------------------------------------------------------------------------------


def _unknown(name: str, detail: str) -> Check:
    """Return a check with the verdict unknown."""
    return Check(name=name, verdict=Verdict.UNKNOWN, detail=detail)


def _unless_unclear(check: Check, uncountable_reason: str) -> Check:
    """Return a failed check as unknown if the log cannot be counted; other checks as they are.

    Args:
        check: the check.
        uncountable_reason: the reason why steps cannot be counted; "" if they can.
    """
    if uncountable_reason and check.verdict is Verdict.FAILED:
        return _unknown(check.name, f"{check.detail}, which proves nothing with this log")
    return check


def _completed(
    run: CommandRun, course: Course, twin: CommandTwin | None, uncountable_reason: str
) -> Check:
    """Return the check that the command ended well on every node, at the twin's last step.

    An earlier last step gives unknown if steps cannot be counted, for the reason ``uncountable_reason``.
    """
    problems = unfinished(run)
    last_step, twin_last_step = course.highest, twin.highest if twin else None
    if (
        not problems
        and last_step is not None
        and twin_last_step is not None
        and last_step < twin_last_step
    ):
        ending = (
            f"the log ends with step {last_step}, the unbroken run's with step {twin_last_step}"
        )
        if uncountable_reason:
            return _unknown(COMPLETED, f"{ending}, which proves nothing with this log")
        problems.append(ending)
    return conclude(
        COMPLETED,
        problems,
        f"the command ended with status 0 on {_nodes(run)}",
        looked_at=len(run.exits),
    )


def _nodes(run: CommandRun) -> str:
    """Return in words the nodes on which the command ended well, such as "3 of 4 nodes"."""
    good_ends = sum(end == GOOD for end in run.exits.values())
    return (
        f"{good_ends} of {run.experiment.nodes} nodes" if run.experiment.nodes > 1 else "its node"
    )


def _shows_steps(
    run: CommandRun, course: Course, twin: CommandTwin | None, uncountable_reason: str
) -> Check:
    """Return the check that the log shows steps, and as many as the unbroken run.

    It is unknown, with a remedy, if steps are missing or cannot be counted; it never fails. A few
    missing steps are allowed: see :func:`_is_too_silent`. ``uncountable_reason`` is the reason why steps
    cannot be counted, or "".
    """
    name, last_step = "the log shows steps", course.highest
    if uncountable_reason:
        return _unknown(name, f"{uncountable_reason}; see {run.directory / 'log'}")
    if last_step is not None:
        twin_steps = [step for step in twin.counts if step <= last_step] if twin is not None else []
        silent_count = sum(step not in course.steps for step in twin_steps)
        if _is_too_silent(run, silent_count, len(twin_steps)):
            problem = f"{silent_count} of {len(twin_steps)} steps are in its twin's log only"
            return _unknown(
                name, f"{problem}: print every step, or run without a twin (twin=False)"
            )
        line_count, lacking_count = _lines_lacking(run, course, twin)
        if _is_too_silent(run, lacking_count, line_count):
            problem = (
                f"{lacking_count} of {line_count} lines with a step of the unbroken run are missing"
            )
            return _unknown(
                name, f"{problem}: a restarted rank prints none, or a lost rank was not restarted"
            )
        passed_detail = f"{plural(len(course.steps), 'step')} in {plural(run.lines_read, 'line')}"
        return conclude(name, [], passed_detail, looked_at=len(course.steps))
    if silence_reason := why_silent(run):
        return _unknown(name, f"{silence_reason}; see {run.directory / 'log'}")
    problem = (
        f"LogPatterns(step={run.experiment.watch.step!r}) matches none of {run.lines_read} lines"
    )
    if run.odd:
        problem = f"LogPatterns(step={run.experiment.watch.step!r}) matches {run.odd!r}, which is not a whole number"
    example = f", such as {run.example[:80]!r}" if run.example else ""
    return _unknown(name, f"{problem}{example}: correct the pattern; see {run.directory / 'log'}")


def _lines_lacking(run: CommandRun, course: Course, twin: CommandTwin | None) -> tuple[int, int]:
    """Return how many lines of the twin's log show a step, and how many are missing here.

    Only steps up to the last one count. Both numbers are 0 if a fault made the job smaller for
    good.
    """
    last_step = course.highest
    if twin is None or last_step is None or taken_nodes(run):
        return 0, 0
    twin_counts = {step: count for step, count in twin.counts.items() if step <= last_step}
    own_counts = course.counts()
    return sum(twin_counts.values()), sum(
        max(0, count - own_counts.get(step, 0)) for step, count in twin_counts.items()
    )


def _recovered(
    run: CommandRun, course: Course, recoveries: list[Recovery], twin: CommandTwin | None
) -> Check:
    """Return the check that the log shows a recovery from each fault.

    It is unknown if the log shows no step, or if only an unbroken run could show whether the last
    step was shown. A fault in the last step of a run that ended well needs no recovery.
    """
    injected_count, last_step = len(_injected_faults(run)), course.highest
    if last_step is None:
        return _unknown(RECOVERED, "the log shows no step")
    missing_count, ended_well = injected_count - len(recoveries), not unfinished(run)
    if missing_count and ended_well and twin is None:
        problem = f"the log shows no step after step {last_step}"
        remedy = "only an unbroken run can show whether that is the last step"
        return _unknown(RECOVERED, f"{problem}; {remedy}")
    if ended_well and twin is not None and twin.highest is not None and last_step >= twin.highest:
        missing_count = 0  # the fault struck in the last step
    problems = (
        [f"the log shows no recovery from {missing_count} of {plural(injected_count, 'incident')}"]
        if missing_count
        else []
    )
    return conclude(
        RECOVERED,
        problems,
        plural(len(recoveries), "recovery", "recoveries"),
        looked_at=injected_count,
    )


def _steps_kept(run: CommandRun, course: Course) -> Check:
    """Return the check that no more steps were shown again than the plan allows.

    It is unknown if the log shows no step.
    """
    name, max_lost_steps, lost_count = (
        "committed steps kept",
        run.experiment.max_lost_steps,
        course.lost_steps(),
    )
    if not course.steps:
        return _unknown(name, "the log shows no step")
    steps_in_words = plural(lost_count, "step was", "steps were")
    problems = (
        [f"{steps_in_words} lost and shown again, max_lost_steps={max_lost_steps}"]
        if lost_count > max_lost_steps
        else []
    )
    return conclude(name, problems, f"{steps_in_words} shown again", looked_at=len(course.steps))


def _losses(run: CommandRun, course: Course, twin: CommandTwin | None) -> Check:
    """Return the check that the losses equal the twin's, within the tolerance of the patterns.

    It is unknown if one of the logs shows too few losses, or begins with another step, or the twin
    of a running job was not made or has failed. Only steps with a loss in both logs are compared.
    Those of a running job must include steps after its faults, unless a loss differs.
    """
    watch, own_losses = run.experiment.watch, course.losses()
    if twin is None:
        return _unknown(LOSSES, "no unbroken run was made, as this run did not end well")
    if twin.failure:
        return _unknown(LOSSES, f"the unbroken run did not show its steps: {twin.failure}")
    is_running_job = run.experiment.running_job is not None
    if is_running_job and not twin.counts:
        return _unknown(LOSSES, "no step is shown whole in both logs")
    for owner, losses in (("this run's", own_losses), ("the unbroken run's", twin.losses)):
        if not losses:
            problem = f"LogPatterns(loss={watch.loss!r}) finds no loss of any step in {owner} log"
            return _unknown(LOSSES, f"{problem}: correct the pattern; see {run.directory / 'log'}")
    if not is_running_job and min(course.steps) != twin.first:
        problem = f"the log begins with step {min(course.steps)}, the unbroken run's with step {twin.first}"
        return _unknown(
            LOSSES,
            f"{problem}: have the command keep its state in {{run_dir}}, which is new for every run",
        )
    twin_steps = [step for step in sorted(twin.losses) if step <= max(course.steps)]
    shared = [step for step in twin_steps if step in own_losses]
    silence_reason = (
        _why_late_losses_unknown(run, course, twin_steps)
        if is_running_job
        else _why_too_silent(run, len(twin_steps) - len(shared), len(twin_steps))
    )
    different_steps = [
        step for step in shared if differs(own_losses[step], twin.losses[step], watch.tolerance)
    ]
    if silence_reason and not (is_running_job and different_steps):
        return _unknown(LOSSES, silence_reason)
    problems = [
        f"step {step}: {_in_words(own_losses[step])} instead of {_in_words(twin.losses[step])}"
        for step in different_steps[:1]
    ]
    precision_in_words = f"within {watch.tolerance:g}" if watch.tolerance else "to the last digit"
    passed_detail = (
        f"{len(shared)} of {plural(len(twin.losses), 'loss', 'losses')}, {precision_in_words}"
    )
    return conclude(LOSSES, problems, passed_detail, looked_at=len(shared))


def _why_too_silent(run: CommandRun, silent_count: int, twin_count: int) -> str:
    """Return that too few of the steps with a loss in the twin's log have one here; "" if not."""
    if silent_count < twin_count and not _is_too_silent(run, silent_count, twin_count):
        return ""
    return (
        f"{silent_count} of {twin_count} steps have a loss in the twin's log, but not in this run's"
    )


def _why_late_losses_unknown(run: CommandRun, course: Course, twin_steps: Sequence[int]) -> str:
    """Return why the losses of a running job after its faults are not known; "" if they are.

    The steps before the last act of a fault show nothing of a wrong state after it.

    Args:
        run: the run.
        course: its course.
        twin_steps: the steps with a loss in the twin's log.
    """
    highest, own_losses = course.highest_before(last_act_ns(run)), course.losses()
    late_steps = [step for step in twin_steps if step > highest]
    if not late_steps:
        return "no step after the last act of a fault is shown whole, with a loss, in both logs"
    silent_count = sum(step not in own_losses for step in late_steps)
    # one line may be that of a process which has ended meanwhile
    allowed_count = max(1, len(late_steps) // _SILENT_SHARE)
    if silent_count < len(late_steps) and silent_count <= allowed_count:
        return ""
    return (
        f"{silent_count} of {plural(len(late_steps), 'step')} after the last act of a fault have a loss in the"
        f" twin's log, but not in this run's: does LogPatterns(loss={run.experiment.watch.loss!r}) match nan?"
    )


def _is_too_silent(run: CommandRun, silent: int, expected: int) -> bool:
    """Return whether a log lacks more lines than the faults explain, and more than a tenth.

    The line of a step that is due at the moment of a fault is never shown.

    Args:
        run: the run, for the number of its faults.
        silent: the number of missing lines or steps.
        expected: the number of all lines or steps that the twin's log shows.
    """
    return silent > max(len(_injected_faults(run)), expected // _SILENT_SHARE)


def _in_words(losses: tuple[float, ...]) -> str:
    """Return the losses of a step in words, at most four of them."""
    return " and ".join(map(repr, losses[:4]))
