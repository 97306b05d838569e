"""Time from a rank's death, hang or bad number to the next step of the other ranks."""

from __future__ import annotations

import itertools
from statistics import median

from benchmarks.harness.bars import Bar, quantile, spread
from benchmarks.harness.lab import Lab, records, show_progress, step_seconds
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Event, Verdict
from faults import Fault, Hang, Kill, NaN

#: What a recovery may take beside the steps that it repeats.
GRACE_S = 0.1
#: Steps that a hang may take to be told from a slow step.
HANG_STEPS = 5

PLACES = (
    (2, "forward"),
    (0, "reduce"),
    (1, "backward"),
    (3, "optimizer"),
    (0, "forward"),
    (3, "reduce"),
    (2, "backward"),
    (1, "optimizer"),
    (3, "forward"),
    (0, "backward"),
)
_STEPS, _STRIKE = 40, 24


def kill(lab: Lab) -> list[Bar]:
    """Measure SIGKILL of one rank, with and without a warm spare."""
    places = PLACES[: lab.repeats(len(PLACES))]
    faults: list[Fault] = [Kill(rank=rank, at_step=_STRIKE, phase=phase) for rank, phase in places]
    show_progress("  with a warm spare")
    spared = [lab.run(fault, steps=_STEPS, twin=True) for fault in faults]
    show_progress("  without a spare")
    alone = [lab.run(fault, steps=_STEPS, twin=True, spares=0) for fault in faults[:5]]
    show_progress("  the step of three ranks")
    smaller_s = median(step_seconds(lab.run(steps=_STEPS, nodes=3, shards=4, spares=0)))
    return [
        _at_full_world(
            "kill", "SIGKILL, a warm spare: every rank's next step, at full world", spared
        ),
        unchanged("kill", "SIGKILL, a warm spare: nothing lost, same losses and weights", spared),
        _in_smaller_world(alone, smaller_s),
        unchanged("kill", "SIGKILL, no spare: nothing lost, same losses and weights", alone),
    ]


def hang(lab: Lab) -> list[Bar]:
    """Measure a rank that is stopped, holds the interpreter lock, or spins."""
    places = PLACES[: lab.repeats(len(PLACES))]
    bars = []
    for how, what in (
        ("stop", "SIGSTOP"),
        ("gil", "hang that holds the GIL"),
        ("spin", "endless loop"),
    ):
        show_progress(f"  {what}")
        faults = [Hang(rank=rank, at_step=_STRIKE, phase=phase, how=how) for rank, phase in places]
        outcomes = [lab.run(fault, steps=_STEPS, twin=True) for fault in faults]
        steps = 1 if how == "stop" else HANG_STEPS
        bars.append(
            _at_full_world(
                "hang", f"{what}: every rank's next step, at full world", outcomes, steps
            )
        )
        bars.append(unchanged("hang", f"{what}: nothing lost, same losses and weights", outcomes))
    return bars


def nan(lab: Lab) -> list[Bar]:
    """Measure a value on one rank that is not a number."""
    places = PLACES[: lab.repeats(len(PLACES))]
    wheres = itertools.cycle(("gradient", "weight", "activation"))
    faults = [
        NaN(rank=rank, at_step=_STRIKE, parameter="head.weight", where=where)
        for (rank, _), where in zip(places, wheres, strict=False)
    ]
    outcomes = [lab.run(fault, steps=_STEPS, twin=True) for fault in faults]
    named = [
        _accused(outcome) == {fault.rank} for fault, outcome in zip(faults, outcomes, strict=True)
    ]
    clean = unchanged(
        "nan", "NaN on one rank: no poisoned step committed, same losses and weights", outcomes
    )
    times = [seconds for outcome in outcomes if (seconds := to_next_step(outcome)) is not None]
    name = Bar(
        topic="nan",
        name="NaN on one rank: the rank is named",
        measured=f"{sum(named)} of {len(named)} runs",
        limit="all",
        met=all(named),
        timed=False,
    )
    next_step = Bar(
        topic="nan",
        name="NaN on one rank: every rank's next step",
        measured=f"{spread(times)} with a step of {_step(outcomes) * 1e3:.0f} ms"
        if times
        else "never",
        samples={"seconds": times},
    )
    return [clean, name, next_step]


