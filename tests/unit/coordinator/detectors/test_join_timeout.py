"""Tests of the timeout of members that do not follow a plan."""

from __future__ import annotations

from collections.abc import Collection

from chaoskit.coordinator.detectors.join_timeout import FOLLOW_S, JoinTimeout
from chaoskit.vocabulary import TIMED_PHASES, Phase
from chaoskit.wire.messages import Beat, Endpoint, Member, Plan

POLL_S = 0.05


def beat(
    worker: str, phase: Phase, generation: int = 1, age_s: float = 100.0, starved_s: float = 0.0
) -> Beat:
    return Beat(worker, generation, 0, 10, phase, age_s * 1000, starved_s * 1000, 10, 0.0)


def missed(
    *beats: Beat, arrived: Collection[str] = (), abort: bool = True, seconds: float = FOLLOW_S + 0.2
) -> list[str]:
    """Return the workers that are found to stay behind within ``seconds`` of plan 2."""
    monitor = JoinTimeout()
    for number in range(round(seconds / POLL_S)):
        if hangs := monitor.observe(Plan(2, (), abort), beats, arrived, number * POLL_S):
            assert all(hang.age_s > hang.limit_s == FOLLOW_S for hang in hangs)
            return [hang.worker for hang in hangs]
    return []


def test_a_worker_whose_interpreter_is_blocked_does_not_arrive() -> None:
    beats = [beat("a", Phase.REGROUP), beat("b", Phase.REDUCE)]
    assert missed(*beats, arrived={"a"}) == ["b"]
    assert missed(*beats, arrived={"a"}, seconds=FOLLOW_S - 0.1) == []
    assert missed(beat("a", Phase.REGROUP), beat("b", Phase.DONE), arrived={"a"}) == ["b"]


def test_a_main_thread_that_stays_in_an_old_collective_is_missed_once_all_have_arrived() -> None:
    beats = [beat("a", Phase.REDUCE, 2), beat("b", Phase.REDUCE)]
    assert missed(*beats, arrived={"a", "b"}) == ["b"]
    assert missed(beat("a", Phase.REGROUP), beat("b", Phase.REDUCE), arrived={"a", "b"}) == []


def test_who_has_finished_its_training_never_stands_in_a_new_generation() -> None:
    assert missed(beat("a", Phase.REDUCE, 2), beat("b", Phase.DONE), arrived={"a", "b"}) == []


def test_who_stays_in_the_last_reduction_is_missed_by_those_that_are_done() -> None:
    """Ranks that are done never enter the new generation, so the arrival of all must be enough."""
    endpoint = Endpoint("host", "", 0, 0, 0)
    members = tuple(
        Member(rank, worker, "node", endpoint, (rank,)) for rank, worker in enumerate("ab")
    )
    monitor, beats = JoinTimeout(), [beat("a", Phase.DONE), beat("b", Phase.REDUCE)]
    polls = [
        monitor.observe(Plan(2, members, True), beats, {"a", "b"}, number * POLL_S)
        for number in range(60)
    ]
    assert [hang.worker for hang in polls[-1]] == ["b"]
    assert polls[round(FOLLOW_S / POLL_S) - 5] == []


def test_user_code_has_limits_of_its_own() -> None:
    for phase in (*TIMED_PHASES, Phase.OUTSIDE, Phase.LONG, Phase.UNTIMED, Phase.RESTORE):
        assert missed(beat("a", Phase.REGROUP), beat("b", phase), arrived={"a"}) == []


def test_a_plan_for_the_next_step_boundary_leaves_all_where_they_are() -> None:
    assert (
        missed(beat("a", Phase.REDUCE), beat("c", Phase.REGROUP, 0), arrived={"c"}, abort=False)
        == []
    )


def test_a_rank_that_never_entered_the_generation_that_goes_on_reaches_no_step_boundary() -> None:
    """A rank that hangs on its way into a generation is found also when the next one is to begin at a step boundary.

    A rank that is done enters no generation, and does not hang.
    """
    plan = Plan(3, (), abort=False)
    beats = [beat("a", Phase.REGROUP, 1), beat("b", Phase.REDUCE, 2), beat("c", Phase.DONE, 1)]
    monitor = JoinTimeout()
    polls = [monitor.observe(plan, beats, (), number * POLL_S, worked=2) for number in range(60)]
    assert [hang.worker for hang in polls[-1]] == ["a"]
    assert polls[round(FOLLOW_S / POLL_S) - 5] == []


def test_who_is_new_does_not_wait_for_a_step_boundary() -> None:
    """A newcomer with a blocked interpreter keeps the others waiting at the boundary."""
    joiners = [beat("c", Phase.REGROUP, 0), beat("d", Phase.REGROUP, 0)]
    assert missed(beat("a", Phase.REGROUP), *joiners, arrived={"a", "c"}, abort=False) == ["d"]


def test_who_is_new_and_does_not_follow_is_missed_once_all_have_arrived() -> None:
    """The others may be done: they wait for the newcomer, and no step boundary will come."""
    endpoint = Endpoint("host", "", 0, 0, 0)
    members = tuple(
        Member(rank, worker, "node", endpoint, (rank,)) for rank, worker in enumerate("ac")
    )
    monitor, beats = JoinTimeout(), [beat("a", Phase.DONE), beat("c", Phase.REGROUP, 0)]
    plan = Plan(2, members, abort=False)
    assert not any(monitor.observe(plan, beats, {"c"}, number * POLL_S) for number in range(60))
    polls = [monitor.observe(plan, beats, {"a", "c"}, number * POLL_S) for number in range(60, 120)]
    assert [hang.worker for hang in polls[-1]] == ["c"]
    assert polls[round(FOLLOW_S / POLL_S) - 5] == []


def test_time_without_a_cpu_does_not_count() -> None:
    late = beat("b", Phase.REDUCE, age_s=10.0, starved_s=9.0)
    assert missed(beat("a", Phase.REGROUP), late, arrived={"a"}) == []
    monitor, beats = JoinTimeout(), [beat("b", Phase.REDUCE)]
    monitor.observe(Plan(2, (), True), beats, (), 0.0)
    assert monitor.observe(Plan(2, (), True), beats, (), 60.0) == [], (
        "the coordinator itself was deaf"
    )
