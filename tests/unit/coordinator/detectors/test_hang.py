"""Tests of the hang detector: a rank that hangs is found soon, and no other rank is ever blamed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.examples import examples

from chaoskit.config import RunConfig
from chaoskit.coordinator.detectors.hang import HangDetector, HungRank
from chaoskit.coordinator.detectors.phase_limits import CALM_STEPS, KNOWN_STEPS, YOUNG_STEPS
from chaoskit.coordinator.detectors.watch import RankWatch
from chaoskit.job import JobSpec
from chaoskit.vocabulary import TIMED_PHASES, Phase
from chaoskit.wire.messages import Beat, Endpoint, Member, Plan, Suspicion

CONFIG = RunConfig(job=JobSpec("train.py"))
POLL_S = CONFIG.heartbeat_ms / 1000
LONGEST_MS = (100.0, 100.0, 100.0)
PARTS = {
    Phase.OUTSIDE: 0.1,
    Phase.FORWARD: 0.3,
    Phase.BACKWARD: 0.5,
    Phase.REDUCE: 0.0,
    Phase.OPTIMIZER: 0.1,
}


def beat(worker: str, phase: Phase, age_s: float = 0.0, **changes: float) -> Beat:
    """A beat of a worker in generation 1, step 10, with 10 commits there, and phases of up to 0.1 s."""
    values = {
        "generation": 1,
        "rank": 0,
        "step": 10,
        "starved_ms": 0.0,
        "commits": 10,
        "loss": 0.0,
    } | changes
    values = {
        "trained_in": values["generation"] if values["commits"] else 0,
        "longest_ms": LONGEST_MS,
    } | values
    return Beat(worker=worker, phase=phase, age_ms=age_s * 1000, **values)  # type: ignore[arg-type]


def trained(
    step_s: float = 0.2, workers: str = "ab", steps: int = 10, commits: int = 100
) -> HangDetector:
    """A detector that saw the last ``steps`` of 10 steps, the last one at time 0; ``commits`` were made before it.

    Phases took up to 0.1 s, so their limit is 0.1 s x 1.2 + 0.5 s = 0.62 s after 100 commits.
    """
    detector = HangDetector(CONFIG)
    for step in range(steps + 1):
        numbers = {"step": 10 - steps + step, "commits": commits - steps + step}
        beats = [beat(worker, Phase.FORWARD, **numbers) for worker in workers]
        assert detector.observe(beats, (step - steps) * step_s) == []
    return detector


def blamed(detector: HangDetector, *beats: Beat, now_s: float = 0.01) -> list[str]:
    return [hang.worker for hang in detector.observe(beats, now_s)]


# -- blamed ranks
# -------------------------------------------------------------------------------------------------


def test_the_rank_that_others_wait_for_is_blamed() -> None:
    (hang,) = trained().observe(
        [beat("a", Phase.BACKWARD, 0.7), beat("b", Phase.REDUCE, 0.6)], 0.01
    )
    assert hang == HungRank("a", Phase.BACKWARD, age_s=0.7, limit_s=hang.limit_s)
    assert hang.limit_s == pytest.approx(0.62)


def test_while_no_rank_waits_a_phase_has_the_limit_of_user_code() -> None:
    short, long = CONFIG.outside_limit_s - 1, CONFIG.outside_limit_s + 1
    assert (
        blamed(trained(), beat("a", Phase.BACKWARD, short), beat("b", Phase.FORWARD, short)) == []
    )
    assert (
        blamed(trained(), beat("a", Phase.BACKWARD, short), beat("b", Phase.REDUCE, short, step=9))
        == []
    )
    assert blamed(trained(), beat("a", Phase.BACKWARD, long), beat("b", Phase.FORWARD, long)) == [
        "a"
    ]
    slow = {"longest_ms": (1000 * CONFIG.outside_limit_s,) * 3}
    assert blamed(trained(), *(beat(worker, Phase.FORWARD, long, **slow) for worker in "ab")) == []  # type: ignore[arg-type]


def test_before_the_first_step_the_rehearsal_tells_what_is_long() -> None:
    """No step time is known yet; one shard took 2 s, so that 12 times as much is a hang, and start-up time is not."""
    waiting = beat("b", Phase.REDUCE, 25, step=0, commits=0)
    for age_s, expected in ((23.0, []), (25.0, ["a"])):
        fresh = HangDetector(CONFIG)
        assert (
            blamed(
                fresh,
                beat("a", Phase.FORWARD, age_s, step=0, commits=0, rehearsal_ms=2000),
                waiting,
            )
            == expected
        )


def test_a_short_rehearsal_is_no_promise() -> None:
    fresh, waiting = HangDetector(CONFIG), beat("b", Phase.REDUCE, 9, step=0, commits=0)
    assert (
        blamed(fresh, beat("a", Phase.FORWARD, 9.0, step=0, commits=0, rehearsal_ms=20), waiting)
        == []
    )
    assert blamed(
        fresh, beat("a", Phase.FORWARD, 10.5, step=0, commits=0, rehearsal_ms=20), waiting
    ) == ["a"]


@pytest.mark.parametrize("phase", [Phase.OUTSIDE, Phase.FORWARD, Phase.OPTIMIZER])
def test_a_world_of_one_has_the_limit_of_user_code(phase: Phase) -> None:
    """A phase has another limit if the next world waits for its rank, or if the phase took longer
    before.
    """
    assert CONFIG.collective_timeout_s > CONFIG.outside_limit_s
    assert blamed(trained(workers="a"), beat("a", phase, CONFIG.collective_timeout_s - 1)) == []
    assert blamed(trained(workers="a"), beat("a", phase, CONFIG.collective_timeout_s + 1)) == ["a"]
    if phase in TIMED_PHASES:
        beats = [beat("a", phase, 0.7)]
        hangs = trained(workers="a").observe(beats, 0.01, planned=2)
        assert [hang.worker for hang in hangs] == ["a"], "its next world waits"
        slow = {"longest_ms": (1000 * CONFIG.collective_timeout_s,) * 3}
        beats = [beat("a", phase, CONFIG.collective_timeout_s + 1, **slow)]  # type: ignore[arg-type]
        assert blamed(trained(workers="a"), *beats) == []


WAITS = [Phase.REDUCE, Phase.REGROUP, Phase.LONG, Phase.UNTIMED, Phase.START, Phase.DONE]


@pytest.mark.parametrize("phase", WAITS)
def test_a_rank_that_waits_or_said_so_is_never_blamed(phase: Phase) -> None:
    assert blamed(trained(), beat("a", phase, 1e6), beat("b", Phase.REDUCE, 1e6)) == []


def test_a_copy_of_the_state_has_as_long_as_a_start() -> None:
    """A rank that is stuck in it, or has a stuck source, would keep the others waiting for ever
    otherwise.
    """
    waiting = beat("b", Phase.REDUCE, 1e6)
    assert blamed(trained(), beat("a", Phase.RESTORE, CONFIG.startup_s - 1, step=0), waiting) == []
    assert blamed(trained(), beat("a", Phase.RESTORE, CONFIG.startup_s + 1, step=0), waiting) == [
        "a"
    ]


def test_a_copy_of_the_state_is_not_waited_for_once_a_newer_plan_broke_it_off() -> None:
    """The only rank with the state hangs in a restore, its source was lost, and fresh ranks wait for it at step 0."""
    fresh = [beat(worker, Phase.REGROUP, 1e6, generation=0, step=0, commits=0) for worker in "bc"]
    fresh[0] = beat("b", Phase.REGROUP, 1e6, step=0, commits=0)
    detector, startup_s = trained(), CONFIG.startup_s

    def ended(now_s: float, planned: int) -> list[str]:
        stuck = beat("a", Phase.RESTORE, 1e6 + now_s)
        return [hang.worker for hang in detector.observe([stuck, *fresh], now_s, planned=planned)]

    assert ended(1.0, planned=1) == []
    assert ended(2.0, planned=2) == [], "the plan may not have come to that rank yet"
    assert ended(startup_s + 1, planned=2) == []
    assert ended(startup_s + 3, planned=2) == ["a"]


def test_a_restore_has_the_time_of_a_start_from_the_plan_that_broke_it_off() -> None:
    """The copy was a large one, and another rank was lost meanwhile."""
    detector, waiting = trained(), beat("b", Phase.REGROUP, 1.0, generation=2)
    restoring = beat("a", Phase.RESTORE, CONFIG.startup_s + 20)
    assert detector.observe([restoring, waiting], 1.0, planned=2) == []


def test_a_rank_that_is_stuck_in_the_last_reduction_stalls_those_that_are_done() -> None:
    detector = trained()
    detector.observe([beat("a", Phase.REDUCE, 60), beat("b", Phase.DONE, 60, step=11)], 0.01)
    assert detector.stalled(0.02)
    detector.observe([beat("a", Phase.DONE, 60, step=11), beat("b", Phase.DONE, 60, step=11)], 0.03)
    assert not detector.stalled(0.04)


def test_a_rank_that_is_stuck_on_its_way_to_the_others_stalls_them() -> None:
    detector = trained()
    detector.observe([beat("a", Phase.REGROUP, 60), beat("b", Phase.REGROUP, 60)], 0.01)
    assert not detector.stalled(0.02), "all wait for a plan, perhaps for a replacement"
    detector.observe([beat("a", Phase.REGROUP, 60), beat("b", Phase.REDUCE, 60)], 0.03)
    assert detector.stalled(0.04)


def test_a_hang_in_the_optimizer_is_waited_for_in_the_next_step() -> None:
    assert blamed(
        trained(), beat("a", Phase.OPTIMIZER, 0.7), beat("b", Phase.REDUCE, 0.6, step=11)
    ) == ["a"]


def test_a_hang_in_the_last_optimizer_is_waited_for_by_ranks_that_are_done() -> None:
    assert blamed(
        trained(), beat("a", Phase.OPTIMIZER, 0.7), beat("b", Phase.DONE, 0.6, step=11)
    ) == ["a"]


def test_a_rank_that_never_comes_to_the_regroup_is_blamed_by_survivors_but_not_by_a_joiner() -> (
    None
):
    late = beat("a", Phase.BACKWARD, 0.7)
    assert blamed(trained(), late, beat("c", Phase.REGROUP, 0.6, step=0, commits=0)) == []
    assert blamed(trained(), late, beat("b", Phase.REGROUP, 0.6)) == ["a"]
    assert blamed(trained(), late, beat("b", Phase.REDUCE, 0.6, generation=2)) == ["a"]


def test_the_users_own_code_has_a_limit_of_its_own() -> None:
    waiting = beat("b", Phase.REDUCE, 200)
    assert blamed(trained(), beat("a", Phase.OUTSIDE, CONFIG.outside_limit_s - 1), waiting) == []
    assert blamed(trained(), beat("a", Phase.OUTSIDE, CONFIG.outside_limit_s + 1), waiting) == ["a"]


def test_ranks_that_all_stand_still_between_two_steps_are_found() -> None:
    """No rank waits for another one, and the limit of user code holds."""
    hangs = trained().observe(
        [beat(worker, Phase.OUTSIDE, CONFIG.outside_limit_s + 1) for worker in "ab"], 0.01
    )
    assert [(hang.worker, hang.waited) for hang in hangs] == [("a", False)]
    remedy = "declare it with trainer.long_phase, or raise outside_limit_s"
    assert hangs[0].detail.endswith(f"limit 120000 ms, and no rank waits for it: {remedy}")
    young = [beat(worker, Phase.OUTSIDE, CONFIG.outside_limit_s - 1) for worker in "ab"]
    assert blamed(trained(), *young) == []


def test_the_detail_of_a_hang_within_a_step_names_no_long_phase() -> None:
    """A phase of the step cannot be declared as a long one."""
    (hang,) = trained().observe(
        [beat(worker, Phase.FORWARD, CONFIG.outside_limit_s + 1) for worker in "ab"], 0.01
    )
    assert hang.detail.endswith("and no rank waits for it")


@pytest.mark.parametrize("age_s", [1.0, 1e6])
@pytest.mark.parametrize("busy", [Phase.LONG, Phase.UNTIMED])
@pytest.mark.parametrize("phase", [Phase.OUTSIDE, *TIMED_PHASES])
def test_no_rank_is_blamed_while_another_one_does_what_may_take_any_time(
    phase: Phase, busy: Phase, age_s: float
) -> None:
    """A rank whose host is blocked by its device shows a phase of the step while it waits for the other rank."""
    beats = [beat("a", busy, age_s), beat("b", phase, 1e6)]
    assert blamed(trained(), *beats) == []
    assert blamed(trained(), *reversed(beats)) == []


@pytest.mark.parametrize("phase", [Phase.OUTSIDE, *TIMED_PHASES])
def test_no_rank_is_blamed_while_another_one_makes_progress(phase: Phase) -> None:
    """The other rank reaches its reduction, and waits then, or it stands still, too."""
    still = beat("a", Phase.OUTSIDE, 1e6)
    assert blamed(trained(), still, beat("b", phase, 1.0)) == []
    slow = {"longest_ms": (1000 * CONFIG.outside_limit_s,) * 3}
    if phase in TIMED_PHASES:
        assert blamed(trained(), still, beat("b", phase, CONFIG.outside_limit_s + 1, **slow)) == []  # type: ignore[arg-type]
    assert blamed(trained(), still, beat("b", Phase.REDUCE, 1.0)) == ["a"]
    assert blamed(trained(), still, beat("b", phase, 1e6)) == ["a"]


@pytest.mark.parametrize("phase", [Phase.START, Phase.RESTORE])
def test_no_rank_is_blamed_while_another_one_starts_or_restores(phase: Phase) -> None:
    still = [beat(worker, Phase.OUTSIDE, 1e6) for worker in "ab"]
    joiner = {"step": 0, "commits": 0}
    assert blamed(trained(), *still, beat("c", phase, CONFIG.startup_s - 1, **joiner)) == []
    assert blamed(trained(), *still, beat("c", phase, CONFIG.startup_s + 1, **joiner)) == ["a"]


def test_a_rank_of_an_old_generation_is_blamed_although_others_have_entered_the_next_one() -> None:
    """The user's code of a sharded job builds the groups, and waits there for all members."""
    still = beat("a", Phase.OUTSIDE, CONFIG.outside_limit_s + 1)
    entered = {"generation": 2, "trained_in": 1, "step": 0, "commits": 0}
    assert blamed(trained(), still, beat("b", Phase.OUTSIDE, 1.0, **entered)) == ["a"]
    assert blamed(trained(), still, beat("b", Phase.LONG, 1.0, **entered)) == []


