"""The state of a running job after the faults of a run, read from its records.

A command ends, and shows by its exit status how. A running job goes on: its new steps show that.

-> experiment/judge/command_judge.py: the check. attach/run/: the records of places.
"""

from __future__ import annotations

from chaoskit.experiment.injection.command_follower import GOOD
from chaoskit.experiment.run.command_run import CommandRun, describe_end
from chaoskit.journal import Record
from chaoskit.runlog.outcome import Check
from chaoskit.vocabulary import Event, RunEnd, Verdict

GOES_ON = "training goes on after the faults"
HANDS_STAND = "hands stand while faults are in force"
#: Seconds after which the API server shows the end of a container at the latest.
_API_LATE_S = 5.0
_ACTS = (Event.INJECTED, Event.ACTED, Event.LIFTED, Event.EVIDENCE)


def goes_on(run: CommandRun) -> Check:
    """Return the check that the training goes on after the faults, or has completed.

    It fails if the training stands still, with the places that have no container, or that are on a
    silent machine. It is unknown if the run ended before that could be seen.
    """
    problem = why_standing(run)
    if problem:
        return Check(name=GOES_ON, verdict=Verdict.FAILED, detail=problem)
    if run.is_aborted:
        return Check(name=GOES_ON, verdict=Verdict.UNKNOWN, detail=_why_aborted(run))
    if lost := lost_places(run):
        detail = f"the log shows new steps, but {'; '.join(lost)}"
        return Check(name=GOES_ON, verdict=Verdict.UNKNOWN, detail=detail)
    if run.deadline_passed:
        limit_s = run.experiment.deadline_s
        detail = f"the deadline of {limit_s:g} s (deadline_s) passed before the job was observed for long enough"
        return Check(name=GOES_ON, verdict=Verdict.UNKNOWN, detail=detail)
    if run.reason == RunEnd.ENDED:
        return Check(name=GOES_ON, verdict=Verdict.PASSED, detail="the training has completed")
    steps = sorted(_new_steps(run))
    shown = f"{len(steps)} new steps up to step {steps[-1]}" if steps else "no fault acted"
    return Check(name=GOES_ON, verdict=Verdict.PASSED, detail=shown)


def why_standing(run: CommandRun) -> str:
    """Return why the training of a running job does not go on; "" if it does, or may."""
    if run.reason == RunEnd.ENDED:
        bad_ends = [(node, end) for node, end in sorted(run.exits.items()) if end != GOOD]
        return "; ".join(f"the container of {node} {describe_end(*end)}" for node, end in bad_ends)
    if run.has_stalled:
        problem = f"no step was shown for {run.experiment.stalled_s:g} s (stalled_s)"
    elif run.deadline_passed and not _new_steps(run):
        since_s = (run.ended_ns - last_act_ns(run)) / 1e9
        problem = f"no new step was shown in the {since_s:.0f} s since the last act of a fault"
    else:
        return ""
    return "; ".join([problem, *lost_places(run)])


def has_ended_well(run: CommandRun) -> bool:
    """Return whether a run was observed to its end, or to a good end of the job."""
    return run.reason in (RunEnd.OBSERVED, RunEnd.ENDED) and not why_standing(run)


def lost_places(run: CommandRun) -> list[str]:
    """Return in words each place without a running container, or on a silent machine, at the end."""
    return [*_empty_places(run), *_silent_places(run)]


def _empty_places(run: CommandRun) -> list[str]:
    """Return in words each place without a running container at the end of the run."""
    newest = _newest(run, Event.LIFE_OBSERVED, Event.LIFE_ENDED)
    return [
        f"{node} has had no running container for {(run.ended_ns - record.t_ns) / 1e9:.0f} s: {record['cause']}"
        for node, record in sorted(newest.items())
        if record.event == Event.LIFE_ENDED
    ]


def _silent_places(run: CommandRun) -> list[str]:
    """Return in words each place on a machine of which the control plane does not hear."""
    newest = _newest(run, Event.MACHINE_SILENT, Event.SILENCE_ENDED)
    return [
        f"the machine {record['machine']} of {node} has been silent for {(run.ended_ns - record.t_ns) / 1e9:.0f} s"
        for node, record in sorted(newest.items())
        if record.event == Event.MACHINE_SILENT
    ]


