"""Nodes that join, and the link of each to one that is there: a pure state machine.

A link has two ends. So a node is refused only when all of some tries failed, against different nodes where there are
some, and one of these is known to be well connected. Nothing waits for a test: a node that is needed earlier is used.
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
from chaoskit.health.limits import Limits
from chaoskit.wire.messages import AgentHello, Finding, LinksMeasured, MeasureLinks, PairReading

#: So many tests must fail, with so long a pause before each but the first.
TRIES = 3
AGAIN_S = 0.25
#: What is worth a warning is a reason to refuse a node where the links of the others are so many times better.
MUCH = 10.0


@dataclass
class _Trial:
    """A node on trial. ``number``: of the test that is under way; 0 for none."""

    number: int = 0
    peer: str = ""
    due_s: float = -math.inf
    failed: dict[str, list[Finding]] = field(default_factory=dict)  # by the node at the other end
    tries: int = 0
    passed: PairReading | None = None
    found: list[Finding] = field(default_factory=list)  # when it passed
    told: tuple[Finding, ...] = ()


class Newcomers:
    """Has every node that joins test its link to another one, and says what it finds.

    Args:
        first: no test has this number or a smaller one, as those may be tests of another coordinator.
    """

    def __init__(self, first: int = 0) -> None:
        self._limits = Limits()
        self._doors: dict[str, tuple[str, int]] = {}
        self._trials: dict[str, _Trial] = {}
        self._count = first

    def introduce(self, hello: AgentHello) -> None:
        """A node has come, perhaps again: then what it was asked is asked anew, as its answer may be lost."""
        self._doors[hello.node] = (hello.host, hello.port)
        if hello.node in self._trials:
            self._trials[hello.node].number = 0

    def forget(self, node: str) -> None:
        """Another agent speaks for it from now on, or its links may be others."""
        self._trials.pop(node, None)

    def can_test(self, node: str) -> bool:
        """Whether others can connect to a node, as far as it has said where."""
        return self._doors.get(node, ("", 0))[1] > 0

    def order(self, membership: Membership, attached: Collection[str], now_s: float) -> list[Send]:
        """The tests that are due."""
        there = self._there(membership, attached)
        ranked = _ranked(membership)
        sent = []
        for node in there:
            if node in ranked and node not in self._trials:
                continue  # it trains, and was on trial before another coordinator, if at all
            trial = self._trials.setdefault(node, _Trial())
            if trial.number or trial.passed or trial.tries >= TRIES or now_s < trial.due_s:
                continue
            if not (peers := self._peers(node, there, ranked)):
                continue
            self._count += 1
            trial.number, trial.peer = self._count, peers[trial.tries % len(peers)]
            target = (trial.peer, *self._doors[trial.peer])
            sent.append(Send(node, MeasureLinks(self._count, (target,), joins=True)))
        return sent

    def answer(self, answer: LinksMeasured, is_heard: Callable[[str], bool], now_s: float) -> None:
        """What a test came to. ``is_heard``: whether we ourselves are in contact with a node."""
        trial = self._trials.get(answer.node)
        if trial is None or trial.number != answer.number or not answer.links:
            return
        trial.number, reading = 0, answer.links[0]
        found = self._judge(reading)
        if all(one.severity != "bad" for one in found):
            trial.passed, trial.found = reading, [_named(one, trial.peer) for one in found]
            return
        trial.due_s = now_s + AGAIN_S
        if is_heard(trial.peer):  # else it is not the link
            trial.tries += 1
            trial.failed[trial.peer] = found

    def news(self, membership: Membership) -> list[tuple[str, tuple[Finding, ...]]]:
        """What is known now of nodes whose trial is over, and was not told like that before."""
        ranked, news = _ranked(membership), []
        for node, trial in self._trials.items():
            found = tuple(self._findings(trial, ranked))
            if found and found != trial.told:
                trial.told = found
                news.append((node, found))
        return news

    def untested(self, membership: Membership, attached: Collection[str]) -> frozenset[str]:
        """Nodes whose trial is not over, and can be held."""
        there, ranked = self._there(membership, attached), _ranked(membership)
        over = {
            node for node, trial in self._trials.items() if trial.passed or trial.tries >= TRIES
        }
        return frozenset(
            node for node in there if node not in over and self._peers(node, there, ranked)
        )

    def _there(self, membership: Membership, attached: Collection[str]) -> list[str]:
        """Nodes that could be at either end of a test, by name."""
        out = membership.unfit - membership.on_probation
        doors = (node for node in membership.nodes if node in attached and self.can_test(node))
        return sorted(node for node in doors if node not in out)

    def _peers(self, node: str, there: Sequence[str], ranked: Collection[str]) -> list[str]:
        """Against whom, in this order: rather nodes that train; each newcomer begins with another one."""
        first = [one for one in there if one in ranked and one != node]
        rest = [one for one in there if one not in ranked and one != node]
        return [*_from(first, node), *_from(rest, node)]

    def _judge(self, reading: PairReading) -> list[Finding]:
        """As by hand, but stricter where others show what this network can do."""
        found = [one for one in pair.judge(reading, self._limits) if one.what.startswith("pair.")]
        passed = [trial.passed for trial in self._trials.values() if trial.passed is not None]
        return [
            self._compare(one, [other for link in passed for other in _values(link, one.what)])
            for one in found
        ]

    def _compare(self, finding: Finding, others: Sequence[float]) -> Finding:
        if finding.severity != "warn" or not others or not isinstance(finding.value, float):
            return finding
        usual = sorted(others)[len(others) // 2]
        times = (
            finding.value / usual
            if finding.what.endswith("_ms")
            else usual / max(finding.value, 1e-9)
        )
        if times < MUCH:
            return finding
        return msgspec.structs.replace(
            finding, severity="bad", detail=f"usual between the others: {usual:.4g}"
        )

    def _findings(self, trial: _Trial, ranked: Collection[str]) -> list[Finding]:
        """Of a trial that is over. What failed tells of this node only if the other end is known to be well."""
        if trial.passed is not None:
            failed = (_softened(one, peer) for peer, found in trial.failed.items() for one in found)
            return [*trial.found, *(one for one in failed if one.severity != "ok")]
        if trial.tries < TRIES:
            return []
        told = _named if any(self._is_well(peer, ranked) for peer in trial.failed) else _softened
        return [
            told(one, peer)
            for peer, found in trial.failed.items()
            for one in found
            if one.severity == "bad"
        ]

    def _is_well(self, node: str, ranked: Collection[str]) -> bool:
        trial = self._trials.get(node)
        return trial.passed is not None if trial is not None else node in ranked


def _ranked(membership: Membership) -> frozenset[str]:
    """The nodes of the ranks, once a world has settled; also while the next one is being formed."""
    plan = membership.plan
    if plan is None or not (membership.settled or plan.generation > 1):
        return frozenset()
    return frozenset(member.node for member in plan.members)


def _from(nodes: Sequence[str], node: str) -> list[str]:
    """The same in a circle, from the one that follows ``node`` on."""
    at = bisect(nodes, node)
    return [*nodes[at:], *nodes[:at]]


def _values(reading: PairReading, what: str) -> tuple[float, ...]:
    """What a test measured of what a finding is about."""
    of = {
        "pair.connect_ms": (reading.connect_ms,),
        "pair.rtt_ms": reading.rtt_ms,
        "pair.sent_mb_s": (reading.sent_mb_s,),
        "pair.received_mb_s": (reading.received_mb_s,),
    }
    return of.get(what, ())


def _named(finding: Finding, peer: str) -> Finding:
    """With the node at the other end."""
    return msgspec.structs.replace(
        finding, detail="; ".join(filter(None, (f"to {peer}", finding.detail)))
    )


def _softened(finding: Finding, peer: str) -> Finding:
    """The same as a warning: it may be the fault of the other end."""
    severity = "warn" if finding.severity == "bad" else finding.severity
    return msgspec.structs.replace(_named(finding, peer), severity=severity)
