"""The writing end of a journal, which numbers each record and keeps it while the disk is full.

-> errors.py (JournalFull): a disk that stays full ends the job. experiment/judge/coverage.py: lost
records make a run unknown.
"""

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

#: The format of journals, which is in the first record of every writer.
FORMAT = 2
_LATE_S = 60.0
_LATE_BYTES_MAX = 16 * 2**20  # with records of 200 bytes, a minute at 1,400 steps a second
_RETRY_S = 0.05
_TAIL_BYTES = 1 << 18
_CLOSED = -1  # never a valid descriptor


class Journal:
    """A writer of the records of one process to ``directory/source.jsonl``.

    Args:
        directory: the directory of the journals, which is created.
        source: the name of the journal.
        role: the role of this process in the run, such as ``worker``. With a role, the first record
            is ``opened``, which describes this process, and the last one ``closed``.
        node: the node of the process; "" if it belongs to no node.
        late_s: the time in seconds for which records wait for a full disk; then :meth:`write`
            raises JournalFull.
        late_bytes_max: the size in bytes of the records that may wait.

    Raises:
        OSError: if the file cannot be opened, or has a torn last line and the disk is full.
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
        self._writer_name, self._next_number = os.urandom(4).hex().encode(), 0
        self._path = directory / f"{source}.jsonl"
        self._descriptor = os.open(
            self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        self._late = _Late(late_s, late_bytes_max)
        self._lock = threading.RLock()  # a signal handler may write, too
        self._fragment = (0, 0)  # offset and length of a line that was written only in part
        if _ends_within_a_line(self._path):  # the last writer was killed, or the machine crashed
            self._write_line(b"\n")
        self._owes_closed = bool(role)
        if role:
            self.write(Event.OPENED, version=FORMAT, role=role, node=node, **_this_process())

    def write(self, event: Event, *, t_ns: int | None = None, **fields: Any) -> None:
        """Append one record.

        While the disk is full, the record waits in memory, and a thread writes it later. Any thread
        and a signal handler may call this method.

        Args:
            event: the event.
            t_ns: the time of the event, by this machine's clock; None for now.
            fields: the fields of the event.

        Raises:
            JournalFull: if the disk is full, and records have waited too long, or there are too
                many.
            OSError: if the write fails for another reason.
        """
        first_part = lines.encode(
            event, to_run(time.monotonic_ns() if t_ns is None else t_ns), fields
        )
        with self._lock:
            caught_up = not self._late.lines or self._catch_up()
            line = self._seal(first_part)
            if not caught_up or not self._append(line):
                self._keep_waiting(line)

    def _seal(self, first_part: bytes) -> bytes:
        """Return the whole line for a first part, and give it the next number."""
        number, self._next_number = self._next_number, self._next_number + 1
        return lines.seal(first_part, self._writer_name, number)

    def has(self, event: Event, *, t_ns: int | None, **fields: Any) -> bool:
        """Return whether this record is in the last 256 KiB of the file, or waits for the disk.

        An earlier process may have written it. Without a time the result is False.
        """
        if t_ns is None:
            return False
        first_part = lines.encode(event, to_run(t_ns), fields)
        with self._path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return any(lines.holds_record(line, first_part) for line in (*file, *self._late.lines))

    def sign_off(self, reason: str) -> None:
        """Write ``closed``, once, before this process ends in order.

        A failure to write it is ignored. A journal without a role gets no such record.
        """
        with self._lock:
            owes_closed, self._owes_closed = self._owes_closed, False
        if owes_closed:
            with contextlib.suppress(JournalFull, OSError):
                self.write(Event.CLOSED, reason=reason)

    def close(self, reason: str = "") -> None:
        """Write ``closed`` as :meth:`sign_off` does, then all waiting records, and close the file.

        Args:
            reason: the reason of the end, for the record ``closed``.

        Raises:
            JournalFull, OSError: as :meth:`write` does; the file stays open then.
        """
        self.sign_off(reason)
        self.flush()
        with self._lock:  # another file may get this descriptor, and a thread may still write later
            descriptor, self._descriptor = self._descriptor, _CLOSED
        os.close(descriptor)

    def flush(self) -> None:
        """Write all waiting records; return when the disk has had room for the last one.

        Raises:
            JournalFull, OSError: as :meth:`write` does.
        """
        while self._late.lines:
            with self._lock:
                if not self._catch_up() and self._late.is_over(time.monotonic()):
                    raise self._late.error(self._path)
            time.sleep(_RETRY_S)

    def _append(self, line: bytes) -> bool:
        """Write a line; return False if there is no room for all of it.

        Raises:
            OSError: if the write fails for another reason; a limit of the file size is named.
        """
        try:
            self._write_line(line)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise OSError(
                    error.errno, f"{error.strerror}; {file_size_limit()}", str(self._path)
                ) from None
            if error.errno not in NO_ROOM:
                raise
            return False
        return True

    def _write_line(self, line: bytes) -> None:
        """Write a whole line.

        The rest of a line that was cut short is not written on its own: it could follow a line of
        another process.
        """
        self._blank_out()
        # the next attempt raises the error
        while (written_bytes := os.write(self._descriptor, line)) < len(line):
            self._fragment = (
                os.lseek(self._descriptor, 0, os.SEEK_CUR) - written_bytes,
                written_bytes,
            )
            self._blank_out()

    def _blank_out(self) -> None:
        """Turn a fragment into a blank line, in its place.

        Other processes may append to this file at any time.
        """
        offset, size_bytes = self._fragment
        if size_bytes:
            # a descriptor with O_APPEND can write only at the end
            file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(file, b" " * (size_bytes - 1) + b"\n", offset)
            finally:
                os.close(file)
            self._fragment = (0, 0)

    def _keep_waiting(self, line: bytes) -> None:
        """Keep a line until there is room; start the thread that retries.

        Raises:
            JournalFull: if records have waited too long, or there are too many.
        """
        now_s = time.monotonic()
        if not self._late.lines:
            self._late.begin_wait(now_s)
            threading.Thread(target=self._retry, name="ck-journal", daemon=True).start()
        self._late.add(line)
        if self._late.is_over(now_s):
            raise self._late.error(self._path)

    def _retry(self) -> None:
        """Write waiting records, on a thread of its own.

        The process may not write another record for a long time.
        """
        caught_up = False
        while not caught_up:
            time.sleep(_RETRY_S)
            with self._lock:
                try:
                    caught_up = self._catch_up()
                except OSError:
                    return  # the next record that is written raises the same error

    def _catch_up(self) -> bool:
        """Write waiting records as far as there is room; return whether all are written.

        Once all are written, a record ``records_late`` follows with their number.

        Raises:
            OSError: if a write fails for another reason than a full disk.
        """
        waiting = self._late
        while waiting.lines:
            if not self._append(waiting.lines[0]):
                return False
            waiting.remove_oldest()
            if not waiting.lines and waiting.count:
                summary = waiting.summary(time.monotonic())
                waiting.lines.append(
                    self._seal(
                        lines.encode(Event.RECORDS_LATE, to_run(time.monotonic_ns()), summary)
                    )
                )
        return True


class _Late:
    """The records that wait for a full disk.

    Args:
        limit_s: the longest wait in seconds.
        bytes_max: the size of records that may wait.

    Attributes:
        lines: the waiting lines, the oldest first.
        count: the number of late records that no ``records_late`` has reported yet.
    """

    def __init__(self, limit_s: float, bytes_max: int) -> None:
        self._limit_s, self._bytes_max = limit_s, bytes_max
        self.lines: deque[bytes] = deque()
        self.count = 0
        self._waiting_bytes, self._since_s = 0, 0.0

    def begin_wait(self, now_s: float) -> None:
        """Start a new wait at ``now_s``, with the count of late records at 0."""
        self.count, self._waiting_bytes, self._since_s = 0, 0, now_s

    def add(self, line: bytes) -> None:
        """Keep a line; drop it if too many bytes wait already, for which the caller raises."""
        # the caller raises an error for lines beyond the limit
        if self._waiting_bytes <= self._bytes_max:
            self.lines.append(line)
            self.count += 1
            self._waiting_bytes += len(line)

    def remove_oldest(self) -> None:
        """Remove the oldest line, which was written."""
        self._waiting_bytes -= len(self.lines.popleft())

    def summary(self, now_s: float) -> dict[str, Any]:
        """Return the fields of the record ``records_late``, and count late records anew."""
        count, self.count = self.count, 0
        return {"records": count, "full_s": round(now_s - self._since_s, 3)}

    def is_over(self, now_s: float) -> bool:
        """Return whether records have waited too long, or are too many."""
        return bool(self.lines) and (
            now_s - self._since_s > self._limit_s or self._waiting_bytes > self._bytes_max
        )

    def error(self, path: Path) -> JournalFull:
        """Return the error of a disk that stays full; it names the limit that was exceeded."""
        limit = (
            f"{self._limit_s:g} s"
            if self._waiting_bytes <= self._bytes_max
            else f"{self._bytes_max} bytes of records"
        )
        return JournalFull(
            f"{path.parent}: {os.strerror(errno.ENOSPC)} for {limit}. A run is judged by its journals: free room there "
            "or choose a directory that has more (`--report`)"
        )


def _ends_within_a_line(path: Path) -> bool:
    """Return whether a file ends without a line break; False if it is empty."""
    size_bytes = path.stat().st_size  # 0 for a file that is not regular
    if not size_bytes:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _this_process() -> dict[str, Any]:
    """Return the fields of the record ``opened``.

    They make times and numbers of several machines comparable.
    """
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
    """Return the version of chaoskit in this process; "" if it is not an installed package."""
    from importlib import metadata  # slow to import, and torch has it already

    try:
        return metadata.version("chaoskit")
    except metadata.PackageNotFoundError:
        return ""
