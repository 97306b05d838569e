"""Tests of pods that are deleted, evicted and replaced while they train.

No step, no sample and no bit of a loss is lost by it.
"""

from __future__ import annotations

import pytest

from chaoskit import Chaos, ElasticPolicy
from chaoskit.faults import (
    BadImage,
    DeleteCoordinatorPod,
    DeletePod,
    EvictPod,
    Kill,
    KillContainer,
    KillCoordinator,
    NoRoom,
    PreemptPod,
    ReplaceNode,
)
from chaoskit.suites.recovery.expect import AT, heals, survives

pytestmark = [pytest.mark.chaos(substrate="kubernetes"), pytest.mark.slow]


@pytest.mark.parametrize("phase", ["forward", "reduce", "optimizer"])
def test_a_deleted_pod_costs_nothing(chaos: Chaos, phase: str) -> None:
    """A spare in another pod takes the rank."""
    survives(chaos, DeletePod(rank=1, at_step=AT, phase=phase))


def test_a_container_that_ends_costs_nothing(chaos: Chaos) -> None:
    """The API server learns of it seconds later: the run goes on until then."""
    survives(chaos, KillContainer(rank=1, at_step=AT), steps=300)


def test_an_evicted_pod_costs_nothing(chaos: Chaos) -> None:
    survives(chaos, EvictPod(rank=1, at_step=AT))


def test_without_a_spare_the_other_pods_train_on(chaos: Chaos) -> None:
    """Two pods train on, until one has started another rank."""
    outcome = survives(chaos, DeletePod(rank=1, at_step=AT), nodes=3, spares=0)
    assert "node1" not in {member["node"] for member in outcome.records("plan")[-1]["members"]}


def test_a_pod_is_deleted_in_a_recovery(chaos: Chaos) -> None:
    survives(
        chaos, Kill(rank=1, at_step=AT), DeletePod(rank=2, during="restore"), nodes=3, spares=0
    )


def test_a_pod_and_the_coordinator_are_lost_in_one_step(chaos: Chaos) -> None:
    survives(chaos, DeletePod(rank=1, at_step=AT), KillCoordinator(rank=0, at_step=AT))


def test_the_coordinators_pod_is_deleted(chaos: Chaos) -> None:
    """The ranks train on; a coordinator in another pod has a copy of the record."""
    outcome = survives(chaos, DeleteCoordinatorPod(at_step=AT), steps=200)
    assert outcome.records("detected") == []
    assert len(outcome.records("resumed")) == 1


def test_a_rank_dies_while_there_is_no_coordinator(chaos: Chaos) -> None:
    survives(chaos, DeleteCoordinatorPod(at_step=AT), Kill(rank=1, at_step=AT + 2), steps=100)


def test_a_pod_and_the_coordinators_are_deleted_in_one_step(chaos: Chaos) -> None:
    survives(
        chaos, DeletePod(rank=1, at_step=AT), DeleteCoordinatorPod(rank=0, at_step=AT), steps=100
    )


def test_a_replaced_pod_is_fresh_capacity(chaos: Chaos) -> None:
    """The world is full again, with a new pod."""
    heals(chaos, ReplaceNode(rank=1, at_step=AT, back_after_s=0.1), nodes=3, spares=0, steps=20)


@pytest.mark.parametrize("fault", [NoRoom, BadImage])
def test_a_lost_pod_is_replaced_once_that_can_be_done(
    chaos: Chaos, fault: type[NoRoom | BadImage]
) -> None:
    """The others train on while the cluster has no pod for it."""
    faults = fault(at_step=AT, lasts_s=6.0), DeletePod(rank=1, at_step=AT + 2)
    options = {"step_s": 0.04}
    outcome = survives(
        chaos, *faults, nodes=3, spares=0, steps=450, options=options, node_replacements=1
    )
    assert len(outcome.records("node_replaced")) == 1
    assert outcome.steps[-1].world == 3


def test_a_preempted_pod_costs_nothing(chaos: Chaos) -> None:
    survives(chaos, PreemptPod(rank=1, at_step=AT), steps=600)


def test_a_preempted_pod_leaves(chaos: Chaos) -> None:
    """A preempted pod has its grace period, like one that is drained."""
    policy = ElasticPolicy(min_replicas=2, max_replicas=3)
    outcome = survives(
        chaos, PreemptPod(rank=1, at_step=AT), nodes=3, spares=0, steps=600, elastic=policy
    )
    assert outcome.records("detected") == []
    assert outcome.steps[-1].world == 2


@pytest.mark.parametrize("fault", [DeletePod, EvictPod])
def test_a_pod_that_is_told_to_go_leaves(chaos: Chaos, fault: type[DeletePod | EvictPod]) -> None:
    """Given time, and an elastic policy, a deletion is no loss: no rank is given up."""
    policy = ElasticPolicy(min_replicas=2, max_replicas=3)
    outcome = survives(
        chaos, fault(rank=1, at_step=AT, grace_s=20), nodes=3, spares=0, steps=100, elastic=policy
    )
    assert outcome.records("detected") == []
    assert outcome.steps[-1].world == 2
