"""Turns a raw run of a command into an outcome. A check without data is unknown, never passed."""

from __future__ import annotations

import math
from typing import Any

from chaoskit.experiment.injection.command_follower import GOOD
from chaoskit.experiment.judge.command_audit import audit
from chaoskit.experiment.judge.command_coverage import coverage_of
from chaoskit.experiment.plan.command_plan import moment
from chaoskit.experiment.run.command_run import CommandRun
from chaoskit.experiment.run.legibility import uncountable, why_silent
from chaoskit.experiment.run.log_ends import hints, log_ends
from chaoskit.experiment.twin.command_twin import CommandTwin, failed_nodes, taken_nodes, unfinished
from chaoskit.plaintext import plural
from chaoskit.runlog.findings import (
    compared_with_itself,
    conclude,
    environment,
    fault_check,
    fault_record,
    harness_lost,
    rules_fired,
    started_at,
)
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
_SILENT_SHARE = 10  # so many steps one may be without a loss


def judge_command(run: CommandRun, twin: CommandTwin | None, substrate: str) -> Outcome:
    """Everything that can be said about ``run``. ``twin``: what the command does unbroken, if that is known."""
    experiment, lines = run.experiment, run.lines
    first_ns = min((strike.target.injected_ns for strike in _landed(run)), default=math.inf)
    course = Course(lines, twin.usual if twin and twin.counts else Usual.before(lines, first_ns))
    recoveries = [
        recovery for strike in _landed(run) if (recovery := _recovery(run, course, strike))
    ]
    coverage, not_applied = coverage_of(run, twin), _not_applied(run, twin)
    unclear = (twin.uncountable if twin else "") or uncountable(
        run, course.usual, twin.counts if twin else {}
    )
    checks = [
        coverage.check(len(run.records), len(run.coverage)),
        _completed(run, course, twin, unclear),
        _shows_steps(run, course, twin, unclear),
        *(fault_check(strike, run.ended_ns) for strike in run.injections),
        *audit(run, is_whole=not coverage.blind),
        *(
            [_excused(_recovered(run, course, recoveries, twin), unclear)]
            if RECOVERED not in not_applied
            else []
        ),
        _excused(_kept(run, course), unclear),
    ]
    if twin is not None and run.run_id and twin.run_id == run.run_id:
        checks.append(compared_with_itself("twin", run.run_id))
    if twin is not None and LOSSES not in not_applied:
        checks.append(_excused(_losses(run, course, twin), unclear))
    if run.harness_lost:
        checks.append(harness_lost(run.records))
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
        # which torch the command has is known to the command alone
        environment=environment(run.coverage, "warden", "chaoskit", "python", "kernel", "machine"),
        directory=str(run.directory),
        settings=_settings(run),
    )


def _reasons(run: CommandRun, checks: list[Check], verdict: Verdict) -> list[str]:
    """Return why a run did not pass, and what helps."""
    if verdict == Verdict.PASSED:
        return []
    return [
        *(f"{check.name}: {check.detail}" for check in checks if check.verdict == verdict),
        *hints(run),
    ]


def _settings(run: CommandRun) -> dict[str, Any]:
    """What was chosen for this run, and is not a field of the outcome itself."""
    experiment = run.experiment
    chosen = {
        "step pattern": experiment.watch.step,
        "loss pattern": experiment.watch.loss,
        "tolerance": experiment.watch.tolerance,
        "ranks": experiment.ranks,
        "max_lost_steps": experiment.max_lost_steps,
        "stalled_s": experiment.stalled_s,
        "rules": experiment.rules,
    }
    return {name: value for name, value in chosen.items() if value}


def _not_applied(run: CommandRun, twin: CommandTwin | None) -> dict[str, str]:
    """Checks that say nothing about the run, with the reason."""
    found = {}
    if not _landed(run):
        found[RECOVERED] = "no fault struck"
    if run.experiment.watch.loss is None:
        found[LOSSES] = "there is no pattern for losses"
    elif twin is None:
        found[LOSSES] = "the unbroken run is not known"
    return found


def _landed(run: CommandRun) -> list[_Landed]:
    return [
        _Landed(strike)
        for strike in run.injections
        if strike.target is not None and not strike.missed
    ]


class _Landed:
    """A strike that was injected."""

    def __init__(self, strike: InjectionRecord) -> None:
        assert strike.target is not None
        self.fault, self.target = strike.fault, strike.target
        self.done_ns = strike.target.done_ns  # from then on the fault is in force


# -- the course -----------------------------------------------------------------------------------------------------


def _points(run: CommandRun, course: Course) -> list[StepPoint]:
    """One point a step, at the last time that it was shown. Of several losses the smallest."""
    points: list[StepPoint] = []
    losses = course.losses()
    for step, shown in course.steps.items():
        at_s = (shown.at_ns[-1] - run.started_ns) / 1e9
        points.append(
            StepPoint(
                step=step,
                loss=losses[step][0] if step in losses else None,
                at_s=at_s,
                seconds=at_s - points[-1].at_s if points else 0.0,
                generation=shown.attempt,
                world=0,
            )
        )
    return points


