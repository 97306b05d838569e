"""Journal records in words: what somebody who looks at a run wants a line for."""

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
    """``kind``: info, bad or good. ``t_ns``: CLOCK_MONOTONIC."""

    t_ns: int
    kind: str
    text: str


def note_of(record: Record) -> Note | None:
    """What ``record`` says, or None where nobody wants to read it."""
    said = _words(record)
    return Note(record.t_ns, *said) if said else None


def note_of_return(setback: Setback) -> Note:
    """Training goes on."""
    t_ns = setback.good_ns or setback.noticed_ns
    strength = f"with {plural(setback.world, 'rank')}" if setback.world else "again"
    if setback.planned or setback.cause == PLANNED:
        return Note(t_ns, "good", f"step {setback.step + 1} committed {strength}, as planned")
    after = f"{duration(setback.seconds)} after the {'fault' if setback.fault else 'loss'}"
    return Note(t_ns, "good", f"step {setback.step + 1} committed {strength}, {after}")


def _words(record: Record) -> tuple[str, str] | None:
    get = record.get
    match record.event:
        case Event.INJECTED:
            return "bad", f"fault injected: {get('what')}"
        case Event.DETECTED:
            who = (
                f"rank {get('rank')} ({get('worker')})"
                if get("rank") is not None
                else f"spare {get('worker')}"
            )
            return "bad", f"{who} lost: {_reason(str(get('cause')), str(get('detail')))}"
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
            who = f"rank {get('rank')}" if get("rank") is not None else str(get("worker"))
            return (
                "info" if get("action") == "none" else "bad"
            ), f"log rule {get('rule')}, {who}: {get('verdict')}, {get('reason')}"
        case Event.SAVE_FAILED:
            return "bad", f"step {get('step')} not stored on {get('tier')}: {get('reason')}"
        case _:
            return _calm_words(record.event, record.fields)


def _calm_words(event: str, fields: dict[str, Any]) -> tuple[str, str] | None:
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
            ) or f"the world is to have {plural(fields['size'], 'node')}"
        case Event.EVICTED:
            return "bad", f"{fields['node']} evicted: {fields['detail']}"
        case Event.RESUMED:
            return "info", f"coordinator {fields['term']} took over from the one before it"
        case Event.RECORD_LOST:
            return "bad", f"the coordinator's record was lost: {fields['detail']}"
        case Event.CONNECTIONS_REFUSED:
            return "bad", f"{plural(fields['count'], 'connection')} refused: {fields['reason']}"
        case Event.JOB_ENDED:
            return ("good" if fields["ok"] else "bad"), f"the job ended: {fields['reason']}"
    return None


def _reason(cause: str, detail: str) -> str:
    if cause == EXITED:
        return "its process ended"
    return detail if detail.startswith(cause) else f"{cause}: {detail}" if detail else cause