def test_no_rank_is_blamed_while_a_member_was_not_heard_yet() -> None:
    """A coordinator that has just taken over hears one node after the other."""
    watch, plan = RankWatch(CONFIG), plan_of(1)
    still = [beat(worker, Phase.OUTSIDE, 1e6) for worker in "ab"]
    watch.hear(still[:1], 1.0)
    assert watch.look(plan, ["a", "b"], ["a", "b"], 1.0, worked=1) == ([], False)
    watch.hear(still, 2.0)
    hangs, _ = watch.look(plan, ["a", "b"], ["a", "b"], 2.0, worked=1)
    assert [hang.worker for hang in hangs] == ["a"]


def test_ranks_that_build_their_model_again_have_the_time_of_a_start() -> None:
    """All ranks of a sharded job build it in each generation, before their first step in it."""
    detector = HangDetector(msgspec.structs.replace(CONFIG, startup_s=300.0))
    entered = {"generation": 2, "trained_in": 1}
    assert (
        detector.observe([beat(worker, Phase.OUTSIDE, 299.0, **entered) for worker in "ab"], 0.0)
        == []
    )
    (hang,) = detector.observe(
        [beat(worker, Phase.OUTSIDE, 301.0, **entered) for worker in "ab"], 0.1
    )
    assert (hang.worker, hang.limit_s) == ("a", 300.0)


