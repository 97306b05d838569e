"""Lines of the journal that follow from the coordinator's log.

A coordinator writes its decisions to the log first. When it ends before the journal has them, the
next coordinator writes the same lines, with the time of the decision.

-> coordinator/commit.py: the lines of lost workers; coordinator/handlers/on_restart.py: the lines
that are written again. journal/__init__.py: the file of a journal.
"""

from __future__ import annotations

import msgspec

from chaoskit.coordinator.detectors.rulings import reason_of
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import WriteRecord
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Plan


def note_of_event(event: events.MembershipEvent, now_s: float) -> list[WriteRecord]:
    """Return the journal's line of an event, or an empty list if the event has none.

    The losses of ranks have lines of their own (:func:`chaoskit.coordinator.commit.announce_loss`).
    """
    t_ns = int(now_s * 1e9)
    match event:
        case events.Settled(generation):
            return [WriteRecord(Event.SETTLED, {"generation": generation}, t_ns)]
        case events.LeftOut():
            return [WriteRecord(Event.LEFT_OUT, msgspec.structs.asdict(event), t_ns)]
        case events.Readmitted():
            return [WriteRecord(Event.RETURNED, msgspec.structs.asdict(event), t_ns)]
        case events.Evicted():
            return [WriteRecord(Event.EVICTED, msgspec.structs.asdict(event), t_ns)]
        case events.Ruled(fired=fired, aside=True):
            return [
                WriteRecord(
                    Event.SET_ASIDE,
                    {"node": fired.node, "strikes": 0, "detail": reason_of(fired)},
                    t_ns,
                )
            ]
        case _:
            return []


def note_of_plan(plan: Plan, now_s: float) -> WriteRecord:
    """Return the journal's line of a published plan."""
    members = [
        {"rank": member.rank, "worker": member.worker, "node": member.node, "shards": member.shards}
        for member in plan.members
    ]
    fields = {
        "generation": plan.generation,
        "abort": plan.abort,
        "members": members,
        "leavers": plan.leavers,
        "reason": plan.reason,
    }
    return WriteRecord(Event.PLAN, fields, int(now_s * 1e9))


def note_of_set_aside(node: str, strikes: int, now_s: float) -> WriteRecord:
    """Return the journal's line of a node that is set aside after ``strikes`` lost workers."""
    return WriteRecord(Event.SET_ASIDE, {"node": node, "strikes": strikes}, int(now_s * 1e9))


def note_of_end(ok: bool, reason: str, now_s: float) -> WriteRecord:
    """Return the journal's line of the end of the job."""
    return WriteRecord(Event.JOB_ENDED, {"ok": ok, "reason": reason}, int(now_s * 1e9))
