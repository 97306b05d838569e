"""One call has one result: the logs of collectives, driven through losses, joins and generations in any order."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from chaoskit.errors import BadInput
from chaoskit.runtime.group.collective_log import RESULTS_BYTES_MAX, CollectiveLog, ResultsDiffer
from chaoskit.runtime.group.generations import FirstMove, Generation, GenerationCourse
from chaoskit.wire.messages import Endpoint, Member, Plan

NOWHERE = Endpoint("host", "", 0, 0, 0)
CALLS = 3  # after each step
STEPS = 4
EVENTS = 150
PATIENCE = 200  # turns of all ranks in which a job without faults comes to its end


class Rank:
    """A member whose user code makes ``CALLS`` calls after each step, and what its trainer decides."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.course = GenerationCourse(name, Generation)
        self.course.calls.close(0)  # nothing is called before the first transaction
        self.entered: Generation | None = None
        self.met: tuple[Generation, int] | None = (
            None  # in which all have come to the call of that number
        )
        self.seen: dict[tuple[int, int], bytes] = {}  # by step and number

    @property
    def generation(self) -> Generation:
        assert self.course.current is not None
        return self.course.current

    def settles(self, *, calling: bool) -> bool:
        """Stand in the newest generation. False: not now."""
        generation, course = self.generation, self.course
        if self.entered is generation:
            return True
        if generation.first_move(course.step) is FirstMove.HEAL:
            assert not calling, "no rank goes on while another one is in a call"
            course.step = generation.goal_step
        if generation.holder is not None:
            if generation.results is None or not course.begin_step_change(generation):
                return False
            course.calls.adopt(course.step, generation.results)
            course.end_step_change()
        if generation.first_move(course.step) is FirstMove.END:
            course.done |= not calling
            return calling
        self.entered = generation
        return True