def to_next_step(outcome: Outcome) -> float | None:
    """Return the seconds from the first fault until the last rank has committed the struck step or
    the one after it.
    """
    journal = records(outcome)
    struck = next((record for record in journal if record.event == Event.INJECTED), None)
    if struck is None:
        return None
    for point in outcome.steps:
        commits = [r.t_ns for r in journal if r.event == Event.COMMIT and r["step"] == point.step]
        if point.step >= struck["step"] and commits and max(commits) > struck.t_ns:
            return (max(commits) - struck.t_ns) / 1e9
    return None


def _accused(outcome: Outcome) -> set[int]:
    return {record["owner"] for record in records(outcome) if record.event == Event.NONFINITE}


def _step(outcomes: list[Outcome]) -> float:
    """Return the median step before the fault."""
    steps = [point.seconds for outcome in outcomes for point in outcome.steps[1:_STRIKE]]
    return median(steps)


def _at_full_world(topic: str, name: str, outcomes: list[Outcome], steps: int = 1) -> Bar:
    """Return the bar on the next step at full world: at most ``steps`` step times and the grace.

    Each recovery is compared with the median step of its own run.
    """
    pairs = [
        (recovery.full_strength_seconds, steps * recovery.step_seconds + GRACE_S)
        for outcome in outcomes
        for recovery in outcome.recoveries[:1]
        if recovery.full_strength_seconds is not None
    ]
    if len(pairs) < len(outcomes):
        missing = f"not in {len(outcomes) - len(pairs)} of {len(outcomes)} runs"
        return Bar(
            topic=topic, name=name, measured=missing, limit="in all runs", met=False, timed=False
        )
    allowed = f"{steps} steps" if steps > 1 else "a step"
    return durations(topic, name, pairs, f"{allowed} + {GRACE_S * 1e3:.0f} ms")


def _in_smaller_world(outcomes: list[Outcome], step_s: float) -> Bar:
    pairs = [
        (outcome.recoveries[0].seconds, step_s + GRACE_S)
        for outcome in outcomes
        if outcome.recoveries and outcome.recoveries[0].world == 3
    ]
    name = "SIGKILL, no spare: every survivor's next step"
    if len(pairs) < len(outcomes):
        missing = f"{len(outcomes) - len(pairs)} of {len(outcomes)} runs did not go on with 3 ranks"
        return Bar(
            topic="kill", name=name, measured=missing, limit="in all runs", met=False, timed=False
        )
    return durations("kill", name, pairs, f"a step of 3 ranks + {GRACE_S * 1e3:.0f} ms")


def durations(topic: str, name: str, pairs: list[tuple[float, float]], limit: str) -> Bar:
    """Return a bar that compares medians, run by run. ``pairs``: the seconds and the limit of each
    run.
    """
    seconds = [measured for measured, _ in pairs]
    allowed_s = median(limit_s for _, limit_s in pairs)
    excess = [measured - limit_s for measured, limit_s in pairs]
    within = sum(excess_s <= 0 for excess_s in excess)
    return Bar(
        topic=topic,
        name=f"{name}",
        measured=f"{spread(seconds)}; {within} of {len(pairs)} runs within",
        limit=f"{limit} = {allowed_s * 1e3:.0f} ms",
        met=median(excess) <= 0,
        samples={
            "seconds": seconds,
            "limits": [limit_s for _, limit_s in pairs],
            "p95": quantile(seconds, 0.95),
        },
    )


def unchanged(topic: str, name: str, outcomes: list[Outcome], most: int = 0) -> Bar:
    """Return the bar on equality: bit-equal to the twin, at most ``most`` steps lost, and all
    checks passed.
    """
    same = [
        outcome.verdict == Verdict.PASSED and outcome.lost_steps <= most and _same(outcome)
        for outcome in outcomes
    ]
    lost = sum(outcome.lost_steps for outcome in outcomes)
    problems = sorted({reason for outcome in outcomes for reason in outcome.reasons})
    return Bar(
        topic=topic,
        name=name,
        measured="; ".join(
            [f"{lost} steps lost, bit-equal in {sum(same)} of {len(same)} runs", *problems]
        ),
        limit=f"{f'at most {most} in each' if most else 0} lost, all bit-equal",
        met=all(same),
        timed=False,
    )


def _same(outcome: Outcome) -> bool:
    try:
        outcome.assert_same_losses_as_twin()
    except AssertionError:
        return False
    return True
