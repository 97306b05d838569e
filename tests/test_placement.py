"""Where copies lie: never with their owner, in pairs, and where they lay before if that is still good."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaoskit.checkpoint.placement import Node, Piece, Placement, exposure, place, survival_probability
from chaoskit.errors import BadInput


def pieces_on(nodes: list[Node], ranks: int = 1) -> list[Piece]:
    return [Piece(f"{node.name}/{rank}", node.name) for node in nodes for rank in range(ranks)]


def by_node(nodes: list[Node], placement: Placement) -> dict[str, tuple[str, ...]]:
    return {node.name: placement[f"{node.name}/0"] for node in nodes}


@st.composite
def clusters(draw: st.DrawFn) -> list[Node]:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    names = draw(st.permutations(range(sum(sizes))))
    racks = [f"rack{number}" for number, size in enumerate(sizes) for _ in range(size)]
    return [Node(f"node{name:02}", rack) for name, rack in zip(names, racks, strict=True)]


@given(clusters(), st.integers(1, 3), st.integers(1, 2))
def test_no_copy_lies_with_its_owner(nodes: list[Node], copies: int, ranks: int) -> None:
    placement = place(nodes, pieces_on(nodes, ranks), copies)
    assert len(placement) == len(nodes) * ranks
    for piece, partners in placement.items():
        assert piece.split("/")[0] not in partners
        assert len(set(partners)) == len(partners) == min(copies, len(nodes) - 1)
        assert set(partners) <= {node.name for node in nodes}


@given(clusters(), st.integers(1, 3))
def test_the_first_copy_is_in_another_rack(nodes: list[Node], copies: int) -> None:
    racks = dict(nodes)
    if len(set(racks.values())) == 1:
        return
    for name, partners in by_node(nodes, place(nodes, pieces_on(nodes), copies)).items():
        assert racks[partners[0]] != racks[name]


@given(clusters(), st.integers(1, 3))
def test_all_copies_are_in_other_racks_if_racks_allow_it(nodes: list[Node], copies: int) -> None:
    racks = dict(nodes)
    if max(Counter(racks.values()).values()) > len(nodes) // (copies + 1):
        return
    for name, partners in by_node(nodes, place(nodes, pieces_on(nodes), copies)).items():
        assert len({racks[name], *(racks[partner] for partner in partners)}) == copies + 1


@given(st.integers(2, 40), st.integers(1, 3))
def test_without_racks_cells_are_disjoint_and_load_is_even(count: int, copies: int) -> None:
    nodes = [Node(f"node{number:02}") for number in range(count)]
    partners = by_node(nodes, place(nodes, pieces_on(nodes), copies))
    load = Counter(itertools.chain.from_iterable(partners.values()))
    assert max(load.values()) - min(load[node.name] for node in nodes) <= 1
    if count % (copies + 1) == 0:
        for name, chosen in partners.items():
            assert all({name, *chosen} == {other, *partners[other]} for other in chosen)


@given(clusters())
def test_pairs_are_symmetric_but_for_one_triple(nodes: list[Node]) -> None:
    racks = Counter(node.rack for node in nodes)
    if len(nodes) < 2 or (len(racks) > 1 and max(racks.values()) > len(nodes) // 2):
        return
    partners = by_node(nodes, place(nodes, pieces_on(nodes)))
    one_sided = [name for name, (other,) in partners.items() if partners[other] != (name,)]
    assert len(one_sided) <= (3 if len(nodes) % 2 else 0)
    assert max(Counter(other for (other,) in partners.values()).values()) <= 2


@given(clusters(), st.integers(1, 3), st.randoms())
def test_order_does_not_matter(nodes: list[Node], copies: int, chance: random.Random) -> None:
    shuffled = chance.sample(nodes, len(nodes))
    assert place(nodes, pieces_on(nodes), copies) == place(shuffled, pieces_on(shuffled), copies)


@given(clusters(), st.integers(1, 3))
def test_nothing_moves_when_nothing_changes(nodes: list[Node], copies: int) -> None:
    before = place(nodes, pieces_on(nodes), copies)
    assert place(nodes, pieces_on(nodes), copies, before) == before


@settings(max_examples=200)
@given(st.integers(2, 5), st.integers(2, 6), st.data())
def test_few_copies_move_when_a_node_is_replaced(racks: int, each: int, data: st.DataObject) -> None:
    """One is lost, then another one comes: only those around it move."""
    nodes = [Node(f"node{number:02}", f"rack{number % racks}") for number in range(racks * each)]
    before = place(nodes, pieces_on(nodes))
    gone = data.draw(st.sampled_from(nodes))
    left = [node for node in nodes if node != gone]
    between = place(left, pieces_on(left), before=before)
    assert moved(before, between) <= 4
    back = [*left, Node("node99", data.draw(st.sampled_from(nodes)).rack)]
    after = place(back, pieces_on(back), before=between)
    assert moved(between, after) <= 6
    for name, (partner,) in by_node(back, after).items():
        assert dict(back)[partner] != dict(back)[name]


def moved(before: Placement, after: Placement) -> int:
    """Copies that must be sent."""
    return sum(len(set(partners) - set(before.get(piece, ()))) for piece, partners in after.items())


def test_without_racks_one_loss_moves_one_copy() -> None:
    nodes = [Node(f"node{number}") for number in range(8)]
    before = place(nodes, pieces_on(nodes))
    after = place(nodes[1:], pieces_on(nodes[1:]), before=before)
    assert moved(before, after) == 1
    again = place([*nodes[1:], Node("new")], pieces_on([*nodes[1:], Node("new")]), before=after)
    assert moved(after, again) == 2  # the one that was left alone, and the new one


def test_a_rack_that_holds_most_nodes_copies_to_the_others() -> None:
    nodes = [Node("a", "one"), Node("b", "one"), Node("c", "one"), Node("d", "two")]
    assert by_node(nodes, place(nodes, pieces_on(nodes))) == {"a": ("d",), "b": ("d",), "c": ("d",), "d": ("a",)}


def test_copies_leave_their_parallel_groups() -> None:
    """HSDP: two shard groups over two nodes each; the replicas of a shard are two nodes apart."""
    nodes = [Node(f"node{number}") for number in range(4)]
    groups = {
        0: ("shard0", "replica0"),
        1: ("shard0", "replica1"),
        2: ("shard1", "replica0"),
        3: ("shard1", "replica1"),
    }
    pieces = [Piece(f"node{number}/0", f"node{number}", groups[number]) for number in range(4)]
    assert by_node(nodes, place(nodes, pieces)) == {
        "node0": ("node3",),
        "node1": ("node2",),
        "node2": ("node1",),
        "node3": ("node0",),
    }


@given(st.integers(2, 12), st.integers(1, 4))
def test_no_partner_in_ones_own_group_where_groups_are_small(count: int, size: int) -> None:
    """``count`` shard groups of ``size`` nodes."""
    nodes = [Node(f"node{number:02}") for number in range(count * size)]
    pieces = [Piece(f"{node.name}/0", node.name, (f"shard{number // size}",)) for number, node in enumerate(nodes)]
    placed = by_node(nodes, place(nodes, pieces))
    for number, node in enumerate(nodes):
        (partner,) = placed[node.name]
        assert int(partner.removeprefix("node")) // size != number // size


def test_a_group_of_all_nodes_is_no_hindrance() -> None:
    nodes = [Node(f"node{number}") for number in range(6)]
    pieces = [Piece(f"{node.name}/0", node.name, ("world",)) for node in nodes]
    assert place(nodes, pieces) == place(nodes, pieces_on(nodes))


def test_one_node_has_no_partner() -> None:
    pieces = [Piece("a/0", "a")]
    assert place([Node("a")], pieces) == {"a/0": ()}
    assert exposure(pieces, 1, {}) == {"a/0": 1}


def test_bad_input() -> None:
    with pytest.raises(BadInput, match="use 1 or more"):
        place([Node("a")], [], 0)
    with pytest.raises(BadInput, match="a node that is there"):
        place([Node("a")], [Piece("p", "b")])


def test_exposure() -> None:
    pieces = [Piece("p", "a"), Piece("q", "b"), Piece("r", "c")]
    verified = {"p": ["b", "c"], "q": ["a", "b"]}
    assert exposure(pieces, 1, verified) == {"r": 1}
    assert exposure(pieces, 2, verified) == {"q": 1, "r": 2}


# -- what pairs are worth -------------------------------------------------------------------------------------------


def ring(nodes: list[Node]) -> Placement:
    return {f"{node.name}/0": (nodes[(number + 1) % len(nodes)].name,) for number, node in enumerate(nodes)}


@pytest.mark.parametrize(
    ("count", "lost", "pairs", "next_neighbour"),
    [
        (8, 2, 0.857, 0.714),
        (8, 3, 0.571, 0.286),
        (16, 2, 0.933, 0.867),
        (16, 3, 0.800, 0.629),
        (64, 2, 0.984, 0.968),
        pytest.param(64, 4, 0.906, 0.819, marks=pytest.mark.slow),
        (256, 2, 0.996, 0.992),
        (256, 4, 0.977, 0.954),
    ],
)
def test_pairs_survive_more_than_a_ring(count: int, lost: int, pairs: float, next_neighbour: float) -> None:
    """Against numbers that were computed elsewhere. Of the ring of 256 only samples are taken."""
    nodes = [Node(f"node{number:03}") for number in range(count)]
    pieces, names = pieces_on(nodes), [node.name for node in nodes]
    assert survival_probability(names, lost, pieces, place(nodes, pieces)) == pytest.approx(pairs, abs=6e-4)
    tolerance = 0.003 if (count, lost) == (256, 4) else 6e-4
    found = survival_probability(names, lost, pieces, ring(nodes))
    assert found == pytest.approx(next_neighbour, abs=tolerance)


@given(clusters(), st.integers(1, 2), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_the_probability_is_that_of_all_sets(nodes: list[Node], copies: int, lost: int) -> None:
    if lost > len(nodes):
        return
    pieces, names = pieces_on(nodes), [node.name for node in nodes]
    placement = place(nodes, pieces, copies)
    sets = list(itertools.combinations(names, lost))
    survived = [all(not {piece.node, *placement[piece.name]} <= set(gone) for piece in pieces) for gone in sets]
    assert survival_probability(names, lost, pieces, placement) == pytest.approx(sum(survived) / len(sets))
