"""The durable record of a run's decisions: what a coordinator must know of the ones before it.

A file of JSON lines: a header with the term, then one remembered event a line. A coordinator takes the record over by
writing a copy with the next term and renaming it into place. One that was only stopped, and wakes up later, finds that
its own file is not the record any more, and may decide nothing. It may have been stopped while it wrote: so it looks
again afterwards, and whoever takes over reads once more what was written until the renaming.

A record that is gone, or cannot be read, is one in which nothing was written: what can be made up for comes from the
nodes. Only its last line may be torn: what that says was never carried out. The copy of a record that went with its
machine may lack decisions that were carried out, too.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec

from chaoskit.checkpoint.disk.files import sync_directory
from chaoskit.coordinator.membership.events import AnyEvent, WorkerLost
from chaoskit.coordinator.outputs import Remember
from chaoskit.errors import ChaoskitError
from chaoskit.process.linux import reserve
from chaoskit.process.run_clock import to_own, to_run


class Fenced(ChaoskitError):
    """Another coordinator has taken over."""


class Gone(ChaoskitError):
    """The record was deleted under the coordinator that held it."""


class _Header(msgspec.Struct, frozen=True):
    term: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]


class _Line(msgspec.Struct, frozen=True):
    """``ahead_ns``: how far the run's clock is ahead of the one by which this is told; another machine reads it."""

    now_s: float
    event: AnyEvent
    lag_s: float = 0.0
    ahead_ns: int = 0


class _Packed(msgspec.Struct, frozen=True):
    """A line that JSON cannot say, as it holds a number that is not finite: in MessagePack."""

    packed: bytes


_encoder = msgspec.json.Encoder()
_header_decoder = msgspec.json.Decoder(_Header)
_line_decoder = msgspec.json.Decoder(_Line)
_RESERVE_BYTES = 2**18
_packed_decoder = msgspec.json.Decoder(_Packed)
_unpacker = msgspec.msgpack.Decoder(_Line)
_NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Damaged(Exception):
    """What is written there cannot be what a coordinator wrote."""


class Record:
    """The record of one run, held by one coordinator.

    Attributes:
        term: number of this coordinator, from 1.
        memory: what it remembers, with what those before it did.
        damage: why what was written there counts as lost; "" if nothing does.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.damage = path, ""
        before = term = -1
        try:
            before = _open(path)
            term, self.memory = _read(before)
        except (OSError, _Damaged) as error:
            term, self.memory, self.damage = 0, [], f"{path.name} cannot be read: {error}"
        self._replace(term + 1, before)

    def _replace(self, term: int, before: int) -> None:
        """Write a record with this ``term`` in the place of the one that ``before`` is open on."""
        self.term = term
        self._fd, name = tempfile.mkstemp(prefix=f"{self._path.stem}.", dir=self._path.parent)
        draft = Path(name)
        _write(self._fd, [_encoder.encode(_Header(term)), *map(_encode, self.memory)])
        os.fsync(self._fd)
        self._reserve()
        self._inode = os.fstat(self._fd).st_ino
        if self._path.is_dir():  # a file can take the place of anything else
            self._path.rename(draft.with_name(f"{draft.name}.aside"))
        draft.rename(self._path)
        sync_directory(self._path.parent)  # a rename is durable only then
        late: list[Remember] = []
        with contextlib.suppress(OSError, _Damaged):
            late = _read(before)[1][len(self.memory) :]
        if before >= 0:
            os.close(before)
        if late:
            self.append(late)

    def outbid(self, term: int) -> None:
        """A node knows of a coordinator of this ``term``: have a higher one, if that is not so.

        Raises:
            Fenced, Gone: as :meth:`check` does.
        """
        if term <= self.term:
            return
        self.check()
        os.close(self._fd)
        self._replace(term + 1, _open(self._path))

    def check(self) -> None:
        """Whether this coordinator is still the one: nodes must not be kept by another that decides nothing.

        Raises:
            Fenced: if the record belongs to another coordinator by now.
            Gone: if there is no record any more.
        """
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError as error:
            raise Gone(f"{self._path.name} of term {self.term} is gone") from error
        if inode != self._inode:
            raise Fenced(f"term {self.term} is over: another coordinator holds {self._path.name}")

    def append(self, entries: list[Remember]) -> None:
        """Write down; durable, in the record of the run, when this returns.

        Raises:
            Fenced, Gone: as :meth:`check` does. Nothing that was decided may be carried out.
            OSError: if there is no room. The same holds.
        """
        self.check()
        end = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            _write(self._fd, [_encode(entry) for entry in entries])
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(
                self._fd, os.lseek(self._fd, end, os.SEEK_SET)
            )  # what is written next begins a line
            raise
        self._reserve()
        self.check()
        self.memory += entries

    def _reserve(self) -> None:
        """Room for the decisions that a full disk calls for."""
        reserve(self._fd, os.lseek(self._fd, 0, os.SEEK_CUR) + _RESERVE_BYTES)


def _write(fd: int, lines: list[bytes]) -> None:
    data = memoryview(b"".join(line + b"\n" for line in lines))
    while data:  # a disk that fills up takes a part, and says so only the next time
        data = data[os.write(fd, data) :]


def _encode(entry: Remember) -> bytes:
    line = _Line(entry.now_s, entry.event, entry.lag_s, to_run(0))
    data = _encoder.encode(line)
    try:
        if _line_decoder.decode(data) == line:
            return data
    except msgspec.ValidationError:
        pass
    return _encoder.encode(_Packed(msgspec.msgpack.encode(line)))


def _open(path: Path) -> int:
    """A descriptor; -1 if there is no record."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1


def _read(fd: int) -> tuple[int, list[Remember]]:
    """The term and what is remembered; 0 and nothing if there is no record.

    Raises:
        _Damaged: if a line cannot be read that is not the last one.
        OSError: if none can.
    """
    if fd < 0:
        return 0, []
    *lines, last = os.pread(fd, os.fstat(fd).st_size, 0).split(b"\n")
    if not lines:
        raise _Damaged("it has no header")
    try:
        term = _header_decoder.decode(lines[0]).term
        entries = [_decode(line) for line in lines[1:]]
    except _NOT_JSON as error:
        raise _Damaged(str(error)) from error
    with contextlib.suppress(*_NOT_JSON):  # torn by the end of its writer
        entries.append(_decode(last))
    return term, entries


def _decode(line: bytes) -> Remember:
    try:
        decoded = _line_decoder.decode(line)
    except msgspec.ValidationError:
        decoded = _unpacker.decode(_packed_decoder.decode(line).packed)
    shift_ns = to_own(decoded.ahead_ns)  # 0 on the machine that wrote it
    if not shift_ns:
        return Remember(decoded.event, decoded.now_s, decoded.lag_s)
    event = decoded.event
    if isinstance(event, WorkerLost) and event.detected_ns:
        event = msgspec.structs.replace(event, detected_ns=event.detected_ns + shift_ns)
    return Remember(event, decoded.now_s + shift_ns / 1e9, decoded.lag_s + shift_ns / 1e9)
