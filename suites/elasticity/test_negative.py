"""Negative tests: plans that must not begin, and runs that must fail.

A suite that passes everything proves nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from chaoskit import BadInput, Chaos, ElasticPolicy, Verdict
from chaoskit.faults import Demand, Scale, TakeSpot
from chaoskit.suites.elasticity.expect import OPTIONS, POLICY, STEPS
from chaoskit.suites.elasticity.storms import storm
from chaoskit.suites.recovery.expect import STEADY


@pytest.mark.promise("a size that the elastic policy allows.")
def test_a_storm_of_sizes_that_the_policy_forbids_never_begins(chaos: Chaos) -> None:
    even = ElasticPolicy(min_replicas=2, max_replicas=4, replica_increment_step=2)
    with pytest.raises(BadInput, match="to=3"):
        chaos.run(
            STEADY,
            steps=STEPS,
            elastic=even,
            faults=storm(0, POLICY, resizes=5, start=4),
            check=False,
        )
    assert chaos.outcomes == []


@pytest.mark.parametrize(
    "fault", [Scale(to=2, at_step=5), TakeSpot(rank=1, at_step=5), Demand(at_step=5)], ids=str
)
def test_without_a_policy_nothing_begins(chaos: Chaos, fault: Scale | TakeSpot | Demand) -> None:
    with pytest.raises(BadInput, match="elastic"):
        chaos.run(STEADY, steps=STEPS, faults=[fault], check=False)
    assert chaos.outcomes == []


@pytest.mark.xfail(
    strict=True,
    reason="below the smallest size a second rank is started on a node that is left, instead of a wait",
)
def test_a_world_that_may_not_be_smaller_waits_for_ever(chaos: Chaos) -> None:
    """A world that needs all its nodes does not go on without one."""
    rigid = ElasticPolicy(min_replicas=3, max_replicas=3)
    outcome = chaos.run(
        STEADY,
        nodes=3,
        spares=0,
        steps=60,
        options=OPTIONS,
        elastic=rigid,
        faults=[TakeSpot(rank=1, grace_s=0.3, at_step=10)],
        deadline_s=20.0,
        twin=False,
        check=False,
    )
    assert [record["node"] for record in outcome.records("node_lost")] == ["node1"]
    assert len(outcome.records("plan")) == 1
    assert outcome.verdict == Verdict.FAILED
    assert "did not end within its deadline" in outcome.reasons[0]
    assert len(outcome.steps) < 60


def test_a_job_whose_nodes_are_all_taken_is_lost(chaos: Chaos) -> None:
    """No rank and no copy is left: the run ends with that reason."""
    faults = [TakeSpot(rank=rank, grace_s=0.0, at_step=10) for rank in range(2)]
    plan: dict[str, Any] = {
        "nodes": 2,
        "spares": 0,
        "steps": 60,
        "deadline_s": 60.0,
        "twin": False,
    }
    outcome = chaos.run(STEADY, faults=faults, options=OPTIONS, elastic=POLICY, check=False, **plan)
    assert outcome.verdict == Verdict.FAILED
    assert "every replica was lost" in outcome.reasons[0]
    assert {record["node"] for record in outcome.records("node_lost")} == {"node0", "node1"}
