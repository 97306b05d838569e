"""Which nodes cannot reach each other, and which of them go on together: a pure state machine.

A coordinator sees only its own links. When all ranks wait for each other, nobody is late, and nobody is to blame, the
nodes are asked to try theirs. Where some are broken, the largest set of nodes that all reach each other goes on; the
others are left out until they reach everybody again.

A node that has ended cannot be connected to, either. The coordinator may hear of its end later than of the connections
that failed. So both nodes of a broken link are asked once more before one is left out: a node that has ended is lost,
and no other node is left out in its place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from chaoskit.coordinator.membership.events import LeftOut, Returned
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.outputs import Send
from chaoskit.wire.messages import AgentHello, TestLinks

#: Ranks that have all waited so long may be unable to reach each other. A wrong guess costs one connection a link.
SUSPECT_S = 0.5
#: The same when a generation breaks again and again: for so long after each time.
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
        confirms: the test that has found broken links. Their nodes are asked to answer once more, and for no links.
        sent: whether the nodes were asked.
    """

    number: int
    asked: tuple[str, ...]
    since_s: float
    answers: dict[str, frozenset[str]] = field(default_factory=dict)
    confirms: _Test | None = None
    sent: bool = True

    @property
    def apart(self) -> set[Pair]:
        """The pairs of which one node could not connect to the other, by the first answers."""
        answers = self.confirms.answers if self.confirms is not None else self.answers
        return {frozenset((node, other)) for node, others in answers.items() for other in others}


class Links:
    """Tests of the links between nodes, one at a time.

    Args:
        first: no test has this number or a smaller one, as those may be tests of another coordinator.
    """

    def __init__(self, first: int = 0) -> None:
        self._count = first
        self._test: _Test | None = None
        self._rested_s = -math.inf
        self._tested: frozenset[str] = frozenset()  # who answered the last one
        self._doors: dict[
            str, tuple[str, int]
        ] = {}  # by node: where others may try to connect to it

    def introduce(self, hello: AgentHello) -> None:
        """A node has come, perhaps again."""
        self._doors[hello.node] = (hello.host, hello.port)

    def test(self, membership: Membership, attached: Collection[str], now_s: float) -> list[Send]:
        """Ask all nodes that matter for their links to each other, unless it is too early for that."""
        if (test := self._test) is not None and not test.sent:
            test.sent = True
            return [Send(node, TestLinks(test.number, ())) for node in test.asked]
        asked = tuple(sorted(_asked(membership).intersection(attached)))
        if self._test is not None or now_s < self._rested_s + AGAIN_S or len(asked) < 2:
            return []
        self._count += 1
        self._test = _Test(self._count, asked, now_s)
        doors = [(node, *self._doors[node]) for node in asked]
        others = {node: tuple(door for door in doors if door[0] != node) for node in asked}
        return [Send(node, TestLinks(self._count, others[node])) for node in asked]

    def answer(self, node: str, number: int, unreachable: Iterable[str]) -> None:
        """What ``node`` has found."""
        if self._test is not None and self._test.number == number and node in self._test.asked:
            self._test.answers[node] = frozenset(unreachable)

    def judge(
        self, membership: Membership, attached: Collection[str], now_s: float, *, stuck: bool
    ) -> list[LeftOut | Returned]:
        """What follows from the last test, once, as soon as it is over.

        Args:
            stuck: whether the ranks still wait for each other; else nobody is left out.
        """
        inside = _asked(membership) - {*membership.left_out}
        if not inside:  # nobody is left whom they could not reach; a single node has nobody to try
            back = tuple(node for node in membership.left_out if node in attached)
            return [Returned(back)] if back else []
        test = self._take_result(attached, inside, now_s)
        if test is None:
            return []
        apart = test.apart
        if stuck and test.confirms is None and any(pair <= inside for pair in apart):
            self._ask_to_confirm(test, attached, inside, now_s)
            return []
        decided: list[LeftOut | Returned] = []
        mute = inside - self._tested
        if stuck and (out := to_leave_out(inside, apart, membership.keepers, mute)):
            pairs = sorted("-".join(sorted(pair)) for pair in apart if pair <= inside)
            decided.append(LeftOut(tuple(out), f"no connection {', '.join(pairs)}"))
            inside -= set(out)
        tested = self._tested
        whole = [
            node
            for node in membership.left_out
            if node in tested and not _is_apart(node, inside, apart)
        ]
        return [*decided, Returned((whole[0],))] if whole else decided

    def _take_result(
        self, attached: Collection[str], inside: Collection[str], now_s: float
    ) -> _Test | None:
        """Return the test that is over; None while an attached node may still answer."""
        test = self._test
        if test is None:
            return None
        awaited = (
            attached if test.confirms is None else inside
        )  # the end of a node may be known before its loss
        missing = [node for node in test.asked if node in awaited and node not in test.answers]
        if missing and now_s < test.since_s + ANSWER_S:
            return None
        first = test.confirms or test
        self._test, self._rested_s = None, now_s
        self._tested = frozenset(first.answers).difference(missing)
        return test

    def _ask_to_confirm(
        self, test: _Test, attached: Collection[str], inside: set[str], now_s: float
    ) -> None:
        """Have both nodes of each broken link answer once more, before one of them is left out."""
        doubtful = {node for pair in test.apart if pair <= inside for node in pair}
        self._count += 1
        asked = tuple(sorted(doubtful.intersection(attached)))
        self._test = _Test(self._count, asked, now_s, confirms=test, sent=False)


def _asked(membership: Membership) -> set[str]:
    """The nodes of the ranks, and those that were left out."""
    members = membership.plan.members if membership.plan is not None else ()
    live = {member.node for member in members if membership.host_of(member.worker) is not None}
    return live.union(membership.left_out)


def _is_apart(node: str, others: Collection[str], apart: Collection[Pair]) -> bool:
    return any(frozenset((node, other)) in apart for other in others)


def to_leave_out(
    nodes: Collection[str],
    apart: Collection[Pair],
    keepers: Collection[str],
    mute: Collection[str] = (),
) -> list[str]:
    """Whom to do without, so that all others reach each other: again and again the one that is cut off from most.

    Args:
        apart: pairs that cannot reach each other.
        keepers: nodes that have the state of the training; one of them stays in any case.
        mute: nodes that did not say what they reach: they are cut off from us, too, at least one way.
    """
    left, out = set(nodes), []
    while broken := [pair for pair in apart if pair <= left]:
        kept = left.intersection(keepers)
        candidates = [
            node for node in left if any(node in pair for pair in broken) and kept != {node}
        ]
        worst = max(
            candidates, key=lambda node: (node in mute, sum(node in pair for pair in broken), node)
        )
        left.discard(worst)
        out.append(worst)
    return out
