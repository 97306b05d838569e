"""Log of a night: a line for each step in the night's folder, from which a killed night resumes.

The unit is a test with all of its repeats. A test that was not complete is run again from its
beginning, so that no comparison spans a pause.

-> nightly/run.py: ``Night._open``, which resumes a killed night or begins a new one.
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
    """The first line of a log.

    Attributes:
        night: the UUID of the night.
        name: the name of its plan.
        plan: a digest of the plan.
        commit: the tested commit; "" outside of a repository.
    """

    night: str
    name: str
    plan: str
    commit: str
    started_unix_ns: int


class UnitDone(msgspec.Struct, frozen=True, tag_field="entry", tag="unit"):
    """A test of a part of the night is complete.

    Its records are in the history, or wait for it. ``findings`` are those of a comparison.
    """

    unit: NightUnit
    findings: list[NumberFinding] = []


class NightStopped(msgspec.Struct, frozen=True, tag_field="entry", tag="stopped"):
    """The night must end for this reason. A kill does not change that: the next start ends it."""

    reason: str


class NightEnded(msgspec.Struct, frozen=True, tag_field="entry", tag="ended"):
    """The last line of a log, with the record of the night."""

    record: NightRecord


LogLine = NightBegan | UnitDone | NightStopped | NightEnded
_decoder = msgspec.json.Decoder(LogLine)


@dataclass
class NightState:
    """The contents of a log: the state of a night that may be under way.

    Attributes:
        began: the first line; None if there is no log.
        units: the complete tests.
        findings: the findings of the comparisons.
        stopped: why the night must end; "" if it may go on.
        ended: the record of the night; None until it is over.
    """

    began: NightBegan | None = None
    units: list[NightUnit] = field(default_factory=list)
    findings: list[NumberFinding] = field(default_factory=list)
    stopped: str = ""
    ended: NightRecord | None = None

    def take(self, line: LogLine) -> None:
        """Apply a line of the log to this state."""
        match line:
            case NightBegan():
                self.began = line
            case UnitDone(unit, findings):
                self.units.append(unit)
                self.findings += findings
            case NightStopped(reason):
                self.stopped = reason
            case NightEnded(record):
                self.ended = record

    def has_done(self, part: str, test: str) -> bool:
        """Return True if a test is complete in a part of the night."""
        return any(unit.part == part and unit.test == test for unit in self.units)

    def is_open_night(self, name: str) -> bool:
        """Return True if it is an unfinished night of this name."""
        return self.ended is None and self.began is not None and self.began.name == name

    def is_resumable(self, plan: str, commit: str, now_unix_ns: int) -> bool:
        """Return True if a killed night can go on.

        It must have the same plan and commit, and have begun less than a day ago.
        """
        if self.ended is not None or self.began is None:
            return False
        is_same = (self.began.plan, self.began.commit) == (plan, commit)
        return is_same and now_unix_ns - self.began.started_unix_ns < _RESUMABLE_NS


def read_log(folder: Path) -> NightState:
    """Return the state that the log in a folder describes.

    It is empty if there is no log or it cannot be read. Lines that cannot be decoded are skipped,
    such as one that a kill has torn.
    """
    state = NightState()
    try:
        lines = (folder / FILE_NAME).read_bytes().split(b"\n")
    except OSError:
        return state
    for line in lines:
        try:
            state.take(_decoder.decode(line))
        except msgspec.MsgspecError:
            continue
    return state


def folders_beyond(root: Path, name: str, keep: int) -> list[Path]:
    """Return the folders of complete nights of this name, the oldest first.

    The latest ``keep`` nights are left out.
    """
    folders = sorted(
        root.glob(f"*-{name}-*/")
    )  # the names begin with the day, and end with an id that sorts by time
    complete = [
        folder
        for folder in folders
        if (end := read_log(folder).ended) is not None and end.name == name
    ]
    return complete[: max(0, len(complete) - keep)]


class NightLog:
    """The writer of the log in a night's folder.

    Attributes:
        state: the contents of the log, including all added lines.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = read_log(folder)

    @property
    def began(self) -> NightBegan:
        """The first line of the log. Raise HarnessError if the log does not have it."""
        if self.state.began is None:
            raise HarnessError(f"the log in {self.folder} has no beginning")
        return self.state.began

    def add(self, line: LogLine) -> None:
        """Apply a line to ``state``, append it to the log, and flush it to the disk.

        The folder is created if necessary. A line that cannot be written is applied nevertheless.

        Raises:
            HarnessError: if the log cannot be written.
        """
        self.state.take(line)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / FILE_NAME).open("ab") as file:
                is_torn = file.tell() and not (self.folder / FILE_NAME).read_bytes().endswith(b"\n")
                file.write((b"\n" if is_torn else b"") + msgspec.json.encode(line) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise HarnessError(f"the log of the night cannot be written: {error}") from error
