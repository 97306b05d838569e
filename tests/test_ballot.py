"""What the ranks of a sharded job conclude from each other's rows: a bad rank is told from a bad batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.checkpoint.slots import Busy, Slots
from chaoskit.runtime.ballot import Decision, Row, Suspicion, gather, share, whole_step

STEP = 7


def owners(world: int, shift: int) -> list[tuple[int, ...]]:
    """One shard a rank; every rank has that of the rank ``shift`` places further."""
    return [((rank + shift) % world,) for rank in range(world)]


def rows(world: int, shift: int, bad: set[int], *, healthy: bool = True) -> list[Row]:
    """What the ranks say when the shards in ``bad`` gave NaN: then nobody's sum is finite."""
    return [
        Row(
            healthy=healthy,
            finite=not bad,
            protected=STEP,
            digest=rank,
            losses=[(math.nan if s in bad else 1.0) if s in owners(world, shift)[rank] else None for s in range(world)],
        )
        for rank in range(world)
    ]


def attempts(world: int, bad_rank: set[int], bad_shard: set[int], *, once: bool = False) -> list[Decision]:
    """The decisions until one is no repetition."""
    suspicion, decisions, shift = Suspicion(), list[Decision](), 0
    while not decisions or decisions[-1].verdict == "repeat":
        faulty = not (once and decisions)
        bad = {shard for rank, (shard,) in enumerate(owners(world, shift)) if rank in bad_rank or shard in bad_shard}
        decisions.append(suspicion.decide(STEP, owners(world, shift), rows(world, shift, bad if faulty else set())))
        shift = decisions[-1].shift
        assert len(decisions) < 10
    return decisions


def test_finite_numbers_are_committed_at_once() -> None:
    assert [one.verdict for one in attempts(4, set(), set())] == ["commit"]


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
def test_what_comes_once_costs_repetitions_and_is_committed_as_usual(world: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    decisions = attempts(world, {rank}, set(), once=True)
    assert [one.verdict for one in decisions] == ["repeat", "repeat", "commit"]
    assert [one.shift for one in decisions] == [1, 0, 0]  # the bits of a sum depend on who computed what


def test_broken_weights_are_their_ranks_fault() -> None:
    found = rows(3, 0, {1})
    found[1] = found[1]._replace(healthy=False)
    assert Suspicion().decide(STEP, owners(3, 0), found) == Decision("rank", ranks=(1,))


def test_a_sum_that_overflows_is_the_batchs_fault() -> None:
    suspicion = Suspicion()
    found = [row._replace(finite=False) for row in rows(2, 0, set())]
    assert suspicion.decide(STEP, owners(2, 0), found).verdict == "repeat"
    assert suspicion.decide(STEP, owners(2, 1), found).verdict == "batch"


def test_every_step_begins_without_a_suspicion() -> None:
    suspicion = Suspicion()
    suspicion.decide(STEP, owners(2, 0), rows(2, 0, {1}))
    assert suspicion.decide(STEP + 1, owners(2, 0), rows(2, 0, set())) == Decision("commit")


@pytest.mark.parametrize("loss", [0.1, -math.inf, math.inf, 1e300, 5e-324])
def test_a_row_comes_through_as_it_was(loss: float) -> None:
    row = Row(healthy=True, finite=False, protected=-1, digest=2**32 - 1, losses=[loss, None])
    assert share(None, row) == [row]


def test_one_rank_gathers_its_own_value() -> None:
    assert gather(None, b"\x00\xff") == [b"\x00\xff"]


# -- the step that is kept ----------------------------------------------------------------------------------------


class Owner:
    """A rank that copies each state into two slots, or lets it out, and hears sooner or later that it counts."""

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


@given(st.lists(st.lists(st.sampled_from(["in time", "late", "left out"]), min_size=3, max_size=3), max_size=12))
def test_a_step_that_is_kept_is_kept_by_all(history: list[list[str]]) -> None:
    """Whatever any rank lets out, and however late it hears of its copies."""
    owners, kept = [Owner() for _ in range(3)], -1
    for step, happens in enumerate([*history, *[["in time"] * 3] * 2]):
        for owner, what in zip(owners, happens, strict=True):
            late = max(owner.steps, default=-1)  # by now it has heard of what came before
            if what != "left out":
                owner.copy(step, kept)
            owner.protected = max(owner.protected, step if what == "in time" and step in owner.steps else late)
        kept = whole_step(kept, step, [owner.protected for owner in owners])
        assert kept == -1 or all(kept in owner.steps for owner in owners)
    assert kept == step, "when all is well again the newest is kept"


def test_without_copies_elsewhere_the_two_newest_of_each_are_worth_most() -> None:
    assert whole_step(3, 4, [4, 4, -1]) == -1, "a partner was lost: nobody knows how long it takes to have another"
    assert whole_step(3, 7, [7, 6, 7]) == 3
    assert whole_step(3, 8, [8, 7, 8]) == -1
