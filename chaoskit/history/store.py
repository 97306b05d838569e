"""Storage of records: a file of JSON lines for each session, in a folder or an object store.

    format.json                     {"version": 1}
    2026-11/UUID.jsonl              the records of one session, which began in that month

A file has one writer and a unique name. Several sessions may therefore write at once without locks.
Unreadable parts are set aside with a line about each, and the rest is used. Such parts are a line
that a killed writer left torn, a file that holds no records, and a record of a later version.

-> history/record.py: the kinds of records. history/session.py: records of a pytest session.
-> nightly/keeping.py: records of a night, which wait if the store cannot be reached.
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
_PATIENCE_S = 15.0  # the time that a test waits for an object store
_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(HistoryRecord)


class _Version(msgspec.Struct):
    """The format version of a history, or of a record."""

    version: int


@dataclass
class RunContents:
    """The records that were read from a store.

    Attributes:
        runs: the runs, sorted by their start.
        plans: the plan of each series.
        accepted: regressions that are accepted, including those that have expired.
        nights: the nights, sorted by their start.
        set_aside: a line for each part that could not be read.
    """

    runs: list[RunRecord] = field(default_factory=list)
    plans: dict[str, SeriesRecord] = field(default_factory=dict)
    accepted: list[AcceptedRecord] = field(default_factory=list)
    nights: list[NightRecord] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)

    def take(self, data: bytes, name: str) -> None:
        """Add the records of a file, and a line to ``set_aside`` for each unreadable one.

        A later plan of a series replaces an earlier one. Other records are appended, unsorted.

        Args:
            data: the contents of the file.
            name: the name of the file in these lines.
        """
        *lines, rest = data.split(b"\n")
        for number, line in enumerate([*lines, *([rest] if rest else [])], 1):
            if not line.strip():
                continue
            try:
                record = decode(line)
            except msgspec.MsgspecError as error:
                self.set_aside.append(f"{name}, line {number}: {_set_aside_reason(line, error)}")
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
        """Return the commit of the latest good night of this name, or of any; "" if there is none.

        A night is good if its exit code is 0 and no file differed from its commit. The nights must
        be in order.
        """
        nights = [night for night in self.nights if name in ("", night.name)]
        good_commits = [
            night.commit
            for night in nights
            if not (night.exit_code or night.is_changed) and night.commit
        ]
        return good_commits[-1] if good_commits else ""

    def in_order(self) -> RunContents:
        """Sort the runs and nights in place, and return these contents.

        Duplicates, as in two files, are removed.
        """
        unique = {run.run_id: run for run in self.runs}
        nights = {night.night: night for night in self.nights}
        self.nights = sorted(
            nights.values(), key=lambda night: (night.started_unix_ns, night.night)
        )
        self.runs = sorted(unique.values(), key=lambda run: (run.started_unix_ns, run.run_id))
        return self


def decode(line: bytes) -> HistoryRecord:
    """Return the record in a line.

    Raises:
        msgspec.MsgspecError: if the line holds no record that this version reads, or the session of
            a run is no UUID of version 7.
    """
    try:
        record: HistoryRecord = _decoder.decode(line)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.ValidationError(str(error)) from None
    if record.version > VERSION:
        raise msgspec.ValidationError(f"version {record.version}")
    if isinstance(record, RunRecord) and record.session and not _NAME.fullmatch(record.session):
        raise msgspec.ValidationError(f"{record.session[:40]!r} is not the UUID of a session")
    return record


def _set_aside_reason(line: bytes, error: Exception) -> str:
    """Return why a line is set aside: a later version, or damage."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if (version := msgspec.json.decode(line, type=_Version).version) > VERSION:
            return (
                f"set aside: a record of version {version}, and this chaoskit reads up to {VERSION}"
            )
    return f"set aside: damaged ({error})"


def encode(records: Iterable[HistoryRecord]) -> bytes:
    """Return records as JSON lines."""
    return b"".join(_encoder.encode(record) + b"\n" for record in records)


def read_file(path: Path) -> RunContents:
    """Return the records of a file. Raise BadInput if it cannot be read or holds no run."""
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
    """The file operations that a history needs, on a folder or an object store.

    An operation that fails raises OSError or ChaoskitError.
    """

    def names(self) -> Sequence[str]:
        """Return the names of all files, such as ``2026-11/UUID.jsonl``.

        A folder that cannot be listed is returned as ``2026-11/``.
        """

    def get(self, name: str) -> bytes:
        """Return the contents of a file. Raise FileNotFoundError if there is none."""

    def put(self, name: str, data: bytes) -> None:
        """Create or replace a file atomically: a reader sees all of it or nothing."""

    def append(self, name: str, data: bytes) -> None:
        """Append to a file, which is created if it does not exist.

        A file has one writer: in an object store, contents that another one has written are lost.
        """

    def remove(self, name: str) -> None:
        """Delete a file. A missing file is no error."""

    def close(self) -> None:
        """Close connections."""


