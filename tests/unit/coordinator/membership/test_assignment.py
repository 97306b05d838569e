"""Tests of the assignment of ranks and shards: balance, shards that survivors keep, sums that fold
locally.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.examples import examples

from chaoskit.coordinator.membership.assignment import fit, reassign, seat

Assignment = dict[str, tuple[int, ...]]


def everything(assignment: Assignment) -> list[int]:
    return sorted(shard for shards in assignment.values() for shard in shards)


def test_from_scratch_gives_contiguous_blocks_by_rank() -> None:
    assert reassign({}, ["a", "b", "c"], 8) == {"a": (0, 1, 2), "b": (3, 4, 5), "c": (6, 7)}


def test_only_strangers_is_from_scratch() -> None:
    assert reassign({"gone": (0, 1)}, ["a", "b"], 2) == {"a": (0,), "b": (1,)}


def test_more_members_than_shards_leaves_some_without() -> None:
    assert reassign({}, ["a", "b", "c"], 2) == {"a": (0,), "b": (1,), "c": ()}


def test_a_replacement_gets_the_heavier_load_of_the_dead_one() -> None:
    before = {"a": (0, 1, 2), "b": (3, 4), "c": (5, 6)}
    assert reassign(before, ["spare", "b", "c"], 7) == {
        "spare": (0, 1, 2),
        "b": (3, 4),
        "c": (5, 6),
    }


def test_orphans_go_to_the_owner_of_the_sibling_subtree() -> None:
    before = {"a": (0, 1), "b": (2, 3), "c": (4, 5), "d": (6, 7)}
    assert 6 in reassign(before, ["a", "b", "d"], 8)["d"]
    assert 4 in reassign(before, ["a", "b", "d"], 8)["d"]
    assert reassign({"a": (0,), "b": (1,), "c": (2,), "d": (3,)}, ["a", "b", "d"], 4)["d"] == (2, 3)


def test_a_survivor_that_must_give_keeps_its_largest_subtree() -> None:
    assert reassign({"a": (1, 2, 3), "b": (0,)}, ["a", "b"], 4)["a"] == (2, 3)


def test_survivors_keep_their_rank_and_a_spare_takes_the_dead_ones() -> None:
    seats = [("n0.0", "n0"), ("n1.0", "n1"), ("n2.0", "n2")]
    ranks = seat(seats, {"n0.0": "n0", "n2.0": "n2"}, {"n0.1": "n0", "n1.1": "n1"}, 3)
    assert ranks == ["n0.0", "n1.1", "n2.0"]


def test_of_equal_spares_the_lowest_name_is_taken() -> None:
    seats = [("n0.0", "n0"), ("n1.0", "n1")]
    assert seat(seats, {"n0.0": "n0"}, {"n0.10": "n0", "n0.9": "n0"}, 2) == ["n0.0", "n0.9"]


def test_highest_ranks_fill_the_holes_of_a_shrinking_world() -> None:
    seats = [(f"n{rank}.0", f"n{rank}") for rank in range(5)]
    assert seat(seats, {"n1.0": "n1", "n3.0": "n3", "n4.0": "n4"}, {}, 5) == [
        "n4.0",
        "n1.0",
        "n3.0",
    ]


def test_newcomers_sit_down_where_a_rank_of_their_node_was_lost() -> None:
    seats = [("n0.0", "n0"), ("n2.0", "n2"), ("n1.0", "n1")]
    assert seat(seats, {"n0.0": "n0"}, {"n1.1": "n1", "n2.1": "n2"}, 3) == ["n0.0", "n2.1", "n1.1"]


def test_a_member_that_joined_meanwhile_is_kept_before_a_better_spare() -> None:
    seats = [("n0.0", "n0"), ("n1.0", "n1")]
    assert seat(seats, {"n0.0": "n0", "n0.1": "n0"}, {"n1.1": "n1"}, 2) == ["n0.0", "n0.1"]


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[list[str]]]:
    """A number of shards, and the members of some generations."""
    shard_count = draw(st.integers(1, 24))
    names = st.lists(
        st.sampled_from("abcdefghij"), min_size=1, max_size=min(shard_count, 8), unique=True
    )
    return shard_count, draw(st.lists(names, min_size=1, max_size=6))


@settings(max_examples=examples(600), deadline=None, database=None)
@given(histories())
def test_every_assignment_is_complete_balanced_and_keeps_what_it_can(
    history: tuple[int, list[list[str]]],
) -> None:
    shard_count, worlds = history
    before: Assignment = {}
    for members in worlds:
        after = reassign(before, members, shard_count)
        assert list(after) == members
        assert everything(after) == list(range(shard_count))
        loads = [len(shards) for shards in after.values()]
        assert max(loads) - min(loads) <= 1
        assert after == {member: tuple(sorted(shards)) for member, shards in after.items()}
        least, extras = divmod(shard_count, len(members))
        held = [len(before.get(member, ())) for member in members]
        possible = sum(min(load, least) for load in held) + min(
            extras, sum(load > least for load in held)
        )
        kept = sum(len(set(before.get(member, ())) & set(after[member])) for member in members)
        assert kept == possible, "a survivor lost a shard without need"
        before = after


@settings(max_examples=examples(300), deadline=None, database=None)
@given(histories(), st.data())
def test_replacing_workers_one_to_one_moves_only_their_shards(
    history: tuple[int, list[list[str]]], data: st.DataObject
) -> None:
    shard_count, worlds = history
    before: Assignment = {}
    for members in worlds:
        before = reassign(before, members, shard_count)
    dead = data.draw(st.sampled_from(worlds[-1]))
    after = reassign(
        before, ["new" if member == dead else member for member in worlds[-1]], shard_count
    )
    if len(worlds[-1]) > 1:
        assert after == {
            "new" if member == dead else member: shards for member, shards in before.items()
        }


def test_shares_are_kept_as_far_as_they_go() -> None:
    before = {"a": (0, 1, 2, 3), "b": (4, 5, 6, 7), "c": (8, 9, 10, 11)}
    after = reassign(before, ["a", "b", "c"], 12, {"a": 5, "b": 2, "c": 5})
    assert after == {"a": (0, 1, 2, 3, 6), "b": (4, 5), "c": (7, 8, 9, 10, 11)}
    assert reassign({}, ["a", "b", "c"], 12, {"a": 5, "b": 2, "c": 5})["b"] == (5, 6)


def test_newcomers_get_the_mean_of_those_who_stay() -> None:
    shares = {"a": 2, "b": 5, "c": 5, "d": 4}
    assert fit(shares, ["a", "b", "c", "d"], 16) == shares
    assert fit(shares, ["a", "b", "c"], 24) == {"a": 4, "b": 10, "c": 10}
    assert fit(shares, ["a", "b", "new", "d"], 16) == {"a": 2, "b": 6, "new": 4, "d": 4}
    assert fit(shares, ["new", "b", "c"], 16) is None, "those who are left were alike"
    assert fit(shares, ["x", "y"], 16) is None
    assert fit({}, ["a"], 16) is None
    assert fit({"a": 1, "b": 9}, ["a", "b", *"cdefghij"], 10) == dict.fromkeys(
        ["a", "b", *"cdefghij"], 1
    )
    assert fit({"a": 1, "b": 9}, ["a", "b", "c"], 2) is None, "not everybody can have a shard"


@settings(max_examples=examples(600), deadline=None, database=None)
@given(histories(), st.data())
def test_shares_are_honoured_and_survivors_keep_what_they_allow(
    history: tuple[int, list[list[str]]], data: st.DataObject
) -> None:
    shard_count, worlds = history
    before: Assignment = {}
    shares_before: dict[str, int] = {}
    for members in worlds:
        if data.draw(st.booleans()):
            cuts = (
                sorted(
                    data.draw(
                        st.sets(
                            st.integers(1, shard_count - 1),
                            min_size=len(members) - 1,
                            max_size=len(members) - 1,
                        )
                    )
                )
                if len(members) > 1
                else []
            )
            edges = [0, *cuts, shard_count]
            shares_before = {
                member: edges[rank + 1] - edges[rank] for rank, member in enumerate(members)
            }
        shares = fit(shares_before, members, shard_count)
        after = reassign(before, members, shard_count, shares)
        assert everything(after) == list(range(shard_count))
        assert list(after) == members
        assert min(map(len, after.values())) >= 1
        if shares is not None:
            assert {member: len(shards) for member, shards in after.items()} == shares
            if set(shares_before) == set(members):
                assert shares == shares_before
            for member in members:
                held = set(before.get(member, ()))
                assert len(held & set(after[member])) == min(len(held), shares[member]) or not any(
                    before.get(survivor) for survivor in members
                )
        before = after


@settings(max_examples=examples(400), deadline=None, database=None)
@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 30), min_size=1),
    st.integers(0, 40),
    st.data(),
)
def test_fitted_shares_are_complete_and_in_proportion(
    shares: dict[str, int], more: int, data: st.DataObject
) -> None:
    members = data.draw(st.lists(st.sampled_from("abcdefghijkl"), min_size=1, unique=True))
    shard_count = len(members) + more
    fitted = fit(shares, members, shard_count)
    earlier = [shares[member] for member in members if member in shares]
    assert (fitted is None) == (len(set(earlier)) < 2)
    if fitted is None:
        return
    assert sum(fitted.values()) == shard_count
    assert min(fitted.values()) >= 1
    mean = sum(earlier) / len(earlier)
    weights = {member: shares.get(member, mean) for member in members}
    part = shard_count / sum(weights.values())
    if min(weights.values()) * part >= 1:  # else some must give what the least take
        assert all(abs(fitted[member] - weight * part) < 1 for member, weight in weights.items())


@settings(max_examples=examples(300), deadline=None, database=None)
@given(st.integers(1, 6), st.data())
def test_seats_are_complete_and_hold_every_member(size: int, data: st.DataObject) -> None:
    seats = [
        (f"n{rank}.{rank}", f"n{data.draw(st.integers(0, 3))}")
        for rank in range(data.draw(st.integers(1, size)))
    ]
    joined = {f"m.{number}": f"n{number % 4}" for number in range(data.draw(st.integers(0, size)))}
    alive = dict(data.draw(st.lists(st.sampled_from(seats), unique=True)))
    members = dict(list((alive | joined).items())[:size])
    spares = {f"s.{number}": f"n{number % 4}" for number in range(data.draw(st.integers(0, 4)))}
    assume(members or spares)
    ranks = seat(seats, members, spares, size)
    assert len(ranks) == min(size, len(members) + len(spares))
    assert set(members) <= set(ranks) <= set(members) | set(spares)
    assert max(Counter(ranks).values()) == 1
    kept = [worker for rank, (worker, _) in enumerate(seats[: len(ranks)]) if worker in members]
    assert all(ranks[rank] == worker for rank, (worker, _) in enumerate(seats) if worker in kept)


@settings(max_examples=examples(600), deadline=None, database=None)
@given(st.data())
def test_seats_do_not_depend_on_the_order_of_losses(data: st.DataObject) -> None:
    nodes = st.sampled_from(["n0", "n1", "n2"])
    seats = [(f"n.{number}", data.draw(nodes)) for number in range(data.draw(st.integers(2, 5)))]
    spares = {f"s.{number}": data.draw(nodes) for number in range(data.draw(st.integers(0, 4)))}
    everybody = dict(seats) | spares
    lost = data.draw(
        st.lists(st.sampled_from(sorted(everybody)), max_size=len(everybody) - 1, unique=True)
    )
    alive = {worker: node for worker, node in everybody.items() if worker not in lost}
    members = {worker: node for worker, node in seats if worker in alive}
    at_once = seat(
        seats, members, {worker: alive[worker] for worker in spares if worker in alive}, len(seats)
    )

    alive, ranks = dict(everybody), [worker for worker, _ in seats]
    for worker in lost:
        del alive[worker]
        members = {worker: alive[worker] for worker in ranks if worker in alive}
        ranks = seat(
            seats,
            members,
            {w: alive[w] for w in spares if w in alive and w not in members},
            len(seats),
        )
    assert ranks == at_once
