"""Votes of ranks: the ranks that are called corrupt, and those that never are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chaoskit.runtime.integrity.mistakes import Mistakes
from chaoskit.runtime.integrity.voting import (
    RankSeal,
    SuspectRanks,
    audit_at,
    blamed,
    examine,
    judge,
    outvoted,
    panel,
)

WORDS = st.integers(1, 2**62)
WORLDS = st.integers(2, 9)
STATE = "weights, buffers or optimizer state"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_only_a_majority_outvotes(words: list[int]) -> None:
    """The remaining ranks agree on a single word, and are more than half of the voters."""
    guilty = outvoted(words)
    cast = [word for word in words if word]
    agreed = [word for rank, word in enumerate(words) if word and rank not in guilty]
    if guilty:
        assert len(set(agreed)) == 1
        assert 2 * len(agreed) > len(cast)
    elif len(set(cast)) > 1:
        assert all(2 * cast.count(word) <= len(cast) for word in cast)


@given(WORLDS, st.data())
def test_one_corrupt_state_among_three_or_more_is_named(world: int, data: st.DataObject) -> None:
    rank, right, wrong = data.draw(st.integers(0, world - 1)), data.draw(WORDS), data.draw(WORDS)
    seals = [RankSeal(state=wrong if number == rank else right) for number in range(world)]
    suspicion = examine(seals)
    if right == wrong:
        assert suspicion is None
        return
    assert suspicion is not None
    assert suspicion.ranks == ((rank,) if world > 2 else ())
    assert rank in suspicion.involved


@given(WORLDS.filter(lambda world: world % 2 == 0), st.data())
def test_a_tie_is_broken_only_by_who_contradicts_himself(world: int, data: st.DataObject) -> None:
    torn = data.draw(st.lists(st.booleans(), min_size=world, max_size=world))
    seals = [RankSeal(state=1 + (rank < world // 2), torn=int(torn[rank])) for rank in range(world)]
    suspicion = examine(seals)
    assert suspicion is not None
    honest = {seal.state for seal in seals if not seal.torn}
    assert suspicion.ranks == (
        tuple(rank for rank in range(world) if torn[rank]) if len(honest) == 1 else ()
    )


@given(st.integers(4, 9), st.data())
def test_copies_of_a_corrupt_state_do_not_outvote_those_who_have_their_own(
    world: int, data: st.DataObject
) -> None:
    """A single state was corrupt; any number of newcomers copied it, and agreed with it."""
    witnesses = data.draw(st.integers(3, world))
    states = [
        data.draw(st.sampled_from([1, 2])) if rank >= witnesses else 1 + (rank == 0)
        for rank in range(world)
    ]
    suspicion = examine(
        [RankSeal(state=state, heir=int(rank >= witnesses)) for rank, state in enumerate(states)]
    )
    assert suspicion is not None
    assert suspicion.ranks == tuple(rank for rank, state in enumerate(states) if state == 2)


def test_of_three_with_one_heir_nobody_guesses_but_a_lone_survivor_is_outvoted_by_its_copies() -> (
    None
):
    heir = RankSeal(state=2, heir=1)
    assert examine([RankSeal(state=1), RankSeal(state=2), heir]) == SuspectRanks(
        STATE, (), (0, 1, 2)
    )
    assert examine([RankSeal(state=1), heir, heir]) == SuspectRanks(STATE, (0,), (0,))


@given(WORLDS, WORDS, WORDS)
def test_who_has_nothing_to_compare_is_not_outvoted(world: int, state: int, gradient: int) -> None:
    """A rank that took the state from a peer did not compute the last gradient."""
    assert (
        examine([RankSeal(state=state, gradient=gradient * (rank != 1)) for rank in range(world)])
        is None
    )


@given(
    st.lists(st.integers(0, 3), min_size=3, max_size=4).filter(
        lambda words: len({*words} - {0}) > 1
    )
)
def test_gradients_are_put_to_the_vote(words: list[int]) -> None:
    suspicion = examine([RankSeal(state=7, gradient=word) for word in words])
    assert suspicion is not None
    assert suspicion.ranks == outvoted(words)


@given(
    WORLDS.flatmap(
        lambda world: st.lists(st.integers(-1, world - 1), min_size=world, max_size=world)
    )
)
def test_complaints_never_convict_everybody_nor_whom_nobody_named(complaints: list[int]) -> None:
    guilty = blamed(complaints)
    assert len(guilty) < len(complaints)
    for rank in guilty:
        assert rank in complaints or complaints[rank] != -1


def test_whom_two_name_is_guilty_and_a_lone_complainer_is() -> None:
    assert blamed([2, 2, -1, -1]) == (2,)
    assert blamed([-1, 3, -1, -1]) == (1,)
    assert blamed([-1, 0, -1]) == blamed([-1, 1, -1]) == (1,)
    assert blamed([-1, -1]) == ()


def test_who_complains_of_a_rank_that_complains_of_itself_is_innocent() -> None:
    assert blamed([1, 1, -1]) == (1,)
    assert blamed([1, 1, 3, -1]) == (1, 2)


COMPLAINTS = st.integers(2, 9).flatmap(
    lambda world: st.tuples(
        st.lists(st.integers(-1, world - 1), min_size=world, max_size=world),
        st.sets(st.integers(0, world - 1), min_size=1),
    )
)


@given(COMPLAINTS)
def test_where_a_complaint_is_not_known_only_two_accusers_convict(
    drawn: tuple[list[int], set[int]],
) -> None:
    """A rank named once, and a lone complainer, stay innocent; every rank with more knowledge
    agrees.
    """
    complaints, unread = drawn
    guilty = blamed(complaints, unread)
    read = {rank: accused for rank, accused in enumerate(complaints) if rank not in unread}
    accusers = {
        number: [rank for rank, accused in read.items() if accused == number != rank]
        for number in range(len(complaints))
    }
    assert guilty == tuple(rank for rank, complainants in accusers.items() if len(complainants) > 1)
    assert {*guilty} <= {*blamed(complaints)}


@given(st.integers(4, 9), st.data())
def test_whom_all_others_name_is_convicted_though_one_of_them_is_not_read(
    world: int, data: st.DataObject
) -> None:
    rank, other = data.draw(st.permutations(range(world)))[:2]
    complaints = [rank] * world
    complaints[rank] = data.draw(st.integers(-1, world - 1))
    assert blamed(complaints, {other}) == blamed(complaints) == (rank,)


def test_of_two_only_who_complains_of_itself_is_guilty() -> None:
    """A rank that complains of the other may read badly, or the other may send badly."""
    assert blamed([1, -1]) == blamed([-1, 0]) == blamed([1, 0]) == ()
    assert blamed([-1, 1]) == blamed([1, 1]) == (1,)
    assert blamed([0, -1]) == blamed([0, 0]) == (0,)
    assert blamed([0, 1]) == ()
    assert examine([RankSeal(complaint=2), RankSeal()]) is None


@given(st.integers(1, 50), st.lists(st.integers(0, 60), max_size=30))
def test_mistakes_far_apart_do_not_add_up(memory_steps: int, gaps: list[int]) -> None:
    mistakes, step, run = Mistakes(memory_steps), 0, 0
    for gap in gaps:
        step, run = step + gap, (0 if gap > memory_steps else run) + 1
        mistakes.add(["bad"], step)
        assert (mistakes.count("bad", step), mistakes.count("good", step)) == (run, 0)
        assert mistakes.count("bad", step + memory_steps) == run
        assert mistakes.count("bad", step + memory_steps + 1) == 0


@given(st.integers(0, 500), st.integers(1, 7), st.integers(2, 6), st.integers(0, 4))
def test_an_audit_has_two_ranks_and_a_referee_beside_them(
    step: int, every: int, world: int, more: int
) -> None:
    ownership = [list(range(rank, world + more, world)) for rank in range(world)]
    pair = audit_at(step, every, ownership)
    assert (pair is None) == (step % every != 0)
    if pair is None:
        return
    assert pair.shard in ownership[pair.owner]
    ranks = panel(pair, world)
    assert len({*ranks}) == min(world, 3) == len(ranks)
    assert all(0 <= rank < world for rank in ranks)


def test_audits_come_round_to_every_shard_and_every_pair() -> None:
    audits = {audit_at(step, 1, [[0], [1], [2], [3]]) for step in range(12)}
    assert len({(pair.owner, pair.auditor) for pair in audits if pair}) == 12
    assert audit_at(5, 0, [[0], [1]]) is None
    assert audit_at(4, 4, [[0, 1]]) is None


RIGHT = 7


@given(
    st.sampled_from(["owner", "auditor", "referee"]),
    st.lists(WORDS, min_size=2, max_size=2),
    st.booleans(),
)
def test_with_three_ranks_one_bad_rank_is_always_the_one_that_is_named(
    bad: str, wrong: list[int], transient: bool
) -> None:
    """The rank may be wrong once, always alike or always otherwise; no innocent rank is named."""
    ranks = {"owner": 0, "auditor": 1, "referee": 2}
    first = dict.fromkeys((0, 1), RIGHT)
    second = dict.fromkeys((0, 1, 2), RIGHT)
    if bad != "referee":
        first[ranks[bad]] = wrong[0]
    if first[0] == first[1]:
        return  # then no rank asks
    if not transient:
        second[ranks[bad]] = wrong[1]
    verdict, guilty = judge(first, second)
    assert guilty == (ranks[bad],)
    assert verdict == ("transient" if second[0] == second[1] else "rank")


@given(WORDS, WORDS, WORDS, WORDS)
def test_two_ranks_convict_only_who_contradicts_himself(
    one: int, other: int, again: int, other_again: int
) -> None:
    if one == other:
        return
    verdict, guilty = judge({0: one, 1: other}, {0: again, 1: other_again})
    liars = tuple(rank for rank, lied in ((0, one != again), (1, other != other_again)) if lied)
    if again == other_again:
        assert (verdict, guilty) == ("transient", liars)
    elif len(liars) == 1:
        assert (verdict, guilty) == ("rank", liars)
    else:
        assert (verdict, guilty) == ("undecided", ())


def test_a_referee_that_contradicts_two_is_itself_replaced() -> None:
    assert judge({0: 1, 1: 2}, {0: 2, 1: 2, 2: 3}) == ("rank", (2,))


def test_three_different_words_convict_only_a_lone_liar() -> None:
    assert judge({0: 1, 1: 2}, {0: 1, 1: 3, 2: 4}) == ("rank", (1,))
    assert judge({0: 1, 1: 2}, {0: 1, 1: 2, 2: 4}) == ("undecided", ())
