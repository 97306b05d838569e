"""Lines of the journal that follow from the record.

A coordinator writes its decisions to the record first. When it ends before the journal has them, the next coordinator
writes the same lines, with the time of the decision.
"""

from __future__ import annotations

import msgspec

from chaoskit.coordinator.detectors.rulings import reason_of
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import Note
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Plan


def note_of_event(event: events.AnyEvent, now_s: float) -> list[Note]:
    """What an event is called in the journal, if it has a line of its own there. Losses are told by rank, elsewhere."""
    t_ns = int(now_s * 1e9)
    match event:
        case events.Settled(generation):
            return [Note(Event.SETTLED, {"generation": generation}, t_ns)]
        case events.LeftOut():
            return [Note(Event.LEFT_OUT, msgspec.structs.asdict(event), t_ns)]
        case events.Returned():
            return [Note(Event.RETURNED, msgspec.structs.asdict(event), t_ns)]
        case events.Evicted():
            return [Note(Event.EVICTED, msgspec.structs.asdict(event), t_ns)]
        case events.Ruled(fired=fired, aside=True):
            return [
                Note(
                    Event.SET_ASIDE,
                    {"node": fired.node, "strikes": 0, "detail": reason_of(fired)},
                    t_ns,
                )
            ]
        case _:
            return []


def note_of_plan(plan: Plan, now_s: float) -> Note:
    """A plan that is published."""
    members = [
        {"rank": m.rank, "worker": m.worker, "node": m.node, "shards": m.shards}
        for m in plan.members
    ]
    fields = {
        "generation": plan.generation,
        "abort": plan.abort,
        "members": members,
        "leavers": plan.leavers,
        "reason": plan.reason,
    }
    return Note(Event.PLAN, fields, int(now_s * 1e9))


def note_of_set_aside(node: str, strikes: int, now_s: float) -> Note:
    """A node that has had its last strike."""
    return Note(Event.SET_ASIDE, {"node": node, "strikes": strikes}, int(now_s * 1e9))


def note_of_end(ok: bool, reason: str, now_s: float) -> Note:
    """The end of the job."""
    return Note(Event.JOB_ENDED, {"ok": ok, "reason": reason}, int(now_s * 1e9))