def test_of_ranks_that_all_stand_still_one_is_ended_at_a_time() -> None:
    """The others have the state, which the replacement of the first one takes over; then it waits for them."""
    detector, age_s = trained(workers="abc"), CONFIG.outside_limit_s + 1
    left = [beat(worker, Phase.OUTSIDE, age_s) for worker in "bc"]
    assert blamed(detector, beat("a", Phase.OUTSIDE, age_s), *left) == ["a"]
    assert blamed(detector, beat("a", Phase.OUTSIDE, age_s), *left) == ["a"], (
        "it was not ended, and still hangs"
    )
    assert detector.observe(left, 1.0, replacement_starts=True) == []
    joiner = {"step": 0, "commits": 0}
    waiting = beat("d", Phase.REGROUP, 1.0, generation=0, **joiner)
    assert detector.observe([waiting, *left], 2.0, planned=2, gathers=True) == []
    restoring = beat("d", Phase.RESTORE, 1.0, generation=2, **joiner)
    assert detector.observe([restoring, *left], 3.0, planned=2) == []
    hangs = detector.observe(
        [beat("d", Phase.REDUCE, 0.1, generation=2, commits=0), *left], 4.0, planned=2
    )
    assert [(hang.worker, hang.waited) for hang in hangs] == [("b", True), ("c", True)]