class History:
    """Ranks act one at a time, each as far as it comes alone; at any moment some are lost, and others join."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self.ranks: list[Rank] = []
        self.count, self.generation = 0, 0
        self.arrived: dict[tuple[int, int, int], set[str]] = defaultdict(set)
        self.form(chance.randint(1, 4))

    def go_on(self) -> None:
        """What happens next."""
        if self._chance.random() < 0.06:
            self.ranks = self._chance.sample(self.ranks, self._chance.randint(1, len(self.ranks)))
            self.form(self._chance.randint(0, 2))
        elif self._chance.random() < 0.1:
            self.hand_over()
        else:
            self.act(self._chance.choice(self.ranks))

    def form(self, joining: int) -> None:
        """All ranks and some new ones meet in a new generation."""
        self.generation += 1
        for _ in range(joining):
            self.ranks.append(Rank(f"worker{self.count}"))
            self.count += 1
        members = tuple(
            Member(number, rank.name, "", NOWHERE, ()) for number, rank in enumerate(self.ranks)
        )
        plan = Plan(self.generation, members, abort=True)
        for rank in self.ranks:
            rank.course.offer(plan)
        told = [rank.course.progress_for(rank.generation) for rank in self.ranks]
        for rank in self.ranks:
            rank.generation.learn([progress.encode() for progress in told if progress is not None])

    def hand_over(self) -> None:
        """The results of the holder come to all others."""
        if (holder := self.ranks[0].generation.holder) is None:
            return
        source = self.ranks[holder.rank].course
        for rank in self.ranks:
            rank.generation.results = source.calls.results(holder.step)

    def act(self, rank: Rank) -> None:
        """One thing that the main thread of ``rank`` does."""
        course, calls, step = rank.course, rank.course.calls, rank.course.step
        if course.done:
            return
        if rank.met is not None:
            self.write_down(rank, *rank.met)
        elif calls.is_closed(step):
            if rank.settles(calling=False) and course.step == step:
                self.come(rank, CALLS)
        elif calls.made(step) == CALLS:
            if step == STEPS:
                course.done = True
            else:
                calls.close(step)
        elif (known := calls.replay(step)) is not None:
            self.show(rank, (step, calls.made(step) - 1), known)
        elif rank.settles(calling=True) and calls.made(step) == len(calls.results(step)):
            assert rank.generation.gone_on(step) is None, (
                "no rank is refused that calls what others call"
            )
            self.come(rank, calls.made(step))

    def come(self, rank: Rank, number: int) -> None:
        """``rank`` waits for the others, in a call or for the commit."""
        arrived = self.arrived[self.generation, rank.course.step, number]
        arrived.add(rank.name)
        if arrived >= {member.worker for member in rank.generation.plan.members}:
            rank.met = rank.generation, number

    def write_down(self, rank: Rank, generation: Generation, number: int) -> None:
        """Keep the result of a call, or commit, unless a newer generation has begun."""
        rank.met = None
        if not rank.course.begin_step_change(generation):
            return
        if number == CALLS:
            rank.course.step += 1
        else:
            rank.course.calls.record(
                rank.course.step, f"of generation {generation.plan.generation}".encode()
            )
        rank.course.end_step_change()

    def show(self, rank: Rank, key: tuple[int, int], result: bytes) -> None:
        """User code of ``rank`` gets a result."""
        rank.seen[key] = result
        for other in self.ranks:
            assert other.seen.get(key, result) == result, "one call has one result"

    def end_well(self) -> None:
        """Without another fault all come to the end, with the results of every call that they lived through."""
        for _ in range(PATIENCE):
            self.hand_over()
            for rank in self.ranks:
                self.act(rank)
        for rank in self.ranks:
            assert rank.course.done
            steps = {step for step, _ in rank.seen}
            assert len(rank.seen) == len(steps) * CALLS


@given(st.integers(0, 2**32))
@settings(max_examples=examples(1000), deadline=None, database=None)
def test_one_call_has_one_result(seed: int) -> None:
    """Whatever ranks are lost and join between any two things that a rank does, and however far each has come."""
    history = History(Random(seed))
    for _ in range(EVENTS):
        history.go_on()
    history.end_well()


def test_a_rank_that_is_behind_is_given_the_results() -> None:
    """The log of the member with most results is taken over, call by call, and then the rank calls for itself."""
    here, there = CollectiveLog(), CollectiveLog()
    for log in (here, there):
        log.record(3, b"one")
        assert log.replay(3) == b"one"
    there.record(3, b"two")
    here.adopt(3, there.results(3))
    assert here.replay(3) == b"two"
    assert here.replay(3) is None
    assert here.made(3) == 2


def test_results_belong_to_their_step() -> None:
    """After the next commit nothing is left of them; nor is it after a step was lost and is taken again."""
    log = CollectiveLog()
    log.record(3, b"one")
    assert log.replay(3) == b"one"
    assert (log.results(4), log.made(4), log.replay(4)) == ((), 0, None)
    log.close(2)
    assert (log.results(3), log.made(3)) == ((), 0)


def test_another_result_of_the_same_call_is_refused() -> None:
    """A rank that was left out, and comes back, may have a result that the others do not know."""
    log = CollectiveLog()
    log.record(3, b"one")
    with pytest.raises(ResultsDiffer, match="step 3"):
        log.adopt(3, (b"other", b"two"))


def test_results_are_small() -> None:
    """All ranks refuse what is too much for a log, as all of them record the same."""
    log = CollectiveLog()
    log.record(3, bytes(RESULTS_BYTES_MAX // 2))
    with pytest.raises(BadInput, match="reduce a metric"):
        log.record(3, bytes(RESULTS_BYTES_MAX))
    log.record(4, bytes(RESULTS_BYTES_MAX))


def test_logs_of_other_results_have_other_digests() -> None:
    """Members compare digests; only those whose log differs are given one."""
    digests = set()
    for results in ([], [b"a"], [b"b"], [b"a", b""], [b"a", b"b"], [b"ab"]):
        log = CollectiveLog()
        for result in results:
            log.record(1, result)
        digests.add(log.digest(1))
    assert len(digests) == 6
