"""Journals: append-only records of each process, on one clock.

A journal is a file of JSON lines. Each line is written by one ``write(2)``. So a SIGKILL loses no
record that was written, and never tears a line of another process. ``t_ns`` is on the run's clock
(:mod:`chaoskit.process.run_clock`). Lines carry a sequence number and a checksum, which reveal
missing and damaged lines (:class:`FileCoverage`).

While the disk is full, records wait in memory, where a SIGKILL loses them. They are written in
order once there is room. A line that was written only in part is blanked out and written again.

-> vocabulary.py (Event): the events and their fields. journal/writer.py: how long records wait.
"""

from __future__ import annotations

from chaoskit.journal.lines import Record
from chaoskit.journal.reader import (
    FileCoverage,
    Journals,
    JournalTail,
    WriterCoverage,
    load_journals,
    read_events,
    read_journals,
    read_tail,
)
from chaoskit.journal.writer import Journal

__all__ = [
    "FileCoverage",
    "Journal",
    "JournalTail",
    "Journals",
    "Record",
    "WriterCoverage",
    "load_journals",
    "read_events",
    "read_journals",
    "read_tail",
]
