"""What a night has done so far, line by line in its folder: after a kill, the next start goes on from there.

The unit is a test with all of its repeats: one that was not over is run anew, so that no comparison is made of runs
before and after a pause.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from chaoskit.errors import HarnessError
from chaoskit.history.finding import NumberFinding
from chaoskit.history.record import NightRecord, NightUnit

FILE_NAME = "night.jsonl"
_RESUMABLE_NS = 24 * 3600 * 10**9


class NightBegan(msgspec.Struct, frozen=True, tag_field="entry", tag="began"):
    """The first line. ``plan``: a digest of what was to be done."""

    night: str
    name: str
    plan: str
    commit: str
    started_unix_ns: int


class UnitDone(msgspec.Struct, frozen=True, tag_field="entry", tag="unit"):
    """A test is over in a part of the night, and its records are in the history."""

    unit: NightUnit
    findings: list[NumberFinding] = []


class NightStopped(msgspec.Struct, frozen=True, tag_field="entry", tag="stopped"):
    """It must not go on, for this reason: what follows a kill ends it."""

    reason: str


class NightEnded(msgspec.Struct, frozen=True, tag_field="entry", tag="ended"):
    """The last line."""

    record: NightRecord


Entry = NightBegan | UnitDone | NightStopped | NightEnded
_decoder = msgspec.json.Decoder(Entry)


@dataclass
class NightSoFar:
    """What the lines of a night say."""

    began: NightBegan | None = None
    units: list[NightUnit] = field(default_factory=list)
    findings: list[NumberFinding] = field(default_factory=list)
    stopped: str = ""
    ended: NightRecord | None = None

    def take(self, entry: Entry) -> None:
        """Add a line."""
        match entry:
            case NightBegan():
                self.began = entry
            case UnitDone(unit, findings):
                self.units.append(unit)
                self.findings += findings
            case NightStopped(reason):
                self.stopped = reason
            case NightEnded(record):
                self.ended = record

    def has_done(self, part: str, test: str) -> bool:
        """Whether a test is over in a part of the night."""
        return any(unit.part == part and unit.test == test for unit in self.units)

    def is_open_night(self, name: str) -> bool:
        """Whether it is one of this name that is not over."""
        return self.ended is None and self.began is not None and self.began.name == name

    def is_resumable(self, plan: str, commit: str, now_unix_ns: int) -> bool:
        """Whether it was killed while it did the same, within a day: another plan or commit is another night."""
        if self.ended is not None or self.began is None:
            return False
        is_same = (self.began.plan, self.began.commit) == (plan, commit)
        return is_same and now_unix_ns - self.began.started_unix_ns < _RESUMABLE_NS


def read_log(folder: Path) -> NightSoFar:
    """What the log in a folder says. A line that a kill has torn is left out."""
    found = NightSoFar()
    try:
        lines = (folder / FILE_NAME).read_bytes().split(b"\n")
    except OSError:
        return found
    for line in lines:
        try:
            found.take(_decoder.decode(line))
        except msgspec.MsgspecError:
            continue
    return found


def folders_beyond(root: Path, name: str, keep: int) -> list[Path]:
    """The folders of nights of this name that are over, but for the latest ones. The oldest comes first."""
    folders = sorted(
        root.glob(f"*-{name}-*/")
    )  # their names begin with the day, and end with what sorts by time
    over = [
        folder
        for folder in folders
        if (end := read_log(folder).ended) is not None and end.name == name
    ]
    return over[: max(0, len(over) - keep)]


class NightLog:
    """Writes the log of a night, and knows what it says.

    Raises:
        HarnessError: if it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.so_far = read_log(folder)

    def add(self, entry: Entry) -> None:
        """Write a line, and have it on the disk."""
        self.so_far.take(entry)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / FILE_NAME).open("ab") as file:
                is_torn = file.tell() and not (self.folder / FILE_NAME).read_bytes().endswith(b"\n")
                file.write((b"\n" if is_torn else b"") + msgspec.json.encode(entry) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise HarnessError(f"the log of the night cannot be written: {error}") from error
