"""Tests of the link between each node that joins and another one: a pure state machine.

A link has two ends. A node is refused only if several tests failed, against different nodes where
possible, and one of these nodes is known to be well connected. No decision waits for a test: a node
that is needed earlier is used.

-> daemon/link_probe.py makes the tests; health/pair.py judges one, by the limits in
health/limits.py. coordinator/detectors/fitness.py refuses the node;
coordinator/handlers/on_measurement.py sends the orders. Links that break during training:
coordinator/detectors/links.py.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.outputs import Send
from chaoskit.health import pair
from chaoskit.health.limits import HealthLimits
from chaoskit.wire.messages import AgentHello, Finding, LinksMeasured, MeasureLinks, PairReading

#: Number of tests that must fail, and the pause before each further test.
TRIES = 3
AGAIN_S = 0.25
#: Factor by which the links of others must be better to make a finding of severity "warn" a reason
#: to refuse a node.
MUCH = 10.0


@dataclass
class _Trial:
    """A node on trial.

    Attributes:
        number: number of the test that is under way; 0 for none.
        peer: the node at the other end of the last test.
        due_s: earliest time of the next test.
        failed_findings: node at the other end -> findings of the failed test.
        tries: number of failed tests.
        passed_reading: the reading of the test that passed; None before.
        passed_findings: findings of the test that passed.
        reported_findings: the findings that were last reported.
    """

    number: int = 0
    peer: str = ""
    due_s: float = -math.inf
    failed_findings: dict[str, list[Finding]] = field(default_factory=dict)
    tries: int = 0
    passed_reading: PairReading | None = None
    passed_findings: list[Finding] = field(default_factory=list)
    reported_findings: tuple[Finding, ...] = ()


class Newcomers:
    """Trials of the nodes that join: each tests its link to another node.

    Args:
        first: the numbers of the tests start above it; lower ones may belong to another
            coordinator.
    """

    def __init__(self, first: int = 0) -> None:
        self._limits = HealthLimits()
        self._addresses: dict[str, tuple[str, int]] = {}
        self._trials: dict[str, _Trial] = {}
        self._count = first

    def introduce(self, hello: AgentHello) -> None:
        """Take in the address of a node that has connected. Its open test is ordered again."""
        self._addresses[hello.node] = (hello.host, hello.port)
        if hello.node in self._trials:
            self._trials[hello.node].number = 0

    def forget(self, node: str) -> None:
        """Forget the trial of a node that has a new agent, or may have other links."""
        self._trials.pop(node, None)

    def can_test(self, node: str) -> bool:
        """Return whether a node has announced a port at which others can connect to it."""
        return self._addresses.get(node, ("", 0))[1] > 0

    def order(self, membership: Membership, attached: Collection[str], now_s: float) -> list[Send]:
        """Return the orders of the tests that are due: one for each node on trial, at most.

        A node that has joined since the last call is put on trial here.
        """
        testable_nodes = self._testable(membership, attached)
        ranked_nodes = _ranked(membership)
        orders = []
        for node in testable_nodes:
            if node in ranked_nodes and node not in self._trials:
                continue  # it trains, and was on trial before another coordinator, if at all
            trial = self._trials.setdefault(node, _Trial())
            if trial.number or trial.passed_reading or trial.tries >= TRIES or now_s < trial.due_s:
                continue
            if not (peers := self._peers(node, testable_nodes, ranked_nodes)):
                continue
            self._count += 1
            trial.number, trial.peer = self._count, peers[trial.tries % len(peers)]
            target = (trial.peer, *self._addresses[trial.peer])
            orders.append(Send(node, MeasureLinks(self._count, (target,), joins=True)))
        return orders

    def answer(self, answer: LinksMeasured, is_heard: Callable[[str], bool], now_s: float) -> None:
        """Take in the result of a test. A failed test counts only if the other end is in contact.

        An answer to another test than the last one of its node is ignored.

        Args:
            is_heard: returns True for a node that is in contact with the coordinator.
        """
        trial = self._trials.get(answer.node)
        if trial is None or trial.number != answer.number or not answer.links:
            return
        trial.number, reading = 0, answer.links[0]
        findings = self._judge(reading)
        if all(finding.severity != "bad" for finding in findings):
            trial.passed_reading, trial.passed_findings = (
                reading,
                [_with_peer(finding, trial.peer) for finding in findings],
            )
            return
        trial.due_s = now_s + AGAIN_S
        if is_heard(trial.peer):  # otherwise the peer failed, not the link
            trial.tries += 1
            trial.failed_findings[trial.peer] = findings

    def news(self, membership: Membership) -> list[tuple[str, tuple[Finding, ...]]]:
        """Return (node, findings) for each finished trial with findings that are new or changed.

        They count as reported from now on.
        """
        ranked_nodes, news = _ranked(membership), []
        for node, trial in self._trials.items():
            findings = tuple(self._findings(trial, ranked_nodes))
            if findings and findings != trial.reported_findings:
                trial.reported_findings = findings
                news.append((node, findings))
        return news

    def untested(self, membership: Membership, attached: Collection[str]) -> frozenset[str]:
        """Return the nodes with a trial that is not over, although another node can be its peer."""
        testable_nodes, ranked_nodes = self._testable(membership, attached), _ranked(membership)
        finished_nodes = {
            node
            for node, trial in self._trials.items()
            if trial.passed_reading or trial.tries >= TRIES
        }
        return frozenset(
            node
            for node in testable_nodes
            if node not in finished_nodes and self._peers(node, testable_nodes, ranked_nodes)
        )

    def _testable(self, membership: Membership, attached: Collection[str]) -> list[str]:
        """Return the nodes that could be at either end of a test, by name."""
        unfit = membership.unfit - membership.on_probation
        attached_nodes = (
            node for node in membership.nodes if node in attached and self.can_test(node)
        )
        return sorted(node for node in attached_nodes if node not in unfit)

    def _peers(self, node: str, nodes: Sequence[str], ranked_nodes: Collection[str]) -> list[str]:
        """Return the nodes to test ``node`` against, in order: nodes that train come first.

        Each newcomer begins with another one of them.
        """
        first = [peer for peer in nodes if peer in ranked_nodes and peer != node]
        rest = [peer for peer in nodes if peer not in ranked_nodes and peer != node]
        return [*_rotated(first, node), *_rotated(rest, node)]

    def _judge(self, reading: PairReading) -> list[Finding]:
        """Return the findings of a reading, by the usual limits and by the links that passed.

        No finding is "bad" if the link passes.
        """
        findings = [
            finding
            for finding in pair.judge(reading, self._limits)
            if finding.what.startswith("pair.")
        ]
        readings = [trial.passed_reading for trial in self._trials.values() if trial.passed_reading]
        return [
            self._compare(
                finding, [other for link in readings for other in _values(link, finding.what)]
            )
            for finding in findings
        ]

    def _compare(self, finding: Finding, others: Sequence[float]) -> Finding:
        """Return ``finding``, made "bad" if it is a warning and other links are ``MUCH`` better."""
        if finding.severity != "warn" or not others or not isinstance(finding.value, float):
            return finding
        usual_value = sorted(others)[len(others) // 2]
        ratio = (
            finding.value / usual_value
            if finding.what.endswith("_ms")
            else usual_value / max(finding.value, 1e-9)
        )
        if ratio < MUCH:
            return finding
        return msgspec.structs.replace(
            finding, severity="bad", detail=f"the usual value of other links is {usual_value:.4g}"
        )

    def _findings(self, trial: _Trial, ranked_nodes: Collection[str]) -> list[Finding]:
        """Return the findings of a trial, or none while it is under way.

        Failed tests count against the node only if a node at the other end is known to be well.
        """
        if trial.passed_reading is not None:
            failed_findings = (
                _as_warning(finding, peer)
                for peer, findings in trial.failed_findings.items()
                for finding in findings
            )
            return [
                *trial.passed_findings,
                *(finding for finding in failed_findings if finding.severity != "ok"),
            ]
        if trial.tries < TRIES:
            return []
        add_peer = (
            _with_peer
            if any(self._is_well(peer, ranked_nodes) for peer in trial.failed_findings)
            else _as_warning
        )
        return [
            add_peer(finding, peer)
            for peer, findings in trial.failed_findings.items()
            for finding in findings
            if finding.severity == "bad"
        ]

    def _is_well(self, node: str, ranked_nodes: Collection[str]) -> bool:
        """Return whether a node is known to have good links: it passed its trial, or trains."""
        trial = self._trials.get(node)
        return trial.passed_reading is not None if trial is not None else node in ranked_nodes


def _ranked(membership: Membership) -> frozenset[str]:
    """Return the nodes of the ranks, once a world has settled, and while the next one forms."""
    plan = membership.plan
    if plan is None or not (membership.settled or plan.generation > 1):
        return frozenset()
    return frozenset(member.node for member in plan.members)


def _rotated(nodes: Sequence[str], node: str) -> list[str]:
    """Return the sorted ``nodes``, rotated to begin with the one that follows ``node``."""
    start = bisect(nodes, node)
    return [*nodes[start:], *nodes[:start]]


def _values(reading: PairReading, what: str) -> tuple[float, ...]:
    """Return the measurements that a finding with the name ``what`` is about."""
    values = {
        "pair.connect_ms": (reading.connect_ms,),
        "pair.rtt_ms": reading.rtt_ms,
        "pair.sent_mb_s": (reading.sent_mb_s,),
        "pair.received_mb_s": (reading.received_mb_s,),
    }
    return values.get(what, ())


def _with_peer(finding: Finding, peer: str) -> Finding:
    """Return ``finding`` with the node at the other end in its detail."""
    return msgspec.structs.replace(
        finding, detail="; ".join(filter(None, (f"to {peer}", finding.detail)))
    )


def _as_warning(finding: Finding, peer: str) -> Finding:
    """Return ``finding`` as a warning at most: the other end may be at fault."""
    severity = "warn" if finding.severity == "bad" else finding.severity
    return msgspec.structs.replace(_with_peer(finding, peer), severity=severity)
