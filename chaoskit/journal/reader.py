"""The reading end of journals: records by time, and the readable part of each file.

No content of a file stops a reader: damaged lines are left out. :func:`load_journals` counts them,
and counts and leaves out repeated ones; the other readers return a repeated line again.

-> experiment/judge/coverage.py: missing and damaged records make a run unknown.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from chaoskit.journal.lines import JournalLine, Record, has_mark, marks, unseal
from chaoskit.vocabulary import Event

_TAIL_BYTES = 1 << 18


class WriterCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """The readable part of the records of one process in a file.

    Attributes:
        writer: the name of the process in its lines.
        records: the number of readable records, each counted once.
        missing: the number of missing records before the newest readable one.
        repeated: the number of repeated lines.
        first_ns, last_ns: the earliest and the latest time of a record.
        opened, closed: the records that the process wrote about itself at its begin, and at an
            orderly end; None if missing.
    """

    writer: str
    records: int
    missing: int
    repeated: int
    first_ns: int
    last_ns: int
    opened: Record | None
    closed: Record | None

    @property
    def role(self) -> str:
        """The role of the process in the run; "" if it is not known."""
        return str(self.opened["role"]) if self.opened is not None else ""

    @property
    def node(self) -> str:
        """The node of the process; "" if it is not known, or the process belonged to no node."""
        return str(self.opened["node"]) if self.opened is not None else ""


class FileCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """The readable part of one journal file.

    Attributes:
        source: the name of the file without suffix, as in records.
        bad_lines: the number of damaged lines, of all writers.
        torn: the last damaged line is the end of the file and has no line break, because its writer
            was killed.
        writers: the writers by the time of their first record.
    """

    source: str
    bad_lines: int
    torn: bool
    writers: tuple[WriterCoverage, ...]

    @property
    def records(self) -> int:
        """The number of readable records, of all writers."""
        return sum(writer.records for writer in self.writers)

    @property
    def missing(self) -> int:
        """The number of records that are missing, of all writers."""
        return sum(writer.missing for writer in self.writers)

    @property
    def repeated(self) -> int:
        """The number of repeated lines, of all writers."""
        return sum(writer.repeated for writer in self.writers)


@dataclass(frozen=True, slots=True)
class Journals:
    """All journals of a run.

    Attributes:
        records: the records by time, each once.
        files: source -> the readable part of its file.
    """

    records: list[Record]
    files: dict[str, FileCoverage]


def load_journals(directory: Path) -> Journals:
    """Return every readable record of every journal in ``directory``, and each file's coverage."""
    records, files = list[Record](), dict[str, FileCoverage]()
    for path in sorted(directory.glob("*.jsonl")):
        tally = _Tally(path.stem)
        tally.read(path.read_bytes())
        records += tally.records
        files[path.stem] = tally.coverage()
    return Journals(sorted(records, key=lambda record: record.t_ns), files)


def read_journals(directory: Path) -> list[Record]:
    """Return every readable record of every journal in ``directory``, ordered by time."""
    return load_journals(directory).records


def read_events(directory: Path, *events: Event) -> list[Record]:
    """Return the records of these events, ordered by time; other lines are not decoded.

    A repeated line gives its record again. A directory without journals gives an empty list, and
    so do no events.
    """
    event_marks, records = marks(events), list[Record]()
    for path in sorted(directory.glob("*.jsonl")):
        lines = (line for line in path.read_bytes().split(b"\n") if has_mark(line, event_marks))
        records += (line.record for line in _unsealed(lines, path.stem))
    return sorted(records, key=lambda record: record.t_ns)


def read_tail(directory: Path) -> list[Record]:
    """Return the newest records of every journal in ``directory``, file after file.

    The last 256 KiB of each file are read, since a run may have written for days. A line that is
    cut by that limit is left out. The records of a file keep the order of its lines.
    """
    records = list[Record]()
    for path in sorted(directory.glob("*.jsonl")):
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            records += (line.record for line in _unsealed(file.read().split(b"\n"), path.stem))
    return records


def _unsealed(lines: Iterable[bytes], source: str) -> Iterator[JournalLine]:
    """Return the undamaged lines; the first one may be a fragment."""
    return (line for line in (unseal(text, source) for text in lines) if line is not None)


