"""Lost steps that the age of a copy explains: every member of their world ended in the same
update.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from chaoskit.journal import Record
from chaoskit.runlog.history import History
from chaoskit.runlog.outcome import CopyInterval
from chaoskit.runlog.torn import lost_without_reason, torn_worlds, widest_interval
from chaoskit.vocabulary import Event

AT = 20  # steps that are committed when the first world ends
EVERY = 8


class Script:
    """The journals of a replicated run of some ranks, in the order of their writing."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._time = count()
        self._members: list[str] = []
        self._generation = 0

    def write(self, source: str, event: Event, **fields: Any) -> None:
        self.records.append(Record(next(self._time), source, event, fields))

    def plan(self, *workers: str) -> None:
        self._generation, self._members = self._generation + 1, list(workers)
        members = [{"worker": worker} for worker in workers]
        self.write("coordinator", Event.PLAN, generation=self._generation, members=members)

    def copied(self, every: int, worker: str = "a", step_ms: float = 100.0) -> None:
        fields = {
            "step": 0,
            "generation": self._generation,
            "every": every,
            "step_ms": step_ms,
            "cost_ms": 8.0,
        }
        self.write("node", Event.COPY_INTERVAL, worker=worker, **fields)

    def commit(self, first: int, after: int, *workers: str) -> None:
        for step in range(first, after):
            for worker in workers or self._members:
                numbers = {"loss": 1.0, "grad_sum": 1.0}
                self.write(worker, Event.COMMIT, step=step, generation=self._generation, **numbers)

    def tear(self, step: int, *workers: str) -> None:
        for worker in workers:
            self.write("node", Event.TORN, worker=worker, step=step, generation=self._generation)

    @property
    def unexplained(self) -> int:
        return lost_without_reason(History(self.records), torn_worlds(self.records))


def script(
    restored: int, *, every: int = EVERY, torn: tuple[tuple[str, int], ...] = (("a", AT), ("b", AT))
) -> Script:
    """Return a script in which two ranks commit ``AT`` steps, and two others begin with a copy of
    ``restored`` steps.
    """
    journals = Script()
    journals.plan("a", "b")
    journals.copied(1)
    journals.copied(every)
    journals.commit(0, AT)
    for worker, step in torn:
        journals.tear(step, worker)
    journals.plan("c", "d")
    journals.copied(1, "c")
    journals.commit(restored, AT + 3)
    return journals


@pytest.mark.parametrize("age", range(EVERY))
def test_the_steps_since_a_copy_are_explained_where_every_rank_ended_in_one_update(
    age: int,
) -> None:
    assert script(AT - age).unexplained == 0


@pytest.mark.parametrize(
    ("torn", "what"),
    [
        ((("a", AT),), "of the other rank nothing is known: its node was lost"),
        ((), "no rank ended in its update"),
        ((("a", AT), ("b", AT - 1)), "they were in different updates"),
        ((("a", AT), ("e", AT)), "a spare is no member"),
    ],
)
def test_where_one_rank_may_have_left_a_whole_state_nothing_is_explained(
    torn: tuple[tuple[str, int], ...], what: str
) -> None:
    """The step in flight is explained, and no other."""
    assert script(AT - 4, torn=torn).unexplained == 3, what
    assert script(AT - 1, torn=torn).unexplained == 0, "the last step was in flight"


def test_a_copy_that_is_older_than_it_may_be_explains_nothing() -> None:
    assert script(AT - EVERY).unexplained == EVERY - 1
    assert script(AT - 1, every=1).unexplained == 0
    assert script(AT - 3, every=1).unexplained == 2


def test_the_interval_is_that_of_the_world_that_ended() -> None:
    """Another world may have copied less often, before or after."""
    journals = Script()
    journals.plan("a", "b")
    journals.copied(50)
    journals.commit(0, AT)
    journals.plan("a", "b", "c")
    journals.copied(2)
    journals.commit(AT, 30)
    journals.tear(30, "a", "b", "c")
    journals.plan("d")
    journals.copied(50, "d")
    journals.commit(25, 40)
    assert journals.unexplained == 4


def test_of_two_nodes_that_copy_either_copy_may_be_the_one_that_is_left() -> None:
    untorn = script(AT - 4, torn=())
    assert untorn.unexplained == 3
    journals = Script()
    journals.plan("a", "b")
    journals.copied(2, "a")
    journals.copied(5, "b")
    journals.commit(0, AT)
    journals.tear(AT, "a", "b")
    journals.plan("c")
    journals.commit(AT - 4, AT + 1)
    assert journals.unexplained == 0


def test_a_second_world_that_is_torn_explains_its_own_steps_only() -> None:
    journals = Script()
    journals.plan("a", "b")
    journals.copied(EVERY)
    journals.commit(0, AT)
    journals.tear(AT, "a", "b")
    journals.plan("c", "d")
    journals.copied(1, "c")
    journals.copied(3, "c")
    journals.commit(AT - 5, AT - 2)
    journals.tear(AT - 2, "c", "d")
    journals.plan("e", "f")
    journals.commit(AT - 4, AT + 3)
    assert journals.unexplained == 0
    journals.plan("g")
    journals.commit(AT + 1, AT + 4)
    assert journals.unexplained == 1, "the last world was not torn"


def test_ranks_that_wrote_their_commit_down_and_did_not_finish_the_update_are_torn() -> None:
    """A commit is written down inside the update."""
    journals = Script()
    journals.plan("a", "b")
    journals.copied(EVERY)
    journals.commit(0, AT)
    journals.commit(AT, AT + 1, "b")
    journals.tear(AT, "a", "b")
    journals.plan("c", "d")
    journals.commit(AT - EVERY + 1, AT + 3)
    assert journals.unexplained == 0


@settings(max_examples=examples(200), deadline=None, database=None)
@given(
    st.integers(1, 12),
    st.integers(0, AT),
    st.sets(st.sampled_from("ab")),
)
def test_lost_steps_are_explained_exactly_if_all_ended_so_and_the_copy_was_young_enough(
    every: int, age: int, torn: set[str]
) -> None:
    journals = script(AT - age, every=every, torn=tuple((worker, AT) for worker in sorted(torn)))
    beside_the_last = max(0, age - 1)
    explained = torn == {"a", "b"} and age < every
    assert journals.unexplained == (0 if explained else beside_the_last)


def test_the_longest_interval_of_a_run_is_told() -> None:
    """The interval is given in steps and in seconds."""
    assert widest_interval(script(AT).records) == CopyInterval(steps=EVERY, seconds=0.8)
    assert widest_interval(Script().records) is None
