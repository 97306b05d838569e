"""The coordinator's log: the durable events of a run, which the next coordinator replays.

The log is a file of JSON lines: a header with the term, then one event a line. A coordinator takes
the log over by writing a copy with the next term and renaming it into place. A coordinator that was
only stopped, and continues later, finds that its own file is not the log any more, and may decide
nothing. It may have been stopped while it wrote. So it checks again afterwards, and the next
coordinator reads once more what was written until the renaming.

A log that is gone, or cannot be read, counts as empty; the nodes report what they know. Only its
last line may be torn, and the event in it was never carried out. The copy of a log that was lost
with its machine may lack decisions that were carried out.

-> coordinator/handlers/on_restart.py replays the log; coordinator/server.py appends to it, and ends
a process that lost it. agent/coordinator_link.py: how nodes find the new coordinator.
journal/writer.py: records while the disk is full.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec

from chaoskit.checkpoint.disk.files import sync_directory
from chaoskit.coordinator.membership.events import MembershipEvent
from chaoskit.coordinator.outputs import LogEntry
from chaoskit.errors import ChaoskitError
from chaoskit.process.linux import reserve
from chaoskit.process.run_clock import to_own, to_run
from chaoskit.wire.messages import WorkerLost


class Fenced(ChaoskitError):
    """Another coordinator has taken the log over."""


class Gone(ChaoskitError):
    """The log was deleted while a coordinator held it."""


#: Version of the lines. A log of another version counts as lost; the reason names its version.
FORMAT = 2


class _Header(msgspec.Struct, frozen=True):
    """First line of a log. A header without ``format`` is of format 1."""

    term: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
    format: int = 1


class _LogLine(msgspec.Struct, frozen=True):
    """An entry as it is stored; the fields are those of :class:`LogEntry`.

    ``ahead_ns``: how far the run's clock is ahead of the clock of ``now_s``, because another
    machine may read the line.
    """

    now_s: float
    event: MembershipEvent
    lag_s: float = 0.0
    ahead_ns: int = 0


class _PackedLine(msgspec.Struct, frozen=True):
    """A line that JSON cannot represent, because a number is not finite: in MessagePack."""

    packed: bytes


_encoder = msgspec.json.Encoder()
_header_decoder = msgspec.json.Decoder(_Header)
_line_decoder = msgspec.json.Decoder(_LogLine)
_RESERVE_BYTES = 2**18
_packed_decoder = msgspec.json.Decoder(_PackedLine)
_unpacker = msgspec.msgpack.Decoder(_LogLine)
_NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Damaged(Exception):
    """The content of the file was not written by a coordinator of this version."""


class CoordinatorLog:
    """The log of one run, held by one coordinator.

    Opening it takes it over from the coordinator before, with the next term.

    Attributes:
        term: number of this coordinator, from 1.
        entries: all events of the run, those of the coordinators before this one first.
        damage: the reason why the former content counts as lost, or "".

    Raises:
        OSError: if the new log cannot be written.
        Fenced, Gone: if the log was taken over or deleted at this very moment.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.damage = path, ""
        former_fd = term = -1
        try:
            former_fd = _open(path)
            term, self.entries = _read(former_fd)
        except (OSError, _Damaged) as error:
            term, self.entries, self.damage = 0, [], f"{path.name} cannot be read: {error}"
        self._replace(term + 1, former_fd)

    def _replace(self, term: int, former_fd: int) -> None:
        """Write the entries to a new file with this ``term``, and rename it into the log's place.

        Entries that were appended to the former log meanwhile are taken over.

        Args:
            former_fd: descriptor of the former log, which is closed; -1 for none.

        Raises:
            Fenced, Gone, OSError: as :meth:`append` does.
        """
        self.term = term
        self._fd, name = tempfile.mkstemp(prefix=f"{self._path.stem}.", dir=self._path.parent)
        draft = Path(name)
        _write(self._fd, [_encoder.encode(_Header(term, FORMAT)), *map(_encode, self.entries)])
        os.fsync(self._fd)
        self._reserve()
        self._inode = os.fstat(self._fd).st_ino
        if self._path.is_dir():  # a rename can replace anything else
            self._path.rename(draft.with_name(f"{draft.name}.aside"))
        draft.rename(self._path)
        sync_directory(self._path.parent)  # a rename is durable only then
        late_entries: list[LogEntry] = []
        with contextlib.suppress(OSError, _Damaged):
            late_entries = _read(former_fd)[1][len(self.entries) :]
        if former_fd >= 0:
            os.close(former_fd)
        if late_entries:
            self.append(late_entries)

    def outbid(self, term: int) -> None:
        """Raise the term of this coordinator above ``term``, which a node has seen.

        Nothing changes if it is higher already.

        Raises:
            Fenced, Gone: as :meth:`check` does.
            OSError: if the log of the new term cannot be written.
        """
        if term <= self.term:
            return
        self.check()
        os.close(self._fd)
        self._replace(term + 1, _open(self._path))

    def check(self) -> None:
        """Check that this coordinator still holds the log, and so may decide.

        Raises:
            Fenced: if another coordinator holds the log by now.
            Gone: if the log was deleted.
            OSError: if the log cannot be looked up for another reason.
        """
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError as error:
            raise Gone(f"{self._path.name} of term {self.term} is gone") from error
        if inode != self._inode:
            raise Fenced(f"term {self.term} is over: another coordinator holds {self._path.name}")

    def append(self, entries: list[LogEntry]) -> None:
        """Append ``entries`` to the log; they are durable when this returns.

        Decisions may be carried out only if no error is raised. After :class:`Fenced`, the entries
        may be in a file that is not the log any more.

        Raises:
            Fenced, Gone: as :meth:`check` does.
            OSError: if the entries cannot be written, as on a full disk. The log ends as before.
        """
        self.check()
        end = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            _write(self._fd, [_encode(entry) for entry in entries])
            os.fdatasync(self._fd)
        except OSError:
            # the next entry must begin a line
            os.ftruncate(self._fd, os.lseek(self._fd, end, os.SEEK_SET))
            raise
        self._reserve()
        self.check()
        self.entries += entries

    def _reserve(self) -> None:
        """Reserve disk space for the decisions that follow when the disk is full."""
        reserve(self._fd, os.lseek(self._fd, 0, os.SEEK_CUR) + _RESERVE_BYTES)


