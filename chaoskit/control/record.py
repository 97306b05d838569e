"""The durable record of a run's decisions: what a coordinator must know of the ones before it.

A file of JSON lines: a header with the term, then one remembered event a line. A coordinator takes the record over by
writing a copy with the next term and renaming it into place. One that was only stopped, and wakes up later, finds that
its own file is not the record any more, and may decide nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from chaoskit.control.membership import AnyEvent
from chaoskit.control.plane import Remember
from chaoskit.errors import ChaoskitError


class Fenced(ChaoskitError):
    """Another coordinator has taken over."""


class _Header(msgspec.Struct, frozen=True):
    term: int


class _Line(msgspec.Struct, frozen=True):
    now_s: float
    event: AnyEvent


_encoder = msgspec.json.Encoder()
_header_decoder = msgspec.json.Decoder(_Header)
_line_decoder = msgspec.json.Decoder(_Line)


class Record:
    """The record of one run, held by one coordinator.

    Attributes:
        term: number of this coordinator, from 1.
        memory: what those before it remembered.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        before, self.memory = _read(path)
        self.term = before + 1
        draft = path.with_suffix(f".{os.getpid()}")
        self._fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        lines = [_encoder.encode(_Header(self.term)), *map(_encode, self.memory)]
        _write(self._fd, lines)
        os.fsync(self._fd)
        self._inode = os.fstat(self._fd).st_ino
        draft.rename(path)

    def check(self) -> None:
        """Whether this coordinator is still the one: nodes must not be kept by another that decides nothing.

        Raises:
            Fenced: if the record belongs to another coordinator by now.
        """
        if self._path.stat().st_ino != self._inode:
            raise Fenced(f"term {self.term} is over: another coordinator holds {self._path.name}")

    def append(self, entries: list[Remember]) -> None:
        """Write down; durable when this returns.

        Raises:
            Fenced: if the record belongs to another coordinator by now. Nothing that was decided may be carried out.
            OSError: if there is no room. The same holds.
        """
        self.check()
        _write(self._fd, [_encode(entry) for entry in entries])
        os.fdatasync(self._fd)


def _write(fd: int, lines: list[bytes]) -> None:
    data = memoryview(b"".join(line + b"\n" for line in lines))
    while data:  # a disk that fills up takes a part, and says so only the next time
        data = data[os.write(fd, data) :]


def _encode(entry: Remember) -> bytes:
    return _encoder.encode(_Line(entry.now_s, entry.event))


def _read(path: Path) -> tuple[int, list[Remember]]:
    try:
        header, *lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return 0, []
    entries = []
    for line in lines:
        try:
            decoded = _line_decoder.decode(line)
        except msgspec.DecodeError:
            break  # torn by the end of its writer: what it says was never carried out
        entries.append(Remember(decoded.event, decoded.now_s))
    return _header_decoder.decode(header).term, entries
