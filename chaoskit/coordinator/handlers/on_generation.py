"""Progress of the last plan: its members form a group, or the generation is planned again.

-> runtime/group/regroup.py: how a member builds the group, and what it reports.
coordinator/membership/apply.py: what a settled or stalled generation changes.
"""

from __future__ import annotations

from chaoskit.coordinator.commit import commit
from chaoskit.coordinator.detectors.links import SUSPICION_S
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.notes import note_of_event
from chaoskit.coordinator.outputs import Output, Show
from chaoskit.coordinator.state import STALLS_MAX, BrokenReport, PlaneState
from chaoskit.wire.messages import Formed, GroupBroken, Healed

#: The loss of a rank is usually reported within this time of the collectives that it breaks.
BROKEN_GRACE_S = 0.15


def formed(state: PlaneState, message: Formed, now_s: float) -> list[Output]:
    """Note that a member has built its group. The last report of all settles the generation.

    A report of another generation is only shown to observers.
    """
    shown, forming, generation = [Show(message)], state.forming, message.generation
    if generation != state.membership.generation:
        return [*shown]
    forming.formed.add(message.worker)
    if forming.settled == generation or not forming.formed.issuperset(state.membership.members):
        return [*shown]
    return [*shown, *_settle(state, generation, now_s)]


def note_trained(state: PlaneState, generation: int, now_s: float) -> list[Output]:
    """Settle a generation in which a rank committed a step: all its members had built the group.

    Members that are lost cannot report it any more, and members with a slow agent cannot report it
    yet. Return no outputs if the report changes nothing.
    """
    return _settle(state, generation, now_s) if state.membership.may_have_worked(generation) else []


def _settle(state: PlaneState, generation: int, now_s: float) -> list[Output]:
    """Commit that a generation has settled, with its members that are known to have ended."""
    state.forming.settled = max(state.forming.settled, generation)
    ended = state.workers.ended.intersection(state.membership.members)
    settled = events.Settled(generation, tuple(sorted(ended)))
    return [*note_of_event(settled, now_s), *commit(state, settled, now_s)]


def healed(state: PlaneState, message: Healed, now_s: float) -> list[Output]:
    """Commit that a member has taken the state over.

    A report that is out of date is only shown to observers.
    """
    shown = [Show(message)]
    if is_out_of_date(state, message.generation):
        return [*shown]
    return [*shown, *commit(state, message, now_s)]


def is_out_of_date(state: PlaneState, generation: int) -> bool:
    """Return whether a report of a member of ``generation`` is out of date.

    In a sharded job, each generation takes its pieces of the state over again.
    """
    return state.config.job.sharded and generation != state.membership.generation


def group_broken(state: PlaneState, message: GroupBroken, now_s: float) -> list[Output]:
    """Note the first report that the collectives of the last generation broke; show each report.

    :func:`renew_broken` plans the generation again after :data:`BROKEN_GRACE_S`.
    """
    if message.generation == state.membership.generation and state.forming.broken is None:
        state.forming.broken = BrokenReport(now_s + BROKEN_GRACE_S, message.worker, message.detail)
    return [Show(message)]


def renew_broken(state: PlaneState, now_s: float) -> list[Output]:
    """Plan a broken generation again, once its time is over and no loss has led to a newer plan."""
    broken = state.forming.broken
    if broken is None or now_s < broken.renew_s:
        return []
    outputs = renew(state, state.membership.generation, broken.detail, now_s, broken.worker)
    state.forming.broken = None
    return outputs


def renew(
    state: PlaneState, generation: int, detail: str, now_s: float, by: str = ""
) -> list[Output]:
    """Plan the members of the last generation again; without outputs for an earlier generation.

    The job fails instead after :data:`STALLS_MAX` new starts without a committed step. Links are
    tested for a while.

    Args:
        detail: the reason for the new start, in words.
        by: the worker that reported first that the generation broke.
    """
    if generation != state.membership.generation:
        return []
    state.forming.suspicious_until_s = now_s + SUSPICION_S
    if state.forming.stalls.note("stalled", state.detectors.watch.committed):
        reason = f"no step is committed after {STALLS_MAX} new starts: {detail}"
        return commit(state, events.RunFailed(reason), now_s)
    return commit(state, events.Stalled(generation, by), now_s)