def _twin_losses(twin: CommandTwin | None) -> list[float | None] | None:
    if twin is None or not twin.losses or twin.highest is None:
        return None
    return [
        twin.losses[step][0] if step in twin.losses else None for step in range(twin.highest + 1)
    ]


def _recovery(run: CommandRun, course: Course, strike: _Landed) -> Recovery | None:
    """From the injection to the first step that is new after the training has felt it.

    One that was not felt is over with the next step, unless the run did not end well: then it may only not have shown.
    """
    injected_ns, felt = strike.target.injected_ns, _felt(run, course, strike)
    end = felt.end if felt else None if unfinished(run) else course.next_record(strike.done_ns)
    if end is None:
        return None
    at_ns, step = end
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
        cause=_impact(run, course, strike) or "the log does not show that the training felt it",
        fault=str(strike.fault),
        injected_s=start_s,
        generation=course.steps[step].attempt,
        world=0,
        spans=[span],
        seconds=seconds,
        full_strength_seconds=None,
        step_seconds=step_s,
    )


def _felt(run: CommandRun, course: Course, strike: _Landed) -> Felt | None:
    injected_ns = strike.target.injected_ns
    later = [one.target.injected_ns for one in _landed(run) if one.target.injected_ns > injected_ns]
    return look(course, strike.done_ns, min(later, default=math.inf))


def _impact(run: CommandRun, course: Course, strike: _Landed) -> str:
    """How the job felt a fault, in words; "" if the log does not show it."""
    felt, problems = _felt(run, course, strike), unfinished(run)
    if felt is None:
        return problems[0] if problems else ""
    if felt.back is not None:
        return f"the log went back from step {felt.step} to step {felt.back}"
    return f"no new step was shown for {felt.pause_s:.2f} s after step {felt.step}"


# -- faults ---------------------------------------------------------------------------------------------------------


def _fault_record(run: CommandRun, course: Course, strike: InjectionRecord) -> FaultRecord:
    felt = []
    if (
        strike.target is not None
        and not strike.missed
        and (impact := _impact(run, course, _Landed(strike)))
    ):
        seen = _felt(run, course, _Landed(strike))
        at_ns = seen.end[0] if seen and seen.end else run.ended_ns
        felt = [
            EvidenceRecord(level="impactful", at_s=(at_ns - run.started_ns) / 1e9, observed=impact)
        ]
    return fault_record(strike, run.started_ns, _stood, felt, moment(strike.fault))


def _stood(target: Struck) -> str:
    shown = (
        "the log showed no step yet" if target.step < 0 else f"the log showed step {target.step}"
    )
    return f"rank {target.rank} (pid {target.pid} on {target.node}) was alive, and {shown}; where it stood is not known"


# -- checks ---------------------------------------------------------------------------------------------------------


def _unknown(name: str, detail: str) -> Check:
    return Check(name=name, verdict=Verdict.UNKNOWN, detail=detail)


def _excused(check: Check, unclear: str) -> Check:
    """A check that failed on a log that cannot be counted has shown nothing."""
    if unclear and check.verdict is Verdict.FAILED:
        return _unknown(check.name, f"{check.detail}, which says nothing")
    return check


def _completed(run: CommandRun, course: Course, twin: CommandTwin | None, unclear: str) -> Check:
    problems = unfinished(run)
    last, whole = course.highest, twin.highest if twin else None
    if not problems and last is not None and whole is not None and last < whole:
        ending = f"the log ends with step {last}, the unbroken run's with step {whole}"
        if unclear:
            return _unknown(COMPLETED, f"{ending}, which says nothing")
        problems.append(ending)
    return conclude(
        COMPLETED,
        problems,
        f"the command ended with status 0 on {_nodes(run)}",
        looked_at=len(run.exits),
    )


def _nodes(run: CommandRun) -> str:
    good = sum(end == GOOD for end in run.exits.values())
    return f"{good} of {run.experiment.nodes} nodes" if run.experiment.nodes > 1 else "its node"


