"""Replay of an undo file: undoes its open entries, and marks in the file those that are done.

-> ``undo/entries.py``: how each kind is undone. ``undo/guard.py``, ``undo/janitor.py`` and
``undo/log.py``: when a file is replayed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chaoskit.process.linux import boot_id, kernel_id
from chaoskit.substrate.undo.entries import RepairOutcome, UndoEntry, from_json

_LOOK_S = 0.02
_LINE_SHOWN = 60  # bytes of a damaged line that a message quotes


@dataclass(frozen=True, slots=True)
class Repair:
    """The outcome of one entry: undone, found done already, kept, or failed.

    Attributes:
        act: kind of the entry; ``damaged`` for lines that cannot be read.
        target: name of the process, group, container, directory or command; of ``damaged``, the
            path of the undo file.
        detail: why it failed, and the remedy; "" if it did not, or the reason is unknown.
    """

    act: str
    target: str
    outcome: RepairOutcome
    detail: str = ""


@dataclass
class UndoFile:
    """The readable content of an undo file.

    Attributes:
        kernel: kernel that its pids belong to, see :func:`chaoskit.process.linux.kernel_id`; "" if
            the file has none.
        entries: open entries, by number.
        damaged: lines that cannot be read, by number.
        begun: True if the file is not empty.
    """

    kernel: str = ""
    entries: dict[int, UndoEntry] = field(default_factory=dict)
    damaged: dict[int, bytes] = field(default_factory=dict)
    begun: bool = False

    @property
    def problem(self) -> str:
        """A description of the lines that cannot be read; "" if there are none."""
        if not self.damaged:
            return ""
        number, line = next(iter(self.damaged.items()))
        more = f" and {len(self.damaged) - 1} more" if len(self.damaged) > 1 else ""
        shown = repr(line[:_LINE_SHOWN])[1:]
        remedy = "see what is left, then remove the file"
        return f"line {number}{more} cannot be read, and was not put back: {shown}; {remedy}"


def read(data: bytes) -> UndoFile:
    """Parse the data of an undo file, and return its content. Nothing is raised.

    A torn last line counts as never written: its act was never begun.
    """
    undo_file = UndoFile(begun=bool(data))
    *lines, torn = data.split(b"\n")
    if torn.lstrip(b"\0")[:1] not in (b"", b"{"):
        lines.append(torn)
    for number, line in enumerate(lines, 1):
        fields = _parse_object(line)
        entry = from_json(fields) if fields is not None else None
        if fields is not None and set(fields) == {"kernel"} and isinstance(fields["kernel"], str):
            undo_file.kernel = fields["kernel"]
        elif fields is not None and set(fields) == {"done"} and isinstance(fields["done"], int):
            undo_file.entries.pop(fields["done"], None)
        elif fields is not None and entry is not None:
            undo_file.entries[fields["entry"]] = entry
        else:
            undo_file.damaged[number] = line
    return undo_file


def _parse_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object on a line, or None if the line holds none."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def has_known_pids(kernel: str) -> bool:
    """Return whether this process can interpret the pids of an undo file.

    They belong to its own kernel, or to an earlier boot, of which no process is left.
    """
    return kernel in ("", kernel_id()) or not kernel.startswith(f"{boot_id()}/")


def replay(
    undo_file: UndoFile, mark: Callable[[int], None], patience_s: float, farewell_s: float = 0.0
) -> list[Repair]:
    """Undo the open entries, and return the outcome of each in the order of their numbers.

    Raises nothing: an entry that cannot be undone is tried again, and then reported as failed.

    Args:
        mark: called with the number of each entry that is done: undone, found gone, or kept.
        patience_s: time for which failing entries are tried again.
        farewell_s: time in which processes that end by themselves may do so, with all that they
            have started.
    """
    # processes and control groups of an earlier boot are gone
    is_earlier_boot = undo_file.kernel not in ("", kernel_id())
    open_entries = {
        number: entry
        for number, entry in sorted(
            undo_file.entries.items(), key=lambda numbered: (numbered[1].order, numbered[0])
        )
        if not (is_earlier_boot and entry.ends_with_kernel)
    }
    repairs: dict[int, Repair] = {}
    for number, entry in undo_file.entries.items():
        if number not in open_entries:
            repairs[number] = Repair(entry.act, entry.target, RepairOutcome.NOTHING_LEFT)
            mark(number)
    for entry in open_entries.values():
        with contextlib.suppress(OSError, ValueError):
            entry.thaw()
    begun_s = time.monotonic()
    while True:
        passed_s = time.monotonic() - begun_s
        is_last = passed_s >= patience_s
        for number, entry in list(open_entries.items()):
            if entry.ends_by_itself() and passed_s < farewell_s:
                break  # it still uses what later entries undo
            repairs[number] = _undo(entry)
            may_come = passed_s < entry.may_come_s and not is_last and not is_earlier_boot
            if repairs[number].outcome == RepairOutcome.NOTHING_LEFT and may_come:
                continue
            if repairs[number].outcome != RepairOutcome.FAILED:
                del open_entries[number]
                mark(number)
        if not open_entries or (is_last and passed_s >= farewell_s):
            return [repairs[number] for number in sorted(repairs)]
        time.sleep(_LOOK_S)


def _undo(entry: UndoEntry) -> Repair:
    """Undo an entry, and return the outcome. Every error becomes a failed repair."""
    try:
        outcome, detail = entry.undo(), ""
    except Exception as error:  # noqa: BLE001 - the other entries must still be undone
        outcome, detail = RepairOutcome.FAILED, str(error) or type(error).__name__
    return Repair(entry.act, entry.target, outcome, detail)


def replay_file(
    descriptor: int, patience_s: float, farewell_s: float = 0.0
) -> tuple[list[Repair], UndoFile]:
    """Undo the open entries of an undo file, and append a mark for each that is done.

    Return the outcomes, and the content of the file before.

    Args:
        descriptor: open file, which this process has locked.
        patience_s: as in :func:`replay`, like ``farewell_s``.
    """
    data = _content(descriptor)
    undo_file = read(data)
    if data.rpartition(b"\n")[2] and len(data.split(b"\n")) not in undo_file.damaged:
        os.ftruncate(descriptor, data.rfind(b"\n") + 1)  # a mark must be a line of its own

    def mark(number: int) -> None:
        with contextlib.suppress(OSError):  # disk full: the next replay finds it done
            os.write(descriptor, f'{{"done": {number}}}\n'.encode())

    return replay(undo_file, mark, patience_s, farewell_s), undo_file


def is_over(repairs: list[Repair], undo_file: UndoFile) -> bool:
    """Return whether an undo file can be removed: it was readable, and no undo has failed.

    An entry that was kept (:attr:`RepairOutcome.KEPT`) is no failure.
    """
    return not undo_file.problem and all(
        repair.outcome != RepairOutcome.FAILED for repair in repairs
    )


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def describe(repair: Repair) -> str:
    """Return a line about an outcome for users."""
    if repair.act == "damaged":
        return f"{repair.target}: {repair.detail}"
    state = {"continue": "stopped", "kill": "running", "end": "running"}.get(repair.act, "behind")
    match repair.outcome:
        case RepairOutcome.NOTHING_LEFT:
            return f"{repair.act} {repair.target}: nothing left to do"
        case RepairOutcome.KEPT:
            return f"kept {repair.target}: its run was killed; judge it with: chaoskit judge {repair.target}/RUN"
        case RepairOutcome.FAILED:
            return f"{repair.act} {repair.target}: not put back{_reason_suffix(repair.detail)}"
    return {
        "continue": f"continued {repair.target}, left {state}",
        "kill": f"ended {repair.target}, left {state}",
        "end": f"ended {repair.target}, left {state}",
        "command": f"ran {repair.target}",
        "container": f"removed container {repair.target}, left {state}",
    }.get(repair.act, f"removed {repair.target}, left {state}")


def _reason_suffix(detail: str) -> str:
    return f": {detail}" if detail else ", and it is tried again at the next start"
