"""Ranks that hang, do not follow, are slow or go quiet are detected in time, and distinguished from
late ones.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.busy import load
from support.goals import Flag
from support.stopwatch import Stopwatch

from chaoskit.journal import Record
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate.limits.cgroup import unavailable
from chaoskit.suites.recovery.expect import JOBS, STEADY
from chaoskit.vocabulary import Phase, Verdict
from chaoskit.wire.messages import Heartbeat, Plan
from faults import Fault, Hang, Kill, Straggle

LATE, PRINTING = (
    Path(__file__).parents[2] / "jobs" / name for name in ("failing/late.py", "logs/printing.py")
)
AT = 8
HANG_S = 0.5  # RunConfig.hang_floor_ms
FOLLOW_S = 2.0  # chaoskit.coordinator.detectors.join_timeout.FOLLOW_S


def run(chaos: Chaos, *faults: Fault, job: str = STEADY, **plan: Any) -> Outcome:
    settings = {"nodes": 3, "spares": 1, "steps": 24, "deadline_s": 90.0, "twin": False} | plan
    assert not chaos.limits, "the limits of production"
    return chaos.run(job, faults=faults, **settings)


def struck(outcome: Outcome) -> list[Record]:
    return outcome.records("injected")


def losses(outcome: Outcome) -> list[tuple[int, str]]:
    return [(record["rank"], record["cause"]) for record in outcome.records("detected")]


def assert_left_alone(outcome: Outcome) -> None:
    assert outcome.records("detected", "rule_fired") == []
    assert len(outcome.records("plan")) == 1


# -- phase -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["spin", "gil"])
def test_a_rank_that_hangs_is_found_when_its_phase_is_too_old(
    chaos: Chaos, stopwatch: Stopwatch, how: str
) -> None:
    """A hang is detected a beat and a check after the limit: the floor of 500 ms and some steps.

    The next suspect has more time.
    """
    outcome = run(chaos, Hang(rank=1, at_step=AT, how=how))
    (hang,), (detected,) = struck(outcome), outcome.records("detected")
    assert (detected["rank"], detected["cause"]) == (1, "hung")
    detail = re.fullmatch(
        r"(\w+) for (\d+) ms, limit (\d+) ms, while others wait", detected["detail"]
    )
    assert detail is not None
    age_ms, limit_ms = int(detail[2]), int(detail[3])
    assert HANG_S * 1000 <= limit_ms <= age_ms
    assert (outcome.suspects, outcome.hang_limits_ms[detail[1]] >= 2 * limit_ms - 1) == (1, True)
    stopwatch.within(
        HANG_S + 1.0, hang, detected
    )  # a spinning rank takes CPU time from the detectors


def test_a_pause_whose_like_was_seen_before_is_left_alone(chaos: Chaos) -> None:
    """The second pause is longer than any limit that steps of 30 ms suggest."""
    first = Straggle(rank=1, at_step=AT, phase="forward", delay_ms=450, steps=1)
    second = Straggle(rank=2, at_step=AT + 6, phase="forward", delay_ms=800, steps=1)
    outcome = run(chaos, first, second, steps=30)
    assert_left_alone(outcome)
    assert max(point.seconds for point in outcome.steps) > 0.8
    assert outcome.suspects == 0


def test_a_rank_that_hangs_on_a_crowded_machine_is_found(chaos: Chaos) -> None:
    """The rank hangs for longer than its wait for a CPU, which does not count."""
    with load():
        outcome = run(
            chaos, Hang(rank=1, at_step=AT, how="gil"), job="gpt", nodes=4, options={"size": "tiny"}
        )
    assert losses(outcome) == [(1, "hung")]
    (hang,), (detected,) = struck(outcome), outcome.records("detected")
    assert detected.t_ns - hang.t_ns > HANG_S * 1e9


@pytest.mark.parametrize("world", [2, 4])
def test_a_crowded_machine_raises_no_alarm(chaos: Chaos, world: int) -> None:
    """A wait for a CPU is no hang."""
    with load():
        outcome = run(chaos, job="gpt", nodes=world, steps=24, options={"size": "tiny"})
    assert_left_alone(outcome)


@pytest.mark.parametrize("job", ["evaluating", "saving", "compiling", "starting_slowly"])
def test_work_that_takes_longer_than_a_phase_may_is_no_hang(chaos: Chaos, job: str) -> None:
    """Long work is no hang in a declared phase, between two steps, in a compilation, or at the
    start.
    """
    assert_left_alone(run(chaos, job=f"{JOBS}:{job}", spares=0, options={"seconds": 2.4 * HANG_S}))


@pytest.mark.parametrize("job", ["uneven", "growing"])
def test_steps_of_different_length_are_no_hangs(chaos: Chaos, job: str) -> None:
    """The floor is below the length of a step, so only the learned step time protects the longest
    ones.
    """
    outcome = run(chaos, job=f"{JOBS}:{job}", spares=0, hang_floor_ms=15)
    assert max(point.seconds for point in outcome.steps) > 0.06
    assert_left_alone(outcome)


def test_a_rank_that_is_late_within_the_limit_is_left_alone(
    chaos: Chaos, stopwatch: Stopwatch
) -> None:
    """Each phase of two steps begins late by more than half the limit; then the steps are as short
    as before.
    """
    outcome = run(chaos, Straggle(rank=1, at_step=AT, delay_ms=300, steps=2))
    assert_left_alone(outcome)
    assert min(point.seconds for point in outcome.steps[AT : AT + 2]) >= 0.6
    first, *_, last = outcome.records("commit")
    assert (
        stopwatch.is_busy(first, last)
        or max(point.seconds for point in outcome.steps[AT + 3 :]) < 0.3
    )


@pytest.mark.skipif(bool(unavailable("cpu")), reason=unavailable("cpu"))
def test_a_rank_with_a_share_of_a_cpu_is_left_alone(chaos: Chaos) -> None:
    """The kernel runs the process for a part of each tenth of a second."""
    fault = Straggle(rank=1, at_step=AT, how="quota", cpu_fraction=0.15, steps=10)
    assert_left_alone(run(chaos, fault, job="gpt", nodes=2, spares=0, options={"size": "tiny"}))


# -- a plan is not followed ------------------------------------------------------------------------


def waits_in_reduction(message: Any) -> bool:
    """Return True if rank 1 only waits for the others."""
    beats = message.beats if isinstance(message, Heartbeat) else ()
    return any(
        (beat.worker, beat.step, beat.phase) == ("node1.0", AT, Phase.REDUCE) for beat in beats
    )


def grows(message: Any) -> bool:
    """Return True if the world is to be full again, at the next step boundary."""
    return isinstance(message, Plan) and message.generation > 1 and len(message.members) == 3


def test_a_rank_that_does_not_follow_a_plan_is_missed(
    chaos: Chaos, stopwatch: Stopwatch, tmp_path: Path
) -> None:
    """A rank that holds the interpreter lock in an unlimited wait is missed when another rank dies
    and a plan is due.
    """
    waits = Flag(tmp_path / "waits", waits_in_reduction)
    options = {"at_step": AT, "waits": waits.until["file"], "deaf": str(tmp_path / "deaf")}
    plan = {
        "job": f"{LATE}:deaf_in_a_reduction",
        "options": options,
        "watch": waits,
        "check": False,
    }
    outcome = run(chaos, Kill(rank=2, at_step=AT, phase="forward"), **plan)
    problems = [check.name for check in outcome.checks if check.verdict != Verdict.PASSED]
    assert problems == ["no false alarm"], "nothing was injected into the rank that is deaf"
    killed, deaf = outcome.records("detected")
    assert killed["rank"] == 2
    assert killed["cause"] == "exited"
    assert (deaf["rank"], deaf["cause"]) == (1, "hung")
    assert re.fullmatch(
        rf"reduce for \d+ ms, limit {FOLLOW_S * 1000:.0f} ms, while others wait", deaf["detail"]
    )
    (plan_record,) = [
        record for record in outcome.records("plan") if killed.t_ns < record.t_ns < deaf.t_ns
    ]
    assert deaf.t_ns - plan_record.t_ns > 0.9 * FOLLOW_S * 1e9
    stopwatch.within(FOLLOW_S + 0.5, plan_record, deaf)


def test_a_rank_that_follows_a_plan_at_the_end_of_a_long_step_is_not_missed(
    chaos: Chaos, tmp_path: Path
) -> None:
    """A rank may follow a plan of growth late, because the world grows at the end of the step.

    The rank waits in the step for longer than it may take to follow.
    """
    planned = Flag(tmp_path / "planned", grows)
    options = {"full": 3, "planned": planned.until["file"], "seconds": 1.25 * FOLLOW_S}
    plan = {
        "job": f"{LATE}:late_for_a_growth",
        "options": options,
        "watch": planned,
        "spares": 0,
        "steps": 20,
    }
    outcome = run(chaos, Kill(rank=2, at_step=AT), **plan)
    (killed,) = outcome.records("detected")
    assert killed["rank"] == 2
    _, shrunk, grown = outcome.records("plan")
    assert [len(plan["members"]) for plan in (shrunk, grown)] == [2, 3]
    first = next(record for record in outcome.records("commit") if record.t_ns > grown.t_ns)
    assert first.t_ns - grown.t_ns > FOLLOW_S * 1e9


# -- stragglers ------------------------------------------------------------------------------------

PACED = {
    "job": "paced",
    "nodes": 4,
    "options": {"shard_s": 0.02},
    "slow_limit": 3.0,
    "slow_steps": 10,
}


def test_a_straggler_is_told_and_replaced(chaos: Chaos, stopwatch: Stopwatch) -> None:
    """A rank with shards that take five times longer is replaced after the stated number of steps, and
    a little.
    """
    outcome = run(chaos, Straggle(rank=1, at_step=AT, delay_ms=45, steps=1000), steps=40, **PACED)
    report = outcome.records("straggler")[0]
    assert (report["rank"], report["kind"]) == (1, "compute")
    (detected,) = outcome.records("detected")
    assert (detected["rank"], detected["cause"]) == (1, "slow")
    (fault,) = struck(outcome)
    assert fault.t_ns < report.t_ns <= detected.t_ns
    stopwatch.within(3.2, fault, detected)


@pytest.mark.parametrize(
    ("delay_ms", "steps"), [(12, 1000), (45, 8)], ids=["not slow enough", "not for long enough"]
)
def test_an_uneven_rank_is_not_replaced(chaos: Chaos, delay_ms: float, steps: int) -> None:
    """A rank is kept that is twice as slow for all steps, or five times as slow for fewer steps
    than the limit.
    """
    outcome = run(
        chaos, Straggle(rank=1, at_step=AT, delay_ms=delay_ms, steps=steps), steps=30, **PACED
    )
    assert_left_alone(outcome)


# -- log rules -------------------------------------------------------------------------------------

#: Settings that turn all other detectors off.
RULED: dict[str, Any] = {
    "job": str(PRINTING),
    "rules": [
        {
            "name": "quiet",
            "logPattern": r"step \d+ loss (\S+) took (?:\S+) ms",
            "expectedRecurringFrequencyInSeconds": 1.0,
        }
    ],
    "hang_steps": 1e6,
    "hang_floor_ms": 10_000_000,
    "collective_timeout_s": 20_000.0,
}


def test_a_rank_that_goes_quiet_breaks_its_log_rule(chaos: Chaos, stopwatch: Stopwatch) -> None:
    """The rule fires after its second without a line, with all other detectors off."""
    outcome = run(chaos, Hang(rank=1, at_step=AT, how="spin"), **RULED)
    (hang,), (fired,) = struck(outcome), outcome.records("rule_fired")
    assert (fired["rule"], fired["verdict"], fired["rank"]) == ("quiet", "hanging", 1)
    assert losses(outcome) == [(1, "log rule")]
    stopwatch.within(1.3, hang, fired)


def test_a_rank_that_is_quiet_for_less_than_its_rule_allows_is_left_alone(chaos: Chaos) -> None:
    """The rank prints about 700 ms apart for three steps, and its rule allows a second."""
    outcome = run(chaos, Straggle(rank=1, at_step=AT, delay_ms=220, steps=3), **RULED)
    assert_left_alone(outcome)
