"""The reading end of journals: records by time, and how much of each file could be read.

Nothing that a file holds stops a reader: a line that is damaged is counted and left out, and so is one that comes
twice.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from chaoskit.journal.lines import Line, Record, has_mark, marks, unseal
from chaoskit.vocabulary import Event

_TAIL_BYTES = 1 << 18


class WriterCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """What one process has written to a file, as far as it can be read.

    Attributes:
        writer: its name in the lines.
        records: that could be read, each once.
        missing: records before the newest of them that could not.
        repeated: lines that came again.
        first_ns, last_ns: the earliest and the latest time that a record bears.
        opened, closed: what it said of itself at its begin, and when it ended in order; None where that is missing.
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
        """Of the process in the run; "" where it is not known."""
        return str(self.opened["role"]) if self.opened is not None else ""

    @property
    def node(self) -> str:
        """Where the process ran; "" where that is not known, or it belonged to no node."""
        return str(self.opened["node"]) if self.opened is not None else ""


class FileCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """How much of one journal file could be read.

    Attributes:
        source: its name without suffix, as records have it.
        bad_lines: that are not as they were written, of all writers.
        torn: whether the last of them is the end of the file and has no line break: its writer was killed there.
        writers: by the time of their first record.
    """

    source: str
    bad_lines: int
    torn: bool
    writers: tuple[WriterCoverage, ...]

    @property
    def records(self) -> int:
        """Records that could be read, of all writers."""
        return sum(writer.records for writer in self.writers)

    @property
    def missing(self) -> int:
        """Records that are known to be missing, of all writers."""
        return sum(writer.missing for writer in self.writers)

    @property
    def repeated(self) -> int:
        """Lines that came again, of all writers."""
        return sum(writer.repeated for writer in self.writers)


@dataclass(frozen=True, slots=True)
class Journals:
    """All journals of a run.

    Attributes:
        records: ordered by time, each once.
        files: by source.
    """

    records: list[Record]
    files: dict[str, FileCoverage]


def load_journals(directory: Path) -> Journals:
    """Return every record of every journal in ``directory``, and how much of each file that is."""
    records, files = list[Record](), dict[str, FileCoverage]()
    for path in sorted(directory.glob("*.jsonl")):
        tally = _Tally(path.stem)
        tally.read(path.read_bytes())
        records += tally.records
        files[path.stem] = tally.coverage()
    return Journals(sorted(records, key=lambda record: record.t_ns), files)


def read_journals(directory: Path) -> list[Record]:
    """Return every record of every journal in ``directory``, ordered by time."""
    return load_journals(directory).records


def read_events(directory: Path, *events: Event) -> list[Record]:
    """Return the records of these events, ordered by time. No other line is decoded."""
    wanted, found = marks(events), list[Record]()
    for path in sorted(directory.glob("*.jsonl")):
        lines = (line for line in path.read_bytes().split(b"\n") if has_mark(line, wanted))
        found += (line.record for line in _unsealed(lines, path.stem))
    return sorted(found, key=lambda record: record.t_ns)


def read_tail(directory: Path) -> list[Record]:
    """Return the newest records of every journal in ``directory``: for a run that may have written for days."""
    found = list[Record]()
    for path in sorted(directory.glob("*.jsonl")):
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            found += (line.record for line in _unsealed(file.read().split(b"\n"), path.stem))
    return found


def _unsealed(lines: Iterable[bytes], source: str) -> Iterator[Line]:
    """Return those that can be read. The first one may lack its begin."""
    return (line for line in (unseal(text, source) for text in lines) if line is not None)


class _Tally:
    """Reads one file."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._bad_lines, self._torn = 0, False
        self._writers: dict[str, _WriterTally] = {}
        self._lines: list[Line] = []

    def read(self, data: bytes) -> None:
        *whole, rest = data.split(b"\n")
        for text in whole:
            if text.strip():  # else a line that found no room, and was blanked out
                self._take(text)
        if rest.strip():
            self._torn = not self._take(rest)

    def _take(self, text: bytes) -> bool:
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
        """By their time, and within a moment as they are numbered: a line that is there twice may be out of place."""
        return [
            line.record
            for line in sorted(self._lines, key=lambda line: (line.record.t_ns, line.seq))
        ]

    def coverage(self) -> FileCoverage:
        found = [writer.coverage() for writer in self._writers.values()]
        return FileCoverage(
            source=self._source,
            bad_lines=self._bad_lines,
            torn=self._torn,
            writers=tuple(sorted(found, key=lambda writer: writer.first_ns)),
        )


class _WriterTally:
    """Counts the lines of one writer. A signal handler may write between number and line, so order is not asked."""

    def __init__(self, first: Line) -> None:
        self._by = first.by
        self._first_ns = self._last_ns = first.record.t_ns
        self._seen: set[int] = set()
        self._repeated = 0
        self._opened: Record | None = None
        self._closed: Record | None = None

    def take(self, line: Line) -> bool:
        """Count it; False if it came before."""
        if line.seq in self._seen:
            self._repeated += 1
            return False
        self._seen.add(line.seq)
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
        return WriterCoverage(
            writer=self._by,
            records=len(self._seen),
            missing=max(self._seen) + 1 - len(self._seen),
            repeated=self._repeated,
            first_ns=self._first_ns,
            last_ns=self._last_ns,
            opened=self._opened,
            closed=self._closed,
        )


class JournalTail:
    """Follows the journals of ``directory`` while they grow, without ever reading a byte twice.

    Args:
        without: events whose records are left out, before they are decoded.
    """

    def __init__(self, directory: Path, without: Collection[str] = ()) -> None:
        self._directory = directory
        self._read_bytes: dict[Path, int] = {}
        self._without = marks(without)

    def poll(self, last_bytes: int = 0) -> list[Record]:
        """What was written since the last call, ordered by time; not what is written only in part.

        Args:
            last_bytes: of a file that is read for the first time, no more than its end; 0 for all of it.
        """
        records = [
            record
            for path in self._directory.glob("*.jsonl")
            for record in self._news(path, last_bytes)
        ]
        return sorted(records, key=lambda record: record.t_ns)

    def _news(self, path: Path, last_bytes: int) -> Iterator[Record]:
        size_bytes = path.stat().st_size
        begin = self._read_bytes.get(path, max(0, size_bytes - last_bytes) if last_bytes else 0)
        if size_bytes <= begin:
            return
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(size_bytes - begin)
        whole = data.rfind(b"\n") + 1
        self._read_bytes[path] = begin + whole
        lines = (line for line in data[:whole].split(b"\n") if not has_mark(line, self._without))
        yield from (line.record for line in _unsealed(lines, path.stem))
