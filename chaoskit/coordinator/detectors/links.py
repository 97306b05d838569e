"""Tests of the connections between nodes, and the choice of nodes to leave out when some fail.

A pure state machine. A coordinator sees only its own links. When all ranks wait for each other, and
no rank is late or to blame, the nodes are asked to test their links. If some links are broken, the
largest set of nodes that all reach each other continues. The other nodes are left out until they
reach all of these again.

A connection to a node that has ended fails, too, and the coordinator may learn of the end later
than of the failed connection. So both nodes of a broken link are asked once more before one is left
out: a node that has ended is lost, and no other node is left out in its place.

-> agent/agent.py and agent/dial.py make the connections;
coordinator/handlers/on_measurement.py decides when to test, and commits the decisions. Slow links:
coordinator/detectors/link_speed.py; links of new nodes: newcomers.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from chaoskit.coordinator.membership.events import LeftOut, Readmitted
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.outputs import Send
from chaoskit.wire.messages import AgentHello, TestLinks

#: Ranks that have all waited this long may be unable to reach each other. A wrong guess costs one
#: connection a link.
SUSPECT_S = 0.5
#: Time for which links are tested after a generation broke and no loss explains it.
SUSPICION_S = 2.0
#: The nodes have this long to answer: their own attempts take less.
ANSWER_S = 1.0
#: Pause between two tests, while there is still a reason for them.
AGAIN_S = 0.5

Pair = frozenset[str]


@dataclass
class _Test:
    """A question to some nodes, and their answers.

    Attributes:
        number: the number of the test.
        asked_nodes: the nodes that are to answer.
        since_s: when the test began.
        answers: node -> the nodes that it could not connect to.
        confirmed_test: the test that this one confirms, as it has found broken links. The nodes of
            these links are asked to answer once more, and test no links. None for a first test.
        is_sent: the nodes were asked.
    """

    number: int
    asked_nodes: tuple[str, ...]
    since_s: float
    answers: dict[str, frozenset[str]] = field(default_factory=dict)
    confirmed_test: _Test | None = None
    is_sent: bool = True

    @property
    def broken_links(self) -> set[Pair]:
        """The pairs in which one node could not connect to the other, by the first test."""
        answers = self.confirmed_test.answers if self.confirmed_test is not None else self.answers
        return {frozenset((node, other)) for node, others in answers.items() for other in others}


class Links:
    """Tests of the links between nodes, one at a time, and the decision which nodes are left out.

    Args:
        first: the numbers of the tests start above it; lower ones may belong to another
            coordinator.
    """

    def __init__(self, first: int = 0) -> None:
        self._count = first
        self._test: _Test | None = None
        self._last_test_s = -math.inf
        self._answering_nodes: frozenset[str] = frozenset()  # the nodes that answered the last test
        self._addresses: dict[str, tuple[str, int]] = {}  # node -> where others can connect to it

    def introduce(self, hello: AgentHello) -> None:
        """Take in the address of a node that has connected."""
        self._addresses[hello.node] = (hello.host, hello.port)

    def test(self, membership: Membership, attached: Collection[str], now_s: float) -> list[Send]:
        """Return the orders of the next test of links between nodes with ranks, or left out.

        Nodes that are not ``attached`` take no part.

        There are none while a test is under way, for :data:`AGAIN_S` after one, and for fewer than
        two nodes. A second question that :meth:`judge` has prepared is returned first.
        """
        if (test := self._test) is not None and not test.is_sent:
            test.is_sent = True
            return [Send(node, TestLinks(test.number, ())) for node in test.asked_nodes]
        asked_nodes = tuple(sorted(_nodes_to_ask(membership).intersection(attached)))
        if self._test is not None or now_s < self._last_test_s + AGAIN_S or len(asked_nodes) < 2:
            return []
        self._count += 1
        self._test = _Test(self._count, asked_nodes, now_s)
        addresses = [(node, *self._addresses[node]) for node in asked_nodes]
        others = {
            node: tuple(address for address in addresses if address[0] != node)
            for node in asked_nodes
        }
        return [Send(node, TestLinks(self._count, others[node])) for node in asked_nodes]

    def answer(self, node: str, number: int, unreachable: Iterable[str]) -> None:
        """Take in the nodes that ``node`` could not reach in the test of this number.

        Answers to other tests, and of nodes that were not asked, are ignored.
        """
        if (
            self._test is not None
            and self._test.number == number
            and node in self._test.asked_nodes
        ):
            self._test.answers[node] = frozenset(unreachable)

    def judge(
        self, membership: Membership, attached: Collection[str], now_s: float, *, stuck: bool
    ) -> list[LeftOut | Readmitted]:
        """Return the decisions that follow from the last test, once, as soon as it is over.

        A test that finds broken links is first confirmed by a second question to their nodes. One
        node at most is readmitted. If no other node has a rank, all attached nodes are readmitted.

        Args:
            attached: nodes with a connection to the coordinator.
            stuck: the ranks still wait for each other; if False, no node is left out.
        """
        ranked_nodes = _nodes_to_ask(membership) - {*membership.left_out}
        if not ranked_nodes:  # no other node is left for a test
            returned_nodes = tuple(node for node in membership.left_out if node in attached)
            return [Readmitted(returned_nodes)] if returned_nodes else []
        test = self._take_result(attached, ranked_nodes, now_s)
        if test is None:
            return []
        broken_links = test.broken_links
        if (
            stuck
            and test.confirmed_test is None
            and any(pair <= ranked_nodes for pair in broken_links)
        ):
            self._ask_to_confirm(test, attached, ranked_nodes, now_s)
            return []
        decisions: list[LeftOut | Readmitted] = []
        silent_nodes = ranked_nodes - self._answering_nodes
        if stuck and (
            left_out := to_leave_out(ranked_nodes, broken_links, membership.keepers, silent_nodes)
        ):
            pairs = sorted("-".join(sorted(pair)) for pair in broken_links if pair <= ranked_nodes)
            decisions.append(LeftOut(tuple(left_out), f"no connection {', '.join(pairs)}"))
            ranked_nodes -= set(left_out)
        answering_nodes = self._answering_nodes
        reachable_nodes = [
            node
            for node in membership.left_out
            if node in answering_nodes and not _is_cut_off(node, ranked_nodes, broken_links)
        ]
        return [*decisions, Readmitted((reachable_nodes[0],))] if reachable_nodes else decisions

    def _take_result(
        self, attached: Collection[str], ranked_nodes: Collection[str], now_s: float
    ) -> _Test | None:
        """Return the test that is over, or None while an attached node may still answer."""
        test = self._test
        if test is None:
            return None
        # a confirmation also waits for nodes that have just lost their connection
        awaited_nodes = attached if test.confirmed_test is None else ranked_nodes
        missing_nodes = [
            node for node in test.asked_nodes if node in awaited_nodes and node not in test.answers
        ]
        if missing_nodes and now_s < test.since_s + ANSWER_S:
            return None
        first = test.confirmed_test or test
        self._test, self._last_test_s = None, now_s
        self._answering_nodes = frozenset(first.answers).difference(missing_nodes)
        return test

    def _ask_to_confirm(
        self, test: _Test, attached: Collection[str], ranked_nodes: set[str], now_s: float
    ) -> None:
        """Prepare a second question to both nodes of each broken link."""
        doubtful_nodes = {
            node for pair in test.broken_links if pair <= ranked_nodes for node in pair
        }
        self._count += 1
        asked_nodes = tuple(sorted(doubtful_nodes.intersection(attached)))
        self._test = _Test(self._count, asked_nodes, now_s, confirmed_test=test, is_sent=False)


def _nodes_to_ask(membership: Membership) -> set[str]:
    """Return the nodes of the live ranks, and the nodes that were left out."""
    members = membership.plan.members if membership.plan is not None else ()
    live = {member.node for member in members if membership.host_of(member.worker) is not None}
    return live.union(membership.left_out)


def _is_cut_off(node: str, others: Collection[str], broken_links: Collection[Pair]) -> bool:
    return any(frozenset((node, other)) in broken_links for other in others)


def to_leave_out(
    nodes: Collection[str],
    broken_links: Collection[Pair],
    keepers: Collection[str],
    silent_nodes: Collection[str] = (),
) -> list[str]:
    """Return nodes to leave out so that all others reach each other.

    The node that is cut off from most others is left out, until no broken pair remains. The last
    node that has the state is never left out.

    Args:
        nodes: all nodes to choose from.
        broken_links: pairs that cannot reach each other.
        keepers: nodes that have the state of the training; at least one of them stays.
        silent_nodes: nodes that did not answer. They are taken first, as their link to the
            coordinator is bad, too.
    """
    remaining_nodes, left_out = set(nodes), []
    while broken_pairs := [pair for pair in broken_links if pair <= remaining_nodes]:
        kept = remaining_nodes.intersection(keepers)
        candidates = [
            node
            for node in remaining_nodes
            if any(node in pair for pair in broken_pairs) and kept != {node}
        ]
        worst_node = max(
            candidates,
            key=lambda node: (
                node in silent_nodes,
                sum(node in pair for pair in broken_pairs),
                node,
            ),
        )
        remaining_nodes.discard(worst_node)
        left_out.append(worst_node)
    return left_out
