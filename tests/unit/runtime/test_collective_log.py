"""The logs of collectives, driven through losses, joins and generations in any order: each call has
a single result.
"""

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
PATIENCE = 200  # turns of all ranks in which a job without faults ends


class Rank:
    """A member with user code that makes ``CALLS`` calls after each step, and the decisions of its
    trainer.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.course = GenerationCourse(name, Generation)
        self.course.calls.close(0)  # there are no calls before the first transaction
        self.entered: Generation | None = None
        self.met: tuple[Generation, int] | None = (
            None  # the generation in which all have reached this call
        )
        self.shown: dict[
            tuple[int, int], bytes
        ] = {}  # the results shown to user code, by step and number

    @property
    def generation(self) -> Generation:
        assert self.course.current is not None
        return self.course.current

    def settles(self, *, calling: bool) -> bool:
        """Enter the newest generation. Return False if that is not possible now."""
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
    """A history in which ranks act in turn, each as far as possible alone; at any moment ranks are
    lost and others join.
    """

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self.ranks: list[Rank] = []
        self.count, self.generation = 0, 0
        self.arrived: dict[tuple[int, int, int], set[str]] = defaultdict(set)
        self.form(chance.randint(1, 4))

    def go_on(self) -> None:
        """Execute the next random event."""
        if self._chance.random() < 0.06:
            self.ranks = self._chance.sample(self.ranks, self._chance.randint(1, len(self.ranks)))
            self.form(self._chance.randint(0, 2))
        elif self._chance.random() < 0.1:
            self.hand_over()
        else:
            self.act(self._chance.choice(self.ranks))

    def form(self, joining: int) -> None:
        """Form a new generation of all ranks and some new ones."""
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
        reports = [rank.course.progress_for(rank.generation) for rank in self.ranks]
        for rank in self.ranks:
            rank.generation.learn(
                [progress.encode() for progress in reports if progress is not None]
            )

    def hand_over(self) -> None:
        """Give the results of the holder to all others."""
        if (holder := self.ranks[0].generation.holder) is None:
            return
        source = self.ranks[holder.rank].course
        for rank in self.ranks:
            rank.generation.results = source.calls.results(holder.step)

    def act(self, rank: Rank) -> None:
        """Execute an action of the main thread of ``rank``."""
        course, calls, step = rank.course, rank.course.calls, rank.course.step
        if course.done:
            return
        if rank.met is not None:
            self.write_down(rank, *rank.met)
        elif calls.is_closed(step):
            if rank.settles(calling=False) and course.step == step:
                self.come(rank, CALLS)
        elif calls.next_call(step) == CALLS:
            if step == STEPS:
                course.done = True
            else:
                calls.close(step)
        elif (recorded := calls.replay(step)) is not None:
            self.show(rank, (step, calls.next_call(step) - 1), recorded)
        elif rank.settles(calling=True) and calls.next_call(step) == len(calls.results(step)):
            assert rank.generation.gone_on(step) is None, (
                "no rank is refused that calls what others call"
            )
            self.come(rank, calls.next_call(step))

    def come(self, rank: Rank, number: int) -> None:
        """Have ``rank`` wait for the others, in a call or for the commit."""
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
        """Show a result to the user code of ``rank``."""
        rank.shown[key] = result
        for other in self.ranks:
            assert other.shown.get(key, result) == result, "one call has one result"

    def end_well(self) -> None:
        """Run without another fault: all ranks come to the end, with equal results of each shared
        call.
        """
        for _ in range(PATIENCE):
            self.hand_over()
            for rank in self.ranks:
                self.act(rank)
        for rank in self.ranks:
            assert rank.course.done
            steps = {step for step, _ in rank.shown}
            assert len(rank.shown) == len(steps) * CALLS


@given(st.integers(0, 2**32))
@settings(max_examples=examples(1000), deadline=None, database=None)
def test_one_call_has_one_result(seed: int) -> None:
    """Ranks are lost and join between any two actions of a rank, at any progress of each."""
    history = History(Random(seed))
    for _ in range(EVENTS):
        history.go_on()
    history.end_well()


def test_a_rank_that_is_behind_is_given_the_results() -> None:
    """The rank takes over the log of the member with most results, call by call, and then calls
    itself.
    """
    behind, ahead = CollectiveLog(), CollectiveLog()
    for log in (behind, ahead):
        log.record(3, b"one")
        assert log.replay(3) == b"one"
    ahead.record(3, b"two")
    behind.adopt(3, ahead.results(3))
    assert behind.replay(3) == b"two"
    assert behind.replay(3) is None
    assert behind.next_call(3) == 2


def test_results_belong_to_their_step() -> None:
    """The results are gone after the next commit, and after a step was lost and is repeated."""
    log = CollectiveLog()
    log.record(3, b"one")
    assert log.replay(3) == b"one"
    assert (log.results(4), log.next_call(4), log.replay(4)) == ((), 0, None)
    log.close(2)
    assert (log.results(3), log.next_call(3)) == ((), 0)


def test_another_result_of_the_same_call_is_refused() -> None:
    """A rank that was left out, and comes back, may have a result that the others do not have."""
    log = CollectiveLog()
    log.record(3, b"one")
    with pytest.raises(ResultsDiffer, match="step 3"):
        log.adopt(3, (b"other", b"two"))


def test_results_are_small() -> None:
    """All ranks refuse a result that is too large for a log, because all of them record it."""
    log = CollectiveLog()
    log.record(3, bytes(RESULTS_BYTES_MAX // 2))
    with pytest.raises(BadInput, match="reduce a metric"):
        log.record(3, bytes(RESULTS_BYTES_MAX))
    log.record(4, bytes(RESULTS_BYTES_MAX))


def test_logs_of_other_results_have_other_digests() -> None:
    """Members compare digests; only a member with a different log receives a log."""
    digests = set()
    for results in ([], [b"a"], [b"b"], [b"a", b""], [b"a", b"b"], [b"ab"]):
        log = CollectiveLog()
        for result in results:
            log.record(1, result)
        digests.add(log.digest(1))
    assert len(digests) == 6