def test_the_next_one_is_ended_where_no_replacement_comes() -> None:
    detector, age_s = trained(workers="abc"), CONFIG.outside_limit_s + 1
    assert blamed(detector, *(beat(worker, Phase.OUTSIDE, age_s) for worker in "abc")) == ["a"]
    left = [beat(worker, Phase.OUTSIDE, age_s) for worker in "bc"]
    assert detector.observe(left, CONFIG.startup_s, replacement_starts=True) == []
    (hang,) = detector.observe(left, CONFIG.startup_s + 1, replacement_starts=True)
    assert hang.worker == "b"
    assert detector.observe(left[1:], CONFIG.startup_s + 2) == [], "the only rank has longer"
    (hang,) = detector.observe(
        [beat("c", Phase.OUTSIDE, CONFIG.collective_timeout_s + 1)], CONFIG.startup_s + 60
    )
    assert hang.worker == "c", "no worker is being started"


def test_the_last_rank_is_kept_while_a_joiner_takes_its_state() -> None:
    """Its process answers for it.

    A joiner that has not begun to after a while gets nothing from it.
    """
    age_s = CONFIG.outside_limit_s + 1
    left = beat("b", Phase.OUTSIDE, age_s)
    joiner = beat("c", Phase.REGROUP, 9.0, generation=0, step=0, commits=0)
    detector = trained()
    assert blamed(detector, beat("a", Phase.OUTSIDE, age_s), left) == ["a"]
    assert detector.observe([joiner, left], 0.1, planned=2, gathers=True) == []
    assert [hang.worker for hang in detector.observe([joiner, left], 3.0, planned=2)] == ["b"]


def test_joiners_that_are_stuck_on_their_way_keep_no_rank_alive() -> None:
    """Ranks that hang in the optimizer tell no newer generation of their step, so its joiner never gets there."""
    age_s = CONFIG.outside_limit_s + 1
    left = [beat(worker, Phase.OPTIMIZER, age_s) for worker in "bc"]
    joiner = beat("d", Phase.REGROUP, 9.0, generation=0, step=0, commits=0)
    detector = trained(workers="abc")
    assert blamed(detector, beat("a", Phase.OPTIMIZER, age_s), *left) == ["a"]
    assert detector.observe([joiner, *left], 0.1, planned=2, gathers=True) == []
    assert [hang.worker for hang in detector.observe([joiner, *left], 3.0, planned=2)] == ["b"]


def test_a_declared_phase_has_a_limit_only_where_one_is_set() -> None:
    """A long phase needs no waiting rank to be found, either."""
    detector = HangDetector(msgspec.structs.replace(CONFIG, long_limit_s=600.0))
    beats = [beat(worker, Phase.LONG, 599.0) for worker in "ab"]
    assert detector.observe(beats, 0.0) == []
    (hang,) = detector.observe([beat(worker, Phase.LONG, 601.0) for worker in "ab"], 0.1)
    assert (hang.worker, hang.limit_s) == ("a", 600.0)
    waiting = beat("b", Phase.REDUCE, 601.0)
    assert [
        hang.worker for hang in detector.observe([beat("a", Phase.LONG, 601.0), waiting], 0.2)
    ] == ["a"]
    still = beat("b", Phase.OUTSIDE, 601.0)
    assert detector.observe([beat("a", Phase.LONG, 599.0), still], 0.3) == [], (
        "it may still be waited for"
    )
    assert [
        hang.worker for hang in detector.observe([beat("a", Phase.LONG, 601.0), still], 0.4)
    ] == ["a"]


def test_work_and_waits_of_the_runtime_have_no_limit_of_declared_phases() -> None:
    """A rank stands at the hook of a fault, or copies its last state."""
    detector, untimed = (
        HangDetector(msgspec.structs.replace(CONFIG, long_limit_s=1.0)),
        beat("a", Phase.UNTIMED, 1e6),
    )
    assert detector.observe([untimed], 0.0) == []
    assert detector.observe([untimed, beat("b", Phase.LONG, 1e6)], 0.1) == []
    assert detector.observe([untimed, beat("b", Phase.REDUCE, 1e6)], 0.2) == []


