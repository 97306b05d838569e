"""Times in which pieces of a sharded state lacked copies, read from the journals.

A piece is the part of the state that one rank holds. In such a time one more loss may lose the
state.

-> checkpoint/peer/copy_placement.py: which nodes keep copies. daemon/piece_keeper.py writes the
records. checkpoint/peer/sender.py: how a copy is made again.
"""

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

    Attributes:
        begun_ns: the time at which the lack was recorded. The loss itself may have been earlier.
        ended_ns: the time at which every piece had its copies again; None if that never happened.
        pieces: the pieces that lacked copies at some moment of it.
    """

    begun_ns: int
    ended_ns: int | None
    pieces: tuple[int, ...]


def windows(records: Iterable[Record], copies: int) -> list[Window]:
    """Return all windows, by time, without the one before the first copies of the training.

    A membership counts as protected when the piece of each of its workers is recorded with so many
    copies. Only sharded states have such records.

    Args:
        records: the records of the run, by time.
        copies: the number of copies that each piece must have.
    """
    ended_windows: list[Window] = []
    members: set[str] = set()
    unprotected: set[str] = set()
    pieces: dict[str, int] = {}
    begun_ns, lacking_pieces = 0, set[int]()
    was_protected = False  # every piece had its copies at some time
    for record in records:
        if record.event == Event.PLAN:
            members = {member["worker"] for member in record["members"]}
            unprotected = set(members)
        elif record.event == Event.EXPOSED:
            unprotected |= {record["worker"]} & members
        elif record.event == Event.PROTECTED:
            pieces[record["worker"]] = record["piece"]
            unprotected -= {record["worker"]} if len(record["nodes"]) >= copies else set()
        else:
            continue
        lacking_pieces |= {pieces[worker] for worker in unprotected if worker in pieces}
        if unprotected and was_protected and not begun_ns:
            begun_ns = record.t_ns
        elif not unprotected and members:
            if begun_ns:
                ended_windows.append(Window(begun_ns, record.t_ns, tuple(sorted(lacking_pieces))))
            was_protected, begun_ns, lacking_pieces = True, 0, set()
    return (
        [*ended_windows, Window(begun_ns, None, tuple(sorted(lacking_pieces)))]
        if begun_ns
        else ended_windows
    )


def restored_ns(intervals: Sequence[Window], after_ns: int) -> int | None:
    """Return when every piece had its copies after ``after_ns``, in ns; None if it never had.

    That is the end of the first window that ends then or later. Without one, the result is
    ``after_ns`` itself.
    """
    later_windows = [
        window for window in intervals if window.ended_ns is None or window.ended_ns >= after_ns
    ]
    return later_windows[0].ended_ns if later_windows else after_ns


def exposures(
    intervals: Sequence[Window], strikes: Iterable[InjectionRecord], started_ns: int
) -> list[Exposure]:
    """Return the windows for a report.

    Each begins with the first fault that struck since the window before, if any.
    """
    acts = [
        (strike.target.injected_ns, str(strike.fault))
        for strike in strikes
        if strike.target and not strike.missed
    ]
    exposed_times, last_end_ns = [], 0
    for window in intervals:
        causes = sorted(act for act in acts if last_end_ns < act[0] <= window.begun_ns)
        begun_ns, fault = causes[0] if causes else (window.begun_ns, None)
        ended_ns = last_end_ns = window.ended_ns or window.begun_ns
        exposed_times.append(
            Exposure(
                fault=fault,
                begun_s=(begun_ns - started_ns) / 1e9,
                seconds=None if window.ended_ns is None else (ended_ns - begun_ns) / 1e9,
                pieces=list(window.pieces),
            )
        )
    return exposed_times
