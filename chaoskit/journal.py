"""Append-only records of what each process saw, on one clock.

A journal is a file of JSON lines. Each line is written by one ``write(2)``, so a SIGKILL loses nothing that was
reported and never tears a line of another process. ``t_ns`` is CLOCK_MONOTONIC, which all processes of a host share.

While the disk is full, records wait in memory, where a SIGKILL does lose them, and are written in their order once
there is room. A line that found room for its begin only is blanked out and written again, whole.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.errors import JournalFull
from chaoskit.osprocess import NO_ROOM
from chaoskit.vocabulary import Event

_LATE_S = 60.0
_LATE_BYTES_MAX = 16 * 2**20  # of records of 200 bytes, a minute at 1,400 steps a second
_RETRY_S = 0.05
_encoder = msgspec.json.Encoder()
_TAIL_BYTES = 1 << 18
_HEAD_BYTES = 64  # in which time and event stand


class Record(msgspec.Struct, frozen=True):
    """One journal line. ``fields`` holds what belongs to the event; see :class:`chaoskit.vocabulary.Event`."""

    t_ns: int
    source: str
    event: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The field ``name``, or ``default`` where the record has none."""
        return self.fields.get(name, default)


class Journal:
    """Writes the records of one process to ``directory/source.jsonl``.

    Args:
        late_s: for so long records wait for a disk that is full.
        late_bytes_max: of records that may wait.
    """

    def __init__(
        self, directory: Path, source: str, *, late_s: float = _LATE_S, late_bytes_max: int = _LATE_BYTES_MAX
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.source = source
        self._path = directory / f"{source}.jsonl"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._late = _Late(late_s, late_bytes_max)
        self._lock = threading.RLock()  # a signal handler may write, too
        self._fragment = (0, 0)  # offset and length of a line that found room in part
        if _ends_within_a_line(self._path):  # its last writer was killed, or the machine went down
            self._put(b"\n")

    def write(self, event: Event, *, t_ns: int | None = None, **fields: Any) -> None:
        """Append one record. ``t_ns`` defaults to now.

        Raises:
            JournalFull: if the disk is full, and records have waited for too long, or there are too many.
            OSError: if it fails.
        """
        line = _line(event, time.monotonic_ns() if t_ns is None else t_ns, fields)
        with self._lock:
            if self._late.lines or not self._append(line):
                self._put_off(line)

    def has(self, event: Event, *, t_ns: int | None, **fields: Any) -> bool:
        """Whether this record is among the newest of the file, written by a process before this one perhaps."""
        if t_ns is None:
            return False
        line = _line(event, t_ns, fields)
        with self._path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return line in file.readlines() or line in self._late.lines

    def close(self) -> None:
        """Wait for room for what waits. Raises JournalFull as :meth:`write` does."""
        self.flush()
        os.close(self._fd)

    def flush(self) -> None:
        """Return when every record is written. Raises JournalFull as :meth:`write` does."""
        while self._late.lines:
            with self._lock:
                if not self._catch_up() and self._late.is_over(time.monotonic()):
                    raise self._late.error(self._path)
            time.sleep(_RETRY_S)

    def _append(self, line: bytes) -> bool:
        """Write a line; False if there is no room for all of it."""
        try:
            return self._put(line)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return False

    def _put(self, line: bytes) -> bool:
        self._blank_out()
        written = os.write(self._fd, line)
        if written == len(line):
            return True
        self._fragment = (os.lseek(self._fd, 0, os.SEEK_CUR) - written, written)
        self._blank_out()
        return False

    def _blank_out(self) -> None:
        """Make a blank line of a fragment, in its place: another process may append to this file at any moment."""
        offset, size_bytes = self._fragment
        if size_bytes:
            file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)  # what is written with O_APPEND goes to the end
            try:
                os.pwrite(file, b" " * (size_bytes - 1) + b"\n", offset)
            finally:
                os.close(file)
            self._fragment = (0, 0)

    def _put_off(self, line: bytes) -> None:
        now_s = time.monotonic()
        if not self._late.lines:
            self._late.begin(now_s)
            threading.Thread(target=self._retry, name="ck-journal", daemon=True).start()
        self._late.add(line)
        if self._late.is_over(now_s):
            raise self._late.error(self._path)

    def _retry(self) -> None:
        """On a thread, while records wait: the process may write no other one for long."""
        caught_up = False
        while not caught_up:
            time.sleep(_RETRY_S)
            with self._lock:
                caught_up = self._catch_up()

    def _catch_up(self) -> bool:
        """Write what waits, as far as there is room; whether that was all."""
        late = self._late
        while late.lines:
            if not self._append(late.lines[0]):
                return False
            late.written()
            if not late.lines and late.count:
                late.lines.append(late.summary(time.monotonic()))
        return True