@pytest.mark.promise("not counting time without a CPU")
def test_time_without_a_cpu_does_not_count() -> None:
    waiting = beat("b", Phase.REDUCE, 0.6)
    assert blamed(trained(), beat("a", Phase.BACKWARD, 0.7, starved_ms=150), waiting) == []
    assert blamed(trained(), beat("a", Phase.BACKWARD, 0.7, starved_ms=50), waiting) == ["a"]


# -- the limit -------------------------------------------------------------------------------------


def limit_s(detector: HangDetector, phase: Phase = Phase.FORWARD, **changes: float) -> float:
    """Return the limit of a phase of rank a, while rank b waits."""
    waiting = beat("b", Phase.REDUCE, 1e9, **changes)
    (hang,) = detector.observe([beat("a", phase, 1e9, **changes), waiting], 0.01)
    return hang.limit_s


@pytest.mark.promise("as a recovery took in this run, `hang_floor_ms` at least")
def test_a_phase_may_last_longer_than_the_longest_one_by_what_a_recovery_takes() -> None:
    detector = trained(commits=1_000_000)
    assert limit_s(detector) == pytest.approx(0.1 + 0.5, rel=1e-3)
    detector.limits.note_recovery(1.5)
    assert limit_s(detector) == pytest.approx(0.1 + 1.5, rel=1e-3)
    detector.limits.note_recovery(0.2)
    assert limit_s(detector) == pytest.approx(0.1 + 0.5, rel=1e-3)


def test_each_kind_of_phase_has_a_limit_of_its_own() -> None:
    detector = trained(commits=1_000_000)
    longest = {"longest_ms": (3000.0, 200.0, 50.0)}
    limits_s = [limit_s(detector, phase, **longest) for phase in TIMED_PHASES]  # type: ignore[arg-type]
    assert limits_s == pytest.approx([3.5, 0.7, 0.6], rel=1e-3), (
        "the optimizer's longest of before was 0.1 s"
    )


@pytest.mark.promise("A pause whose like was seen before ends no rank")
def test_what_one_rank_has_done_another_may_do() -> None:
    """The longest phase counts even after its rank is gone."""
    detector = trained(commits=1_000_000)
    detector.observe(
        [beat("c", Phase.FORWARD, longest_ms=(4000.0, 0.0, 0.0)), beat("b", Phase.REDUCE)], 0.01
    )  # type: ignore[arg-type]
    waiting = beat("b", Phase.REDUCE, 9)
    assert blamed(detector, beat("a", Phase.FORWARD, 4.4), waiting) == []
    assert blamed(detector, beat("a", Phase.FORWARD, 4.6), waiting) == ["a"]


def test_few_steps_show_few_durations() -> None:
    assert limit_s(trained(commits=100)) == pytest.approx(0.1 * 1.2 + 0.5)
    assert limit_s(trained(commits=20)) == pytest.approx(0.1 * 2 + 0.5)
    assert limit_s(trained(steps=0, commits=4), commits=4) == pytest.approx(0.1 * 6 + 0.5)


def test_a_phase_is_never_suspicious_before_hang_steps_steps() -> None:
    assert limit_s(trained(step_s=2.0)) == pytest.approx(CONFIG.hang_steps * 2.0)


@pytest.mark.promise(
    "A suspect may have been healthy: the next phase of that kind has twice the time"
)
def test_a_suspect_counts_as_seen_and_doubles_the_limit() -> None:
    detector = trained(commits=1_000_000)
    before_s = limit_s(detector)
    detector.limits.suspect(Suspicion(Phase.FORWARD, age_s=0.65, limit_s=before_s))
    assert detector.limits.suspects == 1
    assert detector.limits.longest_s(Phase.FORWARD) == 0.65
    assert limit_s(detector) == pytest.approx(2 * before_s)
    assert limit_s(detector, Phase.BACKWARD) == pytest.approx(before_s)


def test_the_age_of_a_suspect_is_not_multiplied_while_few_steps_are_known() -> None:
    """A factor of five for it in the first steps would delay the second hang by more than a minute."""
    detector = trained(steps=0, commits=4)
    detector.limits.suspect(Suspicion(Phase.FORWARD, age_s=15.2, limit_s=15.0))
    assert limit_s(detector, commits=4) == pytest.approx(2 * 15.0)


@pytest.mark.promise("1,000 steps without a suspect halve it again")
def test_calm_steps_halve_what_suspects_have_raised() -> None:
    detector, suspicion = (
        trained(commits=1_000_000),
        Suspicion(Phase.FORWARD, age_s=1.0, limit_s=8.0),
    )
    detector.limits.suspect(suspicion)
    steps = [CALM_STEPS + 9, CALM_STEPS + 10, 2 * CALM_STEPS + 10, 9 * CALM_STEPS + 10]
    limits_s = [limit_s(detector, step=step) for step in steps]
    assert limits_s == pytest.approx([16.0, 8.0, 4.0, 1.5], rel=1e-3), "the longest phase stays"
    detector.limits.suspect(suspicion)
    assert limit_s(detector, step=10 * CALM_STEPS + 9) == pytest.approx(16.0), (
        "the steps before it do not count"
    )


