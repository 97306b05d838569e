"""The transition of a membership: an event in, actions out.

-> coordinator/membership/apply.py: what each event changes; coordinator/membership/decide.py: the
next plan, or the end. coordinator/commit.py calls this, and returns the entry for the log and the
effects.
"""

from __future__ import annotations

from chaoskit.coordinator.membership.apply import apply_event
from chaoskit.coordinator.membership.decide import decide
from chaoskit.coordinator.membership.events import Action, FinishJob, MembershipEvent
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.membership.restart_from_copies import search_copies, update_sharded_state


def handle(membership: Membership, event: MembershipEvent, now_s: float) -> list[Action]:
    """Change a membership by one event, and return the actions that follow, in order.

    The end of the job is the only action of its event, and no actions follow it. The start-up time
    counts from the first call.
    """
    status, target = membership.status, membership.target
    if status.finished:
        return []
    status.deadline_s = min(status.deadline_s, now_s + membership.config.startup_s)
    actions = apply_event(membership, event, now_s)
    if target.swap_by_s is not None and now_s >= target.swap_by_s:
        target.swap_by_s = None
    if membership.is_sharded:
        update_sharded_state(membership)
    actions += search_copies(membership, now_s)
    decision = decide(membership, now_s)
    if isinstance(decision, FinishJob):
        status.finished = True
        return [decision]
    # a plan comes before the starts: it holds them back until its generation has committed
    return [decision, *actions] if decision else actions
