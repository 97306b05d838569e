"""Tests of nodes that come and go as spot machines do.

The traces of this file are made up, in published formats.
"""

from __future__ import annotations

import os

import pytest

from chaoskit import Chaos
from chaoskit.elastic.traces import parse_trace, read_trace
from chaoskit.suites.elasticity.expect import POLICY, no_rank_is_lost, resizes, sizes
from chaoskit.suites.elasticity.storms import from_trace

#: Seconds into which a whole trace is compressed.
_LASTS_S = 6.0
_GRACE_S = 2.0

TRACES = {
    "oobleck": "0,add,a\n0,add,b\n0,add,c\n600000,remove,b\n1200000,add,d\n1500000,remove,a\n2400000,add,b\n",
    "bamboo": "0,4\n600,3\n1800,4\n2400,2\n",
    "skypilot": '{"metadata": {"gap_seconds": 600}, "data": [2, 4, 4, 3, 2]}',
}


@pytest.mark.slow
@pytest.mark.promise("gives (time_s, node, joins), from three published formats", name="skypilot")
@pytest.mark.parametrize("name", TRACES)
def test_a_trace(chaos: Chaos, name: str) -> None:
    """Nodes with a notice leave in time, so that nothing is lost; new nodes are used."""
    trace = parse_trace(TRACES[name], name)
    spot = from_trace(trace.compressed(trace.duration_s / _LASTS_S), POLICY, grace_s=_GRACE_S)
    outcome = resizes(chaos, *spot.faults, nodes=spot.nodes)
    assert len(sizes(outcome)) > 1
    no_rank_is_lost(outcome)


@pytest.mark.slow
@pytest.mark.promise("None of these formats knows a notice before the loss.")
def test_a_trace_without_notices(chaos: Chaos) -> None:
    """Each node that leaves without a notice is a loss.

    None of the published formats knows a notice.
    """
    trace = parse_trace(TRACES["oobleck"])
    spot = from_trace(trace.compressed(trace.duration_s / _LASTS_S), POLICY, grace_s=0.0)
    outcome = resizes(chaos, *spot.faults, nodes=spot.nodes)
    assert len(outcome.recoveries) == 2


@pytest.mark.skipif(
    "CHAOSKIT_SPOT_TRACE" not in os.environ,
    reason="name a trace of your own in CHAOSKIT_SPOT_TRACE",
)
def test_a_trace_of_your_own(chaos: Chaos) -> None:
    trace = read_trace(os.environ["CHAOSKIT_SPOT_TRACE"])
    spot = from_trace(
        trace.compressed(max(1e-3, trace.duration_s / _LASTS_S)), POLICY, grace_s=_GRACE_S
    )
    assert resizes(chaos, *spot.faults, nodes=spot.nodes).lost_steps == 0