def test_a_suspect_in_code_of_its_own_moves_no_limit_of_a_phase() -> None:
    detector = trained()
    before_s = limit_s(detector)
    detector.limits.suspect(Suspicion(Phase.OUTSIDE, age_s=130.0, limit_s=120.0))
    assert limit_s(detector) == before_s


@pytest.mark.parametrize("commits_s", [50.0, 0.01], ids=["long", "short"])
def test_one_odd_step_does_not_move_the_step_time(commits_s: float) -> None:
    detector = trained()
    detector.observe(
        [beat(worker, Phase.FORWARD, step=11, commits=101) for worker in "ab"], commits_s
    )
    assert detector.step_s == pytest.approx(0.2)


def test_the_time_for_which_a_node_is_cut_off_is_no_step_time() -> None:
    config = msgspec.structs.replace(CONFIG, hang_floor_ms=1)
    watch, steps = RankWatch(config), 3
    plan = Plan(1, (Member(0, "a", "n", Endpoint("host", "", 0, 0, -1), (0,)),), abort=True)
    limits = []
    for now_s, commits in [(0.2 * step, step) for step in range(steps)] + [(10.0, 20), (10.2, 21)]:
        watch.hear([beat("a", Phase.FORWARD, step=commits, commits=commits)], now_s)
        assert watch.look(plan, ["a"], ["a"], now_s) == ([], False)
        limits.append(watch.step_s)
    assert max(limits) == pytest.approx(0.2)


def test_steps_shorter_than_a_beat_are_counted() -> None:
    detector = HangDetector(CONFIG)
    for number in range(6):
        detector.observe(
            [beat("a", Phase.FORWARD, step=5 * number, commits=5 * number)], 0.05 * number
        )
    assert detector.step_s == pytest.approx(0.01)


def test_before_a_process_has_taken_two_steps_only_the_start_up_is_limited() -> None:
    for commits in range(KNOWN_STEPS):
        waiting = beat("b", Phase.REDUCE, 1e6, commits=commits)
        for age_s, expected in ((0.99 * CONFIG.startup_s, []), (1.01 * CONFIG.startup_s, ["a"])):
            assert (
                blamed(
                    HangDetector(CONFIG), beat("a", Phase.FORWARD, age_s, commits=commits), waiting
                )
                == expected
            )
    waiting = beat("b", Phase.REDUCE, 9, commits=KNOWN_STEPS)
    assert blamed(HangDetector(CONFIG), beat("a", Phase.FORWARD, 9, commits=0), waiting) == ["a"]


def test_steps_shorter_than_a_beat_are_known_at_once() -> None:
    """A beat has all counters of a rank: a new coordinator knows as much as the one before."""
    waiting = beat("b", Phase.REDUCE, 3, commits=400)
    assert blamed(HangDetector(CONFIG), beat("a", Phase.FORWARD, 0.7, commits=400), waiting) == [
        "a"
    ]


def test_a_regroup_is_no_step() -> None:
    detector = trained()
    for step in (10, 11, 12):
        late_s = 30 + step * 0.2
        detector.observe(
            [beat(w, Phase.FORWARD, step=step, commits=step, generation=2) for w in "ab"], late_s
        )
    assert detector.step_s == pytest.approx(0.2)


def test_a_slower_generation_gets_its_own_limit_and_a_faster_one_too() -> None:
    detector = trained()
    for generation, step_s in ((2, 0.8), (3, 0.2)):
        for step in range(7):
            now_s = generation * 100 + step * step_s
            beats = [
                beat(w, Phase.FORWARD, step=step, commits=step, generation=generation) for w in "ab"
            ]
            detector.observe(beats, now_s)
        assert detector.step_s == pytest.approx(step_s)


def test_the_first_step_of_a_fresh_spare_may_be_slow() -> None:
    waiting = beat("b", Phase.REDUCE, 9, generation=2)
    fresh = {"generation": 2, "commits": 0}
    assert blamed(trained(), beat("c", Phase.FORWARD, 2.1, **fresh), waiting) == []
    assert blamed(trained(), beat("c", Phase.FORWARD, 2.2, **fresh), waiting) == ["c"]
    assert (
        blamed(trained(), beat("a", Phase.FORWARD, 2.1, generation=2, trained_in=1), waiting) == []
    )
    assert blamed(trained(), beat("c", Phase.FORWARD, 0.7, generation=2, commits=1), waiting) == [
        "c"
    ]


def test_the_only_rank_is_blamed_while_a_fresh_one_waits_to_join() -> None:
    fresh = beat("c", Phase.REGROUP, 5.0, generation=0, step=0, commits=0)
    assert blamed(trained(workers="a"), beat("a", Phase.FORWARD, 0.7), fresh) == ["a"]


def test_a_rank_left_in_an_old_generation_is_blamed() -> None:
    assert blamed(
        trained(), beat("a", Phase.BACKWARD, 0.7), beat("b", Phase.REDUCE, 0.1, generation=2)
    ) == ["a"]


# -- stalls ----------------------------------------------------------------------------------------


def test_a_rank_one_step_ahead_of_those_that_regroup_is_blamed() -> None:
    """A rank one step ahead hangs in the next step, and the new world of the others waits for it."""
    ahead = beat("a", Phase.FORWARD, 0.7, step=11, commits=11)
    assert blamed(trained(), ahead, beat("b", Phase.REGROUP, 0.7)) == ["a"]
    assert blamed(trained(), ahead, beat("b", Phase.REDUCE, 0.7)) == [], (
        "the step of b does not need a any more"
    )