class _FolderFiles:
    """The files of a history in a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self) -> Sequence[str]:
        return sorted(self._names(self._root, ""))

    def _names(self, folder: Path, prefix: str) -> Iterator[str]:
        """Yield the names in a folder and its subfolders, one level deep."""
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if entry.is_file():
                        yield f"{prefix}{entry.name}"
                    elif not prefix:
                        yield from list(self._names(folder / entry.name, f"{entry.name}/"))
                except OSError:
                    yield f"{prefix}{entry.name}/"

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
                _write_all(file, data if _ends_a_line(file, size_bytes) else b"\n" + data)
                os.fsync(file.fileno())
            except OSError:
                file.truncate(
                    size_bytes
                )  # the next record must not begin behind a part of this one
                raise

    def remove(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing: a folder has no connections."""


def _ends_a_line(file: FileIO, size_bytes: int) -> bool:
    """Return True if the file is empty or ends with a newline.

    A killed writer may have left a torn line.
    """
    if not size_bytes:
        return True
    file.seek(size_bytes - 1)
    return file.read(1) == b"\n"


def _write_all(file: FileIO, data: bytes) -> None:
    """Write all of the data. A disk that is nearly full accepts only a part at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


class _ObjectStoreFiles:
    """The files of a history in an object store."""

    def __init__(self, url: str) -> None:
        from chaoskit.checkpoint.remote.backoff import Backoff  # imports torch
        from chaoskit.checkpoint.remote.opening import open_store
        from chaoskit.checkpoint.remote.store import Traffic

        # short, because a test waits for the store
        self._store = open_store(
            url,
            traffic=Traffic(backoff=Backoff(deadline_s=_PATIENCE_S), request_timeout_s=_PATIENCE_S),
        )
        self._contents: dict[
            str, bytes
        ] = {}  # an object is written whole: its earlier contents are kept here

    def names(self) -> Sequence[str]:
        prefixes = ["", *(f"{directory}/" for directory in self._store.directories())]
        return sorted(
            f"{prefix}{name}"
            for prefix in prefixes
            for name in self._store.sizes(prefix.rstrip("/"))
        )

    def get(self, name: str) -> bytes:
        return self._store.get(name)

    def put(self, name: str, data: bytes) -> None:
        self._store.put(name, data)

    def append(self, name: str, data: bytes) -> None:
        self._contents[name] = self._contents.get(name, b"") + data
        self._store.put(name, self._contents[name])

    def remove(self, name: str) -> None:
        self._store.remove(name)

    def close(self) -> None:
        self._store.close()


class RunHistory:
    """The records of many sessions.

    Args:
        store: a folder, or a URL such as ``s3://bucket/history``.

    Raises:
        BadInput: if it is a URL that cannot be used.
    """

    def __init__(self, store: str) -> None:
        self.store = store
        self._files: Files = (
            _ObjectStoreFiles(store) if "://" in store else _FolderFiles(Path(store))
        )
        self._has_format = False  # True once the format file was seen or written

    def is_there(self) -> bool:
        """Return True if a history exists in the store.

        Raise BadInput if the store cannot be read, or its format is damaged or a later one.
        """
        try:
            header = msgspec.json.decode(self._files.get(_FORMAT), type=_Version)
        except FileNotFoundError:
            return False
        except (OSError, ChaoskitError) as error:
            raise BadInput(
                "history", self.store, f"name a store that can be read: {error}"
            ) from None
        except msgspec.MsgspecError as error:
            raise BadInput(
                "history", self.store, f"correct or delete its {_FORMAT}: {error}"
            ) from None
        if header.version > VERSION:
            raise BadInput(
                "history", self.store, f"use a later chaoskit: it has format {header.version}"
            )
        return True

    def read(self) -> RunContents:
        """Return all records. Raise BadInput if there is no history or it cannot be listed.

        Parts that cannot be read are in ``set_aside`` of the result.
        """
        if not self.is_there():
            raise BadInput(
                "history", self.store, "name a store that has records: --chaos-history creates one"
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
                continue  # the draft of a writer that was killed
            if not _PLACE.fullmatch(name):
                why = (
                    "it cannot be listed"
                    if name.endswith("/")
                    else "its name is not that of a file of records"
                )
                contents.set_aside.append(f"{name}: set aside: {why}")
                continue
            try:
                contents.take(self._files.get(name), name)
            except (OSError, ChaoskitError) as error:
                contents.set_aside.append(f"{name}: set aside: it cannot be read ({error})")
        return contents.in_order()

    def add(self, session: str, records: Iterable[HistoryRecord]) -> str:
        """Append records to the file of a session, and return the name of the file.

        The history is created if necessary. The last line may be torn if the writer is killed.

        Args:
            session: the UUID of the session, from :func:`chaoskit.history.record.new_id`.

        Raises:
            HarnessError: if the records cannot be written, or the store has no usable format.
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
        """Delete the files of sessions that began before a day, and return their names.

        Args:
            dry_run: return the names, and delete no file.

        Raises:
            OSError, ChaoskitError: if the store cannot be listed, or a file cannot be deleted.
        """
        files = [name for name in self._files.names() if _PLACE.fullmatch(name)]
        old_files = [
            name
            for name in files
            if began(name.rpartition("/")[2].removesuffix(_SUFFIX)).date() < before
        ]
        for name in old_files if not dry_run else ():
            self._files.remove(name)
        return old_files

    def close(self) -> None:
        """Close connections."""
        self._files.close()


def began(session: str) -> datetime:
    """Return the start time of a session in UTC, which is the time in its UUID.

    Raise ValueError if it is no UUID.
    """
    return datetime.fromtimestamp((UUID(session).int >> 80) / 1000, UTC)