class _Late:
    """Records that wait for a disk that is full."""

    def __init__(self, limit_s: float, bytes_max: int) -> None:
        self._limit_s, self._bytes_max = limit_s, bytes_max
        self.lines: deque[bytes] = deque()
        self.count = 0  # that are still to be told of
        self._bytes, self._since_s = 0, 0.0

    def begin(self, now_s: float) -> None:
        self.count, self._bytes, self._since_s = 0, 0, now_s

    def add(self, line: bytes) -> None:
        if self._bytes <= self._bytes_max:  # beyond that an error is raised for each
            self.lines.append(line)
            self.count += 1
            self._bytes += len(line)

    def written(self) -> None:
        self._bytes -= len(self.lines.popleft())

    def summary(self, now_s: float) -> bytes:
        """The record that tells of those which were late."""
        count, self.count = self.count, 0
        full_s = round(now_s - self._since_s, 3)
        return _line(Event.RECORDS_LATE, time.monotonic_ns(), {"records": count, "full_s": full_s})

    def is_over(self, now_s: float) -> bool:
        """Whether this has gone on for too long."""
        return bool(self.lines) and (now_s - self._since_s > self._limit_s or self._bytes > self._bytes_max)

    def error(self, path: Path) -> JournalFull:
        limit = f"{self._limit_s:g} s" if self._bytes <= self._bytes_max else f"{self._bytes_max} bytes of records"
        return JournalFull(
            f"{path.parent}: {os.strerror(errno.ENOSPC)} for {limit}. A run is judged by its journals: free room there "
            "or choose a directory that has more (`--report`)"
        )


def _ends_within_a_line(path: Path) -> bool:
    size_bytes = path.stat().st_size  # 0 for what is no regular file
    if not size_bytes:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _line(event: Event, t_ns: int, fields: dict[str, Any]) -> bytes:
    return _encoder.encode({"t_ns": t_ns, "event": event.value, **fields}) + b"\n"


def read_journals(directory: Path) -> list[Record]:
    """Every record of every journal in ``directory``, ordered by time. A torn last line is left out."""
    records = [record for path in sorted(directory.glob("*.jsonl")) for record in _read_one(path)]
    return sorted(records, key=lambda record: record.t_ns)


def _read_one(path: Path, last_bytes: int = 0) -> Iterator[Record]:
    with path.open("rb") as file:
        if last_bytes:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        data = file.read()
    for line in data.splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue  # the machine went down in the middle of a write, or reading began in the middle of a line
        yield Record(t_ns=fields.pop("t_ns"), source=path.stem, event=fields.pop("event"), fields=fields)


def read_tail(directory: Path) -> list[Record]:
    """The newest records of every journal in ``directory``: for a run that may have written for days."""
    return [record for path in sorted(directory.glob("*.jsonl")) for record in _read_one(path, _TAIL_BYTES)]


class JournalTail:
    """Follows the journals of ``directory`` while they grow, without ever reading a byte twice.

    Args:
        without: events whose records are left out, before they are decoded.
    """

    def __init__(self, directory: Path, without: Collection[str] = ()) -> None:
        self._directory = directory
        self._read_bytes: dict[Path, int] = {}
        self._without = tuple(f'"event":"{event}"'.encode() for event in without)

    def poll(self, last_bytes: int = 0) -> list[Record]:
        """What was written since the last call, ordered by time; not what is written only in part.

        Args:
            last_bytes: of a file that is read for the first time, no more than its end; 0 for all of it.
        """
        records = [record for path in self._directory.glob("*.jsonl") for record in self._news(path, last_bytes)]
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
        for line in data[:whole].splitlines():
            head = line[:_HEAD_BYTES]
            if any(mark in head for mark in self._without):
                continue
            try:
                fields = msgspec.json.decode(line)
                yield Record(fields.pop("t_ns"), path.stem, fields.pop("event"), fields)
            except (msgspec.DecodeError, AttributeError, KeyError):
                continue  # reading began in the middle of a line
