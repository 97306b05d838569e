"""Ranks that hang: the progress boards of all ranks together show which one holds up the others.

-> coordinator/detectors/hang.py and join_timeout.py find them, phase_limits.py has the limits.
coordinator/handlers/on_rule_fired.py: ranks that a log rule calls hanging.
"""

from __future__ import annotations

from chaoskit.coordinator.commit import commit
from chaoskit.coordinator.detectors.hang import HungRank
from chaoskit.coordinator.handlers.on_generation import renew
from chaoskit.coordinator.handlers.on_worker_lost import give_up
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import Output, WriteRecord
from chaoskit.coordinator.state import PlaneState
from chaoskit.vocabulary import HUNG, Event
from chaoskit.wire import messages
from chaoskit.wire.messages import Plan, Suspicion


def look_for_hangs(state: PlaneState, now_s: float) -> list[Output]:
    """Give up ranks that hang, and plan a generation again in which all ranks wait for each other.

    There are no outputs before the first plan. A hung rank on a node that is not in steady contact
    is kept: its reports may be late. Limits that have moved are written to the journal.
    """
    membership, watch, plan = state.membership, state.detectors.watch, state.membership.plan
    if plan is None:
        return []
    hangs, is_stalled = watch.look(
        plan,
        membership.crew,
        _arrived(state, plan),
        now_s,
        worked=membership.worked,
        is_over=membership.is_gathering,
        joiner_waits=bool(membership.spares) and len(membership.members) < membership.size,
        replacement_starts=membership.is_starting,
    )
    outputs: list[Output] = []
    for hang in hangs:
        if state.detectors.contact.is_steady(state.workers.node_of[hang.worker], now_s):
            outputs += _give_up_hung(state, hang, now_s)
    if (limits := watch.moved_limits()) is not None:
        outputs.append(WriteRecord(Event.HANG_LIMITS, limits))
    if is_stalled:
        outputs += renew(state, plan.generation, "every rank waits for the others", now_s)
    return outputs


def _arrived(state: PlaneState, plan: Plan) -> set[str]:
    """Return the members of ``plan`` that have come to its rendezvous."""
    ranks = state.board.arrived(messages.STANDING)
    # the members of a settled generation may have met at the previous coordinator
    is_settled = state.forming.settled == plan.generation
    return {member.worker for member in plan.members if is_settled or member.rank in ranks}


def _give_up_hung(state: PlaneState, hang: HungRank, now_s: float) -> list[Output]:
    """Give up a rank that hangs. The job fails if rank after rank hangs in the same step.

    A rank that others waited for raises the limit of its phase, as it may have been healthy.
    """
    watch, step = state.detectors.watch, state.detectors.watch.committed
    suspicion = Suspicion(hang.phase, hang.age_s, hang.limit_s) if hang.waited else None
    if suspicion is not None:
        watch.limits.suspect(suspicion)
    if state.detectors.suspects.note(hang.phase.label, step, hang.worker):
        reason = (
            f"rank after rank hangs in the {hang.phase.label} phase of step {step}: {hang.detail}"
        )
        return commit(state, events.RunFailed(reason), now_s)
    return give_up(state, hang.worker, HUNG, hang.detail, now_s, suspicion=suspicion)