def _shows_steps(run: CommandRun, course: Course, twin: CommandTwin | None, unclear: str) -> Check:
    name, last = "the log shows steps", course.highest
    if unclear:
        return _unknown(name, f"{unclear}; see {run.directory / 'log'}")
    if last is not None:
        wanted = [step for step in twin.counts if step <= last] if twin is not None else []
        silent = sum(step not in course.steps for step in wanted)
        if _is_too_silent(run, silent, len(wanted)):
            told = f"{silent} of {len(wanted)} steps are in its twin's log only"
            return _unknown(
                name, f"{told}: have every step shown, or do without a twin (twin=False)"
            )
        lines, lacking = _lines_lacking(run, course, twin)
        if _is_too_silent(run, lacking, lines):
            told = f"of {lines} lines that show a step of the unbroken run {lacking} are missing"
            return _unknown(name, f"{told}: a rank that came back shows none, or never came back")
        fine = f"{plural(len(course.steps), 'step')} in {plural(run.lines_read, 'line')}"
        return conclude(name, [], fine, looked_at=len(course.steps))
    if silence := why_silent(run):
        return _unknown(name, f"{silence}; see {run.directory / 'log'}")
    told = f"LogPatterns(step={run.experiment.watch.step!r}) matches none of {run.lines_read} lines"
    if run.odd:
        told = f"LogPatterns(step={run.experiment.watch.step!r}) matches {run.odd!r}, which is no whole number"
    example = f", such as {run.example[:80]!r}" if run.example else ""
    return _unknown(name, f"{told}{example}: mend the pattern; see {run.directory / 'log'}")


def _lines_lacking(run: CommandRun, course: Course, twin: CommandTwin | None) -> tuple[int, int]:
    """How many lines of the unbroken run show a step, and how many of these have no like in this run's log.

    Of steps up to the last one; of a job that a fault made smaller for good nothing is known.
    """
    last = course.highest
    if twin is None or last is None or taken_nodes(run):
        return 0, 0
    wanted = {step: count for step, count in twin.counts.items() if step <= last}
    shown = course.counts()
    return sum(wanted.values()), sum(
        max(0, count - shown.get(step, 0)) for step, count in wanted.items()
    )


def _recovered(
    run: CommandRun, course: Course, recoveries: list[Recovery], twin: CommandTwin | None
) -> Check:
    landed, last = len(_landed(run)), course.highest
    if last is None:
        return _unknown(RECOVERED, "the log shows no step")
    missing, is_well = landed - len(recoveries), not unfinished(run)
    if missing and is_well and twin is None:
        told = f"no step after step {last} was shown, and whether that was the last is known by an unbroken run alone"
        return _unknown(RECOVERED, told)
    if is_well and twin is not None and twin.highest is not None and last >= twin.highest:
        missing = 0  # it hit the last step
    problems = (
        [f"the log shows no recovery from {missing} of {plural(landed, 'incident')}"]
        if missing
        else []
    )
    return conclude(
        RECOVERED, problems, plural(len(recoveries), "recovery", "recoveries"), looked_at=landed
    )


def _kept(run: CommandRun, course: Course) -> Check:
    name, most, lost = "committed steps kept", run.experiment.max_lost_steps, course.lost_steps()
    if not course.steps:
        return _unknown(name, "the log shows no step")
    again = plural(lost, "step was", "steps were")
    problems = [f"{again} lost and shown again, max_lost_steps={most}"] if lost > most else []
    return conclude(name, problems, f"{again} shown again", looked_at=len(course.steps))


def _losses(run: CommandRun, course: Course, twin: CommandTwin) -> Check:
    watch, mine = run.experiment.watch, course.losses()
    for whose, losses in (("this run's", mine), ("the unbroken run's", twin.losses)):
        if not losses:
            told = f"LogPatterns(loss={watch.loss!r}) finds no loss of any step in {whose} log"
            return _unknown(LOSSES, f"{told}: mend the pattern; see {run.directory / 'log'}")
    if min(course.steps) != twin.first:
        told = f"the log begins with step {min(course.steps)}, the unbroken run's with step {twin.first}"
        return _unknown(
            LOSSES,
            f"{told}: have the command keep its state in {{run_dir}}, which is new for every run",
        )
    wanted = [step for step in sorted(twin.losses) if step <= max(course.steps)]
    shared = [step for step in wanted if step in mine]
    silent = len(wanted) - len(shared)
    if not shared or _is_too_silent(run, silent, len(wanted)):
        told = (
            f"{silent} of {len(wanted)} steps have no loss in this run's log, and one in its twin's"
        )
        return _unknown(LOSSES, told)
    wrong = [step for step in shared if differs(mine[step], twin.losses[step], watch.tolerance)]
    problems = [
        f"step {step}: {_told(mine[step])} instead of {_told(twin.losses[step])}"
        for step in wrong[:1]
    ]
    how = f"within {watch.tolerance:g}" if watch.tolerance else "to the last digit"
    fine = f"{len(shared)} of {plural(len(twin.losses), 'loss', 'losses')}, {how}"
    return conclude(LOSSES, problems, fine, looked_at=len(shared))


def _is_too_silent(run: CommandRun, silent: int, wanted: int) -> bool:
    """Whether a log lacks more than chance explains: a step whose line was due when a fault struck is never shown."""
    return silent > max(len(_landed(run)), wanted // _SILENT_SHARE)


def _told(losses: tuple[float, ...]) -> str:
    return " and ".join(map(repr, losses[:4]))