def test_a_job_in_which_all_wait_is_stalled() -> None:
    detector = trained()
    assert not detector.stalled(9e9)
    assert blamed(detector, beat("a", Phase.REDUCE, 2.9), beat("b", Phase.REDUCE, 9)) == []
    assert not detector.stalled(0.05)
    assert detector.stalled(0.2)
    detector.observe([beat("a", Phase.REDUCE, 90), beat("b", Phase.LONG, 90)], 1.0)
    assert not detector.stalled(1.0)
    assert not HangDetector(CONFIG).stalled(9e9)


def test_a_rank_that_missed_the_last_step_waits_for_no_step_boundary() -> None:
    """The others have committed the last step, and take part in no new generation that begins at the end of a step."""
    detector, done = trained(), beat("a", Phase.DONE, 9, step=12)
    detector.observe([done, beat("b", Phase.REGROUP, 2.9, step=11)], 1.0)
    assert not detector.stalled(1.05)
    assert detector.stalled(1.2)
    detector.observe([done, beat("b", Phase.DONE, 90, step=12)], 1.3)
    assert not detector.stalled(1.3)


@pytest.mark.parametrize("phase", [Phase.REDUCE, Phase.REGROUP])
@pytest.mark.parametrize("joiner_waits", [False, True])
def test_the_only_rank_of_a_world_has_no_other_to_wait_for(
    phase: Phase, joiner_waits: bool
) -> None:
    detector, limit_s = HangDetector(CONFIG), max(CONFIG.startup_s, CONFIG.collective_timeout_s)
    world_of_one = True

    def hangs(now_s: float, age_s: float, generation: int = 1) -> list[str]:
        rank = beat("a", phase, age_s, generation=generation)
        hangs = detector.observe(
            [rank], now_s, planned=generation, joiner_waits=joiner_waits, world_of_one=world_of_one
        )
        return [hang.worker for hang in hangs]

    assert hangs(0.0, 2 * limit_s) == [], "its phase began before this coordinator"
    assert hangs(limit_s - 1, 3 * limit_s) == []
    assert hangs(limit_s + 1, 3 * limit_s) == ["a"]
    assert hangs(limit_s + 2, 3 * limit_s, generation=2) == [], "it was given another plan"
    world_of_one = False
    assert hangs(0.0, limit_s, generation=3) == []
    assert hangs(2 * limit_s, 3 * limit_s, generation=3) == [], "the last of two waits for a spare"


def test_a_stall_that_a_new_generation_did_not_cure_is_given_twice_the_time() -> None:
    detector, waiting = trained(), [beat(worker, Phase.REDUCE, 4.0) for worker in "ab"]
    assert blamed(detector, *waiting) == []
    assert detector.stalled(0.01)
    assert not detector.stalled(0.01), "what is merely slow must come to its end"
    assert detector.stalled(2.5)
    detector.observe([beat(worker, Phase.FORWARD, step=11, commits=101) for worker in "ab"], 3.0)
    detector.observe(waiting, 3.0)
    assert detector.stalled(3.0)


def test_ranks_that_waited_for_their_group_do_not_stall_as_soon_as_it_is_built() -> None:
    """Their coordinator was lost before they could meet, so the phase of their first reduction is old already."""
    watch, plan = RankWatch(CONFIG), plan_of(2)

    def stalls(now_s: float, waited_s: float, worked: int) -> bool:
        watch.hear([beat(worker, Phase.REDUCE, waited_s, generation=2) for worker in "ab"], now_s)
        hangs, is_stalled = watch.look(plan, ["a", "b"], ["a", "b"], now_s, worked=worked)
        assert hangs == []
        return is_stalled

    assert not stalls(3.8, 0.5, worked=1)
    assert not stalls(3.9, 60.0, worked=2)
    assert not stalls(4.0, 60.1, worked=2)
    assert stalls(9.0, 65.1, worked=2)


# -- what a recovery takes -------------------------------------------------------------------------


def plan_of(generation: int, *, abort: bool = True) -> Plan:
    members = tuple(
        Member(rank, name, "n", Endpoint("host", "", 0, 0, -1), (rank,))
        for rank, name in enumerate("ab")
    )
    return Plan(generation, members, abort=abort)


def recover(watch: RankWatch, plan: Plan, begun_s: float, took_s: float) -> None:
    """Both ranks are in the new generation, and have committed a step in it ``took_s`` after its plan."""
    for now_s, trained_in in ((begun_s, plan.generation - 1), (begun_s + took_s, plan.generation)):
        numbers = {"generation": plan.generation, "trained_in": trained_in, "commits": 1_000_000}
        watch.hear([beat(worker, Phase.FORWARD, **numbers) for worker in "ab"], now_s)
        watch.look(plan, ["a", "b"], ["a", "b"], now_s, worked=plan.generation)


def test_a_recovery_is_measured_from_its_plan_to_the_first_step_after_it() -> None:
    watch = RankWatch(CONFIG)
    recover(watch, plan_of(1), 0.0, 0.8)
    assert watch.limits.allowance_s == pytest.approx(0.8)
    recover(watch, plan_of(2), 10.0, 3.0)
    assert watch.limits.allowance_s == pytest.approx(3.0)
    recover(watch, plan_of(3, abort=False), 20.0, 9.0)
    assert watch.limits.allowance_s == pytest.approx(3.0), (
        "a plan that waits for a step boundary interrupts none"
    )
    recover(watch, plan_of(4), 30.0, 0.1)
    assert watch.limits.allowance_s == pytest.approx(0.5), "hang_floor_ms"


