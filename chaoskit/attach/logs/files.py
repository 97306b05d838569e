"""Followed logs in the directory of a run: a file of plain text for each place, and journal records.

The file of a place is ``log/NAME.log``. The journal has a record for each place, each life and each
hole. Records of lives and holes hold the number of lines in the file before them.

-> attach/logs/records.py: lines, holes and places. vocabulary.py (Event): the journal records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from chaoskit.attach.logs.records import ContainerLine, LogHole, LogPlace
from chaoskit.journal import Journal, Record
from chaoskit.vocabulary import Event

FOLDER = "log"


class LogFiles:
    """Writer of the logs of a run.

    Args:
        directory: the directory of the run.
        journal: receives the records.
    """

    def __init__(self, directory: Path, journal: Journal) -> None:
        self._directory, self._journal = directory / FOLDER, journal
        self._files: dict[LogPlace, _PlaceFile] = {}
        self._directory.mkdir(parents=True, exist_ok=True)

    def receive(self, records: Sequence[ContainerLine | LogHole]) -> None:
        """Write lines and holes in their order.

        Raises:
            OSError: if a file cannot be written.
            JournalFull: as :meth:`Journal.write` does.
        """
        for record in records:
            file = self._files.get(record.place) or self._begin(record.place)
            if isinstance(record, LogHole):
                self._write_hole(record, file.lines)
                continue
            if record.life.container_id != file.container_id:
                file.container_id = record.life.container_id
                self._journal.write(
                    Event.LOG_LIFE,
                    t_ns=record.t_ns,
                    file=record.place.name,
                    life=record.life.number,
                    container_id=record.life.container_id,
                    line=file.lines,
                )
            file.write(record.content)
        for place in {record.place for record in records}:
            self._files[place].flush()

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def _begin(self, place: LogPlace) -> _PlaceFile:
        """Open the file of a place."""
        file = _PlaceFile(self._directory / f"{place.name}.log")
        self._files[place] = file
        self._journal.write(
            Event.LOG_FOLLOWED,
            file=place.name,
            pod=place.pod,
            uid=place.pod_uid,
            container=place.container,
        )
        return file

    def _write_hole(self, hole: LogHole, lines: int) -> None:
        """Write the record of a hole after so many lines of its file."""
        self._journal.write(
            Event.LOG_HOLE,
            t_ns=hole.t_ns,
            file=hole.place.name,
            life=hole.first_life,
            last_life=hole.last_life,
            reason=hole.reason.name.lower(),
            detail=hole.detail,
            after=hole.after,
            before=hole.before,
            line=lines,
        )


class _PlaceFile:
    """The file of one place.

    Attributes:
        lines: number of lines that were written.
        container_id: ID of the container of the last line.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("ab")
        self.lines = 0
        self.container_id = ""

    def write(self, content: bytes) -> None:
        """Append a line."""
        self._file.write(content + b"\n")
        self.lines += 1

    def flush(self) -> None:
        """Pass all lines on to the kernel."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class StoredHole:
    """A hole of a log as the journal has it.

    Attributes:
        pod, container: the place; "" if the record of the place is missing.
        file: name of the file in ``log/``, without suffix.
        line: number of lines of the file before the hole.
        reason: name of a :class:`HoleReason`, in lower case.
        after, before: node's times of the lines around the hole; "" for none.
        t_ns: time at which the hole was noticed, on the run's clock.
    """

    pod: str
    container: str
    file: str
    line: int
    reason: str
    after: str
    before: str
    t_ns: int


def read_holes(records: Sequence[Record]) -> Iterator[StoredHole]:
    """Yield the holes of all logs, from the journal records of a run."""
    places = {record["file"]: record for record in records if record.event == Event.LOG_FOLLOWED}
    for record in records:
        if record.event == Event.LOG_HOLE:
            place = places.get(record["file"])
            yield StoredHole(
                place["pod"] if place is not None else "",
                place["container"] if place is not None else "",
                record["file"],
                record["line"],
                record["reason"],
                record["after"],
                record["before"],
                record.t_ns,
            )
