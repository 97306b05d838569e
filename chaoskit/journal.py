"""Append-only records of what each process saw, on one clock.

A journal is a file of JSON lines. Each line is written by one ``write(2)``, so a SIGKILL loses nothing that was
reported and never tears a line of another process. ``t_ns`` is CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.vocabulary import Event

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
    """Writes the records of one process to ``directory/source.jsonl``."""

    def __init__(self, directory: Path, source: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.source = source
        self._path = directory / f"{source}.jsonl"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, event: Event, *, t_ns: int | None = None, **fields: Any) -> None:
        """Append one record. ``t_ns`` defaults to now."""
        os.write(self._fd, _line(event, time.monotonic_ns() if t_ns is None else t_ns, fields))

    def has(self, event: Event, *, t_ns: int | None, **fields: Any) -> bool:
        """Whether this record is among the newest of the file, written by a process before this one perhaps."""
        with self._path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return t_ns is not None and _line(event, t_ns, fields) in file.readlines()

    def close(self) -> None:
        os.close(self._fd)


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
