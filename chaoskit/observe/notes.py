"""Notes: journal records as lines of text for observers of a run.

-> observe/follower.py keeps the newest notes. vocabulary.py: the events.
"""

from __future__ import annotations

from typing import Any

import msgspec

from chaoskit.journal import Record
from chaoskit.plaintext import plural
from chaoskit.report.summary import duration
from chaoskit.runlog.account.setback import Setback
from chaoskit.runlog.account.time_account import PLANNED
from chaoskit.vocabulary import EXITED, Event


class Note(msgspec.Struct, frozen=True):
    """A line about an event.

    Attributes:
        t_ns: the time on CLOCK_MONOTONIC.
        kind: info, bad or good, by which it is coloured.
    """

    t_ns: int
    kind: str
    text: str


def note_of(record: Record) -> Note | None:
    """Return a note about ``record``, or None if the event is not worth a line."""
    kind_and_text = _kind_and_text(record)
    return Note(record.t_ns, *kind_and_text) if kind_and_text else None


def note_of_return(setback: Setback) -> Note:
    """Return a note that training goes on after a recovery or a planned resize."""
    t_ns = setback.good_ns or setback.noticed_ns
    strength = f"with {plural(setback.world, 'rank')}" if setback.world else "again"
    if setback.planned or setback.cause == PLANNED:
        return Note(t_ns, "good", f"step {setback.step + 1} committed {strength}, as planned")
    after = f"{duration(setback.seconds)} after the {'fault' if setback.fault else 'loss'}"
    return Note(t_ns, "good", f"step {setback.step + 1} committed {strength}, {after}")


def _kind_and_text(record: Record) -> tuple[str, str] | None:
    """Return kind and text of a record; None if it is not worth a line.

    This function has the events about faults, losses and corruption.
    """
    get = record.get
    match record.event:
        case Event.INJECTED:
            return "bad", f"fault injected: {get('what')}"
        case Event.DETECTED:
            subject = (
                f"rank {get('rank')} ({get('worker')})"
                if get("rank") is not None
                else f"spare {get('worker')}"
            )
            return "bad", f"{subject} lost: {_loss_text(str(get('cause')), str(get('detail')))}"
        case Event.NODE_LOST:
            return "bad", f"{get('node')} lost: {get('detail')}"
        case Event.NONFINITE if get("owner") is None:
            return "bad", f"step {get('step')}: a sum of gradients is not finite"
        case Event.NONFINITE:
            return (
                "bad",
                f"step {get('step')}: the contribution of rank {get('owner')} is not finite",
            )
        case Event.CORRUPT:
            return (
                "bad",
                f"step {get('step')}: {get('what')} of rank {get('rank')} is corrupt ({get('verdict')})",
            )
        case Event.RULE_FIRED:
            subject = f"rank {get('rank')}" if get("rank") is not None else str(get("worker"))
            return (
                "info" if get("action") == "none" else "bad"
            ), f"log rule {get('rule')}, {subject}: {get('verdict')}, {get('reason')}"
        case Event.SAVE_FAILED:
            return "bad", f"step {get('step')} not stored on {get('tier')}: {get('reason')}"
        case _:
            return _kind_and_text_of_other_event(record.event, record.fields)


def _kind_and_text_of_other_event(event: str, fields: dict[str, Any]) -> tuple[str, str] | None:
    """Return kind and text of another event of a run; None if it is not worth a line."""
    match event:
        case Event.PLAN:
            return (
                "info",
                f"generation {fields['generation']}: {plural(len(fields['members']), 'rank')}",
            )
        case Event.RESTORED:
            return (
                "info",
                f"rank {fields['rank']} received the state of step {fields['step']} from {fields['source']}",
            )
        case Event.SAVED:
            return "info", f"step {fields['step']} stored on {fields['tier']}"
        case Event.SET_ASIDE:
            reason = (
                f"it lost {plural(fields['strikes'], 'worker')}"
                if fields["strikes"]
                else fields["detail"]
            )
            return "bad", f"{fields['node']} gets no more workers: {reason}"
        case Event.LEFT_OUT:
            return (
                "bad",
                f"the world goes on without {', '.join(fields['nodes'])}: {fields['detail']}",
            )
        case Event.RETURNED:
            return "good", f"{', '.join(fields['nodes'])} can reach all other nodes again"
        case Event.RESIZED:
            return "info", fields.get(
                "reason"
            ) or f"the world is resized to {plural(fields['size'], 'node')}"
        case Event.EVICTED:
            return "bad", f"{fields['node']} evicted: {fields['detail']}"
        case Event.RESUMED:
            return "info", f"coordinator {fields['term']} took over from the one before it"
        case Event.RECORD_LOST:
            return "bad", f"the coordinator's log was lost: {fields['detail']}"
        case Event.CONNECTIONS_REFUSED:
            return "bad", f"{plural(fields['count'], 'connection')} refused: {fields['reason']}"
        case Event.JOB_ENDED:
            return ("good" if fields["ok"] else "bad"), f"the job ended: {fields['reason']}"
    return None


def _loss_text(cause: str, detail: str) -> str:
    """Return a text about the cause of a loss."""
    if cause == EXITED:
        return "its process ended"
    return detail if detail.startswith(cause) else f"{cause}: {detail}" if detail else cause