def _write(fd: int, lines: list[bytes]) -> None:
    data = memoryview(b"".join(line + b"\n" for line in lines))
    while data:  # a disk that fills up takes a part, and fails only the next write
        data = data[os.write(fd, data) :]


def _encode(entry: LogEntry) -> bytes:
    line = _LogLine(entry.now_s, entry.event, entry.lag_s, to_run(0))
    data = _encoder.encode(line)
    try:
        if _line_decoder.decode(data) == line:
            return data
    except msgspec.ValidationError:
        pass
    return _encoder.encode(_PackedLine(msgspec.msgpack.encode(line)))


def _open(path: Path) -> int:
    """Open the log for reading, and return its descriptor; -1 if there is no log.

    Raises:
        OSError: if the log cannot be opened.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1


def _read(fd: int) -> tuple[int, list[LogEntry]]:
    """Return the term and the entries of a log; 0 and no entries for descriptor -1.

    A last line that is torn is left out.

    Raises:
        _Damaged: if the log has another format, or an invalid line that is not the last one.
        OSError: if the file cannot be read.
    """
    if fd < 0:
        return 0, []
    *lines, last = os.pread(fd, os.fstat(fd).st_size, 0).split(b"\n")
    if not lines:
        raise _Damaged("it has no header")
    try:
        header = _header_decoder.decode(lines[0])
        if header.format != FORMAT:
            raise _Damaged(
                f"it is of format {header.format}, "
                f"and this version of chaoskit reads format {FORMAT}"
            )
        entries = [_decode(line) for line in lines[1:]]
    except _NOT_JSON as error:
        raise _Damaged(str(error)) from error
    with contextlib.suppress(*_NOT_JSON):  # torn by the end of its writer
        entries.append(_decode(last))
    return header.term, entries


def _decode(line: bytes) -> LogEntry:
    """Return the entry of a line, with its times on the clock of this machine.

    An invalid line raises one of ``_NOT_JSON``.
    """
    try:
        decoded = _line_decoder.decode(line)
    except msgspec.ValidationError:
        decoded = _unpacker.decode(_packed_decoder.decode(line).packed)
    shift_ns = to_own(decoded.ahead_ns)  # 0 on the machine that wrote it
    if not shift_ns:
        return LogEntry(decoded.event, decoded.now_s, decoded.lag_s)
    event = decoded.event
    if isinstance(event, WorkerLost) and event.detected_ns:
        event = msgspec.structs.replace(event, detected_ns=event.detected_ns + shift_ns)
    return LogEntry(event, decoded.now_s + shift_ns / 1e9, decoded.lag_s + shift_ns / 1e9)
