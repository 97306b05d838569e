"""Followed logs in the directory of a run: a file of plain text for each place, and journal records.

The file of a place is ``log/NAME.log``. Several places may share a file, such as the pods that have
had one place of a job. The journal has a record for each place, each life and each hole. Records of
lives and holes hold the number of lines in the file before them.

-> attach/logs/records.py: lines, holes and places. vocabulary.py (Event): the journal records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        name_of: returns the name of the file of a place, without suffix. Default: the place's own.
    """

    def __init__(
        self,
        directory: Path,
        journal: Journal,
        name_of: Callable[[LogPlace], str] = lambda place: place.name,
    ) -> None:
        self._directory, self._journal, self._name_of = directory / FOLDER, journal, name_of
        self._files: dict[str, _PlaceFile] = {}
        self._names: dict[LogPlace, str] = {}
        self._directory.mkdir(parents=True, exist_ok=True)

    def receive(self, records: Sequence[ContainerLine | LogHole]) -> None:
        """Write lines and holes in their order.

        Raises:
            OSError: if a file cannot be written.
            JournalFull: as :meth:`Journal.write` does.
        """
        for record in records:
            if record.place not in self._names:
                self._begin(record.place)
            file = self._files[self._names[record.place]]
            if isinstance(record, LogHole):
                self._write_hole(record, file.lines)
                continue
            if record.life.container_id != file.container_id:
                file.container_id = record.life.container_id
                self._journal.write(
                    Event.LOG_LIFE,
                    t_ns=record.t_ns,
                    file=self._names[record.place],
                    life=record.life.number,
                    container_id=record.life.container_id,
                    line=file.lines,
                )
            file.write(record.content)
        for place in {record.place for record in records}:
            self._files[self._names[place]].flush()

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def _begin(self, place: LogPlace) -> None:
        """Open the file of a place, unless another place has opened it."""
        name = self._names[place] = self._name_of(place)
        if name not in self._files:
            self._files[name] = _PlaceFile(self._directory / f"{name}.log")
        self._journal.write(
            Event.LOG_FOLLOWED,
            file=name,
            pod=place.pod,
            uid=place.pod_uid,
            container=place.container,
        )

    def _write_hole(self, hole: LogHole, lines: int) -> None:
        """Write the record of a hole after so many lines of its file."""
        self._journal.write(
            Event.LOG_HOLE,
            t_ns=hole.t_ns,
            file=self._names[hole.place],
            pod=hole.place.pod,
            container=hole.place.container,
            life=hole.first_life,
            last_life=hole.last_life,
            reason=hole.reason.name.lower(),
            detail=hole.detail,
            after=hole.after,
            before=hole.before,
            line=lines,
        )


class _PlaceFile:
    """The file of one place, or of several.

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
        pod, container: the place.
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
    for record in records:
        if record.event == Event.LOG_HOLE:
            yield StoredHole(
                record["pod"],
                record["container"],
                record["file"],
                record["line"],
                record["reason"],
                record["after"],
                record["before"],
                record.t_ns,
            )
