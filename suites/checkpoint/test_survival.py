"""Tests of the value of a placement, against closed forms and against real losses.

-> checkpoint/peer/copy_placement.py decides which nodes keep the copies of a piece.
"""

from __future__ import annotations

from math import comb

import pytest

from chaoskit import Chaos, Outcome
from chaoskit.checkpoint.peer.copy_placement import Piece, survival_probability
from chaoskit.faults import KillNode
from chaoskit.suites.checkpoint.expect import AT, all_copied, ends, sharded

pytestmark = pytest.mark.costly


def partners(outcome: Outcome) -> dict[str, list[str]]:
    """Return worker -> nodes that keep copies of its piece, from the journal of its agent."""
    first: dict[str, list[str]] = {}
    for record in outcome.records("protected"):
        first.setdefault(record["worker"], record["nodes"])
    return first


def survival(outcome: Outcome, lost: int) -> float:
    """Return the probability that the run's state outlives the loss of so many nodes."""
    placement = partners(outcome)
    pieces = [Piece(worker, worker.split(".")[0]) for worker in placement]
    return survival_probability({piece.node for piece in pieces}, lost, pieces, placement)


def of_pairs(nodes: int, lost: int) -> float:
    """Return the probability, in closed form, that the loss of nodes hits no pair twice."""
    return float(2**lost * comb(nodes // 2, lost) / comb(nodes, lost))


def of_a_ring(nodes: int, lost: int) -> float:
    """Return the probability, in closed form, that the loss of nodes hits no two neighbours."""
    return nodes / (nodes - lost) * comb(nodes - lost, lost) / comb(nodes, lost)


@pytest.mark.slow
@pytest.mark.promise(
    "`exposure` says which pieces lack copies, `survival_probability` what a placement is worth."
)
def test_four_nodes(chaos: Chaos) -> None:
    probability = survival(sharded(chaos, spares=0, goal=all_copied(chaos, 4)), 2)
    assert probability == pytest.approx(of_pairs(4, 2))
    assert probability > of_a_ring(4, 2)


@pytest.mark.slow
def test_eight_nodes(chaos: Chaos) -> None:
    """The probabilities equal the row of the published tables.

    Pairs have 0.857 for two lost nodes and 0.571 for three; a ring has 0.714 and 0.286.
    """
    outcome = sharded(chaos, nodes=8, spares=0, goal=all_copied(chaos, 8))
    assert [round(survival(outcome, lost), 3) for lost in (2, 3)] == [0.857, 0.571]
    assert [round(of_a_ring(8, lost), 3) for lost in (2, 3)] == [0.714, 0.286]


def test_one_node_of_each_pair_may_be_lost_and_not_both(chaos: Chaos) -> None:
    """The loss of both partners is fatal, that of two strangers is not."""
    pair = partners(sharded(chaos, spares=0, goal=all_copied(chaos, 4)))
    partner = int(pair["node0.0"][0].removeprefix("node"))
    other_pair = next(rank for rank in (1, 2, 3) if rank != partner)
    outcome = ends(
        chaos, KillNode(rank=0, at_step=AT), KillNode(rank=partner, at_step=AT), spares=0
    )
    assert any("every replica was lost" in reason for reason in outcome.reasons)
    outcome = ends(
        chaos, KillNode(rank=0, at_step=AT), KillNode(rank=other_pair, at_step=AT), spares=0
    )
    assert len(outcome.steps) == 20
