"""Decisions of the ranks of a sharded job from each other's rows: a bad rank is distinguished from
a bad batch.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.checkpoint.memory.slots import Busy, Slots
from chaoskit.runtime.integrity import voting
from chaoskit.runtime.integrity.ballot import (
    DIGEST,
    Decision,
    RankOrBatch,
    Row,
    exchange_rows,
    gather,
    whole_step,
)

STEP = 7


def owners(world: int, shift: int) -> list[tuple[int, ...]]:
    """Return one shard a rank; every rank has the shard of the rank ``shift`` places further."""
    return [((rank + shift) % world,) for rank in range(world)]


def rows(world: int, shift: int, bad: set[int], *, healthy: bool = True) -> list[Row]:
    """Return the rows of the ranks when the shards in ``bad`` gave NaN: then no rank's sum is
    finite.
    """
    return [
        Row(
            healthy=healthy,
            finite=not bad,
            protected_step=STEP,
            digest=rank,
            state=1,
            torn=False,
            heir=False,
            written=0,
            halts=False,
            losses=[
                (math.nan if s in bad else 1.0) if s in owners(world, shift)[rank] else None
                for s in range(world)
            ],
        )
        for rank in range(world)
    ]


def attempts(
    world: int, bad_rank: set[int], bad_shard: set[int], *, once: bool = False
) -> list[Decision]:
    """Return the decisions until one is no repetition."""
    suspicion, decisions, shift = RankOrBatch(), list[Decision](), 0
    while not decisions or decisions[-1].verdict == "repeat":
        faulty = not (once and decisions)
        bad = {
            shard
            for rank, (shard,) in enumerate(owners(world, shift))
            if rank in bad_rank or shard in bad_shard
        }
        decisions.append(
            suspicion.decide(
                STEP, owners(world, shift), rows(world, shift, bad if faulty else set())
            )
        )
        shift = decisions[-1].shift
        assert len(decisions) < 10
    return decisions


def test_finite_numbers_are_committed_at_once() -> None:
    assert [decision.verdict for decision in attempts(4, set(), set())] == ["commit"]


@given(world=st.integers(2, 6), data=st.data())
def test_what_stays_with_a_rank_is_its_fault(world: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    last = attempts(world, {rank}, set())[-1]
    assert (last.verdict, last.ranks) == ("rank", (rank,))


@given(world=st.integers(2, 6), data=st.data())
def test_what_goes_with_shards_is_the_batchs_fault(world: int, data: st.DataObject) -> None:
    shards = data.draw(st.sets(st.integers(0, world - 1), min_size=1))
    last = attempts(world, set(), shards)[-1]
    assert (last.verdict, set(last.shards)) == ("batch", shards)


@given(world=st.integers(2, 6), data=st.data())
def test_what_comes_once_costs_repetitions_and_is_committed_as_usual(
    world: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    decisions = attempts(world, {rank}, set(), once=True)
    assert [decision.verdict for decision in decisions] == ["repeat", "repeat", "commit"]
    # the bits of a sum depend on the rank that computed each shard
    assert [decision.shift for decision in decisions] == [1, 0, 0]


def test_broken_weights_are_their_ranks_fault() -> None:
    rows_of_ranks = rows(3, 0, {1})
    rows_of_ranks[1] = rows_of_ranks[1]._replace(healthy=False)
    assert RankOrBatch().decide(STEP, owners(3, 0), rows_of_ranks) == Decision("rank", ranks=(1,))


def test_a_sum_that_overflows_is_the_batchs_fault() -> None:
    suspicion = RankOrBatch()
    rows_of_ranks = [row._replace(finite=False) for row in rows(2, 0, set())]
    assert suspicion.decide(STEP, owners(2, 0), rows_of_ranks).verdict == "repeat"
    assert suspicion.decide(STEP, owners(2, 1), rows_of_ranks).verdict == "batch"


def test_every_step_begins_without_a_suspicion() -> None:
    suspicion = RankOrBatch()
    suspicion.decide(STEP, owners(2, 0), rows(2, 0, {1}))
    assert suspicion.decide(STEP + 1, owners(2, 0), rows(2, 0, set())) == Decision("commit")


@pytest.mark.parametrize("loss", [0.1, -math.inf, math.inf, 1e300, 5e-324])
def test_a_row_comes_through_as_it_was(loss: float) -> None:
    row = Row(
        True,
        False,
        -1,
        digest=DIGEST - 1,
        state=DIGEST - 2,
        torn=True,
        heir=False,
        written=DIGEST - 3,
        halts=True,
        losses=[loss, None],
    )
    assert exchange_rows(None, row) == [row]


def test_one_rank_gathers_its_own_value() -> None:
    assert gather(None, b"\x00\xff") == [b"\x00\xff"]


# -- replicas of a piece ---------------------------------------------------------------------------


def replicated(count: int, differing: dict[int, dict[str, Any]]) -> tuple[RankOrBatch, list[Row]]:
    """Return two pieces, each held by ``count`` ranks in turn; ``differing`` gives other fields by
    rank.
    """
    world = 2 * count
    rows_of_ranks = [
        row._replace(digest=rank % 2, state=7 + rank % 2)
        for rank, row in enumerate(rows(world, 0, set()))
    ]
    return RankOrBatch([rank % 2 for rank in range(world)]), [
        row._replace(**differing.get(rank, {})) for rank, row in enumerate(rows_of_ranks)
    ]


def decide(suspicion: RankOrBatch, rows_of_ranks: list[Row], step: int = STEP) -> Decision:
    return suspicion.decide(step, owners(len(rows_of_ranks), 0), rows_of_ranks)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_replicas_that_agree_commit(count: int) -> None:
    assert decide(*replicated(count, {})) == Decision("commit")


def test_ranks_that_hold_different_pieces_are_not_compared() -> None:
    rows_of_ranks = [row._replace(state=rank) for rank, row in enumerate(rows(4, 0, set()))]
    assert decide(RankOrBatch(range(4)), rows_of_ranks) == Decision("commit")


@given(rank=st.integers(0, 5), other=st.integers(0, 5))
def test_of_three_replicas_the_minority_is_convicted(rank: int, other: int) -> None:
    """The minority of both pieces is convicted if both have one."""
    decision = decide(*replicated(3, {rank: {"state": 3}, other: {"state": 3}}))
    if rank == other or (rank - other) % 2:
        assert (decision.verdict, decision.ranks) == ("rank", tuple(sorted({rank, other})))
    else:  # two of three agree
        assert (decision.verdict, len(decision.ranks)) == ("rank", 1)


def test_of_two_replicas_the_one_that_contradicts_itself_is_convicted() -> None:
    decision = decide(*replicated(2, {3: {"state": 3, "torn": True}}))
    assert (decision.verdict, decision.ranks) == ("rank", (3,))


def test_two_replicas_that_differ_end_the_job_whatever_is_known_of_other_pieces() -> None:
    decision = decide(*replicated(2, {0: {"state": 3}, 3: {"state": 3, "torn": True}}))
    assert decision.verdict == "undecided"
    assert decision.mismatch is not None
    assert (decision.mismatch.ranks, decision.mismatch.involved) == ((), (0, 2))


def test_a_state_that_differs_counts_before_numbers_that_are_not_finite() -> None:
    """A flipped weight can make every gradient overflow."""
    suspicion, rows_of_ranks = replicated(3, {2: {"state": 3}})
    decision = decide(suspicion, [row._replace(finite=False) for row in rows_of_ranks])
    assert (decision.verdict, decision.ranks) == ("rank", (2,))


def test_an_heir_has_no_vote_against_two_that_are_none() -> None:
    """The heir may have copied a corrupt state from the minority."""
    differing = {0: {"state": 3}, 2: {"state": 3, "heir": True}}
    decision = decide(*replicated(4, differing))
    assert (decision.verdict, decision.ranks) == ("rank", (0, 2))


def test_a_damaged_gradient_is_computed_again_and_costs_a_rank_the_third_time() -> None:
    suspicion, rows_of_ranks = replicated(3, {2: {"digest": 9}})
    verdicts = [decide(suspicion, rows_of_ranks, step).verdict for step in (1, 5, 9)]
    assert verdicts == ["repeat", "repeat", "rank"]


def test_damaged_gradients_of_long_ago_are_forgotten() -> None:
    suspicion, rows_of_ranks = replicated(3, {2: {"digest": 9}})
    assert {decide(suspicion, rows_of_ranks, 200 * number).verdict for number in range(5)} == {
        "repeat"
    }


def test_two_replicas_whose_gradients_keep_differing_in_one_step_end_the_job() -> None:
    suspicion, rows_of_ranks = replicated(2, {2: {"digest": 9}})
    verdicts = [decide(suspicion, rows_of_ranks).verdict for _ in range(3)]
    assert verdicts == ["repeat", "repeat", "undecided"]
    suspicion, rows_of_ranks = replicated(2, {2: {"digest": 9}})
    assert {decide(suspicion, rows_of_ranks, step).verdict for step in range(5)} == {"repeat"}


def test_gradients_are_compared_as_often_as_the_setting_says() -> None:
    _, table = replicated(3, {2: {"digest": 9}})
    pieces = [rank % 2 for rank in range(6)]
    assert [decide(RankOrBatch(pieces, every), table, 6).verdict for every in (0, 3, 4)] == [
        "commit",
        "repeat",
        "commit",
    ]


def test_all_conclude_the_same_from_what_was_found() -> None:
    decision = decide(*replicated(3, {2: {"digest": 9}}))
    assert decision.mismatch == voting.SuspectRanks("reduced gradient", (2,), (2,))


# -- the step that is kept -------------------------------------------------------------------------


class Owner:
    """A rank that copies each state into two slots, or leaves it out, and learns sooner or later
    that it counts.
    """

    def __init__(self) -> None:
        self.slots = Slots()
        self.slots.reserve(1)
        self.protected = -1

    def copy(self, step: int, kept: int) -> None:
        try:
            image = self.slots.take(kept)
        except Busy:
            return
        image.begin(step, 1, b"", b"", 1)
        image.end("00" * 16)
        self.slots.give_back(image)

    @property
    def steps(self) -> set[int]:
        return {seal.step for _, seal in self.slots.complete()}


@given(
    st.lists(
        st.lists(st.sampled_from(["in time", "late", "left out"]), min_size=3, max_size=3),
        max_size=12,
    )
)
def test_a_step_that_is_kept_is_kept_by_all(history: list[list[str]]) -> None:
    """The kept step does not depend on the copies that a rank leaves out, nor on the delay of its
    news of copies.
    """
    owners, kept = [Owner() for _ in range(3)], -1
    for step, happens in enumerate([*history, *[["in time"] * 3] * 2]):
        for owner, outcome in zip(owners, happens, strict=True):
            late = max(owner.steps, default=-1)  # by now the rank knows of earlier copies
            if outcome != "left out":
                owner.copy(step, kept)
            owner.protected = max(
                owner.protected, step if outcome == "in time" and step in owner.steps else late
            )
        kept = whole_step(kept, step, [owner.protected for owner in owners])
        assert kept == -1 or all(kept in owner.steps for owner in owners)
    assert kept == step, "when all is well again the newest is kept"


def test_without_copies_elsewhere_the_two_newest_of_each_are_worth_most() -> None:
    assert whole_step(3, 4, [4, 4, -1]) == -1, (
        "a partner was lost: the time until there is another is unknown"
    )
    assert whole_step(3, 7, [7, 6, 7]) == 3
    assert whole_step(3, 8, [8, 7, 8]) == -1