class _Tally:
    """Reader of one file, which counts damaged lines and the lines of each writer."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._bad_lines, self._torn = 0, False
        self._writers: dict[str, _WriterTally] = {}
        self._lines: list[JournalLine] = []

    def read(self, data: bytes) -> None:
        """Count the lines in ``data``, the whole content of the file, and keep undamaged ones."""
        *whole_lines, last_line = data.split(b"\n")
        for text in whole_lines:
            if text.strip():  # a blank line is a fragment that was blanked out
                self._take(text)
        if last_line.strip():
            self._torn = not self._take(last_line)

    def _take(self, text: bytes) -> bool:
        """Count a line and keep it unless it is repeated; return False if it is damaged."""
        line = unseal(text, self._source)
        if line is None:
            self._bad_lines += 1
            return False
        writer = self._writers.get(line.by)
        if writer is None:
            writer = self._writers[line.by] = _WriterTally(line)
        if writer.take(line):
            self._lines.append(line)
        return True

    @property
    def records(self) -> list[Record]:
        """The records by time, and by number within the same time.

        A repeated line may be out of place.
        """
        return [
            line.record
            for line in sorted(self._lines, key=lambda line: (line.record.t_ns, line.seq))
        ]

    def coverage(self) -> FileCoverage:
        """Return the readable part of the file, as counted so far."""
        writers = [writer.coverage() for writer in self._writers.values()]
        return FileCoverage(
            source=self._source,
            bad_lines=self._bad_lines,
            torn=self._torn,
            writers=tuple(sorted(writers, key=lambda writer: writer.first_ns)),
        )


class _WriterTally:
    """Count of the lines of one writer.

    A signal handler may write between number and line, so the order of the lines does not matter.
    """

    def __init__(self, first_line: JournalLine) -> None:
        self._writer_name = first_line.by
        self._first_ns = self._last_ns = first_line.record.t_ns
        self._seen_numbers: set[int] = set()
        self._repeated = 0
        self._opened: Record | None = None
        self._closed: Record | None = None

    def take(self, line: JournalLine) -> bool:
        """Count a line; return False if it is repeated."""
        if line.seq in self._seen_numbers:
            self._repeated += 1
            return False
        self._seen_numbers.add(line.seq)
        record = line.record
        self._first_ns, self._last_ns = (
            min(self._first_ns, record.t_ns),
            max(self._last_ns, record.t_ns),
        )
        if record.event == Event.OPENED:
            self._opened = record
        elif record.event == Event.CLOSED:
            self._closed = record
        return True

    def coverage(self) -> WriterCoverage:
        """Return the readable part of the writer's records."""
        return WriterCoverage(
            writer=self._writer_name,
            records=len(self._seen_numbers),
            missing=max(self._seen_numbers) + 1 - len(self._seen_numbers),
            repeated=self._repeated,
            first_ns=self._first_ns,
            last_ns=self._last_ns,
            opened=self._opened,
            closed=self._closed,
        )


class JournalTail:
    """Reader that follows the journals of ``directory`` while they grow, each line once.

    Args:
        directory: the directory of the journals.
        without: events with records that are left out, before they are decoded.
    """

    def __init__(self, directory: Path, without: Collection[str] = ()) -> None:
        self._directory = directory
        self._read_bytes: dict[Path, int] = {}
        self._excluded_marks = marks(without)

    def poll(self, last_bytes: int = 0) -> list[Record]:
        """Return the complete records written since the last call, ordered by time.

        Damaged lines are left out. A line that is not complete yet is returned by a later call.
        Records of a later call may be older than those of this one.

        Args:
            last_bytes: the number of bytes at the end of a file that its first reading covers; 0
                for the whole file. A line that this cuts is left out.
        """
        records = [
            record
            for path in self._directory.glob("*.jsonl")
            for record in self._new_records(path, last_bytes)
        ]
        return sorted(records, key=lambda record: record.t_ns)

    def _new_records(self, path: Path, last_bytes: int) -> Iterator[Record]:
        """Yield the new records of a file, and store how far the file was read."""
        size_bytes = path.stat().st_size
        begin_bytes = self._read_bytes.get(
            path, max(0, size_bytes - last_bytes) if last_bytes else 0
        )
        if size_bytes <= begin_bytes:
            return
        with path.open("rb") as file:
            file.seek(begin_bytes)
            data = file.read(size_bytes - begin_bytes)
        whole_bytes = data.rfind(b"\n") + 1
        self._read_bytes[path] = begin_bytes + whole_bytes
        lines = (
            line
            for line in data[:whole_bytes].split(b"\n")
            if not has_mark(line, self._excluded_marks)
        )
        yield from (line.record for line in _unsealed(lines, path.stem))
