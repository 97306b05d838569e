"""Ranks that differ in speed: shards are moved, a straggler is given up, or links are tested.

-> coordinator/detectors/workload.py decides, by balance.py (shards) and stragglers.py (slow ranks).
coordinator/membership/assignment.py: which shards a rank gets.
"""

from __future__ import annotations

from chaoskit.coordinator.commit import commit
from chaoskit.coordinator.detectors.workload import GiveUpStraggler, TryLinks
from chaoskit.coordinator.handlers.on_worker_lost import give_up
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import Output, WriteRecord
from chaoskit.coordinator.state import PlaneState
from chaoskit.vocabulary import SLOW


def look_at_workload(state: PlaneState, now_s: float) -> list[Output]:
    """Carry out the decisions on the speed of the ranks.

    These are lines of the journal, other shares of the shards, tests of links, and stragglers that
    are given up.
    """
    outputs: list[Output] = []
    for decision in state.detectors.workload.look(state.membership):
        match decision:
            case WriteRecord():
                outputs.append(decision)
            case GiveUpStraggler(worker, detail):
                until_s = now_s + state.limits.farewell_of(state.config)  # it is healthy
                state.workers.farewells[worker] = until_s, detail
                outputs += give_up(state, worker, SLOW, detail, now_s)
            case TryLinks(nodes):
                outputs += state.detectors.link_speeds.order(nodes)
            case events.Rebalanced():
                outputs += commit(state, decision, now_s)
    return outputs
