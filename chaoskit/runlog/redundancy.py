"""When pieces of a sharded state lacked copies, read from the journals: then one more loss may be one too many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chaoskit.journal import Record
from chaoskit.runlog.injected import InjectionRecord
from chaoskit.runlog.outcome import Exposure
from chaoskit.vocabulary import Event


@dataclass(frozen=True, slots=True)
class Window:
    """A time in which not every piece had all its copies.

    Args:
        begun_ns: when it became known. The loss itself may have been earlier.
        ended_ns: when every piece had its copies again; None if that never came.
        pieces: which lacked copies at some moment of it.
    """

    begun_ns: int
    ended_ns: int | None
    pieces: tuple[int, ...]


def windows(records: Iterable[Record], copies: int) -> list[Window]:
    """All windows, by time. That in which the training has its first copies made is none.

    A membership counts as protected when the piece of each of its workers is known to have so many copies. Only of a
    state in pieces that is told.
    """
    found: list[Window] = []
    members: set[str] = set()
    lacking: set[str] = set()
    pieces: dict[str, int] = {}
    begun_ns, touched = 0, set[int]()
    whole = False  # whether every piece had its copies at some time
    for record in records:
        if record.event == Event.PLAN:
            members = {member["worker"] for member in record["members"]}
            lacking = set(members)
        elif record.event == Event.EXPOSED:
            lacking |= {record["worker"]} & members
        elif record.event == Event.PROTECTED:
            pieces[record["worker"]] = record["piece"]
            lacking -= {record["worker"]} if len(record["nodes"]) >= copies else set()
        else:
            continue
        touched |= {pieces[worker] for worker in lacking if worker in pieces}
        if lacking and whole and not begun_ns:
            begun_ns = record.t_ns
        elif not lacking and members:
            if begun_ns:
                found.append(Window(begun_ns, record.t_ns, tuple(sorted(touched))))
            whole, begun_ns, touched = True, 0, set()
    return [*found, Window(begun_ns, None, tuple(sorted(touched)))] if begun_ns else found


def restored_ns(found: Sequence[Window], after_ns: int) -> int | None:
    """When every piece had its copies after ``after_ns``: at once, if none lacked any; None: never."""
    later = [window for window in found if window.ended_ns is None or window.ended_ns >= after_ns]
    return later[0].ended_ns if later else after_ns


def exposures(
    found: Sequence[Window], strikes: Iterable[InjectionRecord], started_ns: int
) -> list[Exposure]:
    """Each window as people read it: from the first fault that struck since the one before, if any did."""
    acts = [
        (strike.target.injected_ns, str(strike.fault))
        for strike in strikes
        if strike.target and not strike.missed
    ]
    told, before_ns = [], 0
    for window in found:
        causes = sorted(act for act in acts if before_ns < act[0] <= window.begun_ns)
        begun_ns, fault = causes[0] if causes else (window.begun_ns, None)
        ended_ns = before_ns = window.ended_ns or window.begun_ns
        told.append(
            Exposure(
                fault=fault,
                begun_s=(begun_ns - started_ns) / 1e9,
                seconds=None if window.ended_ns is None else (ended_ns - begun_ns) / 1e9,
                pieces=list(window.pieces),
            )
        )
    return told