def _newest(run: CommandRun, *events: Event) -> dict[str, Record]:
    """Return the last record of these events that each node has written before the run ended."""
    return {
        record.source: record
        for record in run.records
        if record.event in events and record.t_ns <= run.ended_ns
    }


def check_hands(run: CommandRun) -> list[Check]:
    """Return the check that is unknown if a hand has ended while faults may have acted by it.

    Its effects end with a hand, and the next one does not begin them again. A hand may end with its
    container, whose end the API server shows later, and on a node from the strike of a fault on that
    takes the node away. There is no check if all other hands stood.
    """
    first_act_ns = min(
        (record.t_ns for record in run.records if record.event == Event.INJECTED), default=None
    )
    ended_hands = [
        f"the hand on the {record['role']} of {record.source} has ended"
        for record in run.records
        if record.event == Event.HAND_ENDED
        and first_act_ns is not None
        and first_act_ns <= record.t_ns <= run.ended_ns
        and not _ended_by_fault(run, record)
        and not _ended_with_life(run, record)
    ]
    if not ended_hands:
        return []
    detail = f"{'; '.join(ended_hands)}: faults that acted by it ended early"
    return [Check(name=HANDS_STAND, verdict=Verdict.UNKNOWN, detail=detail)]


def _ended_by_fault(run: CommandRun, hand: Record) -> bool:
    """Return whether a hand has ended after the strike of a fault that takes its node away."""
    return any(
        strike.fault.ends_node
        and strike.target is not None
        and hand.source in strike.target.struck_nodes
        and strike.target.injected_ns <= hand.t_ns
        for strike in run.injections
    )


def _ended_with_life(run: CommandRun, hand: Record) -> bool:
    """Return whether the container of a hand has ended at the same time as the hand."""
    latest_ns = hand.t_ns + int(_API_LATE_S * 1e9)
    return any(
        record.event == Event.LIFE_ENDED
        and (record.source, record["container_id"]) == (hand.source, hand["container_id"])
        and record.t_ns <= latest_ns
        for record in run.records
    )


def why_unclear(run: CommandRun) -> str:
    """Return why the log of a running job proves nothing; "" if it does."""
    if run.is_aborted:
        return "the run was aborted"
    if not any(line.step is not None for line in run.lines):
        return "the log shows no step"
    return hole_in_steps(run)


def hole_in_steps(run: CommandRun) -> str:
    """Return in words the first hole in a log that shows steps; "" if there is none.

    Steps may be missing there, so that it is not known how many were lost, or when the first new
    one was shown.
    """
    nodes = {line.node for line in run.lines}
    holes = [
        record
        for record in run.records
        if record.event == Event.LOG_HOLE
        and record["file"] in nodes
        and record.t_ns <= run.ended_ns
    ]
    if not holes:
        return ""
    hole = holes[0]
    more = f" (and {len(holes) - 1} more holes)" if len(holes) > 1 else ""
    return f"lines of {hole['file']} may be missing after line {hole['line']} of its log: {hole['reason']}{more}"


def _new_steps(run: CommandRun) -> set[int]:
    """Return the steps after the last act of a fault that are above all steps before it."""
    act_ns = last_act_ns(run)
    steps = [(line.t_ns, line.step) for line in run.lines if line.step is not None]
    highest = max((step for t_ns, step in steps if t_ns <= act_ns), default=-1)
    return {step for t_ns, step in steps if t_ns > act_ns and step > highest}


def last_act_ns(run: CommandRun) -> int:
    """Return the time of the last act or end of a fault; that of the start if there is none."""
    acts_ns = [record.t_ns for record in run.records if record.event in _ACTS]
    return max(acts_ns, default=run.started_ns)


def _why_aborted(run: CommandRun) -> str:
    """Return the condition of the user that ended the run, in words."""
    ends = [record for record in run.records if record.event == Event.RUN_ENDED]
    return f"the run was aborted: {ends[-1]['detail']}" if ends else "the run was aborted"
