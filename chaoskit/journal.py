"""Append-only records of what each process saw, on one clock.

A journal is a file of JSON lines. Each line is written by one ``write(2)``, so a SIGKILL loses nothing that was
reported and never tears a line of another process. ``t_ns`` is CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.vocabulary import Event

_encoder = msgspec.json.Encoder()
_TAIL_BYTES = 1 << 18


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
        self._fd = os.open(directory / f"{source}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, event: Event, *, t_ns: int | None = None, **fields: Any) -> None:
        """Append one record. ``t_ns`` defaults to now."""
        line = {"t_ns": time.monotonic_ns() if t_ns is None else t_ns, "event": event.value, **fields}
        os.write(self._fd, _encoder.encode(line) + b"\n")

    def close(self) -> None:
        os.close(self._fd)


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
