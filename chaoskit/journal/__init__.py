"""Append-only records of what each process saw, on one clock.

A journal is a file of JSON lines. Each line is written by one ``write(2)``, so a SIGKILL loses nothing that was
reported and never tears a line of another process. ``t_ns`` is of the run's clock (:mod:`chaoskit.process.run_clock`).
Lines carry a sequence number and a checksum: what is missing or damaged is known (:class:`FileCoverage`).

While the disk is full, records wait in memory, where a SIGKILL does lose them, and are written in their order once
there is room. A line that found room for its begin only is blanked out and written again, whole.
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
