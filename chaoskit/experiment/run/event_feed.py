"""The thread that reads a run's journals while the run goes on, and shows its events to the platform."""

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

_LOOK_S = 0.5
#: A younger record may still be overtaken by an older one of another process, or of another machine.
_HOLD_NS = 500_000_000


@contextlib.contextmanager
def showing_events(directory: Path, show: Callable[[RunEvent], None] | None) -> Iterator[None]:
    """Show the events of the run in ``directory`` as long as a ``with`` lasts, on a thread of its own.

    Args:
        show: takes an event, and must not wait for anything; None where the platform shows none.
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
    try:
        _follow(JournalTail(directory / "journal", without=WITHOUT_EVENTS), show, is_over)
    except Exception as error:  # noqa: BLE001 - events are for people, and must not cost a run
        sys.stderr.write(f"events of {directory.name} are not shown any more: {error!r}\n")


def _follow(tail: JournalTail, show: Callable[[RunEvent], None], is_over: threading.Event) -> None:
    events, held = RunEvents(), list[Record]()
    while not is_over.wait(_LOOK_S):
        held = _by_time([*held, *tail.poll()])
        limit_ns = time.monotonic_ns() - _HOLD_NS
        ripe = [record for record in held if record.t_ns <= limit_ns]
        held = held[len(ripe) :]
        for record in ripe:
            _show(events.take(record), show)
    for record in _by_time([*held, *tail.poll()]):
        _show(events.take(record), show)
    _show(events.finish(), show)


def _show(events: list[RunEvent], show: Callable[[RunEvent], None]) -> None:
    for event in events:
        show(event)


def _by_time(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.t_ns)
