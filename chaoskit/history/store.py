"""A place for records: one file of JSON lines a session, in a folder or an object store. No other session writes it.

    format.json                     {"version": 1}
    2026-11/UUID.jsonl              the records of one session, which began in that month

A file has one writer, and a name that no other file has: several sessions may write at once, and nothing is locked.
What cannot be read is set aside with a line about it, and the rest is used: a line that a killed writer left torn, a
file that holds no records, a record of a later version.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from io import FileIO
from pathlib import Path
from typing import Protocol
from uuid import UUID

import msgspec

from chaoskit.errors import BadInput, ChaoskitError, HarnessError
from chaoskit.history.record import (
    VERSION,
    AcceptedRecord,
    HistoryRecord,
    NightRecord,
    RunRecord,
    SeriesRecord,
)
from chaoskit.report.store import write_whole

_FORMAT, _FORMAT_DATA = "format.json", b'{"version": 1}\n'
_SUFFIX = ".jsonl"
_NAME = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
_PLACE = re.compile(rf"\d{{4}}-\d{{2}}/{_NAME.pattern}\.jsonl")
_PATIENCE_S = 15.0  # with an object store
_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(HistoryRecord)


class _Version(msgspec.Struct):
    version: int


@dataclass
class RunContents:
    """What was read.

    Attributes:
        runs: in the order in which they were started. plans: by series. accepted: what may be worse. nights: in
            their order. set_aside: a line for each thing that could not be read.
    """

    runs: list[RunRecord] = field(default_factory=list)
    plans: dict[str, SeriesRecord] = field(default_factory=dict)
    accepted: list[AcceptedRecord] = field(default_factory=list)
    nights: list[NightRecord] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)

    def take(self, data: bytes, name: str) -> None:
        """Add the records of a file."""
        *lines, rest = data.split(b"\n")
        for number, line in enumerate([*lines, *([rest] if rest else [])], 1):
            if not line.strip():
                continue
            try:
                record = decode(line)
            except msgspec.MsgspecError as error:
                self.set_aside.append(f"{name}, line {number}: {_why(line, error)}")
                continue
            match record:
                case RunRecord():
                    self.runs.append(record)
                case SeriesRecord():
                    self.plans[record.series] = record
                case AcceptedRecord():
                    self.accepted.append(record)
                case NightRecord():
                    self.nights.append(record)

    def last_good(self, name: str = "") -> str:
        """The commit of the latest night of this name, or of any, in which nothing was wrong; "" if there is none.

        One whose files were changed says nothing of its commit.
        """
        mine = [night for night in self.nights if name in ("", night.name)]
        good = [
            night.commit
            for night in mine
            if not (night.exit_code or night.is_changed) and night.commit
        ]
        return good[-1] if good else ""

    def in_order(self) -> RunContents:
        """Sort the runs. A run or a night that is there twice, as in two files, is one."""
        unique = {run.run_id: run for run in self.runs}
        nights = {night.night: night for night in self.nights}
        self.nights = sorted(
            nights.values(), key=lambda night: (night.started_unix_ns, night.night)
        )
        self.runs = sorted(unique.values(), key=lambda run: (run.started_unix_ns, run.run_id))
        return self


def decode(line: bytes) -> HistoryRecord:
    """The record in a line. Raises ``msgspec.MsgspecError`` where it holds none that this version reads."""
    try:
        found: HistoryRecord = _decoder.decode(line)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.ValidationError(str(error)) from None
    if found.version > VERSION:
        raise msgspec.ValidationError(f"version {found.version}")
    if isinstance(found, RunRecord) and found.session and not _NAME.fullmatch(found.session):
        raise msgspec.ValidationError(f"{found.session[:40]!r} is the name of no session")
    return found


def _why(line: bytes, error: Exception) -> str:
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if (found := msgspec.json.decode(line, type=_Version).version) > VERSION:
            return (
                f"set aside: a record of version {found}, and this chaoskit reads up to {VERSION}"
            )
    return f"set aside: damaged ({error})"


def encode(records: Iterable[HistoryRecord]) -> bytes:
    """Records as lines."""
    return b"".join(_encoder.encode(record) + b"\n" for record in records)


def read_file(path: Path) -> RunContents:
    """The records of one file. Raises BadInput if it cannot be read, or holds none."""
    contents = RunContents()
    try:
        contents.take(path.read_bytes(), str(path))
    except OSError as error:
        raise BadInput(
            "history", str(path), f"name a file that can be read ({error.strerror})"
        ) from None
    if not contents.runs:
        why = f"; {contents.set_aside[0]}" if contents.set_aside else ""
        raise BadInput(
            "history", str(path), f"name a file of records, such as --chaos-save writes{why}"
        )
    return contents.in_order()


class Files(Protocol):
    """A folder with folders of files, or what is like one."""

    def names(self) -> Sequence[str]:
        """Of all files, such as ``2026-11/UUID.jsonl``; and ``2026-11/`` for a folder that cannot be listed."""

    def get(self, name: str) -> bytes:
        """The contents of a file."""

    def put(self, name: str, data: bytes) -> None:
        """Make a file; a reader sees all of it or nothing."""

    def append(self, name: str, data: bytes) -> None:
        """Add to the end of a file, or make it."""

    def remove(self, name: str) -> None:
        """Delete a file; it is no error if there is none."""

    def close(self) -> None:
        """Let go of connections."""


class _Folder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self) -> Sequence[str]:
        return sorted(self._names(self._root, ""))

    def _names(self, folder: Path, place: str) -> Iterator[str]:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if entry.is_file():
                        yield f"{place}{entry.name}"
                    elif not place:
                        yield from list(self._names(folder / entry.name, f"{entry.name}/"))
                except OSError:
                    yield f"{place}{entry.name}/"

    def get(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        write_whole(self._root / name, data)

    def append(self, name: str, data: bytes) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+", buffering=0) as file:
            size_bytes = file.seek(0, os.SEEK_END)
            try:
                _write(file, data if _ends_a_line(file, size_bytes) else b"\n" + data)
                os.fsync(file.fileno())
            except OSError:
                file.truncate(
                    size_bytes
                )  # the next record shall not begin behind a part of this one
                raise

    def remove(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is open."""


