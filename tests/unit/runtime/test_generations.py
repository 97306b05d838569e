"""The decisions of a worker about generations: which it begins, with which step, and how long it
waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from chaoskit.config import RunConfig
from chaoskit.job import JobSpec
from chaoskit.runtime.group.generations import (
    FirstMove,
    Generation,
    GenerationChange,
    GenerationCourse,
    MemberProgress,
    entry_limit_s,
    healing_limit_s,
    may_appeal,
)
from chaoskit.runtime.step.restore import sources
from chaoskit.wire.messages import Endpoint, Member, OfferedSnapshot, Plan

ME = "node0.0"
NOWHERE = Endpoint("host", "", 0, 0, 0)


def plan(
    generation: int,
    *,
    abort: bool = False,
    leaves: bool = False,
    world: int = 2,
    restore: tuple[OfferedSnapshot, ...] = (),
) -> Plan:
    """Return a plan with this worker as its first rank, or as a leaver."""
    names = [f"node{number}.0" for number in range(leaves, world + leaves)]
    members = tuple(
        Member(rank, name, name.split(".")[0], NOWHERE, (rank,)) for rank, name in enumerate(names)
    )
    return Plan(generation, members, abort=abort, restore=restore, leavers=(ME,) if leaves else ())


def copy_of(step: int) -> OfferedSnapshot:
    """Return a sealed copy in the memory of another node."""
    return OfferedSnapshot("node9", "node9.0", step, 1, 1, "00", NOWHERE)


def course() -> GenerationCourse[Generation]:
    return GenerationCourse(ME, Generation)


def begun(change: GenerationChange[Generation] | None) -> Generation:
    assert change is not None
    return change.begun


def with_standings(
    standings: Sequence[tuple[int, bool]], restore: tuple[OfferedSnapshot, ...] = ()
) -> Generation:
    """Return a generation with members that have reported these steps and ends."""
    its_plan = plan(3, world=len(standings), restore=restore)
    generation = Generation(its_plan, its_plan.members[0])
    generation.learn([MemberProgress(-1, step, done).encode() for step, done in standings])
    return generation


# -- which generation ------------------------------------------------------------------------------


def test_the_first_plan_is_begun_at_once() -> None:
    """The first plan is begun at once, whether it aborts or not: it need not await the end of any
    step.
    """
    change = course().offer(plan(1))
    assert change is not None
    assert (change.previous, change.takes_part, change.begun.me.rank) == (None, True, 0)


def test_a_plan_that_aborts_breaks_the_generation_before() -> None:
    """A plan that aborts is begun at once, and the generation before it is over."""
    here = course()
    first = begun(here.offer(plan(1)))
    change = here.offer(plan(2, abort=True))
    assert change is not None
    assert change.previous is first
    assert first.broken
    assert here.is_over(first)
    assert here.current is change.begun


def test_a_soft_plan_waits_until_all_ranks_vote_for_it() -> None:
    """A plan that does not abort is voted for at once, and begun only when the lowest vote of all
    ranks names it.
    """
    here = course()
    first = begun(here.offer(plan(1)))
    assert here.vote == 1
    assert here.offer(plan(2)) is None
    assert here.vote == 2
    assert here.move_on(1) is None
    assert not here.is_over(first)
    assert begun(here.move_on(2)).plan.generation == 2
    assert here.vote == 2
    assert here.move_on(2) is None


def test_the_newest_soft_plan_takes_the_place_of_an_older_one() -> None:
    """The newest of several waiting plans counts, in any order of arrival."""
    here = course()
    here.offer(plan(1))
    for generation in (2, 4, 3):
        assert here.offer(plan(generation)) is None
    assert here.vote == 4
    assert here.move_on(3) is None
    assert begun(here.move_on(4)).plan.generation == 4


def test_a_soft_plan_is_begun_at_once_where_the_generation_is_broken() -> None:
    """A broken generation has no step boundary: a plan that comes then waits for none."""
    here = course()
    first = begun(here.offer(plan(1)))
    assert here.give_up(first) is None
    assert first.broken
    assert begun(here.offer(plan(2))).plan.generation == 2


def test_to_give_up_begins_the_plan_that_waits() -> None:
    """A rank that gives its generation up begins the waiting plan, and once only."""
    here = course()
    first = begun(here.offer(plan(1)))
    here.offer(plan(2))
    assert begun(here.give_up(first)).plan.generation == 2
    assert here.give_up(first) is None


def test_to_give_up_an_older_generation_leaves_the_newer_one_alone() -> None:
    """A late report about an older generation begins no plan that waits in the newer one."""
    here = course()
    first = begun(here.offer(plan(1)))
    second = begun(here.offer(plan(2, abort=True)))
    here.offer(plan(3))
    assert here.give_up(first) is None
    assert not here.is_over(second)


def test_a_worker_that_is_to_go_keeps_its_place_and_forms_no_group() -> None:
    """A worker that leaves reports its former place, and comes back if a newer plan needs
    it again.
    """
    here = course()
    here.offer(plan(1))
    change = here.offer(plan(2, abort=True, leaves=True))
    assert change is not None
    assert not change.takes_part
    assert change.begun.me == plan(1).members[0]
    assert here.departing is change.begun
    back = here.offer(plan(3, abort=True))
    assert back is not None
    assert back.takes_part
    assert here.departing is None


def test_a_worker_departs_with_a_plan_that_waits_for_its_step_boundary() -> None:
    """The members of that plan go on without it; it may be told to end before it has come to the
    boundary.
    """
    here = course()
    here.offer(plan(1))
    assert here.departure is None
    here.offer(plan(2, leaves=True))
    assert here.departing is None
    assert here.departure == plan(2, leaves=True)
    here.offer(plan(3))
    assert here.departure is None


@given(st.data())
@settings(max_examples=examples(200), deadline=None)
def test_generations_only_grow_and_one_at_most_is_not_over(data: st.DataObject) -> None:
    """Generations only grow, and only the newest is not over, for any plans in any order.

    The vote never names an older plan than the current one, and a plan that waits is in time never
    forgotten.
    """
    here, lived = course(), list[Generation]()
    newest = 0
    for _ in range(data.draw(st.integers(1, 15), "steps")):
        before = here.current
        match data.draw(st.sampled_from(["offer", "move on", "give up"]), "what"):
            case "offer":
                generation = data.draw(st.integers(1, 12), "generation")
                abort = data.draw(st.booleans(), "abort")
                newest = max(newest, generation)
                change = here.offer(plan(generation, abort=abort))
            case "move on":
                change = here.move_on(data.draw(st.integers(0, here.vote), "lowest vote"))
            case _ if lived:
                change = here.give_up(data.draw(st.sampled_from(lived), "one"))
            case _:
                continue
        if change is not None:
            assert change.previous is before
            assert before is None or change.begun.plan.generation > before.plan.generation
            lived.append(change.begun)
        assert here.current is (lived[-1] if lived else None)
        assert all(here.is_over(generation_before) for generation_before in lived[:-1])
        assert lived[-1:] == [] or lived[-1].plan.generation <= here.vote <= newest
    if lived:
        here.give_up(lived[-1])
        assert here.current is not None
        assert here.current.plan.generation == here.vote, "nothing waits any more"


# -- the step that others are told -----------------------------------------------------------------


def test_no_generation_is_told_of_a_step_that_is_changing() -> None:
    """While the step changes, no step is reported; a generation that was begun meanwhile receives
    the new step.
    """
    here = course()
    first = begun(here.offer(plan(1)))
    assert here.begin_step_change(first)
    second = begun(here.offer(plan(2, abort=True)))
    assert not here.may_report(second)
    here.step = 7
    here.end_step_change()
    assert here.may_report(second)
    assert here.progress_for(second) == MemberProgress(0, 7, False)


def test_the_step_does_not_change_after_it_was_reported() -> None:
    """A rank that may have reported its step to a newer generation commits no step in the older
    one.
    """
    here = course()
    first = begun(here.offer(plan(1)))
    second = begun(here.offer(plan(2, abort=True)))
    assert here.progress_for(second) is not None
    assert not here.begin_step_change(first)
    assert here.may_report(second), "a refusal holds nothing back"


def test_a_generation_that_broke_is_told_nothing() -> None:
    """A broken generation receives no report, and a report to it does not wait for the step to
    stand.
    """
    here = course()
    first = begun(here.offer(plan(1)))
    assert here.begin_step_change(first)
    first.broken = True
    assert here.may_report(first)
    assert here.progress_for(first) is None


# -- what a rank does first ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("standings", "copies", "step", "move"),
    [
        ([(0, False), (0, False)], [], 0, FirstMove.TRAIN),
        ([(5, False), (6, False)], [], 5, FirstMove.HEAL),
        ([(5, False), (6, False)], [], 6, FirstMove.TRAIN),
        ([(5, False), (6, True)], [], 5, FirstMove.HEAL),
        ([(6, False), (6, True)], [], 6, FirstMove.END),
        ([(5, True), (6, False)], [], 6, FirstMove.TRAIN),
        ([(-1, False), (-1, False)], [], -1, FirstMove.FAIL),
        ([(-1, False), (0, False)], [], -1, FirstMove.HEAL),
        ([(0, False), (0, False)], [8], 0, FirstMove.HEAL),
        ([(-1, False), (-1, False)], [7, 8], -1, FirstMove.HEAL),
    ],
)
def test_first_move(
    standings: list[tuple[int, bool]], copies: list[int], step: int, move: FirstMove
) -> None:
    """A rank heals while a member or a copy is ahead of it, and ends if a member with its step is
    at the end.
    """
    assert with_standings(standings, tuple(map(copy_of, copies))).first_move(step) is move


@given(
    st.lists(st.tuples(st.integers(-1, 5), st.booleans()), min_size=1, max_size=5),
    st.lists(st.integers(1, 6), max_size=3),
)
def test_all_members_come_to_one_step(standings: list[tuple[int, bool]], copies: list[int]) -> None:
    """All ranks of a generation name the same step, every source has it, and with it all make the
    same move.
    """
    generation = with_standings(standings, tuple(map(copy_of, copies)))
    goal = generation.goal_step
    assert goal == max([step for step, _ in standings] + copies)
    moves = {generation.first_move(goal) for _ in standings}
    assert len(moves) == 1
    assert FirstMove.HEAL not in moves
    assert (FirstMove.FAIL in moves) == (goal < 0 and not any(done for _, done in standings))
    for step, _ in standings:
        assert (generation.first_move(step) is FirstMove.HEAL) == (step < goal)
    if goal >= 0:
        offers = sources(generation)
        assert {
            source.snapshot.step if source.snapshot else standings[source.rank][0]
            for source in offers
        } == {goal}


@given(st.integers(0, 2**40), st.integers(-1, 2**60), st.booleans())
def test_a_standing_survives_its_encoding(rank: int, step: int, done: bool) -> None:
    """The other members read exactly the standing that a member reports."""
    assert MemberProgress.decode(rank, MemberProgress(rank, step, done).encode()) == MemberProgress(
        rank, step, done
    )


# -- limits ----------------------------------------------------------------------------------------


def test_healing_waits_for_any_time_in_a_broken_generation_only() -> None:
    """A rank without a source waits for a plan for a limited time; without limit if the generation
    broke under it.
    """
    generation = with_standings([(0, False), (1, False)])
    assert healing_limit_s(generation)
    generation.broken = True
    assert healing_limit_s(generation) is None


def test_a_rank_with_a_state_asks_for_another_plan_before_it_gives_up() -> None:
    """A rank that has a state asks for another plan, a few times: its state may be the last one."""
    assert may_appeal(0, 1)
    assert may_appeal(6, 3)
    assert not may_appeal(6, 4)
    assert not may_appeal(-1, 1)


def test_an_entry_that_failed_waits_longer_than_a_replacement_takes_to_start() -> None:
    """A failed entry waits until a replacement can have started; without limit if its end is
    explained.
    """
    config = RunConfig(job=JobSpec("job.py", sharded=True), replacement_s=3.0, startup_s=20.0)
    limit_s = entry_limit_s(is_explained=False, config=config)
    assert limit_s is not None
    assert limit_s > 20.0
    assert entry_limit_s(is_explained=True, config=config) is None
