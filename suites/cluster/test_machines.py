"""Tests of machines without power and a stopped API server.

They need commands that do this (``LEVERS``).
"""

from __future__ import annotations

import pytest

from chaoskit import Chaos, ElasticPolicy
from chaoskit.faults import DrainMachine, Fault, Kill, LoseMachine, StopApiServer, TaintMachine
from chaoskit.suites.recovery.expect import AT, survives

pytestmark = [pytest.mark.chaos(substrate="kubernetes"), pytest.mark.slow]


def needs(kind: type[Fault]) -> pytest.MarkDecorator:
    """Return a mark that skips a test if a fault of this kind cannot be injected."""
    reason = kind.unavailable()
    return pytest.mark.skipif(bool(reason), reason=f"substrate kubernetes: {reason}")


may_empty, needs_machines, needs_levers = (
    needs(DrainMachine),
    needs(LoseMachine),
    needs(StopApiServer),
)


@needs_machines
@pytest.mark.parametrize("phase", ["forward", "reduce"])
def test_a_machine_that_loses_its_power_costs_nothing(chaos: Chaos, phase: str) -> None:
    """Connections do not end, and the API server reports the machine ready: leases run out."""
    survives(chaos, LoseMachine(rank=1, at_step=AT, phase=phase), spares=0, steps=200)


@needs_machines
def test_a_lost_machines_nodes_come_back_elsewhere(chaos: Chaos) -> None:
    outcome = survives(
        chaos, LoseMachine(rank=1, at_step=AT), spares=0, steps=600, node_replacements=3
    )
    lost = {record["node"] for record in outcome.records("node_lost")}
    assert lost <= {record["node"] for record in outcome.records("node_replaced")}


@may_empty
def test_a_drained_machine_is_left_in_order(chaos: Chaos) -> None:
    """Given time, and an elastic policy, a drain is no loss: no rank is given up."""
    policy = ElasticPolicy(min_replicas=1, max_replicas=3)
    outcome = survives(chaos, DrainMachine(rank=1, at_step=AT), spares=0, steps=600, elastic=policy)
    assert outcome.records("detected") == []


@may_empty
def test_a_tainted_machine_costs_nothing(chaos: Chaos) -> None:
    survives(chaos, TaintMachine(rank=1, at_step=AT), spares=0, steps=600)


@needs_levers
def test_no_decision_waits_for_the_api_server(chaos: Chaos) -> None:
    """A rank that dies while the API server is stopped is replaced as ever."""
    survives(
        chaos, StopApiServer(at_step=AT, lasts_s=4.0), Kill(rank=1, at_step=AT + 40), steps=400
    )
