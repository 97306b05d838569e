"""The writing end of a journal: it loses no record for want of room, and numbers each."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from chaoskit.errors import JournalFull
from chaoskit.journal import lines
from chaoskit.process.linux import (
    NO_ROOM,
    boot_id,
    core_count,
    cpu_model,
    file_size_limit,
    start_ticks,
)
from chaoskit.process.run_clock import to_run
from chaoskit.vocabulary import Event

#: Of what is written; told by the first record of every writer.
FORMAT = 2
_LATE_S = 60.0
_LATE_BYTES_MAX = 16 * 2**20  # of records of 200 bytes, a minute at 1,400 steps a second
_RETRY_S = 0.05
_TAIL_BYTES = 1 << 18
_CLOSED = -1  # no file has this descriptor


class Journal:
    """Writes the records of one process to ``directory/source.jsonl``.

    Args:
        role: of this process in the run, such as ``worker``. Where it is given, the first record is ``opened``, which
            says what this process is, and the last one ``closed``.
        node: where it runs; "" for what belongs to no node.
        late_s: for so long records wait for a disk that is full.
        late_bytes_max: of records that may wait.
    """

    def __init__(
        self,
        directory: Path,
        source: str,
        *,
        role: str = "",
        node: str = "",
        late_s: float = _LATE_S,
        late_bytes_max: int = _LATE_BYTES_MAX,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.source = source
        self._by, self._seq = os.urandom(4).hex().encode(), 0
        self._path = directory / f"{source}.jsonl"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._late = _Late(late_s, late_bytes_max)
        self._lock = threading.RLock()  # a signal handler may write, too
        self._fragment = (0, 0)  # offset and length of a line that found room in part
        if _ends_within_a_line(self._path):  # its last writer was killed, or the machine went down
            self._put(b"\n")
        self._is_open = bool(role)
        if role:
            self.write(Event.OPENED, version=FORMAT, role=role, node=node, **_this_process())

    def write(self, event: Event, *, t_ns: int | None = None, **fields: Any) -> None:
        """Append one record. ``t_ns``: when it happened, by this machine's clock; now, if it is left out.

        Raises:
            JournalFull: if the disk is full, and records have waited for too long, or there are too many.
            OSError: if it fails.
        """
        begin = lines.encode(event, to_run(time.monotonic_ns() if t_ns is None else t_ns), fields)
        with self._lock:
            caught_up = not self._late.lines or self._catch_up()
            line = self._seal(begin)
            if not caught_up or not self._append(line):
                self._put_off(line)

    def _seal(self, begin: bytes) -> bytes:
        seq, self._seq = self._seq, self._seq + 1
        return lines.seal(begin, self._by, seq)

    def has(self, event: Event, *, t_ns: int | None, **fields: Any) -> bool:
        """Whether this record is among the newest of the file, written by a process before this one perhaps."""
        if t_ns is None:
            return False
        begin = lines.encode(event, to_run(t_ns), fields)
        with self._path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return any(lines.is_of(line, begin) for line in (*file, *self._late.lines))

    def sign_off(self, reason: str) -> None:
        """Write ``closed``, once: this process ends in order. It ends all the same where that cannot be written."""
        with self._lock:
            is_open, self._is_open = self._is_open, False
        if is_open:
            with contextlib.suppress(JournalFull, OSError):
                self.write(Event.CLOSED, reason=reason)

    def close(self, reason: str = "") -> None:
        """Sign off, and wait for room for what waits. Raises JournalFull as :meth:`write` does."""
        self.sign_off(reason)
        self.flush()
        with self._lock:  # another file may get this descriptor, and a thread may write later still
            fd, self._fd = self._fd, _CLOSED
        os.close(fd)

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
            self._put(line)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise OSError(
                    error.errno, f"{error.strerror}; {file_size_limit()}", str(self._path)
                ) from None
            if error.errno not in NO_ROOM:
                raise
            return False
        return True

    def _put(self, line: bytes) -> None:
        """Write a line, whole. The rest of one that was cut short could follow the line of another process."""
        self._blank_out()
        while (written := os.write(self._fd, line)) < len(line):  # the next attempt says why
            self._fragment = (os.lseek(self._fd, 0, os.SEEK_CUR) - written, written)
            self._blank_out()

    def _blank_out(self) -> None:
        """Make a blank line of a fragment, in its place: another process may append to this file at any moment."""
        offset, size_bytes = self._fragment
        if size_bytes:
            file = os.open(
                self._path, os.O_WRONLY | os.O_CLOEXEC
            )  # what is written with O_APPEND goes to the end
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
                try:
                    caught_up = self._catch_up()
                except OSError:
                    return  # the next record that is written meets the same error, and raises it

    def _catch_up(self) -> bool:
        """Write what waits, as far as there is room; whether that was all."""
        late = self._late
        while late.lines:
            if not self._append(late.lines[0]):
                return False
            late.written()
            if not late.lines and late.count:
                told = late.summary(time.monotonic())
                late.lines.append(
                    self._seal(lines.encode(Event.RECORDS_LATE, to_run(time.monotonic_ns()), told))
                )
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

    def summary(self, now_s: float) -> dict[str, Any]:
        """Return the fields of the record that tells of those which were late."""
        count, self.count = self.count, 0
        return {"records": count, "full_s": round(now_s - self._since_s, 3)}

    def is_over(self, now_s: float) -> bool:
        """Whether this has gone on for too long."""
        return bool(self.lines) and (
            now_s - self._since_s > self._limit_s or self._bytes > self._bytes_max
        )

    def error(self, path: Path) -> JournalFull:
        limit = (
            f"{self._limit_s:g} s"
            if self._bytes <= self._bytes_max
            else f"{self._bytes_max} bytes of records"
        )
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


def _this_process() -> dict[str, Any]:
    """Return what the record ``opened`` says: with it, times and numbers of several machines can be compared."""
    torch, pid = sys.modules.get("torch"), os.getpid()
    return {
        "pid": pid,
        "ticks": start_ticks(pid),
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "unix_ns": time.time_ns(),
        "clock_ahead_ns": to_run(0),
        "chaoskit": own_version(),
        "torch": None if torch is None else str(torch.__version__),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": f"{cpu_model()}, {core_count():g} cores",
    }


@functools.cache
def own_version() -> str:
    """Return the version of chaoskit that this process runs; "" where it runs from a folder that says none."""
    from importlib import metadata  # slow to import, and torch has it already

    try:
        return metadata.version("chaoskit")
    except metadata.PackageNotFoundError:
        return ""
