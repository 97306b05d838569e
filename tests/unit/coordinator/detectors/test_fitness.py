"""Tests of the fitness of nodes: the pure machine, and an elastic world that depends on it."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from chaoskit.config import RunConfig
from chaoskit.coordinator.detectors.fitness import Fitness
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.elasticity import Elasticity
from chaoskit.coordinator.membership.handle import handle
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.membership.worker_placement import PROOF_S
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.job import JobSpec
from chaoskit.wire.messages import Endpoint, Finding, HealthReport, NodeLost, WorkerReady

Severity = Literal["ok", "warn", "bad"]
NODES = ("a", "b", "c")


def report(node: str, severity: Severity, value: float = 1.0) -> HealthReport:
    return HealthReport(node, (Finding("disk.free_bytes", severity, value, node=node),), 5.0)


def joined(*nodes: str, **settings: object) -> Membership:
    membership = Membership(
        RunConfig(job=JobSpec("job.py"), nodes=len(nodes), spares=0, **settings)
    )  # type: ignore[arg-type]
    for node in nodes:
        handle(membership, events.NodeJoined(node), 0.0)
    return membership


reports = st.lists(
    st.tuples(st.sampled_from(NODES), st.sampled_from(["ok", "warn", "bad"])), max_size=12
)


@given(reports, st.sets(st.sampled_from(NODES)), st.booleans())
def test_only_who_was_refused_is_kept_out_and_each_is_told_of_once(
    reports: list[tuple[str, Severity]], on_probation: set[str], enforce: bool
) -> None:
    membership, fitness = joined(*NODES, on_probation=tuple(on_probation)), Fitness(enforce=enforce)
    refused: set[str] = set()
    proved: set[str] = set()
    for node, severity in reports:
        fitness.hear(report(node, severity))
        verdicts = 0
        while (event := fitness.judge(membership)) is not None:
            handle(membership, event, 0.0)
            verdicts += 1
        if severity == "bad":
            refused.add(node)
        elif node not in refused:
            proved.add(node)
        assert verdicts <= 1
        out = (refused | on_probation.difference(proved)) if enforce else on_probation
        assert membership.unfit == out


def test_what_is_said_again_is_no_news() -> None:
    fitness = Fitness(enforce=True)
    assert fitness.hear(report("a", "ok")) is not None
    assert fitness.hear(report("a", "ok")) is None
    assert fitness.hear(report("a", "ok", 2.0)) is not None
    fitness.forget("a")
    assert fitness.hear(report("a", "ok", 2.0)) is not None


def test_a_node_that_has_not_joined_is_judged_when_it_has() -> None:
    membership, fitness = joined("a"), Fitness(enforce=True)
    fitness.hear(report("b", "bad"))
    assert fitness.judge(membership) is None
    handle(membership, events.NodeJoined("b"), 0.0)
    assert fitness.judge(membership) == events.Unfit("b", "disk.free_bytes=1")


def elastic_world(**settings: object) -> tuple[Membership, Elasticity]:
    """Three nodes of an elastic run, which train."""
    policy = ElasticPolicy(
        min_replicas=1, max_replicas=3, scaling_timeout_s=0.0, faulty_scale_down_timeout_s=1.0
    )
    config = RunConfig(
        job=JobSpec("job.py"), nodes=3, spares=0, shards=3, elastic=policy, **settings
    )  # type: ignore[arg-type]
    membership, elasticity = Membership(config), Elasticity(policy)
    for node in NODES:
        tell(membership, elasticity, events.NodeJoined(node))
    tell(membership, elasticity, events.Tick(), PROOF_S)
    for node in NODES:
        for worker in sorted(membership.workers_on(node)):
            endpoint = Endpoint("host", worker, 1, 2, 3)
            tell(membership, elasticity, WorkerReady(worker, node, endpoint))
    tell(membership, elasticity, events.Settled(1))
    return membership, elasticity


def tell(
    membership: Membership,
    elasticity: Elasticity,
    event: events.MembershipEvent,
    now_s: float = 0.0,
) -> None:
    handle(membership, event, now_s)
    elasticity.take_in(event, membership, now_s)
    if (wish := elasticity.wanted_resize(membership)) is not None:
        handle(membership, wish, now_s)


def tick(membership: Membership, elasticity: Elasticity, now_s: float) -> None:
    tell(membership, elasticity, events.PolicyTick(), now_s)


def test_an_elastic_world_shrinks_without_a_node_that_is_not_fit() -> None:
    membership, elasticity = elastic_world()
    assert (membership.size, membership.idle) == (3, frozenset())
    tell(membership, elasticity, events.Unfit("b", "XID 79"))
    tick(membership, elasticity, 5.0)
    assert (membership.size, membership.unfit) == (2, {"b"})
    tell(membership, elasticity, NodeLost("b"), 6.0)
    tell(membership, elasticity, events.NodeJoined("b", "another agent"), 7.0)
    tick(membership, elasticity, 8.0)
    assert (membership.size, membership.idle) == (3, frozenset()), (
        "who came in its place counts again"
    )


def test_an_elastic_world_does_not_count_a_node_that_it_was_told_to_do_without() -> None:
    membership, elasticity = elastic_world(quarantined=("c",))
    tick(membership, elasticity, 5.0)
    assert membership.size == 2


def test_an_elastic_world_grows_by_a_node_that_has_proved_itself() -> None:
    membership, elasticity = elastic_world(on_probation=("c",))
    tick(membership, elasticity, 5.0)
    assert membership.size == 2
    tell(membership, elasticity, events.Fit("c"), 6.0)
    tick(membership, elasticity, 7.0)
    assert (membership.size, membership.idle) == (3, frozenset())