# -- simulated jobs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    start_s: float
    phase: Phase
    step: int


def timelines(
    work_s: Sequence[Sequence[float]], hang: tuple[int, int, Phase] | None = None
) -> list[list[Span]]:
    """The schedule of a job: ``work_s[step][rank]`` is a rank's own work; all meet in each
    reduction.

    ``hang`` is the rank, the step and the phase that never ends.
    """
    world = len(work_s[0])
    now_s, spans = [0.0] * world, [[Span(0.0, Phase.START, 0)] for _ in range(world)]
    for step, works_s in enumerate(work_s):
        for phase, part in PARTS.items():
            if phase == Phase.OPTIMIZER:
                now_s = [max(now_s)] * world
            for rank in range(world):
                if math.isfinite(now_s[rank]):
                    spans[rank].append(Span(now_s[rank], phase, step))
                now_s[rank] += math.inf if (rank, step, phase) == hang else part * works_s[rank]
    return spans


def longest_of(spans: list[Span], now_s: float) -> tuple[float, ...]:
    """Return the longest phases after the first step, as the heartbeat page shows them."""
    longest_ms = dict.fromkeys(TIMED_PHASES, 0.0)
    for span, after in pairwise(spans):
        if span.step > 0 and span.phase in longest_ms and after.start_s <= now_s:
            longest_ms[span.phase] = max(
                longest_ms[span.phase], 1000 * (after.start_s - span.start_s)
            )
    return tuple(longest_ms.values())


def observations(
    spans: list[list[Span]], offsets_s: Sequence[float], end_s: float
) -> Iterator[tuple[float, list[Beat]]]:
    """The latest beats whenever one arrives; every rank's agent reads its board at moments of its own."""
    beats: dict[int, Beat] = {}
    polls = [
        (number * POLL_S + offset, rank)
        for number in range(int(end_s / POLL_S))
        for rank, offset in enumerate(offsets_s)
    ]
    for now_s, rank in sorted(polls):
        span = spans[rank][bisect_right([span.start_s for span in spans[rank]], now_s) - 1]
        age_s = now_s - span.start_s
        longest_ms = longest_of(spans[rank], now_s)
        numbers = {"rank": rank, "step": span.step, "commits": span.step, "longest_ms": longest_ms}
        beats[rank] = beat(str(rank), span.phase, age_s, **numbers)  # type: ignore[arg-type]
        if len(beats) == len(spans):
            yield now_s, list(beats.values())


@st.composite
def jobs(
    draw: st.DrawFn, least_step_s: float, least_world: int = 1
) -> tuple[list[list[float]], list[float]]:
    """The work of every step and rank, each with a jitter of up to two, and the moments of the agents."""
    world, step_s = draw(st.integers(least_world, 4)), draw(st.floats(least_step_s, 0.4))
    jitter = draw(st.sampled_from([st.just(1.0), st.floats(1.0, 2.0), st.sampled_from([1.0, 2.0])]))
    steps = draw(
        st.lists(st.lists(jitter, min_size=world, max_size=world), min_size=4, max_size=14)
    )
    offsets_s = draw(st.lists(st.floats(0, POLL_S * 0.99), min_size=world, max_size=world))
    return [[step_s * factor for factor in factors] for factors in steps], offsets_s


@settings(max_examples=examples(300), deadline=None, database=None)
@given(jobs(least_step_s=0.01))
def test_jitter_is_never_blamed(job: tuple[list[list[float]], list[float]]) -> None:
    work_s, offsets_s = job
    detector, end_s = HangDetector(CONFIG), sum(max(works_s) for works_s in work_s)
    for now_s, beats in observations(timelines(work_s), offsets_s, end_s):
        assert detector.observe(beats, now_s) == []
        assert not detector.stalled(now_s)


@settings(max_examples=examples(300), deadline=None, database=None)
@given(jobs(least_step_s=0.1, least_world=2), st.data())
def test_the_guilty_rank_is_found_soon(
    job: tuple[list[list[float]], list[float]], data: st.DataObject
) -> None:
    work_s, offsets_s = job
    assume(len(work_s) >= 10)
    rank, step = (
        data.draw(st.integers(0, len(offsets_s) - 1)),
        data.draw(st.integers(8, len(work_s) - 2)),
    )
    phase = data.draw(st.sampled_from([Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]))
    step_s = max(max(works_s) for works_s in work_s)
    longest_s = step_s * max(PARTS.values())
    limit_s = max(
        CONFIG.hang_steps * step_s,
        longest_s * (1 + YOUNG_STEPS / step) + CONFIG.hang_floor_ms / 1000,
    )
    limit_s += step_s  # until another rank waits for it
    spans = timelines(work_s, (rank, step, phase))
    hung_s = spans[rank][-1].start_s
    detector = HangDetector(CONFIG)
    for now_s, beats in observations(spans, offsets_s, hung_s + limit_s + 0.06):
        if hangs := detector.observe(beats, now_s):
            assert [(hang.worker, hang.phase) for hang in hangs] == [(str(rank), phase)]
            return
    raise AssertionError("the hang was not found in time")
