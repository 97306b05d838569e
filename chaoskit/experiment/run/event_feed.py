"""A thread that reads the journals of a running experiment and shows its events to the platform.

-> experiment/run/run_events.py: which records make an event. substrate/kubernetes/events.py: the
events of a pod or Job, as kubectl shows them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from chaoskit.experiment.run.run_events import WITHOUT_EVENTS, RunEvents
from chaoskit.journal import JournalTail, Record
from chaoskit.substrate.core.run_event import RunEvent

_POLL_S = 0.5
#: A record is held back this long, since an older one of another process or machine may still come.
_HOLD_NS = 500_000_000


@contextlib.contextmanager
def showing_events(directory: Path, show: Callable[[RunEvent], None] | None) -> Iterator[None]:
    """Show the events of the run in ``directory`` during a ``with`` block, in a thread of its own.

    The end of the block waits until the last events are shown. An error of ``show`` is written to
    stderr, and no further event is shown.

    Args:
        directory: the directory of the run.
        show: receives an event, and must not block; None if the platform shows no events.
    """
    if show is None:
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(
        target=_feed, args=[directory, show, is_over], name="ck-events", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _feed(directory: Path, show: Callable[[RunEvent], None], is_over: threading.Event) -> None:
    """Follow the journals; an error is written to stderr, because events must not fail a run."""
    try:
        _follow(JournalTail(directory / "journal", without=WITHOUT_EVENTS), show, is_over)
    except Exception as error:  # noqa: BLE001 - events are shown only, and must not fail a run
        sys.stderr.write(f"events of {directory.name} are not shown any more: {error!r}\n")


def _follow(tail: JournalTail, show: Callable[[RunEvent], None], is_over: threading.Event) -> None:
    """Read records until the run is over, and show their events in the order of time."""
    events, held_records = RunEvents(), list[Record]()
    while not is_over.wait(_POLL_S):
        held_records = _by_time([*held_records, *tail.poll()])
        limit_ns = time.monotonic_ns() - _HOLD_NS
        due_records = [record for record in held_records if record.t_ns <= limit_ns]
        held_records = held_records[len(due_records) :]
        for record in due_records:
            _show(events.take(record), show)
    for record in _by_time([*held_records, *tail.poll()]):
        _show(events.take(record), show)
    _show(events.finish(), show)


def _show(events: list[RunEvent], show: Callable[[RunEvent], None]) -> None:
    """Show events in order."""
    for event in events:
        show(event)


def _by_time(records: list[Record]) -> list[Record]:
    """Return records sorted by time."""
    return sorted(records, key=lambda record: record.t_ns)
