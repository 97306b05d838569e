"""Nodes that join, and the test of their links: the pure state machine, and real runs over bad
networks.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.goals import Flag

from chaoskit.config import RunConfig
from chaoskit.coordinator.detectors.newcomers import AGAIN_S, TRIES, Newcomers
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.handle import handle
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.outputs import Send
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.job import JobSpec
from chaoskit.journal import Record, read_journals
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate.core.traffic import Block, Narrow, between
from chaoskit.suites.recovery.expect import STEADY
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import (
    AgentHello,
    Endpoint,
    Finding,
    HealthReport,
    LinksMeasured,
    MeasureLinks,
    PairReading,
    WorkerReady,
)
from faults import AddNode, Bandwidth, Cut, Fault, Target
from faults.evidence import Evidence

GOOD = {"connect_ms": 1.0, "rtt_ms": (0.2,), "sent_mb_s": 900.0, "received_mb_s": 900.0}
DEAD = {"error": "silent for 2 s"}
NARROW = GOOD | {"sent_mb_s": 1.0}
WORTH_A_WARNING = GOOD | {"received_mb_s": 50.0}
NODES = ("a", "b", "c", "d")


def reading(node: str, values: dict[str, Any]) -> PairReading:
    return PairReading(address=f"{node}:1", node=node, **values)


class Cluster:
    """Nodes that answer at once, according to the quality of each end of a link."""

    def __init__(self, *nodes: str, **settings: Any) -> None:
        self.membership = Membership(
            RunConfig(job=JobSpec("job.py"), nodes=len(nodes), spares=0, **settings)
        )
        self.newcomers, self.now_s, self.silent = Newcomers(), 0.0, set[str]()
        self.ends: dict[str, dict[str, Any]] = {}
        self.findings: dict[str, tuple[Finding, ...]] = {}
        self.against: list[tuple[str, str]] = []
        self.join(*nodes)

    def join(self, *nodes: str) -> None:
        for port, node in enumerate(nodes, 1):
            self.newcomers.introduce(AgentHello(node, "host", 1, host=node, port=port))
            handle(self.membership, events.NodeJoined(node), self.now_s)

    def settle(self, *nodes: str) -> None:
        for node in nodes:
            for worker in sorted(self.membership.workers_on(node)):
                handle(
                    self.membership,
                    WorkerReady(worker, node, Endpoint("h", worker, 1, 2, 3)),
                    self.now_s,
                )
        handle(self.membership, events.Settled(self.membership.generation), self.now_s)

    def order(self) -> list[Send]:
        return self.newcomers.order(self.membership, self.membership.nodes, self.now_s)

    def go_on(self) -> None:
        """Order and answer tests until no more are ordered."""
        for _ in range(TRIES * 3):
            self.answer(self.order())
            self.now_s += AGAIN_S

    def answer(self, sent: Iterable[Send]) -> None:
        for send in sent:
            order = send.message
            assert isinstance(order, MeasureLinks)
            ((peer, host, _),) = order.targets
            assert peer == host != send.node
            self.against.append((send.node, peer))
            values = self.ends.get(peer) or self.ends.get(send.node) or GOOD
            answer = LinksMeasured(send.node, order.number, (reading(peer, values),), joins=True)
            self.newcomers.answer(answer, lambda node: node not in self.silent, self.now_s)
            self.findings |= dict(self.newcomers.news(self.membership))

    def refused(self) -> set[str]:
        return {
            node
            for node, findings in self.findings.items()
            if any(finding.severity == "bad" for finding in findings)
        }


def test_all_who_begin_are_tested_each_against_another() -> None:
    cluster = Cluster(*NODES)
    cluster.go_on()
    assert sorted(cluster.against) == [("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")]
    assert (set(cluster.findings), cluster.refused()) == (set(NODES), set())
    assert {finding.what for finding in cluster.findings["a"]} >= {
        "pair.reached",
        "pair.rtt_ms",
        "pair.sent_mb_s",
        "pair.intact",
    }
    assert all(finding.detail.startswith("to b") for finding in cluster.findings["a"])


@pytest.mark.parametrize(
    "values", [DEAD, NARROW, WORTH_A_WARNING], ids=["dead", "narrow", "worse than all others"]
)
@given(st.sampled_from(NODES))
def test_who_is_badly_connected_is_refused_and_nobody_who_was_tested_against_it(
    values: dict[str, Any], node: str
) -> None:
    cluster = Cluster(*(other for other in NODES if other != node))
    cluster.go_on()
    cluster.join(node)
    cluster.ends[node] = values
    cluster.go_on()
    assert cluster.refused() == {node}
    assert {peer for tested, peer in cluster.against if tested == node} == set(NODES) - {node}


def test_one_who_begins_with_others_is_refused_too() -> None:
    cluster = Cluster(*NODES)
    cluster.ends["b"] = NARROW
    cluster.go_on()
    assert cluster.refused() == {"b"}
    assert any(
        finding.severity == "warn" and finding.detail.startswith("to b")
        for finding in cluster.findings["a"]
    )


@given(
    st.dictionaries(
        st.sampled_from(NODES), st.sampled_from([DEAD, NARROW, WORTH_A_WARNING]), max_size=4
    )
)
def test_nobody_is_refused_whose_own_end_is_well(ends: dict[str, dict[str, Any]]) -> None:
    """A node with a good end is not refused, whichever of the others are bad."""
    cluster = Cluster(*NODES)
    cluster.ends = ends
    cluster.go_on()
    assert cluster.refused() <= set(ends)
    if len(ends) >= len(NODES) - 1 and WORTH_A_WARNING not in ends.values():
        assert not cluster.refused(), "of two ends neither is known to be well"


def test_links_that_are_all_alike_are_good_enough() -> None:
    cluster = Cluster(*NODES)
    cluster.ends = dict.fromkeys(NODES, WORTH_A_WARNING)
    cluster.go_on()
    assert (set(cluster.findings), cluster.refused()) == (set(NODES), set())


def test_a_newcomer_is_tested_against_those_who_train_and_they_are_not_tested_again() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.settle("a", "b", "c")
    assert cluster.order() == [], "by a coordinator that has not seen them join"
    cluster.join("d")
    cluster.ends["d"] = DEAD
    cluster.go_on()
    assert cluster.against == [("d", "a"), ("d", "b"), ("d", "c")]
    assert cluster.refused() == {"d"}


def test_that_the_other_end_is_silent_says_nothing_of_the_newcomer() -> None:
    cluster = Cluster("a")
    cluster.settle("a")
    cluster.join("b")
    cluster.ends["a"] = DEAD
    cluster.silent = {"a"}
    cluster.go_on()
    assert cluster.findings == {}
    cluster.ends.clear()
    cluster.go_on()
    assert (set(cluster.findings), cluster.refused()) == ({"b"}, set())


def test_a_node_that_attaches_again_is_asked_again_and_an_old_answer_counts_for_nothing() -> None:
    cluster = Cluster("a", "b")
    (old, _) = cluster.order()
    assert cluster.order() == [], "one test at a time"
    cluster.newcomers.introduce(AgentHello("a", "host", 1, host="a", port=1))
    (again,) = cluster.order()
    assert again.node == "a"
    cluster.answer([old])
    assert "a" not in cluster.findings
    cluster.answer([again])
    assert "a" in cluster.findings


def test_a_node_on_probation_is_held_until_its_link_is_known_but_only_if_there_is_another_node() -> (
    None
):
    cluster = Cluster("a", on_probation=("a",))
    assert cluster.newcomers.untested(cluster.membership, {"a"}) == frozenset()
    cluster.join("b")
    assert cluster.newcomers.untested(cluster.membership, NODES) == {"a", "b"}
    cluster.go_on()
    assert cluster.newcomers.untested(cluster.membership, NODES) == frozenset()


# -- real runs -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AddNodeBehind(AddNode):
    """A fault that adds a fourth node, which only the coordinator reaches well."""

    makes: str

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        ways = between(["node3"], ["node0", "node1", "node2"])
        changes = {"a narrow link": Narrow(bits_per_s=8e6, ways=ways), "no link": Block(ways=ways)}
        target.cluster.apply("node3", changes[self.makes])
        async for evidence in super().inject(target):
            yield evidence


def run(chaos: Any, fault: Fault, flag: Flag, world: int) -> Outcome:
    """Run a job until the flag is up and the world has ``world`` ranks."""
    elastic = ElasticPolicy(min_replicas=2, max_replicas=4, scaling_timeout_s=0.0)
    plan: dict[str, Any] = {
        "nodes": 3,
        "spares": 0,
        "shards": 4,
        "elastic": elastic,
        "deadline_s": 180.0,
    }
    plan |= {
        "steps": 20,
        "until": flag.until | {"world": world},
        "watch": flag,
        "options": {"step_s": 0.03},
    }
    outcome: Outcome = chaos.run(STEADY, faults=[fault], twin=False, check=False, **plan)
    return outcome


def links_are_known(directory: Path, *severities: str) -> Flag:
    """Return the goal that the fourth node's link was tested, with a reading of one of these
    ``severities``.
    """

    def is_known(message: Any) -> bool:
        if not isinstance(message, HealthReport) or message.node != "node3":
            return False
        return any(
            finding.what.startswith("pair.") and finding.severity in severities
            for finding in message.findings
        )

    return Flag(directory / "links", is_known)


def records(outcome: Outcome, event: Event) -> list[Record]:
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event == event
    ]


def refusals(outcome: Outcome) -> dict[str, list[str]]:
    return {
        record["node"]: record["reasons"]
        for record in records(outcome, Event.HEALTH)
        if record["standing"] == "refused"
    }


@pytest.mark.promise(
    "gets no workers until its own report and its link have passed", makes="a narrow link"
)
@pytest.mark.parametrize(
    ("makes", "reason"),
    [
        ("a narrow link", r"pair\.(sent|received)_mb_s=\d.*to node\d"),
        ("no link", r"pair\.reached=no"),
    ],
)
@pytest.mark.chaos(substrate="netns")
def test_a_node_that_comes_and_is_badly_connected_is_not_used(
    chaos: Any, tmp_path: Path, makes: str, reason: str
) -> None:
    """The reason is a reading of its link; the others train on as before."""
    kind = Bandwidth if makes == "a narrow link" else Cut
    if why := kind.unavailable():
        pytest.skip(why)
    outcome = run(chaos, AddNodeBehind(at_step=5, makes=makes), links_are_known(tmp_path, "bad"), 3)
    ((node, reasons),) = refusals(outcome).items()
    assert node == "node3"
    assert re.search(reason, reasons[0]), reasons
    worlds = [
        {member["node"] for member in plan["members"]} for plan in records(outcome, Event.PLAN)
    ]
    assert worlds == [{"node0", "node1", "node2"}], (
        "it was not needed, so it was not used before it was tested"
    )
    assert records(outcome, Event.DETECTED) == []


@pytest.mark.promise("A node that joins tests its link to one that is there")
@pytest.mark.chaos(substrate="netns")
def test_a_node_that_comes_and_is_well_connected_is_used(chaos: Any, tmp_path: Path) -> None:
    """The world grows by the new node after the test of its link."""
    outcome = run(chaos, AddNode(at_step=5), links_are_known(tmp_path, "ok", "warn"), 4)
    assert refusals(outcome) == {}
    last = records(outcome, Event.PLAN)[-1]
    assert {member["node"] for member in last["members"]} == {"node0", "node1", "node2", "node3"}
    findings = [
        record["findings"] for record in records(outcome, Event.HEALTH) if record["node"] == "node3"
    ][-1]
    assert {"pair.reached", "pair.sent_mb_s"} <= {record["what"] for record in findings}