def _ends_a_line(file: FileIO, size_bytes: int) -> bool:
    """Whether what is there is whole: its writer may have been killed."""
    if not size_bytes:
        return True
    file.seek(size_bytes - 1)
    return file.read(1) == b"\n"


def _write(file: FileIO, data: bytes) -> None:
    """A disk that is nearly full takes a part."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


class _Objects:
    def __init__(self, url: str) -> None:
        from chaoskit.checkpoint.remote.backoff import Backoff  # imports torch
        from chaoskit.checkpoint.remote.opening import open_store
        from chaoskit.checkpoint.remote.store import Traffic

        # a test waits for it
        self._store = open_store(
            url,
            traffic=Traffic(backoff=Backoff(deadline_s=_PATIENCE_S), request_timeout_s=_PATIENCE_S),
        )
        self._begun: dict[
            str, bytes
        ] = {}  # an object is written whole: what was added to it before is kept here

    def names(self) -> Sequence[str]:
        places = ["", *(f"{one}/" for one in self._store.directories())]
        return sorted(
            f"{place}{name}" for place in places for name in self._store.sizes(place.rstrip("/"))
        )

    def get(self, name: str) -> bytes:
        return self._store.get(name)

    def put(self, name: str, data: bytes) -> None:
        self._store.put(name, data)

    def append(self, name: str, data: bytes) -> None:
        self._begun[name] = self._begun.get(name, b"") + data
        self._store.put(name, self._begun[name])

    def remove(self, name: str) -> None:
        self._store.remove(name)

    def close(self) -> None:
        self._store.close()


class RunHistory:
    """The records of many sessions.

    Args:
        store: a folder, or a URL such as ``s3://bucket/history``.

    Raises:
        BadInput: if it is a URL that cannot be used, or what is there has another format.
    """

    def __init__(self, store: str) -> None:
        self.store = store
        self._files: Files = _Objects(store) if "://" in store else _Folder(Path(store))
        self._has_format = False  # as far as it was looked at

    def is_there(self) -> bool:
        """Whether anything was ever kept there. Raises BadInput if that is no history of this format."""
        try:
            found = msgspec.json.decode(self._files.get(_FORMAT), type=_Version)
        except FileNotFoundError:
            return False
        except (OSError, ChaoskitError) as error:
            raise BadInput(
                "history", self.store, f"name a store that can be read: {error}"
            ) from None
        except msgspec.MsgspecError as error:
            raise BadInput(
                "history", self.store, f"mend or delete its {_FORMAT}: {error}"
            ) from None
        if found.version > VERSION:
            raise BadInput(
                "history", self.store, f"use a later chaoskit: it has format {found.version}"
            )
        return True

    def read(self) -> RunContents:
        """All records. Raises BadInput if there is no history."""
        if not self.is_there():
            raise BadInput(
                "history", self.store, "name a store that has records: --chaos-history makes one"
            )
        contents = RunContents()
        try:
            names = self._files.names()
        except (OSError, ChaoskitError) as error:
            raise BadInput(
                "history", self.store, f"name a store that can be listed: {error}"
            ) from None
        for name in names:
            if name.rpartition("/")[2].startswith((".", _FORMAT)):
                continue  # a draft of a writer that was killed
            if not _PLACE.fullmatch(name):
                why = (
                    "it cannot be listed"
                    if name.endswith("/")
                    else "it is not named as a file of records is"
                )
                contents.set_aside.append(f"{name}: set aside: {why}")
                continue
            try:
                contents.take(self._files.get(name), name)
            except (OSError, ChaoskitError) as error:
                contents.set_aside.append(f"{name}: set aside: it cannot be read ({error})")
        return contents.in_order()

    def add(self, session: str, records: Iterable[HistoryRecord]) -> str:
        """Keep records of a session beside those that it has added before, and give the name of their file.

        Of a writer that is killed, the last line may be torn.

        Args:
            session: its UUID, of :func:`chaoskit.history.record.new_id`.

        Raises:
            HarnessError: if that cannot be done.
        """
        name = f"{began(session):%Y-%m}/{session}{_SUFFIX}"
        try:
            if not self._has_format and not self.is_there():
                self._files.put(_FORMAT, _FORMAT_DATA)
            self._has_format = True
            self._files.append(name, encode(records))
        except (OSError, ChaoskitError) as error:
            raise HarnessError(f"nothing was added to the history {self.store}: {error}") from None
        return name

    def prune(self, before: date, *, dry_run: bool) -> list[str]:
        """Delete the files of sessions that began before a day, and give their names. ``dry_run``: delete none."""
        found = [name for name in self._files.names() if _PLACE.fullmatch(name)]
        old = [
            name
            for name in found
            if began(name.rpartition("/")[2].removesuffix(_SUFFIX)).date() < before
        ]
        for name in old if not dry_run else ():
            self._files.remove(name)
        return old

    def close(self) -> None:
        """Let go of connections."""
        self._files.close()


def began(session: str) -> datetime:
    """When the session of this UUID began."""
    return datetime.fromtimestamp((UUID(session).int >> 80) / 1000, UTC)
